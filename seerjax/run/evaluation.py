"""Evaluation on held-out problems.

    held-out problems -> n requests each -> completions -> verdicts -> means with standard errors

Problems and seeds depend only on the run's seed, so that evaluations before and after training use
the same ones.

    pass@k of one problem with c correct of n completions: 1 - C(n - c, k) / C(n, k)

Source of pass@k: Chen et al. 2021, https://arxiv.org/abs/2107.03374, the unbiased estimator.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
import dataclasses
import functools
import re
from typing import Any, NamedTuple

import numpy as np

from seerjax import fields, types
from seerjax.engine import engine as engine_lib
from seerjax.models import tokenizer as tokenizer_lib
from seerjax.rollout import divided, groups, policies
from seerjax.run import progress as progress_lib, sampling, summary
from seerjax.tasks import loading
from seerjax.types import Completion, Problem, Task, Verdict

# Metric prefix of the run's own task; a set NAME uses `heldout_NAME`.
ROOM = "heldout"
METRIC = re.compile(rf"({ROOM}(?:_[a-z][a-z0-9_]*)?)/([a-z0-9_./]+)")
MEANS = ("reward", "accuracy", "well_formed", "ended", "accuracy_well_formed", "length")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
  """Configuration of held-out evaluations.

  Attributes:
    num_problems: held-out problems to evaluate, each with `num_samples` completions.
    temperature: sampling temperature; 0 is greedy.
    every: steps between evaluations, in addition to the first and the last; 0 for none.
    num_samples: completions per problem; fractions and rewards are means over all of them.
    pass_at: values of k for which pass@k is reported (the probability that at least one of k
      completions is correct).
    sets: further evaluation tasks by name: "TASK" or "TASK=PATH", with the meaning of
      `RunConfig.task` and `task_path`, or "TASK=OPTIONS" (see `loading.load_set`). Metrics are
      named `heldout_NAME/...`; the parts of a set's reward have weight 1.
    best: metric that selects the best checkpoint, which is kept (ties: the earliest); "" keeps only
      the latest checkpoints.
  """

  num_problems: int = 1024
  temperature: float = 0.0
  every: int = 0
  num_samples: int = 1
  pass_at: tuple[int, ...] = ()
  sets: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)
  best: str = f"{ROOM}/reward"

  def __post_init__(self):
    fields.check(
      self,
      num_problems=fields.at_least(1, "1024 is usual"),
      every=fields.at_least(0, "0, only before and after the run, is usual"),
      temperature=fields.Rule(
        f"0 or {types.TEMPERATURES}",
        lambda value: value == 0 or types.is_temperature(value),
        "0 is greedy, 1 samples as in training",
      ),
      num_samples=fields.at_least(1, "1 is usual, 16 for pass@8"),
    )
    if self.num_samples > 1 and self.temperature == 0:
      raise ValueError(
        f"EvaluationConfig.num_samples: got {self.num_samples} with temperature=0, expected 1 (all"
        " greedy answers to a problem are equal); set EvaluationConfig.temperature, 1 for example."
      )
    for k in self.pass_at:
      if not 1 <= k <= self.num_samples:
        raise ValueError(
          f"EvaluationConfig.pass_at: got k={k!r} with num_samples={self.num_samples}, expected"
          " whole numbers from 1 to num_samples; raise num_samples, twice the largest k is usual."
        )
    for name, task in self.sets.items():
      if not groups.PART_NAME.fullmatch(name) or not task:
        raise ValueError(
          f"EvaluationConfig.sets: got {name!r}: {task!r}, expected a name of lower-case letters,"
          " digits and underscores, and a value TASK or TASK=PATH; write"
          " --config.evaluation.sets.math=math=DIRECTORY."
        )
    found = METRIC.fullmatch(self.best)
    known = (*MEANS, *(f"pass_at_{k}" for k in self.pass_at))
    if self.best and not (found and (found[2] in known or found[2].startswith("part/"))):
      raise ValueError(
        f"EvaluationConfig.best: got {self.best!r}, expected a metric of an evaluation, {ROOM}/ or"
        f" {ROOM}_SET/ and one of {', '.join(known)} or part/PART, or ''; name one."
      )


class Answer(NamedTuple):
  """Completion of one problem and its verdict."""

  problem: Problem
  completion: Completion
  verdict: Verdict


def load_sets(
  config: EvaluationConfig, further: Mapping[str, Task] | None = None
) -> dict[str, Task]:
  """Returns the tasks of `EvaluationConfig.sets` and of `further`, by name.

  Raises:
    ValueError: if a task cannot be loaded or a name is invalid or duplicate (the message names the
      set), or if `EvaluationConfig.best` refers to an unknown set.
    FileNotFoundError: if a task's file does not exist.
  """
  found: dict[str, Task] = dict(further or {})
  for name in found:
    if not groups.PART_NAME.fullmatch(name) or name in config.sets:
      raise ValueError(
        f"evaluation sets: got a task named {name!r}, expected lower-case letters, digits and"
        f" underscores, a letter first, and none of EvaluationConfig.sets ({sorted(config.sets)});"
        " rename it."
      )
  for name, text in config.sets.items():
    try:
      found[name] = loading.load_set(text)
    except ValueError as error:
      raise ValueError(f"EvaluationConfig.sets.{name}: {error}") from error
  rooms = (ROOM, *(f"{ROOM}_{name}" for name in found))
  if config.best and config.best.partition("/")[0] not in rooms:
    raise ValueError(
      f"EvaluationConfig.best: got {config.best!r}, expected a metric of one of {', '.join(rooms)};"
      " name one, or add the set to EvaluationConfig.sets."
    )
  return found


def check_prompts(
  config: EvaluationConfig,
  tasks: Iterable[Task],
  *,
  tokenizer: tokenizer_lib.Tokenizer,
  max_tokens: int,
  context: int,
  seed: int,
) -> None:
  """Checks that held-out prompts leave room for a completion, before anything is computed.

  Args:
    config: gives the number of problems.
    tasks: the evaluation tasks.
    tokenizer: the policy's tokenizer.
    max_tokens: maximum number of generated tokens.
    context: maximum length of prompt and completion: the smaller of the engine's and the model's.
    seed: the run's seed.

  Raises:
    ValueError: as `groups.check_prompts`.
  """
  for task in tasks:
    groups.check_prompts(
      task,
      "heldout",
      config.num_problems,
      tokenizer=tokenizer,
      max_tokens=max_tokens,
      context=context,
      context_name="EngineConfig.max_model_len, or the model's max_position_embeddings",
      seed=seed,
    )


def evaluate(
  config: EvaluationConfig,
  *,
  generate: groups.Generate,
  task: Task,
  tokenizer: tokenizer_lib.Tokenizer,
  max_tokens: int,
  seed: int,
  stop: tuple[str, ...] = (),
  reward_weights: Mapping[str, float] | None = None,
) -> dict[str, float]:
  """Returns held-out accuracy and mean reward, with standard errors.

  Args:
    config: number of problems, completions per problem, and temperature.
    generate: maps requests to completions, in any order.
    task: source of problems and verdicts.
    tokenizer: the policy's tokenizer.
    max_tokens: maximum number of generated tokens.
    seed: the run's seed.
    stop: a completion ends before the first of these.
    reward_weights: as in `RolloutConfig`.

  Returns:
    accuracy, standard_error, reward, reward_standard_error, well_formed (an answer could be
    parsed), ended (by itself), accuracy_well_formed (correct among well-formed), length (mean
    tokens); pass_at_K and pass_at_K_standard_error; part/NAME, the mean of a part of the reward.
    Standard errors are those of per-problem means, since completions of one problem are correlated.

  Raises:
    ValueError: if the task has no held-out problem or cannot judge, or if a request failed.
  """
  found = _answers(
    config, config.num_problems, config.num_samples, generate=generate, task=task,
    tokenizer=tokenizer, max_tokens=max_tokens, seed=seed, stop=stop,
    reward_weights=reward_weights,
  )  # fmt: skip
  # Sorted by problem, so that sums do not depend on the order of completion.
  answers = [answer for _, answer in sorted(found, key=lambda placed: placed[0])]
  verdicts = [one.verdict for one in answers]
  by_problem = lambda values: np.asarray(values, np.float64).reshape(-1, config.num_samples)
  correct = by_problem([verdict.correct for verdict in verdicts])
  formed = by_problem([verdict.well_formed for verdict in verdicts])
  both = correct * formed  # A task may accept the answer of a text that is not well formed.
  accuracy, error = _mean(correct.mean(axis=1))
  reward, reward_error = _mean(by_problem([one.reward for one in verdicts]).mean(axis=1))
  numbers = dict(
    accuracy=accuracy,
    standard_error=error,
    reward=reward,
    reward_standard_error=reward_error,
    well_formed=float(formed.mean()),
    ended=float(np.mean([one.completion.finish_reason == "stop" for one in answers])),
    accuracy_well_formed=float(both.sum() / max(formed.sum(), 1.0)),
    length=float(np.mean([len(one.completion.tokens) for one in answers])),
  )
  num_correct = correct.sum(axis=1).astype(int).tolist()
  for k in config.pass_at:
    chances = [pass_at(k, config.num_samples, count) for count in num_correct]
    numbers[f"pass_at_{k}"], numbers[f"pass_at_{k}_standard_error"] = _mean(np.asarray(chances))
  return numbers | summary.part_means(verdicts)


def pass_at(k: int, num_samples: int, num_correct: int) -> float:
  """Returns the unbiased pass@k estimate for one problem.

  Computes 1 - C(n - c, k) / C(n, k) for n = `num_samples` and c = `num_correct` as a product, which
  cannot overflow.
  """
  failing = 1.0
  for place in range(num_samples - num_correct + 1, num_samples + 1):
    failing *= max(1.0 - k / place, 0.0)
  return 1.0 - failing


def _mean(values: np.ndarray) -> tuple[float, float]:
  """Returns the mean of f64[n] and its standard error."""
  return float(values.mean()), float(values.std() / np.sqrt(len(values)))


def first_answer(
  config: EvaluationConfig,
  *,
  generate: groups.Generate,
  task: Task,
  tokenizer: tokenizer_lib.Tokenizer,
  max_tokens: int,
  seed: int,
  stop: tuple[str, ...] = (),
  reward_weights: Mapping[str, float] | None = None,
) -> Answer:
  """Returns the completion of the first problem of `evaluate`, bit for bit; same arguments."""
  ((_, answer),) = _answers(
    config, 1, 1, generate=generate, task=task, tokenizer=tokenizer, max_tokens=max_tokens,
    seed=seed, stop=stop, reward_weights=reward_weights,
  )  # fmt: skip
  return answer


def _answers(
  config: EvaluationConfig,
  most: int,
  num_samples: int,
  *,
  generate: groups.Generate,
  task: Task,
  tokenizer: tokenizer_lib.Tokenizer,
  max_tokens: int,
  seed: int,
  stop: tuple[str, ...],
  reward_weights: Mapping[str, float] | None,
) -> Iterator[tuple[tuple[int, int], Answer]]:
  """Yields ((problem position, sample), answer) for the seed's first problems, as they finish."""
  num_problems = groups.num_problems(task, "heldout")
  count = min(most, num_problems)
  one = groups.RolloutConfig(
    group_size=max(num_samples, 2),
    temperature=config.temperature,
    max_tokens=max_tokens,
    stop=stop,
  )
  problems, requests = {}, []
  for place in range(count):
    index = groups.problem_index(place, num_problems, seed)
    problem = groups.problem_of(task, "heldout", index)
    asked = groups.group_requests(
      problem, group=place, step=-1, config=one, tokenizer=tokenizer, seed=seed
    )[:num_samples]
    problems |= {request.request_id: problem for request in asked}
    requests += asked
  for completion in groups.whole(generate(requests)):
    problem = problems[completion.request_id]
    _, place, sample = groups.place_of(completion.request_id)
    verdict = groups.judge(task, problem, completion.text, reward_weights)
    yield (place, sample), Answer(problem, completion, verdict)


