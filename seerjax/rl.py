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
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from seerjax import checkpoint, host_memory, metrics, numerics as numerics_lib, parallel
from seerjax.engine import engine as engine_lib, runner as runner_lib, sizes
from seerjax.engine.kv import pool as kv_pool_lib, stores
from seerjax.models import lora, tokenizer as tokenizer_lib, transformer
from seerjax.rollout import (
  divided,
  groups as groups_lib,
  journal as journal_lib,
  policies,
  trace as trace_lib,
)
from seerjax.run import (
  evaluation,
  off_policy,
  progress as progress_lib,
  status as status_lib,
  stops as stops_lib,
  summary,
)
from seerjax.run.evaluation import EvaluationConfig
from seerjax.speculation import budget as budget_lib, statistics, suffix_drafter
from seerjax.trainer import advantages, losses, packing, plan as plan_lib, step as step_lib
from seerjax.types import Completion, Problem, Request, Rollout, RolloutGroup, Task, TrainState


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainerConfig:
  """How a step's groups become gradients.

  Attributes:
    rows_per_micro_batch: rows of one gradient program; 0 lets model and context decide
      (`packing.derived_sizes`), never the memory that is free, for they shape a gradient's sums.
    sequences_per_micro_batch: most sequences in it; scratch pages are kept for so many. 0 as above.
    num_mini_batches: optimiser steps on one batch of rollouts; the first is exactly on-policy.
    max_rounds: DAPO's dynamic sampling: groups whose rewards are all equal are replaced by the next
      problems' for at most this many rounds; 1 keeps every group.
    overlong_buffer: DAPO's overlong shaping: answers within this many tokens of `max_tokens` lose
      reward linearly; 0 is off.
    remat: what a gradient keeps of the forward pass: "none" computes nothing again; "layer" keeps
      each layer's input alone, which takes a third more time and far less memory. Scores have the
      same bits; sums of a gradient may be rounded elsewhere (beyond eight layers they are), so that
      the fingerprint names it.
  """

  rows_per_micro_batch: int = 0
  sequences_per_micro_batch: int = 0
  num_mini_batches: int = 1
  max_rounds: int = 1
  overlong_buffer: int = 0
  remat: transformer.Remat = "none"

  def __post_init__(self):
    if self.remat not in transformer.REMATS:
      raise ValueError(
        f"TrainerConfig.remat: got {self.remat!r}, expected one of {transformer.REMATS}; 'layer'"
        " is for models whose activations do not fit."
      )
    for field, least, usual in (
      ("rows_per_micro_batch", 0, "0, which lets the model decide,"),
      ("sequences_per_micro_batch", 0, "0, which lets the model decide,"),
      ("num_mini_batches", 1, 1), ("max_rounds", 1, 1),
    ):  # fmt: skip
      if (value := vars(self)[field]) < least:
        raise ValueError(
          f"TrainerConfig.{field}: got {value}, expected at least {least}; {usual} is usual."
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
  """One run, whole. Every field can be set as `--config.field`, nested ones by dots.

  Attributes:
    model: "nano", a Hugging Face directory, or a Hub id.
    task: "word_problems", "countdown", "gsm8k", "module:Task" or "module:reward_function".
    task_path: what the task reads, if it reads anything.
    seed: decides problems and samples.
    num_steps: rounds of the circle.
    num_instances: devices that sample and learn side by side; changes no bit.
    checkpoint_every: steps.
    lora_rank: columns of the low-rank adapters that learn in place of the weights; 0 is full
      fine-tuning.
    lora_alpha: adapters count alpha / rank times.
    numerics: what decides bits.
    engine: sizes of the engine.
    rollout: what a step samples.
    chat: what every prompt says besides its problem, evaluations included.
    scheduler: which request's next chunk runs, and where; changes no bit.
    kv_pool: where keys of waiting requests go when their pages are needed; changes no bit.
    budget: how much is drafted from the group's own texts, where it pays; changes no bit.
    stale: whether it may learn from what older weights sampled, as a rival; by default it does not.
    trainer: how it learns.
    loss: the objective.
    optimizer: the optax chain.
    evaluation: held-out accuracy.
  """

  model: str = "nano"
  task: str = "word_problems"
  task_path: str = ""
  seed: int = 0
  num_steps: int = 40
  num_instances: int = 1
  checkpoint_every: int = 10
  lora_rank: int = 0
  lora_alpha: float = 16.0
  numerics: numerics_lib.NumericsConfig = numerics_lib.NumericsConfig(reduction_shards=0)
  engine: engine_lib.EngineConfig = engine_lib.EngineConfig()
  rollout: groups_lib.RolloutConfig = groups_lib.RolloutConfig()
  chat: tokenizer_lib.ChatConfig = tokenizer_lib.ChatConfig()
  scheduler: policies.LongestGroupFirst = policies.LongestGroupFirst(chunk_tokens=128)
  kv_pool: kv_pool_lib.KVPoolConfig = kv_pool_lib.KVPoolConfig()
  budget: budget_lib.BudgetConfig = budget_lib.BudgetConfig()
  stale: off_policy.StaleConfig = off_policy.StaleConfig()
  trainer: TrainerConfig = TrainerConfig()
  loss: losses.LossConfig = losses.LossConfig()
  optimizer: step_lib.OptimizerConfig = step_lib.OptimizerConfig()
  evaluation: EvaluationConfig = EvaluationConfig()

  def __post_init__(self):
    if not 0 <= self.seed < 2**63:
      raise ValueError(
        f"RunConfig.seed: got {self.seed}, expected 0 <= seed < 2**63; choose a smaller one."
      )
    if self.num_instances > parallel.MAX_INSTANCES:
      raise ValueError(
        f"RunConfig.num_instances: got {self.num_instances}, expected at most"
        f" {parallel.MAX_INSTANCES} (one a device); lower it."
      )
    for field, least in (
      ("num_steps", 0), ("num_instances", 1), ("checkpoint_every", 1), ("lora_rank", 0)
    ):  # fmt: skip
      if vars(self)[field] < least:
        raise ValueError(
          f"RunConfig.{field}: got {vars(self)[field]}, expected at least {least}; raise it."
        )
    if not 0 < self.lora_alpha < math.inf:
      raise ValueError(
        f"RunConfig.lora_alpha: got {self.lora_alpha}, expected a positive number; 16 is usual."
      )
    if self.stale.steps_ahead and self.num_instances < 2:
      raise ValueError(
        f"StaleConfig.steps_ahead: got {self.stale.steps_ahead} with num_instances="
        f"{self.num_instances}, expected 2 or more (half of them sample while the others learn);"
        " raise RunConfig.num_instances."
      )
    if self.stale.begun > 1 and self.trainer.max_rounds > 1:
      raise ValueError(
        f"StaleConfig.begun: got {self.stale.begun} with max_rounds={self.trainer.max_rounds},"
        " expected one of them at 1; dynamic sampling needs whole steps."
      )
    if self.trainer.num_mini_batches > self.rollout.groups_per_step:
      raise ValueError(
        f"TrainerConfig.num_mini_batches: got {self.trainer.num_mini_batches}, expected at most"
        f" RolloutConfig.groups_per_step={self.rollout.groups_per_step} (a group is not divided);"
        " lower it or sample more groups."
      )
    most = self.rollout.max_tokens
    # A prompt has one token at least, and the last token of an answer needs no row.
    room = min(
      self.engine.max_context - 1, self.trainer.rows_per_micro_batch or self.engine.max_context
    )
    if most > room:
      raise ValueError(
        f"RolloutConfig.max_tokens: got {most}, expected at most {room}, because prompt and answer"
        f" have to fit EngineConfig.max_context={self.engine.max_context} and"
        f" TrainerConfig.rows_per_micro_batch={self.trainer.rows_per_micro_batch}; lower it, or"
        " raise those."
      )
    if not 0 <= self.trainer.overlong_buffer <= most:
      raise ValueError(
        f"TrainerConfig.overlong_buffer: got {self.trainer.overlong_buffer}, expected 0 to"
        f" RolloutConfig.max_tokens={most}; a fifth of it is usual, 0 is off."
      )


@runtime_checkable
class Learner(Protocol):
  """Of whatever policy, what learns: a model's shape and its f32 master weights."""

  @property
  def model(self) -> transformer.TransformerConfig: ...

  @property
  def params(self) -> transformer.Params: ...


@dataclasses.dataclass(frozen=True)
class Policy:
  """What learns: a model's shape, its tokenizer and its f32 master weights."""

  model: transformer.TransformerConfig
  tokenizer: tokenizer_lib.Tokenizer
  params: transformer.Params


@dataclasses.dataclass(frozen=True)
class Result:
  """What a run leaves behind: final state, the numbers of summary.json, and one problem.

  That problem is the first of those held out, answered by the first weights and by the last.
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


@dataclasses.dataclass(frozen=True)
class Programs:
  """A run's compiled programs. Runs of one shape in one process may share them."""

  made_for: tuple[Any, ...]
  trainer: step_lib.Trainer
  runner: runner_lib.Runner


# Settings that the journal does not hold a resumed run to: the fingerprint speaks for the first,
# and the others move no bit.
FREE_SETTINGS = (
  "numerics", "num_steps", "num_instances", "checkpoint_every", "scheduler", "kv_pool", "budget"
)  # fmt: skip
# Host seconds of a request's draft, and of a step that drafts for anybody: 0.35 to 0.6 ms were
# measured for a single request, most of them to show its tree what the siblings said since.
DRAFT_SECONDS, DRAFTING_SECONDS = 2e-5, 4e-4
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
  say: Callable[[str], None] = print,
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
    say: takes lines for people: what is found, and at least every ten seconds what it is at.
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
  directory = pathlib.Path(directory)
  with stops_lib.heard() as stops, progress_lib.Progress(say) as progress:
    return _train(
      config, policy, task, directory, resume, accept_new_numerics, programs, stops, progress
    )


def _train(
  config: RunConfig,
  policy: Policy,
  task: Task,
  directory: pathlib.Path,
  resume: bool,
  accept_new_numerics: bool,
  programs: Programs | None,
  stops: stops_lib.Stops,
  progress: progress_lib.Progress,
) -> Result:
  """See `train`."""
  clock = summary.RunClock()
  given = config
  check_directory(directory, resume=resume)
  if resume:
    config = as_begun(config, directory)
  config = for_model(config, policy.model)
  policy = dataclasses.replace(policy, tokenizer=chatting(policy.tokenizer, config.chat))
  if resume and config.stale != off_policy.StaleConfig():
    raise ValueError(
      f"RunConfig.stale: got {config.stale} and a run to resume, expected a new one (what is under"
      " way between two steps is kept in memory alone); choose another directory, without resume."
    )
  for split in ("train", "heldout"):
    groups_lib.num_problems(task, split)  # Refuses none.
  settings = metrics.encode(dataclasses.asdict(config))
  fingerprint = numerics_lib.fingerprint(config.numerics, config.trainer.remat)
  if programs is None:
    programs = make_programs(config, policy.model)
  elif programs.made_for != _programs_key(config, policy.model):
    raise ValueError(
      "train.programs: got programs of another config or model, expected make_programs of these;"
      " share them only between equals."
    )
  trainer = programs.trainer
  memory = memory_plan(config, policy.model)
  state, step, before = initial_state(config, policy), 0, {}
  base = frozen_weights(config, policy)
  if resume:
    restored = checkpoint.restore(
      directory / "checkpoints",
      jax.eval_shape(lambda: state),
      fingerprint=fingerprint,
      accept_new_numerics=accept_new_numerics,
    )
    state, step = restored.state, restored.step
    before = restored.host_state["before"] or _accuracy_at(directory, 0)
    clock.carry_on(restored.host_state["clock"])
    progress.say(f"resumed after step {step} of {config.num_steps}")

  def save(step: int) -> None:
    if checkpoint.latest_step(directory / "checkpoints") == step:
      return
    with stops.put_off(), progress.phase("saving"):
      checkpoint.save(
        directory / "checkpoints",
        step,
        state,
        host_state={"before": before, "clock": clock.read(), "sizes": chosen_sizes(config)},
        fingerprint=fingerprint,
        accept_new_numerics=accept_new_numerics,
      )

  # Before the journal, which holds a run to its settings from its first line on.
  engine = engine_lib.Engine(
    policy.model,
    published_weights(config, state.params, base),
    numerics=config.numerics,
    config=memory.engine,
    key=numerics_lib.key(config.seed),
    tokenizer=policy.tokenizer,
    policy_version=step,
    runner=programs.runner,
    kv_pool=kv_pool_lib.KVPool(config.kv_pool, stores.open_store(config.kv_pool)),
  )
  with contextlib.ExitStack() as files:
    status = files.enter_context(status_lib.kept(directory, step=step))
    files.enter_context(progress.beaten(status.beat))
    journal = files.enter_context(
      journal_lib.Journal(
        directory / "journal.jsonl",
        fingerprint=fingerprint,
        settings={name: settings[name] for name in settings if name not in FREE_SETTINGS},
        accept_new_numerics=accept_new_numerics,
        # The journal counts steps from 0: what step `step` sampled is not of a whole step yet.
        resume_step=step - 1,
      )
    )
    for sentence in missing_records(directory, step, journal):
      progress.say(sentence)
    metrics.write_summary(directory / "config.json", settings | {"fingerprint": fingerprint})
    if line := chosen(given, config):
      progress.say(line)
    progress.say(memory.describe())
    progress.say(engine.plan())
    with progress.phase("measuring the engine's steps"):
      engine.drafter = drafter_for(config, engine)
    writer = files.enter_context(
      metrics.Writer(
        directory,
        resume_step=step if resume else None,
        total_steps=config.num_steps,
        console_digits=CONSOLE_DIGITS,
      )
    )
    files.enter_context(progress.shown(writer.note))
    carried = off_policy.Carried()
    ahead = off_policy.Ahead(
      lambda step: sample(config, engine, task, journal, step, carried, progress=progress)
    )
    files.callback(ahead.close)

    def accuracy_after(step: int) -> dict[str, float]:
      found = _accuracy_at(directory, step)  # Of a run that was stopped since.
      if not found:
        when = {config.num_steps: "after", 0: "before"}.get(step, f"after step {step}")
        progress.say(f"held-out accuracy on {config.evaluation.num_problems} problems, {when}:")
        found = accuracy_of(config, engine, task, progress)
        writer.write(step, {f"heldout/{name}": value for name, value in found.items()})
        progress.say(f"  {evaluation.describe(found)}")
      return found

    every = config.evaluation.every
    try:
      save(step)  # The first at once, so that from here on a kill can be resumed.
      before = before or accuracy_after(0)
      while step < config.num_steps:
        progress.begin_step(step + 1, config.num_steps)
        joules = clock.joules
        with contextlib.ExitStack() as whole:
          # From the first update on, a stop waits until the step is whole, its numbers included.
          put_off = functools.partial(whole.enter_context, stops.put_off())
          new_state, numbers = circle(
            config, engine, trainer, ahead, state, step, base,
            progress=progress, before_update=put_off,
          )  # fmt: skip
          if joules is not None:
            numbers["circle/joules"] = (clock.joules or 0.0) - joules
          writer.write(step + 1, numbers)
          progress.has_said()
          state, step = new_state, step + 1
          status.step = step
        if step % config.checkpoint_every == 0 or step == config.num_steps:
          save(step)
        if every and step % every == 0 and step < config.num_steps:
          accuracy_after(step)
      progress.end_steps()
      after = accuracy_after(step)
      with progress.phase("answering one problem again"):
        now = answer_of(config, engine, task)
        first = running_weights(config, _first_params(config, policy), base)
        engine.set_params(first, policy_version=0)
        then = answer_of(config, engine, task)
    except KeyboardInterrupt as stop:
      if not step_lib.is_given_up(state):  # A second one, in the middle of an update.
        save(step)
      raise stops_lib.Interrupted(
        f"stopped by {stops_lib.name_of(stop)} after step {step} of {config.num_steps}; --resume"
        " goes on",
        stops_lib.status_of(stop),
      ) from None
    written = [row for row in metrics.read(directory / "metrics.jsonl") if "contract/kl" in row]
    numbers = summary.of_run(before, after, written) | clock.read()
    numbers |= dict(optimizer_steps=int(state.step), numerics=fingerprint)
    metrics.write_summary(directory / "summary.json", numbers)
  return Result(state, numbers, then, now)


def circle(
  config: RunConfig,
  engine: engine_lib.Engine,
  trainer: step_lib.Trainer,
  ahead: off_policy.Ahead[Sampled],
  state: TrainState,
  step: int,
  base: transformer.Params | None,
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
    weights = published_weights(config, state.params, base)
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
  """
  assert engine.tokenizer is not None
  watched = progress or progress_lib.silent()
  begin = time.monotonic()
  counted = dataclasses.replace(engine.counters)
  take_drafts(engine)  # Those of evaluations are not the step's.
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
  done = trace_lib.StepTrace(traces, take_drafts(engine))
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
    rollout = divided.DividedRollout(engine, config.scheduler, said=said)
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
  base: transformer.Params | None = None,
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
  batches = [pack(config, [groups[i] for i in part.tolist()], values[part]) for part in parts]
  sampling_params = running_weights(config, state.params, base)
  references: list[Any] = [None] * len(batches)  # f32[m, n] each, or None.
  if config.loss.kl_coefficient:
    assert base is not None
    reference = reference_weights(config, state, base)
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
      params = running_weights(config, state.params, base)
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
      policy.tokenizer,
      step,
      generate=functools.partial(refuse, step),
      known=functools.partial(known, step),
      on_rollout=lambda *_: None,
    )
    for step in steps
  }
  base = frozen_weights(config, policy)
  for step in steps:
    begin = time.monotonic()
    state, numbers = learn(config, trainer, state, groups.pop(step), base)
    say(
      f"step {step + 1} learnt again, {step - steps.start + 1} of {len(steps)}: log-probability gap"
      f" {numbers['contract/max_abs_logprob_gap']}, {time.monotonic() - begin:.1f} s"
    )
  return state


def pack(config: RunConfig, groups: Sequence[RolloutGroup], values: np.ndarray) -> Any:
  """Returns the groups as one `TrainBatch` of the run's fixed shapes."""
  return packing.pack(groups, values, **_packing_arguments(config))


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


def chatting(
  tokenizer: tokenizer_lib.Tokenizer, config: tokenizer_lib.ChatConfig
) -> tokenizer_lib.Tokenizer:
  """Returns a tokenizer whose every chat says what a run's config has it say.

  Raises:
    ValueError: if the tokenizer says other things of its own, which no journal would know of.
  """
  if tokenizer.chat_config not in (config, tokenizer_lib.ChatConfig()):
    raise ValueError(
      f"RunConfig.chat: got {config} and a tokenizer with {tokenizer.chat_config}, expected one of"
      " them to be empty; set --config.chat alone."
    )
  return dataclasses.replace(tokenizer, chat_config=config)


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


def drafter_for(config: RunConfig, engine: engine_lib.Engine) -> suffix_drafter.SuffixDrafter:
  """Returns a drafter of the groups' own texts, with a budget for this engine's step times."""
  # Times rise in stairs, one a tile of rows and one a bucket: a draft of a few rows is cheap on one
  # of them and dear on its edge, so that the first hundred rows are measured closely.
  buckets = engine.config.row_buckets
  powers = [2**power for power in range(buckets[-1].bit_length())]
  of_instance = {*powers, *range(4, 129, 4), *buckets, *(bucket + 1 for bucket in buckets)}
  rows = sorted(engine.num_instances * n for n in of_instance if n <= buckets[-1])
  seconds = engine.step_seconds(rows)
  # A smaller step never takes longer, and noise only adds: no more than the fastest of the larger.
  least = np.minimum.accumulate([seconds[count] for count in reversed(rows)])[::-1].tolist()
  times = budget_lib.StepTimes(
    rows=tuple(rows),
    seconds=tuple(least),
    draft_seconds=DRAFT_SECONDS,
    drafting_seconds=DRAFTING_SECONDS,
  )
  return suffix_drafter.SuffixDrafter(
    budget=budget_lib.Budget(times, config.budget),
    is_probe=lambda request_id: groups_lib.place_of(request_id)[2] == 0,
  )


def take_drafts(engine: engine_lib.Engine) -> statistics.Acceptance:
  """Returns what came of the engine's drafts since this was asked last."""
  drafter = engine.drafter
  if not isinstance(drafter, suffix_drafter.SuffixDrafter):
    return statistics.Acceptance()
  found, drafter.acceptance = drafter.acceptance, statistics.Acceptance()
  return found


# What learns, and what engine and trainer run of it.


def initial_state(config: RunConfig, policy: Learner) -> TrainState:
  """Returns the state of a run that has not learnt: of all weights, or of fresh adapters."""
  optimizer = step_lib.make_optimizer(config.optimizer)
  return step_lib.first_state(_first_params(config, policy), optimizer)


def _first_params(config: RunConfig, policy: Learner) -> Any:
  """Returns what learns, as it begins: the policy's weights themselves, or fresh adapters."""
  if not config.lora_rank:
    return policy.params
  key = numerics_lib.key(groups_lib.request_seed(config.seed, -2))
  return lora.init(key, policy.model, config.numerics, config.lora_rank)


def frozen_weights(config: RunConfig, policy: Learner) -> transformer.Params | None:
  """Returns the policy's first weights in compute dtype, None if the run does not need them.

  They are the base under adapters, and the reference policy of `LossConfig.kl_coefficient`.
  """
  if not config.lora_rank and not config.loss.kl_coefficient:
    return None
  # On the whole mesh at once, so that no step has to copy them there.
  whole = jax.sharding.NamedSharding(_meshes(config)[1], jax.P())
  return jax.device_put(transformer.compute_params(policy.params, config.numerics), whole)


def running_weights(
  config: RunConfig, params: Any, base: transformer.Params | None
) -> transformer.Params:
  """Returns what engine and trainer both run.

  Args:
    config: the run.
    params: f32 masters of what learns (`TrainState.params`).
    base: of `frozen_weights`.
  """
  if not config.lora_rank:
    return transformer.compute_params(params, config.numerics)
  assert base is not None
  return lora.attach(base, params, config.lora_alpha / config.lora_rank)


def published_weights(
  config: RunConfig, params: Any, base: transformer.Params | None
) -> transformer.Params:
  """Returns `running_weights` for the engine, which may sample while an update takes `params`.

  They are copies only where it does (`StaleConfig.steps_ahead`): float32 weights are otherwise the
  masters themselves, whose place the next masters take before the engine runs again.
  """
  weights = running_weights(config, params, base)
  return jax.tree.map(jnp.copy, weights) if config.stale.steps_ahead else weights


def reference_weights(
  config: RunConfig, state: TrainState, base: transformer.Params
) -> transformer.Params:
  """Returns the policy before it learnt, as `running_weights` has it now."""
  if not config.lora_rank:
    return base
  # Adapters that say nothing: scored by the program that scores those that learn, so that a fresh
  # one is at a distance of exactly zero.
  return running_weights(config, jax.tree.map(jnp.zeros_like, state.params), base)


def exported_weights(config: RunConfig, policy: Policy, state: TrainState) -> transformer.Params:
  """Returns plain f32 weights of what was learnt, adapters merged; for other programs to load."""
  if not config.lora_rank:
    return state.params
  return lora.merge(policy.params, state.params, config.lora_alpha / config.lora_rank)


# Memory, before anything is taken.


class MemoryPlan(NamedTuple):
  """What a run takes of memory, in bytes of its fullest device.

  Attributes:
    learning: masters, moments, gradient sums and the rest.
    frozen: weights that do not learn, beside those that run.
    pages: of the engine.
    are_pages_given_back: while it learns.
    held: by this process already, the policy's first weights included; of a CPU alone.
    others: of all other devices together, where they share one memory; else 0.
    free: now.
    engine: sizes, with what was open decided.
  """

  learning: plan_lib.Plan
  frozen: int
  pages: int
  are_pages_given_back: bool
  held: int
  others: int
  free: float
  engine: engine_lib.EngineConfig

  @property
  def needed(self) -> int:
    """Bytes on top of what is held, at the most."""
    while_learning = self.learning.learning + (0 if self.are_pages_given_back else self.pages)
    return self.learning.kept + self.frozen + max(self.pages, while_learning) + self.others

  def describe(self) -> str:
    """Returns one line in MiB."""
    mib = plan_lib.MIB
    given_back = " that are given back while it learns" if self.are_pages_given_back else ""
    others = f", {self.others / mib:,.0f} on the other devices" if self.others else ""
    free = (
      f"{self.free / mib:,.0f} are free" if self.free < math.inf else "nothing says what is free"
    )
    return (
      f"memory, MiB a device: {self.learning.describe()}, {self.frozen / mib:,.0f} frozen weights,"
      f" {self.pages / mib:,.0f} pages of the engine{given_back}{others}; at most"
      f" {self.needed / mib:,.0f} beside the {self.held / mib:,.0f} held now, and {free}"
    )


def memory_plan(config: RunConfig, model: transformer.TransformerConfig) -> MemoryPlan:
  """Returns what a run is going to take; nothing is computed or allocated.

  Raises:
    ValueError: with all figures, if that does not fit what is free.
  """
  config = for_model(config, model)
  trainer, mesh = make_programs(config, model).trainer, _meshes(config)[1]
  dtype = config.numerics.dtype
  masters = transformer.shapes(model, config.numerics.reduction_shards)
  weights = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), masters)
  whole_bytes = plan_lib.tree_bytes(weights)
  if config.lora_rank:
    adapter = lora.shapes(model, config.numerics, config.lora_rank)
    attached = lambda base, adapter: lora.attach(base, adapter, 1.0)
    weights = jax.eval_shape(attached, weights, adapter)
  learning = trainer.plan(weights, _layout(config), _most_micro_batches(config))
  # Under adapters the frozen weights are those that run.
  frozen = whole_bytes if config.loss.kl_coefficient and not config.lora_rank else 0
  num_devices, is_cpu = mesh.devices.size, jax.default_backend() == "cpu"
  free = sizes.free_bytes(mesh)
  others = 0
  if is_cpu:
    free *= num_devices
    of_each = max(learning.weights, whole_bytes) + frozen + learning.activations + learning.scratch
    others = (num_devices - 1) * (of_each + learning.masters)
  plan = MemoryPlan(
    learning, frozen, 0, config.engine.gives_back_pages,
    held=int(host_memory.resident_bytes()) if is_cpu else 0,
    others=others, free=free, engine=config.engine,
  )  # fmt: skip
  if plan.needed > free:
    raise ValueError(
      f"RunConfig: got a run that takes more than there is ({plan.describe()}), expected one that"
      " fits; set TrainerConfig.remat=layer, RunConfig.lora_rank or a bfloat16"
      " NumericsConfig.compute_dtype, lower EngineConfig.max_context or"
      " TrainerConfig.sequences_per_micro_batch, or free memory."
    )
  sharers = num_devices if is_cpu else 1
  left = (free - plan.needed) / sharers
  if plan.are_pages_given_back:
    left += learning.learning / sharers
  engine = sizes.fitted(config.engine, model, config.numerics, free_bytes=left)
  page = sizes.page_bytes(model, config.numerics, page_size=engine.page_size)
  return plan._replace(
    engine=engine,
    pages=engine.num_pages * page,
    others=others + (num_devices - 1) * engine.num_pages * page if is_cpu else 0,
  )


