"""THE CIRCLE: sample, judge, learn, publish, again.

    problems -> tasks prompt -> engine samples -> task judges -> groups
       ^                                                           |
       +---- engine.set_params <- params <- optimiser <- packed batch

Everything a step does is a function of (config, step): which problems, which seeds, which tokens,
which gradient. That is why a killed run resumes to the same bits, and why the log-probabilities
that sampled are, to the bit, those that learn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import json
import pathlib
import resource
import time
from typing import Any

import jax
import numpy as np

from seerjax import checkpoint, metrics, parallel
from seerjax import numerics as numerics_lib
from seerjax.engine import engine as engine_lib
from seerjax.models import tokenizer as tokenizer_lib
from seerjax.models import transformer
from seerjax.rollout import journal as journal_lib
from seerjax.rollout import rollout as rollout_lib
from seerjax.trainer import advantages, losses, packing
from seerjax.trainer import step as step_lib
from seerjax.types import Completion, Problem, Request, Rollout, RolloutGroup, Task, TrainState


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainerConfig:
  """How a step's groups become gradients.

  Attributes:
    rows_per_micro_batch: rows of one gradient program.
    num_mini_batches: optimiser steps on one batch of rollouts; the first is exactly on-policy.
    max_rounds: DAPO's dynamic sampling: groups whose rewards are all equal are replaced by the next
      problems' for at most this many rounds; 1 keeps every group.
    overlong_buffer: DAPO's overlong shaping: answers within this many tokens of `max_tokens` lose
      reward linearly; 0 is off.
  """

  rows_per_micro_batch: int = 4096
  num_mini_batches: int = 1
  max_rounds: int = 1
  overlong_buffer: int = 0

  def __post_init__(self):
    for field in ("num_mini_batches", "max_rounds"):
      value = dataclasses.asdict(self)[field]
      if value < 1:
        raise ValueError(f"TrainerConfig.{field}: got {value}, expected at least 1; 1 is usual.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
  """What is measured before and after.

  Attributes:
    num_problems: of the held-out split, each answered once.
    temperature: 0 is greedy.
    every: steps between two evaluations besides the first and the last; 0 for none.
  """

  num_problems: int = 1024
  temperature: float = 0.0
  every: int = 0


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
    numerics: what decides bits.
    engine: sizes of the engine.
    rollout: what a step samples.
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
  numerics: numerics_lib.NumericsConfig = numerics_lib.NumericsConfig()
  engine: engine_lib.EngineConfig = engine_lib.EngineConfig()
  rollout: rollout_lib.RolloutConfig = rollout_lib.RolloutConfig()
  trainer: TrainerConfig = TrainerConfig()
  loss: losses.LossConfig = losses.LossConfig()
  optimizer: step_lib.OptimizerConfig = step_lib.OptimizerConfig()
  evaluation: EvaluationConfig = EvaluationConfig()


@dataclasses.dataclass(frozen=True)
class Policy:
  """What learns: a model's shape, its tokenizer and its f32 master weights."""

  model: transformer.TransformerConfig
  tokenizer: tokenizer_lib.Tokenizer
  params: transformer.Params


@dataclasses.dataclass(frozen=True)
class Result:
  """What a run leaves behind: final state, and the numbers of summary.json."""

  state: TrainState
  summary: dict[str, Any]


class Interrupted(Exception):
  """The run was stopped by Ctrl-C after its last whole step was saved."""


