"""Compiled functions that add texts to a suffix tree, read and remove them.

For the storage see `speculation.suffix_nodes`.
"""

from __future__ import annotations

import numpy as np

from seerjax import compiled
from seerjax.speculation.suffix_nodes import (
  _AFTER,
  _BEFORE,
  _CHILD,
  _COUNT,
  _ENDS,
  _FIRST_ROW,
  _FIRST_SHARED,
  _FREE,
  _LAST_ROW,
  _LENGTH,
  _MADE,
  _MANY,
  _NEXT,
  _NUMBER,
  _OWNER,
  _PARENT,
  _POSITION,
  _PREVIOUS,
  _ROWS,
  _SUM,
  _TOKEN,
  _UNWRITTEN,
  BITS,
  DEPTH,
  HASHED,
  LIVE,
  ROW,
  SHAPE,
  WIDTH,
  WORD,
  _bare_arrays,
  _child,
  _depth,
  _hash,
  _is_before,
  _is_hashed,
  _list_first,
  _locate,
  _num_requests,
  _unhash,
  _unlist,
)


@compiled.inlined
def _count_one(t, parent, child, word, bit):
  """Counts another occurrence of the string to `child`; keeps the most likely child first."""
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
  """Returns a new node that is in no list."""
  node = t.numbers[_FREE]
  if node:
    t.numbers[_FREE] = t.nodes[node, _NEXT]
  else:
    node = t.numbers[_MADE]
    t.numbers[_MADE] = node + 1
  t.numbers[LIVE] += 1
  t.nodes[node, _POSITION] = position
  t.nodes[node, _PARENT] = parent
  t.nodes[node, _TOKEN] = token
  t.nodes[node, _CHILD] = 0
  t.nodes[node, SHAPE] = shape
  return np.int32(node)


@compiled.inlined
def _free(t, node):
  t.nodes[node, SHAPE] = 0
  t.nodes[node, _NEXT] = t.numbers[_FREE]
  t.numbers[_FREE] = node
  t.numbers[LIVE] -= 1


@compiled.inlined
def _leaf(t, parent, depth, position, word, bit):
  """Adds the string at `position` as a leaf; it differs from all others from `depth` on.

  The leaf is open: its edge extends to the end of the text, up to `DEPTH`.
  """
  node = _make(t, position, parent, t.store[position + depth], np.int64(DEPTH))
  t.nodes[node, _COUNT] = 1
  t.nodes[node, _SUM] = 0
  for column in range(BITS, t.nodes.shape[1]):
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
    t.nodes[parent, SHAPE] |= HASHED
    child = t.nodes[parent, _CHILD]
    while child:
      _hash(t, child)
      child = t.nodes[child, _NEXT]
  return node


@compiled.inlined
def _put(t, node, other):
  """Puts `node` in the place of `other` among its siblings."""
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
  """Removes a node at which nothing ends; its only child takes its place."""
  child = t.nodes[node, _CHILD]
  if _is_hashed(t, node):
    _unhash(t, child)
  _put(t, child, node)
  _free(t, node)


@compiled.inlined
def _split(t, child, depth):
  """Returns a new node at `depth` on the edge to `child`, with the counts of the edge."""
  position = np.int64(t.nodes[child, _POSITION])
  node = _make(t, position, np.int32(0), np.int32(0), depth)
  t.nodes[node, _COUNT] = t.nodes[child, _COUNT]
  for column in range(BITS, t.nodes.shape[1]):
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
  """Returns (length of agreement of a string with the edge to `child`, depth of the edge's end)."""
  other = t.nodes[child, _POSITION]
  bottom = _depth(t, child)
  at, stop = depth, min(bottom, target)
  while at < stop and t.store[other + at] == t.store[position + at]:
    at += 1
  if at < bottom and t.store[other + at] == _UNWRITTEN:
    # The text of an open leaf ends here, and another string reaches it: the end becomes a node.
    t.nodes[child, SHAPE] = at | 1 << _ENDS
    row = other // WIDTH
    owner = t.rows[row, _OWNER]
    index = t.rows[row, _NUMBER] * ROW + other % WIDTH
    t.requests[owner, _FIRST_SHARED] = min(t.requests[owner, _FIRST_SHARED], np.int64(index))
    bottom = at
  return at, bottom


