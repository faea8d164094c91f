"""Masks constrain the requests that have one, and change no bit of the others in the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tiny_model

from seerjax.engine import engine as engine_lib, planner as planner_lib
from seerjax.engine.engine import EngineConfig
from seerjax.types import Request, SamplingParams

SIZES = EngineConfig(
  page_size=16, num_pages=40, max_num_seqs=8, max_model_len=64, batch_size_buckets=(32,)
)
VOCABULARY = tiny_model.CONFIG.vocab_size
# Both tests draw the same backend, and share its programs.
BACKENDS = [
  pytest.param(numerics, id=numerics.backend, marks=pytest.mark.few(1, of="backend"))
  for numerics in (tiny_model.NUMERICS, tiny_model.NATIVE)
]


def third(answer: Sequence[int]) -> np.ndarray:
  """Ids that leave the remainder of the answer's length when divided by three."""
  words = np.zeros(-(-VOCABULARY // 32), np.uint32)
  for token in range(len(answer) % 3, VOCABULARY, 3):
    words[token // 32] |= np.uint32(1 << token % 32)
  return words


def requests(count: int) -> list[Request]:
  kinds = [
    SamplingParams(max_tokens=9),
    SamplingParams(max_tokens=9, temperature=0.7, top_p=0.8),
    SamplingParams(max_tokens=9, temperature=0.0),
  ]
  return [
    Request(request_id=str(i), prompt=(3, 4, *range(5, 6 + i % 4)), sampling=kinds[i % 3], seed=i)
    for i in range(count)
  ]


def together(engine: engine_lib.Engine, asked: Sequence[Request], masked: set[str]) -> dict:
  for request in asked:
    engine.add_request(request, mask=third if request.request_id in masked else None)
  found = {}
  while engine.num_unfinished:
    engine.step()
    found |= {done.request_id: done for done in engine.poll()}
  return found


class Shifted(planner_lib.Planner):
  """Twin: each sample has its neighbour's mask."""

  def inputs(self, scheduled):
    inputs = super().inputs(scheduled)
    rows = inputs.sampling
    if rows.mask is None:
      return inputs
    return inputs._replace(
      sampling=rows._replace(mask=np.roll(rows.mask, 1, 1), high=np.roll(rows.high, 1, 1))
    )


def differences(numerics, planner=planner_lib.Planner) -> int:
  """Returns how many of twelve requests, half of them masked, have not the bits of each alone."""
  asked, masked = requests(12), {str(i) for i in range(0, 12, 2)}
  alone = tiny_model.make_engine(SIZES, numerics)
  expected = {}
  for one in asked:
    expected |= together(alone, [one], masked)
  engine = tiny_model.make_engine(SIZES, numerics, planner=planner)
  found = together(engine, asked, masked)
  if planner is planner_lib.Planner:
    for name in masked:
      assert [token % 3 for token in found[name].tokens] == [i % 3 for i in range(9)]
  return sum(not tiny_model.same(found[name], expected[name]) for name in expected)


@pytest.mark.thorough
@pytest.mark.parametrize("numerics", BACKENDS)
def test_masked_and_free_answers_have_the_bits_of_each_alone(numerics):
  assert differences(numerics) == 0


@pytest.mark.thorough
@pytest.mark.parametrize("numerics", BACKENDS)
def test_twin_a_mask_on_the_neighbours_row_is_seen(numerics):
  assert differences(numerics, Shifted) > 0


@pytest.mark.thorough
def test_a_mask_that_raises_ends_its_own_request_alone():
  def broken(answer: Sequence[int]) -> np.ndarray:
    if len(answer) == 2:
      raise ValueError("no more")
    return third(answer)

  engine = tiny_model.make_engine(SIZES)
  first, second = requests(2)
  engine.add_request(first, mask=broken)
  engine.add_request(second)
  found = {}
  while engine.num_unfinished:
    engine.step()
    found |= {done.request_id: done for done in engine.poll()}
  assert found["0"].finish_reason == "error" and "no more" in found["0"].error
  assert found["1"].finish_reason == "length"


@pytest.mark.thorough
def test_held_answers_grow_by_no_token_and_change_by_no_bit(seed):
  asked, rng = requests(6), np.random.default_rng(seed)
  engine = tiny_model.make_engine(SIZES)
  expected = together(engine, asked, {"0", "3"})
  for request in asked:
    engine.add_request(request, mask=third if request.request_id in ("0", "3") else None)
  found, lengths = {}, dict.fromkeys(expected, 0)
  for visit in range(400):
    if not engine.num_unfinished:
      break
    held = {name for name in expected if rng.random() < 0.5} if visit < 300 else set()
    engine.hold(held)
    for update in engine.step():
      assert update.request_id not in held
      lengths[update.request_id] += len(update.tokens)
    found |= {done.request_id: done for done in engine.poll()}
  assert [*lengths.values()] == [9] * 6
  assert all(tiny_model.same(found[name], expected[name]) for name in expected)


@pytest.mark.thorough
def test_all_that_is_held_is_no_work():
  engine = tiny_model.make_engine(SIZES)
  engine.add_request(requests(1)[0])
  engine.hold({"0"})
  for _ in range(3):
    assert not engine.step()
  engine.hold(())
  while engine.num_unfinished:
    engine.step()
  assert engine.poll()[0].finish_reason == "length"


def bits(allowed) -> np.ndarray:
  """Returns a mask that allows these ids."""
  flags = np.zeros(-(-VOCABULARY // 32) * 32, np.uint8)
  flags[list(allowed)] = 1
  return np.packbits(flags, bitorder="little").view(np.uint32)


WORDS = -(-VOCABULARY // 32)
# (mask after two tokens, other fields of the request, text of the error).
WRONG_MASKS: list[tuple[Any, dict[str, Any], str]] = [
  (bits(()), {}, "mask: got a mask that allows no id, expected at"),
  (
    bits((5,)),
    {"allowed_token_ranges": ((6, 9),) * 9},
    "no id from 6 to 8, the range of SamplingParams.allow",
  ),
  (bits((5, 9)), {"allowed_token_ranges": ((6, 9),) * 9}, "no id from 6 to 8, the"),
  (bits((0,)), {"allowed_token_ranges": ((1, VOCABULARY),) * 9}, "no id from 1 to 63, the"),
  (bits(()), {"stop_token_ids": (3,)}, "a stop id that the mask allows"),
  (np.ones(WORDS, np.int32), {}, f"got int32[{WORDS}], expected uint32[{WORDS}]"),
  (np.ones(WORDS, bool), {}, f"got bool[{WORDS}], expected uint32"),
  (np.ones(VOCABULARY, bool), {}, f"got bool[{VOCABULARY}]"),
  (np.ones(WORDS, np.float32), {}, "got float32["),
  (np.ones(WORDS, np.uint64), {}, "got uint64["),
  (np.uint32(7), {}, "(7), expected uint32["),
  (np.ones(1, np.uint32), {}, "got uint32[1], expected"),
  (np.ones(WORDS + 1, np.uint32), {}, f"got uint32[{WORDS + 1}]"),
  (np.ones((1, WORDS), np.uint32), {}, "got uint32[1, "),
  ([2**32 - 1] * WORDS, {}, "got [4294967295, "),
  (None, {}, "got None, expected uint32["),
]


@pytest.mark.parametrize("numerics", BACKENDS)
def test_a_mask_that_cannot_be_ends_its_own_request_by_name(numerics):
  engine = tiny_model.make_engine(SIZES, numerics)
  valid, _ = requests(2)
  expected = together(engine, [valid], set())["0"]
  for number, (wrong, changes, message) in enumerate(WRONG_MASKS):
    sampling = SamplingParams(max_tokens=9, **changes)
    name = f"wrong {number}"

    def mask(answer: Sequence[int], wrong=wrong) -> np.ndarray:
      return wrong if len(answer) == 2 else bits(range(VOCABULARY))

    engine.add_request(Request(request_id=name, prompt=(7, 8), sampling=sampling), mask=mask)
    engine.add_request(valid)
    found = {}
    while engine.num_unfinished:
      engine.step()
      found |= {done.request_id: done for done in engine.poll()}
    assert found[name].finish_reason == "error" and message in found[name].error, found[name].error
    assert len(found[name].tokens) == 2
    assert tiny_model.same(found["0"], expected)


def test_a_mask_and_allowed_leave_what_both_allow():
  engine = tiny_model.make_engine(SIZES)
  sampling = SamplingParams(max_tokens=9, allowed_token_ranges=((4, 8),) * 9)
  request = Request(request_id="a", prompt=(7, 8), sampling=sampling)
  engine.add_request(request, mask=lambda answer: bits((2, 7, 9)))
  while engine.num_unfinished:
    engine.step()
  [done] = engine.poll()
  assert done.tokens == (7,) * 9 and done.finish_reason == "length"
