"""The triangle multiplication: its definition, and the program of a schedule."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from experiments.problems.kernel_speed.schedules import Schedule

NORM_EPSILON = 1e-5
NUM_PROJECTIONS = 5

# Groups that share one matmul, of: left, right, left's gate, right's gate, output gate.
_GROUPS = {
  "separate": ((0,), (1,), (2,), (3,), (4,)),
  "pairs": ((0, 1), (2, 3), (4,)),
  "sides": ((0, 2), (1, 3), (4,)),
  "four": ((0, 1, 2, 3), (4,)),
  "five": ((0, 1, 2, 3, 4),),
}


class Inputs(NamedTuple):
  """Arguments of the triangle multiplication.

  Attributes:
    x: f32[n, n, c].
    mask: f32[n, n] of 0 and 1.
    norm_scale, norm_bias: f32[c].
    projections: f32[5, c, h]: left, right, left's gate, right's gate, output gate.
    output_scale, output_bias: f32[h].
    output_projection: f32[h, c].
  """

  x: jax.Array
  mask: jax.Array
  norm_scale: jax.Array
  norm_bias: jax.Array
  projections: jax.Array
  output_scale: jax.Array
  output_bias: jax.Array
  output_projection: jax.Array


def draw(seed: int, kind: str, *, size: int, dim: int, hidden: int) -> Inputs:
  """Returns random arguments on the device.

  Args:
    seed: at least 0.
    kind: one of `KINDS`; "normal" masks nothing, the others one pair in ten.
    size, dim, hidden: n, c, h.
  """
  rng = np.random.Generator(np.random.PCG64(seed))

  def normal(*shape: int, scale: float = 1.0, mean: float = 0.0) -> jax.Array:
    return jnp.asarray(mean + scale * rng.standard_normal(shape, dtype=np.float32), jnp.float32)

  if kind == "cauchy":
    # Larger tails would only test overflow.
    tails = np.clip(2 * rng.standard_cauchy((size, size, dim)), -1e6, 1e6)
    x = jnp.asarray(tails, jnp.float32)
  else:
    x = normal(size, size, dim)
  kept = 1.0 if kind == "normal" else 0.9
  inputs = Inputs(
    x=x,
    mask=jnp.asarray(rng.random((size, size)) < kept, jnp.float32),
    norm_scale=normal(dim, scale=0.1, mean=1.0),
    norm_bias=normal(dim, scale=0.1),
    projections=normal(NUM_PROJECTIONS, dim, hidden, scale=dim**-0.5),
    output_scale=normal(hidden, scale=0.1, mean=1.0),
    output_bias=normal(hidden, scale=0.1),
    output_projection=normal(hidden, dim, scale=hidden**-0.5),
  )
  return jax.block_until_ready(inputs)


def reference(inputs: Inputs) -> jax.Array:
  """Returns the result by definition, f32[n, n, c]."""

  def norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    mean = x.mean(axis=-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(axis=-1, keepdims=True)
    normed = (x - mean) * lax.rsqrt(variance + NORM_EPSILON)
    return normed * scale[None, None, :] + bias[None, None, :]

  y = norm(inputs.x, inputs.norm_scale, inputs.norm_bias)
  left, right, left_gate, right_gate, gate = (y @ w for w in inputs.projections)
  left = left * inputs.mask[:, :, None] * jax.nn.sigmoid(left_gate)
  right = right * inputs.mask[:, :, None] * jax.nn.sigmoid(right_gate)
  summed = jnp.einsum("ikd,jkd->ijd", left, right)
  normed = norm(summed, inputs.output_scale, inputs.output_bias)
  return (normed * jax.nn.sigmoid(gate)) @ inputs.output_projection


# Shared by all environments, so that it compiles once per size.
compiled_reference = jax.jit(reference)


def trimul(schedule: Schedule, inputs: Inputs) -> jax.Array:
  """Returns the same as `reference`, f32[n, n, c], computed according to the schedule."""
  size, _, dim = inputs.x.shape
  rows, mask = inputs.x.reshape(size * size, dim), inputs.mask.reshape(size * size)
  parts = [
    _project(schedule, part, kept, inputs)
    for part, kept in zip(
      _pieces(rows, schedule.row_chunks, 0), _pieces(mask, schedule.row_chunks, 0)
    )
  ]
  axis = 0 if schedule.layout == "rows" else 1
  left, right, gate = (jnp.concatenate(pieces, axis=axis) for pieces in zip(*parts))
  summed, layout = _contract(schedule, left, right, size)
  summed = _oriented(summed, layout, schedule.output_layout)
  gate = _oriented(gate, schedule.layout, schedule.output_layout)
  axis = 0 if schedule.output_layout == "rows" else 1
  finished = [
    _finish(schedule, part, part_gate, inputs)
    for part, part_gate in zip(
      _pieces(summed, schedule.output_chunks, axis), _pieces(gate, schedule.output_chunks, axis)
    )
  ]
  return jnp.concatenate(finished, axis=0).reshape(size, size, dim)


def _project(
  schedule: Schedule, rows: jax.Array, mask: jax.Array, inputs: Inputs
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns left, right and the activated output gate, each in `schedule.layout`."""
  is_rows = schedule.layout == "rows"
  dtype = jnp.dtype(schedule.projection_dtype)
  is_folded = schedule.input_norm == "folded"
  form = "dot" if is_folded else schedule.input_norm
  mean, inverse = _moments(rows, form, 1)
  if is_folded:
    y = rows
  else:
    y = (rows - mean) * inverse * inputs.norm_scale[None, :] + inputs.norm_bias[None, :]
    if schedule.barriers == "all":
      y = lax.optimization_barrier(y)
  if not is_rows:
    mean, inverse = mean.reshape(1, -1), inverse.reshape(1, -1)

  def along(vector: jax.Array) -> jax.Array:
    """Returns a per-feature vector, shaped to broadcast with `linear`'s result."""
    return vector[None, :] if is_rows else vector[:, None]

  def linear(weights: jax.Array) -> jax.Array:
    scaled = inputs.norm_scale[:, None] * weights if is_folded else weights
    pair = (y, scaled) if is_rows else (scaled, y)
    axes = ((1,), (0,)) if is_rows else ((0,), (1,))
    result = _dot(*pair, (axes, ((), ())), dtype)
    if not is_folded:
      return result
    centred = (result - mean * along(scaled.sum(axis=0))) * inverse
    return centred + along(inputs.norm_bias @ weights)

  results: list[Any] = [None] * NUM_PROJECTIONS
  for group in _GROUPS[schedule.projections]:
    weights = jnp.concatenate([inputs.projections[place] for place in group], axis=1)
    parts = _pieces(linear(weights), len(group), 1 if is_rows else 0)
    for place, part in zip(group, parts):
      results[place] = part
  kept = mask[:, None] if is_rows else mask[None, :]
  left = results[0] * kept * _sigmoid(results[2], schedule.sigmoid)
  right = results[1] * kept * _sigmoid(results[3], schedule.sigmoid)
  return left, right, _sigmoid(results[4], schedule.sigmoid)


