"""The loop for one problem: keep training until it gives way.

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
import pathlib
import time
from typing import Any

import numpy as np

from seerjax import metrics, numerics as numerics_lib
from seerjax.discovery import (
  archive as archive_lib,
  attempts as attempts_lib,
  config as discovery_config,
  edits,
  environment as environment_lib,
  loading,
  numbers as numbers_lib,
  objective as objective_lib,
  puct,
  record as record_lib,
  starts as starts_lib,
  tiny_policy as tiny_policy_lib,
)
from seerjax.discovery.attempts import Generate, Sampled, Writer
from seerjax.discovery.config import DiscoverConfig
from seerjax.discovery.edit_policy import EditPolicy
from seerjax.discovery.environment import Artefact, Environment
from seerjax.discovery.program_policy import ProgramPolicy
from seerjax.engine import engine as engine_lib
from seerjax.models import parameters
from seerjax.models.loading import Model
from seerjax.rollout import divided, groups, journal as journal_lib
from seerjax.run import (
  config as config_lib,
  directory as directory_lib,
  memory as memory_lib,
  policy as policy_lib,
  programs as programs_lib,
  progress as progress_lib,
  session as session_lib,
)
from seerjax.run.config import RunConfig
from seerjax.run.policy import Policy
from seerjax.run.programs import Programs
from seerjax.trainer import entropic, losses, step as step_lib
from seerjax.types import Completion, Request, Rollout, TrainState


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


# A checkpoint is also due when the last one is so old: what a kill makes us compute again.
SAVE_SECONDS = 60.0


def discover(
  config: DiscoverConfig,
  environment: Environment,
  directory: pathlib.Path,
  *,
  factory: Callable[[], Environment] | None = None,
  policy: Policy | None = None,
  resume: bool = False,
  accept_new_numerics: bool = False,
  log: Callable[[str], None] = print,
  programs: Programs | None = None,
) -> Discovery:
  """Keeps training on one problem, and keeps the best that was ever found.

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
    log: takes lines for people: what is found, and at least every ten seconds what it is at.
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
  if factory is None:
    factory = functools.partial(loading.load, config.problem)
    if config.num_workers:
      loading.check_name(config.problem)
  with session_lib.Session(
    pathlib.Path(directory),
    num_steps=config.num_steps,
    resume=resume,
    accept_new_numerics=accept_new_numerics,
    log=log,
    keep_checkpoints=2,
  ) as run:
    record_lib.check_directory(run.directory, resume=resume)
    return _discover(config, environment, factory, run, resume, policy, programs)


