"""Builds requests from text prompts, and the seeds of prompts that are submitted together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import difflib
import hashlib
from typing import Any, TypedDict

from seerjax.models import tokenizer as tokenizer_lib
from seerjax.types import Request, SamplingParams


class SamplingFields(TypedDict, total=False):
  """Fields of `SamplingParams` that `Engine.generate` takes one by one."""

  temperature: float
  top_k: int
  top_p: float
  min_p: float
  presence_penalty: float
  frequency_penalty: float
  repetition_penalty: float
  logit_bias: tuple[tuple[int, float], ...]
  allowed_token_ranges: tuple[tuple[int, int], ...]
  max_tokens: int
  stop_token_ids: tuple[int, ...]
  stop: tuple[str, ...]


def seed_at(seed: int, prompt: int, choice: int = 0) -> int:
  """Returns the seed of one response among those that are requested together, in [0, 2**32).

  The first response to the first prompt has `seed` itself. Each other response has a seed derived
  from `seed` and its position, so that equal prompts get different responses, and each response can
  be reproduced alone with its own seed.

  Args:
    seed: common seed.
    prompt: index of the prompt.
    choice: index among the responses to that prompt.
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
  seed: int | None = None,
  fields: Mapping[str, Any] | None = None,
) -> list[Request]:
  """Returns requests in the order given; a text becomes one user turn of the chat template.

  A text's seed is `seed_at(seed, place)`: equal texts in one list get different responses.

  Args:
    asked: a text, or texts and requests, which are passed through.
    sampling: sampling parameters of the texts; if it has no stop ids, the model's are used. None is
      temperature 1 and 256 tokens, or as many as the context leaves.
    tokenizer: needed for texts.
    context: maximum positions of a prompt and its response.
    seed: seed of the texts; 0 if None.
    fields: fields of the texts' `SamplingParams`; replace `sampling`. Missing fields are as if
      `sampling` were None.

  Raises:
    ValueError: for a text without a tokenizer, or a blank text; for `sampling` and `fields`
      together; for either of them or a seed without a text; for an unknown field.
  """
  asked = [asked] if isinstance(asked, str) else list(asked)
  fields = {} if fields is None else fields
  _check_how(asked, sampling, seed, fields)
  requests: list[Request] = []
  for place, one in enumerate(asked):
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
        f"Engine.generate: got the text {one[:40]!r}, expected at least one character other than"
        " spaces; write a question."
      )
    prompt = tuple(tokenizer.chat_ids(one))
    usual = SamplingParams()
    room = max(1, min(usual.max_tokens, context - len(prompt)))
    of_text = sampling or SamplingParams(**{"max_tokens": room, **fields})
    if not of_text.stop_token_ids:
      of_text = dataclasses.replace(of_text, stop_token_ids=tokenizer.eos_ids)
    requests.append(
      Request(
        request_id=f"text {place}", prompt=prompt, sampling=of_text, seed=seed_at(seed or 0, place)
      )
    )
  return requests


def _check_how(
  asked: Sequence[Request | str],
  sampling: SamplingParams | None,
  seed: int | None,
  fields: Mapping[str, Any],
) -> None:
  """Refuses arguments that conflict or would have no effect; see `as_requests`."""
  names = [one.name for one in dataclasses.fields(SamplingParams)]
  for name in fields:
    if name not in names:
      near = difflib.get_close_matches(name, names, n=1)
      fix = f"did you mean {near[0]!r}?" if near else "correct the spelling."
      raise ValueError(f"Engine.generate: got {name!r}, expected one of {names}; {fix}")
  if sampling is not None and fields:
    raise ValueError(
      f"Engine.generate: got sampling and {', '.join(fields)}, expected only one of the two; leave"
      " out sampling, or write sampling=dataclasses.replace(sampling, ...)."
    )
  given = [
    *(["sampling"] if sampling is not None else []),
    *fields,
    *(["seed"] if seed is not None else []),
  ]
  if given and not any(isinstance(one, str) for one in asked):
    raise ValueError(
      f"Engine.generate: got {', '.join(given)} and no text, expected a text to apply them to; a"
      " Request has its own parameters: write Request(sampling=SamplingParams(...), seed=...)."
    )
