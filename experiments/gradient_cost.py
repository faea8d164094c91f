"""Times forward and gradient of the main job's micro-batch, tiled and native.

Claim: natively a gradient takes at most 4x the time of a forward pass, and the forward pass is at
least 2.5x as fast as the tiled one.
Command: bash launch/local.sh experiments.gradient_cost --workdir=runs/gradient_cost
  in a minute: --groups=1 --repetitions=1
Hardware: 2 CPU cores, about 3 minutes. Numbers: docs/results/gradient_cost.md

The micro-batch has word problems with 8 completions each, of forced lengths and random tokens, on
one device, in the shapes that the main job derives for the model. Both implementations run in one
process and take turns. A forward pass scores the batch (`Trainer.scores`) in the same way as the
gradient program, which contains it (`Trainer.gradient`). CPU seconds count every thread.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import json
import pathlib
import time
from typing import Any

from absl import app, flags
import jax
import numpy as np

from seerjax import generate
from seerjax.models import parameters
from seerjax.rollout import groups as groups_lib
from seerjax.run import command_line, config as run_config, presets, programs as programs_lib
from seerjax.tasks import loading
from seerjax.trainer import losses
from seerjax.types import (
  Completion,
  Request,
  Rollout,
  RolloutGroup,
  SamplingParams,
  TrainBatch,
  Verdict,
)

MEMBERS = 8
IMPLEMENTATIONS = ("tiled", "native")
# Targets: maximum of native gradient / forward time; minimum speed-up of native over tiled forward.
MOST_OF_FORWARD, LEAST_OF_TILED = 4.0, 2.5

Say = Callable[[str], None]


def job(model: str, implementation: str, model_shards: int = 1) -> tuple[Any, run_config.RunConfig]:
  """Returns a policy, and the main job on one instance with the sizes derived for its model."""
  policy, _ = generate.load(model)
  main = presets.main_job()
  numerics = dataclasses.replace(main.numerics, implementation=implementation)
  config = dataclasses.replace(
    main, model=model, num_instances=1, model_shards=model_shards, numerics=numerics
  )
  return policy, run_config.for_model(config, policy.model)


def answered(policy: Any, num_groups: int, longest: int) -> list[RolloutGroup]:
  """Returns groups of word problems with random completions of 16 to `longest` tokens."""
  random = np.random.default_rng(0)
  task = loading.load("word_problems", path=None)
  groups = []
  for index in range(num_groups):
    problem = task.problem("train", index)
    prompt = groups_lib.prompt_tokens(problem, policy.require_tokenizer())
    rollouts = []
    for member in range(MEMBERS):
      length = int(random.integers(16, longest + 1))
      tokens = random.integers(0, policy.require_tokenizer().vocab_size, length)
      completion = Completion(
        request_id=f"{index}/{member}",
        tokens=tuple(map(int, tokens)),
        behaviour_logprobs=np.zeros(length, np.float32),
        raw_logprobs=np.zeros(length, np.float32),
        text="",
        finish_reason="length",
        policy_version=0,
      )
      request = Request(
        request_id=completion.request_id,
        prompt=prompt,
        sampling=SamplingParams(max_tokens=longest),
        seed=member,
      )
      verdict = Verdict(reward=float(member % 2), correct=bool(member % 2), well_formed=True)
      rollouts.append(Rollout(request=request, completion=completion, verdict=verdict))
    groups.append(RolloutGroup(group_index=index, problem=problem, rollouts=tuple(rollouts)))
  return groups


def calls(
  model: str, implementation: str, num_groups: int, model_shards: int = 1
) -> tuple[TrainBatch, dict[str, Callable[[], Any]]]:
  """Returns a packed batch, and the functions to time: its "forward" and "gradient".

  Raises:
    ValueError: if the groups fill more than one micro-batch.
  """
  policy, config = job(model, implementation, model_shards)
  groups = answered(policy, num_groups, config.rollout.max_tokens // 4)
  values = np.tile(np.where(np.arange(MEMBERS) % 2, 1.0, -1.0).astype(np.float32), (num_groups, 1))
  batch = programs_lib.pack(config, groups, values)
  if len(batch.targets) > 1:
    raise ValueError(
      f"--groups: got {num_groups}, which fill {len(batch.targets)} micro-batches, expected one;"
      " lower --groups."
    )
  trainer = programs_lib.make_programs(config, policy.model).trainer
  params = parameters.compute_params(policy.params, config.numerics)
  denominators = losses.denominators(batch)
  return batch, {
    "forward": lambda: trainer.scores(params, batch),
    "gradient": lambda: jax.block_until_ready(
      trainer.gradient(params, batch, denominators, None)[0]
    ),
  }


def measure(model: str, num_groups: int, repetitions: int, say: Say) -> dict[str, Any]:
  """Returns medians of wall and CPU seconds by implementation and call, and the rows."""
  timed, num_rows = {}, 0
  for implementation in IMPLEMENTATIONS:
    batch, functions = calls(model, implementation, num_groups)
    num_rows = int(np.sum(batch.tokens.num_rows))
    timed |= {(implementation, what): function for what, function in functions.items()}
  wall: dict[tuple[str, str], list[float]] = {key: [] for key in timed}
  cpu: dict[tuple[str, str], list[float]] = {key: [] for key in timed}
  for repetition in range(repetitions + 1):
    # Alternates the order, so that other load on the machine affects all alike.
    for key in list(timed)[:: 1 if repetition % 2 else -1]:
      begin, cpu_begin = time.perf_counter(), time.process_time()
      timed[key]()
      if repetition:  # The first round compiles.
        wall[key].append(time.perf_counter() - begin)
        cpu[key].append(time.process_time() - cpu_begin)
    say(f"  round {repetition} of {repetitions}" + ("" if repetition else ", which compiles"))
  seconds: dict[str, Any] = {implementation: {} for implementation in IMPLEMENTATIONS}
  for (implementation, what), values in wall.items():
    key = (implementation, what)
    seconds[implementation][what] = dict(
      wall=float(np.median(values)), lowest=min(values), highest=max(values),
      cpu=float(np.median(cpu[key])),
    )  # fmt: skip
  return dict(rows=num_rows, seconds=seconds)


def table(results: dict[str, Any]) -> str:
  """Returns the seconds and the targets as Markdown."""
  seconds = results["seconds"]
  lines = [
    f"{results['rows']:,} rows; medians of wall seconds (range), CPU seconds.\n",
    "| implementation | forward | gradient | forward, CPU | gradient, CPU | gradient / forward |",
    "|---|---|---|---|---|---|",
  ]
  for name, row in seconds.items():
    cells = [
      f"{part['wall']:.3f} ({part['lowest']:.3f} to {part['highest']:.3f})"
      for part in (row["forward"], row["gradient"])
    ]
    cells += [f"{row['forward']['cpu']:.3f}", f"{row['gradient']['cpu']:.3f}"]
    ratio = row["gradient"]["wall"] / row["forward"]["wall"]
    lines.append(f"| {name} | " + " | ".join(cells) + f" | {ratio:.1f} |")
  native, tiled = seconds["native"], seconds["tiled"]
  of_forward = native["gradient"]["wall"] / native["forward"]["wall"]
  of_tiled = tiled["forward"]["wall"] / native["forward"]["wall"]
  lines += [
    "\n| aim | measured | holds |",
    "|---|---|---|",
    f"| native's gradient at most {MOST_OF_FORWARD:g} of its forwards | {of_forward:.2f} |"
    f" {'yes' if of_forward <= MOST_OF_FORWARD else '**no**'} |",
    f"| native's forward at least {LEAST_OF_TILED:g} times as fast as tiled's | {of_tiled:.2f} |"
    f" {'yes' if of_tiled >= LEAST_OF_TILED else '**no**'} |",
  ]
  return "\n".join(lines) + "\n"


def run(
  model: str, num_groups: int, repetitions: int, directory: pathlib.Path, say: Say
) -> dict[str, Any]:
  """Measures, prints, and writes results.json and table.md."""
  results = measure(model, num_groups, repetitions, say)
  directory.mkdir(parents=True, exist_ok=True)
  record = dict(model=model, groups=num_groups, repetitions=repetitions) | results
  record |= dict(device=jax.devices()[0].device_kind, jax_version=jax.__version__)
  (directory / "results.json").write_text(json.dumps(record, indent=1) + "\n")
  (directory / "table.md").write_text(table(results))
  say(f"\n{table(results)}\nwritten to {directory}")
  return results


def main(argv: list[str]) -> None:
  args = flags.FLAGS
  with command_line.refusals():
    command_line.check_arguments(argv)
    run(
      args.model,
      args.groups,
      args.repetitions,
      pathlib.Path(args.workdir),
      lambda line: print(line, flush=True),
    )


if __name__ == "__main__":
  flags.DEFINE_string(
    "model", "nano", "Model: nano, a Hugging Face directory, a GGUF file, or a Hub id."
  )
  flags.DEFINE_integer(
    "groups", 4, f"Number of groups of {MEMBERS} responses each, in one micro-batch.", 1
  )
  flags.DEFINE_integer("repetitions", 5, "Number of timed rounds, after one warm-up round.", 1)
  flags.DEFINE_string("workdir", "runs/gradient_cost", "Output directory for numbers and table.")
  app.run(main)
