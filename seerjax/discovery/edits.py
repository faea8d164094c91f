"""Applies a sentence of edit tokens to an artefact, and judges the result.

  (artefact, tokens, seed) -> EditLanguage.apply -> verify -> Attempt

It is a pure function of its arguments, so attempts can be made in any order, in other processes
(`Judge`), and again after a restart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import concurrent.futures
import concurrent.futures.process
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
from typing import NamedTuple

import numpy as np

from seerjax.discovery import environment as environment_lib
from seerjax.discovery.attempts import Attempt
from seerjax.discovery.environment import Artefact, EditLanguage, Environment

# Sentences sent to a worker at a time: sending costs about as much as one sentence.
BATCH = 4
AFTER_PARENT_SECONDS = 3.0  # Delay of a worker after SIGTERM, so that its parent ends first.


class WorkerDied(ChildProcessError):
  """A worker process ended while working."""


class Job(NamedTuple):
  """A sentence to apply to an artefact; see `EditLanguage.apply`."""

  artefact: Artefact
  tokens: tuple[int, ...]
  seed: int


def attempt(environment: Environment, job: Job) -> Attempt:
  """Applies a sentence to an artefact, and judges the result."""
  assert environment.language is not None
  try:
    artefact = environment_lib.applied(environment.language, job.artefact, job.tokens, job.seed)
  except ValueError as error:
    return _failed("malformed", str(error))
  # A bug of the language must not end the run and lose its results.
  except (Exception, SystemExit) as error:
    return _failed("failed", f"apply raised {type(error).__name__}: {str(error)[:200]}")
  score = environment_lib.verified(environment, artefact)
  if not score.is_valid:
    return _failed("invalid", score.reason)
  return Attempt(artefact=artefact, score=score, status="ok")


def random_sentence(language: EditLanguage, random: np.random.Generator) -> tuple[int, ...]:
  """Returns a random non-empty sentence: uniform over lengths, and over the ids at each position.

  Empty sentences, which change nothing, are excluded.
  """
  stop, ranges = -1 if language.stop_token is None else language.stop_token, language.allowed
  stops = [place for place, (low, high) in enumerate(ranges) if low <= stop < high]
  ends = [*(place for place in stops if place), len(ranges)]
  end = ends[int(random.integers(len(ends)))]
  sentence = []
  for place, (low, high) in enumerate(ranges[:end]):
    if place in stops:  # Exclude the stop token.
      token = int(random.integers(low, high - 1))
      sentence.append(token + (token >= stop))
    else:
      sentence.append(int(random.integers(low, high)))
  return tuple(sentence) if end == len(ranges) else (*sentence, stop)


class Judge:
  """Makes attempts, in this process or in workers with their own environment.

  A context manager; leaving it ends the workers.
  """

  def __init__(
    self, environment: Environment, factory: Callable[[], Environment], num_workers: int = 0
  ):
    """Initialises the judge.

    Args:
      environment: environment of the attempts.
      factory: makes an environment in a worker, to which it is pickled; unused without workers.
      num_workers: processes; 0 makes attempts here, which is best if one takes less than a
        millisecond.

    Raises:
      ValueError: if the environment has no edit language, or the number is negative, or above 1
        for an environment with timed verdicts.
    """
    if environment.language is None:
      raise ValueError(
        f"{environment.name}: got a problem without an edit language, expected one; define"
        " LANGUAGE, or choose a model that writes programs with --config.model."
      )
    if num_workers < 0:
      raise ValueError(
        f"Judge: got num_workers={num_workers}, expected at least 0; 0 judges in this process."
      )
    if num_workers > 1 and isinstance(environment, environment_lib.Timed):
      raise ValueError(
        f"Judge: got num_workers={num_workers} for {environment.name}, which is timed, expected at"
        " most 1, since parallel workers slow each other down; set --config.num_workers=1."
      )
    self._environment = environment
    self._pool = None
    # CPU seconds of attempts in all processes, and the part spent in workers.
    self.cpu_seconds = self.worker_seconds = 0.0
    if num_workers:
      self._pool = concurrent.futures.ProcessPoolExecutor(
        num_workers,
        # Forking is unsafe while other threads (XLA's) hold locks.
        multiprocessing.get_context("spawn"),
        initializer=_begin_worker,
        initargs=(factory,),
      )

  def attempts(self, jobs: Sequence[Job]) -> list[Attempt]:
    """Returns the attempt of each job, in order.

    Raises:
      WorkerDied: if a worker process ended.
    """
    if self._pool is None:
      begin = time.process_time()
      found = [attempt(self._environment, job) for job in jobs]
      self.cpu_seconds += time.process_time() - begin
      return found
    batches = [list(jobs[first : first + BATCH]) for first in range(0, len(jobs), BATCH)]
    found = []
    try:
      for attempts, seconds in self._pool.map(_work, batches):
        found += attempts
        self.cpu_seconds += seconds
        self.worker_seconds += seconds
    except concurrent.futures.process.BrokenProcessPool:
      raise WorkerDied(
        f"Judge: got a worker process of {self._environment.name} that died, expected its verdicts;"
        " check for a lack of memory, os._exit or a crash in C: --config.num_workers=0 shows it,"
        " and --resume continues after the last complete step."
      ) from None
    return found

  def __enter__(self) -> Judge:
    return self

  def __exit__(self, *_: object) -> None:
    if self._pool is not None:
      self._pool.shutdown(cancel_futures=True)


# Environment of a worker process.
_of_worker: list[Environment] = []


def follow_parent() -> None:
  """Makes a worker process ignore Ctrl-C, and end when its parent has ended for any reason.

  After SIGTERM, which is sent to all processes of a job, the worker ends a little later than the
  parent; otherwise the parent's last step would fail with a dead worker.
  """
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  signal.signal(signal.SIGTERM, _end_later)
  threading.Thread(target=_end_with_parent, daemon=True).start()


def _begin_worker(factory: Callable[[], Environment]) -> None:
  follow_parent()
  _of_worker.append(factory())


def _end_later(number: int, frame: object) -> None:
  del number, frame
  timer = threading.Timer(AFTER_PARENT_SECONDS, os._exit, (1,))
  timer.daemon = True
  timer.start()


def _end_with_parent() -> None:
  parent = multiprocessing.parent_process()
  assert parent is not None
  multiprocessing.connection.wait([parent.sentinel])
  os._exit(1)  # No more requests can arrive.


def _work(jobs: list[Job]) -> tuple[list[Attempt], float]:
  begin = time.process_time()
  found = [attempt(_of_worker[0], job) for job in jobs]
  return found, time.process_time() - begin


def _failed(status: str, reason: str) -> Attempt:
  score = environment_lib.invalid(f"{status}: {reason[:300]}")
  return Attempt(artefact=None, score=score, status=status, message=reason)
