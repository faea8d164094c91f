"""Counts, drafts, removal and replicas: by hand, against the definition, and refusals."""

from __future__ import annotations

import random

import hypothesis
from hypothesis import given, strategies as st
import numpy as np
import pytest

from seerjax.speculation.suffix_tree import (
  DEPTH,
  ROW,
  GroupTrees,
  ReferenceTree,
  SpeculationArgs,
  SuffixTree,
)

GREEDY = SpeculationArgs(smoothing=0.0, min_token_prob=0.0)


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
  assert tree.draft([1], GREEDY._replace(max_spec_tokens=1)) == ([(3,)], 0.75, 1)


def test_ties_go_to_more_occurrences_then_to_the_smaller_token():
  tree = tree_of(a=[1, 5, 1, 4, 1, 4], b=[9])
  assert tree.draft([1], GREEDY._replace(max_spec_tokens=1))[0] == [(4,)]
  tree.append("a", 6, [1, 5])
  assert tree.draft([1], GREEDY._replace(max_spec_tokens=1))[0] == [(4,)]
  tree.append("a", 8, [1, 5])
  assert tree.draft([1], GREEDY._replace(max_spec_tokens=1))[0] == [(5,)]


def test_the_longest_match_is_followed_and_scored():
  tree = tree_of(a=[1, 2, 3, 4], b=[1, 2, 3, 5], c=[2, 3, 6], d=[2, 3, 6], e=[2, 3, 6])
  # After 1 2 3, one said 4 and one 5; each with probability 1 / (2 + 1/2).
  args = SpeculationArgs(smoothing=0.5)
  assert tree.draft([1, 2, 3], args) == ([(4,)], 0.4, 3)
  # After 2 3, three of five said 6: better than the longer match, when both compete.
  paths, score, match = tree.draft([1, 2, 3], args._replace(num_lookups=2))
  assert (paths, match) == ([(6,)], 2) and score == pytest.approx(3 / 5.5)


def test_paths_branch_where_the_next_likeliest_token_leaves_and_then_go_on_from_less():
  tree = tree_of(a=[1, 2, 3, 4], b=[1, 2, 3, 5], c=[1, 2, 7, 8], d=[2, 9])
  args = GREEDY._replace(top_k=4)
  # 3 in two of three, then 4; 7 in one of three; 5 in half of two of three; 9 follows 2 alone.
  paths, score, match = tree.draft([1, 2], args)
  assert paths == [(3, 4), (7, 8), (3, 5), (9,)]
  assert match == 2
  assert score == pytest.approx(2 / 3 + 1 / 3 + 1 / 3 + 1 / 3 + 1 / 3 + 1 / 4)


def test_nothing_is_drafted_where_nothing_follows():
  tree = tree_of(a=[1, 2, 3])
  assert tree.draft([]) == tree.draft([4]) == tree.draft([1, 2, 3]) == ([], 0.0, 0)
  assert SuffixTree().draft([1]) == ([], 0.0, 0)
  assert tree.draft([2], SpeculationArgs(pattern_lookup_min=2)) == ([], 0.0, 0)
  assert tree.draft([2], SpeculationArgs(smoothing=20.0)) == ([], 0.0, 0)


def test_a_request_that_is_removed_was_never_here():
  tree = tree_of(a=[1, 2, 3, 1, 2], b=[1, 2, 4])
  before = tree_of(b=[1, 2, 4])
  tree.remove("a")
  assert tree.count([1, 2]) == (1, 1) and tree.count([2, 3]) == (0, 0)
  assert tree.num_nodes == before.num_nodes
  assert tree.draft([1]) == before.draft([1])


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


@st.composite
def histories(draw):
  """Appends of a few requests in small alphabets, with copies of each other, and removals."""
  rng = random.Random(draw(st.integers(0, 2**32)))
  vocab = draw(st.sampled_from([1, 2, 3, 8]))
  texts: dict[str, list[int]] = {}
  steps = []
  for _ in range(draw(st.integers(1, 25))):
    if texts and rng.random() < 0.1:
      name = rng.choice(sorted(texts))
      del texts[name]
      steps.append((name, -1, []))
      continue
    name = rng.choice("abcd")
    text = texts.setdefault(name, [])
    count = rng.choice([0, 1, 1, 2, 5, 17, 70, ROW])
    new = [rng.randrange(vocab) for _ in range(count)]
    if rng.random() < 0.5:
      source = texts[rng.choice(sorted(texts))]
      start = rng.randrange(len(source) + 1)
      new = source[start : start + count]
    repeated = rng.randrange(len(text) + 1) if rng.random() < 0.2 else len(text)
    steps.append((name, repeated, text[repeated:] + new))
    text.extend(new)
  return steps, vocab, rng


