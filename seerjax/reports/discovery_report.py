"""Report of a discovery run on one page: the best artefact, its history, and comparisons.

It reads the files that `ttt.discover` writes:

  best.json        the artefact, its value and its lineage
  metrics.jsonl    curves                                   (seerjax.metrics)
  summary.json     headline, and "rivals" if baselines ran  (exists once the run has ended)
  config.json      settings and fingerprint

Like all pages of `seerjax.reports` it has no scripts and loads nothing. The picture of the artefact
is drawn by the problem (`Environment.picture`): its SVG is reduced to an allow-list of shapes, with
ids of the report's own and without links.

Steps are counted from 1, as in metrics.jsonl and best.json; the start has step 0.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import datetime
import io
import json
import math
import os
import pathlib
import re
from typing import Any, NamedTuple
import xml.etree.ElementTree as xml

import numpy as np

from seerjax import metrics, types
from seerjax.discovery.environment import Artefact, Environment
from seerjax.reports import charts, page, run_directory, run_report
from seerjax.reports.charts import Chart, Frame

BEST = "best.json"
BEST_FIELDS = ("problem", "value", "certificate", "artefact", "lineage", "tree")
VALUE_DIGITS = 12  # Records differ in the tenth digit.
TILE_DIGITS = 8
MAX_ARTEFACT_TEXT = 20_000  # Characters.
MAX_TITLE_TEXT = 400  # Characters of a node's tooltip.

BEST_CHART = Chart(
  title="Best so far",
  names=("search/best",),
  note="over all attempts so far, in the problem's unit",
  digits=VALUE_DIGITS,
  is_smoothed=False,
)
SEARCH_CHARTS = (
  Chart(
    title="Value of attempts",
    names=("search/value_p10", "search/value_median", "search/value_p90"),
    note="over the step's valid attempts, in the problem's unit",
    labels=("10 %", "median", "90 %"),
    digits=6,
  ),
  Chart(
    title="Valid attempts",
    names=("search/valid_rate",),
    note="share of the step's attempts",
    is_percent=True,
  ),
  Chart(title="Archive", names=("search/archive_size",), note="living states, including starts"),
  Chart(
    title="Seed trees alive",
    names=("search/seed_trees_alive",),
    note="starts with living descendants; at 1, all states have one ancestor",
  ),
  Chart(title="Tokens", names=("search/tokens",), note="sampled since the start of the run"),
)
LEARNING_CHARTS = (
  Chart(
    title="β",
    names=("objective/beta",),
    note="mean tilt of the groups, for rewards divided by their group's range",
    # With a single outstanding attempt in a group beta is unbounded: 1e7 and more.
    is_logarithmic=True,
  ),
  Chart(
    title="Effective samples",
    names=("objective/effective_samples",),
    note="effective number of attempts in a tilted group, mean over groups",
  ),
  Chart(
    title="Divergence",
    names=("objective/divergence",),
    note="nats between the tilted and the uniform group, mean over groups",
  ),
  Chart(
    title="KL to the base",
    names=("objective/kl_to_base",),
    note="nats per token, from the sampling weights to the initial ones",
  ),
  Chart(title="Entropy", names=("train/entropy",), note="nats per token"),
  Chart(title="Gradient norm", names=("train/grad_norm",), note="global, before clipping"),
)


REWARD_CHART = Chart(
  title="Rewards of attempts",
  names=(*(f"search/reward_p{p}" for p in (0, 10, 25, 50, 75, 90, 100)), "search/reward_mean"),
  note="bands: 50 %, 80 % and 100 % of the step's attempts; invalid attempts count as 0",
)


class Relative(NamedTuple):
  """A state in the tree of the best state, as recorded when that was found.

  Attributes:
    id: id of the state.
    parent: id of its parent; None for the start.
    step: step in which it was found, from 1; 0 for the start.
    value: in the problem's unit.
  """

  id: int
  parent: int | None
  step: int
  value: float


class Ancestor(NamedTuple):
  """A state on the path to the best one.

  Attributes:
    step: step in which it was found, from 1; 0 for the start.
    value: in the problem's unit.
    tokens: token ids or text that made it from its parent; empty for the start.
  """

  step: int
  value: float
  tokens: tuple[int, ...] | str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
  """Contents of a discovery's directory.

  Attributes:
    run: curves, summary and settings.
    environment: the problem.
    artefact: the best artefact.
    value: its value in the problem's unit.
    certificate: exact bound behind the value; "" if the value is exact.
    lineage: states from the start to the artefact.
    tree: known descendants of that start, oldest first.
    date: date of best.json, year-month-day in UTC.
  """

  run: run_directory.Run
  environment: Environment
  artefact: Artefact
  value: float
  certificate: str
  lineage: tuple[Ancestor, ...]
  tree: tuple[Relative, ...]
  date: str

  @property
  def num_steps(self) -> int:
    """Number of completed steps."""
    steps, _ = self.run.curves.get("search/best", (np.zeros(0), np.zeros(0)))
    return int(steps[-1]) if len(steps) else 0

  @property
  def start(self) -> float:
    """Best value among the starts; for an unfinished run, the value of the artefact's start."""
    return float(metrics.decode_number(self.run.summary.get("start", self.lineage[0].value)))

  def gain(self, other: float) -> float:
    """Returns how much better the value is than another; negative if it is worse."""
    return self.value - other if self.environment.is_maximised else other - self.value


