"""Contexts that can be read before their questions are known, for thinking ahead of time.

  context   "Ana has 12 pens. Ana buys 7 more pens."        may be read early
  notes     "12+7=19\\n- Ana has 19 pens."                   what a sleeper would write
  facts     "Ana has 19 pens."                              its facts alone: the oracle c'
  question  "How many pens does Ana have now?"              known late; 10 a context

A waker is asked with the context, with what a sleeper made of it, or with both. The split "test"
tells of people, in verbs and in two kinds of stories that "train" and "heldout" never use: "star",
where all are compared with the first, and "mixed", where who was compared trades. These two splits
differ in contexts alone: budgets are fixed on "heldout", and "test" is read once.

Which question is asked follows a law of Zipf over the questions that a context allows: the higher
`predictability`, the surer the first of them.

Source: Lin et al. 2025, https://arxiv.org/abs/2504.13171, whose contexts come of templates that may
not be shipped; these stories are ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
from fractions import Fraction
import re
from typing import NamedTuple, Protocol, overload, runtime_checkable

from seerjax import fields
from seerjax.tasks import answers, equations, splits, stories
from seerjax.tasks.draws import Draws
from seerjax.tasks.stories import Chain, Teller
from seerjax.types import Problem, Verdict

SPLITS = ("train", "heldout", "test")
SIZES = {"train": 1_000_000, "heldout": 10_000, "test": 10_000}  # Contexts.
MAX_PREDICTABILITY = 3.0
# Words that a model pretrained on all of `stories` knows and a sleeper is not trained on.
TEST_NAMES = ("Dan", "Ida", "Jon", "Leo", "Nora", "Tom", "Zoe")
TRAIN_NAMES = tuple(name for name in stories.NAMES if name not in TEST_NAMES)
TEST_VERBS = ("finds", "loses", "takes")
# Of ten contexts, how many are of each kind.
TRAIN_KINDS = {"story": 5, "trade": 2, "people": 3}
TEST_KINDS = {"story": 3, "trade": 1, "people": 2, "star": 3, "mixed": 1}
# Told outside of "test" to who asks for it by `StatefulConfig.kinds`.
ASKED_KINDS = {"branch": 1}
QUESTION_FORMS = ("now", "goal", "share", "price", "both", "difference")
SLEEP_QUESTION = "How many {thing} does each have now?"
# How many of a solution's last steps an answer has; None is all, and asked for without a word.
LENGTHS = (0, 1, 2, None)

_FACT = re.compile(r"([A-Z][a-z]+) has ([0-9]{1,40}) ([a-z]+)\.", re.ASCII)
_SENTENCE = re.compile(r"(?<=[.!?])\s+|\n")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StatefulContext:
  """What may be read before a question is known.

  Attributes:
    context_id: unique within its task; equal ids mean equal contexts.
    text: what is read.
    kind: of what it tells, "" if that is not known.
    num_steps: of reasoning that all facts need, 0 if that is not known.
    facts: what is true after it, in sentences; "" if that is not known.
    notes: what a sleeper would write: how facts come about, and facts as points of a list, a line
      each; "" if that is not known.
  """

  context_id: str
  text: str
  kind: str = ""
  num_steps: int = 0
  facts: str = ""
  notes: str = ""

  def __post_init__(self):
    fields.check(self)
    if not self.text.strip():
      raise ValueError(
        f"StatefulContext {self.context_id!r}: got an empty context, expected at least one"
        " character that is no space; drop it, or ask its questions without sleep."
      )


@runtime_checkable
class StatefulTask(Protocol):
  """Contexts, their questions, and what a good answer is."""

  @property
  def name(self) -> str:
    """Of the task."""
    ...

  def contexts(self, split: str) -> Sequence[StatefulContext]:
    """Returns the contexts of a split."""
    ...

  def questions(self, split: str, context: int) -> tuple[Problem, ...]:
    """Returns the questions about context number `context` of the split."""
    ...

  def sleep_prompt(self, context: StatefulContext) -> str:
    """Returns what a sleeper is asked."""
    ...

  def facts(self, context: StatefulContext) -> str:
    """Returns what a perfect sleeper would leave, "" if that is not known."""
    ...

  def wake_prompt(self, question: str, context: str, rewritten: str) -> str:
    """Returns what a waker is asked; `context` or `rewritten` may be empty, not both."""
    ...

  def verdict(self, problem: Problem, text: str) -> Verdict:
    """Judges an answer; never raises."""
    ...


class LazyContexts(Sequence[StatefulContext]):
  """The contexts of a split, each made when it is asked for."""

  def __init__(self, make: Callable[[int], StatefulContext], count: int):
    self._make = make
    self._count = count

  def __len__(self) -> int:
    return self._count

  @overload
  def __getitem__(self, index: int) -> StatefulContext: ...
  @overload
  def __getitem__(self, index: slice) -> tuple[StatefulContext, ...]: ...
  def __getitem__(self, index: int | slice) -> StatefulContext | tuple[StatefulContext, ...]:
    if isinstance(index, slice):
      return tuple(self._make(i) for i in range(*index.indices(self._count)))
    if not -self._count <= index < self._count:
      raise IndexError(
        f"contexts: got index {index}, expected {-self._count} <= index < {self._count}; take it"
        " modulo their number."
      )
    return self._make(index % self._count)


def joined_prompt(question: str, context: str, rewritten: str, *, joint: str = " ") -> str:
  """Returns a question after what is known.

  Args:
    question: what is asked.
    context: the raw context, "" where only its rewrite is read.
    rewritten: what a sleeper made of it, "" without sleep.
    joint: what stands between them.

  Raises:
    ValueError: if the question is empty, or neither a context nor a rewrite is there.
  """
  if not question.strip():
    raise ValueError(
      f"wake_prompt: got the question {question!r}, expected at least one character that is no"
      " space; a context without a question is the arm 'leak'."
    )
  if not context.strip() and not rewritten.strip():
    raise ValueError(
      f"wake_prompt: got the question {question[:60]!r} without context and without rewrite,"
      " expected one of them; pass the context's text."
    )
  return joint.join(part for part in (context, rewritten, question) if part.strip())


def with_length(question: str, length: int | None) -> str:
  """Returns a question that asks for an answer of its last `length` steps: "How many? (1)"."""
  return question if length is None else f"{question} ({length})"


def solution_of(problem: Problem, length: int | None) -> str:
  """Returns a problem's solution with its last `length` steps alone; None is all of them."""
  *steps, answer = problem.solution.split("\n")
  kept = steps if length is None else steps[max(0, len(steps) - length) :]
  return "\n".join((*kept, answer))


