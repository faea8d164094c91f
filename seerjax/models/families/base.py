"""The record of a family of models, and what families of one kind of layer share.

    config.json  -- family.read -->   TransformerConfig  -- family.written -->  config.json
    tensors      -- family.tensors --> parameters, both ways

Every field of config.json that would change the computation is either read or refused by name, so a
model never runs as something other than its file describes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any

from seerjax import layer_kinds
from seerjax.backends import layer_support
from seerjax.layer_kinds import Experts, Gated, Grouped, LayerConfig
from seerjax.models import huggingface_layout, rope_fields
from seerjax.models.config import TransformerConfig
from seerjax.models.config_fields import Fields

# What a refused field of config.json would need.
UNSUPPORTED = "this release does not compute it; choose another checkpoint"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gguf:
  """A family's form in GGUF files.

  Attributes:
    architecture: value of general.architecture, and the prefix of its keys.
    turns_heads: whether the rows of a head's queries and keys are interleaved.
    norm_offset: number by which a file's norms exceed ours.
    names: names of a layer's tensors that differ from `gguf_tensors.LAYER`, by Hugging Face's.
    keys: further keys of the architecture, with allowed values as in `gguf_config.KEYS`.
    completed: returns a shape, given the keys and the equal layers that the usual keys describe;
      None for families of equal layers.
    divided: inverts `completed`: returns the equal layers, and further keys; raises
      NotImplementedError for a shape that no file describes.
  """

  architecture: str
  turns_heads: bool = False
  norm_offset: float = 0.0
  names: Mapping[str, str] = dataclasses.field(default_factory=dict)
  keys: Mapping[str, tuple[Any, ...] | None] = dataclasses.field(default_factory=dict)
  completed: Callable[[Fields, TransformerConfig], TransformerConfig] | None = None
  divided: Callable[[TransformerConfig], tuple[TransformerConfig, dict[str, Any]]] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
  """A family of models: data and functions, all in one file.

  Attributes:
    model_type: name of the family in config.json.
    architecture: name of its class in config.json.
    read: returns the shape that a config.json describes; raises ValueError naming a field.
    written: returns the fields of config.json that describe a shape, without the names above.
    describes: whether checkpoints of the family can have this shape.
    tensors: checkpoint tensors of every parameter, which serve reading and writing.
    attention: fields of `Grouped` that the family determines; a GGUF file does not have them.
    gguf: its form in GGUF files; None if there is none.
    sizes: shapes of its published models, by their names on the Hub in lower case.
  """

  model_type: str
  architecture: str
  read: Callable[[Fields], TransformerConfig]
  written: Callable[[TransformerConfig], dict[str, Any]]
  describes: Callable[[TransformerConfig], bool]
  tensors: Callable[[TransformerConfig], huggingface_layout.Plan] = huggingface_layout.plan
  attention: Mapping[str, bool] = dataclasses.field(default_factory=dict)
  gguf: Gguf | None = None
  sizes: Mapping[str, TransformerConfig] = dataclasses.field(default_factory=dict)


def refuse_unsupported(fields: Fields, *biases: str) -> None:
  """Refuses fields that change the computation of every family; all of these `biases` are false.

  Raises:
    ValueError: naming the field.
  """
  if fields.get("hidden_act") not in (None, "silu"):
    raise fields.refuse("hidden_act", "'silu'", UNSUPPORTED)
  for field in ("quantization_config", "compression_config"):
    if fields.get(field) is not None:
      raise fields.refuse(field, "none", "use the checkpoint in bfloat16 or float32")
  for field in biases:
    if fields.flag(field):
      raise fields.refuse(field, "false", UNSUPPORTED)
  if fields.get("dual_chunk_attention_config") is not None:
    raise fields.refuse("dual_chunk_attention_config", "none", UNSUPPORTED)
  if fields.get("partial_rotary_factor") not in (None, 1):
    raise fields.refuse("partial_rotary_factor", "1", UNSUPPORTED)
  layer_types = fields.get("layer_types")
  if layer_types is not None and (
    not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types)
  ):
    raise fields.refuse("layer_types", "'full_attention' in every layer", UNSUPPORTED)


def refuse_windows(fields: Fields) -> None:
  """Refuses windows in the spelling of Qwen and Llama, if a layer would have one.

  Raises:
    ValueError: naming the field.
  """
  if fields.get("layer_types") is None and fields.flag("use_sliding_window"):
    is_reached = fields.whole("num_hidden_layers") > fields.whole("max_window_layers", 28)
    if fields.get("sliding_window") is not None and is_reached:
      raise fields.refuse("use_sliding_window", "false", UNSUPPORTED)


def read_equal_layers(
  fields: Fields, attention: Mapping[str, bool], *, head_dim: int = 0
) -> TransformerConfig:
  """Returns the shape of a model of equal layers with grouped attention and a gated MLP.

  Args:
    fields: config.json.
    attention: fields of `Grouped` that the family determines.
    head_dim: features of a head if the file does not have them; 0 divides the hidden ones.

  Raises:
    ValueError: naming the field that is missing or malformed.
  """
  gated = Gated(intermediate_size=fields.whole("intermediate_size"))
  parts = [gated] * fields.layers("num_hidden_layers")
  return read_equal_attention(fields, attention, parts, head_dim=head_dim)


def read_equal_attention(
  fields: Fields,
  attention: Mapping[str, bool],
  feed_forwards: Sequence[Gated | Experts],
  *,
  head_dim: int = 0,
) -> TransformerConfig:
  """Works like `read_equal_layers`, given the part after attention of every layer."""
  hidden_size, num_heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
  head_dim = fields.whole("head_dim", head_dim or max(hidden_size // num_heads, 1))
  max_model_len = fields.whole("max_position_embeddings")
  grouped = Grouped(
    num_heads=num_heads,
    num_kv_heads=fields.whole("num_key_value_heads", num_heads),
    head_dim=head_dim,
    rotary=rope_fields.read(fields, head_dim, max_model_len),
    **attention,
  )
  return TransformerConfig(
    vocab_size=fields.whole("vocab_size"),
    hidden_size=hidden_size,
    layers=tuple(LayerConfig(attention=grouped, feed_forward=part) for part in feed_forwards),
    norm_eps=fields.number("rms_norm_eps", 1e-6),
    is_tied=fields.flag("tie_word_embeddings"),
    max_model_len=max_model_len,
  )


def write_equal_layers(config: TransformerConfig) -> dict[str, Any]:
  """Returns the fields of config.json that `read_equal_layers` reads.

  Raises:
    NotImplementedError: if layers differ.
  """
  inner = config.only_kind("config.json").gated("config.json").intermediate_size
  return write_equal_attention(config) | {"intermediate_size": inner}


def write_equal_attention(config: TransformerConfig) -> dict[str, Any]:
  """Works like `write_equal_layers`, without the fields of the parts after attention."""
  kind = config.layers[0].attention
  return {
    "attention_dropout": 0.0,
    "head_dim": kind.head_dim,
    "hidden_act": "silu",
    "hidden_size": config.hidden_size,
    "max_position_embeddings": config.max_model_len,
    "num_attention_heads": kind.num_heads,
    "num_hidden_layers": config.num_layers,
    "num_key_value_heads": kind.num_kv_heads,
    "rms_norm_eps": config.norm_eps,
    **rope_fields.written(kind.rotary),
    "tie_word_embeddings": config.is_tied,
    "vocab_size": config.vocab_size,
  }


def has_equal_layers(config: TransformerConfig, attention: Mapping[str, bool]) -> bool:
  """Returns whether all layers are equal, with these fields of `Grouped` and the others plain."""
  kind = config.layers[0]
  if not isinstance(kind.feed_forward, Gated):
    return False
  plain = Grouped(
    num_heads=kind.attention.num_heads,
    num_kv_heads=kind.attention.num_kv_heads,
    head_dim=kind.attention.head_dim,
    rotary=kind.attention.rotary,
    **attention,
  )
  inner = kind.feed_forward.intermediate_size
  expected = LayerConfig(attention=plain, feed_forward=Gated(intermediate_size=inner))
  is_plain = not layer_support.beyond_dense(config)  # Scales and caps of the whole model, too.
  return is_plain and all(layer == expected for layer in config.layers)


def equal_layers(
  num_layers: int, intermediate_size: int, **attention: Any
) -> tuple[LayerConfig, ...]:
  """Returns equal layers with the given fields of `Grouped`, for the shapes of published models."""
  feed_forward = Gated(intermediate_size=intermediate_size)
  layer = LayerConfig(attention=Grouped(**attention), feed_forward=feed_forward)
  return layer_kinds.uniform(layer, num_layers)
