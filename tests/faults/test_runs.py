"""A run that meets a fault ends with a clear error, or continues to the bits of an intact run.

Each fault happens at three drawn moments: a full disk, a torn journal, a damaged checkpoint, a
clock jump, a NaN gradient, and a reward that raises, hangs or has a wrong type. Signals at each
moment of a run are tested in `tests/run/test_lifecycle.py`; the records themselves in
`tests/rollout/test_journal.py` and `tests/test_checkpoint.py`.
"""

from __future__ import annotations

import collections
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time

import faults
import numpy as np
import pytest
import small_run
from small_run import PER_STEP, Vowels, assert_equal_bits, records_of, rows_of, train

from seerjax import checkpoint
from seerjax.run import stops
from seerjax.trainer import advantages as advantages_lib
from seerjax.types import Verdict

ROOT = pathlib.Path(__file__).parents[2]
NUM_STEPS = 4
# Verdicts of a run's steps; earlier verdicts belong to an evaluation.
FIRST, LAST = PER_STEP + 1, (NUM_STEPS + 1) * PER_STEP

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("programs_on_disk")]


@pytest.fixture(scope="module")
def whole() -> tuple:
  """The run without faults: (directory, result)."""
  directory, result, _ = small_run.whole_run()
  return directory, result


def assert_came_to_the_same(directory: pathlib.Path, result, whole) -> None:
  """Checks weights and metrics, and that each rollout is present once."""
  expected_in, expected = whole
  assert_equal_bits(result.state, expected.state)
  assert rows_of(directory) == rows_of(expected_in)
  place = lambda one: (one["step"], one["group"], one["member"])
  found, wanted = (
    sorted((one for one in records_of(run) if one["kind"] == "rollout"), key=place)
    for run in (directory, expected_in)
  )
  assert found == wanted and len(found) == NUM_STEPS * PER_STEP


def resume(directory: pathlib.Path, whole) -> None:
  assert_came_to_the_same(directory, train(directory, resume=True), whole)


# The disk.


class Filling(Vowels):
  """Fills a disk, except for some bytes, at one of its verdicts."""

  def __init__(self, stop_at: int, filler: pathlib.Path, spare: int):
    super().__init__(stop_at)
    self.filler, self.spare = filler, spare

  def verdict(self, problem, text):
    if self.num_verdicts + 1 == self.stop_at:
      self.fill()
      self.stop_at = -1
    return super().verdict(problem, text)

  def fill(self) -> None:
    with self.filler.open("wb", buffering=0) as file:
      try:
        while file.write(bytes(4096)):
          pass
      except OSError:
        pass
      file.truncate(max(file.tell() - self.spare, 0))


@pytest.mark.parametrize(
  "what, spare, message",
  [
    # The first file without room fails: a file may have some left in its last block.
    ("journal", 0, r"expected room for (it|them); free some"),
    # There is room for a step's records, but not for the weights.
    ("checkpoint", 2**15, r"checkpoint.* expected room for it; free some"),
  ],
)
def test_a_disk_that_fills_ends_a_run_that_goes_on_when_there_is_room(
  what, spare, message, whole, tmp_path, seed, tell_events
):
  events = collections.Counter()
  last = LAST - 1 if what == "journal" else LAST - PER_STEP  # Before the last checkpoint.
  for moment in faults.moments(seed, last, FIRST):
    with faults.small_disk(tmp_path / f"disk {moment}", 2**26) as disk:
      task = Filling(moment, disk / "filler", spare)
      with pytest.raises(OSError, match=message):
        train(disk / "run", task, checkpoint_every=1)
      events[f"{what} on a full disk"] += 1
      task.filler.unlink()
      resume(disk / "run", whole)
  tell_events("disks", events, (f"{what} on a full disk",))


# Files.


def test_a_journal_that_is_torn_is_cut_and_sampled_again(whole, tmp_path, seed, tell_events):
  events = collections.Counter()
  stopped = small_run.stopped_run()
  data = (stopped / "journal.jsonl").read_bytes()
  # Within the records of the stopped step: records that the last checkpoint covers are on disk.
  records, lines = records_of(stopped), data.splitlines(keepends=True)
  last = max(at for at, one in enumerate(records) if one.get("step", 0) < 2)
  first = sum(map(len, lines[: last + 1]))
  for moment in faults.moments(seed, len(data) - 1, first):
    directory = tmp_path / str(moment)
    shutil.copytree(stopped, directory)
    (directory / "journal.jsonl").write_bytes(data[:moment])
    resume(directory, whole)
    events["torn journal"] += 1
  tell_events("files", events, ("torn journal",))


def test_of_damaged_checkpoints_the_one_before_is_taken_and_said(
  whole, tmp_path, seed, tell_events, caplog
):
  events = collections.Counter()
  for moment in faults.moments(seed, 10**6):
    directory = tmp_path / str(moment)
    shutil.copytree(small_run.stopped_run(), directory)
    assert checkpoint.steps(directory / "checkpoints") == (0, 2)
    files = [*(directory / "checkpoints" / "step_00000002").rglob("*")]
    files = sorted(one for one in files if one.is_file() and one.stat().st_size)
    file = files[moment % len(files)]
    data = bytearray(file.read_bytes())
    data[moment % len(data)] ^= 1 << moment % 8
    file.write_bytes(data)
    caplog.clear()
    resume(directory, whole)
    [message] = [one for one in caplog.messages if "DAMAGED CHECKPOINT of step 2: " in one]
    assert str(file) in message and message.endswith("and the run resumes from step 0.")
    assert (directory / "checkpoints" / "damaged_step_00000002").is_dir()
    events["damaged checkpoint"] += 1
  tell_events("files", events, ("damaged checkpoint",))


