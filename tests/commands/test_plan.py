"""The command `plan`: memory and sizes of a run, from the model's shape alone."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import subprocess
import sys

import pytest

from seerjax.commands import plan, train
from seerjax.engine import engine as engine_lib
from seerjax.models import presets
from seerjax.run import presets as run_presets

ROOT = pathlib.Path(__file__).parents[2]


def test_the_main_jobs_plan_has_its_sizes():
  model = train.shape_of("nano")
  assert model is not None
  text = plan.describe(run_presets.main_job(), model)
  assert "1.1 M parameters in" in text and "memory, MiB a device: " in text
  assert "chosen for this model and context: " in text
  assert "up to 64 sequences of 512 positions at once" in text
  assert "step: 48 groups of 8, up to 82,944 tokens" in text and text.endswith("20 steps")


def test_what_does_not_fit_is_refused_with_its_figures():
  config = dataclasses.replace(
    run_presets.named_model(), engine=engine_lib.EngineConfig(max_model_len=32_768)
  )
  model = presets.get("qwen3-8b").changed(num_layers=400)
  with pytest.raises(ValueError, match="RunConfig: got a run that needs more memory than is free"):
    plan.describe(config, model)


@pytest.mark.parametrize("name", ["nano", "Qwen/Qwen3-0.6B", "someone/else"])
def test_a_shape_is_known_without_weights(name):
  assert (train.shape_of(name) is None) == (name == "someone/else")


def test_it_runs_from_the_command_line_and_writes_nothing(tmp_path):
  run = lambda *flags: subprocess.run(
    [sys.executable, "-m", "seerjax.commands", "plan", f"--workdir={tmp_path / 'run'}", *flags],
    cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True,
  )  # fmt: skip
  done = run("--config.rollout.group_size=4")
  assert done.returncode == 0 and "48 groups of 4" in done.stdout, done.stderr
  done = run("--config.model=someone/else")
  assert done.returncode == 2
  assert done.stderr.startswith("RunConfig.model: got 'someone/else', whose shape is not known")
  assert not (tmp_path / "run").exists()
