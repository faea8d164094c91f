"""Samples a step's groups in rounds of problems (DAPO's dynamic sampling).

A group with equal rewards has no gradient and is replaced by the next problem's group.
Source: Yu et al. 2025 (DAPO), https://arxiv.org/abs/2503.14476.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from seerjax.models import tokenizer as tokenizer_lib
from seerjax.rollout import groups as groups_lib
from seerjax.types import Problem, Rollout, RolloutGroup, Task


def step_groups(
  config: groups_lib.RolloutConfig,
  *,
  dynamic_sampling_rounds: int,
  task: Task,
  tokenizer: tokenizer_lib.Tokenizer,
  seed: int,
  step: int,
  generate: groups_lib.Generate,
  known: groups_lib.Known,
  on_rollout: Callable[[int, int, Problem, Rollout], None],
) -> list[RolloutGroup]:
  """Returns the groups of a step.

  With `dynamic_sampling_rounds` above 1, rounds follow until enough groups have unequal rewards.
  The problems of a round depend on the counts of earlier rounds, never on the order of completion.

  Args:
    config: configuration of a step's rollouts.
    dynamic_sampling_rounds: maximum number of rounds; 1 keeps every group.
    task: source of problems and verdicts.
    tokenizer: encodes prompts.
    seed: the run's seed.
    step: step number, from 0.
    generate: as in `sample_groups`.
    known: returns rollouts that need not be sampled again.
    on_rollout: called for each finished rollout.
  """
  wanted = config.prompts_per_step
  num_problems = groups_lib.num_problems(task, "train")
  kept: list[RolloutGroup] = []
  rejected: list[RolloutGroup] = []
  taken = 0
  for _ in range(dynamic_sampling_rounds):
    # A step's first problem does not depend on the number of rounds of earlier steps.
    start = step * wanted * dynamic_sampling_rounds + taken
    count = wanted - len(kept)
    indices = [
      groups_lib.problem_index(start + place, num_problems, seed) for place in range(count)
    ]
    groups = groups_lib.sample_groups(
      [groups_lib.problem_of(task, "train", index) for index in indices],
      first_group=taken,
      step=step,
      generate=generate,
      task=task,
      config=config,
      tokenizer=tokenizer,
      seed=seed,
      known=known,
      on_rollout=on_rollout,
    )
    taken += count
    is_kept = [dynamic_sampling_rounds == 1 or np.ptp(group.rewards) > 0 for group in groups]
    kept += [group for group, keep_it in zip(groups, is_kept, strict=True) if keep_it]
    rejected += [group for group, keep_it in zip(groups, is_kept, strict=True) if not keep_it]
    if len(kept) == wanted:
      break
  # A step always has the same number of groups; rejected groups fill it up.
  chosen = kept + rejected[: wanted - len(kept)]
  return sorted(chosen, key=lambda group: group.group_index)
