"""Trains a pretrained model with GRPO on tasks of reasoning-gym.

Claim: in 40 steps of 8 x 8 completions SmolLM2-135M-Instruct learns sums of two numbers, with all
weights and with adapters: its held-out accuracy rises above the initial confidence interval. KL and
gap between engine and trainer are exactly 0.0 in every step.
Command: bash launch/local.sh experiments.learning.real --model=models/smollm2-135m-instruct
  one arm, one seed:     --arms=full --seeds=0
  the second task:       --generator=products --arms=full --seeds=0
  continue after a kill: the same command; an unfinished cell continues from its last checkpoint
  the table alone:       --nosteps
Needs: reasoning-gym
Hardware: 2 CPU cores, 7 GiB; 25 to 40 minutes a run. Numbers: docs/results/real/learning.md

A cell is one run: a generator, an arm and a seed, with its own directory in --workdir.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import functools
import pathlib
from typing import Any, NamedTuple

from absl import flags, logging
import numpy as np

from experiments import cells as cells_lib, measure as measure_lib
from seerjax import checkpoint, metrics, numerics as numerics_lib, rl
from seerjax.commands import train
from seerjax.engine import engine as engine_lib
from seerjax.rollout import groups
from seerjax.run import policy as policy_lib, programs as programs_lib
from seerjax.run.config import RunConfig, TrainerConfig
from seerjax.run.evaluation import EvaluationConfig
from seerjax.tasks import loading
from seerjax.trainer import losses, optimizer as optimizer_lib
from seerjax.types import Task

# By arm: learning rate, and rank of the adapters (0 trains all weights).
ARMS = {"full": (3e-6, 0), "lora": (2e-4, 8)}
# Options of the generators, chosen so that the model's initial accuracy is between 10 and 60 %.
GENERATORS = {
  "basic_arithmetic": dict(
    min_terms=2, max_terms=2, min_digits=1, max_digits=1, operators=("+", "-"),
    allow_parentheses=False, allow_negation=False,
  ),
  "products": dict(min_terms=2, max_terms=2, min_digits=1, max_digits=1),
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """Settings that all cells share.

  Attributes:
    model: a Hugging Face directory.
    num_steps: steps of a run.
    prompts_per_step: problems per step.
    group_size: completions per problem.
    max_tokens: maximum tokens of a completion.
    heldout: problems of an evaluation, each answered once.
    every: steps between evaluations.
    temperature: of rollouts and evaluations. At 1 the model begins at 8 %, at 0.6 at 25 %.
    compute_dtype: compute dtype of engine and trainer.
  """

  model: str
  num_steps: int = 40
  prompts_per_step: int = 8
  group_size: int = 8
  max_tokens: int = 24
  heldout: int = 200
  every: int = 20
  temperature: float = 0.6
  compute_dtype: str = "float32"


class Cell(NamedTuple):
  """One run: generator, arm and seed."""

  generator: str
  arm: str
  seed: int


def load_task(generator: str) -> Task:
  """Returns the task of a generator of `GENERATORS`."""
  return loading.load(f"reasoning_gym.{generator}", options=GENERATORS[generator])


def config_of(settings: Settings, cell: Cell) -> RunConfig:
  """Returns the run configuration of a cell."""
  rate, rank = ARMS[cell.arm]
  return RunConfig(
    model=settings.model,
    task=f"reasoning_gym.{cell.generator}",
    task_options=GENERATORS[cell.generator],
    seed=cell.seed,
    num_steps=settings.num_steps,
    checkpoint_every=5,
    lora_rank=rank,
    numerics=numerics_lib.NumericsConfig(compute_dtype=settings.compute_dtype),
    engine=engine_lib.EngineConfig(
      max_model_len=128, max_num_seqs=64, batch_size_buckets=(64, 256)
    ),
    rollout=groups.RolloutConfig(
      prompts_per_step=settings.prompts_per_step,
      group_size=settings.group_size,
      max_tokens=settings.max_tokens,
      temperature=settings.temperature,
    ),
    trainer=TrainerConfig(remat="layer"),
    loss=losses.dapo(),
    optimizer=optimizer_lib.OptimizerConfig(learning_rate=rate, warmup_steps=2),
    evaluation=EvaluationConfig(
      num_problems=settings.heldout, temperature=settings.temperature, every=settings.every
    ),
  )


def measure(
  settings: Settings,
  directory: pathlib.Path,
  cell: Cell,
  finished: Any,
  programs: dict[Any, Any],
) -> dict[str, Any]:
  """Runs a cell, from its last checkpoint if there is one; returns its record."""
  del finished
  config, place = config_of(settings, cell), directory / "-".join(map(str, cell))
  say = functools.partial(print, flush=True)
  say(f"{cell.generator}, {cell.arm}, seed {cell.seed}: {place}")
  policy = policy_lib.load_policy(config.model, config.numerics)
  if cell.arm not in programs:
    programs[cell.arm] = programs_lib.make_programs(config.shared, policy.model)
    train.check_model(policy, programs[cell.arm], say=say)
  rl.train(
    config, policy, load_task(cell.generator), place, log=say, programs=programs[cell.arm],
    resume=checkpoint.latest_step(place / "checkpoints") is not None,
  )  # fmt: skip
  return cell._asdict() | dict(settings=dataclasses.asdict(settings), **found_in(place))


def found_in(place: pathlib.Path) -> dict[str, Any]:
  """Returns the results in a run's metrics.jsonl, whether or not the run has ended."""
  path = place / metrics.FILE_NAME
  rows = metrics.read(path) if path.is_file() else []
  number = lambda row, name: float(metrics.decode_number(row[name]))
  steps = [row for row in rows if "rollout_train/kl" in row]
  asked = [row for row in rows if "heldout/accuracy" in row]
  return dict(
    steps=[int(row["step"]) for row in steps],
    rewards=[number(row, "rollout/reward_mean") for row in steps],
    kl=[number(row, "rollout_train/kl") for row in steps],
    gap=[number(row, "rollout_train/max_abs_logprob_gap") for row in steps],
    heldout=[(int(row["step"]), number(row, "heldout/accuracy")) for row in asked],
  )


