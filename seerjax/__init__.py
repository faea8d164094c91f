"""SeerJAX: reinforcement learning of language models, bit-identical wherever it runs.

`__all__` is the public API. Names are imported when they are first used, so that importing this
package costs nothing and touches no device.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from seerjax import array_typing, numerics, types
  from seerjax.numerics import NumericsConfig
  from seerjax.types import (
    Completion,
    Problem,
    Request,
    Rollout,
    RolloutGroup,
    SamplingParams,
    Task,
    Verdict,
  )

__version__ = "0.1.0"

# The module of each public record; a public name that is not listed here is itself a module.
_HOMES = {
  "Completion": "types",
  "NumericsConfig": "numerics",
  "Problem": "types",
  "Request": "types",
  "Rollout": "types",
  "RolloutGroup": "types",
  "SamplingParams": "types",
  "Task": "types",
  "Verdict": "types",
}

__all__ = [
  "Completion",
  "NumericsConfig",
  "Problem",
  "Request",
  "Rollout",
  "RolloutGroup",
  "SamplingParams",
  "Task",
  "Verdict",
  "array_typing",
  "numerics",
  "types",
]


def __getattr__(name: str) -> Any:
  if name in _HOMES:
    return getattr(importlib.import_module(f"seerjax.{_HOMES[name]}"), name)
  if name in __all__:
    return importlib.import_module(f"seerjax.{name}")
  raise AttributeError(
    f"seerjax: got the attribute {name!r}, expected one of {__all__}; import other modules by their"
    " own name."
  )


def __dir__() -> list[str]:
  return sorted([*__all__, "__version__"])
