"""Suffix trees of groups, their drafts, and errors."""

from __future__ import annotations

import numpy as np
import pytest

from seerjax.speculation.group_trees import GroupTrees
from seerjax.speculation.suffix_tree import SpeculationArgs

GREEDY = SpeculationArgs(min_token_prob=0.0)


def test_a_batch_of_groups_is_written_into_the_callers_buffers():
  trees = GroupTrees()
  for group, text in (("g", [1, 2, 3]), ("h", [1, 4, 5])):
    trees.register_group(group)
    trees.append(group, [("r", 0, text)])
  patterns = np.asarray([1, 9, 1, 2], np.int32)
  output = np.full((3, 1, 2), -1, np.int32)
  drafts = trees.batch_speculate(
    ["g", "h", "h"], np.asarray([0, 1, 3, 4]), patterns, output, GREEDY._replace(max_spec_tokens=2)
  )
  assert drafts.num_tokens.tolist() == [[2], [2], [0]]
  assert output[:2, 0].tolist() == [[2, 3], [4, 5]]
  assert drafts.scores == pytest.approx([0.8 + 0.64, 0.8 + 0.64, 0.0])
  assert drafts.match_lengths.tolist() == [1, 1, 0]


def test_limits_hold_for_a_path_and_for_all_together():
  trees = GroupTrees()
  trees.register_group("g")
  for request in range(4):
    trees.append("g", [(str(request), 0, [1, *range(10 + request, 30)])])
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


def test_a_group_lives_until_it_is_dropped():
  trees = GroupTrees()
  for group in "ghg":
    trees.register_group(group)
    trees.append(group, [("r", 0, [1, 2])])
  assert trees.group_ids == ("g", "h")
  assert trees.num_bytes == trees.tree("g").num_bytes + trees.tree("h").num_bytes > 0
  trees.drop_group("g")
  trees.drop_group("h")
  assert trees.group_ids == () and trees.num_bytes == 0


def test_a_drafts_buffers_need_not_be_clean():
  trees = GroupTrees()
  trees.register_group("g")
  trees.append("g", [("r", 0, [1, 2, 3])])
  output = np.full((1, 1, 8), 77, np.int32)
  drafts = trees.batch_speculate(["g"], np.asarray([0, 1]), np.asarray([8], np.int32), output)
  assert drafts.num_tokens.tolist() == [[0]]


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
    (lambda t: t.tree("h"), "group 'h': got an unknown group, expected one of 1"),
    (lambda t: t.append("h", [("r", 0, [1])]), "register it first"),
    (lambda t: t.drop_group("h"), "group 'h'"),
    (lambda t: speculate(t, offsets=(0, 1, 1)), "got buffer_offsets of"),
    (lambda t: speculate(t, patterns=(1, 1)), "got pattern_buffer of"),
    (lambda t: speculate(t, output=(1, 2, 8)), "got output_buffer of"),
    (lambda t: speculate(t, limits=(2, 2)), "got limits of"),
    (lambda t: speculate(t, offsets=(0, 2)), "got buffer_offsets from 0 to 2, expected ascending"),
    (lambda t: speculate(t, offsets=(1, 0)), "recompute them"),
  ],
)
def test_refusals_of_groups(call, message):
  trees = GroupTrees()
  trees.register_group("g")
  with pytest.raises(ValueError, match=message):
    call(trees)