def play(steps, *trees):
  for name, start, tokens in steps:
    for tree in trees:
      if start < 0:
        tree.remove(name)
      else:
        tree.append(name, start, tokens)


def strings(texts, vocab, rng, count):
  """Parts of the texts, half of them with another last token."""
  found = []
  for _ in range(count):
    text = rng.choice([*texts.values(), [0]]) or [0]
    start = rng.randrange(len(text))
    string = text[start : start + rng.randrange(1, DEPTH + 1)]
    found.append(string if rng.random() < 0.5 else [*string[:-1], rng.randrange(vocab)])
  return found


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
      smoothing=rng.choice([0.0, 0.25, 1.0]),
      num_lookups=rng.choice([1, 3]),
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
  args = SpeculationArgs(top_k=3, num_lookups=2)
  for string in strings(texts, vocab, rng, 10):
    assert tree.draft(string, args) == again.draft(string, args)


@given(histories())
@hypothesis.settings(max_examples=40)
def test_the_match_of_a_texts_end_is_known(history):
  steps, _, rng = history
  tree = SuffixTree()
  play(steps, tree)
  args = SpeculationArgs(top_k=2, num_lookups=rng.choice([1, 3]))
  for name in tree.lengths:
    text = tree.tokens(name)
    assert tree.draft(text, args, request_id=name) == tree.draft(text, args)


@given(histories(), st.data())
def test_a_replica_fed_by_deltas_drafts_the_same(history, data):
  steps, vocab, rng = history
  server, replica = GroupTrees(), GroupTrees()
  server.register_group("g")
  replica.register_group("g")
  for name, start, tokens in steps:
    if start < 0:
      server.remove_request("g", name)
    else:
      server.update_cst("g", name, start, tokens)
    if data.draw(st.booleans()):
      deltas = server.fetch_cst(["g"], [replica.cache_info("g")])
      replica.apply_deltas(deltas)
      if data.draw(st.booleans()):
        replica.apply_deltas(deltas)  # Repeated on the way.
      assert replica.cache_info("g") == server.cache_info("g")
      assert all(trees.num_bytes == trees.tree("g").num_bytes for trees in (server, replica))
      assert server.fetch_cst(["g"], [replica.cache_info("g")])[0][1:] == ((), ())
      for string in strings({"": list(tokens)}, vocab, rng, 3):
        assert replica.tree("g").draft(string) == server.tree("g").draft(string)


def test_a_name_that_is_used_again_is_another_request():
  server, replica = GroupTrees(), GroupTrees()
  for trees in (server, replica):
    trees.register_group("g")
  server.update_cst("g", "a", 0, [1, 2, 3])
  replica.apply_deltas(server.fetch_cst(["g"], [replica.cache_info("g")]))
  server.remove_request("g", "a")
  server.update_cst("g", "a", 0, [4, 5, 6, 7])
  (delta,) = server.fetch_cst(["g"], [replica.cache_info("g")])
  assert delta.removed == ("a",)
  replica.apply_deltas([delta])
  assert replica.tree("g").tokens("a").tolist() == [4, 5, 6, 7]


def test_a_batch_of_groups_is_written_into_the_callers_buffers():
  trees = GroupTrees()
  for group, text in (("g", [1, 2, 3]), ("h", [1, 4, 5])):
    trees.register_group(group)
    trees.update_cst(group, "r", 0, text)
  patterns = np.asarray([1, 9, 1, 2], np.int32)
  output = np.full((3, 1, 2), -1, np.int32)
  drafts = trees.batch_speculate(
    ["g", "h", "h"], np.asarray([0, 1, 3, 4]), patterns, output, GREEDY._replace(max_spec_tokens=2)
  )
  assert drafts.num_tokens.tolist() == [[2], [2], [0]]
  assert output[:2, 0].tolist() == [[2, 3], [4, 5]]
  assert drafts.scores.tolist() == [2.0, 2.0, 0.0] and drafts.match_lengths.tolist() == [1, 1, 0]


