"""The pool's tiers, without an engine: data sent to a store comes back intact, or is refused."""

from __future__ import annotations

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seerjax.kv import values
from seerjax.kv.disk_store import DiskStore
from seerjax.kv.pool import (
  MOST_FAILURES,
  PAUSE_STEPS,
  PIN_STEPS,
  KVPool,
  KVPoolConfig,
)
from seerjax.kv.stores import open_store
from seerjax.kv.values import Identity


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


def make_pool(directory: pathlib.Path, max_bytes: int = 10**6, weights: str = "w") -> KVPool:
  pool = KVPool(KVPoolConfig(host_pages=4), DiskStore(directory, max_bytes=max_bytes))
  pool.identify(lambda owner: Identity("f", weights, 3))
  return pool


def send_on(pool: KVPool, name: str, tokens: list[int]) -> None:
  """Puts a request's pages, then makes room so that they move to the store."""
  pool.put(name, 4, rounds(sum(tokens)), tokens)
  assert pool.make_room(4)


@pytest.mark.thorough
def test_what_the_host_has_no_room_for_comes_back_from_the_disk(tmp_path):
  pool = make_pool(tmp_path)
  for name in ("a", "b"):
    assert pool.make_room(4)
    pool.put(name, 4, rounds(ord(name)), [ord(name)])
  assert "a" in pool and "b" in pool and len(list(tmp_path.glob("*/*.kv"))) == 1
  assert bits(pool.take("a")) == bits(rounds(ord("a")))
  assert bits(pool.take("b")) == bits(rounds(ord("b")))
  assert (pool.store.requests_in, pool.store.requests_out, pool.host.requests_out) == (1, 1, 1)
  assert "a" not in pool


@pytest.mark.thorough
def test_what_the_store_lost_or_changed_is_not_given_back(tmp_path):
  def flip(path: pathlib.Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)

  damages = (
    lambda path: flip(path, -1),
    lambda path: flip(path, 40),  # Of the header.
    lambda path: flip(path, 0),
    lambda path: path.write_bytes(b"short"),
    pathlib.Path.unlink,
  )
  pool = make_pool(tmp_path)
  for damage in damages:
    send_on(pool, "a", [1, 2])
    [path] = tmp_path.glob("*/*.kv")
    damage(path)
    assert pool.take("a") is None and "a" not in pool and not path.exists()
  assert (pool.store.requests_out, pool.store.requests_lost) == (0, len(damages))


def test_a_full_store_leaves_a_request_where_it_is(tmp_path):
  pool = make_pool(tmp_path, max_bytes=10)
  pool.put("a", 4, rounds(0), [0])
  assert not pool.make_room(1) and pool.num_host_pages == 4
  assert bits(pool.take("a")) == bits(rounds(0))


def test_values_stay_for_some_steps_and_make_room_before(tmp_path):
  pool = make_pool(tmp_path)
  send_on(pool, "a", [1])
  for _ in range(2 * PIN_STEPS):
    pool.advance()
  assert bits(pool.take("a")) == bits(rounds(1))  # A live request's pages never expire.
  for _ in range(PIN_STEPS - 1):
    pool.advance()
  assert list(tmp_path.glob("*/*.kv"))
  pool.advance()
  assert not list(tmp_path.glob("*/*.kv"))

  send_on(pool, "b", [2])
  [size] = (path.stat().st_size for path in tmp_path.glob("*/*.kv"))
  pool = make_pool(tmp_path / "small", max_bytes=size)
  send_on(pool, "c", [3])
  pool.drop("c")
  send_on(pool, "d", [4])  # In the room of unneeded pages.
  pool.put("e", 4, rounds(5), [5])
  assert not pool.make_room(4) and bits(pool.take("d")) == bits(rounds(4))


def files_in(directory) -> list[str]:
  return sorted(path.name for path in directory.glob("*/*.kv"))


def test_what_was_put_of_a_request_goes_when_it_is_over(tmp_path):
  pool = make_pool(tmp_path)
  pool.export("here", [1], rounds(1))
  pool.export("there", [2], rounds(2))
  send_on(pool, "spilled", [3])
  pool.take("spilled")
  kept = files_in(tmp_path)
  assert len(kept) == 3
  pool.end("here")
  pool.end("spilled")
  pool.end("nowhere")
  assert len(files_in(tmp_path)) == 1
  # A request that continued elsewhere can be read until it ends there.
  pool.drop("there")
  assert len(files_in(tmp_path)) == 1
  pool.end("there")
  assert not files_in(tmp_path)


