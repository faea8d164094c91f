"""Parameters: layout, initialisation, rounding, stacking, and placement on a mesh.

Parameters are a plain pytree. Every dimension that the `model` mesh axis may shard has a leading
axis of logical slabs (r = `reduction_shards`): one slab holds whole query heads and their key/value
heads. Several slabs may each have a copy of one key/value head (`shared_heads`). The embedding has
no slab axis; its rows are sharded directly, into as many slabs of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from seerjax import numerics as numerics_lib, parallel
from seerjax.array_typing import Array, PRNGKeyArray
from seerjax.layer_kinds import Experts, Gated, Grouped
from seerjax.models import shared_heads
from seerjax.models.config import TransformerConfig, slabs_for
from seerjax.ops import moe

Params = dict[str, Any]
# Norms of outputs, in layers that have them.
POST_NORMS = ("attention_out_norm", "mlp_out_norm")
# Weights that no compute dtype rounds: a correction bias decides between close scores, and moves in
# steps that bfloat16 cannot express.
FLOAT32 = ("router_correction_bias",)
# The weights of routers.
ROUTERS = ("router", "router_bias", "router_correction_bias")

# Maximum layers that a program repeats; compile time and program size grow with each.
UNROLLED_LAYERS = 8


def shapes(config: TransformerConfig, reduction_shards: int) -> Params:
  """Returns every parameter's shape (f32), as `jax.ShapeDtypeStruct`s: the layout of `Params`."""
  r, d = reduction_shards, config.hidden_size
  params = {
    "embed": _f32(config.vocab_size, d),
    "layers": [
      _attention_shapes(layer.attention, d, r)
      | _feed_forward_shapes(layer.feed_forward, d, r)
      | ({name: _f32(d) for name in POST_NORMS} if layer.norm_placement == "pre_and_post" else {})
      for layer in config.layers
    ],
    "final_norm": _f32(d),
  }
  if not config.is_tied:
    params["head"] = _f32(r, config.vocab_size // r, d)
  return params


def _f32(*shape: int) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(shape, jnp.float32)


def _attention_shapes(kind: Grouped, d: int, r: int) -> Params:
  c = kind.head_dim
  q_columns, kv_columns = kind.num_heads // r * c, kind.in_slabs(r).num_kv_heads // r * c
  shapes = {
    "attention_norm": _f32(d),
    "qkv": _f32(r, d, q_columns + 2 * kv_columns),  # Columns: queries, keys, values of the slab.
    "out": _f32(r, q_columns, d),
  }
  if kind.has_qkv_biases:
    shapes["qkv_bias"] = _f32(r, q_columns + 2 * kv_columns)
  if kind.has_qk_norms:
    shapes |= {"query_norm": _f32(c), "key_norm": _f32(c)}
  if kind.has_sinks:
    shapes["sinks"] = _f32(r, kind.num_heads // r)
  return shapes


def _feed_forward_shapes(kind: Gated | Experts, d: int, r: int) -> Params:
  if isinstance(kind, Gated):
    return {"mlp_norm": _f32(d), **_gated_shapes(kind.intermediate_size // r, d, r)}
  count, inner = kind.routing.num_experts, kind.expert_size
  own = moe.experts_per_slab(count, r)
  shapes = {
    "mlp_norm": _f32(d),
    "router": _f32(d, count),
    "expert_gate_up": _f32(r, own, d, 2 * inner),  # Columns: gate, up of the expert.
    "expert_down": _f32(r, own, inner, d),
  }
  if kind.routing.has_bias:
    shapes["router_bias"] = _f32(count)
  if kind.routing.has_correction_bias:
    shapes["router_correction_bias"] = _f32(count)
  return shapes | (_gated_shapes(kind.shared_size // r, d, r) if kind.shared_size else {})


def _gated_shapes(inner: int, d: int, r: int) -> Params:
  return {
    "gate_up": _f32(r, d, 2 * inner),  # Columns: gate, up of the slab.
    "down": _f32(r, inner, d),
  }


def init(
  key: PRNGKeyArray, config: TransformerConfig, numerics: numerics_lib.NumericsConfig
) -> Params:
  """Returns f32 master weights: normal with deviation 0.02, norms' factors one, biases zero.

  Args:
    key: key of `numerics.key`; consumed.
    config: shape of the model.
    numerics: `reduction_shards` decides the layout; another layout gives other values for a key.

  Raises:
    ValueError: if slabs do not divide the model, or the key is of another kind.
  """
  numerics_lib.require_key(key, what="parameters.init: key")
  slabs = slabs_for(config, numerics)
  layout = shapes(config, slabs)
  paths, structure = jax.tree_util.tree_flatten_with_path(layout)
  residual_scale = (2 * config.num_layers) ** -0.5

  def leaf(index: int, path, shape) -> Array:
    name = path[-1].key
    if name.endswith("norm") and config.norm_weights == "w":
      return jnp.ones(shape.shape, shape.dtype)
    if name.endswith(("norm", "bias")) or name == "sinks":
      return jnp.zeros(shape.shape, shape.dtype)
    scale = 0.02 * (residual_scale if name in ("out", "down", "expert_down") else 1.0)
    with numerics_lib.pinned_randomness():
      noise = jax.random.normal(jax.random.fold_in(key, index), shape.shape, shape.dtype)
    return jnp.float32(scale) * noise

  leaves = [leaf(index, path, shape) for index, (path, shape) in enumerate(paths)]
  return shared_heads.filled(structure.unflatten(leaves), config, slabs)


@functools.partial(jax.jit, static_argnums=(1,))
def compute_params(master: Params, numerics: numerics_lib.NumericsConfig) -> Params:
  """Returns the weights that engine and trainer both use: the masters, rounded once.

  Those named in `FLOAT32` are not rounded.

  More than `UNROLLED_LAYERS` layers of equal shapes are `stacked`, except for kernel backends: a
  kernel's operand is a whole array, so slicing a layer would copy its weights in every step.
  """
  round_to = lambda leaf, dtype: leaf.astype(dtype)
  params = jax.tree.map(round_to, master, dtypes(master, numerics.dtype))
  layers = params["layers"]
  is_stacked = len(layers) > UNROLLED_LAYERS and not numerics.uses_kernels
  return stacked(params) if is_stacked and _have_equal_shapes(layers) else params


def dtypes(params: Params, dtype: Any) -> Params:
  """Returns the dtype of each weight in a model that computes in `dtype`."""
  is_kept = are_named(params, FLOAT32)
  return jax.tree.map(lambda is_kept: jnp.dtype(jnp.float32 if is_kept else dtype), is_kept)


def rounded_shapes(shapes: Params, dtype: Any) -> Params:
  """Returns the shapes of weights in a model that computes in `dtype`."""
  of = lambda leaf, dtype: jax.ShapeDtypeStruct(leaf.shape, dtype)
  return jax.tree.map(of, shapes, dtypes(shapes, dtype))


def are_named(params: Any, names: Collection[str]) -> Any:
  """Returns a tree of bools: True where a weight has one of the names."""
  is_one = lambda path, _: _names(path)[-1:] in [(name,) for name in names]
  return jax.tree_util.tree_map_with_path(is_one, params)


def _have_equal_shapes(layers: list[Params]) -> bool:
  shapes = [{name: leaf.shape for name, leaf in layer.items()} for layer in layers]
  return all(shape == shapes[0] for shape in shapes)


def is_stacked(params: Params) -> bool:
  """Returns whether the layers are one dict of `[l, ...]`, over which `forward` loops."""
  return isinstance(params.get("layers"), dict)


def stacked(params: Params) -> Params:
  """Returns weights, or adapters, with equal layers stacked in one dict, every leaf `[l, ...]`."""
  if is_stacked(params):
    return params
  return {**params, "layers": jax.tree.map(lambda *leaves: jnp.stack(leaves), *params["layers"])}


def unstacked(params: Params) -> Params:
  """Returns weights, gradients or adapters with a list of layers, like the masters."""
  if not is_stacked(params):
    return params
  layers = params["layers"]
  count = jax.tree.leaves(layers)[0].shape[0]
  at = lambda index: jax.tree.map(lambda leaf: leaf[index], layers)
  return {**params, "layers": [at(index) for index in range(count)]}


def partition_specs(config: TransformerConfig, reduction_shards: int) -> Params:
  """Returns the partition spec of each parameter: slabs over `model`, the rest replicated.

  The embedding's rows, which are slabs of the vocabulary, are also sharded over `model`.
  """
  return specs_of(shapes(config, reduction_shards))


def specs_of(params: Params) -> Params:
  """Works like `partition_specs`, for weights (stacked or not), adapters, or weights with adapters.

  Adapters that rows choose among are `params["adapters"]` (`models.adapters`).
  """
  of_layers = (None,) if is_stacked(params) else ()

  def spec(path, leaf, is_slab):
    names = _names(path)
    before = of_layers if names[0] == "layers" else ()
    if names[0] == "adapters":  # After the axes of layers, if stacked, and of adapters.
      of_expert = any(name.startswith("expert_") for name in names)
      before = (None,) * (leaf.ndim - (4 if of_expert else 3))
    return jax.P(*before, parallel.MODEL_AXIS) if is_slab or names == ("embed",) else jax.P()

  return jax.tree_util.tree_map_with_path(spec, params, have_slabs(params))


def have_slabs(params: Params) -> Params:
  """Returns a tree of bools like `specs_of`: True where the array has a slab dimension."""
  slabs = ("qkv", "qkv_bias", "sinks", "out", "gate_up", "down", "head")
  slabs += ("expert_gate_up", "expert_down")
  slabs_of_adapters = (("qkv", "b"), ("gate_up", "b"), ("out", "a"), ("down", "a"))
  slabs_of_adapters += tuple((f"expert_{n}", part) for n in ("gate_up", "down") for part in "ab")

  def is_slab(path, _):
    names = _names(path)
    of_adapter = tuple(name.removesuffix("_lora") for name in names[-2:])
    return names[-1] in slabs or of_adapter in slabs_of_adapters

  return jax.tree_util.tree_map_with_path(is_slab, params)


def _names(path: Any) -> tuple[str, ...]:
  """Returns the dict keys on the path to an array, without layer indices."""
  return tuple(key.key for key in path if isinstance(key, jax.tree_util.DictKey))


def placed(
  params: Params, mesh: jax.sharding.Mesh, piece_bytes: int = parallel.PIECE_BYTES
) -> Params:
  """Returns weights on the mesh: slabs and embedding over `model`, replicated over instances.

  Arrays that are sharded over more of the mesh's devices are gathered in pieces of `piece_bytes`.
  """
  place = lambda spec: jax.sharding.NamedSharding(mesh, spec)
  return jax.tree.map(
    lambda leaf, spec: parallel.put(leaf, place(spec), piece_bytes=piece_bytes),
    params,
    specs_of(params),
    is_leaf=lambda leaf: isinstance(leaf, jax.Array | np.ndarray),
  )
