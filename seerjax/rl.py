"""Reinforcement learning, the loop: sample, judge, learn, publish.

    problems -> task's prompts -> engine samples -> verdicts -> advantages
       ^                                                           |
       +---- engine.set_params <- weights <- optimiser <- loss <---+

Everything a step does is a function of (config, step): which problems, which seeds, which tokens,
which gradient. That is why a killed run resumes to the same bits, and why the log-probabilities
that sampled are, to the bit, those that learn.

`train` is the loop, and `train_step` one round of it: `sample` asks the engine for tokens and the
task for a verdict on each answer, `judge` makes advantages of their rewards, `learn` takes the loss
and its gradient, and what was learnt is published to the engine. What every run has besides (its
directory, checkpoints, Ctrl-C) is `run.session`.
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
from seerjax.rollout import divided, journal as journal_lib
from seerjax.run import (
  drafter as drafter_lib,
  evaluation,
  policy as policy_lib,
  programs as programs_lib,
  progress as progress_lib,
  rounds,
  sampling,
  session as session_lib,
  setup as setup_lib,
  slices,
  summary,
  workers as workers_lib,
)
from seerjax.run.config import RunConfig
from seerjax.run.policy import Policy
from seerjax.run.programs import Programs
from seerjax.trainer import advantages as advantages_lib, losses, step as step_lib
from seerjax.types import Completion, Problem, Request, Rollout, RolloutGroup, Task, TrainState

# Rewards f32[b, g] of a step's groups to advantages [b, g].
Advantages = Callable[[np.ndarray], Any]


@dataclasses.dataclass(frozen=True)
class Result:
  """What a run leaves behind.

  Attributes:
    state: weights and optimiser at the end.
    summary: the numbers of summary.json.
    before: the first held-out problem, answered by the first weights.
    after: the same, answered by the last weights.
    policy: the first weights, and the tokenizer.
    weights: which of them learnt.
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
  """Runs the loop.

  Args:
    config: the run.
    model: the model to train, whose weights are the start of a new run: what
      `seerjax.load_model` returns, or its argument (a name, a directory, a GGUF file or a Hub id).
      A name is recorded as `config.model`. A loaded model's numerics are the run's where
      `config.numerics` is left at its default; of weights that were rounded to bfloat16 the masters
      begin rounded. A `run.policy.Policy` holds weights that were made elsewhere.
    task: where problems come from.
    directory: takes config.json, status.json, metrics.jsonl, journal.jsonl, traces.jsonl,
      checkpoints/ and summary.json.
    resume: carry on from the latest checkpoint; finished rollouts are read from the journal.
    accept_new_numerics: resume under another fingerprint, as a new epoch.
    accept_new_data: resume with other problems than the run began with (`tasks.digests`), as a new
      epoch.
    log: takes lines for people: what is found, and at least every ten seconds what it is at.
    programs: of `make_programs` for an equal config and model, and the same `loss` and `optimizer`;
      its own if None.
    evaluation_sets: further tasks by name that evaluations ask, besides those of
      `config.evaluation.sets`. Like the four below no setting: a resume has to be given the same
      ones again.
    loss: of one micro-batch, in the place of `losses.policy_loss`.
    advantages: of rewards f32[b, g] of groups, in the place of those of `config.loss.algorithm`.
    optimizer: an optax chain in the place of `config.optimizer`.
    on_step: called after each whole step with its number from 1, its state and its numbers.

  Raises:
    stops.Interrupted: on Ctrl-C or SIGTERM, when the last whole step has been saved.
    ValueError: for settings, a directory, programs or a task that cannot work, before anything is
      sampled or the journal begun. Later only for what one problem shows: a prompt of
      `task` that leaves no room for its answer, or a text that a task cannot judge (the run can be
      resumed).
  """
  further = evaluation.load_sets(config.evaluation, evaluation_sets)
  sets = {name: slices.shared_task(one) for name, one in further.items()}
  with session_lib.Session(
    pathlib.Path(directory),
    num_steps=config.num_steps,
    resume=resume,
    accept_new_numerics=accept_new_numerics,
    accept_new_data=accept_new_data,
    log=log,
  ) as run:
    with run.progress.phase("reading the model"):
      config, policy = setup_lib.opened(config, model)
    ready = setup_lib.set_up(
      run, config, policy, task, programs, loss, optimizer, sets=sets, resume=resume
    )
    config, engine, base, state = ready.config, ready.engine, ready.base, ready.state
    usual = functools.partial(
      sample, config, engine, task, ready.journal, progress=run.progress, drafts=ready.drafts,
      workers=ready.workers,
    )  # fmt: skip
    sample_step, publish = setup_lib.ends(ready, run, task, usual)
    run.begin(state, lambda: {"before": ready.before}, ready.drafts.parts())
    before = ready.before
    if not run.step:
      before = setup_lib.accuracy_after(0, run, ready.asked)
    elif _evaluates_after(run.step, config):  # A stop may have come before it was finished.
      setup_lib.accuracy_after(run.step, run, ready.asked)
    else:
      run.keep_best(config.evaluation.best)  # Else the next save removes it.
    while run.step < config.num_steps:
      joules = run.clock.joules
      with run.next_step() as put_off_stops:
        state, numbers = train_step(
          config, engine, ready.trainer, state, run.step, base,
          sample=sample_step, publish=publish, advantages=advantages, progress=run.progress,
          before_update=put_off_stops, drafts=ready.drafts,
        )  # fmt: skip
        if joules is not None:
          numbers["step/joules"] = (run.clock.joules or 0.0) - joules
        run.finish_step(state, lambda: {"before": before}, numbers, ready.drafts.parts())
      # Its own tree and dict, of the same arrays, so that it can change neither of the run's.
      on_step(run.step, jax.tree.map(lambda leaf: leaf, state), dict(numbers))
      run.save_if_due(every=config.checkpoint_every)
      if _evaluates_after(run.step, config):
        setup_lib.accuracy_after(run.step, run, ready.asked)
    run.progress.end_steps()
    after = setup_lib.accuracy_after(run.step, run, ready.asked)
    with run.progress.phase("answering one problem again"):
      now = ready.asked.answer()
      first = policy_lib.first_params(config.weights, ready.policy)
      first = policy_lib.running_weights(config.weights, first, base)
      engine.set_params(first, policy_version=0)
      then = ready.asked.answer()
    rows = agreement.from_first(lambda: metrics.read(run.directory / metrics.FILE_NAME))
    numbers = summary.of_run(before, after, [row for row in rows if "contract/kl" in row])
    if sets:
      numbers["sets"] = setup_lib.sets_gained(run, ready.asked)
    numbers |= run.clock.read() | dict(optimizer_steps=int(state.step), numerics=ready.fingerprint)
    numbers |= dict(data=run.data_epochs)
    metrics.write_summary(run.directory / "summary.json", numbers)
    return Result(state, numbers, then, now, ready.policy, config.weights)


