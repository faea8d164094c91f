"""One suffix tree a group: what its texts said next, counted, to draft what they will say.

  texts  a b c a b d        root -- a b --- c a b d
                                 |      `-- d
                                 |- b --- c a b d         counts, by occurrence and by request,
                                 |    `-- d               stand on every edge
                                 |- c a b d
                                 `- d

A path-compressed trie of all strings of up to `DEPTH` tokens that start anywhere in a group's
texts. Its nodes are the root, the strings after which texts differ, and the ends: the last strings
of each text, which are still growing. All tokens of an edge have equal counts, and the tree is a
function of {request: tokens}: the order in which requests grew, how their tokens were cut into
calls, who came and went in between leave no trace. So drafts are equal on every machine and in
every replica that was fed by deltas. Ties: more requests, more occurrences, the smaller token.

Why a trie on flat arrays, and not a suffix automaton or a table of n-grams: it counts occurrences
*and* distinct requests while it grows (a request that loops must not outvote its siblings), forgets
a request again, and bounds its depth. An automaton has none of the three without a walk over its
links; a table has one length of match. What is stored:

  nodes  i32[n, 10 + w]  one record a node, within a cache line or two; its last w numbers are bits:
                         which requests said it
  heads  i32[h]          hash table from (parent, first token), for nodes with many children
  store  i32[r * 319]    texts in rows of ROW tokens, each followed by the next DEPTH - 1: any
                         string lies in one piece, and an edge is where one that takes it is

What makes appending far cheaper than DEPTH steps a token: a string that nobody else said is an open
leaf, whose edge reaches as far as its text is written, so that growing it touches nothing. Only the
last few strings of a text that were said before (as many as the match is long) walk down their
edges. What makes drafting cheap: the likeliest child stands first, and the sum is kept.

Source: SuffixDecoding (arXiv 2411.04975; ArcticInference) for drafts scored by expected accepted
tokens; Seer (arXiv 2511.14617, tables 5 and 6) for groups, deltas and the names of the calls.
Counts by request, canonical ends and replicas that need no order are ours. No clock, no JAX.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import functools
import itertools
from typing import Any, NamedTuple

import numba
from numba import carray, extending  # pyright: ignore[reportPrivateImportUsage]
import numpy as np

from seerjax import compiled

_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)
# Tokens of the longest string that is kept.
DEPTH = 64
# Strings that start in one row of the store.
ROW = 256
_WIDTH = ROW + DEPTH - 1
# The match length that is tried first.
_USUAL = 4
# Where the store holds no token yet.
_UNWRITTEN = -1
# Requests whose bits fit one number of a node.
_WORD = 32

# Columns of a node. Nodes are numbered from the root, 0, which also means "none".
_POSITION, _PARENT, _TOKEN, _COUNT, _CHILD, _NEXT, _PREVIOUS, _SHAPE = range(8)
# The sum of the children's requests; the next node of a bucket; from here on, one bit a request.
_SUM, _CHAIN, _BITS = 8, 9, 10
# _SHAPE is depth + _HASHED + ends << _ENDS: how many texts end right here.
_DEPTH_BITS, _HASHED, _ENDS = 127, 128, 8
# From so many children on, they are found by the hash table; fewer are read one by one.
_MANY = 8
# Columns of a request: tokens, its first and last row, and the first string of its end that
# somebody else said too: those before are open leaves, which grow without being touched.
_LENGTH, _FIRST_ROW, _LAST_ROW, _FIRST_SHARED = range(4)
# Columns of a row of the store: the rows after and before it, whose it is, its number there.
_AFTER, _BEFORE, _OWNER, _NUMBER = range(4)
# Numbers of a tree: nodes ever made, first free one, nodes in use, rows in use.
_MADE, _FREE, _LIVE, _ROWS = range(4)


Tokens = Sequence[int] | np.ndarray
# Of one request: its name, the tokens before these, these.
Update = tuple[str, int, Tokens]


class SpeculationArgs(NamedTuple):
  """How drafts are made.

  Attributes:
    max_spec_tokens: longest path.
    pattern_lookup_max: most tokens of the context that are looked up; what leaves no room for a
      draft of `max_spec_tokens` within `DEPTH` is not.
    pattern_lookup_min: fewest.
    top_k: most paths; 1 is linear.
    min_token_prob: a path ends before its probability falls below.
    smoothing: imagined requests that said what has not been seen; the probability of a continuation
      is (requests that said it) / (the sum of that over all continuations + smoothing).
    num_lookups: match lengths that compete, from the longest down; the best score wins.
  """

  max_spec_tokens: int = 8
  pattern_lookup_max: int = DEPTH
  pattern_lookup_min: int = 1
  top_k: int = 1
  min_token_prob: float = 0.1
  smoothing: float = 0.25
  num_lookups: int = 1


DEFAULT_ARGS = SpeculationArgs()


class Drafts(NamedTuple):
  """What `batch_speculate` wrote, b queries of up to k paths.

  Attributes:
    num_tokens: i32[b, k], tokens of each path; 0 from the first missing one on.
    scores: f64[b], expected accepted tokens: the sum of all drafted tokens' probabilities.
    match_lengths: i32[b], tokens of the context that the main path continues; 0 if nothing.
  """

  num_tokens: np.ndarray
  scores: np.ndarray
  match_lengths: np.ndarray


class TextUpdate(NamedTuple):
  """Tokens of one request from position `prev_token_count` on.

  Attributes:
    request_id: of the request.
    birth: counts the requests that a group ever had; tells two of one name apart.
    prev_token_count: tokens before these.
    new_tokens: i32[n].
  """

  request_id: str
  birth: int
  prev_token_count: int
  new_tokens: np.ndarray


class GroupDelta(NamedTuple):
  """What a replica of a group lacks: `removed` first, then `updates`, in the order of birth."""

  group_id: str
  removed: tuple[str, ...]
  updates: tuple[TextUpdate, ...]


# What a replica of one group holds: request -> (birth, tokens).
CacheInfo = Mapping[str, tuple[int, int]]


class _Arrays(NamedTuple):
  """A tree, as compiled functions see it. Shapes: the head of this file."""

  nodes: np.ndarray
  heads: np.ndarray
  store: np.ndarray  # i32[rows * _WIDTH]
  rows: np.ndarray  # i32[rows, 4]
  requests: np.ndarray  # i64[slots, 4]
  tails: np.ndarray  # i32[slots, DEPTH], the node of the end that starts at index % DEPTH.
  numbers: np.ndarray  # i64[4]


class SuffixTree:
  """The texts of one group and their counts."""

  def __init__(self):
    self._start()

  def _start(self) -> None:
    self._slots: dict[str, int] = {}
    self._lengths: dict[str, int] = {}
    self._free_slots: list[int] = []
    self._num_removed = 0  # Tokens that nobody's text has, and the store still does.
    self._arrays = _empty_arrays()

  @property
  def lengths(self) -> Mapping[str, int]:
    """request -> tokens, in the order in which requests came."""
    return self._lengths

  @property
  def num_bytes(self) -> int:
    """Bytes allocated."""
    return sum(array.nbytes for array in self._arrays)

  @property
  def num_nodes(self) -> int:
    """Nodes in use, the root not counted."""
    return int(self._arrays.numbers[_LIVE])

  def append(self, request_id: str, prev_token_count: int, new_tokens: Tokens) -> int:
    """Adds tokens to a request's text; returns how many were new.

    Args:
      request_id: a new one starts a text.
      prev_token_count: tokens of the request before `new_tokens`. What is here already is passed
        over, so that a repeated call changes nothing.
      new_tokens: ids >= 0.

    Raises:
      ValueError: if tokens before these are missing, or other ones stand here already.
    """
    return self.append_many([(request_id, prev_token_count, new_tokens)])

  def append_many(self, updates: Sequence[Update]) -> int:
    """Does `append` for different requests in one go; for none of them if one is refused.

    Raises:
      ValueError: as `append`, or if a request comes twice.
    """
    texts: dict[str, np.ndarray] = {}
    for request_id, prev_token_count, new_tokens in updates:
      if request_id in texts:
        raise ValueError(
          f"request {request_id!r}: got two updates in one call, expected one; join their tokens."
        )
      tokens = np.asarray(new_tokens, np.int32)
      if prev_token_count != self._lengths.get(request_id, 0):
        tokens = self._beyond(request_id, prev_token_count, tokens)
      texts[request_id] = tokens
    return self._grow(texts)

  def remove(self, request_id: str) -> None:
    """Forgets a request; the tree is then as if it had never been here.

    Raises:
      ValueError: if there is no such request.
    """
    slot = self._slot(request_id, "remove")
    self._num_removed += self._lengths[request_id]
    if self._num_removed <= sum(self._lengths.values()) - self._lengths[request_id]:
      _remove(self._arrays, slot)
      del self._slots[request_id], self._lengths[request_id]
      self._free_slots.append(slot)
      return
    # The store keeps what was removed, since edges may lean on it; with too much of it, start over.
    texts = {name: self.tokens(name) for name in self._lengths if name != request_id}
    self._start()
    self._grow(texts)

  def tokens(self, request_id: str, start: int = 0) -> np.ndarray:
    """Returns i32[n], a request's text from its token `start` on.

    Raises:
      ValueError: if there is no such request.
    """
    slot = self._slot(request_id, "tokens")
    return _read(self._arrays, slot, start, self._lengths[request_id])

  def count(self, tokens: Tokens) -> tuple[int, int]:
    """Returns how often a string of 1 to `DEPTH` tokens occurs, and in how many requests.

    Raises:
      ValueError: if it is empty or longer.
    """
    if not 1 <= len(tokens) <= DEPTH:
      raise ValueError(
        f"SuffixTree.count: got {len(tokens)} tokens, expected 1 to {DEPTH}; longer strings are not"
        " kept."
      )
    occurrences, requests = _count(self._arrays, np.asarray(tokens, np.int32))
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
    """Drafts for b contexts; writes the paths into `output`, what they are into `drafts`.

    Args:
      patterns: i32[n], contexts one after the other.
      offsets: i64[b + 1], where each begins and ends.
      limits: i32[b, 2], most tokens of a path and of all paths together.
      request_ids: b; see `GroupTrees.batch_speculate`.
      args: how; `args.max_spec_tokens` bounds `limits` too.
      output: i32[b, top_k, max_spec_tokens].
      drafts: b queries; overwritten.

    Raises:
      ValueError: if one of `request_ids` is not here.
    """
    owners = [-1 if name is None else self._slot(name, "speculate") for name in request_ids]
    _speculate(
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
      args.smoothing,
      args.num_lookups,
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
    """Returns the paths that may follow `context`, their score, and the match's length.

    Args:
      context: tokens so far.
      args: how.
      request_id: whose text ends with `context`, if one's does; see `GroupTrees.batch_speculate`.

    Raises:
      ValueError: for arguments that name no draft, or a request that is not here.
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
        f"SuffixTree.{what}: got request {request_id!r}, expected one of the {len(self._slots)}"
        " that are here; append to it first."
      )
    return self._slots[request_id]

  def _beyond(self, request_id: str, prev_token_count: int, tokens: np.ndarray) -> np.ndarray:
    """Returns what of `tokens` is not here yet, after the checks that `append` promises."""
    length = self._lengths.get(request_id, 0)
    if not 0 <= prev_token_count <= length:
      raise ValueError(
        f"request {request_id!r}: got prev_token_count={prev_token_count}, expected 0 to {length},"
        " the tokens that are here; send those between first."
      )
    known = min(length - prev_token_count, tokens.size)
    if known:
      slot = self._slots[request_id]
      here = _read(self._arrays, slot, prev_token_count, prev_token_count + known)
      (differing,) = np.nonzero(here != tokens[:known])
      if differing.size:
        place = int(differing[0])
        raise ValueError(
          f"request {request_id!r}: got token {tokens[place]} at {prev_token_count + place},"
          f" expected {here[place]}, which is here already; a text only grows: remove the request"
          " first."
        )
    return tokens[known:]

  def _grow(self, texts: Mapping[str, np.ndarray]) -> int:
    """Appends to each request what is known to be new."""
    parts = list(texts.values())
    tokens = parts[0] if len(parts) == 1 else np.concatenate([*parts, np.zeros(0, np.int32)])
    least = np.minimum.reduce(tokens, initial=0)
    if least < 0:
      raise ValueError(
        f"SuffixTree.append: got token id {least}, expected 0 or more; pad nothing."
      )
    born = [request_id for request_id in texts if request_id not in self._slots]
    for request_id in born:
      self._slots[request_id] = self._free_slots.pop() if self._free_slots else len(self._slots)
      self._lengths[request_id] = 0
    slots = np.asarray([self._slots[request_id] for request_id in texts], np.int64)
    sizes = [part.size for part in parts]
    offsets = np.asarray([0, *itertools.accumulate(sizes)], np.int64)
    # A string that is new or still grows makes two nodes at most.
    self._arrays = _with_room(
      self._arrays,
      num_nodes=2 * (tokens.size + DEPTH * len(texts)),
      num_rows=tokens.size // ROW + 2 * len(texts),
      num_slots=len(self._slots) + len(self._free_slots),
    )
    for request_id in born:
      self._arrays.requests[self._slots[request_id]] = 0
    _append(self._arrays, slots, offsets, tokens)
    for request_id, size in zip(texts, sizes):
      self._lengths[request_id] += size
    return tokens.size


