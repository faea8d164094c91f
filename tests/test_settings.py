"""The settings of tests/conftest.py are in force."""

from __future__ import annotations

from collections.abc import Callable
import json
import os
import pathlib
import subprocess
import sys
from typing import NamedTuple
import warnings

from hypothesis import given, strategies as st
import jax
from jax import dtypes
import jax.numpy as jnp
import jaxtyping
import pytest

from seerjax import numerics, types

ROOT = pathlib.Path(__file__).parents[1]


def test_there_are_eight_devices():
  assert jax.device_count() == 8


def test_rank_promotion_raises():
  with pytest.raises(ValueError, match="rank_promotion"):
    jnp.add(jnp.ones((2, 3)), jnp.ones(3))


def test_dtype_promotion_is_standard_here():
  assert (jnp.ones(2, jnp.bfloat16) + jnp.ones(2, jnp.float32)).dtype == jnp.float32


def test_dtype_promotion_is_strict_where_asked(strict_promotion: None):
  with pytest.raises(dtypes.TypePromotionError):
    jnp.add(jnp.ones(2, jnp.bfloat16), jnp.ones(2, jnp.float32))


@given(st.integers(0, 3))
def test_settings_go_with_hypothesis(value: int):
  assert value in range(4)


def test_annotations_are_checked():
  with pytest.raises(jaxtyping.TypeCheckError):
    numerics.require_same("no mapping", {}, what="this")  # pyright: ignore[reportArgumentType]


def test_an_int_is_welcome_where_a_float_is_asked_for():
  assert types.SamplingParams(temperature=1).temperature == 1


def test_annotations_can_be_left_unchecked(unchecked_annotations: None):
  with pytest.raises(TypeError, match="not iterable"):
    numerics.require_same(7, {}, what="this")  # pyright: ignore[reportArgumentType]


def test_the_seed_is_stable_in_a_session(seed: int):
  assert 0 <= seed < 2**30


def test_warnings_from_our_packages_are_errors():
  # As a module of ours would give it: the filter reads the name of the module.
  with pytest.raises(UserWarning, match="from us"):
    warnings.warn_explicit("from us", UserWarning, "linear.py", 1, module="seerjax.ops.linear")
  with pytest.warns(UserWarning, match="from them"):
    warnings.warn_explicit("from them", UserWarning, "core.py", 1, module="elsewhere")


# This session may have a share of the tests.
ALL_FILES = {"SEERJAX_TEST_SHARE": "1", "SEERJAX_TEST_SHARE_OF_THOROUGH": "1"}
LAUNCHER = "tests/launch/test_local.py"  # A thorough file, in a thorough folder.
# Arguments of a session, and whether it runs that file.
SESSIONS = (
  ([LAUNCHER], True),
  (["--everyday", "tests/launch"], False),
  (["--everyday", LAUNCHER], True),
  (["--everyday", "--whole=", LAUNCHER], False),
  (["--everyday", f"--whole=tests/x.py,{LAUNCHER}", "tests/launch"], True),
)


@pytest.fixture(scope="module")
def collected() -> list[str]:
  """What each of `SESSIONS` says that it would run, all asked for in one process, of seed 7."""
  program = """
import json, sys, pytest
for arguments in json.loads(sys.argv[1]):
  pytest.main(["-p", "no:cacheprovider", "--co", *arguments])
  print("the next session", flush=True)
"""
  done = subprocess.run(
    [sys.executable, "-c", program, json.dumps([arguments for arguments, _ in SESSIONS])],
    cwd=ROOT,
    env=os.environ | ALL_FILES | {"SEERJAX_TEST_SEED": "7"},
    capture_output=True,
    text=True,
    check=False,
  )
  said = done.stdout.split("the next session")[:-1]
  assert len(said) == len(SESSIONS), done.stdout + done.stderr
  return said


@pytest.mark.thorough
def test_a_seed_repeats_a_session(collected: list[str]):
  assert all("SEERJAX_TEST_SEED=7" in said for said in collected), collected


class Item(NamedTuple):
  """What a draw reads of a test."""

  nodeid: str
  path: pathlib.Path
  thorough: bool

  def get_closest_marker(self, name: str) -> object | None:
    return name if self.thorough and name == "thorough" else None


def test_half_of_the_thorough_tests_are_drawn_with_all_their_parameters(request):
  (conftest,) = (
    plugin
    for name, plugin in request.config.pluginmanager.list_name_plugin()
    if name.endswith("tests/conftest.py")
  )
  items = [
    Item(f"{file}::test_{number}[{part}]", ROOT / file, dear)
    for file in ("tests/ops/test_x.py",)
    for number in range(8)
    for part in "ab"
    for dear in [number < 6]
  ]
  left_out = {}
  for seed in ("7", "7 again", "8"):
    left_out[seed] = conftest.undrawn_thorough_tests(items, 0.5, seed.split()[0])
    names = {item.nodeid.partition("[")[0] for item in left_out[seed]}
    # Three of the six that are thorough, each with both parameters.
    assert len(names) == 3 and len(left_out[seed]) == 6
    assert all(item.thorough for item in left_out[seed])
  assert left_out["7"] == left_out["7 again"] != left_out["8"]
  assert not conftest.undrawn_thorough_tests(items, 1, "7")


@pytest.mark.thorough
def test_every_day_what_is_thorough_runs_only_where_it_is_named(collected: list[str]):
  for (arguments, found), said in zip(SESSIONS, collected, strict=True):
    assert ("<Module test_local.py>" in said) == found, (arguments, said)


@pytest.mark.long  # As the option itself, which is of `launch/test.sh --long`.
def test_a_session_goes_on_after_what_passed(tmp_path: pathlib.Path):
  names = ("test_there_are_eight_devices", "test_a_session_is_worth_telling_of")
  finished = tmp_path / "finished.txt"
  command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
  command += [f"--finished={finished}", *(f"{__file__}::{name}" for name in names)]

  def session(fails: str, *options: str) -> str:
    environment = os.environ | ALL_FILES | {"SEERJAX_TEST_FAILS": fails}
    done = subprocess.run(
      [*command, *options], env=environment, capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr

  said = session("1", "-n", "1")
  assert "1 failed, 1 passed" in said, said
  assert finished.read_text() == f"tests/test_settings.py::{names[0]}\n"
  said = session("")
  assert "1 passed, 1 deselected" in said, said
  events, name = finished.read_text().splitlines()[1:]
  assert events == "# this session: tests 1"
  assert name == f"tests/test_settings.py::{names[1]}"


def test_a_session_is_worth_telling_of(tell_events: Callable[..., None]):
  assert not os.environ.get("SEERJAX_TEST_FAILS")
  tell_events("this session", {"tests": 1}, expected=("tests",))
