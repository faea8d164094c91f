"""The suffix-draft experiment: streams, replay and tables, small and by hand."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import pytest

from experiments import suffix_drafts
from experiments.suffix_drafts import Cost, Sampled, Workload
from seerjax.speculation.suffix_tree import SpeculationArgs

SMALL = Workload(num_groups=2, group_size=3, num_tokens=256, num_prompts=0)


@pytest.mark.parametrize("name", suffix_drafts.STREAMS)
def test_streams_are_drawn_again_alike(name: str):
  one, two = (suffix_drafts.STREAMS[name](SMALL, np.random.default_rng(1)) for _ in range(2))
  assert one.shape == (2, 3, 256) and one.dtype == np.int32 and one.min() >= 0
  np.testing.assert_array_equal(one, two)


def test_a_sibling_that_said_the_same_leaves_few_steps():
  group = Sampled([1, 2, 3], [[*range(10, 30)], [*range(10, 30)], [*range(40, 60)]])
  assert suffix_drafts.replay(group, 0, 0, SpeculationArgs()) == 20
  # 9 + 9 + 2 tokens.
  assert suffix_drafts.replay(group, 0, 1, SpeculationArgs()) == 3
  assert suffix_drafts.replay(group, 1, 1, SpeculationArgs()) == 20
  lengths = suffix_drafts.acceptance_lengths([group], references=[0, 2])
  assert lengths[0, 1] == 1.0 and lengths[2, 1] == pytest.approx(60 / (3 + 3 + 20))


def test_the_last_token_is_sampled_not_drafted():
  assert suffix_drafts.agreement([1, 2, 3], [1, 2, 3, 4]) == 3
  assert suffix_drafts.agreement([1, 2, 3], [1, 2, 3]) == 2
  assert suffix_drafts.agreement([1, 9], [1, 2, 3]) == 1
  assert suffix_drafts.agreement([1], [1]) == 0


def test_tables_by_hand():
  cost = Cost(0.5, 0.75, 88.4, 1.5, 2.0, 20.04, 5.7, 5.33, 2.62, 1_703_936)
  assert suffix_drafts.cost_table({"code": cost}).splitlines()[-1] == (
    "| code | 1,703,936 | 0.50 | 0.75 | 88 | 1.50 | 2.00 | 20.0 | 5.7 | 5.33 | 2.62 |"
  )
  table = suffix_drafts.acceptance_table({(5, 1): 4.0, (5, 2): 4.5, (5, 4): 5.0})
  assert table.splitlines()[-1] == "| 5 | 4.00 | 4.50 | 5.00 | 2.32 / 2.44 / 2.59 |"


def test_costs_are_measured_and_written(tmp_path: pathlib.Path):
  suffix_drafts.run(SMALL, ["loops"], tmp_path)
  results = json.loads((tmp_path / "results.json").read_text())
  cost = Cost(**results["costs"]["loops"])
  assert cost.load == 2 * 3 * 256 and cost.append > 0 and cost.draft > 0
  # Each completion repeats its own fifty tokens.
  assert cost.accepted > 4
  assert "| loops | 1,536 |" in (tmp_path / "table.md").read_text()


def test_an_unknown_stream_is_refused(tmp_path: pathlib.Path):
  with pytest.raises(ValueError, match="--streams: got loop, expected some of reasoning"):
    suffix_drafts.run(SMALL, ["loop"], tmp_path)
