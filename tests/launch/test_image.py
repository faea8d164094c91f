"""launch/image.sh, which makes a container image, in an empty folder; and the Dockerfile."""

from __future__ import annotations

import fnmatch
import pathlib
import re
import shutil
import subprocess
import sys

import launched
import pytest

LAUNCH = launched.ROOT / "launch"


def instructions() -> list[tuple[str, str]]:
  """Returns the Dockerfile's instructions, each with what follows it."""
  lines = (LAUNCH / "Dockerfile").read_text().splitlines()
  words = [line.partition(" ") for line in lines if line and not line.startswith("#")]
  return [(word, rest) for word, _, rest in words]


def image(root: pathlib.Path, *arguments: str, python: str) -> tuple[int, str]:
  done = subprocess.run(
    ["bash", "launch/image.sh", *arguments],
    cwd=root,
    env={"PATH": "/usr/local/bin:/usr/bin:/bin", "SEERJAX_PYTHON": python, "HOME": str(root)},
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    check=False,
  )
  return done.returncode, done.stdout


def copied(root: pathlib.Path) -> pathlib.Path:
  """Copies what the Dockerfile's COPY takes, without what its .dockerignore leaves out."""
  ignored = (LAUNCH / "Dockerfile.dockerignore").read_text().split()
  names = [name.removeprefix("**/") for name in ignored]
  leave = lambda _, found: {n for n in found if any(fnmatch.fnmatch(n, one) for one in names)}
  return pathlib.Path(shutil.copytree(launched.ROOT, root, ignore=leave, symlinks=True))


def test_a_dockerfile_is_a_copy_and_one_script():
  found = instructions()
  assert [word for word, _ in found] == ["FROM", "ARG", "COPY", "WORKDIR", "RUN", "CMD"]
  arguments = dict(found)
  assert arguments["COPY"] == f". {arguments['WORKDIR']}"
  assert arguments["RUN"] == "bash launch/image.sh --platform=$PLATFORM --cluster"
  minor = re.match(r"python:(3\.\d+)-", arguments["FROM"])
  assert minor and (LAUNCH / "locks" / f"runtime-{minor[1]}.txt").is_file()
  assert arguments["ARG"] == "PLATFORM=cuda12"


@pytest.mark.parametrize(
  "arguments, message",
  [
    (["--platform=cuda"], "got 'cuda', expected cpu, cuda12, cuda13 or tpu"),
    (["train"], "got 'train', expected --platform=P or --cluster"),
  ],
)
def test_what_it_does_not_know_is_refused(arguments: list[str], message: str):
  status, text = image(launched.ROOT, *arguments, python=sys.executable)
  assert status == 1 and message in text


def test_a_help_says_what_it_does():
  status, text = image(launched.ROOT, "--help", python=sys.executable)
  assert status == 0 and "--platform=P" in text and "--cluster" in text


def test_with_the_packages_there_the_library_runs(tmp_path: pathlib.Path):
  # This environment, marked as installed from the locks.
  root = launched.with_experiments(launched.checkout_in(tmp_path / "a place"))
  status, text = image(root, python=sys.executable)
  assert status == 0, text
  assert re.search(r"^image: seerjax \S+, JAX \S+$", text, re.MULTILINE)


@pytest.mark.long
def test_an_empty_folder_becomes_an_image(tmp_path: pathlib.Path):
  root = copied(tmp_path / "seerjax")
  assert not (root / ".venv").exists() and not (root / ".git").exists()
  status, text = image(root, "--platform=cpu", "--cluster", python=sys.executable)
  assert status == 0, text
  python = root / ".venv" / "bin" / "python"
  found = subprocess.run(
    [python, "-P", "-c", "import ray, seerjax; print(seerjax.__file__)"],
    capture_output=True,
    text=True,
    check=True,
  )
  assert found.stdout.strip() == str(root / "seerjax" / "__init__.py")
