"""A run's report: one HTML page that holds everything and asks for nothing.

  python -m seerjax.reports.run_report RUN_DIRECTORY

It reads what a run leaves in its directory, each if it is there:

  metrics.jsonl    curves                       (seerjax.metrics)
  summary.json     the headline and its table
  config.json      the settings, and "fingerprint" if it has one
  journal.jsonl    lengths and transcripts      (seerjax.rollout.journal)
  traces.jsonl     who ran where and when       (seerjax.rollout.trace)

The page has no script and no outside resource. Pictures are inline SVG that takes its colours from
the page, so that they follow a light or a dark screen. All text of models, tasks and settings is
escaped.

A section is a function from `Run` to HTML (empty if the run has nothing for it); `SECTIONS` is
their order on the page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import html
import json
import math
import os
import pathlib
import sys
from typing import Any

import numpy as np

from seerjax import metrics
from seerjax.reports import gantt
from seerjax.rollout import journal, trace as trace_lib
from seerjax.speculation import statistics

FILE_NAME = "report.html"
NUM_TRANSCRIPTS = 4  # Of the first step, and as many of the last.
NUM_BINS = 24

Points = tuple[np.ndarray, np.ndarray]  # (steps, values), of equal length.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
  """What a run directory holds.

  Attributes:
    name: of the directory.
    curves: by metric name, the steps and values.
    summary: empty if there is none.
    config: empty if there is none.
    fingerprints: of the journal's epochs, or the config's.
    first: rollouts of the journal's first step, by (group, member).
    last: rollouts of its last step; empty if there is one step only.
    traces: by step, what was done for it.
  """

  name: str
  curves: dict[str, Points]
  summary: dict[str, Any]
  config: dict[str, Any]
  fingerprints: tuple[dict[str, str], ...]
  first: tuple[journal.Entry, ...]
  last: tuple[journal.Entry, ...]
  traces: dict[int, trace_lib.StepTrace]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chart:
  """One picture of the curves.

  Attributes:
    title: above it.
    names: metrics drawn, those of them that the run has.
    note: what the numbers are, with their unit.
    labels: what the curves are called, where there are several.
    is_contract: whether the curve is promised to be exactly zero.
    is_percent: whether values are fractions shown in percent.
    digits: significant ones that are shown.
    is_smoothed: whether long curves are drawn as means, over the faint raw one.
    is_logarithmic: whether the scale is; what is not above 0 is then not drawn.
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


CONTRACT_CHARTS = (
  Chart(
    title="KL, rollout ‖ trainer",
    names=("contract/kl",),
    note="nats, with the weights that sampled, before the update",
    is_contract=True,
  ),
  Chart(
    title="Largest log-probability gap",
    names=("contract/max_abs_logprob_gap",),
    note="nats, max |behaviour_logprob − logprob| over every sampled token",
    is_contract=True,
  ),
)
CHARTS = (
  Chart(title="Reward", names=("rollout/reward_mean",), note="mean over the step's rollouts"),
  Chart(
    title="Accuracy",
    names=("rollout/accuracy", "heldout/accuracy"),
    note="share of right answers",
    labels=("training problems", "held-out"),
    is_percent=True,
  ),
  Chart(
    title="Response length",
    names=("rollout/length_mean", "rollout/length_p99"),
    note="tokens",
    labels=("mean", "99th percentile"),
  ),
  Chart(title="Loss", names=("train/loss",), note="of the policy, at the step's first update"),
  Chart(title="Gradient norm", names=("train/grad_norm",), note="global, before clipping"),
  Chart(title="Entropy", names=("train/entropy",), note="nats per token"),
  Chart(title="Throughput", names=("rollout/tokens_per_second",), note="generated tokens/s"),
)


# Reading.


