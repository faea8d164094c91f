"""Requests run to their ends: what `Engine.generate` does by the doors that everybody has."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Protocol, runtime_checkable

from seerjax.engine.sequence import StepOutput
from seerjax.types import Completion, Request


@runtime_checkable
class RunsRequests(Protocol):
  """What is asked of an engine; see `engine.Engine`."""

  def submit(self, request: Request) -> None: ...
  def step(self) -> list[StepOutput]: ...
  def poll(self) -> list[Completion]: ...
  def cancel(self, request_id: str) -> None: ...


def to_ends(
  engine: RunsRequests,
  requests: Sequence[Request],
  *,
  live: Container[str],
  keep: Callable[[list[Completion]], None],
  on_step: Callable[[list[StepOutput]], None] | None,
) -> list[Completion]:
  """Returns the completions of `requests`, in the order given, without those that were cancelled.

  Args:
    engine: that runs them, and whatever else is in it.
    requests: submitted at once, all or none.
    live: ids of the unfinished.
    keep: takes what others' requests finished with, for the next `poll`.
    on_step: called with each visit's updates.

  Raises:
    BaseException: what a step or `on_step` raises, Ctrl-C too; nothing of `requests` is left then.
  """
  others = engine.poll()  # Of earlier requests, which may have had the same ids.
  wanted: dict[str, Completion | None] = {}
  try:
    for request in requests:
      engine.submit(request)
      wanted[request.request_id] = None
    while any(request_id in live for request_id in wanted):
      updates = engine.step()
      if on_step is not None:
        on_step(updates)
      for completion in engine.poll():
        if completion.request_id in wanted:
          wanted[completion.request_id] = completion
        else:
          others.append(completion)
  except BaseException:
    for request_id in wanted:
      if request_id in live:
        engine.cancel(request_id)
    others += [one for one in engine.poll() if one.request_id not in wanted]
    raise
  finally:
    keep(others)
  return [completion for completion in wanted.values() if completion is not None]
