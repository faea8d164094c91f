"""THE CIRCLE: sample, judge, learn, publish, again.

    problems -> tasks prompt -> engine samples -> task judges -> groups
       ^                                                           |
       +---- engine.set_params <- params <- optimiser <- packed batch

Everything a step does is a function of (config, step): which problems, which seeds, which tokens,
which gradient. That is why a killed run resumes to the same bits, and why the log-probabilities
that sampled are, to the bit, those that learn.

Read on from `train`: `circle` is one round of it, `sample` and `learn` are its halves;
`learn_again` takes rounds again from a journal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import functools
import math
import pathlib
import time
from typing import Any, NamedTuple

import numpy as np

from seerjax import metrics, numerics as numerics_lib
from seerjax.engine import engine as engine_lib
from seerjax.engine.kv import pool as kv_pool_lib, stores
from seerjax.models import parameters, tokenizer as tokenizer_lib
from seerjax.models.loading import Model
from seerjax.rollout import (
  divided,
  groups as groups_lib,
  journal as journal_lib,
  trace as trace_lib,
)
from seerjax.run import (
  config as config_lib,
  directory as directory_lib,
  drafter as drafter_lib,
  evaluation,
  memory as memory_lib,
  off_policy,
  policy as policy_lib,
  programs as programs_lib,
  progress as progress_lib,
  session as session_lib,
  summary,
)
from seerjax.run.config import RunConfig
from seerjax.run.policy import Policy
from seerjax.run.programs import Programs
from seerjax.speculation import statistics
from seerjax.trainer import advantages, losses, step as step_lib
from seerjax.types import Completion, Problem, Request, Rollout, RolloutGroup, Task, TrainState


@dataclasses.dataclass(frozen=True)
class Result:
  """What a run leaves behind.

  Attributes:
    state: weights and optimiser at the end.
    summary: the numbers of summary.json.
    before: the first held-out problem, answered by the first weights.
    after: the same, answered by the last weights.
  """

  state: TrainState
  summary: dict[str, Any]
  before: evaluation.Answer
  after: evaluation.Answer


class Sampled(NamedTuple):
  """What a step learns from.

  Attributes:
    groups: judged.
    num_old: tokens of theirs that older weights sampled.
    numbers: how they were sampled.
  """

  groups: list[RolloutGroup]
  num_old: int
  numbers: dict[str, float]


# Settings that the journal does not hold a resumed run to: the fingerprint speaks for the first,
# and the others move no bit.
FREE_SETTINGS = (
  "numerics", "num_steps", "num_instances", "checkpoint_every", "scheduler", "kv_pool",
  "speculation",
)  # fmt: skip
# What the progress bar shows.
CONSOLE_DIGITS = {
  "rollout/reward_mean": 4,
  "rollout/length_mean": 4,
  "rollout/tokens_per_second": 4,
  "contract/kl": 4,
}


def train(
  config: RunConfig,
  policy: Policy,
  task: Task,
  directory: pathlib.Path,
  *,
  resume: bool = False,
  accept_new_numerics: bool = False,
  log: Callable[[str], None] = print,
  programs: Programs | None = None,
) -> Result:
  """Runs the circle.

  Args:
    config: the run.
    policy: what learns; its params are the start of a new run.
    task: where problems come from.
    directory: takes config.json, status.json, metrics.jsonl, journal.jsonl, traces.jsonl,
      checkpoints/ and summary.json.
    resume: carry on from the latest checkpoint; finished rollouts are read from the journal.
    accept_new_numerics: resume under another fingerprint, as a new epoch.
    log: takes lines for people: what is found, and at least every ten seconds what it is at.
    programs: of `make_programs` for an equal config and model; its own if None.

  Returns:
    The final state and summary.

  Raises:
    stops.Interrupted: on Ctrl-C or SIGTERM, when the last whole step has been saved.
    ValueError: for settings, a directory, programs or a task that cannot work, before anything is
      sampled or the journal begun. Later only for what one problem shows: a prompt that leaves no
      room for its answer, or a text that the task cannot judge (the run can be resumed).
  """
  if not isinstance(task, Task):
    raise ValueError(
      f"train.task: got {type(task).__name__}, expected a task with name, num_problems, problem and"
      " verdict; pass tasks.load(...), or see seerjax.types.Task."
    )
  with session_lib.Session(
    pathlib.Path(directory),
    num_steps=config.num_steps,
    resume=resume,
    accept_new_numerics=accept_new_numerics,
    log=log,
  ) as run:
    return _train(config, policy, task, run, resume, programs)


def _train(
  config: RunConfig,
  policy: Policy,
  task: Task,
  run: session_lib.Session,
  resume: bool,
  programs: Programs | None,
) -> Result:
  """See `train`."""
  given, progress = config, run.progress
  if resume:
    config = directory_lib.as_begun(config, run.directory)
  config = config_lib.for_model(config, policy.model)
  policy = policy.with_chat(config.chat)
  if resume and config.stale != off_policy.StaleConfig():
    raise ValueError(
      f"RunConfig.stale: got {config.stale} and a run to resume, expected a new one (what is under"
      " way between two steps is kept in memory alone); choose another directory, without resume."
    )
  for split in ("train", "heldout"):
    groups_lib.num_problems(task, split)  # Refuses none.
  fingerprint = numerics_lib.fingerprint(config.numerics, config.trainer.remat)
  if programs is None:
    programs = programs_lib.make_programs(config, policy.model)
  elif programs.made_for != programs_lib.key_of(config, policy.model):
    raise ValueError(
      "train.programs: got programs of another config or model, expected make_programs of these;"
      " share them only between equals."
    )
  trainer = programs.trainer
  drafts = drafter_lib.RunDrafts(config.speculation)
  memory = memory_lib.memory_plan(config, policy.model)
  state, before = programs_lib.first_state(config, policy), {}
  base = programs_lib.base_weights(config, policy)
  run.hold_to(
    metrics.encode(dataclasses.asdict(config)),
    free=FREE_SETTINGS,
    defaults=metrics.encode(dataclasses.asdict(RunConfig())),
  )
  if restored := run.restore(lambda: state, fingerprint=fingerprint):
    state = restored.state
    before = restored.host_state["before"] or directory_lib.accuracy_at(run.directory, 0)
  # Before the journal, which holds a run to its settings from its first line on.
  engine = engine_lib.Engine(
    Model(
      policy.model,
      policy_lib.published_weights(
      config.weights, state.params, base, is_copied=config.stale.steps_ahead > 0
    ),
      config.numerics,
      policy.require_tokenizer(),
    ),
    config=memory.engine,
    key=numerics_lib.key(config.seed),
    policy_version=run.step,
    runner=programs.runner,
    kv_pool=kv_pool_lib.KVPool(config.kv_pool, stores.open_store(config.kv_pool)),
  )
  run.open(sizes=config_lib.chosen_sizes(config), console_digits=CONSOLE_DIGITS)
  if line := config_lib.chosen(given, config):
    progress.say(line)
  progress.say(memory.describe())
  progress.say(engine.plan())
  with progress.phase("measuring the engine's steps"):
    drafts.begin(engine)
  journal = run.journal
  assert journal is not None
  carried = off_policy.Carried()
  ahead = off_policy.Ahead(
    lambda step: sample(
      config, engine, task, journal, step, carried, progress=progress, drafts=drafts
    )
  )
  run.enter(contextlib.closing(ahead))

  def accuracy_after(step: int) -> dict[str, float]:
    found = directory_lib.accuracy_at(run.directory, step)  # Of a run that was stopped since.
    if not found:
      when = {config.num_steps: "after", 0: "before"}.get(step, f"after step {step}")
      progress.say(f"held-out accuracy on {config.evaluation.num_problems} problems, {when}:")
      found = accuracy_of(config, engine, task, progress)
      run.writer.write(step, {f"heldout/{name}": value for name, value in found.items()})
      progress.say(f"  {evaluation.describe(found)}")
    return found

  def host_state() -> dict[str, Any]:
    return {"before": before}

  every = config.evaluation.every
  run.begin(state, host_state)
  before = before or accuracy_after(0)
  while run.step < config.num_steps:
    joules = run.clock.joules
    with run.next_step() as put_off_stops:
      state, numbers = circle(
        config, engine, trainer, ahead, state, run.step, base,
        progress=progress, before_update=put_off_stops,
      )  # fmt: skip
      if joules is not None:
        numbers["circle/joules"] = (run.clock.joules or 0.0) - joules
      run.finish_step(state, host_state, numbers)
    run.save_if_due(every=config.checkpoint_every)
    if every and run.step % every == 0 and run.step < config.num_steps:
      accuracy_after(run.step)
  progress.end_steps()
  after = accuracy_after(run.step)
  with progress.phase("answering one problem again"):
    now = answer_of(config, engine, task)
    first = policy_lib.first_params(config.weights, policy)
    first = policy_lib.running_weights(config.weights, first, base)
    engine.set_params(first, policy_version=0)
    then = answer_of(config, engine, task)
  written = [row for row in metrics.read(run.directory / metrics.FILE_NAME) if "contract/kl" in row]
  numbers = summary.of_run(before, after, written) | run.clock.read()
  numbers |= dict(optimizer_steps=int(state.step), numerics=fingerprint)
  metrics.write_summary(run.directory / "summary.json", numbers)
  return Result(state, numbers, then, now)


def circle(
  config: RunConfig,
  engine: engine_lib.Engine,
  trainer: step_lib.Trainer,
  ahead: off_policy.Ahead[Sampled],
  state: TrainState,
  step: int,
  base: parameters.Params | None,
  *,
  progress: progress_lib.Progress,
  before_update: Callable[[], object],
) -> tuple[TrainState, dict[str, float]]:
  """One round: sample, judge, learn, publish. Returns the new state and the round's numbers."""
  begin = time.monotonic()
  sampled = ahead.take(step)
  if config.stale.steps_ahead and step + 1 < config.num_steps:
    ahead.begin(step + 1)  # By the weights of this step, beside what follows.
  sampled_at = time.monotonic()
  if config.engine.gives_back_pages and not engine.num_unfinished:
    engine.give_back_pages()
  with progress.phase("learning"):
    state, learned = learn(
      config, trainer, state, sampled.groups, base,
      num_old=sampled.num_old, before_update=before_update,
    )  # fmt: skip
    weights = policy_lib.published_weights(
      config.weights, state.params, base, is_copied=config.stale.steps_ahead > 0
    )
    learned_at = time.monotonic()
    ahead.wait()
    engine.set_params(weights, policy_version=step + 1)
  numbers = summary.of_rollouts(sampled.groups) | sampled.numbers | learned
  return state, numbers | {
    "train/seconds": learned_at - sampled_at,
    "circle/seconds": time.monotonic() - begin,
  }


