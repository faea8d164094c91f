"""Twins of the contract that several tests have to find out."""

from __future__ import annotations

import dataclasses

from seerjax.engine.planner import Planner
from seerjax.sleep.runner import Runner


class TakesASlot(Planner):
  """Background rows are written to the slots of foreground rows."""

  def with_background(self, plan, table):
    front = [piece.sequence for piece in plan.rows[0]]
    plan = super().with_background(plan, table)
    for piece, sequence in zip(plan.rows[0][len(front) :], front):
      piece.sequence.page_row = sequence.page_row
    return plan


class FromTheClock(Runner):
  """Seeds of sleep depend on the step at which a job starts."""

  def _begin(self, context, job):
    config, steps = self._config, self._engine.counters.steps
    self._config = dataclasses.replace(config, seed=config.seed + steps)
    super()._begin(context, job)
    self._config = config
