"""launch/gpu_check.sh, as far as it goes without a GPU."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
# In the bench's place: it writes its arguments, and ends as a file beside it says.
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
  root = tmp_path / "a checkout"
  shutil.copytree(ROOT / "launch", root / "launch")
  (root / "pallas_kernels" / "bench").mkdir(parents=True)
  (root / "pallas_kernels" / "__init__.py").write_text("")
  (root / "pallas_kernels" / "bench" / "__main__.py").write_text(BENCH)
  return root


def run(checkout: pathlib.Path, *arguments: str, **environment: str) -> tuple[int, str]:
  """Runs gpu_check.sh with this Python; returns its exit status and all that it wrote."""
  done = subprocess.run(
    ["bash", str(checkout / "launch" / "gpu_check.sh"), *arguments],
    env=os.environ | {"SEERJAX_PYTHON": sys.executable, "JAX_PLATFORMS": "cpu"} | environment,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    check=False,
  )
  return done.returncode, done.stdout


def test_help_names_every_part(checkout: pathlib.Path):
  status, text = run(checkout, "--help")
  assert status == 0
  for part in ("racecheck", "memcheck", "kernels", "self_test", "contract", "bench", "questions"):
    assert f"\n  {part} " in text


def test_a_dry_run_runs_the_bench_and_says_what_it_leaves_out(checkout: pathlib.Path):
  status, text = run(checkout, "--dry_run")
  assert status == 0, text
  out = checkout / "runs" / "gpu_check"
  assert f"bench got --out={out} --seconds=" in text
  assert "--commit=unknown --dry_run\n" in text
  for part in ("racecheck", "memcheck", "kernels", "self_test", "contract"):
    assert f"  not run      0 s  {part}: it needs a GPU\n" in text or f"{part}: this Python" in text
  assert "gpu_check.sh: passed in" in text
  assert "bench got" in (out / "bench.log").read_text()


def test_parts_are_chosen_and_results_go_where_they_are_wanted(
  checkout: pathlib.Path, tmp_path: pathlib.Path
):
  out = tmp_path / "some where"
  status, text = run(checkout, "--dry_run", f"--out={out}", "--only=questions")
  assert status == 0, text
  assert f"bench got --question=all --out={out}/questions --commit=unknown --dry_run\n" in text
  assert text.count("\n== ") == 2  # questions and the summary


def test_a_part_that_fails_or_has_no_time_fails_the_whole(checkout: pathlib.Path):
  (checkout / "pallas_kernels" / "bench" / "status").write_text("")
  status, text = run(checkout, "--dry_run", "--only=bench,questions")
  assert status == 1
  assert text.count("  FAILED ") == 2
  assert "gpu_check.sh: 2 part(s) FAILED" in text
  (checkout / "pallas_kernels" / "bench" / "orders").write_text("60")
  status, text = run(checkout, "--dry_run", "--only=bench,questions", "--seconds=1")
  assert status == 1
  assert "NO TIME" in text
  assert "questions: --only=questions --seconds=N gives it more" in text


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
    ("--fast", "got '--fast', expected --dry_run, --out=, --only=, --seconds= or --help."),
    ("--only=bench,speed", "--only: got 'speed', expected some of: racecheck memcheck kernels"),
    ("--seconds=soon", "--seconds: got 'soon', expected a number of seconds."),
  ],
)
def test_what_cannot_be_asked_is_refused(checkout: pathlib.Path, argument: str, message: str):
  status, text = run(checkout, argument)
  assert status == 1
  assert message in text
