"""Small word problems with exact answers, worked solutions and a long tail of lengths.

A context tells of people and the things they have; several questions are asked about one context.

  context   "Ana has 12 pens. Ana buys 7 more pens. Ana is 9 years old."
  question  "How many pens does Ana have now?"
  solution  "12+7=19\\n#### 19"

The number of reasoning steps belongs to the problem, so lengths correlate within a group. The split
"heldout" tells the same things in sentence forms that no other split uses (made of words they do
use) and with larger numbers. "pretrain" and "train" share forms and numbers, not problems. All
templates are ours.
"""

from __future__ import annotations

import dataclasses
from fractions import Fraction

from seerjax.tasks import answers, splits
from seerjax.tasks.draws import Draws
from seerjax.types import Problem, Verdict

NAMES = (
  "Ana", "Ben", "Dan", "Eva", "Ida", "Jon", "Kim", "Lea",
  "Leo", "Max", "Mia", "Nora", "Omar", "Sam", "Tom", "Zoe",
)  # fmt: skip
OBJECTS = ("apples", "books", "cards", "cups", "eggs", "keys", "nuts", "pens", "pins", "shells")
SPLITS = ("train", "heldout", "pretrain")
QUESTIONS_PER_CONTEXT = 3
MAX_PEOPLE = 8
MAX_REPEATS = 5
# Problems of each split: more than any run draws, and few enough to be named by an index.
SIZES = {"train": 300_000, "heldout": 30_000, "pretrain": 30_000_000}
HELDOUT_SCALE = 1.4  # Both limits of `WordProblemsConfig` are multiplied by this in "heldout".
# That a held-out sentence has an unseen form: always, but the draw belongs to what a problem is.
UNSEEN_RATE = 1.0
# Events of a context: most are short, some are long, which makes the tail of lengths that the
# rollout has to live with. A question may add a step.
MEAN_STEPS = 2.5
LONG_RATE, LONG_MEAN_STEPS = 0.06, 10.0
MAX_STEPS = 24
DISTRACTOR_RATE = 0.1  # That an irrelevant sentence follows a sentence.
# That an event is a daily one, worth 2 to 5 steps; more in long contexts: their prompts stay short.
REPEAT_RATE, LONG_REPEAT_RATE = 0.08, 0.4
SCALE_RATE = 0.12  # That an event multiplies or halves.
FRACTION_RATE = 0.2  # That a sharing question may have an answer that is no integer.
# Of ten contexts, how many are of each kind; see `Context`.
STORY_WEIGHT, TRADE_WEIGHT, PEOPLE_WEIGHT = 5, 2, 3

