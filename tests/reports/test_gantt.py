"""Rollout charts: lanes, the tail, memory, and escaping of texts."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

from seerjax.reports import gantt
from seerjax.rollout.trace import Span, Trace
from seerjax.speculation.statistics import Acceptance

SPANS = [
  Span("0/0", "a", 0, 0, 4, 4, True, False),
  Span("0/1", "a", 0, 2, 6, 4, False, True),
  Span("0/0", "a", 1, 4, 10, 6, True, True),
  Span("1/<b>", "<b>", 0, 4, 7, 3, True, True),
]
TRACE = Trace(spans=SPANS, used_pages=[[step, 10 - step] for step in range(10)], rows=[1] * 10)


def test_a_span_takes_the_first_free_lane():
  found = gantt.lanes([span for span in SPANS if span.instance == 0])
  assert [(lane, span.request_id) for lane, span in found] == [
    (0, "0/0"), (1, "0/1"), (0, "1/<b>"),
  ]  # fmt: skip


def test_the_chart_has_every_chunk_and_the_tail():
  root = ElementTree.fromstring(gantt.gantt(TRACE))
  rects = root.findall(".//rect")
  kinds = [rect.get("class") for rect in rects]
  assert kinds.count(None) == 4 and kinds.count("probe") == 3 and kinds.count("tail") == 1
  # Three requests: the last of them ends at 10, the one before at 7.
  tail = next(rect for rect in rects if rect.get("class") == "tail")
  scale = (gantt.WIDTH - gantt.LEFT) / 10
  assert float(tail.get("width")) == round(3 * scale, 1)
  assert "instance 0" in "".join(root.itertext()) and "instance 1" in "".join(root.itertext())


def test_memory_is_drawn_for_every_instance():
  root = ElementTree.fromstring(gantt.occupancy(TRACE, 10))
  lines = root.findall(".//polyline")
  assert len(lines) == 2 and all(len(line.get("points").split()) == 10 for line in lines)


def test_a_section_says_what_happened_and_escapes_names():
  text = gantt.section(3, TRACE, 10)
  assert "step 3: 10 engine visits, 3 requests in 4 chunks, 1 of them on more than" in text
  assert "<b>" not in re.sub(r"<title>.*?</title>", "", text) and "1/&lt;b&gt;" in text


def test_an_empty_rollout_is_drawn():
  assert gantt.occupancy(Trace(), 1) == ""
  ElementTree.fromstring(gantt.gantt(Trace()))


def test_drafts_are_drawn_by_position_and_by_siblings():
  drafts = Acceptance()
  assert gantt.drafts_section(drafts) == ""
  for held, references in ((2, 0), (1, 0), (2, 7)):
    drafts.add(2, held, references)
  text = gantt.drafts_section(drafts)
  assert "6 tokens drafted from sibling texts, 5 of them accepted (83%); 2.67 tokens per" in text
  # All three first tokens held and two of the second; 2.5 tokens a step alone, 3 with siblings.
  for label in (">100%<", ">67%<", ">2.50<", ">3.00<", ">7<"):
    assert label in text
  assert text.count('class="bar"') == 4
  ElementTree.fromstring(f"<page>{text}</page>")
