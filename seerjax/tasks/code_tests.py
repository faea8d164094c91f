"""Programs with unit tests, from a file of one's own; judged in the sandbox.

  {"prompt": "Write add(a, b).", "tests": ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]}

An answer's last closed block of Python is its program; it is right if all tests hold. How they are
held depends on them:

| tests                              | what happens                                                |
|------------------------------------|-------------------------------------------------------------|
| each `assert EXPRESSION == LITERAL`| the program computes the expressions, and its values are    |
|                                    | compared here: it never sees what is expected               |
| others ("tests" may be one text)   | they run behind the program, in its process, to their end   |

In the second way a program can do to the tests what it likes, such as redefine what they call: that
is for models which do not try, not for one that learns from its reward. A verdict depends on the
machine where a program needs about as long as `limits` allow.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import os
import pathlib
from typing import Any
import warnings

from seerjax.sandbox.sandbox import Limits, Sandbox
from seerjax.tasks import code_blocks, jsonl, splits
from seerjax.types import Problem, Verdict

MAX_PROGRAM = 65_536  # Characters.
LIMITS = Limits()
INSTRUCTION = "Answer with one fenced block of Python that begins with ```python."
_VALUES, _RUN = "_values_of_tests", "_run_tests"


def plain(value: Any) -> Any:
  """Returns a value as what JSON holds, equal for equal values of the built-in types alone.

  The sandbox runs this very source, behind the program; it must need nothing of this module.
  """
  if hasattr(value, "tolist"):  # numpy's.
    value = value.tolist()
  if value is None or isinstance(value, (bool, str)):
    return value
  if isinstance(value, (int, float)):  # 2.0 is 2.
    return int(value) if value == value and abs(value) < 1e300 and value == int(value) else value
  if isinstance(value, list):
    return [plain(item) for item in value]
  if isinstance(value, tuple):
    return {"tuple": [plain(item) for item in value]}
  if isinstance(value, (set, frozenset)):
    return {"set": sorted((plain(item) for item in value), key=repr)}
  if isinstance(value, dict):
    return {"dict": sorted(([plain(k), plain(v)] for k, v in value.items()), key=repr)}
  return {"other": [type(value).__name__, repr(value)]}


_HARNESS = f"""

{inspect.getsource(plain)}

def {_VALUES}(expressions):
  return [plain(eval(expression, globals())) for expression in expressions]


def {_RUN}(tests):
  exec(compile(tests, "tests.py", "exec"), globals())
  return True
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnitTests:
  """What a program is held to.

  Attributes:
    text: Python, run as a whole where `values` is empty.
    values: (expression, value as `plain` gives it) of each test, where all are of that form.
  """

  text: str
  values: tuple[tuple[str, Any], ...] = ()

  @classmethod
  def read(cls, text: str) -> UnitTests:
    """Reads tests.

    Raises:
      ValueError: if they are no Python, or none at all.
    """
    try:
      with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Of the tests' own "\d", say.
        body = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
      raise ValueError(f"got tests that are no Python ({error}), expected Python") from error
    if not body:
      raise ValueError("got no tests, expected at least one assertion")
    values = []
    for statement in body:
      match statement:
        case ast.Assert(test=ast.Compare(left=left, ops=[ast.Eq()], comparators=[right])):
          try:
            values.append((ast.unparse(left), plain(ast.literal_eval(right))))
            continue
          except ValueError:  # No literal.
            pass
      return cls(text=text)
    return cls(text=text, values=tuple(values))

  def hold(self, sandbox: Sandbox, program: str, limits: Limits) -> bool:
    """Returns whether a program passes.

    Args:
      sandbox: that runs it.
      program: Python.
      limits: of all the tests together.
    """
    source = program + _HARNESS
    if not self.values:
      found, _ = sandbox.run_python(source, _RUN, {"tests": self.text}, limits=limits)
      return found is True
    expressions = [expression for expression, _ in self.values]
    found, _ = sandbox.run_python(source, _VALUES, {"expressions": expressions}, limits=limits)
    return found == [value for _, value in self.values]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CodeTests(splits.Splits):
  """The task; see `load`. A problem's `answer` is its tests.

  Attributes:
    name, train, heldout: see `Splits`.
    sandbox: that runs programs; `close` ends it.
    limits: of one answer.
  """

  name: str = "code"
  sandbox: Sandbox
  limits: Limits = LIMITS

  def verdict(self, problem: Problem, text: str) -> Verdict:
    """Reward 1 if all tests hold; well formed if the text has a program that is Python.

    Raises:
      RuntimeError: if the isolation that was there at the start cannot be had any more.
    """
    program = read_program(text)
    if program is None:
      return Verdict(reward=0.0, correct=False, well_formed=False)
    correct = UnitTests.read(problem.answer).hold(self.sandbox, program, self.limits)
    return Verdict(reward=float(correct), correct=correct, well_formed=True, answer=program)

  def close(self) -> None:
    """Ends the sandbox."""
    self.sandbox.close()


def read_program(text: str) -> str | None:
  """Returns the last closed block of Python in a text; None if it has none, or is no Python."""
  program, is_open = code_blocks.last_python(text)
  if program is None or is_open or len(program) > MAX_PROGRAM:
    return None
  try:
    with warnings.catch_warnings():
      warnings.simplefilter("ignore")
      ast.parse(program)
  except (SyntaxError, ValueError, RecursionError, MemoryError):
    return None
  return program


def _read(path: pathlib.Path, instruction: str) -> list[Problem]:
  problems = []
  for number, row in jsonl.numbered_rows(path, ("prompt",)):
    tests, solution = row.get("tests"), row.get("solution", "")
    lines: Any = [tests] if isinstance(tests, str) else tests
    try:
      if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        raise ValueError(f"got tests={json.dumps(tests)[:80]}, expected a text or a list of texts")
      text = "\n".join(lines)
      UnitTests.read(text)
    except ValueError as error:
      raise ValueError(
        f"{path}, line {number}: {error}; write 'tests' as"
        ' ["assert add(1, 2) == 3", ...], or repair that line.'
      ) from error
    question = row["prompt"].strip()
    problems.append(
      Problem(
        problem_id=f"code-{path.stem}-{number}",
        prompt=f"{question}\n{instruction}" if instruction else question,
        question=question,
        answer=text,
        solution=solution if isinstance(solution, str) else "",
      )
    )
  return problems


def load(
  path: str | os.PathLike[str],
  *,
  instruction: str = INSTRUCTION,
  limits: Limits = LIMITS,
  allow_weak_sandbox: bool = False,
) -> CodeTests:
  """Reads the task, and starts its sandbox.

  Args:
    path: a directory with train.jsonl and test.jsonl (which is "heldout"), or one file, of which
      every tenth problem is held out.
    instruction: added after every prompt, on a line of its own; "" for none.
    limits: of one answer's program with all its tests.
    allow_weak_sandbox: also where programs could reach files, the network or other processes.

  Raises:
    FileNotFoundError: naming the file that is missing.
    ValueError: naming the file and the line that cannot be used, or what this machine cannot
      isolate.
  """
  path = pathlib.Path(path)
  if path.is_dir():
    train, heldout = (_read(path / f"{name}.jsonl", instruction) for name in ("train", "test"))
  else:
    train, heldout = splits.split_rows(_read(path, instruction))
  sandbox = Sandbox(allow_weak=allow_weak_sandbox)
  return CodeTests(train=tuple(train), heldout=tuple(heldout), sandbox=sandbox, limits=limits)
