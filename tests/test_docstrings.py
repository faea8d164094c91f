"""Docstrings of the public API include what a signature cannot: shapes, arguments and errors.

They make up the site's reference. Names come from tests/public_api.txt; the tests read the source
of their modules.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
HEADINGS = re.findall(
  r"^seerjax\.(\S+?)(?:, from seerjax\.(\S+))?$",
  (ROOT / "tests" / "public_api.txt").read_text(),
  re.MULTILINE,
)
MODULES = sorted({home or name for name, home in HEADINGS})
SHAPE = re.compile(r"\b(?:bool|bf|[fiu])\d*\[")
ARRAYS = re.compile(r"\b(?:np\.ndarray|ArrayLike)\b")


def raised(function: ast.FunctionDef) -> set[str]:
  """Returns the names of what a function raises itself, functions within it left out."""
  found: set[str] = set()
  left: list[ast.AST] = list(function.body)
  while left:
    node = left.pop()
    if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Lambda):
      continue
    if isinstance(node, ast.Raise) and node.exc is not None:
      error = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
      found.add(ast.unparse(error).rpartition(".")[2])
    left += ast.iter_child_nodes(node)
  return found


def of_function(function: ast.FunctionDef, name: str) -> Iterator[str]:
  text = ast.get_docstring(function) or ""
  if not text and function.name != "__init__":
    yield f"{name}: got no docstring"
  if "Raises:" not in text and (errors := raised(function)):
    yield f"{name}: got no 'Raises:' for {', '.join(sorted(errors))}"
  arguments = function.args.posonlyargs + function.args.args + function.args.kwonlyargs
  for argument in arguments:
    if argument.arg in ("self", "cls"):
      continue
    if "Args:" in text and not re.search(rf"^ +{argument.arg}: ", text, re.MULTILINE):
      yield f"{name}: got an 'Args:' without {argument.arg}"
    if argument.annotation and ARRAYS.search(ast.unparse(argument.annotation)):
      if not SHAPE.search(text):
        yield f"{name}: got no shape of {argument.arg}"


def of_class(node: ast.ClassDef, name: str) -> Iterator[str]:
  text = ast.get_docstring(node) or ""
  if not text:
    yield f"{name}: got no docstring"
  makers = [*node.decorator_list, *node.bases]
  is_record = any(re.search("dataclass|NamedTuple", ast.unparse(maker)) for maker in makers)
  for member in node.body:
    if isinstance(member, ast.FunctionDef) and (
      not member.name.startswith("_") or member.name == "__init__"
    ):
      if any(ast.unparse(one).endswith(".setter") for one in member.decorator_list):
        continue  # The property itself documents the value.
      yield from of_function(member, f"{name}.{member.name}")
    elif is_record and isinstance(member, ast.AnnAssign):
      field = ast.unparse(member.target)
      item = re.search(rf"^ +{field}: (.*(?:\n {{4,}}.*)*)", text, re.MULTILINE)
      if not field.startswith("_") and item is None:
        yield f"{name}: got no text for the field {field}"
      elif item and ARRAYS.search(ast.unparse(member.annotation)) and not SHAPE.search(item[1]):
        yield f"{name}: got no shape of the field {field}"


def complaints(source: str) -> list[str]:
  """Returns what the docstrings of a module's public names lack, as sentences."""
  found: list[str] = []
  for node in ast.parse(source).body:
    if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
      found += of_function(node, node.name)
    elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
      found += of_class(node, node.name)
  return found


@pytest.mark.parametrize("module", MODULES)
def test_public_names_say_shapes_arguments_and_errors(module: str):
  path = ROOT / "seerjax" / module.replace(".", "/")
  path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
  assert complaints(path.read_text()) == []


def test_what_a_docstring_lacks_is_seen():
  source = '''
def bare(): ...

def refuses(x: int, y: np.ndarray):
  """Returns nothing.

  Args:
    x: one.
  """
  raise errors.Wrong("x")

@dataclasses.dataclass
class Record:
  """One.

  Attributes:
    known: f32[n].
    shapeless: a lot.
  """
  known: np.ndarray
  shapeless: np.ndarray
  unknown: int
'''
  assert complaints(source) == [
    "bare: got no docstring",
    "refuses: got no 'Raises:' for Wrong",
    "refuses: got an 'Args:' without y",
    "refuses: got no shape of y",
    "Record: got no shape of the field shapeless",
    "Record: got no text for the field unknown",
  ]
