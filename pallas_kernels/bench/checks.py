"""Checks of the kernels' values and bits, which must pass before speed is reported.

There are four kinds of check. Agreement: with the definition, on random numbers, in f64 on the host
if that is small. Invariance: a row has the same bits alone, in a batch, permuted, with any number
of other rows, and when repeated. Claim: a field of `Config` that should not change bits, compared
with another value. Question: the same for a field without a claim; neither answer is a failure.
Sizes are those of the models' layers on a GPU, and tiny in the interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
import dataclasses
import functools
import math
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import (
  attention,
  grouped_matmul,
  matmul,
  matmul_parts,
  rms_norm,
  token_logprobs,
)

# Maximum multiplications of f64 on the host; beyond, the f32 definition on the device is used.
HOST_PRODUCTS = 1 << 34
# Up to this many random numbers are drawn on the host, without compilation.
HOST_NUMBERS = 1 << 24
# Gradients of the vocabulary use two chunks, the second one shorter.
GRADIENT_VOCABULARY = 20480
# Limits of (total relative error, worst element relative to its size and the mean size).
# bfloat16 rounds by up to 2^-9; attention rounds p as well.
BFLOAT16 = (2**-8, 2**-7)
FLOAT32 = (2**-13, 2**-10)
ATTENTION = (2**-7, 2**-5)
GRADIENT = (2**-6, 2**-4)


Kind: TypeAlias = Literal["agreement", "invariance", "claim", "question"]


@dataclasses.dataclass(frozen=True)
class Check:
  """The result of one check, with what was observed."""

  kernel: str
  kind: Kind
  what: str
  passed: bool
  seen: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
  """The sizes of checks.

  Attributes:
    interpret: run on a CPU.
    weights: (k, n, shards) of matmul; the first is checked with every number of rows.
    rows: numbers of rows for agreement, of matmul and norms.
    sweeps: numbers of rows that must not affect bits, by name.
    claim_rows: rows of matmul's claims.
    swapped_rows: rows of its swapped orientation, one number per width of a tile.
    features: features of norms.
    layers: (key/value heads, group, head_dim, window) of attention; those with a window have sinks.
    context: positions of a sequence.
    lengths: contexts of single rows and drafts, in visible positions.
    attention: `Config` of attention.
    tables: (features, vocabulary) of token_logprobs.
    scored_rows: numbers of scored rows, the largest first.
    experts: (experts, k, n, rows) of grouped_matmul.
  """

  interpret: bool
  weights: tuple[tuple[int, int, int], ...]
  rows: tuple[int, ...]
  sweeps: tuple[tuple[str, tuple[int, ...]], ...]
  claim_rows: int
  swapped_rows: tuple[int, ...]
  features: tuple[int, ...]
  layers: tuple[tuple[int, int, int, int | None], ...]
  context: int
  lengths: tuple[int, ...]
  attention: attention.Config
  tables: tuple[tuple[int, int], ...]
  scored_rows: tuple[int, ...]
  experts: tuple[tuple[int, int, int, int], ...]


# Layers of Qwen3-8B, Qwen3-30B-A3B and gpt-oss-120b.
FULL = Sizes(
  interpret=False,
  weights=((4096, 4096, 8), (4096, 6144, 1), (12288, 4096, 8), (2880, 5120, 1)),
  rows=(1, 8, 64, 1000, 4096),
  sweeps=(
    ("1 to 65 rows", tuple(range(1, 66))),
    ("127 to 129 and 255 to 257 rows", (127, 128, 129, 255, 256, 257)),
    ("1000 and 4096 rows", (1000, 4096)),
  ),
  claim_rows=257,
  swapped_rows=(8, 16, 32, 64),
  features=(4096, 2880),
  layers=((8, 4, 128, None), (8, 8, 64, 128)),
  context=4352,
  lengths=(1, 255, 256, 257, 511, 2048, 4097),
  attention=attention.Config(),
  tables=((4096, 151936), (2880, 201088)),
  scored_rows=(200, 1, 64, 65),
  experts=((128, 2048, 768, 512), (128, 2048, 768, 4096), (128, 2880, 2880, 256)),
)
TINY = Sizes(
  interpret=False,
  weights=((512, 64, 8), (128, 192, 1)),
  rows=(1, 9, 70),
  sweeps=(("1, 8, 9 and 65 rows", (1, 8, 9, 65)),),
  claim_rows=70,
  swapped_rows=(8, 64),
  features=(64,),
  layers=((1, 2, 64, 70),),
  context=160,
  lengths=(1, 64, 65, 130),
  attention=attention.Config(kv_split=64, key_block=64, query_tile=8),
  tables=((64, 512),),
  scored_rows=(70, 1),
  experts=((3, 64, 64, 20),),
)


def kernel_checks(sizes: Sizes) -> dict[str, Iterable[Check]]:
  """Returns each kernel's checks, most important first, as lazy iterators."""
  return {
    "matmul": matmul_checks(sizes),
    "attention": attention_checks(sizes),
    "rms_norm": rms_norm_checks(sizes),
    "token_logprobs": token_logprobs_checks(sizes),
    "grouped_matmul": grouped_matmul_checks(sizes),
  }


