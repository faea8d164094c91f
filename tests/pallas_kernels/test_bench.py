"""The benchmark: its tables of made-up numbers, its budget, and a small dry run from end to end."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
from kernel_arrays import needs_interpreter
import numpy as np
import pytest

from pallas_kernels import gpu
from pallas_kernels.bench import (
  __main__ as bench,
  cases as cases_lib,
  check_sizes,
  checks as checks_lib,
  comparison,
  questions as questions_lib,
  timing as timing_lib,
)
from pallas_kernels.bench.comparison import Check
from pallas_kernels.bench.timing import Contestant, Machine, Timing

ROOT = pathlib.Path(__file__).parents[2]
MACHINE = Machine(copy_bandwidth=4e12, matmul_peak=800e12)
HEADER = {
  "dry_run": "",
  "date": "2026-01-02",
  "commit": "abc1234",
  "device": "NVIDIA H200",
  "driver": "580.1",
  "python": "3.12.3",
  "jax": "0.11.2",
  "command": "python -m pallas_kernels.bench",
}
FEATURES = 64
VECTOR = jax.ShapeDtypeStruct((FEATURES,), jnp.float32)


def case(bar=None, ours=jnp.sin, peers=(), kernel="rms_norm", name="small") -> cases_lib.Case:
  contestants = [Contestant(label, call, (VECTOR,)) for label, call in peers]
  return cases_lib.Case(
    kernel,
    name,
    Contestant("ours", ours, (VECTOR,)),
    tuple(contestants),
    num_bytes=4e6,
    num_operations=8e8,
    bar=bar,
  )


def passing(kernel="rms_norm") -> list[Check]:
  return [
    Check(kernel, "agreement", "values", True, "error 1e-3"),
    Check(kernel, "invariance", "alone", True, "equal: 0 of 8 entries"),
  ]


def cannot(x):
  raise ValueError("m=8 must be divisible by 128\nand more")


# A copy of 4e6 bytes takes 1 us of that machine, 8e8 operations too.
@pytest.mark.parametrize(
  "bar, seconds, verdict, text",
  [
    (cases_lib.Bar(cases_lib.COPY, 0.80), 1.24e-6, "met", "at least 80 % of copy bandwidth"),
    (cases_lib.Bar(cases_lib.COPY, 0.80), 1.30e-6, "not met", ""),
    (cases_lib.PREFILL, 1.6e-6, "met", "at least 60 % of matmul peak"),
    (cases_lib.PREFILL, 1.7e-6, "not met", ""),
    (cases_lib.Bar("peer", 0.85), 2.3e-6, "met", "at least 85 % of peer"),
    (cases_lib.Bar("peer", 0.85), 2.4e-6, "not met", ""),
    (cases_lib.VERIFICATION, 1e-6, "not measured", "at most 1.05 times one token"),
    (None, 1e-6, "", ""),
  ],
)
def test_bars_are_judged_by_what_they_name(bar, seconds, verdict, text):
  timings = [Timing("ours", seconds, seconds, seconds), Timing("peer", 2e-6, 2e-6, 2e-6)]
  row = bench.judged(case(bar), timings, MACHINE)
  assert row.verdict == verdict
  assert text in row.bar
  assert row.copy_share == pytest.approx(1e-6 / seconds)
  assert row.peak_share == pytest.approx(1e-6 / seconds)


def test_a_verification_is_judged_by_the_time_of_one_token():
  for seconds, verdict in ((1.04e-6, "met"), (1.06e-6, "not met")):
    timings = [Timing("ours", seconds), Timing(cases_lib.ONE_TOKEN, 1e-6)]
    assert bench.judged(case(cases_lib.VERIFICATION), timings, MACHINE).verdict == verdict


def test_the_page_says_times_shares_peers_and_bars():
  timings = [
    Timing("ours", 1.25e-6, 1.2e-6, 1.5e-6),
    Timing("cuBLAS", 1e-6, 0.9e-6, 1.1e-6),
    Timing("stock", reason="ValueError: m=8 | 128"),
  ]
  report = bench.Report(HEADER, MACHINE, passing())
  report.rows.append(bench.judged(case(cases_lib.Bar("cuBLAS", 0.85)), timings, MACHINE))
  page = bench.markdown(report)
  assert "2026-01-02 at abc1234: NVIDIA H200, 580.1, Python 3.12.3, JAX 0.11.2." in page
  assert "copies 4.00 TB/s (read and written) and multiplies bfloat16 at 800 TFLOP/s" in page
  assert (
    "| small | 1.2 (1.2 to 1.5) | 80 % | 80 % | cuBLAS 1.0 (0.9 to 1.1), 0.80x; stock: ValueError:"
    " m=8 / 128 | at least 85 % of cuBLAS | not met |"
  ) in page
  assert "| invariance | alone | equal: 0 of 8 entries | ok |" in page


def test_speed_is_refused_where_a_check_fails(tmp_path):
  for kind in ("agreement", "invariance"):
    failing = Check("rms_norm", kind, "this one", False, "differ: 3 of 8 entries")
    report = bench.Report(HEADER | {"dry_run": "dry"})
    bench.bench(report, {"rms_norm": [*passing(), failing]}, [case()], 60.0, tmp_path)
    (row,) = report.rows
    assert (row.verdict, row.timings) == ("refused", ())
    assert row.note == f"{kind} fails: this one: differ: 3 of 8 entries"
    assert report.failures == ["rms_norm: this one: differ: 3 of 8 entries"]
    page = (tmp_path / "bench.md").read_text()
    assert f"| small |  |  |  | {row.note} |  | refused |" in page
    assert "FAILED" in page
    assert "- rms_norm: this one: differ" in page


def test_a_kernel_that_raises_is_refused_and_the_others_go_on():
  def checks():
    yield from passing("matmul")
    raise RuntimeError("no such instruction")

  report = bench.Report(HEADER)
  bench.check(report, {"matmul": checks(), "rms_norm": passing()}, 60.0)
  assert "RuntimeError: no such instruction" in bench.refusal("matmul", report.checks)
  assert bench.refusal("rms_norm", report.checks) == ""
  assert bench.refusal("attention", report.checks) == (
    "no check of agreement and invariance was made"
  )


def test_claims_fail_a_run_and_questions_do_not():
  checks = [
    *passing(),
    Check("rms_norm", "claim", "stages 1 == 2", False, "differ: 1 of 8 entries"),
    Check("rms_norm", "question", "swapped == tall", False, "differ: 2 of 8 entries"),
  ]
  report = bench.Report(HEADER)
  bench.check(report, {"rms_norm": checks}, 60.0)
  assert report.failures == ["rms_norm: stages 1 == 2: differ: 1 of 8 entries"]
  assert bench.refusal("rms_norm", report.checks) == ""
  page = bench.markdown(report)
  assert "| claim | stages 1 == 2 | differ: 1 of 8 entries | FAILED |" in page
  assert "| question | swapped == tall | differ: 2 of 8 entries | no |" in page


class Clock:
  """A clock that advances only with work."""

  def __init__(self):
    self.now = 0.0

  def __call__(self) -> float:
    return self.now

  def work(self, checks, seconds):
    for check in checks:
      self.now += seconds
      yield check


def test_each_kernel_has_its_share_of_time_and_what_others_left():
  clock, report = Clock(), bench.Report(HEADER)
  checks = {
    "matmul": clock.work(passing("matmul") * 4, 10.0),
    "attention": clock.work(passing("attention"), 1.0),
    "rms_norm": clock.work(passing("rms_norm") * 3, 10.0),
  }
  bench.check(report, checks, 90.0, clock)
  made = {name: sum(done.kernel == name for done in report.checks) for name in checks}
  # 30 seconds are matmul's: the fourth check is past them. Attention leaves its own to the norms.
  assert made == {"matmul": 4, "attention": 2, "rms_norm": 5}
  assert report.left_out == [
    "matmul: the checks after 'alone'",
    "rms_norm: the checks after 'values'",
  ]


@pytest.mark.parametrize(
  "remaining, num_left, longest, expected",
  [(100.0, 10, 5.0, 10.0), (100.0, 1000, 5.0, 0.5), (4.9, 10, 5.0, 0.0), (5.0, 1, 5.0, 5.0)],
)
def test_a_case_gets_its_share_or_is_left_out(remaining, num_left, longest, expected):
  assert bench.case_seconds(remaining, num_left, longest) == expected


def test_the_number_of_copies_outlasts_l2_and_fits_memory():
  # A megabyte, a microsecond: as many as one program may hold.
  assert timing_lib.num_copies(1e6, 1e-6) == timing_lib.MOST_COPIES
  # Fifty megabytes of weights, 12 microseconds; then a cache of two gigabytes; then one of nine.
  assert timing_lib.num_copies(50e6, 12e-6) == timing_lib.MOST_COPIES
  assert timing_lib.num_copies(100e6, 200e-6) == 10
  assert timing_lib.num_copies(2.1e9, 500e-6) == 2
  assert timing_lib.num_copies(9e9, 2e-3) == 1


def test_contestants_are_timed_in_turn_and_one_that_raises_is_a_line():
  contestants = [
    Contestant("sine", jnp.sin, (VECTOR,)),
    Contestant("cannot", cannot, (VECTOR,)),
    Contestant("shared", lambda x, n: x * n, (VECTOR, np.float32(3) * np.ones(FEATURES, "f4"))),
    Contestant("torch", lambda torch, x: torch.sin(x), (VECTOR,), is_torch=True),
  ]
  timings = {t.name: t for t in timing_lib.race(contestants, 100e6, 1e-3, 0.1)}
  assert list(timings) == ["sine", "cannot", "shared", "torch"]
  for name in ("sine", "shared"):
    assert 0 < timings[name].least <= timings[name].median <= timings[name].most
  assert timings["cannot"].reason == "ValueError: m=8 must be divisible by 128"
  # Here PyTorch is absent, or has no GPU.
  assert timings["torch"].reason
  row = bench.judged(case(cases_lib.Bar("cannot", 0.85)), [*timings.values()], MACHINE)
  assert row.verdict == "not measured"
  assert bench.judged(case(), [timings["cannot"]], MACHINE).verdict == "failed"


@pytest.mark.thorough
def test_a_machine_is_measured():
  machine = timing_lib.measure_machine(1 << 20, (64, 128))
  assert machine.copy_bandwidth > 1e6
  assert machine.matmul_peak > 1e6


def test_inputs_are_drawn_where_they_are_shapes():
  drawn = timing_lib.draw((VECTOR, np.arange(3)), seed=0)
  assert abs(float(jnp.std(drawn[0])) - 1) < 0.4
  np.testing.assert_array_equal(drawn[1], np.arange(3))
  assert timing_lib.shapes_of((np.arange(3, dtype=np.int32), VECTOR))[0].shape == (3,)


@pytest.mark.parametrize(
  "found, expected, passed",
  [
    ([1.0, 2.0], [1.0, 2.0], True),
    ([1.0, 2.1], [1.0, 2.0], False),
    ([1.0, np.nan], [1.0, 2.0], False),
    ([0.0, 0.0], [0.0, 0.0], True),
  ],
)
def test_values_agree_within_limits_and_nan_never(found, expected, passed):
  done = comparison.agreement(
    "rms_norm", "x", np.asarray(found), np.asarray(expected), (0.01, 0.02)
  )
  assert done.passed is passed


def test_bits_are_counted_where_values_are_equal():
  zero, minus_zero = jnp.zeros(3), -jnp.zeros(3)
  assert comparison.num_differing((zero, zero), (minus_zero, zero)) == 3
  nan = jnp.full(2, jnp.nan, jnp.bfloat16)
  assert comparison.num_differing(nan, nan) == 0
  done = comparison.same_bits("matmul", "claim", "stages", [(zero, minus_zero), (zero, zero)])
  assert (done.passed, done.seen) == (False, "differ: 3 of 6 entries")


def test_cases_hold_the_issues_shapes_and_count_bytes_and_operations():
  cases = {case.name: case for case in cases_lib.cases()}
  product = cases["Qwen3-8B qkv, 1 row"]
  assert product.num_bytes == 2 * (4096 + 4096 * 6144 + 6144)
  assert product.num_operations == 2 * 4096 * 6144
  decode = cases["Qwen3-8B decode, 64 x 8192"]
  assert decode.num_bytes == 2 * (2 * 64 * 8192 * 8 * 128 + 2 * 64 * 4096)
  assert decode.bar == cases_lib.DECODE
  prefill = cases["Qwen3-8B prefill, 4 x 2048"]
  assert prefill.num_operations == 4 * 4 * (2048 * 2049 / 2) * 4096
  verification = cases["gpt-oss-120b verification of 8 drafts, 1 x 8192"]
  assert verification.ours.inputs[0].shape == (9, 8, 8, 64)
  heads = cases["Qwen3-8B queries' and keys' norm, 64 rows"]
  assert [x.shape for x in heads.ours.inputs[:2]] == [(8, 64, 4, 128), (8, 64, 1, 128)]
  assert heads.num_bytes == 2 * (2 * 64 * 40 * 128 + 2 * 128)
  assert "gpt-oss-120b queries' and keys' norm, 64 rows" not in cases  # It has no such norm.
  for model in cases_lib.MODELS:
    for num_rows in (1, 8, 16, 64, 1024, 4096):
      for layer in ("qkv", "out", "gate_up", "down"):
        bar = cases[f"{model.name} {layer}, {cases_lib.rows_text(num_rows)}"].bar
        few = cases_lib.ROWS_FROM_MEMORY if num_rows <= 64 else None
        assert bar == (cases_lib.ROWS_FROM_TENSOR_CORE if num_rows >= 1024 else few)


def test_segments_of_a_case_cover_every_new_row_once():
  _, _, _, segments = cases_lib.paged(cases_lib.QWEN3_8B, 3, 256, 20, 16)
  np.testing.assert_array_equal(segments.segment_start, [0, 16, 20, 36, 40, 56])
  np.testing.assert_array_equal(segments.segment_length, [16, 4] * 3)
  np.testing.assert_array_equal(segments.positions, np.tile(np.arange(236, 256), 3))
  assert sorted(segments.page_table[::2].reshape(-1)) == list(range(12))
  assert (segments.page_table[::2] == segments.page_table[1::2]).all()


def first_of_each_kind() -> list[cases_lib.Case]:
  cases = cases_lib.cases()
  kept = {case.name: case for case in cases if case.name.startswith("Qwen3-30B")}
  names = ("norm, 64 rows", "gate_up, 8 rows", "verification of 8 drafts, 1 x 8192")
  return [kept[f"Qwen3-30B-A3B {name}"] for name in names]


@pytest.mark.thorough
def test_a_dry_run_lowers_and_names_what_does_not(tmp_path):
  peers = (("cannot", cannot), ("sine", jnp.sin))
  cases = [*first_of_each_kind(), case(ours=cannot, name="broken"), case(peers=peers)]
  kernels = dict.fromkeys(case.kernel for case in cases)
  report = bench.Report(HEADER | {"dry_run": bench.DRY_RUN})
  bench.bench(report, {name: passing(name) for name in kernels}, cases, 60.0, tmp_path)
  assert [row.verdict for row in report.rows] == ["", "not measured", "not measured", "failed", ""]
  assert report.failures == ["broken: does not lower: ValueError: m=8 must be divisible by 128"]
  record = json.loads((tmp_path / "bench.json").read_text())
  assert record["machine"] is None
  assert record["rows"][0]["timings"][0] == {
    "name": "rms_norm", "median": 0.0, "least": 0.0, "most": 0.0, "reason": bench.LOWERS
  }  # fmt: skip
  page = (tmp_path / "bench.md").read_text()
  assert "**dry run: nothing here was measured.**" in page
  assert (
    "| small |  |  |  | lowers for an H200; cannot: does not lower: ValueError: m=8 must be"
    " divisible by 128; sine: lowers for an H200 |  |  |"
  ) in page


@pytest.mark.thorough
@needs_interpreter
def test_a_dry_run_checks_lowers_and_writes_both_files(tmp_path):
  # One check or two of each kernel. All of them are the command with --dry_run.
  sizes = dataclasses.replace(check_sizes.TINY, interpret=True, rows=(1, 9))
  report = bench.Report(bench.header("abc1234", is_dry=True))
  checks = checks_lib.kernel_checks(sizes)
  few = {name: itertools.islice(checks[name], 2 if name == "rms_norm" else 1) for name in checks}
  bench.bench(report, few, first_of_each_kind(), 60.0, tmp_path)
  assert report.failures == []
  assert {done.kernel for done in report.checks if done.passed} == set(checks)
  # Only the norm was seen to be invariant.
  assert [row.verdict for row in report.rows] == ["", "refused", "refused"]
  assert report.rows[1].note == "no check of invariance was made"
  record = json.loads((tmp_path / "bench.json").read_text())
  assert [done["kernel"] for done in record["checks"]].count("rms_norm") == 2
  page = (tmp_path / "bench.md").read_text()
  assert "| agreement | 9 rows of 64, bfloat16 | error" in page
  assert "| Qwen3-30B-A3B norm, 64 rows |  |  |  | lowers for an H200; XLA: lowers for an" in page


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", checks_lib.kernel_checks(check_sizes.TINY))
def test_all_checks_hold_on_this_gpu(kernel):
  for done in checks_lib.kernel_checks(check_sizes.TINY)[kernel]:
    assert done.passed or done.kind == "question", done


@pytest.mark.thorough
@pytest.mark.parametrize(
  "question",
  [
    questions_lib.register_operand,
    questions_lib.glue_fma,
    questions_lib.prefill_merge,
    questions_lib.cpu_lowering,
    pytest.param(questions_lib.wgmma_height, marks=needs_interpreter),
    pytest.param(questions_lib.operand_order, marks=needs_interpreter),
    pytest.param(questions_lib.wgmma_width, marks=needs_interpreter),
  ],
)
def test_questions_are_asked_without_a_gpu_and_then_change_nothing(question):
  small = {"weights": ((64, 64, 1),), "claim_rows": 9, "swapped_rows": (8, 16)}
  sizes = dataclasses.replace(check_sizes.TINY, interpret=True, **small)
  answer = questions_lib.ask(question, questions_lib.Setting(sizes, None))
  assert answer.name == question.__name__
  assert answer.seen.startswith("dry run: ")
  assert answer.change == "none: ask on a GPU"


def test_glue_is_its_definition():
  x, angle = jnp.asarray([[1.0, 2.0, 3.0, 4.0]]), jnp.asarray([[0.0, np.pi / 2]], jnp.float32)
  np.testing.assert_allclose(questions_lib.rotary(x, angle), [[1, -4, 3, 2]], atol=1e-6)
  np.testing.assert_allclose(questions_lib.residual(x, x), 1.7 * x, rtol=1e-6)
  np.testing.assert_allclose(questions_lib.gated(x, x), x * jax.nn.silu(x), rtol=1e-6)


def test_an_answer_that_raises_is_a_failure_and_the_others_are_asked(tmp_path):
  def broken(setting):
    raise RuntimeError("no room")

  report = bench.Report(HEADER)
  setting = questions_lib.Setting(check_sizes.TINY, None)
  bench.answer_questions(report, [broken, questions_lib.glue_fma], setting, tmp_path)
  assert report.failures == ["broken: RuntimeError: no room"]
  assert [answer.name for answer in report.answers] == ["glue_fma"]
  assert "| glue_fma | Does XLA contract multiply-adds by size? | dry run:" in bench.markdown(
    report
  )


def test_questions_of_the_list_are_questions_of_the_program():
  text = (ROOT / "docs/results/GPU_TODO.md").read_text()
  for question in questions_lib.QUESTIONS:
    assert f"--question={question.__name__}`" in text
  assert text.count("--question=") == len(questions_lib.QUESTIONS)


def test_names_choose_kernels_and_questions():
  assert bench.named([], ("matmul", "rms_norm"), "--only") == ("matmul", "rms_norm")
  assert bench.named(["rms_norm"], ("matmul", "rms_norm"), "--only") == ("rms_norm",)
  assert bench.chosen_questions("glue_fma") == (questions_lib.glue_fma,)
  assert bench.chosen_questions("all") == questions_lib.QUESTIONS


@pytest.mark.thorough
def test_a_cpu_is_told_of_the_dry_run(tmp_path):
  done = subprocess.run(
    [sys.executable, "-m", "pallas_kernels.bench", f"--out={tmp_path}"],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode != 0
  assert "the kernels cannot run here: got the platform 'cpu', expected an NVIDIA GPU" in (
    done.stdout + done.stderr
  )
  assert "--dry_run needs no GPU." in done.stdout + done.stderr
  assert not list(tmp_path.iterdir())


def test_a_command_that_is_absent_says_nothing():
  assert bench.output_of("no-such-command") == ""
  assert bench.header("abc", is_dry=True)["commit"] == "abc"
  assert bench.header("", is_dry=True)["dry_run"] == bench.DRY_RUN
  assert gpu.device_reason(interpret=False) is not None
