"""The statistics of sleep-time compute by hand, a report, and errors."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import reader

from experiments.sleep import nano as sleep_time, tables as sleep_tables
from experiments.sleep.tables import TEST, WAKE, About, Arm, Cells
from seerjax.sleep import prompts as prompts_lib, thinkers
from seerjax.sleep.protocol import Row

ROOT = pathlib.Path(__file__).parents[3]


def about(context: str, number: int, **fields) -> About:
  values = dict(
    part="main", problem_id=f"{context}{number}", context_id=context, seed=0, num_steps=number + 1,
    context_steps=3, context_tokens=40, logprob=-1.0,
  ) | fields  # fmt: skip
  return About(**values)


def row(context: str, number: int, arm: str, reward: float, tokens: int, **fields) -> Row:
  values = dict(
    context_id=context, problem_id=f"{context}{number}", arm=arm, verbosity=3,
    num_parallel=1 if arm == "wake" else 0, max_tokens=99, reward=reward, num_tokens=tokens,
    num_sleep_tokens=40 if arm == "wake" else 0, num_sharing=2,
  ) | fields  # fmt: skip
  return Row(**values)


ABOUT = [about(context, number) for context in "ab" for number in range(2)]
ROWS = [
  row("a", 0, "test", 1, 20), row("a", 1, "test", 0, 30),
  row("b", 0, "test", 0, 10), row("b", 1, "test", 0, 60),
  row("a", 0, "wake", 1, 10), row("a", 1, "wake", 1, 10),
  row("b", 0, "wake", 0, 10), row("b", 1, "wake", 1, 10),
]  # fmt: skip
CELLS = Cells(ROWS, ABOUT)


def test_intervals_are_over_contexts():
  gain = CELLS.right(WAKE) - CELLS.right(TEST)
  assert gain.tolist() == [0, 1, 0, 1]
  found = sleep_tables.mean(CELLS, gain)
  assert found == (0.5, 0.5, 0.5)  # Each context's mean is one half.
  found = sleep_tables.mean(CELLS, CELLS.right(WAKE))
  assert found.value == 0.75 and found.high == pytest.approx(0.75 + 1.96 * 0.25)
  assert found.text(100) == f"75.0 ({100 * found.low:.1f} to {100 * found.high:.1f})"
  columns = {"x": CELLS.tokens(TEST)}
  found = sleep_tables.bootstrap(CELLS, columns, lambda means: means["x"])
  assert found == (30, 25, 35)  # Of two contexts, of 25 and 35, drawn twice.
  assert sleep_tables.bootstrap(CELLS, columns, lambda means: means["x"]) == found


def test_the_baseline_is_interpolated_and_never_falls():
  extra = [
    row(c, n, "test", reward, tokens, verbosity=0)
    for c, n, reward, tokens in (("a", 0, 1, 4), ("a", 1, 1, 4), ("b", 0, 0, 4), ("b", 1, 0, 4))
  ]
  cells = Cells([*ROWS, *extra], ABOUT)
  arms = [TEST, Arm("test", 0)]
  # At 4 tokens half are right, at 30 a quarter: at 10 the baseline is still right in half.
  gain = sleep_tables.gain_at_equal_tokens(cells, cells, WAKE, arms)
  assert gain.value == pytest.approx(0.25)


def test_prices_cross_where_sleep_has_paid():
  assert sleep_tables.price(CELLS, WAKE, 2.0, 2) == 40
  assert sleep_tables.price(CELLS, TEST, 2.0, 2) == 60
  # First questions save 10 and 0, second ones 20 and 50: 5 and 35 in the mean, 40 have to be paid.
  assert sleep_tables.crossing(CELLS, CELLS, TEST, WAKE, 1.0) == 2.0
  assert sleep_tables.crossing(CELLS, CELLS, TEST, WAKE, 2.0) == pytest.approx(1 + 30 / 70)
  assert sleep_tables.crossing(CELLS, CELLS, TEST, WAKE, 0.5) == math.inf


def test_other_contexts_are_foreseen_by_their_lengths_alone():
  known = [one._replace(context_tokens=40 if one.context_id == "a" else 400) for one in ABOUT]
  cells = Cells(ROWS, known)
  # Answers without sleep took 25 tokens in the short context, 35 in the long one.
  for name, full in (("a", 25), ("b", 35)):
    others = cells.some(lambda one, name=name: one.context_id == name)
    assert sleep_tables.foreseen(cells, cells, TEST, WAKE, others) == (40, 10, full)
  assert sleep_tables.foreseen(cells, cells, TEST, WAKE, cells) == (40, 10, 30)


def test_steps_and_long_answers():
  one, two = sleep_tables.by_steps(CELLS, CELLS, lambda one: one.num_steps)
  assert (one.name, two.name, one.count) == ("1", "2", 2)
  assert (two.test, two.wake, two.test_tokens, two.ratio) == (0, 1, 45, 4.5)
  (only,) = sleep_tables.by_steps(CELLS, CELLS, lambda one: 12)
  assert only.name == "10 or more" and only.count == 4
  assert sleep_tables.where_test_is_long(CELLS, CELLS, 55).ratio == 6
  assert sleep_tables.where_test_is_long(CELLS, CELLS, 99).count == 0


def test_the_planner_learns_when_it_pays():
  many = [about(f"c{i:03}", n) for i in range(120) for n in range(10)]
  rows = [
    row(one.context_id, int(one.problem_id[-1]), arm, 1, tokens)
    for one in many
    for arm, tokens in (("test", 30), ("wake", 10))
  ]
  cells = Cells(rows, many)
  often = sleep_tables.planned(cells, cells, TEST, WAKE, 1.0, 5.0)
  rarely = sleep_tables.planned(cells, cells, TEST, WAKE, 1.0, 1.2)
  assert often.always < often.never and often.num_slept > 90
  assert rarely.never < rarely.always and rarely.num_slept < 40
  assert max(often.excess, rarely.excess) < 0.1
  assert min(often.planner, often.never) > often.always


def test_a_gain_that_grows_with_predictability_has_a_slope():
  known = [
    about(f"c{i}", n, logprob=-3.0 + 0.01 * (2 * i + n)) for i in range(100) for n in range(2)
  ]
  rows = []
  for one in known:
    number = int(one.problem_id[-1])
    right = float(one.logprob > -2.0)
    rows.append(row(one.context_id, number, "test", 0, 9))
    rows.append(row(one.context_id, number, "wake", right, 9))
  found = sleep_tables.by_predictability(Cells(rows, known), TEST, WAKE)
  assert found.gains == pytest.approx((0, 0, 0.5, 1, 1), abs=0.03) and found.slope.low > 0
  flat = sleep_tables.by_predictability(Cells(rows, known), TEST, TEST)
  assert flat.slope == (0, 0, 0)


def test_a_part_of_the_questions_and_a_missing_row():
  first = CELLS.some(lambda one: one.context_id == "a")
  assert first.tokens(TEST).tolist() == [20, 30] and first.starts.tolist() == [0]
  with pytest.raises(ValueError, match="got 3 rows of .*'test'.*, expected one of each of 4"):
    Cells(ROWS[1:], ABOUT)


def test_a_question_that_follows_from_its_context_is_likelier():
  scored = []

  def score(tokens):
    scored[:] = tokens
    return tuple(-float(i) for i in range(1, len(tokens)))

  task = sleep_time.StatefulWordProblems()
  problem = task.questions("heldout", 0)[0]
  found = sleep_time.predictability(
    score, reader.TOKENIZER, task, problem.context, problem.question
  )
  ids = reader.TOKENIZER.encode(f" {problem.question}")
  start = next(i for i in range(len(scored)) if scored[i : i + len(ids)] == ids)
  # Token i has the score -i: the mean over the question's own places.
  assert found == pytest.approx(-(start + (len(ids) - 1) / 2))


@pytest.mark.thorough
def test_a_report_of_all_arms_has_every_table(tmp_path: pathlib.Path):
  seeds, small = (0, 1), 2
  names = dict(max_samples=2, wake_tokens=48)
  own = [
    part._replace(configs=tuple(dataclasses.replace(one, **names, cuts=(8,) if one.cuts else ())
                                for one in part.configs))
    for part in sleep_time.parts(seeds, small, 2, 2, small, is_taught=True)
  ]  # fmt: skip
  monkey = pytest.MonkeyPatch()
  monkey.setattr(sleep_time, "CUTS", dataclasses.replace(sleep_time.CUTS, cuts=(8,)))
  rows: dict[str, list[Row]] = {}
  known: dict[str, list[About]] = {}
  try:
    for part in own:
      thinker = reader.Reader()
      for found in sleep_time.rows_of(
        part, prompts_lib.taught(part.task), thinkers.asking(thinker)
      ):
        rows.setdefault(part.name, []).extend(found)
      rng = np.random.default_rng(part.seed)
      for one in {row.problem_id: row for row in rows[part.name]}.values():
        if any(have.problem_id == one.problem_id for have in known.get(part.name, [])):
          continue
        known.setdefault(part.name, []).append(
          about(one.context_id, 0, problem_id=one.problem_id, seed=part.seed,
                logprob=-rng.random())
        )  # fmt: skip
    plain = {
      name: [row for row in rows[name] if row.verbosity == sleep_time.WHOLE]
      for name in ("main", "curves")
    }
    sleep_time.report("reader", {"other": plain, "reader": rows}, known, tmp_path)
  finally:
    monkey.undo()
  text = (tmp_path / "tables.md").read_text()
  for title in (
    "Arms of other", "Arms of reader", "Arms of reader, at each length", "T_b(q, c') against",
    "Gain at equal test tokens, 4 contexts", "By the number",
    "Price of a question", "Break-even", "The planner", "quintile", "Several rewrites, 4 contexts",
    "law of Zipf",
  ):  # fmt: skip
    assert title in text
  assert (tmp_path / "sleep.png").stat().st_size > 1000


@pytest.mark.thorough
@pytest.mark.parametrize(
  "flag, message",
  [
    ("--num_contexts=1", "got 1 and ['0', '1', '2'], expected 2 to 700 contexts of each seed"),
    ("--seeds=5", "got 100 and ['5'], expected 2 to 700 contexts of each seed, and seeds of 0 to"),
    ("--rivals=nano-sleep", "--rivals: got ['nano-sleep'] with --model=nano-sleep, expected other"),
  ],
)
def test_bad_flags_are_refused(flag: str, message: str, tmp_path: pathlib.Path):
  command = [sys.executable, "-m", "experiments.sleep.nano", f"--workdir={tmp_path}", flag]
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
  assert done.returncode == 2 and message in done.stderr, done.stderr
