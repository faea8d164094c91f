"""A model small enough to run every experiment in seconds, and a run of it."""

from __future__ import annotations

import pathlib

import pytest
import tiny_runs


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
  """The directory of a random model of two layers with nano's vocabulary."""
  return tiny_runs.write_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def trained(
  tiny: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[pathlib.Path, dict[str, dict[str, list[float]]]]:
  """Part c on the tiny model: a directory with the two runs, and their log lines."""
  directory = tmp_path_factory.mktemp("trained")
  return directory, tiny_runs.train(tiny, directory)
