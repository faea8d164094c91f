"""Similarity of lengths within groups, which determines whether length estimates are useful."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from seerjax.rollout.buffer import Group, Item, State

# Number of groups to compare, by arrival: enough for a small error, few enough for comparing all
# pairs cheaply.
NUM_COMPARED = 64

# Minimum data for judging similarity.
_FEWEST_FINISHED = 12
_FEWEST_GROUPS = 4
_FEWEST_KNOWN = 20  # Pairs of known orders, per member of a group.

# Early results overestimate similarity: what finishes first is shorter than its like, and two
# members of a group that are both in the first tenth agree more than whole lengths do. For
# lognormal lengths with a share of 0.6 between groups, the correlation of pairs seems to be 0.75
# when a tenth has finished, 0.59 at three tenths, 0.48 at half, and 0.42 at the end.
_EARLY = 0.7


class Likeness(NamedTuple):
  """Similarity of lengths within groups.

  Attributes:
    correlation: Kendall's correlation, in [-1, 1]; 0 if nothing is known.
    error: its standard error, by leaving out one group at a time.
    num_known: number of pairs of known orders in the mean.
  """

  correlation: float
  error: float
  num_known: int


def rank_correlation(lengths: np.ndarray, finished: np.ndarray) -> Likeness:
  """Returns Kendall's correlation of lengths within groups; some lengths may be lower bounds.

  Two groups and two member positions agree if the members at both positions are in the same order.
  A pair counts only if both orders are known: the shorter request has finished, with fewer tokens
  than the longer one has now. The result has the same bits on every machine, because it uses
  integers and sums that are rounded once.

  Args:
    lengths: i64[g, n], generated tokens.
    finished: bool[g, n]; where False, the length is a lower bound (0 for a missing member).
  """
  is_less = (lengths[:, None] < lengths[None]) & finished[:, None]  # [one group, other, place]
  order = is_less.astype(np.int64) - is_less.swapaxes(0, 1)
  total, known = order.sum(2), np.abs(order).sum(2)
  # For n signs with sum s, the products of all pairs add up to (s^2 - n) / 2.
  agreed, pairs = (total**2 - known) // 2, (known**2 - known) // 2  # [one group, other].
  all_agreed, all_pairs = int(agreed.sum()) // 2, int(pairs.sum()) // 2
  if not all_pairs:
    return Likeness(0.0, 0.0, 0)
  without = (all_agreed - agreed.sum(1)) / np.maximum(all_pairs - pairs.sum(1), 1)
  count = len(without)
  mean = math.fsum(without) / count
  variance = (count - 1) / count * math.fsum((without - mean) ** 2)
  return Likeness(all_agreed / all_pairs, math.sqrt(variance), all_pairs)


class GroupLikeness:
  """Measures the similarity of lengths in the groups that arrived first.

  Until the result is known, these groups run in order of arrival, so that which requests have
  finished depends on their lengths alone. An order by estimates would look like similarity.
  """

  def __init__(self):
    self._groups: dict[int, Group] = {}
    self._num_finished = 0
    self._next = _FEWEST_FINISHED  # Number of finished requests at which to measure next.

  def update(self, item: Item) -> None:
    if item.group.index < NUM_COMPARED:
      self._groups[item.group.index] = item.group
      self._num_finished += item.state is State.FINISHED

  def is_at_least(self, least: float) -> bool:
    """Returns whether the correlation is at least `least` with confidence.

    Measured only occasionally; False in between.
    """
    if self._num_finished < self._next:
      return False
    self._next = max(self._num_finished * 115 // 100, self._num_finished + 1)
    started = [
      g.members for g in self._groups.values() if sum(m.generated > 0 for m in g.members) > 1
    ]
    size = max(map(len, started), default=0)
    lengths = np.zeros((len(started), size), int)
    finished = np.zeros((len(started), size), bool)
    for group, members in enumerate(started):
      lengths[group, : len(members)] = [item.generated for item in members]
      finished[group, : len(members)] = [item.state is State.FINISHED for item in members]
    found = rank_correlation(lengths, finished)
    if len(started) < _FEWEST_GROUPS or found.num_known < _FEWEST_KNOWN * size:
      return False
    running = 1 - int(finished.sum()) / int((lengths > 0).sum())
    early = _EARLY * running * running * running
    error = found.error + 1 / len(started)  # The standard error is unreliable for few groups.
    return found.correlation - error >= least + (1 - least) * early