def describe(numbers: Mapping[str, float]) -> str:
  """Returns a one-line summary for display."""
  reward, half = numbers["reward"], 1.96 * numbers["reward_standard_error"]
  passes = [
    f"{value:.1%} pass@{name.removeprefix('pass_at_')}"
    for name, value in numbers.items()
    if re.fullmatch(r"pass_at_\d+", name)
  ]
  parts = [
    f"{name.removeprefix('part/')} {value:.3g}"
    for name, value in numbers.items()
    if name.startswith("part/")
  ]
  return ", ".join(
    (
      f"mean reward {reward:.4g} (95 % interval {reward - half:.4g} to {reward + half:.4g})",
      *([f"parts {' and '.join(parts)}"] if parts else []),
      f"{numbers['accuracy']:.1%} correct (standard error {numbers['standard_error']:.1%})",
      *passes,
      f"{numbers['accuracy_well_formed']:.1%} of the well-formed {numbers['well_formed']:.1%}",
      f"{numbers['ended']:.1%} ended before the limit",
      f"{numbers['length']:.1f} tokens on average",
    )
  )


@dataclasses.dataclass(frozen=True)
class Evaluator:
  """Evaluates with a run's engine and the engine's current weights.

  Attributes:
    config: number of problems and temperature.
    engine: the engine, with a tokenizer.
    tasks: evaluation tasks by metric prefix; `ROOM` is the run's own task.
    rollout: limits of completions.
    policy: scheduling policy.
    seed: the run's seed.
    progress: receives progress updates.
  """

  config: EvaluationConfig
  engine: engine_lib.Engine
  tasks: Mapping[str, Task]
  rollout: groups.RolloutConfig
  policy: policies.Policy
  seed: int
  progress: progress_lib.Progress

  def accuracy(self, room: str = ROOM) -> dict[str, float]:
    """Returns the metrics of `evaluate` for one task.

    `reward_weights` apply to the run's own task only, because other sets may have other parts;
    their parts have weight 1.
    """
    run = divided.DividedRollout(self.engine, self.policy).run
    num_tokens = lambda: self.engine.counters.sampled_tokens
    watched = functools.partial(sampling.watched, self.progress, "evaluating", num_tokens, run)
    return evaluate(self.config, generate=watched, **self._asked(room))

  def answer(self) -> Answer:
    """Returns the completion of the first held-out problem; see `first_answer`."""
    run = divided.DividedRollout(self.engine, self.policy).run
    return first_answer(self.config, generate=run, **self._asked(ROOM))

  def _asked(self, room: str) -> dict[str, Any]:
    assert self.engine.tokenizer is not None
    return dict(
      task=self.tasks[room],
      tokenizer=self.engine.tokenizer,
      max_tokens=self.rollout.max_tokens,
      seed=self.seed,
      stop=self.rollout.stop,
      reward_weights=self.rollout.reward_weights if room == ROOM else {},
    )


def tasks_by_room(task: Task, sets: Mapping[str, Task]) -> dict[str, Task]:
  """Returns the evaluation tasks by metric prefix, the run's own task first."""
  return {ROOM: task} | {f"{ROOM}_{name}": one for name, one in sets.items()}
