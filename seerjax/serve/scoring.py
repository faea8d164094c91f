"""Scores of given tokens, and of the likeliest others: the trainer's forward beside the engine.

    tokens --transformer.forward--> hidden rows --head.likeliest--> ids --head, forced--> scores

A program of its own: an engine's step is the same whether a request asks for other tokens or not,
and so are its bits. The scores are those that the engine gives the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from seerjax import numerics as numerics_lib
from seerjax.models import config as model_config, head, kv_layout, parameters, transformer
from seerjax.models.loading import Model
from seerjax.ops import sampling
from seerjax.serve.grammar import AnswerMask
from seerjax.types import SamplingParams, SamplingRows, TokenBatch, TokenScores

# (token, log-probability) of the likeliest at one place.
Top = tuple[tuple[int, float], ...]
# Rows of one call of the head, and the shortest sequence of one of the forward.
HEAD_ROWS = 128
SHORTEST = 64
MOST_TOP = 16
# Below any score: the distribution leaves the token out.
LEFT_OUT = -1e20
_PLAIN = SamplingParams()


class Scorer:
  """Scores whole sequences of one model.

  Attributes:
    params: the running weights; may be set at any time.
  """

  def __init__(self, model: Model, *, context: int):
    """Makes it.

    Args:
      model: as its engine runs it.
      context: most positions of a sequence.
    """
    self.params = model.params
    self._config = model.config
    self._numerics = model_config.numerics_for(model.config, model.numerics)
    self._context = context
    self._num_top = min(MOST_TOP, model.config.vocab_size)
    shape = dict(config=self._config, numerics=self._numerics)
    self._hidden = jax.jit(functools.partial(_hidden_rows, **shape))
    self._likeliest = jax.jit(functools.partial(_likeliest, count=self._num_top, **shape))
    self._forced = jax.jit(functools.partial(_forced, **shape))

  def prompt(
    self, tokens: Sequence[int], num_top: int
  ) -> tuple[tuple[float, ...], tuple[Top, ...]]:
    """Returns, for each token but the first, its log-probability under softmax(logits), and the
    likeliest `num_top` there."""
    if len(tokens) < 2:
      return (), ()
    hidden = self._rows(tokens[:-1])
    rows = sampling.sampling_rows([_PLAIN] * (len(tokens) - 1))
    scores = self._scored(hidden, np.asarray(tokens[1:], np.int32), rows)
    return tuple(scores.tolist()), self._tops(hidden, rows, num_top)

  def tops(
    self,
    tokens: Sequence[int],
    first: int,
    params: SamplingParams,
    num_prompt: int,
    num_top: int,
    *,
    mask: AnswerMask | None = None,
  ) -> tuple[Top, ...]:
    """Returns the likeliest tokens at each place from `first` on, under the processed distribution.

    Args:
      tokens: prompt and answer.
      first: position of the first place.
      params: of the request.
      num_prompt: tokens of its prompt.
      num_top: at each place, at most: what filters leave out is not named.
      mask: of the answer.
    """
    hidden = self._rows(tokens[:-1])[first - 1 :]
    places = [position - num_prompt for position in range(first, len(tokens))]
    rows = sampling.sampling_rows([params] * len(places), places)
    if mask is not None:
      own, answer = mask.copy(), tokens[num_prompt:]
      masks: Any = np.stack([own(answer[:place]) for place in places])
      highest: Any = np.minimum(rows.high, sampling.NO_LIMIT - 1)
      rows = rows._replace(mask=masks, high=highest)
    return self._tops(hidden, rows, num_top)

  def _rows(self, tokens: Sequence[int]) -> np.ndarray:
    """Returns the hidden rows f[t, d] of a sequence."""
    size = SHORTEST
    while size < len(tokens):
      size *= 4
    padded = np.zeros(size, np.int32)
    padded[: len(tokens)] = tokens
    return np.asarray(self._hidden(self.params, padded, np.int32(len(tokens))))[: len(tokens)]

  def _tops(self, hidden: np.ndarray, rows: SamplingRows, num_top: int) -> tuple[Top, ...]:
    count = hidden.shape[0]
    if not num_top:
      return ((),) * count
    ids = np.concatenate(
      [
        np.asarray(self._likeliest(self.params, *_chunk((hidden, rows), start)))[: count - start]
        for start in range(0, count, HEAD_ROWS)
      ]
    )[:, :num_top]
    width = ids.shape[1]
    hidden, rows = jax.tree.map(lambda leaf: np.repeat(leaf, width, axis=0), (hidden, rows))
    scores = self._scored(hidden, ids.reshape(-1), rows, is_raw=False)
    found = []
    for some, values in zip(ids.tolist(), scores.reshape(-1, width).tolist(), strict=True):
      kept = [(token, value) for token, value in zip(some, values, strict=True) if value > LEFT_OUT]
      found.append(tuple(sorted(kept, key=lambda one: (-one[1], one[0]))))
    return tuple(found)

  def _scored(
    self, hidden: np.ndarray, tokens: np.ndarray, rows: SamplingRows, *, is_raw: bool = True
  ) -> np.ndarray:
    """Returns f32[n], the scores of given tokens, by the head that samples."""
    found = []
    for start in range(0, len(tokens), HEAD_ROWS):
      scores = self._forced(self.params, *_chunk((hidden, tokens, rows), start))
      values = scores.raw_logprob if is_raw else scores.logprob
      found.append(np.asarray(values)[: len(tokens) - start])
    return np.concatenate(found)


def _chunk(rows: Any, start: int) -> tuple[Any, ...]:
  """Returns `HEAD_ROWS` rows from `start` on, the first one again for those missing, and how many
  are none of these."""
  count = min(HEAD_ROWS, jax.tree.leaves(rows)[0].shape[0] - start)

  def cut(leaf: np.ndarray) -> np.ndarray:
    part = np.asarray(leaf)[start : start + count]
    return np.concatenate([part, np.repeat(part[:1], HEAD_ROWS - count, axis=0)])

  return *jax.tree.map(cut, rows), np.int32(count)


def _hidden_rows(
  params: parameters.Params,
  tokens: jax.Array,
  count: jax.Array,
  *,
  config: model_config.TransformerConfig,
  numerics: numerics_lib.NumericsConfig,
) -> jax.Array:
  """Hidden rows f[n, d] of one sequence of `count` tokens, i32[n], on pages of its own."""
  size, tile, page_size = tokens.shape[0], numerics.query_tile, numerics.kv_split
  num_pages = -(-size // page_size)
  positions = jnp.arange(size, dtype=jnp.int32)
  starts = jnp.arange(-(-size // tile), dtype=jnp.int32) * tile
  table = jnp.arange(1, num_pages + 1, dtype=jnp.int32)[None, :]
  batch = TokenBatch(
    tokens=tokens,
    positions=positions,
    slots=positions + page_size,  # Page 0 is the dump.
    num_rows=count,
    segment_start=starts,
    segment_length=jnp.clip(count - starts, 0, tile),
    page_table=jnp.repeat(table, starts.shape[0], axis=0),
    num_segments=(count + tile - 1) // tile,
  )
  pages = kv_layout.ScratchPages(num_pages + 1, page_size)
  hidden, _ = transformer.forward(params, batch, pages, config=config, numerics=numerics)
  return hidden


def _likeliest(
  params: parameters.Params,
  hidden: jax.Array,
  rows: SamplingRows,
  num_rows: jax.Array,
  *,
  count: int,
  config: model_config.TransformerConfig,
  numerics: numerics_lib.NumericsConfig,
) -> jax.Array:
  return head.likeliest(params, hidden, rows, num_rows, count, config=config, numerics=numerics)


def _forced(
  params: parameters.Params,
  hidden: jax.Array,
  tokens: jax.Array,
  rows: SamplingRows,
  num_rows: jax.Array,
  *,
  config: model_config.TransformerConfig,
  numerics: numerics_lib.NumericsConfig,
) -> TokenScores:
  nothing = jnp.zeros(tokens.shape, jnp.int32)
  _, scores = head.sample_and_score(
    params,
    hidden,
    tokens,
    rows,
    nothing.astype(jnp.uint32),
    nothing,
    num_rows,
    numerics_lib.key(0),  # Nothing is sampled here.
    config=config,
    numerics=numerics,
  )
  return scores
