"""A rollout on workers gives one engine's completions though the store loses or changes data.

At a drawn response of a worker the data in the store are damaged and the worker is lost: its
requests continue elsewhere, and look for their pages in the store. Each kind of damage to an
engine's pages is tested in `tests/contract/test_exports.py`.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
import pathlib

import cluster_cases
from cluster_cases import alone, asked, make_engine, on_store
import faults
import numpy as np
import pytest
import tiny_model

from seerjax.cluster.driver import ClusterRollout
from seerjax.cluster.local_workers import LocalWorkers
from seerjax.cluster.records import Answered, Event, Lost
from seerjax.cluster.worker import EngineWorker
from seerjax.rollout.policies import ByRoom, Divided

Befall = Callable[[Sequence[pathlib.Path], int], None]


class Losing(LocalWorkers):
  """Loses a worker after one of its responses with pages, when the store is damaged.

  Attributes:
    answers: responses with pages until then.
    befall: damages the store's files, in a way that depends on the moment.
    lost: lost workers.
  """

  def __init__(self, workers, *, befall: Befall, directory: pathlib.Path, moment: int):
    super().__init__(workers)
    self.answers = self.moment = moment
    self.befall, self.directory = befall, directory
    self.lost: tuple[int, ...] = ()

  def events(self, *, blocks: bool) -> Sequence[Event]:
    found = list(super().events(blocks=blocks))
    for event in list(found):
      if isinstance(event, Answered) and any(result.kv for result in event.results):
        self.answers -= 1
        if self.answers == 0:
          self.befall(sorted(self.directory.glob("*/*.kv")), self.moment)
          self.lost += (event.worker,)
          found.append(Lost(worker=event.worker, reason="lost on purpose"))
    return found


def forget_one(files: Sequence[pathlib.Path], moment: int) -> None:
  files[moment % len(files)].unlink()


def forget_all(files: Sequence[pathlib.Path], moment: int) -> None:
  for file in files:
    file.unlink()


def flip_a_bit(files: Sequence[pathlib.Path], moment: int) -> None:
  """Flips a bit of each file."""
  rng = np.random.default_rng(moment)
  for file in files:
    data = bytearray(file.read_bytes())
    data[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
    file.write_bytes(data)


def do_nothing(files: Sequence[pathlib.Path], moment: int) -> None:
  """A store without a fault, from which pages are adopted."""


@pytest.mark.parametrize(
  "befall, counted",
  [
    (forget_one, ("gone", "adopted")),
    (forget_all, ("gone",)),
    (flip_a_bit, ("damaged",)),
    (do_nothing, ("adopted",)),
  ],
)
def test_a_store_that_loses_or_changes_pages_costs_no_bit(
  befall: Befall,
  counted: tuple[str, ...],
  tmp_path,
  seed,
  tell_events,
):
  events = collections.Counter()
  for moment in faults.moments(seed, 6):
    directory = tmp_path / str(moment)
    engines = [
      make_engine(tiny_model.NATIVE, kv_pool=on_store(directory), num_pages=pages)
      for pages, _ in cluster_cases.SIZES
    ]
    workers = Losing(
      [EngineWorker(engine) for engine in engines],
      befall=befall,
      directory=directory,
      moment=moment,
    )
    rollout = ClusterRollout(workers, Divided(chunk_tokens=2, routing=ByRoom()))
    found = list(rollout.run(asked()))
    wanted = alone(tiny_model.NATIVE, 7)
    assert len({one.request_id for one in found}) == len(found) == len(wanted)
    assert all(one.has_bits_of(wanted[one.request_id]) for one in found)
    assert len(workers.lost) == 1
    events[befall.__name__] += 1
    for engine in engines:
      imports = engine.counters.imports
      events += collections.Counter(
        gone=imports.gone, damaged=imports.damaged, adopted=imports.adopted
      )
  tell_events("stores", events, (befall.__name__, *counted))
