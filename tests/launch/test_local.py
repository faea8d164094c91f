"""launch/local.sh, as far as it runs without installing anything."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import sys
import tomllib

import launch_scripts
from launch_scripts import ROOT
import pytest

from seerjax.commands import __main__ as commands

# Commands that load a problem by its name.
WITH_PROBLEMS = ("discover", "check", "report")
MINOR = "{}.{}".format(*sys.version_info[:2])


@pytest.fixture
def checkout(tmp_path: pathlib.Path) -> pathlib.Path:
  """A checkout with an experiment and the commands, in a path with spaces."""
  root = launch_scripts.copied(tmp_path / "a checkout")
  (root / "experiments").mkdir()
  (root / "experiments" / "other.py").write_text('"""Claim: one.\nCommand: other\n"""\n')
  (root / "experiments" / "helper.py").write_text('"""Claim: none; experiments read this."""\n')
  for name in ("commands", "recipes"):
    shutil.copytree(ROOT / "seerjax" / name, root / "seerjax" / name)
  return root


def run(checkout: pathlib.Path, *arguments: str, **environment: str) -> tuple[int, str]:
  return launch_scripts.run("local", *arguments, root=checkout, **environment)


def test_help_lists_the_commands_and_the_experiments(checkout: pathlib.Path):
  status, text = run(checkout, "--help")
  assert status == 0
  # Not files that experiments import.
  assert text.endswith("\nexperiments: experiments.other\n")
  assert f"\ncommands: {' '.join(commands.COMMANDS)}\n" in text


def test_no_argument_runs_the_main_job(checkout: pathlib.Path):
  status, text = run(checkout, "--dry-run", "--platform=cpu")
  assert status == 0
  assert f"python {sys.executable}\n" in text
  assert f"launch/locks/runtime-{MINOR}.txt\n" in text
  assert "platform cpu\nextra none\nrun train\n" in text


def test_flags_go_to_the_experiment(checkout: pathlib.Path):
  _, text = run(checkout, "--dry-run", "experiments.other", "--config.steps=3", "--platform", "tpu")
  assert "platform tpu\nextra tpu\nrun experiments.other --config.steps=3\n" in text
  _, text = run(checkout, "--dry-run", "--config.steps=3")
  assert "run train --config.steps=3\n" in text


def test_a_name_without_a_dot_is_a_command(checkout: pathlib.Path):
  for name in commands.COMMANDS:
    status, text = run(checkout, "--dry-run", name, "nano", "--port=1")
    assert status == 0
    problems = "--problems=experiments.problems.names:load " if name in WITH_PROBLEMS else ""
    assert text.endswith(f"run {name} {problems}nano --port=1\n")


def test_cuda_is_chosen_by_the_driver(checkout: pathlib.Path, tmp_path: pathlib.Path):
  tools = tmp_path / "tools"
  tools.mkdir()
  for driver, extra in (("570.86.15", "cuda12"), ("580.65.06", "cuda13"), ("", "cuda12")):
    tool = tools / "nvidia-smi"
    tool.write_text(f'#!/bin/sh\n[ "$1" = -L ] && echo "GPU 0: some" && exit\necho "{driver}"\n')
    tool.chmod(0o755)
    _, text = run(checkout, "--dry-run", PATH=f"{tools}:{os.environ['PATH']}")
    assert f"platform cuda\nextra {extra}\n" in text


def test_an_unknown_platform_is_refused(checkout: pathlib.Path):
  status, text = run(checkout, "--dry-run", "--platform=gpu")
  assert status == 1
  assert "--platform: got 'gpu', expected cpu, cuda or tpu; leave it out to detect it." in text


def test_a_platform_without_a_name_is_refused(checkout: pathlib.Path):
  status, text = run(checkout, "--platform")
  assert status == 1
  assert "--platform: got nothing, expected cpu, cuda or tpu" in text


def test_a_task_of_reasoning_gym_brings_its_package(checkout: pathlib.Path):
  lock = f"lock {checkout}/launch/locks/environments-{MINOR}.txt\n"
  for flags, is_there in (
    (("--config.task=reasoning_gym.chain_sum",), True),
    (("--config.task", "reasoning_gym.chain_sum"), True),
    (("--config.evaluation.sets.sums=reasoning_gym.chain_sum",), True),
    (("--recipe=arithmetic",), True),
    (("--recipe=word_problems",), False),
    (("--config.task=my_reasoning_gym:Task",), False),
    ((), False),
  ):
    assert (lock in run(checkout, "--dry-run", *flags)[1]) == is_there, flags
  needy = checkout / "experiments" / "needy.py"
  needy.write_text('"""Draws sums.\n\nNeeds: reasoning-gym\n"""\n')
  assert lock in run(checkout, "--dry-run", "experiments.needy")[1]


def test_an_unknown_experiment_is_refused_before_anything_is_installed(checkout: pathlib.Path):
  status, text = run(checkout, "experiments.ohter")
  assert status == 1
  assert "got the experiment 'experiments.ohter', expected one that exists" in text
  for name in ("trian", "seerjax.serve"):
    status, text = run(checkout, name)
    assert status == 1
    assert f"got the command '{name}', expected one that exists" in text
  assert not (checkout / ".venv").exists()


def write_python(path: pathlib.Path, body: str) -> str:
  path.write_text(f"#!/bin/sh\n{body}\n")
  path.chmod(0o755)
  return str(path)


def test_a_python_without_venv_is_named_with_its_package(checkout, tmp_path):
  # Answers for its version and fails to import, as Debian's python3 does without python3-venv.
  body = 'case "$2" in *version*) echo 3.12 ;; *) exit 1 ;; esac'
  python = write_python(tmp_path / "python", body)
  status, text = run(checkout, "--dry-run", SEERJAX_PYTHON=python)
  assert status == 1
  assert "has no venv or ensurepip: apt install python3.12-venv" in text


def test_a_python_without_a_lock_is_refused(checkout, tmp_path):
  python = write_python(tmp_path / "python", "echo 3.10")
  status, text = run(checkout, "--dry-run", SEERJAX_PYTHON=python)
  assert status == 1
  assert f"{python} is Python 3.10, expected one of: 3.13 3.12 3.11" in text


def test_a_python_that_does_not_run_is_refused(checkout, tmp_path):
  status, text = run(checkout, "--dry-run", SEERJAX_PYTHON=str(tmp_path / "none"))
  assert status == 1
  assert "does not run: set SEERJAX_PYTHON to a Python interpreter, or unset it" in text


def test_a_strange_venv_is_left_alone(checkout: pathlib.Path):
  (checkout / ".venv").mkdir()
  (checkout / ".venv" / "mine").write_text("")
  status, text = run(checkout, "--platform=cpu")
  assert status == 1
  assert "exists and was not created by launch/; move it away." in text
  assert (checkout / ".venv" / "mine").exists()


@pytest.mark.parametrize("minor", ["3.11", "3.12", "3.13"])
def test_locks_hold_what_the_project_asks_for(minor: str):
  def read(kind: str) -> dict[str, str]:
    lines = (ROOT / "launch" / "locks" / f"{kind}-{minor}.txt").read_text().splitlines()
    pins = [line.split("==") for line in lines if not line.startswith("#")]
    assert all(len(pin) == 2 for pin in pins), "every line is NAME==VERSION"
    return {re.sub("[-_.]+", "-", name).lower(): version for name, version in pins}

  project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
  runtime, dev = read("runtime"), read("dev")
  assert not set(runtime) & set(dev)

  def names(requirements: list[str]) -> set[str]:
    return {re.sub("[-_.]+", "-", re.split("[<>=\\[]", r)[0]).lower() for r in requirements}

  assert names(project["dependencies"]) <= set(runtime)
  assert names(project["optional-dependencies"]["problems"]) <= set(runtime)
  assert names(project["optional-dependencies"]["mooncake"]) == set(read("mooncake"))
  assert names(project["optional-dependencies"]["cluster"]) <= set(read("cluster"))
  assert names(project["optional-dependencies"]["environments"]) <= set(read("environments"))
  assert not set(read("environments")) & (set(runtime) | set(dev))
  assert not set(read("cluster")) & set(runtime)
  assert names(project["optional-dependencies"]["dev"]) <= set(runtime) | set(dev)
  assert runtime["jax"].startswith("0.10." if minor == "3.11" else "0.12.")
  assert "pytest" not in runtime
