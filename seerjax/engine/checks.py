"""Validates arguments of the engine's public methods, so that no step fails on them.

Each message has the value, the expected values and the fix; see `Engine.add_request`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from seerjax import fields
from seerjax.kv.manifest import KVManifest
from seerjax.models import tokenizer as tokenizer_lib
from seerjax.ops import sampling
from seerjax.types import Completion, Request

# Larger than any logit, and far from float32 overflow and from `sampling.DROPPED`.
MAX_ABS_BIAS = 1e6
MAX_INT32 = 2**31 - 1  # Positions, pages and rows are int32 on the devices.


class Context(NamedTuple):
  """Limit on one sequence, prompt and response.

  Attributes:
    positions: maximum positions of a sequence.
    of_model: maximum positions of the model.
    held_by_pages: advice for a message if pages are the limit; "" if config or model are.
  """

  positions: int
  of_model: int
  held_by_pages: str


def whole(what: str, value: Any, least: int, most: int | None, fix: str) -> None:
  """Refuses a value that is not a whole number from `least` to `most` (None: unbounded).

  Raises:
    ValueError: with `what` as its prefix and `fix` as its suffix.
  """
  if fields.is_whole(value) and value >= least and (most is None or value <= most):
    return
  expected = f"{least} to {most}"
  if most in (None, MAX_INT32):
    is_above = fields.is_whole(value) and value > least
    expected = f"at most {most}" if is_above else f"at least {least}"
  kind = "" if fields.is_whole(value) else "a whole number, "
  raise ValueError(f"{what}: got {value!r}, expected {kind}{expected}; {fix}.")


def tokens_of(what: str, tokens: Any, vocab_size: int) -> None:
  """Refuses tokens that are not ids of a vocabulary.

  Raises:
    ValueError: with the first value of another type, or the lowest and highest id.
  """
  strange = next((token for token in tokens if not fields.is_whole(token)), None)
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


def chunk(what: str, chunk_tokens: int | None) -> None:
  """Refuses a chunk of no token.

  Raises:
    ValueError: with `what` as its prefix.
  """
  if chunk_tokens is not None:
    whole(f"{what}: chunk_tokens", chunk_tokens, 1, None, "None runs to the end")


def pin(
  tokens: Sequence[int],
  reuses_prefixes: bool,
  adapter: str,
  adapters: Collection[str],
  vocab_size: int,
) -> None:
  """Refuses a pin that no request could use.

  Args:
    tokens: the prefix.
    reuses_prefixes: whether the engine caches prefixes.
    adapter: name of the adapter of the pin.
    adapters: names of the engine's adapters, "" included.
    vocab_size: vocabulary size of the model.

  Raises:
    ValueError: if the engine caches no prefixes, or has no such adapter or token.
  """
  tokens_of("Chunks.pin: tokens", tokens, vocab_size)
  if not reuses_prefixes:
    raise ValueError(
      "Chunks.pin: got a pin for an engine with EngineConfig.enable_prefix_caching=False, expected"
      " an"
      " engine with prefix caching; leave it True."
    )
  if adapter not in adapters:
    raise ValueError(
      f"Chunks.pin: got adapter {adapter!r}, expected one of {sorted(adapters)}; see"
      " Engine.set_adapters."
    )


def weights(params: Mapping[str, Any], what: str) -> None:
  """Refuses a call to an engine without weights.

  Args:
    params: weights of the engine.
    what: the call, for the message.

  Raises:
    ValueError: if there are no weights.
  """
  if "layers" not in params:
    raise ValueError(
      f"{what}: got an engine without weights (Engine.release_weights freed them), expected loaded"
      " weights; call Engine.update_weights first."
    )


def request(
  request: Request,
  *,
  context: Context,
  vocab_size: int,
  has_tokenizer: bool,
  adapters: Collection[str] = (),
) -> None:
  """Refuses a request that an engine could never complete.

  Args:
    request: the request.
    context: limit on one sequence.
    vocab_size: vocabulary size of the model.
    has_tokenizer: whether there is text to search for stop strings.
    adapters: names of the engine's adapters.

  Raises:
    ValueError: if the prompt is empty, the request too long, or a feature is missing in this engine
      or model.
  """
  what = f"request {request.request_id!r}"
  if not request.prompt:
    raise ValueError(f"{what}: got an empty prompt, expected at least one token; add a BOS token.")
  tokens_of(what, request.prompt, vocab_size)
  tokens_of(f"{what}, stop_token_ids", request.sampling.stop_token_ids, vocab_size)
  if request.adapter and request.adapter not in adapters:
    raise ValueError(
      f"{what}: got the adapter {request.adapter!r}, expected"
      f" {', '.join(map(repr, adapters)) or 'none, as this engine has none'}, or '' for the base;"
      " add it with Engine.set_adapters."
    )
  if not 0 <= request.seed < 2**32:
    raise ValueError(
      f"{what}: got seed {request.seed}, expected 0 <= seed < 2**32; take it modulo 2**32."
    )
  raise_it = context.held_by_pages or "raise EngineConfig.max_model_len"
  if len(request.prompt) + 1 > context.positions:
    raise ValueError(
      f"{what}: got a prompt of {len(request.prompt)} tokens, expected fewer than the context of"
      f" {context.positions}; shorten it or {raise_it} (the model allows {context.of_model})."
    )
  if len(request.prompt) + request.sampling.max_tokens > context.positions:
    raise ValueError(
      f"{what}: got {len(request.prompt)} prompt tokens and max_tokens"
      f" {request.sampling.max_tokens}, expected a sum of at most {context.positions}, the"
      f" context; lower SamplingParams.max_tokens or {raise_it}."
    )
  if request.sampling.stop and not has_tokenizer:
    raise ValueError(
      f"{what}: got stop without a tokenizer, expected a model that has one; use"
      " stop_token_ids, or load the model with its tokenizer."
    )
  highest = max((high for _, high in request.sampling.allowed_token_ranges), default=0)
  if highest > vocab_size:
    raise ValueError(
      f"{what}: got a grammar that allows ids up to {highest - 1}, expected at most"
      f" {vocab_size - 1}; write SamplingParams.allowed_token_ranges for this model's vocabulary."
    )
  for token, bias in request.sampling.logit_bias:
    if not 0 <= token < vocab_size or not abs(bias) <= MAX_ABS_BIAS:
      raise ValueError(
        f"{what}: got logit_bias ({token}, {bias}), expected a token id from 0 to {vocab_size - 1}"
        f" and a bias from -{MAX_ABS_BIAS:g} to {MAX_ABS_BIAS:g}; the lowest bias forbids a token."
      )
  sampling.sampling_rows([request.sampling])  # Refuses parameters that do not fit a row.


def manifest(
  request: Request,
  kv: KVManifest,
  policy_version: int,
  page_size: int,
  layout: set[tuple[str, tuple[int, ...], tuple[int, ...]]],
) -> None:
  """Refuses a manifest that cannot describe a request's pages: it was given to the wrong engine.

  Args:
    request: the request.
    kv: result of `Chunks.export_kv`.
    policy_version: policy version of the engine.
    page_size: page size of the engine.
    layout: layout of the engine's pages, as `KVManifest.layout`.

  Raises:
    ValueError: if the manifest has another policy, page size or model.
  """
  what = f"request {request.request_id!r}"
  if kv.policy_version != policy_version:
    raise ValueError(
      f"{what}: got pages of policy_version {kv.policy_version}, expected {policy_version}, the"
      " engine's; leave kv out, and the pages are recomputed."
    )
  whole(f"{what}: kv.num_written", kv.num_written, 1, None, "leave kv out if there are no pages")
  if kv.page_size != page_size:
    raise ValueError(
      f"{what}: got pages of {kv.page_size} positions, expected {page_size}, the engine's"
      " EngineConfig.page_size; use the same page_size in all engines, or leave kv out."
    )
  if kv.layout != layout:
    raise ValueError(
      f"{what}: got pages of {sorted(kv.layout)} (dtype, shape before and after the page axis),"
      f" expected {sorted(layout)}; they belong to another model or model axis: leave kv out."
    )


def resume_from(
  request: Request,
  partial: Completion,
  *,
  policy_version: int,
  vocab_size: int,
  tokenizer: tokenizer_lib.Tokenizer | None,
) -> None:
  """Refuses a completion that cannot be the partial response of a request.

  Raises:
    ValueError: if it belongs to another request or policy, is already finished, or cannot be a
      sample of this request: invalid log-probabilities, or tokens that are not allowed.
  """
  what = f"request {request.request_id!r}"
  params, count = request.sampling, len(partial.tokens)
  if partial.request_id != request.request_id:
    raise ValueError(
      f"{what}: got a completion of request {partial.request_id!r}, expected one of this request;"
      " pass the completion with the same request_id."
    )
  if partial.policy_version != policy_version:
    raise ValueError(
      f"{what}: got {count} tokens sampled by policy_version {partial.policy_version}, expected"
      f" {policy_version}, the engine's (a completion comes from one policy_version); restart it"
      " from its prompt."
    )
  if partial.finish_reason or count >= params.max_tokens:
    raise ValueError(
      f"{what}: got {count} of {params.max_tokens} tokens sampled, finish_reason"
      f" {partial.finish_reason!r}, expected an unfinished completion; use it as it is."
    )
  tokens_of(f"{what}, resume_from.tokens", partial.tokens, vocab_size)
  ends = [place for place, token in enumerate(partial.tokens) if token in params.stop_token_ids]
  if ends:
    raise ValueError(
      f"{what}: got the stop id {partial.tokens[ends[0]]} at position {ends[0]} of the completion,"
      " expected an unfinished completion; use it as it is."
    )
  for place, (token, (low, high)) in enumerate(
    zip(partial.tokens, params.allowed_token_ranges, strict=False)
  ):
    if not low <= token < high:
      raise ValueError(
        f"{what}: got token {token} at position {place} of the completion, expected {low} to"
        f" {high - 1}, which its grammar allows there; pass tokens that this request sampled."
      )
  for name in ("behaviour_logprobs", "raw_logprobs"):
    values = vars(partial)[name]
    wrong = np.flatnonzero(~(np.isfinite(values) & (values <= 0)))
    if len(wrong):
      raise ValueError(
        f"{what}: got resume_from.{name} of {values[wrong[0]]} at position {wrong[0]}, expected a"
        " finite number of at most 0; pass the values that the engine returned."
      )
  if tokenizer is not None and params.stop:
    text = tokenizer.decode(list(partial.tokens), skip_special_tokens=True)
    found = [stop for stop in params.stop if stop in text]
    if found:
      raise ValueError(
        f"{what}: got the stop string {found[0]!r} in the completion, expected an unfinished"
        " completion; use it as it is."
      )
