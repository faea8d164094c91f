"""Builds the state of a run and the sampling and publishing functions of its loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
import contextlib
import dataclasses
import os

import optax

from seerjax import metrics
from seerjax.engine import engine as engine_lib
from seerjax.kv import pool as kv_pool_lib, stores
from seerjax.models import decoder as decoder_lib, parameters
from seerjax.models.loading import Model
from seerjax.rollout import groups as groups_lib, journal as journal_lib, policy_loading
from seerjax.run import (
  config as config_lib,
  directory as directory_lib,
  drafter as drafter_lib,
  evaluation,
  lifecycle,
  off_policy,
  policy as policy_lib,
  programs as programs_lib,
  slices,
  workers as workers_lib,
)
from seerjax.run.config import RunConfig
from seerjax.run.policy import Policy
from seerjax.run.programs import Programs
from seerjax.tasks import digests
from seerjax.trainer import step as step_lib
from seerjax.types import RolloutGroup, Task, TrainState

# Sample(step) returns a step's groups and metrics. Publish(weights, policy_version) sends weights.
Sample = Callable[[int], tuple[list[RolloutGroup], dict[str, float]]]
Publish = Callable[[parameters.Params, int], None]

# Settings that may change on resume: `numerics` is covered by the fingerprint; the others do not
# affect results.
FREE_SETTINGS = (
  "numerics", "num_steps", "data_parallel_size", "tensor_parallel_size",
  "weight_transfer_chunk_bytes", "checkpoint_every",
  "scheduler", "kv_pool", "speculation", "cluster",
)  # fmt: skip
# Metrics shown by the progress bar.
CONSOLE_DIGITS = {
  "rollout/reward_mean": 4,
  "rollout/length_mean": 4,
  "rollout/tokens_per_second": 4,
  "rollout_train/kl": 4,
}


@dataclasses.dataclass(frozen=True)
class Setup:
  """State of a run at the start of its loop.

  Attributes:
    config: configuration with all defaults filled in.
    engine: engine with the weights of `state`.
    journal: the open journal.
    drafts: state of the engine's drafter.
    workers: remote workers that sample instead of the engine, or None.
    asked: evaluator for the run's task and all other sets.
    state: training state, new or from the latest checkpoint.
    base: frozen weights from `programs.base_weights`.
    before: held-out metrics before the first step; empty if not measured yet.
  """

  config: RunConfig
  engine: engine_lib.Engine
  journal: journal_lib.Journal
  drafts: drafter_lib.RunDrafts
  workers: workers_lib.RunWorkers | None
  asked: evaluation.Evaluator
  state: TrainState
  base: parameters.Params | None
  before: dict[str, float]


def opened(
  config: RunConfig, model: str | os.PathLike[str] | Model | Policy
) -> tuple[RunConfig, Policy]:
  """Returns the config with the model's settings, and the model as a `Policy`.

  Raises:
    ValueError: if config and model disagree on the model's name or numerics, or if `model` is not a
      model.
    FileNotFoundError: if the directory does not exist, or the Hub does not provide it.
    ImportError: if a Hub id is given and `huggingface_hub` is not installed.
  """
  if isinstance(model, Policy):
    return config, model
  if not isinstance(model, str | os.PathLike | Model):
    raise ValueError(
      f"train.model: got {type(model).__name__}, expected the result of seerjax.load_model, a name,"
      " a directory, a GGUF file or a Hub id; pass 'nano', for example."
    )
  name = model.name if isinstance(model, Model) else os.fspath(model)
  if name and config.model not in (RunConfig().model, name):
    raise ValueError(
      f"RunConfig.model: got {config.model!r} and the model {name!r}, expected only one of them;"
      " leave RunConfig.model out."
    )
  config = dataclasses.replace(config, model=name or config.model)
  if not isinstance(model, Model):
    return config, policy_lib.load_policy(name, config.numerics)
  if config.numerics == RunConfig().numerics:
    config = dataclasses.replace(config, numerics=model.numerics)
  wanted = dataclasses.asdict(decoder_lib.decide(model.config, config.numerics).numerics)
  found = dataclasses.asdict(model.numerics)
  if differing := [field for field in wanted if wanted[field] != found[field]]:
    both = [f"{field}={wanted[field]!r} (the model: {found[field]!r})" for field in differing]
    raise ValueError(
      f"RunConfig.numerics: got {', '.join(both)}, expected the numerics of the loaded model; write"
      " load_model(name, config.numerics), or leave RunConfig.numerics out."
    )
  return config, policy_lib.policy_of(model)


def set_up(
  run: lifecycle.Life,
  config: RunConfig,
  policy: Policy,
  task: Task,
  programs: Programs | None,
  loss: step_lib.PolicyLoss,
  optimizer: optax.GradientTransformation | None,
  sets: Mapping[str, Task],
) -> Setup:
  """Builds the initial state of the loop; the arguments are those of `rl.train`.

  `sets` are all further evaluation tasks, by name.

  Raises:
    ValueError: for invalid settings, programs or task, before the journal is created.
  """
  slices.require_supported(config)
  given, progress = config.shared, run.progress
  run.decide(given, policy, loss=loss, optimizer=optimizer)
  config = dataclasses.replace(config, **run.config.parts)
  tokenizer = run.policy.require_tokenizer()
  if run.resume and config.off_policy != off_policy.OffPolicyConfig():
    raise ValueError(
      f"RunConfig.off_policy: got {config.off_policy} and a run to resume, expected a new run"
      " (requests in"
      " progress between steps are kept only in memory); choose another directory, without resume."
    )
  for split in ("train", "heldout"):
    groups_lib.num_problems(task, split)  # Raises if there are none.
  evaluation.check_prompts(
    config.evaluation, sets.values(), tokenizer=tokenizer,
    max_tokens=config.rollout.max_tokens,
    context=min(config.engine.max_model_len, policy.model.max_model_len), seed=config.seed,
  )  # fmt: skip
  drafts = drafter_lib.RunDrafts(config.speculation)
  run.plan_memory(
    programs,
    "train.programs: got programs of another config or model, expected make_programs of this"
    " config and model; share them only between equal runs.",
  )
  before: dict[str, float] = {}
  base = programs_lib.base_weights(run.config, run.policy)
  data = digests.of_task(slices.own_task(task), config.task_path or None)
  for name, one in sets.items():
    path = config.evaluation.sets.get(name, "").partition("=")[2]
    data |= digests.of_set(name, slices.own_task(one), path or None)
  run.hold_to(metrics.encode(dataclasses.asdict(config)), free=FREE_SETTINGS, data=data)
  restored = run.restore(run.abstract_state)
  if restored is None:
    state = run.first_state()
  else:
    state = restored.state
    before = restored.host_state["before"] or directory_lib.accuracy_at(run.directory, 0)
  published = policy_lib.published_weights(
    config.weights, state.params, base, is_copied=config.off_policy.max_policy_lag > 0
  )
  tiers = kv_pool_lib.config_of(config.kv_pool, run.programs.runner.mesh)
  # Created before the journal, because the journal's first line fixes the run's settings.
  engine = run.engine(published, kv_pool_lib.KVPool(tiers, stores.open_store(tiers)))
  run.open(console_digits=CONSOLE_DIGITS)
  chosen = config_lib.chosen(given, run.config)
  # A custom optimizer has its own learning rate.
  warned = run.rate_warning() if optimizer is None else ""
  for line in (chosen, run.memory.describe(), engine.memory_plan(), warned):
    if line:
      progress.say(line)
  with progress.phase("measuring the engine's steps"):
    drafts.begin(engine)
  if line := drafts.restore(run.restored_part):
    progress.say(line)
  asked = evaluation.Evaluator(
    config.evaluation, engine, evaluation.tasks_by_room(task, sets), config.rollout,
    policy_loading.load(config.scheduler), config.seed, progress,
  )  # fmt: skip
  assert run.journal is not None
  workers = workers_lib.opened(
    dataclasses.replace(config, engine=engine.config), policy.model, tokenizer,
    run.programs.runner, engine, run.enter,
  )  # fmt: skip
  if workers is not None:
    workers.publish(published, run.step)
  return Setup(
    config, engine, run.journal, drafts, workers, asked, state, base, before
  )  # fmt: skip


def ends(ready: Setup, run: lifecycle.Life, task: Task, sample: Sample) -> tuple[Sample, Publish]:
  """Returns the (sample, publish) functions of the loop.

  These are `sample` and the engine's own update, or their off-policy wrappers (`OffPolicyConfig`).
  """
  config, engine = ready.config, ready.engine

  def publish(weights: parameters.Params, policy_version: int) -> None:
    engine.update_weights(weights, policy_version=policy_version)
    if ready.workers is not None:
      ready.workers.publish(weights, policy_version)

  if config.off_policy.oversample > 1:
    partial = off_policy.Partial(
      engine, task, ready.journal, config.rollout, oversample=config.off_policy.oversample,
      policy=policy_loading.load(config.scheduler), seed=config.seed, progress=run.progress,
      drafts=ready.drafts,
    )  # fmt: skip
    return partial.sample, publish
  if config.off_policy.max_policy_lag:
    ahead = off_policy.OneStepOff(sample, publish, num_steps=config.num_steps)
    run.enter(contextlib.closing(ahead))
    return ahead.sample, ahead.publish
  return sample, publish
