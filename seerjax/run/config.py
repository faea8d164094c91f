"""Configuration of a training run: `RunConfig`, its trainer part, and model-dependent defaults.

Fields left at 0 or () that depend on the model are filled in by `for_model`, and `chat.now` by
`policy.chatting`. A resume takes both from the checkpoint (`directory.as_begun`).
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
from typing import Any

from seerjax import fields, numerics as numerics_lib, parallel
from seerjax.cluster.config import ClusterConfig
from seerjax.engine import engine as engine_lib, sizes
from seerjax.kv import pool as kv_pool_lib
from seerjax.models import (
  chat_template,
  config as model_config,
  decoder as decoder_lib,
  transformer,
)
from seerjax.models.decoder import Decoder
from seerjax.rollout import groups as groups_lib, policies, policy_loading
from seerjax.run import learning_rates, off_policy
from seerjax.run.evaluation import EvaluationConfig
from seerjax.run.policy import WeightsConfig
from seerjax.speculation.config import SpeculationConfig
from seerjax.trainer import losses, packing, step as step_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainerConfig:
  """Configuration of how a step's groups become gradients.

  Attributes:
    rows_per_micro_batch: rows of one gradient program; 0 derives it from model and context
      (`packing.derived_sizes`), never from free memory, because it determines the order of a
      gradient's sums.
    sequences_per_micro_batch: maximum number of sequences per micro-batch; determines the scratch
      pages. 0 as above.
    num_mini_batches: optimiser steps per batch of rollouts; the first is exactly on-policy.
    dynamic_sampling_rounds: DAPO's dynamic sampling: groups with all-equal rewards are replaced by
      further problems, in at most this many rounds; 1 keeps every group.
    overlong_buffer: DAPO's overlong shaping: completions within this many tokens of `max_tokens`
      lose reward linearly; 0 disables it.
    remat: activations kept for the backward pass: "none" recomputes nothing; "layer" keeps only
      each layer's input (a third more time, far less memory); "layer_offloaded" keeps it in host
      memory. Scores have the same bits; gradient sums may round differently (they do beyond eight
      layers), so the fingerprint includes this setting.
  """

  rows_per_micro_batch: int = 0
  sequences_per_micro_batch: int = 0
  num_mini_batches: int = 1
  dynamic_sampling_rounds: int = 1
  overlong_buffer: int = 0
  remat: transformer.Remat = "none"

  def __post_init__(self):
    derived = fields.at_least(0, "0, which derives it from the model, is usual")
    fields.check(
      self,
      remat=fields.one_of(
        transformer.REMATS, "'layer' is for models with activations that do not fit"
      ),
      rows_per_micro_batch=derived,
      sequences_per_micro_batch=derived,
      num_mini_batches=fields.at_least(1, "1 is usual"),
      dynamic_sampling_rounds=fields.at_least(1, "1 is usual"),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
  """Configuration of a training run. Every field can be set as `--config.field` (nested: dots).

  Attributes:
    model: "nano", a Hugging Face directory, a GGUF file, or a Hub id.
    task: a built-in task ("word_problems", "reasoning_gym.chain_sum", "gsm8k", ...; see
      `tasks.load`), "module:Task" or "module:reward_function".
    task_path: data file or directory of the task, if it needs one.
    task_options: parameters of a reasoning-gym generator, by name.
    seed: determines problems and samples.
    num_steps: number of steps (sample, judge, learn, publish).
    data_parallel_size: data-parallel devices for sampling and learning; does not affect results.
    tensor_parallel_size: devices that share the weights of each instance: 1, 2, 4 or 8, at most the
      number of slabs (`NumericsConfig.reduction_shards`); does not affect results.
    weight_transfer_chunk_bytes: upper bound on bytes of weights in flight per device while
      publishing, to the engine and to cluster workers; does not affect results.
    checkpoint_every: steps between checkpoints.
    lora_rank: rank of trained LoRA adapters; 0 is full fine-tuning.
    lora_alpha: adapters are scaled by alpha / rank.
    numerics: all settings that determine bits.
    engine: sizes of the engine.
    rollout: problems, group size and sampling of a step.
    chat: chat settings of every prompt, including evaluations.
    scheduler: policy that chooses the next request and its instance: a record or "module:Policy";
      does not affect results.
    kv_pool: where KV pages of waiting requests are spilled; does not affect results.
    speculation: drafter and draft budget; does not affect results.
    cluster: workers that sample instead of the run's own engine; does not affect results.
    off_policy: off-policy training on samples from older weights, a baseline for comparison; off by
      default.
    trainer: how groups become gradients.
    loss: the objective.
    optimizer: the optax chain.
    evaluation: held-out evaluations.
  """

  model: str = "nano"
  task: str = "word_problems"
  task_path: str = ""
  task_options: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
  seed: int = 0
  num_steps: int = 40
  data_parallel_size: int = 1
  tensor_parallel_size: int = 1
  weight_transfer_chunk_bytes: int = parallel.PIECE_BYTES
  checkpoint_every: int = 10
  lora_rank: int = 0
  lora_alpha: float = 16.0
  numerics: numerics_lib.NumericsConfig = numerics_lib.NumericsConfig()
  engine: engine_lib.EngineConfig = engine_lib.EngineConfig()
  rollout: groups_lib.RolloutConfig = groups_lib.RolloutConfig()
  chat: chat_template.ChatConfig = chat_template.ChatConfig()
  scheduler: policies.Policy | str = policies.LongestGroupFirst(chunk_tokens=128)
  kv_pool: kv_pool_lib.KVPoolConfig = kv_pool_lib.KVPoolConfig()
  speculation: SpeculationConfig = SpeculationConfig()
  cluster: ClusterConfig = ClusterConfig()
  off_policy: off_policy.OffPolicyConfig = off_policy.OffPolicyConfig()
  trainer: TrainerConfig = TrainerConfig()
  loss: losses.LossConfig = losses.LossConfig()
  optimizer: step_lib.OptimizerConfig = step_lib.OptimizerConfig()
  evaluation: EvaluationConfig = EvaluationConfig()

  def __post_init__(self):
    fields.check(
      self,
      seed=fields.SEED,
      num_steps=fields.at_least(0),
      weight_transfer_chunk_bytes=fields.at_least(1),
      checkpoint_every=fields.at_least(1),
      lora_rank=fields.at_least(0),
      lora_alpha=fields.positive("16 is usual"),
    )
    policy_loading.check_name(self.scheduler, "RunConfig.scheduler")
    parallel.require_sizes(
      self.data_parallel_size,
      self.tensor_parallel_size,
      self.numerics.reduction_shards,
      what="RunConfig.",
    )
    if self.off_policy.max_policy_lag and self.data_parallel_size < 2:
      raise ValueError(
        f"OffPolicyConfig.max_policy_lag: got {self.off_policy.max_policy_lag} with"
        f" data_parallel_size={self.data_parallel_size}, expected 2 or more (half of them sample"
        " while the"
        " others train); raise RunConfig.data_parallel_size."
      )
    if self.cluster.workers:
      self._check_cluster()
    if self.off_policy.max_policy_lag and self.speculation.draft.learn:
      raise ValueError(
        "DraftModelConfig.learn: got True with"
        f" OffPolicyConfig.max_policy_lag={self.off_policy.max_policy_lag},"
        " expected at most one of them (the draft would be trained while it is used); set one to"
        " its default."
      )
    if self.off_policy.oversample > 1 and self.trainer.dynamic_sampling_rounds > 1:
      raise ValueError(
        f"OffPolicyConfig.oversample: got {self.off_policy.oversample} with"
        f" dynamic_sampling_rounds={self.trainer.dynamic_sampling_rounds},"
        " expected at least one of them to be 1; dynamic sampling needs whole steps."
      )
    if self.trainer.num_mini_batches > self.rollout.prompts_per_step:
      raise ValueError(
        f"TrainerConfig.num_mini_batches: got {self.trainer.num_mini_batches}, expected at most"
        f" RolloutConfig.prompts_per_step={self.rollout.prompts_per_step} (groups are not split);"
        " lower it or sample more groups."
      )
    most = self.rollout.max_tokens
    # A prompt has at least one token, and the last generated token needs no row.
    rows = self.trainer.rows_per_micro_batch
    room = min(self.engine.max_model_len - 1, rows or self.engine.max_model_len)
    if most > room:
      and_rows = f" and TrainerConfig.rows_per_micro_batch={rows}" if rows else ""
      raise ValueError(
        f"RolloutConfig.max_tokens: got {most}, expected at most {room}, because prompt and answer"
        f" have to fit EngineConfig.max_model_len={self.engine.max_model_len}{and_rows}; lower it,"
        " or"
        f" raise {'those' if rows else 'that'}."
      )
    if not 0 <= self.trainer.overlong_buffer <= most:
      raise ValueError(
        f"TrainerConfig.overlong_buffer: got {self.trainer.overlong_buffer}, expected 0 to"
        f" RolloutConfig.max_tokens={most}; a fifth of it is usual, 0 is off."
      )

  def _check_cluster(self) -> None:
    """Checks that the settings are compatible with cluster workers.

    Raises:
      ValueError: naming the setting.
    """
    for name, is_set in (
      ("OffPolicyConfig", self.off_policy != off_policy.OffPolicyConfig()),
      ("DraftModelConfig.learn", self.speculation.draft.learn),
    ):
      if is_set:
        raise ValueError(
          f"ClusterConfig.workers: got {self.cluster.workers} with {name}, expected at most one of"
          " them (workers sample whole steps, with their own drafter); leave one at its default."
        )

  @property
  def weights(self) -> WeightsConfig:
    """Settings of the trained weights."""
    return WeightsConfig(
      numerics=self.numerics,
      lora_rank=self.lora_rank,
      lora_alpha=self.lora_alpha,
      seed=self.seed,
      weight_transfer_chunk_bytes=self.weight_transfer_chunk_bytes,
    )

  @property
  def keeps_base(self) -> bool:
    """Whether the initial weights are kept, as base of adapters or as KL reference."""
    return bool(self.lora_rank or self.loss.kl_coefficient)


@dataclasses.dataclass(frozen=True)
class DecidedRun:
  """All decisions for a run of one model on this machine; made by `for_model`.

  Attributes:
    config: the configuration, with nothing left open that depends on the model.
    decoder: the decisions for its model.
  """

  config: RunConfig
  decoder: Decoder

  def fingerprint(self) -> dict[str, str]:
    """Returns the numerics fingerprint of sampling and training."""
    return self.decoder.fingerprint(self.config.trainer.remat)


def for_model(config: RunConfig, model: model_config.TransformerConfig) -> DecidedRun:
  """Returns the run with all model-dependent defaults decided.

  Raises:
    ValueError: if completions could exceed the model's context.
  """
  if config.rollout.max_tokens >= model.max_model_len:
    raise ValueError(
      f"RolloutConfig.max_tokens: got {config.rollout.max_tokens}, expected at most"
      f" {model.max_model_len - 1}, because prompt and answer have to fit the model's own context"
      " of"
      f" {model.max_model_len} positions (max_position_embeddings in its config.json); lower it (in"
      " discovery the larger of ProgramConfig.thinking_tokens and answer_tokens), or take a model"
      " of a longer context."
    )
  trainer, optimizer = config.trainer, config.optimizer
  if not optimizer.learning_rate:
    rate = learning_rates.usual(learning_rates.num_parameters(model), is_lora=config.lora_rank > 0)
    optimizer = dataclasses.replace(optimizer, learning_rate=rate)
  rows, sequences = packing.derived_sizes(
    context=min(config.engine.max_model_len, model.max_model_len),
    bytes_per_position=2 * model.num_layers * model.num_kv_heads * model.head_dim * 4,
    rows=trainer.rows_per_micro_batch,
    sequences=trainer.sequences_per_micro_batch,
  )
  decoder = decoder_lib.decide(model, config.numerics)
  decided = dataclasses.replace(
    config,
    numerics=decoder.numerics,
    engine=sizes.with_buckets(config.engine, decoder),
    trainer=dataclasses.replace(
      trainer, rows_per_micro_batch=rows, sequences_per_micro_batch=sequences
    ),
    optimizer=optimizer,
  )
  return DecidedRun(decided, decoder)


def chosen(config: RunConfig, of_model: RunConfig) -> str:
  """Returns one line with the defaults that `for_model` filled in; "" if there are none."""
  names = [
    f"{field}={new}"
    for field, old, new in (
      ("chat.now", config.chat, of_model.chat),
      ("numerics.backend", config.numerics, of_model.numerics),
      ("numerics.row_tile", config.numerics, of_model.numerics),
      ("numerics.reduction_shards", config.numerics, of_model.numerics),
      ("engine.batch_size_buckets", config.engine, of_model.engine),
      ("trainer.rows_per_micro_batch", config.trainer, of_model.trainer),
      ("trainer.sequences_per_micro_batch", config.trainer, of_model.trainer),
      ("optimizer.learning_rate", config.optimizer, of_model.optimizer),
    )
    for old, new in [(vars(part)[field.partition(".")[2]] for part in (old, new))]
    if old != new
  ]
  return f"chosen for this model and context: {', '.join(names)}" if names else ""


def chosen_sizes(config: RunConfig) -> dict[str, Any]:
  """Returns the values that `for_model` chose, in the form a checkpoint stores for a resume."""
  return {
    "now": config.chat.now,
    "backend": config.numerics.backend,
    "row_tile": config.numerics.row_tile,
    "reduction_shards": config.numerics.reduction_shards,
    "batch_size_buckets": list(config.engine.batch_size_buckets),
    "rows_per_micro_batch": config.trainer.rows_per_micro_batch,
    "sequences_per_micro_batch": config.trainer.sequences_per_micro_batch,
    "learning_rate": config.optimizer.learning_rate,
  }
