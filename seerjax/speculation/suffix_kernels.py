"""Compiled functions that add texts to a suffix tree, read and remove them.

For the storage see `speculation.suffix_nodes`.
"""

from __future__ import annotations

import numpy as np

from seerjax import compiled
from seerjax.speculation import suffix_nodes as nodes


@compiled.inlined
def _count_one(t, parent, child, word, bit):
  """Counts another occurrence of the string to `child`; keeps the most likely child first."""
  t.nodes[child, nodes.COUNT] += 1
  if not t.nodes[child, word] & bit:
    t.nodes[child, word] |= bit
    t.nodes[parent, nodes.SUM] += 1
  if parent and t.nodes[child, nodes.PREVIOUS]:
    if nodes.is_before(t, child, t.nodes[parent, nodes.CHILD]):
      nodes.unlist(t, child)
      nodes.list_first(t, child)


@compiled.inlined
def _make(t, position, parent, token, shape):
  """Returns a new node that is in no list."""
  node = t.numbers[nodes.FREE]
  if node:
    t.numbers[nodes.FREE] = t.nodes[node, nodes.NEXT]
  else:
    node = t.numbers[nodes.MADE]
    t.numbers[nodes.MADE] = node + 1
  t.numbers[nodes.LIVE] += 1
  t.nodes[node, nodes.POSITION] = position
  t.nodes[node, nodes.PARENT] = parent
  t.nodes[node, nodes.TOKEN] = token
  t.nodes[node, nodes.CHILD] = 0
  t.nodes[node, nodes.SHAPE] = shape
  return np.int32(node)


@compiled.inlined
def _free(t, node):
  t.nodes[node, nodes.SHAPE] = 0
  t.nodes[node, nodes.NEXT] = t.numbers[nodes.FREE]
  t.numbers[nodes.FREE] = node
  t.numbers[nodes.LIVE] -= 1


@compiled.inlined
def _leaf(t, parent, depth, position, word, bit):
  """Adds the string at `position` as a leaf; it differs from all others from `depth` on.

  The leaf is open: its edge extends to the end of the text, up to `DEPTH`.
  """
  node = _make(t, position, parent, t.store[position + depth], np.int64(nodes.DEPTH))
  t.nodes[node, nodes.COUNT] = 1
  t.nodes[node, nodes.SUM] = 0
  for column in range(nodes.BITS, t.nodes.shape[1]):
    t.nodes[node, column] = 0
  t.nodes[node, word] = bit
  t.nodes[parent, nodes.SUM] += 1
  if parent:
    first = t.nodes[parent, nodes.CHILD]
    if first == 0 or nodes.is_before(t, node, first):
      nodes.list_first(t, node)
    else:
      after = t.nodes[first, nodes.NEXT]
      t.nodes[node, nodes.PREVIOUS] = first
      t.nodes[node, nodes.NEXT] = after
      t.nodes[first, nodes.NEXT] = node
      if after:
        t.nodes[after, nodes.PREVIOUS] = node
  if nodes.is_hashed(t, parent):
    nodes.add_hashed(t, node)
    return node
  size = 0
  child = t.nodes[parent, nodes.CHILD]
  while child:
    size += 1
    child = t.nodes[child, nodes.NEXT]
  if size >= nodes.MANY:
    t.nodes[parent, nodes.SHAPE] |= nodes.HASHED
    child = t.nodes[parent, nodes.CHILD]
    while child:
      nodes.add_hashed(t, child)
      child = t.nodes[child, nodes.NEXT]
  return node


@compiled.inlined
def _put(t, node, other):
  """Puts `node` in the place of `other` among its siblings."""
  parent = t.nodes[other, nodes.PARENT]
  t.nodes[node, nodes.PARENT] = parent
  t.nodes[node, nodes.TOKEN] = t.nodes[other, nodes.TOKEN]
  if nodes.is_hashed(t, parent):
    nodes.drop_hashed(t, other)
    nodes.add_hashed(t, node)
  if parent:
    before, after = t.nodes[other, nodes.PREVIOUS], t.nodes[other, nodes.NEXT]
    t.nodes[node, nodes.PREVIOUS] = before
    t.nodes[node, nodes.NEXT] = after
    if before:
      t.nodes[before, nodes.NEXT] = node
    else:
      t.nodes[parent, nodes.CHILD] = node
    if after:
      t.nodes[after, nodes.PREVIOUS] = node


@compiled.inlined
def _dissolve(t, node):
  """Removes a node at which nothing ends; its only child takes its place."""
  child = t.nodes[node, nodes.CHILD]
  if nodes.is_hashed(t, node):
    nodes.drop_hashed(t, child)
  _put(t, child, node)
  _free(t, node)


