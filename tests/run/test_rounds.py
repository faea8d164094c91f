"""Sampling rounds continue until enough groups have a learning signal."""

from __future__ import annotations

import dataclasses
import zlib

import numpy as np
import pytest
from small_run import CONFIG, PER_STEP, Vowels, engine

from seerjax import rl
from seerjax.rollout import journal as journal_lib

pytestmark = pytest.mark.usefixtures("programs_on_disk")


class Coin(Vowels):
  """Rewards few texts, so that most groups have no signal."""

  def reward(self, text: str) -> float:
    return float(zlib.crc32(text.encode()) % 5 == 0)


@pytest.mark.thorough
def test_rounds_replace_groups_that_say_nothing(tmp_path):
  config = dataclasses.replace(
    CONFIG, trainer=dataclasses.replace(CONFIG.trainer, dynamic_sampling_rounds=3)
  )
  found, num_taken = [], []
  for turn in range(2):
    path = tmp_path / f"{turn}.jsonl"
    with journal_lib.Journal(path, fingerprint={}, settings={}) as journal:
      found.append([rl.sample(config, engine(), Coin(), journal, step)[0] for step in range(4)])
      # Known rollouts give the same groups, whatever round they are of.
      task = Coin()
      known = [rl.sample(config, engine(), task, journal, step)[0] for step in range(4)]
      assert task.num_verdicts == 0
      taken = journal.keys()
      num_taken.append([sum(at == step for at, *_ in taken) for step in range(4)])
    names = [
      [[rollout.completion.tokens for rollout in g.rollouts] for groups in part for g in groups]
      for part in (found[-1], known)
    ]
    assert names[0] == names[1]
  indices = [[[g.group_index for g in groups] for groups in part] for part in found]
  assert indices[0] == indices[1] and num_taken[0] == num_taken[1]
  assert all(len(groups) == 2 for groups in found[0])
  assert all(part == sorted(part) for part in indices[0])
  assert max(num_taken[0]) > PER_STEP and max(num_taken[0]) <= 3 * PER_STEP
  # A step keeps what it found, before it fills up with the rest.
  for groups, taken in zip(found[0], num_taken[0], strict=True):
    spread = [np.ptp(group.rewards) > 0 for group in groups]
    assert all(spread) or taken > PER_STEP
