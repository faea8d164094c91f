"""Inputs of attention: queries, keys and values from hidden rows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from seerjax.array_typing import Array
from seerjax.backends.protocol import LayerShape, Operations
from seerjax.models import lora
from seerjax.models.parameters import Params
from seerjax.ops import rotary


def input_rows(
  operations: Operations,
  shape: LayerShape,
  axis: str | None,
  weights: Params,
  rows: Any,
  one: Array,
):
  """Maps hidden rows f[n, d] to queries f[n, k, g, c], keys and values f[n, k, c] (local slabs)."""
  x, cos, sin = rows
  kind = shape.kind.attention
  num_rows, c, group = x.shape[0], kind.head_dim, kind.group
  norm = lambda x, scale: operations.rms_norm_rows(x, scale, shape.norm_eps, shape.norm_weights)
  normed = norm(x, weights["attention_norm"])

  def slab(shared, weights):
    # Norms and rotation of the heads are inside the slab: outside, the number of local heads would
    # change the order of their sums.
    normed, cos, sin, head_norms, low = shared
    qkv = operations.dot(normed, weights["qkv"])
    if low is not None:
      qkv = qkv + operations.dot(low, weights["qkv_lora"])
    qkv = qkv.astype(normed.dtype)
    if "qkv_bias" in weights:
      qkv = qkv + weights["qkv_bias"][None, :]
    num_kv_heads = qkv.shape[1] // (c * (group + 2))
    heads = qkv.reshape(num_rows, -1, c)
    first_key, first_value = num_kv_heads * group, num_kv_heads * (group + 1)
    q, k, v = heads[:, :first_key], heads[:, first_key:first_value], heads[:, first_value:]
    if head_norms:
      q, k = norm(q, head_norms["query_norm"]), norm(k, head_norms["key_norm"])
    q, k = rotary.rotate_rows(q, cos, sin), rotary.rotate_rows(k, cos, sin)
    return q.reshape(num_rows, num_kv_heads, group, c), k, v

  head_norms = {name: weights[name] for name in ("query_norm", "key_norm") if name in weights}
  slabs = {name: weights[name] for name in ("qkv", "qkv_bias") if name in weights}
  low = None
  if "qkv_lora" in weights:
    product = operations.dot(normed, weights["qkv_lora"]["a"])
    low = lora.low_rank(product, weights["qkv_lora"], x.dtype)
    slabs["qkv_lora"] = weights["qkv_lora"]["b"]
  shared = (normed, cos, sin, head_norms, low)
  by_slab = operations.map_slabs(slab, shared, slabs, one, axis)
  # f[r, n, k / r, ...] -> f[n, k, ...]
  return jax.tree.map(
    lambda part: jnp.swapaxes(part, 0, 1).reshape(num_rows, -1, *part.shape[3:]), by_slab
  )
