"""Admission, prefix sharing, and freedom from starvation."""

from __future__ import annotations

import dataclasses

import pytest
import tiny_model
from word_engine import SIZES, make_engine, request, run, tokens_from


def test_members_of_a_group_share_the_pages_of_their_prompt():
  prompt = tokens_from(3, 19)
  members = [request(str(index), prompt, seed=index, group="g", max_tokens=5) for index in range(4)]
  engine = make_engine()
  completions = engine.generate(members)
  # The first writes 19; the others find 18: two full pages, and two positions of the third.
  assert engine.counters.reused_tokens == 3 * 18 and engine.counters.page_copies == 3
  assert engine.counters.rows == 19 + 3 * 1 + 4 * 4
  assert engine.counters.sampled_tokens == 20
  plain = make_engine(dataclasses.replace(SIZES, enable_prefix_caching=False))
  for ours, alone in zip(completions, plain.generate(members), strict=True):
    assert tiny_model.same(ours, alone)
  assert plain.counters.reused_tokens == plain.counters.page_copies == 0
  assert plain.counters.rows == 4 * 19 + 4 * 4


def test_members_of_a_group_that_are_held_share_the_pages_of_their_prompt():
  members = [
    request(str(index), tokens_from(3, 19), seed=index, group="g", max_tokens=5)
    for index in range(4)
  ]
  engine = make_engine()
  engine.hold({one.request_id for one in members})
  for one in members:
    engine.add_request(one)
  for _ in range(8):
    assert not engine.step()
  assert engine.counters.rows == 18 and engine.counters.reused_tokens == 3 * 18
  engine.hold(())
  completions = run(engine)
  assert engine.counters.rows == 18 + 4 + 4 * 4
  for one in members:
    assert tiny_model.same(completions[one.request_id], make_engine().generate([one])[0])


def test_siblings_wait_for_one_that_comes_back_in_the_middle_of_their_prompt():
  first, second = (
    request(name, tokens_from(3, 19), seed=seed, group="g", max_tokens=5)
    for seed, name in enumerate("ab")
  )
  engine = make_engine()
  engine.add_request(first)
  engine.step()  # 16 of 19 positions.
  engine.chunks.pause("a")
  engine.chunks.spill(["a"])
  engine.chunks.resume("a")
  engine.add_request(second)
  assert tiny_model.same(run(engine)["b"], make_engine().generate([second])[0])
  assert engine.counters.reused_tokens == 18


def test_the_next_turn_finds_the_last():
  engine = make_engine()
  [first] = engine.generate([request("a", tokens_from(1, 10), max_tokens=10)])
  prompt = tokens_from(1, 10) + first.tokens + (4, 4)
  [second] = engine.generate([request("b", prompt, max_tokens=4)])
  # The last sampled token was never an input, so its position is not written.
  assert engine.counters.reused_tokens == 19
  assert tiny_model.same(second, make_engine().generate([request("b", prompt, max_tokens=4)])[0])


def test_when_pages_run_out_requests_wait_and_all_finish():
  requests = [
    request(str(index), tokens_from(index, 20), seed=index, max_tokens=13) for index in range(7)
  ]
  engine = make_engine()
  completions = engine.generate(requests)
  assert engine.counters.waits > 0 and engine.counters.preemptions == 0
  for one, completion in zip(requests, completions, strict=True):
    assert tiny_model.same(completion, make_engine().generate([one])[0])


WHOLE = dataclasses.replace(SIZES, reserved_tokens=0)


@pytest.mark.parametrize("reserved_tokens", [1, 0])
def test_answers_grow_and_the_last_one_gives_up_its_pages(reserved_tokens):
  # Of eight pages each completion needs three at first and five in the end.
  requests = [
    request(str(index), tokens_from(index, 10), seed=index, max_tokens=30) for index in range(3)
  ]
  engine = make_engine(dataclasses.replace(SIZES, reserved_tokens=reserved_tokens))
  for one in requests:
    engine.add_request(one)
  finished, at_once = [], 0
  while engine.num_unfinished:
    at_once = max(at_once, len(engine.step()))
    finished += engine.poll()
  # The oldest request never waits, and all finish in order.
  assert [completion.request_id for completion in finished] == ["0", "1", "2"]
  assert (at_once, engine.counters.displaced > 0) == ((2, True) if reserved_tokens else (1, False))
  for one, completion in zip(requests, finished, strict=True):
    assert tiny_model.same(completion, make_engine().generate([one])[0])


