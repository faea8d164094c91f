"""Low-rank adapters: y = x @ W + scale * (x @ A) @ B, with W frozen and never merged.

The engine and the trainer both run the weights that `attach` returns, through the same tile
programs, so they compute the same bits; a merged weight would be rounded once more. `merge` is for
export only.

  qkv, gate_up   A f[d, rank] is replicated, B f[r, rank, columns] has W's slabs
  out, down      A f[r, rows, rank] has W's slabs and its partial products join W's in the tree,
                 B f[rank, d] is replicated
  expert_...     A f[r, E / r, rows, rank] and B f[r, E / r, rank, columns]: a pair per expert

B starts at zero, so x @ W is followed by the addition of an exact zero, and the initial model is
the base model. Bits are promised between two runs of one program with adapters, not between a
program with and one without them: XLA may fuse the two differently.

The trainer owns the adapter; its leaves are float32 masters like any others:

  base    = compute_params(master weights)                       once
  params  = attach(base, adapter, scale)                         each step; engine and trainer
  trained, frozen = partition(params)                            differentiate `trained` alone

Source: Hu et al. 2021, https://arxiv.org/abs/2106.09685.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import math
from typing import Any

import jax
import jax.numpy as jnp

from seerjax import fields, numerics as numerics_lib, parallel
from seerjax.array_typing import Array, PRNGKeyArray
from seerjax.backends.protocol import Operations
from seerjax.layer_kinds import Experts, LayerConfig
from seerjax.models import config as model_config, parameters
from seerjax.models.config import TransformerConfig
from seerjax.models.parameters import Params

Adapter = dict[str, Any]

# Targets of layers without experts. A layer with experts has `EXPERT_TARGETS` too, and those of the
# MLP only if it has an MLP that all rows share.
TARGETS = ("qkv", "out", "gate_up", "down")
EXPERT_TARGETS = ("expert_gate_up", "expert_down")
ALL_TARGETS = (*TARGETS, *EXPERT_TARGETS)
# Of `TARGETS`, those with output columns in slabs; the others have their contraction in slabs.
COLUMN_TARGETS = ("qkv", "gate_up")
MLP_TARGETS = ("gate_up", "down")


def targets_of(config: TransformerConfig) -> tuple[str, ...]:
  """Returns the weights of a model that can have an adapter."""
  layout = parameters.shapes(config, 1)
  return tuple(name for name in ALL_TARGETS if any(name in layer for layer in layout["layers"]))


def shapes(
  config: TransformerConfig,
  numerics: numerics_lib.NumericsConfig,
  rank: int,
  targets: Sequence[str] | None = None,
) -> Adapter:
  """Returns the layout of an adapter, `{"layers": [{target: {"a", "b"}}]}`, as f32 shapes.

  A layer has those of the targets that are among its weights. None is `targets_of`.

  Raises:
    ValueError: for an invalid rank or target.
  """
  known = targets_of(config)
  targets = known if targets is None else tuple(targets)
  if not targets or len(set(targets)) != len(targets) or not set(targets) <= set(known):
    raise ValueError(
      f"lora targets: got {targets}, expected at least one of {known}, each once; all of them are"
      " usual."
    )
  smallest = min(config.hidden_size, *(_smallest(kind, targets) for kind in config.layers))
  if not 1 <= rank <= smallest:
    raise ValueError(
      f"lora rank: got {rank}, expected 1 <= rank <= {smallest}, the smallest dimension of the"
      " adapted weights; 8 to 64 is usual."
    )
  layout = parameters.shapes(config, model_config.slabs_for(config, numerics))

  def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)

  def pair(name: str, weight: jax.ShapeDtypeStruct) -> dict[str, jax.ShapeDtypeStruct]:
    *slabs, rows, columns = weight.shape
    if name in COLUMN_TARGETS:
      return {"a": f32(rows, rank), "b": f32(*slabs, rank, columns)}
    if name in EXPERT_TARGETS:
      return {"a": f32(*slabs, rows, rank), "b": f32(*slabs, rank, columns)}
    return {"a": f32(*slabs, rows, rank), "b": f32(rank, columns)}

  of_layer = lambda layer: {name: pair(name, layer[name]) for name in targets if name in layer}
  return {"layers": [of_layer(layer) for layer in layout["layers"]]}


def _smallest(kind: LayerConfig, targets: Sequence[str]) -> int:
  """Returns the smallest inner dimension of a layer's adapted weights."""
  part, sizes = kind.feed_forward, [kind.attention.num_heads * kind.attention.head_dim]
  is_of = lambda names: any(name in targets for name in names)
  if isinstance(part, Experts):
    sizes += [part.expert_size] * is_of(EXPERT_TARGETS)
    sizes += [part.shared_size] * (is_of(MLP_TARGETS) and part.shared_size > 0)
  else:
    sizes += [part.intermediate_size] * is_of(MLP_TARGETS)
  return min(sizes)


