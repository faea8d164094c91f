"""Sentences yield legal fences, or the reason for an error."""

from __future__ import annotations

import json

from fence_cases import PLAIN, SQUARE, WHOLE, after_sentences, notched, sentence, sentences, small
import pytest

from experiments.problems.purse_seine import rectangles, rules
from seerjax.discovery import environment as environment_lib


def test_the_vocabulary_fits_its_protocol():
  language = WHOLE.language
  assert isinstance(language, environment_lib.EditLanguage)
  assert isinstance(WHOLE, environment_lib.Environment)
  assert isinstance(WHOLE, environment_lib.Baselines)
  assert language.vocab_size % 8 == 0 and language.vocab_size <= 128
  assert all(0 <= low < high <= language.vocab_size for low, high in language.allowed)
  assert language.stop_token is None
  for artefact in (SQUARE, WHOLE.start(0), after_sentences(WHOLE, 5, 4)):
    prompt = language.prompt(artefact)
    assert len(prompt) == 84 and all(0 <= token < language.vocab_size for token in prompt)


def test_the_prompt_shows_points_and_how_much_of_a_cell_is_inside():
  # 30 wanted points in the lower left cell, 30 unwanted ones in the next.
  environment = small([(i, 5) for i in range(30)], [(12_000, i) for i in range(30)])
  prompt = environment.language.prompt([[0, 0], [11_000, 0], [11_000, 3000], [0, 3000]])
  lower_left, other, next_cell = prompt[3], prompt[4], prompt[3 + 9]
  assert lower_left - other == 3 * 2 + 1
  assert other - next_cell == 3 * 2
  whole = environment.language.prompt([[0, 0], [99_999, 0], [99_999, 99_999], [0, 99_999]])
  assert whole[3] - lower_left == 1 and whole[4] - other == 2


# Without a polish most sentences drawn evenly leave the fence too long, or worse than it was.
@pytest.mark.parametrize(
  ("environment", "count", "least", "legal", "better"),
  [(WHOLE, 60, 1500, 60, 4), (PLAIN, 200, 300, 40, 2)],
  ids=["with a polish", "plain"],
)
def test_random_sentences_give_legal_fences_or_a_reason(environment, count, least, legal, better):
  outcomes, reasons = {"legal": 0, "better": 0}, []
  for seed in range(2):
    artefact = environment.start(seed)
    best = environment.verify(artefact).value
    drawn = sentences(environment, seed)
    for number in range(count):
      before, sentence = json.dumps(artefact), next(drawn)
      try:
        changed = environment.language.apply(artefact, sentence, number)
      except ValueError as error:
        reasons.append(str(error))
        continue
      assert json.dumps(artefact) == before
      score = environment.verify(changed)
      assert score.is_valid, score.reason
      outcomes["legal"] += 1
      if score.value > best:
        artefact, best = changed, score.value
        outcomes["better"] += 1
    assert best > least
  assert outcomes["legal"] > legal and outcomes["better"] > better
  assert all("expected" in reason for reason in reasons)


def test_equal_sentences_and_seeds_give_equal_fences():
  artefact = after_sentences(WHOLE, 1, 3)
  drawn = sentences(WHOLE, 9)
  seen = set()
  for number in range(6):
    sentence = next(drawn)

    def outcome(seed: int, sentence: tuple[int, ...] = sentence) -> str:
      try:
        return json.dumps(WHOLE.language.apply(artefact, sentence, seed))
      except ValueError as error:
        return str(error)

    assert outcome(number) == outcome(number)
    seen |= {outcome(number), outcome(number + 100)}
  assert len(seen) > 6


def test_a_sentence_that_keeps_all_only_climbs():
  start = WHOLE.start(2)
  after = WHOLE.language.apply(start, sentence(), 0)
  assert WHOLE.verify(after).value >= WHOLE.verify(start).value


def test_without_a_polish_a_sentence_does_what_its_edits_say():
  # A push moves the upper side out by 60 from 53,000, along all of it: nothing shortens or climbs.
  square = [[50_000, 50_000], [53_000, 50_000], [53_000, 53_000], [50_000, 53_000]]
  push = (rectangles.PUSH, 16, 17, 0, 15)
  pushed = PLAIN.language.apply(square, sentence(push)[:-1], 0)
  assert pushed == [[50_000, 50_000], [53_000, 50_000], [53_000, 53_060], [50_000, 53_060]]


def test_without_a_polish_a_fence_that_is_too_long_is_refused():
  fence = notched(220, 100_000, 99_700)
  push = (rectangles.PUSH, 16, 0, 15, 10)
  with pytest.raises(ValueError, match="long, expected at most 400000; add less"):
    PLAIN.language.apply(fence, sentence(push)[:-1], 0)


def test_edits_that_leave_nothing_are_refused():
  square = [[50_000, 50_000], [53_000, 50_000], [53_000, 53_000], [50_000, 53_000]]
  remove = (rectangles.REMOVE, 16, 16, 15, 15)
  with pytest.raises(ValueError, match="got nothing left, expected a fence of 4 to 1000 vertices"):
    WHOLE.language.apply(square, sentence(remove), 0)


def test_edits_that_change_nothing_are_refused():
  environment = small([(15, 15)])
  far_away = (rectangles.REMOVE, 31, 31, 0, 0)
  for edits in ((), (far_away, far_away)):
    for fence in (SQUARE, SQUARE[2:] + SQUARE[:2], SQUARE[::-1]):
      with pytest.raises(ValueError, match="got the fence back as it was, expected a change"):
        environment.language.apply(fence, sentence(*edits), 0)


def test_edits_that_leave_a_fence_too_long_are_refused():
  # A deep notch in the lower side; it is hardly ever selected among all the edges.
  fence = notched(220, 100_000, 99_700)
  assert rules.illegality(fence) == ""
  push = (rectangles.PUSH, 16, 0, 15, 10)
  with pytest.raises(ValueError, match="long that 1000 steps could not shorten, expected at most"):
    WHOLE.language.apply(fence, sentence(push), 0)


def test_edits_that_leave_too_many_vertices_are_refused():
  fence = notched(248, 90_000, 30_000)
  assert rules.illegality(fence) == "" and len(fence) == 996
  pushes = [(rectangles.PUSH, x, 0, 11, 3) for x in (8, 16)]
  assert WHOLE.verify(WHOLE.language.apply(fence, sentence(pushes[0]), 0)).is_valid
  with pytest.raises(ValueError, match="got 1004 vertices left, expected a fence of 4 to 1000"):
    WHOLE.language.apply(fence, sentence(*pushes), 0)


def test_what_is_no_sentence_is_refused():
  whole = sentence()
  with pytest.raises(ValueError, match="got 20 tokens, expected 21"):
    WHOLE.language.apply(SQUARE, whole[:-1], 0)
  with pytest.raises(ValueError, match="got 0 at 20, expected 100 <= id < 108"):
    WHOLE.language.apply(SQUARE, (*whole[:-1], 0), 0)
  with pytest.raises(ValueError, match="got 21 tokens, expected 20; write 4 edits of 5[.]"):
    PLAIN.language.apply(SQUARE, whole, 0)
