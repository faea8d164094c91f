"""Visits of several steps sample, stream, count and omit exactly what single steps do."""

from __future__ import annotations

import dataclasses

from guessing import Guesser
import pytest
from word_engine import SIZES, make_engine, request, same, tokenizer_fields, tokens_from

from seerjax.engine.engine import Engine
from seerjax.engine.runner import MAX_STOP_IDS
from seerjax.models import tokenizer as tokenizer_lib


def in_visits(steps: int, **others) -> Engine:
  return make_engine(dataclasses.replace(SIZES, decode_steps_per_call=steps), **others)


def asked() -> list:
  """Returns four requests that leave at different steps, one by a stop id only the host knows."""
  free = run_all(make_engine(), [request("c", tokens_from(9, 4), seed=2, max_tokens=12)])
  stop = free["c"].tokens[5]
  return [
    request("a", max_tokens=12),
    request("b", tokens_from(3, 2), seed=1, max_tokens=5, temperature=0.0),
    request(
      "c",
      tokens_from(9, 4),
      seed=2,
      max_tokens=12,
      stop_token_ids=(*range(506, 506 + MAX_STOP_IDS), stop),
    ),
    request("d", (7,), seed=3, max_tokens=15, logit_bias=((9, 2.0),), top_k=40),
  ]


def run_all(engine: Engine, requests: list) -> dict:
  return {completion.request_id: completion for completion in engine.generate(requests)}


def stream(engine: Engine, requests: list) -> tuple[dict, dict, list[str]]:
  """Returns (tokens, text) as they were streamed, completions, and the order of their ends."""
  streamed: dict[str, tuple] = {}
  for one in requests:
    engine.add_request(one)
  ends, found = [], {}
  while engine.num_unfinished:
    updates = engine.step()
    names = [update.request_id for update in updates]
    assert len(names) == len(set(names)), f"got {names}, expected each request once a visit"
    for update in updates:
      tokens, text = streamed.get(update.request_id, ((), ""))
      streamed[update.request_id] = tokens + update.tokens, text + update.text
    for completion in engine.poll():
      ends.append(completion.request_id)
      found[completion.request_id] = completion
  return streamed, found, ends


@pytest.mark.thorough
@pytest.mark.parametrize("steps", [3, 8])
def test_what_is_told_and_counted_is_that_of_single_steps(steps):
  plain, engine = make_engine(), in_visits(steps)
  streamed, expected, ends = stream(plain, asked())
  streamed_in_visits, found, ends_in_visits = stream(engine, asked())
  assert all(same(found[name], expected[name]) for name in expected)
  assert {one.finish_reason for one in found.values()} == {"length", "stop"}
  assert streamed_in_visits == streamed and ends_in_visits == ends
  mine, theirs = engine.counters, plain.counters
  assert theirs.visits == theirs.steps == mine.steps > 2 * mine.visits
  assert (mine.rows, mine.sampled_tokens) == (theirs.rows, theirs.sampled_tokens)


def test_a_visit_ends_with_its_last_row():
  engine = in_visits(8)
  engine.add_request(request("a", max_tokens=5))
  engine.add_request(request("b", seed=1, max_tokens=3))
  assert [len(update.tokens) for update in engine.step()] == [1, 1]  # The prompts are written.
  assert [len(update.tokens) for update in engine.step()] == [4, 2]
  assert (engine.counters.visits, engine.counters.steps) == (2, 5)
  assert engine.num_unfinished == 0


def test_a_chunk_that_ends_within_a_visit_is_resumed_to_the_same_bits():
  expected = run_all(make_engine(), asked())
  engine = in_visits(8)
  for one in asked():
    engine.add_request(one, chunk_tokens=4)
  lengths = set()
  while engine.num_unfinished:
    engine.step()
    for name in engine.chunks.poll_paused():
      lengths.add(len(engine.progress(name).tokens) % 4)
      engine.chunks.resume(name, chunk_tokens=4)
  found = {one.request_id: one for one in engine.poll()}
  assert lengths == {0} and all(same(found[name], expected[name]) for name in expected)
  assert engine.chunks.free_pages(0) == SIZES.num_pages - 1


