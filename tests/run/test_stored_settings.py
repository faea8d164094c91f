"""A directory of the release before reads in today's names."""

from __future__ import annotations

import pytest

from seerjax.rollout import likeness, queues, routing
from seerjax.run import stored_settings
from seerjax.speculation import budget

BEFORE = {
  "seed": 3,
  "scheduler": {
    "chunk_tokens": 128,
    "routing": {"max_imbalance": 0.05},
    "min_pull_tokens": 512,
    "min_correlation": 0.5,
    "num_compared": 64,
    "fair_every": 64,
  },
  "budget": {
    "policy": "mba",
    "gamma_max": 8,
    "priority": 2.0,
    "on_gain": 0.1,
    "off_gain": 0.05,
    "probe_cost": 0.0025,
    "probe_requests": 2,
    "memory": 512.0,
  },
}
TODAY = {
  "seed": 3,
  "scheduler": {
    "chunk_tokens": 128, "routing": {}, "min_pull_tokens": 512, "min_correlation": 0.5
  },
  "speculation": {"budget": {"policy": "mba", "gamma_max": 8, "priority": 2.0}},
}  # fmt: skip


def test_settings_of_the_release_before_have_todays_names():
  assert stored_settings.as_today(BEFORE) == TODAY
  assert stored_settings.as_today(TODAY) == TODAY


def test_a_setting_that_is_a_constant_now_must_have_had_its_value():
  stored = BEFORE | {"budget": BEFORE["budget"] | {"memory": 64.0}}
  with pytest.raises(ValueError, match=r"memory: got 64.0 in stored settings, expected 512.0"):
    stored_settings.as_today(stored)


def test_the_table_has_the_constants_of_the_code():
  values = stored_settings.CONSTANTS
  assert values["scheduler.fair_every"] == queues.FAIR_EVERY
  assert values["scheduler.num_compared"] == likeness.NUM_COMPARED
  assert values["scheduler.routing.max_imbalance"] == routing.MAX_IMBALANCE
  names = ("memory", "off_gain", "on_gain", "probe_cost", "probe_requests")
  assert [values[f"speculation.budget.{name}"] for name in names] == [
    vars(budget)[name.upper()] for name in names
  ]


def test_a_setting_that_is_new_had_its_default():
  defaults = {"seed": 0, "scheduler": {"chunk_tokens": 64, "patience": 2}, "shine": 1.5}
  found = stored_settings.completed({"seed": 3, "scheduler": {"chunk_tokens": 128}}, defaults)
  assert found == {"seed": 3, "scheduler": {"chunk_tokens": 128, "patience": 2}, "shine": 1.5}
