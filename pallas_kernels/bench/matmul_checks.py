"""Checks of matmul, of its slabs, and of grouped_matmul."""

from __future__ import annotations

from collections.abc import Callable, Iterator
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import grouped_matmul, matmul, matmul_parts
from pallas_kernels.bench import comparison
from pallas_kernels.bench.check_sizes import Sizes
from pallas_kernels.bench.comparison import Check, Kind


def matmul_expected(x: jax.Array, w: jax.Array) -> Any:
  if x.shape[0] * w.size <= comparison.HOST_PRODUCTS:
    return comparison.as_float64(x) @ comparison.as_float64(w)
  return matmul.reference(x, w)


def matmul_checks(sizes: Sizes) -> Iterator[Check]:
  check = functools.partial(comparison.same_bits, "matmul")
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
    x, w = comparison.normal(0, most, k), comparison.normal(1, k, n)
    name, call = f"[{k}, {n}] in {shards} shards", of(shards=shards)
    for rows in sizes.rows:
      yield comparison.agreement(
        "matmul",
        f"{rows} rows x {name}",
        call(x[:rows], w),
        matmul_expected(x[:rows], w),
        comparison.BFLOAT16,
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
  x, w, up = (
    comparison.normal(0, rows[-1], k),
    comparison.normal(1, k, n),
    comparison.normal(2, k, n),
  )
  yield comparison.agreement(
    "matmul", f"f32, [{k}, {n}]", single(x, w), matmul_expected(x, w), comparison.FLOAT32
  )
  more: dict[str, Any] = {
    "bias": comparison.normal(3, n),
    "residual": comparison.normal(4, rows[-1], n),
  }
  yield comparison.agreement(
    "matmul",
    "bias, residual and a transposed weight",
    _transposed(sizes)(x, w.T, **more),
    matmul.reference(x, w, **more),
    comparison.BFLOAT16,
  )
  pair = jax.jit(functools.partial(matmul.swiglu, interpret=sizes.interpret))
  scaled = x * jnp.bfloat16(k**-0.5)
  gated = np.asarray(pair(scaled, w, up))
  yield comparison.agreement(
    "matmul", "swiglu", gated, matmul.swiglu_reference(scaled, w, up), comparison.BFLOAT16
  )
  yield check(
    "invariance",
    f"swiglu, {rows[0]} of {rows[-1]} rows",
    [(pair(scaled[: rows[0]], w, up), gated[: rows[0]])],
  )

  @jax.jit
  def with_gradient(x, w, dy):
    y, pull = jax.vjp(functools.partial(matmul.matmul, interpret=sizes.interpret), x, w)
    return y, *pull(dy)

  dy = comparison.normal(5, rows[-1], n)
  y, dx, dw = with_gradient(x, w, dy)
  yield comparison.agreement(
    "matmul", "dx", dx, matmul.reference(dy, w, transposed=True), comparison.BFLOAT16
  )
  yield comparison.agreement("matmul", "dw", dw, matmul.reference(x.T, dy), comparison.BFLOAT16)
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
  stream, w = comparison.normal(6, most, n), w.reshape(slabs, k // slabs, n)

  @functools.partial(jax.jit, static_argnames=("mode", "out_dtype"))
  def call(x, w, stream=None, *, mode="auto", out_dtype=None):
    config = matmul.Config(mode=mode)
    return matmul.contract_slabs(
      x, w, stream=stream, out_dtype=out_dtype, config=config, interpret=sizes.interpret
    )

  expected = matmul_expected(x, w.reshape(k, n))
  yield comparison.agreement(
    "matmul", f"{most} rows x {name}", call(x, w), expected, comparison.BFLOAT16
  )
  # Parts are apart for few rows, and not for many.
  whole = np.asarray(call(x, w, stream))
  rows = sorted({rows for _, sweep in sizes.sweeps for rows in (sweep[0], sweep[-1])})
  yield comparison.same_bits(
    "matmul",
    "invariance",
    f"{', '.join(map(str, rows))} rows onto a stream, {name}",
    ((call(x[:count], w, stream[:count]), whole[:count]) for count in rows),
  )
  some = x[: sizes.claim_rows]
  together, apart = (call(some, w, mode=mode) for mode in ("sequential", "parallel"))
  yield comparison.same_bits(
    "matmul", "claim", f"mode parallel == sequential, {name}", [(apart, together)]
  )
  half = (slabs // 2, k // 2)
  halves = [
    call(some[:, i * half[1] : (i + 1) * half[1]], w[i * half[0] :][: half[0]], out_dtype="float32")
    for i in range(2)
  ]
  added = matmul_parts.add_partials(
    jnp.stack(halves), out_dtype=jnp.bfloat16, interpret=sizes.interpret
  )
  yield comparison.same_bits("matmul", "claim", f"two devices == one, {name}", [(added, together)])


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
      yield comparison.same_bits("matmul", kind, what, [(left, right)])


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
    x, w = comparison.normal(0, num_rows, k), comparison.normal(1, num_experts, k, n)
    experts = random_experts(num_rows, num_experts)
    counts = sizes_of(experts, num_experts)
    whole = np.asarray(call(x, counts, w))
    expected = grouped_matmul.reference(x, counts, w)
    yield comparison.agreement(kernel, name, whole, expected, comparison.BFLOAT16)
    rng = np.random.default_rng(4)
    # The same rows in another order within their experts, and half of the rows.
    order = np.lexsort((rng.random(num_rows), experts))
    some = np.sort(rng.permutation(num_rows)[: num_rows // 2])
    choices: list[Any] = [np.asarray([row]) for row in rng.integers(0, num_rows, 8)]
    choices += [order, some, np.arange(num_rows)]
    yield comparison.same_bits(
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
      yield comparison.same_bits(kernel, "claim", f"{what}; {name}", [(found, whole)])
  num_experts, k, n, num_rows = sizes.experts[0]
  x, w, dy = (
    comparison.normal(0, num_rows, k),
    comparison.normal(1, num_experts, k, n),
    comparison.normal(2, num_rows, n),
  )
  counts = sizes_of(random_experts(num_rows, num_experts), num_experts)

  def gradients(function: Callable[..., Any], x: jax.Array, w: jax.Array, dy: jax.Array) -> Any:
    return jax.vjp(lambda x, w: function(x, counts, w), x, w)[1](dy)

  found = jax.jit(functools.partial(gradients, call))(x, w, dy)
  exact = [array.astype(jnp.float32) for array in (x, w, dy)]
  expected = gradients(grouped_matmul.reference, *exact)
  for label, got, want in zip(("dx", "dw"), found, expected):
    yield comparison.agreement(kernel, f"{label}, {num_rows} rows", got, want, comparison.BFLOAT16)