def load(run_dir: str | os.PathLike, environment: Environment) -> Found:
  """Reads the directory of a discovery.

  Args:
    run_dir: directory written by `ttt.discover`.
    environment: problem of the run.

  Raises:
    ValueError: if there is no best.json, a file is damaged, or the run is of another problem.
  """
  path = pathlib.Path(run_dir) / BEST
  if not path.is_file():
    raise ValueError(
      f"discovery report: got {run_dir} without {BEST}, expected the directory of"
      " `seerjax discover`; pass its --workdir (`seerjax report` takes those of other runs, too)."
    )
  best = run_directory.read_json(path)
  try:
    missing = [name for name in BEST_FIELDS if name not in best]
    if missing:
      raise ValueError(f"it has no {', '.join(missing)}")
    value = _finite(best["value"])
    lineage = tuple(
      Ancestor(
        int(state["step"]),
        _finite(state["value"]),
        state["tokens"] if isinstance(state["tokens"], str) else tuple(map(int, state["tokens"])),
      )
      for state in best["lineage"]
    )
    if not lineage:
      raise ValueError("its lineage is empty")
    tree = tuple(
      Relative(
        int(state["id"]),
        None if state["parent"] is None else int(state["parent"]),
        int(state["step"]),
        _finite(state["value"]),
      )
      for state in best["tree"]
    )
  except (KeyError, TypeError, ValueError) as error:
    raise ValueError(
      f"discovery report: got a damaged {path} ({type(error).__name__}: {error}), expected the"
      f" fields {', '.join(BEST_FIELDS)} as ttt.discover writes them; restore a copy, or run again."
    ) from error
  if best["problem"] != environment.name:
    raise ValueError(
      f"discovery report: got the problem {environment.name!r} for a run of {best['problem']!r},"
      " expected the same problem; load the one that config.json names."
    )
  written = datetime.datetime.fromtimestamp(path.stat().st_mtime, datetime.UTC)
  return Found(
    run=run_directory.load(run_dir),
    environment=environment,
    artefact=best["artefact"],
    value=value,
    certificate=str(best["certificate"]),
    lineage=lineage,
    tree=tree,
    date=written.date().isoformat(),
  )


def _finite(value: Any) -> float:
  found = float(metrics.decode_number(value))
  if not math.isfinite(found):
    raise ValueError(f"a value is {found}")
  return found


