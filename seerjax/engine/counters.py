"""Statistics of an engine: steps, tokens, and pages that moved."""

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
class Counters:
  """Statistics since the engine was created.

  Attributes:
    visits: times that `Engine.step` dispatched work to the devices.
    steps: steps run, one or more per visit.
    rows: rows computed.
    sampled_tokens: tokens sampled and kept.
    reused_tokens: positions served from the prefix cache.
    page_copies: partial pages copied before they were written.
    preemptions: sequences that lost their pages.
    displaced: times a request was preempted in favour of an older one.
    waits: times a waiting or running request lacked pages at the beginning of a visit.
    drafted_tokens: drafted tokens verified, one row each; tokens that paths share count once.
    accepted_tokens: drafted tokens accepted.
    side_paths: times a path other than the first had the longest acceptance.
    read_tokens: positions of prefill-only requests (`Engine.likeliest`), drafts included.
    key_copies: keys also written to a further path's pages.
    cut_for_rows: draft trees that lost leaves because the step had no rows left.
    cut_for_pages: draft trees that lost leaves because the instance had no pages left.
    cut_for_copies: draft trees that lost leaves because the table of key copies was full.
    errors: requests that ended with an error in a step.
    new_starts: times a step failed and the keys of all requests were computed again.
    migrated_pages: pages moved between instances with their request.
    pulled_pages: pages of prompts copied from another instance.
    spilled_pages: pages spilled off the devices.
    restored_pages: pages restored to the devices.
    peer_bytes: bytes copied between instances.
    background_rows: the part of `rows` that belongs to background requests.
    background_paused: times a background request held pages but got no row of a visit.
    background_spilled: times a background request was spilled because another needed its pages.
    background_preempted: times a background request lost its pages because the pool was full too.
    host: traffic of the pool's pinned host memory.
    store: traffic of the pool's store.
    imports: pages exchanged between engines.
  """

  visits: int = 0
  steps: int = 0
  rows: int = 0
  sampled_tokens: int = 0
  reused_tokens: int = 0
  page_copies: int = 0
  preemptions: int = 0
  displaced: int = 0
  waits: int = 0
  drafted_tokens: int = 0
  accepted_tokens: int = 0
  side_paths: int = 0
  read_tokens: int = 0
  key_copies: int = 0
  cut_for_rows: int = 0
  cut_for_pages: int = 0
  cut_for_copies: int = 0
  errors: int = 0
  new_starts: int = 0
  migrated_pages: int = 0
  pulled_pages: int = 0
  spilled_pages: int = 0
  restored_pages: int = 0
  peer_bytes: int = 0
  background_rows: int = 0
  background_paused: int = 0
  background_spilled: int = 0
  background_preempted: int = 0
  host: TierCounters = dataclasses.field(default_factory=TierCounters)
  store: TierCounters = dataclasses.field(default_factory=TierCounters)
  imports: ImportCounters = dataclasses.field(default_factory=ImportCounters)
