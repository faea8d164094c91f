"""test.sh keeps compiled programs by CPU and versions, and selects tests by changed files."""

from __future__ import annotations

from collections.abc import Callable
import os
import pathlib
import platform
import re
import subprocess
import sys
import time
import types

import launch_scripts
from launch_scripts import ROOT
import pytest

LOCK = "jax==0.12.0.1\njaxlib==0.12.0\nnumba==0.66.0\n"
CPUINFO = """processor : 0
vendor_id\t: AuthenticAMD
cpu family\t: 25
model\t\t: 17
model name\t: AMD EPYC
cpu MHz\t\t: 2400.123
flags\t\t: fpu avx2 avx512f
"""


@pytest.fixture(scope="module")
def programs() -> types.ModuleType:
  """The script as a module."""
  return launch_scripts.module("programs")


def test_a_folder_says_whose_programs_it_holds(programs: types.ModuleType):
  name = programs.name_of("a CPU", LOCK, {})
  assert name.startswith(f"jax-0.12.0.1-python-{platform.python_version()}-")
  with pytest.raises(ValueError, match="got no line jax==VERSION, expected one; name launch/locks"):
    programs.name_of("a CPU", "numba==0.66.0\n", {})


@pytest.mark.parametrize(
  "cpu, lock, environment, same",
  [
    ("a CPU", LOCK, {"HOME": "/other"}, True),
    ("another CPU", LOCK, {}, False),
    ("a CPU", LOCK.replace("0.66.0", "0.67.0"), {}, False),
    ("a CPU", LOCK.replace("0.12.0.1", "0.12.1"), {}, False),
    ("a CPU", LOCK, {"XLA_FLAGS": "--xla_cpu_max_isa=AVX2"}, False),
  ],
)
def test_programs_of_another_compiler_or_cpu_lie_elsewhere(
  programs: types.ModuleType, cpu: str, lock: str, environment: dict[str, str], same: bool
):
  assert (programs.name_of(cpu, lock, environment) == programs.name_of("a CPU", LOCK, {})) == same


@pytest.mark.parametrize(
  "before, after, same",
  [
    ("2400.123", "3100.9", True),
    ("AMD EPYC", "AMD EPYC 9B14", True),  # A name of the same kind of CPU.
    (" avx512f", "", False),
    (": 17", ": 18", False),
  ],
)
def test_a_cpu_is_what_it_can_do(
  programs: types.ModuleType, tmp_path: pathlib.Path, before: str, after: str, same: bool
):
  names = []
  for text in (CPUINFO, CPUINFO.replace(before, after)):
    (tmp_path / "cpuinfo").write_text(text * 2)  # Of each of its cores.
    names.append(programs.processor(tmp_path / "cpuinfo"))
  assert (names[0] == names[1]) == same
  assert programs.processor(tmp_path / "none")  # Without Linux's file.


def test_the_folders_used_last_stay_and_nothing_else_is_touched(
  programs: types.ModuleType, tmp_path: pathlib.Path
):
  now = time.time()
  for age in range(5):
    (tmp_path / f"jax-{age}" / "native").mkdir(parents=True)
    (tmp_path / f"jax-{age}" / "native" / "one.o").write_text("code")
    os.utime(tmp_path / f"jax-{age}", (now - age, now - age))
  (tmp_path / "passed").write_text("a commit")
  (tmp_path / "others").mkdir()
  programs.make_tidy(tmp_path, 3, 100)
  assert sorted(os.listdir(tmp_path)) == ["jax-0", "jax-1", "jax-2", "others", "passed"]
  assert (tmp_path / "jax-2" / "native" / "one.o").exists()


def test_what_was_used_longest_ago_leaves_a_folder_beyond_its_bound(
  programs: types.ModuleType, tmp_path: pathlib.Path
):
  folder = tmp_path / "jax-0"
  (folder / "native").mkdir(parents=True)
  now = time.time()
  # Written long ago and read since; and the other way.
  for name, written, read in (("a-cache", 90, 1), ("b-cache", 50, 50), ("native/c.o", 2, 60)):
    (folder / name).write_text("x" * 40)
    os.utime(folder / name, (now - read, now - written))
  programs.make_tidy(tmp_path, 3, 100)
  assert {path.name for path in folder.rglob("*") if path.is_file()} == {"a-cache", "c.o"}


def test_the_script_makes_the_folder_of_this_machine(tmp_path: pathlib.Path):
  minor = "{}.{}".format(*sys.version_info[:2])
  lock = f"launch/locks/runtime-{minor}.txt"
  command = [sys.executable, "launch/programs.py", str(tmp_path), lock]
  lines = {subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout for _ in "ab"}
  (folder,) = tmp_path.iterdir()
  assert lines == {f"{folder}\n".encode()}


