"""Small word problems with exact answers, worked solutions, and a long tail of lengths.

A context is a story about people and their things; several questions are asked about each.

  context   "Ana has 12 pens. Ana buys 7 more pens. Ana is 9 years old."
  question  "How many pens does Ana have now?"
  solution  "12+7=19\\n#### 19"

The number of reasoning steps depends on the problem, so lengths correlate within a group. The split
"heldout" tells the same kinds of stories in sentence forms that no other split uses (with the same
vocabulary) and with larger numbers. "pretrain" and "train" share forms and numbers, but no problem.
All templates are ours.
"""

from __future__ import annotations

import dataclasses
from fractions import Fraction

from seerjax import fields
from seerjax.tasks import answers, built_in, splits, stories
from seerjax.tasks.draws import Draws
from seerjax.tasks.stories import Chain, Context, Teller
from seerjax.types import Problem, Verdict

QUESTIONS_PER_CONTEXT = 3
HELDOUT_SCALE = 1.4  # Both limits of `WordProblemsConfig` are multiplied by this in "heldout".
# Probability that a held-out sentence has an unseen form; kept, because removing its draw would
# change the problems.
UNSEEN_RATE = 1.0
FRACTION_RATE = 0.2  # Probability that a sharing question may have a fractional answer.
# Relative frequencies of the kinds of contexts, in tenths; see `Context`.
STORY_WEIGHT, TRADE_WEIGHT, PEOPLE_WEIGHT = 5, 2, 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class WordProblemsConfig:
  """Sizes of numbers.

  Attributes:
    max_operand: largest number that a train sentence adds or subtracts.
    max_total: largest number of things that anyone has in train.
  """

  max_operand: int = 40
  max_total: int = 150

  def __post_init__(self):
    fields.check(
      self,
      max_operand=fields.at_least(4, "40 is usual"),
      max_total=fields.Rule(
        f"at least 2 * max_operand = 2 * {self.max_operand}",
        lambda total: total >= 2 * self.max_operand,
        "raise it",
      ),
    )


class _UnseenTeller(Teller):
  """Teller of "heldout"."""

  def say(self, what: str, **words: object) -> str:
    self.draws.chance(UNSEEN_RATE)
    return super().say(what, **words)


def _teller(config: WordProblemsConfig, split: str, draws: Draws) -> Teller:
  """Returns the teller of a split."""
  is_heldout = split == "heldout"
  scale = HELDOUT_SCALE if is_heldout else 1.0
  return (_UnseenTeller if is_heldout else Teller)(
    draws,
    forms=stories.HELDOUT_FORMS if is_heldout else stories.TRAIN_FORMS,
    max_operand=int(config.max_operand * scale),
    max_total=int(config.max_total * scale),
    max_boxed=int(9 * scale),
  )


def _joined(first: Chain, second: Chain, operator: str) -> Chain:
  """Returns both chains, extended by the step that adds or subtracts the second one's value."""
  # In a chain of comparisons one chain may contain the other: do not repeat its lines.
  if second.lines[: len(first.lines)] == first.lines:
    lines = second.lines
  elif first.lines[: len(second.lines)] == second.lines:
    lines = first.lines
  else:
    lines = (*first.lines, *second.lines)
  joined = Chain(person=first.person, value=first.value, lines=lines)
  return joined.then(operator, second.value)


def _question(
  teller: Teller, context: Context, number: int, order: Draws
) -> tuple[str, tuple[str, ...], Fraction]:
  """Returns (question, solution lines, answer) of question `number` about the context.

  `order` is the same for all questions about a context, which keeps them distinct.
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
    # Not the first person: their number is stated and needs no reasoning.
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
class WordProblems(splits.Drawn):
  """Word problems as a task.

  With c contexts, problem i of a split is question i // c about context i % c, so consecutive
  problems have different contexts; `questions` returns those of one context.
  """

  config: WordProblemsConfig = WordProblemsConfig()
  name: str = "word_problems"

  def num_contexts(self, split: str) -> int:
    """Returns the number of contexts in the split."""
    return self.num_problems(split) // QUESTIONS_PER_CONTEXT

  def drawn(self, split: str, index: int) -> Problem:
    """Returns problem `index` of the split."""
    number, context = divmod(index, self.num_contexts(split))
    return self._problem(split, context, number)

  def questions(self, split: str, context: int) -> tuple[Problem, ...]:
    """Returns the problems of one context; their `context` texts are equal."""
    splits.check_index(self.name, split, context, self.num_contexts(split))
    return tuple(self._problem(split, context, q) for q in range(QUESTIONS_PER_CONTEXT))

  def verdict(self, problem: Problem, text: str) -> Verdict:
    """Returns reward 1 if the text has exactly one "#### <number>", and it is the answer."""
    return answers.number_verdict(problem, text)

  def _problem(self, split: str, context_index: int, number: int) -> Problem:
    teller = _teller(self.config, split, Draws(self.name, split, context_index))
    events, is_long = teller.num_events()
    kind = teller.draws.below(STORY_WEIGHT + TRADE_WEIGHT + PEOPLE_WEIGHT)
    if kind < TRADE_WEIGHT:
      context = stories.trade(teller, min(events + 1, stories.MAX_STEPS), is_long)
    elif kind < TRADE_WEIGHT + PEOPLE_WEIGHT and events < stories.MAX_PEOPLE:
      context = stories.people(teller, events)
    else:
      context = stories.story(teller, events, is_long)
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


TASKS = {"word_problems": built_in.Source(WordProblems)}
