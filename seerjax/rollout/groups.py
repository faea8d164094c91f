"""Samples and judges one step's groups, with any sampler of completions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import dataclasses
import hashlib
import math
import numbers
import re
from typing import Any

from seerjax import fields, types
from seerjax.models import tokenizer as tokenizer_lib
from seerjax.types import (
  Completion,
  Problem,
  Request,
  Rollout,
  RolloutGroup,
  SamplingParams,
  Task,
  Verdict,
)

# (group, member, problem) -> the rollout if a journal already contains it, else None.
Known = Callable[[int, int, Problem], Rollout | None]
# Bound on rewards, so that sums of squares over a batch stay finite in float32.
MAX_REWARD = 1e15
# Valid names of reward parts; they also occur in metric and flag names.
PART_NAME = re.compile(r"[a-z][a-z0-9_]*")
Generate = Callable[[Sequence[Request]], Iterable[Completion]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutConfig:
  """Configuration of the rollouts of one step.

  Attributes:
    prompts_per_step: number of problems.
    group_size: rollouts per problem.
    temperature: see `SamplingParams`, also for the next fields.
    top_k: 0 keeps all.
    top_p: 1 keeps all.
    min_p: 0 drops none.
    max_tokens: maximum number of generated tokens per rollout.
    stop: a rollout's text ends before the first of these.
    reward_weights: weights of the reward parts in a task's verdicts, by name
      (`types.weighted_sum`); parts without an entry have weight 1.
  """

  prompts_per_step: int = 32
  group_size: int = 8
  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  max_tokens: int = 256
  stop: tuple[str, ...] = ()
  reward_weights: Mapping[str, float] = dataclasses.field(default_factory=dict, hash=False)

  def __post_init__(self):
    fields.check(
      self,
      prompts_per_step=fields.at_least(1, "32 is usual"),
      group_size=fields.at_least(2, "a group's advantages compare its members, and 8 are usual"),
    )
    self.sampling(())  # Validates the sampling parameters.
    check_weights(self.reward_weights)

  def sampling(self, stop_token_ids: Sequence[int]) -> SamplingParams:
    """Returns the sampling parameters of every request."""
    return SamplingParams(
      temperature=self.temperature,
      top_k=self.top_k,
      top_p=self.top_p,
      min_p=self.min_p,
      max_tokens=self.max_tokens,
      stop_token_ids=tuple(stop_token_ids),
      stop=self.stop,
    )


def check_weights(weights: Mapping[str, float]) -> None:
  """Raises for invalid reward weights.

  Raises:
    ValueError: naming the part, its weight and the valid values.
  """
  if not isinstance(weights, Mapping):
    raise ValueError(
      f"RolloutConfig.reward_weights: got {weights!r} ({type(weights).__name__}), expected a"
      ' mapping of names to numbers; write {"format": 0.2}.'
    )
  for name, weight in weights.items():
    if not isinstance(name, str) or not PART_NAME.fullmatch(name):
      raise ValueError(
        f"RolloutConfig.reward_weights: got the name {name!r}, expected lower-case letters, digits"
        " and underscores, a letter first; use the name of a part of the task's verdicts."
      )
    if not _is_finite(weight):
      raise ValueError(
        f"RolloutConfig.reward_weights: got {weight!r} for {name!r}, expected a finite number below"
        f" {MAX_REWARD:g} in magnitude; 1 counts the part once, 0 only logs it."
      )


def _is_finite(value: Any) -> bool:
  is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
  return is_number and abs(float(value)) < MAX_REWARD  # False for NaN.


def request_seed(*numbers: int) -> int:
  """Returns a seed in [0, 2**32) from a request's coordinates: run seed, step, group, member."""
  digest = hashlib.blake2b(repr(numbers).encode(), digest_size=4).digest()
  return int.from_bytes(digest, "little")


