"""Pins: which pages are kept, who may take them, and that new weights invalidate them."""

from __future__ import annotations

import dataclasses

import pytest
from seen_inputs import SeesInputs
from word_engine import SIZES, make_engine, params, request, run, same, tokens_from

from seerjax.engine.engine import Engine
from seerjax.kv.pool import KVPool, KVPoolConfig

START = tokens_from(1, 27)  # Three whole pages, and a bit of a fourth.
# Requests take the pages of whole answers, so that it is known how many.
PINNING = dataclasses.replace(SIZES, pinned_pages=4, reserved_tokens=0)


def asked(name="a", question=(3, 4), **sampling):
  return request(name, START + question, max_tokens=3, **sampling)


def pinned_engine(**others) -> Engine:
  engine = make_engine(PINNING, **others)
  engine.generate([asked()])
  assert engine.chunks.pin(START) == 24
  return engine


def flush(engine: Engine) -> None:
  """Runs requests, one after another, that together need all unheld pages; none waits."""
  for i in range(1, 4):
    engine.generate([request(f"f{i}", tokens_from(100 * i, 30), max_tokens=3)])


def held_and_kept(engine: Engine) -> tuple[int, int]:
  """Positions of the first pin on the devices, and those there or in the pool."""
  return engine.chunks.pins[0].num_held, engine.chunks.pins[0].num_kept


def test_pinned_pages_outlive_what_needs_the_others():
  counts = []
  for is_pinned in (True, False):
    engine = pinned_engine()
    if not is_pinned:
      engine.chunks.unpin(START)
    flush(engine)
    before = engine.counters.reused_tokens
    [found] = engine.generate([asked("b", (9, 9))])
    counts.append(engine.counters.reused_tokens - before)
    assert same(found, make_engine().generate([asked("b", (9, 9))])[0])
  assert counts == [24, 0]


def test_a_pin_is_filled_by_what_requests_write():
  engine = make_engine(PINNING)
  assert engine.chunks.pin(START) == 0 and engine.chunks.pins[0].num_kept == 0
  engine.add_request(request("fill", START, max_tokens=1), is_background=True)
  run(engine)
  assert engine.chunks.pin(START) == 24 == engine.chunks.pins[0].num_held
  engine.chunks.unpin(START)
  assert engine.chunks.pins == () and engine.chunks.free_pages(0) == 8


@pytest.mark.parametrize("host_pages, kept", [(4096, 24), (0, 0)])
def test_pages_of_pins_leave_for_one_in_front_and_come_back(host_pages, kept):
  engine = pinned_engine(kv_pool=KVPool(KVPoolConfig(host_pages=host_pages)))
  large = request("l", tokens_from(200, 40), max_tokens=24)  # All eight pages.
  expected = make_engine().generate([large])[0]
  engine.add_request(large)
  engine.step()
  assert engine.chunks.held_pages("l") == 8 and engine.counters.waits == 0
  assert held_and_kept(engine) == (0, kept)
  assert same(run(engine)["l"], expected)
  engine.step()  # No foreground request is present.
  assert engine.chunks.pins[0].num_held == kept
  flush(engine)
  before = engine.counters.reused_tokens
  [found] = engine.generate([asked("b", (9, 9))])
  assert engine.counters.reused_tokens - before == kept
  assert same(found, make_engine().generate([asked("b", (9, 9))])[0])


@pytest.mark.parametrize("host_pages, kept", [(4096, 24), (0, 0)])
def test_pins_make_way_for_one_in_background_once_nothing_runs(host_pages, kept):
  engine = pinned_engine(kv_pool=KVPool(KVPoolConfig(host_pages=host_pages)))
  large = request("l", tokens_from(200, 40), max_tokens=24)  # All eight pages.
  expected = make_engine().generate([large])[0]
  engine.add_request(asked("s"), is_background=True)
  engine.add_request(large, is_background=True)
  engine.step()
  assert (
    engine.chunks.held_pages("l") == 0 and engine.chunks.pins[0].num_held == 24
  )  # Another runs.
  while "s" in engine._requests.live:
    engine.step()
  engine.step()
  assert engine.chunks.held_pages("l") == 8 and engine.chunks.pins[0].num_held == 0
  found = run(engine)
  assert same(found["l"], expected)
  engine.step()
  assert engine.chunks.pins[0].num_held == kept


class Keeps(Engine):
  """Twin: an engine with pins that keep pages of the old weights."""

  def _forget_pages(self):
    pins = [sequence for sequence in self._pins.sequences if sequence.pages]
    self.memory.forget_all()
    self._weights.publish(self.memory, self.policy_version)
    for sequence in pins:
      self.memory.remember(sequence, sequence.tokens[: sequence.num_written])


@pytest.mark.parametrize("kind, is_right", [(Engine, True), (Keeps, False)])
def test_new_weights_release_pins(kind, is_right):
  engine = pinned_engine(kind=kind)
  engine.update_weights(params(1), 1)
  [found] = engine.generate([asked("b", temperature=0.0)])
  [expected] = make_engine(seed=1).generate([asked("b", temperature=0.0)])
  assert same(found, expected) == is_right
  if is_right:
    assert engine.chunks.free_pages(0) == 8 and held_and_kept(engine) == (0, 0)
    assert (
      engine.chunks.pin(START) == 24 and engine.chunks.free_pages(0) == 5
    )  # Filled by that request.


def test_new_weights_forget_pins_off_the_devices():
  engine = pinned_engine()
  engine.generate([request("l", tokens_from(200, 40), max_tokens=24)])
  assert held_and_kept(engine) == (0, 24)
  engine.update_weights(params(1), 1)
  engine.step()
  assert held_and_kept(engine) == (0, 0) and engine.chunks.pin(START) == 0


def test_a_step_that_breaks_off_takes_pinned_pages_too():
  class Breaking(SeesInputs):
    def _inputs(self, scheduled):
      if self.counters.visits == 4:
        self.counters.visits += 1
        raise KeyboardInterrupt
      return super()._inputs(scheduled)

  engine = pinned_engine(kind=Breaking)
  visits, engine.counters.visits = engine.counters.visits, 4
  del visits
  engine.add_request(asked("b"))
  with pytest.raises(KeyboardInterrupt):
    engine.step()
  assert held_and_kept(engine) == (0, 0)
  assert same(run(engine)["b"], make_engine().generate([asked("b")])[0])
  assert engine.chunks.pin(START) == 24 and engine.chunks.free_pages(0) == 5


def test_what_cannot_be_pinned_is_refused():
  engine = pinned_engine()
  with pytest.raises(ValueError, match=r"got 2 pages in addition to 3 pinned ones, expected at"):
    engine.chunks.pin(tokens_from(300, 16))
  with pytest.raises(ValueError, match="got 7 tokens, expected at least 8, one page"):
    engine.chunks.pin(tokens_from(300, 7))
  with pytest.raises(ValueError, match=r"got adapter 'x', expected one of \[''\]"):
    engine.chunks.pin(START, adapter="x")
  with pytest.raises(ValueError, match="got 16 tokens that are not pinned, expected one of the 1"):
    engine.chunks.unpin(tokens_from(300, 16))
  plain = make_engine(dataclasses.replace(SIZES, enable_prefix_caching=False))
  with pytest.raises(ValueError, match="enable_prefix_caching=False, expected an engine with"):
    plain.chunks.pin(START)
