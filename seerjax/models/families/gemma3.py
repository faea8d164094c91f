"""Gemma 3, text: five of six layers see a window of positions, with a rotary base of their own.

    x = embed * sqrt(d)
    x = x + norm(attention(norm(x)))        norm(x) = x / rms(x) * (1 + w)
    x = x + norm(mlp(norm(x)))              gelu in its tanh form

Source: Gemma 3 Technical Report, https://arxiv.org/abs/2503.19786; the fields are those of
transformers' `Gemma3TextConfig`, in the spellings of its versions 4 and 5. Directories with vision
(model_type gemma3) are refused.

Sizes: the config.json of each of google/gemma-3-* on the Hub.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from typing import Any

from seerjax.layer_kinds import Gated, Grouped, LayerConfig
from seerjax.models import rope_fields
from seerjax.models.config import TransformerConfig
from seerjax.models.config_fields import Fields
from seerjax.models.families import base
from seerjax.ops import rotary

ACTIVATION = "gelu_pytorch_tanh"
FULL, SLIDING = "full_attention", "sliding_attention"
# Defaults of transformers, which its files leave out.
HEAD_DIM, PATTERN, FULL_BASE, SLIDING_BASE = 256, 6, 1e6, 1e4
# llama.cpp knows 27B, with another scale, by its number of layers.
LAYERS_OF_27B = 62
# Field and default of the rotary base of each type of layer, as transformers 4 spells them.
BASES = {FULL: ("rope_theta", FULL_BASE), SLIDING: ("rope_local_base_freq", SLIDING_BASE)}


def read(fields: Fields) -> TransformerConfig:
  """Returns the configuration that a config.json describes.

  Raises:
    ValueError: naming the field that is missing, malformed or not supported.
  """
  _refuse_unsupported(fields)
  head_dim = fields.whole("head_dim", HEAD_DIM)
  max_model_len = fields.whole("max_position_embeddings")
  hidden_size, num_heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
  types = _layer_types(fields)
  turns = _rotaries(fields, head_dim, max_model_len)
  scalar = fields.number("query_pre_attn_scalar", float(HEAD_DIM))
  has_cap = fields.get("final_logit_softcapping") is not None
  kinds = {
    name: layer(
      num_heads=num_heads,
      num_kv_heads=fields.whole("num_key_value_heads"),
      head_dim=head_dim,
      intermediate_size=fields.whole("intermediate_size"),
      turn=turns[name],
      window=fields.whole("sliding_window") if name == SLIDING else None,
      scale=None if scalar == head_dim else scalar**-0.5,
    )
    for name in dict.fromkeys(types)
  }
  is_tied = fields.get("tie_word_embeddings") is None or fields.flag("tie_word_embeddings")
  return TransformerConfig(
    vocab_size=fields.whole("vocab_size"),
    hidden_size=hidden_size,
    layers=tuple(kinds[name] for name in types),
    norm_eps=fields.number("rms_norm_eps", 1e-6),
    norm_weights="1 + w",
    embedding_scale=hidden_size**0.5,
    logit_soft_cap=fields.number("final_logit_softcapping") if has_cap else None,
    is_tied=is_tied,
    max_model_len=max_model_len,
  )


def layer(
  *,
  num_heads: int,
  num_kv_heads: int,
  head_dim: int,
  intermediate_size: int,
  turn: rotary.RotaryConfig,
  window: int | None,
  scale: float | None,
) -> LayerConfig:
  """Returns the kind of a layer, windowed or full."""
  return LayerConfig(
    attention=Grouped(
      num_heads=num_heads,
      num_kv_heads=num_kv_heads,
      head_dim=head_dim,
      has_qk_norms=True,
      window=window,
      scale=scale,
      rotary=turn,
    ),
    feed_forward=Gated(intermediate_size=intermediate_size, activation="gelu_tanh"),
    norm_placement="pre_and_post",
  )


def describes(config: TransformerConfig) -> bool:
  """Returns whether a config.json of this family can describe a configuration."""
  first = config.layers[0]
  own = first.attention
  if not isinstance(first.feed_forward, Gated):
    return False
  if own.scale is not None and (
    _scalar(own.scale) in (0, own.head_dim) or own.scale != _scalar(own.scale) ** -0.5
  ):
    return False
  turns = _by_type(config)
  like = {
    window: layer(
      num_heads=own.num_heads,
      num_kv_heads=own.num_kv_heads,
      head_dim=own.head_dim,
      intermediate_size=first.feed_forward.intermediate_size,
      turn=turns[FULL if window is None else SLIDING],
      window=window,
      scale=own.scale,
    )
    for window in {at.attention.window for at in config.layers}
  }
  return (
    len(like.keys() - {None}) <= 1
    and all(at == like[at.attention.window] for at in config.layers)
    and turns[SLIDING].scaling == "none"
    and config.norm_weights == "1 + w"
    and config.embedding_scale == config.hidden_size**0.5
  )


def written(config: TransformerConfig) -> dict[str, Any]:
  """Returns the fields of config.json that describe a shape, as transformers 4 and 5 read them."""
  own = config.layers[0].attention
  turns = _by_type(config)
  windows = [at.attention.window for at in config.layers]
  scalar = own.head_dim if own.scale is None else _scalar(own.scale)
  parameters = {
    name: {"rope_type": "default", "rope_theta": turn.base} | rope_fields.scaling_of(turn)
    for name, turn in turns.items()
  }
  return {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": config.logit_soft_cap,
    "head_dim": own.head_dim,
    "hidden_activation": ACTIVATION,
    "hidden_size": config.hidden_size,
    "intermediate_size": config.layers[0].gated("config.json").intermediate_size,
    "layer_types": [FULL if window is None else SLIDING for window in windows],
    "max_position_embeddings": config.max_model_len,
    "num_attention_heads": own.num_heads,
    "num_hidden_layers": config.num_layers,
    "num_key_value_heads": own.num_kv_heads,
    "query_pre_attn_scalar": scalar,
    "rms_norm_eps": config.norm_eps,
    "rope_local_base_freq": turns[SLIDING].base,
    "rope_parameters": parameters,
    "rope_scaling": rope_fields.scaling_of(turns[FULL]) or None,
    "rope_theta": turns[FULL].base,
    "sliding_window": next((window for window in windows if window is not None), None),
    "tie_word_embeddings": config.is_tied,
    "vocab_size": config.vocab_size,
  }


def from_gguf(fields: Fields, plain: TransformerConfig) -> TransformerConfig:
  """Returns the shape that a GGUF file describes, given that of its full layers.

  The pattern of layers, the base of windowed ones and the scale of 27B are constants in llama.cpp.

  Raises:
    ValueError: naming the key that is malformed or not supported.
  """
  own = plain.layers[0].attention
  if own.rotary.scaling not in ("none", "linear"):
    raise fields.refuse(
      "rope.scaling.type", "'none' or 'linear', and no tensor rope_freqs", base.UNSUPPORTED
    )
  window = None
  if fields.get("attention.sliding_window") not in (None, 0):
    window = fields.whole("attention.sliding_window")
  pattern = fields.whole("attention.sliding_window_pattern", PATTERN)
  sliding_base = fields.number("rope.freq_base_swa", SLIDING_BASE)
  has_cap = fields.get("final_logit_softcapping") is not None
  like = functools.partial(
    layer,
    num_heads=own.num_heads,
    num_kv_heads=own.num_kv_heads,
    head_dim=own.head_dim,
    intermediate_size=plain.layers[0].gated("GGUF").intermediate_size,
    scale=(plain.hidden_size / own.num_heads) ** -0.5
    if plain.num_layers == LAYERS_OF_27B
    else None,
  )
  full = like(turn=own.rotary, window=None)
  sliding = full
  if window is not None:
    turn = rotary.RotaryConfig(head_dim=own.head_dim, base=sliding_base)
    sliding = like(turn=turn, window=window)
  return dataclasses.replace(
    plain,
    layers=tuple(sliding if (index + 1) % pattern else full for index in range(plain.num_layers)),
    norm_weights="1 + w",
    embedding_scale=plain.hidden_size**0.5,
    logit_soft_cap=fields.number("final_logit_softcapping") if has_cap else None,
  )


def to_gguf(config: TransformerConfig) -> tuple[TransformerConfig, dict[str, Any]]:
  """Inverts `from_gguf`: returns equal layers with what full ones have, and the further keys.

  Raises:
    NotImplementedError: for a shape that llama.cpp does not compute.
  """
  turns, windows = _by_type(config), [at.attention.window for at in config.layers]
  own, window = config.layers[0].attention, next(filter(None, windows), None)
  is_full = [found is None for found in windows]
  pattern = is_full.index(True) + 1 if window is not None and any(is_full) else PATTERN
  values: dict[str, Any] = {}
  if window is not None:
    values = {
      "attention.sliding_window": window,
      "attention.sliding_window_pattern": pattern,
      "rope.freq_base_swa": float(turns[SLIDING].base),
    }
  if config.logit_soft_cap is not None:
    values["final_logit_softcapping"] = float(config.logit_soft_cap)
  kind = dataclasses.replace(own, window=None, scale=None, rotary=turns[FULL])
  plain = config.changed(
    layers=(LayerConfig(attention=kind, feed_forward=config.layers[0].gated("GGUF")),)
    * config.num_layers
  )
  if turns[FULL].scaling not in ("none", "linear") or config != from_gguf(
    Fields(pathlib.Path("GGUF"), values, "gemma3."), plain
  ):
    raise NotImplementedError(
      f"GGUF: got scale={own.scale}, windows {windows} and scaling={turns[FULL].scaling!r} in full"
      " layers, expected the scale of the heads, full attention in every n-th layer alone, and"
      " 'none' or 'linear': llama.cpp computes no other; save a Hugging Face directory instead."
    )
  return plain, values


def _scalar(scale: float) -> int:
  """Returns query_pre_attn_scalar of a scale; transformers requires a whole number."""
  return round(scale**-2)


def _by_type(config: TransformerConfig) -> dict[str, rotary.RotaryConfig]:
  """Returns the rotary embedding of the last full and the last windowed layer, or the default."""
  head_dim = config.layers[0].attention.head_dim
  found = {
    FULL: rotary.RotaryConfig(head_dim=head_dim, base=FULL_BASE),
    SLIDING: rotary.RotaryConfig(head_dim=head_dim, base=SLIDING_BASE),
  }
  for at in config.layers:
    found[FULL if at.attention.window is None else SLIDING] = at.attention.rotary
  return found


def _refuse_unsupported(fields: Fields) -> None:
  if fields.get("partial_rotary_factor") not in (None, 1):
    raise fields.refuse("partial_rotary_factor", "1", base.UNSUPPORTED)
  if fields.get("hidden_activation") not in (None, ACTIVATION):
    raise fields.refuse("hidden_activation", repr(ACTIVATION), base.UNSUPPORTED)
  for field in ("attention_bias", "use_bidirectional_attention"):
    if fields.flag(field):
      raise fields.refuse(field, "false", base.UNSUPPORTED)
  if fields.get("attn_logit_softcapping") is not None:
    # transformers reads this field, and does not cap.
    raise fields.refuse("attn_logit_softcapping", "none", base.UNSUPPORTED)
  for field in ("quantization_config", "compression_config"):
    if fields.get(field) is not None:
      raise fields.refuse(field, "none", "use the checkpoint in bfloat16 or float32")


def _layer_types(fields: Fields) -> list[str]:
  count, types = fields.layers("num_hidden_layers"), fields.get("layer_types")
  if types is None:
    pattern = fields.whole("sliding_window_pattern", PATTERN)
    return [SLIDING if (index + 1) % pattern else FULL for index in range(count)]
  if (
    not isinstance(types, list)
    or len(types) != count
    or any(name not in (FULL, SLIDING) for name in types)
  ):
    raise fields.refuse("layer_types", f"{count} of {(FULL, SLIDING)}", base.UNSUPPORTED)
  return types


def _rotaries(fields: Fields, head_dim: int, max_model_len: int) -> dict[str, rotary.RotaryConfig]:
  """Returns the rotary embedding of each type of layer.

  Raises:
    ValueError: also if rope_parameters contradicts a field of transformers 4.
  """
  bases = {name: fields.number(field, default) for name, (field, default) in BASES.items()}
  by_type, read_at = (
    fields.get("rope_parameters"),
    functools.partial(_rotary, head_dim, max_model_len),
  )
  if by_type is None:
    found = {
      FULL: read_at(fields, "rope_scaling", bases[FULL]),
      SLIDING: rotary.RotaryConfig(head_dim=head_dim, base=bases[SLIDING]),
    }
  elif not isinstance(by_type, dict) or not set(by_type) <= set(bases):
    raise fields.refuse("rope_parameters", f"an object with {tuple(bases)}", "correct the file")
  else:
    inner = Fields(fields.path, by_type, "rope_parameters.")
    found = {name: read_at(inner, name, base) for name, base in bases.items()}
  place = "rope_scaling" if by_type is None else "rope_parameters"
  for name, (field, _) in BASES.items():
    if fields.get(field) is not None and bases[name] != found[name].base:
      raise fields.refuse(
        field, f"the {found[name].base} of {place} for {name}", "remove one of the two"
      )
  if fields.get("rope_scaling") is not None:
    full = found[FULL]
    if read_at(fields, "rope_scaling", full.base) != full:
      raise fields.refuse(
        "rope_scaling", f"the value in rope_parameters, {full}", "remove one of the two"
      )
  return found


def _rotary(
  head_dim: int, max_model_len: int, fields: Fields, field: str, outer_base: float
) -> rotary.RotaryConfig:
  """Reads the object at a field, which may be missing; `outer_base` is for one without a base."""
  value = {} if fields.get(field) is None else fields.get(field)
  if not isinstance(value, dict):
    raise fields.refuse(field, "an object", "correct the file")
  outer = Fields(fields.path, {"rope_theta": value.get("rope_theta", outer_base)})
  inner = Fields(fields.path, value, f"{fields.prefix}{field}.")
  return rope_fields.read_one(outer, inner, head_dim, max_model_len)


def _size(hidden: int, intermediate: int, layers: int) -> TransformerConfig:
  like = lambda turn_base, window: layer(
    num_heads=4,
    num_kv_heads=1,
    head_dim=HEAD_DIM,
    intermediate_size=intermediate,
    turn=rotary.RotaryConfig(head_dim=HEAD_DIM, base=turn_base),
    window=window,
    scale=None,
  )
  windowed, full = like(SLIDING_BASE, 512), like(FULL_BASE, None)
  return TransformerConfig(
    vocab_size=262_144,
    hidden_size=hidden,
    layers=tuple(windowed if (index + 1) % PATTERN else full for index in range(layers)),
    norm_eps=1e-6,
    norm_weights="1 + w",
    embedding_scale=hidden**0.5,
    is_tied=True,
    max_model_len=32_768,
    family="gemma3_text",
  )


FAMILY = base.Family(
  model_type="gemma3_text",
  architecture="Gemma3ForCausalLM",
  read=read,
  written=written,
  describes=describes,
  attention={"has_qk_norms": True},
  gguf=base.Gguf(
    architecture="gemma3",
    norm_offset=1.0,
    names={
      "post_attention_layernorm": "post_attention_norm",
      "pre_feedforward_layernorm": "ffn_norm",
      "post_feedforward_layernorm": "post_ffw_norm",
    },
    keys=dict.fromkeys(
      (
        "attention.sliding_window",
        "attention.sliding_window_pattern",
        "rope.freq_base_swa",
        "final_logit_softcapping",
      )
    ),
    completed=from_gguf,
    divided=to_gguf,
  ),
  sizes={
    "gemma-3-270m": _size(640, 2048, 18),
    "gemma-3-1b": _size(1152, 6912, 26),
  },
)
