"""The engine's own step: what is counted in a program, what a row decodes, and a dry run."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np

from experiments import engine_step

# As XLA writes programs, shortened: a loop of three turns, one of unknown length, a condition.
PROGRAM = """HloModule jit_step, is_scheduled=true

%fused (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %a = f32[4]{0} add(%p, %p)
}

%layer (t: (s32[], f32[4])) -> (s32[], f32[4]) {
  %t = (s32[], f32[4]{0}) parameter(0)
  %x = f32[4]{0} get-tuple-element(%t), index=1
  %y = f32[4]{0} fusion(%x), kind=kLoop, calls=%fused
  %z = f32[4]{0} custom-call(%y), custom_call_target="mosaic_gpu_v2"
  ROOT %r = (s32[], f32[4]{0}) tuple(%i, %z)
}

%less (t: (s32[], f32[4])) -> pred[] {
  %t = (s32[], f32[4]{0}) parameter(0)
  ROOT %c = pred[]{0} fusion(%t), kind=kLoop, calls=%fused
}

%rare (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  %s = f32[4]{0} sort(%p), dimensions={0}
  ROOT %g = f32[4]{0} fusion(%s), kind=kLoop, calls=%fused
}

%usual (p: f32[4]) -> f32[4] {
  ROOT %p = f32[4]{0} parameter(0)
}

ENTRY %main (a: f32[4]) -> f32[4] {
  %a = f32[4]{0} parameter(0)
  %copy = f32[4]{0} copy(%a)
  %w = (s32[], f32[4]{0}) while(%t), condition=%less, body=%layer, backend_config={"known_trip_count":{"n":"3"}}
  %v = (s32[], f32[4]{0}) while(%t), condition=%less, body=%layer
  ROOT %e = f32[4]{0} conditional(%k, %a, %a), branch_computations={%usual, %rare}
}
"""  # noqa: E501


def test_launches_are_counted_as_often_as_their_loop_turns():
  # A copy; three turns of three; one of three, of a loop that may have more; the longer branch.
  assert engine_step.launches(PROGRAM) == (1 + 9 + 3 + 2, 1)
  assert engine_step.launches("HloModule nothing\n") == (0, 0)


def test_every_row_decodes_at_the_end_of_a_context_of_its_own():
  inputs = engine_step.decoding(engine_step.SMALL, 3, 100)
  assert inputs.batch.page_table.tolist() == [[1, 2], [3, 4], [5, 6]]
  np.testing.assert_array_equal(inputs.batch.positions, [99, 99, 99])
  np.testing.assert_array_equal(inputs.batch.slots, [2 * 64 + 35, 4 * 64 + 35, 6 * 64 + 35])
  np.testing.assert_array_equal(inputs.positions, [100, 100, 100])
  np.testing.assert_array_equal(inputs.batch.segment_length, [1, 1, 1])


def test_a_line_says_how_far_a_step_is_from_a_copy_of_its_bytes():
  found = engine_step.Timed(
    device="NVIDIA H200",
    implementation="pallas",
    xla_flags="",
    model="qwen3-8b",
    rows=64,
    context=512,
    compile_seconds=30.0,
    milliseconds=(6.0, 5.9, 6.5),
    launches=900,
    unknown_loops=0,
    weight_bytes=15_000_000_000,
    page_bytes=5_000_000_000,
  )
  said = found.line(4e12)
  assert "qwen3-8b pallas   64 rows:     6.000 ms (5.900 to 6.500), 900 launches (0 loops" in said
  assert "2,500.0 MB of weights a ms" in said
  assert said.endswith("1.20 times what a copy of its bytes takes (5.000 ms)")
  assert "copy" not in found.line(0.0)


def test_a_dry_run_goes_through_and_keeps_a_line_for_each_number_of_rows(tmp_path):
  out = tmp_path / "steps.jsonl"
  done = subprocess.run(
    [
      sys.executable, "-m", "experiments.engine_step", "--dry_run", "--implementation=tiled",
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
  assert all(line["launches"] > 10 and line["weight_bytes"] > 0 for line in kept)
