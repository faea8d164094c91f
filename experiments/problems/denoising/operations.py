"""The steps of pipelines, their knobs, and the validation of pipelines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from seerjax.discovery import environment as environment_lib

MAX_STEPS = 8


class Parameter(NamedTuple):
  """One knob of a step.

  Attributes:
    name: key in the step's dict.
    choices: ascending numbers, all integers or all floats; or words. Edits use these; a program may
      use any number of the type between the first and the last.
    meaning: description for people and models.
  """

  name: str
  choices: tuple[Any, ...]
  meaning: str

  def complaint(self, value: Any) -> str:
    """Returns why a value is invalid; "" if it is valid."""
    first, last = self.choices[0], self.choices[-1]
    if isinstance(first, str):
      fits = isinstance(value, str) and value in self.choices
      expected = f"one of {', '.join(map(str, self.choices))}"
    else:
      kinds = int if isinstance(first, int) else int | float
      fits = isinstance(value, kinds) and not isinstance(value, bool) and first <= value <= last
      expected = f"{'an integer' if isinstance(first, int) else 'a number'} from {first} to {last}"
    return "" if fits else f"{self.name}: got {environment_lib.shown(value)}, expected {expected}"

  def level(self, value: Any) -> int:
    """Returns the index of the choice nearest to a valid value."""
    if isinstance(value, str):
      return list(self.choices).index(value)
    return int(np.argmin([abs(float(choice) - value) for choice in self.choices]))


class Operation(NamedTuple):
  """One kind of step: its knobs (at most three) and its description."""

  name: str
  parameters: tuple[Parameter, ...]
  meaning: str


_RANK = Parameter("rank", (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32, 48), "components")
_WEIGHT = Parameter(
  "weight",
  (0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95),
  "share of what is mixed in",
)

# In the order of the ids in `PipelineEdits`.
OPERATIONS: tuple[Operation, ...] = (
  Operation("normalise", (), "gives every cell the same number of molecules, the median one"),
  Operation("sqrt", (), "takes square roots; undone by `invert`, or at the end"),
  Operation("log", (), "takes log(1 + x); undone by `invert`, or at the end"),
  Operation("invert", (), "undoes the last sqrt or log"),
  Operation("svd", (_RANK,), "keeps the leading principal components"),
  Operation(
    "diffuse",
    (
      Parameter("neighbours", (2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 20, 24, 30, 40), "cells"),
      Parameter("times", (1, 2, 3, 4, 5, 6), "steps of the walk"),
      Parameter("decay", (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 8.0, 16.0), "exponent of the kernel"),
    ),
    "averages each cell with its neighbours by a random walk on their graph (MAGIC)",
  ),
  Operation(
    "genes",
    (
      Parameter("neighbours", (1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 25, 30, 40, 50, 60), "genes"),
      _WEIGHT,
    ),
    "moves each gene to the average of those it correlates with",
  ),
  Operation(
    "alra",
    (_RANK, Parameter("quantile", (0.0, 0.001, 0.01, 0.02, 0.05, 0.1, 0.2), "of the noise")),
    "low rank, zeros restored where a gene is within its own noise (ALRA)",
  ),
  Operation(
    "nmf",
    (_RANK, Parameter("iterations", (4, 7, 10, 14, 18, 22, 26, 30), "multiplicative updates")),
    "factors into non-negative programs under the Poisson likelihood",
  ),
  Operation(
    "shrink",
    (
      Parameter(
        "strength",
        (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0),
        "prior molecules, in median cells",
      ),
    ),
    "shrinks a cell to the mean of the genes, small cells more (Poisson-gamma posterior)",
  ),
  Operation(
    "blend",
    (Parameter("source", ("raw", "mean", "saved"), "what is mixed in"), _WEIGHT),
    "mixes in the raw counts, the mean of the genes, or what `save` kept",
  ),
  Operation("save", (), "keeps a copy for `blend`; the latest counts"),
  Operation("rescale", (), "gives every gene the total that it has in the raw counts"),
  Operation(
    "power",
    (
      Parameter(
        "exponent",
        (0.6, 0.7, 0.8, 0.85, 0.9, 0.925, 0.95, 0.98, 1.02, 1.05, 1.075, 1.1, 1.15, 1.2, 1.3, 1.5),
        "1 changes nothing",
      ),
    ),
    "raises to a power: below 1 contrasts shrink, above 1 they grow",
  ),
)
BY_NAME = {operation.name: operation for operation in OPERATIONS}


def step(operation: Operation, levels: Sequence[int]) -> dict[str, Any]:
  step: dict[str, Any] = {"op": operation.name}
  for parameter, level in zip(operation.parameters, levels):
    # If there are fewer choices than levels, neighbouring levels share a choice.
    step[parameter.name] = parameter.choices[level * len(parameter.choices) // 16]
  return step


def shifted(parameter: Parameter, value: Any, shift: int) -> Any:
  if shift == 0:
    return value
  level = parameter.level(value) + shift
  return parameter.choices[min(max(level, 0), len(parameter.choices) - 1)]


def complaint(artefact: Any) -> str:
  """Returns why an object is not a pipeline; "" if it is one."""
  if not isinstance(artefact, dict) or set(artefact) != {"steps"}:
    return f'artefact: got {environment_lib.shown(artefact)}, expected {{"steps": [...]}}'
  steps = artefact["steps"]
  if not isinstance(steps, list) or not 1 <= len(steps) <= MAX_STEPS:
    got = f"{len(steps)} steps" if isinstance(steps, list) else type(steps).__name__
    return f"steps: got {got}, expected a list of 1 to {MAX_STEPS}"
  num_transforms, is_saved = 0, False
  for place, step in enumerate(steps):
    where = f"steps[{place}]"
    op = step.get("op") if isinstance(step, dict) else None
    operation = BY_NAME.get(op) if isinstance(op, str) else None
    if operation is None:
      names = ", ".join(BY_NAME)
      got = environment_lib.shown(step)
      return f'{where}: got {got}, expected a dict whose "op" is one of {names}'
    expected = {"op", *(parameter.name for parameter in operation.parameters)}
    if set(step) != expected:
      got = ", ".join(sorted(map(environment_lib.shown, step)))
      return f"{where}: got the fields {got}, expected {', '.join(sorted(expected))}"
    for parameter in operation.parameters:
      reason = parameter.complaint(step[parameter.name])
      if reason:
        return f"{where}.{reason}"
    num_transforms += (op in ("sqrt", "log")) - (op == "invert")
    if num_transforms < 0:
      return f"{where}: got invert, expected a sqrt or log before it that is not undone yet"
    is_saved |= op == "save"
    if op == "blend" and step["source"] == "saved" and not is_saved:
      return f"{where}: got a blend with what is saved, expected a save before it"
  return ""
