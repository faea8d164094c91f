"""Orders are parsed as by the contest's tester, and played."""

from __future__ import annotations

import pytest

from experiments.problems import contest
from experiments.problems.apple_machines import rules as apple_rules
from experiments.problems.contest import apple_machines

APPLES = contest.AppleMachinesContest()
# Level 0 earns 1, 2 and 3 apples for each kind; the first machines cost 1, 2 and 4 apples.
TOY = apple_rules.Instance(
  apples=(1, 2, 3), costs=((1, 2, 4), (3, 50, 60), (700, 800, 900), (9000, 9000, 9000))
)


def test_inputs_of_machines_have_the_contests_form():
  assert apple_machines.machines_input(TOY) == (
    "3 4 500 1\n1 2 3\n1 2 4\n3 50 60\n700 800 900\n9000 9000 9000\n"
  )
  rows = [list(map(int, line.split())) for line in APPLES.case_input(0).decode().splitlines()]
  assert rows[0] == [10, 4, 500, 1] and [len(row) for row in rows[1:]] == [10] * 5
  assert rows[1] == sorted(rows[1]) and rows[1][0] == rows[2][0] == 1


def test_three_turns_by_hand():
  # Turn 0: (0, 0) for 1 apple, 0 left; it works once: 1 apple.
  assert apple_machines.play(TOY, [(0, 0)]) == 1
  # Turn 1: nothing is bought, 2 apples. Turn 2: (0, 1) for 2; 0 left, 1 + 2 are added.
  assert apple_machines.play(TOY, [(0, 0), None, (0, 1)]) == 3
  # Turn 3: (1, 0) for 3; 3 are added, and then there are 2 of (0, 0): 2 + 2 more in turn 4.
  assert apple_machines.play(TOY, [(0, 0), None, (0, 1), (1, 0)]) == 3
  assert apple_machines.play(TOY, [(0, 0), None, (0, 1), (1, 0), None]) == 7
  # A second (0, 0) costs twice as much, and has power 2: 3 of it, 2 apples each, and 2 of (0, 1).
  assert apple_machines.play(TOY, [(0, 0), None, (0, 1), (1, 0), None, (0, 0)]) == 7 - 2 + 3 * 2 + 2
  assert apple_machines.play(TOY, []) == 1
  assert apple_machines.play(TOY, [(0, 0), (0, 0)]) == (
    "turn 1: got an order of level 0 and kind 0 for 2 apples, expected at most the 1 that are there"
  )


def test_turns_agree_with_the_plans_of_apple_machines():
  problem = apple_rules.instance(3)
  plan = [(0, 0, 40), (0, 3, 90), (1, 3, 300), (0, 3, 480)]
  turns = apple_rules.trace(problem, plan)
  orders = [plan[turn.run][:2] if turn.is_bought else None for turn in turns]
  assert apple_machines.play(problem, orders) == turns[-1].apples
  output = "".join("-1\n" if order is None else f"{order[0]} {order[1]}\n" for order in orders)
  points = contest.AppleMachinesContest(first_case=3).value(0, output)
  assert points == apple_rules.points(turns[-1].apples)


@pytest.mark.parametrize(
  ("output", "reason"),
  [
    ("-1\n" * 499, "output: got 499 turns, expected 500"),
    ("-1\n" * 499 + "0", "turn 499: got level 0 alone, expected level and kind, or -1"),
    ("4 0\n", "turn 0: got level 4 and kind 0, expected 0 to 3 and 0 to 9"),
    ("-1 0 -1\n", "turn 1: got level 0 and kind -1, expected 0 to 3 and 0 to 9"),
    ("0 0\n0 x\n", "output: got 'x' as word 3, expected an integer"),
    ("3 9\n" + "-1\n" * 499, "turn 0: got an order of level 3 and kind 9 for"),
  ],
)
def test_orders_that_cannot_be_are_refused(output: str, reason: str):
  value = APPLES.value(0, output)
  assert isinstance(value, str) and reason in value


def test_orders_are_read_as_the_contests_tester_reads_them():
  output = "# a plan\n+0 0\n" + "-1\n  # and then\n" * 499
  assert apple_machines.read_orders(output, 500) == [(0, 0), *[None] * 499]
  # Anything after the last turn is ignored, valid or not.
  assert apple_machines.read_orders(output + "3 9\nend\n", 500) == [(0, 0), *[None] * 499]
  assert apple_machines.read_orders("# -1\n", 1) == "output: got 0 turns, expected 1"
  assert "'#' as word 1" in apple_machines.read_orders("0 # 1\n", 1)
