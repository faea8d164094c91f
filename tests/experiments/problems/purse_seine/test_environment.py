"""The purse-seine problem as a whole: starts, baselines, texts and pictures."""

from __future__ import annotations

import itertools
import json

from fence_cases import WHOLE
import matplotlib.figure
import pytest


def test_starts_are_squares_that_the_seed_chooses():
  starts = [WHOLE.start(seed) for seed in range(20)]
  assert starts == [WHOLE.start(seed) for seed in range(20)]
  assert len({json.dumps(start) for start in starts}) > 4
  for start in starts:
    assert WHOLE.verify(start).value > 1


def test_the_description_holds_a_program_that_makes_the_points():
  start = WHOLE.start(0)
  text = WHOLE.describe(start, WHOLE.verify(start))
  assert str(start) in text and "improve(artefact, seconds, seed)" in text
  program = text.partition("```python\n")[2].partition("```")[0]
  names: dict[str, object] = {}
  exec(program, names)
  assert names["wanted"] == [tuple(point) for point in WHOLE.points.wanted.tolist()]
  assert names["unwanted"] == [tuple(point) for point in WHOLE.points.unwanted.tolist()]


def test_pictures_are_figures():
  figure = WHOLE.picture(WHOLE.start(0))
  assert isinstance(figure, matplotlib.figure.Figure)
  axes = figure.axes[0]
  assert "value" in axes.get_title() and (axes.get_xlabel(), axes.get_ylabel()) == ("x", "y")


def test_baselines_are_legal_and_repeat():
  polished = list(itertools.islice(WHOLE.polished_starts(1), 3))
  assert polished == list(itertools.islice(WHOLE.polished_starts(1), 3))
  assert all(WHOLE.verify(artefact).value > 200 for artefact in polished)


@pytest.mark.long
def test_the_classical_method_gets_far_within_seconds():
  found = list(itertools.islice(WHOLE.classical(0), 4))
  assert found == list(itertools.islice(WHOLE.classical(0), 4))
  assert max(WHOLE.verify(artefact).value for artefact in found) > 3500
