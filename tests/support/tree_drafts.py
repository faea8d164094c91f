"""Trees of drafted tokens, for drafters: shaping, filling, merging, and conversion to paths.

    comb     a main path with siblings of each of its tokens (as in Medusa and EAGLE)
    expand   every node of depth i has k_i children (SpecInfer's expansion <k1, k2, ...>)
    best     the nodes with the likeliest paths, of candidates by depth

Nodes are in descending order of likelihood, because the engine has rows, pages and key copies for a
limited number of nodes and keeps the first ones (`engine.token_tree`). `Tree.paths` gives the value
of `Drafter.draft`.

Sources: SpecInfer (arXiv 2305.09781), section 3; Medusa (arXiv 2401.10774); EAGLE-2 (arXiv
2406.16858): its dynamic trees keep the nodes of the highest products.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
import dataclasses
import heapq
import itertools
import math
from typing import Any, NamedTuple

import numpy as np

MAX_NODES = 4096  # Limit for one tree; a step has far fewer rows.


@dataclasses.dataclass(frozen=True, eq=False)
class Tree:
  """Drafted tokens; the root is the last accepted token and not a node.

  Attributes:
    tokens: i32[n], token ids.
    parents: i32[n], index of each node's parent, which precedes the node; -1 is the root.
  """

  tokens: np.ndarray
  parents: np.ndarray

  def __post_init__(self):
    tokens, parents = (_whole_numbers(name, vars(self)[name]) for name in ("tokens", "parents"))
    if tokens.shape != parents.shape:
      raise ValueError(
        f"Tree: got {len(tokens)} tokens and {len(parents)} parents, expected one parent of each;"
        " -1 is the root."
      )
    _require_order(parents)
    object.__setattr__(self, "tokens", tokens)
    object.__setattr__(self, "parents", parents)

  def __len__(self) -> int:
    return len(self.tokens)

  def depths(self) -> np.ndarray:
    """Returns i32[n], the distance of each node from the root; 1 for the root's children."""
    return _depths(self.parents)

  def paths(self) -> list[tuple[int, ...]]:
    """Returns paths from the root that visit the nodes in tree order, for `Drafter.draft`.

    A path ends where the next node is not a child of the path's last node, so there may be more
    paths than leaves.
    """
    tokens, parents = self.tokens.tolist(), self.parents.tolist()
    found: list[tuple[int, ...]] = []
    whole: list[tuple[int, ...]] = []  # The path to each node.
    for node, (token, parent) in enumerate(zip(tokens, parents)):
      whole.append((*(whole[parent] if parent >= 0 else ()), token))
      if node + 1 == len(parents) or parents[node + 1] != node:
        found.append(whole[node])
    return found


class Shape(NamedTuple):
  """A tree without tokens.

  Attributes:
    parents: i32[n], as `Tree.parents`.
    ranks: i32[n], the rank of each node among its parent's candidates; 0 is the likeliest.
  """

  parents: np.ndarray
  ranks: np.ndarray

  def filled(self, candidates: Any) -> Tree:
    """Returns the tree with `candidates[i - 1][r]` as the node of depth i and rank r.

    Args:
      candidates: i32[depth, k], token ids, independent of the preceding path.

    Raises:
      ValueError: if there are fewer candidates than the shape needs.
    """
    candidates = np.asarray(candidates)
    depths = _depths(self.parents)
    most = (int(depths.max(initial=0)), int(self.ranks.max(initial=-1)) + 1)
    if candidates.ndim != 2 or any(a < b for a, b in zip(candidates.shape, most)):
      raise ValueError(
        f"Shape.filled: got candidates of shape {candidates.shape}, expected [depth, k] of at least"
        f" {most}; draft more of them, or expand fewer."
      )
    return Tree(candidates[depths - 1, self.ranks], self.parents)


def comb(main: Sequence[int], siblings: Sequence[Sequence[int]] = ()) -> Tree:
  """Returns a main path, then siblings of its tokens, the first token's siblings first.

  Args:
    main: token ids.
    siblings: alternative ids for each place of `main`, or for its first places.

  Raises:
    ValueError: if siblings are given for more places than `main` has.
  """
  if len(siblings) > len(main):
    raise ValueError(
      f"comb: got siblings of {len(siblings)} places for a main path of {len(main)} tokens,"
      " expected at most one list for each; draft a longer main path."
    )
  tokens, parents = list(main), list(range(-1, len(main) - 1))
  for place, others in enumerate(siblings):
    tokens += others
    parents += [place - 1] * len(others)
  return Tree(np.asarray(tokens, np.int32), np.asarray(parents, np.int32))


