"""Tasks from the generators of the package reasoning-gym, such as "reasoning_gym.chain_sum".

  prompt    the generator's question, then `INSTRUCTION`
  answer    content of the last <answer>...</answer>; without one, the end of the last non-blank
            line: after its last "=", ": " or "is", without a final full stop
  reward    the generator's score in [0, 1]: the part "correct" if it is 1, else the part "partial"

A problem is a function of only the package version, generator, options, split and index. Problem i
of a split has a separate dataset of `CANDIDATES` items with unique seeds, and is the first question
in it that `splits.is_heldout` assigns to the split. So splits share neither seeds nor questions,
even if a generator has few distinct questions.

The package's scorers expect honest answers. Here the length of answers is bounded; text that a
scorer passes to `eval` must be a literal or a simple formula (`_LITERALS`, `_FORMULAS`); and
scorers with unbounded running time run in the sandbox (`_TIMED`). If a scorer raises, or returns a
score outside [0, 1], the reward is 0 and the case is counted (`ReasoningGym.faults`). `REFUSED`
lists unusable generators.

Source: Stojanovski et al. 2025, "Reasoning Gym", https://arxiv.org/abs/2505.24760; generators and
scorers are in its package (Apache-2.0); nothing of it is copied here.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
import copy
import dataclasses
import difflib
import functools
import importlib
import importlib.metadata
import json
import re
from typing import Any

from absl import logging

from seerjax import fields
from seerjax.sandbox.sandbox import Limits, Sandbox
from seerjax.tasks import splits
from seerjax.types import Problem, Verdict

PREFIX = "reasoning_gym."
PACKAGE = "reasoning-gym"
INSTRUCTION = "Write the final answer between <answer> and </answer>."
SIZES = {"train": 300_000, "heldout": 30_000}  # Problems.
# One question in this many is held out. Small, because drawing an item may take a second.
HELDOUT_SHARE = 2
CANDIDATES = 64  # Most items drawn for a problem; all but a share of 2^-64 find one.
SEEDS = 2**25  # Items per seed of the task: tasks with different seeds share no item.
MAX_SEED = 127  # Some generators use NumPy's seeds, which have 32 bits.
MAX_ANSWER = 8_192  # Characters; longer answers are invalid.
MAX_FORMULA = 1_000  # Characters of a text parsed by sympy.
MAX_EXPONENT = 64
LIMITS = Limits(wall_seconds=5.0, cpu_seconds=5.0)
_TAGS = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_BEFORE = re.compile(r"=|:\s|\bis\b:?")  # Separates an untagged answer from the rest of its line.

_UNORDERED = "its problems depend on the order of sets, and so on PYTHONHASHSEED"
# Unusable generators, with the reason.
REFUSED: Mapping[str, str] = {
  "codeio": "its scorer gives full marks to {}, and its time grows with the cube of the answer's"
  " length",
  "coin_flip": "its scorer gives full marks to 0 for 0.25, and computes 10**999999999 if an answer"
  " contains it",
  "composite": "it mixes other generators",
  "game_of_life_halting": "its scorer gives full marks to every text",
  "intermediate_integration": _UNORDERED,
  "isomorphic_strings": _UNORDERED,
  "knight_swap": f"a problem may take minutes, and {_UNORDERED}",
  "list_functions": "some of its problems are drawn without its seed",
  "polynomial_multiplication": _UNORDERED,
  "puzzle24": "its scorer gives full marks to 6+6+6+6 whatever the numbers are",
  "ransom_note": _UNORDERED,
  "word_ladder": _UNORDERED,
}
# Generators with scorers that evaluate the text, which therefore must be a literal.
_LITERALS = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
# Scorers that pass the text to sympy; it must be a formula of these functions.
_FORMULAS = frozenset({"countdown", "simple_integration"})
_FUNCTIONS = (
  "Abs", "acos", "asin", "atan", "cos", "cosh", "cot", "csc", "exp", "ln", "log", "sec", "sin",
  "sinh", "sqrt", "tan", "tanh",
)  # fmt: skip
# Scorers with unbounded running time.
_TIMED = frozenset({"rubiks_cube", "simple_integration"})
_SCORER = """
import reasoning_gym


