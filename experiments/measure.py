"""Shared parts of measurements: intervals, clocks, turns, tables, bars, and a command's frame.

Claim: none; experiments use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
import math
import pathlib
import time
from typing import Any, NamedTuple, TypeVar

from absl import app, flags
import numpy as np

from seerjax.run import command_line

T = TypeVar("T")
Z = 1.96  # Standard errors on each side of a 95 % interval.
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


class Interval(NamedTuple):
  """A number with its 95 % interval."""

  value: float
  low: float
  high: float

  def text(self, scale: float = 1.0, digits: int = 1) -> str:
    """Returns text such as "1.2 (0.3 to 2.1)"."""
    value, low, high = (f"{scale * one:.{digits}f}" for one in self)
    return f"{value} ({low} to {high})"


def mean(values: Sequence[float] | np.ndarray) -> Interval:
  """Returns the mean of independent values, with an interval of 1.96 standard errors."""
  many = np.asarray(values, np.float64)
  error = float(many.std(ddof=1) / math.sqrt(len(many))) if len(many) > 1 else math.nan
  value = float(many.mean())
  return Interval(value, value - Z * error, value + Z * error)


def ratio(ratios: Sequence[float] | np.ndarray) -> Interval:
  """Returns the geometric mean of paired ratios, with Student's t interval of the logarithms."""
  from scipy import stats  # Slow to import, and most commands need no interval.

  logs = np.log(ratios)
  middle = float(logs.mean())
  half = float(stats.t.ppf(0.975, len(logs) - 1) * logs.std(ddof=1) / np.sqrt(len(logs)))
  return Interval(*(float(np.exp(x)) for x in (middle, middle - half, middle + half)))


def share(value: float, count: int) -> Interval:
  """Returns a share of `count` with its Wilson interval."""
  centre = (value + Z**2 / (2 * count)) / (1 + Z**2 / count)
  half = Z * math.sqrt(value * (1 - value) / count + Z**2 / (4 * count**2)) / (1 + Z**2 / count)
  return Interval(value, centre - half, centre + half)


class Clocked(NamedTuple):
  """Wall and CPU seconds of a call; CPU seconds count all threads of this process."""

  seconds: float
  cpu_seconds: float


def clocked(call: Callable[[], T]) -> tuple[T, Clocked]:
  """Returns the result of a call, and its seconds."""
  begin, cpu_begin = time.perf_counter(), time.process_time()
  result = call()
  return result, Clocked(time.perf_counter() - begin, time.process_time() - cpu_begin)


def in_turn(names: Iterable[T], turn: int) -> list[T]:
  """Returns names in the order of a turn: backwards in every second one.

  Other load on the machine then affects all sides alike.
  """
  return list(names)[:: 1 if turn % 2 == 0 else -1]


def table(names: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
  """Returns a Markdown table."""
  head = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
  return "\n".join([*head, *(f"| {' | '.join(map(str, row))} |" for row in rows)])


def spread(values: Sequence[float], form: str = ",.0f") -> str:
  """Returns the median and range of several rounds as text."""
  middle, low, high = (
    format(one, form) for one in (float(np.median(values)), min(values), max(values))
  )
  return f"{middle} ({low} to {high})"


def holds(is_met: bool) -> str:
  """Returns the last column of a table of aims."""
  return "yes" if is_met else "**no**"


class Bar(NamedTuple):
  """A bar of a picture."""

  label: str
  value: float
  color: str
  alpha: float = 1.0


def bars(found: Sequence[Bar], x_label: str, path: pathlib.Path) -> None:
  """Draws horizontal bars, the first on top."""
  from matplotlib import figure

  sheet = figure.Figure(figsize=(7, 0.6 + 0.3 * len(found)), layout="constrained")
  axes = sheet.subplots()
  for place, one in enumerate(reversed(found)):
    axes.barh(place, one.value, color=one.color, alpha=one.alpha)
    axes.text(one.value, place, f" {one.value:,.0f}", va="center", fontsize=8)
  axes.set_yticks(range(len(found)), [one.label for one in reversed(found)], fontsize=8)
  axes.set_xlabel(x_label)
  axes.margins(x=0.15)
  sheet.savefig(path, dpi=90)


def say(line: str) -> None:
  """Prints a line at once, also where stdout is a file."""
  print(line, flush=True)


def command(run: Callable[[Any], None]) -> None:
  """Runs a command, given its flags; an expected error is one line on stderr and status 2."""

  def main(argv: list[str]) -> None:
    with command_line.refusals():
      command_line.check_arguments(argv)
      run(flags.FLAGS)

  app.run(main)
