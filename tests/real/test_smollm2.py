"""SmolLM2-135M-Instruct, dequantised from Q4_1, gives the completions of `transformers`."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import pytest

from seerjax.engine.engine import Engine, EngineConfig
from seerjax.models import loading
from seerjax.types import Request, SamplingParams

pytestmark = pytest.mark.real
# Greedy answers of transformers 5.23 on torch 2.13 (float32, eager attention, two threads) to our
# ids of eight questions, at most 24 tokens each, with log-probabilities; "margin" is the smallest
# difference of the two largest logits at any of an answer's tokens.
ANSWERS = pathlib.Path(__file__).with_name("greedy_answers.json")
# Largest difference of a log-probability, in nats: 4.4e-5 was seen on longer answers.
TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def engine(smollm2: pathlib.Path) -> Engine:
  return Engine(loading.load_model(smollm2), config=EngineConfig(max_num_seqs=8, max_model_len=256))


def test_the_capital_of_france_is_paris(engine: Engine):
  (answer,) = engine.generate(["What is the capital of France?"], temperature=0.0, max_tokens=16)
  assert answer.text == "The capital of France is Paris."


def test_eight_greedy_answers_are_those_of_transformers(engine: Engine):
  rows = json.loads(ANSWERS.read_text())
  assert len(rows) == 8 and min(row["margin"] for row in rows) > 2 * TOLERANCE
  found = engine.generate(
    [
      Request(
        request_id=row["question"],
        prompt=tuple(row["prompt"]),
        sampling=SamplingParams(
          temperature=0.0, max_tokens=row["max_tokens"], stop_token_ids=engine.tokenizer.eos_ids
        ),
      )
      for row in rows
    ]
  )
  for row, answer in zip(rows, found, strict=True):
    chat = engine.tokenizer.chat_ids([{"role": "user", "content": row["question"]}])
    assert [*chat] == row["prompt"], row["question"]
    assert [*answer.tokens] == row["answer"], row["question"]
    np.testing.assert_allclose(answer.raw_logprobs, row["logprobs"], atol=TOLERANCE, rtol=0)