# What a sleeper wrote.


class SleepVerdict(NamedTuple):
  """What of a sleeper's text is so.

  Attributes:
    num_wanted: facts that it should have.
    num_true: of these, how many it states.
    num_false: other facts that it states: wrong numbers, things and people that are not there.
    num_equations: equations that it states.
    num_false_equations: those of them that are not so, computed again.
  """

  num_wanted: int
  num_true: int
  num_false: int
  num_equations: int
  num_false_equations: int

  @property
  def reward(self) -> float:
    """From 0 to 1, 1 if all that is wanted is there and no other fact."""
    return self.num_true / (self.num_wanted + self.num_false)


def facts_in(text: str) -> tuple[str, ...]:
  """Returns the sentences "Ana has 19 pens." of a text, also of its lists, each once, in order."""
  sentences = (sentence.strip().removeprefix("- ") for sentence in _SENTENCE.split(text))
  return tuple(dict.fromkeys(s for s in sentences if _FACT.fullmatch(s)))


def questions_of(notes: str) -> tuple[str, ...]:
  """Returns a question for each fact of a text that it answers at once, the last fact's first."""
  found = (_FACT.fullmatch(fact) for fact in reversed(facts_in(notes)))
  form = FORMS["train"]["now"][0]
  return tuple(form.format(p=fact[1], o=fact[3]) for fact in found if fact)


def judge_notes(facts: str, text: str) -> SleepVerdict:
  """Judges a sleeper's text; never raises.

  A fact said twice counts once; one person's two numbers are one true fact at best, and a false
  one.

  Args:
    facts: what is so, "Ana has 19 pens." in sentences; at least one.
    text: what the sleeper wrote.
  """
  wanted = set(facts_in(facts))
  said = set(facts_in(text))
  found = equations.stated(text)
  return SleepVerdict(
    num_wanted=len(wanted),
    num_true=len(said & wanted),
    num_false=len(said - wanted),
    num_equations=len(found),
    num_false_equations=sum(not equation.is_true for equation in found),
  )


