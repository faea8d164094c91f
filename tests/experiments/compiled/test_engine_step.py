"""The engine-step measurement: parsing of a line, and a dry run."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from experiments.compiled import engine_step


def test_a_line_says_how_far_a_step_is_from_a_copy_of_its_bytes():
  found = engine_step.Timed(
    device="NVIDIA H200",
    backend="pallas",
    xla_flags="",
    model="qwen3-8b",
    rows=64,
    context=512,
    compile_seconds=30.0,
    milliseconds=(6.0, 5.9, 6.5),
    kernels=330,
    others=400,
    host_reads=0,
    weight_bytes=15_000_000_000,
    page_bytes=5_000_000_000,
  )
  line = found.line(4e12)
  assert "qwen3-8b pallas   64 rows:     6.000 ms (5.900 to 6.500), 330 kernels of ours" in line
  assert "and 400 of XLA's, 0 host syncs, 2,500.0 MB of weights a ms" in line
  assert line.endswith("1.20 times what a copy of its bytes takes (5.000 ms)")
  assert "copy" not in found.line(0.0)


@pytest.mark.thorough
def test_a_dry_run_goes_through_and_keeps_a_line_for_each_number_of_rows(tmp_path):
  out = tmp_path / "steps.jsonl"
  done = subprocess.run(
    [
      sys.executable, "-m", "experiments.compiled.engine_step", "--dry_run", "--backend=tiled",
      "--rows=1,3", f"--out={out}",
    ],
    capture_output=True,
    text=True,
    check=False,
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  assert done.stdout.count("a small model (dry run) tiled") == 2
  kept = [json.loads(line) for line in out.read_text().splitlines()]
  assert [line["rows"] for line in kept] == [1, 3]
  assert all(line["others"] > 10 and line["weight_bytes"] > 0 for line in kept)
