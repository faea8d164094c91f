"""Two processes on one store read each other's pages only if their weights are equal."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
from moving_requests import answers, asked, assert_same, make_engine, run
import numpy as np
import pytest
from store_peer import begin, end, make_peer, tell, wait_for
import tiny_model

from seerjax.engine.engine import Engine
from seerjax.engine.runner import Runner
from seerjax.kv import values
from seerjax.kv.disk_store import DiskStore
from seerjax.kv.pool import KVPool, KVPoolConfig
from seerjax.models.loading import Model

SUPPORT = pathlib.Path(tiny_model.__file__).parent
ROOT = SUPPORT.parents[1]


def written_pages(engine: Engine, name: str) -> list[bytes]:
  """Bits of a request's written positions, all of them in whole pages or the start of the last."""
  sequence = engine._requests.live[name]
  positions = np.arange(sequence.num_written)
  size = engine.config.page_size
  pages = np.asarray(sequence.pages)[positions // size]
  return [
    np.asarray(leaf)[0][:, pages, positions % size].tobytes()
    for leaf in jax.tree.leaves(engine.memory.pages)
  ]


@pytest.mark.thorough  # Starting a process takes long; the rest also holds within one.
def test_two_processes_read_each_others_pages_to_equal_bits(tmp_path):
  paths = os.pathsep.join([str(SUPPORT), str(ROOT)])
  peer = subprocess.Popen(
    [sys.executable, str(SUPPORT / "store_peer.py"), str(tmp_path)],
    env=os.environ | {"PYTHONPATH": paths},
  )
  try:
    engine = make_peer(tmp_path)
    partials = begin(engine, ("r/4",))
    theirs = wait_for(tmp_path / "started.pickle")
    found = end(engine, theirs)
    tell(tmp_path / "theirs.pickle", partials)
    their_found, their_counters = wait_for(tmp_path / "done.pickle")
  finally:
    peer.kill()
    peer.wait()
  assert tiny_model.same(found["r/3"], answers()["r/3"], 0)
  assert tiny_model.same(their_found["r/4"], answers()["r/4"], 0)
  for counters in (engine.counters, their_counters):
    assert counters.restored_pages > 5 and counters.store.requests_out == 1
    assert counters.store.requests_lost == 0


def test_pages_that_another_wrote_have_the_bits_of_ones_own(tmp_path):
  engine, other = make_peer(tmp_path), make_peer(tmp_path)
  request = asked()[3]
  engine.add_request(request, chunk_tokens=7)
  while not engine.chunks.poll_paused():
    engine.step()
  own = written_pages(engine, "r/3")
  assert engine.chunks.spill(["r/3"]) == ["r/3"] and engine.memory.kv_pool.make_room(64)
  other.add_request(request, resume_from=engine.progress("r/3"), chunk_tokens=1)
  sequence = other._requests.live["r/3"]
  num_written = sequence.num_written
  rows = other.counters.rows
  other.step()
  assert other.counters.rows == rows + 1  # Nothing was computed again.
  sequence.num_written = num_written
  assert written_pages(other, "r/3") == own
  other.abort_request("r/3")
  engine.chunks.resume("r/3")  # The other process has removed nothing.
  while engine.num_unfinished:
    engine.step()
  assert tiny_model.same(engine.poll()[0], answers()["r/3"], 0)
  assert engine.counters.store.requests_out == 1


def nudged(params):
  """Returns weights in which one value differs by its last bit."""
  leaves, structure = jax.tree.flatten(params)
  first = np.asarray(leaves[0]).copy()
  flat = first.reshape(-1)
  flat[0] = np.nextafter(flat[0], np.float32(np.inf))
  return structure.unflatten([jnp.asarray(first), *leaves[1:]])


def shifted(params):
  """Returns other weights, with different keys and values everywhere."""
  return jax.tree.map(lambda leaf: leaf * 1.25, params)


class Careless(KVPool):
  """Twin: the store's keys use policy_version instead of the weights."""

  def identify(self, identity):
    def careless(owner):
      found = identity(owner)
      return found._replace(weights=str(found.policy_version))

    super().identify(careless)


def resumed_with_other_weights(tmp_path, change, kind) -> tuple[Engine, bool]:
  """Writes with one engine, resumes with changed weights; whether the answer is that of these."""
  params = tiny_model.params(tiny_model.NUMERICS)

  def peer(weights):
    store = DiskStore(tmp_path / "kv", max_bytes=10**7)
    engine = make_engine((1, 1), kv_pool=kind(KVPoolConfig(host_pages=64), store))
    engine.update_weights(weights, 0)
    return engine

  partials = begin(peer(params), ("r/3",))
  other = peer(change(params))
  found = end(other, partials)["r/3"]
  plain = make_engine((1, 1))
  plain.update_weights(change(params), 0)
  return other, tiny_model.same(found, end(plain, partials)["r/3"], 0)


@pytest.mark.parametrize("change", [nudged, shifted])
def test_equal_policy_versions_with_other_weights_never_meet(change, tmp_path):
  other, is_same = resumed_with_other_weights(tmp_path, change, KVPool)
  assert is_same and other.counters.restored_pages == other.counters.store.requests_out == 0


def test_pages_named_by_policy_version_alone_are_found_out(tmp_path):
  other, is_same = resumed_with_other_weights(tmp_path, shifted, Careless)
  assert not is_same and other.counters.store.requests_out == 1


def test_the_digest_is_of_weights_with_their_adapters_and_computed_once_when_it_is_needed():
  params = tiny_model.params(tiny_model.NUMERICS)
  runner = tiny_model.runner(tiny_model.NUMERICS, 1, 1)
  placed = runner.place_params(params)
  digest = values.weights_digest(placed)
  over_instances = tiny_model.runner(tiny_model.NUMERICS, 2, 1).place_params(params)
  assert values.weights_digest(over_instances) == digest  # Copies count once.
  assert values.weights_digest(runner.place_params(nudged(params))) != digest
  assert values.weights_digest({"base": placed, "lora": jnp.zeros(3)}) != values.weights_digest(
    {"base": placed, "lora": jnp.ones(3)}
  )
  num_calls = 0

  def identity(owner):
    nonlocal num_calls
    num_calls += 1
    return values.Identity("f", digest, 0)

  pool = KVPool(KVPoolConfig())
  pool.identify(identity)
  assert not pool.claim("a", [1]) and num_calls == 0  # Without a store.


class OneArray(Runner):
  """Keeps keys and values of all layers in one array f[i, k, m, l, 2, z, c]."""

  def empty_pages(self, num_pages, page_size):
    return self._joined(super().empty_pages(num_pages, page_size))

  def step(self, params, pages, inputs, key):
    layers = [(pages[:, :, :, at, 0], pages[:, :, :, at, 1]) for at in range(pages.shape[3])]
    pages, *out = super().step(params, tuple(layers), inputs, key)
    return self._joined(pages), *out

  def _joined(self, pages):
    layers = [jnp.stack(layer, axis=3) for layer in pages]
    return jax.device_put(jnp.stack(layers, axis=3), self._page_sharding)


@pytest.mark.thorough
@pytest.mark.parametrize("tier", ["host", "store"])
def test_a_layout_of_one_array_spills_migrates_and_comes_back(tier, tmp_path):
  inner = tiny_model.runner(tiny_model.NUMERICS, 2, 2)
  runner = OneArray(inner.decoder, inner.mesh, inner.max_programs)
  pool = KVPool(
    KVPoolConfig(host_pages=64 if tier == "host" else 16), DiskStore(tmp_path, max_bytes=10**7)
  )
  engine = Engine(
    Model(tiny_model.CONFIG, tiny_model.params(tiny_model.NUMERICS), tiny_model.NUMERICS),
    config=make_engine((2, 2)).config,
    key=jax.random.key(11),
    runner=runner,
    kv_pool=pool,
  )
  assert len(jax.tree.leaves(engine.memory.pages)) == 1
  turn = 0

  def at_pause(request_id):
    nonlocal turn
    turn += 1
    if turn % 2:
      instance = turn // 2 % 2
      engine.chunks.migrate(request_id, instance)
      return instance
    chunks = engine.chunks
    chunks.spill([name for name in chunks.poll_paused() if chunks.held_pages(name)])
    return turn // 2 % 2

  assert_same(run(engine, at_pause))
  counters = engine.counters
  assert min(counters.migrated_pages, counters.spilled_pages, counters.restored_pages) > 0
  assert (counters.store.requests_out > 0) == (tier == "store")
