"""Reference scores: each text is computed whole in a separate forward pass, without any reuse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from seerjax import numerics as numerics_lib
from seerjax.models import config as model_config, head, kv_layout, parameters, transformer
from seerjax.models.decoder import Decoder, decide
from seerjax.ops import penalties, sampling
from seerjax.types import SamplingParams, TokenBatch

# Positions of a text are padded to a multiple of this.
ROWS = 64
MAX_TOP = 16
# Below any score: the processed distribution excludes the token.
LEFT_OUT = -1e20

Top = tuple[tuple[int, float], ...]


class PlainScores:
  """Scores texts by the trainer's forward pass, and the head on rows that are forced."""

  def __init__(
    self,
    config: model_config.TransformerConfig,
    numerics: numerics_lib.NumericsConfig,
    params: parameters.Params,
  ):
    self._params, self._num_top = params, min(MAX_TOP, config.vocab_size)
    self._decoder = decide(config, numerics)

  def prompt(self, tokens: Sequence[int], num_top: int) -> list[tuple[float, Top]]:
    """Returns the raw log-probability of each token but the first, and the top tokens there."""
    hidden = self._rows(tokens[:-1])
    rows = sampling.sampling_rows([SamplingParams()] * len(hidden))
    scores = self._forced(hidden, np.asarray(tokens[1:], np.int32), rows)
    tops = self._tops(hidden, rows, num_top)
    return list(zip(np.asarray(scores.raw_logprob).tolist(), tops, strict=True))

  def answer(
    self,
    prompt: Sequence[int],
    answer: Sequence[int],
    params: SamplingParams,
    num_top: int,
    mask: Callable[[Sequence[int]], np.ndarray] | None = None,
  ) -> list[Top]:
    """Returns the top tokens at each position of an answer, under the processed distribution."""
    hidden = self._rows([*prompt, *answer][:-1])[-len(answer) :]
    rows = sampling.sampling_rows([params] * len(answer), [*range(len(answer))])
    before = [answer[:place] for place in range(len(answer))]
    rows = penalties.with_penalties(rows, params, prompt, before)
    if mask is not None:
      masks: Any = np.stack([mask(one) for one in before])
      highest: Any = np.minimum(rows.high, sampling.NO_LIMIT - 1)
      rows = rows._replace(mask=masks, high=highest)
    return self._tops(hidden, rows, num_top)

  def next(self, tokens: Sequence[int]) -> list[tuple[int, np.float32]]:
    """Returns up to 16 most likely next tokens with raw log-probabilities, in the head's order."""
    hidden, rows = self._rows(tokens)[-1:], sampling.sampling_rows([SamplingParams()])
    ids = self._ids(hidden, rows)
    hidden, rows = jax.tree.map(lambda leaf: np.repeat(leaf, ids.size, axis=0), (hidden, rows))
    scores = self._forced(hidden, ids[0], rows)
    return list(zip(ids[0].tolist(), np.asarray(scores.raw_logprob), strict=True))

  def _rows(self, tokens: Sequence[int]) -> np.ndarray:
    """Returns the hidden rows f[t, d] of a text."""
    padded = np.zeros(-(-len(tokens) // ROWS) * ROWS, np.int32)
    padded[: len(tokens)] = tokens
    count = np.int32(len(tokens))
    return np.asarray(_hidden_rows(self._params, padded, count, decoder=self._decoder))[:count]

  def _ids(self, hidden: np.ndarray, rows: Any) -> np.ndarray:
    found = [
      _likeliest(self._params, *part, count=self._num_top, decoder=self._decoder)
      for part in _parts((hidden, rows))
    ]
    return np.concatenate(found)[: len(hidden)]

  def _forced(self, hidden: np.ndarray, tokens: np.ndarray, rows: Any) -> Any:
    found = [
      _forced(self._params, *part, decoder=self._decoder) for part in _parts((hidden, tokens, rows))
    ]
    return jax.tree.map(lambda *leaves: np.concatenate(leaves)[: len(tokens)], *found)

  def _tops(self, hidden: np.ndarray, rows: Any, num_top: int) -> list[Top]:
    if not num_top:
      return [()] * len(hidden)
    ids = self._ids(hidden, rows)[:, :num_top]
    width = ids.shape[1]
    hidden, rows = jax.tree.map(lambda leaf: np.repeat(leaf, width, axis=0), (hidden, rows))
    scores = self._forced(hidden, ids.reshape(-1), rows).logprob
    found = []
    for some, values in zip(ids.tolist(), scores.reshape(-1, width).tolist(), strict=True):
      kept = [pair for pair in zip(some, values, strict=True) if pair[1] > LEFT_OUT]
      found.append(tuple(sorted(kept, key=lambda pair: (-pair[1], pair[0]))))
    return found


def _parts(rows: Any) -> list[tuple[Any, ...]]:
  """Returns the rows in parts of `ROWS`, padded with a row of theirs, with their valid counts."""
  size, found = jax.tree.leaves(rows)[0].shape[0], []
  for start in range(0, size, ROWS):
    count = min(ROWS, size - start)
    places = np.minimum(np.arange(start, start + ROWS), size - 1)
    part = jax.tree.map(lambda leaf, places=places: np.asarray(leaf)[places], rows)
    found.append((*part, np.int32(count)))
  return found


@functools.partial(jax.jit, static_argnames="decoder")
def _hidden_rows(params: Any, tokens: jax.Array, count: jax.Array, *, decoder: Decoder):
  """Returns hidden rows f[n, d] of a text of `count` tokens, i32[n], on scratch pages."""
  numerics = decoder.numerics
  size, tile, page_size = tokens.shape[0], numerics.query_tile, numerics.kv_split
  num_pages = -(-size // page_size)
  rows = jnp.arange(size, dtype=jnp.int32)
  starts = jnp.arange(-(-size // tile), dtype=jnp.int32) * tile
  table = jnp.arange(1, num_pages + 1, dtype=jnp.int32)[None, :]
  batch = TokenBatch(
    tokens=tokens,
    positions=rows,
    slots=jnp.where(rows < count, rows + page_size, 0),  # Page 0 is a dummy.
    num_rows=count,
    segment_start=starts,
    segment_length=jnp.clip(count - starts, 0, tile),
    page_table=jnp.repeat(table, starts.shape[0], axis=0),
    num_segments=(count + tile - 1) // tile,
  )
  pages = kv_layout.ScratchPages(num_pages + 1, page_size)
  return transformer.forward(params, batch, pages, decoder=decoder)[0]


@functools.partial(jax.jit, static_argnames=("count", "decoder"))
def _likeliest(params: Any, hidden: Any, rows: Any, num_rows: Any, *, count: int, decoder: Decoder):
  return head.top_logprobs(params, hidden, rows, num_rows, count, decoder=decoder)


@functools.partial(jax.jit, static_argnames="decoder")
def _forced(params: Any, hidden: Any, tokens: Any, rows: Any, num_rows: Any, *, decoder: Decoder):
  nothing = jnp.zeros(tokens.shape, jnp.int32)
  seeds, key = nothing.astype(jnp.uint32), numerics_lib.key(0)  # Unused: nothing is sampled.
  return head.sample_and_score(
    params, hidden, tokens, rows, seeds, nothing, num_rows, key, decoder=decoder
  )[1]
