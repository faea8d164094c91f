"""Compares the routes of decoding with those of a pass over whole sequences.

A route is the set of experts of one token in one layer. Decoding goes token by token through pages
of keys and values, as an engine does; the other pass is whole, as the trainer's.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from seerjax.models import flax_module, kv_layout, parameters, transformer
from seerjax.models.decoder import Decoder
from seerjax.types import TokenBatch

SEQUENCES_AT_ONCE = 8  # Of the pass over whole sequences.


class Answers(NamedTuple):
  """Prompts with answers of equal padded length.

  Attributes:
    tokens: i32[b, t].
    lengths: i64[b], tokens without padding.
  """

  tokens: np.ndarray
  lengths: np.ndarray


class Compared(NamedTuple):
  """Routes of one set of weights.

  Attributes:
    num_routes: tokens times layers with experts.
    num_differing: how many of them differ between the two passes.
  """

  num_routes: int
  num_differing: int


def _ids(_: Any, rule: Any, weights: Any, normed: Any, ids: jax.Array, num_rows: Any) -> jax.Array:
  """Keeps the experts of each row (`models.experts.Watch`)."""
  return ids


def whole_routes(params: parameters.Params, tokens: np.ndarray, decoder: Decoder) -> np.ndarray:
  """Returns i32[l, b, t, e], the experts of each token as a pass over whole sequences chooses."""
  size, length = SEQUENCES_AT_ONCE, tokens.shape[1]
  page_size = min(decoder.numerics.kv_split, 64)
  batch, num_pages = flax_module.sequences_batch(size, length, decoder.numerics, page_size)
  pages = kv_layout.ScratchPages(num_pages, page_size)
  program = _whole_program(decoder, pages)
  parts, count = [], len(tokens)
  tokens = np.pad(tokens, ((0, -count % size), (0, 0)))
  for first in range(0, count, size):
    own = batch._replace(tokens=tokens[first : first + size].reshape(-1))
    kept = np.asarray(program(params, jax.tree.map(jnp.asarray, own)))
    parts.append(kept[:, : size * length].reshape(len(kept), size, length, -1))
  return np.concatenate(parts, axis=1)[:, :count]


@functools.lru_cache(maxsize=4)
def _whole_program(decoder: Decoder, pages: kv_layout.ScratchPages) -> Any:
  def run(params: parameters.Params, batch: TokenBatch) -> jax.Array:
    return jnp.stack(transformer.watched(params, batch, pages, decoder=decoder, watch=_ids)[2])

  return jax.jit(run)


def decoded_routes(params: parameters.Params, tokens: np.ndarray, decoder: Decoder) -> np.ndarray:
  """Returns i32[l, b, t, e], the experts of each token as steps of one token a sequence choose."""
  num_sequences, length = tokens.shape
  page_size = min(decoder.numerics.kv_split, 64)
  per_split = decoder.numerics.kv_split // page_size
  width = -(-length // decoder.numerics.kv_split) * per_split
  pages = kv_layout.empty_pages(decoder, num_pages=1 + num_sequences * width, page_size=page_size)
  sequence = np.arange(num_sequences, dtype=np.int32)
  table = (1 + sequence[:, None] * width + np.arange(width)[None]).astype(np.int32)
  program, parts = _step_program(decoder), []
  for position in range(length):
    # Any: the records are typed for device arrays, and this one is built on the host.
    fields: dict[str, Any] = dict(
      tokens=tokens[:, position],
      positions=np.full(num_sequences, position, np.int32),
      slots=table[:, position // page_size] * page_size + position % page_size,
      num_rows=np.int32(num_sequences),
      segment_start=sequence,
      segment_length=np.ones(num_sequences, np.int32),
      page_table=table,
      num_segments=np.int32(num_sequences),
    )
    batch = jax.tree.map(jnp.asarray, TokenBatch(**fields))
    pages, kept = program(params, pages, batch)
    parts.append(np.asarray(kept)[:, :num_sequences])
  return np.stack(parts, axis=2)


@functools.lru_cache(maxsize=4)
def _step_program(decoder: Decoder) -> Any:
  def run(
    params: parameters.Params, pages: kv_layout.Pages, batch: TokenBatch
  ) -> tuple[kv_layout.Pages, jax.Array]:
    _, pages, kept = transformer.watched(params, batch, pages, decoder=decoder, watch=_ids)
    return pages, jnp.stack(kept)

  return jax.jit(run, donate_argnums=1)


def compare(params: parameters.Params, answers: Answers, decoder: Decoder) -> Compared:
  """Counts the routes that differ between decoding and a pass over whole sequences."""
  decoded = decoded_routes(params, answers.tokens, decoder)
  return _compared(decoded, whole_routes(params, answers.tokens, decoder), answers)


def compare_alone(params: parameters.Params, answers: Answers, decoder: Decoder) -> Compared:
  """Works like `compare`, with each sequence decoded in a batch of its own."""
  rows = [answers.tokens[index : index + 1] for index in range(len(answers.tokens))]
  decoded = np.concatenate([decoded_routes(params, own, decoder) for own in rows], axis=1)
  return _compared(decoded, whole_routes(params, answers.tokens, decoder), answers)


def _compared(decoded: np.ndarray, whole: np.ndarray, answers: Answers) -> Compared:
  is_token = np.arange(answers.tokens.shape[1])[None] < answers.lengths[:, None]
  differs = np.any(decoded != whole, axis=-1) & is_token[None]
  return Compared(int(is_token.sum()) * len(decoded), int(differs.sum()))
