"""THE CIRCLE for one problem: keep training until it gives way.

    archive --PUCT--> starts -> prompts -> engine samples -> attempts -> verdicts -> archive
       ^                                                                    |
       +---- engine.set_params <- params <- optimiser <- entropic advantages

One problem is the whole world. A step starts groups of attempts from states that were found before;
an exact verifier scores what they make of them; the best enter the archive, and the weights move
towards what the best of each group did. What the user keeps is the best artefact ever found: it is
on disk (best.json) as soon as it is known. The weights may go.

Everything a step does is a function of (config, step): which starts, which seeds, which tokens,
which gradient. Archive and weights are published as one checkpoint, so that a killed run resumes to
the same bits and the same archive. Steps since then are taken again; of a language model, whose
tokens and programs are dear, a journal holds every chunk and every verdict.

Source: Yuksekgonul et al. 2026 (TTT-Discover), https://arxiv.org/abs/2601.16175. Formulas:
`trainer.entropic`, `discovery.puct`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import pathlib
import time
from typing import Any, NamedTuple

import jax
import numpy as np

from seerjax import checkpoint, metrics, numerics as numerics_lib, parallel, types, writers
from seerjax.discovery import (
  archive as archive_lib,
  edits,
  environment as environment_lib,
  loading,
  puct,
)
from seerjax.discovery.environment import Artefact, Environment
from seerjax.discovery.programs import Attempt
from seerjax.engine import engine as engine_lib
from seerjax.models import config as model_config, parameters, tokenizer as tokenizer_lib
from seerjax.ops import rotary
from seerjax.rollout import divided, groups, journal as journal_lib, policies
from seerjax.run import (
  config as config_lib,
  directory as directory_lib,
  memory as memory_lib,
  policy as policy_lib,
  programs as programs_lib,
  progress as progress_lib,
  status as status_lib,
  stops as stops_lib,
  summary,
)
from seerjax.run.config import RunConfig, TrainerConfig
from seerjax.run.policy import Policy
from seerjax.run.programs import Programs
from seerjax.trainer import advantages, entropic, losses, step as step_lib
from seerjax.types import Completion, Problem, Request, Rollout, RolloutGroup, TrainState, Verdict

OBJECTIVES = ("adaptive", "constant", "mean", "grpo")


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
class ObjectiveConfig:
  """What the weights move towards.

  Attributes:
    kind: "adaptive" solves beta for each group; "constant" takes `beta`; "mean" is reward minus the
      group's mean; "grpo" divides that by the deviation.
    divergence: nats between the tilted and the even group, for "adaptive".
    beta: for "constant", on rewards divided by their group's range.
    gains_only: a labelled deviation from the paper: an attempt is paid for what it is better than
      its start, and nothing if it is not. Else a policy that edits is paid most surely for leaving
      what is good as it is.
    valid_only: a labelled deviation from the paper; see `entropic.entropic`.
    max_advantage: cuts advantages off above it; 0 does not.
    kl_coefficient: pull to the first weights, inside the advantage; 0.1 and 0.01 are published.
  """

  kind: str = "adaptive"
  divergence: float = math.log(2)
  beta: float = 2.0
  gains_only: bool = False
  valid_only: bool = False
  max_advantage: float = 0.0
  kl_coefficient: float = 0.1

  def __post_init__(self):
    if self.kind not in OBJECTIVES:
      raise ValueError(
        f"ObjectiveConfig.kind: got {self.kind!r}, expected one of {OBJECTIVES}; choose one."
      )
    if not 0 <= self.kl_coefficient < math.inf or not 0 <= self.max_advantage < math.inf:
      raise ValueError(
        f"ObjectiveConfig: got kl_coefficient={self.kl_coefficient}, max_advantage="
        f"{self.max_advantage}, expected numbers of at least 0; 0 is off."
      )
    if self.kind in ("mean", "grpo") and (self.valid_only or self.max_advantage):
      raise ValueError(
        f"ObjectiveConfig: got kind={self.kind!r} with valid_only={self.valid_only}, max_advantage="
        f"{self.max_advantage}, expected neither: they belong to 'adaptive' and 'constant'."
      )
    if not 0 < self.divergence < math.inf or not 0 <= self.beta < math.inf:
      raise ValueError(
        f"ObjectiveConfig: got divergence={self.divergence}, beta={self.beta}, expected a positive"
        " number of nats and a beta of at least 0; ln 2 and 2 are published."
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiscoverConfig:
  """One run, whole. Every field can be set as `--config.field`, nested ones by dots.

  Attributes:
    problem: its name, by which the run is known; see `discovery.loading.load`.
    model: "tiny" writes edits and is trained from nothing; a Hugging Face directory, or a Hub id,
      writes programs.
    seed: decides starts and samples; below 2**63.
    num_steps: rounds of the circle; 50 is published.
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
    optimizer: the optax chain.
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
  programs: writers.ProgramConfig = writers.ProgramConfig()
  chat: tokenizer_lib.ChatConfig = tokenizer_lib.ChatConfig()
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
  optimizer: step_lib.OptimizerConfig = step_lib.OptimizerConfig(
    learning_rate=3e-3, b2=0.95, max_gradient_norm=1.0
  )

  def __post_init__(self):
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
    """Returns what the parts that this circle shares with `rl` go by."""
    max_tokens = max(self.programs.thinking_tokens, self.programs.answer_tokens)
    if self.model == "tiny":
      max_tokens = len(_language(environment).allowed)
    return RunConfig(
      seed=self.seed,
      num_steps=self.num_steps,
      num_instances=self.num_instances,
      checkpoint_every=self.checkpoint_every,
      lora_rank=0 if self.model == "tiny" else self.lora_rank,
      lora_alpha=self.lora_alpha,
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
      optimizer=self.optimizer,
    )