def normal(seed: int, *shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
  if math.prod(shape) > HOST_NUMBERS:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)
  rng = np.random.default_rng(seed)
  return jnp.asarray(rng.standard_normal(shape, np.float32), dtype)


def uneven(seed: int, *shape: int) -> jax.Array:
  """Returns normal numbers times powers of two from 2^-8 to 2^8: sums depend on the order."""
  rng = np.random.default_rng(seed)
  powers = np.exp2(rng.integers(-8, 9, shape)).astype(np.float32)
  return jnp.asarray(rng.standard_normal(shape, np.float32) * powers, jnp.bfloat16)


def as_float64(x: Any) -> np.ndarray:
  return np.asarray(x).astype(np.float64)


def num_differing(found: Any, expected: Any) -> int:
  """Returns the number of entries that differ in any bit; for trees, over all leaves."""
  count = 0
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    a, b = (np.ascontiguousarray(x) for x in (a, b))
    unsigned = np.dtype(f"u{a.dtype.itemsize}")
    count += int((a.view(unsigned) != b.view(unsigned)).sum())
  return count


def agreement(
  kernel: str, what: str, found: Any, expected: Any, limits: tuple[float, float]
) -> Check:
  """Compares values; NaN fails."""
  found, expected = as_float64(found), as_float64(expected)
  mean = np.sqrt(np.mean(expected**2)) or 1.0
  error = np.abs(found - expected)
  relative = float(np.sqrt(np.mean(error**2)) / mean)
  worst = float(np.max(error / (np.abs(expected) + mean)))
  seen = f"error {relative:.1e} (at most {limits[0]:.1e}), worst {worst:.1e} ({limits[1]:.1e})"
  return Check(kernel, "agreement", what, relative <= limits[0] and worst <= limits[1], seen)


def same_bits(kernel: str, kind: Kind, what: str, pairs: Iterable[tuple[Any, Any]]) -> Check:
  """Compares bits of (found, expected) pairs."""
  count = total = 0
  for found, expected in pairs:
    count += num_differing(found, expected)
    total += sum(x.size for x in jax.tree.leaves(expected))
  seen = "equal" if count == 0 else "differ"
  return Check(kernel, kind, what, count == 0, f"{seen}: {count:,} of {total:,} entries")


# ----- matmul


def matmul_expected(x: jax.Array, w: jax.Array) -> Any:
  if x.shape[0] * w.size <= HOST_PRODUCTS:
    return as_float64(x) @ as_float64(w)
  return matmul.reference(x, w)


