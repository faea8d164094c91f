"""Attention kernel: the definition, its gradient, bits that depend on visible keys only, errors."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from kernel_arrays import as_float64, needs_interpreter
import numpy as np
import pytest
import refusals

from pallas_kernels import attention, gpu
from pallas_kernels.attention import layout

HEADS, GROUP, HEAD_DIM, PAGE, WIDTH = 1, 3, 64, 32, 12
SPLIT, TILE, NUM_SEGMENTS, NUM_ROWS = 128, 8, 6, 40
SMALL = {"kv_split": SPLIT, "key_block": 64, "query_tile": TILE}


class Sequences:
  """Queries, keys and values of a few sequences, equal for every placement."""

  def __init__(self, length=WIDTH * PAGE, heads=HEADS, group=GROUP, head_dim=HEAD_DIM, page=PAGE):
    rng = np.random.default_rng(0)
    self.shape, self.page, self.width = (heads, group, head_dim), page, length // page
    self.q = 2 * rng.standard_normal((4, length, heads, group, head_dim))
    self.k = rng.standard_normal((4, heads, length, head_dim))
    self.v = rng.standard_normal((4, heads, length, head_dim))

  def batch(self, pieces, seed=0, num_segments=NUM_SEGMENTS, num_rows=NUM_ROWS):
    """Returns the kernel's arguments for `pieces` of (sequence, first position, positions).

    Pages lie at random; what no sequence owns, later positions and padding rows hold other numbers.
    """
    rng = np.random.default_rng(seed)
    heads, _, head_dim = self.shape
    num_pages = 1 + 4 * self.width
    k, v = rng.standard_normal((2, heads, num_pages, self.page, head_dim)) * 9
    tables = 1 + rng.permutation(num_pages - 1).reshape(4, self.width)
    for s in {s for s, _, _ in pieces}:
      written = max(first + count for t, first, count in pieces if t == s)
      for source, pages in ((self.k, k), (self.v, v)):
        flat = pages[:, tables[s]].reshape(heads, -1, head_dim)
        flat[:, :written] = source[s][:, :written]
        pages[:, tables[s]] = flat.reshape(heads, self.width, self.page, head_dim)
    q = rng.standard_normal((num_rows, *self.shape)) * 9
    positions = np.zeros(num_rows)
    start, length = np.zeros((2, num_segments))
    table = np.zeros((num_segments, self.width))
    row = 0
    for i, (s, first, count) in enumerate(pieces):
      q[row : row + count] = self.q[s, first : first + count]
      positions[row : row + count] = np.arange(first, first + count)
      start[i], length[i], table[i] = row, count, tables[s]
      row += count
    integers = (jnp.asarray(x, jnp.int32) for x in (positions, start, length, table, len(pieces)))
    arrays = (jnp.asarray(x, jnp.bfloat16) for x in (q, k, v))
    return (*arrays, attention.Segments(*integers))


@functools.cache
def compiled(window=None, has_sinks=False, **config):
  """Runs the kernel in the interpreter, with outputs that start as NaN."""
  config = attention.Config(**(SMALL | config))
  return jax.jit(
    lambda q, k, v, segments, sinks=None: attention.attention(
      q, k, v, segments, window=window, sinks=sinks, config=config, interpret=True
    )
  )


def sinks_of(heads=HEADS, group=GROUP) -> jax.Array:
  return jnp.asarray(3 * np.random.default_rng(5).standard_normal((heads, group)), jnp.float32)


def rows_by_position(pieces, out) -> dict[tuple[int, int], np.ndarray]:
  """The output's rows by (sequence, position)."""
  names = [(s, first + i) for s, first, count in pieces for i in range(count)]
  return dict(zip(names, as_float64(out)))


def assert_same_bits(found, expected):
  common = found.keys() & expected.keys()
  assert common
  for name in common:
    np.testing.assert_array_equal(found[name], expected[name], err_msg=str(name))


# Lengths 1, one less than a split, a split, one more, and odd; queries of one row and of a tile.
LENGTHS = [(0, 0, 1), (0, SPLIT - 8, 7), (1, SPLIT - 8, 8), (2, SPLIT, 1), (3, 290, 7)]


