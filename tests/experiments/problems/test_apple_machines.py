"""Apple machines: what a plan is worth in integers, and edits that nearly always make another."""

from __future__ import annotations

import copy
import decimal
import itertools
import json
import math

import hypothesis
from hypothesis import strategies as st
from matplotlib import figure
import numpy as np
import pytest

from experiments.problems import apple_machines
from seerjax.discovery import environment as environment_lib

ENVIRONMENT = apple_machines.AppleMachines(0)
POLISHING = apple_machines.AppleMachines(0, with_polish=True, polish_steps=100)
LANGUAGE = apple_machines.PlanEdits(ENVIRONMENT.problem)
POLISH_LANGUAGE = apple_machines.PlanEdits(ENVIRONMENT.problem, apple_machines.Polish(100))
PLAIN = apple_machines.Instance(
  apples=(1, 5, *[100] * 8),
  costs=((1, 3, *[9] * 8), (2, 4, *[9] * 8), (3, 9, *[9] * 8), (5, 9, *[9] * 8)),
)
# One that outgrows every int64, which the contest's costs hardly allow.
RICH = apple_machines.Instance(apples=(10**9,) * 10, costs=((1,) * 10, *[(2,) * 10] * 3))
# Plain enough to count with: 20 turns of (0, 0), 40 of (0, 1), 60 of (1, 0).
THREE = [[0, 0, 20], [0, 1, 60], [1, 0, 120]]


def random_plan(draws: np.random.Generator, num_runs: int) -> list[list[int]]:
  """Returns a plan of random machines, of low levels mostly, so that much is bought."""
  ends = np.sort(draws.choice(np.arange(1, 501), num_runs, replace=False))
  levels = np.minimum(draws.geometric(0.5, num_runs) - 1, 3)
  kinds = draws.integers(0, 10, num_runs)
  return [[int(i), int(j), int(e)] for i, j, e in zip(levels, kinds, ends)]


def random_sentence(language: apple_machines.PlanEdits, draws: np.random.Generator) -> list[int]:
  """Returns ids drawn uniformly from those allowed, up to a stop token."""
  tokens = [int(draws.integers(least, end)) for least, end in language.allowed]
  return tokens[: tokens.index(0) + 1] if 0 in tokens else tokens


def polished(temperature: int, edits: list[int]) -> list[int]:
  """Returns a sentence that ends with a polish, at a place among the temperatures."""
  return [104 + temperature, *edits]


def sentence(*edits: tuple[str, int, int, int, int]) -> list[int]:
  """Returns tokens of edits (verb, run, shape, level * 10 + kind, place among the amounts)."""
  tokens = []
  for verb, *fields in edits:
    ranges = LANGUAGE.allowed[1:5]
    tokens += [apple_machines.VERBS.index(verb), *(r[0] + f for r, f in zip(ranges, fields))]
  return tokens if len(edits) == 4 else [*tokens, 0]


@pytest.fixture(scope="module")
def good_plan() -> list[list[int]]:
  """What the best of some thousand random sentences makes of the empty plan, one after another."""
  draws, best, reward = np.random.default_rng(3), [], 0.0
  for attempt in range(2000):
    try:
      made = LANGUAGE.apply(best, random_sentence(LANGUAGE, draws), attempt)
    except ValueError:
      continue
    made_reward = ENVIRONMENT.verify(made).reward
    if made_reward >= reward:
      best, reward = made, made_reward
  return best


def test_the_contract_is_kept():
  for environment in (ENVIRONMENT, POLISHING):
    assert isinstance(environment, environment_lib.Environment)
    assert isinstance(environment, environment_lib.Baselines)
    assert isinstance(environment.language, environment_lib.EditLanguage)
  assert ENVIRONMENT.name == "apple_machines_0000"
  values = [published.value for published in ENVIRONMENT.published]
  assert values == sorted(values, reverse=True)
  assert round(values[0]) == 5_656_095
  # Means over other inputs: a high value of this one beats nobody.
  assert not any(published.is_comparable for published in ENVIRONMENT.published)
  assert LANGUAGE.vocab_size == 120 and LANGUAGE.stop_token == 0


