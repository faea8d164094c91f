"""Step functions: exact sums, outward rounding, and edits that match their names."""

from __future__ import annotations

from fractions import Fraction
import math

import hypothesis
from hypothesis import strategies as st
import numpy as np

from experiments.problems import step_functions


@hypothesis.given(
  st.lists(st.integers(0, 2**70), min_size=1, max_size=9),
  st.lists(st.integers(0, 5), min_size=1, max_size=9),
)
def test_convolution_is_exact(first, second):
  expected = [0] * (len(first) + len(second) - 1)
  for i, x in enumerate(first):
    for j, y in enumerate(second):
      expected[i + j] += x * y
  assert step_functions.convolve(first, second) == expected


def test_rounding_goes_outward():
  third = Fraction(1, 3)
  assert Fraction(step_functions.at_most(third)) < third < step_functions.at_least(third)
  up = math.nextafter(step_functions.at_most(third), 1)
  assert up == step_functions.at_least(third)
  assert step_functions.at_least(Fraction(1, 2)) == step_functions.at_most(Fraction(1, 2)) == 0.5


def test_edits_do_what_their_names_say():
  heights = np.arange(1.0, 17.0)
  rng = np.random.default_rng(0)

  def after(verb, amount, place):
    edit = step_functions.Edit(verb, amount, place)
    return step_functions.reshape(heights, edit, rng, 16.0)

  assert (after(step_functions.SET, 15, 7)[:2] == 16).all()
  assert (after(step_functions.SET, 0, 7)[2:] == heights[2:]).all()
  assert (after(step_functions.SHIFT, 8, 0) == np.roll(heights, 1)).all()
  assert (after(step_functions.SHIFT, 7, 1)[:8] == [2, 3, 4, 5, 6, 7, 8, 1]).all()
  assert (after(step_functions.MIRROR, 15, 0) == 8.5).all()
  np.testing.assert_allclose(after(step_functions.STRETCH, 15, 0).std(), 1.75 * heights.std())
  np.testing.assert_allclose(after(step_functions.SMOOTH, 3, 0)[1:-1], heights[1:-1])
  noisy = after(step_functions.NOISE, 0, 15)
  assert (noisy[:4] == heights[:4]).all() and (noisy[12:] == heights[12:]).all()
  assert 0 < np.abs(noisy - heights).max() < 0.01
  remelted = after(step_functions.REMELT, 15, 0)
  assert remelted.min() >= 0 and (remelted != heights).all()


def test_smooth_noise_is_standard_normal_and_its_neighbours_alike():
  rng = np.random.default_rng(0)
  draws = np.stack([step_functions.smooth_noise(100, rng) for _ in range(4000)])
  np.testing.assert_allclose(draws.mean(axis=0), 0, atol=0.08)
  np.testing.assert_allclose(draws.std(axis=0), 1, atol=0.08)
  # A quarter each: white noise, and windows of 10, 20 and 30, in which neighbours share all but one
  # draw.
  expected = (0 + 9 / 10 + 19 / 20 + 29 / 30) / 4
  assert abs((draws[:, :-1] * draws[:, 1:]).mean() - expected) < 0.03
  assert abs((draws[:, :-40] * draws[:, 40:]).mean()) < 0.03
  assert step_functions.smooth_noise(1, rng).shape == (1,)


def test_what_is_remelted_keeps_its_mean_on_average():
  rng = np.random.default_rng(0)
  edit = step_functions.Edit(step_functions.REMELT, 15, 0)
  heights = np.linspace(0.0, 1.0, 60)
  means = [step_functions.reshape(heights, edit, rng, 1.0).mean() for _ in range(2000)]
  assert abs(np.mean(means) - 0.5) < 0.02


def test_regions_cover_the_function_at_every_size():
  for n in (1, 2, 5, 26, 51, 300):
    for place in range(step_functions.NUM_PLACES):
      part = step_functions.region(place, n)
      assert 0 <= part.start < part.stop <= n
  assert step_functions.region(0, 51) == slice(0, 51)
  assert [step_functions.region(p, 16) for p in (1, 2)] == [slice(0, 8), slice(8, 16)]


def test_the_view_tells_value_and_peak_and_heights():
  heights = np.repeat([0.0, 1.0], 16)
  ids = step_functions.view(heights, 1.0, 1e-3, 0.5)
  assert ids == (64 + 9, 64 + 8, *[48] * 16, *[63] * 16)
  assert step_functions.view(heights, 1.0, 0.0, 1.0)[:2] == (64, 79)
