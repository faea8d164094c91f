"""The native backend's arithmetic in NumPy: float32 operations in the order that it defines.

Denormal results become zero, as on XLA's threads. Nothing here is fast.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from seerjax.ops.attention import CAUSAL, AttentionRule

LANES = 16


def flush(x: np.ndarray) -> np.ndarray:
  """Returns f32[...] with denormals replaced by zeros of the same sign."""
  x = np.asarray(x, np.float32)
  return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
  """Returns fused a * b + c of float32: rounding float64 to odd makes the second rounding exact."""
  a, b, c = (flush(x).astype(np.float64) for x in np.broadcast_arrays(a, b, c))
  product = a * b  # Exact: 48 bits.
  total = product + c
  part = total - product
  error = (product - (total - part)) + (c - part)
  bits = total.view(np.int64)
  is_even = (bits & 1) == 0
  toward = np.where((error > 0) == (total > 0), bits + 1, bits - 1)
  is_inexact = (error != 0) & np.isfinite(total)
  odd = np.where(is_inexact & is_even, toward, bits).view(np.float64)
  with np.errstate(over="ignore"):
    return flush(odd.astype(np.float32))


def product(a: np.ndarray, w: np.ndarray, start: np.ndarray | None = None) -> np.ndarray:
  """Returns f32[n, k] @ f[k, e]: a chain of fused multiply-adds per output, in ascending k."""
  a, w = np.asarray(a, np.float32), np.asarray(w).astype(np.float32)
  total = np.zeros((a.shape[0], w.shape[1]), np.float32) if start is None else start
  for step in range(a.shape[1]):
    total = fma(a[:, step : step + 1], w[step : step + 1], total)
  return total


def _lanes(x: np.ndarray) -> np.ndarray:
  """Reshapes [..., n] to [..., n / 16, 16], padded with zeros."""
  missing = -x.shape[-1] % LANES
  x = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])
  return x.reshape(*x.shape[:-1], -1, LANES)


def _tree(x: np.ndarray) -> np.ndarray:
  """Reduces [..., 16] to [...] by adding halves four times."""
  while x.shape[-1] > 1:
    half = x.shape[-1] // 2
    x = flush(x[..., :half] + x[..., half:])
  return x[..., 0]


def total(x: np.ndarray) -> np.ndarray:
  """Sums the last axis: 16 partial sums by index mod 16, then the tree."""
  lanes = _lanes(np.asarray(x, np.float32))
  sums = np.zeros(lanes.shape[:-2] + (LANES,), np.float32)
  for step in range(lanes.shape[-2]):
    sums = flush(sums + flush(lanes[..., step, :]))
  return _tree(sums)


def dot(x: np.ndarray, y: np.ndarray) -> np.ndarray:
  """Sums x * y as `total` does, each product fused with its addition."""
  left, right = _lanes(np.asarray(x, np.float32)), _lanes(np.asarray(y, np.float32))
  sums = np.zeros(np.broadcast_shapes(left.shape, right.shape)[:-2] + (LANES,), np.float32)
  for step in range(left.shape[-2]):
    sums = fma(left[..., step, :], right[..., step, :], sums)
  return _tree(sums)


def tree_sum(parts: np.ndarray) -> np.ndarray:
  """Sums the first axis, a power of two of slabs, in neighbouring pairs (`parallel.tree_sum`)."""
  while parts.shape[0] > 1:
    parts = flush(parts[0::2] + parts[1::2])
  return parts[0]


def exp(x: np.ndarray) -> np.ndarray:
  """`native.numbers.exp`."""
  f = np.float32
  x = flush(x)
  inside = np.clip(x, f(-87.3), f(88.0))
  shifted = fma(inside, f(1.44269504), f(12582912.0))
  n = flush(shifted - f(12582912.0))
  r = fma(n, f(2.12194440e-4), fma(n, f(-0.693359375), inside))
  y = np.full_like(r, f(1.9875691500e-4))
  for coefficient in (
    1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1
  ):  # fmt: skip
    y = fma(y, r, f(coefficient))
  y = flush(fma(y, flush(r * r), r) + f(1))
  exponent = shifted.view(np.int32) - np.int32(0x4B400000)
  y = flush(y * ((exponent + np.int32(127)) << np.int32(23)).astype(np.int32).view(np.float32))
  return np.where(np.isnan(x), x, np.where(x >= f(-87.3), y, f(0)))


def tanh(x: np.ndarray) -> np.ndarray:
  """`native.numbers.tanh`."""
  f, x = np.float32, flush(x)
  size, z = np.abs(x), flush(x * x)
  y = np.full_like(x, f(-5.70498872745e-3))
  for coefficient in (2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1):
    y = fma(y, z, f(coefficient))
  large = f(1) - flush(f(2) / (exp(flush(size + size)) + f(1)))
  return np.where(size < f(0.625), fma(flush(y * z), x, x), np.copysign(large, x))


def log(x: np.ndarray) -> np.ndarray:
  """`native.numbers.log`."""
  f = np.float32
  bits = np.asarray(x, np.float32).view(np.int32)
  exponent = (bits - np.int32(0x3F3504F3)) >> np.int32(23)
  m = (bits - (exponent << np.int32(23))).astype(np.int32).view(np.float32) - f(1)
  z = flush(m * m)
  y = np.full_like(m, f(7.0376836292e-2))
  for coefficient in (
    -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1,
    2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
  ):  # fmt: skip
    y = fma(y, m, f(coefficient))
  y = flush(flush(y * m) * z)
  e = exponent.astype(np.float32)
  y = fma(z, f(-0.5), fma(e, f(-2.12194440e-4), y))
  return fma(e, f(0.693359375), flush(m + y))


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
  """Returns f32 values rounded to the compute dtype, as f32."""
  return flush(x.astype(ml_dtypes.bfloat16).astype(np.float32)) if dtype == "bfloat16" else x


def scaled_queries(q: np.ndarray, dtype: str, rule: AttentionRule = CAUSAL) -> np.ndarray:
  """Returns f32[..., c] times the rule's factor, rounded to the compute dtype."""
  return rounded(flush(flush(q) * np.float32(rule.factor(q.shape[-1]))), dtype)


