"""Scores of alternatives have equal bits in pieces and at once, and each row is computed once."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import tiny_model

from seerjax.models.loading import Model
from seerjax.serve import scoring
from seerjax.serve.scoring import SHORTEST, Scorer
from seerjax.types import SamplingParams

pytestmark = pytest.mark.thorough  # Every day test_routes counts the rows of one stream.
PROMPT = tuple(np.random.default_rng(3).integers(0, 64, 21).tolist())
ANSWER = tuple(np.random.default_rng(4).integers(0, 64, 90).tolist())
PARAMS = SamplingParams(temperature=0.8, top_k=20)


def make_scorer(numerics, **others) -> Scorer:
  model = Model(tiny_model.CONFIG, tiny_model.params(numerics), numerics)
  return Scorer(model, context=256, **others)


def in_pieces(following, ends) -> list:
  return [top for end in ends for top in following.take(ANSWER[:end])]


@pytest.mark.few(1)
@pytest.mark.parametrize(
  "numerics",
  [
    pytest.param(tiny_model.NATIVE, id="native f32"),
    pytest.param(tiny_model.NUMERICS, id="f32"),
    pytest.param(tiny_model.NATIVE_BFLOAT16, id="native bf16"),
    pytest.param(tiny_model.BFLOAT16, id="bf16"),
  ],
)
def test_pieces_have_the_bits_of_the_whole_and_each_row_is_computed_once(numerics):
  scorer = make_scorer(numerics)
  whole = scorer.following(PROMPT, PARAMS, 5, keeps=False).take(ANSWER)
  assert len(whole) == len(ANSWER) and all(whole)
  count = len(PROMPT) + len(ANSWER) - 1
  assert scorer.num_rows == count
  ends = [*range(1, 60), 64, 64, 75, 76, len(ANSWER)]
  assert in_pieces(scorer.following(PROMPT, PARAMS, 5), ends) == [*whole]
  # Each row once; the rows present when the pages were outgrown, twice.
  assert count < scorer.num_rows - count <= count + SHORTEST
  # Twin: without kept pages each piece recomputes everything before it.
  before = scorer.num_rows
  again = in_pieces(scorer.following(PROMPT, PARAMS, 5, keeps=False), ends[:20])
  assert again == [*whole[:20]]
  assert scorer.num_rows - before == sum(len(PROMPT) + end - 1 for end in ends[:20])


def test_streams_beside_one_another_keep_no_more_than_they_may():
  scorer = make_scorer(tiny_model.NATIVE, most_kept_bytes=1)
  first, second = (scorer.following(PROMPT, PARAMS, 5) for _ in range(2))
  alone = in_pieces(make_scorer(tiny_model.NATIVE).following(PROMPT, PARAMS, 5), range(1, 9))
  found = []
  for end in range(1, 9):  # In turns: each takes the other's room.
    found.append(first.take(ANSWER[:end]))
    assert second.pages is None
    assert second.take(ANSWER[:end]) == found[-1]
    assert first.pages is None and jax.tree.leaves(second.pages)
  assert [top for piece in found for top in piece] == alone
  del second  # A disconnected client's kept pages are freed.
  assert not jax.tree.leaves(first.pages) and not scorer._kept


def test_scorers_of_equal_models_share_their_programs():
  programs = (scoring._hidden_rows, scoring._likeliest, scoring._forced)
  counted = lambda: [program._cache_size() for program in programs]
  wanted = make_scorer(tiny_model.NUMERICS).prompt(PROMPT, 2)
  before = counted()
  assert all(before)
  assert make_scorer(tiny_model.NUMERICS).prompt(PROMPT, 2) == wanted
  assert counted() == before
