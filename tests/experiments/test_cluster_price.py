"""The overhead of a cluster with one worker: a table by hand, errors, and equal digests."""

from __future__ import annotations

import json
import pathlib
import re

import pytest

from experiments import cluster_price
from experiments.cluster_price import ClusterPriceConfig


def test_a_table_by_hand():
  record = dict(
    implementation="native", ratios=[0.9, 0.9], shares=[0.02, 0.04], seconds=2.0, chunks=30
  )
  line = cluster_price.table([record]).splitlines()[2]
  assert line == "| native | 0.900 (0.900 to 0.900) | 0.85 | 3.00% | 5% | 2.00 |"


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    (dict(turns=1), "ClusterPriceConfig: got turns=1, implementations=("),
    (dict(implementations=("fast",)), "implementations=('fast',), expected at least 2 turns and"),
  ],
)
def test_what_gives_no_interval_is_refused(changes, message):
  with pytest.raises(ValueError, match=re.escape(message)):
    ClusterPriceConfig(**changes)


@pytest.mark.long
def test_both_rollouts_take_turns_and_say_the_same(tmp_path: pathlib.Path):
  config = ClusterPriceConfig(turns=2, num_groups=1, group_size=2, chunk_tokens=16)
  said: list[str] = []
  record = cluster_price.measure(config, "native", tmp_path, said.append)
  assert len(said) == 3 and len(record["ratios"]) == len(record["shares"]) == 2
  assert record["tokens"] == 2 * 2 * 16 and record["chunks"] == 4
  assert 0 < record["shares"][0] < 1
  assert json.loads(json.dumps(record)) and not any(tmp_path.iterdir())
