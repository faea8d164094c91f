"""Scores of given tokens, and of the likeliest others: the trainer's forward beside the engine.

    tokens --transformer.forward--> hidden rows --head.likeliest--> ids --head, forced--> scores

A program of its own: an engine's step is the same whether a request asks for other tokens or not,
and so are its bits. The scores are those that the engine gives the same tokens. An answer that is
streamed keeps its keys from piece to piece (`Following`), so each of its rows is computed once.
"""

from __future__ import annotations

from collections.abc import Sequence
import functools
from typing import Any
import weakref

import jax
import jax.numpy as jnp
import numpy as np

from seerjax import numerics as numerics_lib
from seerjax.models import config as model_config, head, kv_layout, parameters, transformer
from seerjax.models.loading import Model
from seerjax.ops import penalties, sampling
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
# Of the keys that streams keep, all together: beyond, the one that waited longest begins again.
MOST_KEPT_BYTES = 1 << 29
_PLAIN = SamplingParams()


class Scorer:
  """Scores whole sequences of one model.

  Attributes:
    params: the running weights; may be set while nothing is followed.
    num_rows: that its forward computed so far.
  """

  def __init__(self, model: Model, *, context: int, most_kept_bytes: int = MOST_KEPT_BYTES):
    """Makes it.

    Args:
      model: as its engine runs it.
      context: most positions of a sequence.
      most_kept_bytes: of the keys of answers that are followed; one of them is always kept.
    """
    self.params = model.params
    self.num_rows = 0
    self._most_kept_bytes = most_kept_bytes
    self._kept: weakref.WeakSet[Following] = weakref.WeakSet()
    self._num_uses = 0
    self._config = model.config
    self._numerics = model_config.numerics_for(model.config, model.numerics)
    self._context = context
    self._num_top = min(MOST_TOP, model.config.vocab_size)
    shape = dict(config=self._config, numerics=self._numerics)
    self._hidden = jax.jit(functools.partial(_hidden_rows, **shape))
    self._next_hidden = jax.jit(functools.partial(_next_rows, **shape), donate_argnums=1)
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

  def following(
    self,
    prompt: Sequence[int],
    params: SamplingParams,
    num_top: int,
    *,
    mask: AnswerMask | None = None,
    keeps: bool = True,
  ) -> Following:
    """Returns what names the likeliest tokens at each place of an answer, under the processed
    distribution.

    Args:
      prompt: of the answer.
      params: of the request.
      num_top: at each place, at most: what filters leave out is not named.
      mask: of the answer; it keeps those of the answer's beginnings.
      keeps: whether the answer comes in pieces, so that its keys are kept between them.
    """
    return Following(self, prompt, params, num_top, mask=mask, keeps=keeps)

  def _rows(self, tokens: Sequence[int]) -> np.ndarray:
    """Returns the hidden rows f[t, d] of a sequence."""
    padded = _padded(tokens, _size_for(len(tokens)))
    self.num_rows += len(tokens)
    return np.asarray(self._hidden(self.params, padded, np.int32(len(tokens))))[: len(tokens)]

  def _next(self, pages: Any, tokens: Sequence[int], first: int) -> tuple[np.ndarray, Any]:
    """Returns the hidden rows f[n, d] of a sequence from position `first` on, and the pages with
    their keys; `pages` have those before them, and are gone."""
    part = tokens[first:]
    size = SHORTEST if len(part) <= SHORTEST else _size_for(len(tokens))
    self.num_rows += len(part)
    hidden, pages = self._next_hidden(
      self.params, pages, _padded(part, size), np.int32(first), np.int32(len(part))
    )
    return np.asarray(hidden)[: len(part)], pages

  def _make_pages(self, size: int, following: Following) -> Any:
    """Returns pages for `size` positions, and takes others' if there is no room for both."""
    page_size = self._numerics.kv_split
    pages = kv_layout.empty_pages(
      self._config, self._numerics, num_pages=1 - size // -page_size, page_size=page_size
    )
    room = self._most_kept_bytes - _num_bytes(pages)
    for other in sorted(self._kept - {following}, key=lambda one: -one.last_use):
      room -= _num_bytes(other.pages)
      if room < 0:
        other.forget()
        self._kept.discard(other)
    self._kept.add(following)
    return pages

  def _use(self) -> int:
    self._num_uses += 1
    return self._num_uses

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


