"""Configuration of a discovery run, and the settings that may change on resume."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from typing import Any

from seerjax import fields, metrics, numerics as numerics_lib, parallel, types
from seerjax.discovery import (
  environment as environment_lib,
  puct,
)
from seerjax.discovery.environment import Environment
from seerjax.discovery.objective import ObjectiveConfig
from seerjax.engine import engine as engine_lib
from seerjax.models import chat_template
from seerjax.rollout import policies, policy_loading
from seerjax.run.config import SharedConfig, TrainerConfig
from seerjax.tasks import digests
from seerjax.trainer import entropic, losses, optimizer as optimizer_lib

# Settings that do not affect results, so they may change on resume. The engine is not among them:
# its context determines the tiny policy, and how long a program's reasoning may be.
FREE_SETTINGS = ("num_steps", "num_workers", "data_parallel_size", "checkpoint_every", "scheduler")
# Numerics and the problem's file (earlier runs have a digest of it in their settings) do affect
# results, but are compared separately, by fingerprint and data digests, each with its own flag.
NOT_COMPARED = (*FREE_SETTINGS, "numerics", "problem_sha256")
# Learning rate of the tiny policy, which is trained from scratch.
TINY_RATE = 3e-3


@dataclasses.dataclass(frozen=True, kw_only=True)
class TinyConfig:
  """The transformer trained from scratch, for edit languages.

  Attributes:
    hidden_size: features per token.
    num_layers: number of layers.
    num_heads: attention heads; divisible by 8.
    warm_sentences: random valid sentences for the warm start, which gives a prior and the base of
      the KL penalty.
    warm_passes: epochs over these sentences.
  """

  hidden_size: int = 64
  num_layers: int = 2
  num_heads: int = 8
  warm_sentences: int = 1024
  warm_passes: int = 2

  def __post_init__(self):
    warm = fields.at_least(0, "0 starts from random weights")
    fields.check(self, warm_sentences=warm, warm_passes=warm)
    if (
      self.num_heads < 1
      or self.num_heads % 8
      or self.hidden_size < 1
      or self.num_layers < 1
      or (self.hidden_size % self.num_heads)
    ):
      raise ValueError(
        f"TinyConfig: got hidden_size={self.hidden_size}, num_heads={self.num_heads},"
        f" num_layers={self.num_layers}, expected num_heads to be a multiple of 8 that divides"
        " hidden_size, and at least one layer; 64, 8 and 2 are usual."
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramConfig:
  """Settings for sampling and running programs.

  Attributes:
    thinking_tokens: `max_tokens` of the first request.
    answer_tokens: `max_tokens` of the second request, for completions without an answer.
    answer_marker: text that starts an answer of this model, such as "</think>"; "" if there is
      none.
    seconds: time limit that a program is given as an argument.
    memory_mib: memory limit of a program.
    num_workers: programs that run concurrently.
    allow_weak_sandbox: run programs even where network, files or other processes cannot be
      protected from them.
  """

  thinking_tokens: int = 512
  answer_tokens: int = 512
  answer_marker: str = ""
  seconds: float = 10.0
  memory_mib: int = 1024
  num_workers: int = 2
  allow_weak_sandbox: bool = False

  def __post_init__(self):
    fields.check(
      self,
      thinking_tokens=fields.at_least(1),
      answer_tokens=fields.at_least(1),
      memory_mib=fields.at_least(1),
      num_workers=fields.at_least(1),
      seconds=fields.positive("10 is usual"),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiscoverConfig:
  """Configuration of a run. Every field is a flag `--config.field`; nested fields use dots.

  Attributes:
    problem: name of the problem, which also identifies the run; see `discovery.loading.load`.
    model: "tiny" writes edits and is trained from scratch; a Hugging Face directory, a GGUF file or
      a Hub id writes programs.
    seed: determines starts and samples; below 2**63.
    num_steps: steps of the loop; 50 is published.
    prompts_per_step: groups per step; 8 is published.
    group_size: attempts per group; 64 is published.
    train: whether to train the weights.
    temperature: sampling temperature.
    num_workers: processes that apply and judge edits; 0 uses the main process.
    data_parallel_size: devices for data-parallel sampling and training; does not affect results.
    checkpoint_every: steps between checkpoints.
    lora_rank: rank of a language model's adapters; 0 trains all weights, as the tiny policy always
      does.
    lora_alpha: adapters are scaled by alpha / rank.
    tiny: the policy that writes edits.
    programs: the policy that writes programs.
    chat: chat settings of every prompt of a language model.
    search: selection of states.
    objective: training objective.
    numerics: numerics, which determine results to the bit.
    engine: sizes of the engine.
    scheduler: policy of the order and placement of chunks: a record or "module:Policy"; does not
      affect results.
    trainer: sizes of the gradient program.
    optimizer: the optax chain; a learning rate of 0 means `TINY_RATE` for the tiny policy, and the
      usual one for the model's size otherwise (`run.learning_rates.usual`).
  """

  problem: str = ""
  model: str = "tiny"
  seed: int = 0
  num_steps: int = 50
  prompts_per_step: int = 8
  group_size: int = 64
  train: bool = True
  temperature: float = 1.0
  num_workers: int = 0
  data_parallel_size: int = 1
  checkpoint_every: int = 5
  lora_rank: int = 32
  lora_alpha: float = 32.0
  tiny: TinyConfig = TinyConfig()
  programs: ProgramConfig = ProgramConfig()
  chat: chat_template.ChatConfig = chat_template.ChatConfig()
  search: puct.SearchConfig = puct.SearchConfig()
  objective: ObjectiveConfig = ObjectiveConfig()
  # The fastest, in total, of the tile sizes tried with the tiny policy.
  numerics: numerics_lib.NumericsConfig = numerics_lib.NumericsConfig(
    row_tile=64, query_tile=4, slot_tile=128, kv_split=128, reduction_shards=1
  )
  engine: engine_lib.EngineConfig = engine_lib.EngineConfig(
    page_size=32, max_num_seqs=256, max_model_len=256, batch_size_buckets=(256,)
  )
  scheduler: policies.Policy | str = policies.LongestGroupFirst(chunk_tokens=128)
  trainer: TrainerConfig = TrainerConfig(rows_per_micro_batch=4096, sequences_per_micro_batch=64)
  optimizer: optimizer_lib.OptimizerConfig = optimizer_lib.OptimizerConfig(
    b2=0.95, max_gradient_norm=1.0
  )

  def __post_init__(self):
    fields.check(
      self,
      seed=fields.SEED,
      num_steps=fields.at_least(1),
      prompts_per_step=fields.at_least(1),
      group_size=fields.at_least(entropic.MIN_GROUP),
      data_parallel_size=fields.between(1, parallel.MAX_INSTANCES, "one per device at most"),
      checkpoint_every=fields.at_least(1),
      lora_rank=fields.at_least(0),
      lora_alpha=fields.positive("32 is usual"),
      num_workers=fields.at_least(0),
    )
    policy_loading.check_name(self.scheduler, "DiscoverConfig.scheduler")
    if self.search.islands > self.prompts_per_step:
      raise ValueError(
        f"DiscoverConfig: got search.islands={self.search.islands} and"
        f" prompts_per_step={self.prompts_per_step}, expected at least one group per island; raise"
        " prompts_per_step."
      )
    if not types.is_temperature(self.temperature):
      raise ValueError(
        f"DiscoverConfig.temperature: got {self.temperature}, expected {types.TEMPERATURES}"
        " (attempts of a group have to differ); 1 is usual."
      )

  def shared(self, environment: Environment) -> SharedConfig:
    """Returns the settings of the parts shared with `rl`."""
    max_tokens = max(self.programs.thinking_tokens, self.programs.answer_tokens)
    lora_rank, optimizer = self.lora_rank, self.optimizer
    if self.model == "tiny":
      max_tokens = len(environment_lib.language_of(environment).allowed)
      rate = optimizer.learning_rate or TINY_RATE
      lora_rank, optimizer = 0, dataclasses.replace(optimizer, learning_rate=rate)
    return SharedConfig.of(
      self,
      lora_rank=lora_rank,
      keeps_base=self.train or lora_rank > 0,
      max_tokens=max_tokens,
      # A single step on samples of the same weights: the ratio is 1, so nothing is clipped.
      loss=losses.LossConfig(
        algorithm="rloo", clip_low=1.0, clip_high=math.inf, aggregation="sequence_sum"
      ),
      optimizer=optimizer,
    )


def settings_of(config: DiscoverConfig) -> dict[str, Any]:
  """Returns the settings that a resume compares, as JSON."""
  return metrics.encode(dataclasses.asdict(config))


def data_of(config: DiscoverConfig, environment: Environment) -> dict[str, str]:
  """Returns the digest of a problem's file, or of the source of its class."""
  path = pathlib.Path(config.problem)
  if path.suffix == ".py" and path.is_file():
    return {"problem": digests.of_files(path)}
  return digests.of_source(type(environment))
