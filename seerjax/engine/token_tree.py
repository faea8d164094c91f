"""Paths of drafted tokens, merged into a tree: what they share stands in it once.

    paths    (5, 6, 7)  (5, 8)  (5, 6, 9)        the first the likeliest

    last token - 5 - 6 - 7        branch of the last token's first child, and so on
                  \\   \\- 9
                   \\- 8

Nodes stand in the order in which the paths meet them, so that parents precede their children and
any first nodes of a tree are a tree: what there is no room for is cut at the end, leaf by leaf. A
first child goes on with its parent's branch, any other begins a branch of its own; a branch is a
segment of a step, and ends in a leaf.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
import itertools
from typing import NamedTuple


class Node(NamedTuple):
  """One drafted token of a tree.

  Attributes:
    token: its id.
    parent: the node before it, -1 for the last token that was said.
    depth: 1 behind the last token, and so on.
    branch: in which it is computed; 0 begins behind the last token.
    is_first: whether it is its parent's first child.
  """

  token: int
  parent: int
  depth: int
  branch: int
  is_first: bool


class Branch(NamedTuple):
  """The path to one leaf.

  Attributes:
    tokens: from the first drafted one to the leaf.
    rows: of each of them, where it is computed: 0 is the last token, then come the branches' own
      tokens, one branch behind the other.
    num_shared: how many of the first tokens belong to earlier branches; the rest is its own.
  """

  tokens: tuple[int, ...]
  rows: tuple[int, ...]
  num_shared: int


def merge(paths: Iterable[Sequence[int]], max_depth: int) -> list[Node]:
  """Returns the nodes of a tree that holds every path as far as `max_depth` tokens."""
  nodes: list[Node] = []
  children: dict[tuple[int, int], int] = {}
  has_child: set[int] = set()
  num_branches = 1
  for path in paths:
    at = -1
    for token in itertools.islice(path, max(max_depth, 0)):
      child = children.get((at, token))
      if child is None:
        is_first = at not in has_child
        has_child.add(at)
        branch = 0 if at < 0 else nodes[at].branch
        if not is_first:
          branch, num_branches = num_branches, num_branches + 1
        depth = 1 if at < 0 else nodes[at].depth + 1
        children[at, token] = child = len(nodes)
        nodes.append(Node(token, at, depth, branch, is_first))
      at = child
  return nodes


def branches(nodes: Sequence[Node]) -> list[Branch]:
  """Returns the path to each leaf, in the order of branches."""
  if not nodes:
    return []
  by_branch: list[list[int]] = [[] for _ in range(1 + max(node.branch for node in nodes))]
  for index, node in enumerate(nodes):
    by_branch[node.branch].append(index)
  rows = dict(zip(itertools.chain(*by_branch), itertools.count(1)))
  found: list[Branch] = []
  for own in by_branch:
    begin, shared = nodes[own[0]], Branch((), (), 0)
    if begin.parent >= 0:
      shared = found[nodes[begin.parent].branch]
    before = begin.depth - 1
    found.append(
      Branch(
        shared.tokens[:before] + tuple(nodes[index].token for index in own),
        shared.rows[:before] + tuple(rows[index] for index in own),
        before,
      )
    )
  return found
