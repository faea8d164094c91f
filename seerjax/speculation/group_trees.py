"""Suffix trees of many groups; each group drafts from its own texts.

Source: Seer (arXiv 2511.14617, table 5). No clock, no JAX.
"""

from __future__ import annotations

from collections.abc import Sequence
import itertools

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


class GroupTrees:
  """Suffix trees by group."""

  def __init__(self):
    self._trees: dict[str, SuffixTree] = {}
    # Updated incrementally: a bounded drafter reads it often, and there may be thousands of groups.
    self._bytes: dict[str, int] = {}
    self._num_bytes = 0

  @property
  def group_ids(self) -> tuple[str, ...]:
    """All groups."""
    return tuple(self._trees)

  @property
  def num_bytes(self) -> int:
    """Number of allocated bytes."""
    return self._num_bytes

  def tree(self, group_id: str) -> SuffixTree:
    """Returns a group's tree, for reading only.

    Raises:
      ValueError: if there is no such group.
    """
    if group_id not in self._trees:
      raise ValueError(
        f"group {group_id!r}: got an unknown group, expected one of {len(self._trees)} registered"
        " groups; register it first."
      )
    return self._trees[group_id]

  def register_group(self, group_id: str) -> None:
    """Adds a group; no effect if it exists."""
    if group_id not in self._trees:
      self._trees[group_id] = SuffixTree()
      self._weigh(group_id)

  def drop_group(self, group_id: str) -> None:
    """Drops a group.

    Raises:
      ValueError: if there is no such group.
    """
    self.tree(group_id)
    self._num_bytes -= self._bytes.pop(group_id)
    del self._trees[group_id]

  def append(self, group_id: str, updates: Sequence[Update]) -> int:
    """Applies `SuffixTree.append_many` to a group; returns how many tokens were new."""
    added = self.tree(group_id).append_many(updates)
    self._weigh(group_id)
    return added

  def remove_request(self, group_id: str, request_id: str) -> None:
    """Applies `SuffixTree.remove` to a request of a group."""
    self.tree(group_id).remove(request_id)
    self._weigh(group_id)

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
    """Drafts for b requests in one call, into buffers of the caller.

    Args:
      group_ids: group of each request; adjacent requests of one group share a call.
      buffer_offsets: i64[b + 1], bounds of each context in `pattern_buffer`.
      pattern_buffer: i32[n], contexts, newest token last; the last `DEPTH` tokens are enough.
      output_buffer: i32[b, top_k, max_spec_tokens], overwritten; see `Drafts.num_tokens`.
      speculation_args: draft settings.
      limits: i32[b, 2], maximum tokens of a path and of all paths together; by default
        `max_spec_tokens` per path.
      request_ids: for each context, the request with a text that ends in it, or None. The tree
        knows the match at the end of a text, so that no lookup is needed.

    Raises:
      ValueError: for invalid buffers or settings, or an unknown group or request.
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
          f" {dtype}{list(shape)} in C order; allocate a new buffer."
        )
    bounds = buffer_offsets.tolist()
    if bounds[0] < 0 or bounds[-1] > pattern_buffer.size or bounds != sorted(bounds):
      raise ValueError(
        f"batch_speculate: got buffer_offsets from {bounds[0]} to {bounds[-1]}, expected ascending"
        f" offsets within the {pattern_buffer.size} tokens of pattern_buffer; recompute them."
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
