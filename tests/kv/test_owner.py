"""Ownership of keys and values: no other owner finds them, in memory or in a store."""

from __future__ import annotations

import dataclasses

from moving_requests import answers, asked, make_engine
import pytest
from store_peer import make_peer
import tiny_model

from seerjax.engine import drafting
from seerjax.engine.drafting import DraftQuery
from seerjax.kv.owner import BASE, Owner
from seerjax.kv.prefix_index import PrefixIndex
from seerjax.kv.values import Identity
from seerjax.speculation import history
from seerjax.speculation.history import History
from seerjax.speculation.suffix_drafter import SuffixDrafter
from seerjax.types import Request

OWNERS = (BASE, Owner("a"), Owner("", "a"), Owner("a", "b"), Owner("b", "a"), Owner("ab", ""))


def test_each_owner_finds_its_own_pages_alone():
  index = PrefixIndex(2)
  for place, owner in enumerate(OWNERS):
    assert index.find([1, 2, 3], owner).num_tokens == 0
    index.remember([1, 2, 3], [2 * place + 1, 2 * place + 2], owner)
  for place, owner in enumerate(OWNERS):
    found = index.find([1, 2, 3], owner)
    assert (found.pages, found.copy_from) == ((2 * place + 1,), 2 * place + 2)


def test_keys_of_no_namespace_are_those_of_before():
  assert BASE.start == b""
  assert Owner("poet").start.hex() == "d90d7daf04ee7483371e127b6b0427c7"
  assert Identity("f", "w", 3).key([1, 2]) == "0b38dce1e3245868005c2c08d7c71ccdf9454c42"
  assert history._digest([1, 2], "").hex() == "2cc5e4d47c5f3c5fbe635a5a5b7bb392"


class Shared(PrefixIndex):
  """Twin: an index that ignores namespaces."""

  def find(self, tokens, owner=BASE):
    return super().find(tokens, Owner(owner.adapter))

  def remember(self, tokens, pages, owner=BASE):
    super().remember(tokens, pages, Owner(owner.adapter))


@pytest.mark.parametrize("kind", [PrefixIndex, Shared])
def test_an_engine_reads_a_prompt_of_another_namespace_again(kind):
  first, engine, counts = asked()[3], make_engine((1, 1)), []
  for pool in engine.memory.pools:
    pool._index = kind(engine.config.page_size)
  for name, space in (("mine", "mine"), ("theirs", "theirs"), ("none", ""), ("again", "mine")):
    before = engine.counters.reused_tokens
    named = dataclasses.replace(first, request_id=name, namespace=space)
    (found,) = engine.generate([named])
    counts.append(engine.counters.reused_tokens - before)
    assert tiny_model.same(found, answers()["r/3"], 0)
  is_shared = kind is Shared
  assert [count > 0 for count in counts] == [False, is_shared, is_shared, True]


def test_siblings_of_two_namespaces_do_not_wait_for_one_another():
  engine = make_engine((1, 1))
  for request in asked()[:3]:
    space = "" if request.seed == 0 else f"space {request.seed % 2}"
    engine.add_request(dataclasses.replace(request, namespace=space))
  engine.step()
  assert len(engine._requests.running[0]) == 3
  found = {}
  while engine.num_unfinished:
    engine.step()
    found |= {one.request_id: one for one in engine.poll()}
  assert engine.counters.reused_tokens == 0
  assert all(tiny_model.same(found[name], answers()[name], 0) for name in found)


@pytest.mark.thorough  # Two engines with stores; what follows is the same with one.
@pytest.mark.parametrize("space, num_lost", [("mine", 1), ("theirs", 0), ("", 0)])
def test_pages_in_a_store_are_read_by_their_namespace_alone(tmp_path, space, num_lost):
  request = dataclasses.replace(asked()[3], namespace="mine")
  engine, other = make_peer(tmp_path), make_peer(tmp_path)
  engine.add_request(request, chunk_tokens=7)
  while not engine.chunks.poll_paused():
    engine.step()
  assert engine.chunks.spill(["r/3"]) == ["r/3"] and engine.memory.kv_pool.make_room(64)
  partial = engine.progress("r/3")
  other.add_request(dataclasses.replace(request, namespace=space), resume_from=partial)
  while other.num_unfinished:
    other.step()
  assert tiny_model.same(other.poll()[0], answers()["r/3"], 0)
  assert other.counters.store.requests_out == num_lost
  assert b"mine" not in b"".join(p.read_bytes() for p in tmp_path.rglob("*") if p.is_file())


def test_answers_to_a_prompt_are_drafts_of_their_namespace_alone():
  drafter = SuffixDrafter(history=History(), budget=None)
  prompt, answer = [5, 6, 7, 8], [10, 11, 12, 13, 14]
  drafts = {}
  for number, space in enumerate(("mine", "theirs", "", "mine")):
    request = Request(request_id=str(number), prompt=tuple(prompt), namespace=space)
    group = drafting.group_name(request)
    assert not drafting.is_group(group) and drafting.namespace_of(group) == space
    query = DraftQuery(request.request_id, group, [*prompt, 10], len(prompt), 4)
    drafts[number] = (drafter.draft([query]) or [[]])[0]
    if number == 0:
      drafter.finish(request.request_id, group, [*prompt, *answer], len(prompt))
      assert drafter.group_ids == ()
    else:
      drafter.finish(request.request_id, group, prompt, len(prompt))
  assert [bool(paths) for paths in drafts.values()] == [False, False, False, True]
  assert drafts[3][0] == (11, 12, 13, 14)


def test_names_of_namespaces_are_text_without_nul():
  with pytest.raises(ValueError, match="namespace: got 'a.x00b', expected text without the charac"):
    Request(request_id="r", prompt=(1,), namespace="a\0b")
  with pytest.raises(ValueError, match="group_id: got '.x00a', expected text without the charact"):
    Request(request_id="r", prompt=(1,), group_id="\0a")
