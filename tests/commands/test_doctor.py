"""The command `doctor`: versions, fingerprint and the self-test of this machine."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import subprocess
import sys

import jax
import pytest

import seerjax
from seerjax.commands import doctor
from seerjax.run import presets

ROOT = pathlib.Path(__file__).parents[2]


def test_it_names_every_version():
  found = doctor.versions()
  assert found["seerjax"] == seerjax.__version__ and found["jax"] == jax.__version__
  assert list(found) == ["seerjax", "python", *doctor.PACKAGES]


def test_a_sound_machine_has_invariant_rows_and_a_fingerprint():
  is_sound, text = doctor.examine(presets.main_job().numerics)
  assert is_sound and "self-test in float32: rows are invariant: 0 of" in text
  assert "digest" in text and f"jax_version            {jax.__version__}" in text


def test_the_twin_an_implementation_that_depends_on_the_batch_is_told():
  usual = presets.main_job().numerics
  is_sound, text = doctor.examine(dataclasses.replace(usual, backend="untiled"))
  assert not is_sound and "rows are NOT invariant" in text


@pytest.mark.parametrize(
  ("flag", "message"),
  [
    ("--compute_dtype=float8", "NumericsConfig.compute_dtype: got 'float8'"),
    ("x", "seerjax doctor: got ['x'], expected flags alone"),
  ],
)
def test_what_it_cannot_examine_is_refused(flag, message):
  done = subprocess.run(
    [sys.executable, "-m", "seerjax.commands", "doctor", flag],
    cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True,
  )  # fmt: skip
  assert done.returncode == 2 and done.stderr.startswith(message), done.stderr
