"""Stories about people and their things, with a derivation of each number.

  draws --Teller--> "Ana has 12 pens. Ana buys 7 more pens."   Ana: 12+7=19

A teller uses the sentence forms that it is given; tasks decide which forms, names and numbers
belong to which split. All forms are ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses

from seerjax.tasks.draws import Draws

NAMES = (
  "Ana", "Ben", "Dan", "Eva", "Ida", "Jon", "Kim", "Lea",
  "Leo", "Max", "Mia", "Nora", "Omar", "Sam", "Tom", "Zoe",
)  # fmt: skip
OBJECTS = ("apples", "books", "cards", "cups", "eggs", "keys", "nuts", "pens", "pins", "shells")
MAX_PEOPLE = 8
MAX_REPEATS = 5
# Events of a context: most are short, some are long, which gives the long tail of lengths that the
# rollout has to handle. A question may add a step.
MEAN_STEPS = 2.5
LONG_RATE, LONG_MEAN_STEPS = 0.06, 10.0
MAX_STEPS = 24
DISTRACTOR_RATE = 0.1  # Probability that an irrelevant sentence follows a sentence.
# Probability of a daily event, worth 2 to 5 steps; higher in long contexts, to keep prompts short.
REPEAT_RATE, LONG_REPEAT_RATE = 0.08, 0.4
SCALE_RATE = 0.12  # Probability that an event multiplies or halves.

# Sentence forms by meaning. p and q are people, o and x things, n and k numbers.
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
# The same vocabulary, in sentences that no other split has.
HELDOUT_FORMS: dict[str, tuple[str, ...]] = {
  "start": ("At first {p} starts with {n} {o}.",),
  "boxes": ("At first {p} has {k} boxes with {n} {o} in each.",),
  "gain": (
    "Later {p} finds {n} more {o}.",
    "Then {p} gets {n} {o} from a friend.",
  ),
  "loss": (
    "Later {p} sells {n} {o} to a friend.",
    "Then {p} gives a friend {n} of the {o}.",
  ),
  "gain_daily": ("Then for {k} days {p} gets {n} {o} each day.",),
  "loss_daily": ("Then each day for {k} days {p} loses {n} {o}.",),
  "times": ("Then {p} gets more and now has {k} times as many {o}.",),
  "half": ("Then {p} gives a friend half of the {o}.",),
  "transfer": ("Later {q} gets {n} of the {o} from {p}.",),
  "more": ("{p} gets {n} more {o} than {q}.",),
  "fewer": ("{p} gets {n} fewer {o} than {q}.",),
  "as_many": ("{p} has {k} times the {o} of {q}.",),
  "distractor": ("Then {p} also finds {n} {x}.",),
  "now": ("Now, how many {o} does {p} have?",),
  "goal": ("How many more {o} does {p} need if {p} wants {n}?",),
  "share": ("How many {o} does each get if {k} friends share the {o} of {p}?",),
  "price": ("How many coins does {p} get if {p} sells each of the {o} for {k} coins?",),
  "both": ("Now how many {o} do {p} and {q} have?",),
  "difference": ("In the end, how many more {o} does {p} have than {q}?",),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chain:
  """Derivation of one person's number.

  Attributes:
    person: name of the person.
    value: number of things in the end.
    lines: one equation per step, such as "12+7=19".
  """

  person: str
  value: int
  lines: tuple[str, ...] = ()

  def then(self, operator: str, operand: int) -> Chain:
    """Returns the chain with one more step; division must be exact."""
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
  """A story and the numbers at its end.

  Attributes:
    kind: "story" (one person), "trade" (two who give to each other), "people" (each compared with
      the previous one).
    text: the sentences.
    thing: the things that are counted.
    chains: derivations by person, in order of appearance, with all lines that they need.
  """

  kind: str
  text: str
  thing: str
  chains: tuple[Chain, ...]


class Teller:
  """Generates sentences in the given forms, and sometimes irrelevant ones."""

  def __init__(
    self,
    draws: Draws,
    *,
    forms: Mapping[str, Sequence[str]],
    max_operand: int,
    max_total: int,
    max_boxed: int = 9,
    names: Sequence[str] = NAMES,
    distractor_rate: float = DISTRACTOR_RATE,
  ):
    """Draws names and things.

    Args:
      draws: source of all random choices.
      forms: forms by meaning, as in `TRAIN_FORMS`.
      max_operand: largest number that a sentence adds or subtracts.
      max_total: largest number of things that anyone has.
      max_boxed: most things per box.
      names: names of people; the last one drawn is used only in distractors.
      distractor_rate: probability that an irrelevant sentence follows a sentence.
    """
    self.draws = draws
    self.forms = forms
    self.max_operand = max_operand
    self.max_total = max_total
    self.max_boxed = max_boxed
    self.distractor_rate = distractor_rate
    self.names = draws.sample(names, len(names))
    self.things = draws.sample(OBJECTS, len(OBJECTS))

  def say(self, what: str, **words: object) -> str:
    """Returns a sentence in a random form of `what`."""
    return self.draws.choice(self.forms[what]).format(o=self.things[0], **words)

  def ask(self, what: str, **words: object) -> str:
    """Returns a question in a random form of `what`."""
    return self.draws.choice(self.forms[what]).format(o=self.things[0], **words)

  def distract(self, person: str) -> list[str]:
    """Returns no sentence, or an irrelevant one."""
    if not self.draws.chance(self.distractor_rate):
      return []
    number = self.draws.between(2, self.max_operand)
    return [self.say("distractor", p=person, q=self.names[-1], x=self.things[1], n=number)]

  def num_events(self) -> tuple[int, bool]:
    """Returns (events, whether the context is long): 1 + geometric, at most `MAX_STEPS`."""
    is_long = self.draws.chance(LONG_RATE)
    mean = LONG_MEAN_STEPS if is_long else MEAN_STEPS
    events = 1
    while events < MAX_STEPS and self.draws.chance(1.0 - 1.0 / mean):
      events += 1
    return events, is_long

  def start(self, person: str, *, may_box: bool) -> tuple[str, Chain]:
    """Returns a sentence with a person's initial number, and the chain."""
    if may_box and self.draws.chance(0.15):
      boxes, each = self.draws.between(2, 4), self.draws.between(2, self.max_boxed)
      chain = Chain(person=person, value=boxes).then("*", each)
      return self.say("boxes", p=person, k=boxes, n=each), chain
    number = self.draws.between(4, self.max_operand)
    return self.say("start", p=person, n=number), Chain(person=person, value=number)

  def change(self, chain: Chain, most_steps: int, repeat_rate: float) -> tuple[str, Chain]:
    """Returns a sentence and the chain after it, longer by 1 to `most_steps` steps."""
    person, value = chain.person, chain.value
    if self.draws.chance(SCALE_RATE):
      times = self.draws.between(2, 3)
      if value * times <= self.max_total and self.draws.chance(0.5):
        return self.say("times", p=person, k=times), chain.then("*", times)
      if value >= 4 and value % 2 == 0:
        return self.say("half", p=person), chain.then("/", 2)
    # Larger values are more likely to decrease, which keeps them inside 1..max_total.
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


def story(teller: Teller, events: int, is_long: bool) -> Context:
  """Tells of events in the life of one person."""
  repeat_rate = LONG_REPEAT_RATE if is_long else REPEAT_RATE
  person = teller.names[0]
  sentence, chain = teller.start(person, may_box=True)
  sentences = [sentence, *teller.distract(person)]
  while len(chain.lines) < events:
    sentence, chain = teller.change(chain, events - len(chain.lines), repeat_rate)
    sentences += [sentence, *teller.distract(person)]
  return Context(kind="story", text=" ".join(sentences), thing=teller.things[0], chains=(chain,))


def trade(teller: Teller, events: int, is_long: bool) -> Context:
  """Tells of two people who buy, lose and give; each takes part in about half of the events."""
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


def people(teller: Teller, events: int) -> Context:
  """Tells of several people, each compared with the previous one."""
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
