"""The draft report: accepted tokens of a transcript by hand, and escaping of texts."""

from __future__ import annotations

from html.parser import HTMLParser
import json
import re

from seerjax.reports import draft_report, page
from seerjax.reports.draft_report import Drafted, Step, Transcript

PROMPT = [1, 2]
# 5 6 7 were drafted and 5 6 held; then nothing was drafted, twice; then all of a comb's main path.
TOKENS = [*PROMPT, 5, 6, 8, 9, 9, 3, 4, 0]
DRAFTS = [
  Drafted(2, ((5, 6, 7),)),
  Drafted(5, ()),
  Drafted(7, ((9, 9),)),  # A step without a result: the request was preempted.
  Drafted(7, ((3, 4), (3, 5), (6,))),
]
STEPS = [
  Step(((5, 6, 7),), (5, 6, 8)),
  Step((), (9, 9)),
  Step(((3, 4), (3, 5), (6,)), (3, 4, 0)),
]
WORDS = {0: "", 3: "<b>", 4: "\n", 5: "five", 6: " six", 7: "sev", 8: "eight", 9: "&amp;"}


def decode(ids):
  return "".join(WORDS[token] for token in ids)


class Spans(HTMLParser):
  """Reads (kind, text) of every span of a token."""

  def __init__(self, text: str):
    super().__init__()
    self.found: list[tuple[str, str]] = []
    self.tags: set[str] = set()
    self._kind = ""
    self.feed(text)

  def handle_starttag(self, tag, attrs):
    self.tags.add(tag)
    self._kind = dict(attrs).get("class") or "" if tag == "span" else ""
    if self._kind:
      self.found.append((self._kind, ""))

  def handle_data(self, data):
    if self._kind:
      self.found[-1] = (self._kind, self.found[-1][1] + data)

  def handle_endtag(self, tag):
    self._kind = ""


def test_steps_by_hand():
  assert draft_report.steps_of(DRAFTS, TOKENS, len(PROMPT)) == STEPS
  assert [step.num_held for step in STEPS] == [2, 0, 2]
  # Drafts past the end are not counted.
  behind = [Drafted(len(TOKENS), ((1,),))]
  assert draft_report.steps_of(behind, TOKENS, 2) == [Step((), tuple(TOKENS[2:]))]


def test_a_guess_that_the_engine_had_no_room_for_is_no_step_of_its_own():
  found = draft_report.steps_of([Drafted(2, ((5, 7),)), DRAFTS[1]], TOKENS, 2)
  assert found == [Step((), (5, 6, 8)), Step((), (9, 9, 3, 4, 0))]


def test_a_section_colours_each_token_by_what_came_of_it():
  found = draft_report.transcript("nano & draft", "Why <i>?", STEPS, decode)
  text = draft_report.section(found)
  spans = Spans(text).found
  answer = [
    ("held", "five"), ("held", " six"), ("own", "eight"),
    ("own", "&amp;"), ("own", "&amp;"),
    ("held", "<b>"), ("held", "\u21b5"), ("own", "\u2205"),
  ]  # fmt: skip
  by_step = [
    *answer[:3], ("held", "five"), ("held", " six"), ("missed", "sev"),
    *answer[3:5],
    *answer[5:], ("held", "<b>"), ("held", "\u21b5"),
    ("shared", "<b>"), ("missed", "five"),  # A sibling beneath its parent, which is seen once.
    ("missed", " six"),
  ]  # fmt: skip
  assert spans == [*answer, *by_step]
  assert "nano &amp; draft" in text and "Why &lt;i&gt;?" in text and "8 tokens in 3 steps" in text


def test_a_page_asks_for_nothing_and_lets_no_text_out():
  evil = '</pre><script>alert(1)</script><img src="http://x.y/z">'
  step = (((evil, "a"), (evil, "b")), (evil, "a", evil))
  text = draft_report.html(evil, [Transcript(evil, evil, (step,))])
  assert not Spans(text).tags & {"script", "img", "link", "iframe"}
  assert "default-src 'none'" in text and not re.search(r"(src|href)=[\"']?http", text)
  assert 'title="step 1"' in text
  for kind in ("held", "missed", "own", "shared"):
    assert f".drafts .{kind}" in page.STYLE


def test_a_transcript_survives_json_and_is_written(tmp_path):
  found = draft_report.transcript("t", "p", STEPS, decode)
  assert draft_report.read(json.loads(json.dumps(found))) == found == draft_report.read(found)
  path = draft_report.write(tmp_path, "Drafts", [found])
  assert path == tmp_path / "report.html"
  text = path.read_text()
  assert text == draft_report.html("Drafts", [found])
  # Each of the two steps with drafts had two accepted tokens and one of its own.
  for tile in (
    "<b>8</b>",
    "<b>3</b><span>steps</span><i>2 of them",
    "<b>3</b><span>tokens per step",
  ):
    assert tile in text
