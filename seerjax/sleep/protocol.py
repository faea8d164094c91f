"""Evaluates sleep-time compute by its published protocol: accuracy and tokens of each arm.

  S(c) -> c'     before the question, up to ten calls, k sleepers in parallel
  T(q, c')       after it: few tokens b instead of B

| arm     | reads                                | its answer is                                   |
|---------|--------------------------------------|-------------------------------------------------|
| "test"  | q and c                              | the baseline T_B(q, c)                          |
| "cache" | q and c with its KV cached           | that of "test": cached KV saves prefill only    |
| "wake"  | q and k rewrites                     | T_b(q, c')                                      |
| "both"  | q, c and k rewrites                  | T_b(q, c, c')                                   |
| "facts" | q and a perfect rewrite              | the bound for a better sleeper                  |
| "rule"  | q and a rewrite by a fixed rule      | the effect of shortening alone                  |
| "leak"  | c without q                          | the score reached without any question          |
| "pass"  | q and c, several times               | correct if any is, within "wake"'s test tokens  |
| "same"  | q and c, several times               | the majority, within all tokens of "wake",      |
|         |                                      | sleep included: the same total without sleep    |

Each arm runs at every verbosity, "test" and "wake" also with hard cuts of their answers (which
favour sleep, because a cut answer counts as none). "pass" and "same" sample whole answers until
their budget is used, so they overshoot it by less than one answer, in the baseline's favour. If a
sleeper produced no rewrite, the waker reads the raw context.

Answers are functions of their calls (`thinkers.Call`), so neither order nor interruption changes
one; a call that occurs in two arms is made once.

Source: Lin et al. 2025, https://arxiv.org/abs/2504.13171.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
import dataclasses
import itertools
import math
from typing import NamedTuple

from seerjax import fields
from seerjax.rollout import groups
from seerjax.sleep import thinkers
from seerjax.sleep.prompts import Prompts
from seerjax.sleep.thinkers import Answer, Ask, Call, Completed, Message, NoAnswer
from seerjax.tasks.stateful import StatefulContext, StatefulTask
from seerjax.types import Problem, Verdict

ARMS = ("test", "cache", "wake", "both", "facts", "rule", "leak", "pass", "same")
MAX_RETHINKS = 10
# Distinguishes the seeds of sleepers from those of wakers.
_SLEEP, _WAKE = 1, 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProtocolConfig:
  """Arms and budgets of an evaluation.

  Attributes:
    arms: arms to run, of `ARMS`.
    verbosities: indices of verbosities; empty for all.
    parallel: numbers of rewrites given to a waker together.
    max_rethinks: most calls of one sleeper.
    sleep_tokens: most tokens of one call of a sleeper.
    wake_tokens: most tokens of an answer.
    cuts: further, lower limits of an answer, for "test" and "wake".
    sleep_temperature: temperature of the first sleeper.
    parallel_temperature: temperature of the other sleepers.
    wake_temperature: temperature of answers.
    sample_temperature: temperature of later samples in "pass" and "same".
    max_samples: most samples per question in "pass" and "same".
    seed: seed of the run.
    num_at_once: contexts processed concurrently.
  """

  arms: tuple[str, ...] = ARMS
  verbosities: tuple[int, ...] = ()
  parallel: tuple[int, ...] = (1, 2, 5, 10)
  max_rethinks: int = MAX_RETHINKS
  sleep_tokens: int = 1024
  wake_tokens: int = 512
  cuts: tuple[int, ...] = ()
  sleep_temperature: float = 0.0
  parallel_temperature: float = 0.5
  wake_temperature: float = 0.0
  sample_temperature: float = 0.7
  max_samples: int = 32
  seed: int = 0
  num_at_once: int = 16

  def __post_init__(self):
    rule, one = fields.Rule, fields.at_least(1)
    fields.check(
      self, sleep_tokens=one, wake_tokens=one, max_samples=one, num_at_once=one,
      arms=rule(
        f"at least one of {ARMS}", lambda arms: bool(arms) and {*ARMS}.issuperset(arms),
        "correct the spelling",
      ),
      parallel=rule(
        "numbers of rewrites of at least 1", lambda parallel: min(parallel, default=0) >= 1,
        "(1,) is a single rewrite",
      ),
      max_rethinks=fields.between(1, MAX_RETHINKS, "1 is one call per rewrite"),
      cuts=rule(
        f"limits from 1 to below wake_tokens = {self.wake_tokens}",
        lambda cuts: all(1 <= cut < self.wake_tokens for cut in cuts), "drop the others",
      ),
      verbosities=rule(
        "positions of at least 0", lambda places: min(places, default=0) >= 0, "() selects all"
      ),
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Item:
  """A context with its questions.

  Attributes:
    context: the context, which sleepers read.
    questions: questions about it, at least one.
  """

  context: StatefulContext
  questions: tuple[Problem, ...]

  def __post_init__(self):
    fields.check(self)
    if not self.questions:
      raise ValueError(
        f"Item {self.context.context_id!r}: got a context without questions, expected at least one;"
        " leave the context out."
      )
    for problem in self.questions:
      if not problem.question.strip() or problem.context != self.context.text:
        raise ValueError(
          f"Item {self.context.context_id!r}: got {problem.problem_id!r} with the question"
          f" {problem.question[:60]!r} about {problem.context[:60]!r}, expected a question about"
          f" this context, {self.context.text[:60]!r}; set Problem.question and Problem.context."
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """Result of one arm on one question.

  Attributes:
    context_id: id of the context.
    problem_id: id of the question.
    arm: of `ARMS`.
    verbosity: index of the verbosity.
    num_parallel: rewrites read; 0 for none.
    max_tokens: limit of the answer.
    reward: reward of the verdict; 0 without an answer.
    is_correct: `correct` of the verdict.
    num_tokens: tokens generated after the question arrived.
    num_prompt_tokens: prompt tokens read after it arrived; 0 if unknown.
    num_sleep_tokens: tokens generated before, for all questions of the context together.
    num_sharing: number of questions that share `num_sleep_tokens`.
    num_samples: answers sampled for this question.
    is_fallback: whether the raw context was read because there was no rewrite.
    finish_reason: finish reason of the answer; "" without one.
    error: why there is no answer; "" if there is one.
  """

  context_id: str
  problem_id: str
  arm: str
  verbosity: int
  num_parallel: int
  max_tokens: int
  reward: float = 0.0
  is_correct: bool = False
  num_tokens: int = 0
  num_prompt_tokens: int = 0
  num_sleep_tokens: int = 0
  num_sharing: int = 1
  num_samples: int = 0
  is_fallback: bool = False
  finish_reason: str = ""
  error: str = ""

  def cost(self, latency_price: float) -> float:
    """Returns the cost of the question in tokens of sleep: t * b + S / N_q.

    Args:
      latency_price: t, the price of a token generated while a user waits.

    Raises:
      ValueError: if the price is not positive.
    """
    if not latency_price > 0:
      raise ValueError(
        f"Row.cost: got latency_price={latency_price}, expected more than 0; 10 is the published"
        " price of a token while a user waits."
      )
    return latency_price * self.num_tokens + self.num_sleep_tokens / self.num_sharing


class Slept(NamedTuple):
  """Result of one sleeper.

  Attributes:
    notes: the rewrite; "" if there is none.
    num_tokens: tokens generated.
    num_calls: calls made.
    error: why a call failed; earlier notes are kept.
  """

  notes: str
  num_tokens: int
  num_calls: int
  error: str = ""


def items(task: StatefulTask, split: str, places: Iterable[int]) -> tuple[Item, ...]:
  """Returns contexts of a split, with their questions, by index."""
  contexts = task.contexts(split)
  return tuple(
    Item(context=contexts[place], questions=task.questions(split, place)) for place in places
  )


def run(
  given: Sequence[Item],
  *,
  prompts: Prompts,
  verdict: Callable[[Problem, str], Verdict],
  ask: Ask,
  config: ProtocolConfig = ProtocolConfig(),
) -> Iterator[tuple[Row, ...]]:
  """Runs all arms on contexts, and yields the rows of each context in order.

  Args:
    given: contexts with their questions.
    prompts: prompts for the model.
    verdict: (problem, answer) -> verdict.
    ask: runs calls; wrap it in `CallJournal.asking` to make the run resumable.
    config: arms and budgets.

  Raises:
    ValueError: if a configured verbosity does not exist.
  """
  verbosities = config.verbosities or tuple(range(prompts.num_verbosities))
  if max(verbosities) >= prompts.num_verbosities:
    raise ValueError(
      f"ProtocolConfig.verbosities: got {config.verbosities}, expected positions below"
      f" {prompts.num_verbosities}, the number of verbosities of these prompts; drop the others."
    )
  return _run(given, prompts, verdict, ask, config, verbosities)


def _run(
  given: Sequence[Item],
  prompts: Prompts,
  verdict: Callable[[Problem, str], Verdict],
  ask: Ask,
  config: ProtocolConfig,
  verbosities: tuple[int, ...],
) -> Iterator[tuple[Row, ...]]:
  live: dict[int, _Rows] = {}
  wanted: dict[int, tuple[Call, ...]] = {}
  done: dict[int, tuple[Row, ...]] = {}
  num_started = num_yielded = 0

  def advance(place: int, answers: Sequence[Answer] | None) -> None:
    try:
      wanted[place] = live[place].send(answers)  # type: ignore[arg-type]
    except StopIteration as end:
      done[place] = end.value
      del live[place]
      wanted.pop(place, None)

  while num_yielded < len(given):
    while len(live) < config.num_at_once and num_started < len(given):
      live[num_started] = _rows(given[num_started], prompts, verdict, config, verbosities)
      advance(num_started, None)
      num_started += 1
    calls = {call.key: call for place in sorted(wanted) for call in wanted[place]}
    ordered = list(calls.values())
    answers = {ordered[index].key: answer for index, answer in ask(ordered)} if ordered else {}
    for place in sorted(live):
      advance(place, [answers[call.key] for call in wanted[place]])
    while num_yielded in done:
      yield done.pop(num_yielded)
      num_yielded += 1


# Evaluation of one context: yields rounds of calls, takes answers, returns rows.
_Rows = Generator[tuple[Call, ...], Sequence[Answer], tuple[Row, ...]]


def _rows(
  item: Item,
  prompts: Prompts,
  verdict: Callable[[Problem, str], Verdict],
  config: ProtocolConfig,
  verbosities: tuple[int, ...],
) -> _Rows:
  needs_sleep = {*config.arms} & {"wake", "both", "pass", "same"}
  reads_several = {*config.arms} & {"wake", "both"}
  num_jobs = (max(config.parallel) if reads_several else 1) if needs_sleep else 0
  slept = yield from sleeping(item.context, prompts, config, num_jobs)
  asked = _asked(item, prompts, config, verbosities, slept)
  answers = yield from _answered(call for _, call in asked)
  rows = [_row(item, one, call, answers[call.key], verdict) for one, call in asked]
  rows += yield from _cut_rows(item, asked, answers, verdict, config)
  rows += yield from _budget_rows(item, asked, answers, slept, verdict, config)
  counts = {0, *config.parallel}
  kept = [row for row in rows if row.arm in config.arms and row.num_parallel in counts]
  places = {problem.problem_id: place for place, problem in enumerate(item.questions)}
  kept.sort(
    key=lambda row: (
      ARMS.index(row.arm), places[row.problem_id], row.verbosity, row.num_parallel, -row.max_tokens
    )
  )  # fmt: skip
  return tuple(kept)


def sleeping(
  context: StatefulContext, prompts: Prompts, config: ProtocolConfig, num_jobs: int
) -> Generator[tuple[Call, ...], Sequence[Answer], tuple[Slept, ...]]:
  """Runs the sleepers of one context: yields calls, takes answers, returns the results.

  A sleeper's seeds depend only on the context, the sleeper's number and the call's number.
  """
  text = thinkers.number_of(context.text)
  slept = [Slept("", 0, 0)] * num_jobs
  awake: set[int] = set()
  for number in range(config.max_rethinks):
    jobs = [job for job in range(num_jobs) if job not in awake]
    if not jobs:
      break
    calls = tuple(
      Call(
        messages=prompts.sleep(context, slept[job].notes, number),
        max_tokens=config.sleep_tokens,
        temperature=config.parallel_temperature if job else config.sleep_temperature,
        seed=groups.request_seed(config.seed, _SLEEP, text, job, number),
      )
      for job in jobs
    )
    answers = yield from _answered(calls)
    for job, call in zip(jobs, calls, strict=True):
      before, answer = slept[job], answers[call.key]
      if isinstance(answer, NoAnswer):
        slept[job] = before._replace(error=str(answer))
        awake.add(job)
        continue
      notes, is_finished = prompts.read(answer.text, before.notes)
      slept[job] = Slept(notes, before.num_tokens + answer.num_tokens, before.num_calls + 1)
      if is_finished:
        awake.add(job)
  return tuple(slept)


def _answered(
  calls: Iterable[Call],
) -> Generator[tuple[Call, ...], Sequence[Answer], dict[str, Answer]]:
  """Yields the distinct calls once, and returns answers by key."""
  unique = tuple({call.key: call for call in calls}.values())
  if not unique:
    return {}
  answers = yield unique
  return {call.key: answer for call, answer in zip(unique, answers, strict=True)}


class _Asked(NamedTuple):
  """Description of a row before its answer is known."""

  arm: str
  place: int
  verbosity: int
  num_parallel: int = 0
  num_sleep_tokens: int = 0
  is_fallback: bool = False
  error: str = ""


def _call(messages: tuple[Message, ...], config: ProtocolConfig, sample: int = 0) -> Call:
  """Returns the call for sample number `sample` of a waker's answer."""
  number = thinkers.number_of(thinkers.digest([dict(message) for message in messages]))
  return Call(
    messages=messages,
    max_tokens=config.wake_tokens,
    temperature=config.sample_temperature if sample else config.wake_temperature,
    seed=groups.request_seed(config.seed, _WAKE, number, sample),
  )


