"""The kernel-speed problems as a whole: scores, baselines, settings and processes."""

from __future__ import annotations

import pickle

import hypothesis
from hypothesis import strategies as st
import pytest
from schedule_cases import PLAIN, TINY

from experiments.problems import kernel_speed
from experiments.problems.kernel_speed import rules, schedules, trimul
from seerjax.discovery import environment as environment_lib


def test_a_schedule_scores_and_its_value_is_a_ratio():
  score = TINY.verify(PLAIN)
  assert score.is_valid and score.value == score.reward > 0
  found = TINY.measure(PLAIN, laps=5)
  assert len(found.ratios) == len(found.cpu_ratios) == 5
  assert found.speed_up == sorted(found.ratios)[2] and found.error < 1e-4
  assert found.lower_quartile <= found.speed_up
  assert found.cpu_speed_up > 0 and found.seconds > 0 and found.reference_seconds > 0
  assert TINY.confirm(PLAIN, laps=3).is_valid


def test_environments_cross_processes():
  again = pickle.loads(pickle.dumps(TINY))
  assert again.name == TINY.name and again.start(0) == PLAIN
  assert not again.race(trimul.reference, laps=3).reason


@hypothesis.given(
  st.dictionaries(st.sampled_from([*PLAIN, 3]), st.one_of(st.none(), st.floats(), st.text()))
)
def test_nothing_makes_the_verifier_raise(artefact):
  assert not TINY.verify(artefact).is_valid
  assert not TINY.verify({**PLAIN, **dict.fromkeys(artefact), "layout": 1}).is_valid


def test_impossible_settings_are_refused():
  with pytest.raises(ValueError, match="Schedule.layout: got x, expected one of rows, features"):
    schedules.Schedule(layout="x")
  with pytest.raises(ValueError, match="TriMulSpeed.size: got 12, expected a positive multiple"):
    kernel_speed.TriMulSpeed(12)
  with pytest.raises(ValueError, match="TriMulSpeed.hidden: got 0, expected a positive"):
    kernel_speed.TriMulSpeed(8, hidden=0)
  with pytest.raises(ValueError, match="got laps=4, expected an odd number, at least 3; take 9"):
    kernel_speed.TriMulSpeed(8, laps=4)
  with pytest.raises(ValueError, match="TileSpeed.kernel: got 'attention', expected 'matmul' or"):
    kernel_speed.TileSpeed("attention")


@pytest.mark.few(1)
@pytest.mark.parametrize("baseline", ["classical", "polished_starts"])
def test_baselines_yield_schedules(baseline: str):
  made = TINY.classical(0) if baseline == "classical" else TINY.polished_starts(0)
  schedules.Schedule(**next(made))


def test_it_is_an_environment_with_baselines():
  for environment in (TINY, kernel_speed.TileSpeed(), kernel_speed.TileSpeed("rms_norm")):
    assert isinstance(environment, environment_lib.Environment)
    assert isinstance(environment, environment_lib.Baselines)
    assert isinstance(environment, environment_lib.Timed)
    assert isinstance(environment.language, environment_lib.EditLanguage)
    start = environment.start(0)
    assert not rules.complaint(start, environment.fields)
    text = environment.describe(start, environment_lib.invalid("not timed"))
    assert "improve(artefact, seconds, seed)" in text and str(start) in text
  assert len(TINY.picture(PLAIN).axes[0].lines) == 3
