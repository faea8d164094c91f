"""Scheduling policies: which request runs its next chunk, and on which instance.

Each policy is a frozen record of settings. A queue (`rollout.queues`) orders the requests, and
routing (`rollout.routing`) selects the instance.

Source: arXiv 2511.14617v3, sections 3.2 and 3.3, algorithm 2; OSDI '26 for cache-aware routing.
`LongestGroupFirst` goes beyond the source.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses

from seerjax import fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupFCFS:
  """The common baseline: whole groups, whole requests, first come first served.

  Groups are assigned to instances round robin, in order of arrival. A request is admitted as soon
  as its *current* KV fits, and runs to its end. When pages run out, the caller preempts the request
  that was admitted last on that instance (`Buffer.lost_kv`), which then restarts before later ones.

  Attributes:
    reserves: admit only if the KV of all `max_tokens` fits, so that nothing is ever preempted.
  """

  reserves: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class ByPrefix:
  """Routes by longest cached prefix while load is balanced, else to the least loaded instance.

  Attributes:
    max_spread: maximum difference in running requests at which load counts as balanced.
  """

  max_spread: int = 32

  def __post_init__(self):
    fields.check(self)
    if self.max_spread < 0:
      raise ValueError(
        f"ByPrefix: got max_spread={self.max_spread}, expected at least 0; for example 32."
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ByRoom:
  """Routes to the instance with most free pages, or to that of its KV if it has nearly as many.

  The variable cost of an instance's step is proportional to the KV it reads, so this balances step
  times, which equal numbers of requests do not.
  """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Divided:
  """Chunks instead of whole requests, in order of arrival, on any instance.

  Attributes:
    chunk_tokens: maximum tokens of a chunk.
    routing: how to choose among the instances on which the chunk fits.
    min_pull_tokens: if more tokens than this are missing on the chosen instance, their KV is pulled
      from another instance; fewer are recomputed.
  """

  chunk_tokens: int = 8192
  routing: ByPrefix | ByRoom = ByPrefix()
  min_pull_tokens: int = 512

  def __post_init__(self):
    fields.check(self)
    if self.chunk_tokens < 1 or self.min_pull_tokens < 0:
      raise ValueError(
        f"{type(self).__name__}: got chunk_tokens={self.chunk_tokens},"
        f" min_pull_tokens={self.min_pull_tokens}, expected at least 1 and 0; the source uses 8192"
        " and 512."
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContextAware(Divided):
  """Algorithm 2: probes first, shortest first; then by largest group estimate.

  The estimate of a group is its longest finished request, or `max_tokens` if none has finished.
  """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Oracle(Divided):
  """Longest request first by true lengths: the result of perfect estimates. Simulation only.

  Attributes:
    lengths: generated tokens by request id.
  """

  lengths: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongestGroupFirst(Divided):
  """Like `Divided` until lengths within groups prove similar; then the longest group first.

  If lengths within groups are not similar, which request is long is chance, and any order other
  than arrival loses as often as it wins. So requests are scheduled as in `Divided`, routing
  included, as long as the measured similarity is low. It is measured on the groups that arrived
  first, from their finished requests and the current lengths of the others (`rollout.likeness`).
  Once it is at least `min_correlation` (after subtracting its standard error), while many requests
  still wait and have never run, the order switches to that of algorithm 2 with better estimates:

  - the first requests of all groups go first, shortest first, so that every group is probed;
  - then the group with the largest estimate: its longest finished member, but at least the current
    length of every unfinished one; `max_tokens` if none has finished.

  Occasionally the oldest request goes first (`queues.FAIR_EVERY`), to prevent starvation.

  Attributes:
    routing: used after the switch, and always with 16 instances or more; otherwise `ByPrefix()`.
    min_correlation: threshold on the similarity of whole lengths; 2 never switches.
  """

  chunk_tokens: int = 2048
  routing: ByPrefix | ByRoom = ByRoom()
  min_correlation: float = 0.5

  def __post_init__(self):
    super().__post_init__()
    if not -1 <= self.min_correlation <= 2:
      raise ValueError(
        f"LongestGroupFirst: got min_correlation={self.min_correlation}, expected a value in [-1,"
        " 2]; 0.5 is usual, 2 disables it."
      )


SchedulerConfig = GroupFCFS | Divided | ContextAware | Oracle | LongestGroupFirst
