"""Comparison of several runs: a table, and one page that overlays their curves with intervals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import os
from typing import Any

import numpy as np

from seerjax import metrics
from seerjax.reports import charts, page
from seerjax.reports.page import escape, number
from seerjax.reports.run_directory import Run

NORMAL_95 = 1.96  # Standard errors on each side of a 95 % interval.
COLOURS = ("--c0", "--c1", "--c2", "--good", "--bad", "--soft")  # Of the page's style sheet.
DASHES = ("none", "6 3", "2 3")  # One after the other, when the colours begin again.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Overlay:
  """A chart with a curve per run.

  Attributes:
    title: heading.
    name: the metric.
    error: metric of its standard error; "" draws no interval.
    note: caption with the unit.
    is_percent: whether values are fractions to be shown in percent.
  """

  title: str
  name: str
  error: str = ""
  note: str
  is_percent: bool = False


OVERLAYS = (
  Overlay(
    title="Held-out accuracy", name="heldout/accuracy", error="heldout/standard_error",
    note="share of correct answers, with 95 % intervals", is_percent=True,
  ),
  Overlay(
    title="Held-out reward", name="heldout/reward", error="heldout/reward_standard_error",
    note="mean over held-out answers, with 95 % intervals",
  ),
  Overlay(title="Reward", name="rollout/reward_mean", note="mean over the step's rollouts"),
  Overlay(title="KL, rollout ‖ trainer", name="rollout_train/kl", note="nats"),
  Overlay(title="Response length", name="rollout/length_mean", note="tokens, mean of a step"),
  Overlay(title="Entropy", name="train/entropy", note="nats per token"),
)  # fmt: skip


def labels(paths: Sequence[str]) -> list[str]:
  """Returns a short name of each path: the path without the folders that all share."""
  whole = [os.path.abspath(path) for path in paths]
  shared = os.path.commonpath(whole)
  return [os.path.relpath(path, shared) for path in whole]


def rows(runs: Sequence[Run]) -> dict[str, list[str]]:
  """Returns the cells of each row by its label, a cell per run; rows that no run has are left out.

  "-" stands for a number that a run does not have.
  """

  def of(show: Callable[[Mapping[str, Any]], str]) -> list[str]:
    cells = []
    for run in runs:
      try:
        cells.append(show(run.summary))
      except KeyError:
        cells.append("-")
    return cells

  def gain(name: str, text: Callable[[float], str]) -> list[str]:
    def show(summary: Mapping[str, Any]) -> str:
      ends = (summary[name], *summary[f"{name}_interval_95"])
      value, low, high = (text(metrics.decode_number(end)) for end in ends)
      return f"{value} [{low}, {high}]"

    return of(show)

  def plain(name: str, text: Callable[[float], str] = number) -> list[str]:
    return of(lambda summary: text(metrics.decode_number(summary[name])))

  percent = lambda value: f"{100 * value:.1f} %"
  points = lambda value: f"{100 * value:+.1f}"
  signed = lambda value: f"{value:+.3g}"
  found = {
    "held-out accuracy before": plain("accuracy_before", percent),
    "held-out accuracy after": plain("accuracy_after", percent),
    "gain, points [95 %]": gain("gain", points),
    "held-out reward before": plain("reward_before"),
    "held-out reward after": plain("reward_after"),
    "gain of reward [95 %]": gain("reward_gain", signed),
    "largest KL, nats": plain("kl_max"),
    "largest gap, nats": plain("max_abs_logprob_gap"),
    "seconds": plain("seconds"),
    "mean length, tokens": plain("length_mean"),
    "99th percentile of lengths": plain("length_p99"),
    "steps": [str(len(run.curves["train/loss"][0])) if "train/loss" in run.curves else "-"
              for run in runs],
  }  # fmt: skip
  return {label: cells for label, cells in found.items() if {*cells} != {"-"}}


def text_table(names: Sequence[str], cells: Mapping[str, Sequence[str]]) -> str:
  """Returns a table for a terminal: a column per run."""
  lines = [("", *names), *((label, *row) for label, row in cells.items())]
  widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
  return "\n".join(
    "  ".join(
      cell.ljust(width) if i == 0 else cell.rjust(width)
      for i, (cell, width) in enumerate(zip(line, widths, strict=True))
    ).rstrip()
    for line in lines
  )


def html_table(names: Sequence[str], cells: Mapping[str, Sequence[str]]) -> str:
  """Returns the table as HTML."""
  head = "".join(f"<th>{escape(name)}</th>" for name in ("", *names))
  body = "".join(
    f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in (label, *row))}</tr>"
    for label, row in cells.items()
  )
  return f'<div class="scroll"><table class="numbers"><tr>{head}</tr>{body}</table></div>'


def settings(names: Sequence[str], runs: Sequence[Run]) -> str:
  """Returns the table of settings in which the runs differ; "" if there are none."""
  flat = [_flat(run.config) for run in runs]
  keys = sorted({key for one in flat for key in one})
  differing = {
    key: [number(one[key]) if key in one else "-" for one in flat]
    for key in keys
    if any(one.get(key) != flat[0].get(key) for one in flat)
  }
  if not differing:
    return ""
  return f"<h2>Settings that differ</h2>{html_table(names, differing)}"


def _flat(value: Mapping[str, Any], start: str = "") -> dict[str, Any]:
  found: dict[str, Any] = {}
  for name, inner in value.items():
    if isinstance(inner, Mapping):
      found |= _flat(inner, f"{start}{name}.")
    else:
      found[f"{start}{name}"] = inner
  return found


def colour(index: int) -> str:
  """Returns the colour of a run's curves in CSS."""
  return f"var({COLOURS[index % len(COLOURS)]})"