def load(run_dir: str | os.PathLike) -> Run:
  """Reads a run directory.

  Raises:
    ValueError: if it holds none of a run's files, or one of them is damaged.
  """
  path = pathlib.Path(run_dir)
  sources = (metrics.FILE_NAME, "summary.json", "config.json", journal.FILE_NAME)
  if not any((path / name).is_file() for name in sources):
    raise ValueError(
      f"report: got {path}, which holds none of {', '.join(sources)}, expected the directory of a"
      " run; pass the one that the experiment printed."
    )
  lines = metrics.read(path / metrics.FILE_NAME) if (path / metrics.FILE_NAME).is_file() else []
  curves: dict[str, tuple[list, list]] = {}
  for line in lines:
    for name, value in line.items():
      if name != "step":
        steps, values = curves.setdefault(name, ([], []))
        steps.append(line["step"])
        values.append(float(value))
  first: tuple[journal.Entry, ...] = ()
  last: tuple[journal.Entry, ...] = ()
  config = read_json(path / "config.json")
  fingerprints: tuple[dict[str, str], ...] = ()
  if isinstance(config.get("fingerprint"), dict):
    fingerprints = (config["fingerprint"],)
  if (path / journal.FILE_NAME).is_file():
    header, entries = journal.read(path / journal.FILE_NAME)
    fingerprints = header.fingerprints
    by_step: dict[int, list[journal.Entry]] = {}
    for entry in entries:
      by_step.setdefault(entry.step, []).append(entry)
      for step in sorted(by_step)[1:-1]:  # Two steps are held, however long the run was.
        del by_step[step]
    ordered = [
      tuple(sorted(by_step[step], key=lambda e: (e.group, e.member))) for step in sorted(by_step)
    ]
    first = ordered[0] if ordered else ()
    last = ordered[-1] if len(ordered) > 1 else ()
  return Run(
    name=path.resolve().name,
    curves={
      name: (np.asarray(steps, float), np.asarray(values, float))
      for name, (steps, values) in curves.items()
    },
    summary=read_json(path / "summary.json"),
    config={name: value for name, value in config.items() if name != "fingerprint"},
    fingerprints=fingerprints,
    first=first,
    last=last,
    traces=trace_lib.read(path / trace_lib.FILE_NAME),
  )


def read_json(path: pathlib.Path) -> dict[str, Any]:
  """Returns the object of a JSON file, empty if there is no such file.

  Raises:
    ValueError: if it is not JSON.
  """
  if not path.is_file():
    return {}
  try:
    value = json.loads(path.read_text(encoding="utf-8"))
  except ValueError as error:
    raise ValueError(
      f"report: got {path}, which is not JSON ({error}), expected a JSON object; mend or remove it."
    ) from error
  return value if isinstance(value, dict) else {"value": value}


# Words and numbers.


def escape(value: Any) -> str:
  """Returns `value` as text that no HTML can come out of; lone surrogates become U+FFFD."""
  return html.escape(str(value).encode("utf-8", "replace").decode("utf-8"), quote=True)


def number(value: Any, digits: int = 4) -> str:
  """Returns a number with so many significant digits, whole ones in full; else what it got.

  Of a list, each of its members so.
  """
  if isinstance(value, list):
    return ", ".join(number(item, digits) for item in value)
  value = metrics.decode_number(value)
  if isinstance(value, bool) or not isinstance(value, (int, float)):
    return str(value)
  if isinstance(value, int) or (math.isfinite(value) and value == int(value) and abs(value) >= 10):
    return f"{int(value):,}".replace(",", "\u202f")
  if value == 0:
    return "0.0"
  if abs(value) < 10 ** (digits - 1):
    return f"{value:.{digits}g}"
  return f"{value:,.0f}".replace(",", "\u202f")


def axis_number(value: float) -> str:
  """Returns a number for an axis, where there is room for about eight characters: 2.5 M."""
  for size, letter in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
    if abs(value) >= max(size, 1e5):
      return f"{value / size:.9g}{letter}"
  return number(float(value), 9)


def gap_sentence(what: str, points: Points | None) -> tuple[bool, str]:
  """Returns whether a promised zero held at all recorded steps, and the sentence that says so."""
  if points is None or not len(points[1]):
    return False, f"{what} was not recorded, so nothing is claimed."
  steps, values = points
  wrong = np.flatnonzero(values != 0.0)  # NaN is not zero either.
  if not len(wrong):
    return True, f"{what} is exactly 0.0 at every one of {len(values)} recorded steps."
  finite = np.nan_to_num(np.abs(values), nan=np.inf, posinf=np.inf)
  worst = int(np.argmax(finite))
  return False, (
    f"{what} is not zero at {len(wrong)} of {len(values)} recorded steps: at most"
    f" {number(values[worst])} nats, at step {steps[worst]:.0f}."
  )


