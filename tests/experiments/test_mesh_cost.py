"""The mesh-cost table and its timings."""

from __future__ import annotations

import pytest

from experiments import mesh_cost


def record(devices: int, gradient: float) -> dict:
  return dict(
    implementation="native", devices=devices, gradient=gradient, tree=0.003, psum=0.002, share=0.04
  )


def test_a_table_by_hand():
  lines = mesh_cost.table([record(1, 0.2), record(4, 0.3)]).splitlines()
  assert lines[2:] == [
    "| native | 1 | 0.200 | 1.00 | 3.00 | 2.00 | 4.0% |",
    "| native | 4 | 0.300 | 1.50 | 3.00 | 2.00 | 4.0% |",
  ]


def test_sums_run_on_any_number_of_devices():
  for devices in (1, 4):
    for run in mesh_cost.sums(8, 3, 5, devices).values():
      run()


@pytest.mark.long
def test_every_mesh_is_timed_and_has_the_bits_of_one_device():
  said: list[str] = []
  records = mesh_cost.measure("nano", "native", 1, 1, said.append)
  assert [found["devices"] for found in records] == [1, 2, 4, 8]
  assert all(found["gradient"] > 0 and found["slabs"] == 8 for found in records)
  assert len(said) == 2