@compiled.inlined
def _lengthen(t, node, depth, position, target, word, bit):
  """Extends the string that ends at `node` to `target` tokens; returns its new end.

  Args:
    t, node, depth: an explicit node, since a string ends there; 0 for a new string.
    position: position of the string in the store.
    target: its new length, at most `DEPTH`.
    word, bit: bit of the request.
  """
  if node:
    ends = t.nodes[node, SHAPE] >> _ENDS
    child = t.nodes[node, _CHILD]
    if child == 0 and ends == 1:
      # No other text contains this string any more.
      t.nodes[node, _POSITION] = position
      t.nodes[node, SHAPE] = DEPTH
      return node
    t.nodes[node, SHAPE] -= 1 << _ENDS
    if ends == 1 and t.nodes[child, _NEXT] == 0:
      # The node only marked this end: it slides along its edge, or is removed.
      at, bottom = _match(t, child, position, depth, target)
      if at < bottom:
        t.nodes[node, _POSITION] = position
        t.nodes[node, SHAPE] += at - depth
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
        # The parent counted this request at the removed node.
        t.nodes[node, word] |= bit
        _count_one(t, parent, node, word, bit)
  while depth < target:
    child = _child(t, node, t.store[position + depth])
    if child == 0:
      return _leaf(t, node, depth, position, word, bit)
    at, bottom = _match(t, child, position, depth + 1, target)
    if at < bottom:
      child = _split(t, child, at)
    _count_one(t, node, child, word, bit)
    node, depth = child, at
  if target < DEPTH:
    t.nodes[node, SHAPE] += 1 << _ENDS
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
      for at in range(row * WIDTH, (row + 1) * WIDTH):
        t.store[at] = _UNWRITTEN
      t.rows[row, _BEFORE] = before
      t.rows[row, _OWNER] = slot
      t.rows[row, _NUMBER] = length // ROW
      if length:
        t.rows[before, _AFTER] = row
      else:
        t.requests[slot, _FIRST_ROW] = row
    t.store[row * WIDTH + column] = tokens[place]
    if column < DEPTH - 1 and length >= ROW:
      t.store[t.rows[row, _BEFORE] * WIDTH + ROW + column] = tokens[place]
    length += 1
  t.requests[slot, _LAST_ROW] = row
  t.requests[slot, _LENGTH] = length


@compiled.function
def append(t, slots, offsets, tokens):
  """Appends to many texts; there must be room."""
  t = _bare_arrays(t)
  for place in range(slots.size):
    slot = slots[place]
    if offsets[place] == offsets[place + 1]:
      continue
    old, last = t.requests[slot, _LENGTH], t.requests[slot, _LAST_ROW]
    _write(t, slot, tokens, offsets[place], offsets[place + 1])
    length = t.requests[slot, _LENGTH]
    # Strings that occur in no other text grow by themselves; strings of DEPTH tokens are complete.
    first = max(t.requests[slot, _FIRST_SHARED], old - DEPTH + 1)
    if old == 0:
      row = t.requests[slot, _FIRST_ROW]
    elif first // ROW > t.rows[last, _NUMBER]:
      row = np.int64(t.rows[last, _AFTER])
    elif first // ROW < t.rows[last, _NUMBER]:
      row = np.int64(t.rows[last, _BEFORE])
    else:
      row = last
    word, bit = BITS + slot // WORD, np.int32(np.uint32(1) << np.uint32(slot % WORD))
    shared = length
    for index in range(first, length):
      if index > first and index % ROW == 0:
        row = np.int64(t.rows[row, _AFTER])
      node, depth = np.int32(0), np.int64(0)
      if index < old:
        node, depth = t.tails[slot, index % DEPTH], old - index
      target = min(np.int64(DEPTH), length - index)
      node = _lengthen(t, node, depth, row * WIDTH + index % ROW, target, word, bit)
      t.tails[slot, index % DEPTH] = node
      if shared == length and target < DEPTH and _depth(t, node) < DEPTH:
        shared = index
    t.requests[slot, _FIRST_SHARED] = shared


@compiled.function
def read(t, slot, start, stop):
  """Returns tokens `start` to `stop` of a text."""
  tokens = np.empty(stop - start, np.int32)
  row = t.requests[slot, _FIRST_ROW]
  for index in range(stop):
    if index and index % ROW == 0:
      row = np.int64(t.rows[row, _AFTER])
    if index >= start:
      tokens[index - start] = t.store[row * WIDTH + index % ROW]
  return tokens


@compiled.function
def remove(t, slot):
  """Removes all strings of a text from the counts, and nodes that are no longer needed."""
  t = _bare_arrays(t)
  word, kept = BITS + slot // WORD, ~np.int32(np.uint32(1) << np.uint32(slot % WORD))
  length = t.requests[slot, _LENGTH]
  row = t.requests[slot, _FIRST_ROW]
  for index in range(length):
    if index and index % ROW == 0:
      row = np.int64(t.rows[row, _AFTER])
    position = row * WIDTH + index % ROW
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
      # The rest belongs to this string alone.
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
      t.nodes[node, SHAPE] -= 1 << _ENDS
    child = t.nodes[node, _CHILD]
    is_needed = node == 0 or t.nodes[node, SHAPE] >> _ENDS > 0
    if not is_needed and child and t.nodes[child, _NEXT] == 0:
      t.nodes[child, word] &= kept  # Like the node's own bit, which its parent no longer counts.
      _dissolve(t, node)


@compiled.inlined
def _choose(t, parent):
  """Moves the most likely child to the front after counts decreased."""
  best = t.nodes[parent, _CHILD]
  child = best
  while child:
    if _is_before(t, child, best):
      best = child
    child = t.nodes[child, _NEXT]
  if best and t.nodes[best, _PREVIOUS]:
    _unlist(t, best)
    _list_first(t, best)


@compiled.function
def count(t, tokens):
  """Returns (occurrences, requests) of a string."""
  node = _locate(t, tokens, np.int64(0), np.int64(tokens.size))
  if node < 0:
    return np.int64(0), np.int64(0)
  return np.int64(t.nodes[node, _COUNT]), _num_requests(t, node)
