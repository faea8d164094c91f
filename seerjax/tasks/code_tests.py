"""Programming problems with unit tests, from a user's file; answers run in the sandbox.

  {"prompt": "Write add(a, b).", "tests": ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]}

The program is the last closed Python block of an answer; it is correct if all tests pass. How the
tests run depends on their form:

| tests                              | how they run                                                |
|------------------------------------|-------------------------------------------------------------|
| each `assert EXPRESSION == LITERAL`| the program's process evaluates the expressions; the values |
|                                    | are compared here, so it never sees the expected ones       |
| others ("tests" may be one text)   | they are executed after the program, in its process         |

In the second way a program can tamper with the tests, for example redefine what they call: use it
for evaluation of well-behaved models, not as a reward for training. A verdict may depend on the
machine if a program needs about as much time as `limits` allow.
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
from seerjax.tasks import answers, built_in, code_blocks, jsonl, splits
from seerjax.types import Problem, Verdict

MAX_PROGRAM = 65_536  # Characters.
LIMITS = Limits()
INSTRUCTION = "Answer with one fenced block of Python that begins with ```python."
_VALUES, _RUN = "_values_of_tests", "_run_tests"


def plain(value: Any) -> Any:
  """Returns a value as JSON data that is equal exactly for equal values of built-in types.

  The source of this function also runs in the sandbox, after the program, so it must not depend on
  this module.
  """
  if hasattr(value, "tolist"):  # A numpy value.
    value = value.tolist()
  if value is None or isinstance(value, (bool, str)):
    return value
  if isinstance(value, (int, float)):  # So that 2.0 equals 2.
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
  """Tests of a program.

  Attributes:
    text: Python source, executed as a whole if `values` is empty.
    values: (expression, expected value in the form of `plain`) of each test, if all tests have that
      form.
  """

  text: str
  values: tuple[tuple[str, Any], ...] = ()

  @classmethod
  def read(cls, text: str) -> UnitTests:
    """Parses the tests of a problem.

    Raises:
      ValueError: if they are not valid Python, or empty.
    """
    try:
      with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # The tests' own warnings, for example about "\d".
        body = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
      raise ValueError(f"got tests that are not valid Python ({error}), expected Python") from error
    if not body:
      raise ValueError("got no tests, expected at least one assertion")
    values = []
    for statement in body:
      match statement:
        case ast.Assert(test=ast.Compare(left=left, ops=[ast.Eq()], comparators=[right])):
          try:
            values.append((ast.unparse(left), plain(ast.literal_eval(right))))
            continue
          except ValueError:  # Not a literal.
            pass
      return cls(text=text)
    return cls(text=text, values=tuple(values))

  def hold(self, sandbox: Sandbox, program: str, limits: Limits) -> bool:
    """Returns whether a program passes."""
    source = program + _HARNESS
    if not self.values:
      found, _ = sandbox.run_python(source, _RUN, {"tests": self.text}, limits=limits)
      return found is True
    expressions = [expression for expression, _ in self.values]
    found, _ = sandbox.run_python(source, _VALUES, {"expressions": expressions}, limits=limits)
    return found == [value for _, value in self.values]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CodeTests(splits.Splits):
  """Programming problems with tests, as a task; see `load`. The `answer` of a problem is its tests.

  Attributes:
    name, train, heldout: see `Splits`.
    sandbox: runs programs; closed by `close`.
    limits: limits for one answer.
  """

  name: str = "code"
  sandbox: Sandbox
  limits: Limits = LIMITS

  def verdict(self, problem: Problem, text: str) -> Verdict:
    """Returns reward 1 if all tests pass; well formed if the text has a valid Python program.

    Raises:
      RuntimeError: if the sandbox can no longer isolate programs.
    """
    program = read_program(text)
    if program is None:
      return answers.NO_ANSWER
    return answers.answered(
      program, UnitTests.read(problem.answer).hold(self.sandbox, program, self.limits)
    )

  def close(self) -> None:
    """Closes the sandbox."""
    self.sandbox.close()


def read_program(text: str) -> str | None:
  """Returns the last closed Python block of a text; None if there is none or it is invalid."""
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
        prompt=splits.with_instruction(question, instruction),
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
    path: directory with train.jsonl and test.jsonl ("heldout"), or one file; every tenth
      problem of it is held out.
    instruction: appended to every prompt on a separate line; "" for none.
    limits: limits for one program with all its tests.
    allow_weak_sandbox: also run where programs could access files, network or other processes.

  Raises:
    FileNotFoundError: if a file is missing; names it.
    ValueError: if a line is invalid (names file and line), or this machine cannot isolate programs.
  """
  found = splits.of_files(path, lambda file: _read(file, instruction))
  return CodeTests(**found, sandbox=Sandbox(allow_weak=allow_weak_sandbox), limits=limits)


TASKS = {"code": built_in.Source(load, 'JSON lines with "prompt" and "tests"')}
