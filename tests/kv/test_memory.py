"""Pages that migrate or spill, to another instance, the host or a store, return bit for bit."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from moving_requests import answers, asked, assert_same, make_engine, run
import numpy as np
import pytest
import tiny_model

from seerjax import parallel
from seerjax.kv import page_moves
from seerjax.kv.disk_store import DiskStore
from seerjax.kv.pool import KVPool, KVPoolConfig
from seerjax.types import Request, SamplingParams


def made_pages(mesh, dtype):
  """Distinct entries, including negative zeros and both infinities."""
  shape = (mesh.shape["instance"], 8, 7, 4, 2)
  values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape) - 100
  values[:, :, 3], values[:, :, 4, 0] = -0.0, np.inf
  sharding = jax.sharding.NamedSharding(mesh, jax.P("instance", "model"))
  return (jax.device_put(jnp.asarray(values, dtype), sharding),) * 1, values.astype(dtype)


def bits(array) -> bytes:
  return np.asarray(array).tobytes()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (2, 2)])
def test_pages_go_out_and_in_bit_for_bit(dtype, shape):
  mesh = parallel.make_mesh(data_parallel_size=shape[0], tensor_parallel_size=shape[1])
  moves = page_moves.PageMoves(mesh)
  pages, expected = made_pages(mesh, dtype)
  ids = np.zeros((shape[0], 4), np.int32)
  ids[-1, :2] = 3, 4
  # A copy, because the program may read the array after the write below.
  values = moves.extract(pages, ids.copy())
  parts = moves.take_off(values, shape[0] - 1)
  assert {part.sharding.memory_kind for leaf in parts for part in leaf} == {"pinned_host"}
  ids[-1, :2], ids[-1, 2:] = 0, 0
  ids[0, :2] = 6, 5
  pages = moves.insert(pages, ids, moves.put_on(pages, {0: parts}))
  found = np.asarray(pages[0])
  assert bits(found[0, :, 6]) == bits(expected[-1, :, 3])
  assert bits(found[0, :, 5]) == bits(expected[-1, :, 4])
  expected[0, :, 6], expected[0, :, 5] = found[0, :, 6], found[0, :, 5]
  assert bits(found[:, :, 1:]) == bits(expected[:, :, 1:])  # Page 0 takes the padding.


@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
def test_moves_read_before_they_write(tensor_parallel_size):
  """Two pages are exchanged, between instances and within one."""
  mesh = parallel.make_mesh(data_parallel_size=3, tensor_parallel_size=tensor_parallel_size)
  pages, expected = made_pages(mesh, jnp.bfloat16)
  moves = np.zeros((4, 4), np.int32)
  moves[:, 0], moves[:, 1], moves[:, 2] = (0, 3, 2, 5), (2, 5, 0, 3), (1, 4, 1, 6)
  found = np.asarray(page_moves.PageMoves(mesh).move(pages, moves)[0])
  wanted = expected.copy()
  wanted[2, :, 5], wanted[0, :, 3], wanted[1, :, 6] = (
    expected[0, :, 3], expected[2, :, 5], expected[1, :, 4],
  )  # fmt: skip
  assert bits(found[:, :, 1:]) == bits(wanted[:, :, 1:])


def test_migrated_requests_say_the_same():
  engine = make_engine((2, 2))
  turn = iter(range(10**6))

  def at_pause(request_id):
    instance = next(turn) % 2
    assert engine.chunks.migrate(request_id, instance)
    return instance

  assert_same(run(engine, at_pause))
  counters = engine.counters
  assert counters.migrated_pages > 10 and counters.peer_bytes > 0


@pytest.mark.parametrize("mesh", [(1, 1), (2, 2)])
@pytest.mark.parametrize("tier", ["host", "store"])
def test_spilled_requests_come_back_anywhere(mesh, tier, tmp_path):
  pool = KVPool(
    KVPoolConfig(host_pages=64 if tier == "host" else 16), DiskStore(tmp_path, max_bytes=10**7)
  )
  engine = make_engine(mesh, kv_pool=pool)
  turn = iter(range(10**6))

  def at_pause(request_id):
    waiting = [name for name in engine.chunks.poll_paused() if engine.chunks.held_pages(name)]
    left = engine.chunks.spill(waiting)
    assert left == waiting and engine.chunks.held_pages(request_id) == 0
    return next(turn) % mesh[0]

  assert_same(run(engine, at_pause))
  counters = engine.counters
  assert counters.spilled_pages >= counters.restored_pages > 0
  assert pool.host.requests_in == pool.host.requests_out + pool.store.requests_in > 0
  assert (pool.store.requests_in > 0) == (tier == "store")
  assert bool(list(tmp_path.glob("*/*.kv"))) == (tier == "store")


@pytest.mark.thorough
def test_pages_whose_keys_are_transposed_migrate_and_come_back_from_a_store(tmp_path):
  pool = KVPool(KVPoolConfig(host_pages=16), DiskStore(tmp_path, max_bytes=10**7))
  engine = make_engine((2, 2), numerics=tiny_model.NATIVE, kv_pool=pool)
  keys, values = engine.memory.pages[0]
  assert keys.shape[3:] == values.shape[3:][::-1] != values.shape[3:]
  turn = iter(range(10**6))

  def at_pause(request_id):
    place = next(turn)
    instance = place % 2
    if place % 3 == 0:
      chunks = engine.chunks
      chunks.spill([name for name in chunks.poll_paused() if chunks.held_pages(name)])
    else:
      assert engine.chunks.migrate(request_id, instance)
    return instance

  assert_same(run(engine, at_pause), tiny_model.NATIVE)
  counters = engine.counters
  assert counters.migrated_pages and counters.restored_pages and pool.store.requests_in


def test_what_a_store_loses_is_computed_again(tmp_path):
  pool = KVPool(KVPoolConfig(host_pages=16), DiskStore(tmp_path, max_bytes=10**7))
  engine = make_engine((1, 1), kv_pool=pool)
  turn = iter(range(10**6))

  def at_pause(request_id):
    chunks = engine.chunks
    chunks.spill([name for name in chunks.poll_paused() if chunks.held_pages(name)])
    if next(turn) % 3 == 0:
      for path in tmp_path.glob("*/*.kv"):
        path.unlink()

  assert_same(run(engine, at_pause))
  assert pool.store.requests_lost > 0 and pool.store.requests_out > 0


def test_a_flipped_bit_in_the_pool_is_noticed():
  """Twin: the completion depends on the pages that come back."""
  engine = make_engine((1, 1))

  def at_pause(request_id):
    if engine.chunks.spill([request_id]):
      for leaves in engine.memory.kv_pool._held[request_id].rounds:
        values = np.asarray(leaves[0][0]).copy()
        values.view(np.uint32)[..., 0] ^= 1 << 22
        leaves[0][0] = values

  with pytest.raises(AssertionError):
    assert_same(run(engine, at_pause))


def test_a_page_to_copy_is_not_given_to_one_that_comes_back():
  """A prompt's last, partial page is copied in the step in which a spilled request takes the last
  pages there are: only the partial page is idle, and it must stay until it is read."""
  first = Request(request_id="first", prompt=tuple(range(5, 15)), seed=1)
  first = dataclasses.replace(first, sampling=SamplingParams(max_tokens=1))
  second = Request(request_id="second", prompt=(*first.prompt, 40, 41, 42), seed=2)
  second = dataclasses.replace(second, sampling=SamplingParams(max_tokens=4))
  spilled = dataclasses.replace(
    first, request_id="spilled", prompt=tuple(range(20, 28)), sampling=SamplingParams(max_tokens=5)
  )
  expected = make_engine((1, 1)).generate([second, spilled])

  engine = make_engine((1, 1))
  engine.generate([first])  # Leaves three idle pages, the third of them with two positions.
  engine.add_request(spilled, chunk_tokens=3)
  while not engine.chunks.poll_paused():
    engine.step()
  assert engine.chunks.spill(["spilled"]) == ["spilled"]
  pool = engine.memory.pools[0]
  needed = engine.chunks.pages_for(13 + 4) - 2 + engine.chunks.pages_for(8 + 5)
  hog = pool.take(pool.num_available - 3 - (needed - 1))
  engine.add_request(second)
  engine.chunks.resume("spilled")
  found = []
  while engine.num_unfinished:
    engine.step()
    found += engine.poll()
  assert engine.counters.page_copies == 1 and engine.counters.waits > 0
  by_id = {completion.request_id: completion for completion in found}
  assert all(tiny_model.same(by_id[one.request_id], one, 0) for one in expected)
  assert len(hog) == pool.num_pages - 1 - pool.num_available


def test_a_full_pool_leaves_requests_where_they_are():
  engine = make_engine((1, 1), kv_pool=KVPool(KVPoolConfig(host_pages=4)))
  for one in asked()[3:]:
    engine.add_request(one, chunk_tokens=3)
  while len(engine.chunks.poll_paused()) < 2:
    engine.step()
  assert engine.chunks.spill(engine.chunks.poll_paused()) == []  # Of eight pages or more.
  assert all(engine.chunks.held_pages(name) for name in engine.chunks.poll_paused())


def test_a_request_without_a_written_position_leaves_nothing_behind_and_may_be_spilled_again():
  engine = make_engine((1, 1))
  first, second = asked()[3:]
  for request in (first, second):
    engine.add_request(request)
  engine.step()  # All rows belong to the first request.
  for _ in range(2):
    engine.chunks.pause(second.request_id)
    assert engine.chunks.held_pages(second.request_id)
    assert engine.chunks.spill([second.request_id]) == [second.request_id]
    assert not engine.chunks.held_pages(second.request_id)
    engine.chunks.resume(second.request_id)
    for _ in range(3):
      engine.step()
  while engine.num_unfinished:
    engine.step()
  assert engine.memory.kv_pool.num_host_pages == 0
  for completion in engine.poll():
    assert tiny_model.same(completion, answers()[completion.request_id])


def test_no_room_elsewhere_leaves_a_request_where_it_is():
  engine = make_engine((2, 2))
  engine.add_request(asked()[4], chunk_tokens=3, instance=0)
  while not engine.chunks.poll_paused():
    engine.step()
  taken = engine.memory.pools[1].take(36)
  before = engine.chunks.held_pages("r/4")
  assert not engine.chunks.migrate("r/4", 1)
  assert engine.chunks.held_pages("r/4") == before and engine.chunks.free_pages(1) == 3
  for page in taken:
    engine.memory.pools[1].release(page)
  assert engine.chunks.migrate("r/4", 1) and engine.chunks.free_pages(0) == 39


def test_a_prompt_is_pulled_from_where_it_is():
  engine = make_engine((2, 2))
  engine.add_request(asked()[4], instance=0)
  while engine.num_unfinished:
    engine.step()
  prompt = list(asked()[4].prompt)  # 26 positions: six whole pages.
  assert engine.chunks.pull_prefix(prompt, 0, 1) == 24
  assert engine.chunks.pull_prefix(prompt, 0, 1) == 0
  before = engine.counters.reused_tokens
  engine.add_request(asked()[4], instance=1)
  while engine.num_unfinished:
    engine.step()
  assert engine.counters.reused_tokens - before == 24
  assert all(tiny_model.same(one, answers()["r/4"], 0) for one in engine.poll())


def test_new_weights_empty_the_pool():
  engine = make_engine((1, 1))
  engine.add_request(asked()[3], chunk_tokens=3)
  while not engine.chunks.poll_paused():
    engine.step()
  engine.chunks.spill(engine.chunks.poll_paused())
  assert "r/3" in engine.memory.kv_pool
  engine.abort_request("r/3")
  assert "r/3" not in engine.memory.kv_pool
  engine.update_weights(tiny_model.params(tiny_model.NUMERICS), 1)


def test_only_paused_requests_move():
  engine = make_engine((1, 1))
  engine.add_request(asked()[3])
  with pytest.raises(ValueError, match=r"Chunks.spill: got request 'r/3', which is not paused"):
    engine.chunks.spill(["r/3"])
  with pytest.raises(ValueError, match=r"Chunks.migrate: got request 'r/3', which is not paused"):
    engine.chunks.migrate("r/3", 0)
