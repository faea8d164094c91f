"""Charts of a rollout for the report: timeline of chunks, page occupancy, and draft acceptance.

The charts are inline SVG with colours from the page. A chunk is a bar in a lane of its instance,
coloured by group; a dark edge marks a probe; the shaded part is the tail, the steps in which only
the last tenth of the requests ran.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import html

import numpy as np

from seerjax.rollout.trace import Span, Trace
from seerjax.speculation.statistics import Acceptance

WIDTH = 1180
LEFT = 90
LANE = 4
GAP = 14
OCCUPANCY_HEIGHT = 90
BARS_WIDTH, BARS_HEIGHT = 560, 150
# Maximum points of an occupancy curve; more are not visible.
MAX_POINTS = 400


def lanes(spans: Sequence[Span]) -> list[tuple[int, Span]]:
  """Returns (lane, span) pairs; each span takes the first lane that is free at its beginning."""
  ends: list[int] = []
  placed = []
  for span in sorted(spans, key=lambda span: (span.begin, span.request_id)):
    lane = next((i for i, end in enumerate(ends) if end <= span.begin), len(ends))
    if lane == len(ends):
      ends.append(0)
    ends[lane] = span.end
    placed.append((lane, span))
  return placed


def _colour(group: str, groups: dict[str, int]) -> str:
  # Multiples of the golden angle give neighbouring numbers distant hues.
  index = groups.setdefault(group, len(groups))
  return f"hsl({index * 137.508 % 360:.0f} 62% {46 + 12 * (index % 3)}%)"


def _scale(trace: Trace) -> float:
  return (WIDTH - LEFT) / max(trace.num_steps, 1)


def gantt(trace: Trace) -> str:
  """Returns the timeline of a rollout's chunks."""
  scale, top, parts = _scale(trace), 6, []
  groups: dict[str, int] = {}
  data_parallel_size = len(trace.used_pages[0]) if trace.used_pages else 0
  for instance in range(data_parallel_size):
    placed = lanes([span for span in trace.spans if span.instance == instance])
    height = LANE * max((lane + 1 for lane, _ in placed), default=1)
    parts.append(
      f'<text class="tick" x="{LEFT - 8}" y="{top + height / 2 + 4:.0f}" text-anchor="end">'
      f"instance {instance}</text>"
    )
    for lane, span in placed:
      x, y = LEFT + span.begin * scale, top + lane * LANE
      width = max((span.end - span.begin) * scale - 0.4, 0.6)
      title = (
        f"{span.request_id}, steps {span.begin} to {span.end}, {span.num_tokens} tokens"
        f"{', probe' if span.is_probe else ''}{', last chunk' if span.is_last else ''}"
      )
      parts.append(
        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{LANE - 0.8}"'
        f' fill="{_colour(span.group, groups)}"><title>{html.escape(title)}</title></rect>'
      )
      if span.is_probe:
        parts.append(f'<rect class="probe" x="{x:.1f}" y="{y}" width="2.2" height="{LANE - 0.8}"/>')
    top += height + GAP
  tail = trace.tail_steps()
  shade = (
    f'<rect class="tail" x="{WIDTH - tail * scale:.1f}" y="0" width="{tail * scale:.1f}"'
    f' height="{top}"/>'
  )
  return _figure(shade + "".join(parts), top, trace)


def occupancy(trace: Trace, num_pages: int) -> str:
  """Returns the share of pages in use over time, by instance; `num_pages` are usable."""
  used = np.asarray(trace.used_pages, np.float64)
  if not used.size:
    return ""
  chosen = np.unique(np.linspace(0, len(used) - 1, min(len(used), MAX_POINTS)).astype(int))
  scale, parts = _scale(trace), []
  for level in (0.0, 0.5, 1.0):
    y = 8 + OCCUPANCY_HEIGHT * (1 - level)
    parts.append(
      f'<line class="grid" x1="{LEFT}" x2="{WIDTH}" y1="{y}" y2="{y}"/><text class="tick"'
      f' x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{level:.0%}</text>'
    )
  for instance in range(used.shape[1]):
    share = np.minimum(used[chosen, instance] / max(num_pages, 1), 1)
    points = " ".join(
      f"{LEFT + (step + 0.5) * scale:.1f},{8 + OCCUPANCY_HEIGHT * (1 - value):.1f}"
      for step, value in zip(chosen, share, strict=True)
    )
    parts.append(f'<polyline class="line c{instance % 2}" points="{points}"/>')
  return _figure("".join(parts), OCCUPANCY_HEIGHT + 16, trace)


