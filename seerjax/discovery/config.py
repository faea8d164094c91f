"""Configuration of a run of discovery, and which of its settings a resume may change."""

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
from seerjax.rollout import groups, policies
from seerjax.run.config import RunConfig, TrainerConfig
from seerjax.tasks import digests
from seerjax.trainer import entropic, losses, step as step_lib

# Settings that change no bit, so that a run may be resumed with others. Not the engine: its context
# is the tiny policy's own, and what a program's thinking has to fit.
FREE_SETTINGS = ("num_steps", "num_workers", "num_instances", "checkpoint_every", "scheduler")
# Numerics do change bits, and so does the problem's file, of which earlier runs have a digest here;
# but the fingerprint and the digests of data are compared by themselves, with flags of their own.
NOT_COMPARED = (*FREE_SETTINGS, "numerics", "problem_sha256")
# Learning rate of the tiny policy, which is trained from nothing.
TINY_RATE = 3e-3


@dataclasses.dataclass(frozen=True, kw_only=True)
class TinyConfig:
  """The transformer that is trained from nothing, for languages of edits.

  Attributes:
    hidden_size: features of a token.
    num_layers: blocks.
    num_heads: of attention; 8 divides it.
    warm_sentences: random valid sentences that it first learns to say: a prior, and what the
      KL holds it to.
    warm_passes: times it sees them.
  """

  hidden_size: int = 64
  num_layers: int = 2
  num_heads: int = 8
  warm_sentences: int = 1024
  warm_passes: int = 2

  def __post_init__(self):
    fields.check(self)
    if self.num_heads < 1 or self.num_heads % 8 or self.hidden_size < 1 or self.num_layers < 1 or (
      self.hidden_size % self.num_heads
    ):
      raise ValueError(
        f"TinyConfig: got hidden_size={self.hidden_size}, num_heads={self.num_heads},"
        f" num_layers={self.num_layers}, expected heads in eights that divide the features, and a"
        " layer; 64, 8 and 2 are usual."
      )
    if self.warm_sentences < 0 or self.warm_passes < 0:
      raise ValueError(
        f"TinyConfig: got warm_sentences={self.warm_sentences}, warm_passes={self.warm_passes},"
        " expected at least 0; 0 begins with random weights."
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramConfig:
  """How programs are asked for and run.

  Attributes:
    thinking_tokens: of the first request.
    answer_tokens: of the second, for those that had not answered by then.
    answer_marker: with which this model's answer begins, such as "</think>"; "" if it has none.
    seconds: that a program is told it has.
    memory_mib: that it may take.
    num_workers: programs that run side by side.
    allow_weak_sandbox: run them even where network, files or other processes cannot be kept from
      them.
  """

  thinking_tokens: int = 512
  answer_tokens: int = 512
  answer_marker: str = ""
  seconds: float = 10.0
  memory_mib: int = 1024
  num_workers: int = 2
  allow_weak_sandbox: bool = False

  def __post_init__(self):
    fields.check(self)
    for field in ("thinking_tokens", "answer_tokens", "memory_mib", "num_workers"):
      if vars(self)[field] < 1:
        raise ValueError(
          f"ProgramConfig.{field}: got {vars(self)[field]}, expected at least 1; raise it."
        )
    if not 0 < self.seconds < math.inf:
      raise ValueError(
        f"ProgramConfig.seconds: got {self.seconds}, expected a positive number; 10 is usual."
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiscoverConfig:
  """One run, whole. Every field can be set as `--config.field`, nested ones by dots.

  Attributes:
    problem: its name, by which the run is known; see `discovery.loading.load`.
    model: "tiny" writes edits and is trained from nothing; a Hugging Face directory, a GGUF
      file, or a Hub id, writes programs.
    seed: decides starts and samples; below 2**63.
    num_steps: steps of the loop; 50 is published.
    groups_per_step: starts of a step; 8 is published.
    group_size: attempts from each start; 64 is published.
    train: whether the weights move at all.
    temperature: of sampling.
    num_workers: processes that apply edits and judge; 0 does it in this one.
    num_instances: devices that sample and learn side by side; changes no bit.
    checkpoint_every: steps.
    lora_rank: of a language model's adapters; 0 trains all weights, as always of the tiny policy.
    lora_alpha: adapters count alpha / rank times.
    tiny: the policy that writes edits.
    programs: how the policy that writes programs is asked.
    chat: what every prompt of a language model says besides its problem.
    search: where groups start.
    objective: what is learnt.
    numerics: what decides bits.
    engine: sizes of the engine.
    scheduler: which request's next chunk runs, and where; changes no bit.
    trainer: sizes of the gradient's program.
    optimizer: the optax chain; a learning rate of 0 is `TINY_RATE` of the tiny policy, and the
      usual one for its size of a language model (`run.learning_rates.usual`).
  """

  problem: str = ""
  model: str = "tiny"
  seed: int = 0
  num_steps: int = 50
  groups_per_step: int = 8
  group_size: int = 64
  train: bool = True
  temperature: float = 1.0
  num_workers: int = 0
  num_instances: int = 1
  checkpoint_every: int = 5
  lora_rank: int = 32
  lora_alpha: float = 32.0
  tiny: TinyConfig = TinyConfig()
  programs: ProgramConfig = ProgramConfig()
  chat: chat_template.ChatConfig = chat_template.ChatConfig()
  search: puct.SearchConfig = puct.SearchConfig()
  objective: ObjectiveConfig = ObjectiveConfig()
  # Of the tiles that were tried with the tiny policy, these take least time in all.
  numerics: numerics_lib.NumericsConfig = numerics_lib.NumericsConfig(
    row_tile=64, query_tile=4, slot_tile=128, kv_split=128, reduction_shards=1
  )
  engine: engine_lib.EngineConfig = engine_lib.EngineConfig(
    page_size=32, max_sequences=256, max_context=256, row_buckets=(256,)
  )
  scheduler: policies.LongestGroupFirst = policies.LongestGroupFirst(chunk_tokens=128)
  trainer: TrainerConfig = TrainerConfig(
    rows_per_micro_batch=4096, sequences_per_micro_batch=64
  )
  optimizer: step_lib.OptimizerConfig = step_lib.OptimizerConfig(b2=0.95, max_gradient_norm=1.0)

  def __post_init__(self):
    fields.check(self)
    least = {
      "seed": 0, "num_steps": 1, "groups_per_step": 1, "group_size": entropic.MIN_GROUP,
      "num_instances": 1, "checkpoint_every": 1, "lora_rank": 0, "num_workers": 0,
    }  # fmt: skip
    for field, number in least.items():
      if vars(self)[field] < number:
        raise ValueError(
          f"DiscoverConfig.{field}: got {vars(self)[field]}, expected at least {number}; raise it."
        )
    if self.num_instances > parallel.MAX_INSTANCES:
      raise ValueError(
        f"DiscoverConfig.num_instances: got {self.num_instances}, expected at most"
        f" {parallel.MAX_INSTANCES} (one a device); lower it."
      )
    if self.seed >= 2**63:
      raise ValueError(
        f"DiscoverConfig.seed: got {self.seed}, expected less than 2**63; choose a smaller one."
      )
    if not 0 < self.lora_alpha < math.inf:
      raise ValueError(
        f"DiscoverConfig.lora_alpha: got {self.lora_alpha}, expected a positive number; 32 is"
        " usual."
      )
    if self.search.islands > self.groups_per_step:
      raise ValueError(
        f"DiscoverConfig: got search.islands={self.search.islands} and groups_per_step="
        f"{self.groups_per_step}, expected a group for each island; raise groups_per_step."
      )
    if not types.is_temperature(self.temperature):
      raise ValueError(
        f"DiscoverConfig.temperature: got {self.temperature}, expected {types.TEMPERATURES}"
        " (attempts of a group have to differ); 1 is usual."
      )

  def run(self, environment: Environment) -> RunConfig:
    """Returns what the parts that this loop shares with `rl` go by."""
    max_tokens = max(self.programs.thinking_tokens, self.programs.answer_tokens)
    optimizer = self.optimizer
    if self.model == "tiny":
      max_tokens = len(environment_lib.language_of(environment).allowed)
      optimizer = dataclasses.replace(
        optimizer, learning_rate=optimizer.learning_rate or TINY_RATE
      )
    return RunConfig(
      seed=self.seed,
      num_steps=self.num_steps,
      num_instances=self.num_instances,
      checkpoint_every=self.checkpoint_every,
      lora_rank=0 if self.model == "tiny" else self.lora_rank,
      lora_alpha=self.lora_alpha,
      chat=self.chat,
      numerics=self.numerics,
      engine=self.engine,
      scheduler=self.scheduler,
      rollout=groups.RolloutConfig(
        groups_per_step=self.groups_per_step,
        group_size=self.group_size,
        temperature=self.temperature,
        max_tokens=max_tokens,
      ),
      trainer=self.trainer,
      # One step on what these very weights sampled: the ratio is 1, and nothing is clipped.
      loss=losses.LossConfig(
        algorithm="rloo", clip_low=1.0, clip_high=math.inf, aggregation="sequence_sum"
      ),
      optimizer=optimizer,
    )


def settings_of(config: DiscoverConfig) -> dict[str, Any]:
  """Returns what a run is held to on a resume, as JSON."""
  return metrics.encode(dataclasses.asdict(config))


def data_of(config: DiscoverConfig, environment: Environment) -> dict[str, str]:
  """Returns the digest of a problem's own file, or that of the source of its class."""
  path = pathlib.Path(config.problem)
  if path.suffix == ".py" and path.is_file():
    return {"problem": digests.of_files(path)}
  return digests.of_source(type(environment))
