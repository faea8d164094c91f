"""Weights are sent from a trainer to workers in pieces; workers run only published weights."""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import gc
import pickle
import weakref

from cluster_cases import asked, make_engine
import jax
import numpy as np
import pytest
import tiny_model

from seerjax import parallel
from seerjax.cluster import weights as weights_lib
from seerjax.cluster.driver import ClusterRollout
from seerjax.cluster.local_workers import LocalWorkers
from seerjax.cluster.records import Lost, Piece, WeightsRef
from seerjax.cluster.weights import Held, StoreDoor
from seerjax.cluster.worker import EngineWorker
from seerjax.kv.disk_store import DiskStore
from seerjax.kv.pool import KVPool, KVPoolConfig
from seerjax.models import parameters
from seerjax.rollout.policies import Divided

NATIVE = tiny_model.NATIVE
PIECE = 1000  # Bytes: most tensors are larger, some are not.


def trained(seed: int = 1):
  """Weights that no worker starts with."""
  return tiny_model.params(NATIVE, seed)


def published(
  put: Callable[[bytes], Piece] = Held, seed: int = 1, weight_transfer_chunk_bytes: int = PIECE
) -> WeightsRef:
  return weights_lib.publish(
    trained(seed), put, weight_transfer_chunk_bytes=weight_transfer_chunk_bytes
  )


def damaged(weights: WeightsRef, place: int = 2) -> WeightsRef:
  """The same description; one bit of one piece differs."""
  tensor = weights.tensors[place]
  first = tensor.pieces[0]
  assert isinstance(first, Held)
  data = bytearray(first.data)
  data[5] ^= 4
  tensor = dataclasses.replace(tensor, pieces=(Held(bytes(data)), *tensor.pieces[1:]))
  return WeightsRef((*weights.tensors[:place], tensor, *weights.tensors[place + 1 :]))


def bits(params) -> list[bytes]:
  return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(params)]


@pytest.mark.parametrize("weight_transfer_chunk_bytes", [333, 2**30])
def test_what_is_received_is_what_was_published_in_pieces_of_any_size(weight_transfer_chunk_bytes):
  sizes = []

  def put(data: bytes) -> Held:
    sizes.append(len(data))
    return Held(data)

  params = trained()
  weights = weights_lib.publish(
    params, put, weight_transfer_chunk_bytes=weight_transfer_chunk_bytes
  )
  assert max(sizes) <= weight_transfer_chunk_bytes and sum(sizes) == sum(map(len, bits(params)))
  found = weights_lib.received(pickle.loads(pickle.dumps(weights)), parallel.make_mesh())
  assert jax.tree.structure(found) == jax.tree.structure(params)
  assert bits(found) == bits(params)
  stacked = parameters.stacked(params)
  again = weights_lib.publish(stacked, Held)
  assert bits(weights_lib.received(again, parallel.make_mesh())) == bits(stacked)
  assert again.digest != weights.digest


def test_workers_begin_a_policy_version_with_the_trainers_weights_or_not_at_all():
  workers = LocalWorkers([EngineWorker(make_engine(NATIVE)) for _ in range(2)])
  wanted = {one.request_id: one for one in make_engine(NATIVE, weights_seed=1).generate(asked())}
  before = {one.request_id: one for one in make_engine(NATIVE).generate(asked())}
  policy = Divided(chunk_tokens=4)

  def says(expected: dict) -> None:
    found = {one.request_id: one for one in ClusterRollout(workers, policy).run(asked())}
    assert all(found[name].has_bits_of(expected[name]) for name in expected)

  says(before)
  workers.load(weights_lib.publish(trained(), workers.put, weight_transfer_chunk_bytes=PIECE), 4)
  workers.add(EngineWorker(make_engine(NATIVE), name="later"))  # It loads the weights, too.
  says(wanted)
  reports = [worker.report() for worker in workers._workers.values()]
  assert [report.policy_version for report in reports] == [4, 4, 4]
  digest = published().digest
  assert {worker.load(published(), 4) for worker in workers._workers.values()} == {digest}
  assert not any(before[name].has_bits_of(wanted[name]) for name in before)