@dataclasses.dataclass(frozen=True)
class Discovery:
  """What a run leaves behind.

  Attributes:
    artefact: the best ever found.
    score: its.
    archive: all that was kept.
    state: the weights, which may go.
    summary: the numbers of summary.json.
  """

  artefact: Artefact
  score: environment_lib.Score
  archive: archive_lib.Archive
  state: TrainState
  summary: dict[str, Any]


class Sampled(NamedTuple):
  """A step's attempts by group, then by member.

  Attributes:
    starts: for each group, the state it started from.
    start_rewards: and what that state was worth.
    said: for each attempt, the sequences of which it was made.
    attempts: and what came of it.
  """

  starts: tuple[int, ...]
  start_rewards: tuple[float, ...]
  said: list[list[tuple[writers.Said, ...]]]
  attempts: list[list[Attempt]]


BEST = "best.json"
# Of a problem that is timed: states whose values are taken once more, with care, at the end.
NUM_CONFIRMED = 8
# A checkpoint is also due when the last one is so old: what a kill makes us compute again.
SAVE_SECONDS = 60.0
# Sequences are learnt from by their attempt's score; verdicts of their own have no say.
_NOTHING = Verdict(reward=0.0, correct=False, well_formed=True)
# Of a step's rewards: their distribution, from the least to the most.
REWARD_PERCENTS = (0, 10, 25, 50, 75, 90, 100)
# What the progress bar shows, with how many digits: records differ in the seventh and beyond.
CONSOLE_DIGITS = {
  "search/best": 9,
  "search/gain": 9,
  "search/archive_size": 4,
  "objective/beta": 4,
  "objective/kl_to_base": 4,
  "search/tokens": 9,
}
# Settings that change no bit, so that a run may be resumed with others. Not the engine: its context
# is the tiny policy's own, and what a program's thinking has to fit.
FREE_SETTINGS = ("num_steps", "num_workers", "num_instances", "checkpoint_every", "scheduler")
# Numerics do change bits; but for them the fingerprint speaks, with a flag of its own.
_NOT_COMPARED = (*FREE_SETTINGS, "numerics")


def discover(
  config: DiscoverConfig,
  environment: Environment,
  directory: pathlib.Path,
  *,
  factory: Callable[[], Environment] | None = None,
  policy: Policy | None = None,
  resume: bool = False,
  accept_new_numerics: bool = False,
  say: Callable[[str], None] = print,
  programs: Programs | None = None,
) -> Discovery:
  """Runs the circle.

  Args:
    config: the run.
    environment: the problem, such as `discovery.loading.load(config.problem)`.
    directory: takes config.json, status.json, metrics.jsonl, best.json, checkpoints/ and
      summary.json; of a language model also journal.jsonl.
    factory: makes the environment once more in each of `config.num_workers` processes, to which it
      is pickled; `loading.load(config.problem)` if None.
    policy: what writes; `tiny_policy` if None, which goes with `model="tiny"` alone.
    resume: carry on from the latest checkpoint.
    accept_new_numerics: resume under another fingerprint, as a new epoch.
    say: takes lines for people: what is found, and at least every ten seconds what it is at.
    programs: of `run.programs.make_programs`, to share between runs of one shape; its own if None.

  Raises:
    stops.Interrupted: on Ctrl-C or SIGTERM; what was found is saved.
    ValueError: for settings, a directory or a problem that cannot work, before anything is sampled.
  """
  if not isinstance(environment, Environment):
    raise ValueError(
      f"discover.environment: got {type(environment).__name__}, expected a problem; pass"
      " loading.load(config.problem), or what has the attributes of discovery.environment."
      "Environment."
    )
  if factory is None and config.num_workers:
    loading.check_name(config.problem)
  directory = pathlib.Path(directory)
  with stops_lib.heard() as stops, progress_lib.Progress(say) as progress:
    return _discover(
      config,
      environment,
      directory,
      factory or functools.partial(loading.load, config.problem),
      policy,
      resume,
      accept_new_numerics,
      programs,
      stops,
      progress,
    )


