"""Ray worker processes that are killed or stopped at every point of their work.

`kill -9` before, in and after a chunk, in an export and in a load, of one worker or two at once,
and `SIGSTOP` for longer than the patience, each at three drawn moments. Every completion has one
engine's bits and arrives once; every chunk ends once; dead workers are replaced during the rollout.
Needs the packages of launch/locks/cluster-*.txt; skips without.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator
import contextlib
import itertools
import os
import pathlib
import signal
import time

from cluster_cases import alone, asked, make_engine
import faults
import faulty_workers
from faulty_workers import POINTS, STOP, MakeFaulty
import pytest
import tiny_model
import watched_rollout
from watched_rollout import Watched

from seerjax.cluster import weights as weights_lib
from seerjax.cluster.ray_workers import RayWorkers
from seerjax.cluster.records import Event, Lost

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> pathlib.Path:
  return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def workers(directory) -> Iterator[RayWorkers]:
  pytest.importorskip("ray", reason="Ray is not installed")
  os.environ.update(faults.environment(num_devices=1))  # Of Ray's processes, which inherit it.
  made = RayWorkers(MakeFaulty(directory), count=2, patience=300)
  load(made)
  yield made
  made.close()


VERSIONS = itertools.count()


def load(workers: RayWorkers) -> None:
  """Makes all workers load the weights, as if they were new."""
  weights = weights_lib.publish(
    tiny_model.params(tiny_model.NATIVE), workers.put, weight_transfer_chunk_bytes=2**12
  )
  workers.load(weights, next(VERSIONS))


def wake(directory: pathlib.Path) -> None:
  """Continues stopped processes."""
  for process, _ in faulty_workers.met(directory):
    with contextlib.suppress(ProcessLookupError):
      os.kill(process, signal.SIGCONT)


def run(
  workers: RayWorkers, directory: pathlib.Path, journal_at: pathlib.Path, *, wakes: bool = True
) -> tuple[Watched, collections.Counter]:
  """Runs the requests; `wakes` continues stopped processes once they count as lost."""

  def hears(rollout: Watched, event: Event) -> None:
    if wakes and isinstance(event, Lost):
      wake(directory)

  return watched_rollout.run(workers, journal_at, hears)


def forget_faults(directory: pathlib.Path) -> None:
  """Removes the records of faults, and requests for faults that did not happen."""
  for path in (*directory.glob("met *"), *directory.glob("*.*.*")):
    path.unlink(missing_ok=True)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("point", POINTS)
def test_processes_that_are_killed_cost_time_and_no_bit(
  point, count, workers, directory, tmp_path, seed, tell_events
):
  if count == 2 and point in ("in an export", "in a load"):
    pytest.skip("the other one of two exports nothing alone, and has loaded")
  events, seconds = collections.Counter(), []
  for moment in faults.moments(seed + len(point), 4):
    forget_faults(directory)
    if point == "in an export":
      workers.process_ids()  # Waits for both; a single worker exports nothing.
    for _ in range(count):
      faulty_workers.ask(directory, point, moment)
    if point == "in a load":
      load(workers)
    rollout, counted = run(workers, directory, tmp_path / f"{moment}.jsonl")
    met = faulty_workers.met(directory)
    assert len(met) == count, (point, moment, met)
    events += counted
    events[f"kill -9 {point}"] += count
    if point != "in a load":  # This may happen before the rollout observes events.
      assert rollout.counts["lost"] == count
      seconds += [noticed - at for (_, at), noticed in zip(sorted(met), rollout.noticed)]
  assert all(one < 10 for one in seconds), seconds
  print(f"noticed after {max(seconds, default=0):.1f} s at most")
  tell_events("killed", events, (f"kill -9 {point}",))


def test_a_process_that_is_stopped_comes_back_and_its_late_answer_is_dropped(
  workers, directory, tmp_path, seed, tell_events
):
  usual, workers._patience = workers._patience, 8.0
  events = collections.Counter()
  for moment in faults.moments(seed, 5):
    forget_faults(directory)
    faulty_workers.ask(directory, STOP, moment)
    rollout, counted = run(workers, directory, tmp_path / f"{moment}.jsonl")
    assert len(faulty_workers.met(directory)) == 1 and rollout.counts["lost"] >= 1
    events += counted + collections.Counter(late=rollout.counts["late"])
    events["SIGSTOP"] += 1
  workers._patience = usual
  tell_events("stopped", events, ("SIGSTOP", "late", "again"))


def test_a_process_that_is_stopped_for_half_a_minute_serves_again(
  workers, directory, tmp_path, seed, tell_events
):
  usual, workers._patience = workers._patience, 8.0
  events = collections.Counter()
  for moment in faults.moments(seed + 1, 5):
    forget_faults(directory)
    faulty_workers.ask(directory, STOP, moment)
    rollout, counted = run(workers, directory, tmp_path / f"{moment}.jsonl", wakes=False)
    [(process, stopped_at)] = faulty_workers.met(directory)
    assert rollout.counts["lost"] == 1 and rollout.noticed[0] - stopped_at < 10
    events += counted + collections.Counter({"SIGSTOP of 30 s": 1})
    [worker] = rollout.lost
    # It is stopped during all of another rollout.
    asleep, _ = run(workers, directory, tmp_path / f"{moment} asleep.jsonl", wakes=False)
    assert worker not in {one["worker"] for one in asleep.ended}
    events["chunks without it"] += len(asleep.ended)
    time.sleep(max(0.0, stopped_at + 30 - time.time()))
    os.kill(process, signal.SIGCONT)
    assert process in workers.process_ids()  # The same process responds.
    awake, _ = run(workers, directory, tmp_path / f"{moment} awake.jsonl")
    events["chunks of it"] += sum(one["worker"] == worker for one in awake.ended)
  workers._patience = usual
  tell_events(
    "stopped for long", events, ("SIGSTOP of 30 s", "again", "chunks without it", "chunks of it")
  )


def test_a_twin_of_other_weights_has_other_bits():
  wanted = alone(tiny_model.NATIVE, 7)
  found = make_engine(tiny_model.NATIVE, weights_seed=1).generate(asked())
  assert not all(one.has_bits_of(wanted[one.request_id]) for one in found)
