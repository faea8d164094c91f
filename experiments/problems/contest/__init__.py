"""Contest solutions: programs in C++ or Python, judged on generated cases as in a contest.

  {"language": "c++", "source": "..."} -> compiled once -> per case: input -> output -> exact value
  value = mean over the cases if the program solves all of them; otherwise the program is invalid

The cases are ours, drawn as in the contests' problem statements. A program sees only its input. A
program that reads the clock may give different outputs in each run; its value is the one from its
first judgement.

  purse seine (AHC039)      input   N, then the N wanted and the N unwanted points, x y
                            output  m, then m vertices, x y; of several answers the last one counts
  apple machines (AHC058)   input   N L T K, then A by kind, then C by level, N numbers per line
                            output  T times "i j" (buy one of level i and kind j) or "-1" (nothing)

`solutions` compiles, runs and judges; `purse_seine` and `apple_machines` are the contests;
`outputs` parses the output of programs.

Source: AtCoder Heuristic Contests 039 and 058; Yuksekgonul et al. 2026 (TTT-Discover),
https://arxiv.org/abs/2601.16175, whose rewards are mean / 1500 and mean / 1500 / 2000.
"""

from __future__ import annotations

from experiments.problems.contest.apple_machines import (
  AppleMachinesContest,
  apple_machines_programs,
)
from experiments.problems.contest.purse_seine import PurseSeineContest, purse_seine_programs
from experiments.problems.contest.solutions import Contest, ContestSolutions

__all__ = [
  "AppleMachinesContest",
  "Contest",
  "ContestSolutions",
  "PurseSeineContest",
  "apple_machines_programs",
  "purse_seine_programs",
]