def _evaluates_after(step: int, config: RunConfig) -> bool:
  """Returns whether a step is followed by an evaluation that is neither the first nor the last."""
  every = config.evaluation.every
  return bool(every) and step % every == 0 and 0 < step < config.num_steps


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
  """Takes one step: sample, judge, learn, publish; returns the new state and the step's numbers.

  `sample` returns the step's groups and their numbers, `publish` hands the new weights over. A
  draft model that learns does so last, from the same groups.
  """
  begin = time.monotonic()
  groups, sampled = sample(step)
  sampled_at = time.monotonic()
  if config.engine.gives_back_pages and not engine.num_unfinished:
    engine.give_back_pages()
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
  """Samples a step's groups, with a verdict on each answer as it is whole.

  Args:
    config: the run.
    engine: with the weights that sample.
    task: poses, and gives verdicts.
    journal: of the run; what it holds is not sampled again.
    step: from 0.
    progress: is told.
    drafts: of the engine's drafter.
    workers: that sample in the engine's place, if any.

  Returns:
    The groups, and the numbers of how they were sampled.
  """
  assert engine.tokenizer is not None
  watched = progress or progress_lib.silent()
  counted = functools.partial(sampling.counted_by, engine)
  if workers is not None:
    counted = workers.counted
  measure = sampling.Measure(engine, drafts, counted)

  def known(group: int, member: int, problem: Problem) -> Rollout | None:
    entry = journal.lookup(step, group, member, problem_id=problem.problem_id)
    return None if entry is None else entry.rollout

  def keep(group: int, member: int, problem: Problem, rollout: Rollout) -> None:
    journal.append(
      step, group, member, rollout, problem_id=problem.problem_id, prompt_text=problem.prompt
    )

  def generate(requests: Sequence[Request]) -> Iterator[Completion]:
    if workers is not None:
      rollout = workers.rollout(journal)
    else:
      rollout = divided.resumed(engine, config.scheduler, journal, requests)
    measure.traces.append(rollout.trace)
    num_tokens = lambda: counted().sampled_tokens
    details = str if workers is None else workers.text
    yield from sampling.watched(watched, "sampling", num_tokens, rollout.run, requests, details)

  groups = rounds.step_groups(
    config.rollout,
    max_rounds=config.trainer.max_rounds,
    task=task,
    tokenizer=engine.tokenizer,
    seed=config.seed,
    step=step,
    generate=generate,
    known=known,
    on_rollout=keep,
  )
  num_old = sum(len(one.tokens) for one in _completions(groups) if one.policy_version < step)
  return groups, measure.finish(journal.path.parent, step, num_old=num_old)


