"""Prefill-only requests: invalid ones are refused, and a failure leaves no state behind."""

from __future__ import annotations

import dataclasses

from beam_cases import SIZES
import pytest
import tiny_model

from seerjax.engine import engine as engine_lib, planner as planner_lib
from seerjax.types import Request, SamplingParams

READ = Request(request_id="read", prompt=(1, 2, 3), sampling=SamplingParams(max_tokens=5))
OTHER = Request(request_id="other", prompt=(4, 5), sampling=SamplingParams(max_tokens=9))


@pytest.fixture
def engine() -> engine_lib.Engine:
  return tiny_model.make_engine(SIZES, tiny_model.NATIVE)


@pytest.mark.thorough
def test_what_else_runs_goes_on_and_is_told_of(engine):
  engine.add_request(OTHER)
  updates = []
  found = engine.top_logprobs(
    READ, [(), (7,)], 4, drafts=[(), [(8, 9), (8, 1)]], on_step=updates.extend
  )
  assert [list(one) for one in found] == [[()], [(), (8,), (8, 9), (8, 1)]]
  for top in (top for one in found for top in one.values()):
    assert len(top) == 4 and list(top) == sorted(top, key=lambda pair: (-pair[1], pair[0]))
  assert {update.request_id for update in updates} == {"other"} and engine.num_unfinished == 1
  # The same position by another path has the same bits.
  assert engine.top_logprobs(READ, [(7, 8, 1)], 4) == [{(): found[1][8, 1]}]
  while engine.num_unfinished:
    engine.step()
  alone = tiny_model.answer(tiny_model.NATIVE, OTHER)
  assert engine.poll()[0].has_bits_of(alone)
  assert engine.chunks.free_pages(0) == SIZES.num_pages - 1


@pytest.mark.parametrize(
  "answers, count, others, message",
  [
    ([()], 0, {}, "of 'read': count: got 0, expected 1 to 16; no more are returned"),
    ([()], 17, {}, "count: got 17, expected 1 to 16"),
    ([(), (1,)], 2, dict(drafts=[()]), "got drafts for 1 answers, expected drafts for 2, or none"),
    ([(1, 64)], 2, {}, "answer 0: got token ids from 1 to 64, expected 0 to 63"),
    ([(1,)], 2, dict(drafts=[[(99,)]]), "drafts of answer 0: got token ids from 99 to 99"),
    ([(), (1,) * 5], 2, {}, "answer 1 of 5 tokens, expected fewer than max_tokens 5; tokens bey"),
    ([()], 2, dict(instance=3), "instance: got 3, expected 0 to 0"),
  ],
)
def test_what_cannot_be_read_is_refused(engine, answers, count, others, message):
  with pytest.raises(ValueError, match=message):
    engine.top_logprobs(READ, answers, count, **others)
  assert not engine.num_unfinished


def test_a_name_that_is_taken_is_refused(engine):
  engine.add_request(dataclasses.replace(OTHER, request_id="read/0"))
  with pytest.raises(ValueError, match="got the unfinished request 'read/0', an id that is needed"):
    engine.top_logprobs(READ, [()], 2)


class Failing(planner_lib.Planner):
  """Raises for a text that ends with 7."""

  def _instance_inputs(self, scheduled, *args):
    if any(piece.sequence.tokens[-1] == 7 for piece in scheduled):
      raise MemoryError("no rows")
    return super()._instance_inputs(scheduled, *args)


@pytest.mark.thorough
def test_what_breaks_is_raised_and_nothing_of_it_is_left():
  engine = tiny_model.make_engine(SIZES, tiny_model.NATIVE, planner=Failing)
  with pytest.raises(RuntimeError, match="request 'read/1': got MemoryError .no rows. in a step"):
    engine.top_logprobs(READ, [(6,), (7,), (8,)], 2)
  assert not engine.num_unfinished and not engine.poll()
  assert engine.chunks.free_pages(0) == SIZES.num_pages - 1
  assert engine.top_logprobs(READ, [(6,)], 2)[0][()]
