"""Completions in chunks: pauses, resumption, another engine, and errors."""

from __future__ import annotations

import dataclasses

import pytest
from word_engine import SIZES, make_engine, params, request, same, tokens_from

from seerjax.kv.disk_store import DiskStore
from seerjax.kv.pool import KVPool, KVPoolConfig

ROOM = dataclasses.replace(SIZES, num_pages=41)


def in_chunks(engine, one, chunk_tokens, between=lambda engine: None):
  """The completion of one request, `chunk_tokens` at a time."""
  engine.add_request(one, chunk_tokens=chunk_tokens)
  for _ in range(300):
    engine.step()
    if found := engine.poll():
      return found[0]
    for name in engine.chunks.poll_paused():
      between(engine)
      engine.chunks.resume(name, chunk_tokens=chunk_tokens)
  raise AssertionError("unfinished after 300 steps")


@pytest.mark.thorough
@pytest.mark.parametrize("chunk_tokens", [1, 7, 100])
def test_chunks_change_nothing_said_and_no_step(chunk_tokens):
  one = request(prompt=tokens_from(3, 9), max_tokens=30)
  whole = make_engine(ROOM)
  [plain] = whole.generate([one])
  engine = make_engine(ROOM)
  assert same(in_chunks(engine, one, chunk_tokens), plain)
  assert engine.counters.steps == whole.counters.steps
  assert engine.chunks.free_pages(0) == 40


def test_a_chunk_holds_the_pages_of_its_end_and_no_more():
  engine = make_engine()
  engine.add_request(request(prompt=(5, 6, 7), max_tokens=61), chunk_tokens=6)
  engine.step()
  assert engine.chunks.free_pages(0) == 7  # 3 + 6 - 1 positions are one page of eight.
  for _ in range(5):
    engine.step()
  assert engine.chunks.poll_paused() == ["a"] and engine.step() == []
  assert engine.chunks.pages_for(3 + 6 + 1) == 2
  engine.chunks.resume("a", chunk_tokens=1)
  engine.step()
  assert engine.chunks.free_pages(0) == 6


@pytest.mark.thorough
def test_a_paused_request_may_lose_its_pages():
  one = request(prompt=tokens_from(3, 9), max_tokens=30)
  [plain] = make_engine(ROOM).generate([one])
  engine = make_engine(ROOM)
  assert same(in_chunks(engine, one, 7, between=lambda e: e.chunks.preempt("a")), plain)
  assert engine.counters.preemptions == 4


@pytest.mark.parametrize("num_prompt, max_tokens", [(40, 24), (3, 61)], ids=["first", "next"])
def test_paused_requests_give_their_pages_up_where_nothing_could_run_otherwise(
  num_prompt, max_tokens
):
  """The other request needs all eight pages: at once for its prompt, or one by one as it grows."""
  paused = request("a", tokens_from(3, 20), max_tokens=30)
  other = request("b", tokens_from(9, num_prompt), max_tokens=max_tokens, seed=1)
  plain, expected = make_engine().generate([paused])[0], make_engine().generate([other])[0]
  engine = make_engine()
  engine.add_request(paused, chunk_tokens=2)
  while not engine.chunks.poll_paused():
    engine.step()
  assert engine.chunks.held_pages("a")
  [found] = engine.generate([other])
  assert same(found, expected) and engine.counters.displaced == 1
  assert engine.chunks.poll_paused() == ["a"] and not engine.chunks.held_pages("a")
  engine.chunks.resume("a")
  while engine.num_unfinished:
    engine.step()
  assert same(engine.poll()[0], plain)


def test_a_paused_request_may_be_cancelled():
  engine = make_engine()
  engine.add_request(request(max_tokens=30), chunk_tokens=2)
  engine.step(), engine.step()
  assert engine.chunks.poll_paused() == ["a"]
  engine.abort_request("a")
  assert (
    engine.chunks.poll_paused() == []
    and engine.num_unfinished == 0
    and engine.chunks.free_pages(0) == 8
  )


@pytest.mark.parametrize("count", [1, 5, 29])
def test_another_engine_goes_on_from_what_was_said(count):
  """Also in the middle of a stop string, while a part of it is held back."""
  [free] = make_engine(ROOM).generate([request(max_tokens=30)])
  place = len(free.text) // 2
  one = request(max_tokens=30, stop=(free.text[place : place + 6],))
  [plain] = make_engine(ROOM).generate([one])
  first = make_engine(ROOM)
  first.add_request(one, chunk_tokens=min(count, len(plain.tokens) - 1))
  for _ in range(40):
    first.step()
  [name] = first.chunks.poll_paused()
  partial = first.progress(name)
  assert partial.finish_reason == "" and partial.tokens == plain.tokens[: len(partial.tokens)]
  second = make_engine(ROOM)
  second.add_request(one, resume_from=partial)
  while second.num_unfinished:
    second.step()
  [found] = second.poll()
  assert same(found, plain) and found.text == plain.text
  assert found.finish_reason == plain.finish_reason == "stop"


