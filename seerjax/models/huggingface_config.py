"""Converts between a Hugging Face config.json and our `TransformerConfig`.

    config.json  -- read -->  TransformerConfig  -- to_object -->  config.json

Every field that would change the computation is either supported or refused by name, so a model
never runs as something other than its file describes.
"""

from __future__ import annotations

from collections.abc import Mapping
import pathlib
from typing import Any, NamedTuple

from seerjax import fields as fields_lib, layer_kinds
from seerjax.backends import layer_support
from seerjax.layer_kinds import Gated, Grouped, LayerConfig
from seerjax.models import config as model_config, tokenizer_files
from seerjax.ops import rotary


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

# Larger than any size of a published model, vocabularies and contexts included; products of two
# sizes stay within 64 bits.
MAX_SIZE = 2**30
# More layers than any published model has; a model holds a record of each.
MAX_LAYERS = 2048

# Allowed fields and values of each kind of scaling. None: any value; else the values without
# effect.
_ROPE_COMMON = {
  "rope_type": None,
  "type": None,
  "rope_theta": None,
  "partial_rotary_factor": (None, 1, 1.0),
}
_ROPE_FIELDS: dict[str, dict[str, Any]] = {
  "none": {},
  "linear": {"factor": None},
  "llama3": {
    "factor": None,
    "low_freq_factor": None,
    "high_freq_factor": None,
    "original_max_position_embeddings": None,
  },
  "yarn": {
    "factor": None,
    "original_max_position_embeddings": None,
    "beta_fast": None,
    "beta_slow": None,
    "attention_factor": None,
    "mscale": (None,),
    "mscale_all_dim": (None,),
    "truncate": (None, True),
  },
}


def read(path: pathlib.Path) -> model_config.TransformerConfig:
  """Reads config.json, in the spellings of transformers 4 and 5.

  Raises:
    FileNotFoundError: if there is no such file.
    ValueError: naming the field that is missing, malformed or not supported.
  """
  fields = Fields(path, read_object(path))
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
    rotary=_rotary(fields, head_dim, max_model_len),
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
  turn = kind.attention.rotary
  scaling: dict[str, Any] = {}
  if turn.scaling != "none":
    scaling |= {"rope_type": turn.scaling, "factor": turn.factor}
  if turn.scaling in ("llama3", "yarn"):
    scaling["original_max_position_embeddings"] = turn.original_context
  if turn.scaling == "llama3":
    scaling["low_freq_factor"] = turn.low_frequency_factor
    scaling["high_freq_factor"] = turn.high_frequency_factor
  if turn.scaling == "yarn":
    scaling |= {"beta_fast": turn.beta_fast, "beta_slow": turn.beta_slow}
    if turn.attention_factor is not None:
      scaling["attention_factor"] = turn.attention_factor
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
    "rope_parameters": {"rope_type": "default", "rope_theta": turn.base} | scaling,
    "rope_scaling": scaling or None,
    "rope_theta": turn.base,
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


def read_object(path: pathlib.Path) -> dict[str, Any]:
  """Returns the JSON object in one of a model directory's files.

  Raises:
    FileNotFoundError: if there is no such file.
    ValueError: if it is not JSON, or not an object.
  """
  try:
    content = path.read_bytes()
  except FileNotFoundError as error:
    raise FileNotFoundError(
      f"{path}: got no such file, expected a Hugging Face model directory; check the path."
    ) from error
  return tokenizer_files.json_object(path, content)


def _family(fields: Fields) -> str:
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


def _refuse_unsupported(fields: Fields, family: str) -> None:
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


def _rotary(fields: Fields, head_dim: int, max_model_len: int) -> rotary.RotaryConfig:
  """Reads rope_parameters (transformers 5) or rope_theta and rope_scaling (transformers 4)."""
  found = []
  for name in ("rope_parameters", "rope_scaling"):
    value = fields.get(name)
    if value is None:
      continue
    if not isinstance(value, dict):
      raise fields.refuse(name, "an object", "correct the file")
    rope = Fields(fields.path, value, f"{name}.")
    found.append((name, _scaled_rotary(fields, rope, head_dim, max_model_len)))
  if not found:
    return rotary.RotaryConfig(head_dim=head_dim, base=fields.number("rope_theta", 10_000.0))
  if len(found) == 2 and found[0][1] != found[1][1]:
    raise fields.refuse(
      "rope_scaling", f"the value in rope_parameters, {found[0][1]}", "remove one of the two"
    )
  return found[0][1]


