"""Circle packing: decided without tolerance, polished to a maximum, changed by short sentences."""

from __future__ import annotations

from fractions import Fraction
import itertools
import json
import math

import numpy as np
import pytest

from experiments.problems import circle_packing
from seerjax.discovery import environment as environment_lib

QUARTERS = [[x, y, 0.25] for x in (0.25, 0.75) for y in (0.25, 0.75)]
SMALL = circle_packing.CirclePacking(num_circles=7)


def is_packing(artefact) -> bool:
  """The rules, written once more with fractions alone."""
  circles = [[Fraction(number) for number in circle] for circle in artefact]
  inside = all(r > 0 and r <= x <= 1 - r and r <= y <= 1 - r for x, y, r in circles)
  return inside and all(
    (a[0] - b[0]) ** 2 + (a[1] - b[1]) ** 2 >= (a[2] + b[2]) ** 2
    for a, b in itertools.combinations(circles, 2)
  )


def best_radii(centres: np.ndarray) -> np.ndarray:
  """Radii f64[n] of the greatest sum for centres f64[2, n] that may not move."""
  circles = np.concatenate([centres, np.full((1, centres.shape[1]), 0.5)])
  solved = circle_packing._linear_program(circles, 0.0)
  assert solved is not None
  return solved[2]


def random_sentence(language, rng) -> tuple[int, ...]:
  return tuple(int(rng.integers(low, high)) for low, high in language.allowed)


@pytest.mark.parametrize("num_circles", [1, 26])
def test_it_is_an_environment_with_baselines_and_a_language(num_circles):
  environment = circle_packing.CirclePacking(num_circles=num_circles)
  assert isinstance(environment, environment_lib.Environment)
  assert isinstance(environment, environment_lib.Baselines)
  assert isinstance(environment.language, environment_lib.EditLanguage)
  assert environment.name == f"circle_packing_{num_circles}" and environment.is_maximised


def test_published_values_stand_best_first_with_their_source():
  for num_circles in (26, 32):
    published = circle_packing.CirclePacking(num_circles=num_circles).published
    values = [entry.value for entry in published]
    assert values == sorted(values, reverse=True)
    assert all(entry.who and entry.source.startswith("http") for entry in published)
  assert circle_packing.CirclePacking(num_circles=5).published == ()


@pytest.mark.parametrize(
  "num_circles, value",
  [(1, 0.5), (2, 2 - math.sqrt(2))],
)
def test_closed_forms_are_found(num_circles, value):
  environment = circle_packing.CirclePacking(num_circles=num_circles)
  found = [next(environment.classical(0)), next(environment.polished_starts(0))]
  score = max((environment.verify(artefact) for artefact in found), key=lambda s: s.value)
  assert score.is_valid
  assert value - 1e-9 < score.value <= value + 1e-15


def test_four_circles_of_different_radii_beat_the_grid():
  environment = circle_packing.CirclePacking(num_circles=4)
  value = environment.verify(next(environment.classical(0))).value
  assert 1.0 < value < math.sqrt(4 / math.pi)


def test_touching_dyadic_circles_are_a_packing_and_their_sum_is_exact():
  score = circle_packing.CirclePacking(num_circles=4).verify(QUARTERS)
  assert score.is_valid and score.value == score.reward == 1.0
  assert score.certificate == "sum of radii = 1/1; value is rounded down"
  # A right triangle of sides 3, 4 and 5 sixteenths: touching off the axes.
  touching = [[0.25, 0.25, 2 / 16], [0.25 + 3 / 16, 0.5, 3 / 16]]
  assert circle_packing.CirclePacking(num_circles=2).verify(touching).value == 5 / 16


@pytest.mark.parametrize("entry", range(12))
def test_one_unit_in_the_last_place_too_far_is_refused(entry):
  circle, place = divmod(entry, 3)
  environment = circle_packing.CirclePacking(num_circles=4)
  moved = [list(row) for row in QUARTERS]
  moved[circle][place] = math.nextafter(moved[circle][place], math.inf)
  score = environment.verify(moved)
  assert not score.is_valid
  assert "overlap" in score.reason or "crosses" in score.reason


