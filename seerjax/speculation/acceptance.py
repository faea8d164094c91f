"""Own-sample acceptance: a draft holds as far as it says what the target samples anyway.

  draft    d1 d2 d3            rows of one segment: the last token, d1, d2, d3
  sampled  y1 y2 y3 y4         y is drawn by (request, position) alone, never by the draft
  said     y1 .. y(m + 1)      m = how many of d1, d2, ... equal y1, y2, ... before the first that
                               does not; y(m + 1) is the bonus, or the correction

So the text is the same whatever was drafted. Acceptance *length* counts the bonus token: tokens
said a step. Acceptance *rate* is accepted / drafted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
from typing import NamedTuple


class Verified(NamedTuple):
  """What a step said of one request.

  Attributes:
    path: the path that holds furthest; the first of several.
    num_accepted: its tokens that hold.
    tokens: those and the bonus.
  """

  path: int
  num_accepted: int
  tokens: tuple[int, ...]


def accepted(path: Sequence[int], sampled: Sequence[int]) -> int:
  """Returns how many tokens of a path hold.

  Args:
    path: k drafted tokens.
    sampled: k + 1 tokens: what the target samples after the context and each of them.

  Raises:
    ValueError: if there is not one sample more than there are drafted tokens.
  """
  if len(sampled) != len(path) + 1:
    raise ValueError(
      f"accepted: got {len(sampled)} samples for a draft of {len(path)} tokens, expected"
      f" {len(path) + 1}; sample after the last drafted token too."
    )
  count = 0
  while count < len(path) and path[count] == sampled[count]:
    count += 1
  return count


def verify(paths: Sequence[Sequence[int]], sampled: Sequence[Sequence[int]]) -> Verified:
  """Returns the outcome of several paths, each verified as a segment of its own.

  Args:
    paths: one or more; `()` is plain decoding.
    sampled: for each, its samples; see `accepted`.

  Raises:
    ValueError: if there is no path, or samples do not fit.
  """
  if not paths or len(paths) != len(sampled):
    raise ValueError(
      f"verify: got {len(paths)} paths and samples of {len(sampled)}, expected as many, at least"
      " one; plain decoding is the path ()."
    )
  counts = [accepted(path, samples) for path, samples in zip(paths, sampled)]
  best = counts.index(max(counts))
  return Verified(best, counts[best], tuple(sampled[best][: counts[best] + 1]))


@dataclasses.dataclass
class Acceptance:
  """What came of drafts so far; one step of one request is one entry.

  Attributes:
    num_steps: entries, those without a draft too.
    drafted_at: drafted_at[k]: steps that drafted more than k tokens.
    accepted_at: accepted_at[k]: steps in which more than k held.
    by_references: number of sibling texts known -> (steps, tokens said).
  """

  num_steps: int = 0
  drafted_at: list[int] = dataclasses.field(default_factory=list)
  accepted_at: list[int] = dataclasses.field(default_factory=list)
  by_references: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)

  def add(self, num_drafted: int, num_accepted: int, num_references: int = 0) -> None:
    """Adds one step of one request.

    Raises:
      ValueError: if more was accepted than drafted.
    """
    if not 0 <= num_accepted <= num_drafted:
      raise ValueError(
        f"Acceptance.add: got {num_accepted} accepted of {num_drafted} drafted, expected no more"
        " than were drafted; the bonus token does not count here."
      )
    self.num_steps += 1
    missing = num_drafted - len(self.drafted_at)
    self.drafted_at += [0] * missing
    self.accepted_at += [0] * missing
    for place in range(num_drafted):
      self.drafted_at[place] += 1
      self.accepted_at[place] += place < num_accepted
    steps, tokens = self.by_references.get(num_references, (0, 0))
    self.by_references[num_references] = (steps + 1, tokens + num_accepted + 1)

  @property
  def num_drafted(self) -> int:
    """Drafted tokens."""
    return sum(self.drafted_at)

  @property
  def num_accepted(self) -> int:
    """Accepted tokens, no bonus."""
    return sum(self.accepted_at)

  @property
  def length(self) -> float:
    """Acceptance length: tokens said a step, the bonus included; 1 if there was no step."""
    return 1 + self.num_accepted / max(self.num_steps, 1)

  @property
  def rate(self) -> float:
    """Acceptance rate: accepted / drafted; 0 if nothing was drafted."""
    return self.num_accepted / max(self.num_drafted, 1)

  @property
  def rate_at(self) -> tuple[float, ...]:
    """By position: of the steps that drafted so far, the share that held so far."""
    return tuple(held / drafted for held, drafted in zip(self.accepted_at, self.drafted_at))

  @property
  def length_by_references(self) -> Mapping[int, float]:
    """Number of sibling texts -> acceptance length, ascending."""
    return {n: tokens / steps for n, (steps, tokens) in sorted(self.by_references.items())}
