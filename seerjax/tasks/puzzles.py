"""Knights and knaves: knights always tell the truth, knaves always lie; who is what?

  prompt    "Knights always tell the truth, knaves always lie.\\nAda says: Ben is a knave.\\nBen
             says: Ada is a knight and Ben is a knight.\\nWho is a knight, who a knave?"
  answer    "Ada:!B Ben:&AB"
  solution  "Ada knight, Ben knight: not so, says Ada.\\n#### Ada knight, Ben knave"

Statements are formulas of propositional logic in Polish notation: a name's first letter means "this
person is a knight"; `!` is not, `&` and, `|` or, `=` if and only if, `>` if, then. A statement must
be true exactly if its speaker is a knight. Generator and checker use the truth table over all 2^n
assignments; each problem has exactly one solution. Sets of statements selected by
`splits.is_heldout` occur in "heldout" only.

Source: Smullyan 1978, "What is the name of this book?".
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import itertools
import re

from seerjax import fields
from seerjax.tasks import answers, built_in, splits
from seerjax.tasks.draws import Draws
from seerjax.types import Problem, Verdict

NAMES = ("Ada", "Ben", "Cid", "Dan", "Eva", "Flo", "Gus", "Ida", "Jon", "Kim")
LETTERS = {name[0]: name for name in NAMES}
NUM_PEOPLE = (2, 3)  # Minimum and default maximum; `PuzzlesConfig` may raise the maximum.
MAX_ANSWER = 400  # Characters after the mark; longer answers are invalid.
RULE = "Knights always tell the truth, knaves always lie."
QUESTION = "Who is a knight, who a knave?"
_WORDS = {
  "&": "{} and {}",
  "|": "{} or {}",
  "=": "{} if and only if {}",
  ">": "if {}, then {}",
}

Kinds = Mapping[str, bool]  # For each letter, whether the person is a knight.


@dataclasses.dataclass(frozen=True, kw_only=True)
class PuzzlesConfig:
  """Size of the puzzles.

  Attributes:
    max_people: 2 to 10; the truth table has 2^n rows.
  """

  max_people: int = NUM_PEOPLE[1]

  def __post_init__(self):
    fix = f"{NUM_PEOPLE[1]} is the number that a small model can learn"
    fields.check(self, max_people=fields.between(NUM_PEOPLE[0], len(NAMES), fix))


# Formulas.


def value(formula: str, kinds: Kinds) -> bool:
  """Returns the truth value of a formula.

  Args:
    formula: formula in Polish notation, such as "&A!B".
    kinds: assignment of every letter in it.

  Raises:
    ValueError: if it is not a formula over these letters.
  """
  found, rest = _value(formula, kinds)
  if rest:
    raise ValueError(_refusal(formula, kinds, f"{rest!r} too much"))
  return found


def _value(formula: str, kinds: Kinds) -> tuple[bool, str]:
  """Returns (truth value of the formula at the start of a text, remaining text)."""
  head, rest = formula[:1], formula[1:]
  if head in kinds:
    return kinds[head], rest
  if head == "!":
    inner, rest = _value(rest, kinds)
    return not inner, rest
  if head not in _WORDS:
    raise ValueError(_refusal(formula, kinds, f"{head!r} where a formula begins"))
  left, rest = _value(rest, kinds)
  right, rest = _value(rest, kinds)
  match head:
    case "&":
      return left and right, rest
    case "|":
      return left or right, rest
    case "=":
      return left == right, rest
  return not left or right, rest


def _refusal(formula: str, kinds: Kinds, what: str) -> str:
  return (
    f"puzzles.value: got {formula!r} with {what}, expected one formula in Polish notation over the"
    f" letters {''.join(kinds)}, such as '&A!B'; fix it."
  )


def solutions(statements: Mapping[str, str]) -> list[dict[str, bool]]:
  """Returns the assignments consistent with all statements, from the truth table."""
  rows = (
    dict(zip(statements, row)) for row in itertools.product((True, False), repeat=len(statements))
  )
  return [kinds for kinds in rows if not _contradicted(statements, kinds)]


def _contradicted(statements: Mapping[str, str], kinds: Kinds) -> str:
  """Returns the first letter with a statement that contradicts the assignment; "" if none does."""
  wrong = (one for one, formula in statements.items() if value(formula, kinds) != kinds[one])
  return next(wrong, "")


def sentence(formula: str) -> str:
  """Returns a formula in words, for example "Ada is a knight and Ben is a knave"."""
  text, _ = _sentence(formula)
  return text


def _sentence(formula: str) -> tuple[str, str]:
  head, rest = formula[0], formula[1:]
  if head in LETTERS:
    return f"{LETTERS[head]} is a knight", rest
  if head == "!" and rest[0] in LETTERS:
    return f"{LETTERS[rest[0]]} is a knave", rest[1:]
  if head == "!":
    inner, rest = _sentence(rest)
    return f"it is not so that {inner}", rest
  left, rest = _sentence(rest)
  right, rest = _sentence(rest)
  return _WORDS[head].format(left, right), rest


def _drawn(draws: Draws, letters: str) -> str:
  """Returns a random formula over one or two people; rarely negated as a whole."""
  atoms = [draws.choice(("", "!")) + one for one in draws.sample(letters, 2)]
  if draws.chance(0.3):
    return atoms[0]
  formula = draws.choice(tuple(_WORDS)) + "".join(atoms)
  return f"!{formula}" if draws.chance(0.1) else formula


# The task.


def read_kinds(text: str, letters: str) -> dict[str, bool] | None:
  """Parses an assignment such as "Ada knight, Ben is a knave."; None if it is invalid.

  Every person must be named exactly once, and no others.
  """
  parts = text.strip().rstrip(".").split(",") if len(text) <= MAX_ANSWER else []
  found: dict[str, bool] = {}
  for part in parts:
    match = re.fullmatch(r"(?:and )?([A-Z][a-z]+)(?: is)?(?: a)? (knight|knave)", part.strip())
    if match is None or LETTERS.get(match[1][0]) != match[1] or match[1][0] in found:
      return None
    found[match[1][0]] = match[2] == "knight"
  return found if set(found) == set(letters) else None


def _kinds_text(kinds: Kinds) -> str:
  return ", ".join(
    f"{LETTERS[one]} {'knight' if is_knight else 'knave'}" for one, is_knight in kinds.items()
  )


def _statements(answer: str) -> dict[str, str]:
  """Parses `Problem.answer`, for example "Ada:!B Ben:&A!B"."""
  parts = (part.partition(":") for part in answer.split())
  return {name[0]: formula for name, _, formula in parts}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Puzzles(splits.Drawn):
  """Knights-and-knaves puzzles as a task."""

  config: PuzzlesConfig = PuzzlesConfig()
  name: str = "puzzles"

  def drawn(self, split: str, index: int) -> Problem:
    """Returns problem `index`."""
    draws = Draws(self.name, self.config.max_people, split, index)
    count = draws.between(NUM_PEOPLE[0], self.config.max_people)
    letters = "".join(sorted(draws.sample(tuple(LETTERS), count)))
    while True:
      statements = {one: _drawn(draws, letters) for one in letters}
      # Puzzles that differ only in names count as equal.
      core = " ".join(statements.values()).translate(str.maketrans(letters, "ABCDEFGHIJ"[:count]))
      if splits.is_heldout(core) == (split == "heldout") and len(solutions(statements)) == 1:
        break
    claims = [f"{LETTERS[one]} says: {sentence(formula)}." for one, formula in statements.items()]
    question = "\n".join((RULE, *claims, QUESTION))
    lines = []
    for row in itertools.product((True, False), repeat=count):
      kinds = dict(zip(statements, row))
      wrong = _contradicted(statements, kinds)
      if not wrong:
        break
      lines.append(f"{_kinds_text(kinds)}: not so, says {LETTERS[wrong]}.")
    lines.append(f"{answers.ANSWER_MARK} {_kinds_text(kinds)}")
    return Problem(
      problem_id=f"{self.name}-{self.config.max_people}-{split}-{index}",
      prompt=question,
      question=question,
      answer=" ".join(f"{LETTERS[one]}:{formula}" for one, formula in statements.items()),
      num_steps=len(lines),
      solution="\n".join(lines),
    )

  def verdict(self, problem: Problem, text: str) -> Verdict:
    """Returns reward 1 if the text has exactly one "#### <assignment>", and it is a solution."""
    statements = _statements(problem.answer)
    answer = answers.marked_answer(text)
    kinds = None if answer is None else read_kinds(answer, "".join(statements))
    if kinds is None:
      return answers.NO_ANSWER
    answer = _kinds_text({one: kinds[one] for one in statements})
    return answers.answered(answer, kinds in solutions(statements))


TASKS = {"puzzles": built_in.Source(Puzzles)}
