"""The decoder as its papers define it, independent of the engine's rows and slabs."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from seerjax.ops import attention, norms, rotary


@functools.partial(jax.jit, static_argnums=2)
def logits(params, tokens, config):
  """Returns the logits of one whole sequence from the published decoder, in float32."""
  length, d = tokens.shape[0], config.hidden_size
  params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
  matmul = functools.partial(jnp.matmul, precision="highest")

  def norm(x, scale):
    flat = norms.rms_norm_reference(x.reshape(-1, x.shape[-1]), scale, eps=config.norm_eps)
    return flat.reshape(x.shape)

  x = params["embed"][tokens]
  for layer, kind in zip(params["layers"], (kind.attention for kind in config.layers)):
    c, group = kind.head_dim, kind.num_heads // kind.num_kv_heads
    angles = jnp.arange(length)[:, None].astype(jnp.float32)
    angles = angles * jnp.asarray(rotary.frequencies(kind.rotary)[0])[None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    normed = norm(x, layer["attention_norm"])
    parts = []
    for index, slab in enumerate(layer["qkv"]):
      qkv = matmul(normed, slab)
      if kind.has_qkv_biases:
        qkv = qkv + layer["qkv_bias"][index][None]
      heads = qkv.reshape(length, -1, c)
      kv = heads.shape[1] // (group + 2)
      parts.append((heads[:, : kv * group], heads[:, kv * group : -kv], heads[:, -kv:]))
    q, k, v = (jnp.concatenate(part, axis=1) for part in zip(*parts))
    if kind.has_qk_norms:
      q, k = norm(q, layer["query_norm"]), norm(k, layer["key_norm"])
    q, k = rotary.rotate_rows(q, cos, sin), rotary.rotate_rows(k, cos, sin)
    mixed = attention.attention_reference(q.reshape(length, -1, group, c), k, v)
    x = x + matmul(mixed.reshape(length, -1), layer["out"].reshape(-1, d))
    normed = norm(x, layer["mlp_norm"])
    down = jnp.zeros_like(x)
    for gate_up, slab in zip(layer["gate_up"], layer["down"]):
      gate, up = jnp.split(matmul(normed, gate_up), 2, axis=-1)
      down = down + matmul(jax.nn.silu(gate) * up, slab)
    x = x + down
  table = params["head"].reshape(-1, d) if "head" in params else params["embed"]
  return matmul(norm(x, params["final_norm"]), table.T)
