"""Workers that kill or stop their own process when a file in a directory requests it.

    directory/POINT.MOMENT.NUMBER          requests a fault when a worker reaches POINT MOMENT times
    directory/met POINT.MOMENT.NUMBER PID  the fault happened in that process, at the file's time

The first worker that reaches the count takes the fault; each file is used once.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
import dataclasses
import os
import pathlib
import signal
import time

import cluster_cases
import tiny_model

from seerjax.cluster.records import ChunkOrder, ChunkResult, Gone, WeightsRef
from seerjax.cluster.worker import EngineWorker
from seerjax.kv.disk_store import DiskStore
from seerjax.kv.pool import KVPool, KVPoolConfig

POINTS = ("before a chunk", "in a chunk", "after a chunk", "in an export", "in a load")
STOP = "stop"


class Faults:
  """The faults that a directory requests of this process."""

  def __init__(self, directory: pathlib.Path):
    self.directory = directory
    self._came: collections.Counter[str] = collections.Counter()  # Visits since a file appeared.

  def meet(self, point: str) -> None:
    """Reaches a point; does not return where this process is to be killed there."""
    for asked in sorted(self.directory.glob(f"{point}.*")):
      self._came[asked.name] += 1
      if self._came[asked.name] < int(asked.name.split(".")[1]):
        continue
      met = asked.with_name(f"met {asked.name} {os.getpid()}")
      try:
        asked.rename(met)
      except FileNotFoundError:
        continue  # Another worker took it.
      os.utime(met)
      os.kill(os.getpid(), signal.SIGSTOP if point == STOP else signal.SIGKILL)
      time.sleep(0.01)  # The signal has arrived when this returns.


def ask(directory: pathlib.Path, point: str, moment: int) -> None:
  """Requests a fault."""
  (directory / f"{point}.{moment}.{time.monotonic_ns()}").touch()


def met(directory: pathlib.Path) -> list[tuple[int, float]]:
  """Returns (process id, time in seconds) of every fault that happened."""
  found = directory.glob("met *")
  return [(int(one.name.rpartition(" ")[2]), one.stat().st_mtime) for one in found]


class DyingStore(DiskStore):
  """A disk store; its process may die between two bytes of a file."""

  def __init__(self, faults: Faults):
    super().__init__(faults.directory / "store", max_bytes=10**8)
    self.faults = faults

  def put(self, key: str, data: bytes) -> bool:
    unfinished = self._folder / "unfinished.tmp"
    unfinished.write_bytes(data[: len(data) // 2])
    self.faults.meet("in an export")
    unfinished.unlink()
    return super().put(key, data)


class FaultyWorker(EngineWorker):
  """A worker that may fail at every point of its work."""

  def __init__(self, directory: pathlib.Path, *, name: str):
    self.faults = Faults(directory)
    pool = KVPool(KVPoolConfig(host_pages=64), DyingStore(self.faults))
    engine = cluster_cases.make_engine(tiny_model.NATIVE, kv_pool=pool)
    engine.before_step = lambda: self.faults.meet("in a chunk")
    super().__init__(engine, name=name)

  def load(self, weights: WeightsRef, policy_version: int) -> str:
    pieces = tuple(
      dataclasses.replace(one, pieces=tuple(_Met(piece, self.faults) for piece in one.pieces))
      for one in weights.tensors
    )
    return super().load(dataclasses.replace(weights, tensors=pieces), policy_version)

  def run(self, orders: Sequence[ChunkOrder], forget: Sequence[Gone] = ()) -> Sequence[ChunkResult]:
    self.faults.meet(STOP)
    self.faults.meet("before a chunk")
    results = super().run(orders, forget)
    self.faults.meet("after a chunk")
    return results


@dataclasses.dataclass(frozen=True)
class _Met:
  """A piece of weights; a process may die while reading it."""

  piece: object
  faults: Faults

  def read(self, store):
    self.faults.meet("in a load")
    return self.piece.read(store)  # type: ignore[attr-defined]


@dataclasses.dataclass(frozen=True)
class MakeFaulty:
  """Makes a worker in its own process."""

  directory: pathlib.Path

  def __call__(self, number: int) -> FaultyWorker:
    return FaultyWorker(self.directory, name=f"actor {number}")