def expand(widths: Sequence[int]) -> Shape:
  """Returns the tree with `widths[i]` children for every node of depth i, depth by depth.

  Args:
    widths: k1, k2, ..., each at least 1.

  Raises:
    ValueError: if `widths` is empty or not whole numbers of at least 1, or the tree is too large.
  """
  is_width = lambda k: isinstance(k, int | np.integer) and not isinstance(k, bool) and k >= 1
  if not len(widths) or not all(map(is_width, widths)):
    raise ValueError(
      f"expand: got the expansion <{', '.join(map(str, widths))}>, expected whole numbers from 1"
      " on, one a depth; leave out a depth that has no nodes."
    )
  count = sum(itertools.accumulate(map(int, widths), lambda a, b: a * b))
  if count > MAX_NODES:
    raise ValueError(
      f"expand: got the expansion <{', '.join(map(str, widths))}> of {count} nodes, expected at"
      f" most {MAX_NODES}; take fewer children, or best_first."
    )
  parents, ranks, above = [], [], [-1]
  for width in map(int, widths):
    first = len(parents)
    for node in above:
      parents += [node] * width
      ranks += range(width)
    above = range(first, len(parents))
  return Shape(np.asarray(parents, np.int32), np.asarray(ranks, np.int32))


def merge(trees: Iterable[Tree]) -> Tree:
  """Returns the tree of all paths of several trees, likeliest first; no trees give an empty one."""
  tokens: list[int] = []
  parents: list[int] = []
  children: dict[tuple[int, int], int] = {}
  for tree in trees:
    places = {-1: -1}
    for node, (token, parent) in enumerate(
      zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)
    ):
      key = (places[parent], token)
      if key not in children:
        children[key] = len(tokens)
        tokens.append(token)
        parents.append(places[parent])
      places[node] = children[key]
  return Tree(np.asarray(tokens, np.int32), np.asarray(parents, np.int32))


def best_first(scores: Any, budget: int) -> Shape:
  """Returns the nodes of the likeliest paths, in that order, of candidates by depth.

  Args:
    scores: f[depth, k], the log-probability of each candidate of a depth, independent of the
      preceding path; -inf is never taken.
    budget: maximum number of nodes, at least 1.

  Raises:
    ValueError: if scores are not log-probabilities, or the budget is less than 1.
  """
  scores = np.asarray(scores, np.float64)
  if scores.ndim != 2 or np.isnan(scores).any() or (scores > 0).any():
    raise ValueError(
      f"best_first: got scores of shape {scores.shape} from {scores.min(initial=0)} to"
      f" {scores.max(initial=0)}, expected log-probabilities [depth, k], none above 0 and none NaN;"
      " pass log_softmax of the draft's logits."
    )
  if not isinstance(budget, int | np.integer) or not 1 <= budget <= MAX_NODES:
    raise ValueError(
      f"best_first: got a budget of {budget} nodes, expected 1 to {MAX_NODES}; draft nothing"
      " instead of 0."
    )
  order = np.argsort(-scores, axis=1, kind="stable")
  # (-log-probability of the path, order of insertion, parent, depth from 0, rank at the depth).
  waiting: list[tuple[float, int, int, int, int]] = []
  numbers = itertools.count()

  def meet(before: float, parent: int, depth: int, place: int) -> None:
    if depth < len(scores) and place < scores.shape[1]:
      score = before - float(scores[depth, order[depth, place]])
      if math.isfinite(score):
        heapq.heappush(waiting, (score, next(numbers), parent, depth, place))

  meet(0.0, -1, 0, 0)
  parents, ranks = [], []
  before = {-1: 0.0}  # Log-probability of each node's path.
  while waiting and len(parents) < budget:
    score, _, parent, depth, place = heapq.heappop(waiting)
    node = len(parents)
    before[node] = score
    parents.append(parent)
    ranks.append(int(order[depth, place]))
    meet(before[parent], parent, depth, place + 1)
    meet(score, node, depth + 1, 0)
  return Shape(np.asarray(parents, np.int32), np.asarray(ranks, np.int32))


def _whole_numbers(name: str, values: Any) -> np.ndarray:
  values = np.asarray(values)
  if values.ndim != 1 or (values.size and not np.issubdtype(values.dtype, np.integer)):
    raise ValueError(
      f"Tree.{name}: got {values.dtype.name}{list(values.shape)}, expected whole numbers [n]; make"
      " one array of all nodes."
    )
  return values.astype(np.int32)


def _require_order(parents: np.ndarray) -> None:
  wrong = np.flatnonzero((parents >= np.arange(len(parents))) | (parents < -1))
  if wrong.size:
    node = int(wrong[0])
    raise ValueError(
      f"Tree.parents: got {int(parents[node])} for node {node}, expected one of -1 to {node - 1};"
      " parents precede their children."
    )


def _depths(parents: np.ndarray) -> np.ndarray:
  depths = np.ones(len(parents), np.int32)
  for node, parent in enumerate(parents.tolist()):
    if parent >= 0:
      depths[node] = depths[parent] + 1
  return depths