# Pictures.

WIDTH, HEIGHT = 440.0, 210.0
LEFT, RIGHT, TOP, BOTTOM = 52.0, 14.0, 12.0, 26.0
LABEL = 44.0  # Room for the name of the x axis.


def ticks(low: float, high: float, count: int = 4) -> list[float]:
  """Returns about `count` round numbers that cover [low, high]; for (0, 0.93) 0, 0.2, ..., 0.8."""
  if not high > low:
    return [low]
  rough = (high - low) / count
  power = 10.0 ** math.floor(math.log10(rough))
  step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
  first = math.ceil(low / step - 1e-9)
  return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


class Frame:
  """The mapping of data to a picture's points, and its axes."""

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
      # The axis's name stands at its end.
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
  """Returns a centred mean over about a twentieth of the run, narrower at its ends."""
  half = len(values) // 40
  return np.array(
    [
      values[i - w : i + w + 1].mean()
      for i, w in ((i, min(half, i, len(values) - 1 - i)) for i in range(len(values)))
    ]
  )


def line_chart(chart: Chart, run: Run) -> str:
  """Returns one chart as a figure; empty if the run has none of its metrics."""
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
  # A line that is flat by promise needs little room, and no scale but its zero.
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
  """Returns a curve as the `d` of an SVG path."""
  pairs = zip(steps, values, strict=True)
  return "M" + "L".join(f"{frame.x(step):.1f} {frame.y(value):.1f}" for step, value in pairs)


def histogram(samples: Sequence[tuple[str, np.ndarray]]) -> str:
  """Returns overlaid histograms of token counts, each as shares of its own rollouts."""
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


# Sections.


def headline(run: Run) -> str:
  """The run's name, and its few most telling numbers."""
  summary = run.summary
  tiles = []
  if {"accuracy_before", "accuracy_after"} <= summary.keys():
    before, after = float(summary["accuracy_before"]), float(summary["accuracy_after"])
    tiles.append(
      (
        f"{100 * before:.1f} → {100 * after:.1f} %",
        "held-out accuracy",
        f"{100 * (after - before):+.1f} points",
      )
    )
  if "rollout/reward_mean" in run.curves:
    values = run.curves["rollout/reward_mean"][1]
    tiles.append((number(float(values[-1])), "reward", f"from {number(float(values[0]))}"))
  for name, label, unit in (
    ("tokens_per_second", "throughput", "generated tokens/s"),
    ("optimizer_steps", "optimiser steps", ""),
  ):
    if name in summary:
      value = metrics.decode_number(summary[name])
      tiles.append((number(round(value) if value >= 100 else value), label, unit))
  if "seconds" in summary:
    seconds = float(summary["seconds"])
    tiles.append((f"{seconds / 60:.1f} min", "duration", f"{seconds:.0f} s"))
  return header("run report", run.name, tiles)


def header(kind: str, title: str, tiles: Sequence[tuple[str, str, str]]) -> str:
  """Returns the head of a page: its kind, its title, and tiles of (value, label, unit)."""
  cells = "".join(
    f'<div class="tile"><b>{escape(value)}</b><span>{escape(label)}</span>'
    f"<i>{escape(unit)}</i></div>"
    for value, label, unit in tiles
  )
  return (
    f'<header><p class="brand">SeerJAX · {escape(kind)}</p><h1>{escape(title)}</h1>'
    f'<div class="tiles">{cells}</div></header>'
  )


