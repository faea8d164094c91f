"""Values that processes of a slice exchange, and the behaviour of a single process."""

from __future__ import annotations

import numpy as np
import pytest
import slice_jobs

from seerjax import agreement


def test_a_process_that_is_alone_agrees_with_itself():
  assert agreement.is_first()
  assert agreement.from_first(lambda: "broadcast") == "broadcast"
  assert agreement.least(2.5) == 2.5 and agreement.most(7) == 7
  agreement.compare("a step", {"tokens": np.arange(3)})
  with pytest.raises(OSError, match="the disk is full"):
    agreement.from_first(refuse)


def refuse():
  raise OSError("the disk is full")


@pytest.mark.thorough
def test_the_first_of_two_processes_tells_and_a_difference_ends_both():
  found = slice_jobs.run("agreement")
  assert [status for status, _, _ in found] == [0, 0], found
  (_, first, _), (_, second, _) = found
  for one in (first, second):
    assert one["broadcast"] == {"rank": 0, "data": list(range(3000))}
    first_bytes = agreement.FIRST_BYTES
    assert one["sizes"] == [0, *range(first_bytes - 24, first_bytes + 4), 2048]
    assert one["least"] == 4.5 and one["most"] == 4
    # Both errors name the step, the field, and each process's value.
    assert one["differs"].startswith("Disagreement: step 7: got pages that differs between")
    assert "40 (digest " in one["differs"] and ") in process 0; 41 (digest " in one["differs"]
    assert "the same code, flags and files" in one["differs"]
  # The other process ends with the first one's error.
  assert first["refused"] == "OSError: the disk is full"
  assert second["refused"] == (
    "Disagreement: process 0 ended with OSError: the disk is full; see its log."
  )
  # Data in one process's memory could not return to another process's devices.
  assert first["host_pages"] == second["host_pages"] == 0
  assert first["store"] == second["store"]
  assert first["store"].startswith("NotImplementedError: KVPoolConfig: got disk='here' and moonca")
  assert "on a mesh of several processes, expected neither" in first["store"]
  assert first["ahead"] == second["ahead"]
  assert first["ahead"].startswith(
    "NotImplementedError: RunConfig.off_policy: got max_policy_lag=1 in 2 processes, expected 0"
  )
  assert first["workers"].startswith(
    "NotImplementedError: RunConfig.cluster: got workers=3 in 2 processes, expected 0"
  )
