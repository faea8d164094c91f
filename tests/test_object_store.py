"""Checkpoints in an object store exist exactly when their marker does."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import signal
import subprocess
import sys

from etils import epath
import jax.numpy as jnp
import numpy as np
import object_files
import pytest

from seerjax import checkpoint, object_store

FINGERPRINT = {"digest": "aaaa"}
STATE = {"w": jnp.arange(6.0).reshape(2, 3), "none": jnp.zeros((0, 2)), "n": np.arange(3)}
SUPPORT = str(pathlib.Path(__file__).parent / "support")


@pytest.fixture
def place(tmp_path: pathlib.Path) -> str:
  (tmp_path / "store").mkdir()
  return f"{object_files.SCHEME}{tmp_path}/store!bucket/run"


def save(place: str | pathlib.Path, step: int, **options) -> object:
  state = {**STATE, "w": STATE["w"] + step}
  return checkpoint.save(
    place, step, state, host_state={"step": step}, fingerprint=FINGERPRINT, **options
  )


def objects(place: str) -> list[str]:
  return [name for name, _ in object_store.files(epath.Path(place))]


def test_a_checkpoint_comes_back_bit_for_bit(place: str):
  save(place, 3, parts={"extra": {"x": jnp.ones(4)}})
  assert checkpoint.steps(place) == (3,)
  assert checkpoint.read_host_state(place) == {"step": 3}
  restored = checkpoint.restore(place, STATE, fingerprint=FINGERPRINT)
  assert (restored.step, restored.host_state) == (3, {"step": 3})
  assert np.array_equal(restored.state["w"], STATE["w"] + 3)
  assert restored.state["none"].shape == (0, 2) and isinstance(restored.state["n"], np.ndarray)
  part = checkpoint.restore_part(place, "extra", {"x": jnp.zeros(4)})
  assert part["x"].tolist() == [1, 1, 1, 1]
  assert checkpoint.restore_part(place, "other", {}) is None
  with pytest.raises(ValueError, match="got step 3, which .* already holds"):
    save(place, 3)


def test_old_ones_go_and_kept_ones_stay(place: str):
  for step in range(5):
    save(place, step, keep_latest=1, keep_steps=(2,))
  assert checkpoint.steps(place) == (2, 4)
  assert {name.partition("/")[0] for name in objects(place)} == {"step_00000002", "step_00000004"}


SAVES = """
import sys
sys.path[:0] = sys.argv[2:]
import object_files, test_object_store
test_object_store.save(sys.argv[1], 7)
"""


@pytest.mark.parametrize(
  "last",
  [
    "step_00000007/checkpoint.json",
    pytest.param("state/manifest.ocdbt", marks=pytest.mark.thorough),
  ],
)
def test_a_copy_that_was_cut_off_is_no_checkpoint(place: str, last: str):
  save(place, 5)
  done = subprocess.run(
    [sys.executable, "-c", SAVES, place, SUPPORT, str(pathlib.Path(__file__).parent)],
    env=os.environ | {"OBJECTS_DIE_AT": last},
    cwd=pathlib.Path(__file__).parents[1],
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == -signal.SIGKILL, done.stderr
  found = [name for name in objects(place) if name.startswith("step_00000007/")]
  # Only the marker is missing from the whole copy; part of the other copy exists, too.
  assert found and "step_00000007/checkpoint.json" not in found
  assert checkpoint.steps(place) == (5,) and checkpoint.latest_step(place) == 5
  assert checkpoint.restore(place, STATE, fingerprint=FINGERPRINT).step == 5
  with pytest.raises(ValueError, match=r"got step 7 of .*expected one of \(5,\)"):
    checkpoint.restore(place, STATE, fingerprint=FINGERPRINT, step=7)
  # The run repeats the step, over the remains.
  save(place, 7)
  assert checkpoint.restore(place, STATE, fingerprint=FINGERPRINT).step == 7
  # Twin: with only the marker, the copy would count as whole, and be found damaged.
  for name, file in object_store.files(epath.Path(place) / "step_00000007"):
    if name.startswith("state/"):
      file.unlink()
  assert checkpoint.steps(place) == (5, 7)
  with pytest.raises(checkpoint.Damage, match="got no file"):
    checkpoint.restore(place, STATE, fingerprint=FINGERPRINT)


@pytest.mark.parametrize("kind", ["altered", "missing", "description"])
def test_a_damaged_one_is_set_aside_by_its_marker(place: str, kind: str):
  save(place, 1)
  save(place, 2)
  folder = epath.Path(place) / "step_00000002"
  if kind == "description":
    (folder / "checkpoint.json").write_bytes(b"{")
  else:
    name, file = next((n, f) for n, f in object_store.files(folder) if n.startswith("state/"))
    file.write_bytes(bytes(9)) if kind == "altered" else file.unlink()
    assert name
  (message,) = checkpoint.set_aside_damaged(place)
  assert "DAMAGED CHECKPOINT of step 2" in message and "damaged_checkpoint.json" in message
  assert checkpoint.steps(place) == (1,)
  assert checkpoint.restore(place, STATE, fingerprint=FINGERPRINT).step == 1
  assert checkpoint.set_aside_damaged(place) == []  # The last one stays, whatever it is.


def test_a_file_in_the_directorys_stead_names_the_place(place: str, tmp_path: pathlib.Path):
  named = tmp_path / "checkpoints"
  named.write_text(f"{place}\n")
  assert checkpoint.latest_step(named) is None
  save(named, 4)
  assert checkpoint.steps(place) == checkpoint.steps(named) == (4,)
  assert named.is_file()


@pytest.mark.parametrize(
  "text, message",
  [
    ("nothing of use", "got a file with the text 'nothing of use', expected a directory"),
    ("", "got a file with the text '', expected"),
    (
      "floppy://a/b",
      "got 'floppy://a/b', expected a URL that etils.epath supports, gs:// or s3://",
    ),
  ],
)
def test_places_that_cannot_be_are_refused(tmp_path: pathlib.Path, text: str, message: str):
  (tmp_path / "checkpoints").write_text(text)
  with pytest.raises(ValueError, match=message):
    checkpoint.steps(tmp_path / "checkpoints")


@pytest.mark.parametrize("scheme, package", [("gs", "gcsfs"), ("s3", "s3fs")])
def test_a_store_without_its_package_names_it(scheme: str, package: str):
  if importlib.util.find_spec(package):
    pytest.skip(f"{package} is installed")
  with pytest.raises(ValueError, match=f"pip install {package}"):
    checkpoint.steps(f"{scheme}://bucket/run")
