"""Off-policy training modes that trade on-policy data for time, as baselines for comparison.

    one step off   step k + 1 is sampled during the update of step k, on separate devices
    partial        more groups are started than a step needs; once enough are complete, the others
                   keep their tokens and continue in the next step under its new weights

Both train on tokens from older weights, so the gap between sampler and trainer log-probabilities
that a run reports then measures staleness and is not an error. With partial rollouts, the result
depends on which requests finish first. Neither mode can be resumed.

Source: arXiv 2511.14617v3, section 4.4 (partial rollouts as in APRIL); TailSieve for one step off.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import concurrent.futures
import dataclasses
import math
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp

from seerjax import fields
from seerjax.engine import engine as engine_lib
from seerjax.models import tokenizer as tokenizer_lib
from seerjax.rollout import groups as groups_lib, journal as journal_lib, policies
from seerjax.rollout.divided import DividedRollout
from seerjax.run import progress as progress_lib, sampling
from seerjax.run.drafter import RunDrafts
from seerjax.types import Completion, Problem, Request, Rollout, RolloutGroup, Task

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OffPolicyConfig:
  """Configuration of off-policy training. The default is on-policy.

  Attributes:
    max_policy_lag: 1 samples a step during the update of the previous one; 0 samples after it.
    oversample: groups in progress, as a multiple of the groups per step; above 1, groups that do
      not finish in time continue in the next step.
  """

  max_policy_lag: int = 0
  oversample: float = 1.0

  def __post_init__(self):
    fields.check(self)
    if self.max_policy_lag not in (0, 1) or not 1 <= self.oversample <= 16:
      raise ValueError(
        f"OffPolicyConfig: got max_policy_lag={self.max_policy_lag}, oversample={self.oversample},"
        " expected 0 or 1, and"
        " 1 to 16; 1 and 1.0, or 0 and 2.0, are the published baselines."
      )
    if self.max_policy_lag and self.oversample > 1:
      raise ValueError(
        f"OffPolicyConfig: got max_policy_lag={self.max_policy_lag} and"
        f" oversample={self.oversample}, expected at most"
        " one of them; both avoid waiting for long responses."
      )


class OneStepOff(Generic[T]):
  """Samples each step during the update of the previous one.

  Wraps a loop's sample and publish functions.
  """

  def __init__(
    self, sample: Callable[[int], T], publish: Callable[[Any, int], None], *, num_steps: int
  ):
    """Wraps `sample` and `publish` for a run of `num_steps` steps."""
    self._sample, self._publish, self._num_steps = sample, publish, num_steps
    self._thread = concurrent.futures.ThreadPoolExecutor(max_workers=1)
    self._started: dict[int, concurrent.futures.Future[T]] = {}

  def sample(self, step: int) -> T:
    """Returns the samples of a step and starts sampling the next with the same weights.

    Raises:
      Exception: any error raised while sampling the step.
    """
    future = self._started.pop(step, None)
    found = self._sample(step) if future is None else future.result()
    if step + 1 < self._num_steps:
      self._started[step + 1] = self._thread.submit(self._sample, step + 1)
    return found

  def publish(self, weights: Any, policy_version: int) -> None:
    """Publishes a copy of the weights once no sampling is in progress.

    The copy is needed because the engine samples while an update overwrites the float32 masters.

    Raises:
      Exception: any error raised while sampling.
    """
    weights = jax.tree.map(jnp.copy, weights)
    for future in self._started.values():
      future.result()
    self._publish(weights, policy_version)

  def close(self) -> None:
    """Waits for the sampling thread and ends it."""
    self._thread.shutdown()


class Partial:
  """Samples steps with partial rollouts: unfinished groups continue in the next step."""

  def __init__(
    self,
    engine: engine_lib.Engine,
    task: Task,
    journal: journal_lib.Journal,
    rollout: groups_lib.RolloutConfig,
    *,
    oversample: float,
    policy: policies.Policy,
    seed: int,
    progress: progress_lib.Progress,
    drafts: RunDrafts,
  ):
    """Creates the sampler; `oversample` is `OffPolicyConfig.oversample`."""
    self._engine, self._task, self._journal, self._rollout = engine, task, journal, rollout
    self._num_in_progress = math.ceil(oversample * rollout.prompts_per_step)
    self._policy, self._seed = policy, seed
    self._progress, self._drafts = progress, drafts
    self._carried = Carried()

  def sample(self, step: int) -> tuple[list[RolloutGroup], dict[str, float]]:
    """Returns a step's groups and sampling metrics; unfinished groups are carried over."""
    engine = self._engine
    measure = sampling.Measure(lambda: sampling.counted_by(engine), self._drafts)
    num_problems = groups_lib.num_problems(self._task, "train")
    assert engine.tokenizer is not None

    def pose(position: int) -> Problem:
      index = groups_lib.problem_index(position, num_problems, self._seed)
      return groups_lib.problem_of(self._task, "train", index)

    def rollout_of(beginnings: Mapping[str, Completion]) -> DividedRollout:
      # Continuing with new weights is the point of a partial rollout.
      version = engine.policy_version
      renewed = {
        name: dataclasses.replace(one, policy_version=version) for name, one in beginnings.items()
      }
      rollout = DividedRollout(engine, self._policy, resume_from=renewed)
      measure.traces.append(rollout.trace)
      return rollout

    def keep(problem: Problem, rollout: Rollout) -> None:
      place = groups_lib.place_of(rollout.request.request_id)
      self._journal.append(
        *place, rollout, problem_id=problem.problem_id, prompt_text=problem.prompt
      )

    with self._progress.phase("sampling", num_tokens=lambda: engine.counters.sampled_tokens):
      groups, num_old = sample_partial(
        self._carried,
        self._rollout,
        num_in_progress=self._num_in_progress,
        step=step,
        pose=pose,
        task=self._task,
        tokenizer=engine.tokenizer,
        seed=self._seed,
        rollout_of=rollout_of,
        on_rollout=keep,
      )
    return groups, measure.finish(self._journal.path.parent, step, num_old=num_old)