class GroupTrees:
  """The trees of many groups: DGDS's calls, as server and as replica.

  A server is given tokens (`update_cst`) and tells what a replica lacks (`fetch_cst`); a replica
  registers the groups that it runs (`register_group`), takes that (`apply_deltas`) and drafts
  (`batch_speculate`). In one process one object is both.

  Time is what the caller says: `now_seconds` by any clock that does not run backwards.
  """

  def __init__(self):
    self._trees: dict[str, SuffixTree] = {}
    self._births: dict[str, dict[str, int]] = {}
    self._num_births: dict[str, int] = {}
    self._ends: dict[str, float] = {}
    # Kept up to date: who keeps within bounds asks often, and there may be thousands of groups.
    self._bytes: dict[str, int] = {}
    self._num_bytes = 0

  @property
  def group_ids(self) -> tuple[str, ...]:
    """Groups that are here."""
    return tuple(self._trees)

  @property
  def num_bytes(self) -> int:
    """Bytes allocated."""
    return self._num_bytes

  def tree(self, group_id: str) -> SuffixTree:
    """Returns a group's tree, to be read.

    Raises:
      ValueError: if there is no such group.
    """
    if group_id not in self._trees:
      raise ValueError(
        f"group {group_id!r}: got a group that is not here, expected one of the {len(self._trees)}"
        " that are; register it first."
      )
    return self._trees[group_id]

  def register_group(
    self, group_id: str, ttl_seconds: float = float("inf"), now_seconds: float = 0.0
  ) -> None:
    """Makes a group known until `now_seconds + ttl_seconds`; again for one that is here: longer.

    Raises:
      ValueError: if it would be over at once.
    """
    if not ttl_seconds > 0:
      raise ValueError(
        f"register_group: got ttl_seconds={ttl_seconds}, expected more than 0; drop_group ends one."
      )
    if group_id not in self._trees:
      self._trees[group_id] = SuffixTree()
      self._births[group_id] = {}
      self._num_births[group_id] = 0
      self._weigh(group_id)
    self._ends[group_id] = max(
      self._ends.get(group_id, now_seconds), now_seconds + ttl_seconds
    )

  def expire(self, now_seconds: float) -> tuple[str, ...]:
    """Drops the groups whose time is over, and returns which."""
    over = tuple(group for group, end in self._ends.items() if end <= now_seconds)
    for group_id in over:
      self.drop_group(group_id)
    return over

  def drop_group(self, group_id: str) -> None:
    """Forgets a group.

    Raises:
      ValueError: if there is no such group.
    """
    self.tree(group_id)
    self._num_bytes -= self._bytes.pop(group_id)
    del self._trees[group_id], self._births[group_id]
    del self._num_births[group_id], self._ends[group_id]

  def update_cst(
    self, group_id: str, request_id: str, prev_token_count: int, new_tokens: Tokens
  ) -> int:
    """Does `SuffixTree.append` for a request of a group; returns how many tokens were new."""
    return self.update_many(group_id, [(request_id, prev_token_count, new_tokens)])

  def update_many(self, group_id: str, updates: Sequence[Update]) -> int:
    """Does `SuffixTree.append_many` for a group."""
    added = self.tree(group_id).append_many(updates)
    births = self._births[group_id]
    for request_id, _, _ in updates:
      if request_id not in births:
        births[request_id] = self._num_births[group_id]
        self._num_births[group_id] += 1
    self._weigh(group_id)
    return added

  def remove_request(self, group_id: str, request_id: str) -> None:
    """Does `SuffixTree.remove` for a request of a group."""
    self.tree(group_id).remove(request_id)
    self._weigh(group_id)
    del self._births[group_id][request_id]

  def cache_info(self, group_id: str) -> CacheInfo:
    """Returns what is here of a group, for `fetch_cst` of another."""
    lengths = self.tree(group_id).lengths
    return {name: (birth, lengths[name]) for name, birth in self._births[group_id].items()}

  def fetch_cst(
    self, group_ids: Sequence[str], draft_cache_infos: Sequence[CacheInfo]
  ) -> list[GroupDelta]:
    """Returns what replicas lack; a lost or repeated answer does no harm.

    Args:
      group_ids: that are here.
      draft_cache_infos: for each, what the replica holds: its own `cache_info`.

    Raises:
      ValueError: for a group that is not here.
    """
    deltas = []
    for group_id, held in zip(group_ids, draft_cache_infos, strict=True):
      tree, births = self.tree(group_id), self._births[group_id]
      removed = tuple(name for name, (birth, _) in held.items() if births.get(name) != birth)
      updates = []
      for name, birth in births.items():
        known = 0 if name in removed or name not in held else held[name][1]
        if known < tree.lengths[name] or name in removed or name not in held:
          updates.append(TextUpdate(name, birth, known, tree.tokens(name, known)))
      deltas.append(GroupDelta(group_id, removed, tuple(updates)))
    return deltas

  def apply_deltas(self, deltas: Sequence[GroupDelta]) -> None:
    """Takes what a server's `fetch_cst` gave; the groups are registered here.

    Raises:
      ValueError: for a group that is not, or where tokens before those given are missing.
    """
    for delta in deltas:
      tree, births = self.tree(delta.group_id), self._births[delta.group_id]
      for name in delta.removed:
        if name in births:
          self.remove_request(delta.group_id, name)
      tree.append_many([(u.request_id, u.prev_token_count, u.new_tokens) for u in delta.updates])
      births.update({u.request_id: u.birth for u in delta.updates})
      self._weigh(delta.group_id)

  def _weigh(self, group_id: str) -> None:
    num_bytes = self._trees[group_id].num_bytes
    self._num_bytes += num_bytes - self._bytes.get(group_id, 0)
    self._bytes[group_id] = num_bytes

  def batch_speculate(
    self,
    group_ids: Sequence[str],
    buffer_offsets: np.ndarray,
    pattern_buffer: np.ndarray,
    output_buffer: np.ndarray,
    speculation_args: SpeculationArgs = DEFAULT_ARGS,
    limits: np.ndarray | None = None,
    request_ids: Sequence[str | None] | None = None,
  ) -> Drafts:
    """Drafts for b requests at once, into buffers of the caller.

    Args:
      group_ids: of each request; neighbours of one group share a call.
      buffer_offsets: i64[b + 1], where each context begins and ends in `pattern_buffer`.
      pattern_buffer: i32[n], contexts, the newest token last; `DEPTH` tokens are enough.
      output_buffer: i32[b, top_k, max_spec_tokens], written; see `Drafts.num_tokens`.
      speculation_args: how.
      limits: i32[b, 2], most tokens of a path and of all paths together; without it, a path's are
        `max_spec_tokens`.
      request_ids: for each context, the request whose text here ends with just these tokens, or
        None. Where a text ends the tree knows its match, so that nothing is looked up.

    Raises:
      ValueError: for buffers or arguments that do not fit, or a group or request that is not here.
    """
    check_args(speculation_args)
    num, top_k, most = len(group_ids), speculation_args.top_k, speculation_args.max_spec_tokens
    if limits is None:
      limits = np.full((num, 2), (most, most * top_k), np.int32)
    request_ids = [None] * num if request_ids is None else request_ids
    for name, array, dtype, shape in (
      ("buffer_offsets", buffer_offsets, _INT64, (num + 1,)),
      ("pattern_buffer", pattern_buffer, _INT32, pattern_buffer.shape[:1]),
      ("output_buffer", output_buffer, _INT32, (num, top_k, most)),
      ("limits", limits, _INT32, (num, 2)),
    ):
      if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
        raise ValueError(
          f"batch_speculate: got {name} of {array.dtype}{list(array.shape)}, expected"
          f" {dtype}{list(shape)} in C order; make the buffer anew."
        )
    bounds = buffer_offsets.tolist()
    if bounds[0] < 0 or bounds[-1] > pattern_buffer.size or bounds != sorted(bounds):
      raise ValueError(
        f"batch_speculate: got buffer_offsets from {bounds[0]} to {bounds[-1]}, expected ascending"
        f" ones within the {pattern_buffer.size} tokens of pattern_buffer; count again."
      )
    drafts = empty_drafts(num, top_k)
    start = 0
    for group_id, same in itertools.groupby(group_ids):
      stop = start + len(list(same))
      self.tree(group_id).speculate(
        pattern_buffer,
        buffer_offsets[start : stop + 1],
        limits[start:stop],
        request_ids[start:stop],
        speculation_args,
        output_buffer[start:stop],
        Drafts(*(array[start:stop] for array in drafts)),
      )
      start = stop
    return drafts