# Sections.


def headline(found: Found) -> str:
  """Returns the head of the page: the problem and the most important numbers."""
  run, gain = found.run, found.gain(found.start)
  planned = run.config.get("num_steps", found.num_steps)
  won = found.lineage[-1].step
  where = f"found in step {won}" if won else "the start itself"
  share = f"{100 * gain / abs(found.start):+.3g} % of the start" if found.start else ""
  tiles = [
    (page.number(found.value, TILE_DIGITS), f"best value, {_direction(found)}", where),
    (page.number(found.start, TILE_DIGITS), "start", "the best of them"),
    (_signed(gain, TILE_DIGITS), "gain", share),
  ]
  sizes = [run.config.get(name) for name in ("prompts_per_step", "group_size")]
  if all(isinstance(size, int) for size in sizes):
    attempts = found.num_steps * math.prod(size for size in sizes if size is not None)
    tiles.append((page.number(attempts), "attempts", f"{found.num_steps} of {planned} steps"))
  seconds = _cpu_seconds(found)
  if seconds is not None:
    judge = run.summary.get("judge_cpu_seconds")
    note = "" if judge is None else f"edits and verdicts: {page.number(judge, 3)}"
    whole = round(seconds) if seconds >= 100 else seconds
    tiles.append((page.number(whole), "CPU seconds", note))
  if "rollout_train/max_abs_logprob_gap" in run.curves:
    gap = float(np.max(run.curves["rollout_train/max_abs_logprob_gap"][1]))
    tiles.append((page.number(gap), "log-probability gap", "nats, engine to trainer, at most"))
  return page.header(f"discovery · {run.name}", found.environment.name, tiles)


def _direction(found: Found) -> str:
  return "higher is better" if found.environment.is_maximised else "lower is better"


def _signed(value: float, digits: int) -> str:
  return f"{'+' if value >= 0 else '−'}{page.number(abs(value), digits)}"


def _cpu_seconds(found: Found) -> float | None:
  if "cpu_seconds" in found.run.summary:
    return float(metrics.decode_number(found.run.summary["cpu_seconds"]))
  _, values = found.run.curves.get("search/cpu_seconds", (np.zeros(0), np.zeros(0)))
  return float(values[-1]) if len(values) else None


def artefact_section(found: Found, picture: str) -> str:
  """Returns the section on the artefact: its picture and the published values.

  Args:
    found: the run.
    picture: result of `artefact_picture`.
  """
  certificate = (
    f"The value is certified: {found.certificate}."
    if found.certificate
    else "The value is computed by the problem, without a certificate."
  )
  return (
    f'<h2>The best artefact</h2><div class="grid2"><figure>{picture}'
    f'<p class="note">{page.escape(certificate)} The complete artefact is in {BEST}.</p></figure>'
    f"{_published(found)}</div>"
  )


def _published(found: Found) -> str:
  """Returns the table of published values, with this run ranked among them."""
  published = found.environment.published
  if not published:
    return '<figure><p class="note">The problem lists no published values.</p></figure>'
  rows = [
    (
      one.value,
      one.who,
      str(one.year),
      one.source,
      _comparison(found, one.value) if one.is_comparable else "not comparable",
    )
    for one in published
  ]
  rows.append((found.value, "this run", found.date, BEST, ""))
  # On ties the published value comes first.
  rows.sort(key=lambda row: -row[0] if found.environment.is_maximised else row[0])
  text = "".join(
    f'<tr class="{"theirs" if verdict else "ours"}">'
    + _cells(page.number(value, VALUE_DIGITS), who, when, source, verdict)
    + "</tr>"
    for value, who, when, source, verdict in rows
  )
  comparable = [one.value for one in published if one.is_comparable]
  beaten = sum(found.gain(value) > 0 for value in comparable)
  claim = (
    f"This run is better than {beaten} of {len(comparable)} published values."
    if comparable
    else "They are for other inputs, so this run is not compared with them."
  )
  return (
    f"<figure><figcaption><h3>Published values, {_direction(found)}</h3></figcaption>"
    '<div class="scroll"><table class="ranks"><tr><th>value</th><th>who</th><th>when</th>'
    f'<th>where</th><th>this run is</th></tr>{text}</table></div><p class="note">{claim}'
    " Values are as printed in their"
    " sources: a difference below the last digit is not significant, and newer values may"
    " exist.</p></figure>"
  )


