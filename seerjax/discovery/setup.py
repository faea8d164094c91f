"""Builds the state of a discovery run before its loop starts."""

from __future__ import annotations

from collections.abc import Callable
import contextlib
import dataclasses

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
from seerjax.run import (
  config as config_lib,
  lifecycle,
  policy as policy_lib,
  programs as programs_lib,
)
from seerjax.run.policy import Policy
from seerjax.run.programs import Programs
from seerjax.types import TrainState


@dataclasses.dataclass(frozen=True)
class Setup:
  """State of a discovery run before its loop.

  Attributes:
    config: configuration with all defaults resolved.
    meter: counts CPU seconds since the start.
    writer: policy that makes attempts; already entered.
    engine: engine with the weights of `state`.
    state: state of a new run after its warm start, or of the latest checkpoint.
    base: the weights at the start of training, frozen for engine and trainer; None if unused.
    archive: archive of a new run or of the latest checkpoint.
    totals: totals of `numbers`, of a new run or of the latest checkpoint.
  """

  config: DiscoverConfig
  meter: numbers_lib.CpuMeter
  writer: EditPolicy | ProgramPolicy
  engine: engine_lib.Engine
  state: TrainState
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
) -> Setup:
  """Builds the state before the loop; the arguments are those of `ttt.discover`.

  Raises:
    ValueError: for invalid settings, programs or problems, before anything is sampled.
  """
  meter = numbers_lib.CpuMeter(environment)
  policy = tiny_policy_lib.tiny_policy(config, environment) if policy is None else policy
  run.decide(config.shared(environment), policy)
  config = dataclasses.replace(config, **run.config.parts)
  run.plan_memory(
    programs,
    "discover.programs: got programs for a different config or model, expected the result of"
    " make_programs for this one; share programs only between runs of one shape.",
  )
  archive = starts_lib.first_archive(config, environment)
  totals = numbers_lib.first_totals(archive)
  settings = discovery_config.settings_of(config)
  data = discovery_config.data_of(config, environment)
  run.hold_to(settings, free=discovery_config.NOT_COMPARED, data=data)
  restored = run.restore(lambda: dict(state=run.abstract_state(), base=policy.params))
  if restored is None:
    state = run.first_state()
  else:
    state = restored.state["state"]
    run.policy = dataclasses.replace(run.policy, params=restored.state["base"])
    archive = archive_lib.from_json(restored.host_state["archive"])
    totals = restored.host_state["totals"]
    record_lib.check_best(run.directory)
  writer = run.enter(writer_of(config, environment, run.policy, factory))
  if not run.resume:  # Later artefacts may be longer; those are shortened.
    for root in archive_lib.seeds(archive):
      writer.check(root.artefact)
  run.open(console_digits=numbers_lib.CONSOLE_DIGITS, has_journal=config.model != "tiny")
  if isinstance(writer, ProgramPolicy):
    run.progress.say(writer.sandbox.describe())
  elif not run.resume and config.tiny.warm_sentences:
    with run.progress.phase("warming up"):
      params = tiny_policy_lib.warm_start(
        run.config.weights, config, environment, writer, run.programs.trainer, state,
        run.progress.say,
      )  # fmt: skip
    # Training starts here, with fresh moments and with these weights as the base.
    run.policy = dataclasses.replace(run.policy, params=params)
    state = run.first_state()
  # The first weights are kept even without a KL penalty, because the distance to them is logged.
  base = programs_lib.base_weights(run.config, run.policy)
  engine = run.engine(policy_lib.running_weights(run.config.weights, state.params, base))
  warned = run.rate_warning() if config.train else ""
  chosen = config_lib.chosen(run.given, run.config)
  for line in (chosen, warned, run.memory.describe(), engine.memory_plan()):
    if line:
      run.progress.say(line)
  return Setup(config, meter, writer, engine, state, base, archive, totals)


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