@compiled.inlined
def _split(t, child, depth):
  """Returns a new node at `depth` on the edge to `child`, with the counts of the edge."""
  position = np.int64(t.nodes[child, nodes.POSITION])
  node = _make(t, position, np.int32(0), np.int32(0), depth)
  t.nodes[node, nodes.COUNT] = t.nodes[child, nodes.COUNT]
  for column in range(nodes.BITS, t.nodes.shape[1]):
    t.nodes[node, column] = t.nodes[child, column]
  t.nodes[node, nodes.SUM] = nodes.num_requests(t, child)
  _put(t, node, child)
  t.nodes[node, nodes.CHILD] = child
  t.nodes[child, nodes.PARENT] = node
  t.nodes[child, nodes.TOKEN] = t.store[position + depth]
  t.nodes[child, nodes.PREVIOUS] = 0
  t.nodes[child, nodes.NEXT] = 0
  return node


@compiled.inlined
def _match(t, child, position, depth, target):
  """Returns (length of agreement of a string with the edge to `child`, depth of the edge's end)."""
  other = t.nodes[child, nodes.POSITION]
  bottom = nodes.depth_of(t, child)
  at, stop = depth, min(bottom, target)
  while at < stop and t.store[other + at] == t.store[position + at]:
    at += 1
  if at < bottom and t.store[other + at] == nodes.UNWRITTEN:
    # The text of an open leaf ends here, and another string reaches it: the end becomes a node.
    t.nodes[child, nodes.SHAPE] = at | 1 << nodes.ENDS
    row = other // nodes.WIDTH
    owner = t.rows[row, nodes.OWNER]
    index = t.rows[row, nodes.NUMBER] * nodes.ROW + other % nodes.WIDTH
    t.requests[owner, nodes.FIRST_SHARED] = min(
      t.requests[owner, nodes.FIRST_SHARED], np.int64(index)
    )
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
    ends = t.nodes[node, nodes.SHAPE] >> nodes.ENDS
    child = t.nodes[node, nodes.CHILD]
    if child == 0 and ends == 1:
      # No other text contains this string any more.
      t.nodes[node, nodes.POSITION] = position
      t.nodes[node, nodes.SHAPE] = nodes.DEPTH
      return node
    t.nodes[node, nodes.SHAPE] -= 1 << nodes.ENDS
    if ends == 1 and t.nodes[child, nodes.NEXT] == 0:
      # The node only marked this end: it slides along its edge, or is removed.
      at, bottom = _match(t, child, position, depth, target)
      if at < bottom:
        t.nodes[node, nodes.POSITION] = position
        t.nodes[node, nodes.SHAPE] += at - depth
        if at > depth:
          is_hashed = nodes.is_hashed(t, node)
          if is_hashed:
            nodes.drop_hashed(t, child)
          t.nodes[child, nodes.TOKEN] = t.store[t.nodes[child, nodes.POSITION] + at]
          if is_hashed:
            nodes.add_hashed(t, child)
        depth = at
      else:
        parent = t.nodes[node, nodes.PARENT]
        _dissolve(t, node)
        node, depth = child, bottom
        # The parent counted this request at the removed node.
        t.nodes[node, word] |= bit
        _count_one(t, parent, node, word, bit)
  while depth < target:
    child = nodes.child_of(t, node, t.store[position + depth])
    if child == 0:
      return _leaf(t, node, depth, position, word, bit)
    at, bottom = _match(t, child, position, depth + 1, target)
    if at < bottom:
      child = _split(t, child, at)
    _count_one(t, node, child, word, bit)
    node, depth = child, at
  if target < nodes.DEPTH:
    t.nodes[node, nodes.SHAPE] += 1 << nodes.ENDS
  return node


@compiled.inlined
def _write(t, slot, tokens, start, stop):
  """Appends tokens to a text in the store."""
  length = t.requests[slot, nodes.LENGTH]
  row = t.requests[slot, nodes.LAST_ROW]
  for place in range(start, stop):
    column = length % nodes.ROW
    if column == 0:
      before = row
      row = t.numbers[nodes.ROWS]
      t.numbers[nodes.ROWS] += 1
      for at in range(row * nodes.WIDTH, (row + 1) * nodes.WIDTH):
        t.store[at] = nodes.UNWRITTEN
      t.rows[row, nodes.BEFORE] = before
      t.rows[row, nodes.OWNER] = slot
      t.rows[row, nodes.NUMBER] = length // nodes.ROW
      if length:
        t.rows[before, nodes.AFTER] = row
      else:
        t.requests[slot, nodes.FIRST_ROW] = row
    t.store[row * nodes.WIDTH + column] = tokens[place]
    if column < nodes.DEPTH - 1 and length >= nodes.ROW:
      t.store[t.rows[row, nodes.BEFORE] * nodes.WIDTH + nodes.ROW + column] = tokens[place]
    length += 1
  t.requests[slot, nodes.LAST_ROW] = row
  t.requests[slot, nodes.LENGTH] = length