def test_an_overlap_is_named_with_its_pair_and_its_depth():
  environment = circle_packing.CirclePacking(num_circles=3)
  far = [0.875, 0.875, 0.125]
  score = environment.verify([[0.25, 0.5, 0.125], far, [0.5, 0.5, 0.125 + 2.0**-50]])
  assert score.reason == "circles 0 and 2 overlap by 8.88e-16, expected none; shrink the radii"
  score = environment.verify([[0.25, 0.5, 0.25], far, [0.5, 0.5, 0.25]])
  assert score.reason == "circles 0 and 2 overlap by 0.25, expected none; shrink the radii"


def test_the_value_is_the_exact_sum_rounded_down():
  environment = circle_packing.CirclePacking(num_circles=2)
  score = environment.verify([[0.25, 0.25, 0.125], [0.75, 0.75, 2.0**-57]])
  assert score.value == 0.125
  assert Fraction(score.certificate.split()[4].rstrip(";")) == Fraction(0.125) + Fraction(2.0**-57)
  score = environment.verify([[0.25, 0.25, 0.125], [0.75, 0.75, 2.0**-56 + 2.0**-57]])
  assert score.value == 0.125  # To the nearest would be one unit more.


@pytest.mark.parametrize(
  "artefact, reason",
  [
    (None, "artefact: got NoneType, expected a list of 2 [x, y, r]"),
    ("[[0.5, 0.5, 0.5]]", "artefact: got str, expected a list"),
    ({"circles": []}, "artefact: got dict, expected a list"),
    (np.full((2, 3), 0.1), "artefact: got ndarray, expected a list"),
    ([], "artefact: got 0 circles, expected 2"),
    ([[0.5, 0.5, 0.1]] * 3, "artefact: got 3 circles, expected 2"),
    ([0.5, 0.5], "circle 0: got float, expected a list [x, y, r]"),
    ([[0.5, 0.5, 0.1], "abc"], "circle 1: got str, expected a list [x, y, r]"),
    ([[0.5, 0.5]] * 2, "circle 0: got 2 entries, expected 3"),
    ([[[0.5], 0.5, 0.1]] * 2, "circle 0: got x of type list, expected a real number"),
    ([[0.5, True, 0.1]] * 2, "circle 0: got y of type bool, expected a real number"),
    ([[0.5, 0.5, 0.1j]] * 2, "circle 0: got r of type complex, expected a real number"),
    ([["0.5", 0.5, 0.1]] * 2, "circle 0: got x of type str, expected a real number"),
    ([[0.5, 0.5, None]] * 2, "circle 0: got r of type NoneType, expected a real number"),
    ([[0.5, 0.5, math.nan]] * 2, "circle 0: got r = nan, expected 0 <= r <= 1"),
    ([[math.nan, 0.5, 0.1]] * 2, "circle 0: got x = nan, expected 0 <= x <= 1"),
    ([[0.5, math.inf, 0.1]] * 2, "circle 0: got y = inf, expected 0 <= y <= 1"),
    ([[0.5, 0.5, 1e300]] * 2, "circle 0: got r = 1e+300, expected 0 <= r <= 1"),
    ([[0.5, 0.5, 10**5000]] * 2, "circle 0: got r = a whole number, expected 0 <= r <= 1"),
    ([[0.5, 0.5, -0.1]] * 2, "circle 0: got r = -0.1, expected 0 <= r <= 1"),
    ([[0.5, 0.5, 0]] * 2, "circle 0: got r = 0, expected r > 0"),
    ([[0.5, 0.5, -0.0]] * 2, "circle 0: got r = 0, expected r > 0"),
    ([[0.1, 0.5, 0.2]] * 2, "circle 0: got x = 0.1 with r = 0.2, which crosses the left wall by"),
    ([[0.5, 0.9, 0.2]] * 2, "circle 0: got y = 0.9 with r = 0.2, which crosses the upper wall by"),
    ([[0.5, 0.5, 0.1]] * 2, "circles 0 and 1 overlap by 0.2"),
    ([[0.5, 0.5, 5e-324]] * 2, "circles 0 and 1 overlap by less than 1e-300"),
  ],
)
def test_every_cheat_is_refused_with_its_reason(artefact, reason):
  score = circle_packing.CirclePacking(num_circles=2).verify(artefact)
  assert not score.is_valid and math.isnan(score.value) and score.reward == 0
  assert reason in score.reason