def sample(
  config: RunConfig,
  engine: engine_lib.Engine,
  task: Task,
  journal: journal_lib.Journal,
  step: int,
  carried: off_policy.Carried | None = None,
  *,
  progress: progress_lib.Progress | None = None,
  drafts: drafter_lib.RunDrafts | None = None,
) -> Sampled:
  """Samples and judges a step's groups; what the journal holds is not sampled again.

  Args:
    config: the run.
    engine: with the weights that sample.
    task: poses and judges.
    journal: of the run.
    step: from 0.
    carried: groups that wait from step to step (`StaleConfig.begun`).
    progress: is told.
    drafts: of the engine's drafter.
  """
  assert engine.tokenizer is not None
  watched = progress or progress_lib.silent()
  begin = time.monotonic()
  counted = dataclasses.replace(engine.counters)
  take_drafts = drafts.take if drafts else statistics.Acceptance
  take_drafts()  # Those of evaluations are not the step's.
  traces: list[trace_lib.Trace] = []

  def known(group: int, member: int) -> Rollout | None:
    entry = journal.lookup(step, group, member)
    return None if entry is None else entry.rollout

  def keep(group: int, member: int, problem: Problem, rollout: Rollout) -> None:
    journal.append(
      step, group, member, rollout, problem_id=problem.problem_id, prompt_text=problem.prompt
    )

  def generate(requests: Sequence[Request]) -> Iterator[Completion]:
    rollout = divided.resumed(engine, config.scheduler, journal, requests)
    traces.append(rollout.trace)
    yield from _watched(watched, "sampling", engine, rollout.run, requests)

  if config.stale.begun > 1:
    assert carried is not None
    with watched.phase("sampling", num_tokens=lambda: engine.counters.sampled_tokens):
      groups, num_old = _partial_groups(config, engine, task, journal, step, carried, traces)
  else:
    groups = step_groups(
      config,
      task,
      engine.tokenizer,
      step,
      generate=generate,
      known=known,
      on_rollout=keep,
    )
    completions = [rollout.completion for group in groups for rollout in group.rollouts]
    num_old = sum(len(one.tokens) for one in completions if one.policy_version < step)
  done = trace_lib.StepTrace(traces, take_drafts())
  trace_lib.append(journal.path.with_name(trace_lib.FILE_NAME), step, done)
  seconds, counters = time.monotonic() - begin, engine.counters
  num_tokens = counters.sampled_tokens - counted.sampled_tokens
  numbers = trace_lib.summarise(traces) | {
    "schedule/drafted_tokens": float(counters.drafted_tokens - counted.drafted_tokens),
    "schedule/accepted_tokens": float(counters.accepted_tokens - counted.accepted_tokens),
    "rollout/seconds": seconds,
    "rollout/tokens_per_second": num_tokens / max(seconds, 1e-9),
    "rollout/old_tokens": float(num_old),
  }
  return Sampled(groups, num_old, numbers)


