"""Log-probabilities of given tokens and of the top alternatives, by the trainer's forward pass.

    tokens --transformer.forward--> hidden rows --head.top_logprobs--> ids --head, forced--> scores

This is a separate program, so that an engine step and its bits are the same whether or not a
request wants alternatives. The scores equal those that the engine computes for the same tokens. A
streamed response keeps its KV pages between chunks (`Following`), so each row is computed once.
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
from seerjax.models import head, kv_layout, parameters, transformer
from seerjax.models.decoder import Decoder
from seerjax.models.loading import Model
from seerjax.ops import penalties, sampling
from seerjax.serve.grammar import AnswerMask
from seerjax.types import SamplingParams, SamplingRows, TokenBatch, TokenScores

# (token, log-probability) of the top tokens at one position.
Top = tuple[tuple[int, float], ...]
# Rows per call of the head, and the shortest padded sequence of the forward pass.
HEAD_ROWS = 128
SHORTEST = 64
MOST_TOP = 16
# Below any score: the processed distribution excludes the token.
LEFT_OUT = -1e20
# Bound on the KV pages of all streams; above it the least recently used one is recomputed.
MOST_KEPT_BYTES = 1 << 29
_PLAIN = SamplingParams()


class Scorer:
  """Scores whole sequences of one model.

  Attributes:
    params: current weights; may be set while no `Following` is in use.
    num_rows: rows that the forward pass has computed.
  """

  def __init__(self, model: Model, *, context: int, most_kept_bytes: int = MOST_KEPT_BYTES):
    """Initialises the scorer.

    Args:
      model: the model as its engine runs it.
      context: upper bound of a sequence's length.
      most_kept_bytes: upper bound of KV pages of followed responses; one is always kept.
    """
    self.params = model.params
    self.num_rows = 0
    self._most_kept_bytes = most_kept_bytes
    self._kept: weakref.WeakSet[Following] = weakref.WeakSet()
    self._num_uses = 0
    self._decoder = decoder = model.decoder
    self._context = context
    self._num_top = min(MOST_TOP, decoder.shape.vocab_size)
    # Scorers of equal decoders share these programs.
    self._hidden = functools.partial(_hidden_rows, decoder=decoder)
    self._next_hidden = functools.partial(_next_rows, decoder=decoder)
    self._likeliest = functools.partial(_likeliest, count=self._num_top, decoder=decoder)
    self._forced = functools.partial(_forced, decoder=decoder)

  def prompt(
    self, tokens: Sequence[int], num_top: int
  ) -> tuple[tuple[float, ...], tuple[Top, ...]]:
    """Returns, for each token but the first, its log-probability under softmax(logits), and the
    `num_top` most likely tokens at its position."""
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
    """Returns an incremental scorer of one response: the most likely tokens at each position, under
    the processed distribution.

    Args:
      prompt: token ids of the prompt.
      params: sampling parameters of the request.
      num_top: most tokens per position; tokens that filters exclude are not returned.
      mask: mask of the response; must keep the masks of the response's prefixes.
      keeps: whether the response is streamed, so that KV pages are kept between chunks.
    """
    return Following(self, prompt, params, num_top, mask=mask, keeps=keeps)

  def _rows(self, tokens: Sequence[int]) -> np.ndarray:
    """Returns the hidden rows f[t, d] of a sequence."""
    padded = _padded(tokens, _size_for(len(tokens)))
    self.num_rows += len(tokens)
    return np.asarray(self._hidden(self.params, padded, np.int32(len(tokens))))[: len(tokens)]

  def _next(self, pages: Any, tokens: Sequence[int], first: int) -> tuple[np.ndarray, Any]:
    """Returns the hidden rows f[n, d] from position `first` on, and the updated pages.

    `pages` hold keys and values of earlier positions; they are donated.
    """
    part = tokens[first:]
    size = SHORTEST if len(part) <= SHORTEST else _size_for(len(tokens))
    self.num_rows += len(part)
    hidden, pages = self._next_hidden(
      self.params, pages, _padded(part, size), np.int32(first), np.int32(len(part))
    )
    return np.asarray(hidden)[: len(part)], pages

  def _make_pages(self, size: int, following: Following) -> Any:
    """Returns pages for `size` positions; evicts those of others if there is no room for all."""
    page_size = self._decoder.numerics.kv_split
    num_pages = 1 - size // -page_size
    pages = kv_layout.empty_pages(self._decoder, num_pages=num_pages, page_size=page_size)
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
    """Returns f32[n], scores of given tokens by the head that the sampler uses."""
    found = []
    for start in range(0, len(tokens), HEAD_ROWS):
      scores = self._forced(self.params, *_chunk((hidden, tokens, rows), start))
      values = scores.raw_logprob if is_raw else scores.logprob
      found.append(np.asarray(values)[: len(tokens) - start])
    return np.concatenate(found)


class Following:
  """Scores one response as it grows; computes each row once while the KV pages are kept.

  Attributes:
    pages: keys and values of scored positions; None if they were dropped or are not kept.
    last_use: value of the scorer's use counter at the last use.
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
    """Drops the KV pages; the next call recomputes them."""
    self.pages: Any = None
    self._size = self._num_written = 0

  def take(self, answer: Sequence[int]) -> tuple[Top, ...]:
    """Returns the top (token, log-probability) pairs at each position not yet returned.

    Args:
      answer: the whole response so far.
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
    """Returns the last hidden rows of a sequence; at least those not yet returned."""
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
  """Returns the padded length of a sequence of `count` positions."""
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
  """Returns `HEAD_ROWS` rows from `start` on, padded with the first of them, and the number of
  valid rows."""
  count = min(HEAD_ROWS, jax.tree.leaves(rows)[0].shape[0] - start)

  def cut(leaf: np.ndarray) -> np.ndarray:
    part = np.asarray(leaf)[start : start + count]
    return np.concatenate([part, np.repeat(part[:1], HEAD_ROWS - count, axis=0)])

  return *jax.tree.map(cut, rows), np.int32(count)


@functools.partial(jax.jit, static_argnames="decoder")
def _hidden_rows(
  params: parameters.Params,
  tokens: jax.Array,
  count: jax.Array,
  *,
  decoder: Decoder,
) -> jax.Array:
  """Returns hidden rows f[n, d] of a sequence of `count` tokens, i32[n], on scratch pages."""
  page_size = decoder.numerics.kv_split
  num_pages = -(-tokens.shape[0] // page_size)
  batch = _batch(tokens, jnp.int32(0), count, num_pages, decoder.numerics)
  pages = kv_layout.ScratchPages(num_pages + 1, page_size)
  hidden, _ = transformer.forward(params, batch, pages, decoder=decoder)
  return hidden


@functools.partial(jax.jit, static_argnames="decoder", donate_argnums=1)
def _next_rows(
  params: parameters.Params,
  pages: kv_layout.Pages,
  tokens: jax.Array,
  first: jax.Array,
  count: jax.Array,
  *,
  decoder: Decoder,
) -> tuple[jax.Array, kv_layout.Pages]:
  """Returns hidden rows f[n, d] of `count` tokens, i32[n], that start at position `first`, and the
  pages with their keys and values added; `pages` hold those of earlier positions."""
  num_pages = jax.tree.leaves(pages)[0].shape[kv_layout.PAGE_AXIS] - 1
  batch = _batch(tokens, first, count, num_pages, decoder.numerics)
  return transformer.forward(params, batch, pages, decoder=decoder)


def _batch(
  tokens: jax.Array,
  first: jax.Array,
  count: jax.Array,
  num_pages: int,
  numerics: numerics_lib.NumericsConfig,
) -> TokenBatch:
  """Returns a batch of `count` tokens of one sequence from `first` on; page 0 is a dummy."""
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


@functools.partial(jax.jit, static_argnames=("count", "decoder"))
def _likeliest(
  params: parameters.Params,
  hidden: jax.Array,
  rows: SamplingRows,
  num_rows: jax.Array,
  *,
  count: int,
  decoder: Decoder,
) -> jax.Array:
  return head.top_logprobs(params, hidden, rows, num_rows, count, decoder=decoder)


@functools.partial(jax.jit, static_argnames="decoder")
def _forced(
  params: parameters.Params,
  hidden: jax.Array,
  tokens: jax.Array,
  rows: SamplingRows,
  num_rows: jax.Array,
  *,
  decoder: Decoder,
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
    numerics_lib.key(0),  # Unused: nothing is sampled.
    decoder=decoder,
  )
  return scores
