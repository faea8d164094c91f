"""Whether drafts pay: intervals by hand, and every part on a few questions."""

from __future__ import annotations

import dataclasses
import json
import re

import made_rollouts
import pytest

from experiments.speculation import pays as speculation_pays
from experiments.speculation.pays import Pair, TailRates, Turn, Workload


def test_a_table_by_hand():
  workload = Workload(batches=(4,), tail_batches=(1,))
  turn = Turn([Pair(2.0, 1.0, 100)], [TailRates(10.0, 20.0, 40.0)])
  lines = speculation_pays.tables(workload, [turn, turn]).splitlines()
  assert lines[2] == "| 4 | 50 | 100 | 2.00 | 2.00 to 2.00 |"
  assert lines[-1] == "| 1 | 10 | 20 | 40 | 4.00 (4.00 to 4.00) | 2.00 (2.00 to 2.00) |"


def test_requests_and_problems_by_hand():
  workload = Workload(batches=(1, 2, 13), group_size=8, tail_groups=5)
  assert [workload.requests_of(batch) for batch in workload.batches] == [2, 3, 20]
  assert workload.groups_per_turn == 1 + 1 + 3 + 5


@pytest.mark.long
def test_every_turn_is_kept_and_the_run_goes_on(tiny, tmp_path):
  workload = Workload(
    model=tiny,
    batches=(1, 3),
    pairs=3,
    group_size=4,
    tail_batches=(2,),
    tail_groups=2,
    tail_siblings=2,
    max_tokens=10,
  )
  text = speculation_pays.run(workload, tmp_path)
  turns = speculation_pays.measured(workload, tmp_path / "results.json")
  assert [(len(turn.pairs), len(turn.tail)) for turn in turns] == [(2, 1)] * 3
  assert all(min(pair) > 0 for turn in turns for pair in turn.pairs)
  assert (tmp_path / "table.md").read_text() == text + "\n"
  # As if the run had been killed in its last turn.
  record = json.loads((tmp_path / "results.json").read_text())
  del record["turns"][2]
  (tmp_path / "results.json").write_text(json.dumps(record))
  speculation_pays.run(workload, tmp_path)
  again = speculation_pays.measured(workload, tmp_path / "results.json")
  assert again[:2] == turns[:2]
  assert [pair.num_tokens for pair in again[2].pairs] == [
    pair.num_tokens for pair in turns[2].pairs
  ]


def test_turns_of_another_workload_are_refused(tmp_path):
  (tmp_path / "results.json").write_text(json.dumps({"workload": {"seed": 1}, "turns": []}))
  with pytest.raises(ValueError, match=r"results.json: got turns of {'seed': 1}, expected .* name"):
    speculation_pays.measured(Workload(), tmp_path / "results.json")


def test_other_bits_are_refused():
  one = made_rollouts.completion("0/0/0", (1, 2))
  speculation_pays.check_same([one], [one], "batch 1")
  other = dataclasses.replace(one, tokens=(1, 3))
  with pytest.raises(ValueError, match=r"batch 1: got other bits for request '0/0/0'"):
    speculation_pays.check_same([one], [other], "batch 1")


def test_a_workload_without_an_interval_is_refused():
  with pytest.raises(ValueError, match=re.escape("Workload: got pairs=1")):
    Workload(pairs=1)
  with pytest.raises(ValueError, match=re.escape("Workload.clock: got 'sun', expected one of")):
    Workload(clock="sun")
