"""Seconds of steps and of migrations, by hand."""

from __future__ import annotations

import dataclasses

import pytest

from seerjax.simulate.costs import CostModel

DENSE = CostModel(
  num_devices=2,
  device_bytes=100,
  device_bandwidth=10,
  device_speed=1000,
  weight_bytes=40,
  resident_bytes=50,
  active_bytes=40,
  active_parameters=20,
  kv_bytes=2,
  attention_operations=100,
  draft_overhead=0.5,
  fixed_seconds=1.0,
  memory_share=0.5,
  host_bandwidth=4,
  peer_bandwidth=8,
)


def test_a_step_of_a_dense_model_by_hand():
  # Weights 40 / 20 = 2 s; 10 rows compute 2 * 10 * 20 / 2000 = 0.2 s; KV 2 / 20 = 0.1 s a position.
  assert DENSE.step_seconds(10, 30) == pytest.approx(1 + 2 + 3)
  # 200 rows compute 4 s, longer than the weights are read.
  assert DENSE.step_seconds(200, 0) == pytest.approx(1 + 4)


def test_drafts_cost_rows_attention_and_overhead():
  # 200 rows; attention 4 * 100 / 2000 = 0.2 s a position beats reading; all times 1.5.
  assert DENSE.step_seconds(50, 10, 3) == pytest.approx(1.5 * (1 + 4 + 2))


def test_experts_are_read_as_rows_meet_them():
  sparse = dataclasses.replace(DENSE, active_bytes=10)
  assert sparse.step_seconds(1, 0) == pytest.approx(1 + 10 / 20)
  assert sparse.step_seconds(2, 0) == pytest.approx(1 + 40 * (1 - 0.75**2) / 20)
  assert sparse.step_seconds(50, 0) == pytest.approx(1 + 2, rel=1e-4)


def test_moves_prefill_and_room_by_hand():
  assert DENSE.kv_tokens == 25  # (2 * 100 * 0.5 - 50) / 2
  assert DENSE.prefill_seconds(50) == pytest.approx(1.0)
  assert DENSE.host_seconds(6) == pytest.approx(3.0)
  assert DENSE.peer_seconds(6) == pytest.approx(1.5)


@pytest.mark.parametrize(
  "changes, message",
  [
    ({"kv_bytes": 0}, "got kv_bytes=0, expected more than 0"),
    ({"draft_overhead": -1}, "got draft_overhead=-1"),
    ({"memory_share": 0.25}, "got 50 bytes of weights on 2 x 100 bytes at memory_share=0.25"),
  ],
)
def test_costs_that_cannot_be_are_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(DENSE, **changes)