def _cells(*texts: str) -> str:
  return "".join(f"<td>{page.escape(text)}</td>" for text in texts)


def _comparison(found: Found, other: float) -> str:
  if math.isnan(other):
    return "better: no valid result there"
  gain = found.gain(other)
  if not gain:
    return "equal"
  return f"{'better' if gain > 0 else 'worse'} by {page.number(abs(gain), 3)}"


def baselines_section(found: Found) -> str:
  """Returns the section on baselines with the same CPU time."""
  baselines = found.run.summary.get("rivals")  # Name of baselines in the files.
  if not baselines or not isinstance(baselines, dict):
    return ""
  values = {name: float(metrics.decode_number(value)) for name, value in baselines.items()}
  seconds = _cpu_seconds(found)
  budget = "as many CPU seconds" if seconds is None else f"{seconds:.0f} CPU seconds"
  rows = "".join(
    "<tr>"
    + _cells(
      name.replace("_", " "),
      "no valid result" if math.isnan(value) else page.number(value, VALUE_DIGITS),
      _comparison(found, value),
    )
    + "</tr>"
    for name, value in values.items()
  )
  return (
    f'<h2>Baselines at equal CPU time</h2><p class="lead">Each had {page.escape(budget)}, like this'
    ' run. One seed each.</p><figure><div class="scroll"><table'
    ' class="ranks"><tr><th>method</th><th>best value</th><th>this run'
    f" is</th></tr>{rows}</table></div></figure>"
  )


def path_section(found: Found) -> str:
  """Returns the section on the search path: best value over steps, and the ancestors."""
  rows, before = "", None
  for state in found.lineage:
    change = "" if before is None else _signed(state.value - before, 6)
    cells = (str(state.step), page.number(state.value, VALUE_DIGITS), change, _tokens(state))
    rows += f"<tr>{_cells(*cells)}</tr>"
    before = state.value
  return (
    f'<h2>Path to the best</h2><div class="grid2">{charts.line_chart(BEST_CHART, found.run)}'
    f"{lineage_chart(found)}</div><details><summary>Ancestors of the best, with their tokens"
    '</summary><div class="scroll"><table class="ranks"><tr><th>step</th><th>value</th>'
    f"<th>change</th><th>tokens</th></tr>{rows}</table></div></details>"
  )


def _tokens(state: Ancestor) -> str:
  text = state.tokens if isinstance(state.tokens, str) else " ".join(map(str, state.tokens))
  return text if len(text) <= MAX_TITLE_TEXT else f"{text[:MAX_TITLE_TEXT]} …"


