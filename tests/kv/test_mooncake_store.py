"""The real Mooncake Store: a local master, and requests that spill to it.

Needs the packages of launch/locks/mooncake-*.txt and the system's libibverbs; skips without.
"""

from __future__ import annotations

from collections.abc import Iterator
import os
import pathlib
import socket
import subprocess
import sys
import time

import mooncake_master
from moving_requests import answers, asked, assert_same, make_engine, run
import pytest
import tiny_model

from seerjax.kv import mooncake_store
from seerjax.kv.mooncake_store import BUFFER_BYTES, PART_BYTES, MooncakeStore
from seerjax.kv.pool import KVPool, KVPoolConfig
from seerjax.kv.stores import open_store


@pytest.fixture(scope="module")
def master(tmp_path_factory) -> Iterator[str]:
  """The address of a master that runs during this file's tests."""
  made = mooncake_master.start(tmp_path_factory.mktemp("mooncake") / "master.log")
  yield made.address
  made.end()


@pytest.fixture(scope="module")
def member(master) -> Iterator[MooncakeStore]:
  """Joining takes seconds, so one member of the cluster serves several tests."""
  one = MooncakeStore(master, segment_bytes=BUFFER_BYTES)
  yield one
  one.close()


@pytest.fixture
def store(member) -> Iterator[MooncakeStore]:
  yield member
  for key in list(member._num_parts):
    member.remove(key)


def test_what_was_put_comes_back_and_goes(store):
  long = os.urandom(2 * PART_BYTES + 1)
  assert store.put("0/1/2", b"abc") and store.put("long", long)
  assert store.get("0/1/2") == b"abc" and store.get("long") == long
  assert store.put("0/1/2", b"other") and store.get("0/1/2") == b"other"
  # At once, though it was read just now.
  store.remove("long")
  store.remove("long")
  assert store.put("long", long[::-1]) and store.get("long") == long[::-1]
  assert store.get("absent") is None


def test_a_full_cluster_says_so_and_keeps_what_it_has(store):
  first = os.urandom(2 * PART_BYTES)
  assert store.put("first", first)
  assert not store.put("second", os.urandom(3 * PART_BYTES))
  assert store.get("first") == first
  store.remove("first")
  assert store.put("second", first)


def test_two_processes_of_one_cluster_read_each_other_and_remove_nothing(master, store):
  other = MooncakeStore(master, segment_bytes=BUFFER_BYTES)
  assert store.put("0/0/0", b"equal") and other.put("0/0/0", b"equal") and other.put("1", b"one")
  assert other.get("0/0/0") == b"equal" and store.get("1") == b"one" and store.has("1")
  other.remove("0/0/0")
  assert store.get("0/0/0") == b"equal"
  other.close()
  assert store.get("0/0/0") == b"equal" and not store.has("1")


def test_what_lies_with_two_processes_outlives_one(master, store):
  config = KVPoolConfig(mooncake=master, store_bytes=BUFFER_BYTES, mooncake_replicas=2)
  other = open_store(config)
  assert isinstance(other, MooncakeStore)
  assert other.put("twice", b"abc") and store.get("twice") == b"abc"
  other._client.close()  # As if the process had died: nothing is removed.
  assert store.get("twice") == b"abc"


def test_a_request_continues_in_another_engine_with_pages_of_the_cluster(master):
  def engine():
    config = KVPoolConfig(mooncake=master, store_bytes=BUFFER_BYTES)
    return make_engine((1, 1), kv_pool=KVPool(config, open_store(config)))

  here, there = engine(), engine()
  request = asked()[3]
  here.add_request(request, chunk_tokens=7)
  while not here.chunks.poll_paused():
    here.step()
  there.add_request(request, resume_from=here.progress("r/3"), kv=here.chunks.export_kv("r/3"))
  here.abort_request("r/3")
  while there.num_unfinished:
    there.step()
  assert tiny_model.same(there.poll()[0], answers()["r/3"], 0)
  assert there.counters.imports.adopted == 1
  for one in (here, there):
    one.memory.kv_pool.last_tier.close()


def test_what_the_cluster_lost_is_nothing(store):
  store.put("a", b"abc")
  store._client.batch_remove([store._name("a", 0)], True)
  assert store.get("a") is None


def test_spilled_requests_come_back_from_the_cluster(master):
  config = KVPoolConfig(host_pages=16, mooncake=master, store_bytes=BUFFER_BYTES)
  store = open_store(config)
  assert isinstance(store, MooncakeStore)
  pool = KVPool(config, store)
  engine = make_engine((2, 2), kv_pool=pool)
  turn = iter(range(10**6))

  def at_pause(request_id):
    chunks = engine.chunks
    chunks.spill([name for name in chunks.poll_paused() if chunks.held_pages(name)])
    return next(turn) % 2

  assert_same(run(engine, at_pause))
  assert pool.store.requests_in == pool.store.requests_out > 0
  store.close()


# Refusals, which need no Mooncake.


def test_a_small_segment_is_refused():
  with pytest.raises(ValueError, match=r"segment_bytes: got 5, expected at least 16777216; give"):
    MooncakeStore("127.0.0.1:1", segment_bytes=5)


@pytest.mark.parametrize("master", ["localhost", ":50051", "host:port"])
def test_what_is_no_address_is_refused(master):
  with pytest.raises(ValueError, match=f"got '{master}', expected host:port such as"):
    MooncakeStore(master, segment_bytes=BUFFER_BYTES)


def test_a_master_that_does_not_listen_is_refused_soon():
  begin = time.monotonic()
  with pytest.raises(ConnectionError, match=r"expected a running master; start one with"):
    MooncakeStore(f"127.0.0.1:{mooncake_master.free_port()}", segment_bytes=BUFFER_BYTES)
  assert time.monotonic() - begin < 2 * mooncake_store.PATIENCE


def test_what_listens_and_is_no_master_is_refused():
  mooncake_master.skip_without_mooncake()
  with socket.create_server(("127.0.0.1", 0)) as listener:
    master = f"127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(ValueError, match=r"got 'no answer in 2 s' .* give the master's RPC port"):
      MooncakeStore(master, segment_bytes=BUFFER_BYTES, patience=2.0)


def test_without_mooncake_it_says_what_to_install():
  # In a separate process, in which the package cannot be found.
  program = """
import sys
sys.modules["mooncake"] = None
from seerjax.kv.mooncake_store import BUFFER_BYTES, MooncakeStore
MooncakeStore(sys.argv[1], segment_bytes=BUFFER_BYTES)
"""
  with socket.create_server(("127.0.0.1", 0)) as listener:
    master = f"127.0.0.1:{listener.getsockname()[1]}"
    done = subprocess.run(
      [sys.executable, "-c", program, master],
      capture_output=True,
      text=True,
      cwd=pathlib.Path(__file__).parents[2],
      check=False,
    )
  assert "expected Mooncake; install seerjax[mooncake] and" in done.stderr