def test_what_another_request_needs_stays_when_one_is_over(tmp_path):
  pool = make_pool(tmp_path)
  pool.export("a", [1], rounds(1))
  pool.export("b", [1], rounds(1))
  pool.end("a")
  assert len(files_in(tmp_path)) == 1
  pool.export("b", [1, 2], rounds(2))  # Replaces the earlier pages.
  assert len(files_in(tmp_path)) == 1
  for _ in range(2 * PIN_STEPS):
    pool.advance()
  pool.end("b")
  assert not files_in(tmp_path)


class Failing(DiskStore):
  """A store that fails while its flag is set, and counts its calls."""

  fails = False
  asked = 0

  def put(self, key: str, data: bytes) -> bool:
    self.asked += 1
    if self.fails:
      raise OSError("the cluster is gone")
    return super().put(key, data)


def test_a_store_that_fails_again_and_again_is_left_alone_for_a_while(tmp_path):
  store = Failing(tmp_path, max_bytes=10**8)
  pool = KVPool(KVPoolConfig(), store)
  pool.identify(lambda owner: Identity("f", "w", 0))
  assert pool.export("kept", [0], rounds(0)) is not None
  pool.drop("kept")  # With a failing store this room cannot be freed.
  store.fails = True
  for index in range(1, 9):
    assert pool.export(f"r{index}", [index], rounds(index)) is None
  assert store.asked == 1 + MOST_FAILURES and pool.store.failures == MOST_FAILURES
  assert len(files_in(tmp_path)) == 1
  store.fails = False
  for _ in range(PAUSE_STEPS - 1):
    pool.advance()
  assert pool.export("a", [1], rounds(1)) is None
  pool.advance()
  assert pool.export("a", [1], rounds(1)) is not None and pool.export("b", [2], rounds(2))


def test_another_process_finds_values_by_tokens_and_weights_and_removes_none(tmp_path):
  first, second, other = make_pool(tmp_path), make_pool(tmp_path), make_pool(tmp_path, weights="v")
  send_on(first, "a", [1, 2, 3])
  assert not other.claim("x", [1, 2, 3]) and not second.claim("x", [1, 2])
  assert second.claim("x", [1, 2, 3]) and not second.claim("x", [1, 2, 3])
  assert bits(second.take("x")) == bits(rounds(6))
  for _ in range(2 * PIN_STEPS):
    second.advance()
  assert bits(first.take("a")) == bits(rounds(6))


def test_two_requests_of_equal_tokens_share_a_value(tmp_path):
  pool = make_pool(tmp_path)
  send_on(pool, "a", [1])
  send_on(pool, "b", [1])
  assert len(list(tmp_path.glob("*/*.kv"))) == 1
  pool.drop("a")
  for _ in range(2 * PIN_STEPS):
    pool.advance()
  assert bits(pool.take("b")) == bits(rounds(1))


def test_a_value_says_what_it_is():
  identity = Identity("f", "w", 7)
  data = values.packed(jax.tree.map(np.asarray, rounds(0)), identity)
  for part in (b'"policy_version": 7', b'"fingerprint": "f"', b"bfloat16[2, 3, 4, 5]"):
    assert part in data
  assert bits(values.unpacked(data, identity)) == bits(rounds(0))
  assert values.unpacked(data, identity._replace(fingerprint="g")) is None
  assert values.unpacked(data, identity._replace(weights="v")) is None
  assert values.unpacked(data, identity._replace(policy_version=8)) is not None
  for place in range(len(data)):
    damaged = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
    assert values.unpacked(damaged, identity) is None, place


def test_a_config_names_its_store(tmp_path):
  assert open_store(KVPoolConfig()) is None
  store = open_store(KVPoolConfig(disk=str(tmp_path / "kv"), store_bytes=5))
  assert isinstance(store, DiskStore) and store.max_bytes == 5 and store.put("a", b"12345")


@pytest.mark.parametrize(
  "fields, message",
  [
    (
      dict(host_pages=-1),
      r"\.host_pages: got -1, expected at least 0; 0 keeps no KV in host memory",
    ),
    (dict(store_bytes=-1), r"\.store_bytes: got -1, expected at least 0"),
    (dict(mooncake_host=""), r"\.mooncake_host: got '', expected an address; leave it out on one"),
    (dict(mooncake_replicas=0), r"\.mooncake_replicas: got 0, expected at least 1"),
    (dict(disk="kv", mooncake="h:1"), r": got disk='kv' and mooncake='h:1', expected at most one"),
  ],
)
def test_sizes_of_the_pool_are_checked(fields, message):
  with pytest.raises(ValueError, match=f"KVPoolConfig{message}"):
    KVPoolConfig(**fields)