# Word problems.


@dataclasses.dataclass(frozen=True, kw_only=True)
class StatefulConfig:
  """How contexts are told, and which questions come.

  Attributes:
    predictability: exponent of the law of Zipf over a context's questions: 0 asks all alike, 3
      nearly always the first.
    num_questions: a context.
    steps: least and most events of a context, drawn evenly; None is mostly few, as in
      `word_problems`.
    distractor_rate: that a sentence which does not matter follows a sentence.
    kinds: of contexts, which keep their shares; empty for all that the split has.
    max_operand: largest number that a sentence adds or takes away.
    max_total: largest number of things anyone has.
  """

  predictability: float = 0.0
  num_questions: int = 10
  steps: tuple[int, int] | None = None
  distractor_rate: float = stories.DISTRACTOR_RATE
  kinds: tuple[str, ...] = ()
  max_operand: int = 40
  max_total: int = 150

  def __post_init__(self):
    fields.check(self)
    def check(is_right: bool, field: str, expected: str, fix: str) -> None:
      if not is_right:
        raise ValueError(
          f"StatefulConfig.{field}: got {vars(self)[field]!r}, expected {expected}; {fix}."
        )

    check(
      0 <= self.predictability <= MAX_PREDICTABILITY, "predictability",
      f"0 to {MAX_PREDICTABILITY:g}", "0 asks all questions alike",
    )  # fmt: skip
    check(1 <= self.num_questions <= 100, "num_questions", "1 to 100", "10 is usual")
    check(
      self.steps is None or (len(self.steps) == 2 and 1 <= self.steps[0] <= self.steps[1] <= 100),
      "steps", "(least, most) with 1 <= least <= most <= 100", "write (6, 6) for six",
    )  # fmt: skip
    check(0 <= self.distractor_rate <= 1, "distractor_rate", "0 to 1", "0 says none")
    check(
      all(kind in (*TEST_KINDS, *ASKED_KINDS) for kind in self.kinds), "kinds",
      f"kinds of {(*TEST_KINDS, *ASKED_KINDS)}", "correct the spelling; () tells all",
    )  # fmt: skip
    check(self.max_operand >= 4, "max_operand", "at least 4", "40 is usual")
    check(
      self.max_total >= 2 * self.max_operand, "max_total",
      f"at least 2 * max_operand = {2 * self.max_operand}", "raise it",
    )  # fmt: skip


def _speaks(form: str, verbs: Sequence[str]) -> bool:
  return any(verb in form.split() for verb in verbs)


def forms_of(split: str) -> dict[str, tuple[str, ...]]:
  """Returns the sentences of a split, by what they say; "test" shares none with the others."""
  found = {}
  for what, train in stories.TRAIN_FORMS.items():
    unseen = stories.HELDOUT_FORMS[what]
    if split != "test":
      seen = train[:-1] if what in QUESTION_FORMS else train
      found[what] = tuple(form for form in seen if not _speaks(form, TEST_VERBS))
    elif what in QUESTION_FORMS:
      found[what] = (train[-1], *unseen)
    else:
      new = tuple(form for form in (*train, *unseen) if _speaks(form, TEST_VERBS))
      found[what] = new or unseen
  return found


FORMS = {split: forms_of(split) for split in SPLITS}


def _compared(
  teller: Teller, events: int, *, is_branch: bool
) -> tuple[str, tuple[Chain, ...]]:
  """Several people, each compared with the first, or with anybody before: a star or a branch.

  The last of a branch is not compared with the first, so that no branch is a star.
  """
  sentence, first = teller.start(teller.names[0], may_box=False)
  sentences, chains = [sentence], [first]
  for person in teller.names[1 : events + 1]:
    if is_branch and len(chains) > 1:
      first = teller.draws.choice(chains[1:] if len(chains) == events else chains)
    words = dict(p=person, q=first.person)
    chain = dataclasses.replace(first, person=person)
    times = teller.draws.between(2, 3)
    if teller.draws.chance(0.15) and first.value * times <= teller.max_total:
      sentence, chain = teller.say("as_many", k=times, **words), chain.then("*", times)
    elif (first.value < 6 or teller.draws.below(2)) and first.value + 2 <= teller.max_total:
      number = teller.draws.between(2, min(teller.max_operand, teller.max_total - first.value))
      sentence, chain = teller.say("more", n=number, **words), chain.then("+", number)
    else:
      number = teller.draws.between(2, min(teller.max_operand, first.value - 1))
      sentence, chain = teller.say("fewer", n=number, **words), chain.then("-", number)
    sentences += [sentence, *teller.distract(person)]
    chains.append(chain)
  return " ".join(sentences), tuple(chains)


