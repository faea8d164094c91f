"""Penalties of tokens that came before: the first change of a row's logits.

  count = how often a token stands in the answer so far
  z     = logits / repetition, of positive ones, or logits * repetition, of others, of every token
          of the prompt and the answer so far
  z     = z - frequency * count - presence, of every token of the answer so far

A row's penalties are a pure function of its sampling parameters, its prompt and the answer before
it, the earlier tokens of a draft included, so that no schedule moves them. They are a list of token
ids with what is subtracted, summed on the host and rounded to float32 once. Rows of a step have
lists of one length; it is a matter of memory alone, since every entry is changed by itself.

Sources: presence and frequency: OpenAI, https://platform.openai.com/docs/api-reference/completions;
repetition: Keskar et al. 2019, https://arxiv.org/abs/1909.05858, over the prompt, too, as Hugging
Face and vLLM do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from seerjax import parallel
from seerjax.array_typing import Array, Float
from seerjax.types import SamplingParams, SamplingRows

# Entries of the shortest list; longer ones have four times as many, until they suffice.
SHORTEST = 256


class Entries(NamedTuple):
  """The penalties of one row.

  Attributes:
    ids: i32[e], ascending: tokens that `repetition` scales.
    values: f32[e], what is subtracted from each.
  """

  ids: np.ndarray
  values: np.ndarray


def entries(
  params: SamplingParams, prompt: Sequence[int] | np.ndarray, answer: Sequence[int]
) -> Entries:
  """Returns the penalties of the token that follows an answer so far.

  Only which tokens the prompt has counts, not how often (`distinct`).
  """
  said, counts = np.unique(np.asarray(answer, np.int32), return_counts=True)
  values = params.frequency_penalty * counts + params.presence_penalty
  if params.repetition_penalty == 1:
    return Entries(said, values.astype(np.float32))
  ids = np.unique(np.concatenate((np.asarray(prompt, np.int32), said)))
  found = np.zeros(len(ids), np.float32)
  found[np.searchsorted(ids, said)] = values
  return Entries(ids, found)


def entries_along(
  params: SamplingParams, prompt: Sequence[int], answer: Sequence[int]
) -> Iterator[Entries]:
  """Yields the penalties of each token of an answer, as `entries` of what stands before it."""
  before = prompt if params.repetition_penalty != 1 else ()
  tokens = np.asarray((*before, *answer), np.int32)
  ids, places = np.unique(tokens, return_inverse=True)
  counts = np.zeros(len(ids), np.int64)
  is_there = np.zeros(len(ids), bool)
  is_there[places[: len(before)]] = True
  for place in places[len(before) :].tolist():
    values = params.frequency_penalty * counts + params.presence_penalty
    values = np.where(counts > 0, values, 0).astype(np.float32)
    yield Entries(ids[is_there], values[is_there])
    counts[place] += 1
    is_there[place] = True


def distinct(tokens: Sequence[int]) -> np.ndarray:
  """Returns i32[u], the tokens that there are, each once."""
  return np.unique(np.asarray(tokens, np.int32))


def most_entries(params: SamplingParams, num_prompt: int, num_answer: int) -> int:
  """Returns how many entries the penalties behind so many tokens have at most."""
  return num_answer if params.repetition_penalty == 1 else num_prompt + num_answer


def width_for(count: int) -> int:
  """Returns the entries of a list that holds `count`: one of few, each of which is a program."""
  width = SHORTEST
  while width < count:
    width *= 4
  return width


def empty(shape: tuple[int, ...], width: int) -> dict[str, Any]:
  """Returns fields of `SamplingRows` for rows of this shape, without any penalty (numpy)."""
  return dict(
    penalty_ids=np.full((*shape, width), -1, np.int32),
    penalty_values=np.zeros((*shape, width), np.float32),
    repetition=np.ones(shape, np.float32),
  )


def write(
  fields: dict[str, Any], row: tuple[int, ...], params: SamplingParams, found: Entries
) -> None:
  """Writes one row's penalties into the fields of `empty`."""
  count = len(found.ids)
  fields["penalty_ids"][row][:count] = found.ids
  fields["penalty_values"][row][:count] = found.values
  fields["repetition"][row] = params.repetition_penalty


def with_penalties(
  rows: SamplingRows,
  params: SamplingParams,
  prompt: Sequence[int],
  answers: Sequence[Sequence[int]],
) -> SamplingRows:
  """Returns rows of one request with their penalties, those behind each of the answers so far."""
  if not params.has_penalties:
    return rows
  found = [entries(params, prompt, answer) for answer in answers]
  fields = empty((len(found),), width_for(max(len(one.ids) for one in found)))
  for row, one in enumerate(found):
    write(fields, (row,), params, one)
  return rows._replace(**fields)


def penalised_rows(
  logits: Float[Array, "n v"], sampling: SamplingRows, first: Array
) -> Float[Array, "n v"]:
  """Returns penalised logits, of a whole row or of a slab that begins at id `first`."""
  width = logits.shape[1]
  places = sampling.penalty_ids - first
  is_here = (sampling.penalty_ids >= 0) & (places >= 0) & (places < width)
  kept = jnp.take_along_axis(logits, jnp.clip(places, 0, width - 1), axis=1)
  scaled = parallel.rounded(_scaled(kept, sampling.repetition[:, None]))
  rows = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
  # An unused entry, or one of another slab, aims past the end, where a scatter drops it.
  past = width + jnp.arange(places.shape[1], dtype=jnp.int32)[None, :]
  target = logits.at[rows, jnp.where(is_here, places, past)]
  return target.set(scaled - sampling.penalty_values, mode="drop", unique_indices=True)


@jax.custom_vjp
def _scaled(logits: Array, repetition: Array) -> Array:
  """Returns logits under the repetition penalty f32[n, 1]; there is no gradient of the penalty."""
  return jnp.where(logits > 0, logits / repetition, logits * repetition)


def _scaled_backward(residuals: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array]:
  logits, repetition = residuals
  factor = jnp.where(logits > 0, jnp.float32(1) / repetition, repetition)
  return parallel.rounded(cotangent * factor), jnp.zeros_like(repetition)


_scaled.defvjp(
  lambda logits, repetition: (_scaled(logits, repetition), (logits, repetition)), _scaled_backward
)
