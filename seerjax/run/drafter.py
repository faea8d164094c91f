"""A run's drafts: the drafter that its config names, what comes of them, what a draft learns."""

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

PART = "draft"  # The name of a checkpoint's part.


class RunDrafts:
  """Gives a run's engine its drafter, and tells step by step what came of the drafts."""

  def __init__(self, config: config_lib.SpeculationConfig):
    """Refuses what names no drafter, before a run begins.

    Raises:
      ValueError: if there is no function of that name.
    """
    config_lib.load(config)
    self._config = config
    self._learner: draft_learning.DraftLearner | None = None
    self._acceptance = statistics.Acceptance()

  def begin(self, engine: Engine) -> None:
    """Makes the drafter, which may measure the engine's steps, and hands it to the engine.

    Raises:
      ValueError: if it is no drafter, or has no model where one is to learn.
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
          " a draft model; leave SpeculationConfig.drafter as it is, or do not learn."
        )
      self._learner = draft_learning.DraftLearner(model)
    engine.drafter = drafter

  def restore(self, restored_part: Callable[[str, Callable[[], Any]], Any]) -> str:
    """Goes on with what the draft had learnt, if it learns.

    Args:
      restored_part: `Session.restored_part`.

    Returns:
      A sentence for people; "" if there is nothing to say.
    """
    learner = self._learner
    if learner is None:
      return ""
    state = restored_part(PART, lambda: learner.state)
    if state is None:
      return "the draft model learns from here on, from the weights of its name"
    learner.restore(state)
    return "the draft model goes on from what it had learnt"

  def learn(self, answers: Sequence[RolloutGroup], step: int) -> dict[str, float]:
    """Teaches the draft a step's answers, if it learns; returns the step's numbers."""
    return {} if self._learner is None else self._learner.learn(answers, step)

  def parts(self) -> Mapping[str, Any]:
    """Returns what a checkpoint holds of the draft."""
    return {} if self._learner is None else {PART: self._learner.state}

  def take(self) -> statistics.Acceptance:
    """Returns what came of the drafts since this was asked last."""
    return self._acceptance.take()