def test_whole_numbers_and_the_smallest_circles_are_judged_too():
  environment = circle_packing.CirclePacking(num_circles=2)
  assert not environment.verify([[1, 1, 1], [0, 0, 1]]).is_valid
  assert environment.verify([[0.25, 0.25, 5e-324], [0.75, 0.75, 5e-324]]).value == 1e-323


def test_symmetries_and_order_change_neither_validity_nor_value():
  environment = circle_packing.CirclePacking(num_circles=4)
  dyadic = [[0.25, 0.25, 0.25], [0.75, 0.5, 0.125], [0.5625, 0.8125, 0.1875], [0.875, 0.125, 0.125]]
  score = environment.verify(dyadic)
  assert score.is_valid
  for changed in (
    [[1 - x, y, r] for x, y, r in dyadic],
    [[x, 1 - y, r] for x, y, r in dyadic],
    [[y, x, r] for x, y, r in dyadic],
    dyadic[::-1],
  ):
    assert environment.verify(changed) == score
    assert environment.language is not None
  assert environment.language.prompt(dyadic[::-1]) == environment.language.prompt(dyadic)
  sentence = random_sentence(environment.language, np.random.default_rng(0))
  applied = [environment.language.apply(order, sentence, 5) for order in (dyadic, dyadic[::-1])]
  assert applied[0] == applied[1]


def test_a_packing_made_smaller_and_moved_is_one_of_its_share(seed):
  rng = np.random.default_rng(seed)
  environment = circle_packing.CirclePacking(num_circles=4)
  overlapping = [QUARTERS[0], [0.75, 0.25, math.nextafter(0.25, 1)], *QUARTERS[2:]]
  for _ in range(50):
    # Powers of two, and moves that no sum rounds: exact.
    scale = 2.0 ** -float(rng.integers(1, 6))
    right, up = (rng.integers(1, 2**8, 2) / 2.0**9).tolist()
    changed = [[right + x * scale, up + y * scale, r * scale] for x, y, r in QUARTERS]
    assert environment.verify(changed).value == scale
    changed = [[right + x * scale, up + y * scale, r * scale] for x, y, r in overlapping]
    assert "overlap" in environment.verify(changed).reason


def test_the_fast_verifier_agrees_with_fractions_where_circles_nearly_touch(seed):
  rng = np.random.default_rng(seed)
  environment = circle_packing.CirclePacking(num_circles=3)
  counts = {True: 0, False: 0}
  for _ in range(400):
    x, y, r = rng.uniform(0.2, 0.4), rng.uniform(0.2, 0.4), rng.uniform(0.05, 0.2)
    angle, other = rng.uniform(0, math.pi / 2), rng.uniform(0.05, 0.2)
    second = [x + (r + other) * math.cos(angle), y + (r + other) * math.sin(angle), other]
    wall = rng.uniform(0.02, 0.06)
    artefact = [[x, y, r], second, [1 - wall, float(rng.choice([wall, 1 - wall])), wall]]
    for _ in range(int(rng.integers(4))):
      i, k = rng.integers(3, size=2)
      artefact[i][k] = math.nextafter(artefact[i][k], float(rng.choice([0.0, 1.0])))
    expected = is_packing(artefact)
    assert environment.verify(artefact).is_valid == expected
    counts[expected] += 1
  assert min(counts.values()) > 20


def test_starts_are_valid_random_and_plain():
  environment = circle_packing.CirclePacking(num_circles=26)
  starts = [environment.start(seed) for seed in range(20)]
  values = [environment.verify(start).value for start in starts]
  assert all(is_packing(start) for start in starts)
  assert environment.start(3) == starts[3] and len(set(values)) == 20
  assert max(values) < 2.2


def test_sentences_give_valid_packings_and_equal_sentences_equal_ones(seed):
  environment = circle_packing.CirclePacking(num_circles=26)
  language = environment.language
  assert language is not None
  rng = np.random.default_rng(seed)
  artefact = environment.start(seed)
  for trial in range(25):
    sentence = random_sentence(language, rng)
    before = json.dumps(artefact)
    made = language.apply(artefact, sentence, trial)
    assert json.dumps(artefact) == before
    assert language.apply(json.loads(before), sentence, trial) == made
    assert environment.verify(made).is_valid and is_packing(made)
    assert json.loads(json.dumps(made)) == made
    artefact = made


