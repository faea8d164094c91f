"""Decoding with and without a draft model: counts by hand, errors, and a small grid."""

from __future__ import annotations

import json
import re

import pytest

from experiments.speculation import draft_model as speculation
from experiments.speculation.draft_model import Cell, Workload

RECORD = {
  "settings": Workload().settings,
  **Cell("nano", "nano-draft", "countdown", 4, "2", 1)._asdict(),
  "turns": [[2.0, 1.0, 100], [2.0, 1.0, 100]],
  "num_answers": 8,
  "correct": [2, 2],
  "num_steps": 10,
  "drafted_at": [8, 8],
  "accepted_at": [6, 3],
  "draft_seconds": 0.5,
  "costs": {"plain": 0.01, "position": 0.001, "draft": 0.004, "verify": 0.012},
  "joules": None,
}


def test_a_table_by_hand():
  lines = speculation.tables([RECORD]).splitlines()
  assert lines[2] == (
    "8 pairs of answers, all bits equal; 25.00% correct without drafts, 25.00% with. Joules per"
    " token: not readable here."
  )
  # 9 held of the 8 and 6 that might: a = 0.64, c = 0.1, E = 1 + a + a^2 = 2.06; E / 1.2; E 0.01 /
  # (0.004 + 0.012); (1 + a) / (1 + 2 (1 - a)).
  assert lines[6] == (
    "| 4 | 2 | 50 | 100 | 2.00 (2.00 to 2.00) | 1.90 | 25% | 0.64 | 0.100 | 1.71 | 1.29 | 0.96 |"
  )
  assert lines[-1] == "| 2 | 10 | 1.90 | 0.750 (8) | 0.375 (8) |"


def test_a_price_and_joules_where_they_are_known():
  budget = {**RECORD, "length": "budget", "costs": None, "joules": [0.5, 0.25]}
  lines = speculation.tables([budget], price_per_hour=3.6).splitlines()
  # 4 s at 0.001 a second for 8 answers; half of that with drafts.
  assert lines[6].endswith("| 0.64 | - | - | - | - | 0.5000 | 0.2500 | 0.5 | 0.25 |")
  assert "not readable" not in lines[2]


def test_plain_xla_stands_beside_where_it_was_measured():
  lines = speculation.tables([{**RECORD, "untiled": [200.0, 200.0]}]).splitlines()
  assert lines[4].endswith("| untiled, tokens/s | drafts against untiled (95 %) |")
  assert lines[6].endswith("| 0.96 | 200 | 0.50 (0.50 to 0.50) |")  # 100 tokens in a second.


def test_a_share_of_what_might_have_held():
  assert speculation.hold_rate([], []) == 0
  # Of 10 first tokens 5 were accepted; two of these 5 had no second token.
  assert speculation.hold_rate([10, 3], [5, 1]) == 6 / 13


def test_a_grid_by_hand():
  workload = Workload(batches=(1, 2), lengths=("2", "budget"), widths=(1, 4), tasks=("countdown",))
  assert [cell[3:] for cell in workload.cells()[:5]] == [
    (1, "2", 1), (1, "budget", 1), (1, "2", 4), (1, "budget", 4), (2, "2", 1)
  ]  # fmt: skip
  assert workload.cells()[2].shape == "2, comb of 4"
  assert not {"batches", "lengths", "widths", "tasks"} & set(workload.settings)


def test_a_large_batch_has_half_as_many_turns_and_two_at_least():
  turns = [Workload(turns=9).turns_of(batch) for batch in (1, 8, 16, 128)]
  assert turns == [9, 9, 4, 4]
  assert Workload(turns=2).turns_of(128) == 2


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    (dict(drafts=()), "got targets=('nano',) and drafts=(), expected a draft for each target"),
    (dict(lengths=("off",)), "Workload.lengths: got 'off', expected whole numbers from 1 to 16"),
    (dict(lengths=("17",)), "Workload.lengths: got '17', expected whole numbers from 1 to 16"),
    (dict(batches=(0,)), "got batches=(0,), turns=4, expected batches of at least 1"),
    (dict(turns=1), "turns=1, expected batches of at least 1 and at least 2 turns"),
    (dict(clock="sun"), "Workload.clock: got 'sun', expected one of ('wall', 'cpu')"),
  ],
)
def test_a_workload_that_cannot_be_is_refused(changes, message):
  with pytest.raises(ValueError, match=re.escape(message)):
    Workload(**changes)


def lines_of(directory):
  return (directory / "cells.jsonl").read_text().splitlines()


@pytest.mark.long
def test_a_small_grid_goes_on_where_it_was_killed(tiny, tmp_path):
  workload = Workload(
    targets=(tiny,),
    drafts=(tiny,),
    tasks=("countdown",),
    batches=(1, 3),
    lengths=("2", "budget"),
    widths=(1, 2),
    turns=2,
    max_tokens=10,
    untiled=True,
  )
  text = speculation.run(workload, tmp_path)
  assert (tmp_path / "table.md").read_text() == text + "\n"
  assert all(len(json.loads(line)["untiled"]) == 2 for line in lines_of(tmp_path))
  report = (tmp_path / "report.html").read_text()
  assert report.count("<article") == 4  # Two lengths, two widths.
  assert report.count('class="held"') > report.count('class="missed"') > 0
  lines = lines_of(tmp_path)
  first = json.loads(lines[0])
  assert first["accepted_at"][0] > 0.5 * first["drafted_at"][0] > 0  # Its own weights.
  (tmp_path / "cells.jsonl").write_text("\n".join([*lines[:-1], lines[-1][:20]]))
  speculation.run(workload, tmp_path)
  again = lines_of(tmp_path)
  assert again[:-1] == lines[:-1]
  for name in ("num_answers", "correct", "batch", "length", "width"):
    assert json.loads(again[-1])[name] == json.loads(lines[-1])[name]
