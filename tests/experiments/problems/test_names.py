"""Problems by short name: the problem of each, and errors for unknown names."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import import_graph
import numpy as np
import pytest
import tiny_problem

from experiments.problems import names
from seerjax.discovery import edits, environment as environment_lib

# (asked for, got): each problem as it is usual, and with a number.
NAMES = (
  ("apple_machines", "apple_machines_0000"),
  ("apple_machines:12", "apple_machines_0012"),
  ("apple_machines_plain:12", "apple_machines_0012"),
  ("purse_seine", "purse_seine_0"),
  ("purse_seine:3", "purse_seine_3"),
  ("purse_seine_plain:3", "purse_seine_3"),
  ("circle_packing", "circle_packing_26"),
  ("circle_packing:5", "circle_packing_5"),
  ("minimum_overlap", "minimum_overlap_51"),
  ("minimum_overlap:20", "minimum_overlap_20"),
  ("first_autocorrelation", "first_autocorrelation_300"),
  ("first_autocorrelation:30", "first_autocorrelation_30"),
  ("second_autocorrelation", "second_autocorrelation_100"),
  ("second_autocorrelation:30", "second_autocorrelation_30"),
  ("trimul", "trimul_64_128_128"),
  ("trimul:16", "trimul_16_128_128"),
  ("pallas_matmul:512", "matmul_tiles_512_4096_4096"),
  ("pallas_rms_norm", "rms_norm_tiles_4096_4096"),
  ("denoising", "denoising_simulated"),
)
PROGRAMS = (
  ("purse_seine_programs:2", "purse_seine_programs_2"),
  ("apple_machines_programs", "apple_machines_programs_8"),
)


@pytest.mark.parametrize(("name", "found"), NAMES, ids=[name for name, _ in NAMES])
def test_a_name_gives_a_whole_environment(name, found):
  environment = names.load(name)
  assert environment.name == found
  assert isinstance(environment, environment_lib.Environment)
  assert isinstance(environment.language, environment_lib.EditLanguage)
  # The engine's vocabulary is cut into eight, and each place allows ids of it.
  language = environment.language
  assert language.vocab_size % 8 == 0
  assert all(0 <= low < high <= language.vocab_size for low, high in language.allowed)


@pytest.mark.parametrize(
  ("path", "found"),
  [
    ("apple_machines:AppleMachines:12", "apple_machines_0012"),
    ("purse_seine:PurseSeine:3", "purse_seine_3"),
    ("circle_packing:CirclePacking:5", "circle_packing_5"),
    ("minimum_overlap:MinimumOverlap:20", "minimum_overlap_20"),
    ("autocorrelation:FirstAutocorrelation:30", "first_autocorrelation_30"),
    ("kernel_speed:TriMulSpeed:16", "trimul_16_128_128"),
    ("kernel_speed:matmul_tiles:512", "matmul_tiles_512_4096_4096"),
    ("denoising:Denoising", "denoising_simulated"),
    ("contest:purse_seine_programs:2", "purse_seine_programs_2"),
  ],
)
def test_the_paths_that_runs_have_stored_still_load(path, found):
  assert names.load(f"experiments.problems.{path}").name == found


def test_a_change_of_any_problem_concerns_the_table_of_names():
  edges = import_graph.graph()
  problems = {module for module in edges if module.startswith("experiments.problems.")}
  unseen = {
    module for module in problems if "experiments.problems.names" not in
    import_graph.above([module], edges)
  }  # fmt: skip
  assert len(problems) > 30 and not unseen


def test_a_problem_whose_package_is_not_there_says_what_to_install():
  # In a separate process, in which the package cannot be found; another problem does not need it.
  program = """
import sys
sys.modules["highspy"] = None
from experiments.problems import names
print(names.load("apple_machines").name)
names.load("circle_packing")
"""
  done = subprocess.run(
    [sys.executable, "-c", program],
    capture_output=True,
    text=True,
    cwd=pathlib.Path(__file__).parents[3],
    check=False,
  )
  assert done.stdout == "apple_machines_0000\n"
  expected = "got 'circle_packing', which needs highspy, expected it to be installed; run `pip"
  assert expected in done.stderr


@pytest.mark.parametrize(("name", "found"), PROGRAMS)
def test_programs_have_no_language_of_edits(name, found):
  environment = names.load(name)
  assert environment.name == found and environment.language is None
  assert isinstance(environment, environment_lib.Environment)


def test_every_name_of_the_table_is_tested():
  tested = {name.partition(":")[0] for name, _ in (*NAMES, *PROGRAMS)}
  assert tested == {*names.NAMES, "denoising"}


@pytest.mark.parametrize("kind", ["apple_machines", "purse_seine"])
def test_a_plain_problem_is_the_same_one_without_the_polish(kind):
  with_polish, plain = (names.load(name) for name in (f"{kind}:1", f"{kind}_plain:1"))
  start = with_polish.start(0)
  assert start == plain.start(0) and with_polish.verify(start) == plain.verify(start)
  assert with_polish.language is not None and plain.language is not None
  assert with_polish.language.allowed != plain.language.allowed


def test_a_colon_without_a_number_gives_the_usual_one():
  assert names.load("minimum_overlap:").name == names.load("minimum_overlap").name


def test_what_is_no_short_name_the_library_loads():
  assert names.load(tiny_problem.PATH).name == "digits"
  assert names.load("tiny_problem:Row").name == "digits"


def test_a_path_behind_denoising_is_that_of_counts(tmp_path):
  with pytest.raises((OSError, ValueError), match="nowhere"):
    names.load(f"denoising:{tmp_path / 'nowhere.npz'}")


@pytest.mark.parametrize("name", ["", "chess", ":3", "Circle_packing", "chess:4", "problem.txt"])
def test_an_unknown_name_is_refused_with_those_that_there_are(name):
  known = re.escape(str(sorted([*names.NAMES, "denoising"])))
  expected = (
    rf"problem: got '{name}', expected one of {known}, with a number as in 'circle_packing:32',"
    r" 'my_module:MyProblem', or the path of a Python file that ends with '\.py'; correct"
    " --config.problem"
  )
  with pytest.raises(ValueError, match=expected):
    names.load(name)


@pytest.mark.parametrize("number", ["-1", "2.5", "x", " 3", "3:4", "٣", "²"])
def test_what_is_no_number_is_refused(number):
  expected = (
    rf"problem: got 'circle_packing:{number}', expected a number of circles behind the colon;"
    " circle_packing:26 is usual"
  )
  with pytest.raises(ValueError, match=expected):
    names.load(f"circle_packing:{number}")


def test_a_number_out_of_range_is_refused_by_the_problem_itself():
  with pytest.raises(ValueError, match="got 0, expected 1"):
    names.load("circle_packing:0")


def test_what_was_loaded_twice_judges_alike():
  # A worker process loads the same problem as this one.
  here, there = (names.load("minimum_overlap:20") for _ in range(2))
  start = here.start(5)
  assert start == there.start(5)
  assert here.language is not None and there.language is not None
  random = np.random.default_rng(3)
  found = []
  for _ in range(20):
    job = edits.Job(start, edits.random_sentence(here.language, random), 7)
    found.append([edits.attempt(environment, job) for environment in (here, there)])
  assert all(str(one) == str(other) for one, other in found)  # NaN is no NaN's equal.
  assert any(one.score.is_valid for one, _ in found)
