"""Contents of the built wheel: our two packages, typed, with nano, and nothing else."""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sys
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  """Returns a copy of a build's inputs, because setuptools writes next to its sources."""
  source = tmp_path_factory.mktemp("source")
  for name in ("pyproject.toml", "LICENSE", "THIRD_PARTY.md", "README.md"):
    if (ROOT / name).exists():
      shutil.copy(ROOT / name, source)
  for package in ("seerjax", "pallas_kernels", "experiments", "tests"):
    shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
  # Nano may be untrained; files in its folder must be included all the same.
  (source / "seerjax" / "models" / "nano").mkdir(exist_ok=True)
  (source / "seerjax" / "models" / "nano" / "any.json").write_text("{}")
  return source


@pytest.fixture(scope="module")
def wheel_names(source: pathlib.Path) -> set[str]:
  """Names of the files in the built wheel."""
  pytest.importorskip("setuptools", minversion="77", reason="older ones cannot read our licence")
  options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
  done = subprocess.run(
    [sys.executable, "-m", "pip", "wheel", *options, "-w", str(source / "dist"), str(source)],
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stdout + done.stderr
  (wheel,) = (source / "dist").glob("seerjax-*.whl")
  with zipfile.ZipFile(wheel) as archive:
    return set(archive.namelist())


def test_the_wheel_holds_our_two_packages_only(wheel_names: set[str]):
  tops = {name.split("/")[0] for name in wheel_names if ".dist-info/" not in name}
  assert tops == {"seerjax", "pallas_kernels"}


def test_the_wheel_holds_every_module_and_the_type_marks(wheel_names, source):
  for package in ("seerjax", "pallas_kernels"):
    modules = {p.relative_to(source).as_posix() for p in (source / package).rglob("*.py")}
    assert modules <= wheel_names
    assert f"{package}/py.typed" in wheel_names


def test_the_wheel_holds_the_models(wheel_names, source):
  for name in ("nano", "nano_draft", "nano_moe", "nano_sleep"):
    files = [p for p in (source / "seerjax" / "models" / name).rglob("*") if p.is_file()]
    expected = {p.relative_to(source).as_posix() for p in files}
    assert expected and expected <= wheel_names


def test_the_wheel_holds_the_servers_page(wheel_names: set[str]):
  assert "seerjax/serve/page.html" in wheel_names


def test_the_wheel_holds_the_licences(wheel_names: set[str]):
  names = {name.split("/")[-1] for name in wheel_names if ".dist-info/licenses/" in name}
  assert {"LICENSE", "THIRD_PARTY.md"} <= names
