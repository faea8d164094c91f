"""Llama 3, and others of its architecture such as SmolLM2: no norms of heads, no biases.

Sizes: the config.json of each of meta-llama/Llama-3.* on the Hub.
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
  base.refuse_windows(fields)
  return base.read_equal_layers(fields, {})


def written(config: TransformerConfig) -> dict[str, Any]:
  """Returns the fields of config.json that describe a shape."""
  return base.write_equal_layers(config) | {"attention_bias": False, "mlp_bias": False}


def _size(
  hidden: int,
  intermediate: int,
  layers: int,
  heads: int,
  head_dim: int,
  *,
  factor: float,
  is_tied: bool,
) -> TransformerConfig:
  return TransformerConfig(
    vocab_size=128_256,
    hidden_size=hidden,
    layers=base.equal_layers(
      layers,
      intermediate,
      num_heads=heads,
      num_kv_heads=8,
      head_dim=head_dim,
      rotary=rotary.RotaryConfig(
        head_dim=head_dim,
        base=500_000.0,
        scaling="llama3",
        factor=factor,
        original_context=8192,
        low_frequency_factor=1.0,
        high_frequency_factor=4.0,
      ),
    ),
    norm_eps=1e-5,
    is_tied=is_tied,
    max_model_len=131_072,
    family="llama",
  )


FAMILY = base.Family(
  model_type="llama",
  architecture="LlamaForCausalLM",
  read=read,
  written=written,
  describes=functools.partial(base.has_equal_layers, attention={}),
  gguf=base.Gguf(architecture="llama", turns_heads=True),
  sizes={
    "llama-3.2-1b": _size(2048, 8192, 16, 32, 64, factor=32.0, is_tied=True),
    "llama-3.2-3b": _size(3072, 8192, 28, 24, 128, factor=32.0, is_tied=True),
    "llama-3.1-8b": _size(4096, 14_336, 32, 32, 128, factor=8.0, is_tied=False),
  },
)
