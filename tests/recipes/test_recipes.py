"""Recipes are the runs that gave the results they state."""

from __future__ import annotations

import importlib
import pathlib

import pytest

from experiments.learning import real as real_learning
from seerjax import recipes
from seerjax.commands import train
from seerjax.recipes import arithmetic, word_problems
from seerjax.run import presets
from seerjax.run.config import RunConfig

FOLDER = pathlib.Path(next(iter(recipes.__path__)))
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")


def test_the_recipe_of_the_main_job_is_the_default():
  assert word_problems.config() == presets.of_model("nano")


def test_the_recipe_of_real_weights_is_the_cell_that_was_measured():
  settings = real_learning.Settings(model="models/smollm2-135m-instruct")
  cell = real_learning.Cell("basic_arithmetic", "full", 0)
  assert arithmetic.config() == real_learning.config_of(settings, cell)


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_states_its_command_and_its_result(name: str):
  module = importlib.import_module(f"seerjax.recipes.{name}")
  text = module.__doc__ or ""
  assert f"seerjax train --recipe={name}" in text and "\nResult, 20" in text
  page = text.partition("(docs/results/")[2].partition(")")[0].strip()
  assert (FOLDER.parents[1] / "docs" / "results" / page).is_file()
  assert train.recipe_of(name) == module.config()


def test_a_recipe_of_ones_own_is_a_function():
  assert train.recipe_of("seerjax.run.presets:main_job") == presets.main_job()


@pytest.mark.parametrize(
  ("name", "message"),
  [
    (
      "nothing",
      r"--recipe: got 'seerjax.recipes.nothing:config', but module .* cannot be",
    ),
    (
      "nowhere:config",
      r"--recipe: got 'nowhere:config', but module 'nowhere' cannot be",
    ),
    ("seerjax.run.presets:sorted", r"--recipe: got .*, but 'seerjax.run.presets' has no 'sorted'"),
    ("seerjax.run.presets:__name__", r"--recipe: got '.*', a str, expected a function"),
    ("collections:OrderedDict", r"--recipe: got an OrderedDict from .*, expected a RunConfig"),
  ],
)
def test_what_is_no_recipe_is_refused(name, message):
  with pytest.raises(ValueError, match=message):
    train.recipe_of(name)


def test_recipes_are_configurations():
  assert all(isinstance(train.recipe_of(name), RunConfig) for name in NAMES)
