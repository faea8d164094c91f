"""The settings of tests/conftest.py are in force."""

from __future__ import annotations

from collections.abc import Callable
import json
import os
import pathlib
import subprocess
import sys
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
  # As raised from a module of the library: the filter matches the module's name.
  with pytest.raises(UserWarning, match="from us"):
    warnings.warn_explicit("from us", UserWarning, "linear.py", 1, module="seerjax.ops.linear")
  with pytest.warns(UserWarning, match="from them"):
    warnings.warn_explicit("from them", UserWarning, "core.py", 1, module="elsewhere")


# This session may have a share of the tests.
ALL_FILES = {"SEERJAX_TEST_SHARE": "1", "SEERJAX_TEST_SHARE_OF_THOROUGH": "1"}
LAUNCHER = "tests/launch/test_local.py"  # A thorough file, in a thorough folder.
# Arguments of a session, the share of thorough tests that it draws, and whether it runs that file.
SESSIONS = (
  ([LAUNCHER], "1", True),
  (["--everyday", "tests/launch"], "1", False),
  (["--everyday", LAUNCHER], "1", True),
  (["--everyday", "--whole=", LAUNCHER], "1", False),
  (["--everyday", f"--whole=tests/x.py,{LAUNCHER}", "tests/launch"], "1", True),
  (["tests/launch"], "1", True),
  (["tests/launch"], "0", False),
  ([f"--concerned={LAUNCHER}", "tests/launch"], "0", True),
)


@pytest.fixture(scope="module")
def collected() -> list[str]:
  """The tests that each of `SESSIONS` would run, collected in one process with seed 7."""
  program = """
import json, os, sys, pytest
for arguments, share, _ in json.loads(sys.argv[1]):
  os.environ["SEERJAX_TEST_SHARE_OF_THOROUGH"] = share
  pytest.main(["-p", "no:cacheprovider", "--co", *arguments])
  print("the next session", flush=True)
"""
  done = subprocess.run(
    [sys.executable, "-c", program, json.dumps(SESSIONS)],
    cwd=ROOT,
    env=os.environ | ALL_FILES | {"SEERJAX_TEST_SEED": "7"},
    capture_output=True,
    text=True,
    check=False,
  )
  outputs = done.stdout.split("the next session")[:-1]
  assert len(outputs) == len(SESSIONS), done.stdout + done.stderr
  return outputs


@pytest.mark.thorough
def test_a_seed_repeats_a_session(collected: list[str]):
  assert all("SEERJAX_TEST_SEED=7" in output for output in collected), collected


@pytest.fixture
def conftest(request: pytest.FixtureRequest):
  (found,) = (
    plugin
    for name, plugin in request.config.pluginmanager.list_name_plugin()
    if name.endswith("tests/conftest.py")
  )
  return found


NAMES = [
  f"tests/{file}.py::test_{number}"
  for file in ("ops/test_x", "ops/test_y", "run/test_z")
  for number in range(200)
]


def test_a_share_of_the_thorough_tests_is_drawn_by_the_seed(conftest):
  drawn = {seed: conftest.drawn_thorough_tests(NAMES, 0.5, str(seed)) for seed in (7, 8)}
  assert all(250 < len(names) < 350 for names in drawn.values())
  assert drawn[7].keys() != drawn[8].keys()
  assert drawn[7] == conftest.drawn_thorough_tests(reversed(NAMES), 0.5, "7")
  assert {*drawn[7].values()} == {"lottery"}
  # Each test is drawn independently, so a file can be skipped before it is imported.
  few = conftest.drawn_thorough_tests(NAMES[:200], 0.5, "7")
  assert few.keys() == {name for name in drawn[7] if name in NAMES[:200]}
  assert conftest.drawn_thorough_tests(NAMES, 1, "7").keys() == {*NAMES}


@pytest.mark.parametrize(
  "concerned, files",
  [
    ((), set()),
    (("tests/ops/test_x.py",), {"ops/test_x"}),
    (("tests/run",), {"run/test_z"}),
    # The number is bounded for any change; named files come before the rest of their room.
    (("tests/ops", "tests/ops/test_y.py", "tests/run"), {"ops/test_y"}),
    (("tests/models",), set()),
  ],
)
def test_thorough_tests_of_what_changed_are_drawn_beside_the_lottery(
  conftest, concerned: tuple[str, ...], files: set[str]
):
  paths = [pathlib.Path(path) for path in concerned]
  drawn = conftest.drawn_thorough_tests(NAMES, 0.025, "7", paths)
  lottery = conftest.drawn_thorough_tests(NAMES, 0.025, "7")
  assert drawn.items() >= lottery.items()
  of_changes = {name for name, why in drawn.items() if why == "of what changed"}
  assert len(of_changes) == (conftest.MAX_OF_CHANGES if files else 0)
  assert {name[len("tests/") : name.index(".py")] for name in of_changes} == files
  fewer = conftest.drawn_thorough_tests(NAMES[:5], 0, "7", [pathlib.Path("tests/ops")])
  assert fewer == dict.fromkeys(NAMES[:5], "of what changed")


def test_a_share_of_the_files_holds_more_of_the_contract(conftest):
  everything = conftest.files_of_share(1.0, "7", frozenset())
  contract = {path for path in everything if conftest.is_of_contract(path)}
  none = conftest.files_of_share(0.0, "7", frozenset())
  assert none < contract and len(none) == round(conftest.SHARE_OF_CONTRACT * len(contract))
  half = conftest.files_of_share(0.5, "7", frozenset())
  assert len(half & contract) == round(len(contract) / 2) and half != everything
  assert half != conftest.files_of_share(0.5, "8", frozenset())
  ignored = frozenset({conftest.TESTS / "run"})
  assert not any(ignored & {*path.parents} for path in conftest.files_of_share(1.0, "7", ignored))


@pytest.mark.thorough
def test_what_is_thorough_runs_where_it_is_named_drawn_or_changed(collected: list[str]):
  for (arguments, share, found), output in zip(SESSIONS, collected, strict=True):
    assert ("<Module test_local.py>" in output) == found, (arguments, share, output)


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

  output = session("1", "-n", "1")
  assert "1 failed, 1 passed" in output, output
  assert finished.read_text() == f"tests/test_settings.py::{names[0]}\n"
  output = session("")
  assert "1 passed, 1 deselected" in output, output
  events, name = finished.read_text().splitlines()[1:]
  assert events == "# this session: tests 1"
  assert name == f"tests/test_settings.py::{names[1]}"


def test_a_session_is_worth_telling_of(tell_events: Callable[..., None]):
  assert not os.environ.get("SEERJAX_TEST_FAILS")
  tell_events("this session", {"tests": 1}, expected=("tests",))