def table(records: Sequence[dict[str, Any]]) -> str:
  """Returns a Markdown table of runs, including unfinished ones."""
  rows = []
  for record in records:
    count = record["settings"]["heldout"]

    def share(place: int, record=record, count=count) -> str:
      step, value = record["heldout"][place]
      _, low, high = measure_lib.share(value, count)
      return f"{value:.1%} ({low:.1%} to {high:.1%}), step {step}"

    rewards = record["rewards"]
    rows.append((
      record["generator"], record["arm"], record["seed"], len(record["steps"]), share(0), share(-1),
      f"{np.mean(rewards[:5]):.2f}, {np.mean(rewards[-5:]):.2f}", max(record["kl"]),
      max(record["gap"]),
    ))  # fmt: skip
  names = (
    "task", "what learns", "seed", "steps", "held-out before", "after",
    "mean reward of the first and last 5 steps", "largest KL", "largest gap",
  )  # fmt: skip
  return measure_lib.table(names, rows) + "\n"


def picture(records: Sequence[dict[str, Any]], path: pathlib.Path) -> None:
  """Draws rewards by step and held-out accuracy with intervals, one panel per arm."""
  import matplotlib

  matplotlib.use("Agg")
  from matplotlib import pyplot

  kinds = list(dict.fromkeys((record["generator"], record["arm"]) for record in records))
  figure, row = pyplot.subplots(
    1, len(kinds), figsize=(5 * len(kinds), 3.4), squeeze=False, layout="constrained", sharey=True
  )
  for axes, (generator, arm) in zip(row[0], kinds, strict=True):
    wanted = {"generator": generator, "arm": arm}
    for place, record in enumerate(one for one in records if wanted.items() <= one.items()):
      colour = f"C{place}"
      axes.plot(record["steps"], record["rewards"], color=colour, alpha=0.35)
      steps, values = zip(*record["heldout"], strict=True)
      bounds = [measure_lib.share(value, record["settings"]["heldout"]) for value in values]
      errors = [
        [value - low for value, low, _ in bounds],
        [high - value for value, _, high in bounds],
      ]
      axes.errorbar(
        steps, values, yerr=errors, color=colour, marker="o", capsize=3,
        label=f"seed {record['seed']}, held out",
      )  # fmt: skip
    axes.set_title(f"{generator}, {arm}: reward of a step (pale), held-out accuracy", fontsize=9)
    axes.set_xlabel("step")
    axes.set_ylim(0, 1)
    axes.legend(fontsize=7)
  figure.savefig(path, dpi=80)
  pyplot.close(figure)


