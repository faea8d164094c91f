"""launch/gpu_check.sh, as far as it runs without a GPU."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import tarfile
import zipfile

import launch_scripts
from launch_scripts import ROOT
import pytest

# Replaces the benchmark: writes its arguments, and exits as a file next to it specifies.
BENCH = """
import pathlib, sys, time
out = next(a.removeprefix("--out=") for a in sys.argv if a.startswith("--out="))
pathlib.Path(out).mkdir(parents=True, exist_ok=True)
print("bench got", *sys.argv[1:])
orders = pathlib.Path(__file__).with_name("orders")
time.sleep(float(orders.read_text()) if orders.exists() else 0)
sys.exit(pathlib.Path(__file__).with_name("status").exists())
"""


@pytest.fixture
def checkout(tmp_path: pathlib.Path) -> pathlib.Path:
  """A checkout with a bench of a few lines, in a path with spaces."""
  root = launch_scripts.copied(tmp_path / "a checkout")
  (root / "pallas_kernels" / "bench").mkdir(parents=True)
  (root / "pallas_kernels" / "__init__.py").write_text("")
  (root / "pallas_kernels" / "bench" / "__main__.py").write_text(BENCH)
  return root


def run(checkout: pathlib.Path, *arguments: str, **environment: str) -> tuple[int, str]:
  environment = {"JAX_PLATFORMS": "cpu"} | environment
  return launch_scripts.run("gpu_check", *arguments, root=checkout, **environment)


def test_help_names_every_part(checkout: pathlib.Path):
  status, text = run(checkout, "--help")
  assert status == 0
  names = ("kernels", "questions", "bits", "speed", "steps", "job", "memory")
  for number, name in enumerate(names, start=1):
    assert f"\n  {number} {name} " in text


def test_parts_are_processes_whose_results_are_kept(checkout: pathlib.Path):
  status, text = run(checkout, "--dry_run", "--part=1,2")
  assert status == 0, text
  out = checkout / "runs" / "gpu_check"
  summary = (out / "summary.txt").read_text()
  assert summary.startswith("commit unknown, parts 1 2, a dry run: nothing here was measured\n")
  kernels = ("matmul", "attention", "token_logprobs", "rms_norm", "grouped_matmul")
  questions = (
    "parallel_merge", "wgmma_height", "wgmma_width", "operand_order", "glue_fma", "cpu_lowering",
    "register_operand",
  )  # fmt: skip
  # The worst case first, each case in a separate process.
  lines = [line.split(" s  ")[-1] for line in summary.splitlines() if line.startswith("  ok ")]
  assert lines == [*kernels, *questions]
  log = (out / "part1.log").read_text()
  for kernel in kernels:
    assert f"/part1/{kernel} --dry_run --checks_only --only={kernel} --seconds=" in log
  for part, names in ((1, kernels), (2, questions)):
    with tarfile.open(out / f"part{part}.tar.gz") as kept:
      assert {f"part{part}/{name}" for name in names} <= set(kept.getnames())
  assert "gpu_check.sh: passed in" in text
  # A lent machine returns a limited number of files.
  assert len(list(out.iterdir())) == 5


def test_results_go_where_they_are_wanted(checkout: pathlib.Path, tmp_path: pathlib.Path):
  out = tmp_path / "some where"
  status, text = run(checkout, "--dry_run", f"--out={out}", "--part=7")
  assert status == 0, text
  assert "--small --only=rms_norm" in (out / "part7.log").read_text()
  assert sorted(path.name for path in out.iterdir()) == [
    "part7.log", "part7.tar.gz", "summary.txt"
  ]  # fmt: skip


def test_the_engines_own_shapes_are_timed(checkout: pathlib.Path):
  status, text = run(checkout, "--dry_run", "--part=4")
  assert status == 0, text
  for kernel in ("matmul", "attention", "token_logprobs", "rms_norm"):
    assert f"--only={kernel} --models=Qwen3-8B --tiny_checks" in text
  assert "--question=decode_bandwidth" in text


def test_a_process_that_fails_or_has_no_time_fails_the_whole(checkout: pathlib.Path):
  (checkout / "pallas_kernels" / "bench" / "status").write_text("")
  status, text = run(checkout, "--dry_run", "--part=2")
  assert status == 1
  assert text.count("\n  FAILED ") == 2 * 7  # As it comes, and in the summary.
  assert "gpu_check.sh: 7 process(es) FAILED" in text
  (checkout / "pallas_kernels" / "bench" / "orders").write_text("60")
  status, text = run(checkout, "--dry_run", "--part=2", "--seconds=1")
  assert status == 1
  assert text.count("\n  NO TIME ") == 2 * 7


def test_processes_that_measure_no_time_run_at_once(checkout: pathlib.Path):
  (checkout / "pallas_kernels" / "bench" / "orders").write_text("1")
  status, text = run(checkout, "--dry_run", "--part=1,2,4", "--together")
  assert status == 0, text
  assert "\npart 1, at once\n" in text
  assert "\npart 2, at once\n" in text
  # The timed part waits for the others, and the outputs are not mixed.
  assert text.index("\npart 4\n") > text.index("\npart 2, at once\n")
  assert "only=attention" in (checkout / "runs" / "gpu_check" / "part1.log").read_text()
  assert text.count("\n  ok ") == 2 * (5 + 7 + 6)
  (checkout / "pallas_kernels" / "bench" / "status").write_text("")
  status, text = run(checkout, "--dry_run", "--part=1", "--together")
  assert status == 1
  assert "gpu_check.sh: 5 process(es) FAILED" in text


def test_what_this_python_lacks_is_named_or_taken_from_a_wheel(
  checkout: pathlib.Path, tmp_path: pathlib.Path
):
  script = checkout / "launch" / "gpu_check.sh"
  script.write_text(script.read_text().replace('LIBRARY="', 'LIBRARY="a_package_of_nobody '))
  status, text = run(checkout, "--dry_run", "--part=5", f"--wheels={tmp_path}")
  assert status == 0, text
  assert "this Python has no a_package_of_nobody, and no wheel of it lies in" in text
  with zipfile.ZipFile(tmp_path / "a_package_of_nobody-1-py3-none-any.whl", "w") as wheel:
    wheel.writestr("a_package_of_nobody.py", "")
  compiled = checkout / "experiments" / "compiled"
  compiled.mkdir(parents=True)
  for package in (compiled.parent, compiled):
    (package / "__init__.py").write_text("")
  (compiled / "engine_step.py").write_text("import a_package_of_nobody as a, sys\n")
  status, text = run(checkout, "--dry_run", "--part=5", f"--wheels={tmp_path}")
  assert status == 0, text
  assert text.count("\n  ok ") == 2 * 3
  (tmp_path / "broken.whl").write_text("no zip")
  status, text = run(checkout, "--dry_run", "--part=5", f"--wheels={tmp_path}")
  assert status == 1
  assert f"--wheels: got '{tmp_path}/broken.whl', expected a wheel; download it again." in text


@pytest.mark.long
def test_a_dry_run_goes_through_all_parts(tmp_path: pathlib.Path):
  """The real benchmark, interpreted; takes 15 minutes or more."""
  status, text = run(ROOT, "--dry_run", f"--out={tmp_path}")
  assert status == 0, text
  for part in range(1, 8):
    assert f"\npart {part}\n" in text
  assert "one SHA-256 of what both learned: " in text


def test_a_python_without_jax_is_named(checkout: pathlib.Path, tmp_path: pathlib.Path):
  subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
  python = tmp_path / "venv" / "bin" / "python"
  status, text = run(checkout, "--dry_run", SEERJAX_PYTHON=str(python), PYTHONPATH="")
  assert status == 1
  assert "got no Python that can run the kernels, expected one with jax, numpy and absl-py" in text
  assert f"{python}: it has no jax, no numpy, no absl-py" in text
  status, text = run(checkout, SEERJAX_PYTHON="/no/such/python")
  assert status == 1
  assert "/no/such/python: it does not run" in text


def test_a_machine_without_a_gpu_is_named(checkout: pathlib.Path):
  status, text = run(checkout)
  assert status == 1
  assert "expected one with jax[cuda] that sees a GPU, numpy and absl-py" in text
  assert "sees no GPU (JAX_PLATFORMS='cpu')" in text


@pytest.mark.parametrize(
  "argument, message",
  [
    ("--fast", "got '--fast', expected --part=, --together, --dry_run, --out=, --wheels="),
    ("--part=1,speed", "--part: got 'speed', expected some of: 1 2 3 4 5 6 7."),
    ("--seconds=soon", "--seconds: got 'soon', expected a number of seconds."),
  ],
)
def test_what_cannot_be_asked_is_refused(checkout: pathlib.Path, argument: str, message: str):
  status, text = run(checkout, argument)
  assert status == 1
  assert message in text