@dataclasses.dataclass(eq=False)
class GroupInProgress:
  """A group in progress.

  Attributes:
    problem: the problem of the group.
    requests: requests of all members.
    rollouts: finished rollouts by member.
  """

  problem: Problem
  requests: list[Request]
  rollouts: dict[int, Rollout] = dataclasses.field(default_factory=dict)

  @property
  def is_whole(self) -> bool:
    """Whether every member is finished."""
    return len(self.rollouts) == len(self.requests)


@dataclasses.dataclass
class Carried:
  """State carried from step to step by partial rollouts.

  Attributes:
    groups: groups in progress, oldest first.
    beginnings: partial completions by request id.
    num_posed: number of problems started so far.
  """

  groups: list[GroupInProgress] = dataclasses.field(default_factory=list)
  beginnings: dict[str, Completion] = dataclasses.field(default_factory=dict)
  num_posed: int = 0


def sample_partial(
  carried: Carried,
  config: groups_lib.RolloutConfig,
  *,
  num_in_progress: int,
  step: int,
  pose: Callable[[int], Problem],
  task: Task,
  tokenizer: tokenizer_lib.Tokenizer,
  seed: int,
  rollout_of: Callable[[Mapping[str, Completion]], DividedRollout],
  on_rollout: Callable[[Problem, Rollout], None],
) -> tuple[list[RolloutGroup], int]:
  """Samples until enough groups for a step are complete; carries the others over.

  Args:
    carried: state from the previous step; modified.
    config: configuration of a step's rollouts.
    num_in_progress: number of groups to keep in progress.
    step: step number, used in new request ids.
    pose: problem position -> problem.
    task: judges completions.
    tokenizer: encodes prompts.
    seed: the run's seed.
    rollout_of: creates a rollout that continues the given partial completions.
    on_rollout: called for each finished completion.

  Returns:
    The complete groups, renumbered from 0, and the number of their tokens from older weights.

  Raises:
    ValueError: if the task cannot judge a text.
  """
  for place in range(num_in_progress - len(carried.groups)):
    problem = pose(carried.num_posed)
    requests = groups_lib.group_requests(
      problem, group=place, step=step, config=config, tokenizer=tokenizer, seed=seed
    )
    carried.groups.append(GroupInProgress(problem, requests))
    carried.num_posed += 1
  # Tokens from older weights: all of a completion that was finished before, else its prefix.
  old_tokens = {
    rollout.request.request_id: len(rollout.completion.tokens)
    for group in carried.groups
    for rollout in group.rollouts.values()
  } | {name: len(one.tokens) for name, one in carried.beginnings.items()}
  places = {
    request.request_id: (group, member)
    for group in carried.groups
    for member, request in enumerate(group.requests)
    if member not in group.rollouts
  }

  # Finished under these weights, but started under older ones, which the trainer must see.
  versions = {name: one.policy_version for name, one in carried.beginnings.items() if one.tokens}

  def keep(completion: Completion) -> None:
    group, member = places[completion.request_id]
    version = versions.get(completion.request_id, completion.policy_version)
    completion = dataclasses.replace(completion, policy_version=version)
    verdict = groups_lib.judge(task, group.problem, completion.text, config.reward_weights)
    rollout = Rollout(request=group.requests[member], completion=completion, verdict=verdict)
    group.rollouts[member] = rollout
    on_rollout(group.problem, rollout)

  rollout = rollout_of(carried.beginnings)
  wanted = config.prompts_per_step
  asked = [group.requests[member] for group, member in places.values()]
  for completion in groups_lib.whole(rollout.run(asked)):
    keep(completion)
    if sum(group.is_whole for group in carried.groups) >= wanted:
      break
  finished, carried.beginnings = rollout.stop()
  for completion in groups_lib.whole(finished):
    keep(completion)
  chosen = [group for group in carried.groups if group.is_whole][:wanted]
  carried.groups = [group for group in carried.groups if group not in chosen]
  groups = [
    RolloutGroup(
      group_index=place,
      problem=group.problem,
      rollouts=tuple(group.rollouts[member] for member in range(len(group.requests))),
    )
    for place, group in enumerate(chosen)
  ]
  num_old = sum(
    old_tokens.get(rollout.request.request_id, 0) for group in groups for rollout in group.rollouts
  )
  return groups, num_old