def _watched(
  progress: progress_lib.Progress,
  name: str,
  engine: engine_lib.Engine,
  run: groups_lib.Generate,
  requests: Sequence[Request],
) -> Iterator[Completion]:
  """Yields what `run` does; `progress` is told."""
  with progress.phase(
    name, total=len(requests), num_tokens=lambda: engine.counters.sampled_tokens
  ) as phase:
    yield from progress.judged(run(requests), phase)


def _partial_groups(
  config: RunConfig,
  engine: engine_lib.Engine,
  task: Task,
  journal: journal_lib.Journal,
  step: int,
  carried: off_policy.Carried,
  traces: list[trace_lib.Trace],
) -> tuple[list[RolloutGroup], int]:
  """Returns a step's groups, the others carried on, and how many of their tokens are old."""
  assert engine.tokenizer is not None
  num_problems = groups_lib.num_problems(task, "train")

  def pose(position: int) -> Problem:
    index = groups_lib.problem_index(position, num_problems, config.seed)
    return groups_lib.problem_of(task, "train", index)

  def rollout_of(said: Mapping[str, Completion]) -> divided.DividedRollout:
    # They go on with other weights: that is what a partial rollout is.
    version = engine.policy_version
    said = {name: dataclasses.replace(one, policy_version=version) for name, one in said.items()}
    rollout = divided.DividedRollout(engine, config.scheduler, resume_from=said)
    traces.append(rollout.trace)
    return rollout

  def keep(problem: Problem, rollout: Rollout) -> None:
    place = groups_lib.place_of(rollout.request.request_id)
    journal.append(*place, rollout, problem_id=problem.problem_id, prompt_text=problem.prompt)

  return off_policy.sample_partial(
    carried,
    config.rollout,
    num_begun=math.ceil(config.stale.begun * config.rollout.groups_per_step),
    step=step,
    pose=pose,
    task=task,
    tokenizer=engine.tokenizer,
    seed=config.seed,
    rollout_of=rollout_of,
    on_rollout=keep,
  )


