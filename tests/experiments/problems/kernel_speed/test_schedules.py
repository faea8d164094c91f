"""Invalid schedules are refused, and only float32 is held to float32's tolerance."""

from __future__ import annotations

import dataclasses
import json

import pytest
from schedule_cases import PLAIN, TINY

from experiments.problems.kernel_speed import edits, rules, schedules, tiles


def test_only_float32_that_is_multiplied_as_such_is_held_to_it():
  plain = schedules.Schedule()
  half = schedules.Schedule(contraction_dtype="bfloat16")
  assert schedules.tolerance_of(plain, "cpu") == rules.FLOAT32_TOLERANCE
  for schedule, backend in ((half, "cpu"), (plain, "gpu"), (plain, "tpu")):
    assert schedules.tolerance_of(schedule, backend) == rules.TOLERANCE


@pytest.mark.parametrize(
  ("artefact", "reason"),
  [
    (None, "artefact: got None, expected a dict of projections, layout"),
    ({}, "artefact: got {}"),
    ({**PLAIN, "extra": 1}, "expected a dict of"),
    ({**PLAIN, "layout": "columns"}, "layout: got columns, expected one of rows, features"),
    ({**PLAIN, "row_chunks": 3}, "row_chunks: got 3, expected one of 1, 2, 4"),
    ({**PLAIN, "row_chunks": 10**5000}, "row_chunks: got int, expected one of"),
    ({**PLAIN, "row_chunks": True}, "row_chunks: got True"),
    ({**PLAIN, "row_chunks": 1.0}, "row_chunks: got 1.0"),
    ({**PLAIN, "sigmoid": ["tanh"]}, "sigmoid: got ['tanh'], expected one of logistic"),
  ],
)
def test_what_is_no_schedule_is_refused_with_the_reason(artefact, reason: str):
  for judge in (TINY.verify, TINY.confirm):
    score = judge(artefact)
    assert not score.is_valid and reason in score.reason


def test_fields_and_schedule_name_the_same():
  assert list(PLAIN) == [field.name for field in schedules.FIELDS]
  for field in (*schedules.FIELDS, *tiles.MATMUL_FIELDS, *tiles.NORM_FIELDS):
    assert 2 <= len(field.choices) <= edits.FieldEdits.NUM_CHOICES
  assert json.loads(json.dumps(PLAIN)) == PLAIN
  assert dataclasses.asdict(schedules.Schedule()) == PLAIN