def _discover(
  config: DiscoverConfig,
  environment: Environment,
  factory: Callable[[], Environment],
  run: session_lib.Session,
  resume: bool,
  policy: Policy | None,
  programs: Programs | None,
) -> Discovery:
  """See `discover`."""
  meter = numbers_lib.CpuMeter(environment)
  policy = tiny_policy_lib.tiny_policy(config, environment) if policy is None else policy
  given = config.run(environment)
  if resume:
    given = directory_lib.as_begun(given, run.directory)
  shape = config_lib.for_model(given, policy.model)
  config = dataclasses.replace(
    config, numerics=shape.numerics, engine=shape.engine, trainer=shape.trainer
  )
  if programs is None:
    programs = programs_lib.make_programs(shape, policy.model)
  elif programs.made_for != programs_lib.key_of(shape, policy.model):
    raise ValueError(
      "discover.programs: got programs of another config or model, expected make_programs of these;"
      " share them only between runs of one shape."
    )
  # The first weights are kept even where nothing pulls to them: how far they are is shown.
  memory = memory_lib.memory_plan(shape, policy.model, keeps_base=config.train)
  state = programs_lib.first_state(shape, policy)
  archive = starts_lib.first_archive(config, environment)
  totals = numbers_lib.first_totals(archive)
  settings = discovery_config.settings_of(config)
  run.hold_to(
    settings,
    free=discovery_config.NOT_COMPARED,
    defaults=discovery_config.settings_of(DiscoverConfig()),
  )
  like = dict(state=state, base=policy.params)
  fingerprint = numerics_lib.fingerprint(config.numerics, config.trainer.remat)
  if restored := run.restore(lambda: like, fingerprint=fingerprint):
    state = restored.state["state"]
    policy = dataclasses.replace(policy, params=restored.state["base"])
    archive = archive_lib.from_json(restored.host_state["archive"])
    totals = restored.host_state["totals"]
    record_lib.check_best(run.directory)
  writer = run.enter(writer_of(config, environment, policy, factory))
  if not resume:  # Later ones may be longer; of them a part is left out.
    for root in archive_lib.seeds(archive):
      writer.check(root.artefact)
  run.open(
    sizes=config_lib.chosen_sizes(shape),
    console_digits=numbers_lib.CONSOLE_DIGITS,
    has_journal=config.model != "tiny",
  )
  if isinstance(writer, ProgramPolicy):
    run.progress.say(writer.sandbox.describe())
  elif not resume and config.tiny.warm_sentences:
    with run.progress.phase("warming up"):
      params = tiny_policy_lib.warm_start(
        shape, config, environment, writer, programs.trainer, state, run.progress.say
      )
    # Learning begins here: with fresh moments, and with this as the base.
    policy = dataclasses.replace(policy, params=params)
    state = programs_lib.first_state(shape, policy)
  base = None
  if config.train or shape.keeps_base:
    base = policy_lib.frozen_weights(policy, shape.numerics, programs_lib.meshes(shape)[1])
  engine = engine_lib.Engine(
    Model(
      policy.model,
      policy_lib.running_weights(shape.weights, state.params, base),
      config.numerics,
      policy.tokenizer,
    ),
    config=memory.engine,
    key=numerics_lib.key(config.seed),
    policy_version=run.step,
    runner=programs.runner,
  )
  if line := config_lib.chosen(given, shape):
    run.progress.say(line)
  run.progress.say(memory.describe())
  run.progress.say(engine.plan())

  def saved(archive: archive_lib.Archive, totals: dict[str, float]) -> session_lib.HostState:
    return lambda: {"archive": archive_lib.to_json(archive), "totals": totals, "config": settings}

  first = policy.params
  run.begin(dict(state=state, base=first), saved(archive, totals))
  record_lib.write_first(run.directory, environment, archive)
  remarked = ""
  try:
    while run.step < config.num_steps:
      # From the first update on, a stop waits until the step is whole, its numbers included.
      with run.next_step() as put_off_stops:
        sampled = sample(
          config, engine, writer, archive, run.step, run.journal, progress=run.progress
        )
        if not remarked:  # Once is enough.
          remarked = numbers_lib.remark_on(writer, sampled)
          if remarked:
            run.progress.say(f"step {run.step + 1}: {remarked}")
        found = starts_lib.archived(environment, archive, sampled, run.step)
        if archive_lib.best(found).value > totals["best"]:
          record_lib.write_best(run.directory, environment, found, archive_lib.best(found))
        found = starts_lib.replanted(config, environment, found, run.step)
        new_state, numbers = state, {}
        if config.train:
          new_state, numbers = learn_and_publish(
            config, shape, engine, programs.trainer, state, sampled, base, run, put_off_stops
          )
        done = numbers_lib.totals_after(totals, sampled, found, meter.spent(writer))
        numbers |= numbers_lib.of_search(environment, archive, found, sampled, done)
        if (joules := run.clock.joules) is not None:
          numbers["search/joules"] = joules
        run.finish_step(dict(state=new_state, base=first), saved(found, done), numbers)
        state, archive, totals = new_state, found, done
      run.save_if_due(every=config.checkpoint_every, max_seconds=SAVE_SECONDS)
    run.progress.end_steps()
  except edits.WorkerDied:
    run.save()
    raise
  best, score = record_lib.final_best(run.directory, environment, archive)
  numbers = run.clock.read() | dict(
    problem=environment.name,
    best=score.value,
    start=environment_lib.signed(environment, totals["start"]),
    certificate=score.certificate,
    attempts=run.step * config.groups_per_step * config.group_size,
    tokens=totals["tokens"],
    cpu_seconds=totals["cpu_seconds"],
    judge_cpu_seconds=totals["judge_cpu_seconds"],
    lineage=len(best["lineage"]),
    found_in_step=best["step"],
    optimizer_steps=int(state.step),
    numerics=fingerprint,
  )
  metrics.write_summary(run.directory / "summary.json", numbers)
  return Discovery(best["artefact"], score, archive, state, numbers)