def test_four_turns_by_hand():
  turns = apple_machines.trace(PLAIN, [(0, 0, 2), (1, 0, 3)], turns=5)
  assert turns == [
    (0, True, 1),  # 1 - 1 + 1
    (0, False, 2),  # The second (0, 0) costs 2, there is 1.
    (1, True, 1),  # 2 - 2 + 1: level 0 works before level 1 makes a second machine of it.
    (-1, False, 3),  # 1 + 2
    (-1, False, 6),  # 3 + 3
  ]
  turns = apple_machines.trace(PLAIN, [(0, 0, 4), (2, 0, 5), (1, 0, 8)], turns=10)
  # Apples 1 2 | 1 (P = 2: 2 - 2 + 2 = 2) ... the second (0, 0) is bought in turn 2.
  assert [turn.apples for turn in turns[:4]] == [1, 2, 2, 4]
  # Turn 4: 4 - 3 + 2 = 3, B of level 1 becomes 2; turn 5: 3 - 2 + 2, B of level 0 becomes 1 + 2.
  assert [turn.apples for turn in turns[4:6]] == [3, 3]
  # Turn 6: B of level 1 is 3; 3 < 4, so it waits: 3 + 3 * 2, then B of level 0 is 3 + 3.
  assert turns[6] == (2, False, 9)


@pytest.mark.parametrize(
  ("apples", "expected"), [(1, 0), (2, 100_000), (3, 158_496), (10, 332_193), (2**70, 7_000_000)]
)
def test_points_by_hand(apples, expected):
  assert apple_machines.points(apples) == expected


def test_points_near_a_half_are_rounded_to_the_right_side():
  # log2(n) * 1e5 nearest to half-way, by 60 decimals: the side is that of the exact number.
  with decimal.localcontext() as context:
    context.prec = 60
    for odd in (10_000_001, 11_234_567):
      middle = decimal.Decimal(2) ** (decimal.Decimal(odd) / 200_000)
      below = int(middle.to_integral_value(rounding=decimal.ROUND_FLOOR))
      assert apple_machines.points(below) == odd // 2
      assert apple_machines.points(below + 1) == odd // 2 + 1


def test_the_kernels_agree_with_integers_of_any_size():
  draws = np.random.default_rng(11)
  largest = 0
  for case in range(60):
    problem = (ENVIRONMENT.problem, PLAIN, apple_machines.instance(case))[case % 3]
    plan = [[0, 0, 6], *random_plan(draws, int(draws.integers(1, 40)))]
    runs = apple_machines.parse([run for run in plan if run[2] > 6 or run == plan[0]])
    assert not isinstance(runs, str)
    apples = apple_machines.trace(problem, runs)[-1].apples
    assert apple_machines.final_apples(problem, runs) == apples
    tables = apple_machines._tables(problem)
    bits = apple_machines._play(
      tables.apples, tables.costs, *apple_machines._arrays(runs), len(runs), np.zeros(0, np.int64)
    )
    assert bits == pytest.approx(math.log2(apples), abs=1e-9)
    largest = max(largest, apples)
  assert largest > 2**30


def test_good_plans_agree_with_integers_of_any_size(good_plan):
  runs = apple_machines.parse(good_plan)
  assert not isinstance(runs, str)
  apples = apple_machines.trace(ENVIRONMENT.problem, runs)[-1].apples
  assert apples > 2**40
  assert apple_machines.final_apples(ENVIRONMENT.problem, runs) == apples
  assert ENVIRONMENT.verify(good_plan).value == round(1e5 * math.log2(apples))


def test_what_outgrows_an_int64_is_still_exact():
  runs = ((0, 0, 9), (1, 0, 100), (2, 0, 200), (3, 0, 300), (1, 0, 400), (0, 0, 500))
  apples = apple_machines.trace(RICH, runs)[-1].apples
  assert apples > 2**64
  tables, arrays = apple_machines._tables(RICH), apple_machines._arrays(runs)
  assert apple_machines._exact(tables.whole_apples, tables.whole_costs, *arrays, len(runs)) == -1
  assert apple_machines.final_apples(RICH, runs) == apples


def test_inputs_are_as_the_problem_draws_them():
  assert apple_machines.instance(3) == apple_machines.instance(3)
  seen = [apple_machines.instance(index) for index in range(100)]
  assert len(set(seen)) == 100
  for problem in seen:
    assert problem.apples[0] == 1 and list(problem.apples) == sorted(problem.apples)
    assert max(problem.apples) <= 100
    assert problem.costs[0][0] == 1
    for level, kind in itertools.product(range(4), range(10)):
      least = problem.apples[kind] * 500**level
      assert (level, kind) == (0, 0) or least <= problem.costs[level][kind] <= 100 * least
  # Of the nine kinds that are drawn the mean logarithm is about 1, as in the contest's own inputs:
  # ten draws of which the smallest is overwritten have 1.09.
  logs = np.log10([problem.apples[1:] for problem in seen])
  assert abs(logs.mean() - 0.995) < 0.05
  # Logarithms are uniform: half of the costs are above ten times the least.
  above = [p.costs[1][5] > 5000 * p.apples[5] for p in seen]
  assert 30 < sum(above) < 70