def _figure(body: str, height: int, trace: Trace) -> str:
  scale = _scale(trace)
  marks = []
  for share in (0, 0.25, 0.5, 0.75, 1):
    step = round(share * trace.num_steps)
    anchor = "end" if share == 1 else "middle"
    marks.append(
      f'<text class="tick" x="{LEFT + step * scale:.0f}" y="{height + 14}"'
      f' text-anchor="{anchor}">{step}</text>'
    )
  return (
    f'<div class="scroll"><svg viewBox="0 0 {WIDTH} {height + 20}" role="img">{body}'
    f"{''.join(marks)}</svg></div>"
  )


def section(step: int, trace: Trace, num_pages: int) -> str:
  """Returns the report's section on one rollout, the longest of the run."""
  places: dict[str, set[int]] = {}
  for span in trace.spans:
    places.setdefault(span.request_id, set()).add(span.instance)
  moved = sum(len(instances) > 1 for instances in places.values())
  facts = (
    f"step {step}: {trace.num_steps} engine visits, {len(places)} requests in {len(trace.spans)}"
    f" chunks, {moved} of them on more than one instance; {trace.tail_steps()} visits for only the"
    f" last tenth; {trace.preemptions} preempted"
  )
  return (
    f'<h2>Rollout</h2><p class="lead">{facts}.</p><figure>{gantt(trace)}<p class="note">chunks by'
    " instance and visit (one engine step, or several decode steps), coloured by group; dark edges"
    f" mark probes; the tail is shaded</p></figure><figure>{occupancy(trace, num_pages)}<p"
    ' class="note">pages in use, by instance and visit</p></figure>'
  )


def bars(values: Mapping[int, float], most: float, form: str) -> str:
  """Returns a bar chart with values in the format `form`; `most` is the height of a full bar."""
  width = BARS_WIDTH / max(len(values), 1)
  parts = []
  for place, (label, value) in enumerate(values.items()):
    height = BARS_HEIGHT * value / most
    middle, top = (place + 0.5) * width, 20 + BARS_HEIGHT - height
    parts.append(
      f'<rect class="bar" x="{middle - 0.35 * width:.1f}" y="{top:.1f}" width="{0.7 * width:.1f}"'
      f' height="{height:.1f}"/><text class="tick" x="{middle:.1f}" y="{top - 5:.1f}"'
      f' text-anchor="middle">{value:{form}}</text><text class="tick" x="{middle:.1f}"'
      f' y="{BARS_HEIGHT + 36}" text-anchor="middle">{label}</text>'
    )
  return (
    f'<div class="scroll"><svg class="bars" viewBox="0 0 {BARS_WIDTH} {BARS_HEIGHT + 44}"'
    f' role="img">{"".join(parts)}</svg></div>'
  )


def drafts_section(drafts: Acceptance) -> str:
  """Returns the report's section on draft acceptance; empty without drafts."""
  if not drafts.num_drafted:
    return ""
  by_position = {place + 1: rate for place, rate in enumerate(drafts.rate_at)}
  by_references = drafts.length_by_references
  return (
    f'<h2>Drafts: {drafts.rate:.0%} of tokens accepted</h2><p class="lead">'
    f"{drafts.num_drafted:,} tokens drafted from sibling texts,"
    f" {drafts.num_accepted:,} of them accepted ({drafts.rate:.0%}); {drafts.length:.2f} tokens per"
    " step and request, including the bonus token.</p><div"
    f' class="grid2"><figure>{bars(by_position, 1.0, ".0%")}<p class="note">accepted draft tokens,'
    " by position in the"
    f" draft</p></figure><figure>{bars(by_references, max(by_references.values()), '.2f')}<p"
    ' class="note">tokens per step, by number of known sibling texts</p></figure></div>'
  )
