"""Checks of the kernels of single rows: rms_norm and token_logprobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import rms_norm, token_logprobs
from pallas_kernels.bench import comparison
from pallas_kernels.bench.check_sizes import Sizes
from pallas_kernels.bench.comparison import Check

# Gradients of the vocabulary use two chunks, the second one shorter.
GRADIENT_VOCABULARY = 20480


def rms_norm_checks(sizes: Sizes) -> Iterator[Check]:
  check = functools.partial(comparison.same_bits, "rms_norm")
  most = max(sizes.rows)

  def of(**fields: Any) -> Callable[..., jax.Array]:
    config = rms_norm.Config(**fields)
    return jax.jit(functools.partial(rms_norm.rms_norm, config=config, interpret=sizes.interpret))

  call = of()
  add = jax.jit(functools.partial(rms_norm.add_rms_norm, interpret=sizes.interpret))
  for features in sizes.features:
    scale = comparison.normal(1, features)
    for dtype, limits in ((jnp.bfloat16, comparison.BFLOAT16), (jnp.float32, comparison.FLOAT32)):
      x = comparison.normal(0, most, features, dtype=dtype)
      name = f"{most} rows of {features}, {jnp.dtype(dtype)}"
      whole = np.asarray(call(x, scale))
      yield comparison.agreement("rms_norm", name, whole, rms_norm.reference(x, scale), limits)
      order = np.random.default_rng(2).permutation(most)
      yield check(
        "invariance",
        f"alone, other numbers of rows, permuted, again; {name}",
        [(call(x[:rows], scale), whole[:rows]) for rows in sorted(sizes.rows)]
        + [(call(x[-1:], scale), whole[-1:]), (call(x[order], scale), whole[order])],
      )
    x, residual = comparison.normal(0, most, features), comparison.normal(2, most, features)
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
    comparison.normal(i, *shape, dtype=jnp.float32)
    for i, shape in enumerate(((most, features), (features,)))
  )
  dy = comparison.normal(3, most, features, dtype=jnp.float32)
  found = gradients(x, scale, dy)
  for name, got, want in zip(("dx", "dscale"), found, jax.vjp(rms_norm.reference, x, scale)[1](dy)):
    yield comparison.agreement(
      "rms_norm", f"{name}, {most} rows of {features}, float32", got, want, comparison.FLOAT32
    )
  yield check("invariance", "gradients again", [(gradients(x, scale, dy), found)])


def scoring_inputs(num_rows: int, features: int, vocabulary: int) -> tuple[Any, ...]:
  """Returns arguments of token_logprobs; rows are scored, sampled and greedy in turn."""
  rng = np.random.default_rng(3)
  kind = np.arange(num_rows) % 3
  targets = np.where(kind == 0, rng.integers(0, vocabulary, num_rows), -1)
  return (
    comparison.normal(0, num_rows, features) * jnp.bfloat16(features**-0.5),
    comparison.normal(1, vocabulary, features),
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
      yield comparison.agreement(kernel, f"{field}, {name}", got, want, comparison.FLOAT32)
    yield comparison.same_bits(
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
    yield comparison.same_bits(kernel, "claim", what, [(of(**fields)(*inputs), whole)])
  yield from _token_logprobs_gradient_checks(sizes)


def _token_logprobs_gradient_checks(sizes: Sizes) -> Iterator[Check]:
  features, vocabulary = sizes.tables[0]
  vocabulary, most = min(vocabulary, GRADIENT_VOCABULARY), sizes.scored_rows[0]
  hidden, table, _, temperature, keys = scoring_inputs(most, features, vocabulary)
  targets = jnp.arange(most, dtype=jnp.int32)
  cotangents = comparison.normal(4, 3, most, dtype=jnp.float32)
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
    yield comparison.agreement(
      "token_logprobs", f"{label}, {most} rows", got, want, comparison.GRADIENT
    )
  again = [(call(hidden, table), (scores, dhidden, dtable))]
  yield comparison.same_bits("token_logprobs", "invariance", "gradients again", again)
