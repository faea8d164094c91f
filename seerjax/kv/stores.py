"""Opens the store that a KV pool's config names."""

from __future__ import annotations

from seerjax.kv.disk_store import DiskStore
from seerjax.kv.mooncake_store import MooncakeStore
from seerjax.kv.pool import KVPoolConfig, Store


def open_store(config: KVPoolConfig) -> Store | None:
  """Opens the store of a config; returns None if the config names none.

  Raises:
    OSError: if the directory cannot be created, or no Mooncake master listens.
    ImportError: if Mooncake is not installed.
    ValueError: if the cluster refuses the connection.
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
