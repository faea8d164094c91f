"""Apple machines (AtCoder Heuristic Contest 058): buy machines over time to maximise apples.

There are 10 kinds of machine on 4 levels, and 500 turns. By level i and kind j there are counts B,
initially 1, and powers P, initially 0, and one apple at the start. In each turn one machine may be
bought, then all machines work, from level 0 upwards:

  buy (i, j)   apples -= C[i, j] * (P[i, j] + 1),  P[i, j] += 1
  level 0      apples += A[j] * B[0, j] * P[0, j]
  level i      B[i-1, j] += B[i, j] * P[i, j]
  points       round(1e5 * log2(apples at the end))

The artefact is a timeline: consecutive runs [level, kind, end]. In the turns before `end` that no
earlier run covers, that machine is bought whenever it is affordable. After the last run nothing is
bought.

  [[0, 0, 16], [0, 8, 31], [1, 8, 60]]  turns 0-15: (0, 0), turns 16-30: (0, 8), turns 31-59: (1, 8)

Every order of purchases can be expressed (a run of an unaffordable machine saves up for it), and a
change early in the plan does not move the times of the rest. Runs with purchase counts, the obvious
alternative, move everything after a change; annealed for 100,000 simulations (four inputs), they
ended two bits lower.

`rules` has the game, `plans` a fast simulator, `changes` single edits, `anneal` the polish tool,
`edits` the language, `environment` the problem.

Inputs are our own, drawn as in the contest's statement. Source: AtCoder Heuristic Contest 058;
Yuksekgonul et al. 2026 (TTT-Discover), https://arxiv.org/abs/2601.16175.
"""

from __future__ import annotations

from experiments.problems.apple_machines.environment import AppleMachines

__all__ = ["AppleMachines"]
