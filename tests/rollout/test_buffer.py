"""The global view of a rollout."""

from __future__ import annotations

import pytest
import refusals

from seerjax.rollout import buffer as buffer_lib
from seerjax.rollout.buffer import NOWHERE, Buffer, State


def one_request(**changes) -> Buffer:
  buffer = Buffer()
  buffer.add("a", "g", **{"prompt_tokens": 10, "max_tokens": 20, **changes})
  return buffer


def test_a_request_goes_from_chunk_to_chunk_and_its_kv_stays_where_it_ran():
  buffer = one_request()
  item = buffer["a"]
  assert (item.state, item.kv_instance, item.kv_tokens) == (State.WAITING, NOWHERE, 0)
  buffer.begin_chunk("a", 2, 8)
  assert (item.state, item.instance, item.kv_instance, item.chunk_end) == (State.RUNNING, 2, 2, 8)
  assert item.kv_tokens == 10
  buffer.progress("a", 5)
  # The fifth token's KV is written when it is fed to the next step.
  assert (item.generated, item.kv_tokens) == (5, 14)
  buffer.end_chunk("a", 8, False)
  assert (item.state, item.instance, item.kv_instance, item.kv_tokens) == (
    State.WAITING,
    NOWHERE,
    2,
    17,
  )
  buffer.moved("a", 1)
  buffer.begin_chunk("a", 1, 12)
  buffer.end_chunk("a", 13, True)
  assert (item.state, item.generated, item.kv_instance, item.kv_tokens) == (
    State.FINISHED,
    13,
    NOWHERE,
    0,
  )
  assert item.num_chunks == 2
  assert item.group.prompt_instances == {1, 2}
  assert (buffer.num_waiting, buffer.num_running, buffer.num_finished) == (0, 0, 1)


def test_lost_kv_leaves_the_tokens_and_a_running_request_waits_again():
  buffer = one_request()
  buffer.begin_chunk("a", 0, 20)
  buffer.progress("a", 7)
  buffer.lost_kv("a")
  item = buffer["a"]
  assert (item.state, item.generated, item.kv_tokens, item.num_lost) == (State.WAITING, 7, 0, 1)
  assert (item.instance, item.kv_instance) == (NOWHERE, NOWHERE)
  assert (buffer.num_waiting, buffer.num_running, buffer.num_unfinished) == (1, 0, 1)
  buffer.lost_kv("a")
  assert (item.num_lost, buffer.num_waiting) == (2, 1)


def test_groups_and_members_are_numbered_by_arrival_while_others_run():
  buffer = one_request()
  buffer.begin_chunk("a", 0, 20)
  late = buffer.add("b", "h", prompt_tokens=1, max_tokens=2)
  sibling = buffer.add("c", "g", prompt_tokens=1, max_tokens=9, generated=8)
  assert [(item.group.index, item.member, item.index) for item in buffer] == [
    (0, 0, 0),
    (1, 0, 1),
    (0, 1, 2),
  ]
  assert (late.group.name, sibling.generated, buffer.num_unfinished) == ("h", 8, 3)


def test_changes_are_taken_once_each():
  buffer = one_request()
  buffer.add("b", "g", prompt_tokens=1, max_tokens=2)
  assert [item.request_id for item in buffer.take_changes()] == ["a", "b"]
  assert buffer.take_changes() == []
  buffer.begin_chunk("b", 0, 1)
  buffer.begin_chunk("a", 0, 1)
  buffer.progress("b", 1)
  assert [item.request_id for item in buffer.take_changes()] == ["b", "a"]


@pytest.mark.parametrize(
  "generated, expected", [(0, 10), (1, 10), (2, 11), (5, 14)], ids=lambda value: str(value)
)
def test_kv_of_the_last_token_is_written_with_the_next_step(generated, expected):
  assert buffer_lib.kv_positions(one_request(generated=generated)["a"]) == expected


@pytest.mark.parametrize("generated", [4, 11])
def test_progress_out_of_the_chunk_is_refused(generated):
  buffer = one_request()
  buffer.begin_chunk("a", 0, 10)
  buffer.progress("a", 5)
  with pytest.raises(ValueError, match=f"got {generated} generated tokens .* expected 5 to 10"):
    buffer.progress("a", generated)


def test_a_full_request_must_be_finished():
  buffer = one_request()
  buffer.begin_chunk("a", 0, 20)
  with pytest.raises(ValueError, match="at 20 of 20 tokens and finished=False"):
    buffer.end_chunk("a", 20, False)


def test_calls_in_the_wrong_state_are_refused():
  buffer = one_request()
  with pytest.raises(ValueError, match="got progress of request 'a', which is waiting, expected a"):
    buffer.progress("a", 1)
  buffer.begin_chunk("a", 0, 20)
  for call in (lambda: buffer.begin_chunk("a", 0, 1), lambda: buffer.moved("a", 1)):
    with pytest.raises(ValueError, match="which is running, expected a waiting one"):
      call()
  buffer.end_chunk("a", 3, True)
  with pytest.raises(ValueError, match="which is finished, expected a running one"):
    buffer.end_chunk("a", 3, True)
  with pytest.raises(ValueError, match="got lost_kv .* finished, expected a waiting or running"):
    buffer.lost_kv("a")


@refusals.table(
  (lambda: one_request().add("a", "h", prompt_tokens=1, max_tokens=1),
   "got request 'a' twice, expected unique ids"),
  (lambda: one_request(prompt_tokens=0), "expected prompt_tokens >= 1 and 0 <= generated <"),
  (lambda: one_request(generated=20), "expected prompt_tokens >= 1 and 0 <= generated <"),
  (lambda: one_request(generated=-1), "expected prompt_tokens >= 1 and 0 <= generated <"),
  (lambda: one_request(max_tokens=0), "expected prompt_tokens >= 1 and 0 <= generated <"),
  (lambda: one_request().progress("z", 1), "got the unknown request 'z', expected one of the 1"),
  (lambda: one_request().begin_chunk("a", 0, 0), "expected 1 to 20 tokens on an instance >= 0"),
  (lambda: one_request().begin_chunk("a", 0, 21), "expected 1 to 20 tokens on an instance >= 0"),
  (lambda: one_request().begin_chunk("a", -1, 5), "expected 1 to 20 tokens on an instance >= 0"),
  (lambda: one_request().moved("a", 1), "got moved('a', 1) with its KV at -1"),
)  # fmt: skip
def test_refusals(row):
  refusals.check(row)