def matmul_checks(sizes: Sizes) -> Iterator[Check]:
  check = functools.partial(same_bits, "matmul")
  most = max(*sizes.rows, *(rows for _, sweep in sizes.sweeps for rows in sweep))

  @functools.cache
  def compiled(config: matmul.Config) -> Callable[..., jax.Array]:
    return jax.jit(functools.partial(matmul.matmul, config=config, interpret=sizes.interpret))

  def of(**fields: Any) -> Callable[..., jax.Array]:
    return compiled(matmul.Config(**fields))

  single = jax.jit(
    functools.partial(matmul.matmul, out_dtype=jnp.float32, interpret=sizes.interpret)
  )
  for k, n, shards in sizes.weights:
    x, w = normal(0, most, k), normal(1, k, n)
    name, call = f"[{k}, {n}] in {shards} shards", of(shards=shards)
    for rows in sizes.rows:
      yield agreement(
        "matmul",
        f"{rows} rows x {name}",
        call(x[:rows], w),
        matmul_expected(x[:rows], w),
        BFLOAT16,
      )
    whole = np.asarray(call(x, w))
    first = (k, n, shards) == sizes.weights[0]
    # Every number of rows for the first weight; for others, the first and last of each sweep.
    for title, sweep in sizes.sweeps:
      chosen = sweep if first else tuple(dict.fromkeys((sweep[0], sweep[-1])))
      yield check(
        "invariance",
        f"{title if first else ' and '.join(map(str, chosen)) + ' rows'}, {name}",
        ((call(x[:rows], w), whole[:rows]) for rows in chosen),
      )
    order = np.random.default_rng(2).permutation(most)
    yield check("invariance", f"permuted, {name}", [(call(x[order], w), whole[order])])
    yield check("invariance", f"again, {name}", [(call(x, w), whole)])
    if first:
      last = x[-1:]
      yield check("invariance", f"the last row alone, {name}", [(call(last, w), whole[-1:])])
      yield from _matmul_claims(sizes, of, x, w, shards)
    if shards > 1:
      yield from _slab_checks(sizes, x, w, shards)
  # Epilogues, pairs and gradients need no large weight.
  k, n, _ = sizes.weights[-1]
  rows = sorted(sizes.rows)[1:3]
  x, w, up = normal(0, rows[-1], k), normal(1, k, n), normal(2, k, n)
  yield agreement("matmul", f"f32, [{k}, {n}]", single(x, w), matmul_expected(x, w), FLOAT32)
  more: dict[str, Any] = {"bias": normal(3, n), "residual": normal(4, rows[-1], n)}
  yield agreement(
    "matmul",
    "bias, residual and a transposed weight",
    _transposed(sizes)(x, w.T, **more),
    matmul.reference(x, w, **more),
    BFLOAT16,
  )
  pair = jax.jit(functools.partial(matmul.swiglu, interpret=sizes.interpret))
  scaled = x * jnp.bfloat16(k**-0.5)
  gated = np.asarray(pair(scaled, w, up))
  yield agreement("matmul", "swiglu", gated, matmul.swiglu_reference(scaled, w, up), BFLOAT16)
  yield check(
    "invariance",
    f"swiglu, {rows[0]} of {rows[-1]} rows",
    [(pair(scaled[: rows[0]], w, up), gated[: rows[0]])],
  )

  @jax.jit
  def with_gradient(x, w, dy):
    y, pull = jax.vjp(functools.partial(matmul.matmul, interpret=sizes.interpret), x, w)
    return y, *pull(dy)

  dy = normal(5, rows[-1], n)
  y, dx, dw = with_gradient(x, w, dy)
  yield agreement("matmul", "dx", dx, matmul.reference(dy, w, transposed=True), BFLOAT16)
  yield agreement("matmul", "dw", dw, matmul.reference(x.T, dy), BFLOAT16)
  few = with_gradient(x[: rows[0]], w, dy[: rows[0]])
  yield check(
    "invariance",
    f"y and dx under a gradient, {rows[0]} of {rows[-1]} rows",
    [(few[:2], (y[: rows[0]], dx[: rows[0]])), (y, of()(x, w))],
  )
  yield check("invariance", "gradients again", [(with_gradient(x, w, dy), (y, dx, dw))])


