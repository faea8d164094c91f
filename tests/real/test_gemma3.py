"""Gemma 3 270M, dequantised from Q4_K_M, continues texts as `transformers` does."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import pytest

from seerjax.engine.engine import Engine, EngineConfig
from seerjax.models import loading
from seerjax.types import Request, SamplingParams

pytestmark = pytest.mark.real
# Greedy continuations by transformers 5.23 on torch 2.13 (float32, eager attention, one thread) of
# ten texts, 24 tokens each, with log-probabilities; "margin" is the smallest difference of the two
# largest logits at any of their tokens. transformers' AutoTokenizer gave the same ids.
ANSWERS = pathlib.Path(__file__).with_name("gemma3_greedy_answers.json")
WINDOW = 512
# Largest difference of a log-probability, in nats: 1.5e-5 was seen. A window of one position less
# differs by 0.013, and without windows the longest text has another answer.
TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def engine(gemma3: pathlib.Path) -> Engine:
  model = loading.load_model(gemma3)
  return Engine(model, config=EngineConfig(max_num_seqs=10, max_model_len=832))


def test_it_is_the_base_model_with_windows_in_five_of_six_layers(engine: Engine):
  windows = [layer.attention.window for layer in engine.model.layers]
  assert windows == ([WINDOW] * 5 + [None]) * 3
  assert engine.tokenizer.chat_template == ""


def test_ten_greedy_continuations_are_those_of_transformers(engine: Engine):
  rows = json.loads(ANSWERS.read_text())
  assert len(rows) == 10 and min(row["margin"] for row in rows) > 2 * TOLERANCE
  # A text longer than the window, so that windowed layers forget its beginning.
  assert max(len(row["prompt"]) for row in rows) > WINDOW + 200
  found = engine.generate(
    [
      Request(
        request_id=row["text"],
        prompt=tuple(row["prompt"]),
        sampling=SamplingParams(
          temperature=0.0, max_tokens=row["max_tokens"], stop_token_ids=engine.tokenizer.eos_ids
        ),
      )
      for row in rows
    ]
  )
  for row, answer in zip(rows, found, strict=True):
    assert engine.tokenizer.encode(row["text"], add_special_tokens=True) == row["prompt"]
    assert [*answer.tokens] == row["answer"], row["text"]
    np.testing.assert_allclose(answer.raw_logprobs, row["logprobs"], atol=TOLERANCE, rtol=0)