def test_weights_are_loaded_again_where_the_engine_was_given_others_since():
  worker = EngineWorker(make_engine(NATIVE))
  worker.load(published(), 1)
  before = worker.report().weights
  worker.engine.update_weights(tiny_model.params(NATIVE), 1)
  assert worker.report().weights != before
  worker.load(published(), 1)
  assert worker.report().weights == before


def test_old_weights_are_freed_before_the_new_ones_are_read():
  engine = make_engine(NATIVE, weights_seed=3)
  # Arrays that no other engine shares.
  engine.update_weights(jax.tree.map(lambda leaf: leaf * 2, trained(3)), 0)
  old = [weakref.ref(leaf) for leaf in jax.tree.leaves(engine._weights.params)]
  alive: list[int] = []

  @dataclasses.dataclass(frozen=True)
  class Watched:
    data: bytes

    def read(self, store):
      gc.collect()
      alive.append(sum(leaf() is not None for leaf in old))
      return self.data

  assert all(leaf() is not None for leaf in old)
  EngineWorker(engine).load(published(Watched, weight_transfer_chunk_bytes=2**30), 1)
  assert len(alive) == len(old) and set(alive) == {0}


def test_one_flipped_bit_is_told_with_its_tensor_and_the_worker_does_not_join():
  worker = EngineWorker(make_engine(NATIVE), name="bitten")
  workers = LocalWorkers([worker])
  weights = damaged(published())
  name = weights.tensors[2].name
  expected = rf"Worker.load: got SHA-256 \w+ of {name}, expected \w+, the trainer's; publish"
  with pytest.raises(ValueError, match=expected):
    worker.load(weights, 4)
  with pytest.raises(ValueError, match=r"Worker.join: got 'bitten' without weights .* load them"):
    worker.join()
  workers.load(weights, 4)
  workers.begin()
  [event] = workers.events(blocks=False)
  assert isinstance(event, Lost) and "SHA-256" in event.reason
  assert worker.load(published(), 4) == published().digest  # Others may be loaded.
  assert worker.join().policy_version == 4


def test_a_twin_whose_digest_is_made_of_what_arrived_runs_other_weights():
  # As if the trainer's process hashed the weights after the damage.
  good, bad = published(), damaged(published())
  found = {"good": weights_lib.received(good, parallel.make_mesh())}
  hashed = weights_lib.publish(
    jax.tree.unflatten(
      jax.tree.structure(trained()),
      [weights_lib._read(tensor, None) for tensor in bad.tensors],
    ),
    Held,
  )
  found["bad"] = weights_lib.received(hashed, parallel.make_mesh())
  assert bits(found["bad"]) != bits(found["good"]) and hashed.digest != good.digest


def test_weights_lie_in_the_store_of_pages_until_they_are_replaced(tmp_path):
  def pool() -> KVPool:
    return KVPool(KVPoolConfig(), DiskStore(tmp_path, max_bytes=10**7))

  store = DiskStore(tmp_path, max_bytes=10**7)
  door = StoreDoor(store)
  first, second = published(door.put), published(door.put, seed=2)
  worker = EngineWorker(make_engine(NATIVE, kv_pool=pool()))
  assert worker.load(pickle.loads(pickle.dumps(first)), 1) == first.digest
  door.keep_only(second)
  assert worker.load(second, 2) == second.digest
  with pytest.raises(ConnectionError, match=r"got no value for the key 'weights/\w+' in its store"):
    worker.load(first, 3)
  door.keep_only(WeightsRef(()))
  assert store.num_bytes == 0
  with pytest.raises(ConnectionError, match=r"Worker.load: got no store, expected the trainer's"):
    EngineWorker(make_engine(NATIVE)).load(first, 1)


def test_a_full_store_and_pieces_of_nothing_are_refused(tmp_path):
  door = StoreDoor(DiskStore(tmp_path, max_bytes=10))
  with pytest.raises(ConnectionError, match=r"StoreDoor.put: got a full store, expected room for"):
    published(door.put)
  with pytest.raises(
    ValueError, match=r"got weight_transfer_chunk_bytes=0, expected at least 1; 2\*\*26 is"
  ):
    published(weight_transfer_chunk_bytes=0)


def test_an_engine_that_is_asked_does_not_drop_its_weights():
  engine = make_engine(NATIVE)
  engine.add_request(asked()[0])
  with pytest.raises(ValueError, match=r"Engine.release_weights: got 1 unfinished requests"):
    engine.release_weights()