def test_input_0_is_the_same_on_every_machine():
  assert ENVIRONMENT.problem.apples == (1, 2, 2, 3, 3, 4, 4, 11, 49, 57)
  assert ENVIRONMENT.problem.costs[3][:3] == (2352604484, 674512435, 2799857542)


# Of the first 10,000 inputs those with the costs nearest to a half, by ulps of the product.
@pytest.mark.parametrize("index", [3079, 5101, 5607, 6809, 9451])
def test_inputs_that_a_last_bit_could_change_are_rounded_to_the_right_side(index):
  draws = np.random.Generator(np.random.PCG64([58, index]))
  draws.uniform(0.0, 2.0, 9)  # Of the apples but the first.
  exponents = draws.uniform(0.0, 2.0, (4, 10)).tolist()
  problem, from_a_half = apple_machines.instance(index), []
  with decimal.localcontext() as context:
    context.prec = 50
    for level, kind in itertools.product(range(1, 4), range(10)):
      least = problem.apples[kind] * 500**level
      exact = least * decimal.Decimal(10) ** decimal.Decimal(exponents[level][kind])
      assert problem.costs[level][kind] == round(exact)
      from_a_half.append(abs(exact % 1 - decimal.Decimal("0.5")))
  assert min(from_a_half) < 1e-3


def test_nothing_bought_leaves_one_apple():
  score = ENVIRONMENT.verify([])
  assert score.is_valid and (score.value, score.reward) == (0.0, 1.0)


def test_the_plain_start_buys_the_first_machine():
  start = ENVIRONMENT.start(7)
  assert start == [[0, 0, 500]]
  start.append("spoilt")
  score = ENVIRONMENT.verify(ENVIRONMENT.start(7))
  apples = apple_machines.trace(ENVIRONMENT.problem, [(0, 0, 500)])[-1].apples
  assert score.value == apple_machines.points(apples)
  assert score.reward == 1 + math.log2(apples)


@pytest.mark.parametrize(
  ("artefact", "reason"),
  [
    (None, "plan: got NoneType, expected a list of runs"),
    ("plan", "plan: got str, expected a list of runs"),
    ([[0, 0, 1]] * 501, "plan: got 501 runs, expected at most 500"),
    ([3], "plan[0]: got int, expected [level, kind, end]"),
    ([[0, 0]], "plan[0]: got 2 entries, expected [level, kind, end]"),
    ([[0, 0, 2.0]], "plan[0]: got [int, int, float], expected three integers"),
    ([[0, False, 2]], "plan[0]: got [int, bool, int], expected three integers"),
    ([[0, 0, math.nan]], "plan[0]: got [int, int, float], expected three integers"),
    ([[4, 0, 2]], "plan[0]: got level 4, expected 0 to 3"),
    ([[-1, 0, 2]], "plan[0]: got level -1, expected 0 to 3"),
    ([[0, 10, 2]], "plan[0]: got kind 10, expected 0 to 9"),
    ([[0, 0, 2], [0, 1, 2]], "plan[1]: got end 2, expected 3 to 500"),
    ([[0, 0, 501]], "plan[0]: got end 501, expected 1 to 500"),
    ([[0, 0, 10**9999]], "plan[0]: got end int, expected 1 to 500"),
  ],
)
def test_what_is_no_plan_is_refused_with_the_reason(artefact, reason):
  score = ENVIRONMENT.verify(artefact)
  assert not score.is_valid and reason in score.reason
  with pytest.raises(ValueError, match="got no plan"):
    LANGUAGE.prompt(artefact)
  with pytest.raises(ValueError, match="apple_machines_0000.picture: got no plan"):
    ENVIRONMENT.picture(artefact)


JSON = st.recursive(
  st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
  lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner),
)


@hypothesis.given(JSON)
def test_anything_whatever_is_judged(artefact):
  score = ENVIRONMENT.verify(artefact)
  assert score.is_valid or score.reason