@pytest.mark.parametrize(
  "asked_for", [dict(stop=("never in there",)), dict(allowed_token_ranges=((0, 512),) * 12)]
)
def test_a_request_that_is_asked_something_after_each_token_keeps_all_to_single_steps(asked_for):
  engine = in_visits(8)
  engine.generate([request("a", **asked_for), request("b", seed=1, max_tokens=12)])
  assert engine.counters.visits == engine.counters.steps


def test_a_prompt_that_is_being_written_keeps_all_to_single_steps():
  engine = in_visits(8)
  engine.add_request(request("a", max_tokens=12))
  engine.step()
  engine.add_request(request("b", tokens_from(0, 40), seed=1, max_tokens=3))  # Three pieces.
  lengths = [[len(update.tokens) for update in engine.step()] for _ in range(3)]
  assert lengths == [[1], [1], [1, 1]]
  assert [len(update.tokens) for update in engine.step()] == [8, 2]


@pytest.mark.parametrize("silent, in_one_step", [(0.0, True), (1.0, False)])
def test_a_drafter_that_drafts_nothing_keeps_the_visits_long(silent, in_one_step):
  answers = {name: one.tokens for name, one in run_all(make_engine(), asked()).items()}
  drafter = Guesser(answers, 1, right=1.0, silent=silent)
  engine = in_visits(8, drafter=drafter)
  found = run_all(engine, asked())
  assert {name: one.tokens for name, one in found.items()} == answers
  counters = engine.counters
  assert bool(counters.drafted_tokens) == in_one_step
  assert in_one_step or counters.steps > 2 * counters.visits


class Stumbling(tokenizer_lib.TextStream):
  """Raises the next of `errors` when it receives a fifth token."""

  errors: list[BaseException]

  def push(self, token_id: int) -> str:
    piece = super().push(token_id)
    if len(self._ids) == 5 and self.errors:
      raise self.errors.pop()
    return piece


@dataclasses.dataclass(frozen=True, kw_only=True)
class StumblingTokenizer(tokenizer_lib.Tokenizer):
  """A tokenizer; its streams raise once."""

  errors: list[BaseException]

  def stream(self, skip_special_tokens: bool = True) -> tokenizer_lib.TextStream:
    stream = Stumbling(self.backend, skip_special_tokens)
    stream.errors = self.errors
    return stream


@pytest.mark.parametrize("error", [RuntimeError("no such word"), KeyboardInterrupt()])
def test_what_is_met_in_a_visit_takes_back_no_step_before_it(error):
  requests = [request("a"), request("b", seed=1), request("c", seed=2)]
  expected = run_all(make_engine(), requests)
  tokenizer = StumblingTokenizer(**tokenizer_fields(), errors=[error])
  engine = in_visits(8, tokenizer=tokenizer)
  for one in requests:
    engine.add_request(one)
  tokens: dict[str, tuple] = {}
  while engine.num_unfinished:
    try:
      updates = engine.step()
    except KeyboardInterrupt:
      assert len(engine.progress("a").tokens) == 4 == len(engine.progress("c").tokens)
      continue
    for update in updates:
      tokens[update.request_id] = tokens.get(update.request_id, ()) + update.tokens
  found = {one.request_id: one for one in engine.poll()}
  assert {name: one.tokens for name, one in found.items()} == tokens
  if isinstance(error, RuntimeError):
    broken = found.pop("a")
    assert (broken.finish_reason, broken.tokens) == ("error", expected["a"].tokens[:4])
    assert "in a step after 4 tokens" in broken.error
  assert all(same(one, expected[name]) for name, one in found.items())
  assert engine.chunks.free_pages(0) == SIZES.num_pages - 1
