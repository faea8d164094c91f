"""Prompts of sleep that are as short as can be: the context, and what was written so far."""

from __future__ import annotations

from seerjax.sleep.prompts import Prompts
from seerjax.sleep.thinkers import Message


def user(text: str) -> tuple[Message]:
  return ({"role": "user", "content": text},)


# Two calls per job; the second reads what the first wrote.
PROMPTS = Prompts(
  sleep=lambda context, notes, number: user(f"{context.text}{notes}"),
  read=lambda reply, notes: (notes + reply, bool(notes)),
  wake=lambda question, context, rewritten, verbosity: user(f"{context}{rewritten} {question}"),
  leak=lambda context, verbosity: user(context),
  joined="\n".join,
  rule=lambda context: "",
  facts=lambda context: "",
  num_verbosities=1,
)
