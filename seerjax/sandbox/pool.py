"""Thread pool for slow calls, such as sandboxed programs, with a bounded queue."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent import futures
import threading
from typing import Any


class Pool:
  """Thread pool with a bounded queue.

  `submit` blocks while the queue is full. Every accepted call's future gets a result or an error,
  and keeps it.
  """

  def __init__(self, num_workers: int, max_waiting: int):
    """Starts without threads; at most `num_workers` calls run and `max_waiting` are queued."""
    if num_workers < 1 or max_waiting < 0:
      raise ValueError(
        f"Pool: got num_workers={num_workers}, max_waiting={max_waiting}, expected at least 1 and"
        " at least 0; two or more queued programs keep the workers busy."
      )
    self._num_workers = num_workers
    self._max_waiting = max_waiting
    self._waiting: deque[tuple[futures.Future[Any], Callable[..., Any], tuple[Any, ...]]] = deque()
    self._threads: list[threading.Thread] = []
    self._num_idle = 0
    self._changed = threading.Condition()
    self._is_closed = False

  def __enter__(self) -> Pool:
    return self

  def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
    self.close(cancel_waiting=kind is not None)

  def submit(self, call: Callable[..., Any], *arguments: Any) -> futures.Future[Any]:
    """Runs `call(*arguments)` on a worker; blocks while `max_waiting` other calls are queued.

    Must not be called from within such a call, which could deadlock.

    Raises:
      ValueError: if the pool is closed, also while blocked.
    """
    future: futures.Future[Any] = futures.Future()
    with self._changed:
      # A call that an idle worker takes at once does not count as queued.
      self._changed.wait_for(
        lambda: self._is_closed or len(self._waiting) < self._max_waiting + self._num_free()
      )
      if self._is_closed:
        raise ValueError("Pool.submit: got a closed pool, expected an open one; create a new Pool.")
      self._waiting.append((future, call, arguments))
      if self._num_idle < len(self._waiting) and len(self._threads) < self._num_workers:
        thread = threading.Thread(target=self._work, name="sandbox-pool", daemon=True)
        self._threads.append(thread)
        thread.start()
      self._changed.notify_all()
    return future

  def close(self, *, cancel_waiting: bool = False) -> None:
    """Waits for all accepted calls (or cancels queued ones), and ends the threads."""
    with self._changed:
      self._is_closed = True
      if cancel_waiting:
        for future, _, _ in self._waiting:
          future.cancel()
      self._changed.notify_all()
    for thread in self._threads:
      thread.join()

  def _num_free(self) -> int:
    return self._num_idle + self._num_workers - len(self._threads)

  def _work(self) -> None:
    while True:
      with self._changed:
        self._num_idle += 1
        self._changed.notify_all()
        self._changed.wait_for(lambda: self._waiting or self._is_closed)
        self._num_idle -= 1
        if not self._waiting:
          return
        future, call, arguments = self._waiting.popleft()
        self._changed.notify_all()
      if not future.set_running_or_notify_cancel():
        continue
      try:
        future.set_result(call(*arguments))
      except BaseException as error:
        future.set_exception(error)
      # Otherwise the last call's objects would stay alive until the next call.
      del future, call, arguments