def test_what_is_expected_is_counted_once_by_those_that_wait_and_run():
  engine = make_engine(dataclasses.replace(SIZES, reserved_tokens=16))
  # 10 and 16 tokens need four pages; a page of the next tokens is taken at first.
  assert engine.chunks.expected_pages(10, 30) == 4 and engine.chunks.expected_pages(10, 3) == 2
  engine.add_request(request("a", tokens_from(1, 10), max_tokens=30))
  assert engine.chunks.awaited_pages(0) == 4
  engine.step()
  assert (
    engine.chunks.held_pages("a") + engine.chunks.awaited_pages(0) == 4
    and engine.chunks.held_pages("a") == 3
  )


# Three tokens are the start of a page that it would copy; twenty are two full pages and a part.
@pytest.mark.parametrize("shared, own, max_tokens, reused", [(3, 30, 31, 0), (20, 12, 32, 16)])
def test_a_request_gets_all_pages_whichever_of_them_it_shares(shared, own, max_tokens, reused):
  engine = make_engine(WHOLE)
  engine.generate([request("a", tokens_from(1, 30), max_tokens=34)])
  # All 8 pages are idle now, and "b" needs all 8.
  prompt = tokens_from(1, shared) + tokens_from(200, own)
  engine.add_request(request("b", prompt, max_tokens=max_tokens))
  assert len(run(engine)["b"].tokens) == max_tokens
  assert engine.counters.reused_tokens == reused
  if not reused:
    assert engine.counters.page_copies == 0


def test_a_held_request_can_be_moved_before_any_step_has_copied_its_page():
  prompt = tokens_from(1, 13)
  engine = make_engine()
  engine.generate([request("a", prompt, max_tokens=3)])
  held = request("b", prompt, seed=1, max_tokens=12)
  engine.hold({"b"})
  engine.add_request(held)
  assert not engine.step() and engine.counters.page_copies == 1
  engine.chunks.pause("b")
  assert engine.chunks.spill(["b"]) == ["b"]
  engine.hold(())
  engine.chunks.resume("b")
  assert tiny_model.same(run(engine)["b"], make_engine().generate([held])[0])


def test_pages_that_a_spilled_request_shares_are_not_counted_twice():
  prompt = tokens_from(3, 33)
  engine = make_engine(dataclasses.replace(SIZES, reserved_tokens=16, decode_steps_per_call=1))
  engine.add_request(request("a", prompt, max_tokens=24))
  while not any(update.tokens for update in engine.step()):
    pass
  engine.add_request(request("b", prompt, seed=1, max_tokens=8), chunk_tokens=1)
  while not engine.chunks.poll_paused():
    engine.step()
  engine.chunks.spill(["b"])
  assert engine.chunks.awaited_pages(0) > 0  # "a" is expected to take more.
  engine.chunks.resume("b", chunk_tokens=4)
  engine.step()
  # It shares four of its five pages with "a".
  assert engine.chunks.held_pages("b") > 0


@pytest.mark.parametrize("what", ["cancel", "preempt"])
def test_siblings_held_back_go_on_without_the_one_they_waited_for(what):
  engine = make_engine()
  for index in range(4):
    engine.add_request(request(str(index), tokens_from(3, 40), seed=index, group="g", max_tokens=3))
  engine.step()  # 16 of 40 positions of "0"; the others are held back.
  assert [len(engine._requests.running[0]), len(engine._requests.waiting[0])] == [1, 3]
  (engine.abort_request if what == "cancel" else engine.chunks.preempt)("0")
  assert len(run(engine)) == (3 if what == "cancel" else 4)


def test_a_group_whose_members_differ_in_their_prompts_finishes():
  engine = make_engine()
  for index in range(4):
    engine.add_request(request(str(index), tokens_from(index, 20), group="g", max_tokens=3))
  assert len(run(engine)) == 4


def test_a_large_request_is_not_overtaken_for_ever():
  engine = make_engine()
  engine.add_request(request("first", tokens_from(9, 10), max_tokens=20))
  engine.add_request(request("large", tokens_from(1, 30), max_tokens=34))
  served = []
  for index in range(30):
    engine.add_request(request(f"small {index}", tokens_from(index, 4), max_tokens=4))
    engine.step()
    served += [completion.request_id for completion in engine.poll()]
  while engine.num_unfinished:
    engine.step()
    served += [completion.request_id for completion in engine.poll()]
  assert served[:2] == ["first", "large"] and len(served) == 32


def test_preempting_one_in_every_step_holds_nobody_else_up():
  engine = make_engine()
  for index in range(3):
    engine.add_request(request(str(index), seed=index))
  finished = []
  for _ in range(40):
    engine.step()
    finished += [completion.request_id for completion in engine.poll()]
    if "0" not in finished:
      engine.chunks.preempt("0")
  assert {"1", "2"} <= set(finished)
