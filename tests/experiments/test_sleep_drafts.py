"""Drafts from sleep: counts of a small model, and equal completions."""

from __future__ import annotations

import word_engine

from experiments import sleep_drafts
from seerjax.engine.engine import EngineConfig
from seerjax.models.loading import Model


def test_arms_have_equal_answers_and_sleep_adds_drafts():
  model = Model(
    word_engine.CONFIG, word_engine.params(), word_engine.NUMERICS, word_engine.TOKENIZER
  )
  config = EngineConfig(
    page_size=8, num_pages=60, max_sequences=2, max_context=160, row_buckets=(4, 16),
    steps_per_visit=1,
  )  # fmt: skip
  counts = [
    sleep_drafts.ask(
      model,
      arm=arm,
      num_contexts=1,
      num_questions=3,
      split="heldout",
      config=config,
      max_tokens=8,
      verbosity=1,
      temperature=0.0,
    )
    for arm in sleep_drafts.ARMS
  ]
  assert counts[0].answers == counts[1].answers == counts[2].answers
  assert all(count.questions == 3 and count.tokens >= count.steps for count in counts)
  assert sleep_drafts.line("rewrites", counts[1]).startswith("| rewrites | 3 | ")