@pytest.mark.thorough
@pytest.mark.few(1)
@needs_interpreter
@pytest.mark.parametrize("window, has_sinks", [(None, False), (70, True)])
def test_values_are_the_definitions_and_tuning_moves_no_bit(window, has_sinks):
  batch = Sequences().batch(LENGTHS)
  sinks = sinks_of() if has_sinks else None
  expected = as_float64(attention.reference(*batch, window=window, sinks=sinks))
  first, *others = [
    as_float64(compiled(window, has_sinks, **tuning)(*batch, sinks))
    for tuning in ({"mode": "sequential"}, {"mode": "parallel"}, {"skip_blocks": False})
  ]
  np.testing.assert_allclose(first, expected, rtol=2**-6, atol=2**-6)
  for other in others:
    np.testing.assert_array_equal(first, other)
  # Rows of no segment.
  assert not first[sum(count for _, _, count in LENGTHS) :].any()


@pytest.mark.thorough
@needs_interpreter
@pytest.mark.parametrize("mode", ["sequential", "parallel"])
def test_consecutive_heads_that_share_pages_have_the_bits_of_equal_pages(mode):
  q, k, v, segments = Sequences(heads=4).batch(LENGTHS)
  for sharers in (2, 4):
    stored = k[::sharers], v[::sharers]
    whole = (jnp.repeat(pages, sharers, axis=0) for pages in stored)
    found = as_float64(compiled(mode=mode)(q, *stored, segments))
    np.testing.assert_array_equal(found, as_float64(compiled(mode=mode)(q, *whole, segments)))
    expected = as_float64(attention.reference(q, *stored, segments))
    np.testing.assert_allclose(found, expected, rtol=2**-6, atol=2**-6)


@pytest.mark.thorough
@pytest.mark.few(1)
@needs_interpreter
@pytest.mark.parametrize(
  "shape, config",
  [
    # Two warpgroups, more blocks than stages, pages larger than blocks.
    (
      {"heads": 2, "group": 5, "page": 128},
      {"query_tile": 16, "kv_split": 192 * 2, "key_block": 64, "stages": 1},
    ),
    # Pages that fill a part of a block; one block a split.
    (
      {"head_dim": 128, "page": 8, "length": 256},
      {"kv_split": 64, "key_block": 64, "stages": 3, "mode": "parallel"},
    ),
  ],
)
def test_values_are_the_definitions_for_other_shapes(shape, config):
  sequences = Sequences(**shape)
  pieces = [(0, 0, 1), (1, 120, 8), (2, 200, 3), (3, 127, 2), (0, 1, 4)]
  batch = sequences.batch(pieces)
  found = as_float64(compiled(**config)(*batch))
  expected = as_float64(attention.reference(*batch))
  np.testing.assert_allclose(found, expected, rtol=2**-6, atol=2**-6)


