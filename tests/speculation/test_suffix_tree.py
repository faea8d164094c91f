"""Suffix trees: counts, drafts and removal by hand and against the definition, and errors."""

from __future__ import annotations

import hypothesis
from hypothesis import given
import numpy as np
import pytest
from reference_tree import ReferenceTree
from text_histories import histories, play, strings

from seerjax.speculation.suffix_drafts import SMOOTHING
from seerjax.speculation.suffix_tree import SpeculationArgs, SuffixTree

GREEDY = SpeculationArgs(min_token_prob=0.0)


def tree_of(**texts):
  tree = SuffixTree()
  for name, text in texts.items():
    tree.append(name, 0, text)
  return tree


def test_counts_by_occurrence_and_by_request():
  tree = tree_of(a=[1, 2, 1, 2, 1, 2], b=[1, 2, 3])
  assert tree.count([1, 2]) == (4, 2)
  assert tree.count([2, 1]) == (2, 1)
  assert tree.count([1, 2, 3]) == (1, 1)
  assert tree.count([3, 1]) == (0, 0)
  assert tree.count([2, 2]) == (0, 0)


def test_texts_are_not_spliced_however_they_interleave():
  tree = SuffixTree()
  tree.append_many([("a", 0, [1, 2]), ("b", 0, [7])])
  tree.append_many([("b", 1, [8, 9]), ("a", 2, [3])])
  assert tree.count([1, 2, 3]) == tree.count([7, 8, 9]) == (1, 1)
  assert tree.count([2, 7]) == tree.count([9, 3]) == (0, 0)
  assert tree.tokens("a").tolist() == [1, 2, 3] and tree.tokens("b", 1).tolist() == [8, 9]


def test_one_that_loops_does_not_outvote_its_siblings():
  tree = tree_of(loop=[1, 2] * 50, b=[1, 3], c=[1, 3], d=[1, 3])
  assert tree.draft([1], GREEDY._replace(max_spec_tokens=1)) == ([(3,)], 3 / (4 + SMOOTHING), 1)


def test_ties_go_to_more_occurrences_then_to_the_smaller_token():
  tree = tree_of(a=[1, 5, 1, 4, 1, 4], b=[9])
  assert tree.draft([1], GREEDY._replace(max_spec_tokens=1))[0] == [(4,)]
  tree.append("a", 6, [1, 5])
  assert tree.draft([1], GREEDY._replace(max_spec_tokens=1))[0] == [(4,)]
  tree.append("a", 8, [1, 5])
  assert tree.draft([1], GREEDY._replace(max_spec_tokens=1))[0] == [(5,)]


def test_the_longest_match_is_followed_and_scored():
  tree = tree_of(a=[1, 2, 3, 4], b=[1, 2, 3, 5], c=[2, 3, 6], d=[2, 3, 6], e=[2, 3, 6])
  # After 1 2 3, one text has 4 and one 5, though after 2 3 three of five have 6.
  assert tree.draft([1, 2, 3]) == ([(4,)], 1 / (2 + SMOOTHING), 3)


def test_paths_branch_where_the_next_likeliest_token_leaves_and_then_continue_less():
  tree = tree_of(a=[1, 2, 3, 4], b=[1, 2, 3, 5], c=[1, 2, 7, 8], d=[2, 9])
  args = GREEDY._replace(top_k=4)
  # 3 in two of three, then 4; 7 in one of three, then 8; 5 in half of the two; 9 follows 2 alone.
  paths, score, match = tree.draft([1, 2], args)
  assert paths == [(3, 4), (7, 8), (3, 5), (9,)]
  assert match == 2
  three, seven = 2 / (3 + SMOOTHING), 1 / (3 + SMOOTHING)
  four = five = three / (2 + SMOOTHING)
  eight, nine = seven / (1 + SMOOTHING), 1 / (4 + SMOOTHING)
  assert score == pytest.approx(three + four + seven + eight + five + nine)


def test_nothing_is_drafted_where_nothing_follows():
  tree = tree_of(a=[1, 2, 3])
  assert tree.draft([]) == tree.draft([4]) == tree.draft([1, 2, 3]) == ([], 0.0, 0)
  assert SuffixTree().draft([1]) == ([], 0.0, 0)
  assert tree.draft([2], SpeculationArgs(pattern_lookup_min=2)) == ([], 0.0, 0)
  assert tree.draft([2], SpeculationArgs(min_token_prob=0.9)) == ([], 0.0, 0)


def test_a_request_that_is_removed_was_never_here():
  tree = tree_of(a=[1, 2, 3, 1, 2], b=[1, 2, 4])
  before = tree_of(b=[1, 2, 4])
  tree.remove("a")
  assert tree.count([1, 2]) == (1, 1) and tree.count([2, 3]) == (0, 0)
  assert tree.num_nodes == before.num_nodes
  assert tree.draft([1]) == before.draft([1])


@pytest.mark.thorough
def test_more_requests_than_a_word_has_bits():
  tree = SuffixTree()
  for request in range(150):
    tree.append(str(request), 0, [1, 2, request % 3])
  assert tree.count([1, 2]) == (150, 150)
  assert tree.count([2, 1]) == (50, 50)
  for request in range(0, 150, 2):
    tree.remove(str(request))
  assert tree.count([1, 2]) == (75, 75)


