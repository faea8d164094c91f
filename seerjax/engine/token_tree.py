"""Paths of drafted tokens, merged into a tree: what they share stands in it once.

    paths    (5, 6, 7)  (5, 8)  (5, 6, 9)        the first the likeliest

    last token - 5 - 6 - 7        branch 0, the path of first children
                 5 - 8            branch 1
                     6 - 9        branch 2

Nodes stand in the order in which the paths meet them, so that parents precede their children and
any first nodes of a tree are a tree: what there is no room for is cut at the end, leaf by leaf. A
first child goes on with its parent's branch, any other begins a branch of its own; a branch is a
segment of a step, and ends in a leaf.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
    parent, branch = -1, 0
    for depth, token in enumerate(path[: max(max_depth, 0)], 1):
      child = children.get((parent, token))
      if child is None:
        child = children[parent, token] = len(nodes)
        is_first = parent not in has_child
        has_child.add(parent)
        if not is_first:
          branch, num_branches = num_branches, num_branches + 1
        nodes.append(Node(token, parent, depth, branch, is_first))
      else:
        branch = nodes[child].branch
      parent = child
  return nodes


def branches(nodes: Sequence[Node]) -> list[Branch]:
  """Returns the path to each leaf, in the order of branches."""
  by_branch: list[list[Node]] = []
  for node in nodes:
    if node.branch == len(by_branch):
      by_branch.append([])
    by_branch[node.branch].append(node)
  found: list[Branch] = []
  row = 1
  for own in by_branch:
    begin, shared = own[0], Branch((), (), 0)
    if begin.parent >= 0:
      shared = found[nodes[begin.parent].branch]
    num_shared = begin.depth - 1
    tokens = shared.tokens[:num_shared] + tuple([node.token for node in own])
    rows = shared.rows[:num_shared] + tuple(range(row, row + len(own)))
    found.append(Branch(tokens, rows, num_shared))
    row += len(own)
  return found