def init(
  key: PRNGKeyArray,
  config: TransformerConfig,
  numerics: numerics_lib.NumericsConfig,
  rank: int,
  targets: Sequence[str] | None = None,
) -> Adapter:
  """Returns f32 master adapters: A normal with deviation 1 / sqrt(number of inputs), B zero.

  Args:
    key: key of `numerics.key`; consumed.
    config: shape of the model.
    numerics: `reduction_shards` decides the layout.
    rank: columns of A.
    targets: weights that get an adapter, of `targets_of`; None is all of these.

  Raises:
    ValueError: for an invalid rank or target.
  """
  numerics_lib.require_key(key, what="lora.init: key")
  layout = shapes(config, numerics, rank, targets)
  paths, structure = jax.tree_util.tree_flatten_with_path(layout)

  def leaf(index: int, path, shape: jax.ShapeDtypeStruct):
    if path[-1].key == "b":
      return jnp.zeros(shape.shape, shape.dtype)
    of_expert = path[-2].key in EXPERT_TARGETS
    num_inputs = shape.shape[-2] if of_expert else shape.size // rank
    with numerics_lib.pinned_randomness():
      noise = jax.random.normal(jax.random.fold_in(key, index), shape.shape, shape.dtype)
    return jnp.float32(num_inputs**-0.5) * noise

  return structure.unflatten([leaf(i, path, shape) for i, (path, shape) in enumerate(paths)])


def attach(params: Params, adapter: Adapter, scale: float) -> Params:
  """Returns the weights with the adapter attached, as `transformer.forward` runs them.

  Args:
    params: the base, in compute dtype (`parameters.compute_params`); not copied.
    adapter: f32 masters, rounded to the base's dtype here.
    scale: scale of the low-rank term, usually alpha / rank. It stays in float32 and is applied to
      x @ A before that is rounded, so it rounds no weight.

  Returns:
    Params with `{"a", "b", "scale"}` under "qkv_lora", "out_lora" and so on.

  Raises:
    ValueError: if the layers or shapes differ from the base's, or the scale is not finite.
  """
  _check(params, adapter)
  _check_scale(scale)

  is_stacked = parameters.is_stacked(params)
  adapter = parameters.stacked(adapter) if is_stacked else adapter
  scales = jnp.full(_num_layers(params) if is_stacked else (), scale, jnp.float32)

  def layer(weights: Params, adapters: Adapter) -> Params:
    attached = {
      f"{name}_lora": {
        "a": pair["a"].astype(weights[name].dtype),
        "b": pair["b"].astype(weights[name].dtype),
        "scale": scales,
      }
      for name, pair in adapters.items()
    }
    return {**weights, **attached}

  return {**params, "layers": _each(layer, params["layers"], adapter["layers"])}


def _each(function: Callable[..., Any], *layers: Any) -> Any:
  """Applies a function to every layer, or once to the dict of stacked layers."""
  if isinstance(layers[0], dict):
    return function(*layers)
  return [function(*of_one) for of_one in zip(*layers, strict=True)]


def _num_layers(params: Params) -> int:
  layers = params["layers"]
  return jax.tree.leaves(layers)[0].shape[0] if isinstance(layers, dict) else len(layers)


def merge(params: Params, adapter: Adapter, scale: float) -> Params:
  """Returns plain weights W + scale * A @ B, summed in float32, rounded to each weight's dtype.

  For export only: the sum is rounded, while `attach` keeps two terms, so the bits differ.

  Args:
    params: as for `attach`, in any dtype; the f32 masters lose least.
    adapter: f32 masters.
    scale: scale of the low-rank term.

  Raises:
    ValueError: as `attach`.
  """
  params = parameters.unstacked(params)
  _check(params, adapter)
  _check_scale(scale)

  def merged(weight: Any, a: Any, b: Any) -> Any:
    product = jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)  # Broadcasts over the slabs.
    return (weight.astype(jnp.float32) + jnp.float32(scale) * product).astype(weight.dtype)

  def layer(weights: Params, adapters: Adapter) -> Params:
    new = {n: merged(weights[n], *_by_slab(n, pair)) for n, pair in adapters.items()}
    return {**weights, **new}

  layers = [layer(*both) for both in zip(params["layers"], adapter["layers"], strict=True)]
  return {**params, "layers": layers}


