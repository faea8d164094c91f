"""Interface of the models that answer calls in sleep-time compute.

Texts of contexts, rewrites and answers are data. They are put into messages, and only
the chat template can write a message's boundaries (`models.chat_template`), so no text can end its
turn.
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
  """A call failed, and a retry would not help; the message has the reason."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completed:
  """A thinker's completion.

  Attributes:
    text: text of the completion.
    num_tokens: generated tokens, including the end token and hidden reasoning.
    num_prompt_tokens: prompt tokens; 0 if unknown.
    finish_reason: "stop", or "length" if `max_tokens` was reached.
  """

  text: str
  num_tokens: int
  num_prompt_tokens: int = 0
  finish_reason: str = "stop"


Answer = Completed | NoAnswer


@runtime_checkable
class Thinker(Protocol):
  """A model that completes conversations."""

  def complete(
    self, messages: Sequence[Message], *, max_tokens: int, temperature: float, seed: int
  ) -> Completed:
    """Returns the completion of a conversation.

    Args:
      messages: each {"role": ..., "content": ...}.
      max_tokens: most tokens to generate.
      temperature: 0 for greedy decoding.
      seed: sampling seed.

    Raises:
      NoAnswer: if there is none; callers continue without it.
    """
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
  """One call of a thinker; equal calls have equal answers.

  Attributes:
    messages: the conversation.
    max_tokens: most tokens to generate.
    temperature: 0 for greedy decoding.
    seed: sampling seed in [0, 2**32).
  """

  messages: tuple[Message, ...]
  max_tokens: int
  temperature: float
  seed: int

  @property
  def prompt_digest(self) -> str:
    """Digest of the conversation only, 64 hexadecimal digits."""
    return digest([dict(message) for message in self.messages])

  @property
  def key(self) -> str:
    """Digest of everything that determines the answer, 64 hexadecimal digits."""
    return digest([self.prompt_digest, self.max_tokens, float(self.temperature), self.seed])


# Runs calls and yields (index, answer) as they finish.
Ask = Callable[[Sequence[Call]], Iterator[tuple[int, Answer]]]


def digest(value: object) -> str:
  """Returns the SHA-256 of a JSON value, 64 hexadecimal digits."""
  return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def number_of(text: str) -> int:
  """Returns a number in [0, 2**64) for a text, to derive seeds from."""
  return int.from_bytes(hashlib.sha256(text.encode("utf-8", "replace")).digest()[:8], "little")


def answer_of(thinker: Thinker, call: Call) -> Answer:
  """Returns the answer to one call, or the `NoAnswer` error."""
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
  """Returns an `Ask` that calls a thinker from up to `num_threads` threads.

  Raises:
    ValueError: if `num_threads` is below 1.
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
