"""Interruptions change no bit of a run, and a resume with other settings is refused."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import jax
import numpy as np
import pytest
from small_run import (
  CONFIG,
  NUMERICS,
  PER_STEP,
  SHOWN,
  Vowels,
  assert_equal_bits,
  first_state,
  interrupt,
  policy,
  programs_of,
  records_of,
  rows_of,
  train,
)

from seerjax import checkpoint, numerics as numerics_lib, rl
from seerjax.models import chat_template
from seerjax.rollout import journal as journal_lib
from seerjax.run import status, stops
from seerjax.trainer import losses, optimizer as optimizer_lib, step as step_lib
from seerjax.types import Verdict

pytestmark = pytest.mark.usefixtures("programs_on_disk")

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.thorough
@pytest.mark.parametrize("data_parallel_size", [1, 2])
def test_after_ctrl_c_the_run_goes_on_to_the_same_bits(whole, stopped_copy, data_parallel_size):
  directory, expected, _ = whole
  task = Vowels()
  result = train(stopped_copy, task, resume=True, data_parallel_size=data_parallel_size)
  assert_equal_bits(result.state, expected.state)
  assert rows_of(stopped_copy) == rows_of(directory)
  # The first evaluation is not repeated, nor are the two rollouts that were judged.
  assert task.num_verdicts == 3 * PER_STEP - 2 + SHOWN


class UsesItsStateUp(step_lib.Trainer):
  """Deletes the previous state, as a program with donated buffers would."""

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
  """Calls `stop` in the middle of the first checkpoint after its first verdict."""

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
  why = f"stopped by SIGTERM after step {step} of 4; --resume continues"
  assert (str(caught.value), caught.value.status) == (why, 143)
  found = status.read(directory)
  assert found is not None
  assert (found["state"], found["why"], found["step"]) == ("stopped", why, step)
  assert checkpoint.latest_step(directory / "checkpoints") == step
  assert rows_of(directory) == rows_of(whole[0])[: step + 1]


def vars_of(record):
  return {field.name: vars(record)[field.name] for field in dataclasses.fields(record)}


@pytest.mark.thorough
def test_after_kill_the_journal_is_read_and_the_bits_are_the_same(whole, tmp_path):
  directory, expected, _ = whole
  done = subprocess.run(
    [sys.executable, "-c", "import sys, small_run; small_run.run_until_killed(sys.argv[1])"]
    + [str(tmp_path / "run")],
    cwd=ROOT,
    # The other process uses this one's programs.
    env=os.environ
    | {
      "PYTHONPATH": f"{ROOT}:{ROOT / 'tests/support'}",
      "JAX_NUM_CPU_DEVICES": str(jax.device_count()),
      "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
    },
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
  # A longer run continues, and evaluates at its end.
  train(copy, task, resume=True, num_steps=5)
  assert [row["step"] for row in rows_of(copy)] == [0, 1, 2, 3, 4, 4, 5, 5]


@pytest.mark.thorough
def test_a_kill_in_the_first_evaluation_can_be_resumed(whole, tmp_path):
  with pytest.raises(ValueError, match="while judging problem 'heldout-"):
    train(tmp_path / "run", Vowels(stop_at=2, stop=lambda: 1 / 0))
  task = Vowels()
  train(tmp_path / "run", task, resume=True, num_steps=1)
  assert task.num_verdicts == 3 * PER_STEP + SHOWN
  assert rows_of(tmp_path / "run")[:2] == rows_of(whole[0])[:2]


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


def test_the_summary_of_a_resumed_run_counts_all_its_processes(stopped_copy):
  before = checkpoint.restore(
    stopped_copy / "checkpoints",
    jax.eval_shape(lambda state: state, first_state()),
    fingerprint=numerics_lib.fingerprint(NUMERICS),
  ).host_state["clock"]
  began = time.monotonic()
  summary = train(stopped_copy, resume=True).summary
  here = time.monotonic() - began
  assert 0 < before["seconds"] < summary["seconds"] < before["seconds"] + here
  assert 0 <= before["compile_seconds"] <= summary["compile_seconds"] < summary["seconds"]


def test_the_directory_of_a_run_is_refused_before_any_work(whole):
  directory, task = whole[0], Vowels()
  before = {path: path.read_bytes() for path in directory.iterdir() if path.is_file()}
  with pytest.raises(ValueError, match=r"got the directory of another run \(a checkpoint after st"):
    train(directory, task, seed=5)
  assert task.num_verdicts == 0
  assert before == {path: path.read_bytes() for path in directory.iterdir() if path.is_file()}


def test_other_settings_are_refused_with_both_values(stopped_copy):
  config = (stopped_copy / "config.json").read_bytes()
  with pytest.raises(ValueError, match="got other run settings .seed was 0 and is 3"):
    train(stopped_copy, resume=True, seed=3)
  assert (stopped_copy / "config.json").read_bytes() == config


@pytest.mark.thorough
def test_stop_strings_and_chats_go_with_a_run_and_its_resume(tmp_path):
  changes: dict[str, Any] = dict(
    num_steps=2,
    rollout=dataclasses.replace(CONFIG.rollout, stop=("o", "an")),
    chat=chat_template.ChatConfig(system="Hi."),
  )
  expected = train(tmp_path / "whole", **changes)
  rollouts = [entry.rollout for entry in journal_lib.read(tmp_path / "whole" / "journal.jsonl")[1]]
  tokenizer = policy().require_tokenizer()
  for rollout in rollouts:
    text = tokenizer.decode(rollout.request.prompt, skip_special_tokens=False)
    assert text.startswith("<|im_start|>system\nHi.<|im_end|>\n<|im_start|>user\n")
    assert "o" not in rollout.completion.text and "an" not in rollout.completion.text
  # Some completions were cut.
  assert any("o" in tokenizer.decode(rollout.completion.tokens) for rollout in rollouts)
  task = Vowels(stop_at=2 * PER_STEP + 2, stop=interrupt)
  with pytest.raises(stops.Interrupted):
    train(tmp_path / "run", task, **changes)
  others: tuple[tuple[dict[str, Any], str], ...] = (
    (dict(chat=chat_template.ChatConfig(system="Ho.")), "chat.system was 'Hi.' and is 'Ho.'"),
    (
      dict(chat=chat_template.ChatConfig(system="Hi.", variables=dict(brief=True))),
      "chat.variables.brief was None and is True",
    ),
    (dict(rollout=CONFIG.rollout), r"rollout.stop was \['o', 'an'\] and is \[\]"),
  )
  for other, message in others:
    with pytest.raises(ValueError, match=f"got other run settings .*{message}"):
      train(tmp_path / "run", resume=True, **(changes | other))
  result = train(tmp_path / "run", resume=True, **changes)
  assert_equal_bits(result.state, expected.state)
  assert rows_of(tmp_path / "run") == rows_of(tmp_path / "whole")


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
  assert all(row["rollout_train/max_abs_logprob_gap"] == 0.0 for row in rows[1:-1])
  header, _ = journal_lib.read(stopped_copy / "journal.jsonl")
  assert [fingerprint["kv_split"] for fingerprint in header.fingerprints] == ["16", "8"]


def test_what_never_clips_is_written_as_json(tmp_path):
  optimizer = optimizer_lib.OptimizerConfig(max_gradient_norm=float("inf"))
  with pytest.raises(stops.Interrupted, match="stopped by Ctrl-C after step 0 of 4"):
    train(tmp_path / "run", Vowels(1, interrupt), loss=losses.rloo(), optimizer=optimizer)
  config = json.loads((tmp_path / "run" / "config.json").read_text())
  assert config["loss"]["clip_high"] == config["optimizer"]["max_gradient_norm"] == "Infinity"
  header, _ = journal_lib.read(tmp_path / "run" / "journal.jsonl")
  assert header.settings["loss"] == config["loss"]


class Graded(Vowels):
  """Rewards parts; the rewards of `Vowels` count half."""

  def verdict(self, problem, text):
    plain = super().verdict(problem, text)
    parts = {"vowels": plain.reward, "even": float(plain.well_formed)}
    return Verdict.of_parts(parts, correct=plain.correct, well_formed=plain.well_formed)


@pytest.mark.thorough
def test_parts_sets_and_the_best_checkpoint_outlive_a_stop(tmp_path):
  evaluation = dataclasses.replace(
    CONFIG.evaluation, num_problems=2, every=1, temperature=1.0, num_samples=2, pass_at=(1, 2),
    sets={"sums": "countdown"}, best="heldout/part/vowels",
  )  # fmt: skip
  rollout = dataclasses.replace(CONFIG.rollout, reward_weights={"even": 0.25})
  how: dict[str, Any] = dict(
    evaluation=evaluation, rollout=rollout, checkpoint_every=99, num_steps=3
  )
  task = Graded()
  whole = train(tmp_path / "whole", task, **how)
  rows = rows_of(tmp_path / "whole")
  rollouts = [row for row in rows if "rollout/reward_mean" in row]
  for row in rollouts:
    weighted = row["rollout/part/vowels"] + 0.25 * row["rollout/part/even"]
    assert row["rollout/reward_mean"] == pytest.approx(weighted)
  # The journal has each answer's parts, and the weighted reward.
  records = records_of(tmp_path / "whole")
  verdicts = [one["rollout"]["verdict"] for one in records if "rollout" in one]
  assert len(verdicts) == 3 * PER_STEP
  for verdict in verdicts:
    parts = verdict["parts"]
    assert verdict["reward"] == 0.25 * parts["even"] + parts["vowels"]
  # Every set is evaluated as often as the run's own task, at the same steps.
  steps = {
    room: [row["step"] for row in rows if f"{room}/pass_at_2" in row]
    for room in ("heldout", "heldout_sums")
  }
  assert steps == {"heldout": [0, 1, 2, 3], "heldout_sums": [0, 1, 2, 3]}
  assert whole.summary["sets"]["sums"]["accuracy_after"] == 0.0
  assert whole.summary["reward_after"] == rows[-2]["heldout/reward"]
  # The best checkpoint has the highest value, the earliest of equals, and is kept with the newest.
  values = [row["heldout/part/vowels"] for row in rows if "heldout/part/vowels" in row]
  best = values.index(max(values))
  found = json.loads((tmp_path / "whole" / "best_checkpoint.json").read_text())
  assert found == {"step": best, "metric": "heldout/part/vowels", "value": max(values)}
  saved = checkpoint.steps(tmp_path / "whole" / "checkpoints")
  assert best in saved and saved[-1] == 3
  # A stop within an evaluation: it is made after the resume, and the same step is the best.
  stop_at = 2 * evaluation.num_problems + PER_STEP + 2
  with pytest.raises(stops.Interrupted):
    train(tmp_path / "run", Graded(stop_at=stop_at, stop=interrupt), **how)
  assert rows_of(tmp_path / "run")[-1]["step"] >= 1
  resumed = train(tmp_path / "run", Graded(), resume=True, **how)
  assert_equal_bits(resumed.state, whole.state)
  assert rows_of(tmp_path / "run") == rows
  again = json.loads((tmp_path / "run" / "best_checkpoint.json").read_text())
  assert again == found
  assert best in checkpoint.steps(tmp_path / "run" / "checkpoints")


class Constant(Vowels):
  """Gives every response a constant part and a part by its vowels."""

  def verdict(self, problem, text):
    plain = super().verdict(problem, text)
    parts = {"one": 1.0, "vowels": plain.reward}
    return Verdict.of_parts(parts, correct=plain.correct, well_formed=plain.well_formed)


@pytest.mark.thorough
def test_the_best_checkpoint_outlives_steps_that_are_not_evaluated_after_a_resume(tmp_path):
  # All evaluations have one value: the first is the best.
  evaluation = dataclasses.replace(CONFIG.evaluation, best="heldout/part/one", num_problems=1)
  how: dict[str, Any] = dict(evaluation=evaluation, checkpoint_every=1)
  train(tmp_path, Constant(), num_steps=1, **how)
  train(tmp_path, Constant(), resume=True, num_steps=5, **how)
  assert checkpoint.steps(tmp_path / "checkpoints") == (0, 3, 4, 5)
  assert json.loads((tmp_path / "best_checkpoint.json").read_text())["step"] == 0