@hypothesis.given(st.integers(0, 2**32))
def test_wanting_what_can_never_be_paid_for_changes_nothing(seed):
  plan = [[0, 0, 30], *[run for run in random_plan(np.random.default_rng(seed), 4) if run[2] > 30]]
  plan = [run for run in plan if run[0] == 0 and run[2] <= 400]
  problem, level = ENVIRONMENT.problem, 3
  kind = max(range(10), key=lambda k: problem.costs[3][k])
  score = ENVIRONMENT.verify(plan)
  hypothesis.assume(2.0 ** (score.value / 1e5 + 1) < problem.costs[level][kind])
  assert ENVIRONMENT.verify([*plan, [level, kind, 500]]) == score


@hypothesis.given(st.integers(0, 2**32))
def test_cutting_a_run_in_two_changes_nothing(seed):
  draws = np.random.default_rng(seed)
  plan = random_plan(draws, 6)
  level, kind, end = plan[0]
  hypothesis.assume(end > 1)
  cut = [[level, kind, int(draws.integers(1, end))], *plan]
  assert ENVIRONMENT.verify(cut) == ENVIRONMENT.verify(plan)


@pytest.mark.parametrize(
  ("edit", "made"),
  [
    # In the middle of run 1, turns 20 to 59, for 4 turns.
    (("paint", 1, 8, 23, 3), [[0, 0, 20], [0, 1, 40], [2, 3, 44], [0, 1, 60], [1, 0, 120]]),
    # For 100 turns from turn 20: over all that follows.
    (("paint", 1, 0, 23, 15), [[0, 0, 20], [2, 3, 120]]),
    # Run 3 is the idle end; counted modulo 4, so is run 7.
    (("paint", 7, 9, 23, 1), [*THREE, [2, 3, 122]]),
    # A neighbour of the same machine is joined.
    (("paint", 1, 0, 0, 3), [[0, 0, 24], [0, 1, 60], [1, 0, 120]]),
    (("insert", 1, 8, 23, 3), [[0, 0, 20], [0, 1, 40], [2, 3, 44], [0, 1, 64], [1, 0, 124]]),
    (("delete", 1, 0, 0, 0), [[0, 0, 60], [1, 0, 120]]),
    (("delete", 1, 6, 0, 0), [[0, 0, 20], [1, 0, 120]]),
    (("delete", 1, 11, 0, 0), [[0, 0, 20], [1, 0, 80]]),
    (("delete", 0, 0, 0, 0), [[0, 1, 60], [1, 0, 120]]),
    (("delete", 2, 6, 0, 0), [[0, 0, 20], [0, 1, 60]]),
    (("move", 1, 0, 0, 8), [[0, 0, 20], [0, 1, 61], [1, 0, 120]]),
    (("move", 0, 0, 0, 0), [[0, 1, 60], [1, 0, 120]]),
    (("move", 2, 0, 0, 15), [[0, 0, 20], [0, 1, 60], [1, 0, 150]]),
    (("slide", 0, 1, 0, 15), [[0, 0, 50], [0, 1, 90], [1, 0, 120]]),
    (("slide", 1, 15, 0, 0), [[0, 0, 20], [0, 1, 30], [1, 0, 90]]),
    (("slide", 1, 0, 0, 0), [[0, 0, 20], [0, 1, 30], [1, 0, 120]]),
    (("change", 1, 0, 37, 0), [[0, 0, 20], [3, 1, 60], [1, 0, 120]]),
    (("change", 1, 6, 37, 0), [[0, 0, 20], [0, 7, 60], [1, 0, 120]]),
    (("change", 1, 11, 37, 0), [[0, 0, 20], [3, 7, 60], [1, 0, 120]]),
    (("swap", 0, 0, 0, 0), [[0, 1, 40], [0, 0, 60], [1, 0, 120]]),
    (("rekind", 0, 0, 7, 0), [[0, 7, 20], [0, 1, 60], [1, 7, 120]]),
    (("rekind", 2, 8, 7, 0), [[0, 0, 20], [0, 1, 60], [1, 7, 120]]),
  ],
)
def test_edits_by_hand(edit, made):
  before = copy.deepcopy(THREE)
  assert LANGUAGE.apply(THREE, sentence(edit), 0) == made
  assert before == THREE


