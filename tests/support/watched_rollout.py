"""A cluster rollout that observes its events and checks its completions and chunks."""

from __future__ import annotations

import collections
from collections.abc import Callable
import pathlib
import time

from cluster_cases import alone, asked
import tiny_model

from seerjax.cluster.driver import ClusterRollout
from seerjax.cluster.ray_workers import RayWorkers
from seerjax.cluster.records import Answered, Event, Joined, Lost
from seerjax.rollout.journal import Journal
from seerjax.rollout.policies import ByRoom, Divided


class Watched(ClusterRollout):
  """Records the events of a rollout.

  Attributes:
    hears: called with each event before it is handled.
    ended: ended chunks, as in the journal.
    lost: lost workers.
    noticed: time in seconds at which each loss was noticed.
    joined_later: joins after the first response.
  """

  def listen(self, hears: Callable[[Watched, Event], None]) -> None:
    self.hears = hears
    self.ended: list[dict] = []
    self.lost: list[int] = []
    self.noticed: list[float] = []
    self.has_answered = False
    self.joined_later = 0

  def _take(self, event: Event) -> None:
    if isinstance(event, Lost):
      self.noticed.append(time.time())
      self.lost.append(event.worker)
    self.has_answered |= isinstance(event, Answered)
    self.joined_later += isinstance(event, Joined) and self.has_answered
    self.hears(self, event)
    super()._take(event)


def run(
  workers: RayWorkers,
  journal_at: pathlib.Path,
  hears: Callable[[Watched, Event], None] = lambda rollout, event: None,
) -> tuple[Watched, collections.Counter]:
  """Runs the requests with a journal; checks bits, and that nothing is lost or repeated."""
  with Journal(journal_at, fingerprint={}, settings={}) as journal:
    rollout = Watched(workers, Divided(chunk_tokens=2, routing=ByRoom()), journal)
    rollout.listen(hears)
    found = list(rollout.run(asked()))
    rollout.stop()  # Workers that still run have returned by then.
    rollout.ended = [one for one in journal.events() if one["event"] == "ended"]
  wanted = alone(tiny_model.NATIVE, 7)
  assert len({one.request_id for one in found}) == len(found) == len(wanted)
  assert all(one.has_bits_of(wanted[one.request_id]) for one in found)
  chunks = [one["chunk"] for one in rollout.ended]
  assert len({*chunks}) == len(chunks)
  again = rollout.counts["again"]
  assert len(rollout.trace.spans) == len(chunks) + again
  return rollout, collections.Counter(again=again, joined_later=rollout.joined_later)
