"""Qwen2.5 (and Qwen2): biases on queries, keys and values.

Sizes: the config.json of each of Qwen/Qwen2.5-*-Instruct on the Hub. Contexts beyond theirs use
YaRN; the config.json of such checkpoints has it.
"""

from __future__ import annotations

import functools
from typing import Any

from seerjax.models.config import TransformerConfig
from seerjax.models.config_fields import Fields
from seerjax.models.families import base
from seerjax.ops import rotary

ATTENTION = {"has_qkv_biases": True}


def read(fields: Fields) -> TransformerConfig:
  """Returns the shape that a config.json describes."""
  # Biases on queries, keys and values are part of the family, whatever attention_bias says.
  base.refuse_unsupported(fields, "mlp_bias")
  base.refuse_windows(fields)
  return base.read_equal_layers(fields, ATTENTION)


def written(config: TransformerConfig) -> dict[str, Any]:
  """Returns the fields of config.json that describe a shape."""
  windows = {"sliding_window": None, "use_sliding_window": False}
  return base.write_equal_layers(config) | windows


def _size(
  hidden: int,
  intermediate: int,
  layers: int,
  heads: int,
  kv_heads: int,
  *,
  vocab_size: int = 151_936,
  is_tied: bool = True,
) -> TransformerConfig:
  head_dim = hidden // heads
  return TransformerConfig(
    vocab_size=vocab_size,
    hidden_size=hidden,
    layers=base.equal_layers(
      layers,
      intermediate,
      num_heads=heads,
      num_kv_heads=kv_heads,
      head_dim=head_dim,
      rotary=rotary.RotaryConfig(head_dim=head_dim, base=1_000_000.0),
      **ATTENTION,
    ),
    norm_eps=1e-6,
    is_tied=is_tied,
    max_model_len=32_768,
    family="qwen2",
  )


FAMILY = base.Family(
  model_type="qwen2",
  architecture="Qwen2ForCausalLM",
  read=read,
  written=written,
  describes=functools.partial(base.has_equal_layers, attention=ATTENTION),
  attention=ATTENTION,
  gguf=base.Gguf(architecture="qwen2"),
  sizes={
    "qwen2.5-0.5b": _size(896, 4864, 24, 14, 2),
    "qwen2.5-1.5b": _size(1536, 8960, 28, 12, 2),
    "qwen2.5-3b": _size(2048, 11_008, 36, 16, 2),
    "qwen2.5-7b": _size(3584, 18_944, 28, 28, 4, vocab_size=152_064, is_tied=False),
  },
)
