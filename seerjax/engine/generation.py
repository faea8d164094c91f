"""Runs requests to completion: `Engine.generate`, implemented with the engine's public methods."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Protocol, runtime_checkable

from seerjax.engine.sequence import StepOutput
from seerjax.types import Completion, Request


@runtime_checkable
class RunsRequests(Protocol):
  """The methods used here of an engine; see `engine.Engine`."""

  def add_request(self, request: Request) -> None: ...
  def step(self) -> list[StepOutput]: ...
  def poll(self) -> list[Completion]: ...
  def abort_request(self, request_id: str) -> None: ...


def to_ends(
  engine: RunsRequests,
  requests: Sequence[Request],
  *,
  live: Container[str],
  keep: Callable[[list[Completion]], None],
  on_step: Callable[[list[StepOutput]], None] | None,
) -> list[Completion]:
  """Returns the completions of `requests` in the order given, without cancelled ones.

  Args:
    engine: the engine that runs them, possibly with other requests.
    requests: submitted at once, all or none.
    live: ids of the unfinished requests.
    keep: receives completions of other requests, for the next `poll`.
    on_step: called with each visit's updates.

  Raises:
    BaseException: if a step or `on_step` raises, Ctrl-C included; all `requests` are cancelled
      then.
  """
  others = engine.poll()  # Completions of earlier requests, which may have had the same ids.
  wanted: dict[str, Completion | None] = {}
  try:
    for request in requests:
      engine.add_request(request)
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
        engine.abort_request(request_id)
    others += [one for one in engine.poll() if one.request_id not in wanted]
    raise
  finally:
    keep(others)
  return [completion for completion in wanted.values() if completion is not None]
