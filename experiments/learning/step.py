"""Times the phases of a GRPO step on real weights, compared with TRL's GRPOTrainer.

Claim: our step takes at most 1 / 1.5 of the seconds of TRL's at equal lengths, and the
log-probabilities of sampler and trainer are equal, while TRL's are not.
Command: bash launch/local.sh experiments.learning.step --model=models/smollm2-135m-instruct \
           --python=.venv-3.11/bin/python   (`bash launch/peers.sh` makes it)
  ours alone:             --sides=ours
  continue after a kill:  the same command; a finished side is not run again
Needs: reasoning-gym
Hardware: 2 CPU cores, 8 GiB, nothing else running. Numbers: none yet; the claim is a target.

Both sides have the same model, problems, reward, batch, loss (DAPO's) and Adam. They sample with
different noise, so lengths are equal only on average; seconds are therefore reported per token too.
The first step, which compiles on our side, is left out on both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import json
import pathlib
import re
import resource
from typing import Any, NamedTuple

from absl import flags, logging
import numpy as np

from experiments import cells as cells_lib, measure as measure_lib, peer_process
from experiments.learning import real as real_learning, trl_peer
from seerjax import metrics, rl
from seerjax.tasks import jsonl, loading

SIDES = ("ours", "trl")
GENERATOR = "basic_arithmetic"
NUM_PROBLEMS = 1000
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


class Cell(NamedTuple):
  """A side and the index of its repetition."""

  side: str
  round: int


def reward(prompt: str, text: str, row: Mapping[str, Any]) -> float:
  """Returns 1.0 if the last number of a text is the row's answer, else 0.0, as in `trl_peer`."""
  del prompt
  found = NUMBER.findall(text)
  return float(bool(found) and float(found[-1].replace(",", "")) == float(row["answer"]))


def write_problems(path: pathlib.Path) -> None:
  """Writes the problems of both sides as JSON lines, unless the file exists."""
  if path.is_file():
    return
  task = real_learning.load_task(GENERATOR)
  drawn = [task.problem("train", index) for index in range(NUM_PROBLEMS)]
  rows = {one.prompt: one.answer for one in drawn}
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(
    "".join(
      json.dumps(dict(prompt=prompt, answer=answer)) + "\n" for prompt, answer in rows.items()
    )
  )


