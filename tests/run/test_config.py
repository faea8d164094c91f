"""Settings of a run: errors, and defaults that depend on the model."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import jax.numpy as jnp
import pytest
from small_run import NUMERICS

from seerjax import checkpoint, numerics as numerics_lib
from seerjax.engine import engine as engine_lib
from seerjax.models import presets
from seerjax.rollout import groups
from seerjax.run import config as config_lib, directory as directory_lib
from seerjax.run.config import RunConfig, TrainerConfig

pytestmark = pytest.mark.usefixtures("programs_on_disk")


def save(directory: pathlib.Path, step: int, sizes: dict[str, Any]) -> None:
  """Writes a checkpoint of a run that was started with these sizes."""
  checkpoint.save(
    directory / "checkpoints", step, {"w": jnp.zeros(1)}, host_state={"sizes": sizes},
    fingerprint=numerics_lib.fingerprint(NUMERICS),
  )  # fmt: skip


@pytest.mark.thorough
def test_what_a_config_leaves_open_is_the_models_and_a_resume_keeps_it(tmp_path):
  open_config = RunConfig(engine=engine_lib.EngineConfig(max_model_len=512)).shared
  nano = presets.get("nano")
  decided = lambda config: config_lib.for_model(config, nano)[0]
  with_stored_sizes = lambda config: directory_lib.with_stored_sizes(config, tmp_path, resume=True)
  found = decided(open_config)
  assert config_lib.chosen(open_config, found) == (
    "chosen for this model and context: numerics.backend=native,"
    " numerics.row_tile=16, numerics.reduction_shards=8, engine.batch_size_buckets=(64, 512),"
    " trainer.rows_per_micro_batch=2048, trainer.sequences_per_micro_batch=32,"
    " optimizer.learning_rate=0.0001"
  )
  assert decided(found) == found and config_lib.chosen(found, found) == ""
  chosen = config_lib.chosen_sizes(found)
  sizes = chosen | {"sequences_per_micro_batch": 16, "batch_size_buckets": [32, 256]}
  save(tmp_path, 0, sizes)
  resumed = decided(with_stored_sizes(open_config))
  assert resumed.trainer.sequences_per_micro_batch == 16
  assert resumed.engine.batch_size_buckets == (32, 256)
  assert resumed.optimizer.learning_rate == 1e-4
  named = dataclasses.replace(
    open_config,
    engine=dataclasses.replace(open_config.engine, batch_size_buckets=(16,)),
    trainer=TrainerConfig(sequences_per_micro_batch=8),
  )
  assert with_stored_sizes(named).trainer.sequences_per_micro_batch == 8
  assert decided(with_stored_sizes(named)).engine.batch_size_buckets == (16,)
  # Another machine or another kind of weights would choose otherwise.
  assert resumed.numerics.backend == "native"
  save(tmp_path, 1, sizes | {"backend": "tiled"})
  assert decided(with_stored_sizes(open_config)).numerics.backend == "tiled"
  adapters = dataclasses.replace(open_config, lora_rank=4)
  assert decided(adapters).optimizer.learning_rate == 2e-4
  assert decided(with_stored_sizes(adapters)).optimizer.learning_rate == 1e-4


def with_context(model, positions):
  return dataclasses.replace(model, max_model_len=positions)


@pytest.mark.parametrize(
  ("name", "positions", "max_tokens"),
  [
    ("nano", 1024, 1024), ("nano", 64, 256), ("qwen3-0.6b", 8192, 20_000),
    ("qwen3-8b", 8192, 8192), ("qwen2.5-0.5b", 2048, 4000), ("llama-3.2-1b", 512, 600),
    ("llama-3.1-8b", 131_072, 131_072), ("nano-10m", 2, 2),
  ],
)  # fmt: skip
def test_answers_beyond_the_models_context_name_it_and_nothing_that_nobody_set(
  name, positions, max_tokens
):
  config = RunConfig(
    engine=engine_lib.EngineConfig(max_model_len=200_000),
    rollout=groups.RolloutConfig(max_tokens=max_tokens),
  )
  model = with_context(presets.get(name), positions)
  with pytest.raises(ValueError, match=rf"max_tokens: got {max_tokens}, expected at most") as found:
    config_lib.for_model(config.shared, model)
  message = str(found.value)
  assert f"at most {positions - 1}, " in message
  assert f"own context of {positions} positions (max_position_embeddings in" in message
  assert "rows_per_micro_batch" not in message and "EngineConfig" not in message
  if positions > 2:
    fitting = groups.RolloutConfig(max_tokens=positions - 1)
    config_lib.for_model(dataclasses.replace(config, rollout=fitting).shared, model)
