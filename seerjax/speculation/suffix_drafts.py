"""Compiled functions that draft from a suffix tree.

For the storage see `speculation.suffix_nodes`; `SuffixTree.speculate` says what is drafted.
"""

from __future__ import annotations

import numpy as np

from seerjax import compiled
from seerjax.speculation import suffix_nodes as nodes

_USUAL = 4  # Match length to try first.
# Virtual requests with an unseen continuation: the probability of a continuation is (requests with
# it) / (sum of that over all continuations + SMOOTHING).
SMOOTHING = 0.25


@compiled.inlined
def _likeliest(t, node, depth):
  """Returns the node of the most likely next token (0 if none), and the sum of all weights."""
  if depth < nodes.depth_of(t, node):
    if t.store[t.nodes[node, nodes.POSITION] + depth] == nodes.UNWRITTEN:
      return np.int32(0), np.int64(0)
    return node, nodes.num_requests(t, node)
  return t.nodes[node, nodes.CHILD], np.int64(t.nodes[node, nodes.SUM])


@compiled.inlined
def _longest(t, tokens, stop, most):
  """Returns the longest string before `stop` that some text continues: (length, node)."""
  # If a string is continued, so are its suffixes. Most matches are short: start there.
  low, high, middle = np.int64(0), most, min(np.int64(_USUAL), most)
  found = np.int32(0)
  while low < high:
    node = nodes.locate(t, tokens, stop - middle, stop)
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
  """Returns the longest suffix of a text that some text continues: (length, node)."""
  length = t.requests[slot, nodes.LENGTH]
  # A suffix that occurs in no other text has no continuation.
  for index in range(max(t.requests[slot, nodes.FIRST_SHARED], length - most), length):
    node = t.tails[slot, index % nodes.DEPTH]
    if _likeliest(t, node, length - index)[0]:
      return length - index, node
  return np.int64(0), np.int32(0)


@compiled.inlined
def _rank(branches, places, a):
  """Returns the sort key of branches: probability descending; path, step, token ascending."""
  return -branches[a], places[a, 1], places[a, 2], places[a, 3]


@compiled.inlined
def _offer(branches, places, size, probability, node, path, step, token):
  """Adds a branch, replacing the worst if there is no room; returns the number of branches."""
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
  """Moves the best branch to the end of the list, which must not be empty."""
  best = np.int64(0)
  for a in range(1, size):
    if _rank(branches, places, a) < _rank(branches, places, best):
      best = a
  last = size - 1
  branches[best], branches[last] = branches[last], branches[best]
  for column in range(4):
    places[best, column], places[last, column] = places[last, column], places[best, column]


@compiled.inlined
def _walk(t, node, depth, probability, width, least, path, step, out, branches, places, size):
  """Follows the most likely tokens; returns (tokens, sum of probabilities, number of branches).

  Args:
    t, node, depth: start of the walk.
    probability: probability of the preceding tokens; the path ends below `least`.
    width: maximum tokens in `out`, which already has `step`.
    path: number of this path.
    out: i32[max_spec_tokens], receives tokens.
    branches, places, size: alternatives so far: f64[k] probabilities, and i64[k, 4] nodes, paths,
      steps and tokens; k = 0 keeps none.
  """
  score = 0.0
  while step < width:
    best, total = _likeliest(t, node, depth)
    if best == 0:
      break
    weight = nodes.num_requests(t, best)
    next_probability = probability * (weight / (total + SMOOTHING))
    if next_probability < least:
      break  # No other token is more likely, so there are no branches either.
    others = probability * ((total - weight) / (total + SMOOTHING))
    if branches.size and others >= least and depth == nodes.depth_of(t, node):
      child = t.nodes[best, nodes.NEXT]
      while child:
        chance = probability * (nodes.num_requests(t, child) / (total + SMOOTHING))
        if chance >= least:
          size = _offer(
            branches, places, size, chance, child, path, step, t.nodes[child, nodes.TOKEN]
          )
        child = t.nodes[child, nodes.NEXT]
    probability = next_probability
    out[step] = t.store[t.nodes[best, nodes.POSITION] + depth]
    node = best
    depth += 1
    step += 1
    score += probability
  return step, score, size


@compiled.function
def speculate(
  t,
  patterns,
  offsets,
  limits,
  owners,
  most_tokens,
  lookup_most,
  lookup_least,
  top_k,
  least,
  output,
  num_tokens,
  scores,
  match_lengths,
):
  """Drafts for every context; see `SuffixTree.speculate`."""
  t = nodes.bare_arrays(t)
  branches, places = np.empty(top_k - 1, np.float64), np.empty((top_k - 1, 4), np.int64)
  none = np.int64(0)  # A plain 0 would have its own type and cause another compilation.
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
    depth, chance, step, size, path = longest, 1.0, none, none, none
    while True:
      step, score, size = _walk(
        t,
        node,
        depth + step,
        chance,
        min(left, widest),
        least,
        path,
        step,
        output[q, path],
        branches,
        places,
        size,
      )
      if step == 0:
        break
      num_tokens[q, path] = step
      scores[q] += score
      left -= step
      path += 1
      if path == top_k:
        break
      # The next path branches off an earlier one at the next most likely token.
      step = np.int64(-1)
      while size and step < 0:
        _take(branches, places, size)
        size -= 1
        if places[size, 2] < min(left, widest):
          step = places[size, 2]
      # Or it continues a shorter match of the context.
      while step < 0 and size == 0 and depth > lookup_least and left > 0:
        depth = max(depth // 2, np.int64(lookup_least))
        node = nodes.locate(t, patterns, stop - depth, stop)
        child, total = _likeliest(t, node, depth)
        if child and nodes.num_requests(t, child) / (total + SMOOTHING) < least:
          continue
        while child:
          token = t.store[t.nodes[child, nodes.POSITION] + depth]
          chance = nodes.num_requests(t, child) / (total + SMOOTHING)
          for other in range(path):
            if output[q, other, 0] == token:
              chance = -1.0
          if chance >= least:
            size = _offer(branches, places, size, chance, child, path, none, token)
          child = t.nodes[child, nodes.NEXT] if depth == nodes.depth_of(t, node) else np.int32(0)
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
      match_lengths[q] = longest
