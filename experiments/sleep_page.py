"""HTML page and picture of the curves of sleep-time compute.

Claim: none; used by `experiments/sleep_time.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
import pathlib
from typing import NamedTuple

import numpy as np

from seerjax.reports import charts, page


class Curve(NamedTuple):
  """A curve of a chart.

  Attributes:
    label: label of the curve.
    x, y: f64[n] each, x ascending.
  """

  label: str
  x: np.ndarray
  y: np.ndarray


class Curves(NamedTuple):
  """A chart of up to three curves.

  Attributes:
    title: title of the chart.
    x_label: label of the x axis.
    note: explanation of the numbers.
    curves: one to three curves.
    is_percent: whether y is a share.
  """

  title: str
  x_label: str
  note: str
  curves: tuple[Curve, ...]
  is_percent: bool = False


def figure(found: Curves) -> str:
  """Returns a chart as an HTML figure."""
  every_x = np.concatenate([curve.x for curve in found.curves])
  every_y = np.concatenate([curve.y for curve in found.curves])
  low, high = min(0.0, float(every_y.min())), float(every_y.max())
  margin = 0.08 * (high - low) or 1.0
  frame = charts.Frame((0.0, 1.15 * float(every_x.max())), (low, high + margin))

  def text(value: float) -> str:
    return f"{100 * value:.0f} %" if found.is_percent else page.axis_number(round(value, 6))

  parts, heads = [frame.axes(found.x_label, text)], []
  for place, curve in enumerate(found.curves):
    parts.append(f'<path class="line c{place}" d="{charts.polyline(frame, curve.x, curve.y)}"/>')
    for x, y in zip(curve.x, curve.y, strict=True):
      words = f"{curve.label}: {page.number(float(x), 3)} {found.x_label}, {text(float(y))}"
      parts.append(
        f'<circle class="dot c{place}" cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="3.2">'
        f"<title>{page.escape(words)}</title></circle>"
      )
    heads.append(f'<span class="key k{place}">{page.escape(curve.label)}</span>')
  return (
    f'<figure><figcaption><h3>{page.escape(found.title)}</h3><div class="keys">{"".join(heads)}'
    f"</div></figcaption>{frame.svg(found.title, ''.join(parts))}"
    f'<p class="note">{page.escape(found.note)}</p></figure>'
  )


def html_table(markdown: str) -> str:
  """Returns a Markdown table as an HTML table."""
  head, _, *lines = markdown.strip().split("\n")

  def cells(line: str, tag: str) -> str:
    return "".join(
      f"<{tag}>{page.escape(cell.strip())}</{tag}>" for cell in line.strip("|").split("|")
    )

  rows = "".join(f"<tr>{cells(line, 'td')}</tr>" for line in lines)
  return (
    f'<div class="scroll"><table class="numbers"><tr>{cells(head, "th")}</tr>{rows}</table></div>'
  )


def html(
  tiles: Sequence[tuple[str, str, str]],
  curves: Sequence[Curves],
  tables: Sequence[tuple[str, str]],
) -> str:
  """Returns the page.

  Args:
    tiles: (value, label, unit) shown at the top.
    curves: charts.
    tables: (title, Markdown).
  """
  sections = [
    page.header("sleep-time compute", "Thinking before the question arrives", tiles),
    f'<h2>Curves</h2><div class="grid3">{"".join(figure(one) for one in curves)}</div>',
  ]
  sections += [f"<h2>{page.escape(title)}</h2>{html_table(text)}" for title, text in tables]
  return page.html_page("sleep-time compute", sections)


def draw(curves: Sequence[Curves], path: pathlib.Path) -> None:
  """Draws the charts side by side into a picture."""
  import matplotlib

  matplotlib.use("Agg")
  from matplotlib import pyplot

  drawn, axes = pyplot.subplots(1, len(curves), figsize=(4.6 * len(curves), 3.4), squeeze=False)
  for axis, one in zip(axes[0], curves, strict=True):
    scale = 100 if one.is_percent else 1
    for curve in one.curves:
      axis.plot(curve.x, scale * curve.y, marker="o", markersize=4, label=curve.label)
    axis.set_title(one.title, fontsize=10)
    axis.set_xlabel(one.x_label)
    axis.set_ylabel("%" if one.is_percent else "tokens of sleep")
    axis.set_ylim(bottom=min(0, axis.get_ylim()[0]))
    axis.legend(fontsize=8)
    axis.grid(alpha=0.3)
  drawn.tight_layout()
  drawn.savefig(path, dpi=90)
  pyplot.close(drawn)