def lineage_chart(found: Found) -> str:
  """Returns a chart of the best state's lineage and the tree around it: values over steps."""
  run, states = found.run, found.lineage
  _, values = run.curves.get("search/best", (np.zeros(0), np.zeros(0)))
  around = [state.value for state in (*states, *found.tree)]
  shown = np.concatenate([around, values[np.isfinite(values)]])
  low, high = float(shown.min()), float(shown.max())
  # Show the published best unless it would flatten everything else.
  goals = [one.value for one in found.environment.published if one.is_comparable]
  goal = goals[0] if goals else math.nan
  if low - (high - low) <= goal <= high + (high - low):
    low, high = min(low, goal), max(high, goal)
  else:
    goal = math.nan
  margin = 0.08 * (high - low) or 0.1 * abs(high) or 1.0
  last_step = max(found.num_steps, states[-1].step, 1)
  frame = Frame((0.0, float(last_step)), (low - margin, high + margin))
  parts = [frame.axes("step", page.axis_number)]
  if not math.isnan(goal):
    y, words = frame.y(goal), f"published: {page.number(goal, VALUE_DIGITS)}"
    parts.append(
      f'<line class="mean c1" x1="{charts.LEFT}" x2="{charts.WIDTH - charts.RIGHT}"'
      f' y1="{y:.1f}" y2="{y:.1f}"><title>{page.escape(words)}</title></line>'
    )
  places = {state.id: (frame.x(state.step), frame.y(state.value)) for state in found.tree}
  branches = [
    "M{:.1f} {:.1f}L{:.1f} {:.1f}".format(*places[state.parent], *places[state.id])
    for state in found.tree
    if state.parent in places
  ]
  if branches:
    parts.append(f'<path class="raw" d="{"".join(branches)}"/>')
  line = charts.polyline(
    frame,
    np.array([state.step for state in states], float),
    np.array([state.value for state in states]),
  )
  parts.append(f'<path class="line" d="{line}"/>')
  for state in states:
    words = f"step {state.step}: {page.number(state.value, VALUE_DIGITS)}"
    if state.tokens:
      words += f"\ntokens {_tokens(state)}"
    parts.append(
      f'<circle class="dot" cx="{frame.x(state.step):.1f}" cy="{frame.y(state.value):.1f}" r="4">'
      f"<title>{page.escape(words)}</title></circle>"
    )
  note = (
    "dots: ancestors of the best, each made from the previous one; faint: other kept descendants of"
    " the same start"
  )
  note += "" if math.isnan(goal) else "; dashed: the best published value"
  return (
    '<figure><figcaption><h3>Lineage of the best</h3><div class="keys"><span class="key k0">'
    f"<b>{len(states)}</b> of {len(found.tree)} states</span></div></figcaption>"
    f"{frame.svg('Lineage of the best', ''.join(parts))}"
    f'<p class="note">{page.escape(note)}</p></figure>'
  )


def rewards_chart(run: run_directory.Run) -> str:
  """Returns a chart of the rewards' distribution over steps; "" if the run did not record it."""
  chart = REWARD_CHART
  if not {*chart.names} <= {*run.curves}:
    return ""
  steps, _ = run.curves[chart.names[0]]
  *levels, mean = (run.curves[name][1] for name in chart.names)
  middle = len(levels) // 2
  low, high, median = float(levels[0].min()), float(levels[-1].max()), levels[middle]
  margin = 0.08 * (high - low) or 0.1 * abs(high) or 1.0
  last_step = max(float(steps[-1]), float(steps[0]) + 1)
  frame = Frame((float(steps[0]), last_step), (low - margin, high + margin))
  parts = [frame.axes("step", page.axis_number)]
  for least, most in zip(levels[:middle], levels[:middle:-1], strict=True):
    # Forward along the upper edge, and back along the lower one.
    edge = charts.polyline(
      frame, np.concatenate([steps, steps[::-1]]), np.concatenate([most, least[::-1]])
    )
    parts.append(f'<path class="bar" fill-opacity="0.18" d="{edge}Z"/>')
  parts.append(f'<path class="line" d="{charts.polyline(frame, steps, median)}"/>')
  parts.append(f'<path class="line c1" d="{charts.polyline(frame, steps, mean)}"/>')
  heads = "".join(
    f'<span class="key k{i}">{label} <b>{page.number(float(ends[0]), 4)} →'
    f" {page.number(float(ends[-1]), 4)}</b></span>"
    for i, (label, ends) in enumerate((("median", median), ("mean", mean)))
  )
  return (
    f'<figure><figcaption><h3>{chart.title}</h3><div class="keys">{heads}</div></figcaption>'
    f"{frame.svg(chart.title, ''.join(parts))}"
    f'<p class="note">{page.escape(chart.note)}</p></figure>'
  )