def contract_section(run: Run) -> str:
  """Whether the engine and the trainer computed the same bits, in words and as curves."""
  kl = run.curves.get("contract/kl")
  gap = run.curves.get("contract/max_abs_logprob_gap")
  if kl is None and gap is None:
    return ""
  verdicts = [
    gap_sentence("KL(rollout ‖ trainer)", kl),
    gap_sentence("The largest |log-probability gap|", gap),
  ]
  held = all(ok for ok, _ in verdicts)
  title = (
    "The trainer saw the same bits that the engine sampled"
    if held
    else "Equal bits are not shown for this run"
  )
  sentences = " ".join(sentence for _, sentence in verdicts)
  charts = "".join(line_chart(chart, run) for chart in CONTRACT_CHARTS)
  return (
    f'<h2>On-policy, to the bit</h2><div class="banner {"good" if held else "bad"}">'
    f"<b>{'✓' if held else '✗'} {title}.</b> {escape(sentences)}</div>"
    f'<div class="grid2">{charts}</div>'
  )


def curves_section(run: Run) -> str:
  """How the run went, step by step."""
  charts = "".join(line_chart(chart, run) for chart in CHARTS)
  return f'<h2>Learning</h2><div class="grid3">{charts}</div>' if charts else ""


def lengths_section(run: Run) -> str:
  """How long the responses of the first and the last step are."""
  # The journal counts steps from 0, everything that people read from 1.
  samples = [(entries[0].step + 1, entries) for entries in (run.first, run.last) if entries]
  if not samples:
    return ""
  counts = [
    (f"step {step}", np.array([len(e.rollout.completion.tokens) for e in entries]))
    for step, entries in samples
  ]
  rows = []
  for i, ((label, values), (_, entries)) in enumerate(zip(counts, samples, strict=True)):
    cut = sum(e.rollout.completion.finish_reason == "length" for e in entries)
    rows.append(
      f'<tr><td><span class="key k{i}">{label}</span></td><td>{len(values)}</td>'
      f"<td>{values.mean():.1f}</td><td>{np.median(values):.0f}</td>"
      f"<td>{np.percentile(values, 99):.0f}</td><td>{values.max()}</td><td>{cut}</td></tr>"
    )
  return (
    '<h2>Response lengths</h2><div class="grid2 wide"><figure>'
    f'{histogram(counts)}<p class="note">share of the step\'s rollouts; dashed lines are means</p>'
    '</figure><figure class="center"><div class="scroll"><table class="numbers"><tr><th></th>'
    "<th>rollouts</th>"
    "<th>mean</th><th>median</th><th>p99</th><th>max</th><th>cut off</th></tr>"
    f'{"".join(rows)}</table></div><p class="note">tokens; "cut off" counts rollouts that ended at'
    " max_tokens</p></figure></div>"
  )


def rollout_section(run: Run) -> str:
  """How the longest rollout ran: chunks on instances, and their memory."""
  longest = max(
    (
      (trace.num_steps, -step, trace)
      for step, done in run.traces.items()
      for trace in done.rollouts
    ),
    key=lambda entry: entry[:2],
    default=None,
  )
  if longest is None:
    return ""
  num_steps, step, trace = longest
  most = max((max(row) for row in trace.used_pages), default=1)
  num_pages = run.config.get("engine", {}).get("num_pages", 0) - 1
  # Where the engine chose the number of pages itself, of the most that were in use.
  return gantt.section(1 - step, trace, max(num_pages, most)) if num_steps else ""


def drafts_section(run: Run) -> str:
  """What came of the drafts of all steps."""
  drafts = statistics.Acceptance()
  for done in run.traces.values():
    drafts.include(done.drafts)
  return gantt.drafts_section(drafts)


def transcripts_section(run: Run) -> str:
  """What the model said in the first and in the last step."""
  if not run.first:
    return ""
  columns = "".join(
    f"<div><h3>Step {entries[0].step + 1}</h3>{''.join(map(transcript, _sample(entries)))}</div>"
    for entries in (run.first, run.last)
    if entries
  )
  return (
    '<h2>Transcripts</h2><p class="lead">The first member of each of the step\'s first groups:'
    " nobody"
    f' picked them.</p><div class="grid2">{columns}</div>'
  )


def _sample(entries: Sequence[journal.Entry]) -> list[journal.Entry]:
  first_members: dict[int, journal.Entry] = {}
  for entry in entries:
    first_members.setdefault(entry.group, entry)
  return list(first_members.values())[:NUM_TRANSCRIPTS]


