"""Replayed tokens of a run have equal bits; a changed weight is traced to its layer."""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import json
import pathlib
import re
import shutil
from typing import Any

import jax
import numpy as np
import pytest
import small_run
import tiny_model

from seerjax import checkpoint, numerics as numerics_lib, rl
from seerjax.commands import replay
from seerjax.models import (
  chat_template,
  huggingface,
)
from seerjax.models.decoder import decide
from seerjax.rollout import groups, journal as journal_lib
from seerjax.run import policy as policy_lib, programs as programs_lib
from seerjax.run.evaluation import EvaluationConfig
from seerjax.trainer import losses
from seerjax.types import Problem, Verdict

pytestmark = pytest.mark.usefixtures("programs_on_disk")


class Letters:
  """Rewards the letter e. Rewards differ, so that weights change."""

  name = "letters"

  def num_problems(self, split: str) -> int:
    return 7

  def problem(self, split: str, index: int) -> Problem:
    return Problem(problem_id=f"{split}-{index}", prompt=f"{index}?")

  def verdict(self, problem: Problem, text: str) -> Verdict:
    return Verdict(reward=text.count("e") / 4, correct="e" in text, well_formed=True)


class Silent(Letters):
  """Returns the same problems; a call of `verdict` fails."""

  def verdict(self, problem: Problem, text: str) -> Verdict:
    raise AssertionError("judged again")


def run_letters(model: str, directory: pathlib.Path, **changes: Any) -> pathlib.Path:
  """A run of five steps that keeps the weights before steps 0 and 3, and the last."""
  config = dataclasses.replace(
    small_run.CONFIG,
    model=model,
    task=f"{__name__}:Silent",
    num_steps=5,
    checkpoint_every=3,
    rollout=groups.RolloutConfig(prompts_per_step=2, group_size=3, max_tokens=10),
    trainer=dataclasses.replace(
      small_run.CONFIG.trainer, num_mini_batches=2, dynamic_sampling_rounds=2
    ),
    evaluation=EvaluationConfig(num_problems=1),
  )
  config = dataclasses.replace(config, **changes)
  policy = policy_lib.load_policy(model, config.numerics)
  rl.train(config, policy, Letters(), directory, log=lambda line: None)
  return directory


OTHER_NUMERICS = decide(
  tiny_model.SMALLEST, dataclasses.replace(tiny_model.ONE_SLAB, row_tile=4)
).fingerprint()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
  """The directory of the small run's model, of one layer."""
  directory = tmp_path_factory.mktemp("small") / "model"
  policy = small_run.policy()
  huggingface.save(directory, policy.params, policy.model, tokenizer=policy.tokenizer)
  return str(directory)


