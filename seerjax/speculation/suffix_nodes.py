"""Arrays of a suffix tree, and the compiled functions that find and link its nodes.

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
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from seerjax import compiled

DEPTH = 64  # Maximum length of a stored string.
ROW = 256  # Number of strings that start in one row of the store.
WIDTH = ROW + DEPTH - 1
UNWRITTEN = -1  # Marks positions of the store without a token.
WORD = 32  # Request bits per number of a node.

# Columns of a node. Nodes are numbered from the root, 0, which also means "none". From BITS on, one
# bit per request. SHAPE is depth + HASHED + ends << ENDS; ends: number of texts that end here.
POSITION, PARENT, TOKEN, COUNT, CHILD, NEXT, PREVIOUS, SHAPE = range(8)
SUM, _CHAIN, BITS = 8, 9, 10  # Sum of the children's requests; next node of a hash bucket.
_DEPTH_BITS, HASHED, ENDS = 127, 128, 8
# With this many children or more, they are found by the hash table; fewer are scanned.
MANY = 8
# Columns of a request: number of tokens, first and last row, and the first string of its end that
# also occurs in another text; earlier ones are open leaves, which grow without being touched.
LENGTH, FIRST_ROW, LAST_ROW, FIRST_SHARED = range(4)
# Columns of a row of the store: next and previous row, owner, and the row's number in its text.
AFTER, BEFORE, OWNER, NUMBER = range(4)
# Numbers of a tree: nodes ever created, first free node, nodes in use, rows in use.
MADE, FREE, LIVE, ROWS = range(4)


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
def bare_arrays(t):
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
def add_hashed(t, node):
  bucket = _bucket(t, t.nodes[node, PARENT], t.nodes[node, TOKEN])
  t.nodes[node, _CHAIN] = t.heads[bucket]
  t.heads[bucket] = node


@compiled.inlined
def drop_hashed(t, node):
  bucket = _bucket(t, t.nodes[node, PARENT], t.nodes[node, TOKEN])
  at = t.heads[bucket]
  if at == node:
    t.heads[bucket] = t.nodes[node, _CHAIN]
    return
  while t.nodes[at, _CHAIN] != node:
    at = t.nodes[at, _CHAIN]
  t.nodes[at, _CHAIN] = t.nodes[node, _CHAIN]


@compiled.inlined
def is_hashed(t, node):
  return t.nodes[node, SHAPE] & HASHED != 0


@compiled.function
def hash_again(t, made):
  t = bare_arrays(t)
  for node in range(1, made):
    # Free nodes have depth 0.
    if t.nodes[node, SHAPE] and is_hashed(t, t.nodes[node, PARENT]):
      add_hashed(t, np.int32(node))


@compiled.inlined
def depth_of(t, node):
  return np.int64(t.nodes[node, SHAPE] & _DEPTH_BITS)


@compiled.inlined
def child_of(t, parent, token):
  """Returns the child of `parent` along the edge that begins with `token`, or 0."""
  # The most likely child is first, and most nodes have few. The root's children are not listed.
  node = t.nodes[parent, CHILD]
  if not is_hashed(t, parent):
    while node and t.nodes[node, TOKEN] != token:
      node = t.nodes[node, NEXT]
    return node
  if node and t.nodes[node, TOKEN] == token:
    return node
  node = t.heads[_bucket(t, parent, token)]
  while node and (t.nodes[node, TOKEN] != token or t.nodes[node, PARENT] != parent):
    node = t.nodes[node, _CHAIN]
  return node


@compiled.inlined
def num_requests(t, node):
  total = np.int64(0)
  for word in range(BITS, t.nodes.shape[1]):
    bits = np.uint32(t.nodes[node, word])
    bits -= (bits >> np.uint32(1)) & np.uint32(0x55555555)
    bits = (bits & np.uint32(0x33333333)) + ((bits >> np.uint32(2)) & np.uint32(0x33333333))
    bits = (bits + (bits >> np.uint32(4))) & np.uint32(0x0F0F0F0F)
    total += np.int64(np.uint32(bits * np.uint32(0x01010101)) >> np.uint32(24))
  return total


@compiled.inlined
def is_before(t, node, other):
  """Whether `node` is the more likely of two siblings; a total order."""
  one, two = num_requests(t, node), num_requests(t, other)
  if one != two:
    return one > two
  one, two = np.int64(t.nodes[node, COUNT]), np.int64(t.nodes[other, COUNT])
  if one != two:
    return one > two
  return t.nodes[node, TOKEN] < t.nodes[other, TOKEN]


@compiled.inlined
def unlist(t, node):
  """Removes a node from its parent's list of children."""
  before, after = t.nodes[node, PREVIOUS], t.nodes[node, NEXT]
  if before:
    t.nodes[before, NEXT] = after
  else:
    t.nodes[t.nodes[node, PARENT], CHILD] = after
  if after:
    t.nodes[after, PREVIOUS] = before


@compiled.inlined
def list_first(t, node):
  """Inserts an unlisted node as the first child of its parent."""
  parent = t.nodes[node, PARENT]
  first = t.nodes[parent, CHILD]
  t.nodes[node, PREVIOUS] = 0
  t.nodes[node, NEXT] = first
  if first:
    t.nodes[first, PREVIOUS] = node
  t.nodes[parent, CHILD] = node


@compiled.inlined
def locate(t, tokens, start, stop):
  """Returns the node at the lower end of the edge on which a string ends, or -1 for no match."""
  node, depth, length = np.int32(0), np.int64(0), stop - start
  while depth < length:
    node = child_of(t, node, tokens[start + depth])
    if node == 0:
      return np.int32(-1)
    position = t.nodes[node, POSITION]
    bottom = min(depth_of(t, node), length)
    depth += 1
    while depth < bottom:
      if t.store[position + depth] != tokens[start + depth]:
        return np.int32(-1)
      depth += 1
  return node
