"""What holds of a draft: by hand, as a property, and refusals."""

from __future__ import annotations

from hypothesis import given, strategies as st
import pytest

from seerjax.speculation import acceptance
from seerjax.speculation.acceptance import Acceptance, Verified

TOKENS = st.lists(st.integers(0, 2), max_size=6)


def test_a_draft_holds_until_it_differs():
  assert acceptance.accepted([5, 6, 7], [5, 6, 7, 8]) == 3
  assert acceptance.accepted([5, 6, 7], [5, 9, 7, 8]) == 1
  assert acceptance.accepted([5], [4, 4]) == 0
  assert acceptance.accepted([], [4]) == 0


def test_the_path_that_holds_furthest_is_said_with_the_bonus():
  paths = [(1, 2), (1, 3, 4), (1, 3)]
  sampled = [(1, 3, 9), (1, 3, 5, 9), (1, 3, 5)]
  assert acceptance.verify(paths, sampled) == Verified(1, 2, (1, 3, 5))
  assert acceptance.verify([()], [(7,)]) == Verified(0, 0, (7,))


@given(st.lists(TOKENS, min_size=1, max_size=4), st.lists(st.integers(0, 2), min_size=7))
def test_what_is_said_does_not_depend_on_the_draft(paths, text):
  # The target says `text` as long as it was fed `text`; after anything else it says 9.
  sampled = [
    [text[k] if path[:k] == text[:k] else 9 for k in range(len(path) + 1)] for path in paths
  ]
  verified = acceptance.verify(paths, sampled)
  assert list(verified.tokens) == text[: verified.num_accepted + 1]
  counts = [acceptance.accepted(*pair) for pair in zip(paths, sampled)]
  assert verified.num_accepted == max(counts) and verified.path == counts.index(max(counts))


def test_stats_by_hand():
  stats = Acceptance()
  stats.add(3, 1)
  stats.add(2, 2, num_references=15)
  stats.add(0, 0)
  assert (stats.num_steps, stats.num_drafted, stats.num_accepted) == (3, 5, 3)
  assert stats.length == 2.0 and stats.rate == 0.6
  assert stats.rate_at == (1.0, 0.5, 0.0)
  assert stats.length_by_references == {0: 1.5, 15: 3.0}


def test_stats_of_nothing():
  assert (Acceptance().length, Acceptance().rate, Acceptance().rate_at) == (1.0, 0.0, ())


@pytest.mark.parametrize(
  "call, message",
  [
    (lambda: acceptance.accepted([1], [1]), "got 1 samples for a draft of 1 tokens, expected 2"),
    (lambda: acceptance.verify([], []), "got 0 paths and samples of 0, expected as many"),
    (lambda: acceptance.verify([()], []), "plain decoding is the path ()"),
    (lambda: Acceptance().add(1, 2), "got 2 accepted of 1 drafted"),
  ],
)
def test_refusals(call, message):
  with pytest.raises(ValueError, match=message.replace("(", "[(]").replace(")", "[)]")):
    call()
