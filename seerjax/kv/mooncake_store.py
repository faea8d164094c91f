"""Mooncake Store: a KV store tier in the memory of a cluster, over TCP.

Every process lends the cluster a segment of its memory; a master (`launch/mooncake_master.sh`)
tracks the objects. The code works around this measured behaviour:

- Unpinned objects are evicted silently when memory is short, so ours are hard-pinned.
- `put` of an existing key reports success and keeps the old value, so the key is removed first.
- An object that was read is leased for seconds and refuses an ordinary removal, so removals are
  forced.
- A full cluster returns -200, which is back-pressure, not a failure.
- Without a master, the client retries for more than a minute; if another program listens at the
  address, it retries forever. A separate process, which can be killed, tries to join first.

Needs the extra `seerjax[mooncake]` and the system's libibverbs, even without RDMA.
"""

from __future__ import annotations

import importlib
import os
import socket
import subprocess
import sys
from typing import Any

# Status of the client when no segment has room.
NO_SPACE = -200
# The client refuses objects larger than its buffer, so values are split into parts of this size.
PART_BYTES = 4 * 2**20
BUFFER_BYTES = 4 * PART_BYTES
# Seconds within which a TCP connection to the master must succeed.
PATIENCE = 5.0
# Joins a cluster and leaves it: (host, buffer bytes, master) -> exit status 0.
JOIN = """
import sys, mooncake.store
client = mooncake.store.MooncakeDistributedStore()
host, size, master = sys.argv[1], int(sys.argv[2]), sys.argv[3]
status = client.setup(host, "P2PHANDSHAKE", size, size, "tcp", "", master)
print("status", status, file=sys.stderr)
client.close()
sys.exit(status != 0)
"""


class MooncakeStore:
  """A process's client of the cluster. A value is its parts, then their number under its key, so a
  process that finds the number also finds the parts."""

  def __init__(
    self,
    master: str,
    *,
    segment_bytes: int,
    host: str = "127.0.0.1",
    replicas: int = 1,
    patience: float = 30.0,
  ):
    """Joins the cluster and lends it memory.

    Args:
      master: "host:port".
      segment_bytes: memory that this process lends, at least 16 MiB.
      host: address at which the other processes reach this one.
      replicas: number of processes that store each value; all of them if there are fewer.
      patience: seconds within which the trial client must have joined.

    Raises:
      ImportError: if Mooncake or a system library that it needs is not installed.
      ValueError: if the address is malformed, the segment too small or too large, or no client can
        join at the address.
      ConnectionError: if nothing listens at the address.
    """
    if segment_bytes < BUFFER_BYTES:
      raise ValueError(
        f"MooncakeStore.segment_bytes: got {segment_bytes}, expected at least {BUFFER_BYTES}; give"
        " it more memory."
      )
    _check_listens(master)
    store_lib = _library()
    _check_joins(host, master, patience)
    self._client: Any = store_lib.MooncakeDistributedStore()
    self._num_parts: dict[str, int] = {}  # Of the values that this process put.
    status = self._client.setup(
      host, "P2PHANDSHAKE", segment_bytes, BUFFER_BYTES, "tcp", "", master
    )
    if status != 0:
      raise ValueError(
        f"MooncakeStore.segment_bytes: got status {status} from the client, which joined with"
        f" {BUFFER_BYTES} bytes, expected 0 with {segment_bytes} too; give it less memory."
      )
    self._pinned = store_lib.ReplicateConfig()
    self._pinned.with_hard_pin = True
    self._pinned.replica_num = replicas
    # Prefer local memory: objects in another process's memory are lost when it exits.
    self._pinned.preferred_segment = self._client.get_hostname()

  def put(self, key: str, data: bytes) -> bool:
    """Stores `data`; returns False if the cluster has no room for it now.

    Raises:
      ConnectionError: if the put fails for another reason.
    """
    if key not in self._num_parts and self.has(key):
      return True  # Another process put an equal value (`Store`) and will remove it.
    self.remove(key)
    parts = [data[start : start + PART_BYTES] for start in range(0, len(data), PART_BYTES)]
    names = [self._name(key, index) for index in range(len(parts))]
    objects = [*zip(names, parts), (self._name(key), str(len(parts)).encode())]
    self._num_parts[key] = len(parts)
    for index, (name, part) in enumerate(objects):
      status = self._client.put(name, part, self._pinned)
      if status != 0:
        self._num_parts[key] = index
        if index:
          self.remove(key)
        else:  # Nothing was put; skip the removal, since a dead master takes seconds to time out.
          del self._num_parts[key]
        if status == NO_SPACE:
          return False
        raise ConnectionError(
          f"MooncakeStore.put: got status {status} for {key!r}, expected 0; is the master still"
          " running? Resume the run from its journal."
        )
    return True

  def get(self, key: str) -> bytes | None:
    """Returns the value that any process put; None if it is missing or was lost with a process."""
    count = self._client.get(self._name(key))
    if not count:
      return None
    parts = [self._client.get(self._name(key, index)) for index in range(int(count))]
    return b"".join(parts) if all(parts) else None

  def has(self, key: str) -> bool:
    """Returns whether any process has put a value under `key`.

    Raises:
      ConnectionError: if the query fails.
    """
    found = self._client.is_exist(self._name(key))
    if found < 0:
      raise ConnectionError(
        f"MooncakeStore.has: got status {found} for {key!r}, expected 0 or 1; is the master still"
        " running? Resume the run from its journal."
      )
    return found == 1

  def remove(self, key: str) -> None:
    """Removes a value that this process put, at once; any other key is ignored."""
    count = self._num_parts.pop(key, None)
    if count is not None:
      names = [self._name(key), *(self._name(key, index) for index in range(count))]
      self._client.batch_remove(names, True)

  def close(self) -> None:
    """Leaves the cluster; the values that this process put are lost."""
    for key in list(self._num_parts):
      self.remove(key)
    self._client.close()

  def _name(self, key: str, index: int | None = None) -> str:
    return f"seerjax/{key}" if index is None else f"seerjax/{key}/{index}"


def _check_listens(master: str) -> None:
  host, _, port = master.rpartition(":")
  if not host or not port.isdigit():
    raise ValueError(
      f"MooncakeStore.master: got {master!r}, expected host:port such as 127.0.0.1:50051; give the"
      " address that launch/mooncake_master.sh prints."
    )
  try:
    socket.create_connection((host, int(port)), timeout=PATIENCE).close()
  except OSError as error:
    raise ConnectionError(
      f"MooncakeStore.master: got {error} from {master}, expected a running master; start one with"
      " `bash launch/mooncake_master.sh`."
    ) from error


def _check_joins(host: str, master: str, patience: float) -> None:
  command = [sys.executable, "-c", JOIN, host, str(BUFFER_BYTES), master]
  try:
    joined = subprocess.run(command, capture_output=True, text=True, timeout=patience)
    found = "" if joined.returncode == 0 else joined.stderr.strip()[-500:]
  except subprocess.TimeoutExpired:
    found = f"no answer in {patience:g} s"
  if found:
    raise ValueError(
      f"MooncakeStore.master: got {found!r} from a client of {master}, expected it to join; give"
      " the master's RPC port, not its metrics port or the port of another program."
    )


def _library() -> Any:
  os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # Otherwise every connection is logged.
  try:
    return importlib.import_module("mooncake.store")
  except ImportError as error:
    raise ImportError(
      f"MooncakeStore: got {error}, expected Mooncake; install seerjax[mooncake] and, where"
      " libibverbs is missing, the system's libibverbs1."
    ) from error
