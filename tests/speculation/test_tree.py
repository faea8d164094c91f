"""Shapes of token trees, and that the engine's tree of their paths is the same tree."""

from __future__ import annotations

import itertools
import re

from hypothesis import given, strategies as st
import numpy as np
import pytest

from seerjax.engine import token_tree
from seerjax.speculation import tree

LOG_HALF = float(np.log(0.5))


@st.composite
def trees(draw) -> tree.Tree:
  parents = [draw(st.integers(-1, node - 1)) for node in range(draw(st.integers(0, 12)))]
  tokens = draw(st.lists(st.integers(0, 3), min_size=len(parents), max_size=len(parents)))
  return tree.Tree(np.asarray(tokens, np.int32), np.asarray(parents, np.int32))


def made(tokens, parents) -> tree.Tree:
  return tree.Tree(np.asarray(tokens), np.asarray(parents))


def prefixes(paths) -> set[tuple[int, ...]]:
  """Every node of a tree, as all tokens up to it."""
  return {path[:length] for path in paths for length in range(1, len(path) + 1)}


def test_a_comb_is_its_main_path_and_then_the_siblings():
  found = tree.comb([5, 6, 7], [[8], [], [9, 4]])
  assert found.tokens.tolist() == [5, 6, 7, 8, 9, 4]
  assert found.parents.tolist() == [-1, 0, 1, -1, 1, 1]
  assert found.paths() == [(5, 6, 7), (8,), (5, 6, 9), (5, 6, 4)]
  assert len(tree.comb([])) == 0 and tree.comb([]).paths() == []


def test_an_expansion_has_so_many_children_at_each_depth():
  found = tree.expand((2, 1, 3))
  assert found.parents.tolist() == [-1, -1, 0, 1, 2, 2, 2, 3, 3, 3]
  assert found.ranks.tolist() == [0, 1, 0, 0, 0, 1, 2, 0, 1, 2]
  filled = found.filled([[1, 2, 0], [3, 0, 0], [4, 5, 6]])
  assert filled.tokens.tolist() == [1, 2, 3, 3, 4, 5, 6, 4, 5, 6]
  assert filled.depths().tolist() == [1, 1, 2, 2, 3, 3, 3, 3, 3, 3]


def test_merged_trees_hold_every_path_once_the_first_trees_first():
  one, other = tree.comb([1, 2], [[3]]), tree.comb([1, 4], [[3, 5]])
  found = tree.merge([one, other])
  assert found.tokens.tolist() == [1, 2, 3, 4, 5] and found.parents.tolist() == [-1, 0, -1, 0, -1]
  assert len(tree.merge([])) == 0


@given(st.lists(trees(), max_size=3))
def test_a_merged_tree_has_the_nodes_of_all(several):
  found = tree.merge(several)
  wanted = set().union(*(prefixes(one.paths()) for one in several))
  assert prefixes(found.paths()) == wanted and len(found) == len(wanted)


@given(trees())
def test_the_engine_meets_the_nodes_in_the_trees_order(drawn):
  one = tree.merge([drawn])
  nodes = token_tree.merge(one.paths(), max_depth=20)
  assert [node.token for node in nodes] == one.tokens.tolist()
  assert [node.parent for node in nodes] == one.parents.tolist()


@given(st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=6), st.integers(0, 5))
def test_branches_are_the_leaves_and_their_own_rows_follow_one_another(paths, depth):
  paths = [tuple(path) for path in paths]
  nodes = token_tree.merge(paths, depth)
  whole = prefixes(path[:depth] for path in paths)
  assert len(nodes) == len(whole)
  for count in range(len(nodes) + 1):  # Any first nodes are a tree.
    found = token_tree.branches(nodes[:count])
    kept = prefixes(branch.tokens for branch in found)
    assert len(kept) == count and kept <= whole
    # A leaf each: none is the beginning of another.
    pairs = itertools.permutations(found, 2)
    assert not any(a.tokens == b.tokens[: len(a.tokens)] for a, b in pairs)
    own = [row for branch in found for row in branch.rows[branch.num_shared :]]
    assert own == list(range(1, count + 1))
    where = {}
    for branch in found:
      for length, row in enumerate(branch.rows, 1):
        assert where.setdefault(branch.tokens[:length], row) == row


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 20), st.integers(0, 2**32 - 1))
def test_the_best_nodes_are_those_of_the_likeliest_paths(depth, width, budget, seed):
  scores = np.log(np.random.default_rng(seed).dirichlet(np.ones(width + 1), depth)[:, :width])
  found = tree.best_first(scores, budget)
  totals = [
    sum(scores[place, rank] for place, rank in enumerate(ranks))
    for length in range(1, depth + 1)
    for ranks in itertools.product(range(width), repeat=length)
  ]
  before, got = {-1: 0.0}, []
  for node, depth_of in enumerate(tree.Tree(found.ranks, found.parents).depths()):
    before[node] = before[int(found.parents[node])] + scores[depth_of - 1, found.ranks[node]]
    got.append(before[node])
  np.testing.assert_allclose(got, sorted(totals, reverse=True)[:budget], rtol=1e-12)


def test_equal_scores_go_to_the_one_met_first_and_impossible_ones_are_left_out():
  found = tree.best_first([[LOG_HALF, LOG_HALF, -np.inf], [0.0, -np.inf, -np.inf]], 9)
  assert found.parents.tolist() == [-1, -1, 0, 1] and found.ranks.tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize(
  "call, message",
  [
    (lambda: made([1, 2], [-1]), "got 2 tokens and 1 parents, expected one parent of each"),
    (lambda: made([1, 2], [1, -1]), "got 1 for node 0, expected one of -1 to -1; parents prec"),
    (lambda: made([1, 2], [-1, -2]), "got -2 for node 1, expected one of -1 to 0"),
    (lambda: made([0.5], [-1]), "Tree.tokens: got float64[1], expected whole numbers [n]"),
    (lambda: tree.comb([1], [[2], [3]]), "got siblings of 2 places for a main path of 1 tokens"),
    (lambda: tree.expand(()), "got the expansion <>, expected whole numbers from 1 on"),
    (lambda: tree.expand((2, 0)), "got the expansion <2, 0>, expected whole numbers from 1 on"),
    (lambda: tree.expand((9,) * 5), "of 66429 nodes, expected at most 4096; take fewer children"),
    (lambda: tree.expand((2, 2)).filled([[1, 2]]), "got candidates of shape (1, 2), expected"),
    (lambda: tree.best_first([0.1], 3), "got scores of shape (1,) from 0.0 to 0.1, expected log-"),
    (lambda: tree.best_first([[np.nan]], 3), "none above 0 and none NaN; pass log_softmax"),
    (lambda: tree.best_first([[0.0]], 0), "got a budget of 0 nodes, expected 1 to 4096"),
  ],
)
def test_what_is_no_tree_is_refused(call, message):
  with pytest.raises(ValueError, match=re.escape(message)):
    call()