def _discover(
  config: DiscoverConfig,
  environment: Environment,
  directory: pathlib.Path,
  factory: Callable[[], Environment],
  policy: Policy | None,
  resume: bool,
  accept_new_numerics: bool,
  programs: Programs | None,
  stops: stops_lib.Stops,
  progress: progress_lib.Progress,
) -> Discovery:
  """See `discover`."""
  clock = summary.RunClock()
  helped = environment_lib.helper_seconds(environment)
  cpu_start, judged = time.process_time() + helped, helped
  directory_lib.check_directory(directory, resume=resume)
  if not resume and (directory / BEST).is_file():
    raise ValueError(
      f"{directory / BEST}: got the best artefact of another run, expected none; move it away, or"
      " choose another --workdir."
    )
  policy = tiny_policy(config, environment) if policy is None else policy
  given = config.run(environment)
  if resume:
    given = directory_lib.as_begun(given, directory)
  run = config_lib.for_model(given, policy.model)
  config = dataclasses.replace(
    config, numerics=run.numerics, engine=run.engine, trainer=run.trainer
  )
  fingerprint = numerics_lib.fingerprint(config.numerics, config.trainer.remat)
  own_programs = programs_lib.make_programs(run, policy.model)  # Nothing is compiled yet.
  programs = own_programs if programs is None else programs
  if programs.made_for != own_programs.made_for:
    raise ValueError(
      "discover.programs: got programs of another config or model, expected make_programs of these;"
      " share them only between runs of one shape."
    )
  # The first weights are kept even where nothing pulls to them: how far they are is shown.
  memory = memory_lib.memory_plan(run, policy.model, keeps_base=config.train)
  state, step = programs_lib.first_state(run, policy), 0
  archive = first_archive(config, environment)
  start = archive_lib.best(archive).value
  totals = dict(tokens=0, cpu_seconds=0.0, judge_cpu_seconds=0.0, start=start, best=start)
  settings = metrics.encode(dataclasses.asdict(config) | {"problem_sha256": problem_sha256(config)})
  if resume:
    # First: of another model the leaves would have other shapes, which says less.
    check_settings(checkpoint.read_host_state(directory / "checkpoints")["config"], settings)
    like = dict(state=state, base=policy.params)
    restored = checkpoint.restore(
      directory / "checkpoints",
      jax.eval_shape(lambda: like),
      fingerprint=fingerprint,
      accept_new_numerics=accept_new_numerics,
    )
    state, step = restored.state["state"], restored.step
    policy = dataclasses.replace(policy, params=restored.state["base"])
    archive = archive_lib.from_json(restored.host_state["archive"])
    totals = restored.host_state["totals"]
    clock.carry_on(restored.host_state["clock"])
    if (directory / BEST).is_file():
      read_best(directory)  # Damaged, it is refused now, and not in the middle of the run.
    progress.say(f"resumed after step {step} of {config.num_steps}")
  with contextlib.ExitStack() as stack:
    writer = stack.enter_context(writer_of(config, environment, policy, factory))
    if not resume:  # Later ones may be longer; of them a part is left out.
      for root in archive_lib.seeds(archive):
        writer.check(root.artefact)
    status = stack.enter_context(status_lib.kept(directory, step=step))
    stack.enter_context(progress.beaten(status.beat))
    if isinstance(writer, writers.Programs):
      progress.say(writer.sandbox.describe())
    journal = None
    if config.model != "tiny":
      held = {name: settings[name] for name in settings if name not in _NOT_COMPARED}
      journal = stack.enter_context(
        journal_lib.Journal(
          directory / journal_lib.FILE_NAME,
          fingerprint=fingerprint,
          settings=held,
          accept_new_numerics=accept_new_numerics,
          resume_step=step - 1,  # It counts steps from 0.
        )
      )
    for sentence in directory_lib.missing_records(directory, step, journal):
      progress.say(sentence)
    if not resume:
      metrics.write_summary(directory / "config.json", settings | {"fingerprint": fingerprint})
      if isinstance(writer, writers.Edits) and config.tiny.warm_sentences:
        with progress.phase("warming up"):
          params = warm_start(
            run, config, environment, writer, programs.trainer, state, progress.say
          )
        # Learning begins here: with fresh moments, and with this as the base.
        policy = dataclasses.replace(policy, params=params)
        state = programs_lib.first_state(run, policy)
    base = None
    if config.train or run.keeps_base:
      learning = programs_lib.meshes(run)[1]
      base = policy_lib.frozen_weights(policy, run.numerics, learning)
    engine = engine_lib.Engine(
      policy.model,
      policy_lib.running_weights(run.weights, state.params, base),
      numerics=config.numerics,
      config=memory.engine,
      key=numerics_lib.key(config.seed),
      tokenizer=policy.tokenizer,
      policy_version=step,
      runner=programs.runner,
    )
    if line := config_lib.chosen(given, run):
      progress.say(line)
    progress.say(memory.describe())
    progress.say(engine.plan())
    numbers_file = stack.enter_context(
      metrics.Writer(
        directory,
        resume_step=step if resume else None,
        total_steps=config.num_steps,
        console_digits=CONSOLE_DIGITS,
      )
    )

    stack.enter_context(progress.shown(numbers_file.note))

    def save(step: int) -> None:
      if checkpoint.latest_step(directory / "checkpoints") == step:
        return
      with stops.put_off(), progress.phase("saving"):
        checkpoint.save(
          directory / "checkpoints",
          step,
          dict(state=state, base=policy.params),
          host_state={
            "archive": archive_lib.to_json(archive),
            "totals": totals,
            "clock": clock.read(),
            "config": settings,
            "sizes": config_lib.chosen_sizes(run),
          },
          fingerprint=fingerprint,
          accept_new_numerics=accept_new_numerics,
          keep_latest=2,
        )

    if not resume:
      save(0)
    if not (directory / BEST).is_file():
      write_best(directory, environment, archive, archive_lib.best(archive))
    saved_at, has_remarked = time.monotonic(), False
    try:
      while step < config.num_steps:
        progress.begin_step(step + 1, config.num_steps)
        with contextlib.ExitStack() as whole:
          # From the first update on, a stop waits until the step is whole, its numbers included.
          put_off = functools.partial(whole.enter_context, stops.put_off())
          sampled = sample(config, engine, writer, archive, step, journal, progress=progress)
          remark = "" if has_remarked else remark_on(writer, sampled)
          if remark:
            progress.say(f"step {step + 1}: {remark}")
            has_remarked = True  # Once is enough.
          found = archived(environment, archive, sampled, step)
          if archive_lib.best(found).value > totals["best"]:
            write_best(directory, environment, found, archive_lib.best(found))
          found = replanted(config, environment, found, step)
          new_state, numbers = state, {}
          if config.train:
            if config.engine.gives_back_pages:
              engine.give_back_pages()
            with progress.phase("learning"):
              new_state, numbers = learn(
                config, run, programs.trainer, state, sampled, base, before_update=put_off
              )
              weights = policy_lib.running_weights(run.weights, new_state.params, base)
              engine.set_params(weights, policy_version=step + 1)
          tokens = sum(len(said.completion.tokens) for said in sequences(sampled))
          done = dict(
            tokens=totals["tokens"] + tokens,
            cpu_seconds=totals["cpu_seconds"] + cpu_seconds(environment, writer) - cpu_start,
            judge_cpu_seconds=(
              totals["judge_cpu_seconds"] + judge_cpu_seconds(environment, writer) - judged
            ),
            start=totals["start"],
            best=max(totals["best"], archive_lib.best(found).value),
          )
          numbers |= of_search(environment, found, sampled, done) | {
            "search/replanted": float(len({*found.roots} - {*archive.roots})),
            "search/tokens": float(done["tokens"]),
            "search/cpu_seconds": done["cpu_seconds"],
          }
          if (joules := clock.joules) is not None:
            numbers["search/joules"] = joules
          numbers_file.write(step + 1, numbers)
          progress.has_said()
          # Together, and after its numbers: whenever a stop comes, what is saved is a whole step.
          state, archive, totals, step = new_state, found, done, step + 1
          status.step = step
        cpu_start = cpu_seconds(environment, writer)
        judged = judge_cpu_seconds(environment, writer)
        is_due = step % config.checkpoint_every == 0 or time.monotonic() - saved_at > SAVE_SECONDS
        if is_due or step == config.num_steps:
          save(step)
          saved_at = time.monotonic()
      progress.end_steps()
    except KeyboardInterrupt as stop:
      if not step_lib.is_given_up(state):  # A second one, in the middle of an update.
        save(step)
      raise stops_lib.Interrupted(
        f"stopped by {stops_lib.name_of(stop)} after step {step} of {config.num_steps}; --resume"
        " goes on",
        stops_lib.status_of(stop),
      ) from None
    except edits.WorkerDied:
      save(step)
      raise
    if isinstance(environment, environment_lib.Timed):
      # The first may be first by luck alone.
      for leader in archive_lib.leaders(archive, NUM_CONFIRMED):
        write_best(directory, environment, archive, leader)
    # Not the archive's: before a kill a problem that is timed may have found a better one.
    best = read_best(directory)
    score = environment_lib.record_score(environment, best["artefact"])
    numbers = clock.read() | dict(
      problem=environment.name,
      best=score.value,
      start=shown(environment, totals["start"]),
      certificate=score.certificate,
      attempts=step * config.groups_per_step * config.group_size,
      tokens=totals["tokens"],
      cpu_seconds=totals["cpu_seconds"],
      judge_cpu_seconds=totals["judge_cpu_seconds"],
      lineage=len(best["lineage"]),
      found_in_step=best["step"],
      optimizer_steps=int(state.step),
      numerics=fingerprint,
    )
    metrics.write_summary(directory / "summary.json", numbers)
  return Discovery(best["artefact"], score, archive, state, numbers)