def test_edits_of_a_sentence_follow_one_another():
  edits = sentence(("paint", 0, 0, 5, 3), ("paint", 1, 0, 17, 0), ("insert", 0, 0, 3, 9))
  assert LANGUAGE.apply([], edits, 0) == [[0, 3, 16], [0, 5, 20], [1, 7, 21]]


def test_clips_where_the_turns_end():
  assert LANGUAGE.apply([[0, 0, 490]], sentence(("insert", 0, 8, 11, 15)), 0) == [
    [0, 0, 245], [1, 1, 345], [0, 0, 500],
  ]  # fmt: skip
  assert LANGUAGE.apply([[0, 0, 500]], sentence(("paint", 1, 15, 11, 15)), 0) == [
    [0, 0, 468], [1, 1, 500],
  ]  # fmt: skip


@pytest.mark.parametrize("language", [LANGUAGE, POLISH_LANGUAGE])
def test_uniform_sentences_are_nearly_all_valid_and_leave_the_given_plan_alone(
  language, good_plan, record_property
):
  draws, num_valid, num_all = np.random.default_rng(5), 0, 600
  for attempt in range(num_all):
    plan = (
      good_plan, ENVIRONMENT.start(0), random_plan(draws, 32), random_plan(draws, 60),
    )[attempt % 4]  # fmt: skip
    before, tokens = json.dumps(plan), random_sentence(language, draws)
    try:
      made = language.apply(plan, tokens, attempt)
    except ValueError:
      assert json.dumps(plan) == before
      continue
    assert json.dumps(plan) == before
    num_valid += ENVIRONMENT.verify(made).is_valid
    assert made == language.apply(json.loads(before), tuple(tokens), attempt)
    assert len(made) <= max(apple_machines.MAX_RUNS, len(plan))
  record_property("valid", num_valid / num_all)
  assert num_valid >= 0.8 * num_all


def test_ranges_of_ids_meet_and_end_with_the_vocabulary():
  assert LANGUAGE.allowed == ((0, 9), (16, 48), (48, 64), (64, 104), (104, 120)) * 4
  edit = LANGUAGE.allowed[:5]
  assert POLISH_LANGUAGE.allowed == ((104, 120), *edit * 3)


def test_prompts_show_every_run_by_hand():
  assert LANGUAGE.prompt([]) == (9,)
  runs = apple_machines.parse(THREE)
  assert not isinstance(runs, str)
  turns = apple_machines.trace(ENVIRONMENT.problem, runs)
  bought = [sum(turn.is_bought for turn in turns if turn.run == run) for run in range(3)]
  # From 1, 2, 3, 4, 5, 7, 10, 14 and 19 purchases on, the next id.
  assert bought == [16, 8, 2]
  levels = [8, 6, 2]
  assert LANGUAGE.prompt(THREE) == (
    9, 64, 17, 104 + levels[0], 65, 19, 104 + levels[1], 74, 23, 104 + levels[2],
  )  # fmt: skip


def test_prompts_are_never_long():
  draws = np.random.default_rng(2)
  for num_runs in (1, 31, 32, 33, 500):
    prompt = LANGUAGE.prompt(random_plan(draws, num_runs))
    assert len(prompt) == 1 + 3 * min(num_runs, 32)
    assert all(type(token) is int and 0 <= token < LANGUAGE.vocab_size for token in prompt)


@pytest.mark.parametrize(
  ("tokens", "message"),
  [
    ([], "got 0 tokens without a stop token, expected 20; let it end with 0"),
    ([1, 16, 48, 64, 104], "got 5 tokens without a stop token, expected 20"),
    ([9, 16, 48, 64, 104, 0], "got id 9 in place 0, expected 0 to 8"),
    ([1, 15, 48, 64, 104, 0], "got id 15 in place 1, expected 16 to 47"),
    ([1, 16, 48, 64, 120, 0], "got id 120 in place 4, expected 104 to 119"),
    ([0, 0], "got tokens after the stop token in place 0, expected none"),
    ([1, 16, 48, 64, 104] * 5, "got 25 tokens, expected at most 20"),
    ([0], "got a sentence that leaves the plan as it was; expected an edit that changes it"),
    (sentence(("swap", 2, 0, 0, 0)), "got a sentence that leaves the plan as it was"),
  ],
)
def test_sentences_that_are_none_are_refused(tokens, message):
  with pytest.raises(ValueError, match=message):
    LANGUAGE.apply(THREE, tokens, 0)


