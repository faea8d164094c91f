"""The suffix trees of many groups, and what a replica of a group lacks.

A process that has a group's texts appends to them and tells what a replica elsewhere lacks
(`delta`); the replica registers the group, takes that (`apply`) and drafts (`batch_speculate`). In
one process one object does all of it.

Source: Seer (arXiv 2511.14617, table 5) for groups and their deltas; replicas that need no order
are ours. No clock, no JAX.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import itertools
from typing import NamedTuple

import numpy as np

from seerjax.speculation.suffix_tree import (
  DEFAULT_ARGS,
  Drafts,
  SpeculationArgs,
  SuffixTree,
  Update,
  check_args,
  empty_drafts,
)

_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)

# What a replica holds of one group: request -> (birth, number of tokens).
Holdings = Mapping[str, tuple[int, int]]


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


class GroupTrees:
  """The trees of many groups."""

  def __init__(self):
    self._trees: dict[str, SuffixTree] = {}
    self._births: dict[str, dict[str, int]] = {}
    self._num_births: dict[str, int] = {}
    # Bytes are counted as they change: a drafter that keeps within bounds asks often, and there may
    # be thousands of groups.
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

  def register_group(self, group_id: str) -> None:
    """Makes a group known; nothing happens where it is known already."""
    if group_id not in self._trees:
      self._trees[group_id] = SuffixTree()
      self._births[group_id] = {}
      self._num_births[group_id] = 0
      self._weigh(group_id)

  def drop_group(self, group_id: str) -> None:
    """Forgets a group.

    Raises:
      ValueError: if there is no such group.
    """
    self.tree(group_id)
    self._num_bytes -= self._bytes.pop(group_id)
    del self._trees[group_id], self._births[group_id], self._num_births[group_id]

  def append(self, group_id: str, updates: Sequence[Update]) -> int:
    """Does `SuffixTree.append_many` for a group; returns how many tokens were new."""
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

  def holdings(self, group_id: str) -> Holdings:
    """Returns what is here of a group, for `delta` of another."""
    lengths = self.tree(group_id).lengths
    return {name: (birth, lengths[name]) for name, birth in self._births[group_id].items()}

  def delta(self, group_id: str, holdings: Holdings) -> GroupDelta:
    """Returns what a replica of a group lacks; a lost or repeated answer does no harm.

    Args:
      group_id: that is here.
      holdings: what the replica has: its own `holdings`.

    Raises:
      ValueError: for a group that is not here.
    """
    tree, births = self.tree(group_id), self._births[group_id]
    removed = tuple(name for name, (birth, _) in holdings.items() if births.get(name) != birth)
    updates = []
    for name, birth in births.items():
      is_new = name in removed or name not in holdings
      known = 0 if is_new else holdings[name][1]
      if is_new or known < tree.lengths[name]:
        updates.append(TextUpdate(name, birth, known, tree.tokens(name, known)))
    return GroupDelta(group_id, removed, tuple(updates))

  def apply(self, delta: GroupDelta) -> None:
    """Takes what another's `delta` gave; the group is registered here.

    Raises:
      ValueError: for a group that is not, or where tokens before those given are missing.
    """
    tree, births = self.tree(delta.group_id), self._births[delta.group_id]
    for name in delta.removed:
      if name in births:
        self.remove_request(delta.group_id, name)
    tree.append_many([(u.request_id, u.prev_token_count, u.new_tokens) for u in delta.updates])
    births.update({u.request_id: u.birth for u in delta.updates})
    self._weigh(delta.group_id)

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

  def _weigh(self, group_id: str) -> None:
    num_bytes = self._trees[group_id].num_bytes
    self._num_bytes += num_bytes - self._bytes.get(group_id, 0)
    self._bytes[group_id] = num_bytes
