"""The training loop for reinforcement learning: sample, judge, learn, publish.

    problems -> task's prompts -> engine samples -> verdicts -> advantages
       ^                                                           |
       +---- engine.update_weights <- weights <- optimiser <- loss <---+

Problems, seeds, tokens and gradients of a step are a pure function of (config, step). A killed run
therefore resumes to the same bits, and the sampler's log-probabilities equal the trainer's exactly.

`train` runs the loop and `train_step` one step of it: `sample` generates completions and gets the
task's verdicts, `judge` turns rewards into advantages, `learn` computes the loss, its gradient and
the update, and the new weights are published to the engine. `run.lifecycle` handles what all runs
share: the directory, checkpoints and Ctrl-C.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import functools
import os
import pathlib
import time
from typing import Any

import jax
import numpy as np
import optax

from seerjax import agreement, fields, metrics
from seerjax.engine import engine as engine_lib
from seerjax.models import parameters
from seerjax.models.loading import Model
from seerjax.rollout import journal as journal_lib
from seerjax.run import (
  drafter as drafter_lib,
  evaluation,
  held_out,
  lifecycle,
  policy as policy_lib,
  programs as programs_lib,
  progress as progress_lib,
  rounds,
  sampling,
  setup as setup_lib,
  slices,
  summary,
  workers as workers_lib,
)
from seerjax.run.config import RunConfig
from seerjax.run.policy import Policy
from seerjax.run.programs import Programs
from seerjax.trainer import advantages as advantages_lib, losses, step as step_lib
from seerjax.types import Completion, Request, RolloutGroup, Task, TrainState

# Maps the rewards of a step's groups, f32[b, g], to advantages of the same shape.
Advantages = Callable[[np.ndarray], Any]


@dataclasses.dataclass(frozen=True)
class Result:
  """Result of a training run.

  Attributes:
    state: final weights and optimiser state.
    summary: contents of summary.json.
    before: completion of the first held-out problem under the initial weights.
    after: completion of the same problem under the final weights.
    policy: initial weights and the tokenizer.
    weights: which weights were trained.
  """

  state: TrainState
  summary: dict[str, Any]
  before: evaluation.Answer
  after: evaluation.Answer
  policy: Policy
  weights: policy_lib.WeightsConfig

  def trained_model(self) -> Model:
    """Returns the trained model, adapters merged, for `Engine` or `models.huggingface.save`."""
    learnt = policy_lib.exported_weights(self.weights, self.policy, self.state.params)
    numerics = self.weights.numerics
    params = parameters.compute_params(learnt, numerics)
    return Model(self.policy.model, params, numerics, self.policy.tokenizer)


@fields.checked
def train(
  config: RunConfig,
  model: str | os.PathLike[str] | Model | Policy,
  task: Task,
  directory: str | os.PathLike[str],
  *,
  resume: bool = False,
  accept_new_numerics: bool = False,
  accept_new_data: bool = False,
  log: Callable[[str], None] = print,
  programs: Programs | None = None,
  evaluation_sets: Mapping[str, Task] | None = None,
  loss: step_lib.PolicyLoss = losses.policy_loss,
  advantages: Advantages | None = None,
  optimizer: optax.GradientTransformation | None = None,
  on_step: Callable[[int, TrainState, Mapping[str, float]], object] = lambda *_: None,
) -> Result:
  """Trains a model on a task by reinforcement learning.

  Args:
    config: configuration of the run.
    model: the model to train; its weights initialise a new run. A `Model` from
      `seerjax.load_model`, or that function's argument (a name, a directory, a GGUF file or a Hub
      id); a name is recorded as `config.model`. If `config.numerics` is left at its default, a
      loaded model's numerics are used. If its weights were already rounded to bfloat16, the master
      weights start from the rounded values. A `run.policy.Policy` passes weights from elsewhere.
    task: source of problems and verdicts.
    directory: receives config.json, status.json, metrics.jsonl, journal.jsonl, traces.jsonl,
      checkpoints/ and summary.json.
    resume: resume from the latest checkpoint; finished rollouts are read from the journal.
    accept_new_numerics: resume under a different numerics fingerprint, as a new epoch.
    accept_new_data: resume with problems that differ from the original ones (`tasks.digests`), as a
      new epoch.
    log: receives progress lines, at least one every ten seconds.
    programs: compiled programs from `make_programs` for an equal config and model and the same
      `loss` and `optimizer`; compiled here if None.
    evaluation_sets: further evaluation tasks by name, in addition to `config.evaluation.sets`. Like
      the next four arguments it is not stored in the config, so a resume must pass it again.
    loss: loss of one micro-batch; replaces `losses.policy_loss`.
    advantages: maps group rewards f32[b, g] to advantages; overrides `config.loss.algorithm`.
    optimizer: optax chain; replaces `config.optimizer`.
    on_step: called after each completed step with the step number (from 1), state and metrics.

  Returns:
    See `Result`.

  Raises:
    stops.Interrupted: on Ctrl-C or SIGTERM, after the last completed step is saved.
    ValueError: for an invalid setting, directory, task or `programs`, before sampling starts and
      before the journal is created. Later only for a fault of a single problem: a prompt that
      leaves no room for a completion, or a text that the task cannot judge (the run can be
      resumed).
  """
  further = evaluation.load_sets(config.evaluation, evaluation_sets)
  sets = {name: slices.shared_task(one) for name, one in further.items()}
  with lifecycle.Life(
    pathlib.Path(directory),
    num_steps=config.num_steps,
    resume=resume,
    accept_new_numerics=accept_new_numerics,
    accept_new_data=accept_new_data,
    log=log,
  ) as run:
    with run.progress.phase("reading the model"):
      config, policy = setup_lib.opened(config, model)
    ready = setup_lib.set_up(run, config, policy, task, programs, loss, optimizer, sets)
    config, engine, base, state = ready.config, ready.engine, ready.base, ready.state
    usual = functools.partial(
      sample, config, engine, task, ready.journal, progress=run.progress, drafts=ready.drafts,
      workers=ready.workers,
    )  # fmt: skip
    sample_step, publish = setup_lib.ends(ready, run, task, usual)
    run.begin(state, lambda: {"before": ready.before}, ready.drafts.parts())
    before = held_out.accuracy_before(run, ready.asked, ready.before)
    while run.step < config.num_steps:
      joules = run.clock.joules
      with run.next_step() as put_off_stops:
        state, numbers = train_step(
          config, engine, run.programs.trainer, state, run.step, base,
          sample=sample_step, publish=publish, advantages=advantages, progress=run.progress,
          before_update=put_off_stops, drafts=ready.drafts,
        )  # fmt: skip
        if joules is not None:
          numbers["step/joules"] = (run.clock.joules or 0.0) - joules
        run.finish_step(state, lambda: {"before": before}, numbers, ready.drafts.parts())
      # A copied tree and dict, so that `on_step` cannot change the run's own.
      on_step(run.step, jax.tree.map(lambda leaf: leaf, state), dict(numbers))
      run.save_if_due(every=config.checkpoint_every)
      held_out.evaluate_if_due(run, ready.asked)
    run.progress.end_steps()
    after = held_out.accuracy_after(run.step, run, ready.asked)
    with run.progress.phase("answering one problem again"):
      now = ready.asked.answer()
      first = policy_lib.first_params(config.weights, run.policy)
      first = policy_lib.running_weights(config.weights, first, base)
      engine.update_weights(first, policy_version=0)
      then = ready.asked.answer()
    rows = agreement.from_first(lambda: metrics.read(run.directory / metrics.FILE_NAME))
    numbers = summary.of_run(before, after, [row for row in rows if "rollout_train/kl" in row])
    if sets:
      numbers["sets"] = held_out.sets_gained(run, ready.asked)
    numbers = run.finish(numbers | run.clock.read(), state)
    return Result(state, numbers, then, now, run.policy, config.weights)


def train_step(
  config: RunConfig,
  engine: engine_lib.Engine,
  trainer: step_lib.Trainer,
  state: TrainState,
  step: int,
  base: parameters.Params | None,
  *,
  sample: setup_lib.Sample,
  publish: setup_lib.Publish,
  advantages: Advantages | None,
  progress: progress_lib.Progress,
  before_update: Callable[[], object],
  drafts: drafter_lib.RunDrafts | None = None,
) -> tuple[TrainState, dict[str, float]]:
  """Runs one step (sample, judge, learn, publish); returns the new state and the step's metrics.

  `sample` returns the step's groups and sampling metrics; `publish` sends the new weights to the
  engine. A trainable draft model is updated last, from the same groups.
  """
  begin = time.monotonic()
  groups, sampled = sample(step)
  sampled_at = time.monotonic()
  if config.engine.release_kv_while_training and not engine.num_unfinished:
    engine.release_kv_cache()
  with progress.phase("learning"):
    values = judge(config, groups, advantages)
    state, learned = learn(
      config, trainer, state, groups, values, base, before_update=before_update
    )
    weights = policy_lib.running_weights(config.weights, state.params, base)
    learned_at = time.monotonic()
    publish(weights, step + 1)
  of_draft: dict[str, float] = {}
  if drafts is not None:
    with progress.phase("teaching the draft model"):
      of_draft = drafts.learn(groups, step)
  return state, summary.of_rollouts(groups) | sampled | learned | of_draft | {
    "train/seconds": learned_at - sampled_at,
    "step/seconds": time.monotonic() - begin,
  }


def sample(
  config: RunConfig,
  engine: engine_lib.Engine,
  task: Task,
  journal: journal_lib.Journal,
  step: int,
  *,
  progress: progress_lib.Progress | None = None,
  drafts: drafter_lib.RunDrafts | None = None,
  workers: workers_lib.RunWorkers | None = None,
) -> tuple[list[RolloutGroup], dict[str, float]]:
  """Samples a step's groups; each completion gets its verdict as soon as it is finished.

  Args:
    config: configuration of the run.
    engine: holds the weights to sample from.
    task: supplies problems and verdicts.
    journal: the run's journal; rollouts that it contains are not sampled again.
    step: step number, from 0.
    progress: receives progress updates.
    drafts: state of the engine's drafter.
    workers: remote workers that sample instead of `engine`, if any.

  Returns:
    The groups and the sampling metrics.
  """
  assert engine.tokenizer is not None
  watched = progress or progress_lib.silent()
  if workers is None:
    source = sampling.own_engine(engine, config.scheduler, journal)
  else:
    source = workers.source(journal)
  measure = sampling.Measure(source.counted, drafts)
  known, keep = sampling.journalled(journal, step)

  def generate(requests: Sequence[Request]) -> Iterator[Completion]:
    rollout = source.rollout(requests)
    measure.traces.append(rollout.trace)
    num_tokens = lambda: source.counted().sampled_tokens
    yield from sampling.watched(watched, "sampling", num_tokens, rollout.run, requests, source.text)

  groups = rounds.step_groups(
    config.rollout,
    dynamic_sampling_rounds=config.trainer.dynamic_sampling_rounds,
    task=task,
    tokenizer=engine.tokenizer,
    seed=config.seed,
    step=step,
    generate=generate,
    known=known,
    on_rollout=keep,
  )
  num_old = sampling.num_old_tokens(groups, step)
  return groups, measure.finish(journal.path.parent, step, num_old=num_old)


def judge(
  config: RunConfig, groups: Sequence[RolloutGroup], advantages: Advantages | None = None
) -> np.ndarray:
  """Returns advantages f32[b, g] of a step's groups.

  Args:
    config: supplies the overlong penalty and the loss algorithm.
    groups: groups with verdicts.
    advantages: maps rewards to advantages; overrides the algorithm's.
  """
  rewards = np.stack([group.rewards for group in groups])
  if config.trainer.overlong_buffer:
    lengths = np.asarray([[len(r.completion.tokens) for r in g.rollouts] for g in groups])
    rewards = rewards + advantages_lib.overlong_penalty(
      lengths, max_tokens=config.rollout.max_tokens, buffer=config.trainer.overlong_buffer
    )
  if advantages is None:
    return advantages_lib.for_algorithm(config.loss.algorithm, rewards)
  return np.asarray(advantages(rewards), np.float32)


def learn(
  config: RunConfig,
  trainer: step_lib.Trainer,
  state: TrainState,
  groups: Sequence[RolloutGroup],
  values: np.ndarray,
  base: parameters.Params | None = None,
  *,
  before_update: Callable[[], object] = lambda: None,
) -> tuple[TrainState, dict[str, float]]:
  """Runs the optimiser steps of one batch of groups; returns the new state and metrics.

  If any completion was sampled from weights older than `state`, importance ratios are taken
  relative to the sampler's log-probabilities.

  Args:
    config: configuration of the run.
    trainer: compiled programs, including the loss.
    state: holds the weights that sampled.
    groups: groups with verdicts.
    values: f32[b, g], advantages from `judge`.
    base: frozen base weights from `programs.base_weights`.
    before_update: called before the first update; `state` may be donated from then on.
  """
  version = int(state.step) // config.trainer.num_mini_batches
  is_old = sampling.num_old_tokens(groups, version) > 0
  batches = programs_lib.mini_batches(
    config.engine, config.trainer, trainer.decoder, groups, values
  )
  sampling_params = policy_lib.running_weights(config.weights, state.params, base)
  references: list[Any] = [None] * len(batches)  # f32[m, n] each, or None.
  if config.loss.kl_coefficient:
    assert base is not None
    reference = policy_lib.reference_weights(config.weights, state.params, base)
    references = [trainer.scores(reference, batch).logprob for batch in batches]

  # Old log-probabilities under the sampling weights, for the whole batch, before any update.
  olds: list[Any] = [batch.behaviour_logprobs if is_old else None for batch in batches]
  first_scores = []
  first_gradient, numbers = None, {}
  for index, batch in enumerate(batches):
    counts = losses.denominators(batch)
    gradient, means, scores = trainer.gradient(
      sampling_params, batch, counts, olds[index], references[index]
    )
    first_scores.append(scores)
    olds[index] = batch.behaviour_logprobs if is_old else scores.logprob
    if index == 0:
      first_gradient = gradient
      numbers |= summary.of_gradient("train/", means)
  numbers |= summary.of_gaps(first_scores, batches)
  for index, batch in enumerate(batches):
    gradient = first_gradient
    if index:
      params = policy_lib.running_weights(config.weights, state.params, base)
      counts = losses.denominators(batch)
      gradient, means, _ = trainer.gradient(params, batch, counts, olds[index], references[index])
      numbers |= summary.of_gradient("train/later_", means)
    else:
      before_update()
    state, norms = trainer.update(state, gradient)
    numbers |= {f"train/{name}": float(value) for name, value in norms.items()}
  return state, numbers
