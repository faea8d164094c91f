"""How alike lengths are within groups, which decides whether estimates are worth following."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from seerjax.rollout.buffer import Group, Item, State

# Groups, by arrival, whose lengths are compared: enough for a small error, few enough that what
# compares all pairs of them costs nothing.
NUM_COMPARED = 64

# Below these, likeness is not judged.
_FEWEST_FINISHED = 12
_FEWEST_GROUPS = 4
_FEWEST_KNOWN = 20  # Pairs of orders, for each member of a group.

# What finishes first is shorter than its like: two of a group that are both among the first tenth
# agree more than whole lengths do. Of normal logarithms of a share 0.6 between groups, pairs seem
# 0.75 alike when a tenth has finished, 0.59 at three tenths, 0.48 at half, 0.42 in the end.
_EARLY = 0.7


class Likeness(NamedTuple):
  """How alike lengths are within groups.

  Attributes:
    correlation: Kendall's, in [-1, 1]; 0 where nothing is known.
    error: its standard error, from leaving out one group after the other.
    num_known: pairs of known orders that it is the mean of.
  """

  correlation: float
  error: float
  num_known: int


def rank_correlation(lengths: np.ndarray, finished: np.ndarray) -> Likeness:
  """Returns Kendall's correlation of lengths within groups, some of which are only bounds so far.

  Two groups and two places in them agree if the members at the one place stand in the same order as
  those at the other. Only those count whose two orders are both known: the shorter has finished, at
  less than the longer has now. The same bits on every machine: integers, and sums that are rounded
  once.

  Args:
    lengths: i64[g, n] generated tokens.
    finished: bool[g, n]; where False, the length is a lower bound, and 0 where there is no member.
  """
  is_less = (lengths[:, None] < lengths[None]) & finished[:, None]  # [one group, other, place]
  order = is_less.astype(np.int64) - is_less.swapaxes(0, 1)
  total, known = order.sum(2), np.abs(order).sum(2)
  # Of n signs with sum s, the products of all pairs sum up to (s^2 - n) / 2.
  agreed, pairs = (total**2 - known) // 2, (known**2 - known) // 2  # By one group and the other.
  all_agreed, all_pairs = int(agreed.sum()) // 2, int(pairs.sum()) // 2
  if not all_pairs:
    return Likeness(0.0, 0.0, 0)
  without = (all_agreed - agreed.sum(1)) / np.maximum(all_pairs - pairs.sum(1), 1)
  count = len(without)
  mean = math.fsum(without) / count
  variance = (count - 1) / count * math.fsum((without - mean) ** 2)
  return Likeness(all_agreed / all_pairs, math.sqrt(variance), all_pairs)


class GroupLikeness:
  """How alike lengths are within the groups that arrived first.

  These run by arrival until it is known, so that which of them have finished follows from their
  lengths alone, and not from an order by estimates, which would look like likeness.
  """

  def __init__(self):
    self._groups: dict[int, Group] = {}
    self._num_finished = 0
    self._next = _FEWEST_FINISHED  # Measure when so many have finished.

  def update(self, item: Item) -> None:
    if item.group.index < NUM_COMPARED:
      self._groups[item.group.index] = item.group
      self._num_finished += item.state is State.FINISHED

  def is_at_least(self, least: float) -> bool:
    """Returns whether the correlation is surely so much; measured now and then, otherwise False."""
    if self._num_finished < self._next:
      return False
    self._next = max(self._num_finished * 115 // 100, self._num_finished + 1)
    begun = [
      g.members for g in self._groups.values() if sum(m.generated > 0 for m in g.members) > 1
    ]
    size = max(map(len, begun), default=0)
    lengths = np.zeros((len(begun), size), int)
    finished = np.zeros((len(begun), size), bool)
    for group, members in enumerate(begun):
      lengths[group, : len(members)] = [item.generated for item in members]
      finished[group, : len(members)] = [item.state is State.FINISHED for item in members]
    found = rank_correlation(lengths, finished)
    if len(begun) < _FEWEST_GROUPS or found.num_known < _FEWEST_KNOWN * size:
      return False
    running = 1 - int(finished.sum()) / int((lengths > 0).sum())
    early = _EARLY * running * running * running
    error = found.error + 1 / len(begun)  # Of a few groups the first says little.
    return found.correlation - error >= least + (1 - least) * early
