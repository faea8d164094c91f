"""The command `check` names the fault of each broken task, problem and model."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import subprocess
import sys

import pytest
import tiny_problem

from seerjax.commands import check
from seerjax.commands.check import CheckConfig
from seerjax.discovery.problem_check import Finding
from seerjax.models import huggingface, loading, tokenizer as tokenizer_lib
from seerjax.tasks import word_problems
from seerjax.types import Problem, Verdict

ROOT = pathlib.Path(__file__).parents[2]
PROBLEM = str(tiny_problem.__file__)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
  return subprocess.run(
    [sys.executable, "-m", "seerjax.commands", "check", *arguments],
    cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
    capture_output=True, text=True, timeout=500,
  )  # fmt: skip


class Letters:
  """Rewards the letter e."""

  name = "letters"

  def num_problems(self, split: str) -> int:
    return 5

  def problem(self, split: str, index: int) -> Problem:
    return Problem(problem_id=f"{split}-{index}", prompt=f"{index}?", answer="eee")

  def verdict(self, problem: Problem, text: str) -> Verdict:
    return Verdict(reward=float(text.count("e")), correct="e" in text, well_formed=True)


class Empty(Letters):
  def num_problems(self, split: str) -> int:
    return 0 if split == "heldout" else 5


class Changing(Letters):
  count = 0

  def problem(self, split: str, index: int) -> Problem:
    self.count += 1
    return Problem(problem_id=f"{split}-{index}", prompt=f"{self.count}?")


class Alike(Letters):
  def problem(self, split: str, index: int) -> Problem:
    return Problem(problem_id=split, prompt=f"{index}?")


class Raising(Letters):
  def verdict(self, problem: Problem, text: str) -> Verdict:
    return Verdict(reward=float(int(text)), correct=True, well_formed=True)


class Flat(Letters):
  def verdict(self, problem: Problem, text: str) -> Verdict:
    return Verdict(reward=0.0, correct=False, well_formed=True)


@pytest.fixture(scope="module")
def nano() -> tokenizer_lib.Tokenizer:
  return tokenizer_lib.load(loading.NANO)


def test_a_sound_task_has_its_numbers(nano):
  first, second, last = check.check_task(Letters(), nano, CheckConfig())
  assert first.startswith("task letters, train: 5 problems; 5 prompts have ")
  assert "50 texts, answers included, get rewards from 0 to 3" in first
  assert second.startswith("task letters, heldout: ") and last == "task letters: no errors"
  lines = list(check.check_task(word_problems.WordProblems(), nano, CheckConfig(num_problems=20)))
  assert lines[-1] == "task word_problems: no errors" and "20 prompts have" in lines[0]


def test_a_reward_that_does_not_distinguish_is_a_warning(nano):
  lines = list(check.check_task(Flat(), nano, CheckConfig()))
  assert sum(line.startswith("warning: letters, ") for line in lines) == 2


@pytest.mark.parametrize(
  ("task", "message"),
  [
    (Empty, r"letters: got 0 problems in split 'heldout', expected at least 1"),
    (Changing, r"letters: got two different problems from problem\('train', \d\), expected the"),
    (Alike, r"letters: got two problems of one problem_id in split 'train', expected unique ids"),
    (
      Raising,
      r"letters: got ValueError .* while judging problem 'train-\d', text '', expected",
    ),
  ],
)
def test_what_would_break_a_run_is_refused(nano, task, message):
  with pytest.raises(ValueError, match=message):
    list(check.check_task(task(), nano, CheckConfig()))


def test_a_model_has_its_numbers(tiny: str):
  first, second, last = check.check_model(tiny)
  assert "M parameters in 2 layers, 8 heads (2 of keys and values)" in first
  assert "it is saved as qwen3" in first
  shape = huggingface.load_config(tiny)
  per_token = sum(
    2 * 4 * one.attention.num_kv_heads * one.attention.head_dim for one in shape.layers
  )
  assert f"; {per_token:,} bytes of keys and values a token in float32; devices: 1, 2; " in second
  assert last.startswith("tokenizer: 512 ids, ends at [")


def test_a_model_without_a_template_is_warned_of(tiny: str, tmp_path):
  for path in pathlib.Path(tiny).iterdir():
    if path.name not in ("tokenizer_config.json", "chat_template.jinja"):
      (tmp_path / path.name).write_bytes(path.read_bytes())
  lines = list(check.check_model(str(tmp_path)))
  assert any(line.startswith("warning: got no chat template, expected one") for line in lines)


def test_a_model_is_run_and_measured(tiny: str, tmp_path):
  text = tmp_path / "text.txt"
  text.write_text("7 plus 12 is 19. " * 20)
  bits, perplexity, beside = check.check_numbers(tiny, str(text), "")
  assert bits.startswith("model of this run: rows are invariant: 0 of ")
  assert perplexity.startswith(f"perplexity of {text}: ")
  assert beside.startswith("transformers: ")


def test_findings_of_a_problem_are_counted():
  found = [Finding("error", "a"), Finding("warning", "b")]
  lines, is_wrong = check.report_problem("p", found)
  assert is_wrong and lines == ["error: a", "warning: b", "problem p: 1 errors, 1 warnings"]
  assert check.report_problem("p", found[1:]) == (
    ["warning: b", "problem p: 0 errors, 1 warnings"],
    False,
  )


def test_it_needs_something_to_check():
  done = run()
  assert done.returncode == 2
  assert done.stderr.startswith("seerjax check: got nothing to check, expected a task, a problem")
  with pytest.raises(ValueError, match=r"CheckConfig.num_problems: got 0, expected at least 1"):
    dataclasses.replace(CheckConfig(), num_problems=0)


@pytest.mark.long
def test_a_file_that_hangs_as_it_is_imported_is_found(tmp_path):
  path = tmp_path / "hangs.py"
  path.write_text("while True:\n  pass\n")
  done = run("--seconds=5", f"--config.problem={path}")
  assert done.returncode == 2 and "loading: did not end within" in done.stdout, done.stderr


@pytest.mark.long
def test_a_sound_problem_passes_the_check():
  done = run(f"--config.problem={PROBLEM}")
  assert done.returncode == 0 and "0 errors" in done.stdout, done.stdout + done.stderr