def _scaled_rotary(
  fields: Fields, rope: Fields, head_dim: int, max_model_len: int
) -> rotary.RotaryConfig:
  kind_field = "rope_type" if "rope_type" in rope.values else "type"
  kind = rope.get(kind_field)
  scaling = "none" if kind in (None, "default") else kind
  if not isinstance(scaling, str) or scaling not in _ROPE_FIELDS or kind == "none":
    names = ["default", *(name for name in _ROPE_FIELDS if name != "none")]
    raise rope.refuse(kind_field, f"one of {names}", "other kinds of scaling are not implemented")
  known = _ROPE_COMMON | _ROPE_FIELDS[scaling]
  for field, value in rope.values.items():
    if field not in known:
      raise rope.refuse(
        field, f"only {sorted(known)} with the kind {kind!r}", "this release does not compute it"
      )
    allowed = known[field]
    if allowed is not None and not any(value is a or value == a for a in allowed):
      raise rope.refuse(field, f"{allowed[-1]}", "this release does not compute it")
  base = rope.number("rope_theta", fields.number("rope_theta", 10_000.0))
  if base != (outer := fields.number("rope_theta", base)):
    raise rope.refuse("rope_theta", f"the {outer} of rope_theta", "remove one of the two")
  if scaling == "none":
    return rotary.RotaryConfig(head_dim=head_dim, base=base)
  factor = rope.number("factor")
  if scaling == "linear":
    return rotary.RotaryConfig(head_dim=head_dim, base=base, scaling="linear", factor=factor)
  original_context = rope.whole("original_max_position_embeddings", max_model_len)
  if scaling == "llama3":
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high <= low:
      raise rope.refuse("high_freq_factor", f"more than low_freq_factor={low}", "correct the file")
    return rotary.RotaryConfig(
      head_dim=head_dim,
      base=base,
      scaling="llama3",
      factor=factor,
      original_context=original_context,
      low_frequency_factor=low,
      high_frequency_factor=high,
    )
  has_factor = rope.get("attention_factor") is not None
  return rotary.RotaryConfig(
    head_dim=head_dim,
    base=base,
    scaling="yarn",
    factor=factor,
    original_context=original_context,
    beta_fast=rope.number("beta_fast", 32.0),
    beta_slow=rope.number("beta_slow", 1.0),
    attention_factor=rope.number("attention_factor") if has_factor else None,
  )


class Fields:
  """One JSON object with checked access; errors name the field."""

  def __init__(self, path: pathlib.Path, values: Mapping[str, Any], prefix: str = ""):
    self.path, self.values, self.prefix = path, values, prefix

  def refuse(self, field: str, expected: str, fix: str) -> ValueError:
    """Returns an error with the field's value and the expected one."""
    got = fields_lib.shown(self.values[field]) if field in self.values else "nothing"
    return ValueError(f"{self.path}: {self.prefix}{field}: got {got}, expected {expected}; {fix}.")

  def get(self, field: str) -> Any:
    """Returns the field's value, None if it is missing."""
    return self.values.get(field)

  def whole(self, field: str, default: int | None = None) -> int:
    """Returns a number from 1 to `MAX_SIZE`.

    Raises:
      ValueError: for anything else.
    """
    value = self.get(field)
    if value is None and default is not None:
      return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
      raise self.refuse(field, "a whole number of at least 1", "correct the file")
    if value > MAX_SIZE:
      raise self.refuse(field, f"at most {MAX_SIZE}", "correct the file")
    return value

  def layers(self, field: str) -> int:
    """Returns a number of layers, from 1 to `MAX_LAYERS`.

    Raises:
      ValueError: for anything else.
    """
    value = self.whole(field)
    if value > MAX_LAYERS:
      raise self.refuse(field, f"at most {MAX_LAYERS}", "correct the file")
    return value

  def number(self, field: str, default: float | None = None) -> float:
    """Returns a positive number.

    Raises:
      ValueError: for anything else.
    """
    value = self.get(field)
    if value is None and default is not None:
      return default
    if (
      not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf")
    ):
      raise self.refuse(field, "a positive number", "correct the file")
    return float(value)

  def flag(self, field: str) -> bool:
    """Returns a boolean, False if it is missing.

    Raises:
      ValueError: for anything else.
    """
    value = self.get(field)
    if value is not None and not isinstance(value, bool):
      raise self.refuse(field, "true or false", "correct the file")
    return bool(value)