@pytest.fixture(scope="module")
def letters(small: str, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  """Returns a run on two instances with a system message in its chats."""
  chat = chat_template.ChatConfig(system="Hi.")
  directory = run_letters(
    small, tmp_path_factory.mktemp("letters") / "run", data_parallel_size=2, chat=chat
  )
  assert checkpoint.steps(directory / "checkpoints") == (0, 3, 5)
  return directory


@pytest.fixture(scope="module")
def adapters(small: str, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  directory = tmp_path_factory.mktemp("adapters") / "run"
  return run_letters(
    small,
    directory,
    num_steps=3,
    lora_rank=2,
    loss=losses.grpo(kl_coefficient=0.1),
    trainer=small_run.CONFIG.trainer,
  )


def copy_of(run: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
  return pathlib.Path(shutil.copytree(run, tmp_path / "run"))


def write_journal_again(
  run: pathlib.Path,
  change: Callable[[journal_lib.Entry], journal_lib.Entry | None],
  *,
  epoch_at: int = 0,
) -> None:
  """Writes changed entries, None for none; steps before `epoch_at` under other numerics."""
  path = run / journal_lib.FILE_NAME
  header, entries = journal_lib.read(path)
  entries = [entry for entry in map(change, entries) if entry is not None]
  path.unlink()
  here = header.fingerprints[-1]
  parts = [(here, range(epoch_at, 99))]
  if epoch_at:
    parts.insert(0, (OTHER_NUMERICS, range(epoch_at)))
  for fingerprint, steps in parts:
    with journal_lib.Journal(
      path,
      fingerprint=fingerprint,
      settings=header.settings,
      accept_new_numerics=True,
      resume_step=steps.start - 1,
    ) as journal:
      for entry in entries:
        if entry.step in steps:
          journal.append(entry.step, entry.group, entry.member, entry.rollout)


def replayed(run: pathlib.Path, request: str, **options: Any) -> tuple[replay.Finding, list[str]]:
  """Returns the finding and the progress lines."""
  lines: list[str] = []
  return replay.replay(run, request, say=lines.append, **options), lines


def test_every_token_of_a_request_replays(letters: pathlib.Path):
  finding = replay.replay(letters, "0/0/2")
  assert finding.is_equal, finding.text
  assert re.match(r"equal bits: request 0/0/2, (\d+) of \1 tokens, weights of", finding.text)


def test_one_token_replays(letters: pathlib.Path):
  finding = replay.replay(letters, "0/0/1", token=3)
  assert finding.is_equal, finding.text
  assert re.search(r" 1 of ([5-9]|10) tokens", finding.text)


@pytest.mark.long
@pytest.mark.parametrize("layer", [1, 2])
def test_a_flipped_bit_is_traced_to_its_layer(trained, layer: int):
  finding = replay.replay(trained[0] / "rl_tiled", "0/0/0", perturb=layer)
  assert not finding.is_equal
  assert finding.layer == layer
  assert f"come out of layer {layer} of 2" in finding.text


def test_a_changed_record_is_told_from_a_changed_computation(
  letters: pathlib.Path, tmp_path: pathlib.Path
):
  run = copy_of(letters, tmp_path)
  # The journal's noise came from seed 0: under another, tokens differ and no layer does.
  path = run / "config.json"
  values = json.loads(path.read_text())
  path.write_text(json.dumps(values | {"seed": 1}))
  finding = replay.replay(run, "0/0/0")
  assert not finding.is_equal
  assert finding.layer is None
  assert "no layer differs between prefill in one piece and token by token" in finding.text


# Weights that are not kept.


@pytest.mark.few(2)
@pytest.mark.parametrize(
  ("request_name", "steps", "source"),
  [
    ("0/1/0", [], "checkpoint 0"),
    ("1/0/2", [0], "checkpoint 0 and step 1 learnt again"),
    ("2/1/1", [0, 1], "checkpoint 0 and steps 1 to 2 learnt again"),
    ("3/0/0", [], "checkpoint 3"),
    ("4/0/1", [3], "checkpoint 3 and step 4 learnt again"),
  ],
)
def test_weights_that_are_not_kept_are_learnt_again(
  letters: pathlib.Path, request_name: str, steps: list[int], source: str
):
  finding, lines = replayed(letters, request_name)
  assert finding.is_equal, finding.text
  assert finding.text.endswith(f"weights of {source}")
  steps_learnt = [line.partition(",")[0] for line in lines]
  assert steps_learnt == [f"step {step + 1} learnt again" for step in steps]
  # The journal's log-probabilities match those of the retrained weights.
  assert all("log-probability gap 0.0," in line for line in lines)


def test_without_a_checkpoint_the_model_itself_learns_again(
  letters: pathlib.Path, tmp_path: pathlib.Path
):
  run = copy_of(letters, tmp_path)
  shutil.rmtree(run / "checkpoints")
  finding, lines = replayed(run, "4/1/0")
  assert finding.is_equal, finding.text
  assert finding.text.endswith("as it is now and steps 1 to 4 learnt again") and len(lines) == 4


def test_a_flipped_bit_of_weights_learnt_again_is_traced_to_its_layer(letters: pathlib.Path):
  finding, _ = replayed(letters, "1/1/0", perturb=1)
  assert not finding.is_equal and finding.layer == 1


def test_one_changed_reward_changes_the_weights_that_follow(
  letters: pathlib.Path, tmp_path: pathlib.Path
):
  # Twin of the equalities above: if the steps did not matter, this would be equal as well.
  run = copy_of(letters, tmp_path)

  def changed(entry: journal_lib.Entry) -> journal_lib.Entry:
    if (entry.step, entry.group, entry.member) != (1, 0, 0):
      return entry
    verdict = dataclasses.replace(entry.rollout.verdict, reward=7.0)
    return dataclasses.replace(entry, rollout=dataclasses.replace(entry.rollout, verdict=verdict))

  write_journal_again(run, changed)
  assert replayed(run, "1/0/0")[0].is_equal
  finding, _ = replayed(run, "2/0/0")
  assert not finding.is_equal
  assert "the journal's bits come from other weights" in finding.text


def test_a_journal_that_lacks_rollouts_is_refused_with_their_names(
  letters: pathlib.Path, tmp_path: pathlib.Path
):
  run = copy_of(letters, tmp_path)
  lost = [(1, 0, 2), (1, 1, 0)]
  write_journal_again(
    run, lambda entry: None if (entry.step, entry.group, entry.member) in lost else entry
  )
  lines: list[str] = []
  message = r"got no rollout 1/0/2, 1/1/0, expected all rollouts of step 2 .*; restore"
  with pytest.raises(ValueError, match=message):
    replay.replay(run, "2/0/0", say=lines.append)
  assert not lines  # Nothing was computed.
  assert replayed(run, "1/0/0")[0].is_equal
  write_journal_again(run, lambda entry: None if entry.step == 0 else entry)
  with pytest.raises(ValueError, match=r"no rollout 0/0/0, 0/0/1, .*, 0/1/2, expected all roll"):
    replay.replay(run, "1/0/0")


def test_weights_that_learnt_under_other_numerics_are_refused(
  letters: pathlib.Path, tmp_path: pathlib.Path
):
  run = copy_of(letters, tmp_path)
  write_journal_again(run, lambda entry: entry, epoch_at=1)
  message = r"version 2, whose weights learnt in step 1 under another numerics .*row_tile was '4'"
  with pytest.raises(ValueError, match=message):
    replay.replay(run, "2/0/0")
  with pytest.raises(ValueError, match=r"got a request of another numerics fingerprint \(row_tile"):
    replay.replay(run, "0/0/0")


def test_a_checkpoint_of_other_numerics_carries_what_was_sampled_after_it(
  letters: pathlib.Path, tmp_path: pathlib.Path
):
  run = copy_of(letters, tmp_path)
  write_journal_again(run, lambda entry: entry, epoch_at=3)
  config = replay.read_config(run)
  policy = policy_lib.load_policy(config.model, config.numerics)
  trainer = programs_lib.make_programs(config.shared, policy.model).trainer
  restored = checkpoint.restore(
    run / "checkpoints",
    policy_lib.abstract_state(config.weights, policy, trainer.optimizer, trainer.mesh),
    fingerprint=numerics_lib.fingerprint(config.numerics),
    step=3,
  )
  shutil.rmtree(run / "checkpoints")
  checkpoint.save(run / "checkpoints", 3, restored.state, host_state={}, fingerprint=OTHER_NUMERICS)
  for request, num_learnt in (("3/1/2", 0), ("4/1/2", 1)):
    finding, lines = replayed(run, request)
    assert finding.is_equal, finding.text
    assert len(lines) == num_learnt


# Adapters.


@pytest.mark.long
@pytest.mark.parametrize(("request_name", "num_learnt"), [("0/1/2", 0), ("2/0/1", 2)])
def test_a_run_of_adapters_replays(adapters: pathlib.Path, request_name: str, num_learnt: int):
  finding, lines = replayed(adapters, request_name)
  assert finding.is_equal, finding.text
  assert "checkpoint 0 over the model '" in finding.text and len(lines) == num_learnt


@pytest.mark.long
def test_adapters_that_learnt_are_not_those_of_the_start(
  adapters: pathlib.Path, tmp_path: pathlib.Path
):
  # Twin: the weights before step 2 replace those of step 0.
  run = copy_of(adapters, tmp_path)

  def moved(entry: journal_lib.Entry) -> journal_lib.Entry:
    completion = dataclasses.replace(entry.rollout.completion, policy_version=0)
    return dataclasses.replace(
      entry, rollout=dataclasses.replace(entry.rollout, completion=completion)
    )

  write_journal_again(run, moved)
  finding, _ = replayed(run, "2/0/1")
  assert not finding.is_equal and finding.layer is None


@pytest.mark.long
def test_a_flipped_bit_under_adapters_is_traced_to_its_layer(adapters: pathlib.Path):
  finding, _ = replayed(adapters, "1/0/0", perturb=1)
  assert not finding.is_equal and finding.layer == 1


def test_a_flipped_bit_is_one_bit_of_one_weight(tiny: str):
  master = policy_lib.load_policy(tiny, tiny_model.ONE_SLAB).params
  changed = replay.perturbed(master, 2)
  pairs = zip(jax.tree.leaves(master), jax.tree.leaves(changed), strict=True)
  words = [np.asarray(a).view(np.uint32) ^ np.asarray(b).view(np.uint32) for a, b in pairs]
  assert [int(word) for whole in words for word in whole[whole != 0]] == [1 << 22]


# Requests that cannot be replayed.


def test_the_first_weights_are_the_model_itself(letters: pathlib.Path, tmp_path: pathlib.Path):
  run = copy_of(letters, tmp_path)
  for path in (run / "checkpoints" / "step_00000000").rglob("*"):
    if path.is_file():
      path.unlink()
  (run / "checkpoints" / "step_00000000").rename(run / "elsewhere")
  finding = replay.replay(run, "0/0/2")
  assert finding.is_equal, finding.text
  assert "as it is now" in finding.text


def test_other_numerics_are_refused(letters: pathlib.Path, tmp_path: pathlib.Path):
  run = copy_of(letters, tmp_path)
  path = run / "config.json"
  values = json.loads(path.read_text())
  values["numerics"]["row_tile"] = 64
  path.write_text(json.dumps(values))
  with pytest.raises(ValueError, match=r"another numerics fingerprint \(row_tile was '8' and is"):
    replay.replay(run, "0/0/0")


def test_what_is_not_there_is_refused(letters: pathlib.Path, tmp_path: pathlib.Path):
  with pytest.raises(ValueError, match=r"--run: got .*, which has no config.json, expected"):
    replay.replay(tmp_path, "0/0/0")
  with pytest.raises(ValueError, match=r"--request: got '3', expected STEP/GROUP/MEMBER"):
    replay.replay(letters, "3")
  with pytest.raises(ValueError, match=r"does not hold, expected one of its steps 0 \(\d+ roll"):
    replay.replay(letters, "7/0/0")
  with pytest.raises(ValueError, match=r"--token: got 10, expected 0 to [4-9];?"):
    replay.replay(letters, "0/0/0", token=10)
  with pytest.raises(ValueError, match=r"--perturb: got layer 2, expected 1 to 1"):
    replay.replay(letters, "0/0/0", perturb=2)
