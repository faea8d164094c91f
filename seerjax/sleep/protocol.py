"""Sleep-time compute by its published protocol: who knows what, when, and for how many tokens.

  S(c) -> c'     before the question, up to ten rewrites, k of them side by side
  T(q, c')       after it: few tokens b in place of B

| arm     | is asked with                        | its answer is                                   |
|---------|--------------------------------------|-------------------------------------------------|
| "test"  | q and c                              | the baseline T_B(q, c)                          |
| "cache" | q and c, whose KV is kept            | that of "test": kept KV saves prefill alone     |
| "wake"  | q and k rewrites                     | T_b(q, c')                                      |
| "both"  | q, c and k rewrites                  | T_b(q, c, c')                                   |
| "facts" | q and a perfect rewrite              | what a better sleeper would allow               |
| "rule"  | q and a rewrite that took no thought | what shortening alone does                      |
| "leak"  | c without q                          | what can be had without any question            |
| "pass"  | q and c, several times               | right if any is, within "wake"'s test tokens    |
| "same"  | q and c, several times               | the commonest, within all tokens of "wake", its |
|         |                                      | sleep included: the same total without sleep    |

Each arm is run at every verbosity, "test" and "wake" also with hard cuts of their answers (which
flatter sleep: a cut answer is no answer). "pass" and "same" take whole answers until their budget
is used, and so overshoot it by less than one, in the baseline's favour. Where a sleeper left
nothing, a waker reads the raw context.

Answers are functions of their calls (`thinkers.Call`), so that neither order nor interruption moves
one; what is the same call in two arms is asked once.

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
# Set apart so that a sleeper's noise is no waker's.
_SLEEP, _WAKE = 1, 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProtocolConfig:
  """Which arms are run, and with which budgets.

  Attributes:
    arms: of `ARMS`.
    verbosities: places among those of the prompts; empty for all.
    parallel: numbers of rewrites that a waker is given side by side.
    max_rethinks: most calls of one sleeper.
    sleep_tokens: most tokens of one of its calls.
    wake_tokens: most tokens of an answer.
    cuts: further, lower limits of an answer, for "test" and "wake".
    sleep_temperature: of the first sleeper.
    parallel_temperature: of those beside it.
    wake_temperature: of answers.
    sample_temperature: of answers after the first, in "pass" and "same".
    max_samples: most answers to one question there.
    seed: of the run.
    num_at_once: contexts that are worked on side by side.
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
    fields.check(self)
    def refuse(field: str, expected: str, fix: str) -> None:
      raise ValueError(
        f"ProtocolConfig.{field}: got {vars(self)[field]!r}, expected {expected}; {fix}."
      )

    if not self.arms or any(arm not in ARMS for arm in self.arms):
      refuse("arms", f"one at least of {ARMS}", "correct the spelling")
    if not self.parallel or min(self.parallel) < 1:
      refuse("parallel", "numbers of rewrites from 1 on", "(1,) is one sleeper alone")
    if not 1 <= self.max_rethinks <= MAX_RETHINKS:
      refuse("max_rethinks", f"1 to {MAX_RETHINKS}", "1 asks a sleeper once")
    for field in ("sleep_tokens", "wake_tokens", "max_samples", "num_at_once"):
      if vars(self)[field] < 1:
        refuse(field, "at least 1", "raise it")
    if any(not 1 <= cut < self.wake_tokens for cut in self.cuts):
      refuse("cuts", f"limits from 1 to below wake_tokens = {self.wake_tokens}", "drop the others")
    if any(place < 0 for place in self.verbosities):
      refuse("verbosities", "places from 0 on", "() is all of them")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Item:
  """A context with its questions.

  Attributes:
    context: what may be read early.
    questions: about it, at least one.
  """

  context: StatefulContext
  questions: tuple[Problem, ...]

  def __post_init__(self):
    fields.check(self)
    if not self.questions:
      raise ValueError(
        f"Item {self.context.context_id!r}: got a context without questions, expected one at least;"
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
  """What one arm came to with one question.

  Attributes:
    context_id: of the context.
    problem_id: of the question.
    arm: of `ARMS`.
    verbosity: at which it was asked.
    num_parallel: rewrites that were read, 0 for none.
    max_tokens: limit of the answer.
    reward: of the verdict, 0 without an answer.
    is_correct: the verdict's.
    num_tokens: generated after the question came.
    num_prompt_tokens: read after it came, 0 if that is not known.
    num_sleep_tokens: generated before, for all the context's questions together.
    num_sharing: questions that share these.
    num_samples: answers to this question.
    is_fallback: whether the raw context was read in place of a rewrite that is not there.
    finish_reason: of the answer; "" without one.
    error: why there is no answer; "" where there is one.
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
    """Returns the price of the question, in tokens of sleep: t * b + S / N_q.

    Args:
      latency_price: t, of a token for which a user waits.

    Raises:
      ValueError: for a price that is not above 0.
    """
    if not latency_price > 0:
      raise ValueError(
        f"Row.cost: got latency_price={latency_price}, expected more than 0; 10 is the published"
        " price of a token for which a user waits."
      )
    return latency_price * self.num_tokens + self.num_sleep_tokens / self.num_sharing


class Slept(NamedTuple):
  """What a sleeper left.

  Attributes:
    notes: its rewrite, "" if it left none.
    num_tokens: generated.
    num_calls: of the sleeper.
    error: why a call had no answer; what was written before it stays.
  """

  notes: str
  num_tokens: int
  num_calls: int
  error: str = ""


def items(task: StatefulTask, split: str, places: Iterable[int]) -> tuple[Item, ...]:
  """Returns contexts of a split with their questions, by their places."""
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
  """Runs all arms over contexts, and yields the rows of each context in their order.

  Args:
    given: contexts with their questions.
    prompts: how this model is asked.
    verdict: (problem, answer) -> what it is worth.
    ask: answers calls; that of `CallJournal.asking` lets a killed run go on.
    config: arms and budgets.

  Raises:
    ValueError: if the prompts lack a verbosity that is asked for.
  """
  verbosities = config.verbosities or tuple(range(prompts.num_verbosities))
  if max(verbosities) >= prompts.num_verbosities:
    raise ValueError(
      f"ProtocolConfig.verbosities: got {config.verbosities}, expected places below"
      f" {prompts.num_verbosities}, the verbosities of these prompts; drop the others."
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
  num_begun = num_yielded = 0

  def advance(place: int, answers: Sequence[Answer] | None) -> None:
    try:
      wanted[place] = live[place].send(answers)  # type: ignore[arg-type]
    except StopIteration as end:
      done[place] = end.value
      del live[place]
      wanted.pop(place, None)

  while num_yielded < len(given):
    while len(live) < config.num_at_once and num_begun < len(given):
      live[num_begun] = _rows(given[num_begun], prompts, verdict, config, verbosities)
      advance(num_begun, None)
      num_begun += 1
    calls = {call.key: call for place in sorted(wanted) for call in wanted[place]}
    ordered = list(calls.values())
    answers = {ordered[index].key: answer for index, answer in ask(ordered)} if ordered else {}
    for place in sorted(live):
      advance(place, [answers[call.key] for call in wanted[place]])
    while num_yielded in done:
      yield done.pop(num_yielded)
      num_yielded += 1


# One context: what it asks for, round by round, and its rows in the end.
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
  """Yields the calls of several sleepers of one context, takes answers, returns what they left.

  A sleeper's seeds follow from the context, its number and the call's alone.

  Args:
    context: that is read.
    prompts: how this model is asked.
    config: budgets and temperatures.
    num_jobs: sleepers, each on its own.
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
  """Yields different calls once, and returns answers by key."""
  unique = tuple({call.key: call for call in calls}.values())
  if not unique:
    return {}
  answers = yield unique
  return {call.key: answer for call, answer in zip(unique, answers, strict=True)}


class _Asked(NamedTuple):
  """What a row is about, before there is an answer."""

  arm: str
  place: int
  verbosity: int
  num_parallel: int = 0
  num_sleep_tokens: int = 0
  is_fallback: bool = False
  error: str = ""


def _call(messages: tuple[Message, ...], config: ProtocolConfig, sample: int = 0) -> Call:
  """Returns the call for a waker's answer number `sample`."""
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
  """Returns the arms that ask each question once, "test" and "wake" where others count on them."""
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
  """Returns "test" and "wake" with hard cuts; what ends before the cut is not asked again."""
  cuts: list[tuple[_Asked, Call, Answer | None]] = []
  for one, call in asked:
    for limit in config.cuts if one.arm in ("test", "wake") else ():
      answer = answers[call.key]
      is_short = isinstance(answer, Completed) and answer.num_tokens <= limit
      cut = dataclasses.replace(call, max_tokens=limit)
      cuts.append((one, cut, answer if is_short else None))
  further = yield from _answered(call for _, call, answer in cuts if answer is None)
  return [
    _row(item, one, call, answer or further[call.key], verdict) for one, call, answer in cuts
  ]


class _Samples:
  """The answers to one question so far, and what they may still cost."""

  def __init__(self, first: Completed, wake: Completed, sleep_share: float):
    self.answers = [first]
    self.test_budget = float(wake.num_tokens)
    self.budget = wake.num_tokens + sleep_share
    self.error = ""

  @property
  def num_tokens(self) -> int:
    return sum(answer.num_tokens for answer in self.answers)

  def within(self, budget: float) -> list[Completed]:
    """Returns the answers that were begun before the budget was used, one at least."""
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
  """Returns "pass" and "same": several answers without sleep, for what "wake" cost."""
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
  """Returns the place of the best verdict, the first of equals: what an oracle would choose."""
  return max(range(len(judged)), key=lambda i: (judged[i].reward, -i))


def _commonest(judged: Sequence[Verdict]) -> int:
  """Returns the first place of the commonest answer, of the earliest where several are."""
  counts = collections.Counter(one.answer for one in judged if one.well_formed)
  if not counts:
    return 0
  most = max(counts.values())
  return next(i for i, one in enumerate(judged) if one.well_formed and counts[one.answer] == most)


def mean_cost(rows: Sequence[Row], latency_price: float) -> float:
  """Returns the mean price of a question over the rows that have answers, in tokens of sleep.

  Raises:
    ValueError: as `Row.cost`, and if no row has an answer.
  """
  costs = [row.cost(latency_price) for row in rows if not row.error]
  if not costs:
    raise ValueError(
      f"mean_cost: got {len(rows)} rows without an answer, expected one with; see their errors."
    )
  return math.fsum(costs) / len(costs)