def sample(
  config: DiscoverConfig,
  engine: engine_lib.Engine,
  writer: writers.Writer,
  archive: archive_lib.Archive,
  step: int,
  journal: journal_lib.Journal | None = None,
  *,
  progress: progress_lib.Progress | None = None,
) -> Sampled:
  """Chooses a step's starts, samples a group from each, and makes the attempts."""
  watched = progress or progress_lib.silent()
  starts = puct.select(archive, config.groups_per_step, config.search, config.seed)
  by_id = {state.state_id: state for state in archive.states}
  artefacts = [by_id[start].artefact for start in starts]
  asked = [
    writer.ask(artefact, step, group, printed=by_id[start].printed)
    for group, (start, artefact) in enumerate(zip(starts, artefacts, strict=True))
  ]
  said = iter(
    writer.answers(
      sampler(config, engine, journal, watched),
      [request for requests in asked for request in requests],
    )
  )
  by_group = [[next(said) for _ in requests] for requests in asked]
  jobs = [writers.Job(artefacts[group], one) for group, ones in enumerate(by_group) for one in ones]
  with watched.phase("judging"):
    attempts = iter(writer.attempts(jobs, journal))
  return Sampled(
    starts=starts,
    start_rewards=tuple(by_id[start].reward for start in starts),
    said=by_group,
    attempts=[[next(attempts) for _ in ones] for ones in by_group],
  )