def score(generator, config, item, answer):
  data = reasoning_gym.create_dataset(generator, **config)
  return float(data.score_answer(answer, data[item]))
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReasoningGym:
  """The task of one generator; made by `load`.

  Attributes:
    generator: name of a generator in the package, such as "chain_sum".
    options: parameters of the generator's configuration class by name; others keep their defaults.
      "seed" (0 to `MAX_SEED`) selects other problems.
    sandbox: runs scorers with unbounded running time; None for other generators.
    faults: number of scorer failures, by reason.
  """

  generator: str
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
  sandbox: Sandbox | None = dataclasses.field(default=None, compare=False)
  faults: dict[str, int] = dataclasses.field(default_factory=dict, compare=False)

  def __post_init__(self):
    fields.check(self)

  @property
  def name(self) -> str:
    """The name for `tasks.load`."""
    return PREFIX + self.generator

  def num_problems(self, split: str) -> int:
    """Returns the size of the split; problems repeat if a generator has few questions."""
    if split not in SIZES:
      raise splits.unknown_split(self.name, split, tuple(SIZES))
    return SIZES[split]

  def problem(self, split: str, index: int) -> Problem:
    """Returns problem `index`."""
    splits.check_index(self.name, split, index, self.num_problems(split))
    entry = self._entry(split, index).entry
    question = entry["question"].strip()
    return Problem(
      problem_id=f"{self.name}-{split}-{index}",
      prompt=f"{question}\n{INSTRUCTION}",
      question=question,
      answer="" if entry["answer"] is None else str(entry["answer"]),
    )

  def verdict(self, problem: Problem, text: str) -> Verdict:
    """Judges with the generator's scorer; well formed if the answer is in its tags."""
    answer, is_tagged = read_answer(text)
    score = 0.0
    if 0 < len(answer) <= MAX_ANSWER:
      split, _, index = problem.problem_id.removeprefix(f"{self.name}-").partition("-")
      score = self._score(self._entry(split, int(index)), answer)
    return Verdict.of_parts(
      {"correct": score if score == 1.0 else 0.0, "partial": score if score < 1.0 else 0.0},
      correct=score == 1.0,
      well_formed=is_tagged and len(answer) <= MAX_ANSWER,
      answer=answer[:MAX_ANSWER],
    )

  @property
  def package(self) -> str:
    """Name and version of the package, on which the problems depend besides the settings."""
    return f"{PACKAGE} {importlib.metadata.version(PACKAGE)}"

  def close(self) -> None:
    """Closes the sandbox."""
    if self.sandbox is not None:
      self.sandbox.close()

  def _entry(self, split: str, index: int) -> _Entry:
    return _entry(self.generator, _frozen(self.options), split, index)

  def _score(self, found: _Entry, answer: str) -> float:
    """Returns the generator's score of an answer; 0 if the scorer cannot judge it."""
    try:
      if not _is_harmless(self.generator, found.entry, answer):
        return 0.0
      if self.sandbox is None:
        # Copied, because a scorer may modify the entry.
        value = _scorer(self.generator, _frozen(self.options)).score_answer(
          answer, copy.deepcopy(found.entry)
        )
      else:
        arguments = {"generator": self.generator, "config": found.config, "item": found.item}
        value, outcome = self.sandbox.run_python(
          _SCORER, "score", arguments | {"answer": answer}, limits=LIMITS
        )
        if value is None:
          return self._failed(outcome.status, answer)
      score = float(value)
    except Exception as error:  # Third-party code on arbitrary text may raise anything.
      return self._failed(type(error).__name__, answer)
    # Also catches NaN; in all known cases a score above 1 is a bug of the scorer.
    return score if 0.0 <= score <= 1.0 else self._failed(f"score {score}", answer)

  def _failed(self, reason: str, answer: str) -> float:
    self.faults[reason] = self.faults.get(reason, 0) + 1
    if (total := sum(self.faults.values())) & (total - 1) == 0:  # The 1st, 2nd, 4th, 8th, ...
      logging.warning(
        "%s: the scorer failed on %d text(s) so far, which got reward 0; last text: %r (%s)",
        self.name, total, answer[:80], reason,
      )  # fmt: skip
    return 0.0


