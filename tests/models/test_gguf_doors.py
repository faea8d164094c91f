"""Every entry point that takes a model name accepts a GGUF file, and refuses unreadable ones."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import subprocess
import sys
from typing import Any

import gguf_cases
import jax
import numpy as np
import pytest

from experiments import peer_models
import seerjax
from seerjax import numerics as numerics_lib
from seerjax.commands import export, generate, serve, train
from seerjax.engine import engine as engine_lib
from seerjax.models import (
  gguf_file,
  gguf_write,
  huggingface,
  loading,
  parameters,
  tokenizer as tokenizer_lib,
)
from seerjax.rollout import groups
from seerjax.run import command_line, placement, policy as policy_lib, presets
from seerjax.speculation import draft_loading

CONFIG = gguf_cases.QWEN3
ROOT = pathlib.Path(__file__).parents[2]
AUTO = numerics_lib.NumericsConfig()


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> pathlib.Path:
  path = tmp_path_factory.mktemp("files") / "small.Q8_0.gguf"
  tokenizer = gguf_cases.tokenizer("qwen2")
  gguf_write.save(path, gguf_cases.weights(CONFIG), CONFIG, kind="Q8_0", tokenizer=tokenizer)
  return path


@pytest.fixture(scope="module")
def unread(tmp_path_factory) -> pathlib.Path:
  """A file with an unsupported architecture."""
  entries, records = gguf_cases.parts()
  entries["general.architecture"] = gguf_cases.value("str", "mamba")
  path = tmp_path_factory.mktemp("files") / "mamba.gguf"
  path.write_bytes(gguf_cases.raw(entries, records))
  return path


def draft(path: pathlib.Path) -> Any:
  numerics = gguf_cases.NUMERICS
  params = parameters.compute_params(gguf_cases.weights(CONFIG), numerics)
  model = loading.Model(CONFIG, params, numerics, gguf_cases.tokenizer("qwen2"))
  sizes = engine_lib.EngineConfig(page_size=16, max_num_seqs=2, max_model_len=64)
  engine = engine_lib.Engine(model, config=sizes, key=jax.random.key(0))
  return draft_loading.load_draft(path, engine)


# By name: functions of the path that return the model's `config`, or an object that has it.
DOORS: dict[str, Any] = {
  "seerjax.load_model": seerjax.load_model,
  "huggingface.load_config": huggingface.load_config,
  "run.policy": lambda path: policy_lib.load_policy(str(path), AUTO).model,
  "run.placement": lambda path: (
    placement.placed(str(path), AUTO, data_parallel_size=1, tensor_parallel_size=1).shape
  ),
  "commands.generate": lambda path: generate.load(str(path))[0].model,
  "speculation.draft_loading": draft,
}


@pytest.mark.parametrize("door", DOORS)
def test_every_door_takes_a_file(door, file):
  found = DOORS[door](file)
  config = found if hasattr(found, "vocab_size") else found.config
  # A draft omits embedding rows without a token.
  assert (config.num_layers, config.hidden_size) == (CONFIG.num_layers, CONFIG.hidden_size)
  assert (
    config.norm_eps == CONFIG.norm_eps
    and config.layers[0].attention.rotary == CONFIG.layers[0].attention.rotary
  )


@pytest.mark.parametrize("door", DOORS)
def test_every_door_refuses_what_is_not_read_by_file_and_field(door, unread):
  with pytest.raises(NotImplementedError, match=r"mamba\.gguf: general\.architecture: got 'mamba'"):
    DOORS[door](unread)


def test_a_run_of_a_file_says_its_memory_before_weights_are_read(file, capsys):
  config = dataclasses.replace(
    presets.named_model(), rollout=groups.RolloutConfig(max_tokens=32),
    engine=engine_lib.EngineConfig(max_model_len=96),
  )  # fmt: skip
  train.say_memory(config.shared, str(file))
  assert "MiB" in capsys.readouterr().out


def test_a_file_is_served_under_its_own_name(file, tmp_path):
  assert serve.name_of(str(file)) == "small.Q8_0"
  assert serve.name_of(str(tmp_path)) == tmp_path.name
  assert serve.name_of("nano") == "nano" and serve.name_of("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"


def test_a_path_that_is_no_file_is_named(tmp_path):
  with pytest.raises(FileNotFoundError, match=r"got '.*none\.gguf', expected a GGUF file"):
    loading.path_of(tmp_path / "none.gguf")


def test_the_folder_of_a_file_says_to_name_the_file(file):
  with pytest.raises(FileNotFoundError, match=r"got .* with small\.Q8_0\.gguf but .*; pass .*gguf"):
    loading.path_of(file.parent)


def test_what_is_not_read_ends_a_command_with_its_message_alone(unread, capsys):
  with pytest.raises(SystemExit) as stopped, command_line.refusals():
    loading.load_model(unread)
  assert stopped.value.code == 2
  assert capsys.readouterr().err.count("\n") == 1


def test_a_file_becomes_a_directory_and_a_directory_a_file(file, tmp_path):
  export.export_model(str(file), export.Target(tmp_path / "model", dtype="float32"))
  one, other = (huggingface.load(p, AUTO)[0] for p in (file, tmp_path / "model"))
  assert jax.tree.all(jax.tree.map(np.array_equal, one, other))
  assert tokenizer_lib.load(tmp_path / "model").chat_ids("hi") == tokenizer_lib.load(file).chat_ids(
    "hi"
  )
  report = export.export_model(
    str(tmp_path / "model"), export.Target(tmp_path / "again.gguf", gguf="Q8_0")
  )
  # Numbers already in Q8_0 are unchanged: the largest of a block is 127 steps.
  assert "Q8_0: 15 tensors" in report and "F32: 9 tensors" in report
  again = gguf_file.File(tmp_path / "again.gguf")
  for name in again.tensors:
    np.testing.assert_allclose(again.read(name), gguf_file.File(file).read(name), atol=1e-6)


def run(*flags: str) -> subprocess.CompletedProcess:
  return subprocess.run(
    [sys.executable, "-P", "-m", "seerjax.commands", "export", *flags],
    capture_output=True, text=True, cwd=ROOT,
    env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
  )  # fmt: skip


@pytest.mark.thorough
def test_the_command_lists_what_it_writes_and_refuses_in_one_line(tmp_path):
  done = run("--model=nano", "--gguf=Q4_0", f"--out={tmp_path / 'nano.gguf'}")
  assert done.returncode == 2 and "pass the closest one" in done.stderr
  done = run("--model=nano", "--gguf=Q4_0", "--gguf_pre=qwen2", f"--out={tmp_path / 'nano.gguf'}")
  assert done.returncode == 0, done.stderr
  first, *lines = done.stdout.splitlines()
  assert first == f"nano is in {tmp_path / 'nano.gguf'}"
  assert lines == [
    "Q4_0: 36 tensors, 1,130,496 numbers, 635,904 bytes",
    "F32: 21 tensors, 1,568 numbers, 6,272 bytes",
  ]


@pytest.mark.thorough
def test_peers_that_read_no_files_are_given_a_directory(file, tmp_path):
  found = peer_models.as_directory(str(file), tmp_path)
  assert found == str(tmp_path / "small.Q8_0")
  assert huggingface.load_config(found) == CONFIG
  assert peer_models.as_directory(str(file), tmp_path) == found  # Not written again.
  assert peer_models.as_directory("nano", tmp_path) == "nano"
  with pytest.raises(ValueError, match=r"no\.gguf', expected a GGUF file"):
    peer_models.as_directory("no.gguf", tmp_path)
