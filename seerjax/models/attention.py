"""What a row's attention reads: queries, keys and values of its hidden features."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from seerjax import numerics as numerics_lib
from seerjax.array_typing import Array
from seerjax.models import lora
from seerjax.models.config import TransformerConfig
from seerjax.models.parameters import Params
from seerjax.ops import linear, norms, rotary, tiles


def input_rows(
  config: TransformerConfig,
  numerics: numerics_lib.NumericsConfig,
  axis: str | None,
  weights: Params,
  rows: Any,
  one: Array,
):
  """f[n, d] -> queries f[n, k, g, c], keys and values f[n, k, c] of the local slabs."""
  x, cos, sin = rows
  num_rows, c = x.shape[0], config.head_dim
  normed = norms.rms_norm_rows(x, weights["attention_norm"], config.norm_eps, numerics)

  def slab(shared, weights):
    # Norms and rotation of the heads belong in here: outside, the number of local heads would
    # shape their sums.
    normed, cos, sin, head_norms, low = shared
    qkv = linear.dot(normed, weights["qkv"], numerics)
    if low is not None:
      qkv = qkv + linear.dot(low, weights["qkv_lora"], numerics)
    qkv = qkv.astype(normed.dtype)
    if "qkv_bias" in weights:
      qkv = qkv + weights["qkv_bias"][None, :]
    num_kv_heads = qkv.shape[1] // (c * (config.group + 2))
    heads = qkv.reshape(num_rows, -1, c)
    first_key, first_value = num_kv_heads * config.group, num_kv_heads * (config.group + 1)
    q, k, v = heads[:, :first_key], heads[:, first_key:first_value], heads[:, first_value:]
    if head_norms:
      q = norms.rms_norm_rows(q, head_norms["query_norm"], config.norm_eps, numerics)
      k = norms.rms_norm_rows(k, head_norms["key_norm"], config.norm_eps, numerics)
    q, k = rotary.rotate_rows(q, cos, sin), rotary.rotate_rows(k, cos, sin)
    return q.reshape(num_rows, num_kv_heads, config.group, c), k, v

  head_norms = {name: weights[name] for name in ("query_norm", "key_norm") if name in weights}
  slabs = {name: weights[name] for name in ("qkv", "qkv_bias") if name in weights}
  low = None
  if "qkv_lora" in weights:
    product = linear.dot(normed, weights["qkv_lora"]["a"], numerics)
    low = lora.low_rank(product, weights["qkv_lora"], x.dtype)
    slabs["qkv_lora"] = weights["qkv_lora"]["b"]
  shared = (normed, cos, sin, head_norms, low)
  by_slab = tiles.map_slabs(slab, shared, slabs, one, axis, numerics)
  # f[r, n, k / r, ...] -> f[n, k, ...]
  return jax.tree.map(
    lambda part: jnp.swapaxes(part, 0, 1).reshape(num_rows, -1, *part.shape[3:]), by_slab
  )
