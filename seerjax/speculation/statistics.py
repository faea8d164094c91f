"""Acceptance statistics of drafts, by position and by number of available sibling texts.

Acceptance *length* includes the bonus token: tokens sampled per step. Acceptance *rate* is accepted
/ drafted. Verification of drafts: `engine.drafting`.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses


@dataclasses.dataclass
class Acceptance:
  """Acceptance statistics; each step of each request that may draft is one entry.

  Attributes:
    num_steps: number of entries, including those without a draft.
    drafted_at: drafted_at[k]: steps that drafted more than k tokens.
    accepted_at: accepted_at[k]: steps in which more than k tokens were accepted.
    by_references: number of sibling texts -> (steps, tokens sampled).
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
        f"Acceptance.add: got {num_accepted} accepted of {num_drafted} drafted, expected at most"
        " the number drafted; the bonus token does not count here."
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
    """Adds the statistics of another record."""
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
    """Returns the statistics so far and resets them."""
    found = dataclasses.replace(self)
    self.num_steps, self.drafted_at, self.accepted_at, self.by_references = 0, [], [], {}
    return found

  @property
  def num_drafted(self) -> int:
    """Number of drafted tokens."""
    return sum(self.drafted_at)

  @property
  def num_accepted(self) -> int:
    """Accepted tokens, without bonus tokens."""
    return sum(self.accepted_at)

  @property
  def length(self) -> float:
    """Acceptance length: tokens sampled per step, including the bonus; 1 without steps."""
    return 1 + self.num_accepted / max(self.num_steps, 1)

  @property
  def rate(self) -> float:
    """Acceptance rate: accepted / drafted; 0 without drafted tokens."""
    return self.num_accepted / max(self.num_drafted, 1)

  @property
  def rate_at(self) -> tuple[float, ...]:
    """By position: share of steps with acceptance there, among steps that drafted that far."""
    return tuple(held / drafted for held, drafted in zip(self.accepted_at, self.drafted_at))

  @property
  def length_by_references(self) -> Mapping[int, float]:
    """Number of sibling texts -> acceptance length, ascending."""
    return {n: tokens / steps for n, (steps, tokens) in sorted(self.by_references.items())}
