"""The choice of a row's experts from its logits (`ops.routing`).

Sums go over experts in ascending id. Of equal scores, the expert with the lower id is chosen.
"""

from __future__ import annotations

import numpy as np

from seerjax.backends.native import vectors
from seerjax.backends.native.numbers import exp, f32, jit
from seerjax.backends.native.pointers import floats, integers
from seerjax.ops import routing

# Numbers of the scorings.
SCORINGS: dict[str, int] = {"softmax": 0, "softmax_of_chosen": 1, "sigmoid": 2}
_OF_CHOSEN, _SIGMOID = np.int64(1), np.int64(2)
_FREE, _TAKEN, _BARRED = np.int32(0), np.int32(1), np.int32(2)
_LOWEST = f32(-np.inf)
_SMALLEST_SUM = f32(routing.SMALLEST_SUM)


@jit
def _softmax(values, count):
  """Replaces floats at an address by their softmax."""
  x, most = floats(values), vectors.maximum_of(values, values, count)
  for i in range(count):  # Vectors, apart from the sum, which has a fixed order.
    x[i] = exp(x[i] - most)
  total = f32(0.0)
  for i in range(count):
    total = total + x[i]
  for i in range(count):
    x[i] = x[i] / total


@jit
def _take_largest(values, marks, count, wanted, free):
  """Marks the `wanted` largest of the free values as taken; `free` is scratch f32[count].

  A value that is not a number is taken if it is the first free one.
  """
  x, mark, left = floats(values), integers(marks), floats(free)
  for i in range(count):
    left[i] = x[i] if mark[i] == _FREE else _LOWEST
  first = np.int64(0)
  for _ in range(wanted):
    while mark[first] != _FREE:
      first += 1
    best = first
    if left[first] == left[first]:
      most = vectors.maximum_of(free, free, count)
      while mark[best] != _FREE or left[best] != most:
        best += 1
    mark[best], left[best] = _TAKEN, _LOWEST


@jit
def _bar_groups(scores, marks, count, groups, chosen_groups, sums, group_marks):
  """Bars all experts but those of the groups with the largest sums of their two best scores."""
  x, mark, total, own = floats(scores), integers(marks), floats(sums), integers(group_marks)
  size = count // groups
  for group in range(groups):
    first, second = x[group * size], x[group * size + 1]
    if second > first:
      first, second = second, first
    for i in range(group * size + 2, (group + 1) * size):
      if x[i] > first:
        first, second = x[i], first
      elif x[i] > second:
        second = x[i]
    total[group] = first + second
    own[group] = _FREE
  _take_largest(sums, group_marks, groups, chosen_groups, group_marks + 4 * groups)
  for i in range(count):
    if own[i // size] != _TAKEN:
      mark[i] = _BARRED


@jit
def choose(
  logits, correction, has_correction, scoring, count, chosen, groups, chosen_groups,
  is_renormalised, scale, scratch, ids, weights,
):  # fmt: skip
  """Writes a row's experts i32[chosen], ascending, and their weights f32[chosen].

  Args:
    logits (address): f32[count]; replaced by the scores.
    correction (address): f32[count], added to the scores for the choice if `has_correction`.
    scoring (int): one of `SCORINGS`.
    scratch (address): f32[4, count].
  """
  if scoring == _SIGMOID:
    x = floats(logits)
    for i in range(count):
      x[i] = f32(1.0) / (f32(1.0) + exp(-x[i]))
  elif scoring != _OF_CHOSEN:
    _softmax(logits, count)
  scores, marks = floats(logits), integers(scratch)
  for i in range(count):
    marks[i] = _FREE
  for_choice = logits
  if has_correction:
    for_choice = scratch + 4 * count
    corrected, added = floats(for_choice), floats(correction)
    for i in range(count):
      corrected[i] = scores[i] + added[i]
  if groups > 1:
    _bar_groups(
      for_choice, scratch, count, groups, chosen_groups, scratch + 8 * count, scratch + 12 * count
    )
  _take_largest(for_choice, scratch, count, chosen, scratch + 8 * count)
  own, to = integers(ids), floats(weights)
  place = np.int64(0)
  for i in range(count):
    if marks[i] == _TAKEN:
      own[place] = np.int32(i)
      to[place] = scores[i]
      place += 1
  if scoring == _OF_CHOSEN:
    _softmax(weights, chosen)
  if is_renormalised:
    total = f32(0.0)
    for i in range(chosen):
      total = total + to[i]
    for i in range(chosen):
      to[i] = to[i] / (total + _SMALLEST_SUM)
  for i in range(chosen):
    to[i] = to[i] * scale


@jit
def choose_gradient(
  logits, scoring, count, chosen, is_renormalised, scale, ids, of_weights, scratch, of_logits
):
  """Writes a row's gradient f32[count] of the logits, given that of the weights, f32[chosen].

  Args:
    logits (address): f32[count]; replaced by the scores.
    scratch (address): f32[2, chosen].
    of_logits (address): the rest as in `choose`.
  """
  scores, own, given, out = floats(logits), integers(ids), floats(of_weights), floats(of_logits)
  weights, parts = floats(scratch), floats(scratch + 4 * chosen)
  if scoring == _SIGMOID:
    for i in range(count):
      scores[i] = f32(1.0) / (f32(1.0) + exp(-scores[i]))
  elif scoring != _OF_CHOSEN:
    _softmax(logits, count)
  for i in range(chosen):
    weights[i] = scores[own[i]]
    parts[i] = given[i] * scale
  if scoring == _OF_CHOSEN:
    _softmax(scratch, chosen)
  if is_renormalised:
    total, along = _SMALLEST_SUM, f32(0.0)
    for i in range(chosen):
      total = total + weights[i]
      along = along + parts[i] * weights[i]
    along = along / (total * total)
    for i in range(chosen):
      parts[i] = parts[i] / total - along
  along = f32(0.0)
  for i in range(chosen):
    along = along + parts[i] * weights[i]
  for i in range(count):  # Of all experts, a softmax moves every one.
    out[i] = f32(0.0)
    if scoring != _SIGMOID and scoring != _OF_CHOSEN:
      out[i] = -scores[i] * along
  for i in range(chosen):
    if scoring == _SIGMOID:
      out[own[i]] = parts[i] * (weights[i] * (f32(1.0) - weights[i]))
    else:
      out[own[i]] = weights[i] * (parts[i] - along)
