"""The ablation grid: its cells, its table by hand, and resuming a stopped run."""

from __future__ import annotations

import dataclasses
import pathlib

import pytest
import small_discovery
import tiny_problem

from experiments import cells, ttt_ablation
from experiments.ttt_ablation import Cell, Grid

PROBLEM = tiny_problem.__file__
assert PROBLEM is not None
SMALL = Grid(
  problems=(PROBLEM,),
  objectives=("adaptive",),
  reuses=("puct", "none"),
  seeds=(0, 1),
  run=small_discovery.RUN,
)


def test_cells_go_seed_by_seed_and_without_training_once_a_reuse():
  every = list(SMALL.cells())
  assert [cell.seed for cell in every] == [0] * 4 + [1] * 4
  assert [(cell.objective, cell.reuse) for cell in every[:4]] == [
    ("off", "puct"), ("off", "none"), ("adaptive", "puct"), ("adaptive", "none")
  ]  # fmt: skip
  assert len(list(Grid().cells())) == 2 * 3 * (4 + 4 * 4)
  off, adaptive = SMALL.config_of(every[1]), SMALL.config_of(every[6])
  assert not off.train and off.search.reuse == "none" and off.seed == 0
  assert adaptive.train and adaptive.objective.kind == "adaptive" and adaptive.seed == 1


def test_a_table_by_hand():
  records = [
    Cell("p", objective, "puct", seed)._asdict()
    | dict(best=best, is_maximised=True, attempts=7680)
    for objective, seed, best in (
      ("off", 0, 3.0), ("off", 1, 5.0), ("off", 2, 4.0), ("mean", 0, 1.5)
    )
  ]  # fmt: skip
  lines = ttt_ablation.tables(records).splitlines()
  assert "7,680 attempts" in lines[0] and "higher is better" in lines[0]
  assert lines[4] == "| training off | 4 (3 to 5, 3) |"
  assert lines[5] == "| mean | 1.5 (1.5 to 1.5, 1) |"


def _records(problem, objective, bests, is_maximised):
  return [
    Cell(problem, objective, "puct", seed)._asdict() | dict(best=best, is_maximised=is_maximised)
    for seed, best in enumerate(bests)
  ]


def test_comparisons_by_hand():
  records = [
    *_records("up", "off", [1, 2, 3, 4, 5], True),
    *_records("up", "adaptive", [6, 7, 8, 9, 10], True),  # The first of C(10, 5) = 252 orders.
    *_records("up", "mean", [-1, -2, -3, -4, -5], True),
    *_records("down", "off", [1, 2, 3, 4, 5], False),
    *_records("down", "adaptive", [-1, -2, -3, -4, 1.5], False),  # 24 of 25 pairs: the second.
    *_records("few", "off", [1, 2, 3, 4], True),
    *_records("few", "adaptive", [5, 6, 7, 8, 9], True),
  ]
  found = {one[:2]: one for one in ttt_ablation.comparisons(records)}
  assert set(found) == {("up", "adaptive"), ("up", "mean"), ("down", "adaptive")}
  surest = found["up", "adaptive"]
  assert (surest.off, surest.trained) == (3, 8)
  assert surest.p_value == pytest.approx(1 / 252)
  assert surest.corrected == pytest.approx(3 / 252)
  assert found["down", "adaptive"].p_value == pytest.approx(2 / 252)
  assert found["down", "adaptive"].corrected == pytest.approx(2 * 2 / 252)
  assert found["up", "mean"].p_value == found["up", "mean"].corrected == 1.0
  lines = ttt_ablation.significance(list(found.values())).splitlines()
  assert lines[4] == "| up | puct | adaptive | 3 | 8 | 0.004 | 0.012 |"
  assert ttt_ablation.significance([]) == ""


def test_ties_are_enumerated():
  records = [
    *_records("p", "off", [1, 1, 1, 1, 1], True), *_records("p", "mean", [1, 1, 1, 1, 1], True)
  ]  # fmt: skip
  assert ttt_ablation.comparisons(records)[0].p_value == 1.0


def test_a_misspelt_switch_is_refused():
  with pytest.raises(ValueError, match="Grid: got objectives=.'adaptiv'.*correct the spelling"):
    Grid(objectives=("adaptiv",))


@pytest.mark.long
def test_finished_cells_are_kept_and_the_run_goes_on(tmp_path: pathlib.Path):
  text = ttt_ablation.run(SMALL, tmp_path)
  assert "| training off |" in text and "| adaptive |" in text
  path = tmp_path / cells.FILE_NAME
  lines = path.read_text().splitlines()
  assert len(lines) == 8
  path.write_text("\n".join(lines[:7]) + "\n")
  assert ttt_ablation.run(SMALL, tmp_path) == text
  again = path.read_text().splitlines()
  assert again[:7] == lines[:7] and len(again) == 8
  other = dataclasses.replace(SMALL, run=dataclasses.replace(SMALL.run, group_size=5))
  with pytest.raises(ValueError, match="got cells with other group_size, expected those of this"):
    ttt_ablation.run(other, tmp_path)