def problem_index(position: int, num_problems: int, seed: int) -> int:
  """Returns the problem at a position of a seed's infinite order.

  Every problem occurs once before any occurs twice: the order is a walk with a stride coprime to
  the number of problems.

  Raises:
    ValueError: if there is no problem.
  """
  if num_problems < 1:
    raise ValueError(
      f"problem_index: got num_problems={num_problems}, expected at least 1; a task needs a problem"
      " in each split that is used."
    )
  offset = request_seed(seed, 0) % num_problems
  stride = request_seed(seed, 1) % num_problems or 1
  while math.gcd(stride, num_problems) != 1:
    stride += 1
  return (offset + position * stride) % num_problems


def prompt_tokens(problem: Problem, tokenizer: tokenizer_lib.Tokenizer) -> tuple[int, ...]:
  """Returns the chat tokens of the conversation (or prompt) up to the start of the response."""
  return tuple(tokenizer.chat_ids(problem.messages or problem.prompt))


def group_requests(
  problem: Problem,
  *,
  group: int,
  step: int,
  config: RolloutConfig,
  tokenizer: tokenizer_lib.Tokenizer,
  seed: int,
) -> list[Request]:
  """Returns a group's requests, by member; ids and seeds depend only on step, group and member."""
  prompt = prompt_tokens(problem, tokenizer)
  sampling = config.sampling(tokenizer.eos_ids)
  return [
    Request(
      request_id=f"{step}/{group}/{member}",
      prompt=prompt,
      sampling=sampling,
      seed=request_seed(seed, step, group, member),
      group_id=f"{step}/{group}",
    )
    for member in range(config.group_size)
  ]


def require_prompt(
  request: Request, known: Sequence[int], tokenizer: tokenizer_lib.Tokenizer
) -> None:
  """Raises if a journalled rollout has another prompt than the current request.

  Raises:
    ValueError: with the ends of both prompts.
  """
  if request.prompt == tuple(known):
    return
  was, now = (repr(tokenizer.decode(prompt)[-80:]) for prompt in (known, request.prompt))
  raise ValueError(
    f"journal: got an answer {request.request_id} to a prompt that ends with {was}, expected one to"
    f" the current prompt, which ends with {now}: problems or chat have changed; restore the run's"
    " files, or choose another directory."
  )


def place_of(request_id: str) -> tuple[int, int, int]:
  """Returns (step, group, member) of a request id from `group_requests`."""
  step, group, member = map(int, request_id.split("/"))
  return step, group, member


def num_problems(task: Task, split: str) -> int:
  """Returns the number of problems in a split.

  Raises:
    ValueError: if it has none, or the task raises, exits, or does not return a number.
  """
  try:
    count = task.num_problems(split)
  except (Exception, SystemExit) as error:
    raise ValueError(
      f"{task.name}: got {type(error).__name__} ({error}) from num_problems({split!r}), expected a"
      " whole number; fix the task."
    ) from error
  if not isinstance(count, numbers.Integral):
    raise ValueError(
      f"{task.name}: got {count!r} ({type(count).__name__}) from num_problems({split!r}), expected"
      " a whole number of at least 1; return len(...) of the problems."
    )
  if count < 1:
    raise ValueError(
      f"{task.name}: got {count} problems in split {split!r}, expected at least 1; add problems, or"
      " choose another task."
    )
  return count


def check_prompts(
  task: Task,
  split: str,
  count: int,
  *,
  tokenizer: tokenizer_lib.Tokenizer,
  max_tokens: int,
  context: int,
  context_name: str,
  seed: int,
) -> None:
  """Raises if a task's prompts leave no room for a completion, before anything is computed.

  Args:
    task: the task.
    split: "train" or "heldout".
    count: number of positions of the seed's order to check; repeated problems are read once.
    tokenizer: the policy's tokenizer.
    max_tokens: maximum number of generated tokens.
    context: maximum length of prompt and completion.
    context_name: the setting that bounds the context, for the message.
    seed: the run's seed.

  Raises:
    ValueError: if the split is empty or its longest prompt (named in the message) is too long.
  """
  total = num_problems(task, split)
  indices = [problem_index(place, total, seed) for place in range(min(count, total))]
  problems = [problem_of(task, split, index) for index in indices]
  lengths = [len(prompt_tokens(problem, tokenizer)) for problem in problems]
  longest = max(lengths, default=0)
  if longest + max_tokens > context:
    name = problems[lengths.index(longest)].problem_id
    raise ValueError(
      f"{task.name}: got a prompt of {longest} tokens (problem {name!r} of split {split!r}) and"
      f" max_tokens {max_tokens}, expected a sum of at most {context} ({context_name}); raise it,"
      " or lower RolloutConfig.max_tokens."
    )