def test_memory_is_bounded_per_token():
  rng = np.random.default_rng(0)
  tree = SuffixTree()
  for start in range(0, 8192, 16):
    tree.append_many([(name, start, rng.integers(0, 32_000, 16)) for name in "abcd"])
  assert tree.num_bytes <= 150 * 4 * 8192


@given(histories())
@hypothesis.settings(max_examples=60)
def test_counts_agree_with_the_definition(history):
  steps, vocab, rng = history
  tree, reference = SuffixTree(), ReferenceTree()
  play(steps, tree, reference)
  assert dict(tree.lengths) == {name: len(text) for name, text in reference.texts.items()}
  for name, text in reference.texts.items():
    assert tree.tokens(name).tolist() == text
  for string in strings(reference.texts, vocab, rng, 30):
    assert tree.count(string) == reference.count(string)


@given(histories())
@hypothesis.settings(max_examples=40)
def test_drafts_agree_with_the_definition(history):
  steps, vocab, rng = history
  tree, reference = SuffixTree(), ReferenceTree()
  play(steps, tree, reference)
  for string in strings(reference.texts, vocab, rng, 4):
    args = SpeculationArgs(
      max_spec_tokens=rng.choice([1, 3, 8]),
      pattern_lookup_max=rng.choice([2, 12]),
      pattern_lookup_min=rng.choice([1, 2]),
      top_k=rng.choice([1, 2, 4]),
      min_token_prob=rng.choice([0.0, 0.1, 0.3]),
    )
    paths, score, match = tree.draft(string, args)
    expected, expected_score, expected_match = reference.draft(string, args)
    assert (paths, match) == (expected, expected_match), args
    assert score == pytest.approx(expected_score)


@given(histories())
@hypothesis.settings(max_examples=40)
def test_the_tree_follows_from_its_texts_alone(history):
  steps, vocab, rng = history
  tree = SuffixTree()
  play(steps, tree)
  texts = {name: tree.tokens(name).tolist() for name in tree.lengths}
  again = SuffixTree()
  for name in sorted(texts):
    again.append(name, 0, texts[name])
  assert tree.num_nodes == again.num_nodes
  args = SpeculationArgs(top_k=3)
  for string in strings(texts, vocab, rng, 10):
    assert tree.draft(string, args) == again.draft(string, args)


@given(histories())
@hypothesis.settings(max_examples=40)
def test_the_match_of_a_texts_end_is_known(history):
  steps, _, _ = history
  tree = SuffixTree()
  play(steps, tree)
  args = SpeculationArgs(top_k=2)
  for name in tree.lengths:
    text = tree.tokens(name)
    assert tree.draft(text, args, request_id=name) == tree.draft(text, args)


@pytest.mark.parametrize(
  "call, message",
  [
    (lambda t: t.append("a", 4, [1]), "got prev_token_count=4, expected 0 to 3"),
    (lambda t: t.append("a", -1, [1]), "append the missing tokens first"),
    (lambda t: t.append("b", 1, [1]), "got prev_token_count=1, expected 0 to 0"),
    (lambda t: t.append("a", 1, [2, 9]), "got token 9 at 2, expected 3, which is already stored"),
    (lambda t: t.append("a", 3, [4, -1]), "got token id -1, expected at least 0"),
    (lambda t: t.append_many([("a", 3, [4]), ("a", 4, [5])]), "got two updates in one call"),
    (lambda t: t.remove("b"), "SuffixTree.remove: got request 'b', expected one of 1"),
    (lambda t: t.tokens("b"), "SuffixTree.tokens: got request 'b'"),
    (lambda t: t.count([]), "got 0 tokens, expected 1 to 64"),
    (lambda t: t.count([1] * 65), "got 65 tokens, expected 1 to 64"),
    (lambda t: t.draft([1], SpeculationArgs(max_spec_tokens=64)), "max_spec_tokens: got 64"),
    (lambda t: t.draft([1], SpeculationArgs(pattern_lookup_min=60)), "pattern_lookup_min: got 60"),
    (lambda t: t.draft([1], request_id="b"), "SuffixTree.speculate: got request 'b'"),
    (lambda t: t.draft([1], SpeculationArgs(top_k=0)), "top_k: got 0, expected 1 to 64"),
    (lambda t: t.draft([1], SpeculationArgs(min_token_prob=1.5)), "min_token_prob: got 1.5"),
  ],
)
def test_refusals_of_a_tree(call, message):
  tree = tree_of(a=[1, 2, 3])
  with pytest.raises(ValueError, match=message):
    call(tree)
  assert tree.tokens("a").tolist() == [1, 2, 3] and list(tree.lengths) == ["a"]


def test_a_wrong_count_would_be_seen():
  # The twin that must fail: a tree that misses one token differs from the definition.
  tree, reference = tree_of(a=[1, 2, 1]), ReferenceTree()
  reference.append("a", 0, [1, 2, 1, 2])
  assert tree.count([1, 2]) != reference.count([1, 2])
