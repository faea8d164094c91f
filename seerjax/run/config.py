"""Configuration of a training run: `RunConfig`, its trainer part, and model-dependent defaults.

Fields left at 0 or () that depend on the model are filled in by `for_model`, and `chat.now` by
`policy.chatting`. A resume takes both from the checkpoint (`directory.with_stored_sizes`).
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
from seerjax.trainer import losses, optimizer as optimizer_lib, packing


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
class SharedConfig:
  """Settings that every loop shares: a run's programs, memory and weights depend on them alone.

  Attributes:
    seed: determines samples and new adapters.
    data_parallel_size: data-parallel devices.
    tensor_parallel_size: devices that share the weights of each instance.
    max_policy_lag: as in `OffPolicyConfig`; if not 0, sampling and training have own devices.
    weight_transfer_chunk_bytes: as in `RunConfig`.
    lora_rank: rank of trained LoRA adapters; 0 trains all weights.
    lora_alpha: adapters are scaled by alpha / rank.
    keeps_base: whether the initial weights are kept, as base of adapters or as reference.
    max_tokens: maximum number of generated tokens of a request.
    prompts_per_step: groups of a step.
    group_size: completions of a group.
    numerics: all settings that determine bits.
    chat: chat settings of every prompt.
    engine: sizes of the engine.
    trainer: sizes of the gradient program.
    loss: the objective.
    optimizer: the optax chain.
  """

  seed: int
  data_parallel_size: int
  tensor_parallel_size: int = 1
  max_policy_lag: int = 0
  weight_transfer_chunk_bytes: int = parallel.PIECE_BYTES
  lora_rank: int
  lora_alpha: float
  keeps_base: bool
  max_tokens: int
  prompts_per_step: int
  group_size: int
  numerics: numerics_lib.NumericsConfig
  chat: chat_template.ChatConfig
  engine: engine_lib.EngineConfig
  trainer: TrainerConfig
  loss: losses.LossConfig
  optimizer: optimizer_lib.OptimizerConfig

  def __post_init__(self):
    fields.check(self)
    if self.trainer.num_mini_batches > self.prompts_per_step:
      raise ValueError(
        f"TrainerConfig.num_mini_batches: got {self.trainer.num_mini_batches}, expected at most"
        f" RolloutConfig.prompts_per_step={self.prompts_per_step} (groups are not split);"
        " lower it or sample more groups."
      )
    most = self.max_tokens
    # A prompt has at least one token, and the last generated token needs no row.
    rows = self.trainer.rows_per_micro_batch
    room = min(self.engine.max_model_len - 1, rows or self.engine.max_model_len)
    if most > room:
      and_rows = f" and TrainerConfig.rows_per_micro_batch={rows}" if rows else ""
      raise ValueError(
        f"RolloutConfig.max_tokens: got {most}, expected at most {room}, because prompt and answer"
        f" have to fit EngineConfig.max_model_len={self.engine.max_model_len}{and_rows}; lower it,"
        f" or raise {'those' if rows else 'that'}."
      )
    if not 0 <= self.trainer.overlong_buffer <= most:
      raise ValueError(
        f"TrainerConfig.overlong_buffer: got {self.trainer.overlong_buffer}, expected 0 to"
        f" RolloutConfig.max_tokens={most}; a fifth of it is usual, 0 is off."
      )

  @classmethod
  def of(cls, config: Any, **others: Any) -> SharedConfig:
    """Returns the fields of `config` that have the same names, with `others` added or replaced."""
    names = {field.name for field in dataclasses.fields(cls)}
    return cls(**{name: value for name, value in vars(config).items() if name in names} | others)

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
  def parts(self) -> dict[str, Any]:
    """The parts that model, machine and start fill in, by their name in every loop's config."""
    return {
      name: vars(self)[name] for name in ("chat", "numerics", "engine", "trainer", "optimizer")
    }


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
  optimizer: optimizer_lib.OptimizerConfig = optimizer_lib.OptimizerConfig()
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
    _ = self.shared  # Validates sizes and lengths.

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
  def shared(self) -> SharedConfig:
    """The settings that every loop shares."""
    return SharedConfig.of(
      self,
      max_policy_lag=self.off_policy.max_policy_lag,
      max_tokens=self.rollout.max_tokens,
      prompts_per_step=self.rollout.prompts_per_step,
      group_size=self.rollout.group_size,
      keeps_base=self.keeps_base,
    )

  @property
  def weights(self) -> WeightsConfig:
    """Settings of the trained weights."""
    return self.shared.weights

  @property
  def keeps_base(self) -> bool:
    """Whether the initial weights are kept, as base of adapters or as KL reference."""
    return bool(self.lora_rank or self.loss.kl_coefficient)


