"""The engine with the model in the package: one prompt, four seeds, bit-identical repetition.

Four requests ask the same question with seeds 0 to 3. The first one is repeated alone, by an engine
with another page size: its text and log-probabilities have the same bits, because they depend only
on (weights, prompt, sampling parameters, seed). The correct answer is 29; nano often fails on
questions of this length, and reinforcement learning starts from there.

  python examples/generate.py

Takes about ten seconds on two CPU cores, mostly compilation. The last line reads
`equal bits: True`.
"""

from __future__ import annotations

import sys

import numpy as np

from seerjax import (
  Completion,
  Engine,
  EngineConfig,
  NumericsConfig,
  Request,
  SamplingParams,
  load_model,
)

QUESTION = (
  "Leo starts with 4 boxes of 7 eggs. Then for 5 days Leo gets 6 eggs each day. Later a friend"
  " gives 14 eggs to Leo. Then Leo loses 43 eggs. How many eggs does Leo have in the end?"
)
NUMERICS = NumericsConfig(query_tile=4, kv_split=64)


def ask(seeds: list[int], page_size: int) -> list[Completion]:
  """Returns one completion per seed, sampled in one batch by a new engine."""
  model = load_model("nano", NUMERICS)
  assert model.tokenizer is not None
  sizes = EngineConfig(page_size=page_size, max_num_seqs=4, max_model_len=256)
  engine = Engine(model, config=sizes)
  prompt = tuple(model.tokenizer.chat_ids(QUESTION))
  sampling = SamplingParams(max_tokens=96, stop_token_ids=model.tokenizer.eos_ids)
  return engine.generate(
    Request(request_id=str(seed), prompt=prompt, sampling=sampling, seed=seed) for seed in seeds
  )


def main() -> bool:
  """Prints the completions; returns whether the repeated one has equal bits."""
  answers = ask([0, 1, 2, 3], page_size=32)
  for answer in answers:
    total = float(np.sum(answer.behaviour_logprobs, dtype=np.float64))
    print(f"seed {answer.request_id}: {answer.text!r}, {total:.3f} nats, {answer.finish_reason}")
  (alone,) = ask([0], page_size=16)
  return alone.tokens == answers[0].tokens and np.array_equal(
    alone.behaviour_logprobs, answers[0].behaviour_logprobs
  )


if __name__ == "__main__":
  is_equal = main()
  print("equal bits:", is_equal)
  sys.exit(not is_equal)
