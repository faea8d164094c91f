"""Purse seine: a fence in the plane that encloses wanted points and excludes unwanted ones.

  value = max(0, a - b + 1)    a, b: wanted and unwanted points inside the fence or on it

The fence is a simple polygon of at most 1000 integer vertices with axis-parallel edges and a total
length of at most 400,000. The generator draws 10 to 25 Gaussian clusters of each kind, as in the
contest but with our own random numbers, so instances are similar to the contest's, not equal.

`rules` checks fences, `counting` counts points in a fence, `rectangles` has single edits, `anneal`
the polish tool, `edits` the language, `environment` the problem. Compiled functions take fences
that are counter-clockwise with a turn at each vertex.

Source: AtCoder Heuristic Contest 039 (2024), https://atcoder.jp/contests/ahc039/tasks/ahc039_a;
Yuksekgonul et al. 2026 (TTT-Discover), https://arxiv.org/abs/2601.16175, section 4.
"""

from __future__ import annotations

from experiments.problems.purse_seine.environment import PurseSeine

__all__ = ["PurseSeine"]
