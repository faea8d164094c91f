"""SmolLM2-135M-Instruct, dequantised from Q4_1: it loads and answers."""

from __future__ import annotations

import pathlib

import pytest

from seerjax.engine.engine import Engine, EngineConfig
from seerjax.models import loading

pytestmark = pytest.mark.real


def test_the_capital_of_france_is_paris(smollm2: pathlib.Path):
  engine = Engine(
    loading.load_model(smollm2), config=EngineConfig(max_sequences=8, max_context=256)
  )
  (answer,) = engine.generate(
    ["What is the capital of France?"], temperature=0.0, max_tokens=16
  )
  assert answer.text == "The capital of France is Paris."