def _contract(
  schedule: Schedule, left: jax.Array, right: jax.Array, size: int
) -> tuple[jax.Array, str]:
  """Returns sum over k of left[i, k] right[j, k] as a matrix, and its layout."""
  dtype = jnp.dtype(schedule.contraction_dtype)
  is_einsum, is_rows = schedule.contraction == "einsum", schedule.layout == "rows"
  if not is_einsum:
    left, right = (_oriented(x, schedule.layout, "features") for x in (left, right))
    is_rows = False
  if schedule.barriers != "none":
    left, right = lax.optimization_barrier((left, right))
  axis = 1 if is_rows else 0
  pieces = []
  for a, b in zip(
    _pieces(left, schedule.hidden_chunks, axis), _pieces(right, schedule.hidden_chunks, axis)
  ):
    if is_rows:
      shaped = (x.reshape(size, size, -1).astype(dtype) for x in (a, b))
      summed = jnp.einsum("ikd,jkd->ijd", *shaped, preferred_element_type=jnp.float32)
      pieces.append(summed.reshape(size * size, -1))
      continue
    a, b = a.reshape(-1, size, size), b.reshape(-1, size, size)
    if is_einsum:
      a, b = a.astype(dtype), b.astype(dtype)
      summed = jnp.einsum("dik,djk->ijd", a, b, preferred_element_type=jnp.float32)
      pieces.append(summed.reshape(size * size, -1))
      continue
    last = 2
    if schedule.contraction == "transposed":
      # Without the barrier XLA would fold the transposition into the matmul.
      b, last = lax.optimization_barrier(b.swapaxes(1, 2)), 1
    summed = _dot(a, b, (((2,), (last,)), ((0,), (0,))), dtype)
    pieces.append(summed.reshape(-1, size * size))
  layout = "rows" if is_einsum else "features"
  summed = jnp.concatenate(pieces, axis=1 if layout == "rows" else 0)
  return (summed if schedule.barriers == "none" else lax.optimization_barrier(summed)), layout


def _finish(schedule: Schedule, summed: jax.Array, gate: jax.Array, inputs: Inputs) -> jax.Array:
  """Returns the normalised, gated and projected result, f32[rows, c]."""
  is_rows = schedule.output_layout == "rows"
  features = 1 if is_rows else 0
  mean, inverse = _moments(summed, schedule.output_norm, features)
  scale = jnp.expand_dims(inputs.output_scale, 1 - features)
  bias = jnp.expand_dims(inputs.output_bias, 1 - features)
  gated = ((summed - mean) * inverse * scale + bias) * gate
  axes = (((features,), (0,)), ((), ()))
  return _dot(gated, inputs.output_projection, axes, jnp.dtype(schedule.projection_dtype))


def _moments(x: jax.Array, form: str, axis: int) -> tuple[jax.Array, jax.Array]:
  """Returns the mean and 1 / standard deviation along one of two axes, which keeps length 1."""
  if form == "dot":
    share = jnp.full((1, x.shape[axis]), 1 / x.shape[axis], x.dtype)
    sums = (lambda v: share @ v) if axis == 0 else (lambda v: v @ share.T)
    mean = sums(x)
    variance = sums((x - mean) ** 2)
  elif form == "one_pass":
    mean = x.mean(axis=axis, keepdims=True)
    variance = (x * x).mean(axis=axis, keepdims=True) - mean * mean
  else:
    mean = x.mean(axis=axis, keepdims=True)
    variance = ((x - mean) ** 2).mean(axis=axis, keepdims=True)
  return mean, lax.rsqrt(jnp.maximum(variance, 0.0) + NORM_EPSILON)


def _dot(a: jax.Array, b: jax.Array, axes: Any, dtype: Any) -> jax.Array:
  return lax.dot_general(a.astype(dtype), b.astype(dtype), axes, preferred_element_type=jnp.float32)


def _sigmoid(x: jax.Array, form: str) -> jax.Array:
  match form:
    case "tanh":
      return 0.5 * jnp.tanh(0.5 * x) + 0.5
    case "exp":
      return 1 / (1 + jnp.exp(-x))
    case _:
      return jax.nn.sigmoid(x)


def _oriented(x: jax.Array, layout: str, wanted: str) -> jax.Array:
  return x if layout == wanted else x.T


def _pieces(x: jax.Array, count: int, axis: int) -> list[jax.Array]:
  return [x] if count == 1 else jnp.split(x, count, axis=axis)