@compiled.function
def append(t, slots, offsets, tokens):
  """Appends to many texts; there must be room."""
  t = nodes.bare_arrays(t)
  for place in range(slots.size):
    slot = slots[place]
    if offsets[place] == offsets[place + 1]:
      continue
    old, last = t.requests[slot, nodes.LENGTH], t.requests[slot, nodes.LAST_ROW]
    _write(t, slot, tokens, offsets[place], offsets[place + 1])
    length = t.requests[slot, nodes.LENGTH]
    # Strings that occur in no other text grow by themselves; strings of DEPTH tokens are complete.
    first = max(t.requests[slot, nodes.FIRST_SHARED], old - nodes.DEPTH + 1)
    if old == 0:
      row = t.requests[slot, nodes.FIRST_ROW]
    elif first // nodes.ROW > t.rows[last, nodes.NUMBER]:
      row = np.int64(t.rows[last, nodes.AFTER])
    elif first // nodes.ROW < t.rows[last, nodes.NUMBER]:
      row = np.int64(t.rows[last, nodes.BEFORE])
    else:
      row = last
    word, bit = (
      nodes.BITS + slot // nodes.WORD,
      np.int32(np.uint32(1) << np.uint32(slot % nodes.WORD)),
    )
    shared = length
    for index in range(first, length):
      if index > first and index % nodes.ROW == 0:
        row = np.int64(t.rows[row, nodes.AFTER])
      node, depth = np.int32(0), np.int64(0)
      if index < old:
        node, depth = t.tails[slot, index % nodes.DEPTH], old - index
      target = min(np.int64(nodes.DEPTH), length - index)
      node = _lengthen(t, node, depth, row * nodes.WIDTH + index % nodes.ROW, target, word, bit)
      t.tails[slot, index % nodes.DEPTH] = node
      if shared == length and target < nodes.DEPTH and nodes.depth_of(t, node) < nodes.DEPTH:
        shared = index
    t.requests[slot, nodes.FIRST_SHARED] = shared


@compiled.function
def read(t, slot, start, stop):
  """Returns tokens `start` to `stop` of a text."""
  tokens = np.empty(stop - start, np.int32)
  row = t.requests[slot, nodes.FIRST_ROW]
  for index in range(stop):
    if index and index % nodes.ROW == 0:
      row = np.int64(t.rows[row, nodes.AFTER])
    if index >= start:
      tokens[index - start] = t.store[row * nodes.WIDTH + index % nodes.ROW]
  return tokens


@compiled.function
def remove(t, slot):
  """Removes all strings of a text from the counts, and nodes that are no longer needed."""
  t = nodes.bare_arrays(t)
  word, kept = (
    nodes.BITS + slot // nodes.WORD,
    ~np.int32(np.uint32(1) << np.uint32(slot % nodes.WORD)),
  )
  length = t.requests[slot, nodes.LENGTH]
  row = t.requests[slot, nodes.FIRST_ROW]
  for index in range(length):
    if index and index % nodes.ROW == 0:
      row = np.int64(t.rows[row, nodes.AFTER])
    position = row * nodes.WIDTH + index % nodes.ROW
    target = min(np.int64(nodes.DEPTH), length - index)
    node, depth = np.int32(0), np.int64(0)
    while depth < target:
      child = nodes.child_of(t, node, t.store[position + depth])
      t.nodes[child, nodes.COUNT] -= 1
      if t.nodes[child, word] & ~kept:
        t.nodes[child, word] &= kept
        t.nodes[node, nodes.SUM] -= 1
      if t.nodes[child, nodes.COUNT] == 0:
        break
      if node and t.nodes[child, nodes.PREVIOUS] == 0:
        _choose(t, node)
      node, depth = child, nodes.depth_of(t, child)
    if depth < target:
      # The rest belongs to this string alone.
      child = nodes.child_of(t, node, t.store[position + depth])
      if node:
        nodes.unlist(t, child)
        _choose(t, node)
      while child:
        below = t.nodes[child, nodes.CHILD]
        if nodes.is_hashed(t, t.nodes[child, nodes.PARENT]):
          nodes.drop_hashed(t, child)
        _free(t, child)
        child = below
    elif target < nodes.DEPTH:
      t.nodes[node, nodes.SHAPE] -= 1 << nodes.ENDS
    child = t.nodes[node, nodes.CHILD]
    is_needed = node == 0 or t.nodes[node, nodes.SHAPE] >> nodes.ENDS > 0
    if not is_needed and child and t.nodes[child, nodes.NEXT] == 0:
      t.nodes[child, word] &= kept  # Like the node's own bit, which its parent no longer counts.
      _dissolve(t, node)


@compiled.inlined
def _choose(t, parent):
  """Moves the most likely child to the front after counts decreased."""
  best = t.nodes[parent, nodes.CHILD]
  child = best
  while child:
    if nodes.is_before(t, child, best):
      best = child
    child = t.nodes[child, nodes.NEXT]
  if best and t.nodes[best, nodes.PREVIOUS]:
    nodes.unlist(t, best)
    nodes.list_first(t, best)


@compiled.function
def count(t, tokens):
  """Returns (occurrences, requests) of a string."""
  node = nodes.locate(t, tokens, np.int64(0), np.int64(tokens.size))
  if node < 0:
    return np.int64(0), np.int64(0)
  return np.int64(t.nodes[node, nodes.COUNT]), nodes.num_requests(t, node)