def _most_micro_batches(config: RunConfig) -> int:
  """Returns how many micro-batches an optimiser step has where every answer is a whole context."""
  groups = -(-config.rollout.groups_per_step // config.trainer.num_mini_batches)
  longest = min(config.engine.max_context - 1, config.trainer.rows_per_micro_batch)
  fitting = max(1, config.trainer.rows_per_micro_batch // longest)
  together = min(fitting, config.trainer.sequences_per_micro_batch)
  return -(-groups * config.rollout.group_size // together)


# Compiled programs and their sizes.


def for_model(config: RunConfig, model: transformer.TransformerConfig) -> RunConfig:
  """Returns the config with what it leaves to the model as the model decides it."""
  trainer = config.trainer
  rows, sequences = packing.derived_sizes(
    context=min(config.engine.max_context, model.max_context),
    bytes_per_position=2 * model.num_layers * model.num_kv_heads * model.head_dim * 4,
    rows=trainer.rows_per_micro_batch,
    sequences=trainer.sequences_per_micro_batch,
  )
  numerics = transformer.numerics_for(model, config.numerics)
  return dataclasses.replace(
    config,
    numerics=numerics,
    engine=sizes.with_buckets(config.engine, model, numerics),
    trainer=dataclasses.replace(
      trainer, rows_per_micro_batch=rows, sequences_per_micro_batch=sequences
    ),
  )


def chosen(config: RunConfig, of_model: RunConfig) -> str:
  """Returns one line on what a config left to the model (`for_model`); "" if nothing."""
  names = [
    f"{field}={new}"
    for field, old, new in (
      ("numerics.reduction_shards", config.numerics, of_model.numerics),
      ("engine.row_buckets", config.engine, of_model.engine),
      ("trainer.rows_per_micro_batch", config.trainer, of_model.trainer),
      ("trainer.sequences_per_micro_batch", config.trainer, of_model.trainer),
    )
    for old, new in [(vars(part)[field.partition(".")[2]] for part in (old, new))]
    if old != new
  ]
  return f"chosen for this model and context: {', '.join(names)}" if names else ""


def make_programs(config: RunConfig, model: transformer.TransformerConfig) -> Programs:
  """Returns what a run compiles; nothing is compiled before it is first used."""
  config = for_model(config, model)
  sampling, learning = _meshes(config)
  trainer = step_lib.Trainer(
    model,
    config.numerics,
    config.loss,
    step_lib.make_optimizer(config.optimizer),
    learning,
    _layout(config).num_pages,
    config.engine.page_size,
    config.trainer.remat,
  )
  runner = runner_lib.Runner(model, config.numerics, sampling, len(config.engine.row_buckets))
  return Programs(_programs_key(config, model), trainer, runner)


def _meshes(config: RunConfig) -> tuple[jax.sharding.Mesh, jax.sharding.Mesh]:
  """Returns where it samples and where it learns: everywhere, unless both go on at once."""
  if not config.stale.steps_ahead:
    mesh = parallel.make_mesh(num_instances=config.num_instances)
    return mesh, mesh
  half = config.num_instances // 2
  return (
    parallel.make_mesh(num_instances=half),
    parallel.make_mesh(num_instances=config.num_instances - half, first=half),
  )


def _programs_key(config: RunConfig, model: transformer.TransformerConfig) -> tuple[Any, ...]:
  return (
    model, config.num_instances, config.stale.steps_ahead, config.lora_rank, config.numerics,
    config.engine, _layout(config), config.trainer.remat, config.loss, config.optimizer,
  )  # fmt: skip


def _packing_arguments(config: RunConfig) -> dict[str, Any]:
  rows = config.trainer.rows_per_micro_batch
  longest = min(config.engine.max_context, rows + 1)
  return dict(
    numerics=config.numerics,
    page_size=config.engine.page_size,
    rows_per_micro_batch=rows,
    max_sequence_tokens=longest,
    max_sequences=config.trainer.sequences_per_micro_batch,
  )


def _layout(config: RunConfig) -> packing.Layout:
  return packing.layout(**_packing_arguments(config))


def chosen_sizes(config: RunConfig) -> dict[str, Any]:
  """Returns what the model decided, where the config left it open, for a resume."""
  return {
    "reduction_shards": config.numerics.reduction_shards,
    "row_buckets": list(config.engine.row_buckets),
    "rows_per_micro_batch": config.trainer.rows_per_micro_batch,
    "sequences_per_micro_batch": config.trainer.sequences_per_micro_batch,
  }


def as_begun(config: RunConfig, directory: pathlib.Path) -> RunConfig:
  """Returns the config of a resume, with what it leaves open as the run's checkpoint has it."""
  begun = checkpoint.read_host_state(directory / "checkpoints").get("sizes", {})
  # JSON has lists.
  begun = {name: tuple(size) if isinstance(size, list) else size for name, size in begun.items()}

  def filled(part: Any) -> Any:
    open_fields = {name: begun[name] for name in begun if vars(part).get(name) in (0, ())}
    return dataclasses.replace(part, **open_fields)

  return dataclasses.replace(
    config,
    numerics=filled(config.numerics),
    engine=filled(config.engine),
    trainer=filled(config.trainer),
  )


# A run's directory.


def check_directory(directory: pathlib.Path, *, resume: bool) -> None:
  """Refuses a directory that cannot be begun or resumed.

  Raises:
    ValueError: if a new run would meet another one, or there is nothing to resume.
  """
  if directory.exists() and not directory.is_dir():
    raise ValueError(
      f"{directory}: got a file, expected a run's directory or nothing yet; choose another"
      " --workdir."
    )
  latest = checkpoint.latest_step(directory / "checkpoints")
  numbers = directory / metrics.FILE_NAME
  if resume and latest is None:
    raise ValueError(
      f"{directory}: got no checkpoint to resume, expected one under {directory / 'checkpoints'};"
      " start a new run without --resume, or name the run's directory with --workdir."
    )
  if not resume and (latest is not None or (numbers.is_file() and numbers.stat().st_size)):
    found = "its numbers" if latest is None else f"a checkpoint after step {latest}"
    raise ValueError(
      f"{directory}: got the directory of another run ({found}), expected none; carry on with"
      " --resume, choose another --workdir, or remove it."
    )


def missing_records(
  directory: pathlib.Path, step: int, journal: journal_lib.Journal | None
) -> list[str]:
  """Returns a sentence for each file that lacks what whole steps had written: a run needs none.

  Args:
    directory: of a run that is resumed.
    step: whole steps of it.
    journal: of the run; None if it has none.

  Raises:
    ValueError: if the numbers are damaged before their end.
  """
  sentences = []
  if journal is not None:
    of_rollouts = journal.keys()
    known = {key[0] for key in of_rollouts}
    if missing := [one for one in range(step) if one not in known]:
      sentences.append(
        f"{journal.path}: got no rollouts of {len(missing)} of {step} steps, expected those of all;"
        " the run goes on, but these steps can neither be read nor replayed: restore the file from"
        " a copy if you need them."
      )
  path = directory / metrics.FILE_NAME
  known = {row["step"] for row in metrics.read(path)} if path.is_file() else set()
  if missing := [one for one in range(1, step + 1) if one not in known]:
    sentences.append(
      f"{path}: got no numbers of {len(missing)} of {step} steps, expected those of all; the run"
      " goes on, but its report and summary lack them: restore the file from a copy if you need"
      " them."
    )
  path = directory / trace_lib.FILE_NAME
  if damaged := trace_lib.damaged_lines(path):
    sentences.append(
      f"{path}: got damage in line(s) {', '.join(map(str, damaged))}, expected a step's trace in"
      " each; the run goes on, but its report lacks them: restore the file from a copy if you need"
      " them."
    )
  return sentences


def _accuracy_at(directory: pathlib.Path, step: int) -> dict[str, float]:
  """Reads the evaluation after a step back; empty if there was none or it was not finished."""
  path = directory / metrics.FILE_NAME
  rows = [row for row in metrics.read(path) if row["step"] == step] if path.is_file() else []
  named = [(name, value) for row in rows for name, value in row.items()]
  return {name.removeprefix("heldout/"): v for name, v in named if name.startswith("heldout/")}