def _slab_checks(sizes: Sizes, x: jax.Array, w: jax.Array, slabs: int) -> Iterator[Check]:
  """Checks a contraction of slabs: on one device, on two, with parts together and apart."""
  (k, n), most = w.shape, x.shape[0]
  name = f"[{k}, {n}] in {slabs} slabs"
  stream, w = normal(6, most, n), w.reshape(slabs, k // slabs, n)

  @functools.partial(jax.jit, static_argnames=("mode", "out_dtype"))
  def call(x, w, stream=None, *, mode="auto", out_dtype=None):
    config = matmul.Config(mode=mode)
    return matmul.contract_slabs(
      x, w, stream=stream, out_dtype=out_dtype, config=config, interpret=sizes.interpret
    )

  expected = matmul_expected(x, w.reshape(k, n))
  yield agreement("matmul", f"{most} rows x {name}", call(x, w), expected, BFLOAT16)
  # Parts are apart for few rows, and not for many.
  whole = np.asarray(call(x, w, stream))
  rows = sorted({rows for _, sweep in sizes.sweeps for rows in (sweep[0], sweep[-1])})
  yield same_bits(
    "matmul",
    "invariance",
    f"{', '.join(map(str, rows))} rows onto a stream, {name}",
    ((call(x[:count], w, stream[:count]), whole[:count]) for count in rows),
  )
  some = x[: sizes.claim_rows]
  together, apart = (call(some, w, mode=mode) for mode in ("sequential", "parallel"))
  yield same_bits("matmul", "claim", f"mode parallel == sequential, {name}", [(apart, together)])
  half = (slabs // 2, k // 2)
  halves = [
    call(some[:, i * half[1] : (i + 1) * half[1]], w[i * half[0] :][: half[0]], out_dtype="float32")
    for i in range(2)
  ]
  added = matmul_parts.add_partials(
    jnp.stack(halves), out_dtype=jnp.bfloat16, interpret=sizes.interpret
  )
  yield same_bits("matmul", "claim", f"two devices == one, {name}", [(added, together)])


def _transposed(sizes: Sizes) -> Callable[..., jax.Array]:
  return jax.jit(functools.partial(matmul.matmul, transposed=True, interpret=sizes.interpret))


def _matmul_claims(
  sizes: Sizes, of: Callable[..., Any], x: jax.Array, w: jax.Array, shards: int
) -> Iterator[Check]:
  most = sizes.claim_rows
  claims = (
    ("block_m 64 == 128", most, {"block_m": 64}, {}),
    # Shards halve block_n, so its width is checked without them.
    ("block_n 128 == 256", most, {"block_n": 128, "shards": 1}, {"shards": 1}),
    ("max_stages 2 == 8", most, {"max_stages": 2}, {}),
    ("snake_width 1 == 8", most, {"snake_width": 1}, {}),
  )
  tall, swapped = {"swapped_rows": 0}, {"swapped_rows": 64}
  orientations = (
    *(
      (f"swapped_rows 64 == 0 (swapped == tall), {rows} rows", rows, swapped, tall)
      for rows in sizes.swapped_rows
    ),
    (
      "swapped_block_n 64 == 128",
      sizes.swapped_rows[0],
      swapped,
      swapped | {"swapped_block_n": 128},
    ),
  )
  # The interpreter multiplies with numpy, and numpy's bits depend on the shape.
  of_orientations: Kind = "question" if sizes.interpret else "claim"
  kinds: tuple[tuple[Kind, Any], ...] = (("claim", claims), (of_orientations, orientations))
  for kind, asked in kinds:
    for what, rows, *settings in asked:
      left, right = (of(**{"shards": shards} | fields)(x[:rows], w) for fields in settings)
      yield same_bits("matmul", kind, what, [(left, right)])


# ----- rms_norm


def rms_norm_checks(sizes: Sizes) -> Iterator[Check]:
  check = functools.partial(same_bits, "rms_norm")
  most = max(sizes.rows)

  def of(**fields: Any) -> Callable[..., jax.Array]:
    config = rms_norm.Config(**fields)
    return jax.jit(functools.partial(rms_norm.rms_norm, config=config, interpret=sizes.interpret))

  call = of()
  add = jax.jit(functools.partial(rms_norm.add_rms_norm, interpret=sizes.interpret))
  for features in sizes.features:
    scale = normal(1, features)
    for dtype, limits in ((jnp.bfloat16, BFLOAT16), (jnp.float32, FLOAT32)):
      x = normal(0, most, features, dtype=dtype)
      name = f"{most} rows of {features}, {jnp.dtype(dtype)}"
      whole = np.asarray(call(x, scale))
      yield agreement("rms_norm", name, whole, rms_norm.reference(x, scale), limits)
      order = np.random.default_rng(2).permutation(most)
      yield check(
        "invariance",
        f"alone, other numbers of rows, permuted, again; {name}",
        [(call(x[:rows], scale), whole[:rows]) for rows in sorted(sizes.rows)]
        + [(call(x[-1:], scale), whole[-1:]), (call(x[order], scale), whole[order])],
      )
    x, residual = normal(0, most, features), normal(2, most, features)
    normed, total = add(x, residual, scale)
    yield check(
      "invariance",
      f"add_rms_norm == rms_norm of the sum, {features} features",
      [((normed, total), (call(x + residual, scale), x + residual))],
    )
    few = of(blocks_per_multiprocessor=1)(x, scale)
    yield check(
      "claim", f"blocks_per_multiprocessor 1 == 8, {features} features", [(few, call(x, scale))]
    )

  @jax.jit
  def gradients(x, scale, dy):
    pull = jax.vjp(functools.partial(rms_norm.rms_norm, interpret=sizes.interpret), x, scale)[1]
    return pull(dy)

  features = sizes.features[0]
  x, scale = (
    normal(i, *shape, dtype=jnp.float32) for i, shape in enumerate(((most, features), (features,)))
  )
  dy = normal(3, most, features, dtype=jnp.float32)
  found = gradients(x, scale, dy)
  for name, got, want in zip(("dx", "dscale"), found, jax.vjp(rms_norm.reference, x, scale)[1](dy)):
    yield agreement("rms_norm", f"{name}, {most} rows of {features}, float32", got, want, FLOAT32)
  yield check("invariance", "gradients again", [(gradients(x, scale, dy), found)])


# ----- attention

Pieces = list[tuple[int, int, int]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sequences:
  """Queries, keys and values of two sequences, equal wherever they are placed."""

  q: np.ndarray
  k: np.ndarray
  v: np.ndarray
  page: int = 32

  @classmethod
  def normal(cls, heads: int, group: int, head_dim: int, context: int) -> Sequences:
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal(shape, np.float32)
    return cls(
      q=2 * draw(2, context, heads, group, head_dim),
      k=draw(heads, 2, context, head_dim),
      v=draw(heads, 2, context, head_dim),
    )

  def batch(self, pieces: Pieces, seed: int, num_segments: int, num_rows: int) -> tuple[Any, ...]:
    """Returns attention's arguments for `pieces` of (sequence, first position, positions).

    Pages are placed at random. Unowned pages and padding have other numbers.
    """
    rng = np.random.default_rng(seed)
    _, context, heads, group, head_dim = self.q.shape
    width = context // self.page
    table = 1 + rng.permutation(2 * width).reshape(2, width)
    pages = []
    for source in (self.k, self.v):
      page = np.full((heads, 1 + 2 * width, self.page, head_dim), 9, np.float32)
      page[:, table] = source.reshape(heads, 2, width, self.page, head_dim)
      pages.append(jnp.asarray(page, jnp.bfloat16))
    q = np.full((num_rows, heads, group, head_dim), 9, np.float32)
    positions = np.zeros(num_rows, np.int32)
    start, length = np.zeros((2, num_segments), np.int32)
    page_table = np.zeros((num_segments, width), np.int32)
    row = 0
    for i, (sequence, first, count) in enumerate(pieces):
      q[row : row + count] = self.q[sequence, first : first + count]
      positions[row : row + count] = np.arange(first, first + count)
      start[i], length[i], page_table[i] = row, count, table[sequence]
      row += count
    integers = (positions, start, length, page_table, np.int32(len(pieces)))
    segments = attention.Segments(*(jnp.asarray(x) for x in integers))
    return jnp.asarray(q, jnp.bfloat16), *pages, segments


def attention_checks(sizes: Sizes) -> Iterator[Check]:
  for heads, group, head_dim, window in sizes.layers:
    more: dict[str, Any] = {}
    if window is not None:
      more = {"window": window, "sinks": 3 * normal(5, heads, group, dtype=jnp.float32)}
    name = f"{heads} x {group} heads of {head_dim}" + (", window and sinks" if more else "")
    sequences = Sequences.normal(heads, group, head_dim, sizes.context)
    yield from _attention_checks(sizes, sequences, name, more)


def _attention_checks(
  sizes: Sizes, sequences: Sequences, name: str, more: dict[str, Any]
) -> Iterator[Check]:
  check = functools.partial(same_bits, "attention")
  context, tile = sizes.context, sizes.attention.query_tile

  @functools.cache
  def of(**fields: Any) -> Callable[..., jax.Array]:
    config = dataclasses.replace(sizes.attention, **fields)
    return jax.jit(
      functools.partial(attention.attention, config=config, interpret=sizes.interpret, **more)
    )

  def rows_of(pieces: Pieces, seed: int, num_segments: int = 0, num_rows: int = 0, **fields: Any):
    num_rows = num_rows or sum(count for _, _, count in pieces)
    batch = sequences.batch(pieces, seed, num_segments or len(pieces), num_rows)
    return np.asarray(of(**fields)(*batch))

  def against_prefill(pieces: Pieces, seed: int, **options: Any) -> tuple[Any, Any]:
    """Returns the live rows, and the same rows of the prefill."""
    found = rows_of(pieces, seed, **options)
    expected = np.concatenate([prefill[s, first : first + n] for s, first, n in pieces])
    return found[: len(expected)], expected

  whole: Pieces = [
    (s, first, min(tile, context - first)) for s in range(2) for first in range(0, context, tile)
  ]
  flat = rows_of(whole, 0, mode="sequential")
  prefill = flat.reshape(2, context, *flat.shape[1:])
  places = [(i % 2, length - 1) for i, length in enumerate(sizes.lengths)]
  decode: Pieces = [(s, first, 1) for s, first in places]
  batch = sequences.batch(decode, 1, len(decode), len(decode))
  expected = as_float64(attention.reference(*batch, **more))
  found = np.stack([prefill[s, first] for s, first in places])
  yield agreement("attention", f"prefill, {name}", found, expected, ATTENTION)
  decoded = functools.partial(against_prefill, num_segments=len(decode), num_rows=len(decode))
  yield check(
    "invariance",
    f"decode == prefill, {name}",
    [decoded(decode, seed, mode="sequential") for seed in (1, 2)],
  )
  yield check(
    "invariance",
    f"one row alone == in a batch == permuted, {name}",
    [decoded(decode[i : i + 1], 10 + i, mode="sequential") for i in range(len(decode))]
    + [decoded(decode[::-1], 3, mode="sequential")],
  )
  drafts = min(tile, 9)
  verify: Pieces = [(s, first, min(drafts, context - first)) for s, first in places]
  # One program for all of these, with padding after the rows of each.
  shape = {"num_segments": len(places), "num_rows": len(places) * tile}
  yield check(
    "invariance",
    f"verification of {drafts - 1} drafts == prefill, {name}",
    [against_prefill(verify, 4, mode="sequential", **shape)],
  )
  rng = np.random.default_rng(6)
  chunks: Pieces = []
  for s, first in places:
    count = int(rng.integers(1, tile + 1))
    chunks.append((s, first, min(count, context - first)))
  yield check(
    "invariance",
    f"random chunks == prefill, {name}",
    [against_prefill(chunks, 5, mode="sequential", **shape)],
  )
  yield check(
    "invariance", f"prefill again, {name}", [(rows_of(whole, 7, mode="sequential"), flat)]
  )
  yield check(
    "claim",
    f"parallel == sequential, {name}",
    [against_prefill(pieces, 8, mode="parallel", **shape) for pieces in (decode, verify)],
  )
  for field, value in (("stages", 1), ("skip_blocks", False), ("query_tile", tile // 2)):
    what = f"{field} {value} == {dataclasses.asdict(sizes.attention)[field]}, {name}"
    yield check("claim", what, [decoded(decode, 8, **{field: value})])
  yield from _attention_gradient_checks(sizes, sequences, name, more)


def _attention_gradient_checks(
  sizes: Sizes, sequences: Sequences, name: str, more: dict[str, Any]
) -> Iterator[Check]:
  tile = sizes.attention.query_tile
  # Half of the context's first tiles, up to 512 rows, because the definition gathers keys per row.
  num_rows = min(sizes.context // tile // 2, 512 // tile) * tile
  pieces: Pieces = [(0, first, tile) for first in range(0, num_rows, tile)]
  q, k, v, segments = sequences.batch(pieces, 11, len(pieces), num_rows)
  segments = segments._replace(page_table=segments.page_table[:, : -(-num_rows // sequences.page)])
  do = normal(12, *q.shape)

  @jax.jit
  def kernel(q, k, v):
    function = functools.partial(
      attention.attention, config=sizes.attention, interpret=sizes.interpret, **more
    )
    out, pull = jax.vjp(lambda q, k, v: function(q, k, v, segments), q, k, v)
    return out, pull(do)

  def definition(q, k, v):
    return attention.reference(q, k, v, segments, **more)

  out, found = kernel(q, k, v)
  exact = [x.astype(jnp.float32) for x in (q, k, v)]
  expected = jax.vjp(definition, *exact)[1](do.astype(jnp.float32))
  # Pages that no row reads have zero gradients, which would make relative errors look large.
  read = np.unique(segments.page_table)
  unread = np.setdiff1d(np.arange(k.shape[1]), read)
  for label, got, want in zip(("dq", "dk", "dv"), found, expected):
    if label != "dq":
      zeros = np.zeros_like(np.asarray(got[:, unread]))
      what = f"{label} of pages that no row reads, {name}"
      yield same_bits("attention", "agreement", what, [(got[:, unread], zeros)])
      got, want = got[:, read], want[:, read]
    yield agreement("attention", f"{label}, {num_rows} rows, {name}", got, want, GRADIENT)
  yield same_bits(
    "attention",
    "invariance",
    f"gradients again, {name}",
    [(kernel(q, k, v), (out, found))],
  )


# ----- token_logprobs


def scoring_inputs(num_rows: int, features: int, vocabulary: int) -> tuple[Any, ...]:
  """Returns arguments of token_logprobs; rows are scored, sampled and greedy in turn."""
  rng = np.random.default_rng(3)
  kind = np.arange(num_rows) % 3
  targets = np.where(kind == 0, rng.integers(0, vocabulary, num_rows), -1)
  return (
    normal(0, num_rows, features) * jnp.bfloat16(features**-0.5),
    normal(1, vocabulary, features),
    jnp.asarray(targets, jnp.int32),
    jnp.asarray(np.where(kind == 2, 0.0, 0.5 + rng.random(num_rows)), jnp.float32),
    jnp.asarray(rng.integers(0, 2**32, (num_rows, 2)), jnp.uint32),
  )


def _rows_of(inputs: tuple[Any, ...], rows: Any) -> tuple[Any, ...]:
  hidden, table, *rest = inputs
  return hidden[rows], table, *(x[rows] for x in rest)


def token_logprobs_checks(sizes: Sizes) -> Iterator[Check]:
  kernel = "token_logprobs"

  @functools.cache
  def of(**fields: Any) -> Callable[..., Any]:
    config = token_logprobs.Config(**fields)
    return jax.jit(
      functools.partial(token_logprobs.token_logprobs, config=config, interpret=sizes.interpret)
    )

  call = of()
  most, *fewer = sizes.scored_rows
  for features, vocabulary in sizes.tables:
    name = f"{most} rows, table [{vocabulary}, {features}]"
    inputs = scoring_inputs(most, features, vocabulary)
    found = call(*inputs)
    whole = jax.tree.map(np.asarray, found)
    expected = token_logprobs.reference(*inputs)
    same = int((whole.tokens == np.asarray(expected.tokens)).sum())
    yield Check(
      kernel, "agreement", f"tokens, {name}", same == most, f"{same} of {most} tokens are equal"
    )
    for field in ("logprob", "raw_logprob", "entropy"):
      got, want = getattr(found, field), getattr(expected, field)
      yield agreement(kernel, f"{field}, {name}", got, want, FLOAT32)
    yield same_bits(
      kernel,
      "invariance",
      f"alone, other numbers of rows, permuted, again; {name}",
      [
        (call(*_rows_of(inputs, rows)), type(whole)(*(x[rows] for x in whole)))
        for rows in (
          *(slice(0, count) for count in fewer),
          slice(most - 1, most),
          np.random.default_rng(2).permutation(most),
          slice(0, most),
        )
      ],
    )
  claims = ({"max_stages": 2}, {"snake_width": 1})
  for fields in claims:
    what = ", ".join(f"{field} {value} == 8" for field, value in fields.items())
    yield same_bits(kernel, "claim", what, [(of(**fields)(*inputs), whole)])
  yield from _token_logprobs_gradient_checks(sizes)


def _token_logprobs_gradient_checks(sizes: Sizes) -> Iterator[Check]:
  features, vocabulary = sizes.tables[0]
  vocabulary, most = min(vocabulary, GRADIENT_VOCABULARY), sizes.scored_rows[0]
  hidden, table, _, temperature, keys = scoring_inputs(most, features, vocabulary)
  targets = jnp.arange(most, dtype=jnp.int32)
  cotangents = normal(4, 3, most, dtype=jnp.float32)
  kernel = functools.partial(token_logprobs.token_logprobs, interpret=sizes.interpret)

  def gradients(function, hidden, table):
    scored = lambda hidden, table: function(hidden, table, targets, temperature, keys)[1:]
    scores, pull = jax.vjp(scored, hidden, table)
    return scores, *pull(tuple(cotangents))

  call = jax.jit(functools.partial(gradients, kernel))
  scores, dhidden, dtable = call(hidden, table)
  exact = [x.astype(jnp.float32) for x in (hidden, table)]
  _, *expected = gradients(token_logprobs.reference, *exact)
  for label, got, want in zip(("dhidden", "dtable"), (dhidden, dtable), expected):
    yield agreement("token_logprobs", f"{label}, {most} rows", got, want, GRADIENT)
  again = [(call(hidden, table), (scores, dhidden, dtable))]
  yield same_bits("token_logprobs", "invariance", "gradients again", again)


# ----- grouped_matmul


def random_experts(num_rows: int, num_experts: int) -> np.ndarray:
  """Returns each row's expert, i32[n], ascending; the last expert has no rows."""
  experts = np.random.default_rng(3).integers(0, num_experts - 1, num_rows)
  return np.sort(experts).astype(np.int32)


def sizes_of(experts: np.ndarray, num_experts: int) -> jax.Array:
  return jnp.asarray(np.bincount(experts, minlength=num_experts), jnp.int32)


def grouped_matmul_checks(sizes: Sizes) -> Iterator[Check]:
  kernel = "grouped_matmul"

  @functools.cache
  def of(**fields: Any) -> Callable[..., Any]:
    config = grouped_matmul.Config(**fields)
    return jax.jit(
      functools.partial(grouped_matmul.grouped_matmul, config=config, interpret=sizes.interpret)
    )

  call = of()
  for num_experts, k, n, num_rows in sizes.experts:
    name = f"{num_rows} rows, {num_experts} x [{k}, {n}]"
    x, w = normal(0, num_rows, k), normal(1, num_experts, k, n)
    experts = random_experts(num_rows, num_experts)
    counts = sizes_of(experts, num_experts)
    whole = np.asarray(call(x, counts, w))
    expected = grouped_matmul.reference(x, counts, w)
    yield agreement(kernel, name, whole, expected, BFLOAT16)
    rng = np.random.default_rng(4)
    # The same rows in another order within their experts, and half of the rows.
    order = np.lexsort((rng.random(num_rows), experts))
    some = np.sort(rng.permutation(num_rows)[: num_rows // 2])
    choices: list[Any] = [np.asarray([row]) for row in rng.integers(0, num_rows, 8)]
    choices += [order, some, np.arange(num_rows)]
    yield same_bits(
      kernel,
      "invariance",
      f"rows alone, permuted, with fewer others, again; {name}",
      [
        (call(x[chosen], sizes_of(experts[chosen], num_experts), w), whole[chosen])
        for chosen in choices
      ],
    )
    claims = ({"block_m": 64}, {"block_n": 128}, {"max_stages": 2}, {"snake_width": 1})
    for fields in claims:
      what = ", ".join(
        f"{field} {value} == {getattr(grouped_matmul.Config(), field)}"
        for field, value in fields.items()
      )
      found = of(**fields)(x, counts, w)
      yield same_bits(kernel, "claim", f"{what}; {name}", [(found, whole)])
  num_experts, k, n, num_rows = sizes.experts[0]
  x, w, dy = normal(0, num_rows, k), normal(1, num_experts, k, n), normal(2, num_rows, n)
  counts = sizes_of(random_experts(num_rows, num_experts), num_experts)

  def gradients(function: Callable[..., Any], x: jax.Array, w: jax.Array, dy: jax.Array) -> Any:
    return jax.vjp(lambda x, w: function(x, counts, w), x, w)[1](dy)

  found = jax.jit(functools.partial(gradients, call))(x, w, dy)
  exact = [array.astype(jnp.float32) for array in (x, w, dy)]
  expected = gradients(grouped_matmul.reference, *exact)
  for label, got, want in zip(("dx", "dw"), found, expected):
    yield agreement(kernel, f"{label}, {num_rows} rows", got, want, BFLOAT16)
