"""A process with an engine on a shared disk store, for tests of handing requests over.

    python store_peer.py DIRECTORY

It writes started.pickle, its requests' partial completions, when their pages are in the store. It
waits for theirs.pickle, those of the other process's requests, and finishes them in done.pickle.
"""

from __future__ import annotations

import pathlib
import pickle
import sys
import time

from moving_requests import asked, make_engine

from seerjax.engine.engine import Engine
from seerjax.kv.disk_store import DiskStore
from seerjax.kv.pool import KVPool, KVPoolConfig
from seerjax.types import Completion


def begin(engine: Engine, names: tuple[str, ...]) -> dict[str, Completion]:
  """Runs the first chunk of requests and sends their pages to the store."""
  for request in asked():
    if request.request_id in names:
      engine.add_request(request, chunk_tokens=7)
  while len(engine.chunks.poll_paused()) < len(names):
    engine.step()
  for name in names:
    assert engine.chunks.spill([name]) == [name]
  pool = engine.memory.kv_pool
  while pool.num_host_pages:
    assert pool.make_room(pool.free_host_pages + 1)
  return {name: engine.progress(name) for name in names}


def end(engine: Engine, partials: dict[str, Completion]) -> dict[str, Completion]:
  """Finishes requests that started elsewhere."""
  for request in asked():
    if request.request_id in partials:
      engine.add_request(request, resume_from=partials[request.request_id])
  found = {}
  while len(found) < len(partials):
    engine.step()
    found |= {completion.request_id: completion for completion in engine.poll()}
  return found


def make_peer(directory: pathlib.Path, **others) -> Engine:
  """Returns an engine that spills everything possible to a store in the directory."""
  store = DiskStore(directory / "kv", max_bytes=10**7)
  return make_engine((1, 1), kv_pool=KVPool(KVPoolConfig(host_pages=64), store), **others)


def wait_for(path: pathlib.Path) -> dict[str, Completion]:
  """Waits for a file of the other process, and reads it."""
  deadline = time.monotonic() + 300
  while not path.exists():
    assert time.monotonic() < deadline, f"{path.name} never came"
    time.sleep(0.05)
  return pickle.loads(path.read_bytes())


def tell(path: pathlib.Path, what: object) -> None:
  """Writes a file for the other process atomically."""
  path.with_suffix(".tmp").write_bytes(pickle.dumps(what))
  path.with_suffix(".tmp").replace(path)


def main(directory: pathlib.Path) -> None:
  engine = make_peer(directory)
  tell(directory / "started.pickle", begin(engine, ("r/3",)))
  found = end(engine, wait_for(directory / "theirs.pickle"))
  tell(directory / "done.pickle", (found, engine.counters))


if __name__ == "__main__":
  main(pathlib.Path(sys.argv[1]))
