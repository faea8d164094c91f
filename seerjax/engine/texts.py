"""Builds requests from text prompts, and the seeds of prompts that are asked together."""

from __future__ import annotations

from collections.abc import Iterable
import dataclasses
import hashlib

from seerjax.models import tokenizer as tokenizer_lib
from seerjax.types import Request, SamplingParams


def seed_at(seed: int, prompt: int, choice: int = 0) -> int:
  """Returns the seed of one answer among those that are asked together, in [0, 2**32).

  The first answer of the first prompt has `seed` itself. Each other answer has a seed that follows
  from `seed` and its position, so that equal prompts get different answers, and each answer can be
  asked for alone by its own seed.

  Args:
    seed: of all of them.
    prompt: index of the prompt.
    choice: index among the answers to that prompt.
  """
  if not prompt and not choice:
    return seed
  digest = hashlib.blake2b(f"{seed}/{prompt}/{choice}".encode(), digest_size=4).digest()
  return int.from_bytes(digest, "little")


def as_requests(
  asked: str | Iterable[Request | str],
  sampling: SamplingParams | None,
  tokenizer: tokenizer_lib.Tokenizer | None,
  context: int,
) -> list[Request]:
  """Returns requests in the order given; a text becomes one user's turn of the chat template.

  A text's seed is `seed_at(0, place)`: equal texts in one list get different answers.

  Args:
    asked: a text, or texts and requests, which stay as they are.
    sampling: of the texts; without stop ids, those of the model end an answer. None is temperature
      1 and 256 tokens, or as many as the context leaves.
    tokenizer: needed for texts.
    context: most positions of a prompt and its answer.

  Raises:
    ValueError: for one request alone, a text without a tokenizer, or one that says nothing.
  """
  if isinstance(asked, Request):
    raise ValueError(
      "Engine.generate: got one Request, expected several of them; write generate([request])."
    )
  requests: list[Request] = []
  for place, one in enumerate([asked] if isinstance(asked, str) else asked):
    if not isinstance(one, str):
      requests.append(one)
      continue
    if tokenizer is None:
      raise ValueError(
        f"Engine.generate: got the text {one[:40]!r} without a tokenizer, expected a model that has"
        " one; load it with seerjax.load_model, or pass requests."
      )
    if not one.strip():
      raise ValueError(
        f"Engine.generate: got the text {one[:40]!r}, expected at least one character that is no"
        " space; write a question."
      )
    prompt = tuple(tokenizer.chat_ids(one))
    usual = SamplingParams()
    of_text = sampling or dataclasses.replace(
      usual, max_tokens=max(1, min(usual.max_tokens, context - len(prompt)))
    )
    if not of_text.stop_token_ids:
      of_text = dataclasses.replace(of_text, stop_token_ids=tokenizer.eos_ids)
    requests.append(
      Request(
        request_id=f"text {place}", prompt=prompt, sampling=of_text, seed=seed_at(0, place)
      )
    )
  return requests
