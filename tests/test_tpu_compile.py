"""Properties parsed from a program compiled for a TPU, by hand; and one such compilation."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import pathlib
import subprocess

import pytest

from experiments.compiled import hlo, tpu_compile
from seerjax import numerics, parallel

ROOT = pathlib.Path(__file__).parents[1]
PYTHON = ROOT / ".venv-tpu" / "bin" / "python"

# libtpu's output, cut to the parsed parts: a loop of four in a loop with an argument as bound.
TEXT = """HloModule jit_f, is_scheduled=true

%fused_computation (param_0: bf16[128,1024]) -> bf16[128,1024] {
  %param_0 = bf16[128,1024]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  ROOT %tanh.3 = bf16[128,1024]{1,0:T(8,128)(2,1)} tanh(%param_0), backend_config={"window_config":{"estimated_cycles":"999"}}
}

%inner_body (arg_tuple.0: (s32[], bf16[128,1024])) -> (s32[], bf16[128,1024]) {
  %arg_tuple.0 = (s32[]{:T(128)}, bf16[128,1024]{1,0:T(8,128)(2,1)}) parameter(0)
  %get-tuple-element.5 = bf16[128,1024]{1,0:T(8,128)(2,1)} get-tuple-element(%arg_tuple.0), index=1
  %fusion.1 = bf16[128,1024]{1,0:T(8,128)(2,1)} fusion(%get-tuple-element.5), kind=kOutput, calls=%fused_computation, backend_config={"window_config":{"estimated_cycles":"10"}}
  ROOT %tuple.1 = (s32[]{:T(128)}, bf16[128,1024]{1,0:T(8,128)(2,1)}) tuple(%add.1, %fusion.1)
}

%inner_condition (arg_tuple.1: (s32[], bf16[128,1024])) -> pred[] {
  %constant.9 = s32[]{:T(128)} constant(4)
  %arg_tuple.1 = (s32[]{:T(128)}, bf16[128,1024]{1,0:T(8,128)(2,1)}) parameter(0)
  %get-tuple-element.6 = s32[]{:T(128)} get-tuple-element(%arg_tuple.1), index=0
  ROOT %lt.1 = pred[]{:T(512)} compare(%get-tuple-element.6, %constant.9), direction=LT
}

%outer_body (arg_tuple.2: (s32[], bf16[128,1024], s32[])) -> (s32[], bf16[128,1024], s32[]) {
  %arg_tuple.2 = (s32[]{:T(128)}, bf16[128,1024]{1,0:T(8,128)(2,1)}, s32[]{:T(128)}) parameter(0)
  %copy.1 = bf16[128,1024]{1,0:T(8,128)(2,1)S(1)} copy(%get-tuple-element.7), backend_config={"window_config":{"estimated_cycles":"3"}}
  %while.1 = (s32[]{:T(128)}, bf16[128,1024]{1,0:T(8,128)(2,1)}) while(%tuple.2), condition=%inner_condition, body=%inner_body
  ROOT %tuple.3 = (s32[]{:T(128)}, bf16[128,1024]{1,0:T(8,128)(2,1)}, s32[]{:T(128)}) tuple(%add.2, %copy.1, %n)
}

%outer_condition (arg_tuple.3: (s32[], bf16[128,1024], s32[])) -> pred[] {
  %arg_tuple.3 = (s32[]{:T(128)}, bf16[128,1024]{1,0:T(8,128)(2,1)}, s32[]{:T(128)}) parameter(0)
  %get-tuple-element.8 = s32[]{:T(128)} get-tuple-element(%arg_tuple.3), index=0
  %get-tuple-element.9 = s32[]{:T(128)} get-tuple-element(%arg_tuple.3), index=2
  ROOT %lt.2 = pred[]{:T(512)} compare(%get-tuple-element.8, %get-tuple-element.9), direction=LT
}

%cheap (param.1: f32[8]) -> f32[8] {
  ROOT %copy.2 = f32[8]{0:T(256)} copy(%param.1), backend_config={"window_config":{"estimated_cycles":"1"}}
}

%dear (param.2: f32[8]) -> f32[8] {
  ROOT %copy.3 = f32[8]{0:T(256)} copy(%param.2), backend_config={"window_config":{"estimated_cycles":"7"}}
}

