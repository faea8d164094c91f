"""A layer's handlers other than attention in NumPy, forward and backward, with their exact chains.

Weights, rows and results are float32 arrays with values of the compute dtype.
"""

from __future__ import annotations

from typing import Any

import native_reference as reference
import numpy as np

f32 = np.float32
Weights = dict[str, Any]


def _normed(x: np.ndarray, scale: np.ndarray, eps: float, dtype: str) -> np.ndarray:
  inverse = f32(1) / np.sqrt(reference.dot(x, x) / f32(x.shape[-1]) + f32(eps))
  return reference.rounded(reference.rounded(x * inverse[..., None], dtype) * scale, dtype)


def _norm_gradient(
  x: np.ndarray, scale: np.ndarray, eps: float, dtype: str, given: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Returns (gradient of the rows, each row's part of the scale's gradient)."""
  inverse = f32(1) / np.sqrt(reference.dot(x, x) / f32(x.shape[-1]) + f32(eps))
  wide = inverse[..., None]
  part = reference.rounded(reference.rounded(x * wide, dtype) * given, dtype)
  row = reference.rounded(given * scale, dtype)
  along = reference.dot(row, x) / f32(x.shape[-1]) * (inverse * inverse * inverse)
  return reference.rounded(row * wide - x * along[..., None], dtype), part


def _low(product: np.ndarray, adapter: Weights, dtype: str) -> np.ndarray:
  return reference.rounded(product * adapter["scale"], dtype)


def _shared_low(weights: Weights, name: str, normed: np.ndarray, dtype: str) -> np.ndarray | None:
  """Returns the scaled and rounded x @ A of a column adapter, None without one."""
  if f"{name}_lora" not in weights:
    return None
  own = weights[f"{name}_lora"]
  return _low(reference.product(normed, own["a"]), own, dtype)


def _columns(
  weights: Weights, name: str, slab: int, normed: np.ndarray, low: np.ndarray | None
) -> np.ndarray:
  out = reference.product(normed, weights[name][slab])
  return out if low is None else reference.product(low, weights[f"{name}_lora"]["b"][slab], out)


def _columns_gradient(
  weights: Weights, name: str, normed: np.ndarray, given: list[np.ndarray], dtype: str
) -> tuple[np.ndarray, Weights]:
  """Maps cotangents of every slab's columns to (cotangent of their inputs, weight gradients)."""
  back = [reference.product(g, w.T) for g, w in zip(given, weights[name], strict=True)]
  total, gradient = reference.tree_sum(np.stack(back)), {}
  gradient[name] = np.stack([_chain(normed, g) for g in given])
  if f"{name}_lora" in weights:
    own = weights[f"{name}_lora"]
    low = _shared_low(weights, name, normed, dtype)
    lows = [reference.product(g, b.T) for g, b in zip(given, own["b"], strict=True)]
    of_low = reference.rounded(reference.tree_sum(np.stack(lows)), dtype) * own["scale"]
    total = reference.product(of_low, own["a"].T, total)
    of_b = np.stack([_chain(low, g) for g in given])
    gradient[f"{name}_lora"] = {"a": _chain(normed, of_low), "b": of_b}
  return reference.rounded(total, dtype), gradient


def _chain(x: np.ndarray, given: np.ndarray) -> np.ndarray:
  """Returns x^T @ given: one chain over rows."""
  return reference.product(np.ascontiguousarray(x.T), given)


def _row_sum(x: np.ndarray) -> np.ndarray:
  return _chain(np.ones((x.shape[0], 1), f32), x)[0]


def _contracted(
  weights: Weights, name: str, inputs: list[np.ndarray], dtype: str
) -> tuple[np.ndarray, np.ndarray | None]:
  """Returns (the slab tree of inputs @ W plus the adapter's term, the adapter's x @ A)."""
  parts = [reference.product(x, w) for x, w in zip(inputs, weights[name], strict=True)]
  total, low = reference.tree_sum(np.stack(parts)), None
  if f"{name}_lora" in weights:
    own = weights[f"{name}_lora"]
    lows = [reference.product(x, a) for x, a in zip(inputs, own["a"], strict=True)]
    low = _low(reference.tree_sum(np.stack(lows)), own, dtype)
    total = reference.product(low, own["b"], total)
  return reference.rounded(total, dtype), low


def _contracted_gradient(
  weights: Weights,
  name: str,
  inputs: list[np.ndarray],
  low: np.ndarray | None,
  given: np.ndarray,
  dtype: str,
) -> tuple[list[np.ndarray], Weights]:
  """Maps the cotangent of a slab sum to (cotangents of the slabs' inputs, weight gradients)."""
  back = [reference.product(given, w.T) for w in weights[name]]
  gradient: Weights = {name: np.stack([_chain(x, given) for x in inputs])}
  if low is not None:
    own = weights[f"{name}_lora"]
    of_low = reference.rounded(reference.product(given, own["b"].T), dtype) * own["scale"]
    back = [reference.product(of_low, a.T, b) for a, b in zip(own["a"], back, strict=True)]
    of_a = np.stack([_chain(x, of_low) for x in inputs])
    gradient[f"{name}_lora"] = {"a": of_a, "b": _chain(low, given)}
  return [reference.rounded(part, dtype) for part in back], gradient


def _heads(weights: Weights, slab: int, normed: np.ndarray, low: Any, dtype: str, c: int):
  """Returns f32[n, heads, c] of a slab, before norms."""
  qkv = reference.rounded(_columns(weights, "qkv", slab, normed, low), dtype)
  if "qkv_bias" in weights:
    qkv = reference.rounded(qkv + weights["qkv_bias"][slab], dtype)
  return qkv.reshape(qkv.shape[0], -1, c)


def _turned(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
  a, b = np.split(x, 2, axis=-1)
  cos, sin = cos[:, None], sin[:, None]
  return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def attention_inputs(shape: Any, dtype: str, weights: Weights, rows: Any) -> tuple:
  """Returns queries, keys and values."""
  x, cos, sin = rows
  n, c, group = x.shape[0], shape.kind.attention.head_dim, shape.kind.attention.group
  normed = _normed(x, weights["attention_norm"], shape.norm_eps, dtype)
  low = _shared_low(weights, "qkv", normed, dtype)
  outputs = []
  for slab in range(weights["qkv"].shape[0]):
    heads = _heads(weights, slab, normed, low, dtype, c)
    own = heads.shape[1] // (group + 2)
    q, k, v = np.split(heads, (own * group, own * (group + 1)), axis=1)
    turned = []
    for part, name in ((q, "query_norm"), (k, "key_norm")):
      if name in weights:
        part = _normed(part, weights[name], shape.norm_eps, dtype)
      turned.append(reference.rounded(_turned(part, cos, sin), dtype))
    outputs.append((turned[0].reshape(n, own, group, c), turned[1], v))
  return tuple(np.concatenate(parts, axis=1) for parts in zip(*outputs, strict=True))


def attention_inputs_gradient(
  shape: Any, dtype: str, weights: Weights, rows: Any, given: tuple
) -> tuple[Weights, np.ndarray]:
  """Returns (weight gradients before rounding, gradient of the rows)."""
  x, cos, sin = rows
  n, c, eps = x.shape[0], shape.kind.attention.head_dim, shape.norm_eps
  normed = _normed(x, weights["attention_norm"], eps, dtype)
  low = _shared_low(weights, "qkv", normed, dtype)
  slabs = weights["qkv"].shape[0]
  by_slab = zip(*(np.split(part, slabs, axis=1) for part in given), strict=True)
  columns, of_norms = [], {"query_norm": [], "key_norm": []}
  for slab, (of_q, of_k, of_v) in enumerate(by_slab):
    heads, first, parts = _heads(weights, slab, normed, low, dtype, c), 0, []
    for part, name in ((of_q.reshape(n, -1, c), "query_norm"), (of_k, "key_norm")):
      part = reference.rounded(_turned(part, cos, -sin), dtype)
      if name in weights:
        own = heads[:, first : first + part.shape[1]]
        part, of_scale = _norm_gradient(own, weights[name], eps, dtype, part)
        total = np.zeros((n, c), f32)
        for head in range(part.shape[1]):
          total = total + of_scale[:, head]
        of_norms[name].append(_row_sum(total))
      first += part.shape[1]
      parts.append(part)
    columns.append(np.concatenate([*parts, of_v], axis=1).reshape(n, -1))
  back, gradient = _columns_gradient(weights, "qkv", normed, columns, dtype)
  back, of_scale = _norm_gradient(x, weights["attention_norm"], eps, dtype, back)
  gradient["attention_norm"] = _row_sum(of_scale)
  if "qkv_bias" in weights:
    gradient["qkv_bias"] = np.stack([_row_sum(part) for part in columns])
  gradient |= {n: reference.tree_sum(np.stack(parts)) for n, parts in of_norms.items() if parts}
  return gradient, back


def after_attention(shape: Any, dtype: str, weights: Weights, rows: Any) -> np.ndarray:
  """Returns the hidden rows."""
  x, inner, *_ = _until_down(shape, dtype, weights, rows)
  return reference.rounded(x + _contracted(weights, "down", inner, dtype)[0], dtype)


def _until_down(shape: Any, dtype: str, weights: Weights, rows: Any) -> tuple:
  x, mixed = rows
  parts = np.split(mixed.reshape(x.shape[0], -1), weights["out"].shape[0], axis=1)
  projected, out_low = _contracted(weights, "out", parts, dtype)
  x = reference.rounded(x + projected, dtype)
  normed = _normed(x, weights["mlp_norm"], shape.norm_eps, dtype)
  low, inner, gates = _shared_low(weights, "gate_up", normed, dtype), [], []
  for slab in range(weights["gate_up"].shape[0]):
    gate, up = np.split(_columns(weights, "gate_up", slab, normed, low), 2, axis=1)
    inner.append(reference.rounded(gate / (f32(1) + reference.exp(-gate)) * up, dtype))
    gates.append((gate, up))
  return x, inner, gates, normed, parts, out_low


def after_attention_gradient(
  shape: Any, dtype: str, weights: Weights, rows: Any, given: np.ndarray
) -> tuple[Weights, tuple[np.ndarray, np.ndarray]]:
  """Returns (weight gradients before rounding, gradients of both row inputs)."""
  x, inner, gates, normed, parts, out_low = _until_down(shape, dtype, weights, rows)
  _, down_low = _contracted(weights, "down", inner, dtype)
  of_inner, gradient = _contracted_gradient(weights, "down", inner, down_low, given, dtype)
  columns = []
  for (gate, up), part in zip(gates, of_inner, strict=True):
    below = f32(1) + reference.exp(-gate)
    silu, sigmoid = gate / below, f32(1) / below
    of_gate = part * up * (sigmoid + silu * (f32(1) - sigmoid))
    columns.append(np.concatenate([of_gate, part * silu], axis=1))
  back, more = _columns_gradient(weights, "gate_up", normed, columns, dtype)
  back, of_scale = _norm_gradient(x, weights["mlp_norm"], shape.norm_eps, dtype, back)
  of_x = reference.rounded(back + given, dtype)
  of_mixed, last = _contracted_gradient(weights, "out", parts, out_low, of_x, dtype)
  gradient |= more | last | {"mlp_norm": _row_sum(of_scale)}
  return gradient, (of_x, np.concatenate(of_mixed, axis=1).reshape(rows[1].shape))