def records_of(settings: Settings, directory: pathlib.Path) -> list[dict[str, Any]]:
  """Returns the records so far of all runs in a directory that were evaluated at least once."""
  found = []
  for generator in GENERATORS:
    for arm in ARMS:
      for place in sorted(directory.glob(f"{generator}-{arm}-*")):
        one = found_in(place)
        if one["heldout"] and one["steps"]:
          cell = Cell(generator, arm, int(place.name.rpartition("-")[2]))
          found.append(cell._asdict() | dict(settings=dataclasses.asdict(settings), **one))
  return found


def write(settings: Settings, directory: pathlib.Path) -> str:
  """Writes table.md and learning.png of all runs so far; returns the table."""
  records = records_of(settings, directory)
  if not records:
    return "no step is finished\n"
  text = table(records)
  (directory / "table.md").write_text(text)
  picture(records, directory / "learning.png")
  return text


def main(args: flags.FlagValues) -> None:
  logging.set_verbosity(logging.WARNING)
  unknown = [arm for arm in args.arms if arm not in ARMS]
  if unknown or not args.arms:
    raise ValueError(
      f"--arms: got {', '.join(unknown) or 'none'}, expected some of {', '.join(ARMS)};"
      " --arms=full runs one."
    )
  if args.generator not in GENERATORS:
    raise ValueError(
      f"--generator: got {args.generator!r}, expected one of {', '.join(GENERATORS)}."
    )
  directory = pathlib.Path(args.workdir)
  settings = Settings(
    model=args.model, num_steps=args.num_steps, max_tokens=args.max_tokens,
    heldout=args.heldout, every=args.every, compute_dtype=args.dtype,
  )  # fmt: skip
  if args.steps:
    wanted = [Cell(args.generator, arm, int(seed)) for seed in args.seeds for arm in args.arms]
    run = functools.partial(measure, settings, directory)
    try:
      cells_lib.completed(wanted, directory, dataclasses.asdict(settings), run)
    finally:
      write(settings, directory)
  print(write(settings, directory))


if __name__ == "__main__":
  usual = Settings(model="models/smollm2-135m-instruct")
  flags.DEFINE_string("model", usual.model, "Model: a Hugging Face directory, or a Hub id.")
  flags.DEFINE_string(
    "generator", next(iter(GENERATORS)), f"Problem generator, one of {', '.join(GENERATORS)}."
  )
  flags.DEFINE_list("arms", list(ARMS), "Arms to run, from full, lora.")
  flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds of the runs.")
  flags.DEFINE_integer("num_steps", usual.num_steps, "Number of steps per run.", 1)
  flags.DEFINE_integer("max_tokens", usual.max_tokens, "Maximum response length in tokens.", 1)
  flags.DEFINE_integer("heldout", usual.heldout, "Number of problems per evaluation.", 1)
  flags.DEFINE_integer("every", usual.every, "Number of steps between evaluations.", 1)
  flags.DEFINE_string("dtype", usual.compute_dtype, "Compute data type, float32 or bfloat16.")
  flags.DEFINE_bool(
    "steps", True, "Whether to run; otherwise only writes the table from existing results."
  )
  flags.DEFINE_string(
    "workdir", "runs/real_learning", "Output directory for cells, table and curves."
  )
  measure_lib.command(main)