def remark_on(writer: writers.Writer, sampled: Sampled) -> str:
  """Returns what a user should know of a step's attempts and no number tells; "" if nothing."""
  attempts = [attempt for group in sampled.attempts for attempt in group]
  failed = [attempt for attempt in attempts if attempt.status == "failed"]
  if failed and isinstance(writer, writers.Edits):  # Programs fail, languages should not.
    return f"{len(failed)} sentences failed, the first: {failed[0].message}"
  if not any(attempt.score.is_valid for attempt in attempts):
    return f"none of {len(attempts)} attempts is valid, the first: {attempts[0].score.reason}"
  return ""


def sampler(
  config: DiscoverConfig,
  engine: engine_lib.Engine,
  journal: journal_lib.Journal | None,
  progress: progress_lib.Progress,
) -> writers.Generate:
  """Returns what samples completions; what a journal holds is not sampled again."""

  def generate(requests: Sequence[Request]) -> Iterator[Completion]:
    with progress.phase(
      "sampling", total=len(requests), num_tokens=lambda: engine.counters.sampled_tokens
    ) as phase:
      for completion in sampled(requests):
        phase.num_finished += 1
        yield completion

  def sampled(requests: Sequence[Request]) -> Iterator[Completion]:
    if journal is None:
      yield from groups.whole(divided.DividedRollout(engine, config.scheduler).run(requests))
      return
    missing: dict[str, Request] = {}
    for request in requests:
      entry = journal.lookup(*groups.place_of(request.request_id))
      if entry is None:
        missing[request.request_id] = request
      else:
        yield entry.rollout.completion
    asked = list(missing.values())
    answered = divided.resumed(engine, config.scheduler, journal, asked).run(asked)
    for completion in groups.whole(answered):
      rollout = Rollout(
        request=missing[completion.request_id], completion=completion, verdict=_NOTHING
      )
      journal.append(*groups.place_of(completion.request_id), rollout)
      yield completion

  return generate


def sequences(sampled: Sampled) -> list[writers.Said]:
  """Returns all sequences of a step, by group, then by member."""
  return [one for group in sampled.said for said in group for one in said]


def archived(
  environment: Environment, archive: archive_lib.Archive, sampled: Sampled, step: int
) -> archive_lib.Archive:
  """Returns the archive after a step's attempts."""
  expansions = [
    (
      start,
      [
        archive_lib.Child(
          artefact=attempt.artefact,
          value=signed(environment, attempt.score.value),
          reward=attempt.score.reward,
          tokens=said[-1].completion.text or said[-1].completion.tokens,
          printed=attempt.message,
        )
        for said, attempt in zip(group, attempts, strict=True)
        if attempt.score.is_valid
      ],
    )
    for start, group, attempts in zip(
      sampled.starts, sampled.said, sampled.attempts, strict=True
    )
  ]
  return archive_lib.record_step(archive, expansions, step=step)