def _mixed(teller: Teller, events: int) -> tuple[str, tuple[Chain, ...]]:
  """Two people who are compared first, and then buy, lose and give as in a trade."""
  first, second = teller.names[:2]
  sentence, chain = teller.start(first, may_box=False)
  number = teller.draws.between(2, min(teller.max_operand, teller.max_total - chain.value))
  compared = dataclasses.replace(chain, person=second).then("+", number)
  sentences = [sentence, teller.say("more", p=second, q=first, n=number)]
  sentences += teller.distract(second)
  chains, num_events = [chain, compared], 1
  while num_events < events:
    actor = teller.draws.below(2)
    giver, taker = chains[actor], chains[1 - actor]
    room = min(giver.value - 1, teller.max_total - taker.value, teller.max_operand)
    if room >= 2 and teller.draws.chance(0.4):
      number = teller.draws.between(2, room)
      sentences.append(teller.say("transfer", p=giver.person, q=taker.person, n=number))
      chains[actor], chains[1 - actor] = giver.then("-", number), taker.then("+", number)
    else:
      sentence, chains[actor] = teller.change(giver, 1, 0.0)
      sentences.append(sentence)
    sentences += teller.distract(giver.person)
    num_events += 1
  return " ".join(sentences), tuple(chains)


def _merged(first: tuple[str, ...], second: tuple[str, ...]) -> tuple[str, ...]:
  """Returns the lines of both, those that both begin with once."""
  num_shared = 0
  for one, other in zip(first, second, strict=False):
    if one != other:
      break
    num_shared += 1
  return (*first, *second[num_shared:])


class _Told(NamedTuple):
  """A context with what is known of it."""

  kind: str
  text: str
  thing: str
  chains: tuple[Chain, ...]
  teller: Teller


# A question that a context allows: what, and about whom.
Ask = tuple[str, tuple[int, ...]]


