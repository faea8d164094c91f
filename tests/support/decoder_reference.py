"""The decoder as its papers define it, independent of the engine's rows and slabs."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from seerjax.backends.tiled import EXPERTS
from seerjax.layer_kinds import Experts
from seerjax.ops import attention, moe, norms, rotary, routing


@functools.partial(jax.jit, static_argnums=2)
def logits(params, tokens, config):
  """Returns the logits of one whole sequence from the published decoder, in float32."""
  length, d = tokens.shape[0], config.hidden_size
  params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
  matmul = functools.partial(jnp.matmul, precision="highest")

  def norm(x, weights):
    scale = 1 + weights if config.norm_weights == "1 + w" else weights
    flat = norms.rms_norm_reference(x.reshape(-1, x.shape[-1]), scale, eps=config.norm_eps)
    return flat.reshape(x.shape)

  def capped(values, cap):
    return values if cap is None else cap * jnp.tanh(values / cap)

  x = params["embed"][tokens]
  if config.embedding_scale is not None:
    x = x * config.embedding_scale
  for kind, layer in zip(config.layers, params["layers"], strict=True):
    own, c = kind.attention, kind.attention.head_dim
    group = own.num_heads // own.num_kv_heads
    angles = jnp.arange(length)[:, None].astype(jnp.float32)
    angles = angles * jnp.asarray(rotary.frequencies(own.rotary)[0])[None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    normed = norm(x, layer["attention_norm"])
    parts = []
    for index, slab in enumerate(layer["qkv"]):
      qkv = matmul(normed, slab)
      if own.has_qkv_biases:
        qkv = qkv + layer["qkv_bias"][index][None]
      heads = qkv.reshape(length, -1, c)
      kv = heads.shape[1] // (group + 2)
      parts.append((heads[:, : kv * group], heads[:, kv * group : -kv], heads[:, -kv:]))
    q, k, v = (jnp.concatenate(part, axis=1) for part in zip(*parts))
    if own.has_qk_norms:
      q, k = norm(q, layer["query_norm"]), norm(k, layer["key_norm"])
    q, k = rotary.rotate_rows(q, cos, sin), rotary.rotate_rows(k, cos, sin)
    sinks = layer["sinks"].reshape(-1, group) if own.has_sinks else None
    mixed = attention.attention_reference(
      q.reshape(length, -1, group, c), k, v, rule=own.rule, sinks=sinks
    )
    out = matmul(mixed.reshape(length, -1), layer["out"].reshape(-1, d))
    has_post_norms = kind.norm_placement == "pre_and_post"
    x = x + (norm(out, layer["attention_out_norm"]) if has_post_norms else out)
    normed = norm(x, layer["mlp_norm"])
    down = jnp.zeros_like(x)
    if isinstance(kind.feed_forward, Experts):
      rule = kind.feed_forward.routing
      chosen = routing.route_reference(normed, routing.router_of(layer), rule)
      ids = jnp.broadcast_to(jnp.arange(rule.num_experts, dtype=jnp.int32), chosen.shape)
      slabs = {short: layer[name] for name, short in EXPERTS.items()}
      down = moe.experts_reference(normed, ids, chosen, slabs)
    for gate_up, slab in zip(layer.get("gate_up", ()), layer.get("down", ())):
      gate, up = jnp.split(matmul(normed, gate_up), 2, axis=-1)
      inner = {"silu": jax.nn.silu, "gelu_tanh": jax.nn.gelu}[kind.feed_forward.activation](gate)
      down = down + matmul(inner * up, slab)
    x = x + (norm(down, layer["mlp_out_norm"]) if has_post_norms else down)
  table = params["head"].reshape(-1, d) if "head" in params else params["embed"]
  return capped(matmul(norm(x, params["final_norm"]), table.T), config.logit_soft_cap)
