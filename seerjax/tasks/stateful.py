"""Problems with contexts that can be read before their questions, for sleep-time compute.

  context   "Ana has 12 pens. Ana buys 7 more pens."        available early
  notes     "12+7=19\\n- Ana has 19 pens."                   target output of a sleeper
  facts     "Ana has 19 pens."                              its facts only: the oracle c'
  question  "How many pens does Ana have now?"              available late; 10 per context

A waker gets the context, a sleeper's rewrite of it, or both. The split "test" uses names, verbs and
two kinds of stories that "train" and "heldout" do not have: "star", where everyone is compared with
the first person, and "mixed", where people who were compared trade. "train" and "heldout" differ
only in their contexts: budgets are tuned on "heldout", and "test" is evaluated once.

Questions follow Zipf's law over the questions that a context allows: the higher `predictability`,
the more often the first one comes.

Source: Lin et al. 2025, https://arxiv.org/abs/2504.13171; the templates of its contexts may not be
redistributed, and these stories are ours.
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
# Words known to a model pretrained on all of `stories`, but unseen in a sleeper's training.
TEST_NAMES = ("Dan", "Ida", "Jon", "Leo", "Nora", "Tom", "Zoe")
TRAIN_NAMES = tuple(name for name in stories.NAMES if name not in TEST_NAMES)
TEST_VERBS = ("finds", "loses", "takes")
# Relative frequencies of the kinds of contexts, in tenths.
TRAIN_KINDS = {"story": 5, "trade": 2, "people": 3}
TEST_KINDS = {"story": 3, "trade": 1, "people": 2, "star": 3, "mixed": 1}
# Kinds outside of "test" that occur only if `StatefulConfig.kinds` names them.
ASKED_KINDS = {"branch": 1}
QUESTION_FORMS = ("now", "goal", "share", "price", "both", "difference")
SLEEP_QUESTION = "How many {thing} does each have now?"
# Number of last solution steps in an answer; None means all, and adds nothing to the question.
LENGTHS = (0, 1, 2, None)

_FACT = re.compile(r"([A-Z][a-z]+) has ([0-9]{1,40}) ([a-z]+)\.", re.ASCII)
_SENTENCE = re.compile(r"(?<=[.!?])\s+|\n")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StatefulContext:
  """A context that may be read before its question.

  Attributes:
    context_id: unique within the task; equal ids mean equal contexts.
    text: text of the context.
    kind: kind of the context; "" if unknown.
    num_steps: reasoning steps to derive all facts; 0 if unknown.
    facts: facts that follow from it, in sentences; "" if unknown.
    notes: target output of a sleeper: derivations, and facts as list items, one per line; "" if
      unknown.
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
        " character that is not a space; drop it, or ask its questions without sleep."
      )


@runtime_checkable
class StatefulTask(Protocol):
  """A task with contexts and questions about them."""

  @property
  def name(self) -> str:
    """Name of the task."""
    ...

  def contexts(self, split: str) -> Sequence[StatefulContext]:
    """Returns the contexts of a split."""
    ...

  def questions(self, split: str, context: int) -> tuple[Problem, ...]:
    """Returns the questions about the context with this index."""
    ...

  def sleep_prompt(self, context: StatefulContext) -> str:
    """Returns the prompt of a sleeper."""
    ...

  def facts(self, context: StatefulContext) -> str:
    """Returns the output of a perfect sleeper; "" if unknown."""
    ...

  def wake_prompt(self, question: str, context: str, rewritten: str) -> str:
    """Returns the prompt of a waker; `context` or `rewritten` may be empty, but not both."""
    ...

  def verdict(self, problem: Problem, text: str) -> Verdict:
    """Judges an answer; never raises."""
    ...


class LazyContexts(Sequence[StatefulContext]):
  """The contexts of a split, created on access."""

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
  """Returns a question preceded by the context, its rewrite, or both.

  Args:
    question: the question.
    context: the raw context; "" if only the rewrite is read.
    rewritten: a sleeper's rewrite; "" without sleep.
    joint: separator.

  Raises:
    ValueError: if the question is empty, or both context and rewrite are.
  """
  if not question.strip():
    raise ValueError(
      f"wake_prompt: got the question {question!r}, expected at least one character that is not a"
      " space; a context without a question is the arm 'leak'."
    )
  if not context.strip() and not rewritten.strip():
    raise ValueError(
      f"wake_prompt: got the question {question[:60]!r} without context and without rewrite,"
      " expected one of them; pass the context's text."
    )
  return joint.join(part for part in (context, rewritten, question) if part.strip())