def overlay(chart: Overlay, names: Sequence[str], runs: Sequence[Run]) -> str:
  """Returns a chart as a figure; "" if no run has its metric."""
  curves = [(i, *_curve(chart, run)) for i, run in enumerate(runs) if chart.name in run.curves]
  curves = [curve for curve in curves if len(curve[1])]
  if not curves:
    return ""
  every_step = np.concatenate([steps for _, steps, _, _ in curves])
  low = min(float((values - half).min()) for _, _, values, half in curves)
  high = max(float((values + half).max()) for _, _, values, half in curves)
  margin = 0.08 * (high - low) or 0.1 * abs(high) or 1.0
  last = max(float(every_step.max()), float(every_step.min()) + 1)
  frame = charts.Frame((float(every_step.min()), last), (low - margin, high + margin))

  def text(value: float) -> str:
    return f"{round(100 * value, 1):g} %" if chart.is_percent else number(float(value))

  parts, heads = [frame.axes("step", text if chart.is_percent else page.axis_number)], []
  for i, steps, values, half in curves:
    style = f"stroke: {colour(i)}; stroke-dasharray: {DASHES[i // len(COLOURS) % len(DASHES)]}"
    if half.any():
      there = charts.polyline(frame, steps, values - half)
      back = charts.polyline(frame, steps[::-1], (values + half)[::-1])
      parts.append(
        f'<path d="{there}L{back[1:]}Z" style="fill: {colour(i)}; opacity: 0.15; stroke: none"/>'
      )
    parts.append(
      f'<path class="line" style="{style}" d="{charts.polyline(frame, steps, values)}"/>'
    )
    for step, value, error in zip(steps, values, half, strict=True):
      interval = f" ± {text(error)}" if error else ""
      parts.append(
        f'<circle class="hit" style="fill: {colour(i)}" cx="{frame.x(step):.1f}"'
        f' cy="{frame.y(value):.1f}" r="5"><title>{escape(names[i])}, step {step:.0f}:'
        f" {escape(text(value))}{escape(interval)}</title></circle>"
      )
    heads.append(
      f'<span class="key" style="color: {colour(i)}">{escape(names[i])}'
      f" <b>{escape(text(values[-1]))}</b></span>"
    )
  return (
    f'<figure><figcaption><h3>{escape(chart.title)}</h3><div class="keys">{"".join(heads)}</div>'
    f'</figcaption>{frame.svg(chart.title, "".join(parts))}<p class="note">{escape(chart.note)}</p>'
    "</figure>"
  )


def _curve(chart: Overlay, run: Run) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns (steps, values, half widths of the intervals) where all are finite."""
  steps, values = run.curves[chart.name]
  half = np.zeros_like(values)
  if chart.error in run.curves:
    errors = dict(zip(*(part.tolist() for part in run.curves[chart.error]), strict=True))
    half = NORMAL_95 * np.asarray([errors.get(step, 0.0) for step in steps.tolist()])
  kept = np.isfinite(values) & np.isfinite(half)
  return steps[kept], values[kept], half[kept]


def page_of(names: Sequence[str], runs: Sequence[Run]) -> str:
  """Returns the whole page: the table, the curves, and the settings that differ."""
  curves = "".join(overlay(chart, names, runs) for chart in OVERLAYS)
  return page.html_page(
    "comparison",
    [
      page.header("comparison", f"{len(runs)} runs", []),
      html_table(names, rows(runs)),
      f'<h2>Curves</h2><div class="grid3">{curves}</div>' if curves else "",
      settings(names, runs),
    ],
  )