@pytest.mark.thorough
@needs_interpreter
def test_values_that_are_parked_keep_their_bits():
  # With 256 keys a split and 128 values a row, a fold keeps its values in shared memory; a second
  # kernel that folds partials, and narrower heads, hold them in registers.
  sequential, parallel = attention.Config(mode="sequential"), attention.Config(mode="parallel")
  assert sequential.parks(128)
  assert not sequential.parks(64) and not parallel.parks(128)
  sequences = Sequences(head_dim=128, page=64, length=384)
  batch = sequences.batch([(0, 300, 8), (1, 254, 3), (2, 0, 1)])
  whole = {"kv_split": 256, "key_block": 128}
  first, second = (
    as_float64(compiled(**whole, mode=config.mode)(*batch)) for config in (sequential, parallel)
  )
  np.testing.assert_array_equal(first, second)
  expected = as_float64(attention.reference(*batch))
  np.testing.assert_allclose(first, expected, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize(
  "rows, segments, heads, group, context, mode",
  [
    (1, 1, 8, 4, 8192, "parallel"),
    (16, 16, 8, 4, 8192, "parallel"),
    # Two items for each multiprocessor and more.
    (64, 64, 8, 4, 8192, "sequential"),
    # One split a segment.
    (1, 1, 8, 4, 256, "sequential"),
    # Partials that take more memory than "auto" gives them.
    (128, 16, 8, 4, 131072, "sequential"),
    # Two warpgroups: their partials do not fit shared memory.
    (16, 1, 8, 8, 8192, "sequential"),
  ],
)
def test_the_mode_follows_segments_heads_and_multiprocessors(
  rows, segments, heads, group, context, mode
):
  shape, table = (rows, heads, group, 128), (segments, context // 64)
  config = attention.Config(query_tile=16 if group == 8 else 8)
  assert layout.mode_of(config, None, shape, table, 64, False, 132) == mode
  # Twin: an explicit mode is used.
  other = "parallel" if mode == "sequential" else "sequential"
  named = dataclasses.replace(config, mode=other)
  assert layout.mode_of(named, None, shape, table, 64, False, 132) == other


@pytest.mark.thorough
def test_equal_layers_are_lowered_once():
  shapes = structs(64, 64, 8, 4, 128, 8192)
  config = attention.Config(query_tile=8)

  def layers(*args, windows):
    return [attention.attention(*args, window=window, config=config) for window in windows]

  def kernels(*windows):
    module = gpu.lower_for_cuda(functools.partial(layers, windows=windows), *shapes)
    return module.count("custom_call @mosaic_gpu")

  assert kernels(None, None, None) == 1
  # The twin: layers that differ are lowered each.
  assert kernels(None, 128, None) == 2


@pytest.mark.thorough
@pytest.mark.few(1)
@needs_interpreter
@pytest.mark.parametrize("window, has_sinks", [(None, False), (70, True)])
def test_decode_verification_chunks_and_prefill_give_the_same_bits(window, has_sinks):
  sinks = sinks_of() if has_sinks else None
  sequences = Sequences()

  def rows(pieces, mode, seed):
    out = compiled(window, has_sinks, mode=mode)(*sequences.batch(pieces, seed), sinks)
    return rows_by_position(pieces, out)

  # Tiles of 8, as a prefill cuts them, across the first boundary of splits.
  prefill = rows([(0, 112, 8), (0, 120, 8), (0, 128, 8), (0, 136, 8)], "sequential", 0)
  decode = [(0, 115, 1), (0, 127, 1), (0, 128, 1), (0, 129, 1), (0, 141, 1)]
  assert_same_bits(rows(decode, "sequential", 1), prefill)
  assert_same_bits(rows(decode, "parallel", 2), prefill)
  verification = [(1, 40, 5), (0, 125, 7)]
  assert_same_bits(rows(verification, "sequential", 3), prefill)
  chunks = [(0, 113, 3), (0, 116, 6), (2, 300, 8), (0, 122, 8), (0, 130, 1), (0, 131, 8)]
  assert_same_bits(rows(chunks, "parallel", 4), prefill)


@pytest.mark.thorough
@needs_interpreter
def test_a_segments_bits_do_not_depend_on_its_batch(seed):
  rng = np.random.default_rng(seed)
  sequences = Sequences()
  run = compiled(mode="sequential")

  def random_piece():
    count = int(rng.integers(1, 7))
    first = int(rng.integers(0, WIDTH * PAGE - count))
    return int(rng.integers(4)), first, count

  pieces = [random_piece() for _ in range(NUM_SEGMENTS)]
  whole = rows_by_position(pieces, run(*sequences.batch(pieces, seed)))
  # Alone, in another order, with others: each time on other pages.
  some = [pieces[0]] + [random_piece() for _ in range(3)]
  shuffled = [pieces[i] for i in rng.permutation(NUM_SEGMENTS)]
  for other_seed, other in enumerate(([pieces[0]], shuffled, some)):
    assert_same_bits(rows_by_position(other, run(*sequences.batch(other, other_seed))), whole)
  assert not as_float64(run(*sequences.batch([]))).any()


@pytest.mark.thorough
@needs_interpreter
def test_another_split_gives_other_bits():
  # The twin of the tests above: their comparison can fail.
  sequences = Sequences()
  pieces = [(0, 300, 8)]
  batch = sequences.batch(pieces)
  first, second = compiled()(*batch), compiled(kv_split=64, key_block=64)(*batch)
  assert (as_float64(first) != as_float64(second)).any()
  np.testing.assert_allclose(as_float64(first), as_float64(second), rtol=2**-6, atol=2**-6)


@pytest.mark.thorough
@pytest.mark.few(1)
@needs_interpreter
@pytest.mark.parametrize(
  "shape, query_tile, window, has_sinks",
  [
    ({}, TILE, None, True),
    # Two warpgroups and pages of two tiles of keys.
    ({"group": 5, "page": 128}, 16, 5, False),
  ],
)
def test_gradients_are_the_definitions(shape, query_tile, window, has_sinks):
  sequences = Sequences(**shape)
  sinks = sinks_of(group=shape.get("group", GROUP)) if has_sinks else None
  # Two segments read the same pages, sequence 3 is not read, and there is a segment of padding.
  # Rows past the end of the first segment would see keys that no row of it loads.
  pieces = [(2, 58, 6), (0, 3, 1), (0, 125, 5), (1, 130, 6), (1, 136, 4)]
  q, k, v, segments = sequences.batch(pieces)
  weights = jnp.asarray(np.random.default_rng(7).standard_normal(q.shape), jnp.float32)
  config = attention.Config(**(SMALL | {"query_tile": query_tile}))

  def kernel(q, k, v, sinks):
    out = attention.attention(
      q, k, v, segments, window=window, sinks=sinks, config=config, interpret=True
    )
    return jnp.sum(out.astype(jnp.float32) * weights), out

  def definition(q, k, v, sinks):
    out = attention.reference(q, k, v, segments, window=window, sinks=sinks)
    return jnp.sum(out * weights)

  arguments = (0, 1, 2, 3) if has_sinks else (0, 1, 2)
  found, out = jax.jit(jax.grad(kernel, argnums=arguments, has_aux=True))(q, k, v, sinks)
  expected = jax.grad(definition, argnums=arguments)(
    *(x.astype(jnp.float32) for x in (q, k, v)), sinks
  )
  for got, want in zip(found, expected):
    want = as_float64(want)
    np.testing.assert_allclose(as_float64(got), want, rtol=2**-5, atol=2**-7 * np.abs(want).max())
  if not shape:
    # The forward under a gradient is the forward.
    forward = compiled(window, has_sinks)(q, k, v, segments, sinks)
    np.testing.assert_array_equal(as_float64(out), as_float64(forward))


def structs(num_segments, num_rows, heads, group, head_dim, context, page=64):
  """The kernel's arguments as shapes, with pages for four times the context."""
  struct = jax.ShapeDtypeStruct
  width = -(-context // page)
  pages = struct((heads, 4 * width + 1, page, head_dim), jnp.bfloat16)
  segments = attention.Segments(
    *(
      struct(shape, jnp.int32)
      for shape in ((num_rows,), (num_segments,), (num_segments,), (num_segments, width), ())
    )
  )
  return struct((num_rows, heads, group, head_dim), jnp.bfloat16), pages, pages, segments


MODELS = {
  "Qwen3-8B": (8, 4, 128, None),
  "Qwen3-30B-A3B": (4, 8, 128, None),
  "gpt-oss-120b": (8, 8, 64, 128),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
  "num_segments, num_rows, query_tile, context, mode",
  [
    (64, 64, 8, 8192, "sequential"),  # Decode 64 sequences.
    (64, 64, 8, 8192, "parallel"),
    (64, 64 * 9, 9, 8192 + 64, "sequential"),  # Verify 8 drafts.
    (4 * 2048 // 16, 4 * 2048, 16, 2048, "sequential"),  # Prefill, or train.
  ],
)
def test_benchmark_shapes_lower_for_a_gpu(model, num_segments, num_rows, query_tile, context, mode):
  heads, group, head_dim, window = MODELS[model]
  config = attention.Config(query_tile=query_tile, mode=mode)
  shapes = structs(num_segments, num_rows, heads, group, head_dim, context)
  sinks = jax.ShapeDtypeStruct((heads, group), jnp.float32) if window else None

  def forward(q, k, v, segments, sinks):
    return attention.attention(q, k, v, segments, window=window, sinks=sinks, config=config)

  def forward_and_gradient(q, k, v, segments, sinks):
    out, pull = jax.vjp(lambda q, k, v, s: forward(q, k, v, segments, s), q, k, v, sinks)
    return out, pull(out)

  trains = num_rows == 4 * 2048
  module = gpu.lower_for_cuda(forward_and_gradient if trains else forward, *shapes, sinks)
  kernels = 3 if trains else 2 if mode == "parallel" else 1
  assert module.count("custom_call @mosaic_gpu") == kernels


def small_arguments(heads=1, group=2, head_dim=64, page=32):
  zeros = lambda shape, dtype: jnp.zeros(shape, dtype)
  pages = zeros((heads, 5, page, head_dim), jnp.bfloat16)
  integers = [zeros(shape, jnp.int32) for shape in ((3,), (2,), (2,), (2, 4), ())]
  return (
    zeros((3, heads, group, head_dim), jnp.bfloat16),
    pages,
    pages,
    attention.Segments(*integers),
  )


@needs_interpreter
def test_a_gradient_of_heads_that_share_pages_is_refused():
  q, k, v, segments = Sequences(heads=2).batch(LENGTHS)
  loss = lambda q: jnp.sum(compiled()(q, k[:1], v[:1], segments).astype(jnp.float32))
  message = "got a gradient of 2 heads with pages of 1, expected pages of a head for each"
  with pytest.raises(NotImplementedError, match=message):
    jax.eval_shape(jax.grad(loss), q)


def test_small_arguments_are_taken_for_a_gpu():
  with gpu.h200():
    assert attention.is_supported(*small_arguments()) is None


def test_arguments_that_cannot_run_are_refused():
  q, k, v, segments = small_arguments()
  late = segments._replace(positions=jnp.zeros(4, jnp.int32))
  wide = segments._replace(positions=segments.positions.astype(jnp.int16))
  short = segments._replace(page_table=jnp.zeros((1, 4), jnp.int32))
  small = small_arguments()
  sizes = "got pages of {} positions, expected a power of two from 8 up"
  for arguments, options, message in (
    ((q[..., 0], k, v, segments), {}, "got q[3, 1, 2], k_pages[1, 5, 32, 64] and"),
    ((q[..., :32], k, v, segments), {}, "expected the same c in q"),
    (small_arguments(head_dim=96), {}, "got head_dim 96, expected one of (64, 128)"),
    (small_arguments(page=4), {}, sizes.format(4)),
    (small_arguments(page=48), {}, sizes.format(48)),
    (small_arguments(page=512), {}, sizes.format(512)),
    (small_arguments(group=9), {},
     "got query_tile=16 times 9 query heads per key/value head, 144 rows, expected"),
    ((q, k, v, late), {}, "got segments.positions int32[4], expected int32: positions[n]"),
    ((q, k, v, short), {}, "got segments.page_table int32[1, 4], expected"),
    (small, dict(window=0), "got window=0, expected at least 1"),
    (small, dict(sinks=jnp.zeros(2)), "got sinks[2], expected [k, g] = [1, 2]"),
    ((q.astype(jnp.float32), k, v, segments), {},
     "got q of float32, expected bfloat16, which wgmma multiplies; cast it"),
    ((q, k, v.astype(jnp.float16), segments), {}, "got v_pages of float16, expected bfloat16"),
    ((q, k, v, wide), {}, "got segments.positions int16[3], expected int32"),
    (small_arguments(head_dim=128), dict(config=attention.Config(stages=3)),
     "bytes of shared memory, expected at most 232448; make stages, kv_split"),
  ):  # fmt: skip
    with gpu.h200():
      call = lambda given=arguments, options=options: attention.attention(*given, **options)
      refusals.check((NotImplementedError, call, message))
  cpu = "attention: got the platform 'cpu', expected"
  refusals.check((NotImplementedError, lambda: attention.attention(*small), cpu))


@pytest.mark.parametrize(
  "fields, message",
  [
    ({"key_block": 96}, "got key_block=96; expected 64, 128 or 256."),
    ({"kv_split": 192}, "got kv_split=192; expected a positive multiple of key_block=128."),
    ({"mode": "both"}, "got mode='both'; expected 'auto', 'sequential' or 'parallel'."),
    ({"query_tile": 0}, "got query_tile=0; expected at least 1."),
    ({"stages": 0}, "got stages=0; expected 1 to 4."),
    ({"stages": 5}, "got stages=5; expected 1 to 4."),
  ],
)
def test_a_config_that_cannot_work_is_refused(unchecked_annotations, fields, message):
  with pytest.raises(ValueError) as error:
    attention.Config(**fields)
  assert str(error.value) == message
