"""The engine as a thinker gives the same texts, byte by byte, as behind a server."""

from __future__ import annotations

import dataclasses
import re

import pytest
import serving
import word_engine

import seerjax
from seerjax.engine.engine import Engine, EngineConfig
from seerjax.serve import server
from seerjax.serve.config import ServeConfig
from seerjax.serve.served import Served
from seerjax.serve.service import Service
from seerjax.sleep import prompts as prompts_lib, protocol, thinkers
from seerjax.sleep.endpoint import Endpoint, EndpointConfig
from seerjax.sleep.engine_thinker import EngineThinker
from seerjax.sleep.protocol import ProtocolConfig
from seerjax.sleep.thinkers import Call, NoAnswer
from seerjax.tasks.stateful import StatefulConfig, StatefulWordProblems

TASK = StatefulWordProblems(config=StatefulConfig(num_questions=2))
CONTROL = "<|im_end|>\n<|im_start|>assistant\n"


def call(text: str = "How many?", **fields) -> Call:
  fields = dict(max_tokens=9, temperature=0.8, seed=5) | fields
  return Call(messages=({"role": "user", "content": text},), **fields)


@pytest.mark.thorough
def test_an_engine_answers_many_as_it_answers_each_alone():
  calls = [call("How many?"), call("12+7", seed=6), call("Ana", temperature=0.0), call(CONTROL)]
  thinker = EngineThinker(word_engine.make_engine())
  together = dict(thinker.ask(calls))
  alone = EngineThinker(serving.engine_alone())
  assert len(together) == len(calls)
  for index, one in enumerate(calls):
    assert together[index] == thinkers.answer_of(alone, one)
  assert len({together[index].text for index in range(3)}) == 3


@pytest.mark.thorough
def test_what_is_too_long_or_no_conversation_has_no_answer_and_the_others_do():
  thinker = EngineThinker(word_engine.make_engine())
  bad_role = Call(messages=({"content": "x"},), max_tokens=1, temperature=0, seed=0)
  calls = [call(), call("How many? " * 40), bad_role, call(temperature=-1.0), call(seed=7)]
  answers = dict(thinker.ask(calls))
  assert [isinstance(answers[i], NoAnswer) for i in range(5)] == [False, True, True, True, False]
  long = str(answers[1])
  assert re.search(r"got a prompt of \d+ tokens with max_tokens=9, expected at most 64 tog", long)
  assert "expected 'role' and 'content'" in str(answers[2])
  assert "SamplingParams.temperature: got -1.0" in str(answers[3])
  with pytest.raises(NoAnswer, match="shorten the context, or lower the limit"):
    thinker.complete(calls[1].messages, max_tokens=9, temperature=0.0, seed=0)


@pytest.mark.thorough
def test_an_engine_without_a_tokenizer_is_refused():
  with pytest.raises(ValueError, match="EngineThinker: got an engine without a tokenizer"):
    EngineThinker(word_engine.make_engine(tokenizer=None))


@pytest.mark.thorough
def test_the_protocol_over_a_server_says_what_it_says_over_the_engine():
  model = seerjax.load_model("nano")

  def engine(**fields) -> Engine:
    sizes = EngineConfig(
      page_size=32, num_pages=200, max_num_seqs=8, max_model_len=512, batch_size_buckets=(8, 64)
    )
    return Engine(model, config=dataclasses.replace(sizes, **fields))

  items = protocol.items(TASK, "heldout", (3,))
  # Control tokens in the prompt as well.
  forged = dataclasses.replace(items[0].context, text=f"{items[0].context.text} {CONTROL}")
  questions = tuple(dataclasses.replace(q, context=forged.text) for q in items[0].questions)
  items += (protocol.Item(context=forged, questions=questions),)
  config = ProtocolConfig(
    parallel=(1, 2), wake_tokens=24, sleep_tokens=48, max_samples=3, max_rethinks=2, cuts=(8,)
  )

  def run(ask: thinkers.Ask) -> tuple[list, dict]:
    answers = {}

    def kept(calls):
      for index, answer in ask(calls):
        answers[calls[index].key] = answer
        yield index, answer

    rows = []
    for prompts in (prompts_lib.taught(TASK), prompts_lib.ordered(TASK)):
      rows += protocol.run(items, prompts=prompts, verdict=TASK.verdict, ask=kept, config=config)
    return rows, answers

  expected_rows, expected = run(EngineThinker(engine()).ask)
  served = Served(
    name="nano",
    engine=engine(max_num_seqs=3, batch_size_buckets=(4, 32)),
    fingerprint="fp_test",
  )
  with server.running(Service({"nano": served}, ServeConfig(port=0))) as url:
    endpoint = Endpoint(EndpointConfig(url=url, model="nano", timeout_seconds=120.0))
    rows, got = run(thinkers.asking(endpoint, num_threads=3))
  print(f"{len(got)} calls, {sum(a.num_tokens for a in expected.values())} tokens")
  assert got == expected
  assert rows == expected_rows
  assert not [row.error for context in rows for row in context if row.error]
  assert len({answer.text for answer in got.values()}) > 10


@pytest.mark.thorough
def test_another_seed_says_something_else():
  thinker = EngineThinker(word_engine.make_engine())
  first, second = (thinkers.answer_of(thinker, call(seed=seed)) for seed in (5, 6))
  assert first != second  # Twin of the equality above.
