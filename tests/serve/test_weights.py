"""Adapters by name over HTTP, and weights that are replaced between requests."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import json
import logging
import re
import threading
import time

import httpx2
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import serving
import tiny_model
import word_engine

from seerjax import numerics as numerics_lib
from seerjax.commands.serve import adapter_directories
from seerjax.engine.engine import Engine, EngineConfig
from seerjax.models import huggingface, loading, lora, parameters, peft
from seerjax.serve import server
from seerjax.serve.config import ServeConfig
from seerjax.serve.engine_thread import EngineThread, Job, Part, Started
from seerjax.serve.family import Family
from seerjax.serve.service import Service
from seerjax.types import Completion, Request, SamplingParams

NUMERICS = dataclasses.replace(tiny_model.ONE_SLAB, backend="native")
CONFIG = tiny_model.SMALLEST.changed(num_layers=1, vocab_size=512)
SIZES = EngineConfig(
  page_size=16, num_pages=60, max_num_seqs=4, max_model_len=64, batch_size_buckets=(16,)
)
KEY = 3
TOKEN = "secret"
SHAPES = {"poet": (3, lora.TARGETS), "judge": (1, ("qkv", "down"))}


@functools.cache
def master(generation: int):
  weights = parameters.init(numerics_lib.key(generation), CONFIG, NUMERICS)
  # Rounded as a saved model is.
  return jax.tree.map(lambda leaf: (leaf * 9).astype(jnp.bfloat16).astype(jnp.float32), weights)


@functools.cache
def adapter(name: str, generation: int = 0):
  rng = np.random.default_rng((len(name), generation))
  shapes = lora.shapes(CONFIG, NUMERICS, *SHAPES[name])
  draw = lambda shape: jnp.asarray((0.3 * rng.standard_normal(shape.shape)).astype(np.float32))
  return jax.tree.map(draw, shapes), 1.0 + generation


def model_of(base: int, name: str = "", generation: int = 0) -> loading.Model:
  """Returns what one adapter alone is answered by."""
  params = parameters.compute_params(master(base), NUMERICS)
  if name:
    params = lora.attach(params, *adapter(name, generation))
  return loading.Model(CONFIG, params, NUMERICS, word_engine.TOKENIZER)


@functools.cache
def lone(base: int, name: str = "", generation: int = 0) -> Engine:
  sizes = dataclasses.replace(SIZES, max_num_seqs=1, enable_prefix_caching=False)
  return Engine(model_of(base, name, generation), config=sizes, key=numerics_lib.key(KEY))


@functools.cache
def said(seed: int, base: int, name: str = "", generation: int = 0) -> Completion:
  sampling = SamplingParams(max_tokens=9, stop_token_ids=word_engine.TOKENIZER.eos_ids)
  return serving.answer_alone(lone(base, name, generation), (5, 6, 7), seed, sampling)


def make_service(token: str = TOKEN) -> Service:
  adapters = {name: adapter(name) for name in SHAPES}
  model, key = model_of(0), numerics_lib.key(KEY)
  engine = Engine(model, config=SIZES, key=key, adapters=adapters)
  family = Family("tiny", model, engine, key=key, adapters=adapters)
  return Service(family.models, ServeConfig(port=0, token=token), families={"tiny": family})


@pytest.fixture
def asking():
  with server.running(make_service()) as url:
    headers = {"authorization": f"Bearer {TOKEN}"}
    with serving.client(url, headers=headers) as client:
      yield client


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
  """Returns directories with new base weights, a new adapter, and invalid ones."""
  root = tmp_path_factory.mktemp("weights")
  huggingface.save(root / "base", master(1), CONFIG)
  other = dataclasses.replace(CONFIG, hidden_size=24)
  wide = parameters.init(numerics_lib.key(0), other, NUMERICS)
  huggingface.save(root / "wide", wide, other)
  huggingface.save(root / "nan", master(1), CONFIG, dtype="float32")
  (file,) = (root / "nan").glob("*.safetensors")
  tensors = safetensors.numpy.load_file(file)
  tensors["model.norm.weight"][3] = np.nan
  safetensors.numpy.save_file(tensors, file, metadata={"format": "pt"})
  huggingface.save(root / "same_words", master(1), CONFIG, tokenizer=word_engine.TOKENIZER)
  huggingface.save(root / "words", master(1), CONFIG, tokenizer=word_engine.TOKENIZER)
  settings = json.loads((root / "words" / "tokenizer_config.json").read_text())
  settings["chat_template"] = "{{ messages[0].content }}"
  (root / "words" / "tokenizer_config.json").write_text(json.dumps(settings))
  one, scale = adapter("poet", 1)
  peft.save(root / "poet", one, CONFIG, scale=scale)
  peft.save(root / "of_wide", lora.init(numerics_lib.key(1), other, NUMERICS, 2), other, scale=1.0)
  (root / "nothing").mkdir()
  return root


def ask(client: httpx2.Client, model: str, seed: int) -> dict:
  fields = {"prompt": [5, 6, 7], "max_tokens": 9, "logprobs": 0}
  answer = client.post("/v1/completions", json={"model": model, "seed": seed, **fields})
  assert answer.status_code == 200, answer.text
  return answer.json()


def has_bits_of(answer: dict, expected: Completion) -> bool:
  rows = answer["choices"][0]["logprobs"]
  return (
    tuple(rows["token_ids"]) == expected.tokens
    and rows["token_logprobs"] == expected.behaviour_logprobs.tolist()
    and rows["raw_logprobs"] == expected.raw_logprobs.tolist()
  )


def replace(client: httpx2.Client, directory, model: str | None = None) -> httpx2.Response:
  return client.post("/v1/weights", json={"model": model, "directory": str(directory)})


def fingerprints(client: httpx2.Client) -> dict[str, str]:
  listed = client.get("/v1/models").json()["data"]
  return {one["id"]: one["system_fingerprint"] for one in listed}


@pytest.mark.thorough
def test_base_and_adapters_answer_side_by_side_with_the_bits_of_each_alone(asking):
  names = ["tiny", *SHAPES] * 6
  with concurrent.futures.ThreadPoolExecutor(len(names)) as pool:
    answers = [*pool.map(lambda place: ask(asking, names[place], place % 4), range(len(names)))]
  listed = asking.get("/v1/models").json()["data"]
  assert [(one["id"], one["parent"]) for one in listed] == [
    ("tiny", None), ("poet", "tiny"), ("judge", "tiny"),
  ]  # fmt: skip
  prints = fingerprints(asking)
  assert len(set(prints.values())) == 3
  for place, (name, answer) in enumerate(zip(names, answers, strict=True)):
    assert has_bits_of(answer, said(place % 4, 0, "" if name == "tiny" else name)), name
    assert answer["model"] == name and answer["system_fingerprint"] == prints[name]
  assert ask(asking, "", 0)["model"] == "tiny"


@pytest.mark.thorough
def test_other_tokens_of_an_adapter_are_scored_by_it(asking):
  fields = {"prompt": [5, 6, 7], "max_tokens": 5, "seed": 2, "logprobs": 3, "model": "poet"}
  rows = asking.post("/v1/completions", json=fields).json()["choices"][0]["logprobs"]
  for text, logprob, top in zip(rows["tokens"], rows["token_logprobs"], rows["top_logprobs"]):
    assert top.get(text, logprob) == logprob
  assert any(text in top for text, top in zip(rows["tokens"], rows["top_logprobs"]))


def test_an_unknown_adapter_is_refused_as_an_unknown_model_is(asking):
  answer = asking.post("/v1/completions", json={"model": "cook", "prompt": "a"})
  assert answer.status_code == 404
  error = answer.json()["error"]
  assert error["code"] == "model_not_found" and error["param"] == "model"
  assert "got 'cook', expected one of tiny, poet, judge" in error["message"]


@pytest.mark.thorough
def test_a_base_that_is_replaced_answers_for_itself_and_its_adapters(asking, directories, caplog):
  caplog.set_level(logging.INFO, "seerjax.serve")
  before = fingerprints(asking)
  answer = replace(asking, directories / "base")
  assert answer.status_code == 200, answer.text
  after = fingerprints(asking)
  assert answer.json()["system_fingerprint"] == after["tiny"]
  assert not {*before.values()} & {*after.values()}
  for name in ("tiny", *SHAPES):
    found, adapter_name = ask(asking, name, 1), "" if name == "tiny" else name
    assert has_bits_of(found, said(1, 1, adapter_name))
    assert not has_bits_of(found, said(1, 0, adapter_name))
    assert found["system_fingerprint"] == after[name]
  # Equal weights give an equal fingerprint: it identifies the weights, not the time.
  assert replace(asking, directories / "same_words").status_code == 200
  assert fingerprints(asking) == after
  assert any("/v1/weights status=200" in line.message for line in caplog.records)
  assert all(str(directories) not in line.message for line in caplog.records)


@pytest.mark.thorough
def test_an_adapter_that_is_replaced_changes_no_other(asking, directories):
  before = fingerprints(asking)
  assert replace(asking, directories / "poet", "poet").status_code == 200
  after = fingerprints(asking)
  assert [name for name in before if before[name] != after[name]] == ["poet"]
  assert has_bits_of(ask(asking, "poet", 1), said(1, 0, "poet", 1))
  assert has_bits_of(ask(asking, "judge", 1), said(1, 0, "judge"))
  assert has_bits_of(ask(asking, "tiny", 1), said(1, 0))


@pytest.mark.parametrize(
  "directory, model, message",
  [
    ("absent", None, r"directory: got '.*absent', which is not a directory, expected one on"),
    ("nothing", None, r"directory: .*config.json"),
    ("wide", None, r"got a model with hidden_size=24, expected 16, as in the served model"),
    ("nan", "tiny", r"model.norm.weight: got 1 entries that are NaN or infinite, expected finite"),
    (
      "words",
      None,
      r"got another template in the tokenizer of .*, expected that of the served model",
    ),
    ("poet", "tiny", r"got the adapter '.*' for the base 'tiny', expected a model; name one of t"),
    ("base", "poet", r"got the model '.*' for the adapter 'poet', expected an adapter; name the"),
    ("nothing", "poet", r"adapter_config.json: got no such file, expected a PEFT adapter"),
    ("of_wide", "poet", r"got lora_A .* and lora_B .*, expected .* it was made for another model"),
  ],
)
def test_a_directory_that_is_not_the_models_is_refused_and_nothing_changes(
  refusing, directories, directory, model, message
):
  before = fingerprints(refusing)
  answer = replace(refusing, directories / directory, model)
  assert answer.status_code == 400, answer.text
  error = answer.json()["error"]
  assert error["param"] == "directory" and error["code"] == "unfit_weights"
  assert re.search(message, error["message"]), error["message"]
  assert fingerprints(refusing) == before


@pytest.fixture(scope="module")
def refusing():
  """One server for all tests that change nothing."""
  with server.running(make_service()) as url:
    headers = {"authorization": f"Bearer {TOKEN}"}
    with serving.client(url, headers=headers) as client:
      yield client


@pytest.mark.parametrize(
  "body, status, message",
  [
    ({"model": "cook", "directory": "/tmp"}, 404, "got 'cook', expected one of tiny, poet, judge"),
    ({"model": "poet"}, 400, "directory: got nothing, expected a value; name a directory on"),
    ({"directory": 3}, 400, "directory: got 3 (a whole number), expected text"),
    ({"directory": "/tmp", "path": "x"}, 400, "path: got a field that is not supported, expected"),
  ],
)
def test_a_body_that_names_no_directory_or_model_is_refused(refusing, body, status, message):
  answer = refusing.post("/v1/weights", json=body)
  assert answer.status_code == status and message in answer.json()["error"]["message"]


@pytest.mark.thorough
def test_weights_are_replaced_by_whoever_has_the_token_alone(refusing, directories):
  for sent in ({}, {"authorization": "Bearer wrong"}):
    headers = {**refusing.headers, "authorization": sent.get("authorization", "")}
    answer = refusing.post("/v1/weights", json={"directory": "/x"}, headers=headers)
    assert answer.status_code == 401
  with server.running(make_service(token="")) as url, serving.client(url) as open_client:
    answer = replace(open_client, directories / "base")
    assert answer.status_code == 403
    error = answer.json()["error"]
    assert error["code"] == "token_required"
    assert "got a server without a token, expected one with a token" in error["message"]
    assert has_bits_of(ask(open_client, "tiny", 1), said(1, 0))


@pytest.mark.thorough
def test_what_runs_ends_by_the_old_weights_and_what_waits_is_answered_by_the_new(
  asking, directories
):
  before = fingerprints(asking)
  many = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 40, "logprobs": 0, "n": 12, "seed": 1}
  with concurrent.futures.ThreadPoolExecutor(8) as pool:
    # More choices than the engine has room for: the last ones start after the weight update.
    long = pool.submit(asking.post, "/v1/completions", json=many)
    while "seerjax_running 0" in asking.get("/metrics").text:
      time.sleep(0.001)
    replaced = pool.submit(replace, asking, directories / "base")
    late = [pool.submit(ask, asking, "poet", seed) for seed in range(5)]
    answers = [future.result() for future in late]
    assert replaced.result().status_code == 200
    found = long.result().json()
  after = fingerprints(asking)
  assert found["system_fingerprint"] == before["tiny"]
  sampling = SamplingParams(max_tokens=40, stop_token_ids=word_engine.TOKENIZER.eos_ids)
  for choice in found["choices"]:
    expected = serving.answer_alone(lone(0), (5, 6, 7), choice["seed"], sampling)
    assert has_bits_of({"choices": [choice]}, expected)
  for seed, answer in enumerate(answers):
    # Whenever it was admitted, it names the weights that it used.
    base = {before["poet"]: 0, after["poet"]: 1}[answer["system_fingerprint"]]
    assert has_bits_of(answer, said(seed, base, "poet"))


def make_job(name: str, count: int, deliver, fingerprint) -> Job:
  requests = tuple(
    Request(
      request_id=f"{name}/{place}",
      prompt=(5, 6, 7),
      sampling=SamplingParams(max_tokens=6),
      seed=place,
    )
    for place in range(count)
  )
  return Job(
    job_id=name, client=name, model="tiny", requests=requests, masks=(None,) * count,
    num_choices=count, deliver=deliver, fingerprint=fingerprint,
  )  # fmt: skip


def test_a_job_that_has_begun_is_answered_before_weights_come_and_one_that_waits_afterwards():
  """Uses the thread alone, so that the order is known."""
  engine = Engine(model_of(0), config=SIZES, key=numerics_lib.key(KEY))
  thread = EngineThread({"tiny": engine}, max_queued_requests=99, max_waiting_of_client=99)
  order: list[str] = []
  current = ["old"]
  is_over = threading.Event()

  def swap():
    order.append("swap")
    current[0] = "new"

  def deliver_first(event):
    if isinstance(event, Started):
      order.append(f"first begins, {event.fingerprint}")
      # Now: eight of its twelve choices have no room yet, and another job waits behind them.
      thread.submit(make_job("second", 2, deliver_second, lambda: current[0]))
      thread.swap(swap, lambda found: None)
    elif isinstance(event, Part):
      order.append(f"first ends {event.choice}")

  def deliver_second(event):
    if isinstance(event, Started):
      order.append(f"second begins, {event.fingerprint}")
    elif isinstance(event, Part) and event.choice == 1:
      is_over.set()

  thread.submit(make_job("first", 12, deliver_first, lambda: current[0]))
  thread.start()
  assert is_over.wait(120)
  thread.stop(0)
  thread.join(60)
  assert order[0] == "first begins, old" and order[-2:] == ["swap", "second begins, new"]
  assert len(order) == 1 + 12 + 2


@pytest.mark.thorough
def test_weights_that_wait_when_the_server_stops_are_refused():
  engine = Engine(model_of(0), config=SIZES, key=numerics_lib.key(KEY))
  thread = EngineThread({"tiny": engine}, max_queued_requests=99, max_waiting_of_client=99)
  found: list[object] = []

  def deliver(event):
    if isinstance(event, Started):
      thread.swap(lambda: found.append("swapped"), found.append)
      thread.stop(0)

  thread.submit(make_job("only", 1, deliver, lambda: "old"))
  thread.start()
  thread.join(120)
  assert not thread.is_alive
  (refusal,) = found
  assert getattr(refusal, "code", "") == "server_stopping"


@pytest.mark.parametrize(
  "given, message",
  [
    (["poet"], r"--adapter: got 'poet', expected NAME=DIR; write --adapter=poet=DIR"),
    (["=d"], r"--adapter: got '=d', expected NAME=DIR"),
    (["poet="], r"--adapter: got 'poet=', expected NAME=DIR"),
    (["nano=d"], r"--adapter: got the name 'nano', which the model has, expected a different one"),
    (["a=d", "b=e", "a=f"], r"--adapter: got 'a' twice \(d and f\), expected each name once; rena"),
  ],
)
def test_flags_that_name_no_adapter_are_refused(given, message):
  with pytest.raises(ValueError, match=message):
    adapter_directories(given, "nano")
  assert adapter_directories(["a=d", "b=e=f"], "nano") == {"a": "d", "b": "e=f"}


def test_the_described_model_is_json(refusing):
  assert json.loads(refusing.get("/v1/models/poet").text)["parent"] == "tiny"
