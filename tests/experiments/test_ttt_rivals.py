"""The policy against its rivals: who did it, by hand, and a run that goes on where it stopped."""

from __future__ import annotations

import pathlib

import pytest
import small_discovery
import tiny_problem

from experiments import cells, ttt_rivals
from experiments.ttt_rivals import Contest

PROBLEM = str(tiny_problem.__file__)


def record(problem, seed, *bests, is_maximised=True):
  names = ("policy", "classical", "random_edits", "policy_without_reuse")
  return dict(
    problem=problem, seed=seed, bests=dict(zip(names, bests)), is_maximised=is_maximised,
    cpu_seconds=10.0 + seed,
  )  # fmt: skip


def test_who_did_it_by_hand():
  records = [
    record("higher", 0, 5.0, 4.0, 1.0, 9.0),
    record("higher", 1, 6.0, 7.0, 2.0, 9.0),
    record("higher", 2, 7.0, 4.5, 3.0, 9.0),
    record("lower", 0, 5.0, 6.0, 7.0, 1.0, is_maximised=False),
    record("level", 0, 5.0, 5.0, 4.0, 1.0),
  ]
  lines = ttt_rivals.table(records).splitlines()
  assert lines[0].startswith("| problem | policy | classical | random edits | policy without reuse")
  # The median counts, and what came without reuse is no rival.
  assert lines[2] == "| higher (3) | 6 | 4.5 | 2 | 9 | 11 | the policy |"
  assert lines[3] == "| lower (1) | 5 | 6 | 7 | 1 | 10 | the policy |"
  # As good as another is not better.
  assert lines[4] == "| level (1) | 5 | 5 | 4 | 1 | 10 | the tool did it |"


def test_a_contest_of_nobody_is_refused():
  with pytest.raises(ValueError, match=r"Contest: got problems=\(\), seeds=\(0,\), expected at"):
    Contest(problems=())


def test_a_problem_without_edits_is_refused_before_anything_runs(tmp_path: pathlib.Path):
  contest = Contest(problems=("apple_machines_programs",))
  with pytest.raises(ValueError, match="got a problem without a language of edits, expected one"):
    ttt_rivals.run(contest, tmp_path)


@pytest.mark.long
def test_finished_cells_are_kept_and_the_run_goes_on(tmp_path: pathlib.Path):
  contest = Contest(problems=(PROBLEM,), seeds=(0, 1), run=small_discovery.RUN)
  text = ttt_rivals.run(contest, tmp_path)
  assert f"| {PROBLEM} (2) |" in text
  path = tmp_path / cells.FILE_NAME
  lines = path.read_text().splitlines()
  path.write_text(lines[0] + "\n")
  ttt_rivals.run(contest, tmp_path)
  again = path.read_text().splitlines()
  assert again[0] == lines[0] and len(again) == len(lines) == 2