def transcript(entry: journal.Entry) -> str:
  """Returns one rollout as a card; every text in it is escaped."""
  completion, verdict = entry.rollout.completion, entry.rollout.verdict
  mark, word = ("good", "✓ correct") if verdict.correct else ("bad", "✗ wrong")
  if not verdict.well_formed:
    word += ", no answer found"
  facts = [f"reward {number(float(verdict.reward))}", f"{len(completion.tokens)} tokens"]
  if completion.finish_reason == "length":
    facts.append("cut off")
  if len(completion.behaviour_logprobs):
    facts.append(f"mean logprob {float(np.mean(completion.behaviour_logprobs)):.3f}")
  prompt = entry.prompt_text or f"{len(entry.rollout.request.prompt)} prompt tokens, text not kept"
  answer = f'<span class="answer">{escape(verdict.answer)}</span>' if verdict.answer else ""
  return (
    f'<article class="{mark}"><div class="facts"><b>{word}</b>{answer}'
    f"<span>{escape(' · '.join(facts))}</span></div>"
    f'<pre class="prompt">{escape(prompt)}</pre><pre>{escape(completion.text)}</pre></article>'
  )


def details_section(run: Run, charts: Sequence[Chart] = CHARTS) -> str:
  """The summary, the settings, the numerics, and every metric that none of the charts shows."""
  drawn = {name for chart in (*CONTRACT_CHARTS, *charts) for name in chart.names}
  others = {
    name: f"{number(float(v[0]))} → {number(float(v[-1]))}  (min {number(float(np.nanmin(v)))},"
    f" max {number(float(np.nanmax(v)))})"
    if np.isfinite(v).any()
    else "never finite"
    for name, (_, v) in sorted(run.curves.items())
    if name not in drawn
  }
  # Its numerics are the fingerprint below.
  summary = {name: value for name, value in run.summary.items() if name != "numerics"}
  parts = [_table("Summary", summary, is_open=True)]
  for i, fingerprint in enumerate(run.fingerprints):
    title = "Numerics fingerprint" + (f", epoch {i}" if len(run.fingerprints) > 1 else "")
    parts.append(_table(title, fingerprint, is_open=True))
  parts += [_table("Configuration", _flat(run.config)), _table("Other metrics", others)]
  text = "".join(parts)
  return f'<h2>Record</h2><div class="grid2">{text}</div>' if text else ""


def _flat(value: dict[str, Any], start: str = "") -> dict[str, Any]:
  result: dict[str, Any] = {}
  for name, item in value.items():
    result |= _flat(item, f"{start}{name}.") if isinstance(item, dict) else {start + name: item}
  return result


def _table(title: str, values: dict[str, Any], *, is_open: bool = False) -> str:
  if not values:
    return ""
  rows = "".join(
    f"<tr><th>{escape(name)}</th><td>{escape(number(value))}</td></tr>"
    for name, value in values.items()
  )
  return (
    f"<details{' open' if is_open else ''}><summary>{escape(title)}</summary>"
    f'<table class="pairs">{rows}</table></details>'
  )


SECTIONS: tuple[Callable[[Run], str], ...] = (
  headline,
  contract_section,
  curves_section,
  lengths_section,
  rollout_section,
  drafts_section,
  transcripts_section,
  details_section,
)

