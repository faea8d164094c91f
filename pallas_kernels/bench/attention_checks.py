"""Checks of attention and of its gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import attention
from pallas_kernels.bench import comparison
from pallas_kernels.bench.check_sizes import Sizes
from pallas_kernels.bench.comparison import Check

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
      more = {"window": window, "sinks": 3 * comparison.normal(5, heads, group, dtype=jnp.float32)}
    name = f"{heads} x {group} heads of {head_dim}" + (", window and sinks" if more else "")
    sequences = Sequences.normal(heads, group, head_dim, sizes.context)
    yield from _attention_checks(sizes, sequences, name, more)


def _attention_checks(
  sizes: Sizes, sequences: Sequences, name: str, more: dict[str, Any]
) -> Iterator[Check]:
  check = functools.partial(comparison.same_bits, "attention")
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
  expected = comparison.as_float64(attention.reference(*batch, **more))
  found = np.stack([prefill[s, first] for s, first in places])
  yield comparison.agreement("attention", f"prefill, {name}", found, expected, comparison.ATTENTION)
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
  do = comparison.normal(12, *q.shape)

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
      yield comparison.same_bits("attention", "agreement", what, [(got[:, unread], zeros)])
      got, want = got[:, read], want[:, read]
    yield comparison.agreement(
      "attention", f"{label}, {num_rows} rows, {name}", got, want, comparison.GRADIENT
    )
  yield comparison.same_bits(
    "attention",
    "invariance",
    f"gradients again, {name}",
    [(kernel(q, k, v), (out, found))],
  )