def shell(line: str, *arguments: str, cwd: pathlib.Path = ROOT, **environment: str) -> str:
  """Runs a line of bash among the functions of test.sh; returns what it printed."""
  done = subprocess.run(
    ["bash", "-c", f'source "launch/test.sh" "$@"; {line}', "a shell", *arguments],
    env={name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
    | environment,
    cwd=cwd,
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr
  return done.stdout.strip()


NOT_INHERITED = ("SEERJAX_PROGRAMS", "XDG_CACHE_HOME", "SEERJAX_TEST_SEED", "HOME")


@pytest.mark.parametrize(
  "tier, environment, expected",
  [
    ("--all", {"HOME": "{here}/home"}, "{here}/home/.cache/seerjax/programs"),
    ("--all", {"HOME": "{here}/home", "XDG_CACHE_HOME": "{here}/c"}, "{here}/c/seerjax/programs"),
    ("--all", {"HOME": "{here}/home", "SEERJAX_PROGRAMS": "{here}/p"}, "{here}/p"),
    # No cache: on request, without a home, with an unwritable folder, and in the long tests.
    ("--all", {"HOME": "{here}/home", "SEERJAX_PROGRAMS": ""}, ""),
    ("--all", {}, ""),
    ("--all", {"HOME": "{here}/home", "SEERJAX_PROGRAMS": "/proc/no"}, ""),
    ("--long", {"HOME": "{here}/home", "SEERJAX_PROGRAMS": "{here}/p"}, ""),
    ("", {"HOME": "{here}/home"}, "{root}/.programs"),
    ("--changed", {"SEERJAX_PROGRAMS": "{here}/p"}, "{root}/.programs"),
  ],
)
def test_programs_are_kept_where_the_machine_has_a_place(
  checkout: pathlib.Path, tmp_path: pathlib.Path, tier: str, environment: dict, expected: str
):
  places = {"here": str(tmp_path), "root": str(checkout)}
  output = shell(
    "place_of_programs || :",
    *([tier] if tier else []),
    cwd=checkout,
    **{name: value.format(**places) for name, value in environment.items()},
  )
  assert output == expected.format(**places)
  assert not output or pathlib.Path(output).is_dir()


def test_without_a_place_a_run_shares_a_folder_that_ends_with_it(checkout: pathlib.Path):
  line = 'place=""; share_programs python3 3.13; echo $JAX_COMPILATION_CACHE_DIR; ls -d $scratch/*'
  folder, there = shell(line, "--all", cwd=checkout).splitlines()
  assert folder == there and folder.endswith("programs-3.13")
  assert not pathlib.Path(folder).exists()


def test_what_the_oldest_python_runs_is_drawn_in_thirds():
  line = "for SEERJAX_TEST_SEED in 0 1 2 3 4 5 536870912; do part_of_oldest; done"
  assert shell(line).split() == ["rooms", "avx2", "none", "rooms", "avx2", "none", "none"]


@pytest.fixture
def checkout(tmp_path: pathlib.Path) -> pathlib.Path:
  """A checkout of the scripts alone, in a path with a space."""
  root = tmp_path / "a checkout"
  (root / "launch").mkdir(parents=True)
  for name in ("test.sh", "environment.sh", "programs.py"):
    (root / "launch" / name).write_text((ROOT / "launch" / name).read_text())
  return root


@pytest.fixture
def git(checkout: pathlib.Path) -> Callable[..., str]:
  """Runs git in the checkout, with a made-up identity."""

  def run(*arguments: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    command = ["git", *who, *arguments]
    return subprocess.run(
      command, cwd=checkout, capture_output=True, text=True, check=True
    ).stdout.strip()

  run("init", "-q", "-b", "work")
  return run


def test_the_commits_of_a_push_are_those_that_no_run_has_passed(
  checkout: pathlib.Path, git: Callable[..., str], tmp_path: pathlib.Path
):
  base = lambda: shell(f'place="{tmp_path}"; base_of_push', "--all", cwd=checkout)
  assert base() == ""  # No commit yet.
  commits = []
  for number in range(4):
    git("commit", "-q", "--allow-empty", "-m", str(number))
    commits.append(git("rev-parse", "HEAD"))
  first, second, third, last = commits
  assert base() == third  # No main branch is known.
  git("update-ref", "refs/remotes/origin/main", first)
  assert base() == first
  git("update-ref", "refs/remotes/origin/main", last)
  assert base() == third  # A push to main: HEAD is main.
  for passed, expected in ((second, second), (last, third), ("0" * 40, third), ("", third)):
    (tmp_path / "passed").write_text(f"{passed}\n")
    assert base() == expected


def test_a_run_that_passed_is_remembered_and_one_that_failed_is_not(
  checkout: pathlib.Path, git: Callable[..., str], tmp_path: pathlib.Path
):
  git("commit", "-q", "--allow-empty", "-m", "one")
  shell(f'place="{tmp_path}" failures=1; remember_pass', "--all", cwd=checkout)
  assert not (tmp_path / "passed").exists()
  shell('place="" failures=0; remember_pass', "--all", cwd=checkout)
  shell(f'place="{tmp_path}" failures=0; remember_pass', "--all", cwd=checkout)
  assert (tmp_path / "passed").read_text().strip() == git("rev-parse", "HEAD")


def test_the_help_names_every_tier_and_every_variable_that_is_a_users():
  text = (ROOT / "launch" / "test.sh").read_text()
  output = subprocess.run(
    ["bash", str(ROOT / "launch" / "test.sh"), "--help"], capture_output=True, text=True, check=True
  ).stdout
  # Variables that this script sets for pytest are not for users.
  own = {"SEERJAX_TEST_SHARE", "SEERJAX_TEST_SHARE_OF_THOROUGH"}
  read = {*re.findall(r"SEERJAX_\w+", text)} - own
  assert len(read) >= 4
  assert read <= {*re.findall(r"SEERJAX_\w+", output)}
  tiers = {*re.findall(r"--\w+", "".join(re.findall(r"^  (--.*)\)$", text, re.MULTILINE)))}
  assert tiers == {"--help", "--all", "--long", "--changed", "--real"}
  assert tiers == {*re.findall(r"^  (--\w+)", output, re.MULTILINE)}
