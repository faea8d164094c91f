"""SeerJAX: reinforcement learning of language models, bit-identical wherever it runs.

`__all__` is the public API. Names are imported on first use, so importing this package costs
nothing and touches no device.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from seerjax import array_typing, numerics, types
  from seerjax.engine.beam import beam_search
  from seerjax.engine.engine import Engine
  from seerjax.engine.sizes import EngineConfig
  from seerjax.models.loading import load_model
  from seerjax.numerics import NumericsConfig
  from seerjax.rl import train
  from seerjax.run.config import RunConfig
  from seerjax.ttt import discover
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

# The module of each public name; a name that is not listed is itself a module.
_HOMES = {
  "Completion": "types",
  "Engine": "engine.engine",
  "EngineConfig": "engine.sizes",
  "NumericsConfig": "numerics",
  "Problem": "types",
  "Request": "types",
  "Rollout": "types",
  "RolloutGroup": "types",
  "RunConfig": "run.config",
  "SamplingParams": "types",
  "Task": "types",
  "Verdict": "types",
  "beam_search": "engine.beam",
  "discover": "ttt",
  "load_model": "models.loading",
  "train": "rl",
}

__all__ = [
  "Completion",
  "Engine",
  "EngineConfig",
  "NumericsConfig",
  "Problem",
  "Request",
  "Rollout",
  "RolloutGroup",
  "RunConfig",
  "SamplingParams",
  "Task",
  "Verdict",
  "array_typing",
  "beam_search",
  "discover",
  "load_model",
  "numerics",
  "train",
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
