"""Which store stands behind the KV pool, by its config."""

from __future__ import annotations

from seerjax.engine.disk_store import DiskStore
from seerjax.engine.kv_pool import KVPoolConfig, Store
from seerjax.engine.mooncake_store import MooncakeStore


def open_store(config: KVPoolConfig) -> Store | None:
  """Opens the store of a config, None if it names none.

  Raises:
    OSError: if the disk's directory cannot be made, or no Mooncake master listens.
    ImportError: if Mooncake is not installed.
    ValueError: if the cluster refuses.
  """
  if config.disk:
    return DiskStore(config.disk, max_bytes=config.store_bytes)
  if config.mooncake:
    return MooncakeStore(config.mooncake, segment_bytes=config.store_bytes)
  return None