def objective_of(config: ObjectiveConfig, sampled: Sampled) -> tuple[np.ndarray, dict[str, float]]:
  """Returns the advantages f32[b, g] of a step's attempts, and what they look like."""
  rewards = np.asarray([[a.score.reward for a in group] for group in sampled.attempts], np.float64)
  valid = np.asarray([[a.score.is_valid for a in group] for group in sampled.attempts])
  if config.gains_only:
    rewards = np.maximum(rewards - np.asarray(sampled.start_rewards)[:, None], 0.0)
  # "mean" and "grpo" tilt nothing: beta is 0, and all of a group count.
  beta = {"adaptive": None, "constant": config.beta}.get(config.kind, 0.0)
  found = entropic.entropic(
    rewards,
    divergence=config.divergence,
    beta=beta,
    valid=valid,
    valid_only=config.valid_only,
    max_advantage=config.max_advantage or None,
  )
  values = found.advantages
  if config.kind in ("mean", "grpo"):
    values = (advantages.dr_grpo if config.kind == "mean" else advantages.grpo)(rewards)
  return values, {
    "objective/beta": float(np.mean(found.beta)),
    "objective/divergence": float(np.mean(found.kl)),
    "objective/effective_samples": float(np.mean(found.effective_samples)),
    "objective/degenerate_groups": float(sum(map(bool, found.reason))),
  }


def learn(
  config: DiscoverConfig,
  run: RunConfig,
  trainer: step_lib.Trainer,
  state: TrainState,
  sampled: Sampled,
  base: parameters.Params | None,
  *,
  before_update: Callable[[], object] = lambda: None,
) -> tuple[TrainState, dict[str, float]]:
  """Takes one optimiser step on a step's attempts; returns the new state and its numbers.

  `before_update` is called when the gradient is there; from then on `state` may be used up.
  """
  begin = time.monotonic()
  values, numbers = objective_of(config.objective, sampled)
  # Each sequence of an attempt has its advantage.
  counts = [len(said) for group in sampled.said for said in group]
  each = np.repeat(values.ravel(), counts)[:, None]
  batch = programs_lib.pack(run, as_groups(sequences(sampled)), each)
  if base is not None:
    reference_weights = policy_lib.reference_weights(run.weights, state.params, base)
    reference = trainer.scores(reference_weights, batch).logprob
    # What sampled is, to the bit, what the trainer scores: the first is at hand.
    chosen = (batch.behaviour_logprobs, reference, batch.loss_mask)
    numbers["objective/kl_to_base"] = entropic.kl_to_base(*chosen)
    if config.objective.kl_coefficient:
      batch = batch._replace(
        advantages=entropic.kl_shaped(
          batch.advantages, *chosen, config.objective.kl_coefficient
        )
      )
  params = policy_lib.running_weights(run.weights, state.params, base)
  gradient, means, scores = trainer.gradient(params, batch, losses.denominators(batch), None)
  gap = step_lib.rollout_gap(scores, batch)
  before_update()
  state, norms = trainer.update(state, gradient)
  return state, numbers | {
    "contract/kl": gap["kl"],
    "contract/max_abs_logprob_gap": gap["max_abs_logprob_gap"],
    "train/entropy": float(means["entropy"]),
    "train/grad_norm": float(norms["grad_norm"]),
    "train/seconds": time.monotonic() - begin,
  }


def warm_start(
  run: RunConfig,
  config: DiscoverConfig,
  environment: Environment,
  writer: writers.Edits,
  trainer: step_lib.Trainer,
  state: TrainState,
  say: Callable[[str], None],
) -> parameters.Params:
  """Returns weights that have learnt to say random valid sentences.

  An honest stand-in for pre-training: sentences are drawn evenly from the grammar, applied to the
  start and to what such sentences made of it; those that can be applied are learnt.
  """
  language = _language(environment)
  random = np.random.default_rng([config.seed, 1])
  artefacts = [environment.start(groups.request_seed(config.seed, -3, 0))]
  examples: list[writers.Said] = []
  num_tried = 0
  while len(examples) < config.tiny.warm_sentences and num_tried < 8 * config.tiny.warm_sentences:
    jobs = []
    for place in range(min(256, config.tiny.warm_sentences)):
      artefact = artefacts[int(random.integers(len(artefacts)))]
      request = writer.request(artefact, -1, num_tried + place, 0)
      tokens = edits.random_sentence(language, random)
      unscored = np.zeros(len(tokens), np.float32)
      completion = Completion(
        request_id=request.request_id,
        tokens=tokens,
        behaviour_logprobs=unscored,
        raw_logprobs=unscored,
        text="",
        finish_reason="stop",
        policy_version=0,
      )
      jobs.append(writers.Job(artefact, (writers.Said(request, completion),)))
    num_tried += len(jobs)
    for job, attempt in zip(jobs, writer.attempts(jobs), strict=True):
      if attempt.score.is_valid and len(examples) < config.tiny.warm_sentences:
        artefacts.append(attempt.artefact)
        examples += job.said
  say(f"warm start: {len(examples)} valid sentences of {num_tried} drawn evenly")
  size = config.groups_per_step * config.group_size
  for _ in range(config.tiny.warm_passes):
    for first in range(0, len(examples), size):
      part = examples[first : first + size]
      # Advantage 1 for all: the likelihood of what they say goes up.
      batch = programs_lib.pack(run, as_groups(part), np.ones((len(part), 1), np.float32))
      params = policy_lib.running_weights(run.weights, state.params, None)
      gradient, _, _ = trainer.gradient(params, batch, losses.denominators(batch), None)
      state, _ = trainer.update(state, gradient)
  return state.params