class Following:
  """The places of one answer, scored as they come; each row of the forward is computed once as long
  as its keys are kept.

  Attributes:
    pages: keys and values of what was scored; None where none are kept.
    last_use: counts the scorer's uses of all that it follows.
  """

  def __init__(
    self,
    scorer: Scorer,
    prompt: Sequence[int],
    params: SamplingParams,
    num_top: int,
    *,
    mask: AnswerMask | None,
    keeps: bool,
  ):
    self._scorer = scorer
    self._prompt = tuple(prompt)
    self._params = params
    self._num_top = num_top
    self._mask = mask
    self._keeps = keeps
    self._num_told = 0
    self.last_use = 0
    self.forget()

  def forget(self) -> None:
    """Gives the pages back; the next piece computes their keys again."""
    self.pages: Any = None
    self._size = self._num_written = 0

  def take(self, answer: Sequence[int]) -> tuple[Top, ...]:
    """Returns (token, log-probability) of the likeliest at each place that was not told of yet.

    Args:
      answer: all of it so far.
    """
    places = range(self._num_told, len(answer))
    if not places:
      return ()
    self._num_told = len(answer)
    hidden = self._hidden([*self._prompt, *answer][:-1])[-len(places) :]
    rows = sampling.sampling_rows([self._params] * len(places), [*places])
    before = [answer[:place] for place in places]
    rows = penalties.with_penalties(rows, self._params, self._prompt, before)
    if self._mask is not None:
      masks: Any = np.stack([self._mask(one) for one in before])
      highest: Any = np.minimum(rows.high, sampling.NO_LIMIT - 1)
      rows = rows._replace(mask=masks, high=highest)
    return self._scorer._tops(hidden, rows, self._num_top)

  def _hidden(self, tokens: Sequence[int]) -> np.ndarray:
    """Returns hidden rows at the end of a sequence, of what was not told of at least."""
    scorer = self._scorer
    if not self._keeps:
      return scorer._rows(tokens)
    self.last_use = scorer._use()
    if self.pages is None or len(tokens) > self._size:
      self.forget()
      self._size = _size_for(len(tokens))
      self.pages = scorer._make_pages(self._size, self)
    pages, self.pages = self.pages, None
    hidden, self.pages = scorer._next(pages, tokens, self._num_written)
    self._num_written = len(tokens)
    return hidden


def _size_for(count: int) -> int:
  """Returns the positions that a program for `count` of them has room for."""
  size = SHORTEST
  while size < count:
    size *= 4
  return size


def _padded(tokens: Sequence[int], size: int) -> np.ndarray:
  padded = np.zeros(size, np.int32)
  padded[: len(tokens)] = tokens
  return padded


def _num_bytes(pages: Any) -> int:
  return sum(leaf.nbytes for leaf in jax.tree.leaves(pages))


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
  page_size = numerics.kv_split
  num_pages = -(-tokens.shape[0] // page_size)
  batch = _batch(tokens, jnp.int32(0), count, num_pages, numerics)
  pages = kv_layout.ScratchPages(num_pages + 1, page_size)
  hidden, _ = transformer.forward(params, batch, pages, config=config, numerics=numerics)
  return hidden


def _next_rows(
  params: parameters.Params,
  pages: kv_layout.Pages,
  tokens: jax.Array,
  first: jax.Array,
  count: jax.Array,
  *,
  config: model_config.TransformerConfig,
  numerics: numerics_lib.NumericsConfig,
) -> tuple[jax.Array, kv_layout.Pages]:
  """Hidden rows f[n, d] of `count` tokens, i32[n], from position `first` of one sequence on, whose
  keys before them are in `pages`; and the pages with theirs."""
  num_pages = jax.tree.leaves(pages)[0].shape[kv_layout.PAGE_AXIS] - 1
  batch = _batch(tokens, first, count, num_pages, numerics)
  return transformer.forward(params, batch, pages, config=config, numerics=numerics)


def _batch(
  tokens: jax.Array,
  first: jax.Array,
  count: jax.Array,
  num_pages: int,
  numerics: numerics_lib.NumericsConfig,
) -> TokenBatch:
  """`count` tokens of one sequence, from position `first` on; page 0 is the dump."""
  size, tile, page_size = tokens.shape[0], numerics.query_tile, numerics.kv_split
  rows = jnp.arange(size, dtype=jnp.int32)
  starts = jnp.arange(-(-size // tile), dtype=jnp.int32) * tile
  table = jnp.arange(1, num_pages + 1, dtype=jnp.int32)[None, :]
  return TokenBatch(
    tokens=tokens,
    positions=first + rows,
    slots=jnp.where(rows < count, first + rows + page_size, 0),
    num_rows=count,
    segment_start=starts,
    segment_length=jnp.clip(count - starts, 0, tile),
    page_table=jnp.repeat(table, starts.shape[0], axis=0),
    num_segments=(count + tile - 1) // tile,
  )


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