def _asked(
  item: Item,
  prompts: Prompts,
  config: ProtocolConfig,
  verbosities: tuple[int, ...],
  slept: tuple[Slept, ...],
) -> list[tuple[_Asked, Call]]:
  """Returns the calls of arms with one answer per question.

  "test" and "wake" are included if "pass" or "same" needs them.
  """
  text = item.context.text
  found: list[tuple[_Asked, Call]] = []
  arms = {*config.arms}
  is_budgeted = bool(arms & {"pass", "same"})
  rewrites = []
  for count in sorted({*config.parallel, 1} if is_budgeted else {*config.parallel}):
    jobs = slept[:count]
    notes = prompts.joined([job.notes for job in jobs if job.notes]) if jobs else ""
    errors = [job.error for job in jobs if job.error and not job.notes]
    rewrites.append((count, notes, sum(job.num_tokens for job in jobs), (*errors, "")[0]))

  def add(asked: _Asked, context: str, rewritten: str) -> None:
    question = item.questions[asked.place].question
    messages = prompts.wake(question, context, rewritten, asked.verbosity)
    found.append((asked, _call(messages, config)))

  given = {"facts": prompts.facts(item.context), "rule": prompts.rule(item.context)}
  for place, verbosity in itertools.product(range(len(item.questions)), verbosities):
    for arm in ("test", "cache"):
      if arm in arms or (arm == "test" and is_budgeted):
        add(_Asked(arm, place, verbosity), text, "")
    for count, notes, num_tokens, error in rewrites if slept else ():
      for arm in ("wake", "both"):
        if arm in arms or (arm == "wake" and count == 1 and is_budgeted):
          asked = _Asked(arm, place, verbosity, count, num_tokens, not notes, error)
          add(asked, text if arm == "both" or not notes else "", notes)
    for arm, notes in given.items():
      if arm in arms and notes:
        add(_Asked(arm, place, verbosity), "", notes)
    if "leak" in arms:
      call = _call(prompts.leak(text, verbosity), config)
      found.append((_Asked("leak", place, verbosity), call))
  return found


