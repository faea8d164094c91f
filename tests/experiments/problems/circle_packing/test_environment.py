"""The circle-packing problem as a whole: closed forms, starts, baselines, texts and pictures."""

from __future__ import annotations

import itertools
import math

from packing_cases import QUARTERS, SMALL, is_packing
import pytest

from experiments.problems import circle_packing
from seerjax.discovery import environment as environment_lib


@pytest.mark.parametrize("num_circles", [1, 26])
def test_it_is_an_environment_with_baselines_and_a_language(num_circles):
  environment = circle_packing.CirclePacking(num_circles=num_circles)
  assert isinstance(environment, environment_lib.Environment)
  assert isinstance(environment, environment_lib.Baselines)
  assert isinstance(environment.language, environment_lib.EditLanguage)
  assert environment.name == f"circle_packing_{num_circles}" and environment.is_maximised


@pytest.mark.parametrize(
  "num_circles, value",
  [(1, 0.5), (2, 2 - math.sqrt(2))],
)
def test_closed_forms_are_found(num_circles, value):
  environment = circle_packing.CirclePacking(num_circles=num_circles)
  found = [next(environment.classical(0)), next(environment.polished_starts(0))]
  score = max((environment.verify(artefact) for artefact in found), key=lambda s: s.value)
  assert score.is_valid
  assert value - 1e-9 < score.value <= value + 1e-15


def test_four_circles_of_different_radii_beat_the_grid():
  environment = circle_packing.CirclePacking(num_circles=4)
  value = environment.verify(next(environment.classical(0))).value
  assert 1.0 < value < math.sqrt(4 / math.pi)


def test_starts_are_valid_random_and_plain():
  environment = circle_packing.CirclePacking(num_circles=26)
  starts = [environment.start(seed) for seed in range(20)]
  values = [environment.verify(start).value for start in starts]
  assert all(is_packing(start) for start in starts)
  assert environment.start(3) == starts[3] and len(set(values)) == 20
  assert max(values) < 2.2


@pytest.mark.parametrize(
  "sizes, message",
  [
    (dict(num_circles=0), "CircleLanguage.num_circles: got 0, expected 1 <= num_circles <= 200"),
    (dict(num_circles=201), "num_circles: got 201, expected 1 <= num_circles <= 200"),
    (dict(num_edits=0), "CircleLanguage.num_edits: got 0, expected 1 <= num_edits <= 16"),
  ],
)
def test_impossible_sizes_are_refused(sizes, message):
  with pytest.raises(ValueError, match=message):
    circle_packing.CirclePacking(**sizes)


def test_baselines_are_endless_valid_and_follow_their_seed():
  for method in (SMALL.classical, SMALL.polished_starts):
    runs = [list(itertools.islice(method(seed), 3)) for seed in (0, 0, 1)]
    assert runs[0] == runs[1] != runs[2]
    assert all(SMALL.verify(artefact).is_valid for artefact in runs[0])


def test_a_description_says_rules_value_and_program():
  environment = circle_packing.CirclePacking(num_circles=26)
  artefact = environment.start(0)
  text = environment.describe(artefact, environment.verify(artefact))
  for part in ("2.635983084919", "def improve(artefact, seconds, seed)", "no tolerance", "r > 0"):
    assert part in text
  assert repr(artefact[25]) in text
  text = SMALL.describe([], SMALL.verify([]))
  assert "invalid: artefact: got 0 circles, expected 7" in text and "Best known" not in text


def test_a_picture_shows_circles_and_contacts():
  drawn = circle_packing.CirclePacking(num_circles=4).picture(QUARTERS)
  (axes,) = drawn.axes
  assert len(axes.patches) == 4
  assert len(axes.lines) == 4 + 8  # Four pairs touch, and each circle two walls.


@pytest.mark.long
@pytest.mark.parametrize("num_circles, target", [(26, 2.63598), (32, 2.9365)])
def test_classical_reaches_what_is_known(num_circles, target):
  environment = circle_packing.CirclePacking(num_circles=num_circles)
  stream = itertools.islice(environment.classical(0), 400)
  assert any(environment.verify(artefact).value >= target for artefact in stream)
