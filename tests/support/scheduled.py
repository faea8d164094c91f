"""Hand-filled buffers, and helpers that apply a scheduler's decisions, for scheduler tests."""

from __future__ import annotations

from seerjax.rollout.buffer import Buffer
from seerjax.rollout.instances import Decision, Instances
from seerjax.rollout.scheduler import Scheduler


def filled(groups: list[list[int]], *, prompt: int = 4, max_tokens: int = 20) -> Buffer:
  """Returns a buffer with one request per entry, named group/member; the entry is its state."""
  buffer = Buffer()
  for group, members in enumerate(groups):
    for member, generated in enumerate(members):
      buffer.add(
        f"{group}/{member}",
        str(group),
        prompt_tokens=prompt,
        max_tokens=max_tokens,
        generated=generated,
      )
  return buffer


def take(planner: Scheduler, instances: Instances) -> list[Decision]:
  """Applies all decisions until None, and returns them."""
  found = []
  while (decision := planner.next(instances)) is not None:
    planner.buffer.begin_chunk(decision.request_id, decision.instance, decision.max_chunk_tokens)
    instances.admit(decision)
    found.append(decision)
  return found


def end(planner: Scheduler, instances: Instances, decision: Decision, length: int = 10**9) -> None:
  """Ends a chunk when its request has `length` tokens, else at the chunk's end."""
  item = planner.buffer[decision.request_id]
  reached = min(item.chunk_end, length)
  planner.buffer.end_chunk(item.request_id, reached, reached in (length, item.max_tokens))
  instances.release(decision.instance, decision.num_pages)


def names(decisions: list[Decision]) -> list[str]:
  return [decision.request_id for decision in decisions]
