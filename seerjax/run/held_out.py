"""Held-out evaluations of a run: before its first step, after those that are due and the last."""

from __future__ import annotations

from typing import Any

from seerjax.run import directory as directory_lib, evaluation, lifecycle, summary


def accuracy_before(
  run: lifecycle.Life, asked: evaluation.Evaluator, before: dict[str, float]
) -> dict[str, float]:
  """Returns held-out metrics before the first step: those measured now, or `before` on a resume.

  A resumed run may have been stopped during the evaluation of its last step, which is repeated.
  """
  if not run.step:
    return accuracy_after(0, run, asked)
  if not evaluate_if_due(run, asked):
    run.keep_best(asked.config.best)  # Otherwise the next save removes the best checkpoint.
  return before


def evaluate_if_due(run: lifecycle.Life, asked: evaluation.Evaluator) -> bool:
  """Evaluates if the last step is followed by an evaluation other than the first or the last one.

  Returns:
    Whether that was so.
  """
  every = asked.config.every
  if not every or run.step % every or not 0 < run.step < run.num_steps:
    return False
  accuracy_after(run.step, run, asked)
  return True


def accuracy_after(step: int, run: lifecycle.Life, asked: evaluation.Evaluator) -> dict[str, float]:
  """Returns held-out metrics after a step, and keeps the best checkpoint of all evaluations.

  Every set is evaluated, the run's own task first; its metrics are returned. Evaluations that were
  finished before a restart are read from metrics.jsonl.
  """
  numbers = [_asked_in(room, step, run, asked) for room in asked.tasks]
  run.keep_best(asked.config.best)
  return numbers[0]


def _asked_in(
  room: str, step: int, run: lifecycle.Life, asked: evaluation.Evaluator
) -> dict[str, float]:
  """Returns one set's metrics after a step, read from metrics.jsonl if present."""
  if found := directory_lib.accuracy_at(run.directory, step, room):
    return found
  when = {run.num_steps: "after", 0: "before"}.get(step, f"after step {step}")
  of_set = "" if room == evaluation.ROOM else f" of {room.removeprefix(f'{evaluation.ROOM}_')}"
  run.progress.say(f"held-out accuracy on {asked.config.num_problems} problems{of_set}, {when}:")
  found = asked.accuracy(room)
  run.writer.write(step, {f"{room}/{name}": value for name, value in found.items()})
  run.progress.say(f"  {evaluation.describe(found)}")
  return found


def sets_gained(run: lifecycle.Life, asked: evaluation.Evaluator) -> dict[str, dict[str, Any]]:
  """Returns accuracy and reward of each further set before and after the run."""
  return {
    room.removeprefix(f"{evaluation.ROOM}_"): summary.gains(before, after)
    for room in asked.tasks
    if room != evaluation.ROOM
    if (before := directory_lib.accuracy_at(run.directory, 0, room))
    and (after := directory_lib.accuracy_at(run.directory, run.step, room))
  }