# What sentences tell, in which forms. p and q are people, o and x things, n and k numbers.
TRAIN_FORMS: dict[str, tuple[str, ...]] = {
  "start": (
    "{p} has {n} {o}.",
    "{p} starts with {n} {o}.",
    "At first {p} has {n} {o}.",
    "{p} has a box with {n} {o}.",
    "{p} has {n} {o} at first.",
    "{p} starts with a box of {n} {o}.",
  ),
  "boxes": (
    "{p} has {k} boxes with {n} {o} in each box.",
    "{p} has {k} boxes of {n} {o} each.",
    "At first {p} has {k} boxes of {n} {o}.",
    "{p} has at first {k} boxes with {n} {o} each.",
    "{p} starts with {k} boxes of {n} {o}.",
  ),
  "gain": (
    "{p} buys {n} {o}.",
    "{p} buys {n} more {o}.",
    "{p} finds {n} more {o}.",
    "Then {p} finds {n} {o}.",
    "Later {p} gets {n} {o}.",
    "{p} gets {n} {o} from a friend.",
    "A friend gives {p} {n} {o}.",
    "Then a friend gives {n} more {o} to {p}.",
    "Then {p} buys {n} {o}.",
    "{p} gets {n} more {o}.",
    "Later a friend gives {n} {o} to {p}.",
  ),
  "loss": (
    "{p} sells {n} {o}.",
    "{p} loses {n} {o}.",
    "{p} gives {n} {o} to a friend.",
    "{p} gives a friend {n} {o}.",
    "Then {p} sells {n} of the {o}.",
    "Later {p} loses {n} of the {o}.",
    "A friend takes {n} {o} from {p}.",
    "Then a friend takes {n} of the {o} from {p}.",
    "Then {p} loses {n} {o}.",
    "{p} gives {n} of the {o} to a friend.",
    "Later a friend takes {n} {o} from {p}.",
  ),
  "gain_daily": (
    "Each day for {k} days {p} finds {n} {o}.",
    "For {k} days {p} buys {n} {o} each day.",
    "{p} gets {n} more {o} each day for {k} days.",
    "{p} finds {n} {o} each day for {k} days.",
  ),
  "loss_daily": (
    "Each day for {k} days {p} sells {n} {o}.",
    "For {k} days {p} loses {n} {o} each day.",
    "{p} gives {n} {o} to a friend each day for {k} days.",
    "{p} sells {n} {o} each day for {k} days.",
  ),
  "times": (
    "Now {p} has {k} times as many {o}.",
    "Then {p} has {k} times as many {o} as before.",
    "{p} buys more and has {k} times as many {o} as before.",
    "Later {p} has {k} times as many {o} as before.",
  ),
  "half": (
    "{p} sells half of the {o}.",
    "{p} gives half of the {o} to a friend.",
    "Then {p} loses half of the {o}.",
    "A friend takes half of the {o} from {p}.",
    "Later {p} sells half of the {o}.",
  ),
  "transfer": (
    "{p} gives {n} {o} to {q}.",
    "{p} gives {q} {n} {o}.",
    "{q} gets {n} {o} from {p}.",
    "Then {q} takes {n} {o} from {p}.",
    "Then {p} gives {n} {o} to {q}.",
  ),
  "more": (
    "{p} has {n} more {o} than {q}.",
    "Then {p} gets {n} more {o} than {q} has.",
    "At first {p} has {n} more {o} than {q}.",
  ),
  "fewer": (
    "{p} has {n} fewer {o} than {q}.",
    "Then {p} gets {n} fewer {o} than {q} has.",
    "At first {p} has {n} fewer {o} than {q}.",
  ),
  "as_many": (
    "{p} has {k} times as many {o} as {q}.",
    "Then {p} gets {k} times the {o} of {q}.",
    "At first {p} has {k} times as many {o} as {q}.",
  ),
  "distractor": (
    "{p} is {n} years old.",
    "{p} also has {n} {x}.",
    "{p} also buys {n} {x}.",
    "A friend of {p} has {n} {x}.",
    "{q} finds {n} {x}.",
    "{p} now also has {n} {x}.",
    "{q} has {n} {x} in a box.",
  ),
  "now": (
    "How many {o} does {p} have now?",
    "How many {o} does {p} have?",
    "In the end, how many {o} does {p} have?",
    "Now how many {o} are left for {p}?",
    "How many {o} does {p} have in the end?",
  ),
  "goal": (
    "{p} wants {n} {o}. How many more {o} does {p} need?",
    "How many more {o} does {p} need to have {n}?",
    "If {p} wants {n} {o}, how many more does {p} need?",
  ),
  "share": (
    "{k} friends share the {o} of {p}. How many {o} does each friend get?",
    "If {k} friends share the {o} of {p}, how many does each get?",
    "How many does each friend get if {k} friends share the {o} of {p}?",
  ),
  "price": (
    "{p} sells each of the {o} for {k} coins. How many coins does {p} get?",
    "If {p} sells all the {o} for {k} coins each, how many coins does {p} get?",
  ),
  "both": (
    "How many {o} do {p} and {q} have together?",
    "How many {o} do {p} and {q} have now in all?",
    "Together, how many {o} do {p} and {q} have now?",
    "In all, how many {o} do {p} and {q} have?",
  ),
  "difference": (
    "How many more {o} does {p} have than {q}?",
    "Now how many more {o} than {q} does {p} have?",
  ),
}
# Made of the same words, in sentences that no other split has.
HELDOUT_FORMS: dict[str, tuple[str, ...]] = {
  "start": (
    "At first {p} starts with {n} {o}.",
  ),
  "boxes": (
    "At first {p} has {k} boxes with {n} {o} in each.",
  ),
  "gain": (
    "Later {p} finds {n} more {o}.",
    "Then {p} gets {n} {o} from a friend.",
  ),
  "loss": (
    "Later {p} sells {n} {o} to a friend.",
    "Then {p} gives a friend {n} of the {o}.",
  ),
  "gain_daily": (
    "Then for {k} days {p} gets {n} {o} each day.",
  ),
  "loss_daily": (
    "Then each day for {k} days {p} loses {n} {o}.",
  ),
  "times": (
    "Then {p} gets more and now has {k} times as many {o}.",
  ),
  "half": (
    "Then {p} gives a friend half of the {o}.",
  ),
  "transfer": (
    "Later {q} gets {n} of the {o} from {p}.",
  ),
  "more": (
    "{p} gets {n} more {o} than {q}.",
  ),
  "fewer": (
    "{p} gets {n} fewer {o} than {q}.",
  ),
  "as_many": (
    "{p} has {k} times the {o} of {q}.",
  ),
  "distractor": (
    "Then {p} also finds {n} {x}.",
  ),
  "now": (
    "Now, how many {o} does {p} have?",
  ),
  "goal": (
    "How many more {o} does {p} need if {p} wants {n}?",
  ),
  "share": (
    "How many {o} does each get if {k} friends share the {o} of {p}?",
  ),
  "price": (
    "How many coins does {p} get if {p} sells each of the {o} for {k} coins?",
  ),
  "both": (
    "Now how many {o} do {p} and {q} have?",
  ),
  "difference": (
    "In the end, how many more {o} does {p} have than {q}?",
  ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class WordProblemsConfig:
  """How large the numbers are.

  Attributes:
    max_operand: largest number that a train sentence adds or takes away.
    max_total: largest number of things anyone has in train.
  """

  max_operand: int = 40
  max_total: int = 150

  def __post_init__(self):
    if self.max_operand < 4:
      raise ValueError(
        f"WordProblemsConfig.max_operand: got {self.max_operand}, expected at least 4; 40 is usual."
      )
    if self.max_total < 2 * self.max_operand:
      raise ValueError(
        f"WordProblemsConfig.max_total: got {self.max_total}, expected at least 2 * max_operand ="
        f" {2 * self.max_operand}; raise it."
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chain:
  """How one person's number came about.

  Attributes:
    person: whose.
    value: things the person has in the end.
    lines: one equation a step, such as "12+7=19".
  """

  person: str
  value: int
  lines: tuple[str, ...] = ()

  def then(self, operator: str, operand: int) -> Chain:
    """Returns the chain one step longer; division must leave no rest."""
    value = {
      "+": self.value + operand,
      "-": self.value - operand,
      "*": self.value * operand,
      "/": self.value // operand,
    }[operator]
    line = f"{self.value}{operator}{operand}={value}"
    return Chain(person=self.person, value=value, lines=(*self.lines, line))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Context:
  """What was told, and what is true after it.

  Attributes:
    kind: "story" (one person), "trade" (two who give to each other), "people" (each compared with
      the one before).
    text: the sentences.
    thing: what is counted.
    chains: by person, in order of appearance; all lines that the person's number needs.
  """

  kind: str
  text: str
  thing: str
  chains: tuple[Chain, ...]


class _Teller:
  """Says things in the forms of a split, and sometimes something that does not matter."""

  def __init__(self, config: WordProblemsConfig, split: str, draws: Draws):
    scale = HELDOUT_SCALE if split == "heldout" else 1.0
    self.split = split
    self.draws = draws
    self.max_operand = int(config.max_operand * scale)
    self.max_total = int(config.max_total * scale)
    self.max_boxed = int(9 * scale)
    self.names = draws.sample(NAMES, len(NAMES))
    self.things = draws.sample(OBJECTS, len(OBJECTS))

  def say(self, what: str, **words: object) -> str:
    return self.draws.choice(self._forms(what)).format(o=self.things[0], **words)

  def ask(self, what: str, **words: object) -> str:
    forms = HELDOUT_FORMS[what] if self.split == "heldout" else self._forms(what)
    return self.draws.choice(forms).format(o=self.things[0], **words)

  def _forms(self, what: str) -> tuple[str, ...]:
    if self.split == "heldout" and self.draws.chance(UNSEEN_RATE):
      return HELDOUT_FORMS[what]
    return TRAIN_FORMS[what]

  def distract(self, person: str) -> list[str]:
    if not self.draws.chance(DISTRACTOR_RATE):
      return []
    number = self.draws.between(2, self.max_operand)
    return [self.say("distractor", p=person, q=self.names[-1], x=self.things[1], n=number)]

  def num_events(self) -> tuple[int, bool]:
    """Returns (events, whether the context is a long one): 1 + geometric, cut at `MAX_STEPS`."""
    is_long = self.draws.chance(LONG_RATE)
    mean = LONG_MEAN_STEPS if is_long else MEAN_STEPS
    events = 1
    while events < MAX_STEPS and self.draws.chance(1.0 - 1.0 / mean):
      events += 1
    return events, is_long

  def start(self, person: str, *, may_box: bool) -> tuple[str, Chain]:
    if may_box and self.draws.chance(0.15):
      boxes, each = self.draws.between(2, 4), self.draws.between(2, self.max_boxed)
      chain = Chain(person=person, value=boxes).then("*", each)
      return self.say("boxes", p=person, k=boxes, n=each), chain
    number = self.draws.between(4, self.max_operand)
    return self.say("start", p=person, n=number), Chain(person=person, value=number)

  def change(self, chain: Chain, most_steps: int, repeat_rate: float) -> tuple[str, Chain]:
    """Returns a sentence and the chain after it, 1 to `most_steps` steps longer."""
    person, value = chain.person, chain.value
    if self.draws.chance(SCALE_RATE):
      times = self.draws.between(2, 3)
      if value * times <= self.max_total and self.draws.chance(0.5):
        return self.say("times", p=person, k=times), chain.then("*", times)
      if value >= 4 and value % 2 == 0:
        return self.say("half", p=person), chain.then("/", 2)
    # The fuller a hand, the likelier it gives: values stay inside 1..max_total.
    is_gain = value < 6 or self.draws.below(self.max_total) >= value
    room = self.max_total - value if is_gain else value - 1
    repeats = 1
    if most_steps >= 2 and self.draws.chance(repeat_rate):
      repeats = min(self.draws.between(2, min(MAX_REPEATS, most_steps)), max(1, room // 2))
    if repeats == 1:
      number = self.draws.between(min(2, room), min(self.max_operand, room))
      sentence = self.say("gain" if is_gain else "loss", p=person, n=number)
    else:
      number = self.draws.between(2, min(9, room // repeats))
      sentence = self.say("gain_daily" if is_gain else "loss_daily", p=person, n=number, k=repeats)
    for _ in range(repeats):
      chain = chain.then("+" if is_gain else "-", number)
    return sentence, chain


def _story(teller: _Teller, events: int, is_long: bool) -> Context:
  """One person, one thing after another."""
  repeat_rate = LONG_REPEAT_RATE if is_long else REPEAT_RATE
  person = teller.names[0]
  sentence, chain = teller.start(person, may_box=True)
  sentences = [sentence, *teller.distract(person)]
  while len(chain.lines) < events:
    sentence, chain = teller.change(chain, events - len(chain.lines), repeat_rate)
    sentences += [sentence, *teller.distract(person)]
  return Context(kind="story", text=" ".join(sentences), thing=teller.things[0], chains=(chain,))


def _trade(teller: _Teller, events: int, is_long: bool) -> Context:
  """Two people who buy, lose and give to each other; each knows of about half of the events."""
  repeat_rate = LONG_REPEAT_RATE if is_long else REPEAT_RATE
  sentences, chains = [], []
  for person in teller.names[:2]:
    sentence, chain = teller.start(person, may_box=False)
    sentences.append(sentence)
    chains.append(chain)
  num_events = 0
  while num_events < events:
    actor = teller.draws.below(2)
    giver, taker = chains[actor], chains[1 - actor]
    room = min(giver.value - 1, teller.max_total - taker.value, teller.max_operand)
    if room >= 2 and teller.draws.chance(0.4):
      number = teller.draws.between(2, room)
      sentences.append(teller.say("transfer", p=giver.person, q=taker.person, n=number))
      chains[actor], chains[1 - actor] = giver.then("-", number), taker.then("+", number)
      num_events += 1
    else:
      sentence, chains[actor] = teller.change(giver, events - num_events, repeat_rate)
      sentences.append(sentence)
      num_events += len(chains[actor].lines) - len(giver.lines)
    sentences += teller.distract(giver.person)
  return Context(
    kind="trade", text=" ".join(sentences), thing=teller.things[0], chains=tuple(chains)
  )


def _people(teller: _Teller, events: int) -> Context:
  """A row of people, each compared with the one before."""
  sentence, chain = teller.start(teller.names[0], may_box=False)
  sentences, chains = [sentence], [chain]
  for person in teller.names[1 : events + 1]:
    before = chains[-1]
    words = dict(p=person, q=before.person)
    longer = dataclasses.replace(before, person=person)
    times = teller.draws.between(2, 3)
    if teller.draws.chance(0.15) and before.value * times <= teller.max_total:
      sentence, chain = teller.say("as_many", k=times, **words), longer.then("*", times)
    elif before.value < 6 or teller.draws.below(teller.max_total) >= before.value:
      room = min(teller.max_operand, teller.max_total - before.value)
      number = teller.draws.between(min(2, room), room)
      sentence, chain = teller.say("more", n=number, **words), longer.then("+", number)
    else:
      number = teller.draws.between(2, min(teller.max_operand, before.value - 1))
      sentence, chain = teller.say("fewer", n=number, **words), longer.then("-", number)
    sentences += [sentence, *teller.distract(person)]
    chains.append(chain)
  return Context(
    kind="people", text=" ".join(sentences), thing=teller.things[0], chains=tuple(chains)
  )


def _joined(first: Chain, second: Chain, operator: str) -> Chain:
  """Returns both chains and the step that adds the second to the first or takes it away."""
  # In a row of people one chain holds the other's lines already: say no line twice.
  if second.lines[: len(first.lines)] == first.lines:
    lines = second.lines
  elif first.lines[: len(second.lines)] == second.lines:
    lines = first.lines
  else:
    lines = (*first.lines, *second.lines)
  joined = Chain(person=first.person, value=first.value, lines=lines)
  return joined.then(operator, second.value)


def _question(
  teller: _Teller, context: Context, number: int, order: Draws
) -> tuple[str, tuple[str, ...], Fraction]:
  """Returns (question, solution lines, answer) of question `number` of the context.

  `order` is drawn alike for all questions of a context, which keeps them different.
  """
  draws = teller.draws
  if context.kind == "story":
    chain = context.chains[0]
    extras = ["goal", "price"] + ["share"] * (chain.value >= 4)
    what = ("now", *order.sample(extras, 2))[number]
    words: dict[str, object] = dict(p=chain.person)
    if what == "goal":
      wanted = chain.value + draws.between(2, teller.max_operand)
      line = f"{wanted}-{chain.value}={wanted - chain.value}"
      question = teller.ask("goal", n=wanted, **words)
      return question, (*chain.lines, line), Fraction(wanted - chain.value)
    if what == "price":
      price = draws.between(2, 4) if chain.value <= 50 else 2
      longer = chain.then("*", price)
      return teller.ask("price", k=price, **words), longer.lines, Fraction(longer.value)
    if what == "share":
      friends = [k for k in (2, 3, 4, 5) if chain.value % k == 0]
      if draws.chance(FRACTION_RATE) or not friends:
        friends = [2, 4]
      count = draws.choice(friends)
      answer = Fraction(chain.value, count)
      line = f"{chain.value}/{count}={answers.number_text(answer)}"
      return teller.ask("share", k=count, **words), (*chain.lines, line), answer
    return teller.ask("now", **words), chain.lines, Fraction(chain.value)
  joins = order.sample((("both", "+"), ("difference", "-")), 2)
  if context.kind == "trade":
    first, second = context.chains
    if number < 2 and context.chains[number].lines:
      chain = context.chains[number]
      return teller.ask("now", p=chain.person), chain.lines, Fraction(chain.value)
  else:
    # A person from the second on: the first one's number is told, not reasoned.
    if number == 0 or (number == 2 and len(context.chains) > 2):
      chain = context.chains[-1] if number == 0 else draws.choice(context.chains[1:-1])
      return teller.ask("now", p=chain.person), chain.lines, Fraction(chain.value)
    first, second = draws.sample(context.chains, 2)
  if first.value < second.value:
    first, second = second, first
  words = dict(p=first.person, q=second.person)
  what, operator = joins[number == 2]
  joined = _joined(first, second, operator)
  return teller.ask(what, **words), joined.lines, Fraction(joined.value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WordProblems:
  """The task. Problem i of a split asks question i // c about context i % c, of c contexts.

  So consecutive problems have different contexts, and `questions` gives those of one context.
  """

  config: WordProblemsConfig = WordProblemsConfig()
  name: str = "word_problems"

  def num_contexts(self, split: str) -> int:
    """Returns how many contexts the split has."""
    if split not in SIZES:
      raise splits.unknown_split(self.name, split, SPLITS)
    return SIZES[split] // QUESTIONS_PER_CONTEXT

  def num_problems(self, split: str) -> int:
    """Returns how many problems the split has: contexts times questions."""
    return self.num_contexts(split) * QUESTIONS_PER_CONTEXT

  def problem(self, split: str, index: int) -> Problem:
    """Returns problem `index` of the split."""
    splits.check_index(self.name, split, index, self.num_problems(split))
    number, context = divmod(index, self.num_contexts(split))
    return self._problem(split, context, number)

  def questions(self, split: str, context: int) -> tuple[Problem, ...]:
    """Returns the problems of one context; their `context` texts are equal."""
    splits.check_index(self.name, split, context, self.num_contexts(split))
    return tuple(self._problem(split, context, q) for q in range(QUESTIONS_PER_CONTEXT))

  def verdict(self, problem: Problem, text: str) -> Verdict:
    """Reward 1 if the text ends with exactly one "#### <number>" and it is the answer, else 0."""
    return answers.number_verdict(problem, text)

  def _problem(self, split: str, context_index: int, number: int) -> Problem:
    teller = _Teller(self.config, split, Draws(self.name, split, context_index))
    events, is_long = teller.num_events()
    kind = teller.draws.below(STORY_WEIGHT + TRADE_WEIGHT + PEOPLE_WEIGHT)
    if kind < TRADE_WEIGHT:
      context = _trade(teller, min(events + 1, MAX_STEPS), is_long)
    elif kind < TRADE_WEIGHT + PEOPLE_WEIGHT and events < MAX_PEOPLE:
      context = _people(teller, events)
    else:
      context = _story(teller, events, is_long)
    teller.draws = Draws(self.name, split, context_index, number)
    order = Draws(self.name, split, context_index, "order")
    question, lines, answer = _question(teller, context, number, order)
    final = answers.number_text(answer)
    return Problem(
      problem_id=f"{self.name}-{split}-{context_index}-{number}",
      prompt=f"{context.text} {question}",
      context=context.text,
      question=question,
      answer=final,
      num_steps=len(lines),
      solution="\n".join((*lines, f"{answers.ANSWER_MARK} {final}")),
    )
