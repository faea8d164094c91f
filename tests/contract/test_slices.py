"""Several processes with one mesh give the bits of a single process."""

from __future__ import annotations

import collections
import json

import pytest
import slice_jobs

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("programs_on_disk")]


@pytest.mark.parametrize("mesh", [(2, 1), (1, 2)])
def test_two_processes_answer_the_bits_of_one(mesh, tell_events):
  events = collections.Counter()
  expected = slice_jobs.answers((1, 1))
  for status, found, text in slice_jobs.run("answers", json.dumps(mesh)):
    assert status == 0, text
    assert found == {json.dumps(mesh): expected}, text
    events["processes"] += 1
  tell_events(f"mesh {mesh}", events, ("processes",))


def test_twin_another_seed_has_another_digest():
  assert slice_jobs.answers((1, 1), first_seed=1) != slice_jobs.answers((1, 1))
