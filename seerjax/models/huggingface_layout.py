"""Maps our parameters to the tensors of a Hugging Face checkpoint, and back.

q_proj [h c, d], k_proj, v_proj  <->  qkv      f32[r, d, queries | keys | values of the slab]
o_proj [d, h c]                  <->  out      f32[r, h c / r, d]
gate_proj, up_proj               <->  gate_up  f32[r, d, gate | up of the slab]
down_proj                        <->  down     f32[r, e / r, d]
lm_head [v, d]                   <->  head     f32[r, v / r, d]
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import numpy as np

from seerjax.models import config as model_config, parameters


class Leaf(NamedTuple):
  """The checkpoint tensors of one parameter.

  Attributes:
    kind: "plain", "columns" (output features in slabs), "bias", "rows" (input features in slabs)
      or "table" (rows of the vocabulary in slabs).
    tensors: (name, shape) of the checkpoint's tensors, side by side in the slab's last axis.
  """

  kind: Literal["plain", "columns", "bias", "rows", "table"]
  tensors: tuple[tuple[str, tuple[int, ...]], ...]


# (path in `Params`, its `Leaf`) of every parameter.
Plan: TypeAlias = list[tuple[tuple[Any, ...], Leaf]]


def plan(config: model_config.TransformerConfig) -> Plan:
  """Returns (path in `Params`, its `Leaf`) of every parameter, in the checkpoint's order."""
  d = config.hidden_size
  found: Plan = [
    (("embed",), Leaf("plain", (("model.embed_tokens.weight", (config.vocab_size, d)),)))
  ]
  for index, kind in enumerate(config.layers):
    c, inner = kind.attention.head_dim, kind.gated("checkpoint").intermediate_size
    q_size, kv_size = kind.attention.num_heads * c, kind.attention.num_kv_heads * c
    prefix = f"model.layers.{index}."
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    heads = (("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size))
    leaves = {
      "attention_norm": Leaf("plain", ((prefix + "input_layernorm.weight", (d,)),)),
      "qkv": Leaf("columns", tuple((f"{attention}{n}.weight", (size, d)) for n, size in heads)),
      "out": Leaf("rows", ((attention + "o_proj.weight", (d, q_size)),)),
      "mlp_norm": Leaf("plain", ((prefix + "post_attention_layernorm.weight", (d,)),)),
      "gate_up": Leaf(
        "columns", ((mlp + "gate_proj.weight", (inner, d)), (mlp + "up_proj.weight", (inner, d)))
      ),
      "down": Leaf("rows", ((mlp + "down_proj.weight", (d, inner)),)),
    }
    if kind.attention.has_qkv_biases:
      leaves["qkv_bias"] = Leaf(
        "bias", tuple((f"{attention}{name}.bias", (size,)) for name, size in heads)
      )
    if kind.attention.has_qk_norms:
      leaves["query_norm"] = Leaf("plain", ((attention + "q_norm.weight", (c,)),))
      leaves["key_norm"] = Leaf("plain", ((attention + "k_norm.weight", (c,)),))
    found.extend((("layers", index, name), leaf) for name, leaf in leaves.items())
  found.append((("final_norm",), Leaf("plain", (("model.norm.weight", (d,)),))))
  if not config.is_tied:
    found.append((("head",), Leaf("table", (("lm_head.weight", (config.vocab_size, d)),))))
  return found


def to_slabs(kind: str, tensor: np.ndarray, shards: int) -> np.ndarray:
  """Returns a view of one of the checkpoint's tensors, f32[e, d] or f32[e], in our layout."""
  if kind == "columns":  # [r e, d] -> [r, d, e]
    return np.swapaxes(tensor.reshape(shards, -1, tensor.shape[1]), 1, 2)
  if kind == "rows":  # [d, r e] -> [r, e, d]
    return tensor.T.reshape(shards, -1, tensor.shape[0])
  if kind == "plain":
    return tensor
  return tensor.reshape(shards, -1, *tensor.shape[1:])  # "bias" and "table".


def from_slabs(kind: str, part: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
  """Inverts `to_slabs`: returns a tensor of `shape` from f32[r, ...]."""
  if kind == "columns":
    return np.swapaxes(part, 1, 2).reshape(shape)
  if kind == "rows":
    return part.reshape(shape[1], shape[0]).T
  return part.reshape(shape)


def tensors(
  params: parameters.Params, plan: Plan, dtype: np.dtype
) -> Iterator[tuple[str, np.ndarray]]:
  """Yields (name, values) of every tensor of the checkpoint, in the order of `plan`."""
  for path, leaf in plan:
    whole: Any = params
    for key in path:
      whole = whole[key]
    whole, first = np.asarray(whole), 0
    widths = _widths(leaf, whole)
    for (name, shape), width in zip(leaf.tensors, widths, strict=True):
      part = whole[..., first : first + width]
      first += width
      yield name, np.ascontiguousarray(from_slabs(leaf.kind, part, shape).astype(dtype))


def check_layout(params: parameters.Params, config: model_config.TransformerConfig) -> None:
  """Refuses parameters that are not in the layout of a configuration, for any number of slabs.

  Raises:
    ValueError: naming the first path that differs.
  """
  layers = params.get("layers", [])
  shards = layers[0]["out"].shape[0] if layers and "out" in layers[0] else 1
  flat_expected = jax.tree_util.tree_flatten_with_path(parameters.shapes(config, shards))[0]
  flat_found = jax.tree_util.tree_flatten_with_path(params)[0]
  expected = {jax.tree_util.keystr(path): leaf.shape for path, leaf in flat_expected}
  found = {jax.tree_util.keystr(path): leaf.shape for path, leaf in flat_found}
  for path in sorted(set(expected) | set(found)):
    if path not in expected or path not in found or expected[path] != found[path]:
      got = found.get(path, "nothing")
      wanted = expected.get(path, "nothing")
      raise ValueError(
        f"save: params{path}: got {got}, expected {wanted} with {shards} slabs; pass the"
        " configuration of these parameters."
      )


def _widths(leaf: Leaf, whole: np.ndarray) -> list[int]:
  """Returns the width of each tensor of a leaf in the last axis."""
  if leaf.kind in ("columns", "bias"):
    return [shape[0] // whole.shape[0] for _, shape in leaf.tensors]
  return [whole.shape[-1]]
