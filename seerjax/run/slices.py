"""Runs of several processes: one shared directory, and one process's verdicts.

Every process of a slice (`parallel.start`) runs the whole loop on its own devices' part of each
step. The first process uses the run's directory and alone writes journal, metrics, config and
report. Each other process has a temporary directory, which starts as a copy of the run's records.
Checkpoints are written and read by all processes together in the run's directory, which must be
visible to all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import pathlib
import tempfile

import jax

from seerjax import agreement, metrics
from seerjax.rollout import journal as journal_lib, trace as trace_lib
from seerjax.run.config import RunConfig
from seerjax.types import Problem, Task, Verdict

CHECKPOINTS = "checkpoints"
# Files that a resume reads, besides checkpoints.
RECORDS = (journal_lib.FILE_NAME, metrics.FILE_NAME, trace_lib.FILE_NAME, "config.json")


@contextlib.contextmanager
def own_directory(directory: pathlib.Path) -> Iterator[pathlib.Path]:
  """Yields the directory in which this process keeps records of a run in `directory`.

  All processes must enter it together, before the run starts.
  """
  if jax.process_count() == 1:
    yield directory
    return
  records = agreement.from_first(
    lambda: {
      name: (directory / name).read_bytes() for name in RECORDS if (directory / name).is_file()
    }
  )
  if agreement.is_first():
    yield directory
    return
  with tempfile.TemporaryDirectory(prefix=f"seerjax_process_{jax.process_index()}_") as own:
    for name, data in records.items():
      (pathlib.Path(own) / name).write_bytes(data)
    (pathlib.Path(own) / CHECKPOINTS).symlink_to(directory.absolute() / CHECKPOINTS)
    yield pathlib.Path(own)


class JudgedByFirst:
  """Wraps a task so that all verdicts come from the first process.

  Verdicts could otherwise differ between processes: a judge may read a clock or run a program.

  Attributes:
    name: name of the task.
    task: the wrapped task.
  """

  def __init__(self, task: Task):
    self.name = task.name
    self.task = task

  def num_problems(self, split: str) -> int:
    """Returns the number of problems of the wrapped task."""
    return self.task.num_problems(split)

  def problem(self, split: str, index: int) -> Problem:
    """Returns a problem of the wrapped task, which is equal in every process."""
    return self.task.problem(split, index)

  def verdict(self, problem: Problem, text: str) -> Verdict:
    """Returns the first process's verdict; all processes must call this together."""
    return agreement.from_first(lambda: self.task.verdict(problem, text))


def own_task(task: Task) -> Task:
  """Unwraps a task from `shared_task`."""
  return task.task if isinstance(task, JudgedByFirst) else task


def require_supported(config: RunConfig) -> None:
  """Raises for settings that several processes do not support.

  Raises:
    NotImplementedError: naming the setting.
  """
  if jax.process_count() > 1 and config.off_policy.max_policy_lag:
    raise NotImplementedError(
      f"RunConfig.off_policy: got max_policy_lag={config.off_policy.max_policy_lag} in"
      f" {jax.process_count()}"
      " processes, expected 0 (collectives of two threads would run in any order); set it to 0, or"
      " run one process."
    )
  if jax.process_count() > 1 and config.cluster.workers:
    raise NotImplementedError(
      f"RunConfig.cluster: got workers={config.cluster.workers} in {jax.process_count()} processes,"
      " expected 0 (each process would start its own workers); set it to 0, or run one process."
    )


def shared_task(task: Task) -> Task:
  """Wraps a task so that all processes of a slice get the first process's verdicts."""
  is_shared = jax.process_count() == 1 or isinstance(task, JudgedByFirst)
  return task if is_shared else JudgedByFirst(task)
