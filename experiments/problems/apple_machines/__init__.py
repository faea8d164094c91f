"""Apple machines (AtCoder Heuristic Contest 058): what to buy, and when, so that apples multiply.

There are 10 kinds of machine on 4 levels, and 500 turns. By level i and kind j there are counts B,
at first 1, and powers P, at first 0. There is one apple. In each turn one machine may be bought,
then all of them work, from level 0 upwards:

  buy (i, j)   apples -= C[i, j] * (P[i, j] + 1),  P[i, j] += 1
  level 0      apples += A[j] * B[0, j] * P[0, j]
  level i      B[i-1, j] += B[i, j] * P[i, j]
  points       round(1e5 * log2(apples at the end))

The artefact is a painted timeline: runs [level, kind, end], one after the other. In the turns
before `end` that no earlier run has, that machine is wanted: it is bought whenever it can be paid
for. After the last run nothing is bought.

  [[0, 0, 16], [0, 8, 31], [1, 8, 60]]  turns 0-15: (0, 0), turns 16-30: (0, 8), turns 31-59: (1, 8)

Every order of purchases can be expressed (saving up is wanting what is dear), and a change early in
the plan leaves the times of the rest alone. In runs by count, the obvious other choice, it moves
all that follows: annealed for 100,000 simulations (four inputs), they ended two bits lower.

`rules` is the game, `plans` plays it fast, `changes` are single edits, `anneal` is the tool,
`edits` the language, `environment` the problem.

Inputs are our own, drawn as the contest's statement says. Source: AtCoder Heuristic Contest 058;
Yuksekgonul et al. 2026 (TTT-Discover), https://arxiv.org/abs/2601.16175.
"""

from __future__ import annotations

from experiments.problems.apple_machines.environment import AppleMachines

__all__ = ["AppleMachines"]
