"""Charts: positions of points, scales, and readable numbers."""

from __future__ import annotations

import dataclasses
import math
import re

import numpy as np
import pytest

from seerjax import metrics
from seerjax.reports import charts, gantt, page as page_lib, run_directory


def test_points_lie_where_the_numbers_say():
  frame = charts.Frame((0.0, 10.0), (0.0, 1.0))
  assert frame.x(0.0) == charts.LEFT and frame.x(10.0) == charts.WIDTH - charts.RIGHT
  assert frame.y(0.0) == charts.HEIGHT - charts.BOTTOM and frame.y(1.0) == charts.TOP


def test_a_logarithmic_chart_has_a_decade_wherever_it_lies(tmp_path):
  with metrics.Writer(tmp_path, console="off", tensorboard=False) as writer:
    for step, value in enumerate((1e-2, 1e3, 1e8, 0.0, -1.0, math.nan)):
      writer.write(step, {"objective/tilt": value})
  run = run_directory.load(tmp_path)
  chart = charts.Chart(title="Tilt", names=("objective/tilt",), note="of it", is_logarithmic=True)
  page = charts.line_chart(chart, run)
  heights = [float(y) for y in re.findall(r'class="hit c0" cx="[^"]*" cy="([^"]*)"', page)]
  assert len(heights) == 3 and heights[0] - heights[1] == pytest.approx(heights[1] - heights[2])
  assert "not finite, or not above 0: 3" in page and ">100 k</text>" in page
  # The twin: on an even scale the smaller two lie on one line.
  page = charts.line_chart(dataclasses.replace(chart, is_logarithmic=False), run)
  heights = [float(y) for y in re.findall(r'class="hit c0" cx="[^"]*" cy="([^"]*)"', page)]
  assert len(heights) == 5 and heights[0] == heights[1] > heights[2]


def test_ticks_are_round_and_inside():
  np.testing.assert_allclose(charts.ticks(0.0, 0.93), [0.0, 0.25, 0.5, 0.75])
  np.testing.assert_allclose(charts.ticks(-3.0, 17.0), [0.0, 5.0, 10.0, 15.0])
  assert charts.ticks(2.0, 2.0) == [2.0]


def test_numbers_of_axes_are_ten_pixels_high_on_whatever_screen():
  sizes = re.findall(r"\(max-width: (\d+)px\) { \.tick { font-size: ([\d.]+)px", page_lib.STYLE)
  for width in range(300, int(charts.WIDTH) + 1):  # Of a card; 390 pixels of screen leave 332.
    size = 11.0
    for most, smaller in sizes:
      size = float(smaller) if width <= int(most) else size
    assert size * width / charts.WIDTH >= 10, width
  for drawn, least in ((gantt.WIDTH, "svg"), (gantt.BARS_WIDTH, r"svg\.bars")):
    width = re.search(rf"\.scroll > {least} {{ min-width: (\d+)px", page_lib.STYLE)
    assert width is not None and 11 * int(width[1]) / drawn >= 10