@functools.cache
def check_args(args: SpeculationArgs) -> None:
  """Refuses arguments that name no draft.

  Raises:
    ValueError: naming the field.
  """
  for name, value, low, high in (
    ("max_spec_tokens", args.max_spec_tokens, 1, DEPTH - 1),
    ("pattern_lookup_min", args.pattern_lookup_min, 1, DEPTH - args.max_spec_tokens),
    ("pattern_lookup_max", args.pattern_lookup_max, args.pattern_lookup_min, DEPTH),
    ("top_k", args.top_k, 1, DEPTH),
    ("min_token_prob", args.min_token_prob, 0, 1),
    ("smoothing", args.smoothing, 0, float("inf")),
    ("num_lookups", args.num_lookups, 1, DEPTH),
  ):
    if not low <= value <= high:
      raise ValueError(
        f"SpeculationArgs.{name}: got {value}, expected {low} to {high}; a match and its draft"
        f" share the {DEPTH} tokens of the tree."
      )


def empty_drafts(num_queries: int, top_k: int) -> Drafts:
  """Returns room for what `batch_speculate` writes."""
  return Drafts(
    np.zeros((num_queries, top_k), np.int32),
    np.zeros(num_queries),
    np.zeros(num_queries, np.int32),
  )


class ReferenceTree:
  """What `SuffixTree` counts and drafts, by definition: texts alone, searched through each time."""

  def __init__(self):
    self.texts: dict[str, list[int]] = {}

  def append(self, request_id: str, prev_token_count: int, new_tokens: Tokens) -> int:
    """As `SuffixTree.append`, for calls that it would not refuse."""
    text = self.texts.setdefault(request_id, [])
    fresh = list(new_tokens[len(text) - prev_token_count :])
    text.extend(fresh)
    return len(fresh)

  def remove(self, request_id: str) -> None:
    """As `SuffixTree.remove`."""
    del self.texts[request_id]

  def count(self, tokens: Tokens) -> tuple[int, int]:
    """As `SuffixTree.count`."""
    counts = [len(self._places(text, tokens)) for text in self.texts.values()]
    return sum(counts), sum(count > 0 for count in counts)

  def draft(
    self, context: Tokens, args: SpeculationArgs = DEFAULT_ARGS
  ) -> tuple[list[tuple[int, ...]], float, int]:
    """As `SuffixTree.draft`."""
    context = tuple(context)
    longest = min(len(context), args.pattern_lookup_max, DEPTH - args.max_spec_tokens)
    while longest and not self._next(context[-longest:]):
      longest -= 1
    if longest < args.pattern_lookup_min:
      return [], 0.0, 0
    lengths = range(longest, max(args.pattern_lookup_min, longest - args.num_lookups + 1) - 1, -1)
    matched = max(lengths, key=lambda n: self._walk(context[-n:], (), 1.0, args, [], 0)[1])
    paths, score = [], 0.0
    start, step, chance = matched, (), 1.0
    branches: list[tuple[float, int, int, int]] = []
    while True:
      path, more = self._walk(context[-start:], step, chance, args, branches, len(paths))
      if not path:
        break
      paths.append(path)
      score += more
      if len(paths) == args.top_k:
        break
      while not branches and start > args.pattern_lookup_min:
        start = max(start // 2, args.pattern_lookup_min)
        for token, chance in self._next(context[-start:], args.smoothing):
          if chance >= args.min_token_prob and all(token != path[0] for path in paths):
            branches.append((-chance, len(paths), 0, token))
      if not branches:
        break
      branches.sort()
      chance, other, at, token = branches.pop(0)
      chance = -chance
      step = (*(paths[other][:at] if other < len(paths) else ()), token)
      score += chance
    return paths, score, matched if paths else 0

  def _walk(
    self,
    string: tuple[int, ...],
    path: tuple[int, ...],
    chance: float,
    args: SpeculationArgs,
    branches: list[tuple[float, int, int, int]],
    number: int,
  ) -> tuple[tuple[int, ...], float]:
    """Follows the likeliest tokens after `string + path`; returns the path and what it adds."""
    score = 0.0
    while len(path) < args.max_spec_tokens:
      followers = self._next(string + path, args.smoothing)
      for token, share in followers[1:]:
        if chance * share >= args.min_token_prob:
          branches.append((-chance * share, number, len(path), token))
      if not followers or chance * followers[0][1] < args.min_token_prob:
        break
      chance *= followers[0][1]
      score += chance
      path = (*path, followers[0][0])
    return path, score

  def _next(self, string: tuple[int, ...], smoothing: float = 0.0) -> list[tuple[int, float]]:
    """Returns the tokens that were said after a string and their probabilities, best first."""
    if len(string) >= DEPTH:
      return []
    counts: dict[int, list[int]] = {}
    for text in self.texts.values():
      ends = [place + len(string) for place in self._places(text, string)]
      said = [text[end] for end in ends if end < len(text)]
      for token in set(said):
        count = counts.setdefault(token, [0, 0])
        count[0] += 1
        count[1] += said.count(token)
    order = sorted(counts, key=lambda token: (-counts[token][0], -counts[token][1], token))
    total = sum(requests for requests, _ in counts.values())
    return [(token, counts[token][0] / (total + smoothing)) for token in order]

  @staticmethod
  def _places(text: Tokens, string: Tokens) -> list[int]:
    last = len(text) - len(string)
    return [n for n in range(last + 1) if tuple(text[n : n + len(string)]) == tuple(string)]


# Arrays and their growth.


def _empty_arrays() -> _Arrays:
  return _Arrays(
    nodes=np.asarray([[_HASHED if column == _SHAPE else 0 for column in range(11)]], np.int32),
    heads=np.zeros(1, np.int32),
    store=np.zeros(0, np.int32),
    rows=np.zeros((0, 4), np.int32),
    requests=np.zeros((0, 4), np.int64),
    tails=np.zeros((0, DEPTH), np.int32),
    numbers=np.asarray([1, 0, 0, 0], np.int64),
  )


def _with_room(arrays: _Arrays, num_nodes: int, num_rows: int, num_slots: int) -> _Arrays:
  """Returns the tree in arrays that have room for so many more nodes and rows, and all slots."""
  made, _, live, rows = arrays.numbers.tolist()
  if live + 1 + num_nodes > len(arrays.nodes):
    capacity = _capacity(live + 1 + num_nodes, len(arrays.nodes))
    arrays = arrays._replace(
      nodes=_longer(arrays.nodes, capacity),
      heads=np.zeros(1 << (capacity * 2 // 3).bit_length(), np.int32),
    )
    _hash_again(arrays, made)
  if rows + num_rows > len(arrays.rows):
    capacity = _capacity(rows + num_rows, len(arrays.rows))
    arrays = arrays._replace(
      store=_longer(arrays.store, capacity * _WIDTH), rows=_longer(arrays.rows, capacity)
    )
  if num_slots > len(arrays.requests):
    capacity = _capacity(num_slots, len(arrays.requests))
    arrays = arrays._replace(
      requests=_longer(arrays.requests, capacity), tails=_longer(arrays.tails, capacity)
    )
    columns = _BITS - (-capacity // _WORD)
    if columns > arrays.nodes.shape[1]:
      nodes = np.zeros((len(arrays.nodes), columns), np.int32)
      nodes[:, : arrays.nodes.shape[1]] = arrays.nodes
      arrays = arrays._replace(nodes=nodes)
  return arrays


def _capacity(needed: int, present: int) -> int:
  # Half as much again: growing twofold would leave half of all memory unused at times.
  return max(needed, present + present // 2)


def _longer(array: np.ndarray, length: int) -> np.ndarray:
  grown = np.empty((length, *array.shape[1:]), array.dtype)
  grown[: len(array)] = array
  return grown


# Compiled functions. `t` is an `_Arrays`, `slot` a request, a node its row in `t.nodes`.


def _address_to_pointer(typing_context: Any, address: Any) -> Any:
  """Tells numba how an address becomes a pointer."""

  def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    return builder.inttoptr(args[0], context.get_value_type(numba.types.voidptr))

  return numba.types.voidptr(numba.types.intp), generate


_pointer: Any = extending.intrinsic(_address_to_pointer)


@compiled.inlined
def _bare(array):
  """Returns the same memory as an array without an owner: nothing is counted when it is passed."""
  return carray(_pointer(array.ctypes.data), array.shape, array.dtype)


@compiled.inlined
def _bare_arrays(t):
  # Counting references took half the time of an append. The caller holds the arrays.
  return _Arrays(
    _bare(t.nodes),
    _bare(t.heads),
    _bare(t.store),
    _bare(t.rows),
    _bare(t.requests),
    _bare(t.tails),
    _bare(t.numbers),
  )


@compiled.inlined
def _bucket(t, parent, token):
  key = np.uint64(parent) * np.uint64(0x9E3779B97F4A7C15)
  key += np.uint64(token) * np.uint64(0xC2B2AE3D27D4EB4F)
  return np.int64((key >> np.uint64(32)) & np.uint64(t.heads.size - 1))


@compiled.inlined
def _hash(t, node):
  bucket = _bucket(t, t.nodes[node, _PARENT], t.nodes[node, _TOKEN])
  t.nodes[node, _CHAIN] = t.heads[bucket]
  t.heads[bucket] = node


@compiled.inlined
def _unhash(t, node):
  bucket = _bucket(t, t.nodes[node, _PARENT], t.nodes[node, _TOKEN])
  at = t.heads[bucket]
  if at == node:
    t.heads[bucket] = t.nodes[node, _CHAIN]
    return
  while t.nodes[at, _CHAIN] != node:
    at = t.nodes[at, _CHAIN]
  t.nodes[at, _CHAIN] = t.nodes[node, _CHAIN]


@compiled.inlined
def _is_hashed(t, node):
  return t.nodes[node, _SHAPE] & _HASHED != 0


@compiled.function
def _hash_again(t, made):
  t = _bare_arrays(t)
  for node in range(1, made):
    # Free nodes have depth 0.
    if t.nodes[node, _SHAPE] and _is_hashed(t, t.nodes[node, _PARENT]):
      _hash(t, np.int32(node))


@compiled.inlined
def _depth(t, node):
  return np.int64(t.nodes[node, _SHAPE] & _DEPTH_BITS)


@compiled.inlined
def _child(t, parent, token):
  """Returns the child of `parent` whose edge begins with `token`, or 0."""
  # The likeliest child comes first, and most nodes have few. The root's are not even listed.
  node = t.nodes[parent, _CHILD]
  if not _is_hashed(t, parent):
    while node and t.nodes[node, _TOKEN] != token:
      node = t.nodes[node, _NEXT]
    return node
  if node and t.nodes[node, _TOKEN] == token:
    return node
  node = t.heads[_bucket(t, parent, token)]
  while node and (t.nodes[node, _TOKEN] != token or t.nodes[node, _PARENT] != parent):
    node = t.nodes[node, _CHAIN]
  return node


@compiled.inlined
def _num_requests(t, node):
  total = np.int64(0)
  for word in range(_BITS, t.nodes.shape[1]):
    bits = np.uint32(t.nodes[node, word])
    bits -= (bits >> np.uint32(1)) & np.uint32(0x55555555)
    bits = (bits & np.uint32(0x33333333)) + ((bits >> np.uint32(2)) & np.uint32(0x33333333))
    bits = (bits + (bits >> np.uint32(4))) & np.uint32(0x0F0F0F0F)
    total += np.int64(np.uint32(bits * np.uint32(0x01010101)) >> np.uint32(24))
  return total


@compiled.inlined
def _is_before(t, node, other):
  """Whether `node` is the likelier of two children of one parent; a total order."""
  one, two = _num_requests(t, node), _num_requests(t, other)
  if one != two:
    return one > two
  one, two = np.int64(t.nodes[node, _COUNT]), np.int64(t.nodes[other, _COUNT])
  if one != two:
    return one > two
  return t.nodes[node, _TOKEN] < t.nodes[other, _TOKEN]


@compiled.inlined
def _unlist(t, node):
  """Takes a node out of the list of its parent's children."""
  before, after = t.nodes[node, _PREVIOUS], t.nodes[node, _NEXT]
  if before:
    t.nodes[before, _NEXT] = after
  else:
    t.nodes[t.nodes[node, _PARENT], _CHILD] = after
  if after:
    t.nodes[after, _PREVIOUS] = before


@compiled.inlined
def _list_first(t, node):
  """Puts a node that is in no list before the other children of its parent."""
  parent = t.nodes[node, _PARENT]
  first = t.nodes[parent, _CHILD]
  t.nodes[node, _PREVIOUS] = 0
  t.nodes[node, _NEXT] = first
  if first:
    t.nodes[first, _PREVIOUS] = node
  t.nodes[parent, _CHILD] = node


@compiled.inlined
def _said(t, parent, child, word, bit):
  """Counts one more occurrence of what leads to `child`, and keeps the likeliest child first."""
  t.nodes[child, _COUNT] += 1
  if not t.nodes[child, word] & bit:
    t.nodes[child, word] |= bit
    t.nodes[parent, _SUM] += 1
  if parent and t.nodes[child, _PREVIOUS]:
    if _is_before(t, child, t.nodes[parent, _CHILD]):
      _unlist(t, child)
      _list_first(t, child)


@compiled.inlined
def _make(t, position, parent, token, shape):
  """Returns a new node that nobody lists yet."""
  node = t.numbers[_FREE]
  if node:
    t.numbers[_FREE] = t.nodes[node, _NEXT]
  else:
    node = t.numbers[_MADE]
    t.numbers[_MADE] = node + 1
  t.numbers[_LIVE] += 1
  t.nodes[node, _POSITION] = position
  t.nodes[node, _PARENT] = parent
  t.nodes[node, _TOKEN] = token
  t.nodes[node, _CHILD] = 0
  t.nodes[node, _SHAPE] = shape
  return np.int32(node)


@compiled.inlined
def _free(t, node):
  t.nodes[node, _SHAPE] = 0
  t.nodes[node, _NEXT] = t.numbers[_FREE]
  t.numbers[_FREE] = node
  t.numbers[_LIVE] -= 1


@compiled.inlined
def _leaf(t, parent, depth, position, word, bit):
  """Adds the string at `position` as a leaf; it differs from all others from `depth` on.

  The leaf is open: its edge reaches as far as the text is written, up to `DEPTH`.
  """
  node = _make(t, position, parent, t.store[position + depth], np.int64(DEPTH))
  t.nodes[node, _COUNT] = 1
  t.nodes[node, _SUM] = 0
  for column in range(_BITS, t.nodes.shape[1]):
    t.nodes[node, column] = 0
  t.nodes[node, word] = bit
  t.nodes[parent, _SUM] += 1
  if parent:
    first = t.nodes[parent, _CHILD]
    if first == 0 or _is_before(t, node, first):
      _list_first(t, node)
    else:
      after = t.nodes[first, _NEXT]
      t.nodes[node, _PREVIOUS] = first
      t.nodes[node, _NEXT] = after
      t.nodes[first, _NEXT] = node
      if after:
        t.nodes[after, _PREVIOUS] = node
  if _is_hashed(t, parent):
    _hash(t, node)
    return node
  size = 0
  child = t.nodes[parent, _CHILD]
  while child:
    size += 1
    child = t.nodes[child, _NEXT]
  if size >= _MANY:
    t.nodes[parent, _SHAPE] |= _HASHED
    child = t.nodes[parent, _CHILD]
    while child:
      _hash(t, child)
      child = t.nodes[child, _NEXT]
  return node


@compiled.inlined
def _put(t, node, other):
  """Gives `node` the place of `other` among the children of other's parent."""
  parent = t.nodes[other, _PARENT]
  t.nodes[node, _PARENT] = parent
  t.nodes[node, _TOKEN] = t.nodes[other, _TOKEN]
  if _is_hashed(t, parent):
    _unhash(t, other)
    _hash(t, node)
  if parent:
    before, after = t.nodes[other, _PREVIOUS], t.nodes[other, _NEXT]
    t.nodes[node, _PREVIOUS] = before
    t.nodes[node, _NEXT] = after
    if before:
      t.nodes[before, _NEXT] = node
    else:
      t.nodes[parent, _CHILD] = node
    if after:
      t.nodes[after, _PREVIOUS] = node


@compiled.inlined
def _dissolve(t, node):
  """Takes out a node at which nothing ends and whose only child goes on."""
  child = t.nodes[node, _CHILD]
  if _is_hashed(t, node):
    _unhash(t, child)
  _put(t, child, node)
  _free(t, node)


@compiled.inlined
def _split(t, child, depth):
  """Returns a new node at `depth` of the edge into `child`, with the counts of the edge."""
  position = np.int64(t.nodes[child, _POSITION])
  node = _make(t, position, np.int32(0), np.int32(0), depth)
  t.nodes[node, _COUNT] = t.nodes[child, _COUNT]
  for column in range(_BITS, t.nodes.shape[1]):
    t.nodes[node, column] = t.nodes[child, column]
  t.nodes[node, _SUM] = _num_requests(t, child)
  _put(t, node, child)
  t.nodes[node, _CHILD] = child
  t.nodes[child, _PARENT] = node
  t.nodes[child, _TOKEN] = t.store[position + depth]
  t.nodes[child, _PREVIOUS] = 0
  t.nodes[child, _NEXT] = 0
  return node


@compiled.inlined
def _match(t, child, position, depth, target):
  """Returns (how far a string agrees with the edge into `child`, the edge's end)."""
  other = t.nodes[child, _POSITION]
  bottom = _depth(t, child)
  at, stop = depth, min(bottom, target)
  while at < stop and t.store[other + at] == t.store[position + at]:
    at += 1
  if at < bottom and t.store[other + at] == _UNWRITTEN:
    # The text of an open leaf ends here, and somebody else's comes as far: the end becomes a node.
    t.nodes[child, _SHAPE] = at | 1 << _ENDS
    row = other // _WIDTH
    owner = t.rows[row, _OWNER]
    index = t.rows[row, _NUMBER] * ROW + other % _WIDTH
    t.requests[owner, _FIRST_SHARED] = min(t.requests[owner, _FIRST_SHARED], np.int64(index))
    bottom = at
  return at, bottom


@compiled.inlined
def _lengthen(t, node, depth, position, target, word, bit):
  """Lengthens the string that ends at `node` to `target` tokens; returns where it ends now.

  Args:
    t: the tree.
    node: explicit, since something ends there; 0 for a new string.
    depth: of `node`.
    position: where the string is written.
    target: its new length, `DEPTH` at most.
    word: of the request's bit.
    bit: of the request.
  """
  if node:
    ends = t.nodes[node, _SHAPE] >> _ENDS
    child = t.nodes[node, _CHILD]
    if child == 0 and ends == 1:
      # Nobody else says this any more.
      t.nodes[node, _POSITION] = position
      t.nodes[node, _SHAPE] = DEPTH
      return node
    t.nodes[node, _SHAPE] -= 1 << _ENDS
    if ends == 1 and t.nodes[child, _NEXT] == 0:
      # The node was there for this end alone: it slides along its edge, or goes.
      at, bottom = _match(t, child, position, depth, target)
      if at < bottom:
        t.nodes[node, _POSITION] = position
        t.nodes[node, _SHAPE] += at - depth
        if at > depth:
          is_hashed = _is_hashed(t, node)
          if is_hashed:
            _unhash(t, child)
          t.nodes[child, _TOKEN] = t.store[t.nodes[child, _POSITION] + at]
          if is_hashed:
            _hash(t, child)
        depth = at
      else:
        parent = t.nodes[node, _PARENT]
        _dissolve(t, node)
        node, depth = child, bottom
        # Its parent has counted this request at the node that went.
        t.nodes[node, word] |= bit
        _said(t, parent, node, word, bit)
  while depth < target:
    child = _child(t, node, t.store[position + depth])
    if child == 0:
      return _leaf(t, node, depth, position, word, bit)
    at, bottom = _match(t, child, position, depth + 1, target)
    if at < bottom:
      child = _split(t, child, at)
    _said(t, node, child, word, bit)
    node, depth = child, at
  if target < DEPTH:
    t.nodes[node, _SHAPE] += 1 << _ENDS
  return node


@compiled.inlined
def _write(t, slot, tokens, start, stop):
  """Appends tokens to a text in the store."""
  length = t.requests[slot, _LENGTH]
  row = t.requests[slot, _LAST_ROW]
  for place in range(start, stop):
    column = length % ROW
    if column == 0:
      before = row
      row = t.numbers[_ROWS]
      t.numbers[_ROWS] += 1
      for at in range(row * _WIDTH, (row + 1) * _WIDTH):
        t.store[at] = _UNWRITTEN
      t.rows[row, _BEFORE] = before
      t.rows[row, _OWNER] = slot
      t.rows[row, _NUMBER] = length // ROW
      if length:
        t.rows[before, _AFTER] = row
      else:
        t.requests[slot, _FIRST_ROW] = row
    t.store[row * _WIDTH + column] = tokens[place]
    if column < DEPTH - 1 and length >= ROW:
      t.store[t.rows[row, _BEFORE] * _WIDTH + ROW + column] = tokens[place]
    length += 1
  t.requests[slot, _LAST_ROW] = row
  t.requests[slot, _LENGTH] = length


@compiled.function
def _append(t, slots, offsets, tokens):
  """Appends to many texts; there is room."""
  t = _bare_arrays(t)
  for place in range(slots.size):
    slot = slots[place]
    if offsets[place] == offsets[place + 1]:
      continue
    old, last = t.requests[slot, _LENGTH], t.requests[slot, _LAST_ROW]
    _write(t, slot, tokens, offsets[place], offsets[place + 1])
    length = t.requests[slot, _LENGTH]
    # Strings that nobody else said grow by themselves, and those of DEPTH tokens no more.
    first = max(t.requests[slot, _FIRST_SHARED], old - DEPTH + 1)
    if old == 0:
      row = t.requests[slot, _FIRST_ROW]
    elif first // ROW > t.rows[last, _NUMBER]:
      row = np.int64(t.rows[last, _AFTER])
    elif first // ROW < t.rows[last, _NUMBER]:
      row = np.int64(t.rows[last, _BEFORE])
    else:
      row = last
    word, bit = _BITS + slot // _WORD, np.int32(np.uint32(1) << np.uint32(slot % _WORD))
    shared = length
    for index in range(first, length):
      if index > first and index % ROW == 0:
        row = np.int64(t.rows[row, _AFTER])
      node, depth = np.int32(0), np.int64(0)
      if index < old:
        node, depth = t.tails[slot, index % DEPTH], old - index
      target = min(np.int64(DEPTH), length - index)
      node = _lengthen(t, node, depth, row * _WIDTH + index % ROW, target, word, bit)
      t.tails[slot, index % DEPTH] = node
      if shared == length and target < DEPTH and _depth(t, node) < DEPTH:
        shared = index
    t.requests[slot, _FIRST_SHARED] = shared


@compiled.function
def _read(t, slot, start, stop):
  """Returns tokens `start` to `stop` of a text."""
  tokens = np.empty(stop - start, np.int32)
  row = t.requests[slot, _FIRST_ROW]
  for index in range(stop):
    if index and index % ROW == 0:
      row = np.int64(t.rows[row, _AFTER])
    if index >= start:
      tokens[index - start] = t.store[row * _WIDTH + index % ROW]
  return tokens


@compiled.function
def _remove(t, slot):
  """Takes every string of a text out of the counts, and nodes out that nobody needs any more."""
  t = _bare_arrays(t)
  word, kept = _BITS + slot // _WORD, ~np.int32(np.uint32(1) << np.uint32(slot % _WORD))
  length = t.requests[slot, _LENGTH]
  row = t.requests[slot, _FIRST_ROW]
  for index in range(length):
    if index and index % ROW == 0:
      row = np.int64(t.rows[row, _AFTER])
    position = row * _WIDTH + index % ROW
    target = min(np.int64(DEPTH), length - index)
    node, depth = np.int32(0), np.int64(0)
    while depth < target:
      child = _child(t, node, t.store[position + depth])
      t.nodes[child, _COUNT] -= 1
      if t.nodes[child, word] & ~kept:
        t.nodes[child, word] &= kept
        t.nodes[node, _SUM] -= 1
      if t.nodes[child, _COUNT] == 0:
        break
      if node and t.nodes[child, _PREVIOUS] == 0:
        _choose(t, node)
      node, depth = child, _depth(t, child)
    if depth < target:
      # What is left below is this string alone.
      child = _child(t, node, t.store[position + depth])
      if node:
        _unlist(t, child)
        _choose(t, node)
      while child:
        below = t.nodes[child, _CHILD]
        if _is_hashed(t, t.nodes[child, _PARENT]):
          _unhash(t, child)
        _free(t, child)
        child = below
    elif target < DEPTH:
      t.nodes[node, _SHAPE] -= 1 << _ENDS
    child = t.nodes[node, _CHILD]
    is_needed = node == 0 or t.nodes[node, _SHAPE] >> _ENDS > 0
    if not is_needed and child and t.nodes[child, _NEXT] == 0:
      t.nodes[child, word] &= kept  # As the node's own bit, which its parent no longer counts.
      _dissolve(t, node)


@compiled.inlined
def _choose(t, parent):
  """Puts the likeliest child first after counts fell."""
  best = t.nodes[parent, _CHILD]
  child = best
  while child:
    if _is_before(t, child, best):
      best = child
    child = t.nodes[child, _NEXT]
  if best and t.nodes[best, _PREVIOUS]:
    _unlist(t, best)
    _list_first(t, best)


@compiled.inlined
def _locate(t, tokens, start, stop):
  """Returns the node on whose edge a string ends, or -1 if nobody said it."""
  node, depth, length = np.int32(0), np.int64(0), stop - start
  while depth < length:
    node = _child(t, node, tokens[start + depth])
    if node == 0:
      return np.int32(-1)
    position = t.nodes[node, _POSITION]
    bottom = min(_depth(t, node), length)
    depth += 1
    while depth < bottom:
      if t.store[position + depth] != tokens[start + depth]:
        return np.int32(-1)
      depth += 1
  return node


@compiled.function
def _count(t, tokens):
  """Returns (occurrences, requests) of a string."""
  node = _locate(t, tokens, np.int64(0), np.int64(tokens.size))
  if node < 0:
    return np.int64(0), np.int64(0)
  return np.int64(t.nodes[node, _COUNT]), _num_requests(t, node)


# Drafts.


@compiled.inlined
def _likeliest(t, node, depth):
  """Returns the node that the likeliest next token leads to (0 if none), and all weights' sum."""
  if depth < _depth(t, node):
    if t.store[t.nodes[node, _POSITION] + depth] == _UNWRITTEN:
      return np.int32(0), np.int64(0)
    return node, _num_requests(t, node)
  return t.nodes[node, _CHILD], np.int64(t.nodes[node, _SUM])


@compiled.inlined
def _longest(t, tokens, stop, most):
  """Returns the longest string before `stop` that somebody continued: (length, node)."""
  # If a string was continued, so were all its ends. Most matches are short: start there.
  low, high, middle = np.int64(0), most, min(np.int64(_USUAL), most)
  found = np.int32(0)
  while low < high:
    node = _locate(t, tokens, stop - middle, stop)
    if node >= 0 and _likeliest(t, node, middle)[0]:
      found = node
      low = middle
      middle = (low + high + 1) // 2 if low > _USUAL else min(2 * low, high)
    else:
      high = middle - 1
      middle = (low + high + 1) // 2
  return low, found


@compiled.inlined
def _own(t, slot, most):
  """Returns the longest end of a text that somebody continued: (length, node)."""
  length = t.requests[slot, _LENGTH]
  # What nobody else said nobody continued.
  for index in range(max(t.requests[slot, _FIRST_SHARED], length - most), length):
    node = t.tails[slot, index % DEPTH]
    if _likeliest(t, node, length - index)[0]:
      return length - index, node
  return np.int64(0), np.int32(0)


@compiled.inlined
def _rank(branches, places, a):
  """Returns what orders branches: probability down; path, step, token up."""
  return -branches[a], places[a, 1], places[a, 2], places[a, 3]


@compiled.inlined
def _offer(branches, places, size, probability, node, path, step, token):
  """Adds a branch, in place of the worst one where there is no room; returns how many there are."""
  at = size
  if size == branches.size:
    at = np.int64(0)
    for a in range(1, size):
      if _rank(branches, places, a) > _rank(branches, places, at):
        at = a
    if (-probability, path, step, token) >= _rank(branches, places, at):
      return size
  branches[at] = probability
  places[at, 0], places[at, 1], places[at, 2], places[at, 3] = node, path, step, token
  return min(size + 1, branches.size)


@compiled.inlined
def _take(branches, places, size):
  """Moves the best branch behind the others; there is one."""
  best = np.int64(0)
  for a in range(1, size):
    if _rank(branches, places, a) < _rank(branches, places, best):
      best = a
  last = size - 1
  branches[best], branches[last] = branches[last], branches[best]
  for column in range(4):
    places[best, column], places[last, column] = places[last, column], places[best, column]


@compiled.inlined
def _walk(
  t, node, depth, probability, width, least, smoothing, path, step, out, branches, places, size
):
  """Follows the likeliest tokens; returns (tokens, sum of probabilities, branches left aside).

  Args:
    t: the tree.
    node: where the walk begins, at `depth`.
    depth: of the string so far.
    probability: of the tokens that led here.
    width: most tokens of `out`.
    least: smallest probability.
    smoothing: see `SpeculationArgs`.
    path: number of this path.
    step: tokens in `out` already.
    out: i32[max_spec_tokens], where tokens go.
    branches: f64[k], probabilities of branches; k = 0 keeps none.
    places: i64[k, 4], their nodes, paths, steps and tokens.
    size: branches so far.
  """
  score = 0.0
  while step < width:
    best, total = _likeliest(t, node, depth)
    if best == 0:
      break
    weight = _num_requests(t, best)
    next_probability = probability * (weight / (total + smoothing))
    if next_probability < least:
      break  # No other is likelier, so that there are no branches either.
    others = probability * ((total - weight) / (total + smoothing))
    if branches.size and others >= least and depth == _depth(t, node):
      child = t.nodes[best, _NEXT]
      while child:
        chance = probability * (_num_requests(t, child) / (total + smoothing))
        if chance >= least:
          size = _offer(
            branches, places, size, chance, child, path, step, t.nodes[child, _TOKEN]
          )
        child = t.nodes[child, _NEXT]
    probability = next_probability
    out[step] = t.store[t.nodes[best, _POSITION] + depth]
    node = best
    depth += 1
    step += 1
    score += probability
  return step, score, size


@compiled.function
def _speculate(
  t, patterns, offsets, limits, owners, most_tokens, lookup_most, lookup_least, top_k, least,
  smoothing, num_lookups, output, num_tokens, scores, match_lengths,
):
  """Drafts for every context; see `SuffixTree.speculate`."""
  t = _bare_arrays(t)
  branches, places = np.empty(top_k - 1, np.float64), np.empty((top_k - 1, 4), np.int64)
  no_branches, no_places = branches[:0], places[:0]
  trial = np.empty(most_tokens, np.int32)
  none = np.int64(0)  # A plain 0 would be a type, and a compilation, of its own.
  for q in range(offsets.size - 1):
    num_tokens[q] = 0
    scores[q] = 0.0
    match_lengths[q] = 0
    start, stop = offsets[q], offsets[q + 1]
    left, widest = np.int64(limits[q, 1]), min(np.int64(limits[q, 0]), np.int64(most_tokens))
    if min(left, widest) < 1:
      continue
    most = min(stop - start, np.int64(lookup_most))
    if owners[q] < 0:
      longest, node = _longest(t, patterns, stop, most)
    else:
      longest, node = _own(t, owners[q], most)
    if longest < lookup_least:
      continue
    # Of several match lengths, the one with the most to expect.
    matched, most_score = longest, -1.0
    if num_lookups > 1:
      for length in range(longest, max(lookup_least, longest - num_lookups + 1) - 1, -1):
        other = _locate(t, patterns, stop - length, stop)
        _, score, _ = _walk(
          t, other, length, 1.0, min(left, widest), least, smoothing, none, none,
          trial, no_branches, no_places, none,
        )
        if score > most_score:
          matched, node, most_score = length, other, score
    depth, chance, step, size, path = matched, 1.0, none, none, none
    while True:
      step, score, size = _walk(
        t, node, depth + step, chance, min(left, widest), least, smoothing, path, step,
        output[q, path], branches, places, size,
      )
      if step == 0:
        break
      num_tokens[q, path] = step
      scores[q] += score
      left -= step
      path += 1
      if path == top_k:
        break
      # Another path leaves one before it where the next likeliest token does.
      step = np.int64(-1)
      while size and step < 0:
        _take(branches, places, size)
        size -= 1
        if places[size, 2] < min(left, widest):
          step = places[size, 2]
      # Or it goes on from less of the context.
      while step < 0 and size == 0 and depth > lookup_least and left > 0:
        depth = max(depth // 2, np.int64(lookup_least))
        node = _locate(t, patterns, stop - depth, stop)
        child, total = _likeliest(t, node, depth)
        if child and _num_requests(t, child) / (total + smoothing) < least:
          continue
        while child:
          token = t.store[t.nodes[child, _POSITION] + depth]
          chance = _num_requests(t, child) / (total + smoothing)
          for other in range(path):
            if output[q, other, 0] == token:
              chance = -1.0
          if chance >= least:
            size = _offer(branches, places, size, chance, child, path, none, token)
          child = t.nodes[child, _NEXT] if depth == _depth(t, node) else np.int32(0)
        if size:
          _take(branches, places, size)
          size -= 1
          step = none
      if step < 0:
        break
      chance, other = branches[size], places[size, 1]
      node = np.int32(places[size, 0])
      output[q, path, :step] = output[q, other, :step]
      output[q, path, step] = places[size, 3]
      scores[q] += chance
      step += 1
    if path:
      match_lengths[q] = matched
