"""Sentences become attempts, with equal results in this process and in worker processes."""

from __future__ import annotations

import collections
import functools
import math
import os
import pathlib
import subprocess
import sys
import time

import numpy as np
import pytest
import tiny_problem

from seerjax.discovery import edits, loading
from seerjax.discovery.attempts import Attempt

ROW = [0, 1, 2, 0, 1, 2]
WRITE, RAISE, STOP = tiny_problem.WRITE, tiny_problem.RAISE, tiny_problem.STOP


def place(index: int) -> int:
  return tiny_problem.FIRST_PLACE + index


def amount(number: int) -> int:
  return tiny_problem.FIRST_AMOUNT + number


def attempt(*tokens: int, seed: int = 0, environment=None) -> Attempt:
  environment = tiny_problem.Row() if environment is None else environment
  return edits.attempt(environment, edits.Job(list(ROW), tokens, seed))


def jobs(num: int) -> list[edits.Job]:
  """Sentences of every kind about rows of digits."""
  random, language = np.random.default_rng(4), tiny_problem.Digits()
  return [
    edits.Job(tiny_problem.Row().start(i), edits.random_sentence(language, random), i)
    for i in range(num)
  ]


# One attempt.


def test_a_sentence_that_holds_is_judged():
  found = attempt(WRITE, place(5), amount(5))
  assert found.status == "ok" and found.artefact == [0, 1, 2, 0, 1, 5]
  # 2*1 + 1*2 + 0*3 + 2*4 + 1*5 + 6*6, by hand.
  assert found.score.is_valid and found.score.value == 53.0 and found.score.reward == 54.0


def test_a_sentence_of_one_that_is_minimised_has_its_value_and_a_reward_that_rises():
  environment = tiny_problem.Row(is_maximised=False)
  found = attempt(WRITE, place(5), amount(5), environment=environment)
  assert found.score.value == 126.0 - 53.0 and found.score.reward == 1 / 74


def test_a_sentence_that_stops_early_is_applied():
  assert attempt(RAISE, STOP).artefact == ROW[::-1]


def test_the_artefact_that_was_given_stays_as_it_is():
  given = list(ROW)
  edits.attempt(tiny_problem.Row(), edits.Job(given, (WRITE, place(0), amount(5)), 0))
  assert given == ROW


def test_what_is_drawn_at_random_follows_from_the_seed():
  drawn = [attempt(RAISE, place(0), amount(0), seed=seed).artefact for seed in range(8)]
  again = [attempt(RAISE, place(0), amount(0), seed=seed).artefact for seed in range(8)]
  assert drawn == again
  # The twin: other seeds, other draws.
  assert len({row[0] for row in drawn if row}) > 1


def test_what_cannot_be_applied_is_malformed_with_the_reason():
  found = attempt(WRITE, place(1), amount(1))
  assert found.status == "malformed" and found.artefact is None
  assert found.message == "got [0, 1, 2, 0, 1, 2] again, expected a change"
  assert found.score.reason == f"malformed: {found.message}"
  assert math.isnan(found.score.value) and found.score.reward == 0.0


def test_what_comes_out_wrong_is_invalid_with_the_verifiers_reason():
  found = attempt(WRITE, place(1), amount(6))
  assert found.status == "invalid" and found.artefact is None
  assert found.score.reason == "invalid: got the digit 6, expected 0 to 5"
  assert not found.score.is_valid and found.score.reward == 0.0


def test_a_long_reason_is_cut_in_the_score_alone():
  def talk():
    raise ValueError("x" * 1000)

  environment = tiny_problem.Row(language=tiny_problem.Digits(stop_at=1, stop=talk))
  found = attempt(RAISE, STOP, environment=environment)
  assert found.score.reason == f"malformed: {'x' * 300}" and found.message == "x" * 1000


@pytest.mark.parametrize(
  "stop, name", [(lambda: 1 / 0, "ZeroDivisionError"), (lambda: sys.exit(0), "SystemExit")]
)
def test_a_defect_of_the_language_is_a_failure_that_says_so(stop, name):
  environment = tiny_problem.Row(language=tiny_problem.Digits(stop_at=1, stop=stop))
  found = attempt(RAISE, STOP, environment=environment)
  assert found.status == "failed" and found.message.startswith(f"apply raised {name}: ")
  assert found.score.reason == f"failed: {found.message}"


# Random sentences.


def test_random_sentences_are_even_in_length_and_where_ids_are_allowed():
  language, random = tiny_problem.Digits(), np.random.default_rng(0)
  counts = [collections.Counter() for _ in language.allowed]
  num = 7000
  for _ in range(num):
    ids = edits.random_sentence(language, random)
    assert len(ids) == (2 if ids[1] == STOP else 3)
    for where, token in enumerate(ids):
      counts[where][token] += 1
  lengths = collections.Counter(stop=counts[1].pop(STOP), whole=counts[2].total())
  for (low, high), found in zip(language.allowed, counts, strict=True):
    assert set(found) == {*range(low, high)} - {STOP}
  for found in (*counts, lengths):
    mean = found.total() / len(found)
    # Five standard deviations of a binomial.
    assert all(abs(count - mean) < 5 * math.sqrt(mean) for count in found.values())


