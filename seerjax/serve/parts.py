"""An answer's parts as its chat template marks them: content, reasoning, and calls of tools.

    <think> reasoning </think> content <tool_call> {"name": ..., "arguments": {...}} </tool_call>

Only marks that the template itself writes are looked for; without them all is content.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"


class Piece(NamedTuple):
  """A piece of one part.

  Attributes:
    kind: "content", "reasoning" or "call".
    text: of it; of a call the arguments, as JSON.
    name: of the function that is called.
  """

  kind: str
  text: str
  name: str = ""


class Splitter:
  """Takes an answer's text piece by piece and gives back its parts."""

  def __init__(self, template: str, *, is_thinking: bool = False, has_tools: bool = False):
    """Makes it.

    Args:
      template: the chat template, jinja2 source.
      is_thinking: whether the prompt has begun the reasoning.
      has_tools: whether the model was told of tools.
    """
    self._opening = {THINK: "reasoning"} if END_THINK in template else {}
    if has_tools and CALL in template:
      self._opening[CALL] = "call"
    self._closing = {"reasoning": END_THINK, "call": END_CALL}
    self._kind = "reasoning" if is_thinking and self._opening else "content"
    self._text = ""

  def push(self, text: str) -> list[Piece]:
    """Returns what is decided with this text; what may still become a mark is held back."""
    self._text += text
    found: list[Piece] = []
    while True:
      marks = [*self._opening] if self._kind == "content" else [self._closing[self._kind]]
      places = {mark: place for mark in marks if (place := self._text.find(mark)) >= 0}
      if not places:
        break
      mark = min(places, key=lambda one: places[one])
      before, self._text = self._text[: places[mark]], self._text[places[mark] + len(mark) :]
      found += _pieces(self._kind, before)
      self._kind = self._opening[mark] if self._kind == "content" else "content"
    if self._kind != "call":
      held = max((_overlap(self._text, mark) for mark in marks), default=0)
      end = len(self._text) - held
      found += _pieces(self._kind, self._text[:end])
      self._text = self._text[end:]
    return found

  def finish(self) -> list[Piece]:
    """Returns what was held back; a call that was not closed is content, as it stands."""
    text, self._text = self._text, ""
    if self._kind == "call":
      return _pieces("content", CALL + text)
    return _pieces(self._kind, text)


def _overlap(text: str, mark: str) -> int:
  """Returns how many characters at a text's end may begin a mark."""
  longest = min(len(text), len(mark) - 1)
  return next((n for n in range(longest, 0, -1) if text.endswith(mark[:n])), 0)


def _pieces(kind: str, text: str) -> list[Piece]:
  if kind == "call":
    return [_call(text)]
  return [Piece(kind, text)] if text else []


def _call(text: str) -> Piece:
  try:
    body: Any = json.loads(text)
    return Piece("call", json.dumps(body["arguments"], ensure_ascii=False), str(body["name"]))
  except (ValueError, TypeError, KeyError):
    # No call that anybody could follow: as it was said.
    return Piece("content", f"{CALL}{text}{END_CALL}")