def softmax(
  q: np.ndarray, keys: np.ndarray, rule: AttentionRule = CAUSAL, sink: np.float32 | None = None
) -> tuple[np.ndarray, np.float32, np.ndarray, np.float32]:
  """Returns a softmax of the scores of q f32[c] and keys f32[x, c], before it is divided.

  Returns:
    (exponentials f32[x], the sum that divides them, derivatives of capped scores f32[x], the
    exponential of the sink: 0 if there is none).
  """
  scores, slopes = product(keys, q[:, None])[:, 0], np.ones(keys.shape[0], np.float32)
  if rule.soft_cap is not None:
    y = tanh(flush(scores / np.float32(rule.soft_cap)))
    scores, slopes = flush(np.float32(rule.soft_cap) * y), flush(np.float32(1) - flush(y * y))
  maximum = np.max(scores) if sink is None else max(np.max(scores), sink)
  weights = exp(flush(scores - maximum))
  of_sink = np.float32(0) if sink is None else exp(flush(sink - maximum))[()]
  return weights, flush(total(weights) + of_sink), slopes, of_sink


def seen(rule: AttentionRule, count: int) -> slice:
  """Returns the keys that the row after `count` keys sees."""
  return slice(0 if rule.window is None else max(count - rule.window, 0), count)


def attention(
  q: np.ndarray, keys: np.ndarray, values: np.ndarray, dtype: str,
  rule: AttentionRule = CAUSAL, sink: np.float32 | None = None,
) -> np.ndarray:  # fmt: skip
  """Returns one row's attention f32[c]: q f32[c], scaled here, up to the last of f32[x, c]."""
  own = seen(rule, keys.shape[0])
  weights, sums, *_ = softmax(scaled_queries(q, dtype, rule), keys[own], rule, sink)
  weights = rounded(weights, dtype)
  chains = np.zeros((4, q.shape[0]), np.float32)
  for position, weight in enumerate(weights, own.start):
    chains[position % 4] = fma(weight, values[position], chains[position % 4])
  whole = flush(flush(chains[0] + chains[1]) + flush(chains[2] + chains[3]))
  return rounded(flush(whole / sums), dtype)


def attention_gradients(
  q: np.ndarray, keys: np.ndarray, values: np.ndarray, back: np.ndarray, dtype: str,
  grad_keys: np.ndarray, grad_values: np.ndarray, rule: AttentionRule = CAUSAL,
  sink: np.float32 | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.float32]:  # fmt: skip
  """Returns one row's part of the gradients, given the cotangent `back` f32[c] of its attention.

  Returns:
    f32[c] of q; `grad_keys` and `grad_values` f32[x, c] with the row's part added at the end of the
    chains of the keys that it sees; minus its part of the sink's gradient.
  """
  own = seen(rule, keys.shape[0])
  q, keys = scaled_queries(q, dtype, rule), keys[own]
  weights, sums, cap_slopes, of_sink = softmax(q, keys, rule, sink)
  weights = flush(weights / sums)
  slopes = product(values[own], back[:, None])[:, 0]
  inner = dot(weights, slopes)
  slopes = flush(flush(weights * flush(slopes - inner)) * cap_slopes)
  grad_q = flush(product(slopes[None], keys)[0] * np.float32(rule.factor(q.shape[0])))
  grad_keys, grad_values = grad_keys.copy(), grad_values.copy()
  grad_keys[own] = fma(slopes[:, None], q[None], grad_keys[own])
  grad_values[own] = fma(weights[:, None], back[None], grad_values[own])
  return rounded(grad_q, dtype), grad_keys, grad_values, flush(flush(of_sink / sums) * inner)
