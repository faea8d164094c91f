"""Checked access to the fields of a JSON object, such as a model's config.json."""

from __future__ import annotations

from collections.abc import Mapping
import pathlib
from typing import Any

from seerjax import fields as fields_lib
from seerjax.models import tokenizer_files

# Larger than any size of a published model, vocabularies and contexts included; products of two
# sizes stay within 64 bits.
MAX_SIZE = 2**30
# More layers than any published model has; a model holds a record of each.
MAX_LAYERS = 2048


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