def whole(completions: Iterable[Completion]) -> Iterator[Completion]:
  """Yields all completions except failed ones, which must not be trained on.

  Raises:
    ValueError: after all others, if any request failed; the message contains the first error.
  """
  errors: list[str] = []
  for completion in completions:
    if completion.finish_reason == "error":
      errors.append(completion.error)
    else:
      yield completion
  if errors:
    raise ValueError(
      f"rollout: got {len(errors)} request(s) that ended with an error, expected none, because they"
      " cannot be used for training; fix the cause and resume, all others are kept. The first error"
      f" was {errors[0]}"
    )


def problem_of(task: Task, split: str, index: int) -> Problem:
  """Returns a problem of a task.

  Raises:
    ValueError: if the task raises, exits, or does not return a `Problem`; names split and index.
  """
  try:
    # Copied, because the task may keep and modify its own object.
    problem = types.copied(task.problem(split, index))
  except (Exception, SystemExit) as error:
    raise ValueError(
      f"{task.name}: got {type(error).__name__} ({error}) from problem({split!r}, {index}),"
      " expected a Problem; fix the task and resume: earlier verdicts are kept."
    ) from error
  if not isinstance(problem, Problem):
    raise ValueError(
      f"{task.name}: got {problem!r} ({type(problem).__name__}) from problem({split!r}, {index}),"
      " expected a Problem; return seerjax.Problem(problem_id=..., prompt=...)."
    )
  return problem


def judge(
  task: Task, problem: Problem, text: str, weights: Mapping[str, float] | None = None
) -> Verdict:
  """Returns the task's verdict; if it has parts, its reward is their weighted sum.

  Args:
    task: the task.
    problem: the problem.
    text: text of the completion.
    weights: weights of the parts, as in `RolloutConfig.reward_weights`; None weighs all as 1.

  Raises:
    ValueError: if the text is not a string, or the task raises, exits, returns no `Verdict`, or a
      reward that is not a finite number below `MAX_REWARD` (the message names the problem). Also
      if parts are not finite numbers by name, their sum differs from the task's reward, or a weight
      has no part.
  """
  if not isinstance(text, str):
    raise ValueError(
      f"{task.name}: got a text of type {type(text).__name__} for problem {problem.problem_id!r},"
      " expected a string; pass Completion.text."
    )
  try:
    # Copied, because the task may modify it, and the next completion is judged by the same problem.
    verdict = task.verdict(types.copied(problem), text)
  except (Exception, SystemExit) as error:
    raise ValueError(
      f"{task.name}: got {type(error).__name__} ({error}) while judging problem"
      f" {problem.problem_id!r}, text {text[:80]!r}, expected a Verdict for any text; fix the task"
      " and resume: earlier verdicts are kept."
    ) from error
  if not isinstance(verdict, Verdict):
    raise ValueError(
      f"{task.name}: got {verdict!r} ({type(verdict).__name__}) for problem {problem.problem_id!r},"
      f" text {text[:80]!r}, expected a Verdict; fix the task and resume: earlier verdicts are"
      " kept."
    )
  if verdict.parts or weights:
    where = f"{task.name}, problem {problem.problem_id!r}, text {text[:80]!r}"
    verdict = _weighted(verdict, weights or {}, where)
  reward = verdict.reward
  # Also False for NaN.
  if not isinstance(reward, numbers.Real) or not abs(reward) < MAX_REWARD:
    raise ValueError(
      f"{task.name}: got reward {reward!r} for problem {problem.problem_id!r}, text {text[:80]!r},"
      f" expected a finite number below {MAX_REWARD:g} in magnitude, so that its square fits"
      " float32 (a single NaN or infinity would reach every weight); fix the task and resume:"
      " earlier verdicts are kept."
    )
  return verdict


