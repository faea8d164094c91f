"""Loading problems by name, and errors for names without a problem."""

from __future__ import annotations

from collections.abc import Iterator
import sys

import pytest
import tiny_problem

from seerjax.discovery import environment as environment_lib, loading

MODULE = """
import dataclasses

import tiny_problem


class Sized(tiny_problem.Row):
  def __init__(self, size=3):
    super().__init__()
    object.__setattr__(self, "size", size)


def minimised(number):
  return tiny_problem.Row(is_maximised=number > 0)


READY = tiny_problem.Row()
NOTHING = 7


class Bare:
  name = "bare"


def raises():
  raise KeyError("no")


def refuses(number):
  raise ValueError(f"refuses: got {number}")
"""


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
  """The name of a module on the Python path."""
  folder = tmp_path_factory.mktemp("problems")
  (folder / "made_problems.py").write_text(MODULE)
  sys.path.append(str(folder))
  yield "made_problems"
  sys.path.remove(str(folder))


def test_the_path_of_a_python_file_gives_the_problem_in_it():
  environment = loading.load(tiny_problem.PATH)
  assert environment.name == "digits" and environment.language is not None
  assert environment.verify([5] * 6).value == tiny_problem.MOST
  assert not environment.verify([6] * 6).is_valid
  twin = tiny_problem.Row()
  assert environment.start(3) == twin.start(3) != twin.start(4)


def test_a_class_of_a_module_is_called_with_nothing_a_number_or_arguments(module):
  usual, sized = loading.load(f"{module}:Sized"), loading.load(f"{module}:Sized:5")
  assert vars(usual)["size"] == 3 and vars(sized)["size"] == 5
  assert isinstance(usual, environment_lib.Environment)
  assert vars(loading.load(f"{module}:Sized", size=7))["size"] == 7
  assert loading.load("tiny_problem:Row", is_maximised=False).is_maximised is False


def test_a_function_that_returns_a_problem_and_a_problem_itself_will_do(module):
  assert loading.load(f"{module}:minimised:1").is_maximised
  assert not loading.load(f"{module}:minimised:0").is_maximised
  assert loading.load(f"{module}:READY").name == "digits"


@pytest.mark.parametrize(
  "name", ["", "chess", ":3", "chess:4", "problem.txt", "a:B:1:2", ":Row", "a:", "a:b-c"]
)
def test_a_name_of_another_form_is_refused(name):
  expected = (
    f"problem: got '{name}', expected 'my_module:MyProblem', with a number as in"
    r" 'my_module:MyProblem:26', or the path of a Python file that ends with '\.py'; correct"
    " --config.problem"
  )
  with pytest.raises(ValueError, match=expected):
    loading.load(name)
  with pytest.raises(ValueError, match=expected):
    loading.check_name(name)


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(
  "name, message",
  [
    *((f"tiny_problem:Row:{number}",
       f"problem: got 'tiny_problem:Row:{number}', expected a number after the second colon; leave"
       " it out, or write tiny_problem:Row:26")
      for number in ("-1", "2.5", "x", " 3", "", "٣", "²")),
    ("made_problems:Missing", "has no 'Missing', expected a problem; it has"),
    ("made_problems:NOTHING",
     r"without \['name', .*'picture'\], expected a problem with name, is_maximised"),
    ("made_problems:Bare",
     r"without \['is_maximised', .*'picture'\], expected a problem with name"),
    ("made_problems:raises",
     r"problem: got KeyError: 'no' from raises\(\), expected a problem; fix it"),
    ("made_problems:refuses:4", "^refuses: got 4"),
    ("no_such:Row",
     r"problem: got 'no_such:Row', but module 'no_such' cannot be imported \(No module"),
  ],
)  # fmt: skip
def test_what_gives_no_problem_is_refused(name: str, message: str):
  with pytest.raises(ValueError, match=message):
    loading.load(name)


def test_a_file_that_is_not_there_is_refused(tmp_path):
  with pytest.raises(FileNotFoundError, match=r"nowhere\.py: got no such file, expected Python"):
    loading.load(str(tmp_path / "nowhere.py"))
