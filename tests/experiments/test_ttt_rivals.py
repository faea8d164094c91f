"""The policy against its baselines: attribution by hand, and resuming a stopped run."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import pytest
import small_discovery
import tiny_problem

from experiments import cells, ttt_rivals
from experiments.ttt_rivals import Contest

PROBLEM = str(tiny_problem.__file__)


NAMES = ("policy", "classical", "random_edits", "policy_without_reuse")


def records(problem, seed, *bests, is_maximised=True):
  return [
    dict(
      problem=problem, seed=seed, contestant=name, best=best, is_maximised=is_maximised,
      cpu_seconds=10.0 + seed,
    )
    for name, best in zip(NAMES, bests)
  ]  # fmt: skip


def test_who_did_it_by_hand():
  everyone = ("classical", "random_edits")
  lines = ttt_rivals.table(
    [
      *records("higher", 0, 5.0, 4.0, 1.0, 9.0),
      *records("higher", 1, 6.0, 7.0, 2.0, 9.0),
      *records("higher", 2, 7.0, 4.5, 3.0, 9.0),
      *records("higher", 3, 5.5, 4.0, 2.0, 9.0),
      *records("higher", 4, 6.5, 5.5, 2.0, 9.0),
      *records("lower", 0, 5.0, 6.0, 7.0, 1.0, is_maximised=False),
      *records("level", 0, 5.0, 5.0),
      *(one for seed in range(5) for one in records("alone", seed, 5.0, 4.0)),
      *(one for seed in range(5) for one in records("easy", seed, 5.0, 4.0)),
    ],
    dict.fromkeys(("higher", "lower", "level", "alone"), everyone) | {"easy": ("classical",)},
  ).splitlines()
  assert lines[0].startswith("| problem | policy | classical | random edits | policy without reuse")
  # The median counts; results without reuse are no baseline.
  assert lines[2] == "| higher (5) | 6 | 4.5 | 2 | 9 | 12 | the policy |"
  # One seed decides nothing for a policy.
  assert lines[3] == "| lower (1) | 5 | 6 | 7 | 1 | 10 | not settled |"
  # An equal value is not an improvement.
  assert lines[4] == "| level (1) | 5 | 5 |  |  | 10 | the tool did it |"
  # Nor do five while one of its baselines is missing.
  assert lines[5] == "| alone (5) | 5 | 4 |  |  | 12 | not settled |"
  assert lines[6] == "| easy (5) | 5 | 4 |  |  | 12 | the policy |"


def test_a_policy_comes_before_its_rivals_and_only_those_that_its_problem_has():
  contest = Contest(problems=("circle_packing:5", PROBLEM), rivals=("random_edits", "classical"))
  assert [cell[0::2] for cell in contest.cells()] == [
    ("circle_packing:5", "policy"),
    ("circle_packing:5", "random_edits"),
    ("circle_packing:5", "classical"),
    (PROBLEM, "policy"),
    (PROBLEM, "random_edits"),
  ]


def test_a_contest_of_nobody_is_refused():
  with pytest.raises(ValueError, match=r"Contest: got problems=\(\), .* expected at least one"):
    Contest(problems=())


def test_a_rival_that_nobody_knows_is_refused():
  with pytest.raises(ValueError, match=r"Contest: .*rivals=\('annealer',\), .*correct the"):
    Contest(rivals=("annealer",))


def test_a_problem_without_edits_is_refused_before_anything_runs(tmp_path: pathlib.Path):
  contest = Contest(problems=("apple_machines_programs",))
  with pytest.raises(ValueError, match="got a problem without an edit language, expected one"):
    ttt_rivals.run(contest, tmp_path)


@pytest.mark.long
def test_finished_cells_are_kept_and_the_run_goes_on(tmp_path: pathlib.Path):
  contest = Contest(
    problems=(PROBLEM,), seeds=(0, 1), rivals=("random_edits",), run=small_discovery.RUN
  )
  text = ttt_rivals.run(contest, tmp_path)
  assert f"| {PROBLEM} (2) |" in text
  path = tmp_path / cells.FILE_NAME
  lines = path.read_text().splitlines()
  assert len(lines) == 4
  # Killed between a policy and its baseline, which then gets the recorded time.
  path.write_text(lines[0] + "\n")
  ttt_rivals.run(contest, tmp_path)
  again = path.read_text().splitlines()
  assert again[0] == lines[0] and len(again) == 4
  policy, rival = map(json.loads, again[:2])
  assert (rival["contestant"], rival["cpu_seconds"]) == ("random_edits", policy["cpu_seconds"])
  # An additional baseline is added to the existing results.
  ttt_rivals.run(dataclasses.replace(contest, rivals=ttt_rivals.RIVALS), tmp_path)
  more = path.read_text().splitlines()
  assert more[:4] == again and len(more) == 6
