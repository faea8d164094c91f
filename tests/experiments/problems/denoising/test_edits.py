"""Sentences make pipelines, or give an error."""

from __future__ import annotations

import json

import hypothesis
from hypothesis import strategies as st
from pipeline_cases import ENVIRONMENT, LANGUAGE, MAGIC, small
import pytest

from experiments.problems.denoising import edits, operations


def sentences():
  whole = st.tuples(*(st.integers(first, past - 1) for first, past in LANGUAGE.allowed))
  return st.one_of(whole, whole.map(lambda tokens: (*tokens[:6], LANGUAGE.stop_token)))


def test_the_edit_language_keeps_its_form():
  assert LANGUAGE.vocab_size % 8 == 0 and LANGUAGE.vocab_size <= 128
  assert max(past for _, past in LANGUAGE.allowed) <= LANGUAGE.vocab_size
  longest = {"steps": [dict(MAGIC["steps"][2]) for _ in range(operations.MAX_STEPS)]}
  for artefact in (ENVIRONMENT.start(0), MAGIC, longest):
    ids = LANGUAGE.prompt(artefact)
    assert 1 <= len(ids) <= 100 and all(0 <= token < LANGUAGE.vocab_size for token in ids)
  assert LANGUAGE.prompt(MAGIC) != LANGUAGE.prompt(ENVIRONMENT.start(0))


def tokens(verb: str, place: int, op: str = "normalise", levels=(5, 5, 5)):
  names = [operation.name for operation in operations.OPERATIONS]
  offsets = [first for first, _ in LANGUAGE.allowed[1:6]]
  numbers = [place, names.index(op), *levels]
  verb_id = 1 + edits.PipelineEdits.VERBS.index(verb)
  return [verb_id, *(first + number for first, number in zip(offsets, numbers))]


def test_edits_by_hand():
  stop = [LANGUAGE.stop_token]
  first, second, third, last = MAGIC["steps"]
  svd = {"op": "svd", "rank": 1}
  for sentence, expected in [
    (tokens("insert", 4, "svd", (0, 0, 0)) + stop, [*MAGIC["steps"], svd]),
    (tokens("insert", 0, "svd", (0, 9, 9)) + stop, [svd, *MAGIC["steps"]]),
    (tokens("replace", 1, "svd", (0, 0, 0)) + stop, [first, svd, third, last]),
    (tokens("delete", 3) + stop, [first, second, third]),
    (
      tokens("nudge", 2, levels=(15, 8, 0)) + stop,
      [first, second, {**third, "neighbours": 6, "times": 2, "decay": 0.5}, last],
    ),
    (tokens("delete", 3) + tokens("delete", 0), [second, third]),
    # Places beyond the end fold into the pipeline.
    (tokens("delete", 7) + stop, [first, second, third]),
  ]:
    before = json.dumps(MAGIC)
    assert LANGUAGE.apply(MAGIC, sentence, 0) == {"steps": expected}
    assert json.dumps(MAGIC) == before


def test_polishing_never_makes_a_pipeline_worse():
  environment = small()
  polished = environment.language.apply(MAGIC, [*tokens("polish", 2), LANGUAGE.stop_token], 0)
  assert environment.verify(polished).value < environment.verify(MAGIC).value
  assert environment.language.apply(MAGIC, [*tokens("polish", 0), LANGUAGE.stop_token], 0) == MAGIC


@hypothesis.given(sentences(), sentences())
def test_sentences_make_pipelines_or_say_why_not(one, two):
  language = small().language
  artefact = small().start(0)
  for sentence in (one, two):
    try:
      edited = language.apply(artefact, sentence, 0)
    except ValueError:
      continue
    assert language.apply(artefact, sentence, 1) == edited
    assert json.loads(json.dumps(edited)) == edited
    if operations.complaint(edited):
      # A sentence can only be invalid by the order of transforms.
      assert "invert" in operations.complaint(edited) or "save" in operations.complaint(edited)
    else:
      artefact = edited


@pytest.mark.parametrize(
  ("sentence", "message"),
  [
    ([], "PipelineEdits.apply: got 0 tokens, expected 12, or 6 and then the stop token 0"),
    ([0], "got 1 tokens, expected 12"),
    (tokens("delete", 0), "got 6 tokens, expected 12"),
    ([*tokens("delete", 0)[:3], 0], "got 4 tokens, expected 12"),
    ([*tokens("delete", 0), *tokens("delete", 0), 0], "got 13 tokens, expected 12"),
    ([79, *tokens("delete", 0)[1:], 0], "got token 79 at place 0, expected 1 to 5; see `allowed`"),
    ([*tokens("delete", 0), 0, *tokens("delete", 0)[1:]], "got token 0 at place 6, expected 1 to"),
  ],
)
def test_broken_sentences_are_refused(sentence, message: str):
  with pytest.raises(ValueError, match=message):
    LANGUAGE.apply(MAGIC, sentence, 0)


def test_pipelines_neither_overflow_nor_vanish():
  whole = {"steps": [{"op": "log"}] * operations.MAX_STEPS}
  with pytest.raises(ValueError, match="got an insertion into 8 steps, expected at most 8"):
    LANGUAGE.apply(whole, [*tokens("insert", 0), 0], 0)
  with pytest.raises(ValueError, match="got the deletion of the only step"):
    LANGUAGE.apply({"steps": [{"op": "log"}]}, [*tokens("delete", 0), 0], 0)
