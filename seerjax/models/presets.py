"""Shapes of published models, as plain data; their weights are loaded by `huggingface.load`.

Sources: the config.json of each model's own repository on the Hub (Qwen/Qwen3-*, the
Qwen/Qwen2.5-*-Instruct ones, meta-llama/Llama-3.*). Qwen3 and Qwen2.5 reach longer contexts with
YaRN; the config.json of those checkpoints has it.
"""

from __future__ import annotations

from collections.abc import Mapping
import types
from typing import Any

from seerjax import layer_kinds
from seerjax.layer_kinds import Gated, Grouped, LayerConfig
from seerjax.models import config as model_config
from seerjax.models.config import TransformerConfig
from seerjax.ops import rotary


def nano() -> TransformerConfig:
  """Returns the shape of nano, which is in this package; 8 divides each sharded dimension."""
  return TransformerConfig(
    vocab_size=512,
    hidden_size=128,
    layers=layer_kinds.uniform(
      LayerConfig(
        attention=Grouped(
          num_heads=8,
          num_kv_heads=8,
          head_dim=16,
          has_qk_norms=True,
          rotary=rotary.RotaryConfig(head_dim=16, base=10_000.0),
        ),
        feed_forward=Gated(intermediate_size=384),
      ),
      5,
    ),
    norm_eps=1e-6,
    is_tied=True,
    max_model_len=1024,
  )


def nano_draft() -> TransformerConfig:
  """Returns the shape of nano's draft model (0.14 M parameters), which is in this package."""
  return nano().changed(
    hidden_size=64, intermediate_size=192, num_layers=2, num_heads=4, num_kv_heads=4
  )


def nano_10m() -> TransformerConfig:
  """Returns the shape of a larger nano (10.8 M parameters), which can use nano as its draft model.

  Its weights are not shipped; `loading.RECIPES` has their recipe.
  """
  return nano().changed(
    hidden_size=384,
    intermediate_size=1024,
    num_layers=6,
    num_heads=8,
    num_kv_heads=8,
    head_dim=48,
    rotary=rotary.RotaryConfig(head_dim=48, base=10_000.0),
  )


def nano_gpu() -> TransformerConfig:
  """Returns the shape of an 85 M parameter nano for benchmarks; its weights are not shipped."""
  return nano().changed(
    hidden_size=768,
    intermediate_size=2048,
    num_layers=12,
    num_heads=16,
    num_kv_heads=8,
    head_dim=64,
    rotary=rotary.RotaryConfig(head_dim=64, base=10_000.0),
  )


def _layers(num_layers: int, intermediate: int, **attention: Any) -> tuple[LayerConfig, ...]:
  """Returns equal layers with the given fields of `Grouped`."""
  feed_forward = Gated(intermediate_size=intermediate)
  layer = LayerConfig(attention=Grouped(**attention), feed_forward=feed_forward)
  return layer_kinds.uniform(layer, num_layers)


def _qwen3(
  hidden: int, intermediate: int, layers: int, heads: int, is_tied: bool
) -> TransformerConfig:
  return TransformerConfig(
    vocab_size=151_936,
    hidden_size=hidden,
    layers=_layers(
      layers,
      intermediate,
      num_heads=heads,
      num_kv_heads=8,
      head_dim=128,
      has_qk_norms=True,
      rotary=rotary.RotaryConfig(head_dim=128, base=1_000_000.0),
    ),
    norm_eps=1e-6,
    is_tied=is_tied,
    max_model_len=40_960,
  )


def _qwen25(
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
    layers=_layers(
      layers,
      intermediate,
      num_heads=heads,
      num_kv_heads=kv_heads,
      head_dim=head_dim,
      has_qkv_biases=True,
      rotary=rotary.RotaryConfig(head_dim=head_dim, base=1_000_000.0),
    ),
    norm_eps=1e-6,
    is_tied=is_tied,
    max_model_len=32_768,
  )


def _llama3(
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
    layers=_layers(
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
  )


CONFIGS: Mapping[str, TransformerConfig] = types.MappingProxyType(
  {
    "nano": nano(),
    "nano-draft": nano_draft(),
    "nano-10m": nano_10m(),
    "nano-gpu": nano_gpu(),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, True),
    "qwen3-8b": _qwen3(4096, 12_288, 36, 32, False),
    "qwen3-14b": _qwen3(5120, 17_408, 40, 40, False),
    "qwen3-32b": _qwen3(5120, 25_600, 64, 64, False),
    "qwen2.5-0.5b": _qwen25(896, 4864, 24, 14, 2),
    "qwen2.5-1.5b": _qwen25(1536, 8960, 28, 12, 2),
    "qwen2.5-3b": _qwen25(2048, 11_008, 36, 16, 2),
    "qwen2.5-7b": _qwen25(3584, 18_944, 28, 28, 4, vocab_size=152_064, is_tied=False),
    "llama-3.2-1b": _llama3(2048, 8192, 16, 32, 64, factor=32.0, is_tied=True),
    "llama-3.2-3b": _llama3(3072, 8192, 28, 24, 128, factor=32.0, is_tied=True),
    "llama-3.1-8b": _llama3(4096, 14_336, 32, 32, 128, factor=8.0, is_tied=False),
  }
)

# Slabs of each: 8 if it divides every sharded dimension, else the largest number that does (2 and 4
# for Qwen2.5, by its key/value heads). The model axis of a mesh can have no more devices.
REDUCTION_SHARDS: Mapping[str, int] = types.MappingProxyType(
  {name: model_config.largest_shards(config) for name, config in CONFIGS.items()}
)


def get(name: str) -> TransformerConfig:
  """Returns the shape of a published model.

  Raises:
    ValueError: if there is no model of that name.
  """
  if name not in CONFIGS:
    raise ValueError(
      f"presets.get: got {name!r}, expected one of {sorted(CONFIGS)}; other models load from their"
      " own directory through huggingface.load."
    )
  return CONFIGS[name]
