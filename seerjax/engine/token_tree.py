"""Merges drafted paths into a tree in which shared tokens occur once.

    paths    (5, 6, 7)  (5, 8)  (5, 6, 9)        the likeliest first

    last token - 5 - 6 - 7        branch 0, the path of first children
                 5 - 8            branch 1
                     6 - 9        branch 2

Nodes are in the order in which the paths first reach them, so parents precede their children and
any prefix of the node list is a tree: if room is lacking, it is cut at the end, leaf by leaf. A
first child continues its parent's branch; any other child starts a new branch. A branch is a
segment of a step, and ends in a leaf.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Node(NamedTuple):
  """One drafted token of a tree.

  Attributes:
    token: the token id.
    parent: index of the parent node, -1 for the last sampled token.
    depth: distance from the last sampled token, from 1.
    branch: index of its branch; branch 0 starts at the last sampled token.
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
    tokens: tokens from the first drafted one to the leaf.
    rows: row of each token: row 0 is the last sampled token, followed by the branches' own tokens,
      branch after branch.
    num_shared: number of leading tokens that belong to earlier branches; the rest is its own.
  """

  tokens: tuple[int, ...]
  rows: tuple[int, ...]
  num_shared: int


def merge(paths: Iterable[Sequence[int]], max_depth: int) -> list[Node]:
  """Returns the nodes of a tree that contains every path up to `max_depth` tokens."""
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
