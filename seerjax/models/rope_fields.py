"""The fields of config.json that describe a rotary embedding, as transformers 4 and 5 spell them.

rope_parameters | rope_theta, rope_scaling  -- read -->     RotaryConfig
RotaryConfig                                -- written -->  all three
"""

from __future__ import annotations

from typing import Any

from seerjax.models.config_fields import Fields
from seerjax.ops import rotary

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


def read(fields: Fields, head_dim: int, max_model_len: int) -> rotary.RotaryConfig:
  """Reads rope_parameters (transformers 5) or rope_theta and rope_scaling (transformers 4)."""
  found = []
  for name in ("rope_parameters", "rope_scaling"):
    value = fields.get(name)
    if value is None:
      continue
    if not isinstance(value, dict):
      raise fields.refuse(name, "an object", "correct the file")
    rope = Fields(fields.path, value, f"{name}.")
    found.append((name, read_one(fields, rope, head_dim, max_model_len)))
  if not found:
    return rotary.RotaryConfig(head_dim=head_dim, base=fields.number("rope_theta", 10_000.0))
  if len(found) == 2 and found[0][1] != found[1][1]:
    raise fields.refuse(
      "rope_scaling", f"the value in rope_parameters, {found[0][1]}", "remove one of the two"
    )
  return found[0][1]


def read_one(
  fields: Fields, rope: Fields, head_dim: int, max_model_len: int
) -> rotary.RotaryConfig:
  """Reads one object `rope` with a kind of scaling; `fields` may have a `rope_theta` as well."""
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


def scaling_of(turn: rotary.RotaryConfig) -> dict[str, Any]:
  """Returns the fields of an embedding's scaling; empty if there is none."""
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
  return scaling


def written(turn: rotary.RotaryConfig) -> dict[str, Any]:
  """Returns the fields for an embedding, which both transformers 4 and 5 read."""
  scaling = scaling_of(turn)
  return {
    "rope_parameters": {"rope_type": "default", "rope_theta": turn.base} | scaling,
    "rope_scaling": scaling or None,
    "rope_theta": turn.base,
  }
