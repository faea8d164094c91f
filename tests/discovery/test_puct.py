"""Selection of start states, by hand and against a twin with the full history."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import itertools
import math

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from seerjax.discovery import archive, puct
from seerjax.discovery.archive import Archive, Child
from seerjax.discovery.puct import SearchConfig

DEFAULT = SearchConfig()


def child(value: float, artefact: object = None) -> Child:
  return Child(artefact=value if artefact is None else artefact, value=value, reward=1.0)


def family() -> Archive:
  """Returns seeds 0 (1.0) and 1 (0.0), children 2 (3.0) and 3 (2.0) of 0, and 4 (2.5) of 2."""
  kept = archive.start([child(1.0), child(0.0)])
  kept = archive.record_expansion(kept, 0, [child(2.0), child(3.0)], step=0)
  return archive.record_expansion(kept, 2, [child(2.5)], step=1)


def scores_of(kept: Archive, config: SearchConfig = DEFAULT) -> np.ndarray:
  return puct.scores(kept.states, kept.num_expansions, config)


def test_scores_of_five_states_by_hand():
  # T = 2. Values 1, 0, 3, 2, 2.5: ranks 3, 4, 0, 2, 1, so P = 2, 1, 5, 3, 4 fifteenths. The states
  # that are no seeds reach from 2 to 3: S = 1. n(0) = 2, n(2) = 1. Q: 3 for 0, 2.5 for 2.
  root = math.sqrt(3)
  want = [
    3 + root * 2 / 15 / 3,
    0 + root * 1 / 15,
    2.5 + root * 5 / 15 / 2,
    2 + root * 3 / 15,
    2.5 + root * 4 / 15,
  ]
  np.testing.assert_allclose(scores_of(family()), want, rtol=1e-15)
  # Over all states S = 3.
  want = np.asarray([3.0, 0, 2.5, 2, 2.5]) + 3 * (np.asarray(want) - [3, 0, 2.5, 2, 2.5])
  config = SearchConfig(range_over_seeds=True)
  np.testing.assert_allclose(scores_of(family(), config), want, rtol=1e-14)
  np.testing.assert_array_equal(scores_of(family(), SearchConfig(c=0.0)), [3, 0, 2.5, 2, 2.5])


def test_a_batch_of_five_states_by_hand():
  # Scores about 3.08, 0.12, 2.79, 2.35, 2.96: seed 0 comes first and blocks all its descendants.
  assert puct.select(family(), 2, SearchConfig(), seed=0) == (0, 1)
  # With c = 30 the scores are about 5.31, 3.46, 11.16, 12.39, 16.36: grandchild 4 comes first; it
  # blocks its ancestors 2 and 0, but not its uncle 3.
  assert puct.select(family(), 2, SearchConfig(c=30.0), seed=0) == (4, 3)
  assert puct.select(family(), 1, SearchConfig(c=30.0), seed=0) == (4,)


def test_siblings_and_cousins_may_go_together():
  kept = archive.start([child(0.0), child(-9.0), child(-9.5)])
  kept = archive.record_expansion(kept, 0, [child(2.0), child(3.0)], step=0)  # 3: 3.0, 4: 2.0.
  kept = archive.record_step(kept, [(3, [child(7.0)]), (4, [child(6.0)])], step=1)
  # 5 (7.0) comes from 3 and 6 (6.0) from 4: cousins, each with the Q of its parent and more value.
  assert puct.select(kept, 3, SearchConfig(c=0.0), seed=0) == (5, 6, 1)
  # Once 5 and 6 have yielded little, their parents score higher: siblings.
  kept = archive.record_step(kept, [(5, [child(1.0)]), (6, [child(1.5)])], step=2)
  assert puct.select(kept, 3, SearchConfig(c=0.0), seed=0) == (3, 4, 1)


def test_islands_by_hand():
  config = SearchConfig(islands=2, c=30.0)
  # In the tree of seed 0, T = 2: values 1, 3, 2, 2.5 have P = 1, 4, 2, 3 tenths.
  root = 30 * math.sqrt(3)
  want = [3 + root / 10 / 3, 2.5 + root * 4 / 10 / 2, 2 + root * 2 / 10, 2.5 + root * 3 / 10]
  assert max(want) == want[3]
  assert puct.select(family(), 2, config, seed=0) == (4, 1)
  with pytest.raises(ValueError, match="SearchConfig.islands: got 2 for 1 groups, expected at"):
    puct.select(family(), 1, config, seed=0)
  # Expansions on other islands do not count: with T = 3 for 2, state 4 would come before 0.
  kept = archive.record_expansion(family(), 1, [], step=2)
  assert puct.select(kept, 2, SearchConfig(islands=2), seed=0) == (0, 1)
  # A group stays on its own island, whatever the others hold; a closed tree belongs to none.
  kept = archive.record_expansion(family(), 1, [child(-7.0)], step=2)
  assert puct.select(kept, 2, SearchConfig(islands=2, c=0.0), seed=0) == (0, 1)
  planted = archive.replant(kept, 0, child(-9.0), step=2)
  assert puct.select(planted, 2, SearchConfig(islands=2, c=0.0), seed=0) == (6, 1)


def test_a_departed_ancestor_still_joins_a_lineage():
  kept = archive.start([child(0.0), child(-1.0)], capacity=3)
  kept = archive.record_expansion(kept, 0, [child(1.0)], step=0)
  kept = archive.record_expansion(kept, 2, [child(2.0)], step=1)  # 2 departs, 3 stays.
  assert [state.state_id for state in kept.states] == [0, 1, 3]
  assert puct.select(kept, 2, SearchConfig(c=0.0), seed=0) == (3, 1)


def test_only_seeds_are_ranged_over_themselves():
  kept = archive.start([child(1.0), child(4.0)])
  np.testing.assert_array_equal(scores_of(kept), [1 + 3 / 3, 4 + 3 * 2 / 3])


def test_a_range_of_nothing_is_a_millionth():
  kept = archive.start([child(1.0)])
  assert scores_of(kept)[0] == 1 + 1e-6
  assert puct.MIN_RANGE == 1e-6


def test_equal_scores_go_by_value_then_by_age():
  kept = archive.start([child(1.0), child(2.0), child(2.0, "twin")])
  kept = archive.record_step(kept, [(0, [child(5.0)]), (1, []), (2, [])], step=0)
  # c = 0: state 0 has Q 5 from its child 3, with Q 5 itself: equal scores, the higher value wins.
  config = SearchConfig(c=0.0)
  assert scores_of(kept, config).tolist() == [5.0, 2.0, 2.0, 5.0]
  assert puct.select(kept, 3, config, seed=0) == (3, 1, 2)


def test_a_state_whose_attempts_all_failed_counts_by_its_own_value():
  kept = archive.record_expansion(archive.start([child(2.0)]), 0, [], step=0)
  assert scores_of(kept, SearchConfig(c=0.0)).tolist() == [2.0]


class Twin:
  """The same search from the whole history, without incremental counts."""

  def __init__(self, seeds: Sequence[Child], keep: int, capacity: int):
    self.keep, self.capacity = keep, capacity
    self.values = [seed.value for seed in seeds]
    self.artefacts = [seed.artefact for seed in seeds]
    self.parents: list[int] = [-1] * len(seeds)
    self.alive = list(range(len(seeds)))
    self.roots = list(range(len(seeds)))
    self.expansions: list[tuple[int, list[float]]] = []

  def above(self, state: int) -> set[int]:
    parent = self.parents[state]
    return set() if parent < 0 else {parent} | self.above(parent)

  def step(self, expansions: Sequence[tuple[int, Sequence[Child]]]) -> None:
    entered: list[int] = []
    for parent, children in expansions:
      self.expansions.append((parent, [c.value for c in children]))
      num = 0
      for c in sorted(children, key=lambda c: c.value, reverse=True):
        there = [self.artefacts[i] for i in (*self.alive, *entered)]
        if num < self.keep and c.artefact not in there:
          num += 1
          entered.append(len(self.values))
          self.values.append(c.value)
          self.artefacts.append(c.artefact)
          self.parents.append(parent)
    self.alive += entered
    while len(self.alive) > self.capacity:
      free = [i for i in self.alive if i not in self.roots]
      best = max(free, key=lambda i: (self.values[i], -i))
      # The best state departs last; states of closed trees depart first.
      worst = min(free, key=lambda i: (i == best, self.grows(i), self.values[i], -i))
      self.alive.remove(worst)

  def replant(self, root: int, seed: Child) -> None:
    self.roots[self.roots.index(root)] = len(self.values)
    self.alive.append(len(self.values))
    self.values.append(seed.value)
    self.artefacts.append(seed.artefact)
    self.parents.append(-1)

  def grows(self, state: int, roots: Sequence[int] | None = None) -> bool:
    return not ({state} | self.above(state)).isdisjoint(self.roots if roots is None else roots)

  def visits(self, state: int) -> int:
    return sum(p == state or state in self.above(p) for p, _ in self.expansions)

  def best_child(self, state: int) -> float | None:
    return max((v for p, found in self.expansions if p == state for v in found), default=None)

  def scores(self, c: float, roots: Sequence[int]) -> dict[int, float]:
    states = [i for i in self.alive if self.grows(i, roots)]
    ranked = sorted(states, key=lambda i: (-self.values[i], i))
    found = [self.values[i] for i in states if self.parents[i] >= 0]
    found = found or [self.values[i] for i in states]
    spread = max(max(found) - min(found), 1e-6)
    size, total = len(ranked), sum(self.grows(parent, roots) for parent, _ in self.expansions)
    scores = {}
    for i in states:
      prior = (size - ranked.index(i)) / sum(size - rank for rank in range(size))
      best = self.best_child(i)
      bonus = c * spread * prior * math.sqrt(1 + total) / (1 + self.visits(i))
      scores[i] = (self.values[i] if best is None else best) + bonus
    return scores

  def select(self, num: int, c: float, islands: int) -> tuple[int, ...]:
    chosen = {}
    for island in range(islands):
      scores = self.scores(c, self.roots[island::islands])
      taken: list[int] = []
      for i in sorted(scores, key=lambda i: (-scores[i], -self.values[i], i)):
        if all(i not in self.above(j) and j not in self.above(i) for j in taken):
          taken.append(i)
      chosen |= dict(zip(range(island, num, islands), taken))
    return tuple(chosen[group] for group in range(num))


# Few different values, so that there are ties and duplicates. The test makes children of them: the
# check of annotations draws random items to look at.
children = st.lists(
  st.tuples(st.integers(0, 12).map(lambda n: n / 8), st.sampled_from([None, "a", "b"])), max_size=4
)
expansions = st.lists(st.tuples(st.integers(0, 99), children), max_size=3)
history = st.lists(st.tuples(expansions, st.none() | st.integers(0, 99)), max_size=10)


@pytest.mark.thorough
@hypothesis.settings(max_examples=40)
@hypothesis.given(
  st.lists(st.integers(0, 9).map(float), min_size=1, max_size=4),
  history,
  st.sampled_from([0.0, 0.3, 1.0, 20.0]),
  st.integers(1, 3),
  st.integers(1, 12),
)
def test_random_histories_agree_with_the_twin(values, history, c, keep, room):
  seeds = [child(value) for value in values]
  kept = archive.start(seeds, keep_children=keep, capacity=len(seeds) + room)
  twin = Twin(seeds, keep, len(seeds) + room)
  for step, (choices, replanted) in enumerate(history):
    expansions = [
      (twin.alive[choice % len(twin.alive)], [child(*one) for one in found])
      for choice, found in choices
    ]
    before, text = kept, archive.to_json(kept)
    kept = archive.record_step(kept, expansions, step=step)
    twin.step(expansions)
    assert archive.to_json(before) == text
    assert [state.state_id for state in kept.states] == twin.alive
    assert kept.num_expansions == len(twin.expansions)
    assert [state.visits for state in kept.states] == [twin.visits(i) for i in twin.alive]
    assert [state.best_child for state in kept.states] == [twin.best_child(i) for i in twin.alive]
    assert archive.ancestors(kept) == {i: twin.above(i) for i in twin.alive}
    if kept.roots == tuple(range(len(seeds))):
      got = scores_of(kept, SearchConfig(c=c))
      assert got.dtype == np.float64
      np.testing.assert_array_equal(got, list(twin.scores(c, twin.roots).values()))
    if replanted is not None:
      root, seed = twin.roots[replanted % len(seeds)], child(replanted / 16, "fresh")
      kept = archive.replant(kept, root, seed, step=step)
      twin.replant(root, seed)
    assert kept.roots == tuple(twin.roots)
    for num in range(1, len(seeds) + 1):
      for islands in range(1, num + 1):
        chosen = puct.select(kept, num, SearchConfig(c=c, islands=islands), seed=0)
        assert chosen == twin.select(num, c, islands) and len({*chosen}) == num
        for one, other in itertools.combinations(chosen, 2):
          assert one not in twin.above(other) and other not in twin.above(one)


def test_without_blocking_the_twin_disagrees():
  kept = family()
  order = np.argsort(-scores_of(kept, SearchConfig(c=30.0)))
  unblocked = tuple(kept.states[place].state_id for place in order[:2])
  assert unblocked == (4, 3)
  order = np.argsort(-scores_of(kept))
  unblocked = tuple(kept.states[place].state_id for place in order[:2])
  assert unblocked == (0, 4) != puct.select(kept, 2, SearchConfig(), seed=0)


def test_greedy_takes_the_best_states_whatever_their_lineage():
  assert puct.select(family(), 2, SearchConfig(reuse="greedy"), seed=0) == (2, 4)


def test_sequential_always_takes_the_best():
  assert puct.select(family(), 2, SearchConfig(reuse="sequential"), seed=0) == (2, 2)


def test_none_takes_the_seeds_in_turn():
  kept = archive.start([child(float(i)) for i in range(3)])
  config = SearchConfig(reuse="none")
  assert puct.select(kept, 3, config, seed=0) == (0, 1, 2)
  kept = archive.record_step(kept, [(0, [child(9.0)]), (1, [])], step=0)
  assert puct.select(kept, 2, config, seed=0) == (2, 0)


def test_epsilon_greedy_is_greedy_but_for_some_groups():
  kept = archive.start([child(float(-i)) for i in range(8)])
  config = SearchConfig(reuse="epsilon_greedy")
  best = puct.select(kept, 8, SearchConfig(reuse="greedy"), seed=0)
  assert puct.select(kept, 8, dataclasses.replace(config, epsilon=0.0), seed=0) == best
  off = np.zeros(8)
  anyone = np.zeros(8)
  for seed in range(500):
    chosen = puct.select(kept, 8, config, seed=seed)
    assert chosen == puct.select(kept, 8, config, seed=seed)
    off += np.asarray(chosen) != best
    everyone = puct.select(kept, 8, dataclasses.replace(config, epsilon=1.0), seed=seed)
    anyone += np.bincount(everyone, minlength=8)
  # 0.2 * 7/8 of 500 draws for each group; 500 of 4000 draws for each state. Five sigmas.
  assert np.all(np.abs(off - 87.5) < 5 * math.sqrt(500 * 0.175 * 0.825))
  assert np.all(np.abs(anyone - 500) < 5 * math.sqrt(4000 * 0.125 * 0.875))


def test_epsilon_greedy_draws_anew_after_each_step():
  kept = archive.start([child(float(-i)) for i in range(8)])
  config = SearchConfig(reuse="epsilon_greedy", epsilon=1.0)
  chosen = set()
  for step in range(6):
    chosen.add(puct.select(kept, 8, config, seed=3))
    kept = archive.record_step(kept, [(0, [])], step=step)
  assert len(chosen) == 6


@pytest.mark.parametrize("reuse", puct.REUSE)
def test_more_groups_than_seeds_are_refused_by_every_rule(reuse):
  config = SearchConfig(reuse=reuse)
  with pytest.raises(ValueError, match=r"got num=3 groups for 2 seeds.*one seed for each group"):
    puct.select(family(), 3, config, seed=0)
  with pytest.raises(ValueError, match=r"got num=0 groups"):
    puct.select(family(), 0, config, seed=0)
  with pytest.raises(ValueError, match=r"got seed=-1, expected at least 0"):
    puct.select(family(), 1, config, seed=-1)


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    (dict(reuse="best"), r"SearchConfig.reuse: got 'best', expected one of \('puct'"),
    (dict(c=-1.0), r"SearchConfig.c: got -1.0, expected at least 0; 1 is published"),
    (dict(c=math.nan), r"SearchConfig.c: got nan"),
    (dict(epsilon=1.5), r"SearchConfig.epsilon: got 1.5, expected 0 to 1"),
    (dict(patience=-1), r"got islands=1, patience=-1 with reuse='puct', expected at least 1 and 0"),
    (dict(islands=0), r"got islands=0, patience=0 with reuse='puct', expected at least 1 and 0"),
    (dict(patience=3, reuse="none"), r"with reuse='none', expected .* unless reuse is 'puct'"),
    (dict(keep_children=0), r"SearchConfig.keep_children: got 0, expected at least 1"),
    (dict(capacity=1), r"SearchConfig.capacity: got 1, expected at least 2"),
  ],
)
def test_a_configuration_that_cannot_work_is_refused(settings, message):
  with pytest.raises(ValueError, match=message):
    SearchConfig(**settings)