def search_section(found: Found) -> str:
  """Returns the section on the search: rewards of attempts, and the archive."""
  figures = rewards_chart(found.run)
  figures += "".join(charts.line_chart(chart, found.run) for chart in SEARCH_CHARTS)
  return f'<h2>Search</h2><div class="grid3">{figures}</div>' if figures else ""


def learning_section(found: Found) -> str:
  """Returns the section on training; one sentence if training was off."""
  if found.run.config.get("train") is False:
    return (
      '<h2>Learning</h2><p class="lead">Training was off: the initial weights sampled every'
      " attempt.</p>"
    )
  figures = "".join(charts.line_chart(chart, found.run) for chart in LEARNING_CHARTS)
  return f'<h2>Learning</h2><div class="grid3">{figures}</div>' if figures else ""


def record_section(found: Found) -> str:
  """Returns the section with summary, settings, numerics, other metrics, and the artefact."""
  text = json.dumps(found.artefact, ensure_ascii=False)
  if len(text) > MAX_ARTEFACT_TEXT:
    text = f"{text[:MAX_ARTEFACT_TEXT]} … {len(text) - MAX_ARTEFACT_TEXT} more characters in {BEST}"
  # Omit what the page shows elsewhere, with more digits.
  shown = ("problem", "best", "start", "certificate", "found_in_step", "rivals")
  summary = {name: value for name, value in found.run.summary.items() if name not in shown}
  return (
    run_report.details_section(
      dataclasses.replace(found.run, summary=summary),
      (BEST_CHART, REWARD_CHART, *SEARCH_CHARTS, *LEARNING_CHARTS),
    )
    + "<details><summary>The artefact, as JSON</summary>"
    + f"<pre>{page.escape(text)}</pre></details>"
  )


# The picture.

SVG = "{http://www.w3.org/2000/svg}"
HREF = ("href", "{http://www.w3.org/1999/xlink}href")
# Shapes, and elements that they refer to. Nothing that links, runs, animates or embeds pages.
ELEMENTS = frozenset({
  "circle", "clipPath", "defs", "ellipse", "feColorMatrix", "feComposite", "filter", "g", "image",
  "line", "linearGradient", "path", "pattern", "polygon", "polyline", "radialGradient", "rect",
  "stop", "svg", "text", "tspan", "use",
})  # fmt: skip
ATTRIBUTES = frozenset({
  "clip-path", "cx", "cy", "d", "fill", "filter", "gradientTransform", "gradientUnits", "height",
  "in", "in2", "k1", "k2", "k3", "k4", "offset", "opacity", "operator", "patternTransform",
  "patternUnits", "points", "preserveAspectRatio", "r", "rx", "ry", "shape-rendering", "stroke",
  "style", "text-anchor", "transform", "type", "values", "viewBox", "width", "x", "x1", "x2", "y",
  "y1", "y2",
})  # fmt: skip
IMAGE = re.compile(r"data:image/(png|jpeg);base64,[A-Za-z0-9+/=\s]*")
LOCAL_URL = re.compile(r"url\(\s*[\"']?#([^\"')]*)[\"']?\s*\)", re.IGNORECASE)
# Text that could refer outside the page, and the escape that could hide it in a style.
REACHES_OUT = re.compile(r"url|import|src|:\s*//|\\|javascript", re.IGNORECASE)


def artefact_picture(found: Found) -> str:
  """Returns the problem's picture as inline SVG, or a paragraph that says why there is none."""
  import matplotlib  # Slow to import, and needed only here.
  from matplotlib import figure

  try:
    drawing = found.environment.picture(types.copied(found.artefact))
    if not isinstance(drawing, figure.Figure):
      raise TypeError(f"got {type(drawing).__name__}, expected a matplotlib.figure.Figure")
    text = io.StringIO()
    # Text becomes paths, to look the same everywhere; a fixed salt makes ids deterministic.
    with matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": "seerjax"}):
      drawing.savefig(text, format="svg", metadata={"Date": None})
    return inline_svg(text.getvalue(), "Picture of the best artefact")
  except Exception as error:  # User code may raise anything; the page is written all the same.
    return (
      '<p class="lead">No picture: the problem\'s picture(artefact) raised'
      f" {page.escape(type(error).__name__)}: {page.escape(error)}</p>"
    )


