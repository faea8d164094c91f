"""Ray workers in their own processes: one is killed during a rollout, one is stopped.

Needs the packages of launch/locks/cluster-*.txt; tests that start Ray skip without them.
"""

from __future__ import annotations

from collections.abc import Iterator
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time

import cluster_cases
from cluster_cases import asked, assert_alone
import faults
import pytest
import tiny_model

from seerjax.cluster.driver import ClusterRollout
from seerjax.cluster.ray_workers import Losses, RayWorkers
from seerjax.cluster.worker import EngineWorker
from seerjax.rollout.policies import Divided


def make_worker(number: int) -> EngineWorker:
  """Makes the worker of an actor: an engine with the tests' shared program."""
  return EngineWorker(cluster_cases.make_engine(tiny_model.NATIVE), name=f"actor {number}")


@pytest.fixture
def workers() -> Iterator[RayWorkers]:
  pytest.importorskip("ray", reason="Ray is not installed")
  # Actors find this module and tests/support by the environment that they inherit.
  paths = faults.environment()["PYTHONPATH"], str(pathlib.Path(__file__).parent)
  os.environ["PYTHONPATH"] = os.pathsep.join(paths)
  module = sys.modules[__name__]
  sys.modules.setdefault("test_ray_workers", module)
  made = RayWorkers(make_worker, count=2, patience=120)
  yield made
  made.close()


@pytest.mark.long
def test_a_killed_process_costs_time_and_no_bit(workers):
  victim = workers.process_ids()[0]
  rollout, found = ClusterRollout(workers, Divided(chunk_tokens=3)), {}
  for completion in rollout.run(asked()):
    if not found:
      os.kill(victim, signal.SIGKILL)
      killed_at = time.monotonic()
    found[completion.request_id] = completion
    if rollout.counts["lost"] == 1 and killed_at:
      print(f"noticed {time.monotonic() - killed_at:.1f} s after the kill")
      killed_at = 0.0
  assert_alone(found)
  assert rollout.counts["lost"] == 1 and rollout.counts["again"] > 0
  assert workers.replaced == 1
  # Another rollout, on the surviving worker and the new one.
  again = ClusterRollout(workers, Divided(chunk_tokens=5))
  assert_alone({one.request_id: one for one in again.run(asked())})


@pytest.mark.long
def test_a_stopped_process_is_waited_for_no_longer_than_the_patience(workers):
  victim = workers.process_ids()[0]
  workers._patience = 10.0
  rollout, found = ClusterRollout(workers, Divided(chunk_tokens=3)), {}
  for completion in rollout.run(asked(num_groups=4)):
    if not found:
      os.kill(victim, signal.SIGSTOP)
    found[completion.request_id] = completion
    if rollout.counts["lost"]:
      os.kill(victim, signal.SIGCONT)
  wanted = cluster_cases.make_engine(tiny_model.NATIVE).generate(asked(num_groups=4))
  assert [found[one.request_id].has_bits_of(one) for one in wanted] == [True] * len(wanted)
  assert rollout.counts["lost"] == 1 and workers.replaced == 0


# Tests without Ray.


def test_losses_with_chunks_between_them_are_replaced_for_ever_and_those_in_a_row_are_not():
  losses = Losses(max_failures=3)
  for _ in range(50):  # A long run.
    assert losses.lost() and losses.lost()
    losses.ended()
  # Every worker dies of the same orders.
  assert [losses.lost() for _ in range(5)] == [True, True, True, False, False]
  assert losses.in_a_row == 5
  losses.ended()  # On a remaining worker.
  assert losses.lost()
  assert not Losses(max_failures=0).lost()


def test_a_negative_number_of_failures_is_refused():
  with pytest.raises(ValueError, match=r"max_failures: got -1, expected the number of consecutive"):
    RayWorkers(make_worker, count=1, max_failures=-1)


def test_without_ray_the_extra_is_named():
  # A separate process, in which `ray` cannot be imported.
  program = (
    "import sys; sys.modules['ray'] = None\n"
    "from seerjax.cluster.ray_workers import RayWorkers; RayWorkers(print, count=2)"
  )
  ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
  assert ended.returncode == 1
  assert "ImportError" in ended.stderr
  assert "expected Ray; install seerjax[cluster], or run in one process" in ended.stderr


@pytest.mark.parametrize("count, patience", [(0, 1.0), (1, 0.0)])
def test_no_worker_and_no_patience_are_refused(count, patience):
  with pytest.raises(
    ValueError, match=f"got count={count}, patience={patience}, expected at least 1"
  ):
    RayWorkers(make_worker, count=count, patience=patience)


def test_an_address_without_ray_is_named():
  pytest.importorskip("ray", reason="Ray is not installed")
  with pytest.raises(ConnectionError, match=r"from 127.0.0.1:9, expected Ray; start it with"):
    RayWorkers(make_worker, count=2, address="127.0.0.1:9")


@pytest.mark.parametrize(
  "says, message",
  [
    (b"HTTP/1.1 400 Bad Request\r\n", r"got an answer that begins with b'HTTP/1.1 ' from 127"),
    (b"", "got no answer in 5 s from 127"),
  ],
)
def test_an_address_at_which_something_else_listens_is_refused_soon(says, message):
  pytest.importorskip("ray", reason="Ray is not installed")
  with socket.create_server(("127.0.0.1", 0)) as listener:

    def answer() -> None:
      connection, _ = listener.accept()
      if says:
        connection.sendall(says)
      done.wait()
      connection.close()

    done = threading.Event()
    thread = threading.Thread(target=answer)
    thread.start()
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    try:
      with pytest.raises(ConnectionError, match=message):
        RayWorkers(make_worker, count=2, address=address)
    finally:
      done.set()
      thread.join()