def test_limits_hold_for_a_path_and_for_all_together():
  trees = GroupTrees()
  trees.register_group("g")
  for request in range(4):
    trees.update_cst("g", str(request), 0, [1, *range(10 + request, 30)])
  args = GREEDY._replace(top_k=4)
  for widest in range(10):
    for total in range(20):
      output = np.empty((1, 4, 8), np.int32)
      (lengths,) = trees.batch_speculate(
        ["g"],
        np.asarray([0, 1]),
        np.asarray([1], np.int32),
        output,
        args,
        np.asarray([[widest, total]], np.int32),
      ).num_tokens.tolist()
      assert max(lengths) <= widest and sum(lengths) <= total
      assert sum(lengths) == min(total, 4 * min(8, widest))


def test_groups_live_as_long_as_somebody_asks_for_them():
  trees = GroupTrees()
  trees.register_group("g", 10.0, now_seconds=0.0)
  trees.register_group("h", 30.0, now_seconds=0.0)
  trees.register_group("g", 10.0, now_seconds=5.0)
  trees.update_cst("g", "r", 0, [1, 2])
  assert trees.expire(14.0) == ()
  assert trees.expire(15.0) == ("g",)
  assert trees.group_ids == ("h",)
  trees.drop_group("h")
  assert trees.group_ids == () and trees.num_bytes == 0


def test_a_drafts_buffers_need_not_be_clean():
  trees = GroupTrees()
  trees.register_group("g")
  trees.update_cst("g", "r", 0, [1, 2, 3])
  output = np.full((1, 1, 8), 77, np.int32)
  drafts = trees.batch_speculate(["g"], np.asarray([0, 1]), np.asarray([8], np.int32), output)
  assert drafts.num_tokens.tolist() == [[0]]


@pytest.mark.parametrize(
  "call, message",
  [
    (lambda t: t.append("a", 4, [1]), "got prev_token_count=4, expected 0 to 3"),
    (lambda t: t.append("a", -1, [1]), "send those between first"),
    (lambda t: t.append("b", 1, [1]), "got prev_token_count=1, expected 0 to 0"),
    (lambda t: t.append("a", 1, [2, 9]), "got token 9 at 2, expected 3, which is here already"),
    (lambda t: t.append("a", 3, [4, -1]), "got token id -1, expected 0 or more"),
    (lambda t: t.append_many([("a", 3, [4]), ("a", 4, [5])]), "got two updates in one call"),
    (lambda t: t.remove("b"), "SuffixTree.remove: got request 'b', expected one of the 1"),
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


def speculate(trees, *, offsets=(0, 1), patterns=1, output=(1, 1, 8), limits=(1, 2)):
  trees.batch_speculate(
    ["g"],
    np.asarray(offsets, np.int64),
    np.zeros(patterns, np.int32),
    np.zeros(output, np.int32),
    limits=np.zeros(limits, np.int32),
  )


@pytest.mark.parametrize(
  "call, message",
  [
    (lambda t: t.tree("h"), "group 'h': got a group that is not here, expected one of the 1"),
    (lambda t: t.update_cst("h", "r", 0, [1]), "register it first"),
    (lambda t: t.fetch_cst(["h"], [{}]), "group 'h'"),
    (lambda t: t.register_group("g", 0.0), "got ttl_seconds=0.0, expected more than 0"),
    (lambda t: speculate(t, offsets=(0, 1, 1)), "got buffer_offsets of"),
    (lambda t: speculate(t, patterns=(1, 1)), "got pattern_buffer of"),
    (lambda t: speculate(t, output=(1, 2, 8)), "got output_buffer of"),
    (lambda t: speculate(t, limits=(2, 2)), "got limits of"),
    (lambda t: speculate(t, offsets=(0, 2)), "got buffer_offsets from 0 to 2, expected ascending"),
    (lambda t: speculate(t, offsets=(1, 0)), "count again"),
  ],
)
def test_refusals_of_groups(call, message):
  trees = GroupTrees()
  trees.register_group("g")
  with pytest.raises(ValueError, match=message):
    call(trees)


def test_a_wrong_count_would_be_seen():
  # The twin that must fail: a tree that misses one token differs from the definition.
  tree, reference = tree_of(a=[1, 2, 1]), ReferenceTree()
  reference.append("a", 0, [1, 2, 1, 2])
  assert tree.count([1, 2]) != reference.count([1, 2])
