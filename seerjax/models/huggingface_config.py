"""Converts between a Hugging Face config.json and our `TransformerConfig`, by its family.

config.json  -- read -->  TransformerConfig  -- to_object -->  config.json
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

from seerjax.models import config as model_config, config_fields, families


def read(path: pathlib.Path, family: str = "") -> model_config.TransformerConfig:
  """Reads config.json, in the spellings of transformers 4 and 5.

  Args:
    path: path of the file.
    family: family of the model, as for `families.named`; "" takes the file's `model_type`.

  Raises:
    FileNotFoundError: if there is no such file.
    ValueError: naming the field that is missing, malformed or not supported.
  """
  fields = config_fields.Fields(path, config_fields.read_object(path))
  own = families.named(family) if family else _family(fields)
  if fields.get("model_type") not in (None, own.model_type):
    raise fields.refuse("model_type", f"{own.model_type!r} for this family", "name another family")
  return dataclasses.replace(own.read(fields), family=family or own.model_type)


def to_object(
  config: model_config.TransformerConfig, dtype: str, eos_ids: tuple[int, ...]
) -> dict[str, Any]:
  """Returns a config.json that both transformers 4 and 5 read.

  Raises:
    ValueError: if no model family has this configuration.
  """
  family = families.of(config)
  return family.written(config) | {
    "architectures": [family.architecture],
    "bos_token_id": None,
    "dtype": dtype,
    # Explicit, because Llama's default is id 2.
    "eos_token_id": list(eos_ids) if len(eos_ids) > 1 else (eos_ids[0] if eos_ids else None),
    "model_type": family.model_type,
    "torch_dtype": dtype,
    "use_cache": True,
  }


def _family(fields: config_fields.Fields) -> families.Family:
  name, architectures = fields.get("model_type"), fields.get("architectures")
  by_architecture = {family.architecture: family for family in families.FAMILIES}
  if architectures is not None:
    is_known = isinstance(architectures, list) and len(architectures) == 1
    if not is_known or str(architectures[0]) not in by_architecture:
      raise fields.refuse(
        "architectures",
        f"one of {sorted(by_architecture)}",
        "other architectures are not implemented",
      )
    name = by_architecture[architectures[0]].model_type if name is None else name
  if not isinstance(name, str) or name not in families.names():
    raise fields.refuse(
      "model_type", f"one of {families.names()}", "other families are not implemented"
    )
  family = families.named(name)
  if architectures is not None and architectures[0] != family.architecture:
    raise fields.refuse(
      "architectures", f"[{family.architecture!r}] for model_type {name!r}", "correct the file"
    )
  return family
