"""A rollout's trace: its contents, and its state after a kill."""

from __future__ import annotations

import pytest

from seerjax.rollout import trace as trace_lib
from seerjax.rollout.trace import Span, StepTrace, Trace
from seerjax.speculation.statistics import Acceptance

ONE = Trace(
  spans=[Span("0/0/0", "g", 1, 0, 5, 5, True, True)], used_pages=[[1, 2]], rows=[3], spills=2
)


def test_traces_are_read_as_they_were_written(tmp_path):
  path = tmp_path / trace_lib.FILE_NAME
  drafts = Acceptance()
  drafts.add(4, 2, 3)
  steps = {0: StepTrace([ONE, Trace()], drafts), 1: StepTrace([], Acceptance())}
  for step, done in steps.items():
    trace_lib.append(path, step, done)
  assert trace_lib.read(path) == steps


def test_a_torn_line_is_left_out_and_a_later_one_counts(tmp_path):
  path = tmp_path / trace_lib.FILE_NAME
  trace_lib.append(path, 0, StepTrace([Trace()], Acceptance()))
  with path.open("a") as file:
    file.write('{"step":1,"roll\n')
  one = StepTrace([ONE], Acceptance())
  trace_lib.append(path, 0, one)
  assert trace_lib.read(path) == {0: one}
  assert trace_lib.read(tmp_path / "none.jsonl") == {}


def test_a_line_that_a_kill_tore_takes_no_other_with_it(tmp_path):
  path = tmp_path / trace_lib.FILE_NAME
  one = StepTrace([ONE], Acceptance())
  trace_lib.append(path, 0, one)
  with path.open("a") as file:
    file.write('{"step":1,"roll')
  assert trace_lib.damaged_lines(path) == []  # Torn alone: it is sampled again.
  trace_lib.append(path, 1, one)
  assert trace_lib.read(path) == {0: one, 1: one}


@pytest.mark.parametrize("damage", [b"\xff", b"}", b"null", b'{"step":1}', b"[1]"])
def test_damage_is_left_out_and_its_lines_are_named(tmp_path, damage):
  path = tmp_path / trace_lib.FILE_NAME
  one = StepTrace([ONE], Acceptance())
  for step in range(3):
    trace_lib.append(path, step, one)
  lines = path.read_bytes().split(b"\n")
  path.write_bytes(b"\n".join([lines[0], damage, *lines[2:]]))
  assert trace_lib.read(path) == {0: one, 2: one}
  assert trace_lib.damaged_lines(path) == [2]


def test_numbers_of_a_step_are_of_all_its_rollouts():
  numbers = trace_lib.summarise([ONE, ONE])
  assert numbers["schedule/chunks"] == 2 and numbers["schedule/spills"] == 4
  assert numbers["schedule/steps"] == 2 and numbers["schedule/tail_steps"] == 0


def test_the_tail_is_the_time_of_the_last_alone():
  ends = [3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 20, 30]
  spans = [Span(str(end), "g", 0, 0, end, end, False, True) for end in ends]
  trace = Trace(spans=spans)
  assert trace.tail_steps() == 10  # One of twelve.
  assert trace.tail_steps(0.25) == 30 - 11
  assert Trace().tail_steps() == 0
