"""Inputs are printed in the contest's format."""

from __future__ import annotations

import numpy as np

from experiments.problems import contest
from experiments.problems.purse_seine import rules as seine_rules


def test_inputs_have_the_contests_form():
  lines = contest.PurseSeineContest().case_input(1).decode().splitlines()
  points = np.concatenate(seine_rules.points_of(1))
  assert lines[0] == "5000" and len(lines) == 10_001
  assert [list(map(int, line.split())) for line in lines[1:]] == points.tolist()
