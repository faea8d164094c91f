"""Pages of layers with windows are given back alone, and no bit of a response depends on it.

Layers with a window are followed by one without, as in Gemma 3; deeper models keep their pages in
pools. The twin gives pages back one page too early.
"""

from __future__ import annotations

import dataclasses
import functools

from guessing import Guesser
import jax
import numpy as np
import pytest
import tiny_model

from seerjax import parallel
from seerjax.engine import engine as engine_lib, runner as runner_lib
from seerjax.engine.planner import Planner
from seerjax.kv.disk_store import DiskStore
from seerjax.kv.pool import KVPool, KVPoolConfig
from seerjax.models import kv_layout
from seerjax.models.decoder import decide
from seerjax.models.loading import Model
from seerjax.types import Request, SamplingParams

WINDOW, SPLIT, PAGE_SIZE = 8, 8, 4
CONTEXT = 12 * WINDOW
NUMERICS = dataclasses.replace(tiny_model.NUMERICS, kv_split=SPLIT, reduction_shards=1)


def model_of(*windows: int | None):
  kind = tiny_model.SMALLEST.layers[0]
  return dataclasses.replace(
    tiny_model.SMALLEST,
    layers=tuple(kind.changed(window=window) for window in windows),
    max_model_len=CONTEXT,
  )


PAIR, GEMMA = model_of(WINDOW, None), model_of(*5 * [WINDOW], None)
# Pools with two kinds of pages, and one kind of pages, all given back.
DEEP, ALL = model_of(*5 * [WINDOW, None]), model_of(WINDOW)
SIZES = engine_lib.EngineConfig(
  page_size=PAGE_SIZE,
  num_pages=1 + 2 * CONTEXT // PAGE_SIZE,
  max_num_seqs=2,
  max_model_len=CONTEXT,
  batch_size_buckets=(16,),
  decode_steps_per_call=4,
)


class KeepsAll(Planner):
  """Gives no page back."""

  def release_passed(self, scheduled):
    pass


class TooEarly(Planner):
  """Twin: gives back the page of the next row's first key too, one page too early."""

  def release_passed(self, scheduled):
    super().release_passed(scheduled)
    for pieces in scheduled:
      for piece in pieces:
        for pool, window in zip(
          self._memory.windows.pools[piece.sequence.instance], piece.sequence.windows, strict=False
        ):
          first_key = (piece.sequence.num_written - WINDOW + 1) // PAGE_SIZE
          for page in window.drop(max(0, first_key + 1 - window.first)):
            pool.release(page)


@functools.cache
def runner_of(config, instances: int = 1) -> runner_lib.Runner:
  mesh = parallel.make_mesh(data_parallel_size=instances)
  return runner_lib.Runner(decide(config, NUMERICS), mesh, max_programs=2)


def make_engine(config=PAIR, *, instances: int = 1, sizes=SIZES, **others) -> engine_lib.Engine:
  return engine_lib.Engine(
    Model(config, tiny_model.random_params(config, NUMERICS), NUMERICS),
    config=sizes,
    key=jax.random.key(7),
    runner=runner_of(config, instances),
    **others,
  )


def request_of(index: int, max_tokens: int = 10 * WINDOW) -> Request:
  rng = np.random.default_rng(index)
  return Request(
    request_id=str(index),
    prompt=tuple(rng.integers(0, PAIR.vocab_size, 3 + index).tolist()),
    sampling=SamplingParams(max_tokens=max_tokens),
    seed=index,
  )


@functools.cache
def kept(config, index: int, max_tokens: int = 10 * WINDOW):
  """Completion of a request alone, with all of its pages."""
  engine = make_engine(config, planner=KeepsAll)
  (found,) = engine.generate([request_of(index, max_tokens)])
  assert engine.counters.passed_pages == 0
  return found


