"""Penalties on tokens that occurred before: the first change of a row's logits.

  count = number of occurrences of a token in the response so far
  z     = logits / repetition if positive, otherwise logits * repetition, for every token of the
          prompt and the response so far
  z     = z - frequency * count - presence, for every token of the response so far

A row's penalties are a pure function of its sampling parameters, its prompt and the response before
it (with earlier tokens of a draft), so they do not depend on the schedule. They are a list of token
ids and the values to subtract, summed on the host and rounded to float32 once. The rows of a step
have lists of one length, which affects memory only, since every entry is applied by itself.

Sources: presence and frequency: OpenAI, https://platform.openai.com/docs/api-reference/completions;
repetition: Keskar et al. 2019, https://arxiv.org/abs/1909.05858, including the prompt, like Hugging
Face and vLLM.
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

# Entries of the shortest list; longer lists are four times as long, repeatedly, until they suffice.
SHORTEST = 256


class Entries(NamedTuple):
  """The penalties of one row.

  Attributes:
    ids: i32[e], ascending: tokens that `repetition` scales.
    values: f32[e], value to subtract from each logit.
  """

  ids: np.ndarray
  values: np.ndarray


def entries(
  params: SamplingParams, prompt: Sequence[int] | np.ndarray, answer: Sequence[int]
) -> Entries:
  """Returns the penalties for the token after a partial response.

  Only the set of the prompt's tokens matters, not their counts (`distinct`).
  """
  generated, counts = np.unique(np.asarray(answer, np.int32), return_counts=True)
  values = params.frequency_penalty * counts + params.presence_penalty
  if params.repetition_penalty == 1:
    return Entries(generated, values.astype(np.float32))
  ids = np.unique(np.concatenate((np.asarray(prompt, np.int32), generated)))
  found = np.zeros(len(ids), np.float32)
  found[np.searchsorted(ids, generated)] = values
  return Entries(ids, found)


def entries_along(
  params: SamplingParams, prompt: Sequence[int], answer: Sequence[int]
) -> Iterator[Entries]:
  """Yields the penalties for each token of a response: `entries` of the tokens before it."""
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
  """Returns i32[u], the distinct tokens."""
  return np.unique(np.asarray(tokens, np.int32))


def most_entries(params: SamplingParams, num_prompt: int, num_answer: int) -> int:
  """Returns the maximum number of penalty entries after this many tokens."""
  return num_answer if params.repetition_penalty == 1 else num_prompt + num_answer


def width_for(count: int) -> int:
  """Returns the length of a list for `count` entries: one of few, since each needs a program."""
  width = SHORTEST
  while width < count:
    width *= 4
  return width


def empty(shape: tuple[int, ...], width: int) -> dict[str, Any]:
  """Returns the penalty fields of `SamplingRows` for `shape` rows, without penalties (numpy)."""
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
  """Returns rows of one request with the penalties after each of the partial responses."""
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
  # The index of an unused entry, or one of another slab, is past the end; the scatter drops it.
  past = width + jnp.arange(places.shape[1], dtype=jnp.int32)[None, :]
  target = logits.at[rows, jnp.where(is_here, places, past)]
  return target.set(scaled - sampling.penalty_values, mode="drop", unique_indices=True)


@jax.custom_vjp
def _scaled(logits: Array, repetition: Array) -> Array:
  """Returns logits under the repetition penalty f32[n, 1]; the penalty has no gradient."""
  return jnp.where(logits > 0, logits / repetition, logits * repetition)


def _scaled_backward(residuals: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array]:
  logits, repetition = residuals
  factor = jnp.where(logits > 0, jnp.float32(1) / repetition, repetition)
  return parallel.rounded(cotangent * factor), jnp.zeros_like(repetition)


_scaled.defvjp(
  lambda logits, repetition: (_scaled(logits, repetition), (logits, repetition)), _scaled_backward
)