@pytest.mark.parametrize("num_circles", [1, 2, 3])
@pytest.mark.parametrize("verb", circle_packing.VERBS)
def test_every_verb_works_on_few_circles(num_circles, verb):
  environment = circle_packing.CirclePacking(num_circles=num_circles, num_edits=1)
  language = environment.language
  assert language is not None
  artefact = environment.start(0)
  for arguments in ((0, 0, 0), (31, 31, 31), (1, 30, 17)):
    sentence = (circle_packing.VERB_IDS + circle_packing.VERBS.index(verb), *arguments, 7, 0)
    assert environment.verify(language.apply(artefact, sentence, 0)).is_valid


def test_the_noise_of_an_edit_follows_the_seed():
  language = SMALL.language
  assert language is not None
  shake = (circle_packing.VERB_IDS + circle_packing.VERBS.index("shake"), 31, 0, 0)
  keep = (circle_packing.VERB_IDS, 0, 0, 0)
  artefact = SMALL.start(0)
  made = [language.apply(artefact, (*shake, *keep, *keep, 3, 7), seed) for seed in range(4)]
  assert len({json.dumps(packing) for packing in made}) > 1


def test_an_edit_does_what_it_says():
  circles = np.array(QUARTERS).T
  rng = np.random.default_rng(0)
  for verb, arguments, expected in (
    ("keep", (1, 2, 3), QUARTERS),
    ("move", (1, 3, 7), [QUARTERS[0], [3.5 / 32, 7.5 / 32, 0.25], *QUARTERS[2:]]),
    ("resize", (6, 7, 0), [*QUARTERS[:2], [0.75, 0.25, 0.125], QUARTERS[3]]),
    ("swap", (0, 1, 0), QUARTERS),
    ("slide", (0, 3, 31), [[0.75, 0.75, 0.25], *QUARTERS[1:]]),
  ):
    changed = circles.copy()
    circle_packing._edit(changed, verb, *arguments, rng)
    assert changed.T.tolist() == expected, verb
  # The largest hole of three quarters is the fourth's place.
  changed = circles.copy()
  changed[:, 1] = 0.5, 0.5, 0.01
  circle_packing._edit(changed, "refill", 0, 0, 15, rng)
  np.testing.assert_allclose(changed[:, 1], QUARTERS[1], atol=1 / 64)


def test_a_prompt_shows_the_value_and_every_circle_in_its_range():
  for num_circles in (1, 26, 32):
    environment = circle_packing.CirclePacking(num_circles=num_circles)
    language = environment.language
    assert language is not None
    assert language.vocab_size == 128 and language.stop_token is None
    prompt = language.prompt(environment.start(1))
    assert len(prompt) == 3 * num_circles + 1 <= 97
    assert circle_packing.VALUE_IDS <= prompt[0] < language.vocab_size
    for place, token in enumerate(prompt[1:]):
      assert place % 3 * 32 <= token < place % 3 * 32 + 32
  language = circle_packing.CircleLanguage(num_circles=4)
  assert language.prompt(QUARTERS)[1:] == (8, 40, 80, 24, 40, 80, 8, 56, 80, 24, 56, 80)
  for low, high in language.allowed:
    assert 0 <= low < high <= language.vocab_size


def test_sentences_that_were_not_masked_are_refused():
  language = SMALL.language
  assert language is not None
  sentence = [low for low, _ in language.allowed]
  with pytest.raises(ValueError, match="got 13 tokens, expected 14; sample one"):
    language.apply(SMALL.start(0), sentence[1:], 0)
  sentence[1] = 32
  with pytest.raises(ValueError, match="got token 32 in place 1, expected 0 <= token < 32; mask"):
    language.apply(SMALL.start(0), sentence, 0)


@pytest.mark.parametrize(
  "sizes, message",
  [
    (dict(num_circles=0), "CircleLanguage.num_circles: got 0, expected 1 <= num_circles <= 200"),
    (dict(num_circles=201), "num_circles: got 201, expected 1 <= num_circles <= 200"),
    (dict(num_edits=0), "CircleLanguage.num_edits: got 0, expected 1 <= num_edits <= 16"),
  ],
)
def test_impossible_sizes_are_refused(sizes, message):
  with pytest.raises(ValueError, match=message):
    circle_packing.CirclePacking(**sizes)