ENTRY %main (param.3: bf16[128,1024], param.4: s32[]) -> bf16[128,1024] {
  %param.3 = bf16[128,1024]{1,0:T(8,128)(2,1)} parameter(0)
  %conditional.1 = f32[8]{0:T(256)} conditional(%is_sampled, %a, %b), true_computation=%cheap, false_computation=%dear
  %while.2 = (s32[]{:T(128)}, bf16[128,1024]{1,0:T(8,128)(2,1)}, s32[]{:T(128)}) while(%tuple.4), condition=%outer_condition, body=%outer_body
  ROOT %get-tuple-element.10 = bf16[128,1024]{1,0:T(8,128)(2,1)} get-tuple-element(%while.2), index=1
}
"""  # noqa: E501


def record_of(case: tpu_compile.Case, **measured):
  known = dict(
    lower_seconds=1.4, compile_seconds=60.0, refused="", temporaries=3 * 2**20,
    arguments=2**30, results=2**20, code=0, flops=1.5e12, loops=29, unknown_loops=27, cycles=0,
  )  # fmt: skip
  return dict(name=case.name, case=dataclasses.asdict(case)) | known | measured


def test_loops_of_unknown_length_are_told_from_those_of_a_constant():
  loops = hlo.parsed(TEXT).loops()
  assert [(loop.body, loop.trips) for loop in loops] == [("inner_body", 4), ("outer_body", None)]
  # The change that must be noticed: the constant bound also becomes an argument.
  handed_in = TEXT.replace("%get-tuple-element.6, %constant.9", "%get-tuple-element.6, %other")
  assert [loop.trips for loop in hlo.parsed(handed_in).loops()] == [None, None]


def test_cycles_are_those_of_what_runs():
  # The expensive branch, plus per trip of the outer loop a copy and four times the fusion; its
  # own instructions are within its estimate.
  assert [hlo.parsed(TEXT).cycles(n) for n in (0, 1, 8)] == [7, 7 + 43, 7 + 8 * 43]


def test_tables_say_what_was_compiled_and_what_was_refused():
  known = {case.name: case for case in tpu_compile.cases()}
  engine = known["engine-qwen3-8b-v6e-x4-rows512-tile128"]
  train = known["train-qwen3-8b-9layers-v5e-x1-rows2048-tile128"]
  refusal = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm.\nmore"
  text = tpu_compile.table([record_of(engine), record_of(train, refused=refusal)])
  assert (
    "| engine | qwen3-8b | v6e x4 | 512 | 1,024 | 3 | 3% | 29 (27) | 1.5e+12 | 1 + 60 |" in text
  )
  row = "| train | qwen3-8b, 9 layers | v5e x1 | 2,048 | **refused**: RESOURCE_EXHAUSTED: Ran out"
  assert row in text
  tile = known["tile-qwen3-8b-v5e-x1-rows128-tile128"]
  text = tpu_compile.table([record_of(tile, cycles=1000), record_of(engine)])
  assert "| qwen3-8b | v5e | 128 | 1,000 | 1,000 | 4,000 | 3.0 |" in text


def test_steps_are_compiled_with_the_tile_that_a_tpu_takes():
  steps = [case for case in tpu_compile.cases() if case.kind != "tile"]
  assert {case.row_tile for case in steps} == {numerics.row_tile_of("tpu")}
  chosen = {case.rows for case in tpu_compile.cases() if case.kind == "tile"}
  assert numerics.row_tile_of("tpu") in chosen


def test_a_step_has_a_process_of_its_own_and_tiles_share_one():
  tiles = tpu_compile.TILES
  sizes = [len(batch) for batch in tpu_compile.batches(tpu_compile.cases())]
  assert sizes[:4] == [len(tiles)] * 4 and set(sizes[4:]) == {1}


@pytest.mark.parametrize(
  "kind", ["engine", pytest.param("train", marks=pytest.mark.thorough), "tile"]
)
def test_each_kind_of_case_lowers_for_a_tpu(kind):
  case = tpu_compile.Case(
    kind=kind, model="nano", chip="v5e", num_chips=1, rows=1024, row_tile=128, num_layers=9
  )
  lowered = tpu_compile.LOWERED[kind](case, parallel.make_mesh())
  # The layers of a deep model are a loop, and loops over slabs have a bound that is handed in.
  assert lowered.as_text().count("stablehlo.while") > 4


@pytest.mark.skipif(
  importlib.util.find_spec("libtpu") is not None, reason="this Python has the TPU compiler"
)
def test_a_python_without_the_compiler_is_refused():
  with pytest.raises(ValueError, match="got a Python without libtpu, .* run bash launch/tpu_comp"):
    tpu_compile.require_compiler()


@pytest.mark.thorough
@pytest.mark.skipif(
  not PYTHON.exists(), reason="no .venv-tpu with libtpu; bash launch/tpu_compile.sh makes it"
)
def test_a_tile_compiles_for_a_tpu():
  name = "tile-qwen3-0.6b-v5e-x1-rows128-tile128"
  done = subprocess.run(
    [str(PYTHON), "-P", "-m", "experiments.compiled.tpu_compile", f"--only={name}"],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr
  record = json.loads(done.stdout.splitlines()[-1])
  assert record["refused"] == "" and record["cycles"] > 0
  # Over layers; over the slabs of queries, of outputs, of the MLP and of the vocabulary.
  assert (record["loops"], record["unknown_loops"]) == (5, 4)
