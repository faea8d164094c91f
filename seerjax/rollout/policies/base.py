"""Scheduling policies: which request runs its next chunk, and on which instance.

A policy is a frozen record of settings that creates a queue, which orders the waiting requests of
one rollout. Policies use no JAX, clock or randomness, so that every process takes equal decisions
and the simulator runs the same code.

Source: arXiv 2511.14617v3, sections 3.2 and 3.3, algorithm 2; OSDI '26 for cache-aware routing.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
import dataclasses
from typing import Protocol, runtime_checkable

from seerjax.rollout.buffer import Group, Item
from seerjax.rollout.instances import Decision, Instances


@runtime_checkable
class Queue(Protocol):
  """The waiting requests of one rollout, in the order of its policy."""

  def update(self, item: Item) -> None:
    """Reads a request that arrived or changed: its state, its length or the place of its KV."""
    ...

  def estimate(self, group: Group) -> int:
    """Returns the estimated length of a group's requests in tokens, at most `max_tokens`."""
    ...

  def decide(self, instances: Instances) -> Decision | None:
    """Returns the next chunk and its instance, or None until a request or an instance changes."""
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy(abc.ABC):
  """Settings of a scheduling policy."""

  @property
  def in_chunks(self) -> bool:
    """Whether requests run in chunks, so that a lost worker costs at most one chunk of each."""
    return True

  @property
  def grows(self) -> bool:
    """Whether running requests get pages one by one; the last admitted one may be preempted."""
    return False

  def knowing(self, lengths: Mapping[str, int]) -> Policy:
    """Returns the policy for a simulation, which knows generated tokens by request id."""
    del lengths
    return self

  @abc.abstractmethod
  def queue(self) -> Queue:
    """Returns a new, empty queue for one rollout."""
