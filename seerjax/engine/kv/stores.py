"""Which store stands behind the KV pool, by its config."""

from __future__ import annotations

from seerjax.engine.kv.disk_store import DiskStore
from seerjax.engine.kv.mooncake_store import MooncakeStore
from seerjax.engine.kv.pool import KVPoolConfig, Store


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
    return MooncakeStore(
      config.mooncake,
      segment_bytes=config.store_bytes,
      host=config.mooncake_host,
      replicas=config.mooncake_replicas,
    )
  return None