def sample(
  config: DiscoverConfig,
  engine: engine_lib.Engine,
  writer: Writer,
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
  jobs = [
    attempts_lib.Job(artefact, one)
    for artefact, ones in zip(artefacts, by_group, strict=True)
    for one in ones
  ]
  with watched.phase("judging"):
    attempts = iter(writer.attempts(jobs, journal))
  return Sampled(
    starts=starts,
    start_rewards=tuple(by_id[start].reward for start in starts),
    said=by_group,
    attempts=[[next(attempts) for _ in ones] for ones in by_group],
  )


def sampler(
  config: DiscoverConfig,
  engine: engine_lib.Engine,
  journal: journal_lib.Journal | None,
  progress: progress_lib.Progress,
) -> Generate:
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
        request=missing[completion.request_id], completion=completion, verdict=attempts_lib.UNJUDGED
      )
      journal.append(*groups.place_of(completion.request_id), rollout)
      yield completion

  return generate


def learn_and_publish(
  config: DiscoverConfig,
  shape: RunConfig,
  engine: engine_lib.Engine,
  trainer: step_lib.Trainer,
  state: TrainState,
  sampled: Sampled,
  base: parameters.Params | None,
  run: session_lib.Session,
  before_update: Callable[[], object],
) -> tuple[TrainState, dict[str, float]]:
  """Learns from a step's attempts, and gives the engine the weights that sample the next one's."""
  if config.engine.gives_back_pages:
    engine.give_back_pages()
  with run.progress.phase("learning"):
    state, numbers = learn(
      config, shape, trainer, state, sampled, base, before_update=before_update
    )
    weights = policy_lib.running_weights(shape.weights, state.params, base)
    engine.set_params(weights, policy_version=run.step + 1)
  return state, numbers


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
  values, numbers = objective_lib.objective_of(config.objective, sampled)
  # Each sequence of an attempt has its advantage.
  counts = [len(said) for group in sampled.said for said in group]
  each = np.repeat(values.ravel(), counts)[:, None]
  batch = programs_lib.pack(run, attempts_lib.as_groups(attempts_lib.sequences(sampled)), each)
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


def writer_of(
  config: DiscoverConfig,
  environment: Environment,
  policy: Policy,
  factory: Callable[[], Environment],
) -> contextlib.AbstractContextManager[EditPolicy | ProgramPolicy]:
  """Returns how the policy writes; to be entered.

  Raises:
    ValueError: if it writes programs and has no tokenizer.
  """
  group = attempts_lib.Group(
    size=config.group_size, temperature=config.temperature, seed=config.seed
  )
  context = min(config.engine.max_context, policy.model.max_context)
  if config.model == "tiny":
    judge = edits.Judge(environment, factory, config.num_workers)
    return EditPolicy(environment, group, judge, context)
  if policy.tokenizer is None:
    raise ValueError(
      f"DiscoverConfig.model: got {config.model!r} and a policy without a tokenizer, expected one;"
      " pass the model's own."
    )
  tokenizer = policy_lib.chatting(policy.tokenizer, config.chat)
  return ProgramPolicy(environment, group, config.programs, tokenizer, context)


