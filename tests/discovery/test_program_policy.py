"""The program-writing policy: its two requests, real sandboxed programs, and its errors."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import pathlib

import made_rollouts
import pytest
import tiny_problem

from seerjax import models
from seerjax.discovery import program_policy, programs
from seerjax.discovery.attempts import Group, Job, SampledSequence, Writer
from seerjax.discovery.config import ProgramConfig
from seerjax.discovery.program_policy import ProgramPolicy
from seerjax.models import tokenizer as tokenizer_lib
from seerjax.rollout.journal import Journal
from seerjax.types import Completion, Request

TOKENIZER = tokenizer_lib.load(pathlib.Path(models.__file__).parent / "nano")
ENVIRONMENT = tiny_problem.Row()
START = ENVIRONMENT.start(0)
BEST = """It is easy.
```python
def improve(artefact, seconds, seed):
  return [5] * len(artefact)
```
"""
GROUP = Group(size=2, temperature=1.0, seed=3)
CONFIG = ProgramConfig(thinking_tokens=20, answer_tokens=30, seconds=2.0)


def completion(request: Request, text: str) -> Completion:
  """Returns the completion of a model that produced this text."""
  tokens = TOKENIZER.encode(text)[: request.sampling.max_tokens]
  reason = "length" if len(tokens) == request.sampling.max_tokens else "stop"
  return made_rollouts.completion(request.request_id, tokens, text=text, finish_reason=reason)


@pytest.fixture(scope="module")
def writer():
  with ProgramPolicy(ENVIRONMENT, GROUP, CONFIG, TOKENIZER, 4096) as made:
    yield made


def test_who_thinks_too_long_is_asked_again_and_forced_tokens_are_prompt(writer: ProgramPolicy):
  requests = writer.ask(START, 4, 1)
  assert [request.request_id for request in requests] == ["4/1/0", "4/1/1"]
  assert requests[0].prompt == requests[1].prompt and requests[0].seed != requests[1].seed
  asked: list[Request] = []

  def generate(batch: Sequence[Request]) -> list[Completion]:
    asked.extend(batch)
    texts = {"4/1/0": "hm, " * 40, "4/1/1": "No.", "4/1/2": BEST}
    # In any order.
    return [completion(request, texts[request.request_id]) for request in reversed(batch)]

  answers = writer.answers(generate, requests)
  assert [len(one) for one in answers] == [2, 1]
  second = asked[2]
  thought = answers[0][0].completion.tokens
  assert second.request_id == "4/1/2" and second.group_id == requests[0].group_id
  assert second.prompt[: len(requests[0].prompt)] == requests[0].prompt
  assert second.prompt[len(requests[0].prompt) :][: len(thought)] == thought
  assert len(second.prompt) > len(requests[0].prompt) + len(thought)  # The notice.
  assert second.sampling.max_tokens == 30 and second.seed not in {one.seed for one in requests}


@pytest.mark.thorough
def test_what_the_journal_holds_is_not_run_again(writer: ProgramPolicy, tmp_path):
  requests = writer.ask(START, 2, 1)
  texts = [BEST, BEST.replace("[5]", "[9]")]
  jobs = [
    Job(START, (SampledSequence(request, completion(request, text)),))
    for request, text in zip(requests, texts, strict=True)
  ]
  with Journal(tmp_path / "journal.jsonl", fingerprint={}, settings={}) as journal:
    found = writer.attempts(jobs, journal)
    assert [one.status for one in found] == ["ok", "invalid"]
  with ProgramPolicy(ENVIRONMENT, GROUP, CONFIG, TOKENIZER, 4096) as ended:
    pass
  # In another process, and in one that can no longer run programs.
  with Journal(tmp_path / "journal.jsonl", fingerprint={}, settings={}) as journal:
    again = ended.attempts(jobs, journal)
    assert [repr(one) for one in again] == [repr(one) for one in found]  # NaN does not equal NaN.
    assert ended.cpu_seconds == 0
    # Twin: programs outside the journal are run.
    new = jobs[0].sequences[0]._replace(request=other_step(requests[0]))
    with pytest.raises(ValueError, match="Pool.submit: got a closed pool"):
      ended.attempts([Job(START, (new,))], journal)


def other_step(request: Request) -> Request:
  return dataclasses.replace(request, request_id="3/0/0")


@pytest.mark.thorough
def test_programs_run_and_are_judged_anew(writer: ProgramPolicy):
  request = writer.ask(START, 0, 0)[0]
  texts = [BEST, BEST.replace("[5]", "[9]"), "no program", BEST.replace("return", "raise")]
  jobs = [Job(START, (SampledSequence(request, completion(request, text)),)) for text in texts]
  found = writer.attempts(jobs)
  assert [one.status for one in found] == ["ok", "invalid", "malformed", "failed"]
  assert found[0].score.value == tiny_problem.MOST and found[0].artefact == [5] * 6
  assert 0 < writer.worker_seconds == writer.cpu_seconds


@pytest.mark.thorough
def test_a_context_without_room_for_an_answer_is_refused():
  with (
    ProgramPolicy(ENVIRONMENT, GROUP, CONFIG, TOKENIZER, 60) as writer,
    pytest.raises(ValueError, match="got a context of 60 tokens, expected at least [0-9]+: [0-9]+"),
  ):
    writer.check(START)


@pytest.mark.thorough
def test_however_little_room_there_is_a_later_question_is_asked():
  # Exactly enough room for the check at the start.
  with ProgramPolicy(Long(), GROUP, CONFIG, TOKENIZER, 10**6) as writer:
    text = programs.shortened(Long().describe(START, None), program_policy.MIN_DESCRIPTION)
    least = len(writer._question(text)) + writer._reserved
  with ProgramPolicy(Long(), GROUP, CONFIG, TOKENIZER, least) as writer:
    writer.check(START)
    # This output takes more tokens than the start's.
    (request, _) = writer.ask(START, 0, 0, printed="0123456789" * 500)
    assert len(request.prompt) + writer._reserved <= least


class Long(tiny_problem.Row):
  """Returns a very long description."""

  def describe(self, artefact, score):
    return f"RULES. {'many words, ' * 5000} END"


@pytest.mark.thorough
def test_a_long_description_is_shortened_so_that_question_and_answers_fit():
  context = 1000
  with ProgramPolicy(Long(), GROUP, CONFIG, TOKENIZER, context) as writer:
    (request, _) = writer.ask(START, 0, 0, printed="PRINTED")
    text = TOKENIZER.decode(request.prompt)
    assert "RULES. many" in text and "PRINTED" in text and "characters are left out here" in text
    assert len(request.prompt) + CONFIG.thinking_tokens + CONFIG.answer_tokens < context
    # A response that uses the whole thinking budget still has the full answer budget.
    ((_, (second, _)),) = writer.answers(
      lambda batch: [completion(one, "hm, " * 40) for one in batch], [request]
    )
    assert len(request.prompt) + CONFIG.thinking_tokens < len(second.prompt)
    assert second.sampling.max_tokens == CONFIG.answer_tokens
    assert len(second.prompt) + CONFIG.answer_tokens <= context
    # Twin: a short description is not shortened.
  with ProgramPolicy(ENVIRONMENT, GROUP, CONFIG, TOKENIZER, 4096) as writer:
    assert "left out" not in TOKENIZER.decode(writer.ask(START, 0, 0)[0].prompt)


@pytest.mark.parametrize(
  "arguments, message",
  [
    (dict(thinking_tokens=0), "ProgramConfig.thinking_tokens: got 0, expected at least 1"),
    (dict(num_workers=0), "ProgramConfig.num_workers: got 0, expected at least 1"),
    (dict(seconds=0.0), "ProgramConfig.seconds: got 0.0, expected a positive number"),
  ],
)
def test_refusals(arguments, message):
  with pytest.raises(ValueError, match=message):
    ProgramConfig(**arguments)


def test_both_are_writers(writer: ProgramPolicy):
  assert isinstance(writer, Writer)
