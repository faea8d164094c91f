"""Builds the state of a discovery run before its loop starts."""

from __future__ import annotations

from collections.abc import Callable
import contextlib
import dataclasses
from typing import Any

from seerjax import numerics as numerics_lib
from seerjax.discovery import (
  archive as archive_lib,
  attempts as attempts_lib,
  config as discovery_config,
  edits,
  numbers as numbers_lib,
  record as record_lib,
  starts as starts_lib,
  tiny_policy as tiny_policy_lib,
)
from seerjax.discovery.config import DiscoverConfig
from seerjax.discovery.edit_policy import EditPolicy
from seerjax.discovery.environment import Environment
from seerjax.discovery.program_policy import ProgramPolicy
from seerjax.engine import engine as engine_lib
from seerjax.models import parameters
from seerjax.models.loading import Model
from seerjax.run import (
  config as config_lib,
  directory as directory_lib,
  learning_rates,
  lifecycle,
  memory as memory_lib,
  policy as policy_lib,
  programs as programs_lib,
)
from seerjax.run.config import RunConfig
from seerjax.run.policy import Policy
from seerjax.run.programs import Programs
from seerjax.trainer import step as step_lib
from seerjax.types import TrainState


@dataclasses.dataclass(frozen=True)
class Setup:
  """State of a discovery run before its loop.

  Attributes:
    config: configuration with all defaults resolved.
    settings: the configuration's settings, which a resume compares.
    run_config: configuration of the parts shared with `rl`.
    fingerprint: fingerprint of the run's numerics.
    meter: counts CPU seconds since the start.
    writer: policy that makes attempts; already entered.
    trainer: gradient and update.
    engine: engine with the weights of `state`.
    state: state of a new run after its warm start, or of the latest checkpoint.
    first_params: weights at the start of training.
    base: the same weights, frozen for engine and trainer; None if unused.
    archive: archive of a new run or of the latest checkpoint.
    totals: totals of `numbers`, of a new run or of the latest checkpoint.
  """

  config: DiscoverConfig
  settings: dict[str, Any]
  run_config: RunConfig
  fingerprint: dict[str, str]
  meter: numbers_lib.CpuMeter
  writer: EditPolicy | ProgramPolicy
  trainer: step_lib.Trainer
  engine: engine_lib.Engine
  state: TrainState
  first_params: parameters.Params
  base: parameters.Params | None
  archive: archive_lib.Archive
  totals: dict[str, float]


def set_up(
  run: lifecycle.Life,
  config: DiscoverConfig,
  environment: Environment,
  factory: Callable[[], Environment],
  policy: Policy | None,
  programs: Programs | None,
  *,
  resume: bool,
) -> Setup:
  """Builds the state before the loop; the arguments are those of `ttt.discover`.

  Raises:
    ValueError: for invalid settings, programs or problems, before anything is sampled.
  """
  meter = numbers_lib.CpuMeter(environment)
  policy = tiny_policy_lib.tiny_policy(config, environment) if policy is None else policy
  given = config.run(environment)
  if resume:
    given = directory_lib.as_begun(given, run.directory)
  own = programs_lib.make_programs(given, policy.model)
  run_config = own.decided.config
  if policy.tokenizer is not None:
    policy = policy.with_chat(given.chat)
    run_config = dataclasses.replace(run_config, chat=policy.require_tokenizer().chat_config)
  config = dataclasses.replace(
    config, chat=run_config.chat, numerics=run_config.numerics, engine=run_config.engine,
    trainer=run_config.trainer, optimizer=run_config.optimizer,
  )  # fmt: skip
  if programs is None:
    programs = own
  elif programs.made_for != own.made_for:
    raise ValueError(
      "discover.programs: got programs for a different config or model, expected the result of"
      " make_programs for this one; share programs only between runs of one shape."
    )
  # The first weights are kept even without a KL penalty, because the distance to them is logged.
  memory = memory_lib.memory_plan(run_config, policy.model, keeps_base=config.train)
  state = programs_lib.first_state(run_config, policy)
  archive = starts_lib.first_archive(config, environment)
  totals = numbers_lib.first_totals(archive)
  settings = discovery_config.settings_of(config)
  run.hold_to(
    settings,
    free=discovery_config.NOT_COMPARED,
    data=discovery_config.data_of(config, environment),
  )
  fingerprint = own.decided.fingerprint()
  like = dict(state=state, base=policy.params)
  if restored := run.restore(lambda: like, fingerprint=fingerprint):
    state = restored.state["state"]
    policy = dataclasses.replace(policy, params=restored.state["base"])
    archive = archive_lib.from_json(restored.host_state["archive"])
    totals = restored.host_state["totals"]
    record_lib.check_best(run.directory)
  writer = run.enter(writer_of(config, environment, policy, factory))
  if not resume:  # Later artefacts may be longer; those are shortened.
    for root in archive_lib.seeds(archive):
      writer.check(root.artefact)
  run.open(
    sizes=config_lib.chosen_sizes(run_config),
    console_digits=numbers_lib.CONSOLE_DIGITS,
    has_journal=config.model != "tiny",
  )
  if isinstance(writer, ProgramPolicy):
    run.progress.say(writer.sandbox.describe())
  elif not resume and config.tiny.warm_sentences:
    with run.progress.phase("warming up"):
      params = tiny_policy_lib.warm_start(
        run_config, config, environment, writer, programs.trainer, state, run.progress.say
      )
    # Training starts here, with fresh moments and with these weights as the base.
    policy = dataclasses.replace(policy, params=params)
    state = programs_lib.first_state(run_config, policy)
  base = None
  if config.train or run_config.keeps_base:
    mesh = programs_lib.meshes(run_config)[1]
    base = policy_lib.frozen_weights(policy, run_config.numerics, mesh)
  engine = engine_lib.Engine(
    Model(
      policy.model,
      policy_lib.running_weights(run_config.weights, state.params, base),
      config.numerics,
      policy.tokenizer,
    ),
    config=memory.engine,
    key=numerics_lib.key(config.seed),
    policy_version=run.step,
    runner=programs.runner,
  )
  if line := config_lib.chosen(given, run_config):
    run.progress.say(line)
  warned = learning_rates.warning(
    run_config.optimizer.learning_rate, policy.model, is_lora=run_config.lora_rank > 0
  )
  if warned and config.train:
    run.progress.say(warned)
  run.progress.say(memory.describe())
  run.progress.say(engine.memory_plan())
  return Setup(
    config, settings, run_config, fingerprint, meter, writer, programs.trainer, engine, state,
    policy.params, base, archive, totals,
  )  # fmt: skip


def writer_of(
  config: DiscoverConfig,
  environment: Environment,
  policy: Policy,
  factory: Callable[[], Environment],
) -> contextlib.AbstractContextManager[EditPolicy | ProgramPolicy]:
  """Returns a context manager for the writing part of the policy.

  Raises:
    ValueError: if the policy writes programs and has no tokenizer.
  """
  group = attempts_lib.Group(
    size=config.group_size, temperature=config.temperature, seed=config.seed
  )
  context = min(config.engine.max_model_len, policy.model.max_model_len)
  if config.model == "tiny":
    judge = edits.Judge(environment, factory, config.num_workers)
    return EditPolicy(environment, group, judge, context)
  if policy.tokenizer is None:
    raise ValueError(
      f"DiscoverConfig.model: got {config.model!r} and a policy without a tokenizer, expected one;"
      " pass the model's tokenizer."
    )
  tokenizer = policy_lib.chatting(policy.tokenizer, config.chat)
  return ProgramPolicy(environment, group, config.programs, tokenizer, context)
