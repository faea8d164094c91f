"""A suffix tree of a group's texts with counts, for drafting the next tokens.

  texts  a b c a b d        root -- a b --- c a b d
                                 |      `-- d
                                 |- b --- c a b d         every edge has counts by occurrence and
                                 |    `-- d               by request
                                 |- c a b d
                                 `- d

A path-compressed trie of all strings of up to `DEPTH` tokens that start anywhere in a group's
texts. Its nodes are the root, the strings after which texts differ, and the ends: the last strings
of each text, which are still growing. All tokens of an edge have equal counts, and the tree is a
function of {request: tokens}. It does not depend on the order in which requests grew, on how tokens
were divided among calls, or on requests removed in between, so drafts are equal on every machine.
Ties: more requests, more occurrences, the smaller token.

Why a trie on flat arrays rather than a suffix automaton or an n-gram table: it counts occurrences
*and* distinct requests while it grows (a request that loops must not outweigh its siblings), can
remove a request, and has bounded depth. An automaton supports none of these without walking its
links; a table has a single match length. Storage and performance: `suffix_nodes`. Many groups:
`group_trees`.

Source: SuffixDecoding (arXiv 2411.04975; ArcticInference) for drafts scored by expected accepted
tokens; Seer (arXiv 2511.14617, table 5) for the draft settings. Counts by request and canonical
ends are new here. No clock, no JAX.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import functools
import itertools
from typing import NamedTuple

import numpy as np

from seerjax.speculation import suffix_drafts, suffix_kernels, suffix_nodes
from seerjax.speculation.suffix_nodes import (
  BITS,
  DEPTH,
  HASHED,
  LIVE,
  ROW,
  SHAPE,
  WIDTH,
  WORD,
  Arrays,
)

Tokens = Sequence[int] | np.ndarray
# (request, number of tokens before the new ones, new tokens).
Update = tuple[str, int, Tokens]


class SpeculationArgs(NamedTuple):
  """Draft settings.

  Attributes:
    max_spec_tokens: maximum path length.
    pattern_lookup_max: maximum context tokens to look up; also limited so that a draft of
      `max_spec_tokens` still fits within `DEPTH`.
    pattern_lookup_min: minimum context tokens to look up.
    top_k: maximum number of paths; 1 is a chain.
    min_token_prob: a path ends before its probability falls below this; for a token's probability
      see `suffix_drafts.SMOOTHING`.
  """

  max_spec_tokens: int = 8
  pattern_lookup_max: int = DEPTH
  pattern_lookup_min: int = 1
  top_k: int = 1
  min_token_prob: float = 0.1


DEFAULT_ARGS = SpeculationArgs()


class Drafts(NamedTuple):
  """Output of `batch_speculate` for b queries with up to k paths each.

  Attributes:
    num_tokens: i32[b, k], tokens of each path; 0 from the first missing path on.
    scores: f64[b], expected accepted tokens: the sum of all drafted tokens' probabilities.
    match_lengths: i32[b], length of the context match that the main path continues; 0 if none.
  """

  num_tokens: np.ndarray
  scores: np.ndarray
  match_lengths: np.ndarray


class SuffixTree:
  """Suffix tree of the texts of one group, with counts."""

  def __init__(self):
    self._start()

  def _start(self) -> None:
    self._slots: dict[str, int] = {}
    self._lengths: dict[str, int] = {}
    self._free_slots: list[int] = []
    self._num_removed = 0  # Removed tokens that are still in the store.
    self._arrays = _empty_arrays()

  @property
  def lengths(self) -> Mapping[str, int]:
    """request -> number of tokens, in order of arrival."""
    return self._lengths

  @property
  def num_bytes(self) -> int:
    """Number of allocated bytes."""
    return sum(array.nbytes for array in self._arrays)

  @property
  def num_nodes(self) -> int:
    """Nodes in use, excluding the root."""
    return int(self._arrays.numbers[LIVE])

  def append(self, request_id: str, prev_token_count: int, new_tokens: Tokens) -> int:
    """Adds tokens to a request's text; returns how many were new.

    Args:
      request_id: request; an unknown one starts a new text.
      prev_token_count: number of the request's tokens before `new_tokens`. Known tokens are
        skipped, so a repeated call changes nothing.
      new_tokens: ids >= 0.

    Raises:
      ValueError: if preceding tokens are missing, or known tokens differ.
    """
    return self.append_many([(request_id, prev_token_count, new_tokens)])

  def append_many(self, updates: Sequence[Update]) -> int:
    """Applies `append` to several requests; if one raises, none is changed.

    Raises:
      ValueError: as `append`, or if a request occurs twice.
    """
    texts: dict[str, np.ndarray] = {}
    for request_id, prev_token_count, new_tokens in updates:
      if request_id in texts:
        raise ValueError(
          f"request {request_id!r}: got two updates in one call, expected one; join the tokens."
        )
      tokens = np.asarray(new_tokens, np.int32)
      if prev_token_count != self._lengths.get(request_id, 0):
        tokens = self._beyond(request_id, prev_token_count, tokens)
      texts[request_id] = tokens
    return self._grow(texts)

  def remove(self, request_id: str) -> None:
    """Removes a request; the tree is then as if it had never been added.

    Raises:
      ValueError: if there is no such request.
    """
    slot = self._slot(request_id, "remove")
    self._num_removed += self._lengths[request_id]
    if self._num_removed <= sum(self._lengths.values()) - self._lengths[request_id]:
      suffix_kernels.remove(self._arrays, slot)
      del self._slots[request_id], self._lengths[request_id]
      self._free_slots.append(slot)
      return
    # The store keeps removed tokens, since edges may refer to them; rebuild if there are too many.
    texts = {name: self.tokens(name) for name in self._lengths if name != request_id}
    self._start()
    self._grow(texts)

  def tokens(self, request_id: str, start: int = 0) -> np.ndarray:
    """Returns a request's text from token `start` on, i32[n].

    Raises:
      ValueError: if there is no such request.
    """
    slot = self._slot(request_id, "tokens")
    return suffix_kernels.read(self._arrays, slot, start, self._lengths[request_id])

  def count(self, tokens: Tokens) -> tuple[int, int]:
    """Returns the occurrences of a string of 1 to `DEPTH` tokens, and the requests that contain it.

    Raises:
      ValueError: if it is empty or too long.
    """
    if not 1 <= len(tokens) <= DEPTH:
      raise ValueError(
        f"SuffixTree.count: got {len(tokens)} tokens, expected 1 to {DEPTH}; longer strings are not"
        " kept."
      )
    occurrences, requests = suffix_kernels.count(self._arrays, np.asarray(tokens, np.int32))
    return int(occurrences), int(requests)

  def speculate(
    self,
    patterns: np.ndarray,
    offsets: np.ndarray,
    limits: np.ndarray,
    request_ids: Sequence[str | None],
    args: SpeculationArgs,
    output: np.ndarray,
    drafts: Drafts,
  ) -> None:
    """Drafts for b contexts; writes the paths to `output` and their statistics to `drafts`.

    Args:
      patterns: i32[n], concatenated contexts.
      offsets: i64[b + 1], bounds of the contexts.
      limits: i32[b, 2], maximum tokens of a path and of all paths together.
      request_ids: b entries; see `GroupTrees.batch_speculate`.
      args: draft settings; `args.max_spec_tokens` also limits paths.
      output: i32[b, top_k, max_spec_tokens].
      drafts: arrays for b queries; overwritten.

    Raises:
      ValueError: if one of `request_ids` is unknown.
    """
    owners = [-1 if name is None else self._slot(name, "speculate") for name in request_ids]
    suffix_drafts.speculate(
      self._arrays,
      patterns,
      offsets,
      limits,
      np.asarray(owners, np.int64),
      args.max_spec_tokens,
      min(args.pattern_lookup_max, DEPTH - args.max_spec_tokens),
      args.pattern_lookup_min,
      args.top_k,
      args.min_token_prob,
      output,
      drafts.num_tokens,
      drafts.scores,
      drafts.match_lengths,
    )

  def draft(
    self,
    context: Tokens,
    args: SpeculationArgs = DEFAULT_ARGS,
    *,
    request_id: str | None = None,
  ) -> tuple[list[tuple[int, ...]], float, int]:
    """Returns the paths that may follow `context`, their score, and the match length.

    Args:
      context: tokens so far.
      args: draft settings.
      request_id: the request with a text that ends in `context`, if any; see
        `GroupTrees.batch_speculate`.

    Raises:
      ValueError: for invalid `args` or an unknown request.
    """
    check_args(args)
    context = np.asarray(context, np.int32)
    output = np.empty((1, args.top_k, args.max_spec_tokens), np.int32)
    drafts = empty_drafts(1, args.top_k)
    limit = args.max_spec_tokens
    limits = np.asarray([[limit, limit * args.top_k]], np.int32)
    offsets = np.asarray([0, context.size])
    self.speculate(context, offsets, limits, [request_id], args, output, drafts)
    paths = [tuple(output[0, k, :n].tolist()) for k, n in enumerate(drafts.num_tokens[0]) if n]
    return paths, float(drafts.scores[0]), int(drafts.match_lengths[0])

  def _slot(self, request_id: str, what: str) -> int:
    if request_id not in self._slots:
      raise ValueError(
        f"SuffixTree.{what}: got request {request_id!r}, expected one of {len(self._slots)} known"
        " requests; append to it first."
      )
    return self._slots[request_id]

  def _beyond(self, request_id: str, prev_token_count: int, tokens: np.ndarray) -> np.ndarray:
    """Returns the tokens that are new, after the checks described in `append`."""
    length = self._lengths.get(request_id, 0)
    if not 0 <= prev_token_count <= length:
      raise ValueError(
        f"request {request_id!r}: got prev_token_count={prev_token_count}, expected 0 to {length},"
        " the tokens stored so far; append the missing tokens first."
      )
    known = min(length - prev_token_count, tokens.size)
    if known:
      slot = self._slots[request_id]
      here = suffix_kernels.read(self._arrays, slot, prev_token_count, prev_token_count + known)
      (differing,) = np.nonzero(here != tokens[:known])
      if differing.size:
        place = int(differing[0])
        raise ValueError(
          f"request {request_id!r}: got token {tokens[place]} at {prev_token_count + place},"
          f" expected {here[place]}, which is already stored; texts can only grow: remove the"
          " request first."
        )
    return tokens[known:]

  def _grow(self, texts: Mapping[str, np.ndarray]) -> int:
    """Appends tokens that are known to be new."""
    parts = list(texts.values())
    tokens = parts[0] if len(parts) == 1 else np.concatenate([*parts, np.zeros(0, np.int32)])
    least = np.minimum.reduce(tokens, initial=0)
    if least < 0:
      raise ValueError(f"SuffixTree.append: got token id {least}, expected at least 0; do not pad.")
    born = [request_id for request_id in texts if request_id not in self._slots]
    for request_id in born:
      self._slots[request_id] = self._free_slots.pop() if self._free_slots else len(self._slots)
      self._lengths[request_id] = 0
    slots = np.asarray([self._slots[request_id] for request_id in texts], np.int64)
    sizes = [part.size for part in parts]
    offsets = np.asarray([0, *itertools.accumulate(sizes)], np.int64)
    # A new or growing string creates at most two nodes.
    self._arrays = _with_room(
      self._arrays,
      num_nodes=2 * (tokens.size + DEPTH * len(texts)),
      num_rows=tokens.size // ROW + 2 * len(texts),
      num_slots=len(self._slots) + len(self._free_slots),
    )
    for request_id in born:
      self._arrays.requests[self._slots[request_id]] = 0
    suffix_kernels.append(self._arrays, slots, offsets, tokens)
    for request_id, size in zip(texts, sizes):
      self._lengths[request_id] += size
    return tokens.size


@functools.cache
def check_args(args: SpeculationArgs) -> None:
  """Raises for invalid draft settings.

  Raises:
    ValueError: naming the field.
  """
  for name, value, low, high in (
    ("max_spec_tokens", args.max_spec_tokens, 1, DEPTH - 1),
    ("pattern_lookup_min", args.pattern_lookup_min, 1, DEPTH - args.max_spec_tokens),
    ("pattern_lookup_max", args.pattern_lookup_max, args.pattern_lookup_min, DEPTH),
    ("top_k", args.top_k, 1, DEPTH),
    ("min_token_prob", args.min_token_prob, 0, 1),
  ):
    if not low <= value <= high:
      raise ValueError(
        f"SpeculationArgs.{name}: got {value}, expected {low} to {high}; a match and its draft"
        f" share the {DEPTH} tokens of the tree."
      )


def empty_drafts(num_queries: int, top_k: int) -> Drafts:
  """Returns empty arrays for the output of `batch_speculate`."""
  return Drafts(
    np.zeros((num_queries, top_k), np.int32),
    np.zeros(num_queries),
    np.zeros(num_queries, np.int32),
  )


def _empty_arrays() -> Arrays:
  return Arrays(
    nodes=np.asarray([[HASHED if column == SHAPE else 0 for column in range(11)]], np.int32),
    heads=np.zeros(1, np.int32),
    store=np.zeros(0, np.int32),
    rows=np.zeros((0, 4), np.int32),
    requests=np.zeros((0, 4), np.int64),
    tails=np.zeros((0, DEPTH), np.int32),
    numbers=np.asarray([1, 0, 0, 0], np.int64),
  )


def _with_room(arrays: Arrays, num_nodes: int, num_rows: int, num_slots: int) -> Arrays:
  """Returns a tree's arrays with room for more nodes and rows, and for `num_slots` slots."""
  made, _, live, rows = arrays.numbers.tolist()
  if live + 1 + num_nodes > len(arrays.nodes):
    capacity = _capacity(live + 1 + num_nodes, len(arrays.nodes))
    arrays = arrays._replace(
      nodes=_longer(arrays.nodes, capacity),
      heads=np.zeros(1 << (capacity * 2 // 3).bit_length(), np.int32),
    )
    suffix_nodes.hash_again(arrays, made)
  if rows + num_rows > len(arrays.rows):
    capacity = _capacity(rows + num_rows, len(arrays.rows))
    arrays = arrays._replace(
      store=_longer(arrays.store, capacity * WIDTH), rows=_longer(arrays.rows, capacity)
    )
  if num_slots > len(arrays.requests):
    capacity = _capacity(num_slots, len(arrays.requests))
    arrays = arrays._replace(
      requests=_longer(arrays.requests, capacity), tails=_longer(arrays.tails, capacity)
    )
    columns = BITS - (-capacity // WORD)
    if columns > arrays.nodes.shape[1]:
      nodes = np.zeros((len(arrays.nodes), columns), np.int32)
      nodes[:, : arrays.nodes.shape[1]] = arrays.nodes
      arrays = arrays._replace(nodes=nodes)
  return arrays


def _capacity(needed: int, present: int) -> int:
  # Grows by half: doubling would at times leave half of all memory unused.
  return max(needed, present + present // 2)


def _longer(array: np.ndarray, length: int) -> np.ndarray:
  grown = np.empty((length, *array.shape[1:]), array.dtype)
  grown[: len(array)] = array
  return grown
