"""The native backend's additional promises: no tiles, splits or buckets, any vector width.

The fuzz tests of schedules, models and the trainer also run this backend; these tests cover what
only it promises, and its twins.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import native_threads
import numpy as np
import pytest
import tiny_model

from seerjax import numerics as numerics_lib, parallel
from seerjax.backends.native import ffi, numbers, pointers, threads
from seerjax.backends.numba_cpu import NumbaCpu
from seerjax.engine import engine as engine_lib, runner as runner_lib
from seerjax.models import flax_module, head, kv_layout, transformer
from seerjax.models.decoder import decide
from seerjax.ops import sampling
from seerjax.types import SamplingParams

BOTH = pytest.mark.parametrize(
  "numerics",
  [
    pytest.param(tiny_model.NATIVE, id="f32"),
    pytest.param(tiny_model.NATIVE_BFLOAT16, id="bf16", marks=pytest.mark.thorough),
  ],
)
SIZES = engine_lib.EngineConfig(
  page_size=8, num_pages=60, max_num_seqs=8, max_model_len=64, batch_size_buckets=(8, 32),
  enable_prefix_caching=False,
)  # fmt: skip
LENGTH = 8  # Positions of each sequence of the forward below.


@functools.cache
def scored(
  numerics: numerics_lib.NumericsConfig, num_sequences: int, num_threads: int = 1
) -> list[np.ndarray]:
  """Returns tokens and scores by row, for `num_sequences` sequences of `LENGTH` rows."""
  config, params = tiny_model.CONFIG, tiny_model.params(numerics)
  batch, num_pages = flax_module.sequences_batch(num_sequences, LENGTH, numerics, 8)
  rng = np.random.default_rng(3)  # A sequence's tokens do not depend on `num_sequences`.
  tokens = rng.integers(0, config.vocab_size, (64, LENGTH)).astype(np.int32)[:num_sequences]
  batch = jax.tree.map(jnp.asarray, batch)._replace(tokens=jnp.asarray(tokens.reshape(-1)))
  count = num_sequences * LENGTH
  drawn_by = sampling.sampling_rows([SamplingParams(temperature=0.8)] * count)

  @jax.jit
  def run(params, batch):
    pages = kv_layout.empty_pages(decide(config, numerics), num_pages=num_pages, page_size=8)
    hidden, _ = transformer.forward(params, batch, pages, decoder=decide(config, numerics))
    given = jnp.full(count, -1, jnp.int32)
    return head.sample_and_score(
      params,
      hidden,
      given,
      jax.tree.map(jnp.asarray, drawn_by),
      jnp.arange(count, dtype="uint32"),
      batch.positions,
      batch.num_rows,
      numerics_lib.key(0),
      decoder=decide(config, numerics),
    )

  with native_threads.threaded(num_threads):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(run(params, batch))]


@BOTH
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("num_sequences", [1, 3, 4, 7, 64])
def test_a_row_has_its_bits_among_any_number_of_rows_and_threads(
  numerics, num_sequences, num_threads
):
  here = scored(numerics, num_sequences, num_threads)
  for alone, among in zip(scored(numerics, 1), here, strict=True):
    np.testing.assert_array_equal(alone.view(np.int32), among[:LENGTH].view(np.int32))


@pytest.mark.thorough
@BOTH
def test_a_gradient_has_its_bits_with_any_number_of_threads(numerics):
  config, params = tiny_model.CONFIG, tiny_model.params(numerics)
  batch, num_pages = flax_module.sequences_batch(7, LENGTH, numerics, 8)
  count = 7 * LENGTH
  given = np.random.default_rng(3).integers(0, config.vocab_size, count).astype(np.int32)
  batch = jax.tree.map(jnp.asarray, batch)._replace(tokens=jnp.asarray(np.roll(given, 1)))
  drawn_by = sampling.sampling_rows([SamplingParams(temperature=0.8)] * count)

  def loss(params):
    pages = kv_layout.empty_pages(decide(config, numerics), num_pages=num_pages, page_size=8)
    hidden, _ = transformer.forward(params, batch, pages, decoder=decide(config, numerics))
    _, scores = head.sample_and_score(
      params,
      hidden,
      jnp.asarray(given),
      jax.tree.map(jnp.asarray, drawn_by),
      jnp.arange(count, dtype="uint32"),
      batch.positions,
      batch.num_rows,
      numerics_lib.key(0),
      decoder=decide(config, numerics),
    )
    return jnp.sum(scores.logprob)

  def gradient(num_threads):
    with native_threads.threaded(num_threads):
      run = jax.jit(jax.grad(lambda params: loss(params)))
      # The call blocks inside, where the smallest work is divided.
      return [np.asarray(leaf) for leaf in jax.tree.leaves(run(params))]

  alone = gradient(1)
  for _ in range(20):
    helped = threads.process[2]
    for one, two in zip(alone, gradient(2), strict=True):
      assert one.tobytes() == two.tobytes()
    if threads.process[2] > helped:
      return
  pytest.fail("no thread came to help in 20 gradients")


@pytest.mark.thorough
@BOTH
def test_stale_pages_may_hold_anything_even_nan(numerics):
  def change(written, pages):
    stale = lambda written, leaf: jnp.where(written, leaf, jnp.asarray(np.nan, leaf.dtype))
    of_keys, of_values = written[None, None, :, None], written[None, None, :, :, None]
    return tuple((stale(of_keys, keys), stale(of_values, values)) for keys, values in pages)

  found = tiny_model.generate_amid(SIZES, numerics, change)
  assert tiny_model.num_differing(found, numerics) == 0


# Twins.


class FollowsTheBatch(NumbaCpu):
  """Twin: the chain of a logit runs backward when a step samples more than four rows."""

  def head(self, stage, weights, rows, num_rows):
    usual = super().head(stage, weights, rows, num_rows)
    backward = {
      **weights,
      "final_norm": weights["final_norm"][::-1],
      "head": weights["head"][..., ::-1],
    }
    other = super().head(stage, backward, (rows[0][:, ::-1], *rows[1:]), num_rows)
    return jax.tree.map(lambda a, b: jnp.where(num_rows > 4, a, b), other, usual)


@pytest.mark.thorough
@BOTH
def test_a_chain_that_follows_the_batch_is_noticed(numerics):
  mesh = parallel.make_mesh()
  runner = runner_lib.Runner(
    decide(tiny_model.CONFIG, numerics, backend=FollowsTheBatch(numerics)), mesh, max_programs=2
  )
  engine = tiny_model.make_engine(SIZES, numerics, runner=runner)
  assert tiny_model.num_differing(engine.generate(tiny_model.random_requests(8)), numerics) > 0


def running_sum(name, is_of_piece):
  """A handler of x f32[n]; its items should be independent of each other."""

  @numbers.jit
  def count(arguments):
    return ffi.dimension(arguments, 0, 0)

  @numbers.jit
  def work(arguments, results, first, last, worker):
    x, out = pointers.floats(ffi.address(arguments, 0)), pointers.floats(ffi.address(results, 0))
    for item in range(first, last):
      total = numbers.f32(0.0)
      for before in range(first if is_of_piece else 0, item + 1):
        total += x[before]
      out[item] = total

  return ffi.Handler(name, count, work, count)


def summed(handler, x, num_threads):
  shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (x.shape, (num_threads, 0))]
  with native_threads.threaded(num_threads):
    return np.asarray(jax.jit(lambda x: handler(shapes, x)[0])(x))


def test_a_chain_that_begins_with_a_threads_piece_is_noticed():
  x = np.random.default_rng(0).standard_normal(64).astype(np.float32)
  usual = running_sum("seerjax_test_sum", False)
  broken = running_sum("seerjax_test_sum_of_a_piece", True)
  np.testing.assert_array_equal(summed(usual, x, 1), np.cumsum(x))
  np.testing.assert_array_equal(summed(usual, x, 2), np.cumsum(x))
  np.testing.assert_array_equal(summed(broken, x, 1), np.cumsum(x))
  assert np.any(summed(broken, x, 2) != np.cumsum(x))


# Other processors.

DIGEST = """
import hashlib, sys
sys.path.insert(0, {support!r})
import jax
jax.config.update("jax_num_cpu_devices", 8)
sys.path.insert(0, {here!r})
import test_native, tiny_model
parts = [
  part.tobytes()
  for numerics in (tiny_model.NATIVE, tiny_model.NATIVE_BFLOAT16)
  for part in test_native.scored(numerics, 3)
]
print(hashlib.sha256(b"".join(parts)).hexdigest())
"""


@pytest.mark.long
def test_a_processor_of_shorter_vectors_says_the_same():
  # With the name alone LLVM would still use this processor's features.
  older = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": ""}
  here = os.path.dirname(__file__)
  program = DIGEST.format(here=here, support=os.path.join(here, "..", "support"))

  def digest(environment):
    done = subprocess.run(
      [sys.executable, "-c", program], env=os.environ | environment, capture_output=True, text=True,
      timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.split()[-1]

  assert digest(older) == digest({})
