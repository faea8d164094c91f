"""The archive: entry, departure, counts, and survival of a restart."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from seerjax.discovery import archive
from seerjax.discovery.archive import Archive, Child


def child(value: float, artefact: Any = None, *, reward: float = 1.0, tokens: Any = (7,)) -> Child:
  return Child(
    artefact=value if artefact is None else artefact, value=value, reward=reward, tokens=tokens
  )


def seeds(*values: float, **settings: int) -> Archive:
  return archive.start([child(value, tokens=()) for value in values], **settings)


def by_id(kept: Archive) -> dict[int, archive.State]:
  return {state.state_id: state for state in kept.states}


def test_an_expansion_counts_for_its_parent_and_all_above():
  kept = seeds(5.0, 4.0)
  kept = archive.record_expansion(kept, 0, [child(6.0), child(7.0)], step=0)  # 2 is 7.0, 3 is 6.0.
  kept = archive.record_expansion(kept, 2, [child(6.5)], step=1)  # 4.
  kept = archive.record_expansion(kept, 4, [child(9.0)], step=2)  # 5.
  states = by_id(kept)
  assert {i: state.visits for i, state in states.items()} == {0: 3, 1: 0, 2: 2, 3: 0, 4: 1, 5: 0}
  # Only direct children count as best: 9.0 is no child of 2, and 6.5 is below 0's best.
  assert {i: state.best_child for i, state in states.items()} == {
    0: 7.0, 1: None, 2: 6.5, 3: None, 4: 9.0, 5: None,
  }  # fmt: skip
  assert kept.num_expansions == 3 and kept.next_id == 6
  assert [state.parent for state in kept.states] == [None, None, 0, 0, 2, 4]
  assert [state.seed_tree for state in kept.states] == [0, 1, 0, 0, 0, 0]
  assert [state.step for state in kept.states] == [-1, -1, 0, 0, 1, 2]
  assert archive.best(kept).state_id == 5
  assert [state.value for state in archive.leaders(kept, 3)] == [9.0, 7.0, 6.5]
  assert archive.leaders(kept, 1) == (archive.best(kept),) and not archive.leaders(kept, 0)
  assert len(archive.leaders(kept, 100)) == len(kept.states)
  assert [state.state_id for state in archive.lineage(kept, 5)] == [0, 2, 4, 5]
  assert archive.ancestors(kept) == {
    0: frozenset(), 1: frozenset(), 2: {0}, 3: {0}, 4: {0, 2}, 5: {0, 2, 4},
  }  # fmt: skip


def test_an_expansion_that_found_nothing_valid_counts_too():
  kept = archive.record_expansion(seeds(5.0, 4.0), 1, [], step=0)
  assert [(state.visits, state.best_child) for state in kept.states] == [(0, None), (1, None)]
  assert kept.num_expansions == 1 and len(kept.states) == 2


def test_a_group_counts_once_however_many_children_it_has():
  kept = archive.record_expansion(seeds(0.0), 0, [child(0.1 * i) for i in range(1, 65)], step=0)
  assert kept.states[0].visits == kept.num_expansions == 1


def test_a_state_expanded_by_two_groups_of_a_step_counts_twice():
  kept = archive.record_step(seeds(0.0), [(0, [child(1.0)]), (0, [child(2.0)])], step=0)
  assert kept.states[0].visits == kept.num_expansions == 2
  assert [state.value for state in kept.states] == [0.0, 1.0, 2.0]


def test_the_best_two_enter_and_the_first_of_equals():
  found = [child(2.0, "a"), child(3.0, "b"), child(3.0, "c"), child(3.0, "d")]
  kept = archive.record_expansion(seeds(0.0), 0, found, step=0)
  assert [state.artefact for state in kept.states[1:]] == ["b", "c"]
  kept = archive.record_expansion(seeds(0.0, keep_children=3), 0, found, step=0)
  assert [state.artefact for state in kept.states[1:]] == ["b", "c", "d"]


def test_duplicates_leave_their_place_to_the_next_best():
  kept = seeds(0.0)
  found = [
    child(0.0), child(5.0, {"b": 1, "a": [1.5]}), child(5.0, {"a": (1.5,), "b": 1}), child(1.0),
  ]  # fmt: skip
  kept = archive.record_expansion(kept, 0, found, step=0)
  assert [state.artefact for state in kept.states[1:]] == [{"a": [1.5], "b": 1}, 1.0]
  again = archive.record_expansion(kept, 1, [*found, child(-2.0)], step=1)
  assert [state.value for state in again.states] == [0.0, 5.0, 1.0, -2.0]
  # A child that is found again still counts as its parent's best.
  assert by_id(again)[1].best_child == 5.0


def test_a_child_found_by_two_groups_of_a_step_belongs_to_the_first():
  kept = archive.record_step(seeds(0.0, 0.5), [(1, [child(3.0)]), (0, [child(3.0)])], step=0)
  assert [state.parent for state in kept.states] == [None, None, 1]
  assert [state.best_child for state in kept.states] == [3.0, 3.0, None]


def test_seeds_may_be_equal():
  kept = seeds(1.0, 1.0, 1.0)
  assert len(kept.roots) == 3 and len({state.digest for state in kept.states}) == 1


def test_eviction_keeps_seeds_and_the_best_and_the_older_of_equals():
  kept = seeds(-5.0, -6.0, capacity=4)
  kept = archive.record_expansion(kept, 0, [child(1.0, "a"), child(2.0, "b")], step=0)
  kept = archive.record_expansion(kept, 1, [child(1.5, "c"), child(1.5, "d")], step=1)
  assert [state.artefact for state in kept.states] == [-5.0, -6.0, "b", "c"]
  kept = archive.record_expansion(kept, 1, [child(1.5, "e"), child(2.0, "f")], step=2)
  assert [state.artefact for state in kept.states] == [-5.0, -6.0, "b", "f"]
  assert kept.departed == () and kept.roots == (0, 1) and kept.next_id == 8


def test_departed_ancestors_stay_known_and_go_on_counting():
  kept = seeds(0.0, capacity=2)
  kept = archive.record_expansion(kept, 0, [child(1.0)], step=0)
  kept = archive.record_expansion(kept, 1, [child(2.0)], step=1)  # 1 departs.
  assert [state.state_id for state in kept.states] == [0, 2]
  assert [state.state_id for state in kept.departed] == [1]
  assert archive.ancestors(kept) == {0: frozenset(), 2: {0, 1}}
  kept = archive.record_expansion(kept, 2, [child(3.0)], step=2)
  assert [(state.state_id, state.visits) for state in kept.states] == [(0, 3), (3, 0)]
  assert [(state.state_id, state.visits) for state in kept.departed] == [(1, 2), (2, 1)]
  assert [state.value for state in archive.lineage(kept, 3)] == [0.0, 1.0, 2.0, 3.0]
  # A departed artefact may be found again, for example with a better timing.
  again = archive.record_expansion(kept, 3, [child(9.0, 1.0)], step=3)
  assert [(state.state_id, state.artefact) for state in again.states] == [(0, 0.0), (4, 1.0)]
  # Nothing descends from 1 to 3 any more: they are forgotten, and their ids with them.
  kept = archive.record_expansion(kept, 0, [child(4.0)], step=3)
  assert [state.state_id for state in kept.states] == [0, 4] and kept.departed == ()


def test_a_parent_may_depart_in_the_step_that_expands_it():
  kept = seeds(0.0, capacity=3)
  kept = archive.record_expansion(kept, 0, [child(1.0), child(2.0)], step=0)  # 1: 2.0, 2: 1.0.
  kept = archive.record_step(kept, [(0, [child(3.0), child(4.0)]), (2, [child(0.5)])], step=1)
  assert [state.value for state in kept.states] == [0.0, 4.0, 3.0]
  assert kept.states[0].visits == 3


def test_seed_trees_alive_are_those_with_descendants():
  kept = seeds(0.0, 0.1, 0.2, capacity=5)
  assert archive.num_seed_trees_alive(kept) == 0
  kept = archive.record_step(kept, [(0, [child(1.0)]), (1, [child(2.0)])], step=0)
  assert archive.num_seed_trees_alive(kept) == 2
  kept = archive.record_expansion(kept, 4, [child(3.0)], step=1)
  assert archive.num_seed_trees_alive(kept) == 1


def test_no_state_changes_under_the_hands_of_who_made_or_read_it():
  artefact = {"heights": [0.5, 0.25]}
  kept = archive.start([Child(artefact=artefact, value=1.0, reward=1.0)])
  artefact["heights"].append(9.0)
  kept.states[0].artefact["heights"].clear()
  assert kept.states[0].artefact == {"heights": [0.5, 0.25]}
  after = archive.record_expansion(kept, 0, [child(2.0)], step=0)
  assert (kept.states[0].visits, kept.num_expansions, len(kept.states)) == (0, 0, 1)
  assert (after.states[0].visits, after.num_expansions, len(after.states)) == (1, 1, 2)
  with pytest.raises(dataclasses.FrozenInstanceError):
    kept.states[0].visits = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_numbers_of_numpy_become_plain_ones():
  found = Child(
    artefact=[np.float64(0.1)], value=np.float64(0.1), reward=1.0, tokens=(int(np.int32(3)),)
  )
  state = archive.start([found]).states[0]
  assert type(state.value) is float and state.text == "[0.1]"


numbers = st.floats(allow_nan=False, allow_infinity=False)
plain = st.recursive(
  st.none() | st.booleans() | st.integers() | numbers | st.text(),
  lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
  max_leaves=8,
)
values = st.floats(-1e300, 1e300)
# Records are built in the test: the check of annotations draws random items to look at.
found = st.fixed_dictionaries(
  dict(
    artefact=plain,
    value=values,
    reward=values,
    tokens=st.text() | st.lists(st.integers(0, 99)).map(tuple),
    printed=st.text(),
  )
)


@hypothesis.given(
  st.lists(found, min_size=1, max_size=3),
  st.lists(st.tuples(st.integers(0, 99), st.lists(found, max_size=4)), max_size=8),
)
def test_an_archive_comes_back_from_its_text_bit_for_bit(starts, history):
  kept = archive.start([Child(**fields) for fields in starts], capacity=len(starts) + 2)
  for step, (choice, found) in enumerate(history):
    parent = kept.states[choice % len(kept.states)].state_id
    children = [Child(**fields) for fields in found]
    kept = archive.record_expansion(kept, parent, children, step=step)
  text = archive.to_json(kept)
  back = archive.from_json(text)
  assert back == kept and archive.to_json(back) == text
  for ours, theirs in zip(kept.states, back.states):  # == treats 0.0 and -0.0 as equal.
    assert ours.value.hex() == theirs.value.hex() and ours.reward.hex() == theirs.reward.hex()
    assert ours.text == theirs.text and type(ours.tokens) is type(theirs.tokens)
  # The restored archive continues identically.
  after = [archive.record_expansion(a, 0, [child(1.0)], step=9) for a in (kept, back)]
  assert after[0] == after[1]


def test_the_text_is_readable_json():
  kept = archive.record_expansion(seeds(0.1), 0, [child(0.3, [1, 2.0], tokens="x = 1")], step=4)
  read = json.loads(archive.to_json(kept))
  assert read["states"][1]["artefact"] == [1, 2.0] and read["states"][1]["tokens"] == "x = 1"
  assert read["states"][0]["best_child"] == 0.3 and read["num_expansions"] == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e301])
@pytest.mark.parametrize("field", ["value", "reward"])
def test_a_value_that_is_not_finite_is_refused(field, bad):
  with pytest.raises(ValueError, match=rf"Child.{field}: got .*, expected a finite number"):
    Child(**{"artefact": 0, "value": 1.0, "reward": 1.0, field: bad})


@pytest.mark.parametrize(
  ("artefact", "message"),
  [
    ([1.0, [math.nan]], r"artefact\[1\]\[0\]: got nan, expected JSON"),
    ({"a": math.inf}, r"artefact\['a'\]: got inf, expected JSON"),
    ({1: 2}, r"artefact: got the key 1, expected JSON"),
    ([np.zeros(2)], r"artefact\[0\]: got ndarray, expected JSON .*convert arrays with .tolist"),
    (1j, "artefact: got complex, expected JSON"),
  ],
)
def test_an_artefact_that_is_no_json_is_refused_by_place(artefact, message):
  found = Child(artefact=artefact, value=1.0, reward=1.0)
  with pytest.raises(ValueError, match=message):
    archive.start([found])
  with pytest.raises(ValueError, match=message):
    archive.record_expansion(seeds(0.0), 0, [found], step=0)


def test_a_start_that_cannot_work_is_refused():
  with pytest.raises(ValueError, match=r"got no seeds, expected at least one"):
    archive.start([])
  with pytest.raises(ValueError, match=r"got keep_children=0, expected at least 1"):
    seeds(0.0, keep_children=0)
  with pytest.raises(ValueError, match=r"got capacity=2 for 2 seeds, expected more"):
    seeds(0.0, 1.0, capacity=2)


@pytest.mark.parametrize("parent", [-1, 1, 2, 99])
def test_a_parent_that_does_not_live_is_refused(parent):
  kept = seeds(0.0, capacity=2)
  kept = archive.record_expansion(kept, 0, [child(1.0)], step=0)
  kept = archive.record_expansion(kept, 1, [child(2.0)], step=1)
  kept = archive.record_expansion(kept, 2, [child(3.0)], step=2)  # 1 and 2 are departed ancestors.
  with pytest.raises(ValueError, match=rf"got parent {parent}, expected the id of one of the 2"):
    archive.record_expansion(kept, parent, [], step=3)


def test_a_state_admitted_in_a_step_is_no_parent_in_it():
  with pytest.raises(ValueError, match="got parent 1, expected the id of one of the 1 living"):
    archive.record_step(seeds(0.0), [(0, [child(1.0)]), (1, [])], step=0)


def test_a_family_is_all_that_descends_from_one_seed():
  kept = archive.record_step(
    seeds(0.0, 0.0, capacity=4), [(0, [child(1.0)]), (1, [child(9.0)])], step=0
  )
  kept = archive.record_step(kept, [(2, [child(2.0), child(3.0)])], step=1)
  assert [state.state_id for state in kept.departed] == [2]
  assert [state.state_id for state in archive.family(kept, 4)] == [0, 2, 4]
  assert [state.state_id for state in archive.family(kept, 1)] == [1, 3]


def test_the_lineage_of_an_unknown_state_is_refused():
  with pytest.raises(ValueError, match=r"got state 7, expected one of the 2 living"):
    archive.lineage(seeds(0.0, 1.0), 7)


@pytest.mark.parametrize("text", ["{}", "[]", '{"format": "other/2"}'])
def test_another_format_is_refused(text):
  with pytest.raises(ValueError, match=r"got format .*, expected 'seerjax.search.archive/3'"):
    archive.from_json(text)


@pytest.mark.parametrize(
  ("old", "new", "message"),
  [
    ('"value": 2.0', '"value": NaN', r"state 2 has value, reward and best_child \(nan"),
    ('"value": 2.0', '"value": 1e999', r"state 2 has value, reward and best_child \(inf"),
    ('"value": 2.0', '"value": "2.0"', "Type.*Error"),
    ('"artefact": 2.0', '"artefact": NaN', "got nan, expected JSON"),
    ('"parent": 0', '"parent": 7', "state 2 has parent 7, which does not exist"),
    ('"state_id": 1', '"state_id": 0', "state 0 occurs twice"),
    ('"roots": [0, 1]', '"roots": [0, 2]', r"roots \(0, 2\) are not all living seeds"),
    ('"next_id": 3', '"next_id": 2', "next_id 2 is already in use"),
    ('"seed_tree"', '"tree"', "TypeError"),
    ('"tokens"', '"words"', "KeyError"),
    ('"departed": []', '"departed": [0]', "Error"),
    ('"capacity": 1000}', '"capacity": 10', "Expecting ',' delimiter"),
  ],
)
def test_a_damaged_archive_is_refused_with_what_is_wrong(old, new, message):
  text = archive.to_json(archive.record_expansion(seeds(0.0, 1.0), 0, [child(2.0)], step=0))
  assert archive.from_json(text) and old in text
  with pytest.raises(
    ValueError, match=rf"got a damaged archive \(.*{message}.*\), expected the output of to_json"
  ):
    archive.from_json(text.replace(old, new))


def test_stuck_by_hand():
  def stuck(kept, *steps, islands=2):
    return [archive.stuck_roots(kept, step, islands=islands, patience=2) for step in steps]

  kept = seeds(1.0, 1.0)
  assert stuck(kept, 0, 1) == [(), (0, 1)]
  found = archive.record_expansion(kept, 0, [child(2.0)], step=1)
  assert stuck(found, 1, 2, 3) == [(1,), (1,), (0, 1)]
  # An island is replaced as a whole.
  assert stuck(found, 1, 2, 3, islands=1) == [(), (), (0, 1)]
  # Worse than the best of its island: nothing new.
  worse = archive.record_expansion(found, 2, [child(1.5)], step=2)
  assert stuck(worse, 3) == [(0, 1)]
  assert archive.stuck_roots(found, 100, islands=2, patience=0) == ()


def test_replanting_by_hand():
  kept = archive.record_expansion(seeds(0.0, 0.0, capacity=5), 0, [child(2.0), child(1.0)], step=0)
  planted = archive.replant(kept, 0, child(0.5, "fresh"), step=0)
  assert planted.roots == (4, 1) and planted.next_id == 5
  fresh = planted.states[-1]
  assert (fresh.artefact, fresh.is_seed, fresh.seed_tree, fresh.step) == ("fresh", True, 4, 0)
  assert archive.stuck_roots(planted, 1, islands=2, patience=2) == (1,)
  assert archive.best(planted).value == 2.0
  # The best state stays; of the others, the closed tree departs first, with its root.
  found = [(4, [child(0.7, "a"), child(0.6, "b")]), (1, [child(0.5, "c")])]
  grown = archive.record_step(planted, found, step=1)
  assert [state.artefact for state in grown.states] == [0.0, 2.0, "fresh", "a", "b"]
  assert [state.state_id for state in grown.states] == [1, 2, 4, 5, 6]
  assert [state.state_id for state in grown.departed] == [0]
  assert archive.from_json(archive.to_json(grown)) == grown


def test_what_does_not_grow_cannot_be_replanted():
  with pytest.raises(ValueError, match=r"replant: got root 7, expected one of \(0, 1\); close the"):
    archive.replant(seeds(0.0, 1.0), 7, child(1.0), step=0)
