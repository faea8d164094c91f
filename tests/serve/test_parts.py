"""Parts of a response are equal for every division into pieces, and nothing is lost."""

from __future__ import annotations

import itertools
import json

import chat_forms
from hypothesis import given, strategies as st
import pytest

from seerjax.serve import parts
from seerjax.serve.parts import Piece, Splitter

MARKS = (parts.THINK, parts.END_THINK, parts.CALL, parts.END_CALL)
# Partial marks, misplaced marks, invalid calls: anything a model may generate.
SAYINGS = st.lists(
  st.sampled_from(
    [
      *MARKS, *(mark[:-1] for mark in MARKS), *(mark[1:] for mark in MARKS), "<", ">", "a", "\n",
      "ä",
      '{"name": "f", "arguments": {"a": 1.0,  "b": "</tool_call"}}', '{"name": "f"', "{}", " ",
      '<tool_call>\n{"arguments": {}, "name": "g"}\n</tool_call>', '{"name": 1, "arguments": {}}',
    ]
  ),
  max_size=12,
).map("".join)  # fmt: skip


def split(pieces, **others) -> list[Piece]:
  splitter = Splitter(chat_forms.QWEN3, **others)
  found = [one for piece in pieces for one in splitter.push(piece)]
  return [*found, *splitter.finish()]


def joined(pieces: list[Piece]) -> list[Piece]:
  """Returns the pieces with neighbours of one part made one; calls and marks stand alone."""
  found: list[Piece] = []
  for is_text, run in itertools.groupby(
    pieces, key=lambda piece: piece.kind if piece.kind in ("content", "reasoning") else ""
  ):
    run = [*run]
    if is_text:
      text = "".join(piece.text for piece in run)
      assert all(piece.raw == piece.text for piece in run)
      found.append(Piece(is_text, text, raw=text))
    else:
      found += run
  return found


def cut(text: str, places: list[int]) -> list[str]:
  ends = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
  return [text[begin:end] for begin, end in itertools.pairwise(ends)]


class HoldsNothing(Splitter):
  """Twin: a possible mark is not held back."""

  def push(self, text: str) -> list[Piece]:
    return [*super().push(text), *(self.finish() if self._kind != "call" else [])]


@given(SAYINGS, st.lists(st.integers(0, 1000)), st.booleans(), st.booleans())
def test_parts_are_the_same_however_a_text_is_cut(text, places, is_thinking, has_tools):
  others = dict(is_thinking=is_thinking, has_tools=has_tools)
  whole = split([text], **others)
  pieces = split(cut(text, places), **others)
  letters = split(text, **others)
  assert joined(pieces) == joined(whole) == joined(letters)
  assert "".join(piece.raw for piece in pieces) == text
  for piece in whole:
    if piece.kind == "call":
      assert has_tools and isinstance(json.loads(piece.text), dict)
      assert piece.text in piece.raw and piece.raw.endswith(parts.END_CALL)


def test_a_splitter_that_holds_nothing_back_is_found_out():
  splitter = HoldsNothing(chat_forms.QWEN3)
  found = [one for letter in "<think>a</think>b" for one in splitter.push(letter)]
  assert joined(found) != joined(split(["<think>a</think>b"]))


def test_an_answer_with_all_its_parts():
  text = (
    "<think>Which?</think>\nI ask.\n<tool_call>\n"
    '{"name": "find", "arguments": {"city":"Ulm",  "n": 1.0}}\n</tool_call>'
  )
  found = joined(split([text], has_tools=True))
  assert [(piece.kind, piece.text, piece.name) for piece in found] == [
    ("mark", "", ""),
    ("reasoning", "Which?", ""),
    ("mark", "", ""),
    ("content", "\nI ask.\n", ""),
    ("call", '{"city":"Ulm",  "n": 1.0}', "find"),  # Letter by letter as generated.
  ]


@pytest.mark.parametrize(
  "inside",
  [
    "", "{}", "f(1)", '{"name": "f"}', '{"name": "f", "arguments": "{}"}', "[" * 10_000,
    '{"name": 3, "arguments": {}}', '{"name": "f", "arguments": {"a": NaN}}',
    '{"name": "f", "arguments": {}} {}', '{"name": "f", "name": "g", "arguments": {}}',
  ],
)  # fmt: skip
def test_a_call_that_nobody_could_follow_is_content(inside: str):
  text = f"<tool_call>{inside}</tool_call>"
  assert joined(split([text], has_tools=True)) == [Piece("content", text, raw=text)]


def test_a_call_that_is_not_closed_is_content():
  text = '<tool_call>{"name": "f", "arguments": {}}</tool_ca'
  assert joined(split(text, has_tools=True)) == [Piece("content", text, raw=text)]


@pytest.mark.parametrize(
  "value",
  ["</tool_call>", "<tool_call>", "a </tool_call> b </tool_call>", 'a\\"</tool_call>', "<think>"],
)
def test_a_mark_inside_an_arguments_text_is_text(value: str):
  arguments = json.dumps({"a": value})
  text = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
  expected = [Piece("call", arguments, "f", text)]
  assert split([text], has_tools=True) == split(text, has_tools=True) == expected
  assert split([text, text], has_tools=True) == expected * 2


def test_what_follows_a_call_whose_text_is_never_closed_has_its_parts():
  broken = '<tool_call>{"name": "f}</tool_call>'
  good = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
  found = joined(split(f"{broken}<think>a</think>{good}b", has_tools=True))
  kinds = ["content", "mark", "reasoning", "mark", "call", "content"]
  assert [piece.kind for piece in found] == kinds
  assert found[0].text == broken and found[4].raw == good


def test_marks_that_the_template_does_not_write_are_content():
  splitter = Splitter(chat_forms.QWEN25, has_tools=False)
  text = "<think>a</think><tool_call>{}</tool_call>"
  assert joined([*splitter.push(text), *splitter.finish()]) == [Piece("content", text, raw=text)]


def test_who_knows_tools():
  assert parts.knows_tools(chat_forms.QWEN25) and parts.knows_tools(chat_forms.QWEN3)
  assert not parts.knows_tools("{{ 'tools' }}<tool_call></tool_call>")  # A word is no variable.
  assert not parts.knows_tools("{% for tool in tools %}{{ tool }}{% endfor %}")  # Marks no calls.
  assert not parts.knows_tools("{% if %}")


def test_calls_are_written_as_the_template_reads_them():
  call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a":  1}'}}
  message = {"role": "assistant", "content": "", "tool_calls": [call]}
  assert parts.as_template_reads(chat_forms.QWEN3, message) is message
  read = parts.as_template_reads("{{ call.arguments | tojson }}", message)
  assert read["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
  assert message["tool_calls"][0] is call and call["function"]["arguments"] == '{"a":  1}'
