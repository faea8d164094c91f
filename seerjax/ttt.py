"""Test-time training: trains on a single problem and searches for its best solution.

    archive --PUCT--> starts -> prompts -> engine samples -> attempts -> verdicts -> archive
       ^                                                                    |
       +---- engine.update_weights <- params <- optimiser <- entropic advantages

A step selects start states from the archive and samples a group of attempts from each. An exact
verifier scores the resulting artefacts, the best ones enter the archive, and the weights are
updated towards the best attempts of each group. The result is the best artefact found, which is
written to best.json as soon as it is known. The weights need not be kept.

Starts, seeds, tokens and gradients of a step are a pure function of (config, step). Archive and
weights are saved in one checkpoint, so a killed run resumes to the same bits and the same archive.
Steps after the last checkpoint are repeated. For a language model, where tokens and verifier
programs are expensive, a journal records every chunk and every verdict.

`discover` runs the loop: `sample` selects starts and samples a group from each, `judge` builds and
scores the attempts, `learn` takes one optimiser step, and `publish` sends the weights to the
engine.

Source: Yuksekgonul et al. 2026 (TTT-Discover), https://arxiv.org/abs/2601.16175. Formulas:
`trainer.entropic`, `discovery.puct`.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import functools
import pathlib
import time
from typing import Any

import numpy as np

from seerjax import fields
from seerjax.discovery import (
  archive as archive_lib,
  attempts as attempts_lib,
  edits,
  environment as environment_lib,
  loading,
  numbers as numbers_lib,
  objective as objective_lib,
  puct,
  record as record_lib,
  sampling,
  setup as setup_lib,
  starts as starts_lib,
)
from seerjax.discovery.attempts import Sampled, Writer
from seerjax.discovery.config import DiscoverConfig, settings_of
from seerjax.discovery.environment import Artefact, Environment
from seerjax.engine import engine as engine_lib
from seerjax.models import parameters
from seerjax.rollout import journal as journal_lib
from seerjax.run import (
  lifecycle,
  policy as policy_lib,
  programs as programs_lib,
  progress as progress_lib,
  summary,
)
from seerjax.run.policy import Policy, WeightsConfig
from seerjax.run.programs import Programs
from seerjax.trainer import entropic, losses, routes, step as step_lib
from seerjax.types import TrainState

# Metrics of the gradient that are recorded, or how their names begin.
SHOWN_MEANS = ("entropy", *routes.METRICS)


@dataclasses.dataclass(frozen=True)
class Discovery:
  """Result of a discovery run.

  Attributes:
    artefact: the best artefact found.
    score: score of `artefact`.
    archive: final archive of states.
    state: final training state; safe to discard.
    summary: contents of summary.json.
  """

  artefact: Artefact
  score: environment_lib.Score
  archive: archive_lib.Archive
  state: TrainState
  summary: dict[str, Any]


# A checkpoint is also due when the last one is this old; bounds the work lost to a kill.
SAVE_SECONDS = 60.0


@fields.checked
def discover(
  config: DiscoverConfig,
  environment: Environment,
  directory: pathlib.Path,
  *,
  factory: Callable[[], Environment] | None = None,
  policy: Policy | None = None,
  resume: bool = False,
  accept_new_numerics: bool = False,
  accept_new_data: bool = False,
  log: Callable[[str], None] = print,
  programs: Programs | None = None,
) -> Discovery:
  """Trains on one problem and keeps the best artefact found.

  Args:
    config: configuration of the run.
    environment: the problem, for example `discovery.loading.load(config.problem)`.
    directory: receives config.json, status.json, metrics.jsonl, best.json, checkpoints/ and
      summary.json; for a language model also journal.jsonl.
    factory: picklable function that builds the environment in each of `config.num_workers`
      processes; `loading.load(config.problem)` if None.
    policy: the model that writes attempts; None is valid only with `model="tiny"` and means
      `tiny_policy`.
    resume: resume from the latest checkpoint.
    accept_new_numerics: resume under a different numerics fingerprint, as a new epoch.
    accept_new_data: resume with a changed problem file, as a new epoch.
    log: receives progress lines, at least one every ten seconds.
    programs: compiled programs from `run.programs.make_programs`, shared between runs of equal
      shapes; compiled here if None.

  Returns:
    See `Discovery`.

  Raises:
    stops.Interrupted: on Ctrl-C or SIGTERM, after the results so far are saved.
    ValueError: for an invalid setting, directory or problem, before sampling starts.
  """
  if factory is None:
    factory = functools.partial(loading.load, config.problem)
    if config.num_workers:
      loading.check_name(config.problem)
  with lifecycle.Life(
    pathlib.Path(directory),
    num_steps=config.num_steps,
    resume=resume,
    accept_new_numerics=accept_new_numerics,
    accept_new_data=accept_new_data,
    log=log,
    keep_checkpoints=2,
  ) as run:
    record_lib.check_directory(run.directory, resume=resume)
    ready = setup_lib.set_up(run, config, environment, factory, policy, programs)
    config, engine, writer = ready.config, ready.engine, ready.writer
    trainer, weights, settings = run.programs.trainer, run.config.weights, settings_of(config)
    state, archive, totals = ready.state, ready.archive, ready.totals

    def saved(archive: archive_lib.Archive, totals: dict[str, float]) -> lifecycle.HostState:
      return lambda: dict(archive=archive_lib.to_json(archive), totals=totals, config=settings)

    first = run.policy.params
    run.begin(dict(state=state, base=first), saved(archive, totals))
    record_lib.write_first(run.directory, environment, archive)
    remarked = ""
    try:
      while run.step < config.num_steps:
        # Once the update starts, a stop is deferred until the step and its metrics are complete.
        with run.next_step() as put_off_stops:
          sampled = sample(
            config, engine, writer, archive, run.step, run.journal, progress=run.progress
          )
          sampled = judge(writer, archive, sampled, run.journal, progress=run.progress)
          if not remarked and (remarked := numbers_lib.remark_on(writer, sampled)):  # Only once.
            run.progress.say(f"step {run.step + 1}: {remarked}")
          found = starts_lib.archived(environment, archive, sampled, run.step)
          if archive_lib.best(found).value > totals["best"]:
            record_lib.write_best(run.directory, environment, found, archive_lib.best(found))
          found = starts_lib.replanted(config, environment, found, run.step)
          new_state, numbers = state, {}
          if config.train:
            if config.engine.release_kv_while_training:
              engine.release_kv_cache()
            with run.progress.phase("learning"):
              new_state, numbers = learn(
                config, weights, trainer, state, sampled, ready.base, before_update=put_off_stops
              )
              publish(weights, engine, new_state, ready.base, policy_version=run.step + 1)
          done = numbers_lib.totals_after(totals, sampled, found, ready.meter.spent(writer))
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
    numbers = run.clock.read()
    numbers |= numbers_lib.of_run(config, environment, best, score, totals, run.step)
    return Discovery(best["artefact"], score, archive, state, run.finish(numbers, state))


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
  """Selects a step's starts and samples a group from each; `judge` builds the attempts."""
  starts = puct.select(archive, config.prompts_per_step, config.search, config.seed)
  by_id = {state.state_id: state for state in archive.states}
  asked = [
    writer.ask(by_id[start].artefact, step, group, printed=by_id[start].printed)
    for group, start in enumerate(starts)
  ]
  sequences = iter(
    writer.answers(
      sampling.sampler(config, engine, journal, progress or progress_lib.silent()),
      [request for requests in asked for request in requests],
    )
  )
  return Sampled(
    starts=starts,
    start_rewards=tuple(by_id[start].reward for start in starts),
    sequences=[[next(sequences) for _ in requests] for requests in asked],
  )


