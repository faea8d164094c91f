"""What an engine refuses at its doors, so that no step meets it.

Each refusal says what was got, what was expected and what to change; see `Engine.submit`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from seerjax.models import tokenizer as tokenizer_lib
from seerjax.types import Completion, Request

MAX_INT32 = 2**31 - 1  # Positions, pages and rows are counted in it on the devices.


def is_whole(value: Any) -> bool:
  """Returns whether a value is an integer, of Python or numpy."""
  return isinstance(value, int | np.integer)


def whole(what: str, value: Any, least: int, most: int | None, fix: str) -> None:
  """Refuses what is no whole number from `least` to `most` (None: without an end).

  Raises:
    ValueError: with `what` at its beginning and `fix` at its end.
  """
  if is_whole(value) and value >= least and (most is None or value <= most):
    return
  expected = f"{least} to {most}"
  if most in (None, MAX_INT32):
    is_above = is_whole(value) and value > least
    expected = f"at most {most}" if is_above else f"at least {least}"
  kind = "" if is_whole(value) else "a whole number, "
  raise ValueError(f"{what}: got {value!r}, expected {kind}{expected}; {fix}.")


def tokens_of(what: str, tokens: Any, vocab_size: int) -> None:
  """Refuses what are no token ids of a vocabulary.

  Raises:
    ValueError: naming the first of another type, or the lowest and the highest.
  """
  strange = next((token for token in tokens if not is_whole(token)), None)
  if strange is not None:
    raise ValueError(
      f"{what}: got {strange!r} ({type(strange).__name__}) among the token ids, expected whole"
      " numbers; encode with this model's tokenizer."
    )
  low, high = min(tokens, default=0), max(tokens, default=0)
  if low < 0 or high >= vocab_size:
    raise ValueError(
      f"{what}: got token ids from {low} to {high}, expected 0 to {vocab_size - 1}; encode with"
      " this model's tokenizer."
    )


def resume_from(
  request: Request,
  begun: Completion,
  *,
  policy_version: int,
  vocab_size: int,
  tokenizer: tokenizer_lib.Tokenizer | None,
) -> None:
  """Refuses what cannot be the beginning of a request's answer.

  Raises:
    ValueError: if it is of another request or policy, over already, or no sample of this request:
      log-probabilities that are none, tokens that it may not say.
  """
  what = f"request {request.request_id!r}"
  if not isinstance(begun, Completion):
    raise ValueError(
      f"{what}: got resume_from of type {type(begun).__name__}, expected a Completion; pass what"
      " Engine.progress returned."
    )
  sampling, count = request.sampling, len(begun.tokens)
  if begun.request_id != request.request_id:
    raise ValueError(
      f"{what}: got what request {begun.request_id!r} said, expected its own; pass that of the same"
      " request_id."
    )
  if begun.policy_version != policy_version:
    raise ValueError(
      f"{what}: got {count} tokens said by policy_version {begun.policy_version}, expected"
      f" {policy_version}, the engine's (a completion comes from one policy_version); ask it"
      " from its prompt."
    )
  if begun.finish_reason or count >= sampling.max_tokens:
    raise ValueError(
      f"{what}: got {count} of {sampling.max_tokens} tokens said, finish_reason"
      f" {begun.finish_reason!r}, expected one that is not over; use what it said."
    )
  tokens_of(f"{what}, resume_from.tokens", begun.tokens, vocab_size)
  ends = [place for place, token in enumerate(begun.tokens) if token in sampling.stop_token_ids]
  if ends:
    raise ValueError(
      f"{what}: got the stop id {begun.tokens[ends[0]]} at place {ends[0]} of what it said,"
      " expected one that is not over; use what it said."
    )
  for place, (token, (low, high)) in enumerate(zip(begun.tokens, sampling.allowed, strict=False)):
    if not low <= token < high:
      raise ValueError(
        f"{what}: got token {token} at place {place} of what it said, expected {low} to {high - 1},"
        " which its grammar allows there; pass what this very request said."
      )
  for name in ("behaviour_logprobs", "raw_logprobs"):
    values = vars(begun)[name]
    wrong = np.flatnonzero(~(np.isfinite(values) & (values <= 0)))
    if len(wrong):
      raise ValueError(
        f"{what}: got resume_from.{name} of {values[wrong[0]]} at place {wrong[0]}, expected a"
        " finite number of at most 0; pass them as the engine returned them."
      )
  if tokenizer is not None and sampling.stop_strings:
    text = tokenizer.decode(list(begun.tokens), skip_special_tokens=True)
    found = [stop for stop in sampling.stop_strings if stop in text]
    if found:
      raise ValueError(
        f"{what}: got the stop string {found[0]!r} in what it said, expected one that is not over;"
        " use what it said."
      )