def step_groups(
  config: RunConfig,
  task: Task,
  tokenizer: tokenizer_lib.Tokenizer,
  step: int,
  *,
  generate: groups_lib.Generate,
  known: groups_lib.Known,
  on_rollout: Callable[[int, int, Problem, Rollout], None],
) -> list[RolloutGroup]:
  """Returns the groups that a step learns from; the last three arguments as in `sample_groups`.

  With dynamic sampling, rounds follow each other until enough groups have unequal rewards; which
  problems a round takes depends on the counts of the rounds before, never on who finished first.
  """
  wanted = config.rollout.groups_per_step
  num_problems = groups_lib.num_problems(task, "train")
  kept: list[RolloutGroup] = []
  rejected: list[RolloutGroup] = []
  taken = 0
  for _ in range(config.trainer.max_rounds):
    # A step's problems start at the same place however many rounds the steps before it took.
    start = step * wanted * config.trainer.max_rounds + taken
    count = wanted - len(kept)
    indices = [
      groups_lib.problem_index(start + place, num_problems, config.seed) for place in range(count)
    ]
    groups = groups_lib.sample_groups(
      [groups_lib.problem_of(task, "train", index) for index in indices],
      first_group=taken,
      step=step,
      generate=generate,
      task=task,
      config=config.rollout,
      tokenizer=tokenizer,
      seed=config.seed,
      known=known,
      on_rollout=on_rollout,
    )
    taken += count
    is_kept = [config.trainer.max_rounds == 1 or np.ptp(group.rewards) > 0 for group in groups]
    kept += [group for group, keep_it in zip(groups, is_kept, strict=True) if keep_it]
    rejected += [group for group, keep_it in zip(groups, is_kept, strict=True) if not keep_it]
    if len(kept) == wanted:
      break
  # A step always has the same number of groups; those without information fill it up.
  chosen = kept + rejected[: wanted - len(kept)]
  return sorted(chosen, key=lambda group: group.group_index)


