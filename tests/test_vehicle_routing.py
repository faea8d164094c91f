"""The own-problem example: valid starts, exact lengths, and edits that keep every rule."""

from __future__ import annotations

import itertools
import math
import pathlib
import random
from typing import Any

import pytest

from seerjax.discovery import problem_check, problem_file
from seerjax.discovery.environment import EditLanguage

PATH = pathlib.Path(__file__).parents[1] / "examples" / "vehicle_routing.py"
# Six customers on a line, 3, 4 and 5 times 100 to the right of the depot and to its left; vehicles
# of three parcels.
LINE = [(0, 0), (300, 0), (400, 0), (500, 0), (-300, 0), (-400, 0), (-500, 0)]
VERBS = dict(MOVE=6, BEFORE=7, SWAP=8, TURN=9, ALONE=10, POLISH=11)


@pytest.fixture(scope="module")
def problem() -> problem_file.OwnProblem:
  loaded = problem_file.load(PATH)
  assert isinstance(loaded, problem_file.OwnProblem)
  return loaded


@pytest.fixture(scope="module")
def on_a_line(tmp_path_factory) -> problem_file.OwnProblem:
  """The same file with an instance made by hand."""
  source = PATH.read_text()
  for old, new in (
    ("NUM_CUSTOMERS = 75", "NUM_CUSTOMERS = 6"),
    ("CAPACITY = 60", "CAPACITY = 3"),
    ("SIDE = 1000", f"SIDE = 1000\nLINE = {LINE}"),
    ("= _instance()", "= LINE, [0] + 6 * [1], [[abs(a[0] - b[0]) for b in LINE] for a in LINE]"),
  ):
    assert source.count(old) == 1
    source = source.replace(old, new)
  path = tmp_path_factory.mktemp("line") / "line.py"
  path.write_text(source)
  loaded = problem_file.load(path)
  assert isinstance(loaded, problem_file.OwnProblem)
  return loaded


def in_one_order(tours):
  return sorted(min(tour, tour[::-1]) for tour in tours)


def changed_by(language: Any, tours, tokens):
  """Returns the tours after a sentence; the given ones if it changes nothing."""
  try:
    return language.apply(tours, tokens, 0)
  except ValueError:
    return tours


def edits_of(problem: problem_file.OwnProblem) -> Any:
  assert isinstance(problem.language, EditLanguage)
  return problem.language


def test_nothing_is_found_in_the_example(problem):
  assert problem_check.check(problem, 0) == []


def test_it_is_the_problem_that_it_says(problem):
  assert (problem.name, problem.is_maximised) == ("vehicle_routing_75", False)
  language = edits_of(problem)
  assert language.vocab_size % 8 == 0 and language.vocab_size <= 128
  assert all(0 <= low < high <= language.vocab_size for low, high in language.allowed)
  starts = [problem.start(seed) for seed in range(20)]
  assert all(problem.verify(tours).is_valid for tours in starts)
  assert len({str(tours) for tours in starts}) > 8


def test_a_length_is_what_the_places_say(problem):
  scope: dict[str, Any] = {}
  exec(compile(PATH.read_text(), str(PATH), "exec"), scope)
  places = scope["PLACES"]
  for seed in range(5):
    tours = problem.start(seed)
    length = 0
    for tour in tours:
      stops = [0, *tour, 0]
      for a, b in itertools.pairwise(stops):
        (x, y), (u, v) = places[a], places[b]
        length += math.floor(math.sqrt((x - u) ** 2 + (y - v) ** 2) + 0.5)
    score = problem.verify(tours)
    assert (score.value, score.certificate) == (length, "")
    assert score.reward == 10_000 / (1 + length)


def test_lengths_on_a_line_by_hand(on_a_line):
  assert on_a_line.verify([[1, 2, 3], [4, 5, 6]]).value == 2000
  assert on_a_line.verify([[2, 1, 3], [6, 5, 4]]).value == 400 + 100 + 200 + 500 + 1000
  assert on_a_line.verify([[1], [2], [3], [4, 5, 6]]).value == 600 + 800 + 1000 + 1000
  assert on_a_line.verify([[1, 4, 2], [3, 5, 6]]).value == 300 + 600 + 700 + 400 + 500 + 900 + 600
  # Always on to the nearest, the smaller number first: here that is the best.
  assert on_a_line.start(0) == [[1, 2, 3], [4, 5, 6]]


@pytest.mark.parametrize(
  ("tours", "reason"),
  [
    ([[1, 2, 3, 4], [5, 6]], "got a tour with 4 parcels, expected at most 3"),
    ([[1, 2, 3], [4, 5]], "got 5 customers, expected all 6"),
    ([[1, 2, 3], [4, 5, 5]], "got customer 5 twice"),
    ([[1, 2, 3], [4, 5, 6], []], "got a tour that is no list of customers, or an empty one"),
    ([[1, 2, 3], 4, 5, 6], "got a tour that is no list of customers"),
    ([[True, 2, 3], [4, 5, 6]], "got a customer that is no integer from 1 to 6"),
    ([[1.0, 2, 3], [4, 5, 6]], "got a customer that is no integer from 1 to 6"),
    ([[0, 2, 3], [4, 5, 6]], "got a customer that is no integer from 1 to 6"),
    ([[1, 2, 3], [4, 5, 7]], "got a customer that is no integer from 1 to 6"),
    ([], "got no list of 1 to 6 tours"),
    ("abc", "got no list of 1 to 6 tours"),
    (None, "got no list of 1 to 6 tours"),
  ],
)
def test_what_are_no_tours_is_refused(on_a_line, tours, reason):
  assert on_a_line.verify(tours).reason.startswith(reason)


