"""Who answers a prompt, as far as the protocol of sleep knows: one method, and what it returns.

Text of contexts, rewrites and answers is data. It stands in messages, whose turns only the chat
template begins and ends (`models.chat_template`): no text in one ends its turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
import concurrent.futures
import dataclasses
import hashlib
import json
from typing import Protocol, runtime_checkable

from seerjax import types

Message = Mapping[str, str]


class NoAnswer(Exception):
  """A thinker gives no answer to a call, and asking again would not help; says why."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completed:
  """What a thinker said.

  Attributes:
    text: of the answer.
    num_tokens: generated, those of the answer's end and of hidden reasoning included.
    num_prompt_tokens: that were read, 0 if that is not known.
    finish_reason: "stop", or "length" where `max_tokens` cut it.
  """

  text: str
  num_tokens: int
  num_prompt_tokens: int = 0
  finish_reason: str = "stop"


Answer = Completed | NoAnswer


@runtime_checkable
class Thinker(Protocol):
  """A model behind whatever door."""

  def complete(
    self, messages: Sequence[Message], *, max_tokens: int, temperature: float, seed: int
  ) -> Completed:
    """Returns the answer to a conversation.

    Args:
      messages: {"role": ..., "content": ...} each.
      max_tokens: most tokens generated.
      temperature: 0 is greedy.
      seed: of the noise, where there is any.

    Raises:
      NoAnswer: if there is none; a caller goes on without it.
    """
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
  """One question to a thinker; equal calls have equal answers.

  Attributes:
    messages: the conversation.
    max_tokens: most tokens generated.
    temperature: 0 is greedy.
    seed: in [0, 2**32).
  """

  messages: tuple[Message, ...]
  max_tokens: int
  temperature: float
  seed: int

  @property
  def prompt_digest(self) -> str:
    """Of the conversation alone, 64 hexadecimal digits."""
    return digest([dict(message) for message in self.messages])

  @property
  def key(self) -> str:
    """Of all that decides the answer, 64 hexadecimal digits."""
    return digest([self.prompt_digest, self.max_tokens, float(self.temperature), self.seed])


# Answers calls, as (index among them, answer), in the order in which they come.
Ask = Callable[[Sequence[Call]], Iterator[tuple[int, Answer]]]


def digest(value: object) -> str:
  """Returns the SHA-256 of a JSON value, 64 hexadecimal digits."""
  return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def number_of(text: str) -> int:
  """Returns a number in [0, 2**64) that stands for a text in seeds."""
  return int.from_bytes(hashlib.sha256(text.encode("utf-8", "replace")).digest()[:8], "little")


def answer_of(thinker: Thinker, call: Call) -> Answer:
  """Returns the answer to one call, or why there is none."""
  try:
    return thinker.complete(
      types.copied(call.messages),
      max_tokens=call.max_tokens,
      temperature=call.temperature,
      seed=call.seed,
    )
  except NoAnswer as error:
    return error


def asking(thinker: Thinker, *, num_threads: int = 1) -> Ask:
  """Returns what asks a thinker for several answers at once, each in a thread of its own.

  Raises:
    ValueError: for less than one thread.
  """
  if num_threads < 1:
    raise ValueError(f"asking: got num_threads={num_threads}, expected at least 1; raise it.")

  def ask(calls: Sequence[Call]) -> Iterator[tuple[int, Answer]]:
    if num_threads == 1:
      for index, call in enumerate(calls):
        yield index, answer_of(thinker, call)
      return
    with concurrent.futures.ThreadPoolExecutor(num_threads, "thinker") as pool:
      places = {pool.submit(answer_of, thinker, call): i for i, call in enumerate(calls)}
      try:
        for done in concurrent.futures.as_completed(places):
          yield places[done], done.result()
      finally:
        pool.shutdown(wait=True, cancel_futures=True)

  return ask
