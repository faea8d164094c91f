"""One GRPO step at real size, by command: random weights in the shape of Qwen3-0.6B."""

from __future__ import annotations

import json
import os
import pathlib
import re
import resource
import subprocess
import sys

import pytest

from experiments.throughput import real as real_speed
from seerjax.models import (
  huggingface,
  presets,
)

ROOT = pathlib.Path(__file__).parents[2]
QWEN3 = presets.get("qwen3-0.6b")
GIB = 2**30


def one_step(model: pathlib.Path, workdir: pathlib.Path, log: pathlib.Path) -> tuple[str, int]:
  """Takes one GRPO step of two groups of two 32-token responses; returns (output, peak bytes)."""
  command = (
    sys.executable, "-m", "seerjax.commands", "train",
    f"--config.model={model}", f"--workdir={workdir}",
    "--nobitwise", "--config.num_steps=1", "--config.data_parallel_size=1",
    "--config.rollout.prompts_per_step=2", "--config.rollout.group_size=2",
    "--config.rollout.max_tokens=32", "--config.evaluation.num_problems=1",
    "--config.engine.max_model_len=256", "--config.engine.max_num_seqs=4",
    "--config.engine.batch_size_buckets=(16,)", "--config.engine.release_kv_while_training",
    "--config.numerics.compute_dtype=bfloat16", "--config.trainer.remat=layer",
  )  # fmt: skip
  with log.open("w") as out:
    done = subprocess.run(
      command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
      stdout=out, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
  output = log.read_text()
  assert done.returncode == 0, output
  return output, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024


def planned_bytes(output: str) -> int:
  """Returns the bytes of the last memory plan: in use plus additional."""
  found = re.findall(r"at most ([\d,]+) on top of ([\d,]+) in use now", output)
  return sum(int(number.replace(",", "")) for number in found[-1]) * 2**20


@pytest.mark.long
def test_a_whole_step_of_28_layers_fits_24_gib_and_its_plan(tmp_path: pathlib.Path):
  model, workdir = tmp_path / "model", tmp_path / "run"
  real_speed.write_random(model, QWEN3)
  output, peak = one_step(model, workdir, tmp_path / "log")
  planned = planned_bytes(output)
  print(f"peak {peak / GIB:.2f} GiB, planned {planned / GIB:.2f} GiB")
  assert peak < 24 * GIB and 0.8 * planned < peak < 1.2 * planned
  summary = json.loads((workdir / "summary.json").read_text())
  assert summary["optimizer_steps"] == 1 and summary["kl_max"] == 0.0
  assert summary["max_abs_logprob_gap"] == 0.0
  assert huggingface.load_config(workdir / "model") == QWEN3


def test_a_random_model_of_real_width_is_written_as_others_are(tmp_path: pathlib.Path):
  model = QWEN3.changed(num_layers=1, vocab_size=1024, intermediate_size=64)
  real_speed.write_random(tmp_path / "model", model)
  assert huggingface.load_config(tmp_path / "model") == model
