"""A model small enough to run every command and experiment in seconds, and runs of it."""

from __future__ import annotations

import pathlib

import jax
import pytest
import tiny_model

from experiments.invariance import nano as invariance
from seerjax.models import huggingface, loading, parameters, tokenizer as tokenizer_lib
from seerjax.run import presets as run_presets


def write_model(directory: pathlib.Path) -> str:
  """Writes a random model of two layers with nano's vocabulary; returns its directory."""
  model = tiny_model.CONFIG.changed(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_heads=8,
    num_kv_heads=2,  # As in small Qwen2.5 models; four of the eight slabs share each.
    max_model_len=512,
  )
  numerics = run_presets.main_job().numerics
  params = parameters.init(jax.random.key(0), model, numerics)
  # At the usual scale of an initialisation every distribution is nearly uniform.
  params = jax.tree.map(lambda leaf: leaf * 4 if leaf.ndim > 1 else leaf, params)
  huggingface.save(directory, params, model, tokenizer=tokenizer_lib.load(loading.NANO))
  return str(directory)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
  """The directory of a random model of two layers with nano's vocabulary."""
  return write_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def trained(
  tiny: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[pathlib.Path, dict[str, dict[str, list[float]]]]:
  """Part c on the tiny model: a directory with the two runs, and their log lines."""
  directory = tmp_path_factory.mktemp("trained")
  return directory, train(tiny, directory)


def train(model: str, directory: pathlib.Path) -> dict[str, dict[str, list[float]]]:
  """Runs part c of the experiment on invariance twice in a directory; returns the log lines."""
  config = invariance.InvarianceConfig(model=model, rl_steps=2, rl_groups=1, max_tokens=12)
  return invariance.on_policy(config, directory, lambda line: None)
