"""Recomputes the weights between two checkpoints from the journal, bit for bit.

Nothing is sampled or judged: rollouts and rewards come from the journal; the task only supplies its
problems.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import functools
import time

from seerjax.models import tokenizer as tokenizer_lib
from seerjax.run import rounds
from seerjax.run.config import RunConfig
from seerjax.types import Completion, Request, Rollout, RolloutGroup, Task, TrainState

# Runs one step's optimiser steps as the run did: (state, groups) -> (state, metrics).
Learn = Callable[[TrainState, Sequence[RolloutGroup]], tuple[TrainState, Mapping[str, float]]]


def learn_again(
  learn: Learn,
  config: RunConfig,
  task: Task,
  tokenizer: tokenizer_lib.Tokenizer,
  state: TrainState,
  steps: range,
  known: Callable[[int, int, int], Rollout | None],
  *,
  log: Callable[[str], None] = print,
) -> TrainState:
  """Repeats training steps from journalled rollouts; the resulting state has the run's bits.

  Args:
    learn: the run's own update, on any number of instances.
    config: configuration of the run.
    task: the run's task.
    tokenizer: the policy's tokenizer, with the run's chat settings.
    state: state before the first of `steps`.
    steps: consecutive step numbers.
    known: (step, group, member) -> the journalled rollout, or None.
    log: receives one line per step.

  Returns:
    The state after the last of `steps`.

  Raises:
    ValueError: if rollouts are missing from the journal; raised before anything is computed.
  """

  def refuse(step: int, requests: Sequence[Request]) -> tuple[Completion, ...]:
    if requests:
      names = [request.request_id for request in requests]
      more = f" and {len(names) - 8} more" if len(names) > 8 else ""
      raise ValueError(
        f"journal: got no rollout {', '.join(names[:8])}{more}, expected all rollouts of step"
        f" {step + 1} (names count steps from 0); restore the file, or keep a checkpoint of a later"
        " step."
      )
    return ()

  groups = {
    step: rounds.step_groups(
      config.rollout,
      dynamic_sampling_rounds=config.trainer.dynamic_sampling_rounds,
      task=task,
      tokenizer=tokenizer,
      seed=config.seed,
      step=step,
      generate=functools.partial(refuse, step),
      known=lambda group, member, problem, step=step: known(step, group, member),
      on_rollout=lambda *_: None,
    )
    for step in steps
  }
  for step in steps:
    begin = time.monotonic()
    state, numbers = learn(state, groups.pop(step))
    log(
      f"step {step + 1} learnt again, {step - steps.start + 1} of {len(steps)}: log-probability gap"
      f" {numbers['rollout_train/max_abs_logprob_gap']}, {time.monotonic() - begin:.1f} s"
    )
  return state
