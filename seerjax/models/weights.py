"""Checks weights against a model and its numerics, path by path, before they are run.

Weights with other slabs, another dtype or an extra leaf would run without an error, but give other
bits than the fingerprint promises; weights that are not finite give useless samples.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from seerjax.models import lora, parameters
from seerjax.models.decoder import Decoder

# The base weight of each adapter; see `models.lora`.
ADAPTED = {f"{name}_lora": name for name in lora.ALL_TARGETS}


def check(
  params: Any,
  decoder: Decoder,
  *,
  dtype: Any,
  what: str,
) -> None:
  """Refuses weights that are not in the model's layout, with or without adapters.

  Args:
    params: params of `transformer.forward`; adapters as `lora.attach` puts them.
    decoder: the model; its number of slabs decides the layout.
    dtype: dtype of the weights; those of `parameters.FLOAT32` and an adapter's scale are always
      float32.
    what: the argument, for the message.

  Raises:
    ValueError: naming the first path that differs, with the actual and the expected leaf.
  """
  expected = parameters.shapes(decoder.shape, decoder.numerics.reduction_shards)
  dtype = jnp.dtype(dtype)
  wanted = _described(parameters.rounded_shapes(expected, dtype))
  found = _described(_one_by_one(params))
  for path, value in found.items():
    names = tuple(key.key for key in path if isinstance(key, jax.tree_util.DictKey))
    if len(names) == 3 and names[1] in ADAPTED:
      wanted[path] = _of_adapter(path, value, names, expected, dtype)
  for path in sorted({*wanted, *found}, key=jax.tree_util.keystr):
    got, should = found.get(path, "nothing"), wanted.get(path, "nothing")
    if got != should:
      slabs = jax.tree.leaves(expected["layers"])[1].shape[0]
      raise ValueError(
        f"{what}{jax.tree_util.keystr(path)}: got {_word(got)}, expected {_word(should)} in a model"
        f" of {decoder.shape.num_layers} layers with reduction_shards={slabs} in {dtype.name};"
        " create weights for these numerics with huggingface.load or parameters.init, then call"
        " compute_params."
      )


def _one_by_one(params: Any) -> Any:
  """Returns the params with stacked layers replaced by a list of single layers' shapes."""
  layers = params.get("layers") if isinstance(params, dict) else None
  if not isinstance(layers, dict):
    return params

  def at(index: int, leaf: Any) -> Any:
    is_there = leaf.ndim and index < leaf.shape[0]
    return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) if is_there else None

  most = max((leaf.shape[0] for leaf in jax.tree.leaves(layers) if leaf.ndim), default=0)
  parts = [jax.tree.map(lambda leaf, i=i: at(i, leaf), layers) for i in range(most)]
  return {**params, "layers": parts}


def _described(tree: Any) -> dict[Any, Any]:
  """Returns (shape, dtype) by path; the type's name for a leaf that is not an array."""
  leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
  return {
    path: (tuple(leaf.shape), jnp.dtype(leaf.dtype))
    if hasattr(leaf, "dtype") and hasattr(leaf, "shape") else type(leaf).__name__
    for path, leaf in leaves
  }  # fmt: skip


def _of_adapter(path: Any, value: Any, names: tuple[str, ...], expected: Any, dtype: Any) -> Any:
  """Returns the expected shape and dtype of an adapter's leaf of this rank."""
  index, (_, name, part) = path[1].idx, names
  if part == "scale":
    return (), jnp.dtype(jnp.float32)
  if part not in ("a", "b") or isinstance(value, str) or index >= len(expected["layers"]):
    return "nothing"
  shape = value[0]
  target, layer = ADAPTED[name], expected["layers"][index]
  if target not in layer:
    return "nothing"
  *slabs, rows, columns = layer[target].shape
  rank = (shape[-1] if part == "a" else shape[-2]) if len(shape) >= 2 else 0
  sizes = (rows, rank) if part == "a" else (rank, columns)
  is_sliced = target in lora.EXPERT_TARGETS or (part == "b") == (target in lora.COLUMN_TARGETS)
  return (*slabs, *sizes) if is_sliced else sizes, dtype


def _word(value: Any) -> str:
  return value if isinstance(value, str) else f"{value[1].name}{list(value[0])}"
