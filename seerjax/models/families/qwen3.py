"""Qwen3: an RMS norm on each head's queries and keys, before the rotation.

Sizes: the config.json of each of Qwen/Qwen3-* on the Hub. Contexts beyond theirs use YaRN; the
config.json of such checkpoints has it.
"""

from __future__ import annotations

import functools
from typing import Any

from seerjax.models.config import TransformerConfig
from seerjax.models.config_fields import Fields
from seerjax.models.families import base
from seerjax.ops import rotary

ATTENTION = {"has_qk_norms": True}


def read(fields: Fields) -> TransformerConfig:
  """Returns the shape that a config.json describes."""
  base.refuse_unsupported(fields, "attention_bias", "mlp_bias")
  base.refuse_windows(fields)
  return base.read_equal_layers(fields, ATTENTION, head_dim=128)


def written(config: TransformerConfig) -> dict[str, Any]:
  """Returns the fields of config.json that describe a shape."""
  windows = {"sliding_window": None, "use_sliding_window": False}
  return base.write_equal_layers(config) | windows | {"attention_bias": False}


def _size(
  hidden: int, intermediate: int, layers: int, heads: int, is_tied: bool
) -> TransformerConfig:
  return TransformerConfig(
    vocab_size=151_936,
    hidden_size=hidden,
    layers=base.equal_layers(
      layers,
      intermediate,
      num_heads=heads,
      num_kv_heads=8,
      head_dim=128,
      rotary=rotary.RotaryConfig(head_dim=128, base=1_000_000.0),
      **ATTENTION,
    ),
    norm_eps=1e-6,
    is_tied=is_tied,
    max_model_len=40_960,
    family="qwen3",
  )


FAMILY = base.Family(
  model_type="qwen3",
  architecture="Qwen3ForCausalLM",
  read=read,
  written=written,
  describes=functools.partial(base.has_equal_layers, attention=ATTENTION),
  attention=ATTENTION,
  gguf=base.Gguf(architecture="qwen3"),
  sizes={
    "qwen3-0.6b": _size(1024, 3072, 28, 16, True),
    "qwen3-1.7b": _size(2048, 6144, 28, 16, True),
    "qwen3-4b": _size(2560, 9728, 36, 32, True),
    "qwen3-8b": _size(4096, 12_288, 36, 32, False),
    "qwen3-14b": _size(5120, 17_408, 40, 40, False),
    "qwen3-32b": _size(5120, 25_600, 64, 64, False),
  },
)
