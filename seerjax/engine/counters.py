"""Statistics of an engine: steps, tokens, and pages that moved."""

from __future__ import annotations

import dataclasses

from seerjax.kv.counters import PageCounters


@dataclasses.dataclass
class Counters(PageCounters):
  """Statistics since the engine was created; those of its pages are in `PageCounters`.

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
    read_tokens: positions of prefill-only requests (`Engine.top_logprobs`), drafts included.
    key_copies: keys also written to a further path's pages.
    cut_for_rows: draft trees that lost leaves because the step had no rows left.
    cut_for_pages: draft trees that lost leaves because the instance had no pages left.
    cut_for_copies: draft trees that lost leaves because the table of key copies was full.
    errors: requests that ended with an error in a step.
    new_starts: times a step failed and the keys of all requests were computed again.
    background_rows: the part of `rows` that belongs to background requests.
    background_paused: times a background request held pages but got no row of a visit.
    background_spilled: times a background request was spilled because another needed its pages.
    background_preempted: times a background request lost its pages because the pool was full too.
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
  background_rows: int = 0
  background_paused: int = 0
  background_spilled: int = 0
  background_preempted: int = 0