def _weighted(verdict: Verdict, weights: Mapping[str, float], where: str) -> Verdict:
  """Returns a verdict with the weighted sum of its parts as the reward; see `judge`."""
  parts = verdict.parts
  if not isinstance(parts, Mapping) or not all(
    isinstance(name, str) and PART_NAME.fullmatch(name) and _is_finite(value)
    for name, value in parts.items()
  ):
    raise ValueError(
      f"{where}: got the parts {parts!r}, expected finite numbers below {MAX_REWARD:g} in"
      " magnitude, with names of lower-case letters, digits and underscores; fix the task and"
      " resume: earlier verdicts are kept."
    )
  if unknown := sorted(set(weights) - set(parts)):
    raise ValueError(
      f"RolloutConfig.reward_weights: got weights of {unknown} for a verdict with the parts"
      f" {sorted(parts)} ({where}), expected every weighted part in every verdict; correct the"
      " name, or drop the weight."
    )
  plain = types.weighted_sum(parts, {})
  if not math.isclose(verdict.reward, plain, rel_tol=1e-6, abs_tol=1e-9):
    raise ValueError(
      f"{where}: got reward {verdict.reward!r} with parts that sum to {plain!r}, expected that sum"
      " (a run weights parts by RolloutConfig.reward_weights); write Verdict.of_parts(parts, ...),"
      " which sums them."
    )
  reward = types.weighted_sum(parts, weights)
  plain_parts = {name: float(parts[name]) for name in sorted(parts)}
  return dataclasses.replace(verdict, reward=reward, parts=plain_parts)


def sample_groups(
  problems: Sequence[Problem],
  *,
  first_group: int,
  step: int,
  generate: Generate,
  task: Task,
  config: RolloutConfig,
  tokenizer: tokenizer_lib.Tokenizer,
  seed: int,
  known: Known,
  on_rollout: Callable[[int, int, Problem, Rollout], None],
) -> list[RolloutGroup]:
  """Samples and judges one group per problem.

  Args:
    problems: one per group.
    first_group: index of the first group in its step.
    step: step of the run.
    generate: yields completions of requests in any order.
    task: judges the completions.
    config: configuration of the rollouts.
    tokenizer: encodes the prompts.
    seed: the run's seed.
    known: returns rollouts that need not be sampled again.
    on_rollout: called with (group, member, problem, rollout) as each one finishes.

  Returns:
    Groups by index with members by number, independent of the order of completion.

  Raises:
    ValueError: if the task cannot judge a text (see `judge`), a request failed (see `whole`), or a
      known rollout has another prompt (see `require_prompt`).
  """
  places: dict[str, tuple[int, int, Problem, Request]] = {}
  finished: dict[tuple[int, int], Rollout] = {}
  for group, problem in enumerate(problems, start=first_group):
    requests = group_requests(
      problem, group=group, step=step, config=config, tokenizer=tokenizer, seed=seed
    )
    for member, request in enumerate(requests):
      rollout = known(group, member, problem)
      if rollout is None:
        places[request.request_id] = (group, member, problem, request)
      else:
        require_prompt(request, rollout.request.prompt, tokenizer)
        finished[group, member] = rollout
  for completion in whole(generate([request for *_, request in places.values()])):
    group, member, problem, request = places[completion.request_id]
    verdict = judge(task, problem, completion.text, config.reward_weights)
    rollout = Rollout(request=request, completion=completion, verdict=verdict)
    finished[group, member] = rollout
    on_rollout(group, member, problem, rollout)
  return [
    RolloutGroup(
      group_index=group,
      problem=problem,
      rollouts=tuple(finished[group, member] for member in range(config.group_size)),
    )
    for group, problem in enumerate(problems, start=first_group)
  ]