def as_groups(said: Sequence[writers.Said]) -> list[RolloutGroup]:
  """Returns sequences as groups of one, whose advantages are known already."""
  return [
    RolloutGroup(
      group_index=index,
      problem=Problem(problem_id=request.request_id, prompt=""),
      rollouts=(Rollout(request=request, completion=completion, verdict=_NOTHING),),
    )
    for index, (request, completion) in enumerate(said)
  ]


# Policy, archive, and what a run writes of them.


def writer_of(
  config: DiscoverConfig,
  environment: Environment,
  policy: Policy,
  factory: Callable[[], Environment],
) -> contextlib.AbstractContextManager[writers.Edits | writers.Programs]:
  """Returns how the policy writes; to be entered."""
  group = writers.Group(size=config.group_size, temperature=config.temperature, seed=config.seed)
  context = min(config.engine.max_context, policy.model.max_context)
  if config.model == "tiny":
    judge = edits.Judge(environment, factory, config.num_workers)
    return writers.Edits(environment, group, judge, context)
  if policy.tokenizer is None:
    raise ValueError(
      f"DiscoverConfig.model: got {config.model!r} and a policy without a tokenizer, expected one;"
      " pass the model's own."
    )
  tokenizer = policy_lib.chatting(policy.tokenizer, config.chat)
  return writers.Programs(environment, group, config.programs, tokenizer, context)


def tiny_policy(config: DiscoverConfig, environment: Environment) -> Policy:
  """Returns a small transformer with random weights over the environment's vocabulary."""
  language, tiny = _language(environment), config.tiny
  size = tiny.hidden_size // tiny.num_heads
  model = model_config.TransformerConfig(
    family="qwen3",
    vocab_size=language.vocab_size,
    hidden_size=tiny.hidden_size,
    intermediate_size=3 * tiny.hidden_size,
    num_layers=tiny.num_layers,
    num_heads=tiny.num_heads,
    num_kv_heads=tiny.num_heads,
    head_dim=size,
    rotary=rotary.RotaryConfig(head_dim=size, base=10_000.0),
    max_context=config.engine.max_context,
  )
  key = numerics_lib.key(groups.request_seed(config.seed, -4))
  return Policy(model, parameters.init(key, model, config.numerics))


def first_archive(config: DiscoverConfig, environment: Environment) -> archive_lib.Archive:
  """Returns an archive of as many starts as there are groups.

  Raises:
    ValueError: if a start is not valid: the environment's own mistake.
  """
  seeds = [seed_of(config, environment, place) for place in range(config.groups_per_step)]
  return archive_lib.start(
    seeds, keep_children=config.search.keep_children, capacity=config.search.capacity
  )


def replanted(
  config: DiscoverConfig, environment: Environment, archive: archive_lib.Archive, step: int
) -> archive_lib.Archive:
  """Returns the archive with fresh starts in the place of islands that are stuck after a step."""
  search = config.search
  for root in archive_lib.stuck_roots(
    archive, step, islands=search.islands, patience=search.patience
  ):
    seed = seed_of(config, environment, archive.roots.index(root), step + 1)
    archive = archive_lib.replant(archive, root, seed, step=step)
  return archive


def seed_of(
  config: DiscoverConfig, environment: Environment, place: int, step: int = 0
) -> archive_lib.Child:
  """Returns the start of a group's tree that may grow from a step on.

  Raises:
    ValueError: if it is not valid: the environment's own mistake.
  """
  artefact = environment.start(groups.request_seed(config.seed, -3, place, step))
  score = environment.verify(artefact)
  if not score.is_valid:
    raise ValueError(
      f"{environment.name}: got an invalid start ({score.reason}), expected a valid one; mend its"
      " `start`, and try --check_problem."
    )
  return archive_lib.Child(
    artefact=artefact, value=signed(environment, score.value), reward=score.reward
  )


def signed(environment: Environment, value: float) -> float:
  """Returns a value as the archive orders it: higher is better."""
  return value if environment.is_maximised else -value


shown = signed  # Back again: the same change of sign.


def of_search(
  environment: Environment,
  after: archive_lib.Archive,
  sampled: Sampled,
  totals: dict[str, float],
) -> dict[str, float]:
  """Returns a step's numbers of the search; `totals` has the first and the best value so far."""
  scores = [a.score for group in sampled.attempts for a in group]
  rewards = [score.reward for score in scores]
  values = [score.value for score in scores if score.is_valid]
  numbers = {
    "search/best": shown(environment, totals["best"]),
    "search/gain": totals["best"] - totals["start"],
    "search/archive_size": float(len(after.states)),
    "search/seed_trees_alive": float(archive_lib.num_seed_trees_alive(after)),
    "search/valid_rate": len(values) / len(scores),
    "search/reward_mean": float(np.mean(rewards)),
  }
  for percent, reward in zip(REWARD_PERCENTS, np.percentile(rewards, REWARD_PERCENTS)):
    numbers[f"search/reward_p{percent}"] = float(reward)
  if values:
    quantiles = np.quantile(values, (0.1, 0.5, 0.9))
    numbers |= {
      f"search/value_{name}": float(value)
      for name, value in zip(("p10", "median", "p90"), quantiles)
    }
  return numbers


