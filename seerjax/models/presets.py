"""Shapes of our own and of published models, as plain data.

The published ones are in the files of `models.families`; `huggingface.load` loads their weights.
"""

from __future__ import annotations

from collections.abc import Mapping
import types

from seerjax import layer_kinds
from seerjax.layer_kinds import Experts, Gated, Grouped, LayerConfig
from seerjax.models import config as model_config, families
from seerjax.models.config import TransformerConfig
from seerjax.ops import rotary
from seerjax.ops.routing import RoutingConfig


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


def nano_moe() -> TransformerConfig:
  """Returns the shape of nano with 32 experts in each layer; a row runs 4 of them."""
  routing = RoutingConfig(num_experts=32, num_chosen=4, is_renormalised=True)
  return nano().changed(feed_forward=Experts(routing=routing, expert_size=48))


CONFIGS: Mapping[str, TransformerConfig] = types.MappingProxyType(
  {
    "nano": nano(),
    "nano-draft": nano_draft(),
    "nano-10m": nano_10m(),
    "nano-gpu": nano_gpu(),
    "nano-moe": nano_moe(),
    **{name: size for family in families.FAMILIES for name, size in family.sizes.items()},
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
