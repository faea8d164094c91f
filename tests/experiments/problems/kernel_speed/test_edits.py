"""Sentences set the expected fields, and always make a schedule."""

from __future__ import annotations

import hypothesis
from hypothesis import strategies as st
import pytest
from schedule_cases import FEATURES, LANGUAGE, PLAIN

from experiments.problems.kernel_speed import schedules


def test_edits_by_hand():
  # Fields are 1 to 13, choices 14 to 21.
  assert LANGUAGE.vocab_size == 24 and LANGUAGE.allowed[:3] == ((1, 14), (14, 22), (0, 14))
  assert LANGUAGE.prompt(FEATURES) == (0, 14, 15, 14, 14, 15, 14, 15, *[14] * 6)
  assert LANGUAGE.apply(PLAIN, [2, 15, 7, 15, 5, 15, 0], 0) == FEATURES
  # The third choice of two folds to the first.
  assert LANGUAGE.apply(FEATURES, [2, 16, 0], 0) == {**FEATURES, "layout": "rows"}
  assert PLAIN["layout"] == "rows"


@pytest.mark.parametrize(
  ("sentence", "message"),
  [
    ([], "FieldEdits.apply: got 0 tokens, expected 8, or pairs of a field and a choice"),
    ([0], "got 1 tokens, expected 8"),
    ([2, 15], "got 2 tokens, expected 8"),
    ([2, 0], "got 2 tokens"),
    ([2, 15] * 4 + [0], "got 9 tokens"),
    ([2, 22, 0], "got token 22 at place 1, expected 14 to 21; see `allowed`"),
    ([2, 15, 0, 15, 2, 15, 2, 15], "got token 0 at place 2, expected 1 to 13"),
  ],
)
def test_broken_sentences_are_refused(sentence, message: str):
  with pytest.raises(ValueError, match=message):
    LANGUAGE.apply(PLAIN, sentence, 0)


@hypothesis.given(
  st.tuples(*(st.integers(max(first, 1), past - 1) for first, past in LANGUAGE.allowed))
)
def test_every_sentence_makes_a_schedule(sentence):
  edited = LANGUAGE.apply(PLAIN, sentence, 0)
  schedules.Schedule(**edited)
  assert LANGUAGE.apply(PLAIN, sentence, 1) == edited
  assert LANGUAGE.apply(PLAIN, [*sentence[:2], 0], 0) == LANGUAGE.apply(PLAIN, sentence[:2] * 4, 0)