def for_model(
  config: SharedConfig, model: model_config.TransformerConfig
) -> tuple[SharedConfig, Decoder]:
  """Returns the settings with nothing left open that depends on the model, and the decoder.

  Raises:
    ValueError: if completions could exceed the model's context, or a setting is for models with
      experts only.
  """
  if config.max_tokens >= model.max_model_len:
    raise ValueError(
      f"RolloutConfig.max_tokens: got {config.max_tokens}, expected at most"
      f" {model.max_model_len - 1}, because prompt and answer have to fit the model's own context"
      f" of {model.max_model_len} positions (max_position_embeddings in its config.json); lower it"
      " (in discovery the larger of ProgramConfig.thinking_tokens and answer_tokens), or take a"
      " model of a longer context."
    )
  trainer, optimizer = config.trainer, config.optimizer
  if optimizer.freezes_routers and not model.routings:
    raise ValueError(
      "OptimizerConfig.freezes_routers: got True for a model without experts, expected False; leave"
      " it out, or take a model with experts."
    )
  if optimizer.router_bias_speed:
    has_bias = any(rule.has_correction_bias for rule in model.routings.values())
    if config.lora_rank or not has_bias:
      why = f"lora_rank={config.lora_rank}" if has_bias else "a model without correction biases"
      raise ValueError(
        f"OptimizerConfig.router_bias_speed: got {optimizer.router_bias_speed:g} and {why},"
        " expected 0, as no correction bias is trained; leave it out."
      )
  if not optimizer.learning_rate:
    rate = learning_rates.usual(learning_rates.num_parameters(model), is_lora=config.lora_rank > 0)
    optimizer = dataclasses.replace(optimizer, learning_rate=rate)
  rows, sequences = packing.derived_sizes(
    context=min(config.engine.max_model_len, model.max_model_len),
    bytes_per_position=4 * model.kv_features,
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
  return decided, decoder


# What `for_model` and the start of a run fill in: the part, and the field, by which a checkpoint
# stores it.
FILLED_IN = (
  "chat.now", "numerics.backend", "numerics.row_tile", "numerics.reduction_shards",
  "engine.batch_size_buckets", "trainer.rows_per_micro_batch", "trainer.sequences_per_micro_batch",
  "optimizer.learning_rate",
)  # fmt: skip


def filled_in(config: SharedConfig) -> dict[str, Any]:
  """Returns the values of `FILLED_IN`."""
  names = [(name, *name.split(".")) for name in FILLED_IN]
  return {name: vars(config.parts[part])[field] for name, part, field in names}


def chosen(config: SharedConfig, of_model: SharedConfig) -> str:
  """Returns one line with the defaults that `for_model` filled in; "" if there are none."""
  old, new = filled_in(config), filled_in(of_model)
  names = [f"{name}={new[name]}" for name in FILLED_IN if old[name] != new[name]]
  return f"chosen for this model and context: {', '.join(names)}" if names else ""


def chosen_sizes(config: SharedConfig) -> dict[str, Any]:
  """Returns the values that `for_model` chose, in the form a checkpoint stores for a resume."""
  found = {name.partition(".")[2]: value for name, value in filled_in(config).items()}
  return {name: list(one) if isinstance(one, tuple) else one for name, one in found.items()}