def with_length(question: str, length: int | None) -> str:
  """Returns a question that requests an answer with `length` steps: "How many? (1)"."""
  return question if length is None else f"{question} ({length})"


def solution_of(problem: Problem, length: int | None) -> str:
  """Returns a problem's solution with only its last `length` steps; None keeps all."""
  *steps, answer = problem.solution.split("\n")
  kept = steps if length is None else steps[max(0, len(steps) - length) :]
  return "\n".join((*kept, answer))


# Judging a sleeper's text.


class SleepVerdict(NamedTuple):
  """Verdict on a sleeper's text.

  Attributes:
    num_wanted: number of facts expected.
    num_true: expected facts that are stated.
    num_false: other facts that are stated: wrong numbers, or unknown things and people.
    num_equations: equations stated.
    num_false_equations: equations that are false when recomputed.
  """

  num_wanted: int
  num_true: int
  num_false: int
  num_equations: int
  num_false_equations: int

  @property
  def reward(self) -> float:
    """From 0 to 1; 1 if all expected facts are stated and no others."""
    return self.num_true / (self.num_wanted + self.num_false)


def facts_in(text: str) -> tuple[str, ...]:
  """Returns the distinct sentences "Ana has 19 pens." of a text and its lists, in order."""
  sentences = (sentence.strip().removeprefix("- ") for sentence in _SENTENCE.split(text))
  return tuple(dict.fromkeys(s for s in sentences if _FACT.fullmatch(s)))


def questions_of(notes: str) -> tuple[str, ...]:
  """Returns a question answered by each fact of a text, last fact first."""
  found = (_FACT.fullmatch(fact) for fact in reversed(facts_in(notes)))
  form = FORMS["train"]["now"][0]
  return tuple(form.format(p=fact[1], o=fact[3]) for fact in found if fact)


def judge_notes(facts: str, text: str) -> SleepVerdict:
  """Judges a sleeper's text; never raises.

  A repeated fact counts once. If a text states two numbers for a person, at most one is true, and
  at least one counts as false.

  Args:
    facts: expected facts, "Ana has 19 pens." in sentences; at least one.
    text: the sleeper's text.
  """
  wanted = set(facts_in(facts))
  stated = set(facts_in(text))
  found = equations.stated(text)
  return SleepVerdict(
    num_wanted=len(wanted),
    num_true=len(stated & wanted),
    num_false=len(stated - wanted),
    num_equations=len(found),
    num_false_equations=sum(not equation.is_true for equation in found),
  )


# Word problems.


@dataclasses.dataclass(frozen=True, kw_only=True)
class StatefulConfig:
  """Settings of contexts and questions.

  Attributes:
    predictability: exponent of Zipf's law over a context's questions: 0 is uniform, with 3 nearly
      all questions are the first one.
    num_questions: questions per context.
    steps: minimum and maximum number of events, drawn uniformly; None for mostly few, as in
      `word_problems`.
    distractor_rate: probability that an irrelevant sentence follows a sentence.
    kinds: kinds of contexts, with unchanged relative frequencies; empty for all of the split.
    max_operand: largest number that a sentence adds or subtracts.
    max_total: largest number of things that anyone has.
  """

  predictability: float = 0.0
  num_questions: int = 10
  steps: tuple[int, int] | None = None
  distractor_rate: float = stories.DISTRACTOR_RATE
  kinds: tuple[str, ...] = ()
  max_operand: int = 40
  max_total: int = 150

  def __post_init__(self):
    kinds = (*TEST_KINDS, *ASKED_KINDS)
    fields.check(
      self,
      predictability=fields.between(0, MAX_PREDICTABILITY, "0 asks all questions equally often"),
      num_questions=fields.between(1, 100, "10 is usual"),
      steps=fields.Rule(
        "(least, most) with 1 <= least <= most <= 100",
        lambda steps: steps is None or 1 <= steps[0] <= steps[1] <= 100,
        "write (6, 6) for six",
      ),
      distractor_rate=fields.between(0, 1, "0 leaves out all"),
      kinds=fields.Rule(
        f"kinds of {kinds}", {*kinds}.issuperset, "correct the spelling; () allows all"
      ),
      max_operand=fields.at_least(4, "40 is usual"),
      max_total=fields.Rule(
        f"at least 2 * max_operand = 2 * {self.max_operand}",
        lambda total: total >= 2 * self.max_operand,
        "raise it",
      ),
    )


def _speaks(form: str, verbs: Sequence[str]) -> bool:
  return any(verb in form.split() for verb in verbs)


def forms_of(split: str) -> dict[str, tuple[str, ...]]:
  """Returns the sentence forms of a split by meaning; "test" shares none with the others."""
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


