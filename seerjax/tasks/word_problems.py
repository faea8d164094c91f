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

# What is said, in which forms. p and q are people, o and x things, n and k numbers.
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
  """How hard the problems are.

  Attributes:
    max_operand: largest number that a train sentence adds or takes away.
    max_total: largest number of things anyone has in train.
    heldout_scale: both limits are multiplied by this in "heldout".
    unseen_rate: probability that a held-out sentence has an unseen form; the question always has.
    mean_steps: mean number of events of an ordinary context.
    long_rate: probability of a long context.
    long_mean_steps: mean number of events of a long context.
    max_steps: most events of a context; a question may add a step.
    distractor_rate: probability that an irrelevant sentence follows a sentence.
    repeat_rate: probability that an event is a daily one, worth 2 to 5 steps.
    long_repeat_rate: the same in long contexts, which keeps their prompts short.
    scale_rate: probability that an event multiplies or halves.
    fraction_rate: probability that a sharing question may have an answer that is no integer.
    story_weight, trade_weight, people_weight: integers, how often each kind of context comes.
    num_train, num_heldout, num_pretrain: problems of each split.
  """

  max_operand: int = 40
  max_total: int = 150
  heldout_scale: float = 1.4
  unseen_rate: float = 1.0
  mean_steps: float = 2.5
  long_rate: float = 0.06
  long_mean_steps: float = 10.0
  max_steps: int = 24
  distractor_rate: float = 0.1
  repeat_rate: float = 0.08
  long_repeat_rate: float = 0.4
  scale_rate: float = 0.12
  fraction_rate: float = 0.2
  story_weight: int = 5
  trade_weight: int = 2
  people_weight: int = 3
  num_train: int = 300_000
  num_heldout: int = 30_000
  num_pretrain: int = 30_000_000

  def __post_init__(self):
    def refuse(field: str, got: object, expected: str, fix: str):
      raise ValueError(f"WordProblemsConfig.{field}: got {got}, expected {expected}; {fix}.")

    if self.max_operand < 4:
      refuse("max_operand", self.max_operand, "at least 4", "40 is usual")
    if self.max_total < 2 * self.max_operand:
      refuse(
        "max_total",
        self.max_total,
        f"at least 2 * max_operand = {2 * self.max_operand}",
        "raise it",
      )
    if not 1.0 <= self.heldout_scale <= 10.0:
      refuse("heldout_scale", self.heldout_scale, "1 <= heldout_scale <= 10", "1.4 is usual")
    if not 1 <= self.max_steps <= 100:
      refuse("max_steps", self.max_steps, "1 <= max_steps <= 100", "24 is usual")
    for field in ("mean_steps", "long_mean_steps"):
      value = {"mean_steps": self.mean_steps, "long_mean_steps": self.long_mean_steps}[field]
      if not 1.0 <= value <= self.max_steps:
        refuse(field, value, f"1 <= {field} <= max_steps = {self.max_steps}", "lower it")
    for field, value in dataclasses.asdict(self).items():
      if field.endswith("_rate") and not 0.0 <= value <= 1.0:
        refuse(field, value, "a probability between 0 and 1", "0 switches it off")
      if field.endswith("_weight") and value < 0:
        refuse(field, value, "a weight >= 0", "0 switches that kind off")
      if field.startswith("num_") and value < QUESTIONS_PER_CONTEXT:
        refuse(field, value, f"at least {QUESTIONS_PER_CONTEXT} problems", "raise it")
    if self.story_weight + self.trade_weight + self.people_weight < 1:
      refuse("story_weight", self.story_weight, "one weight above 0", "set story_weight=1")


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
    scale = config.heldout_scale if split == "heldout" else 1.0
    self.config = config
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
    if self.split == "heldout" and self.draws.chance(self.config.unseen_rate):
      return HELDOUT_FORMS[what]
    return TRAIN_FORMS[what]

  def distract(self, person: str) -> list[str]:
    if not self.draws.chance(self.config.distractor_rate):
      return []
    number = self.draws.between(2, self.max_operand)
    return [self.say("distractor", p=person, q=self.names[-1], x=self.things[1], n=number)]

  def num_events(self) -> tuple[int, bool]:
    """Returns (events, whether the context is a long one): 1 + geometric, cut at max_steps."""
    is_long = self.draws.chance(self.config.long_rate)
    mean = self.config.long_mean_steps if is_long else self.config.mean_steps
    events = 1
    while events < self.config.max_steps and self.draws.chance(1.0 - 1.0 / mean):
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
    if self.draws.chance(self.config.scale_rate):
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
  repeat_rate = teller.config.long_repeat_rate if is_long else teller.config.repeat_rate
  person = teller.names[0]
  sentence, chain = teller.start(person, may_box=True)
  sentences = [sentence, *teller.distract(person)]
  while len(chain.lines) < events:
    sentence, chain = teller.change(chain, events - len(chain.lines), repeat_rate)
    sentences += [sentence, *teller.distract(person)]
  return Context(kind="story", text=" ".join(sentences), thing=teller.things[0], chains=(chain,))


def _trade(teller: _Teller, events: int, is_long: bool) -> Context:
  """Two people who buy, lose and give to each other; each knows of about half of the events."""
  repeat_rate = teller.config.long_repeat_rate if is_long else teller.config.repeat_rate
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
      if draws.chance(teller.config.fraction_rate) or not friends:
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
    sizes = dict(
      train=self.config.num_train,
      heldout=self.config.num_heldout,
      pretrain=self.config.num_pretrain,
    )
    if split not in sizes:
      raise splits.unknown_split(self.name, split, SPLITS)
    return sizes[split] // QUESTIONS_PER_CONTEXT

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
    config = self.config
    teller = _Teller(config, split, Draws(self.name, split, context_index))
    events, is_long = teller.num_events()
    kind = teller.draws.below(config.story_weight + config.trade_weight + config.people_weight)
    if kind < config.trade_weight:
      context = _trade(teller, min(events + 1, config.max_steps), is_long)
    elif kind < config.trade_weight + config.people_weight and events < MAX_PEOPLE:
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
