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

`discover` is the loop: `sample` chooses starts and samples a group from each, `judge` makes the
attempts and scores them, `learn` takes one optimiser step, and `publish` gives the engine what was
learnt.

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

from seerjax import fields, metrics
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
from seerjax.discovery.config import DiscoverConfig
from seerjax.discovery.environment import Artefact, Environment
from seerjax.engine import engine as engine_lib
from seerjax.models import parameters
from seerjax.rollout import journal as journal_lib
from seerjax.run import (
  policy as policy_lib,
  programs as programs_lib,
  progress as progress_lib,
  session as session_lib,
)
from seerjax.run.config import RunConfig
from seerjax.run.policy import Policy
from seerjax.run.programs import Programs
from seerjax.trainer import entropic, losses, step as step_lib
from seerjax.types import TrainState


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
    accept_new_data: resume with a problem file that was changed, as a new epoch.
    log: takes lines for people: what is found, and at least every ten seconds what it is at.
    programs: of `run.programs.make_programs`, to share between runs of one shape; its own if None.

  Raises:
    stops.Interrupted: on Ctrl-C or SIGTERM; what was found is saved.
    ValueError: for settings, a directory or a problem that cannot work, before anything is sampled.
  """
  if factory is None:
    factory = functools.partial(loading.load, config.problem)
    if config.num_workers:
      loading.check_name(config.problem)
  with session_lib.Session(
    pathlib.Path(directory),
    num_steps=config.num_steps,
    resume=resume,
    accept_new_numerics=accept_new_numerics,
    accept_new_data=accept_new_data,
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
  ready = setup_lib.set_up(run, config, environment, factory, policy, programs, resume=resume)
  config, engine, writer, trainer = ready.config, ready.engine, ready.writer, ready.trainer
  state, archive, totals = ready.state, ready.archive, ready.totals

  def saved(archive: archive_lib.Archive, totals: dict[str, float]) -> session_lib.HostState:
    return lambda: dict(archive=archive_lib.to_json(archive), totals=totals, config=ready.settings)

  first = ready.first_params
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
        sampled = judge(writer, archive, sampled, run.journal, progress=run.progress)
        if not remarked and (remarked := numbers_lib.remark_on(writer, sampled)):  # Once is enough.
          run.progress.say(f"step {run.step + 1}: {remarked}")
        found = starts_lib.archived(environment, archive, sampled, run.step)
        if archive_lib.best(found).value > totals["best"]:
          record_lib.write_best(run.directory, environment, found, archive_lib.best(found))
        found = starts_lib.replanted(config, environment, found, run.step)
        new_state, numbers = state, {}
        if config.train:
          if config.engine.gives_back_pages:
            engine.give_back_pages()
          with run.progress.phase("learning"):
            new_state, numbers = learn(
              config, ready.run_config, trainer, state, sampled, ready.base,
              before_update=put_off_stops,
            )  # fmt: skip
            publish(ready.run_config, engine, new_state, ready.base, policy_version=run.step + 1)
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
  numbers |= dict(optimizer_steps=int(state.step), numerics=ready.fingerprint)
  numbers |= dict(data=run.data_epochs)
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
  """Chooses a step's starts and samples a group from each; attempts are made by `judge`."""
  starts = puct.select(archive, config.groups_per_step, config.search, config.seed)
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
  """Returns what was sampled with the attempts that come of it, each with its score."""
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
  counts = [len(sequences) for group in sampled.sequences for sequences in group]
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


def publish(
  run: RunConfig,
  engine: engine_lib.Engine,
  state: TrainState,
  base: parameters.Params | None,
  *,
  policy_version: int,
) -> None:
  """Gives the engine the weights that sample the next step."""
  weights = policy_lib.running_weights(run.weights, state.params, base)
  engine.set_params(weights, policy_version=policy_version)