# Numbers.


def test_a_gradient_that_is_no_number_ends_a_run_before_its_update(
  whole, tmp_path, seed, tell_events
):
  events = collections.Counter()
  for moment in faults.moments(seed, NUM_STEPS):
    left = moment

    def advantages(rewards: np.ndarray) -> np.ndarray:
      nonlocal left
      left -= 1
      usual = advantages_lib.for_algorithm(small_run.CONFIG.loss.algorithm, rewards)
      return usual if left else usual * np.float32("nan")

    with pytest.raises(ValueError, match=r"(?i)nan|finite"):
      small_run.rl.train(
        small_run.CONFIG, small_run.policy(), Vowels(), tmp_path / str(moment),
        log=lambda line: None, programs=small_run.programs_of(small_run.CONFIG),
        advantages=advantages,
      )  # fmt: skip
    events["gradient of NaN"] += 1
    resume(tmp_path / str(moment), whole)
  tell_events("numbers", events, ("gradient of NaN",))


# The reward.

WRONG = {
  "raises": (lambda: 1 / 0, "got ZeroDivisionError"),
  "is a text": (lambda: "1.0", "got .*str.*, expected"),
  "is a verdict of a text": (
    lambda: Verdict(reward="1.0", correct=True, well_formed=True),  # pyright: ignore
    "got reward '1.0' for problem",
  ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_reward_that_raises_or_lies_about_its_type_is_named(
  kind, whole, tmp_path, seed, tell_events, unchecked_annotations
):
  stop, message = WRONG[kind]
  events = collections.Counter()
  for moment in faults.moments(seed, LAST, FIRST):
    with pytest.raises(ValueError, match=message):
      train(tmp_path / str(moment), Vowels(stop_at=moment, stop=stop))
    events[f"reward that {kind}"] += 1
    resume(tmp_path / str(moment), whole)
  tell_events("rewards", events, (f"reward that {kind}",))


def test_a_run_whose_reward_hangs_ends_within_the_grace_of_a_sigterm(
  whole, tmp_path, seed, tell_events
):
  events = collections.Counter()
  grace = 30.0  # Seconds between SIGTERM and SIGKILL, where a scheduler ends jobs.
  for moment in faults.moments(seed, LAST, FIRST):
    directory = tmp_path / str(moment)
    ended = threading.Event()

    def hang(ended=ended) -> Verdict:
      threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
      while not ended.wait(0.1):
        pass
      raise AssertionError("nothing ended it")

    begin = time.monotonic()
    with pytest.raises(stops.Interrupted, match=r"by SIGTERM after step \d of 4; --resume"):
      train(directory, Vowels(stop_at=moment, stop=hang))
    assert time.monotonic() - begin < grace + 60  # This includes its earlier steps.
    events["reward that hangs"] += 1
    resume(directory, whole)
  tell_events("rewards", events, ("reward that hangs",))


# The clock.

JUMPS = """
import sys, time
offset = {"time": 0.0, "monotonic": 0.0}
def jumping(name, usual):
  return lambda: usual() + offset[name]
time.time, time.monotonic = (jumping(name, getattr(time, name)) for name in offset)
import small_run
moments = [int(word) for word in sys.argv[2:]]
# A year on, an hour back, a day on: what no run may ask is how late it is.
jumps = [(3e7, 3e7), (-3600.0, 0.0), (86400.0, 86400.0)]
class Task(small_run.Vowels):
  def verdict(self, problem, text):
    if self.num_verdicts + 1 in moments:
      wall, since_boot = jumps.pop()
      offset["time"] += wall
      offset["monotonic"] += since_boot
    return super().verdict(problem, text)
small_run.train(sys.argv[1], Task())
assert not jumps
"""


def test_a_clock_that_jumps_moves_nothing(whole, tmp_path, seed, tell_events):
  moments = faults.moments(seed, LAST, FIRST)
  done = subprocess.run(
    [sys.executable, "-c", JUMPS, str(tmp_path / "run"), *map(str, moments)],
    cwd=ROOT, env=faults.environment(), capture_output=True, text=True,
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  # Its weights as in the last step's checkpoint.
  assert_came_to_the_same(tmp_path / "run", train(tmp_path / "run", resume=True), whole)
  tell_events("clocks", {"jump of a clock": len(moments)}, ("jump of a clock",))


# The driver of a cluster's workers.

DRIVER = """
import sys
import small_run
from seerjax.cluster.config import ClusterConfig
small_run.train(
  sys.argv[1],
  small_run.Vowels(int(sys.argv[2]), small_run.kill),
  cluster=ClusterConfig(workers=2, address="local"),
  resume=len(sys.argv) > 3,
)
"""


def test_a_driver_that_is_killed_goes_on_from_its_journal(whole, tmp_path, seed, tell_events):
  events = collections.Counter()
  directory = tmp_path / "run"
  # One run, killed three times on its way: each time some of its sixteen rollouts are judged.
  for moment in faults.moments(seed, 5, 2):
    again = ["again"] if directory.exists() else []
    moment += 0 if again else PER_STEP  # Of the evaluation before.
    done = subprocess.run(
      [sys.executable, "-c", DRIVER, str(directory), str(moment), *again],
      cwd=ROOT, env=faults.environment(), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, (done.returncode, done.stderr)
    events["kill -9 of a driver"] += 1
  resume(directory, whole)
  tell_events("drivers", events, ("kill -9 of a driver",))
