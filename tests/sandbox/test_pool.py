"""Sandbox pools: queueing, back-pressure, and the state after an error."""

from __future__ import annotations

from collections.abc import Callable
import threading
import time
from typing import Any

import pytest

from seerjax.sandbox import pool as pool_lib


def settles(reading: Callable[[], Any], expected: Any) -> bool:
  """Waits briefly until a reading settles."""
  for _ in range(100):
    if reading() == expected:
      return True
    time.sleep(0.02)
  return False


def test_a_pool_holds_back_whoever_is_too_fast():
  release, started = threading.Event(), threading.Semaphore(0)

  def wait(i: int) -> int:
    started.release()
    release.wait()
    return i

  accepted = []
  pool = pool_lib.Pool(2, 3)

  def submit_all():
    for i in range(8):
      accepted.append(pool.submit(wait, i))

  thread = threading.Thread(target=submit_all)
  thread.start()
  started.acquire()
  started.acquire()
  assert settles(lambda: len(accepted), 5)
  time.sleep(0.05)
  assert len(accepted) == 5
  release.set()
  thread.join()
  pool.close()
  assert [future.result() for future in accepted] == list(range(8))


def test_a_pool_without_room_to_wait_runs_what_it_can():
  with pool_lib.Pool(2, 0) as pool:
    found = [pool.submit(divmod, i, 7) for i in range(50)]
  assert [future.result() for future in found] == [divmod(i, 7) for i in range(50)]


def test_a_pool_keeps_errors_and_goes_on():
  threads = threading.active_count()
  with pool_lib.Pool(1, 2) as pool:
    failed, fine = pool.submit(divmod, 1, 0), pool.submit(divmod, 7, 2)
  assert isinstance(failed.exception(), ZeroDivisionError) and fine.result() == (3, 1)
  assert threading.active_count() == threads


def test_a_pool_that_is_left_by_an_error_cancels_what_waits():
  release, started = threading.Event(), threading.Event()

  def wait() -> bool:
    started.set()
    return release.wait()

  waiting = []

  def leave() -> None:
    with pool_lib.Pool(1, 3) as pool:
      waiting.extend(pool.submit(wait) for _ in range(3))
      started.wait()
      threading.Timer(0.05, release.set).start()
      raise KeyError("left")

  with pytest.raises(KeyError):
    leave()
  assert waiting[0].result() and waiting[1].cancelled() and waiting[2].cancelled()


def test_a_pool_refuses_when_closed_and_when_it_could_not_work():
  pool = pool_lib.Pool(1, 1)
  pool.close()
  with pytest.raises(ValueError, match=r"Pool.submit: got a closed pool, expected an open one"):
    pool.submit(print)
  with pytest.raises(ValueError, match="got num_workers=0, max_waiting=1, expected at least 1"):
    pool_lib.Pool(0, 1)
  with pytest.raises(ValueError, match="got num_workers=1, max_waiting=-1, expected at least 1"):
    pool_lib.Pool(1, -1)