def test_a_member_waits_for_memory_with_what_it_has():
  """Two requests run one after the other if their next chunks do not fit together."""
  requests = [request(name, tokens_from(i, 20), max_tokens=40) for i, name in enumerate("ab")]
  plain = make_engine(ROOM).generate(requests)
  engine = make_engine()
  for one in requests:
    engine.add_request(one, chunk_tokens=12)  # Four pages each.
  found = {}
  for _ in range(200):
    engine.step()
    found |= {completion.request_id: completion for completion in engine.poll()}
    if "b" in engine.chunks.poll_paused() and "a" not in found:
      engine.chunks.preempt("b")  # Otherwise both would hold half of the pages that either needs.
    for name in engine.chunks.poll_paused():
      engine.chunks.resume(name, chunk_tokens=20)
  assert [same(found[one.request_id], other) for one, other in zip(requests, plain)] == [True] * 2
  assert engine.counters.waits > 0


def test_a_running_chunk_may_be_ended_at_any_step():
  one = request(max_tokens=30)
  [plain] = make_engine(ROOM).generate([one])
  engine = make_engine(ROOM)
  engine.add_request(one)
  engine.chunks.pause("a")  # Before its first step.
  engine.chunks.resume("a")
  for _ in range(4):
    engine.step()
  engine.chunks.pause("a")
  engine.chunks.pause("a")
  assert engine.step() == [] and engine.chunks.poll_paused() == ["a"]
  engine.chunks.resume("a")
  while engine.num_unfinished:
    engine.step()
  assert same(engine.poll()[0], plain)


def exported(directory, **changes):
  """Returns a partial completion, its exported page manifest, and an engine to adopt the pages."""
  pools = [KVPool(KVPoolConfig(), DiskStore(directory, max_bytes=10**7)) for _ in range(2)]
  engine, other = (make_engine(kv_pool=pool) for pool in pools)
  engine.add_request(request(), chunk_tokens=3)
  while not engine.chunks.poll_paused():
    engine.step()
  kv = engine.chunks.export_kv("a")
  assert kv is not None
  return engine.progress("a"), dataclasses.replace(kv, **changes), other


@pytest.mark.parametrize(
  "changes, message",
  [
    (dict(policy_version=8), r"got pages of policy_version 8, expected 0, the engine's; leave kv"),
    (dict(page_size=4), r"got pages of 4 positions, expected 8, the engine's EngineConfig.page_s"),
    (dict(num_written=0), r"kv.num_written: got 0, expected at least 1; leave kv out if"),
    (dict(parts=()), r"got pages of \[\] \(dtype, shape .*; they belong to another model or mod"),
  ],
)
def test_pages_of_another_engine_are_refused_where_they_can_be_nothing_of_it(
  changes, message, tmp_path
):
  so_far, kv, other = exported(tmp_path, **changes)
  with pytest.raises(ValueError, match=f"request 'a': {message}"):
    other.add_request(request(), resume_from=so_far, kv=kv)
  assert other.num_unfinished == 0


def test_pages_are_exported_between_chunks_to_a_store_alone(tmp_path):
  so_far, kv, other = exported(tmp_path)
  other.add_request(request(), resume_from=so_far, kv=kv)
  with pytest.raises(ValueError, match=r"Chunks.export_kv: got request 'a', which is not paused"):
    other.chunks.export_kv("a")
  rows = other.counters.rows
  other.step()
  assert other.counters.imports.adopted == 1 and other.counters.rows == rows + 1
  engine = make_engine()
  engine.add_request(request(), chunk_tokens=3)
  while not engine.chunks.poll_paused():
    engine.step()
  assert engine.chunks.export_kv("a") is None  # It has no store.


def test_what_was_exported_goes_when_it_is_replaced_and_with_its_policy(tmp_path):
  pool = KVPool(KVPoolConfig(), DiskStore(tmp_path, max_bytes=10**7))
  engine = make_engine(kv_pool=pool)
  engine.add_request(request(), chunk_tokens=3)
  keys = set()
  for _ in range(2):
    while not engine.chunks.poll_paused():
      engine.step()
    keys.add(engine.chunks.export_kv("a").key)
    assert engine.chunks.export_kv("a").key in keys  # A repeated export of the same pages.
    assert len(list(tmp_path.glob("*/*.kv"))) == 1
    engine.chunks.resume("a", chunk_tokens=3)
  assert len(keys) == 2
  engine.abort_request("a")
  assert list(tmp_path.glob("*/*.kv"))  # Another engine may still adopt them.
  engine.update_weights(params(1), 1)
  assert not list(tmp_path.glob("*/*.kv"))