def check(params: Params, adapter: Adapter, scale: float) -> None:
  """Refuses an adapter that `attach` would refuse.

  Raises:
    ValueError: as `attach`.
  """
  _check(params, adapter)
  _check_scale(scale)


def _check_scale(scale: float) -> None:
  if not fields.is_number(scale) or not abs(scale) < math.inf:
    raise ValueError(
      f"lora scale: got {fields.shown(scale)}, expected a finite number; alpha / rank is usual."
    )


def _by_slab(name: str, pair: Adapter) -> tuple[Any, Any]:
  """Returns A and B with a slab axis on both, of size one if the matrix has no slabs."""
  if name in EXPERT_TARGETS:
    return pair["a"], pair["b"]
  if name in COLUMN_TARGETS:
    return pair["a"][None], pair["b"]
  return pair["a"], pair["b"][None]


def partition(params: Params) -> tuple[Any, Any]:
  """Splits the weights of a step into (trained, frozen).

  With adapters, the trained part has the structure of the adapter, stacked if the layers are;
  without, everything is trained. `parameters.unstacked` of its gradient fits the f32 masters.
  """

  def adapters(weights: Params) -> Adapter:
    return {
      name.removesuffix("_lora"): {"a": weights[name]["a"], "b": weights[name]["b"]}
      for name in weights
      if name.endswith("_lora")
    }

  trained = _each(adapters, params["layers"])
  if not jax.tree.leaves(trained):
    return params, None
  return {"layers": trained}, params


def combine(trained: Any, frozen: Any) -> Params:
  """Returns the weights from the two parts of `partition`."""
  if frozen is None:
    return trained

  def layer(weights: Params, adapters: Adapter) -> Params:
    scales = {name: weights[f"{name}_lora"]["scale"] for name in adapters}
    return weights | {
      f"{name}_lora": {**pair, "scale": scales[name]} for name, pair in adapters.items()
    }

  return {**frozen, "layers": _each(layer, frozen["layers"], trained["layers"])}


def _check(params: Params, adapter: Adapter) -> None:
  found, expected = len(adapter["layers"]), _num_layers(params)
  if found != expected:
    raise ValueError(
      f"lora adapter: got {found} layers, expected the base's {expected}; it was made for another"
      " model."
    )
  layers = params["layers"]
  if isinstance(layers, dict):
    layers = [jax.eval_shape(lambda: jax.tree.map(lambda leaf: leaf[0], layers))] * expected
  for index, (weights, adapters) in enumerate(zip(layers, adapter["layers"], strict=True)):
    for name, pair in adapters.items():
      a, b = pair["a"].shape, pair["b"].shape
      ndim = 8 if name in EXPERT_TARGETS else 5
      if len(a) + len(b) != ndim or name not in weights or min(len(a), len(b)) < 2:
        raise ValueError(
          f"lora adapter: got layers[{index}][{name!r}] with a {a} and b {b}, expected one shared"
          " matrix and one matrix per slab, or a pair per expert, for one of"
          f" {[name for name in ALL_TARGETS if name in weights]}; make it with the same model."
        )
      *slabs, rows, columns = weights[name].shape
      rank = a[-1]
      wide_a = () if name in COLUMN_TARGETS else tuple(slabs)
      wide_b = tuple(slabs) if name in (*COLUMN_TARGETS, *EXPERT_TARGETS) else ()
      if a != (*wide_a, rows, rank) or b != (*wide_b, rank, columns):
        raise ValueError(
          f"lora adapter: got layers[{index}][{name!r}] with a {a} and b {b}, expected"
          f" {(*wide_a, rows, 'rank')} and {(*wide_b, 'rank', columns)}; make it with the same"
          " model and NumericsConfig.reduction_shards."
        )


def low_rank(product: Array, adapter: Params, dtype: jnp.dtype) -> Array:
  """Scales x @ A, f32[n, rank], in float32 and rounds it once, ready for the product with B."""
  return (product * adapter["scale"]).astype(dtype)


def adapted_sum(
  operations: Operations,
  partials: Array,
  low: Array,
  adapter: Params,
  dtype: jnp.dtype,
  axis: str | None,
) -> Array:
  """Adds the slabs' partial x @ W and x @ A in the tree, then the low-rank term: f[n, d]."""
  whole, low = parallel.gather_kept((partials, low), axis)
  whole, low = parallel.tree_sum(whole), parallel.tree_sum(low)
  product = operations.dot(low_rank(low, adapter, dtype), adapter["b"])
  return (whole + product).astype(dtype)
