"""Injects faults into a running run on a cluster, from outside.

    kill      kill -9 of a worker's process
    forget    removes all page sets from the store and kills a worker (kill -9)
    damage    flips a bit of every page set in the store and kills a worker (kill -9)
    stop      SIGSTOP of a worker's process, for longer than its timeout; then SIGCONT
    driver    kill -9 of the run itself, which the same command continues

Each fault is injected a random time after a drawn number of finished rollouts. A fault that has no
target then is postponed, and later ones are injected before it.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
import contextlib
import math
import os
import pathlib
import signal
import subprocess
import time
from typing import NamedTuple

import numpy as np

# Attempts by kind. Faults that lose pages also kill a worker, so that another one requests them.
COUNTS = {"kill": 30, "forget": 5, "damage": 5, "stop": 2, "driver": 4}
LEAST = 40  # Faults that have to occur; an attempt fails if the store has no page set.
WORKER = "ray::_Actor"  # Ray's name of worker processes.
POLL_SECONDS = 0.005  # Page sets of short completions are in the store for tenths of a second.


class Fault(NamedTuple):
  """A fault and its time.

  Attributes:
    kind: one of `COUNTS`.
    rollouts: number of finished rollouts of the run after which it is due.
    seconds: additional delay.
  """

  kind: str
  rollouts: int
  seconds: float


def drawn(seed: int, num_rollouts: int, counts: dict[str, int] = COUNTS) -> list[Fault]:
  """Returns faults in order of time.

  Args:
    seed: seed of the draw.
    num_rollouts: rollouts of the run; the first and the last tenth have no faults.
    counts: number of faults by kind.
  """
  rng = np.random.default_rng((seed, 40))
  margin = max(num_rollouts // 10, 1)
  last = max(num_rollouts - margin, margin + 1)
  faults = [
    Fault(kind, int(rng.integers(margin, last)), float(rng.uniform(0, 0.5)))
    for kind, count in counts.items()
    for _ in range(count)
  ]
  return sorted(faults, key=lambda one: one.rollouts)


def processes_below(pid: int, name: str) -> list[int]:
  """Returns the ids of all descendants of a process with a given name."""
  found = subprocess.run(
    ["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True, check=True
  )
  rows = [line.split(None, 2) for line in found.stdout.splitlines()]
  children: dict[int, list[tuple[int, str]]] = collections.defaultdict(list)
  for row in rows:
    children[int(row[1])].append((int(row[0]), row[2] if len(row) > 2 else ""))
  below, waiting = [], [pid]
  while waiting:
    for child, text in children[waiting.pop()]:
      waiting.append(child)
      below += [child] if text.startswith(name) else []
  return sorted(below)


def flip(path: pathlib.Path, rng: np.random.Generator) -> bool:
  """Flips a bit of a file in place; returns False if the file no longer exists."""
  try:
    with path.open("rb+") as file:
      place = int(rng.integers(max(path.stat().st_size, 1)))
      file.seek(place)
      byte = file.read(1)
      file.seek(place)
      file.write(bytes([byte[0] ^ 1 << int(rng.integers(8))]))
  except (FileNotFoundError, IndexError):
    return False
  return True


class Outsider:
  """Injects faults into a run, one after another.

  Attributes:
    met: number of injected faults by kind; "page sets forgotten" and "page sets damaged" count
      files.
  """

  def __init__(
    self,
    faults: Sequence[Fault],
    *,
    seed: int,
    pages: pathlib.Path,
    stop_seconds: float,
    num_rollouts: Callable[[], int],
    is_resumable: Callable[[], bool],
  ):
    """Takes the faults and how to observe the run.

    Args:
      faults: faults in order.
      seed: seed for the choice of workers.
      pages: directory of the workers' shared store.
      stop_seconds: how long a stopped process stays stopped.
      num_rollouts: returns the number of rollouts that the run has finished.
      is_resumable: returns whether the run could be resumed if it were killed now.
    """
    self.met: collections.Counter[str] = collections.Counter()
    self._faults = list(faults)
    self._since: dict[int, float] = {}  # By fault: when its number of rollouts was reached.
    self._rng = np.random.default_rng((seed, 41))
    self._pages, self._stop_seconds = pages, stop_seconds
    self._num_rollouts, self._is_resumable = num_rollouts, is_resumable
    self._stopped: dict[int, float] = {}  # By process: when to continue it.

  def accompany(self, run: subprocess.Popen) -> int | None:
    """Injects faults until the run ends; returns its exit status, None if killed by a fault."""
    try:
      while (status := run.poll()) is None:
        self._wake(time.monotonic())
        for fault in self._due():
          if self._bring(fault.kind, run):
            self._faults.remove(fault)
            self.met[fault.kind] += 1
            if fault.kind == "driver":
              run.wait()
              return None
            break
        time.sleep(POLL_SECONDS)
      return status
    finally:
      self._wake(math.inf)

  def _due(self) -> list[Fault]:
    now, count = time.monotonic(), self._num_rollouts()
    early = [one for one in self._faults if one.rollouts <= count]
    return [one for one in early if now >= self._since.setdefault(one.rollouts, now) + one.seconds]

  def _wake(self, now: float) -> None:
    for process in [one for one, until in self._stopped.items() if until <= now]:
      del self._stopped[process]
      with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGCONT)

  def _bring(self, kind: str, run: subprocess.Popen) -> bool:
    """Injects a fault; returns False if it has no target yet."""
    if kind == "driver":
      if self._is_resumable():
        run.kill()
        return True
      return False
    awake = [one for one in processes_below(run.pid, WORKER) if one not in self._stopped]
    if not awake:
      return False
    if kind in ("forget", "damage") and not self._spoil(kind):
      return False
    process = int(self._rng.choice(awake))
    with contextlib.suppress(ProcessLookupError):
      os.kill(process, signal.SIGSTOP if kind == "stop" else signal.SIGKILL)
      if kind == "stop":
        self._stopped[process] = time.monotonic() + self._stop_seconds
      return True
    return False

  def _spoil(self, kind: str) -> bool:
    """Removes or damages every page set in the store; returns False if there is none."""
    count = 0
    for path in sorted(self._pages.glob("*/*.kv")):
      if kind == "damage":
        count += flip(path, self._rng)
      else:
        with contextlib.suppress(FileNotFoundError):
          path.unlink()
          count += 1
    name = "damaged" if kind == "damage" else "forgotten"
    self.met[f"page sets {name}"] += count
    return count > 0
