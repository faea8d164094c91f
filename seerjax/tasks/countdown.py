"""Countdown: reach a target with some numbers and + - * /, each number at most once.

  prompt    "Use 3, 7 and 25 to make 46. Each number at most once."
  solution  "25-7=18, 18+3=21\\n25+3=28, 28-7=21\\n3*7=21, 21+25=46\\n#### 3*7+25"

A solution is found by trying; how many tries it takes says little about the problem, so lengths
correlate little within a group (in `word_problems` they correlate much).
"""

from __future__ import annotations

import ast
import dataclasses
from fractions import Fraction
import re

from seerjax.tasks import answers, splits
from seerjax.tasks.draws import Draws
from seerjax.types import Problem, Verdict

SPLITS = ("train", "heldout", "pretrain")
MAX_EXPRESSION = 128  # Characters; the parser never sees more.
_EXPRESSION = re.compile(r"[0-9+\-*/() ]+", re.ASCII)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CountdownConfig:
  """How hard the problems are.

  Attributes:
    min_numbers, max_numbers: how many numbers are given.
    max_number: largest given number in train; in "heldout" half as large again.
    max_target: largest target and largest intermediate result.
    max_attempts: most failed tries that a reference solution shows.
    num_train, num_heldout, num_pretrain: problems of each split.
  """

  min_numbers: int = 3
  max_numbers: int = 4
  max_number: int = 25
  max_target: int = 100
  max_attempts: int = 5
  num_train: int = 300_000
  num_heldout: int = 30_000
  num_pretrain: int = 30_000_000

  def __post_init__(self):
    def refuse(field: str, got: object, expected: str, fix: str):
      raise ValueError(f"CountdownConfig.{field}: got {got}, expected {expected}; {fix}.")

    if not 2 <= self.min_numbers <= self.max_numbers:
      refuse("min_numbers", self.min_numbers, "2 <= min_numbers <= max_numbers", "3 is usual")
    if self.max_numbers > 6:
      refuse("max_numbers", self.max_numbers, "at most 6", "4 is usual")
    if self.max_number < 4:
      refuse("max_number", self.max_number, "at least 4", "25 is usual")
    if self.max_target < 2 * self.max_number:
      refuse(
        "max_target",
        self.max_target,
        f"at least 2 * max_number = {2 * self.max_number}",
        "raise it",
      )
    if self.max_attempts < 0:
      refuse("max_attempts", self.max_attempts, "at least 0", "0 shows the solution alone")
    for field, value in dataclasses.asdict(self).items():
      if field.startswith("num_") and value < 1:
        refuse(field, value, "at least 1 problem", "raise it")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Path:
  """One way through the numbers: left to right, always with what is there so far.

  Attributes:
    value: the last result.
    lines: "3*7=21" and so on.
    expression: the same as one expression.
    is_sum: whether the outermost operation is + or -, which needs brackets under * or /.
  """

  value: int
  lines: tuple[str, ...]
  expression: str
  is_sum: bool


def _walk(numbers: list[int], draws: Draws, max_value: int) -> Path:
  """Returns a random path through all the numbers; every value on it is in 1..max_value."""
  order = draws.sample(numbers, len(numbers))
  path = Path(value=order[0], lines=(), expression=str(order[0]), is_sum=False)
  for number in order[1:]:
    results = {"+": path.value + number, "-": path.value - number, "*": path.value * number}
    if path.value % number == 0:
      results["/"] = path.value // number
    # Multiplying or dividing by 1 and sums beyond the limit lead nowhere; one of + and - is left,
    # because every number is at most max_value / 2.
    useful = [
      sign
      for sign, value in results.items()
      if 1 <= value <= max_value and not (sign in "*/" and 1 in (number, path.value))
    ]
    sign = draws.choice(useful)
    inner = f"({path.expression})" if sign in "*/" and path.is_sum else path.expression
    path = Path(
      value=results[sign],
      lines=(*path.lines, f"{path.value}{sign}{number}={results[sign]}"),
      expression=f"{inner}{sign}{number}",
      is_sum=sign in "+-",
    )
  return path


