"""A run's drafts: the drafter that its config names, and what came of what it drafted."""

from __future__ import annotations

from seerjax.engine.engine import Engine
from seerjax.rollout import groups
from seerjax.speculation import config as config_lib, statistics


class RunDrafts:
  """Gives a run's engine its drafter, and tells step by step what came of the drafts."""

  def __init__(self, config: config_lib.SpeculationConfig):
    """Refuses what names no drafter, before a run begins.

    Raises:
      ValueError: if there is no function of that name.
    """
    config_lib.load(config)
    self._config = config
    self._acceptance = statistics.Acceptance()

  def begin(self, engine: Engine) -> None:
    """Makes the drafter, which may measure the engine's steps, and hands it to the engine.

    Raises:
      ValueError: if it is no drafter.
    """
    run = config_lib.DraftedRun(
      engine=engine,
      is_probe=lambda request_id: groups.place_of(request_id)[2] == 0,
      acceptance=self._acceptance,
    )
    engine.drafter = config_lib.make_drafter(self._config, run)

  def take(self) -> statistics.Acceptance:
    """Returns what came of the drafts since this was asked last."""
    return self._acceptance.take()
