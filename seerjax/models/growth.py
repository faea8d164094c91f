"""Function-preserving growth (Net2Net) of a model, as a start for training a larger one.

    hidden features, heads, MLP units   ->  copies; the weights that read them are divided
    features of a head                  ->  a value's are copied; a query's and key's rotate with
                                            the same frequencies, and the new ones are zero
    further layers                      ->  copies of the last one, with zero output projections

Exact copies would stay equal forever, since they get equal gradients. So `noise` divides the
weights that read them unevenly, by random shares that still sum to one, which changes no logit; and
it randomises the new features of queries and keys, which changes logits a little.

Sources: Net2Net, Chen et al. 2015, https://arxiv.org/abs/1511.05641; bert2BERT, Chen et al. 2021,
https://arxiv.org/abs/2110.07143; layers that start as zero: LLaMA Pro, Wu et al. 2024,
https://arxiv.org/abs/2401.02415. A model with experts starts from a dense one (`upcycle`) by parts
of its MLP: Zhu et al. 2024, https://arxiv.org/abs/2406.16554.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from seerjax.backends import layer_support
from seerjax.layer_kinds import Experts
from seerjax.models import parameters
from seerjax.models.config import TransformerConfig
from seerjax.ops import rotary


def check(small: TransformerConfig, large: TransformerConfig) -> None:
  """Refuses a pair of shapes between which growth is not possible.

  Raises:
    ValueError: naming the field, both values, and what would work.
  """
  if found := layer_support.beyond_dense(small) or layer_support.beyond_dense(large):
    raise NotImplementedError(
      f"growth: {found}, expected a model without; grow a model of the families that start from"
      " presets."
    )
  olds, news = _flat(small), _flat(large)
  for field in (
    "vocab_size",
    "is_tied",
    "has_qk_norms",
    "has_qkv_biases",
    "activation",
    "norm_eps",
  ):
    old, new = olds[field], news[field]
    if new != old:
      raise ValueError(
        f"growth.{field}: got {new} for a model of {old}, expected the same; grow to a shape that"
        " differs only in sizes."
      )
  for field in ("hidden_size", "num_heads", "num_kv_heads", "head_dim"):
    old, new = olds[field], news[field]
    if new % old:
      raise ValueError(
        f"growth.{field}: got {new} for a model of {old}, expected a multiple, because norms and"
        f" heads are copied whole; use {max(new // old, 1) * old}."
      )
  few, many = small.layers[0].attention, large.layers[0].attention
  if few.group != many.group:
    raise ValueError(
      f"growth.num_kv_heads: got {many.group} queries for each key/value head for a model of"
      f" {few.group}, expected the same; multiply num_heads and num_kv_heads by the same number."
    )
  for field in ("intermediate_size", "num_layers"):
    old, new = olds[field], news[field]
    if new < old:
      raise ValueError(
        f"growth.{field}: got {new} for a model of {old}, expected at least as many; a model cannot"
        " shrink."
      )
  factor = many.head_dim // few.head_dim
  old, old_scale = rotary.frequencies(few.rotary)
  new, new_scale = rotary.frequencies(many.rotary)
  if old_scale != new_scale or not np.allclose(new[::factor], old, rtol=1e-5, atol=0.0):
    raise ValueError(
      f"growth.rotary: got {many.rotary} for a model of {few.rotary}, expected every frequency"
      " of the small model among those of the large model; keep its base, and scaling='none'."
    )


def _flat(config: TransformerConfig) -> dict[str, Any]:
  """Returns the fields of a config and of its layers, which must be equal."""
  kind = config.only_kind("growth")
  return (
    vars(config)
    | vars(kind.attention)
    | vars(kind.gated("growth"))
    | {"num_layers": config.num_layers}
  )


def grow(
  masters: parameters.Params,
  small: TransformerConfig,
  large: TransformerConfig,
  *,
  noise: float = 0.1,
  seed: int = 0,
) -> parameters.Params:
  """Returns f32 master weights of shape `large` that compute what `masters` of shape `small` do.

  Args:
    masters: weights of the small model, with unstacked layers, in any number of slabs.
    small: shape of the small model.
    large: shape of the result, in as many slabs.
    noise: 0 copies and divides evenly, and changes logits by rounding only. Otherwise, the standard
      deviation of a share from an even one, relative to the whole, and of the new features of
      queries and keys, relative to the old ones.
    seed: seed of the noise.

  Raises:
    ValueError: for shapes between which growth is not possible, slabs that do not divide the large
      shape, or a noise that is out of range.
  """
  check(small, large)
  if not 0 <= noise < 1:
    raise ValueError(f"growth.noise: got {noise}, expected 0 <= noise < 1; 0.1 is usual.")
  shards = masters["layers"][0]["qkv"].shape[0]
  few = small.layers[0].attention
  if few.copies(shards) > 1:
    raise ValueError(
      f"growth.num_kv_heads: got weights in {shards} slabs for {few.num_kv_heads} key/value"
      f" head(s), expected at most {few.num_kv_heads} slabs; load the small model with"
      " reduction_shards=1."
    )
  inner = large.layers[0].gated("growth").intermediate_size
  if inner % shards:
    raise ValueError(
      f"growth.intermediate_size: got {inner} for weights in {shards} slabs,"
      " expected a multiple; load the small model with reduction_shards=1."
    )
  draw = np.random.default_rng(seed)
  layers = [_layer(layer, small, large, noise, draw) for layer in masters["layers"]]
  for _ in range(large.num_layers - small.num_layers):
    last = _layer(masters["layers"][-1], small, large, noise, draw)
    layers.append({**last, "out": 0.0 * last["out"], "down": 0.0 * last["down"]})
  copies = large.hidden_size // small.hidden_size
  features = _copies(small.hidden_size, large.hidden_size)
  grown = {"embed": np.tile(masters["embed"], (1, copies)), "layers": layers}
  if small.is_tied:  # The table is copied, so the norm before the head divides by the copies.
    grown["final_norm"] = _divided(np.asarray(masters["final_norm"]), features, 0, noise, draw)
  else:
    grown["final_norm"] = np.tile(masters["final_norm"], copies)
    grown["head"] = _divided(np.asarray(masters["head"]), features, 2, noise, draw)
  return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), grown)


def upcycle(
  masters: parameters.Params,
  small: TransformerConfig,
  large: TransformerConfig,
  *,
  seed: int = 0,
) -> parameters.Params:
  """Returns f32 master weights of a model with experts, each of them a part of the dense MLP.

  Expert e has the MLP's units from e * expert_size on, cyclically, and its output is multiplied by
  the number of parts: where a row chooses experts evenly, the expected sum is the dense output. The
  router is random. Such a model computes something near the dense one and has to be trained.

  Args:
    masters: weights of the dense model, with unstacked layers, in one slab.
    small: shape of the dense model.
    large: shape of the result, which differs in its feed-forward parts alone.
    seed: seed of the routers.

  Raises:
    ValueError: for other shapes, or experts that do not divide the MLP.
  """
  dense = small.layers[0].gated("growth")
  kind = large.layers[0].feed_forward
  if not isinstance(kind, Experts) or large.changed(feed_forward=dense, family="") != small.changed(
    feed_forward=dense, family=""
  ):
    raise ValueError(
      f"growth: got {large}, expected the shape {small} with experts in every layer; change its"
      " feed_forward alone."
    )
  inner, size, count = dense.intermediate_size, kind.expert_size, kind.routing.num_experts
  if kind.shared_size or inner % size or (count * size) % inner:
    raise ValueError(
      f"growth.expert_size: got {count} experts of {size} units and a shared MLP of"
      f" {kind.shared_size}, expected parts that cover an MLP of {inner} units equally often, and"
      " none shared; change expert_size."
    )
  if masters["layers"][0]["down"].shape[0] != 1:
    raise ValueError(
      "growth: got weights in several slabs, expected one; load them with reduction_shards=1."
    )
  units = np.arange(count * size) % inner
  draw = np.random.default_rng(seed)
  routers = parameters.shapes(large, 1)["layers"]
  layers = []
  for layer, shape in zip(masters["layers"], routers, strict=True):
    old = {name: np.asarray(leaf) for name, leaf in layer.items()}
    d = old["down"].shape[-1]
    gate_up = old["gate_up"].reshape(1, d, 2, inner)[..., units].reshape(1, d, 2, count, size)
    down = old["down"][:, units].reshape(1, count, size, d) * np.float32(inner // size)
    new = {name: leaf for name, leaf in old.items() if name not in ("gate_up", "down")} | {
      "expert_gate_up": gate_up.transpose(0, 3, 1, 2, 4).reshape(1, count, d, 2 * size),
      "expert_down": down,
      "router": 0.02 * draw.standard_normal(shape["router"].shape),
    }
    layers.append(new)
  grown = {**masters, "layers": layers}
  return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), grown)


def _copies(old: int, new: int) -> np.ndarray:
  """Returns i64[new], the old unit that each new unit copies, cyclically."""
  return np.arange(new) % old


def _divided(
  weights: np.ndarray, copies: np.ndarray, axis: int, noise: float, draw: np.random.Generator
) -> np.ndarray:
  """Returns weights that read copies of the inputs of `weights`, along `axis`, to the same sum."""
  counts = np.bincount(copies)
  wide = np.moveaxis(np.take(weights, copies, axis), axis, 0)
  drawn = draw.standard_normal(wide.shape) * noise
  sums = np.zeros((counts.size, *wide.shape[1:]))
  np.add.at(sums, copies, drawn)
  column = (-1, *(1,) * (wide.ndim - 1))
  # A unit with a single copy keeps its weight: its draw equals its own mean.
  shares = 1.0 / counts[copies].reshape(column) + drawn - (sums / counts.reshape(column))[copies]
  return np.moveaxis(wide * shares, 0, axis)


def _layer(
  layer: parameters.Params,
  small: TransformerConfig,
  large: TransformerConfig,
  noise: float,
  draw: np.random.Generator,
) -> parameters.Params:
  """Returns one layer's weights in the large shape."""
  few, many = small.layers[0].attention, large.layers[0].attention
  old, c = {name: np.asarray(leaf, np.float64) for name, leaf in layer.items()}, few.head_dim
  r, d = old["qkv"].shape[:2]
  width, factor = large.hidden_size // d, many.head_dim // c
  queries, keys = few.num_heads // r, few.num_kv_heads // r
  more = many.num_heads // few.num_heads
  hidden = _copies(d, large.hidden_size)
  # Attention divides by sqrt(factor c) now; a norm's mean has `factor` times as many features.
  scale = factor ** (0.5 if few.has_qk_norms else 0.25)

  def heads(columns: np.ndarray, count: int, turns: bool) -> np.ndarray:
    """Copies the heads of f64[r, ..., columns], and widens each."""
    whole = columns.reshape(*columns.shape[:-1], count, c)
    if turns:
      wide = np.zeros((*whole.shape[:-1], c * factor))
      if factor > 1:
        wide[...] = draw.standard_normal(wide.shape) * noise * columns.std() * scale
      wide[..., ::factor] = whole * scale  # Pair `factor j` has the old frequency of pair j.
    else:
      wide = np.tile(whole, factor)
    return np.concatenate([wide] * more, axis=-2).reshape(*columns.shape[:-1], -1)

  def of_heads(columns: np.ndarray) -> np.ndarray:
    q, k, v = np.split(columns, [queries * c, (queries + keys) * c], axis=-1)
    parts = heads(q, queries, True), heads(k, keys, True), heads(v, keys, False)
    return np.concatenate(parts, axis=-1)

  # Indices of the value features of each head, among those of all heads of the slab.
  values = np.arange(queries * c).reshape(queries, c)
  values = np.tile(np.tile(values, factor), (more, 1)).reshape(-1)
  inner = old["down"].shape[1]
  units = _copies(inner, large.layers[0].gated("growth").intermediate_size // r)
  gate_up = old["gate_up"].reshape(r, d, 2, inner)[..., units].reshape(r, d, -1)
  new = {
    "attention_norm": np.tile(old["attention_norm"], width),
    "qkv": _divided(of_heads(old["qkv"]), hidden, 1, noise, draw),
    "out": np.tile(_divided(old["out"], values, 1, noise, draw), width),
    "mlp_norm": np.tile(old["mlp_norm"], width),
    "gate_up": _divided(gate_up, hidden, 1, noise, draw),
    "down": np.tile(_divided(old["down"], units, 1, noise, draw), width),
  }
  if few.has_qkv_biases:
    new["qkv_bias"] = of_heads(old["qkv_bias"])
  for name in ("query_norm", "key_norm") if few.has_qk_norms else ():
    new[name] = np.repeat(old[name], factor) * factor**-0.25
  return new
