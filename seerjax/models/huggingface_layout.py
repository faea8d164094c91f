"""Maps our parameters to the tensors of a Hugging Face checkpoint, and back.

q_proj [h c, d], k_proj, v_proj  <->  qkv      f32[r, d, queries | keys | values of the slab]
o_proj [d, h c]                  <->  out      f32[r, h c / r, d]
gate_proj, up_proj               <->  gate_up  f32[r, d, gate | up of the slab]
down_proj                        <->  down     f32[r, e / r, d]
lm_head [v, d]                   <->  head     f32[r, v / r, d]

mlp.gate [E, d]                  <->  router          f32[d, E]
experts.n.gate_proj, up_proj     <->  expert_gate_up  f32[r, E / r, d, gate | up of the expert]
experts.n.down_proj              <->  expert_down     f32[r, E / r, e, d]

Experts are also read as transformers 5 holds them: stacked, gate_up_proj [E, 2 e, d], down_proj
[E, d, e].
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
import itertools
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import numpy as np

from seerjax.layer_kinds import Experts
from seerjax.models import config as model_config, parameters


class Leaf(NamedTuple):
  """The checkpoint tensors of one parameter.

  Attributes:
    kind: "plain", "turned" (transposed), "columns" (output features in slabs), "bias", "rows"
      (input features in slabs), "table" (rows of the vocabulary in slabs), "experts" (each expert
      transposed) or "stacked" (the same for a tensor of all experts).
    tensors: (name, shape) of the checkpoint's tensors, side by side in the slab's last axis; of
      "experts" those of expert 0, then those of expert 1, and so on.
    num_experts: number of experts, for "experts".
    stacked: (name, shape) of the one tensor that a checkpoint may have in place of `tensors`.
    num_kv_heads: number of heads of the tensors after the first, for queries, keys and values; a
      head that several slabs share is in each of them, and is written from the first.
  """

  kind: Literal["plain", "turned", "columns", "bias", "rows", "table", "experts", "stacked"]
  tensors: tuple[tuple[str, tuple[int, ...]], ...]
  num_experts: int = 0
  stacked: tuple[str, tuple[int, ...]] | None = None
  num_kv_heads: int = 0

  def copies(self, index: int, num_slabs: int) -> int:
    """Returns the number of slabs that share a part of tensor `index`."""
    return max(1, num_slabs // self.num_kv_heads) if index and self.num_kv_heads else 1


# Names of a layer's norms by `LayerConfig.norm_placement`.
NORMS: dict[str, dict[str, str]] = {
  "pre": {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
  "pre_and_post": {
    "attention_norm": "input_layernorm",
    "attention_out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
  },
}

# (path in `Params`, its `Leaf`) of every parameter.
Plan: TypeAlias = list[tuple[tuple[Any, ...], Leaf]]


def plan(config: model_config.TransformerConfig) -> Plan:
  """Returns (path in `Params`, its `Leaf`) of every parameter, in the checkpoint's order.

  Raises:
    NotImplementedError: for experts with a shared MLP or biases.
  """
  d = config.hidden_size
  found: Plan = [
    (("embed",), Leaf("plain", (("model.embed_tokens.weight", (config.vocab_size, d)),)))
  ]
  for index, kind in enumerate(config.layers):
    c, norms = kind.attention.head_dim, NORMS[kind.norm_placement]
    q_size, kv_size = kind.attention.num_heads * c, kind.attention.num_kv_heads * c
    prefix = f"model.layers.{index}."
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    heads = (("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size))
    leaves = {
      "attention_norm": Leaf("plain", ((f"{prefix}{norms['attention_norm']}.weight", (d,)),)),
      "qkv": Leaf(
        "columns",
        tuple((f"{attention}{name}.weight", (size, d)) for name, size in heads),
        num_kv_heads=kind.attention.num_kv_heads,
      ),
      "out": Leaf("rows", ((attention + "o_proj.weight", (d, q_size)),)),
      "mlp_norm": Leaf("plain", ((f"{prefix}{norms['mlp_norm']}.weight", (d,)),)),
    }
    if isinstance(kind.feed_forward, Experts):
      leaves |= _of_experts(kind.feed_forward, mlp, d)
    else:
      inner = kind.feed_forward.intermediate_size
      wide = tuple((f"{mlp}{name}_proj.weight", (inner, d)) for name in ("gate", "up"))
      leaves["gate_up"] = Leaf("columns", wide)
      leaves["down"] = Leaf("rows", ((mlp + "down_proj.weight", (d, inner)),))
    if kind.attention.has_qkv_biases:
      leaves["qkv_bias"] = Leaf(
        "bias",
        tuple((f"{attention}{name}.bias", (size,)) for name, size in heads),
        num_kv_heads=kind.attention.num_kv_heads,
      )
    if kind.attention.has_qk_norms:
      leaves["query_norm"] = Leaf("plain", ((attention + "q_norm.weight", (c,)),))
      leaves["key_norm"] = Leaf("plain", ((attention + "k_norm.weight", (c,)),))
    for name in parameters.POST_NORMS:
      if name in norms:
        leaves[name] = Leaf("plain", ((f"{prefix}{norms[name]}.weight", (d,)),))
    found.extend((("layers", index, name), leaf) for name, leaf in leaves.items())
  found.append((("final_norm",), Leaf("plain", (("model.norm.weight", (d,)),))))
  if not config.is_tied:
    found.append((("head",), Leaf("table", (("lm_head.weight", (config.vocab_size, d)),))))
  return found


def _of_experts(kind: Experts, mlp: str, d: int) -> dict[str, Leaf]:
  """Returns the leaves of one layer's router and experts."""
  routing = kind.routing
  if kind.shared_size or routing.has_bias or routing.has_correction_bias:
    raise NotImplementedError(
      f"checkpoint: got {kind}, expected experts without a shared MLP and without biases; these"
      " tensors have no names here."
    )
  count, inner, own = routing.num_experts, kind.expert_size, mlp + "experts."
  of = lambda name, *shape: [(f"{own}{index}.{name}_proj.weight", shape) for index in range(count)]
  pairs = zip(of("gate", inner, d), of("up", inner, d), strict=True)
  wide = tuple(tensor for pair in pairs for tensor in pair)
  return {
    "router": Leaf("turned", ((mlp + "gate.weight", (count, d)),)),
    "expert_gate_up": Leaf("experts", wide, count, (own + "gate_up_proj", (count, 2 * inner, d))),
    "expert_down": Leaf(
      "experts", tuple(of("down", d, inner)), count, (own + "down_proj", (count, d, inner))
    ),
  }


