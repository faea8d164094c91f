"""Purse seine: one fence around the wanted points of a plane that leaves the unwanted ones out.

  value = max(0, a - b + 1)    a, b: wanted and unwanted points inside the fence or on it

The fence is a simple polygon of at most 1000 integer vertices whose edges are parallel to the axes
and at most 400,000 long in all. The generator draws 10 to 25 Gaussian clusters of each kind, as the
contest's does, from numbers of our own; so an instance is none of the contest's, only alike.

`rules` says what is legal, `counting` what a fence holds, `rectangles` are single edits, `anneal`
is the tool, `edits` the language, `environment` the problem. Compiled functions take fences that
are counter-clockwise with a turn at each vertex.

Source: AtCoder Heuristic Contest 039 (2024), https://atcoder.jp/contests/ahc039/tasks/ahc039_a;
Yuksekgonul et al. 2026 (TTT-Discover), https://arxiv.org/abs/2601.16175, section 4.
"""

from __future__ import annotations

from experiments.problems.purse_seine.environment import PurseSeine

__all__ = ["PurseSeine"]