def test_a_polish_never_makes_a_plan_worse_and_follows_its_seed():
  for temperature in (0, 9):
    edits = polished(temperature, [0])
    made = POLISH_LANGUAGE.apply(THREE, edits, 1)
    assert ENVIRONMENT.verify(made).reward > ENVIRONMENT.verify(THREE).reward
    assert made == POLISH_LANGUAGE.apply(THREE, edits, 1)
    assert made != POLISH_LANGUAGE.apply(THREE, edits, 2)


def test_more_rounds_never_make_a_plan_worse(good_plan):
  values = []
  for rounds in (2, 4, 16):
    polish = apple_machines.Polish(400, rounds)
    language = apple_machines.PlanEdits(ENVIRONMENT.problem, polish)
    made = language.apply(good_plan, polished(9, [0]), 1)
    assert made == language.apply(good_plan, polished(9, [0]), 1)
    values.append(ENVIRONMENT.verify(made).value)
  assert ENVIRONMENT.verify(good_plan).value <= values[0] <= values[1] < values[2], values


def test_a_polish_starts_from_what_the_edits_made():
  ruined = sentence(("paint", 0, 0, 39, 15))
  assert ENVIRONMENT.verify(LANGUAGE.apply(THREE, ruined, 0)).value < 1e5
  one_step = apple_machines.PlanEdits(ENVIRONMENT.problem, apple_machines.Polish(1))
  assert ENVIRONMENT.verify(one_step.apply(THREE, polished(0, ruined), 0)).value < 1e6
  # Three edits are the most.
  edits = sentence(*[("paint", 0, 0, 5, 3)] * 3)[:-1]
  assert POLISH_LANGUAGE.apply(THREE, polished(0, edits), 0)
  with pytest.raises(ValueError, match="got 21 tokens, expected at most 16"):
    POLISH_LANGUAGE.apply(THREE, polished(0, edits + edits[:5]), 0)
  with pytest.raises(ValueError, match="got id 0 in place 0, expected 104 to 119"):
    POLISH_LANGUAGE.apply(THREE, [0], 0)


def test_edits_are_deterministic_without_a_seed(good_plan):
  edits = sentence(("paint", 2, 4, 31, 3), ("rekind", 1, 0, 4, 0))
  assert LANGUAGE.apply(good_plan, edits, 1) == LANGUAGE.apply(good_plan, edits, -2)


def test_annealing_yields_ever_better_plans_and_follows_its_seed():
  problem = apple_machines.AppleMachines(1)
  rewards = []
  for artefact, _ in zip(problem.classical(0), range(2)):
    rewards.append(problem.verify(artefact).reward)
    assert json.loads(json.dumps(artefact)) == artefact
  assert 40 < rewards[0] <= rewards[1]
  first = next(problem.classical(0))
  assert problem.verify(first).reward == rewards[0]
  assert first != next(problem.classical(1))


def test_starts_are_as_long_as_luby_says():
  lengths = [apple_machines._luby(number) for number in range(1, 16)]
  assert lengths == [1, 1, 2, 1, 1, 2, 4, 1, 1, 2, 1, 1, 2, 4, 8]


def test_polished_starts_differ():
  starts = list(itertools.islice(ENVIRONMENT.polished_starts(0), 3))
  assert all(ENVIRONMENT.verify(start).is_valid for start in starts)
  assert starts[0] != starts[1] != starts[2]
  assert starts == list(itertools.islice(ENVIRONMENT.polished_starts(0), 3))


def test_pictures_and_descriptions_show_the_plan(good_plan):
  for plan in ([], THREE, good_plan):
    picture = ENVIRONMENT.picture(plan)
    assert isinstance(picture, figure.Figure) and len(picture.axes) == 2
    text = ENVIRONMENT.describe(plan, ENVIRONMENT.verify(plan))
    assert str(plan) in text and "improve(artefact, seconds, seed)" in text
    assert str(ENVIRONMENT.problem.costs[3][9]) in text


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (dict(instance=-1), "AppleMachines.instance: got -1, expected 0 to 9999"),
    (dict(instance=10_000), "AppleMachines.instance: got 10000, expected 0 to 9999"),
    (dict(polish_steps=0), "AppleMachines.polish_steps: got 0, expected 1 to 1000000"),
    (dict(polish_rounds=-1), "AppleMachines.polish_rounds: got -1, expected 0 to 1000"),
  ],
)
def test_impossible_arguments_are_refused(arguments, message):
  with pytest.raises(ValueError, match=message):
    apple_machines.AppleMachines(**arguments)
