"""Converts between a Hugging Face config.json and our `TransformerConfig`.

    config.json  -- read -->  TransformerConfig  -- to_object -->  config.json

Every field that would change the computation is either supported or refused by name, so a model
never runs as something other than its file describes.
"""

from __future__ import annotations

import pathlib
from typing import Any, NamedTuple

from seerjax import layer_kinds
from seerjax.backends import layer_support
from seerjax.layer_kinds import Gated, Grouped, LayerConfig
from seerjax.models import config as model_config, config_fields, rope_fields


class Family(NamedTuple):
  """The part of our configuration that a checkpoint's `model_type` determines.

  Attributes:
    architecture: name of the architecture in its config.json.
    has_qk_norms: field of `TransformerConfig`.
    has_qkv_biases: field of `TransformerConfig`.
  """

  architecture: str
  has_qk_norms: bool
  has_qkv_biases: bool


FAMILIES = {
  "qwen3": Family("Qwen3ForCausalLM", has_qk_norms=True, has_qkv_biases=False),
  "qwen2": Family("Qwen2ForCausalLM", has_qk_norms=False, has_qkv_biases=True),
  "llama": Family("LlamaForCausalLM", has_qk_norms=False, has_qkv_biases=False),
}


def read(path: pathlib.Path) -> model_config.TransformerConfig:
  """Reads config.json, in the spellings of transformers 4 and 5.

  Raises:
    FileNotFoundError: if there is no such file.
    ValueError: naming the field that is missing, malformed or not supported.
  """
  fields = config_fields.Fields(path, config_fields.read_object(path))
  family = _family(fields)
  _refuse_unsupported(fields, family)
  hidden_size, num_heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
  default_head_dim = 128 if family == "qwen3" else max(hidden_size // num_heads, 1)
  head_dim = fields.whole("head_dim", default_head_dim)
  max_model_len = fields.whole("max_position_embeddings")
  vocab_size, intermediate_size = fields.whole("vocab_size"), fields.whole("intermediate_size")
  num_layers = fields.layers("num_hidden_layers")
  attention = Grouped(
    num_heads=num_heads,
    num_kv_heads=fields.whole("num_key_value_heads", num_heads),
    head_dim=head_dim,
    has_qk_norms=FAMILIES[family].has_qk_norms,
    has_qkv_biases=FAMILIES[family].has_qkv_biases,
    rotary=rope_fields.read(fields, head_dim, max_model_len),
  )
  layer = LayerConfig(attention=attention, feed_forward=Gated(intermediate_size=intermediate_size))
  return model_config.TransformerConfig(
    vocab_size=vocab_size,
    hidden_size=hidden_size,
    layers=layer_kinds.uniform(layer, num_layers),
    norm_eps=fields.number("rms_norm_eps", 1e-6),
    is_tied=fields.flag("tie_word_embeddings"),
    max_model_len=max_model_len,
  )


def family_of(config: model_config.TransformerConfig) -> str:
  """Returns the `model_type` of checkpoints with this configuration.

  Raises:
    ValueError: if there is none.
  """
  if found := layer_support.only_tiled(config):
    raise ValueError(
      f"TransformerConfig: {found}, expected one of {tuple(FAMILIES)}; transformers has no"
      " config.json for this model."
    )
  kind = config.only_kind("config.json").attention
  adds = (kind.has_qk_norms, kind.has_qkv_biases)
  for name, family in FAMILIES.items():
    if (family.has_qk_norms, family.has_qkv_biases) == adds:
      return name
  raise ValueError(
    f"TransformerConfig: got has_qk_norms={kind.has_qk_norms} and"
    f" has_qkv_biases={kind.has_qkv_biases}, expected the combination of one of"
    f" {tuple(FAMILIES)}; transformers has no config.json for this model."
  )


def to_object(
  config: model_config.TransformerConfig, dtype: str, eos_ids: tuple[int, ...]
) -> dict[str, Any]:
  """Returns a config.json that both transformers 4 and 5 read.

  Raises:
    ValueError: if no model family has this configuration.
  """
  family, kind = family_of(config), config.only_kind("config.json")
  values = {
    "architectures": [FAMILIES[family].architecture],
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "dtype": dtype,
    # Explicit, because Llama's default is id 2.
    "eos_token_id": list(eos_ids) if len(eos_ids) > 1 else (eos_ids[0] if eos_ids else None),
    "head_dim": kind.attention.head_dim,
    "hidden_act": "silu",
    "hidden_size": config.hidden_size,
    "intermediate_size": kind.feed_forward.intermediate_size,
    "max_position_embeddings": config.max_model_len,
    "model_type": family,
    "num_attention_heads": kind.attention.num_heads,
    "num_hidden_layers": config.num_layers,
    "num_key_value_heads": kind.attention.num_kv_heads,
    "rms_norm_eps": config.norm_eps,
    **rope_fields.written(kind.attention.rotary),
    "tie_word_embeddings": config.is_tied,
    "torch_dtype": dtype,
    "use_cache": True,
    "vocab_size": config.vocab_size,
  }
  if family != "qwen2":
    values["attention_bias"] = False
  if family == "llama":
    values["mlp_bias"] = False
  else:
    values |= {"sliding_window": None, "use_sliding_window": False}
  return values


def _family(fields: config_fields.Fields) -> str:
  family, architectures = fields.get("model_type"), fields.get("architectures")
  by_architecture = {family.architecture: name for name, family in FAMILIES.items()}
  if architectures is not None:
    is_known = isinstance(architectures, list) and len(architectures) == 1
    if not is_known or str(architectures[0]) not in by_architecture:
      raise fields.refuse(
        "architectures",
        f"one of {sorted(by_architecture)}",
        "other architectures are not implemented",
      )
    family = by_architecture[architectures[0]] if family is None else family
  if not isinstance(family, str) or family not in FAMILIES:
    raise fields.refuse(
      "model_type", f"one of {tuple(FAMILIES)}", "other families are not implemented"
    )
  if architectures is not None and by_architecture[architectures[0]] != family:
    raise fields.refuse(
      "architectures",
      f"[{FAMILIES[family].architecture!r}] for model_type {family!r}",
      "correct the file",
    )
  return family


def _refuse_unsupported(fields: config_fields.Fields, family: str) -> None:
  fix = "this release does not compute it; choose another checkpoint"
  if fields.get("hidden_act") not in (None, "silu"):
    raise fields.refuse("hidden_act", "'silu'", fix)
  for field in ("quantization_config", "compression_config"):
    if fields.get(field) is not None:
      raise fields.refuse(field, "none", "use the checkpoint in bfloat16 or float32")
  # Qwen2's biases on queries, keys and values are part of its family, regardless of this field.
  biases = ("mlp_bias",) if family == "qwen2" else ("attention_bias", "mlp_bias")
  for field in biases:
    if fields.flag(field):
      raise fields.refuse(field, "false", fix)
  if fields.get("dual_chunk_attention_config") is not None:
    raise fields.refuse("dual_chunk_attention_config", "none", fix)
  if fields.get("partial_rotary_factor") not in (None, 1):
    raise fields.refuse("partial_rotary_factor", "1", fix)
  layer_types = fields.get("layer_types")
  if layer_types is not None and (
    not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types)
  ):
    raise fields.refuse("layer_types", "'full_attention' in every layer", fix)
  if layer_types is None and fields.flag("use_sliding_window"):
    is_reached = fields.whole("num_hidden_layers") > fields.whole("max_window_layers", 28)
    if fields.get("sliding_window") is not None and is_reached:
      raise fields.refuse("use_sliding_window", "false", fix)
