"""Converts between the metadata of a GGUF file and our `TransformerConfig`.

    llama.block_count, llama.rope.freq_base, ...  -- read -->      TransformerConfig
    TransformerConfig                             -- metadata -->  llama.block_count, ...

Every key of the architecture is either supported or refused by name. Llama 3's rotary scaling is
not in the metadata: the tensor rope_freqs holds the divisor of each frequency.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
import math
from typing import Any

import numpy as np

from seerjax import fields as fields_lib, layer_kinds
from seerjax.layer_kinds import Gated, Grouped, LayerConfig
from seerjax.models import config as model_config, config_fields, families, gguf_file
from seerjax.ops import rotary

ROPE_FACTORS = "rope_freqs.weight"
HEAD = "output.weight"
EMBEDDING = "token_embd.weight"
# The first family with a form in GGUF files, by architecture.
ARCHITECTURES = {
  family.gguf.architecture: family for family in reversed(families.FAMILIES) if family.gguf
}
# Original context of a model with llama3 scaling, if the file does not have it.
LLAMA3_CONTEXT = 8192
# The program that wrote the factors computed powers in float32.
FACTOR_TOLERANCE = 1e-5
# Allowed values of a key of the architecture. None: any value; else the values that have no effect.
KEYS: dict[str, tuple[Any, ...] | None] = {
  "vocab_size": None,
  "context_length": None,
  "embedding_length": None,
  "block_count": None,
  "feed_forward_length": None,
  "tensor_data_layout": None,
  "use_parallel_residual": (False,),
  "expert_count": (0,),
  "expert_used_count": (0,),
  "attention.head_count": None,
  "attention.head_count_kv": None,
  "attention.key_length": None,
  "attention.value_length": None,
  "attention.layer_norm_rms_epsilon": None,
  "attention.causal": (True,),
  "attention.sliding_window": (0,),
  "rope.dimension_count": None,
  "rope.freq_base": None,
  "rope.scale_linear": (1,),
  "rope.scaling.type": None,
  "rope.scaling.factor": None,
  "rope.scaling.original_context_length": None,
  "rope.scaling.finetuned": None,
  "rope.scaling.attn_factor": (1,),
  "rope.scaling.yarn_ext_factor": (1,),
  "rope.scaling.yarn_attn_factor": (1,),
  "rope.scaling.yarn_log_multiplier": (0,),
  "rope.scaling.yarn_beta_fast": None,
  "rope.scaling.yarn_beta_slow": None,
}


def read(file: gguf_file.File) -> model_config.TransformerConfig:
  """Returns the configuration of a file's model.

  Raises:
    NotImplementedError: for an unsupported architecture or key.
    ValueError: naming the key that is missing, malformed, or contradicts another one.
  """
  architecture = file.metadata.get("general.architecture")
  if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
    raise NotImplementedError(
      f"{file.path}: general.architecture: got {fields_lib.shown(architecture)}, expected one of"
      f" {tuple(ARCHITECTURES)}; other architectures are not built yet."
    )
  prefix = f"{architecture}."
  values = {
    key.removeprefix(prefix): value
    for key, value in file.metadata.items()
    if key.startswith(prefix)
  }
  fields = config_fields.Fields(file.path, values, prefix)
  family = ARCHITECTURES[architecture]
  assert family.gguf is not None
  _refuse_unsupported(fields, {**KEYS, **family.gguf.keys})
  hidden_size, num_heads = fields.whole("embedding_length"), fields.whole("attention.head_count")
  num_kv_heads = fields.whole("attention.head_count_kv", num_heads)
  if num_heads % num_kv_heads:
    raise fields.refuse(
      "attention.head_count_kv",
      f"a divisor of attention.head_count={num_heads}",
      "download it again",
    )
  head_dim = fields.whole("attention.key_length", max(hidden_size // num_heads, 1))
  for same in ("attention.value_length", "rope.dimension_count"):
    if fields.whole(same, head_dim) != head_dim:
      raise fields.refuse(
        same, f"the {head_dim} features of a head", "this release does not compute it"
      )
  max_model_len = fields.whole("context_length")
  epsilon = fields.number("attention.layer_norm_rms_epsilon")
  if epsilon >= 1:
    raise fields.refuse("attention.layer_norm_rms_epsilon", "less than 1", "download it again")
  if head_dim % 2:
    raise fields.refuse("attention.key_length", "an even number", "download it again")
  vocab_size, intermediate_size = _vocab_size(file, fields), fields.whole("feed_forward_length")
  num_layers = fields.layers("block_count")
  attention = Grouped(
    num_heads=num_heads,
    num_kv_heads=num_kv_heads,
    head_dim=head_dim,
    rotary=_rotary(file, fields, head_dim, max_model_len),
    **family.attention,
  )
  layer = LayerConfig(attention=attention, feed_forward=Gated(intermediate_size=intermediate_size))
  config = model_config.TransformerConfig(
    vocab_size=vocab_size,
    hidden_size=hidden_size,
    layers=layer_kinds.uniform(layer, num_layers),
    norm_eps=epsilon,
    is_tied=HEAD not in file.tensors,
    max_model_len=max_model_len,
    family=family.model_type,
  )
  return family.gguf.completed(fields, config) if family.gguf.completed else config


def form_of(config: model_config.TransformerConfig) -> families.Gguf:
  """Returns the form in GGUF files of the family of a configuration.

  Raises:
    NotImplementedError: if the family has none.
    ValueError: if no model family has this configuration.
  """
  family = families.of(config)
  if family.gguf is None:
    raise NotImplementedError(
      f"GGUF: got a model of family {family.model_type!r}, expected one of {tuple(ARCHITECTURES)};"
      " save a Hugging Face directory instead."
    )
  return family.gguf


def divided(
  config: model_config.TransformerConfig,
) -> tuple[LayerConfig, dict[str, str | int | float]]:
  """Returns the kind of layer that usual keys describe, and the family's further keys.

  Raises:
    NotImplementedError: for a shape that GGUF cannot describe.
    ValueError: if no model family has this configuration.
  """
  form = form_of(config)
  plain, further = form.divided(config) if form.divided else (config, {})
  return plain.only_kind("GGUF"), further


def metadata(config: model_config.TransformerConfig) -> dict[str, str | int | float]:
  """Returns the keys of the architecture for a configuration.

  Raises:
    NotImplementedError: for a shape or a rotary scaling that GGUF cannot describe.
    ValueError: if no model family has this configuration.
  """
  family, (kind, further) = form_of(config).architecture, divided(config)
  turn = kind.attention.rotary
  values: dict[str, str | int | float] = {
    "vocab_size": config.vocab_size,
    "context_length": config.max_model_len,
    "embedding_length": config.hidden_size,
    "block_count": config.num_layers,
    "feed_forward_length": kind.gated("GGUF").intermediate_size,
    "attention.head_count": kind.attention.num_heads,
    "attention.head_count_kv": kind.attention.num_kv_heads,
    "attention.key_length": kind.attention.head_dim,
    "attention.value_length": kind.attention.head_dim,
    "attention.layer_norm_rms_epsilon": float(config.norm_eps),
    "rope.dimension_count": kind.attention.head_dim,
    "rope.freq_base": float(turn.base),
  }
  if turn.scaling in ("linear", "yarn"):
    values |= {"rope.scaling.type": turn.scaling, "rope.scaling.factor": float(turn.factor)}
  if turn.scaling in ("llama3", "yarn"):
    values["rope.scaling.original_context_length"] = turn.original_context
  if turn.scaling == "yarn":
    if turn.attention_factor is not None:
      raise NotImplementedError(
        f"GGUF: rope_scaling.attention_factor: got {turn.attention_factor}, expected none, the"
        " method's default; GGUF stores it in another form, which this release does not write."
      )
    values |= {
      "rope.scaling.yarn_beta_fast": float(turn.beta_fast),
      "rope.scaling.yarn_beta_slow": float(turn.beta_slow),
    }
  values |= further
  return {"general.architecture": family, **{f"{family}.{k}": v for k, v in values.items()}}


def rope_factors(turn: rotary.RotaryConfig) -> np.ndarray | None:
  """Returns f32[c / 2], the divisor of each frequency under llama3 scaling; None without it."""
  if turn.scaling != "llama3":
    return None
  plain, _ = rotary.frequencies(rotary.RotaryConfig(head_dim=turn.head_dim, base=turn.base))
  scaled, _ = rotary.frequencies(turn)
  return plain / scaled


def _refuse_unsupported(
  fields: config_fields.Fields, keys: Mapping[str, tuple[Any, ...] | None]
) -> None:
  for key, value in fields.values.items():
    allowed = keys.get(key, ())
    is_number = isinstance(value, bool | int | float)
    if allowed is not None and not (is_number and value in allowed):
      expected = f"{allowed[-1]}, or no such key" if allowed else "no such key"
      raise NotImplementedError(
        f"{fields.path}: {fields.prefix}{key}: got {fields_lib.shown(value)}, expected {expected};"
        " this release does not compute it."
      )


def _vocab_size(file: gguf_file.File, fields: config_fields.Fields) -> int:
  """Returns the number of rows of the embedding, on which tokens and metadata must agree."""
  tokens = file.metadata.get("tokenizer.ggml.tokens")
  counts = {"tokenizer.ggml.tokens": len(tokens)} if isinstance(tokens, list) else {}
  if "vocab_size" in fields.values:
    counts[f"{fields.prefix}vocab_size"] = fields.whole("vocab_size")
  if EMBEDDING in file.tensors:
    counts[EMBEDDING] = file.tensors[EMBEDDING].shape[0]
  if not counts:
    raise fields.refuse("vocab_size", "a whole number, or a list of tokens", "download it again")
  if len(set(counts.values())) > 1:
    got = ", ".join(f"{name}: {count}" for name, count in counts.items())
    raise ValueError(
      f"{file.path}: got different vocabulary sizes ({got}), expected a single size; download it"
      " again."
    )
  return next(iter(counts.values()))


def _rotary(
  file: gguf_file.File, fields: config_fields.Fields, head_dim: int, max_model_len: int
) -> rotary.RotaryConfig:
  base = fields.number("rope.freq_base", 10_000.0)
  kind = fields.get("rope.scaling.type")
  if kind is not None and (not isinstance(kind, str) or kind not in ("none", "linear", "yarn")):
    raise NotImplementedError(
      f"{file.path}: {fields.prefix}rope.scaling.type: got {fields_lib.shown(kind)}, expected"
      " 'none', 'linear' or 'yarn'; other kinds of scaling are not built yet."
    )
  original = fields.whole("rope.scaling.original_context_length", max_model_len)
  if ROPE_FACTORS in file.tensors:
    if kind not in (None, "none"):
      raise fields.refuse("rope.scaling.type", f"none with {ROPE_FACTORS}", "download it again")
    if "rope.scaling.original_context_length" not in fields.values:
      original = LLAMA3_CONTEXT
    return _llama3(file, head_dim, base, original)
  if kind == "linear":
    return rotary.RotaryConfig(
      head_dim=head_dim, base=base, scaling="linear", factor=fields.number("rope.scaling.factor")
    )
  if kind == "yarn":
    return rotary.RotaryConfig(
      head_dim=head_dim,
      base=base,
      scaling="yarn",
      factor=fields.number("rope.scaling.factor"),
      original_context=original,
      beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
      beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
    )
  return rotary.RotaryConfig(head_dim=head_dim, base=base)


def _llama3(file: gguf_file.File, head_dim: int, base: float, original: int) -> rotary.RotaryConfig:
  """Returns the rotary configuration for the factors in a file.

  Raises:
    NotImplementedError: if they are not llama3's.
    ValueError: if they are not one positive number per pair of features.
  """
  where = f"{file.path}: {ROPE_FACTORS}"
  if file.tensors[ROPE_FACTORS].shape != (head_dim // 2,):
    raise ValueError(
      f"{where}: got shape {file.tensors[ROPE_FACTORS].shape}, expected {(head_dim // 2,)}, one"
      f" number per pair of a head's {head_dim} features; download it again."
    )
  factors = file.read(ROPE_FACTORS)
  if not (np.isfinite(factors).all() and (factors > 0).all()):
    raise ValueError(
      f"{where}: got factors that are not positive numbers, expected positive rotation factors; the"
      " file is corrupt, download it again."
    )
  factor = float(str(np.float32(factors.max())))
  if np.all(factors == 1):
    return rotary.RotaryConfig(head_dim=head_dim, base=base)
  for low, high in _bounds(factors, factor, head_dim, base, original):
    found = rotary.RotaryConfig(
      head_dim=head_dim,
      base=base,
      scaling="llama3",
      factor=factor,
      original_context=original,
      low_frequency_factor=low,
      high_frequency_factor=high,
    )
    computed = rope_factors(found)
    if computed is not None and np.allclose(computed, factors, rtol=FACTOR_TOLERANCE, atol=0):
      return found
  raise NotImplementedError(
    f"{where}: got factors from {factors.min()} to {factors.max()} that are not llama3's scaling"
    f" for the rotation base {base}, expected that scaling; other kinds are not implemented."
  )


def _bounds(
  factors: np.ndarray, factor: float, head_dim: int, base: float, original: int
) -> Iterator[tuple[float, float]]:
  """Yields (low, high) frequency factors to try: the published ones, then fitted ones.

  With t rotations over the original context, 1 / f is linear in t between 1 / factor at t = low and
  1 at t = high.
  """
  yield 1.0, 4.0
  plain = 1.0 / base ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
  turns = original * plain / (2 * math.pi)
  between = (factors > 1) & (factors < factor)
  if between.sum() < 2:
    return
  share = (1 / factors[between].astype(np.float64) - 1 / factor) / (1 - 1 / factor)
  slope, start = np.polyfit(turns[between], share, 1)
  if slope <= 0:
    return
  low, high = -start / slope, (1 - start) / slope
  for digits in (2, 4, 7):
    first, last = (float(f"{value:.{digits}g}") for value in (low, high))
    if 0 < first < last:
      yield first, last
