"""The circle: what a run writes, and that nothing that stops or reshapes it changes a bit of it."""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import functools
import json
import math
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time
from typing import Any
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny_model

from seerjax import checkpoint, metrics, numerics as numerics_lib, parallel, rl
from seerjax.engine import engine as engine_lib, runner as runner_lib
from seerjax.models import lora, parameters, presets, tokenizer as tokenizer_lib
from seerjax.models.loading import Model
from seerjax.reports import run_directory, run_report
from seerjax.rollout import divided, groups as groups_lib, journal as journal_lib, policies
from seerjax.run import (
  config as config_lib,
  directory as directory_lib,
  memory as memory_lib,
  off_policy,
  policy as policy_lib,
  programs as programs_lib,
  replay,
  status,
  stops,
)
from seerjax.run.config import RunConfig, TrainerConfig
from seerjax.run.evaluation import EvaluationConfig
from seerjax.run.policy import Policy
from seerjax.run.programs import Programs
from seerjax.trainer import losses, step as step_lib
from seerjax.types import Problem, Verdict

pytestmark = pytest.mark.usefixtures("programs_on_disk")

TESTS = pathlib.Path(__file__).parent
NANO = pathlib.Path(tokenizer_lib.__file__).parent / "nano"
# Its words are nano's.
MODEL = dataclasses.replace(tiny_model.SMALLEST, vocab_size=512, num_layers=1)
NUMERICS = tiny_model.ONE_SLAB
CONFIG = RunConfig(
  model="tiny",
  task="vowels",
  num_steps=4,
  checkpoint_every=2,
  numerics=NUMERICS,
  engine=engine_lib.EngineConfig(
    page_size=8, num_pages=64, max_sequences=4, max_context=48, row_buckets=(16,)
  ),
  rollout=groups_lib.RolloutConfig(groups_per_step=2, group_size=2, max_tokens=6),
  # Chunks end within answers.
  scheduler=policies.LongestGroupFirst(chunk_tokens=4),
  trainer=TrainerConfig(rows_per_micro_batch=64, sequences_per_micro_batch=4),
  loss=losses.dapo(),
  optimizer=step_lib.OptimizerConfig(learning_rate=0.01),
  evaluation=EvaluationConfig(num_problems=4),
)
PER_STEP = 4  # Rollouts of a step, and problems of an evaluation.
SHOWN = 2  # Verdicts of the problem that a run's end shows, before and after.
# Numbers that clocks decide.
# What follows the schedule: an interrupted step does less of its work after the interruption.
TIMES = (
  "rollout/seconds", "rollout/tokens_per_second", "train/seconds", "circle/seconds",
  "schedule/steps", "schedule/tail_steps", "schedule/chunks", "schedule/migrations",
  "schedule/spills", "schedule/drafted_tokens", "schedule/accepted_tokens",
)  # fmt: skip


class Vowels:
  """Likes vowels. Counts what it judges, and can stop the world at one of its verdicts."""

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


class Coin(Vowels):
  """Rewards few texts, so that most groups say nothing."""

  def reward(self, text: str) -> float:
    return float(zlib.crc32(text.encode()) % 5 == 0)


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
def runner(num_instances, numerics, has_adapters):
  del has_adapters  # Other weights, another program.
  return runner_lib.Runner(MODEL, numerics, parallel.make_mesh(num_instances=num_instances), 1)


@functools.cache
def programs(config: RunConfig) -> Programs:
  made = programs_lib.make_programs(config, MODEL)
  if config.stale.steps_ahead:
    return made  # Its devices are its own.
  shared = runner(config.num_instances, config.numerics, config.lora_rank > 0)
  return dataclasses.replace(made, runner=shared)