def test_the_polish_ends_at_a_maximum():
  environment = circle_packing.CirclePacking(num_circles=12)
  for seed in range(5):
    circles = np.array(environment.start(seed)).T.copy()
    circle_packing._settle(circles, circle_packing.FIRM, 200)
    artefact = circle_packing._finish(circles)
    value = environment.verify(artefact).value
    assert value > environment.verify(environment.start(seed)).value
    # Radii for these centres, and moves by a linear program, gain nothing more.
    circles = np.array(artefact).T
    assert abs(best_radii(circles[:2]).sum() - value) < 1e-9
    assert abs(circle_packing._linear(circles)[2].sum() - value) < 1e-9


def test_newton_and_linear_programs_agree():
  agreed = 0
  for seed in range(10):
    circles = np.array(circle_packing.CirclePacking(num_circles=12).start(seed)).T.copy()
    circle_packing._settle(circles, circle_packing.SOFT, 400)
    vertex = circle_packing._vertex(circles)
    if vertex is not None:
      assert abs(vertex[2].sum() - circle_packing._linear(circles)[2].sum()) < 1e-6
      agreed += 1
  assert agreed >= 6


def test_a_linear_program_without_moves_solves_two_circles_by_hand():
  # Two centres 0.3 apart in the middle: the sum is their distance, whatever the shares.
  assert abs(best_radii(np.array([[0.35, 0.65], [0.5, 0.5]])).sum() - 0.3) < 1e-12
  # A corner keeps one small; the other has its wall.
  radii = best_radii(np.array([[0.1, 0.6], [0.1, 0.5]]))
  np.testing.assert_allclose(radii, [0.1, 0.4], atol=1e-12)


def test_circles_in_one_place_are_still_made_a_packing():
  circles = np.full((3, 7), 0.3)
  artefact = circle_packing._finish(circles)
  assert SMALL.verify(artefact).is_valid
  circles = np.concatenate([np.full((2, 7), 0.5), np.full((1, 7), 0.1)])
  assert SMALL.verify(circle_packing._accepted(circles)).is_valid


def test_the_gradient_is_that_of_the_penalty():
  rng = np.random.default_rng(0)
  z = np.concatenate([rng.random(10), rng.uniform(0.1, 0.3, 5)])
  gradient, other = np.empty(15), np.empty(15)
  circle_packing._penalised(z, 20.0, gradient)
  for k in range(15):
    step = np.zeros(15)
    step[k] = 1e-6
    slope = circle_packing._penalised(z + step, 20.0, other)
    slope -= circle_packing._penalised(z - step, 20.0, other)
    assert slope / 2e-6 == pytest.approx(gradient[k], abs=1e-5)


def test_baselines_are_endless_valid_and_follow_their_seed():
  for method in (SMALL.classical, SMALL.polished_starts):
    runs = [list(itertools.islice(method(seed), 3)) for seed in (0, 0, 1)]
    assert runs[0] == runs[1] != runs[2]
    assert all(SMALL.verify(artefact).is_valid for artefact in runs[0])


def test_a_description_says_rules_value_and_program():
  environment = circle_packing.CirclePacking(num_circles=26)
  artefact = environment.start(0)
  text = environment.describe(artefact, environment.verify(artefact))
  for part in ("2.635983084919", "def improve(artefact, seconds, seed)", "no tolerance", "r > 0"):
    assert part in text
  assert repr(artefact[25]) in text
  text = SMALL.describe([], SMALL.verify([]))
  assert "invalid: artefact: got 0 circles, expected 7" in text and "Best known" not in text


def test_a_picture_shows_circles_and_contacts():
  drawn = circle_packing.CirclePacking(num_circles=4).picture(QUARTERS)
  (axes,) = drawn.axes
  assert len(axes.patches) == 4
  assert len(axes.lines) == 4 + 8  # Four pairs touch, and each circle two walls.


@pytest.mark.long
@pytest.mark.parametrize("num_circles, target", [(26, 2.63598), (32, 2.9365)])
def test_classical_reaches_what_is_known(num_circles, target):
  environment = circle_packing.CirclePacking(num_circles=num_circles)
  stream = itertools.islice(environment.classical(0), 400)
  assert any(environment.verify(artefact).value >= target for artefact in stream)