def judge(
  writer: Writer,
  archive: archive_lib.Archive,
  sampled: Sampled,
  journal: journal_lib.Journal | None = None,
  *,
  progress: progress_lib.Progress | None = None,
) -> Sampled:
  """Returns `sampled` with the attempts built from the samples, each with its score."""
  artefacts = {state.state_id: state.artefact for state in archive.states}
  jobs = [
    attempts_lib.Job(artefacts[start], sequences)
    for start, group in zip(sampled.starts, sampled.sequences, strict=True)
    for sequences in group
  ]
  with (progress or progress_lib.silent()).phase("judging"):
    attempts = iter(writer.attempts(jobs, journal))
  return sampled._replace(attempts=[[next(attempts) for _ in group] for group in sampled.sequences])


def learn(
  config: DiscoverConfig,
  weights: WeightsConfig,
  trainer: step_lib.Trainer,
  state: TrainState,
  sampled: Sampled,
  base: parameters.Params | None,
  *,
  before_update: Callable[[], object] = lambda: None,
) -> tuple[TrainState, dict[str, float]]:
  """Takes one optimiser step on a step's attempts; returns the new state and metrics.

  `before_update` is called once the gradient is computed; `state` may be donated from then on.
  """
  begin = time.monotonic()
  values, numbers = objective_lib.objective_of(config.objective, sampled)
  # An attempt's advantage applies to each of its sequences.
  counts = [len(sequences) for group in sampled.sequences for sequences in group]
  each = np.repeat(values.ravel(), counts)[:, None]
  groups = attempts_lib.as_groups(attempts_lib.sequences(sampled))
  batch = programs_lib.pack(config.engine, config.trainer, trainer.decoder, groups, each)
  if base is not None:
    reference_weights = policy_lib.reference_weights(weights, state.params, base)
    reference = trainer.scores(reference_weights, batch).logprob
    # Sampler and trainer log-probabilities are equal to the bit, so the sampler's are used.
    chosen = (batch.behaviour_logprobs, reference, batch.loss_mask)
    numbers["objective/kl_to_base"] = entropic.kl_to_base(*chosen)
    if config.objective.kl_coefficient:
      batch = batch._replace(
        advantages=entropic.kl_shaped(batch.advantages, *chosen, config.objective.kl_coefficient)
      )
  params = policy_lib.running_weights(weights, state.params, base)
  gradient, means, scores = trainer.gradient(params, batch, losses.denominators(batch), None)
  shown = {name: means[name] for name in means if name.startswith(SHOWN_MEANS)}
  gap = step_lib.rollout_gap(scores, batch)
  before_update()
  state, norms = trainer.update(state, gradient)
  return state, numbers | {
    "rollout_train/kl": gap["kl"],
    "rollout_train/max_abs_logprob_gap": gap["max_abs_logprob_gap"],
    **summary.of_gradient("train/", shown),
    "train/grad_norm": float(norms["grad_norm"]),
    "train/seconds": time.monotonic() - begin,
  }


def publish(
  weights: WeightsConfig,
  engine: engine_lib.Engine,
  state: TrainState,
  base: parameters.Params | None,
  *,
  policy_version: int,
) -> None:
  """Sends the engine the weights for the next step's sampling."""
  params = policy_lib.running_weights(weights, state.params, base)
  engine.update_weights(params, policy_version=policy_version)