def judge(
  config: RunConfig, groups: Sequence[RolloutGroup], advantages: Advantages | None = None
) -> np.ndarray:
  """Returns advantages [b, g] of a step's answers: their verdicts' rewards, compared within groups.

  Args:
    config: the run: its overlong shaping, and the algorithm of its loss.
    groups: with their verdicts.
    advantages: of rewards, in the place of the algorithm's.
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
  """Takes the optimiser steps of one batch of groups; returns the new state and its numbers.

  Where an answer is of older weights than those of `state`, ratios are to what sampled it.

  Args:
    config: the run.
    trainer: its programs, the loss among them.
    state: with the weights that sampled.
    groups: with their verdicts.
    values: f32[b, g], their advantages, of `judge`.
    base: of `programs.base_weights`.
    before_update: called before the first update, from which on `state` may be used up.
  """
  version = int(state.step) // config.trainer.num_mini_batches
  is_old = any(one.policy_version < version for one in _completions(groups))
  parts = np.array_split(np.arange(len(groups)), config.trainer.num_mini_batches)
  batches = [
    programs_lib.pack(config, [groups[i] for i in part.tolist()], values[part]) for part in parts
  ]
  sampling_params = policy_lib.running_weights(config.weights, state.params, base)
  references: list[Any] = [None] * len(batches)  # f32[m, n] each, or None.
  if config.loss.kl_coefficient:
    assert base is not None
    reference = policy_lib.reference_weights(config.weights, state.params, base)
    references = [trainer.scores(reference, batch).logprob for batch in batches]

  # With the weights that sampled, over the whole batch, before any update.
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
      numbers |= {f"train/{name}": float(value) for name, value in means.items()}
  gaps = [step_lib.rollout_gap(s, b) for s, b in zip(first_scores, batches, strict=True)]
  numbers |= {
    "contract/kl": max((gap["kl"] for gap in gaps), key=abs),
    "contract/raw_kl": max((gap["raw_kl"] for gap in gaps), key=abs),
    "contract/max_abs_logprob_gap": max(gap["max_abs_logprob_gap"] for gap in gaps),
    "contract/max_abs_raw_logprob_gap": max(gap["max_abs_raw_logprob_gap"] for gap in gaps),
  }
  for index, batch in enumerate(batches):
    gradient = first_gradient
    if index:
      params = policy_lib.running_weights(config.weights, state.params, base)
      counts = losses.denominators(batch)
      gradient, means, _ = trainer.gradient(params, batch, counts, olds[index], references[index])
      numbers |= {f"train/later_{name}": float(value) for name, value in means.items()}
    else:
      before_update()
    state, norms = trainer.update(state, gradient)
    numbers |= {f"train/{name}": float(value) for name, value in norms.items()}
  return state, numbers


def _completions(groups: Sequence[RolloutGroup]) -> list[Completion]:
  return [rollout.completion for group in groups for rollout in group.rollouts]