def inline_svg(text: str, label: str) -> str:
  """Returns an SVG file as an element for the page, with allow-listed shapes and own ids.

  Links lose their targets. Metadata is dropped, and so are style sheets, which would apply to the
  whole page; matplotlib's settings there are applied at the root instead.

  Args:
    text: text of the SVG file.
    label: accessible label.

  Raises:
    xml.ParseError: if it is not XML.
    ValueError: if it is not SVG.
  """
  root = xml.fromstring(text)
  if root.tag != f"{SVG}svg":
    raise ValueError(f"inline_svg: got <{root.tag}>, expected an SVG file; save the figure as svg.")
  names: dict[str, str] = {}
  for element in root.iter():
    for value in element.attrib.values():
      for name in (*LOCAL_URL.findall(value), *re.findall(r"^#(.*)$", value)):
        names.setdefault(name, f"picture-{len(names)}")
  unused = dict(names)  # If an id occurs twice, the first element keeps it.
  safe = _safe(root, names, unused)
  for name in ("width", "height", "x", "y"):
    safe.attrib.pop(name, None)
  width = re.match(r"[\d.]+", root.get("width", ""))
  safe.attrib |= {"role": "img", "aria-label": label, "class": "picture"}
  safe.attrib["style"] = "stroke-linejoin: round; stroke-linecap: butt" + (
    f"; max-width: {width.group()}pt" if width else ""
  )
  return xml.tostring(safe, encoding="unicode")


def _safe(element: xml.Element, names: Mapping[str, str], unused: dict[str, str]) -> xml.Element:
  """Returns a copy with only the known elements and attributes; links become groups."""
  tag = element.tag.removeprefix(SVG)
  made = xml.Element("g" if tag == "a" else tag)
  if tag in ("text", "tspan"):
    made.text = element.text
  for name, value in element.attrib.items():
    if name == "id" and value in unused:
      made.set("id", unused.pop(value))
    elif name in HREF and tag == "use" and value[:1] == "#":
      made.set("href", f"#{names[value[1:]]}")
    elif name in HREF and tag == "image" and IMAGE.fullmatch(value):
      made.set("href", value)
    elif name in ATTRIBUTES and not REACHES_OUT.search(LOCAL_URL.sub("", value)):
      made.set(name, LOCAL_URL.sub(lambda match: f"url(#{names[match[1]]})", value))
  for child in element:
    # The tag of a comment is a function.
    if isinstance(child.tag, str) and child.tag.removeprefix(SVG) in (*ELEMENTS, "a"):
      copy = _safe(child, names, unused)
      if tag in ("text", "tspan"):
        copy.tail = child.tail
      made.append(copy)
  return made


def render(run_dir: str | os.PathLike, environment: Environment) -> pathlib.Path:
  """Writes report.html into a discovery's directory, and returns its path.

  Raises:
    ValueError: see `load`.
  """
  found = load(run_dir, environment)
  picture = artefact_picture(found)
  sections = (
    headline(found),
    artefact_section(found, picture),
    baselines_section(found),
    path_section(found),
    search_section(found),
    run_report.contract_section(found.run),
    learning_section(found),
    record_section(found),
  )
  path = pathlib.Path(run_dir) / page.FILE_NAME
  title = f"{environment.name} · {found.run.name}"
  text = page.html_page(title, sections, has_images="<image" in picture)
  path.write_text(text, encoding="utf-8")
  return path
