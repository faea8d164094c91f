"""What came of drafts, by position and by how many sibling texts a draft could draw on.

Acceptance *length* counts the bonus token: tokens sampled a step. Acceptance *rate* is accepted /
drafted. How a draft is verified: `engine.drafting`.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses


@dataclasses.dataclass
class Acceptance:
  """What came of drafts so far; one step of one request that might draft is one entry.

  Attributes:
    num_steps: entries, those in which nothing was found to draft too.
    drafted_at: drafted_at[k]: steps that drafted more than k tokens.
    accepted_at: accepted_at[k]: steps in which more than k held.
    by_references: number of sibling texts known -> (steps, tokens sampled).
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

  def include(self, other: Acceptance) -> None:
    """Adds what came of other drafts."""
    most = max(len(self.drafted_at), len(other.drafted_at))
    for mine, theirs in (
      (self.drafted_at, other.drafted_at), (self.accepted_at, other.accepted_at)
    ):  # fmt: skip
      mine += [0] * (most - len(mine))
      for place, count in enumerate(theirs):
        mine[place] += count
    self.num_steps += other.num_steps
    for references, (steps, tokens) in other.by_references.items():
      before = self.by_references.get(references, (0, 0))
      self.by_references[references] = (before[0] + steps, before[1] + tokens)

  def take(self) -> Acceptance:
    """Returns what was counted so far, and begins again with nothing."""
    found = dataclasses.replace(self)
    self.num_steps, self.drafted_at, self.accepted_at, self.by_references = 0, [], [], {}
    return found

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
    """Acceptance length: tokens sampled a step, the bonus included; 1 if there was no step."""
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
