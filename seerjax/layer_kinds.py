"""Kinds of a decoder's layers, as data: a layer is an attention and a feed-forward part.

    LayerConfig = attention: Grouped + feed_forward: Gated or Experts

Layers of one model may differ. A kind is a frozen record, so that every difference between layers
is a field, and equal layers are equal records.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from seerjax import fields
from seerjax.ops import attention as attention_lib, rotary as rotary_lib
from seerjax.ops.routing import RoutingConfig

_SIZE = fields.at_least(1, "check config.json")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grouped:
  """Attention in which groups of query heads share key/value heads.

  Attributes:
    num_heads: query heads.
    num_kv_heads: key/value heads; `num_heads / num_kv_heads` queries share one.
    head_dim: c, features of a head.
    has_qk_norms: an RMS norm on every head's queries and keys, before the rotation (Qwen3).
    has_qkv_biases: biases on queries, keys and values (Qwen2.5).
    window: positions that a row sees, its own included; None for all before it.
    soft_cap: scores s become soft_cap * tanh(s / soft_cap); None for none.
    scale: factor on scores; None is 1 / sqrt(head_dim).
    has_sinks: a learned score per query head that takes weight from the keys.
    rotary: rotary embedding of queries and keys.
  """

  num_heads: int
  num_kv_heads: int
  head_dim: int
  has_qk_norms: bool = False
  has_qkv_biases: bool = False
  window: int | None = None
  soft_cap: float | None = None
  scale: float | None = None
  has_sinks: bool = False
  rotary: rotary_lib.RotaryConfig

  def __post_init__(self):
    fields.check(self, num_heads=_SIZE, num_kv_heads=_SIZE)
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
        f"Grouped.num_heads: got {self.num_heads} query heads for {self.num_kv_heads}"
        " key/value heads, expected a multiple; check config.json."
      )
    if self.rotary.head_dim != self.head_dim:
      raise ValueError(
        f"Grouped.rotary.head_dim: got {self.rotary.head_dim}, expected"
        f" head_dim={self.head_dim}; make them equal."
      )
    assert self.rule  # Checks its fields.

  @property
  def rule(self) -> attention_lib.AttentionRule:
    """Rule of the attention."""
    return attention_lib.AttentionRule(window=self.window, soft_cap=self.soft_cap, scale=self.scale)

  @property
  def group(self) -> int:
    """Number of query heads per key/value head."""
    return self.num_heads // self.num_kv_heads

  @property
  def sharded(self) -> dict[str, int]:
    """Sizes, by field, that the number of slabs must divide; a slab has whole query heads."""
    return {"num_heads": self.num_heads}

  def copies(self, num_slabs: int) -> int:
    """Returns the number of consecutive slabs that share one key/value head."""
    return max(1, num_slabs // self.num_kv_heads)

  def in_slabs(self, num_slabs: int) -> Grouped:
    """Returns the kind as slabs compute it: a key/value head that several share is in each."""
    heads = self.num_kv_heads * self.copies(num_slabs)
    return self if heads == self.num_kv_heads else dataclasses.replace(self, num_kv_heads=heads)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gated:
  """A gated MLP: activation(x @ gate) * (x @ up) @ down.

  Attributes:
    intermediate_size: features inside the MLP.
    activation: function of the gate; "gelu_tanh" is gelu in its tanh form.
  """

  intermediate_size: int
  activation: Literal["silu", "gelu_tanh"] = "silu"

  def __post_init__(self):
    fields.check(self, intermediate_size=_SIZE)

  @property
  def sharded(self) -> dict[str, int]:
    """Sizes, by field, that the number of slabs must divide."""
    return {"intermediate_size": self.intermediate_size}

  @property
  def row_features(self) -> int:
    """Features inside the MLP that one row computes."""
    return self.intermediate_size

  @property
  def all_features(self) -> int:
    """Features inside the MLP that the weights have."""
    return self.intermediate_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts:
  """A mixture of gated MLPs: each row runs some of them, its experts, and adds them by weight.

  Attributes:
    routing: rule by which rows choose experts.
    expert_size: features inside one expert.
    shared_size: features inside a gated MLP that every row runs too; 0 for none.
    activation: function of the gates.
  """

  routing: RoutingConfig
  expert_size: int
  shared_size: int = 0
  activation: Literal["silu"] = "silu"

  def __post_init__(self):
    shared = fields.at_least(0, "0 is a layer without one")
    fields.check(self, expert_size=_SIZE, shared_size=shared)

  @property
  def sharded(self) -> dict[str, int]:
    """Sizes, by field, that the number of slabs must divide; a slab has whole experts."""
    shared = {"shared_size": self.shared_size} if self.shared_size else {}
    return {"num_experts": self.routing.num_experts} | shared

  @property
  def row_features(self) -> int:
    """Features inside the MLPs that one row computes."""
    return self.routing.num_chosen * self.expert_size + self.shared_size

  @property
  def all_features(self) -> int:
    """Features inside the MLPs that the weights have."""
    return self.routing.num_experts * self.expert_size + self.shared_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerConfig:
  """The kind of one layer.

  Attributes:
    attention: kind of the attention.
    feed_forward: kind of the part after attention.
    norm_placement: "pre" normalises the input of attention and of the feed-forward part,
      "pre_and_post" also their outputs, before they are added to the residual stream.
  """

  attention: Grouped
  feed_forward: Gated | Experts
  norm_placement: Literal["pre", "pre_and_post"] = "pre"

  def __post_init__(self):
    fields.check(self)

  @property
  def sharded(self) -> dict[str, int]:
    """Sizes, by field, that the number of slabs must divide."""
    return self.attention.sharded | self.feed_forward.sharded

  def in_slabs(self, num_slabs: int) -> LayerConfig:
    """Returns the kind as slabs compute it; see `Grouped.in_slabs`."""
    own = self.attention.in_slabs(num_slabs)
    return self if own is self.attention else dataclasses.replace(self, attention=own)

  def gated(self, what: str) -> Gated:
    """Returns the part after attention of a layer without experts.

    Args:
      what: the feature that needs one, for the message.

    Raises:
      NotImplementedError: for a layer with experts.
    """
    if isinstance(self.feed_forward, Gated):
      return self.feed_forward
    count = self.feed_forward.routing.num_experts
    raise NotImplementedError(
      f"{what}: got a layer of num_experts={count}, expected a gated MLP in every layer; use a"
      " model without experts."
    )

  def changed(self, **changes: Any) -> LayerConfig:
    """Returns the kind with some fields changed, its own and those of its parts."""
    parts: dict[str, Any] = {}
    for name in ("attention", "feed_forward"):
      part = changes.get(name, vars(self)[name])
      known = {field.name for field in dataclasses.fields(part)}
      of_part = {field: changes.pop(field) for field in known & set(changes)}
      parts[name] = dataclasses.replace(part, **of_part)
    return dataclasses.replace(self, **(changes | parts))


def uniform(layer: LayerConfig, num_layers: int) -> tuple[LayerConfig, ...]:
  """Returns the layers of a model in which all are of one kind."""
  return (layer,) * num_layers


def difference(layers: tuple[LayerConfig, ...]) -> str:
  """Returns the first difference of a layer from the first one, for messages; "" if there is none.

  An example is "layer 3 has intermediate_size=64, layer 0 has intermediate_size=32".
  """
  index = next((i for i, layer in enumerate(layers) if layer != layers[0]), None)
  if index is None:
    return ""
  own, first = _flat(layers[index]), _flat(layers[0])
  names = [name for name in own | first if own.get(name) != first.get(name)]
  described = lambda values: ", ".join(f"{name}={values.get(name)}" for name in names)
  return f"layer {index} has {described(own)}, layer 0 has {described(first)}"


def _flat(layer: LayerConfig) -> dict[str, Any]:
  parts = (layer.attention, layer.feed_forward)
  kinds: dict[str, Any] = {"kinds": tuple(type(part).__name__ for part in parts)}
  return (
    kinds
    | {name: value for part in parts for name, value in vars(part).items()}
    | {"norm_placement": layer.norm_placement}
  )
