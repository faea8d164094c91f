"""The language: sentences of edits that insert, replace, nudge, delete or polish a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from experiments.problems.denoising import operations
from experiments.problems.denoising.operations import BY_NAME, MAX_STEPS, OPERATIONS
from seerjax.discovery.environment import Artefact


class PipelineEdits:
  """Up to two edits of six tokens: verb, place, operation, and a level for each of three knobs.

    verb       insert  before the place          place       0..7, folded into the pipeline
               replace the step there            operation   of `OPERATIONS`
               nudge   its knobs by -1, 0 or 1   levels      0..15, folded into the knob's choices
               delete  it
               polish  its knobs one by one, while the validation MSE falls

  A verb ignores tokens that it does not need.
  """

  VERBS = ("insert", "replace", "nudge", "delete", "polish")
  NUM_EDITS = 2
  NUM_LEVELS = 16
  NUM_KNOBS = 3

  def __init__(self, polish: Callable[[list[dict[str, Any]], int], list[dict[str, Any]]]):
    """Takes the polish tool, which maps (steps, index) to steps with that step polished."""
    self._polish = polish
    self._place = 1 + len(self.VERBS)
    self._operation = self._place + MAX_STEPS
    self._levels = tuple(
      self._operation + len(OPERATIONS) + knob * self.NUM_LEVELS for knob in range(self.NUM_KNOBS)
    )

  @property
  def vocab_size(self) -> int:
    return -(-(self._levels[-1] + self.NUM_LEVELS) // 8) * 8

  @property
  def allowed(self) -> tuple[tuple[int, int], ...]:
    rest = (
      (self._place, self._operation),
      (self._operation, self._levels[0]),
      *((first, first + self.NUM_LEVELS) for first in self._levels),
    )
    # A sentence has to change something, so the first edit may not be the stop token.
    return ((1, self._place), *rest, (0, self._place), *rest)

  @property
  def stop_token(self) -> int | None:
    return 0

  def prompt(self, artefact: Artefact) -> tuple[int, ...]:
    ids = [0]
    for step in artefact["steps"]:
      operation = BY_NAME[step["op"]]
      ids.append(self._operation + OPERATIONS.index(operation))
      for first, parameter in zip(self._levels, operation.parameters):
        ids.append(first + parameter.level(step[parameter.name]))
    return tuple(ids)

  def apply(self, artefact: Artefact, tokens: Sequence[int], seed: int) -> Artefact:
    width = len(self.allowed) // self.NUM_EDITS
    kept = list(tokens)
    if len(kept) < len(self.allowed) and len(kept) % width == 1 and kept[-1] == self.stop_token:
      kept.pop()
    if not kept or len(kept) % width or (len(kept) == len(tokens) != len(self.allowed)):
      raise ValueError(
        f"PipelineEdits.apply: got {len(tokens)} tokens, expected {len(self.allowed)}, or {width}"
        " and then the stop token 0; finish the sentence."
      )
    for place, (token, (first, past)) in enumerate(zip(kept, self.allowed)):
      # The stop token is only allowed at the end, where it has been removed.
      least = max(first, 1)
      if not least <= token < past:
        raise ValueError(
          f"PipelineEdits.apply: got token {token} at place {place}, expected {least} to"
          f" {past - 1}; see `allowed`."
        )
    steps = [dict(step) for step in artefact["steps"]]
    for start in range(0, len(kept), width):
      steps = self._edit(steps, kept[start : start + width])
    return {"steps": steps}

  def _edit(self, steps: list[dict[str, Any]], tokens: Sequence[int]) -> list[dict[str, Any]]:
    verb = self.VERBS[tokens[0] - 1]
    place = tokens[1] - self._place
    levels = [token - first for token, first in zip(tokens[3:], self._levels)]
    operation = OPERATIONS[tokens[2] - self._operation]
    at = place % (len(steps) + (verb == "insert"))
    match verb:
      case "insert":
        if len(steps) == MAX_STEPS:
          raise ValueError(
            f"PipelineEdits.apply: got an insertion into {MAX_STEPS} steps, expected at most"
            f" {MAX_STEPS} steps; delete or replace one."
          )
        return [*steps[:at], operations.step(operation, levels), *steps[at:]]
      case "replace":
        return [*steps[:at], operations.step(operation, levels), *steps[at + 1 :]]
      case "nudge":
        moved = dict(steps[at])
        for parameter, level in zip(BY_NAME[moved["op"]].parameters, levels):
          # Thirds of the levels: down, unchanged, up.
          shift = level * 3 // 16 - 1
          moved[parameter.name] = operations.shifted(parameter, moved[parameter.name], shift)
        return [*steps[:at], moved, *steps[at + 1 :]]
      case "delete":
        if len(steps) == 1:
          raise ValueError(
            "PipelineEdits.apply: got the deletion of the only step, expected two steps at least;"
            " replace it."
          )
        return [*steps[:at], *steps[at + 1 :]]
      case _:
        return self._polish(steps, at)
