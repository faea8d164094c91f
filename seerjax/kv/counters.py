"""Statistics of the KV pages: pages that moved, tiers of the pool, exports and imports."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class TierCounters:
  """Traffic of one tier of the KV pool.

  Attributes:
    bytes_in: bytes stored.
    bytes_out: bytes restored.
    requests_in: requests stored.
    requests_out: requests restored.
    requests_lost: requests with missing or corrupt values; they are computed again.
    failures: calls that raised an error.
    seconds_stalled: seconds blocked on the tier.
  """

  bytes_in: int = 0
  bytes_out: int = 0
  requests_in: int = 0
  requests_out: int = 0
  requests_lost: int = 0
  failures: int = 0
  seconds_stalled: float = 0.0


@dataclasses.dataclass
class ImportCounters:
  """Outcomes of exporting pages and importing exported pages (`KVManifest`).

  Attributes:
    exported: page sets exported for other engines.
    adopted: page sets of other engines that were restored from the store and used.
    stale: page sets of other weights, numerics, tokens or length; computed again.
    damaged: page sets with corrupt bytes; computed again.
    gone: page sets missing from the store; computed again.
  """

  exported: int = 0
  adopted: int = 0
  stale: int = 0
  damaged: int = 0
  gone: int = 0


@dataclasses.dataclass
class PageCounters:
  """Statistics of an engine's pages since it was created.

  Attributes:
    migrated_pages: pages moved between instances with their request.
    pulled_pages: pages of prompts copied from another instance.
    spilled_pages: pages spilled off the devices.
    restored_pages: pages restored to the devices.
    passed_pages: pages of layers with windows that were given back because no later row of their
      request reads them.
    peer_bytes: bytes copied between instances.
    host: traffic of the pool's pinned host memory.
    store: traffic of the pool's store.
    imports: pages exchanged between engines.
  """

  migrated_pages: int = 0
  pulled_pages: int = 0
  spilled_pages: int = 0
  restored_pages: int = 0
  passed_pages: int = 0
  peer_bytes: int = 0
  host: TierCounters = dataclasses.field(default_factory=TierCounters)
  store: TierCounters = dataclasses.field(default_factory=TierCounters)
  imports: ImportCounters = dataclasses.field(default_factory=ImportCounters)
