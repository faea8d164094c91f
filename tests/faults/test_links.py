"""A Ray cluster loses the link between two nodes: one local worker, one beyond the link.

At three drawn moments the link goes down for longer than the patience and comes up again. Every
completion has one engine's bits and arrives once; every chunk ends once. The loss of the worker
behind a cut link is noticed within 10 s. Needs root, `ip netns` and the packages of
launch/locks/cluster-*.txt; skips without.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator
import contextlib
import os
import pathlib
import shutil
import tempfile
import time

import faults
from faulty_workers import MakeFaulty
from linked_nodes import Link, Nodes
import pytest
import watched_rollout
from watched_rollout import Watched

from seerjax.cluster import ray_workers
from seerjax.cluster.ray_workers import RayWorkers
from seerjax.cluster.records import Event, Lost

pytestmark = pytest.mark.long

PATIENCE = 8.0  # Seconds; a chunk takes some hundredths.
LAST = 30  # Chunks that have ended when a link is cut, at most; a rollout has some seventy.


class Cluster:
  """Two nodes with a worker each.

  Attributes:
    link: the link between the nodes.
    nodes: Ray's nodes.
    workers: the workers; one is beyond the link.
  """

  def __init__(self, link: Link, nodes: Nodes, workers: RayWorkers):
    self.link, self.nodes, self.workers = link, nodes, workers

  def far_worker(self) -> int:
    """Returns the worker beyond the link; waits until both are there."""
    processes = self.workers.process_ids()
    there = self.link.far_processes()
    [found] = [worker for worker, one in zip(self.workers._actors, processes) if one in there]
    return found


@contextlib.contextmanager
def cluster(directory: pathlib.Path) -> Iterator[Cluster]:
  """Yields a cluster; its processes, link and namespace are gone afterwards."""
  if not ray_workers.is_installed():  # Ray reads its environment when it is imported.
    pytest.skip("Ray is not installed")
  before = dict(os.environ)
  os.environ.update(faults.environment(num_devices=1), RAY_AUTH_MODE="token")
  files = pathlib.Path(tempfile.mkdtemp(prefix="seerjax_ray.", dir="/tmp"))
  with contextlib.ExitStack() as stack:
    stack.callback(os.environ.update, before)
    stack.callback(lambda: [os.environ.pop(name) for name in {*os.environ} - {*before}])
    stack.callback(shutil.rmtree, files, ignore_errors=True)
    link = Link()
    stack.callback(link.close)
    nodes = Nodes(link, files, os.environ)
    stack.callback(nodes.close)
    workers = RayWorkers(MakeFaulty(directory), count=2, address=nodes.address, patience=300)
    stack.callback(workers._ray.shutdown)
    stack.callback(workers.close)
    yield Cluster(link, nodes, workers)


@pytest.fixture(scope="module")
def patient_ray(tmp_path_factory) -> Iterator[Cluster]:
  """Uses Ray's own settings, which detect a disconnected node later than the workers' settings."""
  directory = tmp_path_factory.mktemp("links")
  with cluster(directory) as made:
    made.far_worker()
    # First chunks compile, for which a worker has minutes.
    watched_rollout.run(made.workers, directory / "first.jsonl")
    made.workers._patience = PATIENCE
    yield made


def test_a_link_that_is_down_for_longer_than_the_patience(patient_ray, tmp_path, seed, tell_events):
  link, workers = patient_ray.link, patient_ray.workers
  events, seconds = collections.Counter(), []
  for moment in faults.moments(seed, LAST):
    far = patient_ray.far_worker()
    cut_at: list[float] = []

    def hears(rollout: Watched, event: Event, moment=moment, cut_at=cut_at, far=far) -> None:
      if not cut_at and rollout.counts["ended"] >= moment:
        cut_at.append(time.time())
        link.down()
      if isinstance(event, Lost) and event.worker == far and len(cut_at) == 1:
        cut_at.append(time.time())
        link.up()
        # A response in transit: it arrives when its chunk belongs to another worker.
        late = [one for one, call in workers._calls.items() if call.worker == far]
        workers._ray.wait(late, timeout=60)

    rollout, counted = watched_rollout.run(workers, tmp_path / f"{moment}.jsonl", hears)
    # On a loaded machine the other worker may also count as lost, and rejoin.
    assert far in rollout.lost and counted["again"] > 0
    seconds.append(cut_at[1] - cut_at[0])
    events += counted + collections.Counter(late=rollout.counts["late"])
    events["link down"] += 1
    again, _ = watched_rollout.run(workers, tmp_path / f"{moment} again.jsonl")
    events["its chunks with the link up"] += sum(one["worker"] == far for one in again.ended)
  assert workers.replaced == 0 and max(seconds) < 10, seconds
  print(f"noticed after {max(seconds):.1f} s at most")
  tell_events(
    "link down and up", events, ("link down", "again", "late", "its chunks with the link up")
  )
