"""Prints the memory and the sizes that a run of `train` would have; runs nothing.

    seerjax plan --config.model=Qwen/Qwen3-8B --config.lora_rank=16

It takes the flags of `seerjax train`. From the model's shape alone it prints which settings are
chosen for the model, the memory of a device, and the engine's sizes, all for this machine; no
weights are read. A run that does not fit is refused with its figures (exit status 2).
"""

from __future__ import annotations

from absl import flags

from seerjax import parallel
from seerjax.commands import flags as flags_lib, train
from seerjax.engine import sizes
from seerjax.models import config as model_config
from seerjax.run import (
  command_line,
  config as config_lib,
  learning_rates,
  memory as memory_lib,
  programs as programs_lib,
)
from seerjax.run.config import RunConfig


def describe(config: RunConfig, model: model_config.TransformerConfig) -> str:
  """Returns the plan of a run as text.

  Raises:
    ValueError: with the figures, if the run does not fit.
  """
  programs = programs_lib.make_programs(config.shared, model)
  settled, plan = programs.config, memory_lib.memory_plan(programs)
  rollout, trainer, engine = config.rollout, settled.trainer, plan.engine
  completions = rollout.prompts_per_step * rollout.group_size
  lines = [
    f"{learning_rates.num_parameters(model) / 1e6:,.1f} M parameters in {model.num_layers} layers,"
    f" a context of {model.max_model_len}",
    config_lib.chosen(config.shared, settled),
    plan.describe(),
    f"engine, of an instance: {engine.num_pages} pages of {engine.page_size} positions"
    f"{sizes.windows_described(engine, programs.decoder)}, up to"
    f" {engine.max_num_seqs} sequences of {engine.max_model_len} positions at once, rows a step"
    f" {', '.join(map(str, engine.batch_size_buckets))}",
    f"step: {rollout.prompts_per_step} groups of {rollout.group_size}, up to"
    f" {completions * rollout.max_tokens:,} tokens; gradients of"
    f" {trainer.rows_per_micro_batch:,} rows and {trainer.sequences_per_micro_batch} sequences;"
    f" {config.num_steps} steps",
  ]
  return "\n".join(line for line in lines if line)


def main(argv: list[str]) -> None:
  with command_line.refusals():
    command_line.check_arguments(argv)
    config = flags_lib.from_flags(RunConfig, flags.FLAGS.config)
    parallel.start(
      parallel.SliceConfig(), num_devices=config.data_parallel_size * config.tensor_parallel_size
    )
    config = train.on_these_devices(config)
    model = train.shape_of(config.model)
    if model is None:
      raise ValueError(
        f"RunConfig.model: got {config.model!r}, whose shape is not known here, expected a model"
        " directory, a GGUF file, or one of the published models of models/presets.py; download it,"
        " and pass the directory."
      )
    print(describe(config, model))


def define_flags() -> RunConfig:
  """Defines the flags of the command."""
  return train.define_config("runs/grpo")
