"""The simulation's tables by hand, small parts of the real ones, and errors."""

from __future__ import annotations

import json
import pathlib

import pytest

from experiments.cluster import simulation as seer_simulation
from seerjax.simulate import workloads


def row(seconds: float, tail: float = 10.0) -> dict[str, float]:
  return dict(
    seconds=seconds,
    tail_seconds=tail,
    preemptions=1.0,
    idle_share=0.25,
    accepted=1.9,
    moved_terabytes=2.0,
    cpu_seconds=1.0,
  )


def made() -> dict[str, dict[str, dict[str, float]]]:
  rows = {
    "baseline": row(3910.0, 1817.0),
    "divided": row(3910 / 1.41),
    "+ context": row(2000.0),
    "+ drafts": row(1000.0, 1817 * 0.16),
    f"ours, {seer_simulation.OUR_CHUNK}": row(900.0),
  }
  return {workload.name: rows for workload in workloads.WORKLOADS}


def test_misses_stay_in_the_table():
  text = seer_simulation.paper_tables(made())
  assert "| Moonlight | gain, divided | 1.41 | 1.41 | 1.00 | yes |" in text
  assert "| Moonlight | gain, + context | 1.47 | 1.96 | 1.33 | **no** |" in text
  assert "| Moonlight | tail cut, + drafts | 0.84 | 0.84 | 1.00 | yes |" in text
  assert "| Qwen2-VL-72B | baseline, preemptions per request (fitted) | 1.43 | 1.00 |" in text
  assert (
    "| Moonlight | divided | 2,773 | 1.41 | 10 | 1.00 | 25 % |"
    in seer_simulation.policy_table(made())
  )


def test_the_other_tables_by_hand():
  gains = {"baseline": 1.0, "divided": 1.5, "ours": 1.9, "oracle, by room": 2.0}
  swept = [dict(kv_bound=True, group_size=8, rho=0.3, gains=gains)]
  text = seer_simulation.sweep_table(swept)
  assert "| KV | 8 | 0.3 | 1.00 | 1.50 | 1.90 | 2.00 | 95.0 % | 1.27 |" in text
  assert "| M | 1024 | 1.00 |" in seer_simulation.chunk_table({"M": {1024: {"divided": 1.0}}})
  step = dict(seconds=1000.0, stale_share=0.5, mean_tokens=2000.0)
  assert "| M | a | 1,000 | 50 % | 2,000 |" in seer_simulation.baseline_table({"M": {"a": step}})
  assert "| ours | 3.1 |" in seer_simulation.decision_table({"ours": 3.14})


def test_drawn_workloads_are_compared_and_misses_named():
  lines: list[str] = []
  found = seer_simulation.drawn([0, 1], lines.append, [8, 15])
  assert [len(row["ours"]) for row in found] == [2, 2] and len(lines) == 2
  assert lines[0].startswith("drawn, 8: places scarce, rho ")
  found[1]["ours"] = [1.02, 0.9]
  text = seer_simulation.drawn_table(found)
  low, high = next(b for b in seer_simulation.LIKENESS if b[0] <= found[1]["rho"] < b[1])
  assert f"| KV | {low} to {high} | 1 | 0.960 | 0.960 | 1 | 2 | 0.900 | 1 | 1 |" in text
  assert "1 workloads with a replay below 0.99:" in text
  assert text.endswith(f"chunk {found[1]['chunk_tokens']}: 1.020, 0.900")


def test_a_picture_is_drawn(tmp_path: pathlib.Path):
  seer_simulation.picture(made(), tmp_path / "gains.png")
  assert (tmp_path / "gains.png").stat().st_size > 1000


def test_every_policy_decides_to_the_end():
  lines: list[str] = []
  found = seer_simulation.decisions(lines.append, num_groups=30, group_size=8)
  assert set(found) == set(seer_simulation.systems(512))
  assert len(lines) == len(found)
  assert min(found.values()) > 0  # The experiment measures the speed, alone on a core.


def test_a_trace_is_run(tmp_path: pathlib.Path):
  path = tmp_path / "trace.jsonl"
  rows = [[100 * (g + 1) + m for m in range(8)] for g in range(16)]
  path.write_text("\n".join(json.dumps(dict(output=lengths)) for lengths in rows))
  lines: list[str] = []
  found = seer_simulation.trace(str(path), lines.append)
  assert found["rho"] > 0.95
  assert found["gains"]["baseline"] == 1.0
  assert "16 groups" in lines[0]


def test_unknown_parts_and_no_seeds_are_refused(tmp_path: pathlib.Path):
  with pytest.raises(ValueError, match="--parts: got speed, expected some of paper, chunks"):
    seer_simulation.run(["speed"], 1, tmp_path, print)
  with pytest.raises(ValueError, match="--parts: got none"):
    seer_simulation.run([], 1, tmp_path, print)
  with pytest.raises(ValueError, match="--num_seeds: got 0"):
    seer_simulation.run(["paper"], 0, tmp_path, print)