def as_stored(plan: Plan, names: Collection[str]) -> Plan:
  """Returns a plan with the tensors of all experts where a checkpoint has these names."""
  return [
    (path, Leaf("stacked", (leaf.stacked,)) if leaf.stacked and leaf.stacked[0] in names else leaf)
    for path, leaf in plan
  ]


def assembled(
  leaf: Leaf,
  read: Callable[[str, tuple[int, ...]], np.ndarray],
  shape: tuple[int, ...],
  dtype: Any,
) -> np.ndarray:
  """Returns a parameter from its tensors, which are read one at a time.

  Args:
    leaf: tensors of the parameter.
    read: function of a tensor's name and shape, to its values.
    shape: shape of the parameter.
    dtype: dtype of the parameter.
  """
  if leaf.kind == "experts":
    whole = np.empty(shape, dtype)
    by_expert = whole.reshape(-1, *shape[2:])
    each = len(leaf.tensors) // leaf.num_experts
    for number, (name, tensor_shape) in enumerate(leaf.tensors):
      part = read(name, tensor_shape).T
      index, place = divmod(number, each)
      by_expert[index][:, place * part.shape[1] : (place + 1) * part.shape[1]] = part
    return whole

  def of_tensor(index: int, tensor: tuple[str, tuple[int, ...]]) -> np.ndarray:
    copies = leaf.copies(index, shape[0])
    own = to_slabs(leaf.kind, read(*tensor), shape[0] // copies if copies > 1 else shape[0])
    return np.repeat(own, copies, axis=0) if copies > 1 else own

  parts = itertools.starmap(of_tensor, enumerate(leaf.tensors))
  return _side_by_side(parts, len(leaf.tensors), shape, dtype)


def _side_by_side(
  parts: Iterator[np.ndarray], count: int, shape: tuple[int, ...], dtype: Any
) -> np.ndarray:
  """Concatenates parts along the last axis; a single part is not copied unless necessary."""
  if count == 1:
    return np.ascontiguousarray(next(parts).astype(dtype, copy=False))
  whole, first = np.empty(shape, dtype), 0
  for part in parts:
    whole[..., first : first + part.shape[-1]] = part
    first += part.shape[-1]
  return whole


def to_slabs(kind: str, tensor: np.ndarray, shards: int) -> np.ndarray:
  """Returns a view of one of the checkpoint's tensors, f32[e, d] or f32[e], in our layout."""
  if kind == "columns":  # [r e, d] -> [r, d, e]
    return np.swapaxes(tensor.reshape(shards, -1, tensor.shape[1]), 1, 2)
  if kind == "rows":  # [d, r e] -> [r, e, d]
    return tensor.T.reshape(shards, -1, tensor.shape[0])
  if kind == "plain":
    return tensor
  if kind == "turned":
    return tensor.T
  if kind == "stacked":  # [r E, a, b] -> [r, E, b, a]
    return np.swapaxes(tensor, 1, 2).reshape(shards, -1, tensor.shape[2], tensor.shape[1])
  return tensor.reshape(shards, -1, *tensor.shape[1:])  # "bias" and "table".


def from_slabs(kind: str, part: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
  """Inverts `to_slabs`: returns a tensor of `shape` from f32[r, ...]."""
  if kind == "columns":
    return np.swapaxes(part, 1, 2).reshape(shape)
  if kind == "rows":
    return part.reshape(shape[1], shape[0]).T
  if kind in ("turned", "experts"):
    return part.T
  return part.reshape(shape)


def tensors(
  params: parameters.Params, plan: Plan, dtype: np.dtype
) -> Iterator[tuple[str, np.ndarray]]:
  """Yields (name, values) of every tensor of the checkpoint, in the order of `plan`."""
  for path, leaf in plan:
    whole: Any = params
    for key in path:
      whole = whole[key]
    whole = np.asarray(whole)
    parts = _parts(leaf, whole)
    for (name, shape), part in zip(leaf.tensors, parts, strict=True):
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


def _parts(leaf: Leaf, whole: np.ndarray) -> Iterator[np.ndarray]:
  """Yields the part of a parameter that each tensor of its leaf has, in our layout."""
  if leaf.kind == "experts":
    by_expert = whole.reshape(-1, *whole.shape[2:])
    each = len(leaf.tensors) // leaf.num_experts
    for own in by_expert:
      yield from np.split(own, each, axis=-1)
    return
  first = 0
  for index, (_, shape) in enumerate(leaf.tensors):
    copies = leaf.copies(index, whole.shape[0])
    has_widths = leaf.kind in ("columns", "bias")
    width = shape[0] * copies // whole.shape[0] if has_widths else whole.shape[-1]
    yield (
      whole[::copies, ..., first : first + width]
      if copies > 1
      else whole[..., first : first + width]
    )
    first += width