def _allowed(told: _Told) -> tuple[Ask, ...]:
  """Returns the questions that a context allows, the likeliest first."""
  if told.kind == "story":
    (chain,) = told.chains
    kinds = ("now", "goal", *(("share",) if chain.value >= 4 else ()), "price")
    return tuple((what, (0,)) for what in kinds)
  # Who was only told of is nothing to reason about.
  people = [i for i, chain in enumerate(told.chains) if chain.lines]
  pairs = [(i, i + 1) for i in range(len(told.chains) - 1)]
  if len(told.chains) > 2:
    pairs.append((0, len(told.chains) - 1))
  return (
    *(("now", (i,)) for i in reversed(people)),
    *((what, pair) for pair in reversed(pairs) for what in ("both", "difference")),
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StatefulWordProblems:
  """The task. Problem i of a split asks question i // c about context i % c, of c contexts."""

  config: StatefulConfig = StatefulConfig()
  name: str = "stateful_word_problems"

  def contexts(self, split: str) -> LazyContexts:
    """Returns the contexts of "train", "heldout" or "test".

    Raises:
      ValueError: for another split, or if it tells none of `config.kinds`.
    """
    if split not in SIZES:
      raise splits.unknown_split(self.name, split, SPLITS)
    self._kinds(split)
    return LazyContexts(lambda index: self._context(split, index), SIZES[split])

  def questions(self, split: str, context: int) -> tuple[Problem, ...]:
    """Returns the questions about one context; their `context` texts are equal.

    A question that was asked is drawn anew a few times, other numbers or words for the same; where
    the context allows little else it comes twice.
    """
    splits.check_index(self.name, split, context, len(self.contexts(split)))
    told = self._told(split, context)
    allowed = _allowed(told)
    weights = self.weights(len(allowed))
    texts: set[str] = set()
    found = []
    for number in range(self.config.num_questions):
      draws = Draws(self.name, split, context, "question", number)
      what, people = allowed[_weighted(draws, weights)]
      told.teller.draws = draws
      for _ in range(8):
        text, lines, answer = self._ask(told, what, people)
        if text not in texts:
          break
      texts.add(text)
      final = answers.number_text(answer)
      found.append(
        Problem(
          problem_id=f"{self.name}-{split}-{context}-{number}",
          prompt=f"{told.text} {text}",
          context=told.text,
          question=text,
          answer=final,
          num_steps=len(lines),
          solution="\n".join((*lines, f"{answers.ANSWER_MARK} {final}")),
        )
      )
    return tuple(found)

  def weights(self, count: int) -> tuple[int, ...]:
    """Returns how often each of `count` questions is asked, in parts of their sum."""
    return tuple(
      max(1, round(1_000_000 / (rank + 1) ** self.config.predictability)) for rank in range(count)
    )

  def sleep_prompt(self, context: StatefulContext) -> str:
    """Returns the context and the question what everybody has.

    Where its facts are not known, what is asked for is the first thing that it names.
    """
    things = [fact.rpartition(" ")[2].rstrip(".") for fact in facts_in(context.facts)]
    things += [word for word in re.findall(r"[a-z]+", context.text) if word in stories.OBJECTS]
    thing = things[0] if things else "things"
    return f"{context.text} {SLEEP_QUESTION.format(thing=thing)}"

  def facts(self, context: StatefulContext) -> str:
    """Returns what each person has in the end, a sentence each: the oracle c'."""
    return context.facts

  def rewritten(self, text: str) -> str:
    """Returns the facts of a sleeper's text, which a waker reads; "" if there is none."""
    return " ".join(facts_in(text))

  def by_rule(self, context: StatefulContext) -> str:
    """Returns a rewrite that takes no thought: the sentences that name what is asked for."""
    (thing,) = {fact.rpartition(" ")[2].rstrip(".") for fact in facts_in(context.facts)}
    sentences = _SENTENCE.split(context.text)
    return " ".join(s for s in sentences if re.search(rf"\b{thing}\b", s))

  def wake_prompt(self, question: str, context: str = "", rewritten: str = "") -> str:
    """Returns what is known and the question; with the context alone, a word problem's prompt."""
    return joined_prompt(question, context, rewritten)

  def sleep_verdict(self, context: StatefulContext, text: str) -> SleepVerdict:
    """Judges a sleeper's text about a context."""
    return judge_notes(context.facts, text)

  def num_problems(self, split: str) -> int:
    """Returns how many problems the split has: contexts times questions."""
    return len(self.contexts(split)) * self.config.num_questions

  def problem(self, split: str, index: int) -> Problem:
    """Returns problem `index` of the split: context and question at once, as without sleep."""
    splits.check_index(self.name, split, index, self.num_problems(split))
    number, context = divmod(index, len(self.contexts(split)))
    return self.questions(split, context)[number]

  def verdict(self, problem: Problem, text: str) -> Verdict:
    """Reward 1 if the text ends with exactly one "#### <number>" and it is the answer, else 0."""
    return answers.number_verdict(problem, text)

  def _kinds(self, split: str) -> dict[str, int]:
    kinds = TEST_KINDS if split == "test" else {**TRAIN_KINDS, **ASKED_KINDS}
    usual = TEST_KINDS if split == "test" else TRAIN_KINDS
    found = {kind: share for kind, share in kinds.items() if kind in (self.config.kinds or usual)}
    if not found:
      raise ValueError(
        f"StatefulConfig.kinds: got {self.config.kinds}, expected one at least of {tuple(usual)},"
        f" which the split {split!r} tells; 'star' and 'mixed' are told in 'test'."
      )
    return found

  def _told(self, split: str, index: int) -> _Told:
    draws = Draws(self.name, split, index)
    teller = Teller(
      draws,
      forms=FORMS[split],
      max_operand=self.config.max_operand,
      max_total=self.config.max_total,
      names=TEST_NAMES if split == "test" else TRAIN_NAMES,
      distractor_rate=self.config.distractor_rate,
    )
    kinds = self._kinds(split)
    kind = tuple(kinds)[_weighted(draws, tuple(kinds.values()))]
    events, is_long = teller.num_events()
    if self.config.steps is not None:
      events = draws.between(*self.config.steps)
    # The last name is a distractor's.
    num_compared = min(events, len(teller.names) - 2)
    if kind == "people":
      told = stories.people(teller, num_compared)
    elif kind == "trade":
      told = stories.trade(teller, max(2, events), is_long)
    elif kind == "story":
      told = stories.story(teller, events, is_long)
    else:
      text, chains = (
        _mixed(teller, max(2, events))
        if kind == "mixed"
        else _compared(teller, num_compared, is_branch=kind == "branch")
      )
      return _Told(kind, text, teller.things[0], chains, teller)
    return _Told(told.kind, told.text, told.thing, told.chains, teller)

  def _context(self, split: str, index: int) -> StatefulContext:
    told = self._told(split, index)
    facts = [f"{chain.person} has {chain.value} {told.thing}." for chain in told.chains]
    notes: list[str] = []
    known: tuple[str, ...] = ()
    for chain, fact in zip(told.chains, facts, strict=True):
      merged = _merged(known, chain.lines)
      notes += (*merged[len(known) :], f"- {fact}")
      known = merged
    return StatefulContext(
      context_id=f"{self.name}-{split}-{index}",
      text=told.text,
      kind=told.kind,
      num_steps=len(known),
      facts=" ".join(facts),
      notes="\n".join(notes),
    )

  def _ask(
    self, told: _Told, what: str, people: tuple[int, ...]
  ) -> tuple[str, tuple[str, ...], Fraction]:
    """Returns (question, solution lines, answer)."""
    teller, draws = told.teller, told.teller.draws
    chains = [told.chains[i] for i in people]
    chain = chains[0]
    if what == "now":
      return teller.ask("now", p=chain.person), chain.lines, Fraction(chain.value)
    if what == "goal":
      wanted = chain.value + draws.between(2, teller.max_operand)
      line = f"{wanted}-{chain.value}={wanted - chain.value}"
      text = teller.ask("goal", p=chain.person, n=wanted)
      return text, (*chain.lines, line), Fraction(wanted - chain.value)
    if what == "price":
      longer = chain.then("*", draws.between(2, 4) if chain.value <= 50 else 2)
      coins = longer.value // chain.value
      return teller.ask("price", p=chain.person, k=coins), longer.lines, Fraction(longer.value)
    if what == "share":
      count = draws.choice([k for k in (2, 3, 4, 5) if chain.value % k == 0] or [2, 4])
      answer = Fraction(chain.value, count)
      line = f"{chain.value}/{count}={answers.number_text(answer)}"
      return teller.ask("share", p=chain.person, k=count), (*chain.lines, line), answer
    high, low = sorted(chains, key=lambda one: -one.value)
    both = Chain(person="", value=high.value, lines=_merged(high.lines, low.lines))
    longer = both.then("+" if what == "both" else "-", low.value)
    text = teller.ask(what, p=high.person, q=low.person)
    return text, longer.lines, Fraction(longer.value)


def _weighted(draws: Draws, weights: Sequence[int]) -> int:
  """Returns an index, drawn in proportion to whole weights."""
  left = draws.below(sum(weights))
  for index, weight in enumerate(weights):
    if left < weight:
      return index
    left -= weight
  raise AssertionError("a draw is below the sum of the weights")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sleeper:
  """The sleeper's side as a task: its problems are sleep prompts, its reward is that of notes.

  Attributes:
    stateful: whose contexts are read.
    name: of the task.
  """

  stateful: StatefulWordProblems = StatefulWordProblems()
  name: str = "stateful_sleeper"

  def num_problems(self, split: str) -> int:
    """Returns how many contexts the split has."""
    return len(self.stateful.contexts(split))

  def problem(self, split: str, index: int) -> Problem:
    """Returns the sleep prompt of a context; its answer is the facts, its solution the notes."""
    splits.check_index(self.name, split, index, self.num_problems(split))
    context = self.stateful.contexts(split)[index]
    prompt = self.stateful.sleep_prompt(context)
    return Problem(
      problem_id=f"{self.name}-{split}-{index}",
      prompt=prompt,
      context=context.text,
      question=prompt.removeprefix(context.text).strip(),
      answer=context.facts,
      num_steps=context.num_steps,
      solution=context.notes,
    )

  def verdict(self, problem: Problem, text: str) -> Verdict:
    """Rewards true facts and no others; well formed is a text with a fact and no false equation."""
    found = judge_notes(problem.answer, text)
    return Verdict(
      reward=found.reward,
      correct=found.reward == 1.0,
      well_formed=found.num_true + found.num_false > 0 and not found.num_false_equations,
      answer=" ".join(facts_in(text)),
    )