def train(
  config: RunConfig,
  policy: Policy,
  task: Task,
  directory: pathlib.Path,
  *,
  resume: bool = False,
  accept_new_numerics: bool = False,
  say: Callable[[str], None] = print,
) -> Result:
  """Runs the circle.

  Args:
    config: the run.
    policy: what learns; its params are the start of a new run.
    task: where problems come from.
    directory: takes config.json, metrics.jsonl, journal.jsonl, checkpoints/ and summary.json.
    resume: carry on from the latest checkpoint; finished rollouts are read from the journal.
    accept_new_numerics: resume under another fingerprint, as a new epoch.
    say: takes lines for people.

  Returns:
    The final state and summary.

  Raises:
    Interrupted: on Ctrl-C.
    ValueError: for what cannot work, before anything is computed.
  """
  started = time.monotonic()
  compile_clock = CompileClock()
  settings = json.loads(json.dumps(dataclasses.asdict(config)))
  fingerprint = numerics_lib.fingerprint(config.numerics)
  directory.mkdir(parents=True, exist_ok=True)
  mesh = parallel.make_mesh(num_instances=config.num_instances)
  layout = _layout(config)
  trainer = step_lib.Trainer(
    policy.model,
    config.numerics,
    config.loss,
    step_lib.make_optimizer(config.optimizer),
    mesh,
    layout.num_pages,
    config.engine.page_size,
  )
  state, first, before = trainer.init(policy.params), 0, {}
  if resume:
    abstract = jax.eval_shape(lambda: state)
    restored = checkpoint.restore(
      directory / "checkpoints",
      abstract,
      fingerprint=fingerprint,
      accept_new_numerics=accept_new_numerics,
    )
    state, first, before = restored.state, restored.step, restored.host_state["before"]
    say(f"resumed after step {first} of {config.num_steps}")
  metrics.write_summary(directory / "config.json", settings | {"fingerprint": fingerprint})

  engine = engine_lib.Engine(
    policy.model,
    transformer.compute_params(state.params, config.numerics),
    numerics=config.numerics,
    config=config.engine,
    key=jax.random.key(config.seed),
    tokenizer=policy.tokenizer,
    mesh=mesh,
    policy_version=first,
  )
  say(engine.plan())
  writer = metrics.Writer(
    directory,
    resume_step=first if resume else None,
    total_steps=config.num_steps,
    console_names=("rollout/reward_mean", "rollout/length_mean", "rollout/tokens_per_second", "contract/kl"),
  )
  journal = journal_lib.Journal(
    directory / "journal.jsonl",
    fingerprint=fingerprint,
    settings={name: value for name, value in settings.items() if name != "num_steps"},
    accept_new_numerics=accept_new_numerics,
    resume_step=first,
  )

  def save(step: int) -> None:
    if checkpoint.latest_step(directory / "checkpoints") != step:
      checkpoint.save(
        directory / "checkpoints",
        step,
        state,
        host_state={"before": before},
        fingerprint=fingerprint,
        accept_new_numerics=accept_new_numerics,
      )

  step, rows = first, []
  with writer, journal:
    try:
      if not before:
        say(f"held-out accuracy on {config.evaluation.num_problems} problems, before:")
        before = evaluate(config, engine, task)
        say(f"  {describe(before)}")
        writer.write(0, {f"heldout/{name}": value for name, value in before.items()})
        save(0)
      while step < config.num_steps:
        state, numbers = circle(config, engine, trainer, task, journal, state, step)
        step += 1
        rows.append(numbers)
        if config.evaluation.every and step % config.evaluation.every == 0:
          accuracy = evaluate(config, engine, task)
          numbers |= {f"heldout/{name}": value for name, value in accuracy.items()}
        writer.write(step, numbers)
        if step % config.checkpoint_every == 0 or step == config.num_steps:
          save(step)
      say(f"held-out accuracy on {config.evaluation.num_problems} problems, after:")
      after = evaluate(config, engine, task)
      say(f"  {describe(after)}")
    except KeyboardInterrupt:
      save(step)
      raise Interrupted(f"stopped after step {step} of {config.num_steps}; --resume goes on") from None
  written = [row for row in metrics.read(directory / "metrics.jsonl") if "contract/kl" in row]
  summary = summarise(before, after, written) | dict(
    seconds=time.monotonic() - started,
    compile_seconds=compile_clock.seconds,
    peak_memory_gib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    optimizer_steps=int(state.step),
    numerics=fingerprint,
  )
  metrics.write_summary(directory / "summary.json", summary)
  return Result(state, summary)


def circle(
  config: RunConfig,
  engine: engine_lib.Engine,
  trainer: step_lib.Trainer,
  task: Task,
  journal: journal_lib.Journal,
  state: TrainState,
  step: int,
) -> tuple[TrainState, dict[str, float]]:
  """One round: sample, judge, learn, publish. Returns the new state and the round's numbers."""
  begin = time.monotonic()
  sampled_before = engine.counters.sampled_tokens
  groups = sample(config, engine, task, journal, step)
  sampled_at = time.monotonic()
  numbers = _rollout_numbers(groups)
  num_sampled = engine.counters.sampled_tokens - sampled_before
  state, learned = learn(config, trainer, engine.tokenizer, state, groups)
  numbers |= learned
  engine.set_params(
    transformer.compute_params(state.params, config.numerics), policy_version=step + 1
  )
  end = time.monotonic()
  numbers |= {
    "rollout/seconds": sampled_at - begin,
    "rollout/tokens_per_second": num_sampled / max(sampled_at - begin, 1e-9),
    "train/seconds": end - sampled_at,
  }
  return state, numbers


