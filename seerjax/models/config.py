"""Shape of a decoder, and its number of slabs."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from seerjax import fields, layer_kinds, numerics as numerics_lib
from seerjax.backends.protocol import LayerShape
from seerjax.layer_kinds import Experts, LayerConfig
from seerjax.ops import norms
from seerjax.ops.routing import RoutingConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig:
  """Shape of one decoder; every difference between model families is a field.

  Attributes:
    vocab_size: rows of the embedding.
    hidden_size: d, features of a hidden row.
    layers: kind of each layer; `layer_kinds.uniform` makes equal ones.
    norm_eps: epsilon of every RMS norm.
    norm_weights: what every RMS norm multiplies by, in terms of its weights.
    embedding_scale: factor on embeddings, rounded to the compute dtype; None for none.
    logit_soft_cap: logits z become cap * tanh(z / cap), before anything else; None for none.
    is_tied: the head reads the embedding table.
    max_model_len: positions the model was made for; longer prompts are refused.
    family: family as which the model is saved (`models.families`): the one it was
      read from; "" is the first that can describe it. Shapes of other families may be equal.
  """

  vocab_size: int
  hidden_size: int
  layers: tuple[LayerConfig, ...]
  norm_eps: float = 1e-6
  norm_weights: norms.Weights = "w"
  embedding_scale: float | None = None
  logit_soft_cap: float | None = None
  is_tied: bool = True
  max_model_len: int = 4096
  family: str = dataclasses.field(default="", compare=False)

  def __post_init__(self):
    size = fields.at_least(1, "check config.json")
    fields.check(
      self, vocab_size=size, hidden_size=size, max_model_len=size,
      layers=fields.Rule("at least 1 layer", bool, "check config.json"),
      norm_eps=fields.Rule("0 < norm_eps < 1", lambda eps: 0 < eps < 1, "1e-6 is usual"),
      embedding_scale=fields.or_none(fields.positive("write None for no scale")),
      logit_soft_cap=fields.or_none(fields.positive("write None for no cap")),
    )  # fmt: skip

  def __hash__(self) -> int:
    # Programs are looked up by it in every step, so it does not read all layers.
    ends = (len(self.layers), self.layers[0], self.layers[-1])
    return hash((self.vocab_size, self.hidden_size, self.norm_eps, self.max_model_len, ends))

  @property
  def num_layers(self) -> int:
    """Number of layers."""
    return len(self.layers)

  @property
  def period(self) -> int:
    """Smallest number of layers that repeat, by their kinds; 1 if all are equal."""
    return _period(self.layers)

  @property
  def kv_features(self) -> int:
    """Numbers that the keys and values of one position have in all layers."""
    return sum(2 * at.attention.num_kv_heads * at.attention.head_dim for at in self.layers)

  @property
  def shares_kv_shape(self) -> bool:
    """Whether the keys and values of all layers have one shape."""
    return len({(at.attention.num_kv_heads, at.attention.head_dim) for at in self.layers}) == 1

  @property
  def routings(self) -> dict[int, RoutingConfig]:
    """Rule of the router of each layer with experts, by the layer's index."""
    parts = [layer.feed_forward for layer in self.layers]
    return {i: part.routing for i, part in enumerate(parts) if isinstance(part, Experts)}

  def only_kind(self, what: str) -> LayerConfig:
    """Returns the kind of all layers.

    Args:
      what: the feature that needs equal layers, for the message.

    Raises:
      NotImplementedError: if layers differ, naming the first difference.
    """
    if different := layer_kinds.difference(self.layers):
      raise NotImplementedError(
        f"{what}: got layers of different kinds ({different}), expected equal layers; use a model"
        " of equal layers."
      )
    return self.layers[0]

  def layer_shape(self, index: int, num_slabs: int = 1) -> LayerShape:
    """Returns what the stages of a layer need, for weights in `num_slabs` slabs."""
    kind = self.layers[index].in_slabs(num_slabs)
    return LayerShape(kind, self.norm_eps, self.norm_weights)

  def changed(self, *, num_layers: int | None = None, **changes: Any) -> TransformerConfig:
    """Returns the config with some fields changed; fields of a layer change in every layer.

    Args:
      num_layers: number of layers; further ones repeat the present ones in order.
      **changes: fields by name, of the config, of `LayerConfig` or of its parts.

    Raises:
      TypeError: for a field that neither the config nor a layer has.
    """
    own = {name: changes.pop(name) for name in vars(self) if name in changes}
    layers = own.pop("layers", self.layers)
    count = len(layers) if num_layers is None else num_layers
    of_kind = {layer: layer.changed(**changes) for layer in dict.fromkeys(layers)}
    layers = tuple(of_kind[layers[index % len(layers)]] for index in range(count))
    return dataclasses.replace(self, layers=layers, **own)


@functools.lru_cache(maxsize=64)
def _period(layers: tuple[LayerConfig, ...]) -> int:
  count = len(layers)
  repeats = lambda size: count % size == 0 and layers == layers[:size] * (count // size)
  return next(size for size in range(1, count + 1) if repeats(size))


def largest_shards(config: TransformerConfig) -> int:
  """Returns the largest power of two, at most 8, that `slabs_for` allows."""
  return max(count for count in (1, 2, 4, 8) if not _obstacle(config, count))


def slabs_for(config: TransformerConfig, asked: numerics_lib.NumericsConfig) -> int:
  """Returns the number of slabs: the requested one, or for 0 the largest that the model allows.

  Raises:
    ValueError: if the model does not allow the asked number, naming the dimension and both.
  """
  shards = asked.reduction_shards
  if not shards:
    return largest_shards(config)
  if expected := _obstacle(config, shards):
    raise ValueError(
      f"NumericsConfig.reduction_shards: got {shards}, expected {expected};"
      f" use reduction_shards={largest_shards(config)} for this model, or 0, which finds it."
    )
  return shards


def _obstacle(config: TransformerConfig, num_slabs: int) -> str:
  """Returns what a number of slabs should be instead, by the first field it breaks; "" if none.

  A slab has whole query heads: either all those of its key/value heads, or some of those of one
  head, which it shares with its neighbours.
  """
  kinds = list(dict.fromkeys(config.layers))
  sharded = [pair for layer in kinds for pair in layer.sharded.items()]
  for field, size in (*sharded, ("vocab_size", config.vocab_size)):
    if size % num_slabs:
      return f"a divisor of {field}={size}"
  for layer in kinds:
    heads = layer.attention.num_kv_heads
    if heads % num_slabs and num_slabs % heads:
      return f"a divisor or a multiple of num_kv_heads={heads}"
  return ""
