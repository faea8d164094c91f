"""A rollout gives one engine's completions though its Mooncake master is killed at any moment.

Needs the packages of launch/locks/mooncake-*.txt and the system's libibverbs; skips without.
"""

from __future__ import annotations

import collections
import time

from cluster_cases import alone, asked, make_engine
import faults
import mooncake_master
import pytest
import tiny_model

from seerjax.cluster.driver import ClusterRollout
from seerjax.cluster.local_workers import LocalWorkers
from seerjax.cluster.records import Answered
from seerjax.cluster.worker import EngineWorker
from seerjax.kv.mooncake_store import BUFFER_BYTES
from seerjax.kv.pool import KVPool, KVPoolConfig
from seerjax.kv.stores import open_store
from seerjax.rollout.policies import ByRoom, Divided

pytestmark = pytest.mark.long


class Killing(LocalWorkers):
  """Kills a master after a drawn response."""

  def __init__(self, workers, master: mooncake_master.Master, answers: int):
    super().__init__(workers)
    self.master, self.answers = master, answers

  def events(self, *, blocks: bool):
    found = super().events(blocks=blocks)
    self.answers -= sum(isinstance(event, Answered) for event in found)
    if self.answers <= 0 and self.master.process.poll() is None:
      self.master.process.kill()
      self.master.process.wait()
    return found


def test_a_master_that_is_killed_costs_no_bit(tmp_path, seed, tell_events):
  events = collections.Counter()
  for moment in faults.moments(seed, 8, 2):
    master = mooncake_master.start(tmp_path / f"master {moment}.log")
    config = KVPoolConfig(mooncake=master.address, store_bytes=BUFFER_BYTES)
    engines = [
      make_engine(tiny_model.NATIVE, kv_pool=KVPool(config, open_store(config))) for _ in range(2)
    ]
    workers = Killing([EngineWorker(engine) for engine in engines], master, moment)
    rollout = ClusterRollout(workers, Divided(chunk_tokens=2, routing=ByRoom()))
    begin = time.monotonic()
    found = list(rollout.run(asked()))
    print(f"killed behind answer {moment}: {time.monotonic() - begin:.1f} s in all")
    wanted = alone(tiny_model.NATIVE, 7)
    assert len(found) == len(wanted)
    assert all(one.has_bits_of(wanted[one.request_id]) for one in found)
    assert master.process.poll() is not None
    events["kill -9 of the master"] += 1
    for engine in engines:
      engine.memory.kv_pool.last_tier._client.close()  # Otherwise it tries to reconnect for ever.
      events["exported"] += engine.counters.imports.exported
      events["failures"] += engine.memory.kv_pool.store.failures
  tell_events("Mooncake", events, ("kill -9 of the master", "exported", "failures"))