def sample(
  config: RunConfig,
  engine: engine_lib.Engine,
  task: Task,
  journal: journal_lib.Journal,
  step: int,
) -> list[RolloutGroup]:
  """Samples and judges a step's groups; what the journal holds is not sampled again.

  With dynamic sampling, rounds follow each other until enough groups have unequal rewards; which
  problems a round takes depends on the counts of the rounds before, never on who finished first.
  """
  wanted = config.rollout.groups_per_step
  num_problems = task.num_problems("train")
  assert engine.tokenizer is not None

  def known(group: int, member: int) -> Rollout | None:
    entry = journal.lookup(step, group, member)
    return None if entry is None else entry.rollout

  def keep(group: int, member: int, problem: Problem, rollout: Rollout) -> None:
    journal.append(
      step, group, member, rollout, problem_id=problem.problem_id, prompt_text=problem.prompt
    )

  kept: list[RolloutGroup] = []
  rejected: list[RolloutGroup] = []
  taken = 0
  for _ in range(config.trainer.max_rounds):
    # A step's problems start at the same place however many rounds the steps before it took.
    start = step * wanted * config.trainer.max_rounds + taken
    count = wanted - len(kept)
    indices = [
      rollout_lib.problem_index(start + place, num_problems, config.seed) for place in range(count)
    ]
    groups = rollout_lib.sample_groups(
      [task.problem("train", index) for index in indices],
      first_group=taken,
      step=step,
      generate=lambda requests: completions(engine, requests),
      task=task,
      config=config.rollout,
      tokenizer=engine.tokenizer,
      seed=config.seed,
      known=known,
      on_rollout=keep,
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


def completions(
  engine: engine_lib.Engine, requests: Sequence[Request]
) -> Iterator[Completion]:
  """Yields completions as they finish."""
  for request in requests:
    engine.submit(request)
  while engine.num_unfinished:
    engine.step()
    yield from engine.poll()


def learn(
  config: RunConfig,
  trainer: step_lib.Trainer,
  tokenizer: tokenizer_lib.Tokenizer | None,
  state: TrainState,
  groups: Sequence[RolloutGroup],
) -> tuple[TrainState, dict[str, float]]:
  """Takes the optimiser steps of one batch of groups; returns the new state and its numbers."""
  del tokenizer
  rewards = np.stack([group.rewards for group in groups])
  if config.trainer.overlong_buffer:
    lengths = np.asarray([[len(r.completion.tokens) for r in g.rollouts] for g in groups])
    rewards = rewards + advantages.overlong_penalty(
      lengths, max_tokens=config.rollout.max_tokens, buffer=config.trainer.overlong_buffer
    )
  values = advantages.for_algorithm(config.loss.algorithm, rewards)
  parts = np.array_split(np.arange(len(groups)), config.trainer.num_mini_batches)
  batches = [pack(config, [groups[i] for i in part], values[part]) for part in parts]
  sampling_params = transformer.compute_params(state.params, config.numerics)

  # With the weights that sampled, over the whole batch, before any update.
  first_scores = []
  first_gradient, numbers = None, {}
  for index, batch in enumerate(batches):
    counts = losses.denominators(batch)
    gradient, summary, scores = trainer.gradient(sampling_params, batch, counts, None)
    first_scores.append(scores)
    if index == 0:
      first_gradient = gradient
      numbers |= {f"train/{name}": float(value) for name, value in summary.items()}
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
      params = transformer.compute_params(state.params, config.numerics)
      gradient, summary, _ = trainer.gradient(
        params, batch, losses.denominators(batch), first_scores[index].logprob
      )
      numbers |= {f"train/later_{name}": float(value) for name, value in summary.items()}
    state, norms = trainer.update(state, gradient)
    numbers |= {f"train/{name}": float(value) for name, value in norms.items()}
  return state, numbers


def pack(config: RunConfig, groups: Sequence[RolloutGroup], values: np.ndarray) -> Any:
  """Returns the groups as one `TrainBatch` of the run's fixed shapes."""
  return packing.pack(groups, values, **_packing_arguments(config))


def _packing_arguments(config: RunConfig) -> dict[str, Any]:
  rows = config.trainer.rows_per_micro_batch
  longest = min(config.engine.max_context, rows + 1)
  return dict(
    numerics=config.numerics,
    page_size=config.engine.page_size,
    rows_per_micro_batch=rows,
    max_sequence_tokens=longest,
  )


def _layout(config: RunConfig) -> packing.Layout:
  return packing.layout(**_packing_arguments(config))


def evaluate(config: RunConfig, engine: engine_lib.Engine, task: Task) -> dict[str, float]:
  """Returns held-out accuracy: fractions of problems, and the accuracy's standard error.

  Keys: accuracy, standard_error, well_formed (an answer could be read), ended (by itself),
  accuracy_well_formed (correct among well-formed), length (mean tokens).
  """
  assert engine.tokenizer is not None
  count = min(config.evaluation.num_problems, task.num_problems("heldout"))
  problems = {}
  requests = []
  for place in range(count):
    index = rollout_lib.problem_index(place, task.num_problems("heldout"), config.seed)
    problem = task.problem("heldout", index)
    one = rollout_lib.RolloutConfig(
      temperature=config.evaluation.temperature, max_tokens=config.rollout.max_tokens
    )
    request = rollout_lib.group_requests(
      problem, group=place, step=-1, config=one, tokenizer=engine.tokenizer, seed=config.seed
    )[0]
    problems[request.request_id] = problem
    requests.append(request)
  verdicts, lengths, ended = [], [], []
  for completion in completions(engine, requests):
    verdicts.append(task.verdict(problems[completion.request_id], completion.text))
    lengths.append(len(completion.tokens))
    ended.append(completion.finish_reason == "stop")
  correct = np.asarray([verdict.correct for verdict in verdicts], np.float64)
  formed = np.asarray([verdict.well_formed for verdict in verdicts], np.float64)
  return dict(
    accuracy=float(correct.mean()),
    standard_error=float(correct.std() / np.sqrt(count)),
    well_formed=float(formed.mean()),
    ended=float(np.mean(ended)),
    accuracy_well_formed=float(correct.sum() / max(formed.sum(), 1.0)),
    length=float(np.mean(lengths)),
  )


def describe(accuracy: dict[str, float]) -> str:
  """Returns one line for people."""
  return (
    f"{accuracy['accuracy']:.1%} correct (standard error {accuracy['standard_error']:.1%}),"
    f" {accuracy['accuracy_well_formed']:.1%} of the well-formed {accuracy['well_formed']:.1%},"
    f" {accuracy['ended']:.1%} ended by themselves, {accuracy['length']:.1f} tokens on average"
  )


def summarise(
  before: dict[str, float], after: dict[str, float], rows: Sequence[dict[str, Any]]
) -> dict[str, Any]:
  """Returns the numbers of summary.json that come from accuracies and metrics."""
  gain = after["accuracy"] - before["accuracy"]
  # The two evaluations answer the same problems; unpaired errors are the wider interval.
  error = float(np.hypot(after["standard_error"], before["standard_error"]))

  def highest(name: str) -> float:
    return max((abs(metrics.decode_number(row[name])) for row in rows), default=0.0)

  def mean(name: str) -> float:
    return float(np.mean([row[name] for row in rows])) if rows else 0.0

  return dict(
    accuracy_before=before["accuracy"],
    accuracy_after=after["accuracy"],
    gain=gain,
    gain_interval_95=[gain - 1.96 * error, gain + 1.96 * error],
    well_formed_before=before["well_formed"],
    well_formed_after=after["well_formed"],
    accuracy_well_formed_before=before["accuracy_well_formed"],
    accuracy_well_formed_after=after["accuracy_well_formed"],
    ended_before=before["ended"],
    ended_after=after["ended"],
    max_abs_logprob_gap=max(highest("contract/max_abs_logprob_gap"), highest("contract/max_abs_raw_logprob_gap")),
    kl_max=max(highest("contract/kl"), highest("contract/raw_kl")),
    tokens_per_second=mean("rollout/tokens_per_second"),
    length_mean=mean("rollout/length_mean"),
    length_p99=max((row["rollout/length_p99"] for row in rows), default=0.0),
  )


def _rollout_numbers(groups: Sequence[RolloutGroup]) -> dict[str, float]:
  rollouts = [rollout for group in groups for rollout in group.rollouts]
  lengths = np.asarray([len(rollout.completion.tokens) for rollout in rollouts])
  spread = [float(np.ptp(group.rewards)) > 0 for group in groups]
  return {
    "rollout/reward_mean": float(np.mean([r.verdict.reward for r in rollouts], dtype=np.float64)),
    "rollout/accuracy": float(np.mean([r.verdict.correct for r in rollouts])),
    "rollout/well_formed": float(np.mean([r.verdict.well_formed for r in rollouts])),
    "rollout/ended": float(np.mean([r.completion.finish_reason == "stop" for r in rollouts])),
    "rollout/informative_groups": float(np.mean(spread)),
    "rollout/length_mean": float(lengths.mean()),
    "rollout/length_p99": float(np.quantile(lengths, 0.99)),
  }


class CompileClock:
  """Adds up the seconds XLA compiles in this process, from its making on."""

  def __init__(self):
    self.seconds = 0.0
    jax.monitoring.register_event_duration_secs_listener(self._hear)

  def _hear(self, event: str, duration: float, **_: Any) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
      self.seconds += duration
