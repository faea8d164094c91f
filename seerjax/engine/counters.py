"""One record of what an engine did: steps, tokens, and the pages that moved."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class TierCounters:
  """What passed through one tier of the KV pool.

  Attributes:
    bytes_in: that arrived.
    bytes_out: that came back.
    requests_in: requests that arrived.
    requests_out: requests that came back.
    requests_lost: requests that did not, or with other bytes: they are computed again.
    failures: times it raised instead of an answer.
    seconds_stalled: spent waiting for it.
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
  """What became of pages that another engine had exported (`KVManifest`).

  Attributes:
    exported: page sets that were described for others.
    adopted: page sets of others that came back from the store, and were used.
    stale: that were of other weights, numerics, tokens or length than the request's,
    damaged: whose bytes had changed,
    gone: that were not in the store: all of these are computed again.
  """

  exported: int = 0
  adopted: int = 0
  stale: int = 0
  damaged: int = 0
  gone: int = 0


@dataclasses.dataclass
class Counters:
  """What happened since the engine was made.

  Attributes:
    visits: times the devices were handed work, by `Engine.step`.
    steps: that they ran, one or more a visit.
    rows: rows computed.
    sampled_tokens: tokens sampled and kept.
    reused_tokens: positions found in memory instead of computed.
    page_copies: partial pages copied before they were written.
    preemptions: sequences that lost their pages.
    displaced: times a running request gave its pages to an older one and waited again.
    waits: times a request, waiting or running, lacked pages at the beginning of a visit.
    drafted_tokens: drafted tokens verified, one row each; what paths share is counted once.
    accepted_tokens: drafted tokens that were sampled too.
    side_paths: times a path that was not the first was the longest.
    read_tokens: places of texts that were read (`Engine.likeliest`), drafts among them.
    key_copies: keys written to a further path's pages, too.
    cut_for_rows: trees of drafts that lost leaves because the step had no rows left,
    cut_for_pages: because the instance had no pages left for a path of its own,
    cut_for_copies: because the step had no place left for key copies.
    errors: requests that ended by what they met in a step.
    new_starts: times a step broke off, and the keys of all requests were computed again.
    migrated_pages: pages that changed instance with their request.
    pulled_pages: pages of prompts, copied from another instance.
    spilled_pages: pages that left the devices.
    restored_pages: pages that came back.
    peer_bytes: bytes that went from instance to instance.
    background_rows: of `rows`, those of requests that nobody waits for.
    background_paused: times such a request had pages and got no row of a visit,
    background_spilled: times its pages left the device because another needed them,
    background_preempted: times it lost them, because the pool was full, too.
    host: the pool's pinned host memory.
    store: the pool's store.
    imports: pages that went from engine to engine.
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