def _row(
  item: Item,
  asked: _Asked,
  call: Call,
  answer: Answer,
  verdict: Callable[[Problem, str], Verdict],
) -> Row:
  problem = item.questions[asked.place]
  row = Row(
    context_id=item.context.context_id,
    problem_id=problem.problem_id,
    arm=asked.arm,
    verbosity=asked.verbosity,
    num_parallel=asked.num_parallel,
    max_tokens=call.max_tokens,
    num_sleep_tokens=asked.num_sleep_tokens,
    num_sharing=len(item.questions),
    is_fallback=asked.is_fallback,
    error=asked.error,
  )
  if isinstance(answer, NoAnswer):
    return dataclasses.replace(row, error=asked.error or str(answer))
  if asked.error:
    return row
  judged = verdict(problem, answer.text)
  return dataclasses.replace(
    row,
    reward=judged.reward,
    is_correct=judged.correct,
    num_tokens=answer.num_tokens,
    num_prompt_tokens=answer.num_prompt_tokens,
    num_samples=1,
    finish_reason=answer.finish_reason,
  )


def _cut_rows(
  item: Item,
  asked: list[tuple[_Asked, Call]],
  answers: Mapping[str, Answer],
  verdict: Callable[[Problem, str], Verdict],
  config: ProtocolConfig,
) -> Generator[tuple[Call, ...], Sequence[Answer], list[Row]]:
  """Returns rows of "test" and "wake" with hard cuts; reuses answers that end before the cut."""
  cuts: list[tuple[_Asked, Call, Answer | None]] = []
  for one, call in asked:
    for limit in config.cuts if one.arm in ("test", "wake") else ():
      answer = answers[call.key]
      is_short = isinstance(answer, Completed) and answer.num_tokens <= limit
      cut = dataclasses.replace(call, max_tokens=limit)
      cuts.append((one, cut, answer if is_short else None))
  further = yield from _answered(call for _, call, answer in cuts if answer is None)
  return [_row(item, one, call, answer or further[call.key], verdict) for one, call, answer in cuts]


