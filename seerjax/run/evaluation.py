"""Held-out accuracy: each problem answered once, by any sampler of completions.

    held-out problems -> one request each -> completions -> verdicts -> fractions

Which problems, and which seeds, follow from the run's seed alone, so that evaluations before and
after learning answer the same ones.
"""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
import functools
from typing import Any, NamedTuple

import numpy as np

from seerjax import types
from seerjax.engine import engine as engine_lib
from seerjax.models import tokenizer as tokenizer_lib
from seerjax.rollout import divided, groups, policies
from seerjax.run import progress as progress_lib, sampling
from seerjax.types import Completion, Problem, Task, Verdict


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
  """What is measured before and after.

  Attributes:
    num_problems: of the held-out split, each answered once.
    temperature: 0 is greedy.
    every: steps between two evaluations besides the first and the last; 0 for none.
  """

  num_problems: int = 1024
  temperature: float = 0.0
  every: int = 0

  def __post_init__(self):
    if self.num_problems < 1 or self.every < 0:
      raise ValueError(
        f"EvaluationConfig: got num_problems={self.num_problems}, every={self.every}, expected at"
        " least 1 and 0; 1024 and 0 (before and after alone) are usual."
      )
    if self.temperature != 0 and not types.is_temperature(self.temperature):
      raise ValueError(
        f"EvaluationConfig.temperature: got {self.temperature}, expected 0 or {types.TEMPERATURES};"
        " 0 is greedy, 1 samples as it is trained."
      )


class Answer(NamedTuple):
  """What was answered to one problem, and what the task says of it."""

  problem: Problem
  completion: Completion
  verdict: Verdict


def evaluate(
  config: EvaluationConfig,
  *,
  generate: groups.Generate,
  task: Task,
  tokenizer: tokenizer_lib.Tokenizer,
  max_tokens: int,
  seed: int,
  stop_strings: tuple[str, ...] = (),
) -> dict[str, float]:
  """Returns held-out accuracy: fractions of problems, and the accuracy's standard error.

  Args:
    config: how many problems, at which temperature.
    generate: requests to completions, in any order.
    task: poses and judges.
    tokenizer: of the policy.
    max_tokens: most generated tokens of an answer.
    seed: of the run.
    stop_strings: an answer ends before the first of these.

  Returns:
    accuracy, standard_error, well_formed (an answer could be read), ended (by itself),
    accuracy_well_formed (correct among well-formed), length (mean tokens).

  Raises:
    ValueError: if the task has no held-out problem or cannot judge, or an error ended a request.
  """
  answers = list(
    _answers(
      config, config.num_problems, generate=generate, task=task, tokenizer=tokenizer,
      max_tokens=max_tokens, seed=seed, stop_strings=stop_strings,
    )
  )  # fmt: skip
  correct = np.asarray([one.verdict.correct for one in answers], np.float64)
  formed = np.asarray([one.verdict.well_formed for one in answers], np.float64)
  ended = [one.completion.finish_reason == "stop" for one in answers]
  lengths = [len(one.completion.tokens) for one in answers]
  return dict(
    accuracy=float(correct.mean()),
    standard_error=float(correct.std() / np.sqrt(len(answers))),
    well_formed=float(formed.mean()),
    ended=float(np.mean(ended)),
    accuracy_well_formed=float(correct.sum() / max(formed.sum(), 1.0)),
    length=float(np.mean(lengths)),
  )


def first_answer(
  config: EvaluationConfig,
  *,
  generate: groups.Generate,
  task: Task,
  tokenizer: tokenizer_lib.Tokenizer,
  max_tokens: int,
  seed: int,
  stop_strings: tuple[str, ...] = (),
) -> Answer:
  """Returns the answer to the first problem that `evaluate` asks, to the same bits; see there."""
  (answer,) = _answers(
    config, 1, generate=generate, task=task, tokenizer=tokenizer,
    max_tokens=max_tokens, seed=seed, stop_strings=stop_strings,
  )  # fmt: skip
  return answer


def _answers(
  config: EvaluationConfig,
  most: int,
  *,
  generate: groups.Generate,
  task: Task,
  tokenizer: tokenizer_lib.Tokenizer,
  max_tokens: int,
  seed: int,
  stop_strings: tuple[str, ...],
) -> Iterator[Answer]:
  """Yields answers to the first problems of the seed's order, as they finish."""
  num_problems = groups.num_problems(task, "heldout")
  count = min(most, num_problems)
  one = groups.RolloutConfig(
    temperature=config.temperature, max_tokens=max_tokens, stop_strings=stop_strings
  )
  problems, requests = {}, []
  for place in range(count):
    index = groups.problem_index(place, num_problems, seed)
    problem = groups.problem_of(task, "heldout", index)
    request = groups.group_requests(
      problem, group=place, step=-1, config=one, tokenizer=tokenizer, seed=seed
    )[0]
    problems[request.request_id] = problem
    requests.append(request)
  for completion in groups.whole(generate(requests)):
    problem = problems[completion.request_id]
    yield Answer(problem, completion, groups.judge(task, problem, completion.text))


def describe(accuracy: dict[str, float]) -> str:
  """Returns one line for people."""
  return (
    f"{accuracy['accuracy']:.1%} correct (standard error {accuracy['standard_error']:.1%}),"
    f" {accuracy['accuracy_well_formed']:.1%} of the well-formed {accuracy['well_formed']:.1%},"
    f" {accuracy['ended']:.1%} ended by themselves, {accuracy['length']:.1f} tokens on average"
  )


@dataclasses.dataclass(frozen=True)
class Evaluator:
  """Asks a run's engine, with whatever weights it has.

  Attributes:
    config: how many problems, at which temperature.
    engine: with its tokenizer.
    task: poses and judges.
    rollout: what an answer may be.
    policy: of scheduling.
    seed: of the run.
    progress: is told.
  """

  config: EvaluationConfig
  engine: engine_lib.Engine
  task: Task
  rollout: groups.RolloutConfig
  policy: policies.SchedulerConfig
  seed: int
  progress: progress_lib.Progress

  def accuracy(self) -> dict[str, float]:
    """Returns held-out accuracy; see `evaluate`."""
    run = divided.DividedRollout(self.engine, self.policy).run
    num_tokens = lambda: self.engine.counters.sampled_tokens
    watched = functools.partial(sampling.watched, self.progress, "evaluating", num_tokens, run)
    return evaluate(self.config, generate=watched, **self._asked())

  def answer(self) -> Answer:
    """Returns the answer to the first held-out problem; see `first_answer`."""
    run = divided.DividedRollout(self.engine, self.policy).run
    return first_answer(self.config, generate=run, **self._asked())

  def _asked(self) -> dict[str, Any]:
    assert self.engine.tokenizer is not None
    return dict(
      task=self.task,
      tokenizer=self.engine.tokenizer,
      max_tokens=self.rollout.max_tokens,
      seed=self.seed,
      stop_strings=self.rollout.stop_strings,
    )
