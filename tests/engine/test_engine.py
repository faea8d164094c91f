"""The engine's basic cycle: submitting, stepping, polling, and weight updates."""

from __future__ import annotations

import dataclasses

import jax
import pytest
import tiny_model
from word_engine import SIZES, make_engine, params, request, run, tokens_from

from seerjax.types import Request, SamplingParams


def test_generate_answers_in_the_order_given_and_poll_in_the_order_finished():
  lengths = {"a": 9, "b": 2, "c": 5}
  requests = [request(name, max_tokens=count) for name, count in lengths.items()]
  assert [c.request_id for c in make_engine().generate(requests)] == ["a", "b", "c"]
  engine = make_engine()
  for one in requests:
    engine.add_request(one)
  order = []
  while engine.num_unfinished:
    engine.step()
    order += [completion.request_id for completion in engine.poll()]
  assert order == ["b", "c", "a"] and engine.poll() == []


def test_generate_leaves_the_completions_of_others_to_poll():
  engine = make_engine()
  engine.add_request(request("early", max_tokens=1))
  run_early = engine.step()
  engine.add_request(request("other", max_tokens=3))
  [completion] = engine.generate([request("mine", max_tokens=8)])
  assert completion.request_id == "mine" and run_early[0].finish_reason == "length"
  assert [c.request_id for c in engine.poll()] == ["early", "other"]


def test_generate_does_not_take_an_older_completion_of_the_same_name():
  engine = make_engine()
  engine.add_request(request("a", max_tokens=1))
  engine.step()
  [completion] = engine.generate([request("a", max_tokens=4)])
  assert len(completion.tokens) == 4
  assert [len(c.tokens) for c in engine.poll()] == [1]


def test_generate_submits_all_or_none():
  engine = make_engine()
  with pytest.raises(ValueError, match="'b': got an empty prompt"):
    engine.generate([request("a"), request("b", ())])
  assert engine.num_unfinished == 0
  assert len(engine.generate([request("a")])) == 1


def test_generate_of_nothing_is_nothing_and_a_step_of_nothing_says_nothing():
  engine = make_engine()
  assert engine.generate([]) == [] and engine.step() == [] and engine.counters.steps == 0


def test_generate_returns_without_what_was_cancelled_meanwhile():
  engine = make_engine()

  def cancel(updates):
    if engine.counters.steps == 3:
      engine.abort_request("a")

  completions = engine.generate([request("a"), request("b")], on_step=cancel)
  assert [c.request_id for c in completions] == ["b"]


def test_a_cancelled_request_leaves_nothing_behind():
  engine = make_engine(dataclasses.replace(SIZES, enable_prefix_caching=False))
  for name in "abcde":
    engine.add_request(request(name))
  engine.step()
  for name in "abe":  # "e" still waits.
    engine.abort_request(name)
  completions = run(engine)
  assert sorted(completions) == ["c", "d"] and engine.counters.preemptions == 0
  assert engine.memory.pools[0].num_available == 8
  assert len(engine.generate([request("a")])) == 1  # The name is free again.


def test_a_preempted_request_says_the_same():
  wanted = make_engine().generate([request("a"), request("b", seed=1)])
  engine = make_engine()
  engine.add_request(request("a"))
  engine.add_request(request("b", seed=1))
  for _ in range(4):
    engine.step()
  engine.chunks.preempt("a")
  engine.chunks.preempt("a")  # It is already waiting, so nothing happens.
  assert engine.counters.preemptions == 1
  completions = run(engine)
  assert tiny_model.same(completions["a"], wanted[0])
  assert tiny_model.same(completions["b"], wanted[1])


def test_new_weights_drop_every_page():
  prompt = tokens_from(2, 30)
  engine = make_engine()
  old = engine.generate([request("a", prompt)])[0]
  engine.update_weights(params(1), 1)
  reused = engine.counters.reused_tokens
  new = engine.generate([request("a", prompt)])[0]
  assert engine.counters.reused_tokens == reused
  fresh = make_engine(seed=1).generate([request("a", prompt)])[0]
  assert tiny_model.same(new, fresh) and not tiny_model.same(new, old)
  assert (old.policy_version, new.policy_version, engine.policy_version) == (0, 1, 1)
  # The twin: pages of the old weights would be noticed.
  stale = make_engine()
  stale.generate([request("a", prompt)])
  stale._params = stale._runner.place_params(params(1))
  assert not tiny_model.same(stale.generate([request("a", prompt)])[0], fresh)


def test_pages_that_were_given_back_and_taken_again_move_no_bit():
  engine = tiny_model.make_engine(tiny_model.ALONE)
  short = SamplingParams(max_tokens=6)
  requests = [
    Request(request_id=str(seed), prompt=(1, 2, 3), sampling=short, seed=seed) for seed in range(2)
  ]
  expected = engine.generate(requests)
  held = engine.memory.pages
  engine.release_kv_cache()
  assert all(leaf.is_deleted() for leaf in jax.tree.leaves(held)) and engine.memory_plan()
  found = engine.generate(requests)
  assert all(tiny_model.same(a, b) for a, b in zip(found, expected, strict=True))
  engine.release_kv_cache()
  engine.add_request(requests[0])
  with pytest.raises(ValueError, match="release_kv_cache: got 1 unfinished requests, expected"):
    engine.release_kv_cache()
