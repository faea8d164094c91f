"""Trains nano with experts natively, tiled and on plain XLA, and counts the routes that differ.

Claim: without any record of routes, sampler and trainer choose the same experts for every token and
layer, natively and tiled, so that KL and gap are exactly 0.0 in every step and the held-out
accuracy rises as nano's does. On plain XLA (the control) routes differ and KL is not 0.
Command: bash launch/local.sh experiments.learning.moe_routes --workdir=runs/moe_routes
  one backend:           --backends=native
  in bfloat16:           --compute_dtype=bfloat16 --workdir=runs/moe_routes_bf16
  continue after a kill: the same command; an unfinished run continues from its last checkpoint
Hardware: 2 CPU cores, 10 to 20 minutes a run. Numbers: docs/results/moe.md

After each step, fixed answers of the initial model pass through the weights twice: token by token
through pages of keys and values, as an engine decodes, and whole, as the trainer scores them. A
route is the set of experts of one token in one layer.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

from absl import flags, logging
import jax
import numpy as np

from experiments import measure as measure_lib
from seerjax import metrics, numerics as numerics_lib, parallel, rl
from seerjax.engine import engine as engine_lib
from seerjax.models import parameters
from seerjax.models.decoder import decide
from seerjax.models.loading import Model
from seerjax.rollout import groups
from seerjax.run import policy as policy_lib, presets as run_presets, routes as routes_lib
from seerjax.run.config import RunConfig
from seerjax.run.policy import Policy
from seerjax.tasks import loading
from seerjax.types import Request, SamplingParams, Task

BACKENDS = ("native", "tiled", "untiled")
NUM_ANSWERS, MAX_TOKENS = 64, 128
ROUTES = "routes.json"


def config_of(model: str, backend: Any, compute_dtype: Any, num_steps: int) -> RunConfig:
  """Returns the main job with this model on this backend."""
  base = run_presets.main_job()
  numerics = dataclasses.replace(base.numerics, backend=backend, compute_dtype=compute_dtype)
  return dataclasses.replace(base, model=model, numerics=numerics, num_steps=num_steps)


def initial_answers(config: RunConfig, policy: Policy, task: Task) -> routes_lib.Answers:
  """Returns answers to training problems, sampled from the initial weights."""
  numerics = config.numerics
  decoder = decide(policy.model, numerics)
  params = parameters.compute_params(policy.params, decoder.numerics)
  tokenizer = policy.require_tokenizer()
  engine = engine_lib.Engine(
    Model(policy.model, params, decoder.numerics, tokenizer),
    config=dataclasses.replace(config.engine, max_num_seqs=NUM_ANSWERS),
    key=numerics_lib.key(config.seed),
  )
  prompts = [
    groups.prompt_tokens(task.problem("train", index), tokenizer) for index in range(NUM_ANSWERS)
  ]
  sampling = SamplingParams(max_tokens=MAX_TOKENS, stop_token_ids=tokenizer.eos_ids)
  completions = engine.generate(
    [
      Request(request_id=str(index), prompt=prompt, sampling=sampling, seed=index)
      for index, prompt in enumerate(prompts)
    ]
  )
  whole = [(*prompt, *one.tokens) for prompt, one in zip(prompts, completions, strict=True)]
  longest = max(map(len, whole))
  tokens = np.asarray([[*one, *[0] * (longest - len(one))] for one in whole], np.int32)
  return routes_lib.Answers(tokens, np.asarray([len(one) for one in whole]))


def run_one(config: RunConfig, directory: pathlib.Path) -> None:
  """Trains on one backend, and writes the routes that differ at each step to `ROUTES`."""
  model, backend = config.model, config.numerics.backend
  policy = policy_lib.load_policy(model, config.numerics)
  task = loading.load(config.task, path=None)
  decoder = decide(policy.model, config.numerics)
  answers = initial_answers(config, policy, task)
  path = directory / ROUTES
  found: dict[str, routes_lib.Compared] = {}
  if path.is_file():
    found = {
      step: routes_lib.Compared(*pair) for step, pair in json.loads(path.read_text()).items()
    }

  def on_step(step: int, state: Any, values: Any) -> None:
    params = parameters.compute_params(jax.device_get(state.params), decoder.numerics)
    found[str(step)] = one = routes_lib.compare(params, answers, decoder)
    path.write_text(json.dumps(found))
    measure_lib.say(f"  {backend}, step {step}: {one.num_differing} of {one.num_routes} differ")

  has_begun = (directory / "config.json").is_file()
  rl.train(config, policy, task, directory, resume=has_begun, log=measure_lib.say, on_step=on_step)


def row_of(backend: str, directory: pathlib.Path) -> list[object]:
  """Returns a finished run's row of the table."""
  summary = json.loads((directory / "summary.json").read_text())
  lines = [line for line in metrics.read(directory / "metrics.jsonl") if "rollout_train/kl" in line]
  routes = json.loads((directory / ROUTES).read_text()).values()
  largest = lambda name: max(
    abs(float(metrics.decode_number(line[f"rollout_train/{name}"]))) for line in lines
  )
  low, high = summary["gain_interval_95"]
  return [
    backend,
    len(lines),
    f"{100 * summary['accuracy_before']:.1f} %",
    f"{100 * summary['accuracy_after']:.1f} %",
    f"{100 * summary['gain']:+.1f} ({100 * low:.1f} to {100 * high:.1f})",
    f"{sum(differing for _, differing in routes):,} of {sum(count for count, _ in routes):,}",
    f"{largest('kl'):.1e}" if largest("kl") else "0.0",
    f"{largest('max_abs_logprob_gap'):.1e}" if largest("max_abs_logprob_gap") else "0.0",
    f"{float(lines[-1]['train/dead_experts']):g}",
  ]