STYLE = """
:root { color-scheme: light dark; --page: #f6f6f3; --card: #ffffff; --ink: #1b1d21; --soft: #686d76;
  --rule: #e4e4de; --c0: #2f5fd0; --c1: #d9772b; --c2: #7b5bb5; --good: #1f8a5b;
  --good-page: #e6f4ec; --bad: #c23b3b; --bad-page: #fbeaea; }
@media (prefers-color-scheme: dark) { :root { --page: #121417; --card: #1a1d22; --ink: #e7e8ea;
  --soft: #989ea8; --rule: #2b2f36; --c0: #7ea6ff; --c1: #f0a35e; --c2: #b79cf0;
  --good: #5cc796; --good-page: #16291f; --bad: #f08080; --bad-page: #321c1d; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 40px 28px 72px; }
h1 { font-size: 32px; line-height: 1.2; letter-spacing: -0.02em; margin: 2px 0 22px; }
h2 { font-size: 19px; letter-spacing: -0.01em; margin: 44px 0 14px; }
h3 { font-size: 14px; font-weight: 600; margin: 0; }
.brand { color: var(--soft); margin: 0; font-size: 13px; }
.lead { color: var(--soft); margin: -8px 0 14px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); gap: 14px; }
.tile, figure, article, details { background: var(--card); border: 1px solid var(--rule);
  border-radius: 10px; }
.tile { padding: 14px 18px; display: flex; flex-direction: column; }
.tile b { font-size: 23px; letter-spacing: -0.02em; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
.tile span { font-size: 13px; }
.tile i { font-size: 13px; font-style: normal; color: var(--soft); }
.grid2, .grid3 { display: grid; gap: 14px; align-items: start; }
.grid2 { grid-template-columns: repeat(auto-fit, minmax(min(460px, 100%), 1fr)); }
.grid3 { grid-template-columns: repeat(auto-fill, minmax(min(370px, 100%), 1fr)); }
.grid2 > *, .grid3 > * { min-width: 0; }
.wide, .grid3 { align-items: stretch; }
figure { margin: 0; padding: 14px 16px 10px; container-type: inline-size; }
figure.center { display: flex; flex-direction: column; justify-content: center; }
figcaption { display: flex; flex-wrap: wrap; justify-content: space-between; gap: 2px 12px;
  align-items: baseline; margin-bottom: 4px; }
.keys { display: flex; flex-wrap: wrap; gap: 2px 14px; }
.key { font-size: 13px; color: var(--soft); white-space: nowrap; }
.key b { color: var(--ink); font-weight: 600; font-variant-numeric: tabular-nums; }
.key::before { content: ""; display: inline-block; width: 9px; height: 9px; border-radius: 3px;
  margin-right: 6px; background: var(--c0); }
.k1::before { background: var(--c1); } .k2::before { background: var(--c2); }
.note { color: var(--soft); font-size: 12.5px; margin: 2px 0 2px; }
svg { display: block; width: 100%; height: auto; }
.scroll { overflow-x: auto; }  /* What is wider than a small screen moves in a frame of its own. */
.scroll > svg { min-width: 1080px; } .scroll > svg.bars { min-width: 510px; }
.scroll > .ranks { min-width: 460px; }
figcaption + svg { overflow: visible; }  /* The longest numbers of the axis. */
.picture { margin: 0 auto; border-radius: 6px; background: #ffffff; }
.grid { stroke: var(--rule); stroke-width: 1; }
.tick { fill: var(--soft); font-size: 11px; font-variant-numeric: tabular-nums; }
/* Pictures shrink with their card, and their numbers must not. */
@container (max-width: 400px) { .tick { font-size: 13px; } }
@container (max-width: 340px) { .tick { font-size: 15px; } }
.scroll .tick { font-size: 11px; }
.line, .raw { fill: none; stroke: var(--c0); stroke-width: 2; stroke-linejoin: round;
  stroke-linecap: round; }
.raw { stroke-width: 1; opacity: 0.32; }
.line.c1, .raw.c1 { stroke: var(--c1); } .line.c2, .raw.c2 { stroke: var(--c2); }
.dot, .bar { fill: var(--c0); } .dot.c1, .bar.c1 { fill: var(--c1); }
.dot.c2 { fill: var(--c2); }
.bar { opacity: 0.55; } .bar:hover { opacity: 0.85; }
.mean { stroke: var(--c0); stroke-width: 1.5; stroke-dasharray: 4 3; }
.mean.c1 { stroke: var(--c1); }
.hit { fill: var(--c0); opacity: 0; } .hit.c1 { fill: var(--c1); } .hit.c2 { fill: var(--c2); }
.hit:hover { opacity: 1; }
.tail { fill: var(--soft); opacity: 0.13; } .probe { fill: var(--ink); }
.banner { border-radius: 10px; padding: 13px 18px; margin-bottom: 14px; }
.banner.good { background: var(--good-page); } .banner.bad { background: var(--bad-page); }
.banner.good b { color: var(--good); } .banner.bad b { color: var(--bad); }
article { margin-top: 12px; padding: 12px 16px 14px; border-left: 4px solid var(--bad); }
article.good { border-left-color: var(--good); }
.facts { display: flex; flex-wrap: wrap; gap: 2px 12px; font-size: 13px; align-items: baseline; }
.facts b { color: var(--bad); } article.good .facts b { color: var(--good); }
.facts span { color: var(--soft); font-variant-numeric: tabular-nums; }
.facts .answer { color: var(--ink); border: 1px solid var(--rule); border-radius: 5px;
  padding: 0 7px; max-width: 16em; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
pre { margin: 10px 0 0; white-space: pre-wrap; overflow-wrap: anywhere; max-height: 17em;
  overflow-y: auto; font: 12.5px/1.55 ui-monospace, SFMono-Regular, Menlo, Consolas,
  "DejaVu Sans Mono", monospace; }
pre.prompt { color: var(--soft); border-bottom: 1px solid var(--rule); padding-bottom: 10px; }
details { padding: 12px 18px; } .grid2 + details { margin-top: 14px; }
summary { font-weight: 600; font-size: 14px; cursor: pointer; }
table { border-collapse: collapse; width: 100%; font-size: 13px; margin-top: 8px;
  font-variant-numeric: tabular-nums; }
th, td { padding: 5px 0; border-top: 1px solid var(--rule); text-align: left; font-weight: 400;
  vertical-align: top; }
tr:first-child > * { border-top: 0; }
.pairs th { color: var(--soft); padding-right: 18px; white-space: nowrap; }
.pairs td { text-align: right; overflow-wrap: anywhere; }
.numbers th { color: var(--soft); }
.numbers th, .numbers td { text-align: right; padding-left: 12px; white-space: nowrap; }
.numbers td:first-child { text-align: left; padding-left: 0; }
.ranks th { color: var(--soft); } .ranks th, .ranks td { padding-right: 14px; }
.ranks td { overflow-wrap: anywhere; }
.ranks td:nth-child(odd) { white-space: nowrap; }  /* Numbers, dates and verdicts stay whole. */
.ranks .ours td { font-weight: 650; color: var(--c0); }
@media (max-width: 620px) { main { padding: 24px 12px 48px; } .pairs th { white-space: normal;
  overflow-wrap: anywhere; } .tiles { grid-template-columns: repeat(auto-fit, minmax(140px, 1fr)); }
  .tile b { white-space: normal; overflow-wrap: anywhere; } }
@media print { body { background: none; } pre { max-height: none; } }
"""