def most_held(engine) -> int:
  """Most positions that the running sequences hold in layers with windows, page ends included."""
  most = 0
  while engine.num_unfinished:
    engine.step()
    for sequence in engine._requests.running[0]:
      for window in sequence.windows:
        written = -(-sequence.num_written // PAGE_SIZE) - window.first
        most = max(most, written * PAGE_SIZE)
      if not sequence.windows:
        most = max(most, PAGE_SIZE * np.count_nonzero(sequence.pages[: sequence.num_written]))
  return most


@pytest.mark.parametrize(
  "config",
  [
    PAIR,
    ALL,
    pytest.param(DEEP, marks=pytest.mark.thorough),
    pytest.param(GEMMA, marks=pytest.mark.thorough),
  ],
  ids=["pair", "all", "deep", "gemma"],
)
def test_windowed_layers_hold_a_window_and_a_split_over_ten_windows(config):
  engine = make_engine(config)
  for index in range(2):
    engine.add_request(request_of(index))
  most = most_held(engine)
  found = {one.request_id: one for one in engine.poll()}
  for index in range(2):
    assert tiny_model.same(found[str(index)], kept(config, index))
  written = sum(len(one.prompt) + 10 * WINDOW - 1 for one in map(request_of, range(2)))
  num_passed = engine.counters.passed_pages
  print(f"{num_passed} pages given back of {written} positions, at most {most} positions held")
  # Pages ahead of the response are not among them: they have no positions yet.
  ahead = max(SIZES.decode_steps_per_call, PAGE_SIZE)
  assert 0 < most <= WINDOW + SPLIT + (ahead if config is ALL else 0)
  assert num_passed * PAGE_SIZE >= written - 2 * (WINDOW + SPLIT)
  free = [pool.num_available for pool in engine.memory.windows.pools[0]]
  assert free == [kind.num_pages - 1 for kind in engine.memory.windows.kinds[1:]]
  assert engine.chunks.free_pages(0) == SIZES.num_pages - 1


def test_windowed_layers_have_arrays_for_their_windows_alone():
  engine = make_engine(GEMMA)
  layers = [keys.shape[2] for keys, _ in engine.memory.pages]
  # Twice two sequences with a window, a split and a page ahead, and the rows of a step.
  assert layers == [*5 * [1 + 4 * (-(-(WINDOW + SPLIT + PAGE_SIZE) // PAGE_SIZE) + 1) + 4], 49]
  deep = [keys.shape[2:4] for keys, _ in make_engine(DEEP).memory.pages]
  assert deep == [(49, 5), (29, 5)]
  assert (
    ", 29 pages for layers with a window of 8 (320 of 384 bytes a token) and 2 sequences;"
  ) in engine.memory_plan()
  entries = [kv_layout.entries_of(decide(config, NUMERICS)) for config in (GEMMA, DEEP, ALL)]
  assert entries == [((5,), (0, 1, 2, 3, 4)), ((0,), (1,)), ((0,),)]


def test_a_page_that_is_given_back_too_early_is_noticed():
  engine = make_engine(planner=TooEarly)
  (found,) = engine.generate([request_of(1)])
  assert not tiny_model.same(found, kept(PAIR, 1))


def test_spilled_and_exported_requests_continue_with_their_windows(tmp_path):
  for config in (PAIR, ALL):
    pools = [KVPool(KVPoolConfig(), DiskStore(tmp_path, max_bytes=10**7)) for _ in range(2)]
    engine, other = (make_engine(config, kv_pool=pool) for pool in pools)
    engine.add_request(request_of(1), chunk_tokens=30)
    while not engine.chunks.poll_paused():
      engine.step()
    kv, so_far = engine.chunks.export_kv("1"), engine.progress("1")
    assert engine.chunks.spill(["1"]) and engine.chunks.held_pages("1") == 0
    engine.chunks.resume("1")
    other.add_request(request_of(1), resume_from=so_far, kv=kv)
    for one in (other, engine):  # The end of the request here would remove its file.
      while one.num_unfinished:
        one.step()
      assert tiny_model.same(one.poll()[0], kept(config, 1))
    # Of layers with a window, three pages or four were moved; a cached page need not come back.
    whole, counters = -(-(len(so_far.tokens) + 3) // PAGE_SIZE), engine.counters
    assert counters.spilled_pages <= 4 + (whole if config is PAIR else 0)
    assert counters.spilled_pages - 1 <= counters.restored_pages <= counters.spilled_pages
    assert pools[1].imports.adopted == 1


def test_a_pinned_prefix_and_a_shared_prompt_keep_the_window_at_their_end():
  engine = make_engine()
  prompt = tuple(range(30))
  ask = lambda name, more: Request(
    request_id=name, prompt=prompt + more, sampling=SamplingParams(max_tokens=40)
  )
  expected = make_engine(planner=KeepsAll).generate([ask("a", ()), ask("b", (3, 4))])
  found = engine.generate([ask("a", ())])
  assert engine.chunks.pin(prompt) == 28
  (pin,) = engine.memory.windows.pools
  assert sum(pool.num_holders(page) for pool in pin for page in range(1, pool.num_pages)) == 3
  reused = engine.counters.reused_tokens
  found += engine.generate([ask("b", (3, 4))])
  assert engine.counters.reused_tokens - reused == 28
  assert all(map(tiny_model.same, found, expected))
  engine.chunks.unpin(prompt)
  assert engine.chunks.free_pages(0) == SIZES.num_pages - 1


def test_background_requests_share_few_pages_of_windows():
  sizes = dataclasses.replace(SIZES, background_rows=16)
  engine = make_engine(sizes=sizes)
  (pool,) = engine.memory.windows.pools[0]
  hog = pool.take(pool.num_available - 6)  # A window, a split and two pages.
  for index in range(3):
    engine.add_request(request_of(index, 40), is_background=index > 0)
  while engine.num_unfinished:
    engine.step()
  found = {one.request_id: one for one in engine.poll()}
  for index in range(3):
    assert tiny_model.same(found[str(index)], kept(PAIR, index, 40))
  assert engine.counters.background_spilled > 0 and pool.num_available == 6 and hog


def test_the_paths_of_a_draft_tree_have_pages_of_windows_of_their_own():
  answers = {str(index): kept(PAIR, index, 40).tokens for index in range(2)}
  engine = make_engine(drafter=Guesser(answers, 5, right=0.8))
  found = engine.generate([request_of(index, 40) for index in range(2)])
  for index in range(2):
    assert tiny_model.same(found[index], kept(PAIR, index, 40))
  counters = engine.counters
  assert counters.side_paths and counters.key_copies and counters.passed_pages
  (pool,) = engine.memory.windows.pools[0]
  assert pool.num_available == pool.num_pages - 1


def test_drafts_after_a_text_are_cached_with_their_windows():
  request = request_of(1, 40)
  drafts = [((5, 6, 7, 8), (5, 9, 10), (11,))]
  engines = make_engine(), make_engine(planner=KeepsAll)
  texts = [tuple(range(20)), (*range(20), 5, 9, 10, 12)]
  found = [
    [engine.top_logprobs(request, [text], 3, drafts=drafts) for text in texts] for engine in engines
  ]
  assert found[0] == found[1] and len(found[0][0][0]) == 1 + 4 + 2 + 1
  assert engines[0].counters.reused_tokens >= 20
  (pool,) = engines[0].memory.windows.pools[0]
  assert pool.num_available == pool.num_pages - 1