def _compared(teller: Teller, events: int, *, is_branch: bool) -> tuple[str, tuple[Chain, ...]]:
  """Tells of people compared with the first one (star), or with any earlier one (branch).

  The last person of a branch is not compared with the first, so that no branch is a star.
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
  """Tells of two people who are compared first, and then buy, lose and give as in a trade."""
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
  """Returns the lines of both, with a common prefix only once."""
  num_shared = 0
  for one, other in zip(first, second, strict=False):
    if one != other:
      break
    num_shared += 1
  return (*first, *second[num_shared:])


class _Story(NamedTuple):
  """A generated context with its derivations."""

  kind: str
  text: str
  thing: str
  chains: tuple[Chain, ...]
  teller: Teller


# A question about a context: its kind, and indices of people.
Ask = tuple[str, tuple[int, ...]]


def _allowed(story: _Story) -> tuple[Ask, ...]:
  """Returns the questions that a context allows, most likely first."""
  if story.kind == "story":
    (chain,) = story.chains
    kinds = ("now", "goal", *(("share",) if chain.value >= 4 else ()), "price")
    return tuple((what, (0,)) for what in kinds)
  # The number of a person without events is stated, so asking for it needs no reasoning.
  people = [i for i, chain in enumerate(story.chains) if chain.lines]
  pairs = [(i, i + 1) for i in range(len(story.chains) - 1)]
  if len(story.chains) > 2:
    pairs.append((0, len(story.chains) - 1))
  return (
    *(("now", (i,)) for i in reversed(people)),
    *((what, pair) for pair in reversed(pairs) for what in ("both", "difference")),
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StatefulWordProblems:
  """Word problems with shared contexts, as a task.

  With c contexts, problem i of a split is question i // c about context i % c.
  """

  config: StatefulConfig = StatefulConfig()
  name: str = "stateful_word_problems"

  def contexts(self, split: str) -> LazyContexts:
    """Returns the contexts of "train", "heldout" or "test".

    Raises:
      ValueError: for another split, or if the split has none of `config.kinds`.
    """
    if split not in SIZES:
      raise splits.unknown_split(self.name, split, SPLITS)
    self._kinds(split)
    return LazyContexts(lambda index: self._context(split, index), SIZES[split])

  def questions(self, split: str, context: int) -> tuple[Problem, ...]:
    """Returns the questions about one context; their `context` texts are equal.

    A repeated question is redrawn several times, with other numbers or words; if the context allows
    little else, it may occur twice.
    """
    splits.check_index(self.name, split, context, len(self.contexts(split)))
    story = self._story(split, context)
    allowed = _allowed(story)
    weights = self.weights(len(allowed))
    texts: set[str] = set()
    found = []
    for number in range(self.config.num_questions):
      draws = Draws(self.name, split, context, "question", number)
      what, people = allowed[_weighted(draws, weights)]
      story.teller.draws = draws
      for _ in range(8):
        text, lines, answer = self._ask(story, what, people)
        if text not in texts:
          break
      texts.add(text)
      final = answers.number_text(answer)
      found.append(
        Problem(
          problem_id=f"{self.name}-{split}-{context}-{number}",
          prompt=f"{story.text} {text}",
          context=story.text,
          question=text,
          answer=final,
          num_steps=len(lines),
          solution="\n".join((*lines, f"{answers.ANSWER_MARK} {final}")),
        )
      )
    return tuple(found)

  def weights(self, count: int) -> tuple[int, ...]:
    """Returns relative frequencies of `count` questions, as whole numbers."""
    return tuple(
      max(1, round(1_000_000 / (rank + 1) ** self.config.predictability)) for rank in range(count)
    )

  def sleep_prompt(self, context: StatefulContext) -> str:
    """Returns the context, followed by the question about everyone's things.

    If its facts are unknown, the question is about the first thing that the context names.
    """
    things = [fact.rpartition(" ")[2].rstrip(".") for fact in facts_in(context.facts)]
    things += [word for word in re.findall(r"[a-z]+", context.text) if word in stories.OBJECTS]
    thing = things[0] if things else "things"
    return f"{context.text} {SLEEP_QUESTION.format(thing=thing)}"

  def facts(self, context: StatefulContext) -> str:
    """Returns each person's things at the end, in one sentence each: the oracle c'."""
    return context.facts

  def rewritten(self, text: str) -> str:
    """Returns the facts in a sleeper's text, which a waker reads; "" if there are none."""
    return " ".join(facts_in(text))

  def by_rule(self, context: StatefulContext) -> str:
    """Returns a rewrite by a fixed rule: the sentences that name the thing in question."""
    (thing,) = {fact.rpartition(" ")[2].rstrip(".") for fact in facts_in(context.facts)}
    sentences = _SENTENCE.split(context.text)
    return " ".join(s for s in sentences if re.search(rf"\b{thing}\b", s))

  def wake_prompt(self, question: str, context: str = "", rewritten: str = "") -> str:
    """Returns known text and question; without a rewrite, the prompt of a plain word problem."""
    return joined_prompt(question, context, rewritten)

  def sleep_verdict(self, context: StatefulContext, text: str) -> SleepVerdict:
    """Judges a sleeper's text about a context."""
    return judge_notes(context.facts, text)

  def num_problems(self, split: str) -> int:
    """Returns the number of problems in the split: contexts times questions."""
    return len(self.contexts(split)) * self.config.num_questions

  def problem(self, split: str, index: int) -> Problem:
    """Returns problem `index` of the split: context and question together, without sleep."""
    splits.check_index(self.name, split, index, self.num_problems(split))
    number, context = divmod(index, len(self.contexts(split)))
    return self.questions(split, context)[number]

  def verdict(self, problem: Problem, text: str) -> Verdict:
    """Returns reward 1 if the text has exactly one "#### <number>", and it is the answer."""
    return answers.number_verdict(problem, text)

  def _kinds(self, split: str) -> dict[str, int]:
    kinds = TEST_KINDS if split == "test" else {**TRAIN_KINDS, **ASKED_KINDS}
    usual = TEST_KINDS if split == "test" else TRAIN_KINDS
    found = {kind: share for kind, share in kinds.items() if kind in (self.config.kinds or usual)}
    if not found:
      raise ValueError(
        f"StatefulConfig.kinds: got {self.config.kinds}, expected at least one of {tuple(usual)},"
        f" the kinds of the split {split!r}; 'star' and 'mixed' occur in 'test'."
      )
    return found

  def _story(self, split: str, index: int) -> _Story:
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
    # The last name is reserved for distractors.
    num_compared = min(events, len(teller.names) - 2)
    if kind == "people":
      story = stories.people(teller, num_compared)
    elif kind == "trade":
      story = stories.trade(teller, max(2, events), is_long)
    elif kind == "story":
      story = stories.story(teller, events, is_long)
    else:
      text, chains = (
        _mixed(teller, max(2, events))
        if kind == "mixed"
        else _compared(teller, num_compared, is_branch=kind == "branch")
      )
      return _Story(kind, text, teller.things[0], chains, teller)
    return _Story(story.kind, story.text, story.thing, story.chains, teller)

  def _context(self, split: str, index: int) -> StatefulContext:
    story = self._story(split, index)
    facts = [f"{chain.person} has {chain.value} {story.thing}." for chain in story.chains]
    notes: list[str] = []
    known: tuple[str, ...] = ()
    for chain, fact in zip(story.chains, facts, strict=True):
      merged = _merged(known, chain.lines)
      notes += (*merged[len(known) :], f"- {fact}")
      known = merged
    return StatefulContext(
      context_id=f"{self.name}-{split}-{index}",
      text=story.text,
      kind=story.kind,
      num_steps=len(known),
      facts=" ".join(facts),
      notes="\n".join(notes),
    )

  def _ask(
    self, story: _Story, what: str, people: tuple[int, ...]
  ) -> tuple[str, tuple[str, ...], Fraction]:
    """Returns (question, solution lines, answer)."""
    teller, draws = story.teller, story.teller.draws
    chains = [story.chains[i] for i in people]
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
  """Returns a random index with the given integer weights."""
  left = draws.below(sum(weights))
  for index, weight in enumerate(weights):
    if left < weight:
      return index
    left -= weight
  raise AssertionError("a draw is below the sum of the weights")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sleeper:
  """Training task for sleepers: problems are sleep prompts, the reward is that of the notes.

  Attributes:
    stateful: source of the contexts.
    name: name of the task.
  """

  stateful: StatefulWordProblems = StatefulWordProblems()
  name: str = "stateful_sleeper"

  def num_problems(self, split: str) -> int:
    """Returns the number of contexts in the split."""
    return len(self.stateful.contexts(split))

  def problem(self, split: str, index: int) -> Problem:
    """Returns the sleep prompt of a context, with its facts as answer and its notes as solution."""
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
    """Rewards true facts and only those; well formed with any fact and no false equation."""
    found = judge_notes(problem.answer, text)
    return Verdict(
      reward=found.reward,
      correct=found.reward == 1.0,
      well_formed=found.num_true + found.num_false > 0 and not found.num_false_equations,
      answer=" ".join(facts_in(text)),
    )