def page(title: str, sections: Sequence[str], *, has_images: bool = False) -> str:
  """Returns a whole page of HTML.

  Args:
    title: of the browser's window.
    sections: HTML, in their order; empty ones are left out.
    has_images: whether pictures that are written out in the page itself are shown.
  """
  body = "\n".join(f"<section>{text}</section>" for text in sections if text)
  images = " img-src data:;" if has_images else ""
  return (
    '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
    '<meta name="viewport" content="width=device-width, initial-scale=1">'
    # Should a text ever get past `escape`, the browser still runs and loads nothing.
    f'<meta http-equiv="Content-Security-Policy" content="default-src \'none\';{images}'
    " style-src 'unsafe-inline'\">"
    f"<title>{escape(title)} · SeerJAX</title><style>{STYLE}</style></head>\n"
    f"<body><main>\n{body}\n</main></body></html>\n"
  )


def render(run_dir: str | os.PathLike) -> pathlib.Path:
  """Writes report.html into a run directory and returns its path.

  Raises:
    ValueError: as `load`.
  """
  run = load(run_dir)
  path = pathlib.Path(run_dir) / FILE_NAME
  path.write_text(page(run.name, [section(run) for section in SECTIONS]), encoding="utf-8")
  return path


if __name__ == "__main__":
  if len(sys.argv) != 2:
    sys.exit("usage: python -m seerjax.reports.run_report RUN_DIRECTORY")
  sys.stdout.write(f"{render(sys.argv[1])}\n")
