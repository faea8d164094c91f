"""A run of a one-layer model in seconds: its config, task and programs, made once a process."""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import functools
import json
import os
import pathlib
import signal
import tempfile
from typing import Any

import jax
import numpy as np
import pytest
import tiny_model

from seerjax import checkpoint, metrics, parallel, rl
from seerjax.engine import engine as engine_lib, runner as runner_lib
from seerjax.models import parameters, tokenizer as tokenizer_lib
from seerjax.models.decoder import decide
from seerjax.models.loading import Model
from seerjax.rollout import divided, groups as groups_lib, journal as journal_lib, policies
from seerjax.run import policy as policy_lib, programs as programs_lib, stops
from seerjax.run.config import RunConfig, TrainerConfig
from seerjax.run.evaluation import EvaluationConfig
from seerjax.run.policy import Policy
from seerjax.run.programs import Programs
from seerjax.trainer import losses, optimizer as optimizer_lib
from seerjax.types import Problem, Verdict

NANO = pathlib.Path(tokenizer_lib.__file__).parent / "nano"
# A model with nano's vocabulary.
MODEL = tiny_model.SMALLEST.changed(vocab_size=512, num_layers=1)
# The resolved form of the numerics in CONFIG.
NUMERICS = decide(MODEL, tiny_model.ONE_SLAB).numerics
CONFIG = RunConfig(
  model="tiny",
  task="vowels",
  num_steps=4,
  checkpoint_every=2,
  numerics=tiny_model.ONE_SLAB,
  engine=engine_lib.EngineConfig(
    page_size=8, num_pages=64, max_num_seqs=4, max_model_len=48, batch_size_buckets=(16,)
  ),
  rollout=groups_lib.RolloutConfig(prompts_per_step=2, group_size=2, max_tokens=6),
  # Chunks end within responses.
  scheduler=policies.LongestGroupFirst(chunk_tokens=4),
  trainer=TrainerConfig(rows_per_micro_batch=64, sequences_per_micro_batch=4),
  loss=losses.dapo(),
  optimizer=optimizer_lib.OptimizerConfig(learning_rate=0.01),
  evaluation=EvaluationConfig(num_problems=4),
)
PER_STEP = 4  # Rollouts of a step, and problems of an evaluation.
SHOWN = 2  # Verdicts of the example problem at a run's end, before and after.
# Metrics that depend on the clock.
# Metrics that depend on the schedule: an interrupted step does part of its work before the resume.
TIMES = (
  "rollout/seconds", "rollout/tokens_per_second", "train/seconds", "step/seconds",
  "schedule/steps", "schedule/tail_steps", "schedule/chunks", "schedule/migrations",
  "schedule/spills", "schedule/drafted_tokens", "schedule/accepted_tokens",
)  # fmt: skip


class Vowels:
  """A task that rewards vowels. Counts its verdicts, and can call `stop` at one of them."""

  name = "vowels"

  def __init__(self, stop_at: int = -1, stop: Callable[[], Any] = lambda: None):
    self.num_verdicts = 0
    self.verdicts: list[Verdict] = []
    self.stop_at = stop_at
    self.stop = stop

  def num_problems(self, split: str) -> int:
    return {"train": 7, "heldout": 5}[split]

  def problem(self, split: str, index: int) -> Problem:
    return Problem(problem_id=f"{split}-{index}", prompt=f"{index}?")

  def reward(self, text: str) -> float:
    return sum(letter in "aeiou" for letter in text) / 8

  def verdict(self, problem: Problem, text: str) -> Verdict:
    self.num_verdicts += 1
    if self.num_verdicts == self.stop_at:
      return self.stop()
    reward = self.reward(text)
    verdict = Verdict(reward=reward, correct=reward > 0.2, well_formed=len(text) % 2 == 0)
    self.verdicts.append(verdict)
    return verdict


def interrupt():
  raise KeyboardInterrupt


def kill():
  os.kill(os.getpid(), signal.SIGKILL)


@functools.cache
def policy() -> Policy:
  master = parameters.init(jax.random.key(0), MODEL, NUMERICS)
  master = jax.tree.map(lambda leaf: leaf * 4 if leaf.ndim > 1 else leaf, master)
  return Policy(MODEL, master, tokenizer_lib.load(NANO))


@functools.cache
def runner(data_parallel_size, numerics, has_adapters):
  del has_adapters  # Other weights, another program.
  return runner_lib.Runner(
    decide(MODEL, numerics), parallel.make_mesh(data_parallel_size=data_parallel_size), 1
  )


