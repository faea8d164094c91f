"""Arrays of a suffix tree, and the compiled functions that read and write them.

For the data structure and its use see `speculation.suffix_tree`. Storage:

  nodes  i32[n, 10 + w]  one record per node, within one or two cache lines; the last w numbers are
                         bits: which requests contain this string
  heads  i32[h]          hash table from (parent, first token), for nodes with many children
  store  i32[r * 319]    texts in rows of ROW tokens, each followed by the next DEPTH - 1: any
                         string is contiguous, and an edge refers to an occurrence of its string

Appending costs far less than DEPTH steps per token: a string that occurs in no other text is an
open leaf with an edge to the end of its text, so growth does not touch it. Only the last few
strings of a text that also occur in other texts (as many as the match is long) follow their edges.
Drafting is cheap because the most likely child is first in its list and sums are stored.

All functions are in one file: numba's cache is valid while a function's file is unchanged, and does
not check the files of functions that are inlined into it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from seerjax import compiled

DEPTH = 64  # Maximum length of a stored string.
ROW = 256  # Number of strings that start in one row of the store.
WIDTH = ROW + DEPTH - 1
_USUAL = 4  # Match length to try first.
_UNWRITTEN = -1  # Marks positions of the store without a token.
# Virtual requests with an unseen continuation: the probability of a continuation is (requests with
# it) / (sum of that over all continuations + SMOOTHING).
SMOOTHING = 0.25
WORD = 32  # Request bits per number of a node.

# Columns of a node. Nodes are numbered from the root, 0, which also means "none". From BITS on, one
# bit per request. SHAPE is depth + HASHED + ends << _ENDS; ends: number of texts that end here.
_POSITION, _PARENT, _TOKEN, _COUNT, _CHILD, _NEXT, _PREVIOUS, SHAPE = range(8)
_SUM, _CHAIN, BITS = 8, 9, 10  # Sum of the children's requests; next node of a hash bucket.
_DEPTH_BITS, HASHED, _ENDS = 127, 128, 8
# With this many children or more, they are found by the hash table; fewer are scanned.
_MANY = 8
# Columns of a request: number of tokens, first and last row, and the first string of its end that
# also occurs in another text; earlier ones are open leaves, which grow without being touched.
_LENGTH, _FIRST_ROW, _LAST_ROW, _FIRST_SHARED = range(4)
# Columns of a row of the store: next and previous row, owner, and the row's number in its text.
_AFTER, _BEFORE, _OWNER, _NUMBER = range(4)
# Numbers of a tree: nodes ever created, first free node, nodes in use, rows in use.
_MADE, _FREE, LIVE, _ROWS = range(4)


class Arrays(NamedTuple):
  """A tree in the form for compiled functions. For shapes see the top of this file."""

  nodes: np.ndarray
  heads: np.ndarray
  store: np.ndarray  # i32[rows * WIDTH]
  rows: np.ndarray  # i32[rows, 4]
  requests: np.ndarray  # i64[slots, 4]
  tails: np.ndarray  # i32[slots, DEPTH], node of the end that starts at index % DEPTH.
  numbers: np.ndarray  # i64[4]


# Compiled functions. `t` is an `Arrays`, `slot` a request, a node an index of `t.nodes`.


@compiled.inlined
def _bare_arrays(t):
  # Reference counting took half the time of an append. The caller keeps the arrays alive.
  return Arrays(
    compiled.bare(t.nodes),
    compiled.bare(t.heads),
    compiled.bare(t.store),
    compiled.bare(t.rows),
    compiled.bare(t.requests),
    compiled.bare(t.tails),
    compiled.bare(t.numbers),
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
  return t.nodes[node, SHAPE] & HASHED != 0


@compiled.function
def hash_again(t, made):
  t = _bare_arrays(t)
  for node in range(1, made):
    # Free nodes have depth 0.
    if t.nodes[node, SHAPE] and _is_hashed(t, t.nodes[node, _PARENT]):
      _hash(t, np.int32(node))


@compiled.inlined
def _depth(t, node):
  return np.int64(t.nodes[node, SHAPE] & _DEPTH_BITS)


@compiled.inlined
def _child(t, parent, token):
  """Returns the child of `parent` along the edge that begins with `token`, or 0."""
  # The most likely child is first, and most nodes have few. The root's children are not listed.
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
  for word in range(BITS, t.nodes.shape[1]):
    bits = np.uint32(t.nodes[node, word])
    bits -= (bits >> np.uint32(1)) & np.uint32(0x55555555)
    bits = (bits & np.uint32(0x33333333)) + ((bits >> np.uint32(2)) & np.uint32(0x33333333))
    bits = (bits + (bits >> np.uint32(4))) & np.uint32(0x0F0F0F0F)
    total += np.int64(np.uint32(bits * np.uint32(0x01010101)) >> np.uint32(24))
  return total


@compiled.inlined
def _is_before(t, node, other):
  """Whether `node` is the more likely of two siblings; a total order."""
  one, two = _num_requests(t, node), _num_requests(t, other)
  if one != two:
    return one > two
  one, two = np.int64(t.nodes[node, _COUNT]), np.int64(t.nodes[other, _COUNT])
  if one != two:
    return one > two
  return t.nodes[node, _TOKEN] < t.nodes[other, _TOKEN]


@compiled.inlined
def _unlist(t, node):
  """Removes a node from its parent's list of children."""
  before, after = t.nodes[node, _PREVIOUS], t.nodes[node, _NEXT]
  if before:
    t.nodes[before, _NEXT] = after
  else:
    t.nodes[t.nodes[node, _PARENT], _CHILD] = after
  if after:
    t.nodes[after, _PREVIOUS] = before


