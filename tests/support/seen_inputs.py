"""An engine that lets subclasses see, and change, the arrays of its steps."""

from __future__ import annotations

import functools

from seerjax.engine.engine import Engine
from seerjax.engine.planner import Planner


class SeesInputs(Engine):
  """An engine that replaces its planner's arrays by those that `_inputs` returns."""

  planner: Seen

  def __init__(self, *args, **others):
    super().__init__(*args, planner=functools.partial(Seen, self), **others)

  def _inputs(self, scheduled):
    return self.planner.plain(scheduled)


class Seen(Planner):
  """A planner that asks its engine for the arrays of a step."""

  def __init__(self, engine: SeesInputs, *args, **others):
    super().__init__(*args, **others)
    self._engine, engine.planner = engine, self

  def inputs(self, scheduled):
    return self._engine._inputs(scheduled)

  def plain(self, scheduled):
    """Returns the arrays that a plain planner makes."""
    return super().inputs(scheduled)
