"""Short sentences change a packing as specified, and the result is always a packing."""

from __future__ import annotations

import json

import numpy as np
from packing_cases import QUARTERS, SMALL, is_packing, random_sentence
import pytest

from experiments.problems import circle_packing
from experiments.problems.circle_packing import edits


def test_sentences_give_valid_packings_and_equal_sentences_equal_ones(seed):
  environment = circle_packing.CirclePacking(num_circles=26)
  language = environment.language
  assert language is not None
  rng = np.random.default_rng(seed)
  artefact = environment.start(seed)
  for trial in range(25):
    sentence = random_sentence(language, rng)
    before = json.dumps(artefact)
    made = language.apply(artefact, sentence, trial)
    assert json.dumps(artefact) == before
    assert language.apply(json.loads(before), sentence, trial) == made
    assert environment.verify(made).is_valid and is_packing(made)
    assert json.loads(json.dumps(made)) == made
    artefact = made


@pytest.mark.parametrize("num_circles", [1, 2, 3])
@pytest.mark.parametrize("verb", edits.VERBS)
def test_every_verb_works_on_few_circles(num_circles, verb):
  environment = circle_packing.CirclePacking(num_circles=num_circles, num_edits=1)
  language = environment.language
  assert language is not None
  artefact = environment.start(0)
  for arguments in ((0, 0, 0), (31, 31, 31), (1, 30, 17)):
    sentence = (edits.VERB_IDS + edits.VERBS.index(verb), *arguments, 7, 0)
    assert environment.verify(language.apply(artefact, sentence, 0)).is_valid


def test_the_noise_of_an_edit_follows_the_seed():
  language = SMALL.language
  assert language is not None
  shake = (edits.VERB_IDS + edits.VERBS.index("shake"), 31, 0, 0)
  keep = (edits.VERB_IDS, 0, 0, 0)
  artefact = SMALL.start(0)
  made = [language.apply(artefact, (*shake, *keep, *keep, 3, 7), seed) for seed in range(4)]
  assert len({json.dumps(packing) for packing in made}) > 1


def test_an_edit_does_what_it_says():
  circles = np.array(QUARTERS).T
  rng = np.random.default_rng(0)
  for verb, arguments, expected in (
    ("keep", (1, 2, 3), QUARTERS),
    ("move", (1, 3, 7), [QUARTERS[0], [3.5 / 32, 7.5 / 32, 0.25], *QUARTERS[2:]]),
    ("resize", (6, 7, 0), [*QUARTERS[:2], [0.75, 0.25, 0.125], QUARTERS[3]]),
    ("swap", (0, 1, 0), QUARTERS),
    ("slide", (0, 3, 31), [[0.75, 0.75, 0.25], *QUARTERS[1:]]),
  ):
    changed = circles.copy()
    edits._edit(changed, verb, *arguments, rng)
    assert changed.T.tolist() == expected, verb
  # The largest hole of three quarters is the fourth's place.
  changed = circles.copy()
  changed[:, 1] = 0.5, 0.5, 0.01
  edits._edit(changed, "refill", 0, 0, 15, rng)
  np.testing.assert_allclose(changed[:, 1], QUARTERS[1], atol=1 / 64)


def test_a_prompt_shows_the_value_and_every_circle_in_its_range():
  for num_circles in (1, 26, 32):
    environment = circle_packing.CirclePacking(num_circles=num_circles)
    language = environment.language
    assert language is not None
    assert language.vocab_size == 128 and language.stop_token is None
    prompt = language.prompt(environment.start(1))
    assert len(prompt) == 3 * num_circles + 1 <= 97
    assert edits.VALUE_IDS <= prompt[0] < language.vocab_size
    for place, token in enumerate(prompt[1:]):
      assert place % 3 * 32 <= token < place % 3 * 32 + 32
  language = circle_packing.CircleLanguage(num_circles=4)
  assert language.prompt(QUARTERS)[1:] == (8, 40, 80, 24, 40, 80, 8, 56, 80, 24, 56, 80)
  for low, high in language.allowed:
    assert 0 <= low < high <= language.vocab_size


def test_sentences_that_were_not_masked_are_refused():
  language = SMALL.language
  assert language is not None
  sentence = [low for low, _ in language.allowed]
  with pytest.raises(ValueError, match="got 13 tokens, expected 14; sample one"):
    language.apply(SMALL.start(0), sentence[1:], 0)
  sentence[1] = 32
  with pytest.raises(ValueError, match="got token 32 in place 1, expected 0 <= token < 32; mask"):
    language.apply(SMALL.start(0), sentence, 0)
