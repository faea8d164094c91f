"""Frozen dataclasses as flags: `--config.optimizer.learning_rate=1e-4`, and back.

Claim: none; every experiment's flags go through here.
"""

from __future__ import annotations

import dataclasses
import typing
from typing import Any, TypeVar

import ml_collections
from ml_collections import config_dict

T = TypeVar("T")


def to_flags(config: Any) -> ml_collections.ConfigDict:
  """Returns a locked ConfigDict with the fields of a (nested) dataclass; it refuses other names."""
  values = {
    field.name: to_flags(value) if dataclasses.is_dataclass(value) else _flag_value(value)
    for field in dataclasses.fields(config)
    for value in (vars(config)[field.name],)
  }
  return ml_collections.ConfigDict(values).lock()


def from_flags(kind: type[T], values: ml_collections.ConfigDict) -> T:
  """Returns the dataclass that the flags describe; its own checks refuse what cannot be."""
  hints = typing.get_type_hints(kind)
  arguments: dict[str, Any] = {}
  for name, value in values.items():
    nested = dataclasses.is_dataclass(hints[name])
    arguments[name] = from_flags(hints[name], typing.cast(Any, value)) if nested else value
  return kind(**arguments)


def _flag_value(value: Any) -> Any:
  # A field that may be None takes a number on the command line.
  return config_dict.placeholder(float) if value is None else value