@dataclasses.dataclass(frozen=True)
class _Entry:
  """A problem in the package's form.

  Attributes:
    entry: "question", "answer" and "metadata".
    config: configuration of the dataset, for `reasoning_gym.create_dataset`.
    item: index of the entry in the dataset.
  """

  entry: dict[str, Any]
  config: dict[str, Any]
  item: int


def read_answer(text: str) -> tuple[str, bool]:
  """Returns (the answer of a text, whether it is in <answer> tags)."""
  tagged = _TAGS.findall(text)
  if tagged:
    return tagged[-1].strip(), True
  lines = [line for line in text.splitlines() if line.strip()]
  end = _BEFORE.split(lines[-1])[-1].strip() if lines else ""
  return end.removesuffix(".").strip(' *`$"'), False


def load(name: str, options: Mapping[str, Any] | None = None) -> ReasoningGym:
  """Returns the task of a generator.

  Args:
    name: "reasoning_gym.GENERATOR".
    options: see `ReasoningGym`.

  Raises:
    ValueError: if the package cannot be imported, the generator is unknown, unusable or rejects the
      options, or this machine cannot isolate a scorer that needs it.
  """
  generator, options = name.removeprefix(PREFIX), dict(options or {})
  package = _package()
  known = package.factory.DATASETS
  if generator not in known:
    near = difflib.get_close_matches(generator, known, n=1)
    fix = f"did you mean {PREFIX + near[0]!r}?" if near else "choose one."
    raise ValueError(
      f"tasks.load: got {name!r}, expected {PREFIX}GENERATOR with one of"
      f" {', '.join(sorted(known))}; {fix}"
    )
  if generator in REFUSED:
    raise ValueError(
      f"{name}: got a generator that cannot be used, because {REFUSED[generator]}; choose another."
    )
  allowed = [one.name for one in dataclasses.fields(known[generator][1]) if one.name != "size"]
  if strange := sorted(set(options) - set(allowed)):
    near = difflib.get_close_matches(strange[0], allowed, n=1)
    fix = f"did you mean {near[0]!r}?" if near else "correct the spelling."
    raise ValueError(
      f"{name}: got the option {strange[0]!r}, expected one of {', '.join(allowed)}; {fix}"
    )
  seed = options.get("seed", 0)
  if not fields.is_whole(seed) or not 0 <= seed <= MAX_SEED:
    raise ValueError(
      f"{name}: got the option seed={seed!r}, expected a whole number from 0 to {MAX_SEED}; 0 is"
      " usual."
    )
  task = ReasoningGym(
    generator=generator,
    options=options,
    sandbox=Sandbox(preloaded=("reasoning_gym",)) if generator in _TIMED else None,
  )
  try:
    for split in SIZES:
      task.problem(split, 0)
  except Exception as error:  # The package asserts, and unchecked options may raise anything.
    task.close()
    raise ValueError(
      f"{name}: got {type(error).__name__} ({error}) for the options {options}, expected options"
      " that yield problems; correct them, or leave them out."
    ) from error
  return task


def _package() -> Any:
  """Imports the package.

  Raises:
    ValueError: if it cannot be imported; the message names the missing package.
  """
  try:
    importlib.import_module("reasoning_gym.factory")
    return importlib.import_module("reasoning_gym")
  except ImportError as error:
    raise ValueError(
      f"tasks.load: got a task of {PACKAGE}, which cannot be imported ({error}), expected the extra"
      " 'environments' (pip install 'seerjax[environments]'; in the checkout launch/local.sh"
      " installs it). Its dependency pycosat has no wheels and is built from C: if that fails,"
      " install a C compiler and Python's headers (apt install gcc python3-dev)."
    ) from error


