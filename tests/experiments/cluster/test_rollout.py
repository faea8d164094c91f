"""The cluster experiment: errors, the digested contents, and (thorough) one run."""

from __future__ import annotations

import dataclasses
import json

import made_rollouts
import numpy as np
import pytest

from experiments.cluster import rollout as cluster_rollout
from seerjax.types import Completion


def completion(name: str, logprob: float = -1.0) -> Completion:
  return made_rollouts.completion(name, (3,), logprobs=[logprob])


def test_a_digest_is_of_every_bit_and_of_no_order():
  one, two = completion("a"), completion("b", -2.0)
  assert cluster_rollout.digest_of([one, two]) == cluster_rollout.digest_of([two, one])
  moved = dataclasses.replace(two, raw_logprobs=np.nextafter(two.raw_logprobs, np.float32(0)))
  assert cluster_rollout.digest_of([one, two]) != cluster_rollout.digest_of([one, moved])


def test_nothing_to_ask_is_refused():
  with pytest.raises(ValueError, match=r"got processes=0, num_groups=0, group_size=4, expected at"):
    cluster_rollout.ClusterRolloutConfig(num_groups=0)


@pytest.mark.long
def test_every_system_has_one_digest(tmp_path):
  config = cluster_rollout.ClusterRolloutConfig(num_groups=2, max_tokens=32)
  results = cluster_rollout.run(config, tmp_path)
  assert len({one["digest"] for one in results.values()}) == 1
  assert results["3 workers, one of which dies"]["again"] > 0
  assert json.loads((tmp_path / "results.json").read_text())["results"] == results
  assert "<svg" in (tmp_path / "rollout.html").read_text()
