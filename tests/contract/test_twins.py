"""Twins of the contract's tests: breaking anything that the contract relies on changes bits.

A comparison that cannot fail proves nothing. So each thing that the contract relies on is broken on
purpose here, in both dtypes, and the comparison of test_schedules.py must fail.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from seen_inputs import SeesInputs
import tiny_model

from seerjax.engine import engine as engine_lib

SIZES = engine_lib.EngineConfig(
  page_size=8,
  num_pages=26,
  max_num_seqs=4,
  max_model_len=64,
  batch_size_buckets=(16,),
  enable_prefix_caching=False,
)
TILED = [
  pytest.param(tiny_model.NUMERICS, id="f32"),
  pytest.param(tiny_model.BFLOAT16, id="bf16", marks=pytest.mark.long),
]
NATIVE = [
  pytest.param(tiny_model.NATIVE, id="native f32", marks=pytest.mark.long),
  pytest.param(tiny_model.NATIVE_BFLOAT16, id="native bf16", marks=pytest.mark.long),
]
ALL = pytest.mark.parametrize("numerics", TILED + NATIVE)
# Twins that break splits; the native backend has none: test_native breaks its chains.
BOTH = pytest.mark.parametrize("numerics", TILED)


class Disturbed(SeesInputs):
  """An engine that passes step inputs through `disturb(inputs, work)` (NumPy in and out)."""

  disturb = staticmethod(lambda inputs, work: inputs)

  def _inputs(self, work):
    return self.disturb(super()._inputs(work), work)


def disturbed(disturb, numerics=tiny_model.NUMERICS) -> list:
  """Returns completions of four requests from an engine with the disturbance."""
  engine = tiny_model.make_engine(SIZES, numerics, kind=Disturbed)
  engine.disturb = disturb
  return engine.generate(tiny_model.random_requests(4))


# Changes that must have no effect.


def test_an_engine_left_in_peace_says_what_each_request_says_alone():
  assert tiny_model.num_differing(disturbed(lambda inputs, work: inputs)) == 0


def test_what_padding_rows_hold_changes_nothing():
  rng = np.random.default_rng(0)

  def fill(values, live, high):
    """Returns random integers in all entries after the first `live`."""
    values[0, live:] = rng.integers(0, high, values[0, live:].shape)

  def scribble(inputs, work):
    del work
    batch, sampling = inputs.batch, inputs.sampling
    rows, segments = int(batch.num_rows[0]), int(batch.num_segments[0])
    samples, copies = int(inputs.num_samples[0]), int(inputs.num_copies[0])
    fill(batch.tokens, rows, 64)
    fill(batch.positions, rows, 64)
    fill(batch.slots, rows, SIZES.num_pages * SIZES.page_size)
    fill(batch.segment_start, segments, batch.tokens.shape[1])
    fill(batch.segment_length, segments, 5)
    fill(batch.page_table, segments, SIZES.num_pages)
    fill(inputs.sample_rows, samples, batch.tokens.shape[1])
    fill(inputs.positions, samples, 64)
    fill(inputs.seeds, samples, 2**32)
    fill(inputs.copies, copies, SIZES.num_pages)
    sampling.temperature[0, samples:] = rng.choice([0.0, 0.5, 2.0])
    sampling.top_p[0, samples:] = rng.choice([0.2, 1.0])
    fill(sampling.top_k, samples, 10)
    fill(sampling.bias_ids, samples, 64)
    sampling.bias_values[0, samples:] = 3.0
    return inputs

  assert tiny_model.num_differing(disturbed(scribble)) == 0


@BOTH
def test_what_unwritten_memory_holds_changes_nothing(numerics):
  def change(written, pages):
    written = written[None, None, :, :, None]
    large = lambda leaf: jnp.where(written, leaf, jnp.asarray(1e30, leaf.dtype))
    return jax.tree.map(large, pages)

  found = tiny_model.generate_amid(SIZES, numerics, change)
  assert tiny_model.num_differing(found, numerics) == 0


# Twins.


def flip_lowest_bit(engine, page: int, offset: int) -> None:
  """Flips the lowest mantissa bit of one key in layer 0, head 0."""
  (keys, values), *others = engine.memory.pages
  old = np.asarray(keys)[0, 0, page, offset, 0]
  whole = np.dtype(f"uint{8 * old.dtype.itemsize}")
  new = (old.view(whole) ^ whole.type(1)).view(old.dtype)
  keys = keys.at[0, 0, page, offset, 0].set(new)
  engine.memory.pages = ((keys, values), *others)


@ALL
def test_one_flipped_mantissa_bit_in_a_page_is_noticed(numerics):
  # Rounding may remove the flip of a low bit, so some flips must change the completion, not all.
  noticed = 0
  for offset in range(4):
    engine = tiny_model.make_engine(SIZES, numerics)
    for request in tiny_model.random_requests(4):
      engine.add_request(request)
    engine.step()
    while any(sequence.is_prefilling for sequence in engine._requests.running[0]):
      engine.step()
    for sequence in engine._requests.running[0]:
      flip_lowest_bit(engine, sequence.pages[0], offset)
    while engine.num_unfinished:
      engine.step()
    noticed += tiny_model.num_differing(engine.poll(), numerics)
  assert noticed > 0


@ALL
def test_a_page_table_that_points_at_another_page_is_noticed(numerics):
  # Read the second page twice. Exchanging the two would only add equal terms in another order,
  # which bfloat16 rounds away.
  def misdirect(inputs, work):
    for chunk in work[0]:
      if chunk.sequence.num_written >= 2 * SIZES.page_size:
        segments = inputs.batch.segment_start[0] == chunk.first_row
        table = inputs.batch.page_table[0]
        table[segments, 0] = table[segments, 1]
    return inputs

  assert tiny_model.num_differing(disturbed(misdirect, numerics), numerics) > 0


@ALL
def test_one_noise_key_used_twice_is_noticed(numerics):
  # The second token of each request is drawn with the first one's noise; nothing else changes.
  def repeat(inputs, work):
    sampled = (
      chunk.sequence
      for chunk in work[0]
      if chunk.sequence.num_written + chunk.count == len(chunk.sequence.tokens)
    )
    for place, sequence in enumerate(sampled):
      inputs.positions[0, place] -= len(sequence.tokens) == sequence.num_prompt + 1
    return inputs

  completions = disturbed(repeat, numerics)
  wanted = [tiny_model.answer(numerics, request) for request in tiny_model.random_requests(4)]
  assert all(c.tokens[0] == w.tokens[0] for c, w in zip(completions, wanted, strict=True))
  assert tiny_model.num_differing(completions, numerics) > 0


class FollowsLength(engine_lib.Engine):
  """Twin: splits keys at 8 positions instead of 16 while some request is longer than 32.

  Kernels that choose their splits by the longest sequence of the batch behave like this.
  """

  def step(self):
    longest = max(len(sequence.tokens) for sequence in self._requests.live.values())
    split = 8 if longest > 32 else 16
    self._visits.runner = tiny_model.runner(dataclasses.replace(self.numerics, kv_split=split))
    return super().step()


@pytest.mark.thorough
@pytest.mark.few(1)
@BOTH
def test_a_split_that_follows_the_length_is_noticed(numerics):
  def run(batch):
    return tiny_model.make_engine(SIZES, numerics, kind=FollowsLength).generate(batch)

  # Never longer than 32, so completions alone are correct; next to a longer request they differ.
  short = [request for request in tiny_model.random_requests(8) if len(request.prompt) + 20 <= 32]
  longer = next(request for request in tiny_model.random_requests(8) if len(request.prompt) > 24)
  wanted = [tiny_model.answer(numerics, request) for request in short]
  assert all(map(tiny_model.same, run(short), wanted))
  with_longer = run([longer, *short])[1:]
  assert not all(map(tiny_model.same, with_longer, wanted))


@pytest.mark.thorough
@pytest.mark.few(1)
@BOTH
def test_the_untiled_path_is_noticed(numerics):
  untiled = dataclasses.replace(numerics, backend="untiled")
  # Steps of one row and of many, so that bits depend on the batch.
  sizes = dataclasses.replace(SIZES, max_num_seqs=1, batch_size_buckets=(1, 16))
  apart = tiny_model.make_engine(sizes, untiled).generate(tiny_model.random_requests(4))
  together = tiny_model.make_engine(SIZES, untiled).generate(tiny_model.random_requests(4))
  assert not all(map(tiny_model.same, together, apart))