HEAD = (
  "backend", "steps", "accuracy before", "after", "gain, points (95 %)", "routes that differ",
  "largest KL", "largest gap", "dead experts at the end",
)  # fmt: skip


def draw(directories: dict[str, pathlib.Path], path: pathlib.Path) -> None:
  """Draws reward, gap and routes that differ of each run by step."""
  from matplotlib import figure

  sheet = figure.Figure(figsize=(9, 2.8), layout="constrained")
  axes = sheet.subplots(1, 3)
  for backend, directory in directories.items():
    lines = [
      line for line in metrics.read(directory / "metrics.jsonl") if "rollout_train/kl" in line
    ]
    steps = [line["step"] for line in lines]
    for place, name in enumerate(("rollout/reward_mean", "rollout_train/max_abs_logprob_gap")):
      axes[place].plot(
        steps, [float(metrics.decode_number(line[name])) for line in lines], label=backend
      )
    routes = json.loads((directory / ROUTES).read_text())
    axes[2].plot(
      [int(step) for step in routes], [100 * b / a for a, b in routes.values()], label=backend
    )
  titles = ("mean reward", "largest gap of a log-probability", "routes that differ, %")
  for one, title in zip(axes, titles, strict=True):
    one.set(title=title, xlabel="step")
    one.legend(fontsize=8)
  sheet.savefig(path, dpi=90)


def main(args: flags.FlagValues) -> None:
  logging.set_verbosity(logging.WARNING)
  parallel.start(parallel.SliceConfig(), num_devices=run_presets.main_job().data_parallel_size)
  workdir = pathlib.Path(args.workdir)
  directories = {backend: workdir / backend for backend in args.backends}
  for backend, directory in directories.items():
    if not (directory / "summary.json").is_file():
      directory.mkdir(parents=True, exist_ok=True)
      run_one(config_of(args.model, backend, args.compute_dtype, args.steps), directory)
  rows = [row_of(backend, directory) for backend, directory in directories.items()]
  measure_lib.say(measure_lib.table(HEAD, rows))
  draw(directories, workdir / "moe_routes.png")


if __name__ == "__main__":
  flags.DEFINE_string("workdir", "runs/moe_routes", "Output directory of the runs.")
  flags.DEFINE_string("model", "nano-moe", "Name or directory of a model with experts.")
  flags.DEFINE_multi_enum("backends", BACKENDS, BACKENDS, "Backends to train on.")
  flags.DEFINE_enum("compute_dtype", "float32", numerics_lib.DTYPES, "Compute dtype of the runs.")
  flags.DEFINE_integer("steps", 20, "Steps of a run.", lower_bound=1)
  measure_lib.command(main)
