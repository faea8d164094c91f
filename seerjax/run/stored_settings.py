"""Settings as a directory of the release before has them, in today's names.

Kept for one release. A setting that got another name is read under that; one that has become a
constant must have had its value, and is left out; one that is new had the value of its default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Path then -> path now.
RENAMED: Mapping[str, str] = {
  "budget": "speculation.budget",
}
# Path now -> the value of the constant that it has become.
CONSTANTS: Mapping[str, Any] = {
  "scheduler.fair_every": 64,
  "scheduler.num_compared": 64,
  "scheduler.routing.max_imbalance": 0.05,
  "speculation.budget.memory": 512.0,
  "speculation.budget.off_gain": 0.05,
  "speculation.budget.on_gain": 0.1,
  "speculation.budget.probe_cost": 0.0025,
  "speculation.budget.probe_requests": 2,
}


def as_today(stored: Mapping[str, Any]) -> dict[str, Any]:
  """Returns stored settings in today's names, without those that are constants today.

  Raises:
    ValueError: if one of these had another value.
  """
  return _mapped(stored, "")


def completed(stored: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
  """Returns `as_today`, with the defaults of settings that are newer than what was stored.

  Raises:
    ValueError: as `as_today`.
  """
  return _filled(as_today(stored), defaults)


def _filled(found: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
  filled = dict(found)
  for name, default in defaults.items():
    if name not in filled:
      filled[name] = default
    elif isinstance(filled[name], Mapping) and isinstance(default, Mapping):
      filled[name] = _filled(filled[name], default)
  return filled


def _mapped(stored: Mapping[str, Any], start: str) -> dict[str, Any]:
  found: dict[str, Any] = {}
  for name, value in stored.items():
    path = RENAMED.get(start + name, start + name)
    if path in CONSTANTS:
      if value != CONSTANTS[path]:
        raise ValueError(
          f"{start + name}: got {value!r} in stored settings, expected {CONSTANTS[path]!r}, a"
          " constant by now; read this directory with the release that wrote it."
        )
      continue
    if isinstance(value, Mapping):
      value = _mapped(value, f"{path}.")
    *parents, last = path.removeprefix(start).split(".")
    place = found
    for parent in parents:
      place = place.setdefault(parent, {})
    place[last] = value
  return found
