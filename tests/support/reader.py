"""A rule-based thinker that reads and adds numbers, with errors drawn by seed, in nano's tokens."""

from __future__ import annotations

from collections.abc import Sequence
import pathlib
import re

from seerjax import models
from seerjax.models import tokenizer as tokenizer_lib
from seerjax.sleep import thinkers
from seerjax.sleep.prompts import FINISH, RETHINK
from seerjax.sleep.thinkers import Call, Completed, Message, NoAnswer

TOKENIZER = tokenizer_lib.load(pathlib.Path(models.__file__).parent / "nano")


class Reader:
  """A `Thinker` that records its prompts.

  The prompt tells a sleeper from a waker. A sleeper finds the first amount of each person, and adds
  the numbers of the sentences that name the person; a waker returns the last number of its prompt.
  At a temperature above 0 the seed decides how many lines come first. A prompt that contains
  `refused` gets no response.
  """

  def __init__(self, *, refused: str = "", limit: int = 10**9):
    self.calls: list[Call] = []
    self.refused = refused
    self.limit = limit

  def complete(
    self, messages: Sequence[Message], *, max_tokens: int, temperature: float, seed: int
  ) -> Completed:
    call = Call(messages=tuple(messages), max_tokens=max_tokens, temperature=temperature, seed=seed)
    if len(self.calls) >= self.limit:
      raise KeyboardInterrupt
    self.calls.append(call)
    prompt = messages[-1]["content"]
    if self.refused and self.refused in prompt:
      raise NoAnswer(f"Reader: got {self.refused!r}, expected other words; leave it out.")
    num_lines = thinkers.number_of(str(seed)) % 3 if temperature else 0
    if "each have now?" in prompt:
      lines = _notes(prompt)[num_lines:]
      if "Notes so far" in prompt:
        lines = [FINISH] if "has" in prompt.partition("Notes so far")[2] else [RETHINK, *lines]
    else:
      number = (re.findall(r"[0-9]+", re.sub(r"\([0-9]\)", "", prompt)) or ["0"])[-1]
      lines = ["1+1=2"] * num_lines + [f"#### {int(number) + num_lines}"]
    ids = TOKENIZER.encode("\n".join(lines) or "\n", special_tokens_as_text=True)
    is_cut = len(ids) >= max_tokens
    return Completed(
      text=TOKENIZER.decode(ids[:max_tokens]) if lines else "",
      num_tokens=min(len(ids) + 1, max_tokens),
      num_prompt_tokens=len(TOKENIZER.chat_ids(list(messages))),
      finish_reason="length" if is_cut else "stop",
    )


def _notes(prompt: str) -> list[str]:
  totals: dict[str, int] = {}
  thing = ""
  for sentence in prompt.split(". "):
    words = re.findall(r"\b[A-Z][a-z]+\b", sentence)
    names = [word for word in words if word not in ("At", "Then", "Later")]
    numbers = [int(number) for number in re.findall(r"[0-9]+", sentence)]
    if names and numbers:
      thing = thing or re.findall(r"[a-z]+s\b", sentence)[-1]
      totals[names[0]] = totals.get(names[0], 0) + sum(numbers)
  return [f"{name} has {total} {thing}." for name, total in totals.items()]