def test_random_sentences_are_never_empty():
  class Stops(tiny_problem.Digits):
    allowed = ((0, 9), (8, 10), (9, 16))  # The stop token first, last, and in between.

  random = np.random.default_rng(0)
  drawn = [edits.random_sentence(Stops(), random) for _ in range(400)]
  lengths = collections.Counter(map(len, drawn))
  assert set(lengths) == {2, 3} and min(lengths.values()) > 150
  assert all(STOP not in ids[:-1] and (ids[-1] == STOP) == (len(ids) == 2) for ids in drawn)
  assert {ids[0] for ids in drawn} == set(range(8))


def test_random_sentences_follow_from_the_generator():
  drawn = [
    [edits.random_sentence(tiny_problem.Digits(), random) for _ in range(10)]
    for random in map(np.random.default_rng, (1, 1, 2))
  ]
  assert drawn[0] == drawn[1] != drawn[2]


# Judges.


def test_a_judge_answers_in_the_order_of_the_jobs_and_counts_its_seconds():
  asked = jobs(100)
  with edits.Judge(tiny_problem.Row(), tiny_problem.Row) as judge:
    found = judge.attempts(asked)
    assert judge.attempts([]) == []
  assert same(found, [edits.attempt(tiny_problem.Row(), job) for job in asked])
  assert {attempt.status for attempt in found} == {"ok", "malformed", "invalid"}
  assert 0 < judge.cpu_seconds < 5 and judge.worker_seconds == 0
  # The twin: another order, other attempts.
  assert not same(found, [edits.attempt(tiny_problem.Row(), job) for job in asked[::-1]])


@pytest.mark.long
@pytest.mark.parametrize("num_workers", [1, 2])
def test_worker_processes_make_the_same_attempts(num_workers):
  # Not a multiple of a worker's batch.
  path, asked = tiny_problem.PATH, jobs(25 * edits.BATCH + 1)
  factory = functools.partial(loading.load, path)
  environment = factory()
  with edits.Judge(environment, factory) as judge:
    expected = judge.attempts(asked)
  with edits.Judge(environment, factory, num_workers) as judge:
    found = [judge.attempts(asked) for _ in range(2)]
    assert judge.cpu_seconds == judge.worker_seconds > 0
  assert same(found[0], expected) and same(found[1], expected)
  assert {attempt.status for attempt in expected} >= {"ok", "malformed"}


DEADLY = """
import os

from tiny_problem import *


class Dies(Digits):
  def apply(self, artefact, tokens, seed):
    os._exit(3)


LANGUAGE = Dies()
"""
ORPHANS = """
import functools, os, sys
from seerjax.discovery import edits, loading

if __name__ == "__main__":
  factory = functools.partial(loading.load, sys.argv[1])
  with edits.Judge(factory(), factory, 2) as judge:
    print(*{judge._pool.submit(os.getpid).result() for _ in range(50)}, flush=True)
    sys.stdin.read()
"""


def environment_variables() -> dict[str, str]:
  root = pathlib.Path(__file__).parents[2]
  paths = [str(root), str(pathlib.Path(tiny_problem.PATH).parent)]
  return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def test_a_worker_that_dies_is_told_of(tmp_path):
  (tmp_path / "deadly.py").write_text(DEADLY)
  factory = functools.partial(loading.load, str(tmp_path / "deadly.py"))
  with (
    edits.Judge(factory(), factory, 1) as judge,
    pytest.raises(edits.WorkerDied, match="got a worker process of digits that died, expected its"),
  ):
    judge.attempts(jobs(1))


@pytest.mark.thorough
def test_workers_end_when_whoever_asked_is_killed(tmp_path):
  (tmp_path / "orphans.py").write_text(ORPHANS)
  command = [sys.executable, str(tmp_path / "orphans.py"), tiny_problem.PATH]
  with subprocess.Popen(
    command,
    env=environment_variables(),
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  ) as parent:
    assert parent.stdout is not None
    workers = [int(word) for word in parent.stdout.readline().split()]
    assert workers and all(is_running(worker) for worker in workers)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 60
    while any(is_running(worker) for worker in workers):
      assert time.monotonic() < deadline, "workers outlive their parent"
      time.sleep(0.1)


def is_running(process: int) -> bool:
  """Returns whether a process exists and is not a zombie, which may never be reaped."""
  try:
    state = pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
  except (FileNotFoundError, ProcessLookupError):
    return False
  return state != "Z"


def same(found: list[Attempt], expected: list[Attempt]) -> bool:
  """Returns whether attempts are equal; NaN, the value of an invalid artefact, equals itself."""
  return list(map(repr, found)) == list(map(repr, expected))


# Errors.


def test_a_problem_without_a_language_is_refused():
  expected = (
    "digits: got a problem without an edit language, expected one; define LANGUAGE, or choose a"
    " model that writes programs with --config.model"
  )
  with pytest.raises(ValueError, match=expected):
    edits.Judge(tiny_problem.Row(language=None), tiny_problem.Row)


def test_a_negative_number_of_workers_is_refused():
  with pytest.raises(ValueError, match="Judge: got num_workers=-1, expected at least 0; 0 judges"):
    edits.Judge(tiny_problem.Row(), tiny_problem.Row, -1)


class TimedRow(tiny_problem.Row):
  def confirm(self, artefact):
    return self.verify(artefact)


def test_workers_side_by_side_are_refused_where_attempts_are_timed():
  environment = TimedRow()
  with pytest.raises(
    ValueError, match="which is timed, expected at most 1, since parallel workers"
  ):
    edits.Judge(environment, TimedRow, 2)
  with edits.Judge(environment, TimedRow, 1) as judge:
    assert judge.worker_seconds == 0
