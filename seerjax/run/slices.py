"""A run of several processes: one directory, one task's verdicts, one end.

Every process of a slice (`parallel.start`) runs the whole loop, on its own devices' part of each
step. The first one's directory is the run's: it alone writes journal, numbers, config and report.
The others have a directory of their own, which begins with what the run's holds and is thrown away
at the end; checkpoints are written and read by all of them together, in the run's directory, which
all have to see.
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
# What a resume reads of a run's directory besides its checkpoints.
RECORDS = (journal_lib.FILE_NAME, metrics.FILE_NAME, trace_lib.FILE_NAME, "config.json")


@contextlib.contextmanager
def own_directory(directory: pathlib.Path) -> Iterator[pathlib.Path]:
  """Yields where this process keeps the records of a run in `directory`; see above.

  All processes enter it together, before the run is begun.
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
  """A task whose verdicts are the first process's: a judge may read a clock, or run a program.

  Attributes:
    name: of the task.
    task: itself.
  """

  def __init__(self, task: Task):
    self.name = task.name
    self.task = task

  def num_problems(self, split: str) -> int:
    """Returns what the task does."""
    return self.task.num_problems(split)

  def problem(self, split: str, index: int) -> Problem:
    """Returns what the task does: equal arguments give equal problems in every process."""
    return self.task.problem(split, index)

  def verdict(self, problem: Problem, text: str) -> Verdict:
    """Returns the verdict of the first process, which all of them ask for together."""
    return agreement.from_first(lambda: self.task.verdict(problem, text))


def own_task(task: Task) -> Task:
  """Returns the task itself, of one that `shared_task` gave."""
  return task.task if isinstance(task, JudgedByFirst) else task


def require_supported(config: RunConfig) -> None:
  """Refuses what the processes of a slice cannot do together yet.

  Raises:
    NotImplementedError: naming the setting.
  """
  if jax.process_count() > 1 and config.stale.steps_ahead:
    raise NotImplementedError(
      f"RunConfig.stale: got steps_ahead={config.stale.steps_ahead} in {jax.process_count()}"
      " processes, expected 0 (two threads' collectives would meet in any order); set it to 0, or"
      " run one process."
    )
  if jax.process_count() > 1 and config.cluster.workers:
    raise NotImplementedError(
      f"RunConfig.cluster: got workers={config.cluster.workers} in {jax.process_count()} processes,"
      " expected 0 (each process would ask workers of its own); set it to 0, or run one process."
    )


def shared_task(task: Task) -> Task:
  """Returns a task, as the processes of a slice judge together."""
  is_shared = jax.process_count() == 1 or isinstance(task, JudgedByFirst)
  return task if is_shared else JudgedByFirst(task)
