"""Trace of a rollout, visit by visit: for metrics, the report's chart, and experiments.

A step of a rollout is one visit of its engine (`Engine.step`), which runs one or more engine steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import json
import os
import pathlib
from typing import Any, NamedTuple

from seerjax import metrics
from seerjax.speculation.statistics import Acceptance

FILE_NAME = "traces.jsonl"


class Span(NamedTuple):
  """A chunk that was run.

  Attributes:
    request_id: id of the request.
    group: name of its group.
    instance: instance that ran it.
    begin: first step of the rollout in which it ran.
    end: first step in which it no longer ran.
    num_tokens: tokens generated.
    is_probe: whether it is the group's first request.
    is_last: whether the request finished with this chunk.
  """

  request_id: str
  group: str
  instance: int
  begin: int
  end: int
  num_tokens: int
  is_probe: bool
  is_last: bool


@dataclasses.dataclass
class Trace:
  """Trace of a rollout, visit by visit.

  Attributes:
    spans: chunks, ordered by end.
    used_pages: pages in use, by visit and instance.
    rows: rows computed on all instances, by visit.
    preemptions: running requests that lost their pages.
    dropped: waiting requests that lost their pages, because no tier had room and nothing else
      could run.
    held_back: decisions deferred because no tier had room.
    migrations: requests that moved to another instance with their pages.
    pulls: prompts copied from another instance.
    spills: requests moved off the devices.
  """

  spans: list[Span] = dataclasses.field(default_factory=list)
  used_pages: list[list[int]] = dataclasses.field(default_factory=list)
  rows: list[int] = dataclasses.field(default_factory=list)
  preemptions: int = 0
  dropped: int = 0
  held_back: int = 0
  migrations: int = 0
  pulls: int = 0
  spills: int = 0

  @property
  def num_steps(self) -> int:
    """Number of visits of the engine."""
    return len(self.rows)

  def tail_steps(self, share: float = 0.1) -> int:
    """Returns the steps in which only the last `share` of requests (at least one) were left."""
    ends = sorted(span.end for span in self.spans if span.is_last)
    if not ends:
      return 0
    last = max(int(share * len(ends)), 1)
    return ends[-1] - ends[max(len(ends) - 1 - last, 0)]


class StepTrace(NamedTuple):
  """Trace of one training step's sampling.

  Attributes:
    rollouts: the rollouts, which ran one after the other.
    drafts: acceptance statistics of their drafts.
  """

  rollouts: list[Trace]
  drafts: Acceptance


def summarise(traces: Sequence[Trace]) -> dict[str, float]:
  """Returns the scheduling metrics of a step's consecutive rollouts."""
  return {
    "schedule/steps": float(sum(trace.num_steps for trace in traces)),
    "schedule/tail_steps": float(sum(trace.tail_steps() for trace in traces)),
    "schedule/chunks": float(sum(len(trace.spans) for trace in traces)),
    "schedule/migrations": float(sum(trace.migrations for trace in traces)),
    "schedule/spills": float(sum(trace.spills for trace in traces)),
  }


def append(path: str | os.PathLike, step: int, done: StepTrace) -> None:
  """Appends a step to a trace file, as one line. If a resumed run repeats a step, the later counts.

  Raises:
    OSError: if the disk is full.
  """
  record = {
    "step": step,
    "rollouts": [dataclasses.asdict(trace) for trace in done.rollouts],
    "drafts": dataclasses.asdict(done.drafts),
  }
  line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
  path = pathlib.Path(path)
  try:
    with path.open("a+b") as file:
      if file.tell():
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":  # A kill tore the last line; keep it apart from the new one.
          line = b"\n" + line
      file.write(line)
  except OSError as error:
    raise metrics.disk_error("traces", path, error) from error


def read(path: str | os.PathLike) -> dict[int, StepTrace]:
  """Returns every step in a file, skipping damaged lines; empty if there is no file."""
  return {step: done for _, found in _lines(path) if found for step, done in (found,)}


def damaged_lines(path: str | os.PathLike) -> list[int]:
  """Returns the 1-based numbers of lines that `read` skips, except a torn last one."""
  lines = list(_lines(path))
  return [number for number, found in lines if found is None and number < len(lines)]


def _lines(path: str | os.PathLike) -> Iterator[tuple[int, tuple[int, StepTrace] | None]]:
  """Yields each line's number and contents, None if it is torn or damaged."""
  data = pathlib.Path(path).read_bytes() if pathlib.Path(path).is_file() else b""
  for number, line in enumerate(data.split(b"\n"), 1):
    try:
      record = json.loads(line)
      rollouts = [_trace(rollout) for rollout in record["rollouts"]]
      found = int(record["step"]), StepTrace(rollouts, _acceptance(record["drafts"]))
    except (ValueError, KeyError, TypeError, AttributeError):
      found = None
    yield number, found


def _trace(record: Mapping[str, Any]) -> Trace:
  return Trace(**{**record, "spans": [Span(*span) for span in record["spans"]]})


def _acceptance(record: Mapping[str, Any]) -> Acceptance:
  # JSON turns integer keys into strings and tuples into lists.
  references = {int(count): tuple(pair) for count, pair in record["by_references"].items()}
  return Acceptance(**{**record, "by_references": references})
