"""Finds the program in a model's answer: the last fenced Python block."""

from __future__ import annotations

import re

# Possessive quantifiers avoid backtracking, which would be quadratic in a line's length.
_FENCE = re.compile(r" {0,3}(`{3,})[ \t]*+(\w*+)([^`]*+)")
_MARKS = ("python", "py", "python3")


def last_python(text: str) -> tuple[str | None, bool]:
  """Returns (last block marked as Python, or None; whether it is unclosed)."""
  last: str | None = None
  fence, is_python, lines = "", False, []
  for line in text.split("\n"):
    match = _FENCE.fullmatch(line)
    # A marked fence starts a block even inside another: ignores stray ``` in the reasoning.
    if match and (not fence or match[2].lower() in _MARKS):
      fence, is_python, lines = match[1], match[2].lower() in _MARKS, []
    elif match and len(match[1]) >= len(fence) and not match[2] and not match[3].strip():
      last = "\n".join([*lines, ""]) if is_python else last
      fence = ""
    elif fence:
      lines.append(line)
  return ("\n".join(lines), True) if fence and is_python else (last, False)
