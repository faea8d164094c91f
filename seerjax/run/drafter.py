"""A run's drafter: created from the config, its acceptance statistics, and draft training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from seerjax.engine.engine import Engine
from seerjax.rollout import groups
from seerjax.run import draft_learning
from seerjax.speculation import config as config_lib, statistics
from seerjax.speculation.draft_model import ModelDrafter
from seerjax.speculation.hybrid_drafter import HybridDrafter
from seerjax.types import RolloutGroup

PART = "draft"  # Name of the checkpoint part.


class RunDrafts:
  """Creates the drafter of a run's engine, and collects draft statistics per step."""

  def __init__(self, config: config_lib.SpeculationConfig):
    """Checks the drafter's name before a run starts.

    Raises:
      ValueError: if there is no such function.
    """
    config_lib.load(config)
    self._config = config
    self._learner: draft_learning.DraftLearner | None = None
    self._acceptance = statistics.Acceptance()

  def begin(self, engine: Engine) -> None:
    """Creates the drafter, which may time the engine's steps, and installs it in the engine.

    Raises:
      ValueError: if the result is not a drafter, or has no draft model but should train one.
    """
    run = config_lib.DraftedRun(
      engine=engine,
      is_probe=lambda request_id: groups.place_of(request_id)[2] == 0,
      acceptance=self._acceptance,
    )
    drafter = config_lib.make_drafter(self._config, run)
    if self._config.draft.learn:
      model = drafter.model if isinstance(drafter, HybridDrafter) else drafter
      if not isinstance(model, ModelDrafter):
        raise ValueError(
          f"DraftModelConfig.learn: got True for {type(drafter).__name__}, expected a drafter with"
          " a draft model; use the default SpeculationConfig.drafter, or set learn=False."
        )
      self._learner = draft_learning.DraftLearner(model)
    engine.drafter = drafter

  def restore(self, restored_part: Callable[[str, Callable[[], Any]], Any]) -> str:
    """Restores the state of a trained draft.

    Args:
      restored_part: `Life.restored_part`.

    Returns:
      A sentence for display; "" if the draft is not trained.
    """
    learner = self._learner
    if learner is None:
      return ""
    state = restored_part(PART, lambda: learner.state)
    if state is None:
      return "the draft model is trained from here on, starting from its original weights"
    learner.restore(state)
    return "the draft model continues from its trained weights"

  def learn(self, answers: Sequence[RolloutGroup], step: int) -> dict[str, float]:
    """Trains the draft on a step's completions, if enabled; returns the metrics."""
    return {} if self._learner is None else self._learner.learn(answers, step)

  def parts(self) -> Mapping[str, Any]:
    """Returns the draft's part of a checkpoint."""
    return {} if self._learner is None else {PART: self._learner.state}

  def take(self) -> statistics.Acceptance:
    """Returns the draft statistics since the last call."""
    return self._acceptance.take()
