"""Scheduling policies: what decides which request runs its next chunk, and on which instance.

Each policy is a frozen record of settings; its decisions are made by a queue (`rollout.queues`) and
by routing (`rollout.routing`).

Source: arXiv 2511.14617v3, sections 3.2 and 3.3, algorithm 2; OSDI '26 for cache-aware routing.
What goes beyond it: `LongestGroupFirst`.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses

from seerjax import fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupFCFS:
  """The baseline that others ship: whole groups, whole requests, first come first served.

  A group goes to one instance, by arrival, round robin. A request is admitted as soon as its
  *present* KV fits, and runs to its end: when pages run out, the caller preempts the request that
  was admitted last there (`Buffer.lost_kv`), which then starts again before later ones.

  Attributes:
    reserves: admit only where the KV of all `max_tokens` fits, so that nothing is ever preempted.
  """

  reserves: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class ByPrefix:
  """Where the longest prefix is cached, while load is balanced; else the fewest in flight.

  Attributes:
    max_spread: load is balanced up to this difference of requests in flight.
  """

  max_spread: int = 32

  def __post_init__(self):
    fields.check(self)
    if self.max_spread < 0:
      raise ValueError(f"ByPrefix: got max_spread={self.max_spread}, expected at least 0; say 32.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ByRoom:
  """Where most pages are free, unless where its KV or prompt is there are nearly as many.

  What an instance's step costs beyond its fixed part follows from the KV that it reads, so this
  evens the instances' steps out, which numbers of requests do not.
  """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Divided:
  """Chunks instead of whole requests, in order of arrival, on any instance.

  Attributes:
    chunk_tokens: most tokens of a chunk.
    routing: how an instance is chosen among those where the chunk fits.
    min_pull_tokens: more tokens than these missing on the chosen instance are pulled from the one
      that has them; fewer are computed again.
  """

  chunk_tokens: int = 8192
  routing: ByPrefix | ByRoom = ByPrefix()
  min_pull_tokens: int = 512

  def __post_init__(self):
    fields.check(self)
    if self.chunk_tokens < 1 or self.min_pull_tokens < 0:
      raise ValueError(
        f"{type(self).__name__}: got chunk_tokens={self.chunk_tokens},"
        f" min_pull_tokens={self.min_pull_tokens}, expected at least 1 and 0; 8192 and 512 are the"
        " source's."
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContextAware(Divided):
  """Algorithm 2: probes first, fewest generated first; then the largest group estimate.

  The estimate of a group is the longest of its finished requests, `max_tokens` before the first.
  """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Oracle(Divided):
  """Longest first by true lengths: what perfect estimates would give. Simulation only.

  Attributes:
    lengths: generated tokens by request id.
  """

  lengths: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongestGroupFirst(Divided):
  """What `Divided` does, until lengths within groups are seen to be alike; then the longest first.

  Which request is long is luck where lengths within a group are not alike: any other order than
  that of arrival then loses as often as it wins. So the first chunks go as `Divided` gives them,
  routing included, and every decision stays so where likeness stays low. It is measured on what has
  finished of the groups that arrived first and on what their others have generated so far
  (`rollout.likeness`). Once that is at least `min_correlation`, its standard error taken off, while
  much still waits and has never run, the order is from then on that of algorithm 2 with better
  estimates:

  - the first requests of all groups go first, the least generated of them before the others, so
    that every group is probed;
  - then the group of the largest estimate: the longest of its members that have finished, and never
    below what one that has not finished has generated; `max_tokens` before the first has finished.

  Now and then the request that arrived first goes first (`queues.FAIR_EVERY`), so that none waits
  for ever.

  Attributes:
    routing: once lengths are alike, and with 16 instances or more; else it is `ByPrefix()`.
    min_correlation: see above, of whole lengths; 2 is always `Divided`.
  """

  chunk_tokens: int = 2048
  routing: ByPrefix | ByRoom = ByRoom()
  min_correlation: float = 0.5

  def __post_init__(self):
    super().__post_init__()
    if not -1 <= self.min_correlation <= 2:
      raise ValueError(
        f"LongestGroupFirst: got min_correlation={self.min_correlation}, expected a value in"
        " [-1, 2]; 0.5 is usual, 2 is never."
      )


SchedulerConfig = GroupFCFS | Divided | ContextAware | Oracle | LongestGroupFirst