def programs_of(config: RunConfig) -> Programs:
  """Compiled once for all configs that differ in what is not compiled."""
  return programs(
    dataclasses.replace(
      CONFIG,
      **{
        name: vars(config)[name]
        for name in ("num_instances", "stale", "lora_rank", "numerics", "loss", "optimizer")
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


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  """An uninterrupted run: (directory, result, task)."""
  directory, task = tmp_path_factory.mktemp("whole") / "run", Vowels()
  return directory, train(directory, task), task


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
  """A run that Ctrl-C met in its third step, whose first two of four rollouts were judged."""
  directory = tmp_path_factory.mktemp("stopped") / "run"
  task = Vowels(stop_at=3 * PER_STEP + 3, stop=interrupt)
  with pytest.raises(stops.Interrupted, match=r"by Ctrl-C after step 2 of 4; --resume goes on"):
    train(directory, task, checkpoint_every=10)
  assert checkpoint.steps(directory / "checkpoints") == (0, 2)
  return directory


@pytest.fixture
def stopped_copy(stopped, tmp_path):
  return pathlib.Path(shutil.copytree(stopped, tmp_path / "run"))


# What a run writes.


def test_a_run_writes_its_files_and_keeps_its_promise(whole):
  directory, result, task = whole
  assert {path.name for path in directory.iterdir()} == {
    "checkpoints", "config.json", "journal.jsonl", "metrics.jsonl", "status.json", "summary.json",
    "tensorboard", "traces.jsonl",
  }  # fmt: skip
  assert checkpoint.latest_step(directory / "checkpoints") == 4
  rows = rows_of(directory)
  # An evaluation, four steps, an evaluation.
  assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 4]
  for row in rows[1:-1]:
    for name in ("kl", "raw_kl", "max_abs_logprob_gap", "max_abs_raw_logprob_gap"):
      assert row[f"contract/{name}"] == 0.0
    assert row["train/ratio"] == 1.0
  assert any(row["train/update_norm"] > 0 for row in rows[1:-1])
  assert task.num_verdicts == 6 * PER_STEP + SHOWN
  summary = json.loads((directory / "summary.json").read_text())
  assert summary["max_abs_logprob_gap"] == summary["kl_max"] == 0.0
  assert summary["optimizer_steps"] == int(result.state.step) == 4
  assert {
    "accuracy_before", "accuracy_after", "tokens_per_second", "length_mean", "length_p99",
    "seconds", "compile_seconds", "peak_memory_gib", "numerics",
  } <= set(summary)  # fmt: skip
  header, entries = journal_lib.read(directory / "journal.jsonl")
  assert len(list(entries)) == 4 * PER_STEP
  assert header.settings["seed"] == 0
  config = json.loads((directory / "config.json").read_text())
  assert config["rollout"]["max_tokens"] == 6 and config["fingerprint"] == summary["numerics"]


def test_the_first_row_is_what_the_task_said_of_the_held_out_answers(whole):
  directory, _, task = whole
  first = rows_of(directory)[0]
  verdicts = task.verdicts[:PER_STEP]
  np.testing.assert_allclose(
    first["heldout/accuracy"], np.mean([verdict.correct for verdict in verdicts])
  )
  assert 0 < first["heldout/length"] <= 6


def test_the_last_row_is_the_last_evaluation(whole):
  directory, result, _ = whole
  last = rows_of(directory)[-1]
  assert last["step"] == 4 and last["heldout/accuracy"] == result.summary["accuracy_after"]


# What stops a run changes no bit of it.


@pytest.mark.thorough
@pytest.mark.parametrize("num_instances", [1, 2])
def test_after_ctrl_c_the_run_goes_on_to_the_same_bits(whole, stopped_copy, num_instances):
  directory, expected, _ = whole
  task = Vowels()
  result = train(stopped_copy, task, resume=True, num_instances=num_instances)
  assert_equal_bits(result.state, expected.state)
  assert rows_of(stopped_copy) == rows_of(directory)
  # The first evaluation is not repeated, nor are the two rollouts that were judged.
  assert task.num_verdicts == 3 * PER_STEP - 2 + SHOWN


class UsesItsStateUp(step_lib.Trainer):
  """Leaves nothing of the state before, as a program that is given its buffers would."""

  def update(self, state, gradient):
    new, norms = super().update(state, gradient)
    if int(new.step) == 2:
      jax.tree.map(lambda leaf: leaf.delete(), state)
      terminate()
    return new, norms


def terminate():
  os.kill(os.getpid(), signal.SIGTERM)


def terminate_within_a_compilation():
  def begins(event, value, **about):
    del value
    if event.endswith("backend_compile_duration") and about["fun_name"] == "jit(never_seen)":
      jax.monitoring.unregister_scalar_listener(begins)
      terminate()

  def never_seen(x):
    return x + 1

  jax.monitoring.register_scalar_listener(begins)
  jax.jit(never_seen)(np.zeros(3))
  raise AssertionError("it was not stopped")


class WatchesSaves(Vowels):
  """Stops the world in the middle of the first checkpoint after its first verdict."""

  def __init__(self, checkpoints: pathlib.Path):
    super().__init__()
    self.checkpoints = checkpoints

  def verdict(self, problem, text):
    if not self.num_verdicts:
      threading.Thread(target=self.watch, daemon=True).start()
    return super().verdict(problem, text)

  def watch(self):
    while not any(path.name.startswith(".incoming") for path in self.checkpoints.iterdir()):
      time.sleep(1e-4)
    terminate()


@pytest.mark.thorough
@pytest.mark.few(2)
@pytest.mark.parametrize(
  ("moment", "step"),
  [("sampling", 1), ("compiling", 1), ("updating", 2), ("saving", 2), ("evaluating", 4)],
)
def test_sigterm_ends_a_run_after_its_last_whole_step_whenever_it_comes(
  whole, tmp_path, moment, step
):
  directory = tmp_path / "run"
  runs = programs_of(CONFIG)
  task = {
    "sampling": Vowels(2 * PER_STEP + 2, terminate),
    "compiling": Vowels(2 * PER_STEP + 2, terminate_within_a_compilation),
    "evaluating": Vowels(5 * PER_STEP + 2, terminate),
  }.get(moment, Vowels())
  if moment == "updating":
    runs = dataclasses.replace(runs, trainer=UsesItsStateUp(**vars_of(runs.trainer)))
  if moment == "saving":
    task = WatchesSaves(directory / "checkpoints")
  with pytest.raises(stops.Interrupted) as caught:
    rl.train(CONFIG, policy(), task, directory, log=lambda line: None, programs=runs)
  why = f"stopped by SIGTERM after step {step} of 4; --resume goes on"
  assert (str(caught.value), caught.value.status) == (why, 143)
  found = status.read(directory)
  assert found is not None
  assert (found["state"], found["why"], found["step"]) == ("stopped", why, step)
  assert checkpoint.latest_step(directory / "checkpoints") == step
  assert rows_of(directory) == rows_of(whole[0])[: step + 1]


def vars_of(record):
  return {field.name: vars(record)[field.name] for field in dataclasses.fields(record)}


@pytest.mark.thorough
def test_two_instances_change_no_bit(whole, tmp_path):
  directory, expected, _ = whole
  result = train(tmp_path / "run", num_instances=2)
  assert_equal_bits(result.state, expected.state)
  assert rows_of(tmp_path / "run") == rows_of(directory)


@pytest.mark.thorough
def test_after_kill_the_journal_is_read_and_the_bits_are_the_same(whole, tmp_path):
  directory, expected, _ = whole
  done = subprocess.run(
    [sys.executable, "-c", "import sys, test_rl; test_rl.run_until_killed(sys.argv[1])"]
    + [str(tmp_path / "run")],
    cwd=TESTS.parent,
    env=os.environ | {"PYTHONPATH": f"{TESTS.parent}:{TESTS}:{TESTS / 'support'}"},
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == -signal.SIGKILL, done.stderr
  assert checkpoint.steps(tmp_path / "run" / "checkpoints") == (0,)
  kinds = [record["kind"] for record in records_of(tmp_path / "run")]
  assert kinds.count("chunk") >= 2 * PER_STEP  # Of answers of five or six tokens.
  task = Vowels()
  result = train(tmp_path / "run", task, resume=True)
  assert_equal_bits(result.state, expected.state)
  assert rows_of(tmp_path / "run") == rows_of(directory)
  # Nothing of the two whole steps is sampled again, nor the one rollout of the third.
  assert task.num_verdicts == 3 * PER_STEP - 1 + SHOWN
  rows = rows_of(tmp_path / "run", without=())
  rates = [row["rollout/tokens_per_second"] for row in rows[1:-1]]
  assert rates[:2] == [0.0, 0.0] and min(rates[2:]) > 0.0


def test_a_run_that_has_ended_writes_its_last_row_once(whole, tmp_path):
  directory, expected, _ = whole
  copy = pathlib.Path(shutil.copytree(directory, tmp_path / "run"))
  written = (copy / "metrics.jsonl").read_bytes()
  task = Vowels()
  result = train(copy, task, resume=True)
  assert task.num_verdicts == SHOWN  # Nor is it measured again.
  assert (copy / "metrics.jsonl").read_bytes() == written
  assert_equal_bits(result.state, expected.state)
  timed = ("seconds", "compile_seconds", "peak_memory_gib")
  assert result.summary | {name: expected.summary[name] for name in timed} == expected.summary
  # A longer run goes on, and measures where it ends.
  train(copy, task, resume=True, num_steps=5)
  assert [row["step"] for row in rows_of(copy)] == [0, 1, 2, 3, 4, 4, 5, 5]


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["lost", "emptied"])
def test_records_that_are_gone_are_named_and_end_no_run(whole, stopped_copy, how):
  for name in ("journal.jsonl", "metrics.jsonl"):
    path = stopped_copy / name
    path.unlink() if how == "lost" else path.write_bytes(b"")
  traces = stopped_copy / "traces.jsonl"
  data = traces.read_bytes()
  traces.write_bytes(data[:5] + b"\xff" + data[6:])
  said = []
  result = train(stopped_copy, resume=True, say=said.append)
  text = "\n".join(said)
  assert "journal.jsonl: got no rollouts of 2 of 2 steps, expected those of all; the run" in text
  assert "metrics.jsonl: got no numbers of 2 of 2 steps, expected those of all; the run" in text
  assert "traces.jsonl: got damage in line(s) 1, expected a step's trace in each; the run" in text
  assert_equal_bits(result.state, whole[1].state)
  assert [row["step"] for row in rows_of(stopped_copy)] == [3, 4, 4]
  assert run_directory.load(stopped_copy).traces.keys() == {1, 2, 3}
  assert run_report.render(stopped_copy).is_file()
  said.clear()
  train(stopped_copy, resume=True, say=said.append, num_steps=5)
  assert sum("expected those of all" in line for line in said) == 2  # Until they are restored.


def test_the_summary_of_a_resumed_run_counts_all_its_processes(stopped_copy):
  before = checkpoint.restore(
    stopped_copy / "checkpoints",
    jax.eval_shape(lambda: programs_lib.first_state(CONFIG, policy())),
    fingerprint=numerics_lib.fingerprint(NUMERICS),
  ).host_state["clock"]
  began = time.monotonic()
  summary = train(stopped_copy, resume=True).summary
  here = time.monotonic() - began
  assert 0 < before["seconds"] < summary["seconds"] < before["seconds"] + here
  assert 0 <= before["compile_seconds"] <= summary["compile_seconds"] < summary["seconds"]


@pytest.mark.thorough
def test_steps_read_from_the_journal_do_not_slow_the_run(whole, tmp_path):
  copy = pathlib.Path(shutil.copytree(whole[0], tmp_path / "run"))
  for step in (2, 4):
    shutil.rmtree(copy / "checkpoints" / f"step_{step:08d}")
  summary = train(copy, resume=True, num_steps=5).summary
  rows = [row for row in rows_of(copy, without=()) if "contract/kl" in row]
  rates = [row["rollout/tokens_per_second"] for row in rows]
  assert rates[:4] == [0.0] * 4
  seconds = [row["rollout/seconds"] for row in rows]
  assert summary["tokens_per_second"] == pytest.approx(rates[4] * seconds[4] / sum(seconds))


def run_until_killed(directory: str) -> None:
  """Runs in a process of its own; dies in the third step, with one of its rollouts judged."""
  train(directory, Vowels(stop_at=3 * PER_STEP + 2, stop=kill), checkpoint_every=10)


@pytest.mark.thorough
def test_a_kill_in_the_first_evaluation_can_be_resumed(whole, tmp_path):
  with pytest.raises(ValueError, match="while judging problem 'heldout-"):
    train(tmp_path / "run", Vowels(stop_at=2, stop=lambda: 1 / 0))
  task = Vowels()
  train(tmp_path / "run", task, resume=True, num_steps=1)
  assert task.num_verdicts == 3 * PER_STEP + SHOWN
  assert rows_of(tmp_path / "run")[:2] == rows_of(whole[0])[:2]


# Whom a run refuses.


def test_the_directory_of_a_run_is_refused_before_any_work(whole):
  directory, task = whole[0], Vowels()
  before = {path: path.read_bytes() for path in directory.iterdir() if path.is_file()}
  with pytest.raises(ValueError, match=r"got the directory of another run \(a checkpoint after st"):
    train(directory, task, seed=5)
  assert task.num_verdicts == 0
  assert before == {path: path.read_bytes() for path in directory.iterdir() if path.is_file()}


def test_numbers_without_a_checkpoint_are_another_run_too(tmp_path):
  (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
  with pytest.raises(ValueError, match=r"another run \(its numbers\), expected none; carry on wi"):
    directory_lib.check_directory(tmp_path, resume=False)
  directory_lib.check_directory(tmp_path / "new", resume=False)


def test_nothing_to_resume_is_refused(tmp_path):
  with pytest.raises(ValueError, match=r"got no checkpoint to resume, expected one under .*check"):
    train(tmp_path / "run", resume=True)
  assert not (tmp_path / "run").exists()


def test_other_settings_are_refused_with_both_values(stopped_copy):
  config = (stopped_copy / "config.json").read_bytes()
  with pytest.raises(ValueError, match="got other run settings .seed was 0 and is 3"):
    train(stopped_copy, resume=True, seed=3)
  assert (stopped_copy / "config.json").read_bytes() == config


@pytest.mark.thorough
def test_stop_strings_and_chats_go_with_a_run_and_its_resume(tmp_path):
  changes: dict[str, Any] = dict(
    num_steps=2,
    rollout=dataclasses.replace(CONFIG.rollout, stop_strings=("o", "an")),
    chat=tokenizer_lib.ChatConfig(system="Hi."),
  )
  expected = train(tmp_path / "whole", **changes)
  rollouts = [entry.rollout for entry in journal_lib.read(tmp_path / "whole" / "journal.jsonl")[1]]
  tokenizer = policy().require_tokenizer()
  for rollout in rollouts:
    text = tokenizer.decode(rollout.request.prompt, skip_special_tokens=False)
    assert text.startswith("<|im_start|>system\nHi.<|im_end|>\n<|im_start|>user\n")
    assert "o" not in rollout.completion.text and "an" not in rollout.completion.text
  # Some were cut within what they would have said.
  assert any("o" in tokenizer.decode(rollout.completion.tokens) for rollout in rollouts)
  task = Vowels(stop_at=2 * PER_STEP + 2, stop=interrupt)
  with pytest.raises(stops.Interrupted):
    train(tmp_path / "run", task, **changes)
  others: tuple[tuple[dict[str, Any], str], ...] = (
    (dict(chat=tokenizer_lib.ChatConfig(system="Ho.")), "chat.system was 'Hi.' and is 'Ho.'"),
    (
      dict(chat=tokenizer_lib.ChatConfig(system="Hi.", variables=dict(brief=True))),
      "chat.variables.brief was None and is True",
    ),
    (dict(rollout=CONFIG.rollout), r"rollout.stop_strings was \['o', 'an'\] and is \[\]"),
  )
  for other, message in others:
    with pytest.raises(ValueError, match=f"got other run settings .*{message}"):
      train(tmp_path / "run", resume=True, **(changes | other))
  result = train(tmp_path / "run", resume=True, **changes)
  assert_equal_bits(result.state, expected.state)
  assert rows_of(tmp_path / "run") == rows_of(tmp_path / "whole")


def test_a_tokenizer_that_says_other_things_is_refused():
  own = dataclasses.replace(
    policy().require_tokenizer(), chat_config=tokenizer_lib.ChatConfig(system="Ho.")
  )
  message = "RunConfig.chat: got .*'Hi.'.* and a tokenizer with .*'Ho.'.*; set --config.chat alone"
  with pytest.raises(ValueError, match=message):
    policy_lib.chatting(own, tokenizer_lib.ChatConfig(system="Hi."))
  with pytest.raises(ValueError, match="RunConfig.chat"):
    policy_lib.chatting(own, tokenizer_lib.ChatConfig())
  assert policy_lib.chatting(own, own.chat_config) == own


@pytest.mark.thorough
def test_other_numerics_are_refused_with_both_values_or_begin_an_epoch(stopped_copy):
  other = dataclasses.replace(NUMERICS, kv_split=8)
  with pytest.raises(ValueError, match=r"kv_split was '16' and is '8'.*--accept_new_numerics"):
    train(stopped_copy, resume=True, numerics=other)
  again = dataclasses.replace(CONFIG.trainer, remat="layer")
  with pytest.raises(ValueError, match=r"remat was None and is 'layer'.*--accept_new_numerics"):
    rl.train(
      dataclasses.replace(CONFIG, trainer=again), policy(), Vowels(), stopped_copy, resume=True
    )
  train(stopped_copy, resume=True, numerics=other, accept_new_numerics=True)
  rows = rows_of(stopped_copy)
  assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 4]
  # Were a rollout of the old numerics left in the third step, it would show here.
  assert all(row["contract/max_abs_logprob_gap"] == 0.0 for row in rows[1:-1])
  header, _ = journal_lib.read(stopped_copy / "journal.jsonl")
  assert [fingerprint["kv_split"] for fingerprint in header.fingerprints] == ["16", "8"]


@pytest.mark.parametrize(
  "changes",
  [
    dict(loss=losses.grpo()),
    dict(lora_rank=2),
    dict(num_instances=2),
    dict(numerics=dataclasses.replace(NUMERICS, kv_split=8)),
    dict(optimizer=step_lib.OptimizerConfig(learning_rate=0.02)),
    dict(engine=dataclasses.replace(CONFIG.engine, row_buckets=(8, 16))),
    dict(engine=dataclasses.replace(CONFIG.engine, page_size=4)),
    dict(engine=dataclasses.replace(CONFIG.engine, num_pages=65)),
    dict(engine=dataclasses.replace(CONFIG.engine, max_context=40)),
    dict(engine=dataclasses.replace(CONFIG.engine, max_sequences=3)),
    dict(trainer=TrainerConfig(rows_per_micro_batch=72, sequences_per_micro_batch=4)),
    dict(trainer=TrainerConfig(rows_per_micro_batch=64, sequences_per_micro_batch=5)),
  ],
)
def test_programs_of_another_config_are_refused(tmp_path, changes):
  config = dataclasses.replace(CONFIG, **changes)
  with pytest.raises(ValueError, match=r"train.programs: got programs of another config or model"):
    rl.train(config, policy(), Vowels(), tmp_path, programs=programs_of(CONFIG))
  assert not list(tmp_path.iterdir())


def test_programs_of_another_model_are_refused(tmp_path):
  other = dataclasses.replace(policy(), model=dataclasses.replace(MODEL, norm_eps=1e-5))
  with pytest.raises(ValueError, match=r"train.programs: got programs of another config or model"):
    rl.train(CONFIG, other, Vowels(), tmp_path, programs=programs_of(CONFIG))


class Empty(Vowels):
  """Has nothing to measure on."""

  def num_problems(self, split: str) -> int:
    return 0 if split == "heldout" else 7


@pytest.mark.parametrize(
  ("task", "changes", "message"),
  [
    (Empty(), {}, r"vowels: got 0 problems in split 'heldout', expected at least 1"),
    (
      Vowels(),
      dict(engine=dataclasses.replace(CONFIG.engine, page_size=3)),
      r"got page_size=3, expected a divisor of NumericsConfig.kv_split=16",
    ),
    (Vowels(), dict(num_instances=99), r"make_mesh: got num_instances=99 x model_shards=1 = 99"),
    (
      Vowels(),
      # Refused by the engine, the last that could.
      dict(numerics=dataclasses.replace(NUMERICS, reduction_shards=2)),
      r"NumericsConfig.reduction_shards: got 2, expected a divisor of num_kv_heads=1",
    ),
    (Vowels(), dict(lora_rank=17), r"lora rank: got 17, expected 1 <= rank <= 16"),
  ],
)
def test_what_cannot_work_is_refused_before_the_journal_begins(tmp_path, task, changes, message):
  with pytest.raises(ValueError, match=message):
    rl.train(dataclasses.replace(CONFIG, **changes), policy(), task, tmp_path / "run")
  assert task.num_verdicts == 0 and not (tmp_path / "run").exists()


@pytest.mark.thorough
@pytest.mark.parametrize(
  ("stop", "message"),
  [
    (
      lambda: 1 / 0,
      r"vowels: got ZeroDivisionError \(division by zero\) while judging problem 'tr",
    ),
    (
      lambda: Verdict(reward=float("nan"), correct=False, well_formed=False),
      r"vowels: got reward nan for problem 'train-\d', text .*, expected a finite number",
    ),
  ],
)
def test_a_task_that_cannot_judge_is_named_and_nothing_is_lost(whole, tmp_path, stop, message):
  directory, expected, _ = whole
  with pytest.raises(ValueError, match=message):
    train(tmp_path / "run", Vowels(stop_at=2 * PER_STEP + 3, stop=stop))
  _, entries = journal_lib.read(tmp_path / "run" / "journal.jsonl")
  assert len(list(entries)) == PER_STEP + 2
  result = train(tmp_path / "run", resume=True)
  assert_equal_bits(result.state, expected.state)
  assert rows_of(tmp_path / "run") == rows_of(directory)


@pytest.mark.parametrize(
  ("kind", "changes", "message"),
  [
    (TrainerConfig, dict(num_mini_batches=0), "TrainerConfig.num_mini_batches: got 0, expected"),
    (TrainerConfig, dict(max_rounds=0), "TrainerConfig.max_rounds: got 0, expected at least 1"),
    (RunConfig, dict(num_steps=-1), "RunConfig.num_steps: got -1, expected at least 0"),
    (RunConfig, dict(checkpoint_every=0), "RunConfig.checkpoint_every: got 0, expected at lea"),
    (RunConfig, dict(num_instances=0), "RunConfig.num_instances: got 0, expected at least 1"),
    (RunConfig, dict(lora_rank=-1), "RunConfig.lora_rank: got -1, expected at least 0"),
    (RunConfig, dict(lora_alpha=0.0), "RunConfig.lora_alpha: got 0.0, expected a positive"),
    (RunConfig, dict(lora_alpha=math.inf), "RunConfig.lora_alpha: got inf, expected a positive"),
    (
      RunConfig,
      dict(trainer=TrainerConfig(num_mini_batches=33)),
      "num_mini_batches: got 33, expected at most RolloutConfig.groups_per_step=32",
    ),
    (
      RunConfig,
      dict(engine=engine_lib.EngineConfig(max_context=256)),
      "RolloutConfig.max_tokens: got 256, expected at most 255, because prompt and answer have to"
      " fit EngineConfig.max_context=256 and",
    ),
    (
      RunConfig,
      dict(trainer=TrainerConfig(rows_per_micro_batch=128)),
      "got 256, expected at most 128, .*TrainerConfig.rows_per_micro_batch=128; lower it, or",
    ),
    (
      RunConfig,
      dict(trainer=TrainerConfig(overlong_buffer=257)),
      "TrainerConfig.overlong_buffer: got 257, expected 0 to RolloutConfig.max_tokens=256; a fifth",
    ),
    (
      RunConfig,
      dict(trainer=TrainerConfig(overlong_buffer=-1)),
      "TrainerConfig.overlong_buffer: got -1, expected 0 to",
    ),
  ],
)
def test_a_config_that_cannot_be_is_refused(kind, changes, message):
  with pytest.raises(ValueError, match=message):
    kind(**changes)


# One step, taken apart.


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
    known=lambda group, member: None,
    on_rollout=lambda *_: None,
  )


def learn(groups, config=CONFIG):
  state = programs_lib.first_state(config, policy())
  base = programs_lib.base_weights(config, policy())
  values = rl.judge(config, groups)
  return rl.learn(config, programs_of(config).trainer, state, groups, values, base)


def test_the_order_of_completion_changes_no_bit_of_the_weights():
  state, numbers = learn(groups_of())
  shuffled, shuffled_numbers = learn(groups_of(is_shuffled=True))
  assert_equal_bits(shuffled, state)
  assert shuffled_numbers == numbers
  assert numbers["train/update_norm"] > 0


def test_later_mini_batches_log_their_ratio_under_another_name():
  config = dataclasses.replace(
    CONFIG, trainer=dataclasses.replace(CONFIG.trainer, num_mini_batches=2)
  )
  state, numbers = learn(groups_of(), config)
  assert int(state.step) == 2
  assert numbers["contract/kl"] == numbers["contract/max_abs_logprob_gap"] == 0.0
  assert numbers["train/ratio"] == 1.0 and numbers["train/kl_old"] == 0.0
  assert numbers["train/later_ratio"] != 1.0 and numbers["train/later_kl_old"] > 0.0


def short(rollout):
  completion = rollout.completion
  cut = dataclasses.replace(
    completion,
    tokens=completion.tokens[:2],
    behaviour_logprobs=completion.behaviour_logprobs[:2],
    raw_logprobs=completion.raw_logprobs[:2],
  )
  return dataclasses.replace(rollout, completion=cut)


def test_answers_near_the_limit_lose_reward():
  nothing = Verdict(reward=0.0, correct=False, well_formed=False)
  groups = [
    dataclasses.replace(
      group,
      rollouts=tuple(
        dataclasses.replace(rollout, verdict=nothing)
        for rollout in (group.rollouts[0], short(group.rollouts[1]))
      ),
    )
    for group in groups_of()
  ]
  _, numbers = learn(groups)
  assert numbers["train/update_norm"] == 0.0
  config = dataclasses.replace(
    CONFIG, trainer=dataclasses.replace(CONFIG.trainer, overlong_buffer=4)
  )
  _, numbers = learn(groups, config)
  assert numbers["train/update_norm"] > 0.0


# Rivals that learn from older weights.


@pytest.mark.thorough
def test_one_step_off_learns_from_the_weights_before(tmp_path):
  task = Vowels()
  result = train(tmp_path, task, num_instances=2, stale=off_policy.StaleConfig(steps_ahead=1))
  rows = rows_of(tmp_path)[1:-1]
  assert [row["rollout/old_tokens"] > 0 for row in rows] == [False, True, True, True]
  # On-policy to the bit in the first step alone; then the gap is the step between.
  assert rows[0]["contract/max_abs_logprob_gap"] == 0.0
  assert all(row["contract/max_abs_logprob_gap"] > 0 for row in rows[1:])
  assert rows[0]["train/ratio"] == 1.0 != rows[1]["train/ratio"]
  assert task.num_verdicts == 6 * PER_STEP + SHOWN and int(result.state.step) == 4
  again = train(tmp_path / "again", num_instances=2, stale=off_policy.StaleConfig(steps_ahead=1))
  assert_equal_bits(again.state, result.state)


@pytest.mark.thorough
def test_partial_rollouts_learn_from_those_that_were_whole_first(tmp_path):
  task = Vowels()
  result = train(tmp_path, task, stale=off_policy.StaleConfig(begun=2.0))
  rows = rows_of(tmp_path)[1:-1]
  assert rows[0]["rollout/old_tokens"] == 0 == rows[0]["contract/max_abs_logprob_gap"]
  assert any(row["rollout/old_tokens"] > 0 for row in rows[1:])
  for row in rows:
    assert (row["contract/max_abs_logprob_gap"] > 0) == (row["rollout/old_tokens"] > 0)
  assert int(result.state.step) == 4
  _, entries = journal_lib.read(tmp_path / "journal.jsonl")
  assert len(list(entries)) == task.num_verdicts - 2 * PER_STEP - SHOWN >= 4 * PER_STEP


@pytest.mark.parametrize(
  "changes, message",
  [
    (
      dict(stale=off_policy.StaleConfig(steps_ahead=1)),
      r"steps_ahead: got 1 with num_instances=1, expected 2 or more",
    ),
    (
      dict(
        stale=off_policy.StaleConfig(begun=2.0),
        trainer=dataclasses.replace(CONFIG.trainer, max_rounds=2),
      ),
      r"begun: got 2.0 with max_rounds=2, expected one of them at 1",
    ),
  ],
)
def test_rivals_that_cannot_be_are_refused(changes, message):
  with pytest.raises(ValueError, match=f"StaleConfig.{message}"):
    dataclasses.replace(CONFIG, **changes)


def test_a_rival_is_not_resumed(stopped_copy):
  with pytest.raises(ValueError, match=r"RunConfig.stale: got .* and a run to resume, expected"):
    train(stopped_copy, resume=True, stale=off_policy.StaleConfig(begun=2.0))


@pytest.mark.thorough
def test_rounds_replace_groups_that_say_nothing(tmp_path):
  config = dataclasses.replace(CONFIG, trainer=dataclasses.replace(CONFIG.trainer, max_rounds=3))
  found, num_taken = [], []
  for turn in range(2):
    path = tmp_path / f"{turn}.jsonl"
    with journal_lib.Journal(path, fingerprint={}, settings={}) as journal:
      found.append([rl.sample(config, engine(), Coin(), journal, step)[0] for step in range(4)])
      # Known rollouts give the same groups, whatever round they are of.
      task = Coin()
      known = [rl.sample(config, engine(), task, journal, step)[0] for step in range(4)]
      assert task.num_verdicts == 0
      taken = journal.keys()
      num_taken.append([sum(at == step for at, *_ in taken) for step in range(4)])
    names = [
      [[rollout.completion.tokens for rollout in g.rollouts] for groups in part for g in groups]
      for part in (found[-1], known)
    ]
    assert names[0] == names[1]
  indices = [[[g.group_index for g in groups] for groups in part] for part in found]
  assert indices[0] == indices[1] and num_taken[0] == num_taken[1]
  assert all(len(groups) == 2 for groups in found[0])
  assert all(part == sorted(part) for part in indices[0])
  assert max(num_taken[0]) > PER_STEP and max(num_taken[0]) <= 3 * PER_STEP
  # A step keeps what it found, before it fills up with the rest.
  for groups, taken in zip(found[0], num_taken[0], strict=True):
    spread = [np.ptp(group.rewards) > 0 for group in groups]
    assert all(spread) or taken > PER_STEP


# Steps taken again from a journal.


def known_of(directory):
  _, entries = journal_lib.read(directory / "journal.jsonl")
  rollouts = {(entry.step, entry.group, entry.member): entry.rollout for entry in entries}
  return lambda step, group, member: rollouts.get((step, group, member))


def learn_again(steps, known, *, state=None, config=CONFIG):
  task, lines = Vowels(), []
  state = programs_lib.first_state(config, policy()) if state is None else state
  trainer, base = programs_of(config).trainer, programs_lib.base_weights(config, policy())
  state = replay.learn_again(
    lambda state, groups: rl.learn(config, trainer, state, groups, rl.judge(config, groups), base),
    config, task, policy().require_tokenizer(), state, steps, known, log=lines.append,
  )  # fmt: skip
  assert task.num_verdicts == 0
  assert [line.partition(",")[0] for line in lines] == [f"step {i + 1} learnt again" for i in steps]
  return state


@pytest.mark.thorough
@pytest.mark.parametrize("num_instances", [1, 2])
def test_steps_are_learnt_again_to_the_same_bits(whole, num_instances):
  directory, expected, _ = whole
  config = dataclasses.replace(CONFIG, num_instances=num_instances)
  middle = learn_again(range(2), known_of(directory), config=config)
  stored = checkpoint.restore(
    directory / "checkpoints",
    jax.eval_shape(lambda: middle),
    fingerprint=numerics_lib.fingerprint(NUMERICS),
    step=2,
  ).state
  assert_equal_bits(middle, stored)
  assert_equal_bits(
    learn_again(range(2, 4), known_of(directory), state=middle, config=config), expected.state
  )
  # The twin: a step that is left out is missed.
  with pytest.raises(AssertionError):
    assert_equal_bits(learn_again(range(1), known_of(directory), config=config), stored)


def test_steps_with_rollouts_missing_are_not_learnt_again(whole):
  known = known_of(whole[0])

  def part(step, group, member):
    return None if (step, member) == (1, 1) else known(step, group, member)

  message = r"^journal: got no rollout 1/0/1, 1/1/1, expected all that step 2 learnt from .*;"
  with pytest.raises(ValueError, match=message):
    learn_again(range(2), part)
  nothing = dataclasses.replace(
    CONFIG, rollout=dataclasses.replace(CONFIG.rollout, groups_per_step=5)
  )
  with pytest.raises(ValueError, match=r"rollout 0/0/0, .*, 0/3/1 and 2 more, expected all that"):
    learn_again(range(1), lambda *_: None, config=nothing)


# What learns, and what it is held to.


@pytest.mark.thorough
def test_the_reference_is_the_policy_of_the_start_also_after_a_resume(tmp_path):
  loss = losses.grpo(kl_coefficient=0.5)
  expected = train(tmp_path / "whole", loss=loss, num_steps=2)
  rows = rows_of(tmp_path / "whole")[1:-1]
  assert rows[0]["train/kl_reference"] == 0.0 < rows[1]["train/kl_reference"]
  train(tmp_path / "parts", loss=loss, num_steps=1)
  result = train(tmp_path / "parts", loss=loss, num_steps=2, resume=True)
  assert_equal_bits(result.state, expected.state)
  free, _ = learn(groups_of(), dataclasses.replace(CONFIG, loss=loss))
  held, numbers = rl.learn(
    dataclasses.replace(CONFIG, loss=loss),
    programs_of(dataclasses.replace(CONFIG, loss=loss)).trainer,
    programs_lib.first_state(CONFIG, policy()),
    groups_of(),
    rl.judge(CONFIG, groups_of()),
    jax.tree.map(lambda leaf: leaf * np.float32(1.1), policy().params),
  )
  assert numbers["train/kl_reference"] > 0.0
  with pytest.raises(AssertionError):
    assert_equal_bits(held.params, free.params)


@pytest.mark.long  # The command of tests/experiments/test_grpo.py learns adapters, too.
def test_adapters_learn_beside_frozen_weights(tmp_path):
  loss = losses.grpo(kl_coefficient=0.1)
  changes: dict[str, Any] = dict(lora_rank=2, loss=loss, checkpoint_every=1)
  expected = train(tmp_path / "whole", num_steps=3, **changes)
  rows = rows_of(tmp_path / "whole")[1:-1]
  for row in rows:
    assert row["contract/kl"] == row["contract/raw_kl"] == 0.0
    assert row["contract/max_abs_logprob_gap"] == row["contract/max_abs_raw_logprob_gap"] == 0.0
  # A fresh adapter says what the reference says.
  assert rows[0]["train/kl_reference"] == 0.0 < rows[2]["train/kl_reference"]
  start = programs_lib.first_state(dataclasses.replace(CONFIG, **changes), policy())
  assert jax.tree.structure(expected.state.params) == jax.tree.structure(
    lora.shapes(MODEL, NUMERICS, 2)
  )
  pair, first = (state.params["layers"][0]["qkv"] for state in (expected.state, start))
  assert np.any(np.asarray(pair["b"])) and not np.any(np.asarray(first["b"]))
  assert np.any(np.asarray(pair["a"]) != np.asarray(first["a"]))
  # Resumed, and on two instances: the same bits.
  train(tmp_path / "parts", num_steps=1, **changes)
  result = train(tmp_path / "parts", num_steps=3, resume=True, num_instances=2, **changes)
  assert_equal_bits(result.state, expected.state)
  config = dataclasses.replace(CONFIG, **changes)
  merged = policy_lib.exported_weights(config.weights, policy(), expected.state.params)
  assert jax.tree.structure(merged) == jax.tree.structure(policy().params)
  by_hand = 8.0 * (np.asarray(pair["a"])[None] @ np.asarray(pair["b"]))
  np.testing.assert_allclose(
    merged["layers"][0]["qkv"] - policy().params["layers"][0]["qkv"], by_hand, atol=1e-6
  )


def test_full_fine_tuning_exports_its_masters(whole):
  state = whole[1].state
  assert policy_lib.exported_weights(CONFIG.weights, policy(), state.params) is state.params


def test_what_never_clips_is_written_as_json(tmp_path):
  optimizer = step_lib.OptimizerConfig(max_gradient_norm=float("inf"))
  with pytest.raises(stops.Interrupted, match="stopped by Ctrl-C after step 0 of 4"):
    train(tmp_path / "run", Vowels(1, interrupt), loss=losses.rloo(), optimizer=optimizer)
  config = json.loads((tmp_path / "run" / "config.json").read_text())
  assert config["loss"]["clip_high"] == config["optimizer"]["max_gradient_norm"] == "Infinity"
  header, _ = journal_lib.read(tmp_path / "run" / "journal.jsonl")
  assert header.settings["loss"] == config["loss"]


# What the model decides, and what memory it takes.


@pytest.mark.thorough
def test_what_a_config_leaves_open_is_the_models_and_a_resume_keeps_it(tmp_path):
  open_config = RunConfig(engine=engine_lib.EngineConfig(max_context=512))
  nano = presets.get("nano")
  found = config_lib.for_model(open_config, nano)
  assert config_lib.chosen(open_config, found) == (
    "chosen for this model and context: numerics.reduction_shards=8,"
    " engine.row_buckets=(64, 512), trainer.rows_per_micro_batch=2048,"
    " trainer.sequences_per_micro_batch=32"
  )
  assert config_lib.for_model(found, nano) == found and config_lib.chosen(found, found) == ""
  chosen = config_lib.chosen_sizes(found)
  sizes = chosen | {"sequences_per_micro_batch": 16, "row_buckets": [32, 256]}
  checkpoint.save(
    tmp_path / "checkpoints",
    0,
    {"w": jnp.zeros(1)},
    host_state={"sizes": sizes},
    fingerprint=numerics_lib.fingerprint(NUMERICS),
  )
  resumed = config_lib.for_model(directory_lib.as_begun(open_config, tmp_path), nano)
  assert resumed.trainer.sequences_per_micro_batch == 16
  assert resumed.engine.row_buckets == (32, 256)
  named = dataclasses.replace(
    open_config,
    engine=dataclasses.replace(open_config.engine, row_buckets=(16,)),
    trainer=TrainerConfig(sequences_per_micro_batch=8),
  )
  assert directory_lib.as_begun(named, tmp_path).trainer.sequences_per_micro_batch == 8
  begun = directory_lib.as_begun(named, tmp_path)
  assert config_lib.for_model(begun, nano).engine.row_buckets == (16,)


def test_a_run_that_cannot_fit_is_refused_with_the_figures():
  model = dataclasses.replace(presets.get("qwen3-32b"), num_layers=1, hidden_size=2**22)
  message = (
    r"got a run that takes more than there is \(memory, MiB a device: [\d,]+ masters, [\d,]+"
    r" moments, .* gradient sums, [\d,]+ activations, [\d,]+ scratch pages, .* are free\), expected"
    r" one that fits; set TrainerConfig.remat=layer"
  )
  with pytest.raises(ValueError, match=message):
    memory_lib.memory_plan(RunConfig(), model)


def test_a_plan_is_counted_before_anything_is_taken():
  plan = memory_lib.memory_plan(CONFIG, MODEL)
  two = memory_lib.memory_plan(dataclasses.replace(CONFIG, num_instances=2), MODEL)
  assert 0 < plan.needed < two.needed and plan.others == 0 < two.others
  assert plan.engine.num_pages > 0 and plan.pages > 0
  engine = dataclasses.replace(CONFIG.engine, gives_back_pages=True)
  back = dataclasses.replace(CONFIG, engine=engine)
  assert memory_lib.memory_plan(back, MODEL).needed < plan.needed
  assert "that are given back" in memory_lib.memory_plan(back, MODEL).describe()


# What a caller puts in the place of today's.


def test_callables_stand_in_for_loss_advantages_and_optimizer(tmp_path):
  seen, shapes = [], []

  def loss(*args, **kwargs):
    value, numbers = losses.policy_loss(*args, **kwargs)
    return 2 * value, numbers

  def advantages(rewards):
    shapes.append(rewards.shape)
    return rewards - rewards.mean(1, keepdims=True)

  result = rl.train(
    dataclasses.replace(CONFIG, num_steps=2), policy(), Vowels(), tmp_path, log=lambda line: None,
    loss=loss, advantages=advantages, optimizer=optax.sgd(0.5),
    on_step=lambda step, state, numbers: seen.append((step, int(state.step), numbers)),
  )  # fmt: skip
  assert [row[:2] for row in seen] == [(1, 1), (2, 2)] and shapes == [(2, 2)] * 2
  assert all(row[2]["contract/kl"] == 0.0 for row in seen)
  assert seen[0][2]["train/update_norm"] == pytest.approx(0.5 * seen[0][2]["train/grad_norm"])
  assert int(result.state.step) == 2