@pytest.mark.parametrize(
  ("tours", "verb", "a", "b", "expected"),
  [
    ([[1, 2, 3], [4], [5, 6]], "MOVE", 1, 3, [[2, 3, 1], [4], [5, 6]]),
    ([[1, 2, 3], [4], [5, 6]], "MOVE", 1, 5, [[2, 3], [4], [5, 1, 6]]),
    ([[1, 2, 3], [4], [5, 6]], "MOVE", 4, 5, [[1, 2, 3], [5, 4, 6]]),
    ([[1, 2, 3], [4], [5, 6]], "BEFORE", 3, 1, [[3, 1, 2], [4], [5, 6]]),
    ([[1, 2, 3], [4], [5, 6]], "BEFORE", 3, 5, [[1, 2], [4], [3, 5, 6]]),
    ([[1, 2, 3], [4], [5, 6]], "SWAP", 1, 4, [[4, 2, 3], [1], [5, 6]]),
    ([[1, 2, 3], [4], [5, 6]], "TURN", 2, 3, [[1, 3, 2], [4], [5, 6]]),
    ([[1, 2, 3], [4], [5, 6]], "TURN", 2, 5, [[1, 2, 6], [4], [5, 3]]),
    ([[1, 2, 3], [4], [5, 6]], "TURN", 4, 1, [[1], [4, 2, 3], [5, 6]]),
    ([[1, 2, 3], [4], [5, 6]], "ALONE", 2, 6, [[1, 3], [4], [5, 6], [2]]),
    ([[1, 4, 2], [3], [5, 6]], "POLISH", 1, 2, [[3], [5, 6], [4, 1, 2]]),
    ([[1, 2, 3], [6], [4, 5]], "POLISH", 6, 5, [[1, 2, 3], [4, 5, 6]]),
    ([[2, 4], [1, 5, 6], [3]], "POLISH", 3, 2, [[1, 5, 6], [3, 2, 4]]),
  ],
)
def test_edits_by_hand(on_a_line, tours, verb, a, b, expected):
  language = edits_of(on_a_line)
  before = [list(tour) for tour in tours]
  got = language.apply(tours, (VERBS[verb], a - 1, b - 1, language.stop_token), 0)
  assert tours == before
  if verb == "POLISH":  # It may drive a tour from either end.
    assert on_a_line.verify(got).value == on_a_line.verify(expected).value
    assert sorted(map(sorted, got)) == sorted(map(sorted, expected))
  else:
    assert got == in_one_order(expected)


@pytest.mark.parametrize(
  ("verb", "a", "b"),
  [
    ("MOVE", 4, 3),  # One parcel too many.
    ("MOVE", 4, 4),
    ("TURN", 3, 5),  # Nothing comes after the one, and too much after the other.
    ("TURN", 3, 1),  # Driven backwards a tour is the same.
    ("SWAP", 1, 3),
    ("ALONE", 4, 4),  # It is alone.
    ("POLISH", 4, 4),
  ],
)
def test_a_sentence_that_changes_nothing_is_refused(on_a_line, verb, a, b):
  tours = [[1, 2, 3], [4], [5, 6]]
  tokens = (VERBS[verb], a - 1, b - 1, edits_of(on_a_line).stop_token)
  with pytest.raises(ValueError, match="leaves the tours as they were; edit something"):
    edits_of(on_a_line).apply(tours, tokens, 0)


def test_the_prompt_is_the_tours(on_a_line):
  assert edits_of(on_a_line).prompt([[1, 2, 3], [6], [5, 4]]) == (0, 1, 2, 13, 5, 13, 4, 3, 13)


def test_every_sentence_that_is_allowed_keeps_the_rules(problem, seed):
  language = edits_of(problem)
  draws = random.Random(seed)
  tours = problem.start(seed)
  num_changed = 0
  for _ in range(300):
    tokens = problem_check.sentence(language, draws)
    kept = [list(tour) for tour in tours]
    changed = changed_by(language, tours, tokens)
    assert tours == kept and changed == changed_by(language, tours, tokens)
    assert problem.verify(changed).is_valid
    prompt = language.prompt(changed)
    assert 75 < len(prompt) <= 150 and all(0 <= token < language.vocab_size for token in prompt)
    num_changed += changed != tours
    tours = changed
  assert num_changed > 100


@pytest.mark.parametrize(
  "tokens", [(6,), (6, 0), (0, 6, 0), (6, 0, 6), (6, 0, 1, 7, 0), 5 * (6, 0, 1), (13, 0, 1)]
)
def test_what_is_no_sentence_is_refused(on_a_line, tokens):
  with pytest.raises(ValueError, match="expected edits of three tokens each; follow `allowed`"):
    edits_of(on_a_line).apply([[1, 2, 3], [4, 5, 6]], tokens, 0)


def test_a_greedy_search_over_random_sentences_beats_the_start(problem):
  language = edits_of(problem)
  draws = random.Random(0)
  best = problem.start(0)
  first = problem.verify(best)
  for _ in range(400):
    tours = changed_by(language, best, problem_check.sentence(language, draws))
    if problem.verify(tours).reward > problem.verify(best).reward:
      best = tours
  assert problem.verify(best).value < 0.9 * first.value


def test_the_description_and_the_picture_show_the_tours(problem):
  tours = problem.start(0)
  score = problem.verify(tours)
  text = problem.describe(tours, score)
  assert str(tours) in text and f"total length {score.value:.0f}" in text
  (axes,) = problem.picture(tours).axes
  assert len(axes.lines) == len(tours) + 1
  assert axes.get_title() == f"{len(tours)} tours, total length {score.value:.0f}"