class _Samples:
  """The sampled answers to one question, and their budgets."""

  def __init__(self, first: Completed, wake: Completed, sleep_share: float):
    self.answers = [first]
    self.test_budget = float(wake.num_tokens)
    self.budget = wake.num_tokens + sleep_share
    self.error = ""

  @property
  def num_tokens(self) -> int:
    return sum(answer.num_tokens for answer in self.answers)

  def within(self, budget: float) -> list[Completed]:
    """Returns the answers that started before the budget was used up; at least one."""
    found, used = [self.answers[0]], self.answers[0].num_tokens
    for answer in self.answers[1:]:
      if used >= budget:
        break
      found.append(answer)
      used += answer.num_tokens
    return found


def _budget_rows(
  item: Item,
  asked: list[tuple[_Asked, Call]],
  answers: Mapping[str, Answer],
  slept: tuple[Slept, ...],
  verdict: Callable[[Problem, str], Verdict],
  config: ProtocolConfig,
) -> Generator[tuple[Call, ...], Sequence[Answer], list[Row]]:
  """Returns rows of "pass" and "same": several answers without sleep, at the cost of "wake"."""
  arms = [arm for arm in ("pass", "same") if arm in config.arms]
  if not arms:
    return []
  share = slept[0].num_tokens / len(item.questions)
  first = {(one.place, one.verbosity): call for one, call in asked if one.arm == "test"}
  wake = {
    (one.place, one.verbosity): (one, answers[call.key])
    for one, call in asked
    if one.arm == "wake" and one.num_parallel == 1
  }
  rows, sampled = [], {}
  for key, call in first.items():
    ours, (theirs, other) = answers[call.key], wake[key]
    if isinstance(ours, Completed) and isinstance(other, Completed) and not theirs.error:
      sampled[key] = _Samples(ours, other, share if "same" in arms else 0)
    else:
      error = theirs.error or str(ours if isinstance(ours, NoAnswer) else other)
      rows += [_row(item, _Asked(arm, *key, error=error), call, ours, verdict) for arm in arms]
  for number in range(1, config.max_samples):
    calls = {
      key: dataclasses.replace(_call(first[key].messages, config, number))
      for key, samples in sampled.items()
      if samples.num_tokens < samples.budget and not samples.error
    }
    if not calls:
      break
    further = yield from _answered(calls.values())
    for key, call in calls.items():
      answer = further[call.key]
      if isinstance(answer, Completed):
        sampled[key].answers.append(answer)
      else:
        sampled[key].error = str(answer)
  for key, samples in sampled.items():
    problem = item.questions[key[0]]
    for arm in arms:
      found = samples.within(samples.test_budget if arm == "pass" else samples.budget)
      judged = [verdict(problem, answer.text) for answer in found]
      best = _best(judged) if arm == "pass" else _commonest(judged)
      row = _row(item, _Asked(arm, *key, error=samples.error), first[key], found[best], verdict)
      total = sum(answer.num_tokens for answer in found)
      rows.append(dataclasses.replace(row, num_tokens=total, num_samples=len(found)))
  return rows


def _best(judged: Sequence[Verdict]) -> int:
  """Returns the index of the best verdict, the first of equals, as an oracle would choose."""
  return max(range(len(judged)), key=lambda i: (judged[i].reward, -i))


def _commonest(judged: Sequence[Verdict]) -> int:
  """Returns the index of the first majority answer; ties go to the earliest."""
  counts = collections.Counter(one.answer for one in judged if one.well_formed)
  if not counts:
    return 0
  most = max(counts.values())
  return next(i for i, one in enumerate(judged) if one.well_formed and counts[one.answer] == most)


def mean_cost(rows: Sequence[Row], latency_price: float) -> float:
  """Returns the mean cost of a question over the rows with an answer, in tokens of sleep.

  Raises:
    ValueError: see `Row.cost`; also if no row has an answer.
  """
  costs = [row.cost(latency_price) for row in rows if not row.error]
  if not costs:
    raise ValueError(
      f"mean_cost: got {len(rows)} rows, all without an answer, expected at least one with; see"
      " their errors."
    )
  return math.fsum(costs) / len(costs)
