"""Line charts and histograms of a report, as inline SVG with colours from the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import math

import numpy as np

from seerjax.reports.page import axis_number, escape, number
from seerjax.reports.run_directory import Run

NUM_BINS = 24
WIDTH, HEIGHT = 440.0, 210.0
LEFT, RIGHT, TOP, BOTTOM = 52.0, 14.0, 12.0, 26.0
LABEL = 44.0  # Width of the x axis label.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chart:
  """Definition of a line chart.

  Attributes:
    title: heading.
    names: metrics to draw, if the run has them.
    note: caption with the unit.
    labels: labels of the curves, if there are several.
    is_contract: whether the contract requires the curve to be exactly zero.
    is_percent: whether values are fractions to be shown in percent.
    digits: significant digits shown.
    is_smoothed: whether to draw a moving mean over the faint raw curve, for long curves.
    is_logarithmic: whether the scale is logarithmic; values of 0 or below are not drawn then.
  """

  title: str
  names: tuple[str, ...]
  note: str
  labels: tuple[str, ...] = ()
  is_contract: bool = False
  is_percent: bool = False
  digits: int = 4
  is_smoothed: bool = True
  is_logarithmic: bool = False


def ticks(low: float, high: float, count: int = 4) -> list[float]:
  """Returns about `count` round numbers within [low, high]; for (0, 0.93) 0, 0.2, ..., 0.8."""
  if not high > low:
    return [low]
  rough = (high - low) / count
  power = 10.0 ** math.floor(math.log10(rough))
  step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
  first = math.ceil(low / step - 1e-9)
  return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


class Frame:
  """Coordinate transformation and axes of a chart."""

  def __init__(
    self, x_range: tuple[float, float], y_range: tuple[float, float], height: float = HEIGHT
  ):
    self.x_range, self.y_range, self.height = x_range, y_range, height

  def x(self, value: float) -> float:
    low, high = self.x_range
    return LEFT + (WIDTH - LEFT - RIGHT) * (value - low) / ((high - low) or 1.0)

  def y(self, value: float) -> float:
    low, high = self.y_range
    return (
      self.height - BOTTOM - (self.height - TOP - BOTTOM) * (value - low) / ((high - low) or 1.0)
    )

  def axes(self, x_label: str, y_text: Callable[[float], str]) -> str:
    parts = []
    for value in ticks(*self.y_range):
      y = self.y(value)
      parts.append(
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text class="tick" x="{LEFT - 8}" y="{y + 3.5:.1f}" text-anchor="end">'
        f"{escape(y_text(value))}</text>"
      )
    for value in ticks(*self.x_range, count=5):
      # The label of the axis is at its end.
      if value == int(value) and self.x(value) < WIDTH - RIGHT - LABEL:
        parts.append(
          f'<text class="tick" x="{self.x(value):.1f}" y="{self.height - 9}" text-anchor="middle">'
          f"{value:.0f}</text>"
        )
    parts.append(
      f'<text class="tick" x="{WIDTH - RIGHT}" y="{self.height - 9}" text-anchor="end">'
      f"{escape(x_label)}</text>"
    )
    return "".join(parts)

  def svg(self, label: str, body: str) -> str:
    return (
      f'<svg viewBox="0 0 {WIDTH:.0f} {self.height:.0f}" role="img" aria-label="{escape(label)}">'
      f"{body}</svg>"
    )


def _smooth(values: np.ndarray) -> np.ndarray:
  """Returns a centred moving mean over about a twentieth of the run, narrower at the ends."""
  half = len(values) // 40
  return np.array(
    [
      values[i - w : i + w + 1].mean()
      for i, w in ((i, min(half, i, len(values) - 1 - i)) for i in range(len(values)))
    ]
  )


def line_chart(chart: Chart, run: Run) -> str:
  """Returns a chart as a figure; "" if the run has none of its metrics."""
  curves = [(i, *run.curves[name]) for i, name in enumerate(chart.names) if name in run.curves]
  if not curves:
    return ""
  shown = [np.isfinite(v) & ((v > 0) | (not chart.is_logarithmic)) for _, _, v in curves]
  finite = [
    (i, s[kept], v[kept]) for (i, s, v), kept in zip(curves, shown, strict=True) if kept.any()
  ]
  lost = sum(int(np.sum(~kept)) for kept in shown)

  def text(value: float) -> str:
    if chart.is_percent:
      return f"{round(100 * value, 1):g} %"
    return number(float(value), chart.digits)

  def tick(value: float) -> str:
    if is_flat:
      return "0.0" if value == 0 else ""
    if chart.is_logarithmic:
      return axis_number(float(f"{10**value:.2g}"))
    return text(value) if chart.is_percent else axis_number(value)

  picture = ""
  # A contract curve that is all zero needs little height, and only 0 on its scale.
  is_flat = chart.is_contract and not any(v.any() for _, _, v in finite)
  if finite:
    heights = [np.log10(v) if chart.is_logarithmic else v for _, _, v in finite]
    every_step = np.concatenate([s for _, s, _ in finite])
    every_value = np.concatenate(heights)
    low, high = float(every_value.min()), float(every_value.max())
    if chart.is_contract and low == high == 0.0:
      low, high = -1.0, 1.0
    margin = 0.08 * (high - low) or 0.1 * abs(high) or 1.0
    has_zero = 0.0 <= low <= 0.6 * high and not chart.is_logarithmic
    low = 0.0 if has_zero else low - margin
    last_step = max(float(every_step.max()), float(every_step.min()) + 1)
    frame = Frame(
      (float(every_step.min()), last_step), (low, high + margin), 110.0 if is_flat else HEIGHT
    )
    parts = [frame.axes("step", tick)]
    for (i, steps, values), raw in zip(finite, heights, strict=True):
      line = raw
      if chart.is_smoothed and len(values) >= 40:
        parts.append(f'<path class="raw c{i}" d="{polyline(frame, steps, raw)}"/>')
        line = _smooth(raw)
      parts.append(f'<path class="line c{i}" d="{polyline(frame, steps, line)}"/>')
      x, y = frame.x(steps[-1]), frame.y(line[-1])
      parts.append(f'<circle class="dot c{i}" cx="{x:.1f}" cy="{y:.1f}" r="3.2"/>')
      every = max(1, len(values) // 120)
      for step, value, height in list(zip(steps, values, raw, strict=True))[::every]:
        parts.append(
          f'<circle class="hit c{i}" cx="{frame.x(step):.1f}" cy="{frame.y(height):.1f}" r="5">'
          f"<title>step {step:.0f}: {escape(text(value))}</title></circle>"
        )
    picture = frame.svg(chart.title, "".join(parts))
  heads = []
  for i, _, values in finite:
    label = f"{escape(chart.labels[i])} " if chart.labels and len(chart.names) > 1 else ""
    ends = (
      text(values[-1]) if values[0] == values[-1] else f"{text(values[0])} → {text(values[-1])}"
    )
    heads.append(f'<span class="key k{i}">{label}<b>{escape(ends)}</b></span>')
  left_out = "not finite, or not above 0" if chart.is_logarithmic else "not finite"
  note = escape(chart.note) + (f" · {left_out}: {lost}" if lost else "")
  return (
    f'<figure><figcaption><h3>{escape(chart.title)}</h3><div class="keys">{"".join(heads)}</div>'
    f'</figcaption>{picture}<p class="note">{note}</p></figure>'
  )


def polyline(frame: Frame, steps: np.ndarray, values: np.ndarray) -> str:
  """Returns a curve as the `d` attribute of an SVG path."""
  pairs = zip(steps, values, strict=True)
  return "M" + "L".join(f"{frame.x(step):.1f} {frame.y(value):.1f}" for step, value in pairs)


def histogram(samples: Sequence[tuple[str, np.ndarray]]) -> str:
  """Returns overlaid histograms of token counts, each normalised to its own rollouts."""
  samples = [(label, values) for label, values in samples if len(values)]
  top = max(float(values.max()) for _, values in samples)
  width = max(1, math.ceil((top + 1) / NUM_BINS))
  edges = np.arange(0, top + 1 + width, width)
  shares = [np.histogram(values, edges)[0] / len(values) for _, values in samples]
  frame = Frame((0.0, float(edges[-1])), (0.0, 1.1 * max(float(share.max()) for share in shares)))
  parts = [frame.axes("tokens", lambda value: f"{100 * value:.3g} %")]
  for i, (share, (label, values)) in enumerate(zip(shares, samples, strict=True)):
    for low, high, part in zip(edges[:-1], edges[1:], share, strict=True):
      if part:
        x, y = frame.x(low), frame.y(part)
        parts.append(
          f'<rect class="bar c{i}" x="{x + 0.5:.1f}" y="{y:.1f}" rx="1.5"'
          f' width="{frame.x(high) - x - 1:.1f}" height="{frame.y(0.0) - y:.1f}"><title>'
          f"{escape(label)}: {100 * part:.3g} % have {low:.0f} to {high - 1:.0f}"
          " tokens</title></rect>"
        )
    mean = frame.x(float(values.mean()))
    parts.append(
      f'<line class="mean c{i}" x1="{mean:.1f}" x2="{mean:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
    )
  return frame.svg("Histogram of response lengths", "".join(parts))
