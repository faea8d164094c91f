"""Shape of a decoder, and its number of slabs."""

from __future__ import annotations

import dataclasses

from seerjax import fields, numerics as numerics_lib
from seerjax.ops import rotary


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig:
  """Shape of one decoder; every difference between model families is a field.

  Attributes:
    vocab_size: rows of the embedding.
    hidden_size: d, features of a hidden row.
    intermediate_size: features inside the gated MLP.
    num_layers: decoder blocks.
    num_heads: query heads.
    num_kv_heads: key/value heads; `num_heads / num_kv_heads` queries share one.
    head_dim: c, features of a head.
    has_qk_norms: an RMS norm on every head's queries and keys, before the rotation (Qwen3).
    has_qkv_biases: biases on queries, keys and values (Qwen2.5).
    norm_eps: epsilon of every RMS norm.
    rotary: rotary embedding of every layer.
    is_tied: the head reads the embedding table.
    max_model_len: positions the model was made for; longer prompts are refused.
  """

  vocab_size: int
  hidden_size: int
  intermediate_size: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  has_qk_norms: bool = False
  has_qkv_biases: bool = False
  norm_eps: float = 1e-6
  rotary: rotary.RotaryConfig
  is_tied: bool = True
  max_model_len: int = 4096

  def __post_init__(self):
    size = fields.at_least(1, "check config.json")
    fields.check(
      self, vocab_size=size, hidden_size=size, intermediate_size=size, num_layers=size,
      num_heads=size, num_kv_heads=size, max_model_len=size,
      norm_eps=fields.Rule("0 < norm_eps < 1", lambda eps: 0 < eps < 1, "1e-6 is usual"),
    )  # fmt: skip
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
        f"TransformerConfig.num_heads: got {self.num_heads} query heads for {self.num_kv_heads}"
        " key/value heads, expected a multiple; check config.json."
      )
    if self.rotary.head_dim != self.head_dim:
      raise ValueError(
        f"TransformerConfig.rotary.head_dim: got {self.rotary.head_dim}, expected"
        f" head_dim={self.head_dim}; make them equal."
      )

  @property
  def group(self) -> int:
    """Number of query heads per key/value head."""
    return self.num_heads // self.num_kv_heads


def largest_shards(config: TransformerConfig) -> int:
  """Returns the largest power of two, at most 8, that divides every sharded dimension."""
  sizes = (config.num_kv_heads, config.intermediate_size, config.vocab_size)
  return numerics_lib.largest_shards(sizes)


def slabs_for(config: TransformerConfig, asked: numerics_lib.NumericsConfig) -> int:
  """Returns the number of slabs: the requested one, or for 0 the largest that the model allows.

  Raises:
    ValueError: if the asked number does not divide the model, naming the dimension and both.
  """
  shards = asked.reduction_shards
  if not shards:
    return largest_shards(config)
  for field in ("num_kv_heads", "intermediate_size", "vocab_size"):
    size = dataclasses.asdict(config)[field]
    if size % shards:
      raise ValueError(
        f"NumericsConfig.reduction_shards: got {shards}, expected a divisor of {field}={size};"
        f" use reduction_shards={largest_shards(config)} for this model, or 0, which finds it."
      )
  return shards
