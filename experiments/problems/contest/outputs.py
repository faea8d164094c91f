"""Parses integers in the output of programs."""

from __future__ import annotations

import re

NUMBER = re.compile(r"[+-]?[0-9]{1,9}", re.ASCII)


def integers(text: str, first: int = 0) -> list[int] | str:
  """Returns the integers in a text, or the reason why it is not a list of integers.

  Args:
    text: words separated by white space.
    first: index of the text's first word, for the reason.
  """
  words = text.split()
  for place, word in enumerate(words, first):
    if not NUMBER.fullmatch(word):
      return f"output: got {word[:40]!r} as word {place}, expected an integer of at most 9 digits"
  return [int(word) for word in words]
