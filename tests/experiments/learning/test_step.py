"""A training step compared with TRL's: the common reward, and the table by hand."""

from __future__ import annotations

import pytest

from experiments.learning import step as real_step


@pytest.mark.parametrize(
  "text, right",
  [
    ("4 - 1 = 3", 1.0),
    ("3", 1.0),
    ("The answer is 3.", 1.0),
    ("3 is 4 less 1", 0.0),
    ("-3", 0.0),
    ("", 0.0),
    ("three", 0.0),
    ("1,003", 0.0),
  ],
)
def test_the_last_number_of_a_text_is_its_answer(text, right):
  assert real_step.reward("4 - 1 =", text, {"answer": "3"}) == right


def test_the_table_compares_seconds_by_token_without_the_first_step():
  def record(side: str, seconds: float) -> dict:
    step = dict(generate=1.0, learn=1.0, seconds=seconds, tokens=100.0, max_gap=0.0)
    return dict(side=side, steps=[step | dict(seconds=99.0), step, step], peak_bytes=2**30)

  text = real_step.table([record("ours", 2.0), record("trl", 3.0)])
  assert "| ours | 2 | 2.0 (2.0 to 2.0) | 1.0 | 1.0 | 100 | 20.0 | 0 | 1.00 |" in text
  assert "Seconds by sampled token, TRL / ours: 1.50" in text