def evaluate(expression: str, numbers: tuple[int, ...]) -> Fraction | None:
  """Returns the exact value of an expression over the numbers, or None if it is not allowed.

  Allowed are + - * / and brackets over whole numbers, each given number at most once (twice if
  given twice), and at most `MAX_EXPRESSION` characters. Nothing is ever executed: the text is
  parsed and the tree walked. For example evaluate("3*(7+1)", (1, 3, 7)) is 24.
  """
  if len(expression) > MAX_EXPRESSION or not _EXPRESSION.fullmatch(expression):
    return None
  try:
    tree = ast.parse(expression.strip(), mode="eval")
  except (SyntaxError, ValueError, RecursionError, MemoryError):
    return None
  left = list(numbers)

  def value(node: ast.expr) -> Fraction | None:
    if isinstance(node, ast.Constant) and type(node.value) is int:
      if node.value not in left:
        return None
      left.remove(node.value)
      return Fraction(node.value)
    if isinstance(node, ast.BinOp):
      first, second = value(node.left), value(node.right)
      if first is None or second is None:
        return None
      match node.op:
        case ast.Add():
          return first + second
        case ast.Sub():
          return first - second
        case ast.Mult():
          return first * second
        case ast.Div():
          return first / second if second else None
    return None

  return value(tree.body)


def _parts(answer: str) -> tuple[int, tuple[int, ...]]:
  """Reads back what `Problem.answer` holds: "46 = 3 7 25"."""
  target, _, numbers = answer.partition("=")
  return int(target), tuple(int(number) for number in numbers.split())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Countdown:
  """The task. Every problem has a solution, because its target is what one path reaches."""

  config: CountdownConfig = CountdownConfig()
  name: str = "countdown"

  def num_problems(self, split: str) -> int:
    """Returns how many problems the split has."""
    sizes = dict(
      train=self.config.num_train,
      heldout=self.config.num_heldout,
      pretrain=self.config.num_pretrain,
    )
    if split not in sizes:
      raise splits.unknown_split(self.name, split, SPLITS)
    return sizes[split]

  def problem(self, split: str, index: int) -> Problem:
    """Returns problem `index`; held-out problems have a number that no other split reaches."""
    splits.check_index(self.name, split, index, self.num_problems(split))
    config = self.config
    draws = Draws(self.name, split, index)
    count = draws.between(config.min_numbers, config.max_numbers)
    numbers = [draws.between(2, config.max_number) for _ in range(count)]
    max_value = config.max_target
    if split == "heldout":
      high = config.max_number * 3 // 2
      numbers[draws.below(count)] = draws.between(config.max_number + 1, high)
      max_value = max_value * 3 // 2
    path = _walk(numbers, draws, max_value)
    attempts = []
    for _ in range(draws.between(0, config.max_attempts)):
      attempt = _walk(numbers, draws, max_value)
      if attempt.value != path.value:
        attempts.append(", ".join(attempt.lines))
    listed = ", ".join(map(str, numbers[:-1])) + f" and {numbers[-1]}"
    question = f"Use {listed} to make {path.value}. Each number at most once."
    tried = (*attempts, ", ".join(path.lines))
    return Problem(
      problem_id=f"{self.name}-{split}-{index}",
      prompt=question,
      question=question,
      answer=f"{path.value} = {' '.join(map(str, numbers))}",
      num_steps=len(tried) * len(path.lines),
      solution="\n".join((*tried, f"{answers.ANSWER_MARK} {path.expression}")),
    )

  def verdict(self, problem: Problem, text: str) -> Verdict:
    """Reward 1 if the text ends with exactly one "#### <expression>" that makes the target."""
    answer = answers.marked_answer(text)
    target, numbers = _parts(problem.answer)
    value = None if answer is None else evaluate(answer, numbers)
    if answer is None or value is None:
      return Verdict(reward=0.0, correct=False, well_formed=False)
    correct = value == target
    return Verdict(reward=float(correct), correct=correct, well_formed=True, answer=answer)