def ours(
  settings: real_learning.Settings, problems: pathlib.Path, place: pathlib.Path
) -> dict[str, Any]:
  """Runs our steps; returns their numbers and the peak memory of this process."""
  config = real_learning.config_of(settings, real_learning.Cell(GENERATOR, "full", 0))
  config = dataclasses.replace(
    config,
    task="sums",
    task_options={},
    checkpoint_every=settings.num_steps,
    trainer=dataclasses.replace(config.trainer, remat="none"),
    evaluation=dataclasses.replace(config.evaluation, num_problems=1),
  )
  task = loading.load("sums", path=problems, reward=reward)
  rl.train(config, settings.model, task, place, log=lambda line: print(line, flush=True))
  steps = []
  for row in metrics.read(place / metrics.FILE_NAME):
    if "rollout_train/kl" in row:
      number = lambda name, row=row: float(metrics.decode_number(row[name]))
      seconds = number("rollout/seconds")
      steps.append(
        dict(
          generate=seconds,
          learn=number("train/seconds"),
          seconds=number("step/seconds"),
          tokens=seconds * number("rollout/tokens_per_second"),
          max_gap=number("rollout_train/max_abs_logprob_gap"),
        )
      )
  return dict(steps=steps, peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def of_trl(settings: real_learning.Settings, problems: pathlib.Path, python: str) -> dict[str, Any]:
  """Runs TRL's steps; returns their numbers.

  Raises:
    ValueError: if `python` is empty.
    RuntimeError: with the end of TRL's output, if it fails.
  """
  if not python:
    raise ValueError(
      "--python: got none with --sides=trl, expected a Python that has TRL; see launch/peers.sh."
    )
  rate, _ = real_learning.ARMS["full"]
  request = dataclasses.asdict(settings) | dict(
    dtype=settings.compute_dtype, learning_rate=rate, seed=0, rows=jsonl.read_rows(problems, ())
  )
  return peer_process.answer("trl", python, trl_peer, request)


def measure(
  settings: real_learning.Settings,
  problems: pathlib.Path,
  python: str,
  cell: Cell,
  finished: Any,
  programs: Any,
) -> dict[str, Any]:
  """Runs a side; returns its record."""
  del finished, programs
  place = problems.parent / f"ours-{cell.round}"
  found = (
    ours(settings, problems, place) if cell.side == "ours" else of_trl(settings, problems, python)
  )
  return cell._asdict() | dict(settings=dataclasses.asdict(settings), **found)


def table(records: Sequence[dict[str, Any]]) -> str:
  """Returns medians by side, over all steps but the first of each record, as Markdown."""
  rows = []
  medians = {}
  for side in SIDES:
    mine = [record for record in records if record["side"] == side]
    steps = [step for record in mine for step in record["steps"][1:]]
    if not steps:
      continue
    median = lambda name, steps=steps: float(np.median([step[name] for step in steps]))
    whole = [step["seconds"] - step.get("recording", 0.0) for step in steps]
    medians[side] = float(np.median(whole)) / median("tokens")
    rows.append((
      side, len(steps), measure_lib.spread(whole, ".1f"), f"{median('generate'):.1f}",
      f"{median('learn'):.1f}", f"{median('tokens'):.0f}", f"{1000 * medians[side]:.1f}",
      f"{max(step['max_gap'] for step in steps):.3g}",
      f"{max(record['peak_bytes'] for record in mine) / 2**30:.2f}",
    ))  # fmt: skip
  names = (
    "side", "steps", "seconds per step, median (range)", "sampling", "learning", "tokens per step",
    "ms per sampled token", "largest gap of a log-probability", "peak GiB",
  )  # fmt: skip
  text = measure_lib.table(names, rows) + "\n"
  if len(medians) == len(SIDES):
    ratio = medians["trl"] / medians["ours"]
    text += f"\nSeconds by sampled token, TRL / ours: {ratio:.2f}\n"
  return text


def main(args: flags.FlagValues) -> None:
  logging.set_verbosity(logging.WARNING)
  unknown = [side for side in args.sides if side not in SIDES]
  if unknown or not args.sides:
    raise ValueError(
      f"--sides: got {', '.join(unknown) or 'none'}, expected some of {', '.join(SIDES)}."
    )
  directory = pathlib.Path(args.workdir)
  settings = real_learning.Settings(
    model=args.model, num_steps=args.num_steps, max_tokens=args.max_tokens,
    compute_dtype=args.dtype, every=0,
  )  # fmt: skip
  problems = directory / "problems.jsonl"
  write_problems(problems)
  wanted = [Cell(side, place) for place in range(args.rounds) for side in args.sides]
  run = functools.partial(measure, settings, problems, args.python)
  kept = dataclasses.asdict(settings)
  try:
    cells_lib.completed(wanted, directory, kept, run)
  finally:
    text = table(cells_lib.read(directory / cells_lib.FILE_NAME, kept))
    (directory / "table.md").write_text(text)
  print(text)


if __name__ == "__main__":
  usual = real_learning.Settings(model="models/smollm2-135m-instruct", num_steps=10)
  flags.DEFINE_string("model", usual.model, "Hugging Face directory of the model.")
  flags.DEFINE_list("sides", list(SIDES), "Sides to measure, from ours, trl.")
  flags.DEFINE_integer("rounds", 1, "Number of rounds per side.", 1)
  flags.DEFINE_integer("num_steps", usual.num_steps, "Number of steps per run.", 2)
  flags.DEFINE_integer("max_tokens", usual.max_tokens, "Maximum response length in tokens.", 1)
  flags.DEFINE_string("dtype", usual.compute_dtype, "Compute data type, float32 or bfloat16.")
  flags.DEFINE_string("python", "", "Python that has TRL.")
  flags.DEFINE_string("workdir", "runs/real_step", "Output directory for cells and the table.")
  measure_lib.command(main)
