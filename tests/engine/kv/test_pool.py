"""The pool's tiers, without an engine: what goes on to a store comes back, or is refused."""

from __future__ import annotations

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seerjax.engine.kv.disk_store import DiskStore
from seerjax.engine.kv.pool import KVPool, KVPoolConfig
from seerjax.engine.kv.stores import open_store


def rounds(seed: int):
  """Two rounds of two leaves, the second of bfloat16; two parts each."""
  keys = jax.random.split(jax.random.key(seed), 4)
  leaves = [
    [jax.random.normal(key, (2, 3, 4, 5), dtype) for _ in range(2)]
    for key, dtype in zip(keys, [jnp.float32, jnp.bfloat16] * 2)
  ]
  return [leaves[:2], leaves[2:]]


def bits(tree) -> list[bytes]:
  return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def test_what_the_host_has_no_room_for_comes_back_from_the_disk(tmp_path):
  pool = KVPool(KVPoolConfig(host_pages=4), DiskStore(tmp_path, max_bytes=10**6))
  for name in ("a", "b"):
    assert pool.make_room(4)
    pool.put(name, 4, rounds(ord(name)))
  assert "a" in pool and "b" in pool and len(list(tmp_path.iterdir())) == 1
  assert bits(pool.take("a")) == bits(rounds(ord("a")))
  assert bits(pool.take("b")) == bits(rounds(ord("b")))
  assert (pool.store.requests_in, pool.store.requests_out, pool.host.requests_out) == (1, 1, 1)
  assert "a" not in pool and not list(tmp_path.iterdir())


def test_what_the_store_lost_or_changed_is_not_given_back(tmp_path):
  pool = KVPool(KVPoolConfig(host_pages=4), DiskStore(tmp_path, max_bytes=10**6))
  for damage in (lambda path: path.write_bytes(path.read_bytes()[:-1] + b"x"), pathlib.Path.unlink):
    pool.put("a", 4, rounds(0))
    assert pool.make_room(4)
    [path] = tmp_path.iterdir()
    damage(path)
    assert pool.take("a") is None and "a" not in pool
  assert (pool.store.requests_out, pool.store.requests_lost) == (0, 2)


def test_a_full_store_leaves_a_request_where_it_is(tmp_path):
  pool = KVPool(KVPoolConfig(host_pages=4), DiskStore(tmp_path, max_bytes=10))
  pool.put("a", 4, rounds(0))
  assert not pool.make_room(1) and pool.num_host_pages == 4
  assert bits(pool.take("a")) == bits(rounds(0))


def test_a_config_names_its_store(tmp_path):
  assert open_store(KVPoolConfig()) is None
  store = open_store(KVPoolConfig(disk=str(tmp_path / "kv"), store_bytes=5))
  assert isinstance(store, DiskStore) and store.max_bytes == 5 and store.put("a", b"12345")


@pytest.mark.parametrize(
  "fields, message",
  [
    (dict(host_pages=-1), r"got host_pages=-1, expected at least 0"),
    (dict(store_bytes=-1), r"got store_bytes=-1, expected at least 0"),
    (dict(disk="kv", mooncake="h:1"), r"got disk='kv' and mooncake='h:1', expected one store"),
  ],
)
def test_sizes_of_the_pool_are_checked(fields, message):
  with pytest.raises(ValueError, match=f"KVPoolConfig: {message}"):
    KVPoolConfig(**fields)