def write_best(
  directory: pathlib.Path,
  environment: Environment,
  archive: archive_lib.Archive,
  best: archive_lib.State,
) -> None:
  """Writes the best artefact so far, its lineage, the tree that it grew on, and what it is worth.

  At once, and whole.

  What is there already stays if it is better: a process that died knew more than its checkpoint.
  """
  score = environment_lib.record_score(environment, best.artefact)
  path = directory / BEST
  if path.is_file():
    if not environment_lib.is_better(environment, score.value, read_best(directory)["value"]):
      return
  elif not score.is_valid:
    raise ValueError(
      f"{environment.name}: got an artefact that was valid and now is not ({score.reason}),"
      " expected one verdict; have verify draw nothing and read no clock, or try --check_problem."
    )
  lineage = [
    # Steps count from 1, as in metrics.jsonl; 0 is the start.
    dict(step=state.step + 1, value=shown(environment, state.value), tokens=state.tokens)
    for state in archive_lib.lineage(archive, best.state_id)
  ]
  tree = [
    dict(id=state.state_id, parent=state.parent, step=state.step + 1,
         value=shown(environment, state.value))
    for state in archive_lib.family(archive, best.state_id)
  ]  # fmt: skip
  record = dict(
    problem=environment.name,
    value=score.value,
    certificate=score.certificate,
    step=best.step + 1,
    artefact=best.artefact,
    lineage=lineage,
    tree=tree,
  )
  metrics.write_summary(path, json.loads(json.dumps(record)))


def read_best(directory: pathlib.Path) -> dict[str, Any]:
  """Returns what `write_best` wrote.

  Raises:
    ValueError: naming the file, if it is damaged.
  """
  path = directory / BEST
  try:
    found = json.loads(path.read_text(encoding="utf-8"))
    if not math.isfinite(found["value"]):
      raise ValueError(f"its value is {found['value']}")
    missing = {"artefact", "step", "lineage", "tree"} - {*found}
    if missing:
      raise ValueError(f"it has no {', '.join(sorted(missing))}")
    return found
  except (KeyError, TypeError, ValueError) as error:
    raise ValueError(
      f"{path}: got a damaged file ({type(error).__name__}: {error}), expected the best artefact as"
      " it was written; take it from a copy, or remove it: the best of the checkpoint is written"
      " again on --resume."
    ) from error


def problem_sha256(config: DiscoverConfig) -> str:
  """Returns the digest of a problem's own file; "" of a problem of this library."""
  path = pathlib.Path(config.problem)
  is_file = path.suffix == ".py" and path.is_file()
  return hashlib.sha256(path.read_bytes()).hexdigest() if is_file else ""


def check_settings(before: dict[str, Any], now: dict[str, Any]) -> None:
  """Refuses to resume a run with settings that would make it another one.

  Raises:
    ValueError: naming them with both values.
  """
  changed = [
    difference
    for name in sorted({*before, *now} - {*_NOT_COMPARED})
    for difference in _differences(name, before.get(name), now.get(name))
  ]
  if changed:
    raise ValueError(
      f"--resume: got other settings ({'; '.join(changed)}), expected those of the run; set them as"
      " in its config.json, or choose another --workdir."
    )


def _differences(name: str, before: Any, now: Any) -> list[str]:
  """Returns a sentence for each setting that differs, by its dotted name."""
  if isinstance(before, dict) and isinstance(now, dict):
    return [
      difference
      for field in sorted({*before, *now})
      for difference in _differences(f"{name}.{field}", before.get(field), now.get(field))
    ]
  return [] if before == now else [f"{name}: {before} before, {now} now"]


def cpu_seconds(environment: Environment, writer: writers.Writer) -> float:
  """Returns the CPU seconds of this process, and of those that make and judge its attempts."""
  return time.process_time() + writer.worker_seconds + environment_lib.helper_seconds(environment)


def judge_cpu_seconds(environment: Environment, writer: writers.Writer) -> float:
  """Returns the CPU seconds of attempts, in whatever process."""
  return writer.cpu_seconds + environment_lib.helper_seconds(environment)


def _language(environment: Environment) -> environment_lib.EditLanguage:
  """Returns the environment's language of edits.

  Raises:
    ValueError: if it has none.
  """
  if environment.language is None:
    raise ValueError(
      f"{environment.name}: got a problem without a language of edits, expected one; give it"
      " LANGUAGE, or choose a model that writes programs with --config.model."
    )
  return environment.language