# Hashable form for caches: (name, value as JSON) pairs.
def _frozen(options: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
  return tuple(sorted((name, json.dumps(value)) for name, value in options.items()))


@functools.lru_cache(maxsize=8)
def _scorer(generator: str, options: tuple[tuple[str, str], ...]) -> Any:
  """Returns a dataset used to score entries of all datasets with the same options."""
  return _package().create_dataset(generator, **_config(options, 0))


@functools.lru_cache(maxsize=4096)
def _entry(generator: str, options: tuple[tuple[str, str], ...], split: str, index: int) -> _Entry:
  """Returns a problem of a split.

  Raises:
    ValueError: if no candidate belongs to the split.
  """
  first = 0 if split == "train" else SIZES["train"]
  config = _config(options, (first + index) * CANDIDATES)
  data = _package().create_dataset(generator, **config)
  for item in range(CANDIDATES):
    entry = data[item]
    if splits.is_heldout(entry["question"].strip(), HELDOUT_SHARE) == (split == "heldout"):
      return _Entry(entry=entry, config=config, item=item)
  raise ValueError(
    f"{PREFIX}{generator}: got no question of split {split!r} among {CANDIDATES}, expected one; the"
    " options allow too few different questions: widen their range."
  )


def _config(options: tuple[tuple[str, str], ...], offset: int) -> dict[str, Any]:
  """Returns the configuration of the dataset with seeds from an offset on."""
  config = {name: json.loads(value) for name, value in options}
  return config | {"seed": config.get("seed", 0) * SEEDS + offset, "size": CANDIDATES}


# Checks of text that scorers evaluate.


def _is_harmless(generator: str, entry: Mapping[str, Any], answer: str) -> bool:
  """Returns whether a text is safe for the scorer to evaluate."""
  if generator in _LITERALS:
    right = (entry["answer"], *entry["metadata"].get("valid_answers", ()))
    return answer in {one.strip() for one in right} or _is_literal(answer)
  if generator == "complex_arithmetic":
    return "nan" not in answer.lower()  # The scorer gives NaN the full score.
  if generator in _FORMULAS:
    return len(answer) <= MAX_FORMULA and _is_formula(answer)
  return True


def _is_literal(text: str) -> bool:
  try:
    ast.literal_eval(text)
  except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
    return False
  return True


def _is_formula(text: str) -> bool:
  """Returns whether a text is a formula of numbers, letters, + - * / ** and known functions."""
  try:
    tree = ast.parse(text.strip(), mode="eval")
  except (ValueError, SyntaxError, RecursionError, MemoryError):
    return False
  return _is_term(tree.body, 0)


def _is_term(node: ast.expr, powers: int) -> bool:
  """Returns whether a node is such a formula, nested in `powers` powers."""
  match node:
    case ast.Constant(value=int() | float() as value):
      return not isinstance(value, bool) and abs(value) < 1e12
    case ast.Name(id=name):
      return len(name) == 1 or name == "pi"
    case ast.UnaryOp(op=ast.UAdd() | ast.USub(), operand=operand):
      return _is_term(operand, powers)
    case ast.BinOp(op=ast.Pow(), left=base, right=exponent):
      numbers = [one.value for one in ast.walk(exponent) if isinstance(one, ast.Constant)]
      is_small = all(isinstance(one, int | float) and one <= MAX_EXPONENT for one in numbers)
      is_flat = not any(isinstance(one, ast.Pow) for one in ast.walk(exponent))
      return (
        powers < 2
        and is_small
        and is_flat
        and (_is_term(base, powers + 1) and _is_term(exponent, powers + 1))
      )
    case ast.BinOp(op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div(), left=left, right=right):
      return _is_term(left, powers) and _is_term(right, powers)
    case ast.Call(func=ast.Name(id=name), args=[operand], keywords=[]):
      return name in _FUNCTIONS and _is_term(operand, powers)
  return False