@compiled.inlined
def _list_first(t, node):
  """Inserts an unlisted node as the first child of its parent."""
  parent = t.nodes[node, _PARENT]
  first = t.nodes[parent, _CHILD]
  t.nodes[node, _PREVIOUS] = 0
  t.nodes[node, _NEXT] = first
  if first:
    t.nodes[first, _PREVIOUS] = node
  t.nodes[parent, _CHILD] = node


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


@compiled.inlined
def _locate(t, tokens, start, stop):
  """Returns the node at the lower end of the edge on which a string ends, or -1 for no match."""
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
def count(t, tokens):
  """Returns (occurrences, requests) of a string."""
  node = _locate(t, tokens, np.int64(0), np.int64(tokens.size))
  if node < 0:
    return np.int64(0), np.int64(0)
  return np.int64(t.nodes[node, _COUNT]), _num_requests(t, node)


# Drafts.


@compiled.inlined
def _likeliest(t, node, depth):
  """Returns the node of the most likely next token (0 if none), and the sum of all weights."""
  if depth < _depth(t, node):
    if t.store[t.nodes[node, _POSITION] + depth] == _UNWRITTEN:
      return np.int32(0), np.int64(0)
    return node, _num_requests(t, node)
  return t.nodes[node, _CHILD], np.int64(t.nodes[node, _SUM])


@compiled.inlined
def _longest(t, tokens, stop, most):
  """Returns the longest string before `stop` that some text continues: (length, node)."""
  # If a string is continued, so are its suffixes. Most matches are short: start there.
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
  """Returns the longest suffix of a text that some text continues: (length, node)."""
  length = t.requests[slot, _LENGTH]
  # A suffix that occurs in no other text has no continuation.
  for index in range(max(t.requests[slot, _FIRST_SHARED], length - most), length):
    node = t.tails[slot, index % DEPTH]
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
    weight = _num_requests(t, best)
    next_probability = probability * (weight / (total + SMOOTHING))
    if next_probability < least:
      break  # No other token is more likely, so there are no branches either.
    others = probability * ((total - weight) / (total + SMOOTHING))
    if branches.size and others >= least and depth == _depth(t, node):
      child = t.nodes[best, _NEXT]
      while child:
        chance = probability * (_num_requests(t, child) / (total + SMOOTHING))
        if chance >= least:
          size = _offer(branches, places, size, chance, child, path, step, t.nodes[child, _TOKEN])
        child = t.nodes[child, _NEXT]
    probability = next_probability
    out[step] = t.store[t.nodes[best, _POSITION] + depth]
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
  t = _bare_arrays(t)
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
        node = _locate(t, patterns, stop - depth, stop)
        child, total = _likeliest(t, node, depth)
        if child and _num_requests(t, child) / (total + SMOOTHING) < least:
          continue
        while child:
          token = t.store[t.nodes[child, _POSITION] + depth]
          chance = _num_requests(t, child) / (total + SMOOTHING)
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
      match_lengths[q] = longest
