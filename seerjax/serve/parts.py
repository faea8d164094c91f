"""Splits a response into the parts that its chat template marks: content, reasoning, tool calls.

    <think> reasoning </think> content <tool_call> {"name": ..., "arguments": {...}} </tool_call>

Only markers that occur in the template are recognised; without them everything is content. The
parts do not depend on how the text is split into chunks, and their `Piece.raw` add up to the whole
text.
"""

from __future__ import annotations

from collections.abc import Mapping
import json
import re
from typing import Any, NamedTuple, NoReturn

from seerjax.models import chat_template

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"
_READS_TEXT = re.compile(r"arguments\s+is\s+(not\s+)?string")
_SPACE = re.compile(r"[ \t\n\r]*")
_QUOTE = re.compile(r'\\.|(")', re.DOTALL)  # Escaped characters match, too, but without a group.


def reads_tools(template: str) -> bool:
  """Returns whether a chat template reads `tools`."""
  return "tools" in chat_template.variables_read(template)


def knows_tools(template: str) -> bool:
  """Returns whether a chat template reads `tools` and marks tool calls."""
  return reads_tools(template) and CALL in template and END_CALL in template


def as_template_reads(template: str, message: Mapping[str, Any]) -> Mapping[str, Any]:
  """Returns a message with tool-call arguments in the form that its template expects.

  Arguments arrive as JSON text. Templates that test for a string get that text verbatim; the others
  apply `tojson` and get the parsed object.
  """
  if not message.get("tool_calls") or _READS_TEXT.search(template):
    return message
  calls = [
    {**call, "function": {**call["function"], "arguments": json.loads(_arguments(call))}}
    for call in message["tool_calls"]
  ]
  return {**message, "tool_calls": calls}


def _arguments(call: Mapping[str, Any]) -> str:
  return call["function"]["arguments"]


class Piece(NamedTuple):
  """A contiguous piece of one part.

  Attributes:
    kind: "content", "reasoning", "call", or "mark"; marks are not sent to clients.
    text: the text; for a call its arguments as the model wrote them.
    name: name of the called function.
    raw: the model's output for this piece, markers included.
  """

  kind: str
  text: str
  name: str = ""
  raw: str = ""


class Splitter:
  """Splits streamed text into its parts."""

  def __init__(self, template: str, *, is_thinking: bool = False, has_tools: bool = False):
    """Initialises the splitter.

    Args:
      template: source of the chat template, in jinja2.
      is_thinking: whether the prompt already opened the reasoning.
      has_tools: whether the prompt listed tools.
    """
    self._opening = {THINK: "reasoning"} if END_THINK in template else {}
    if has_tools and CALL in template:
      self._opening[CALL] = "call"
    self._closing = {"reasoning": END_THINK, "call": END_CALL}
    self._kind = "reasoning" if is_thinking and self._opening else "content"
    self._text = ""
    self._searched = 0  # Characters of `_text` known to contain no marker.
    self._counted = self._num_quotes = 0  # Characters of a call searched for quotes; their number.

  def push(self, text: str) -> list[Piece]:
    """Returns text that is safe to emit; holds back a possible prefix of a marker."""
    self._text += text
    found: list[Piece] = []
    while True:
      marks = [*self._opening] if self._kind == "content" else [self._closing[self._kind]]
      find = self._find_end if self._kind == "call" else self._text.find
      places = {mark: find(mark, self._searched) for mark in marks}
      places = {mark: place for mark, place in places.items() if place >= 0}
      if not places:
        break
      mark = min(places, key=lambda one: places[one])
      before, self._text = self._text[: places[mark]], self._text[places[mark] + len(mark) :]
      self._searched = self._counted = self._num_quotes = 0
      if self._kind == "call":
        found.append(_call(before))
      else:
        found += _pieces(self._kind, before)
        if mark != CALL:  # The piece of a call includes both markers.
          found.append(Piece("mark", "", raw=mark))
      self._kind = self._opening[mark] if self._kind == "content" else "content"
    held = max((_overlap(self._text, mark) for mark in marks), default=0)
    end = len(self._text) - held
    if self._kind == "call":
      self._searched = end
    else:
      found += _pieces(self._kind, self._text[:end])
      self._text = self._text[end:]
    return found

  def _find_end(self, mark: str, begin: int) -> int:
    """Returns where a call ends, or -1; a marker inside a JSON string does not count."""
    while (place := self._text.find(mark, begin)) >= 0:
      quotes = _QUOTE.finditer(self._text, self._counted, place)
      self._num_quotes += sum(found[1] is not None for found in quotes)
      self._counted = place
      if self._num_quotes % 2 == 0:
        break
      begin = place + len(mark)
    return place

  def finish(self) -> list[Piece]:
    """Returns the text that was held back; an unclosed call becomes content."""
    found: list[Piece] = []
    while self._kind == "call" and END_CALL in self._text:  # The call has an unclosed string.
      before, _, after = self._text.partition(END_CALL)
      found.append(_call(before))
      self._kind, self._text = "content", ""
      self._searched = self._counted = self._num_quotes = 0
      found += self.push(after)
    text, self._text = self._text, ""
    if self._kind == "call":
      return [*found, *_pieces("content", CALL + text)]
    return [*found, *_pieces(self._kind, text)]


def _overlap(text: str, mark: str) -> int:
  """Returns the length of the longest suffix of a text that could start a marker."""
  longest = min(len(text), len(mark) - 1)
  return next((n for n in range(longest, 0, -1) if text.endswith(mark[:n])), 0)


def _pieces(kind: str, text: str) -> list[Piece]:
  return [Piece(kind, text, raw=text)] if text else []


def _call(text: str) -> Piece:
  raw = f"{CALL}{text}{END_CALL}"
  try:
    members = _members(text)
    (name, _), (arguments, written) = members["name"], members["arguments"]
    is_call = isinstance(name, str) and isinstance(arguments, dict)
  except (ValueError, KeyError, RecursionError):
    is_call = False
  if not is_call:  # Not a valid call: emitted verbatim.
    return Piece("content", raw, raw=raw)
  return Piece("call", written, name, raw)


def _members(text: str) -> dict[str, tuple[Any, str]]:
  """Returns the members of a JSON object, each as (value, source text).

  Raises:
    ValueError: if the text is not a JSON object, or repeats a name.
  """

  def no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a JSON number")

  decoder = json.JSONDecoder(parse_constant=no_number)
  found: dict[str, tuple[Any, str]] = {}
  text = text.strip(" \t\n\r")
  place, separator = 0, "{"
  while text[place : place + 1] == separator:
    place = _after_space(text, place + 1)
    name, place = decoder.raw_decode(text, place)
    place = _after_space(text, place)
    if not isinstance(name, str) or name in found or text[place : place + 1] != ":":
      raise ValueError(f"expected a new name and a colon at {place}")
    begin = _after_space(text, place + 1)
    value, place = decoder.raw_decode(text, begin)
    found[name] = (value, text[begin:place])
    place, separator = _after_space(text, place), ","
  if text[place:] != "}":
    raise ValueError(f"expected the end of the object at {place}")
  return found


def _after_space(text: str, place: int) -> int:
  match = _SPACE.match(text, place)
  assert match is not None
  return match.end()
