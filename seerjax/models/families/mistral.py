"""Mistral: layers like those of Llama; heads may be narrower than hidden size / heads.

Models with a sliding window (Mistral-7B-v0.1) are refused by that field. GGUF files of Mistral have
the architecture "llama", as llama.cpp writes them, and are read as Llama.

Sizes: the config.json of each of mistralai/Mistral-* on the Hub.
"""

from __future__ import annotations

import functools
from typing import Any

from seerjax.models.config import TransformerConfig
from seerjax.models.config_fields import Fields
from seerjax.models.families import base
from seerjax.ops import rotary


def read(fields: Fields) -> TransformerConfig:
  """Returns the shape that a config.json describes."""
  base.refuse_unsupported(fields, "attention_bias", "mlp_bias")
  # transformers' default is a window, so a file without the field has one.
  if "sliding_window" not in fields.values or fields.get("sliding_window") is not None:
    raise fields.refuse("sliding_window", "null", base.UNSUPPORTED)
  return base.read_equal_layers(fields, {})


def written(config: TransformerConfig) -> dict[str, Any]:
  """Returns the fields of config.json that describe a shape."""
  return base.write_equal_layers(config) | {"sliding_window": None}


def _size(
  hidden: int,
  intermediate: int,
  layers: int,
  vocab_size: int,
  *,
  rope_base: float,
  max_model_len: int,
) -> TransformerConfig:
  return TransformerConfig(
    vocab_size=vocab_size,
    hidden_size=hidden,
    layers=base.equal_layers(
      layers,
      intermediate,
      num_heads=32,
      num_kv_heads=8,
      head_dim=128,
      rotary=rotary.RotaryConfig(head_dim=128, base=rope_base),
    ),
    norm_eps=1e-5,
    is_tied=False,
    max_model_len=max_model_len,
    family="mistral",
  )


FAMILY = base.Family(
  model_type="mistral",
  architecture="MistralForCausalLM",
  read=read,
  written=written,
  describes=functools.partial(base.has_equal_layers, attention={}),
  gguf=base.Gguf(architecture="llama", turns_heads=True),
  sizes={
    "mistral-7b-v0.3": _size(4096, 14_336, 32, 32_768, rope_base=1e6, max_model_len=32_768),
    "mistral-nemo-base-2407": _size(
      5120, 14_336, 40, 131_072, rope_base=1e6, max_model_len=128_000
    ),
    "mistral-small-24b-base-2501": _size(
      5120, 32_768, 40, 131_072, rope_base=1e8, max_model_len=32_768
    ),
  },
)