@functools.cache
def programs(config: RunConfig) -> Programs:
  made = programs_lib.make_programs(config.shared, MODEL)
  if config.off_policy.max_policy_lag:
    return made  # It has its own devices.
  shared = runner(config.data_parallel_size, config.numerics, config.lora_rank > 0)
  return dataclasses.replace(made, runner=shared)


def programs_of(config: RunConfig) -> Programs:
  """Returns programs compiled once for all configs that compile to the same ones."""
  return programs(
    dataclasses.replace(
      CONFIG,
      **{
        name: vars(config)[name]
        for name in (
          "data_parallel_size",
          "off_policy",
          "lora_rank",
          "numerics",
          "loss",
          "optimizer",
        )
      },
    )
  )


def train(
  directory,
  task=None,
  *,
  config=CONFIG,
  resume=False,
  accept_new_numerics=False,
  accept_new_data=False,
  say=lambda line: None,
  **changes,
):
  config = dataclasses.replace(config, **changes)
  return rl.train(
    config,
    policy(),
    Vowels() if task is None else task,
    pathlib.Path(directory),
    resume=resume,
    accept_new_numerics=accept_new_numerics,
    accept_new_data=accept_new_data,
    log=say,
    programs=programs_of(config),
  )


def rows_of(directory, *, without=TIMES):
  rows = metrics.read(pathlib.Path(directory) / "metrics.jsonl")
  return [{name: row[name] for name in row if name not in without} for row in rows]


def records_of(directory):
  lines = (pathlib.Path(directory) / journal_lib.FILE_NAME).read_text().splitlines()
  return [json.loads(line)["record"] for line in lines]


def assert_equal_bits(found, expected):
  jax.tree.map(np.testing.assert_array_equal, found, expected)


def run_until_killed(directory: str) -> None:
  """Runs in its own process; dies in the third step, with one of its rollouts judged."""
  train(directory, Vowels(stop_at=3 * PER_STEP + 2, stop=kill), checkpoint_every=10)


@functools.cache
def engine():
  return engine_lib.Engine(
    Model(
      MODEL,
      parameters.compute_params(policy().params, NUMERICS),
      NUMERICS,
      policy().require_tokenizer(),
    ),
    config=CONFIG.engine,
    key=jax.random.key(0),
    runner=runner(1, NUMERICS, False),
  )


def groups_of(*, count=2, is_shuffled=False):
  task = Vowels()

  def generate(requests):
    finished = list(divided.DividedRollout(engine(), CONFIG.scheduler).run(requests))
    return finished[::-2] + finished[-2::-2] if is_shuffled else finished

  return groups_lib.sample_groups(
    [task.problem("train", index) for index in range(count)],
    first_group=0,
    step=0,
    generate=generate,
    task=task,
    config=CONFIG.rollout,
    tokenizer=policy().require_tokenizer(),
    seed=0,
    known=lambda group, member, problem: None,
    on_rollout=lambda *_: None,
  )


def first_state(config=CONFIG):
  return programs_of(config).trainer.init(policy_lib.first_params(config.weights, policy()))


def learn(groups, config=CONFIG):
  state = first_state(config)
  base = programs_lib.base_weights(config.shared, policy())
  values = rl.judge(config, groups)
  return rl.learn(config, programs_of(config).trainer, state, groups, values, base)


# Directories of the runs below; removed when the process ends.
FOLDER = tempfile.TemporaryDirectory()


def new_directory() -> pathlib.Path:
  """Returns a new directory: a run is made again after `conftest.room_for_programs` drops it."""
  return pathlib.Path(tempfile.mkdtemp(dir=FOLDER.name))


@functools.cache
def whole_run():
  """Returns (directory, result, task) of an uninterrupted run, kept for the process."""
  directory, task = new_directory(), Vowels()
  return directory, train(directory, task), task


@functools.cache
def stopped_run():
  """Returns the directory of a run interrupted in its third step, with two rollouts judged."""
  directory = new_directory()
  task = Vowels(stop_at=3 * PER_STEP + 3, stop=interrupt)
  with pytest.raises(stops.Interrupted, match=r"by Ctrl-C after step 2 of 4; --resume continues"):
    train(directory, task, checkpoint_every=10)
  assert checkpoint.steps(directory / "checkpoints") == (0, 2)
  return directory
