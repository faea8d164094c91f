"""The serving benchmark: its clients, metrics and output."""

from __future__ import annotations

import asyncio
import json
import pathlib
import sys

import pytest
import serving as served
import word_engine

from experiments.throughput import http_load, server as serving, server_peers as serving_peers
from experiments.throughput.server import Same, Timed
from experiments.throughput.server_peers import PEERS, Question

SETTINGS = serving_peers.Settings(askings=12)
EOS = word_engine.TOKENIZER.eos_ids
BODY = {"prompt": [5, 6, 7], "max_tokens": 6, "seed": 3, "logprobs": 0}
STREAMED = {**BODY, "stream": True, "stream_options": {"include_usage": True}}


def ask(url: str, *bodies, clients: int = 1) -> list[http_load.Reply]:
  sent = [json.dumps(one).encode() for one in bodies]
  return asyncio.run(http_load.in_turn(url, serving.PATH, sent, clients))[0]


def question(temperature: float = 1.0, seed: int = 3) -> Question:
  return Question((5, 6, 7), "", 6, temperature, seed)


@pytest.mark.thorough
def test_clients_read_an_answer_whole_and_in_pieces():
  with served.running() as (_, url):
    whole, pieces, again = map(http_load.parsed, ask(url, BODY, STREAMED, BODY))
    assert whole == pieces == again
    assert whole.count == len(whole.logprobs) > 0 and whole.text
    many = ask(url, *[BODY] * 9, clients=3)
    assert {http_load.parsed(reply) for reply in many} == {whole}
    assert all(0 < reply.first <= reply.whole for reply in many)
    (refused,) = ask(url, {**BODY, "n": 0})
    with pytest.raises(ValueError, match=r"got status 400 .*n: got 0, expected 1 to 128"):
      http_load.parsed(refused)


def test_what_a_stream_that_breaks_off_says_is_no_answer():
  body = b'data: {"error": {"message": "x"}}\n\n'
  with pytest.raises(ValueError, match="expected a response; see its log"):
    http_load.parsed(http_load.Reply(200, body, 0.1, 0.2))


def test_llamas_log_probabilities_are_read():
  rows = {"content": [{"logprob": -0.5}, {"logprob": -0.25}]}
  body = {"choices": [{"text": "a", "logprobs": rows}], "usage": {"completion_tokens": 2}}
  answer = http_load.parsed(http_load.Reply(200, json.dumps(body).encode(), 0.1, 0.2))
  assert answer == http_load.Answer("a", (-0.5, -0.25), 2)


def same(url: str) -> dict:
  others = [Question((8, 9), "", length, 0.7, 0) for length in (2, 9)]
  return asyncio.run(
    serving.same(
      url, PEERS["ours"], question(), others, settings=SETTINGS, ends=EOS,
      on_asked=lambda count: None,
    )
  )  # fmt: skip


@pytest.mark.thorough
def test_one_question_has_one_answer_and_a_server_that_forgets_its_seed_is_found_out():
  with served.running() as (_, url):
    found = same(url)
  assert found["asked"] >= 12 and found["others"] > 0 and found["streamed"] > 0
  assert (found["answers"], found["patterns"], found["commonest"]) == (1, 1, found["asked"])
  places = iter(range(10_000))
  with served.running(seed_of=lambda *_: next(places)) as (_, url):
    found = same(url)
  assert found["answers"] > 1 and found["patterns"] > 1


def test_every_server_is_asked_for_the_same():
  read = lambda kind, **others: json.loads(
    serving_peers.body(kind, question(), model="nano", ends=(2,), **others)
  )
  ours = read("ours", is_streamed=True, is_forced=True)
  assert ours["logit_bias"] == {"2": serving_peers.NO_END} and ours["stream"]
  assert read("ours", is_streamed=False, is_forced=False)["logprobs"] == 0
  assert read("llama.cpp", is_streamed=False, is_forced=True)["ignore_eos"]
  theirs = read("transformers", is_streamed=False, is_forced=False)
  assert json.loads(theirs["generation_config"])["do_sample"] and theirs["model"].endswith("nano")


def test_peers_take_turns_and_the_engine_is_not_asked_whether_it_streams():
  cells = [*serving.all_cells(["ours", "engine"], 2)]
  assert cells[:2] == [Same("ours", 1.0), Same("ours", 0.0)]
  assert [cell[1:] for cell in cells[2:5]] == [
    ("ours", 1, False), ("ours", 1, True), ("engine", 1, False)
  ]  # fmt: skip
  assert cells[11] == Timed(1, "engine", 1, False)  # Backwards in the second round.
  assert len({*cells}) == len(cells) == 2 + 2 * 9


def timed(tokens: int, seconds: float, first) -> dict:
  return dict(
    tokens=tokens, seconds=seconds, cpu_seconds=seconds / 2, first=first, whole=[0.5, 1.0]
  )


def test_tables_say_what_was_measured_and_what_was_not(tmp_path: pathlib.Path):
  found = {
    Same("ours", 1.0): dict(asked=12, others=9, answers=1, commonest=12, patterns=1),
    Same("transformers", 1.0): dict(asked=12, others=9, answers=3, commonest=7, patterns=None),
    Timed(0, "ours", 64, False): timed(900, 1.0, None),
    Timed(1, "ours", 64, False): timed(900, 0.5, None),
    Timed(2, "ours", 64, False): timed(900, 2.0, None),
    Timed(0, "ours", 64, True): timed(900, 1.0, [0.02, 0.04]),
    Timed(0, "engine", 64, False): timed(1000, 0.5, [0.01, 0.02]),
    Timed(0, "llama-cpp", 64, False): timed(300, 1.0, None),
  }
  table = serving.same_table(found, {"llama-cpp": "xllamacpp"})
  assert "| SeerJAX's server | 1 | 12 | 9 | 1 | 12 | 1 |" in table
  assert "| 3 | 7 | it has none |" in table
  assert "| llama.cpp's server | not installed here: xllamacpp |" in table
  table = serving.timed_table(found)
  assert "whole | 900 (450 to 1,800) | 0.45 | 1,800 |  | 500 (1,000) |" in table
  assert "streamed | 900 (900 to 900) | 0.45 | 1,800 | 20 (40) | 500 (1,000) |" in table
  lines = serving.aims(found).split("\n")[2:]
  assert "| 64 | 0.9 | 0.45 | 0.45 | **no** |" in lines[0]
  assert "| 8 | 1 | not measured |" in lines[1]
  assert "| 64 | 1 | 3.00 | 3.00 | yes |" in lines[2]
  serving.picture(found, tmp_path / "serving.png")
  assert (tmp_path / "serving.png").stat().st_size > 1000


def test_unknown_peers_and_missing_packages_are_named():
  interpreters = dict.fromkeys(("ours", "engine", "llama.cpp", "transformers"), sys.executable)
  with pytest.raises(ValueError, match="--peers: got vllm, expected some of ours, engine"):
    serving.chosen(["vllm"], interpreters)
  assert serving.chosen(["ours", "engine"], interpreters) == (["ours", "engine"], {})


def test_a_server_that_does_not_start_is_quoted(tmp_path: pathlib.Path):
  with pytest.raises(RuntimeError, match=r"got no server \(no weights here\), expected one that"):
    serving_peers.Server([sys.executable, "-c", "print('no weights here')"], tmp_path / "log")
