"""Countdown: reach a target with given numbers and + - * /, each number at most once.

  prompt    "Use 3, 7 and 25 to make 46. Each number at most once."
  solution  "25-7=18, 18+3=21\\n25+3=28, 28-7=21\\n3*7=21, 21+25=46\\n#### 3*7+25"

Solutions are found by trial and error; the number of trials depends little on the problem, so
lengths correlate weakly within a group (in `word_problems` strongly).
"""

from __future__ import annotations

import ast
import dataclasses
from fractions import Fraction
import re

from seerjax.tasks import answers, built_in, splits
from seerjax.tasks.draws import Draws
from seerjax.types import Problem, Verdict

# Few and small numbers, so that a small model can learn the task.
NUM_NUMBERS = (3, 4)
MAX_NUMBER = 25  # In "train"; 1.5 times as large in "heldout".
MAX_TARGET = 100  # Also bounds intermediate results.
MAX_ATTEMPTS = 5  # Failed trials in a reference solution, which teach a model to keep trying.
MAX_EXPRESSION = 128  # Characters; longer expressions are not parsed.
_EXPRESSION = re.compile(r"[0-9+\-*/() ]+", re.ASCII)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Path:
  """A way through the numbers, left to right, with one intermediate result.

  Attributes:
    value: the last result.
    lines: steps such as "3*7=21".
    expression: the steps as one expression.
    is_sum: whether the outermost operation is + or -, which needs brackets under * or /.
  """

  value: int
  lines: tuple[str, ...]
  expression: str
  is_sum: bool


def _walk(numbers: list[int], draws: Draws, max_value: int) -> Path:
  """Returns a random path through all numbers, with every result in 1..max_value."""
  order = draws.sample(numbers, len(numbers))
  path = Path(value=order[0], lines=(), expression=str(order[0]), is_sum=False)
  for number in order[1:]:
    results = {"+": path.value + number, "-": path.value - number, "*": path.value * number}
    if path.value % number == 0:
      results["/"] = path.value // number
    # Exclude multiplying and dividing by 1, and results out of range. Either + or - remains,
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
  given twice), in at most `MAX_EXPRESSION` characters. Nothing is executed: the text is parsed, and
  the tree evaluated. For example evaluate("3*(7+1)", (1, 3, 7)) is 24.
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
  """Parses `Problem.answer`, for example "46 = 3 7 25"."""
  target, _, numbers = answer.partition("=")
  return int(target), tuple(int(number) for number in numbers.split())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Countdown(splits.Drawn):
  """Countdown problems as a task.

  Every problem has a solution, because its target is the result of a path.
  """

  name: str = "countdown"

  def drawn(self, split: str, index: int) -> Problem:
    """Returns problem `index`; held-out problems contain a number larger than in other splits."""
    draws = Draws(self.name, split, index)
    count = draws.between(*NUM_NUMBERS)
    numbers = [draws.between(2, MAX_NUMBER) for _ in range(count)]
    max_value = MAX_TARGET
    if split == "heldout":
      high = MAX_NUMBER * 3 // 2
      numbers[draws.below(count)] = draws.between(MAX_NUMBER + 1, high)
      max_value = max_value * 3 // 2
    path = _walk(numbers, draws, max_value)
    attempts = []
    for _ in range(draws.between(0, MAX_ATTEMPTS)):
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
    """Returns reward 1 if the text has exactly one "#### <expression>" with the target's value."""
    answer = answers.marked_answer(text)
    target, numbers = _parts(problem.answer)
    value = None if answer is None else evaluate(answer, numbers)
    if answer is None or value is None:
      return answers.NO_ANSWER
    return answers.answered(answer, value == target)


TASKS = {"countdown": built_in.Source(Countdown)}
