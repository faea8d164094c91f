"""The scheduler: selects the next request to run a chunk, and its instance.

    buffer (waiting requests) + instances (free resources) --next--> Decision, until None

It uses no JAX, clock or randomness: equal calls give equal decisions on every process, and the
simulator runs the same code. The policy's queue orders the waiting requests.

Source: arXiv 2511.14617v3, sections 3.2 and 3.3, algorithm 2; OSDI '26 for cache-aware routing.
"""

from __future__ import annotations

from seerjax.rollout.buffer import Buffer, Item
from seerjax.rollout.instances import Decision, Instances, num_pages
from seerjax.rollout.policies import Policy


class Scheduler:
  """Decides what runs next; reads a buffer without changing it.

  while (decision := scheduler.next(instances)) is not None:
    buffer.begin_chunk(decision.request_id, decision.instance, decision.max_chunk_tokens)
    instances.admit(decision)
  """

  def __init__(self, policy: Policy, buffer: Buffer):
    self.buffer = buffer
    self.num_decisions = 0
    self._queue = policy.queue()

  def next(self, instances: Instances) -> Decision | None:
    """Returns the next decision, or None until a request ends or arrives.

    Apply each decision before the next call.

    Raises:
      ValueError: if a request can never fit.
    """
    for item in self.buffer.take_changes():
      if item.num_chunks == 0:
        _require_fits(item, instances)
      self._queue.update(item)
    # The usual reason for None: no free slot or no free page.
    if max(instances.room) <= 0:
      return None
    decision = self._queue.decide(instances)
    self.num_decisions += decision is not None
    return decision

  def estimate(self, group: str) -> int:
    """Returns the policy's estimate of the lengths in a group, in generated tokens.

    Policies without estimates return `max_tokens`.
    """
    return self._queue.estimate(self.buffer.groups[group])


def _require_fits(item: Item, instances: Instances) -> None:
  needed = num_pages(item.prompt_tokens + item.max_tokens - 1, instances.page_size)
  if needed > max(instances.num_pages):
    raise ValueError(
      f"scheduler: got request {item.request_id!r} of {item.prompt_tokens} + {item.max_tokens}"
      f" tokens, which needs {needed} pages, expected at most {max(instances.num_pages)}, all pages"
      " of an instance; give instances more pages, or lower max_tokens."
    )