def learn(
  config: RunConfig,
  trainer: step_lib.Trainer,
  state: TrainState,
  groups: Sequence[RolloutGroup],
  base: parameters.Params | None = None,
  *,
  num_old: int = 0,
  before_update: Callable[[], object] = lambda: None,
) -> tuple[TrainState, dict[str, float]]:
  """Takes the optimiser steps of one batch of groups; returns the new state and its numbers.

  Args:
    config: the run.
    trainer: its programs.
    state: with the weights that sampled.
    groups: judged.
    base: of `frozen_weights`.
    num_old: tokens that other weights sampled; where there are any, ratios are to those of the
      engine.
    before_update: called before the first update, from which on `state` may be used up.
  """
  rewards = np.stack([group.rewards for group in groups])
  if config.trainer.overlong_buffer:
    lengths = np.asarray([[len(r.completion.tokens) for r in g.rollouts] for g in groups])
    rewards = rewards + advantages.overlong_penalty(
      lengths, max_tokens=config.rollout.max_tokens, buffer=config.trainer.overlong_buffer
    )
  values = advantages.for_algorithm(config.loss.algorithm, rewards)
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
  olds: list[Any] = [batch.behaviour_logprobs if num_old else None for batch in batches]
  first_scores = []
  first_gradient, numbers = None, {}
  for index, batch in enumerate(batches):
    counts = losses.denominators(batch)
    gradient, means, scores = trainer.gradient(
      sampling_params, batch, counts, olds[index], references[index]
    )
    first_scores.append(scores)
    olds[index] = batch.behaviour_logprobs if num_old else scores.logprob
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


def learn_again(
  config: RunConfig,
  policy: Policy,
  task: Task,
  trainer: step_lib.Trainer,
  state: TrainState,
  steps: range,
  known: Callable[[int, int, int], Rollout | None],
  *,
  say: Callable[[str], None] = print,
) -> TrainState:
  """Takes steps of a run again with the rollouts of its journal; the state has the run's bits.

  Nothing is sampled and nothing judged: the rewards are the journal's, and the task only poses its
  problems again.

  Args:
    config: the run.
    policy: its start.
    task: the run's.
    trainer: its programs, on any number of instances.
    state: before the first of `steps`.
    steps: consecutive.
    known: (step, group, member) -> the journal's rollout, None if it has none.
    say: takes a line a step.

  Returns:
    The state after the last of `steps`.

  Raises:
    ValueError: naming the rollouts that the journal lacks, before anything is computed.
  """

  def refuse(step: int, requests: Sequence[Request]) -> tuple[Completion, ...]:
    if requests:
      names = [request.request_id for request in requests]
      more = f" and {len(names) - 8} more" if len(names) > 8 else ""
      raise ValueError(
        f"journal: got no rollout {', '.join(names[:8])}{more}, expected all that step"
        f" {step + 1} learnt from (names count steps from 0); restore the file, or keep a"
        " checkpoint of a later step."
      )
    return ()

  groups = {
    step: step_groups(
      config,
      task,
      policy.require_tokenizer(),
      step,
      generate=functools.partial(refuse, step),
      known=functools.partial(known, step),
      on_rollout=lambda *_: None,
    )
    for step in steps
  }
  base = programs_lib.base_weights(config, policy)
  for step in steps:
    begin = time.monotonic()
    state, numbers = learn(config, trainer, state, groups.pop(step), base)
    say(
      f"step {step + 1} learnt again, {step - steps.start + 1} of {len(steps)}: log-probability gap"
      f" {numbers['contract/max_abs_logprob_gap']}, {time.monotonic() - begin:.1f} s"
    )
  return state


def accuracy_of(
  config: RunConfig,
  engine: engine_lib.Engine,
  task: Task,
  progress: progress_lib.Progress | None = None,
) -> dict[str, float]:
  """Returns held-out accuracy with the engine's weights; see `evaluation.evaluate`."""
  assert engine.tokenizer is not None
  watched = progress or progress_lib.silent()
  rollout = divided.DividedRollout(engine, config.scheduler)
  return evaluation.evaluate(
    config.evaluation,
    generate=functools.partial(_watched, watched, "evaluating", engine, rollout.run),
    task=task,
    tokenizer=engine.tokenizer,
    max_tokens=config.rollout.max_tokens,
    seed=config.seed,
    stop_strings=config.rollout.stop_strings,
  )


def answer_of(config: RunConfig, engine: engine_lib.Engine, task: Task) -> evaluation.Answer:
  """Returns what the engine's weights answer to the first held-out problem, as evaluated."""
  assert engine.tokenizer is not None
  return evaluation.first_answer(
    config.evaluation,
    generate=divided.DividedRollout(engine, config.scheduler).run,
    task=task,
    tokenizer=engine.tokenizer,
    max_tokens=config.rollout.max_tokens,
    seed=config.seed,
    stop_strings=config.rollout.stop_strings,
  )
