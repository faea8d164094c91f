"""The request buffer of a rollout: each request's progress and the location of its KV.

    add -> WAITING --begin_chunk--> RUNNING --end_chunk--> WAITING -> ... -> FINISHED
                   <---lost_kv-----

A chunk is a bounded part of one request's generation. Between two chunks a request waits in the
buffer, and any instance may run the next one.

Source: arXiv 2511.14617v3, section 3.2 (the request buffer).
"""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
import enum

NOWHERE = -1  # Instance of a request that is not running, or of missing KV.


class State(enum.IntEnum):
  """State of a request."""

  WAITING = 0
  RUNNING = 1
  FINISHED = 2


@dataclasses.dataclass(slots=True, eq=False)
class Group:
  """The requests of one prompt.

  Attributes:
    name: name of the group.
    index: order of arrival, from 0.
    max_tokens: maximum over the members.
    members: members by arrival; the first is the probe.
    prompt_instances: instances on which a member has run. They may still hold the prompt's KV; this
      is only a hint, because another request may have taken the memory since.
  """

  name: str
  index: int
  max_tokens: int = 0
  members: list[Item] = dataclasses.field(default_factory=list)
  prompt_instances: set[int] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(slots=True, eq=False)
class Item:
  """State of one request. Read-only outside `Buffer`.

  Attributes:
    request_id: unique in its buffer.
    group: group of the request.
    member: index in the group, from 0; 0 is the probe.
    index: order of arrival, from 0.
    prompt_tokens: length of the prompt.
    max_tokens: maximum number of generated tokens, over all chunks.
    generated: tokens generated so far.
    state: waiting, running or finished.
    instance: instance that is running it, or NOWHERE.
    kv_instance: instance that holds its KV, on the device or spilled to its host, or NOWHERE.
    kv_tokens: number of positions with KV there.
    chunk_end: upper bound on `generated` at the end of the running chunk.
    num_chunks: chunks started so far.
    num_lost: how often its KV was lost.
    version: incremented on each change; queue entries with an older version are stale.
  """

  request_id: str
  group: Group
  member: int
  index: int
  prompt_tokens: int
  max_tokens: int
  generated: int
  state: State = State.WAITING
  instance: int = NOWHERE
  kv_instance: int = NOWHERE
  kv_tokens: int = 0
  chunk_end: int = 0
  num_chunks: int = 0
  num_lost: int = 0
  version: int = 0


def kv_positions(item: Item) -> int:
  """Returns the number of positions with KV that a request has once it runs."""
  # The last token's KV is written when that token is the input of the next step.
  return item.prompt_tokens + max(item.generated - 1, 0)


class Buffer:
  """All requests of a rollout; requests may be added while others run.

  A buffer has a single reader, its scheduler, which takes the changes since its last call
  (`take_changes`).
  """

  def __init__(self):
    self.items: dict[str, Item] = {}
    self.groups: dict[str, Group] = {}
    self.num_waiting = 0
    self.num_running = 0
    self.num_finished = 0
    self._changes: dict[Item, None] = {}  # An ordered set.

  @property
  def num_unfinished(self) -> int:
    """Number of waiting and running requests."""
    return self.num_waiting + self.num_running

  def __iter__(self) -> Iterator[Item]:
    return iter(self.items.values())

  def __getitem__(self, request_id: str) -> Item:
    return self._item(request_id)

  def add(
    self, request_id: str, group: str, *, prompt_tokens: int, max_tokens: int, generated: int = 0
  ) -> Item:
    """Adds a waiting request; the first of a group is the group's probe.

    Args:
      request_id: unique id.
      group: name of its group; a group may grow at any time.
      prompt_tokens: length of the prompt, at least 1.
      max_tokens: maximum number of generated tokens.
      generated: tokens that a journal already contains; their KV is missing.

    Raises:
      ValueError: if the id exists already, or a length is out of range.
    """
    if request_id in self.items:
      raise ValueError(
        f"buffer: got request {request_id!r} twice, expected unique ids; name requests by step,"
        " group and member."
      )
    if prompt_tokens < 1 or not 0 <= generated < max_tokens:
      raise ValueError(
        f"buffer: got prompt_tokens={prompt_tokens}, generated={generated}, max_tokens={max_tokens}"
        f" for request {request_id!r}, expected prompt_tokens >= 1 and 0 <= generated < max_tokens;"
        " leave finished requests out."
      )
    home = self.groups.setdefault(group, Group(group, len(self.groups)))
    item = Item(
      request_id, home, len(home.members), len(self.items), prompt_tokens, max_tokens, generated
    )
    home.members.append(item)
    home.max_tokens = max(home.max_tokens, max_tokens)
    self.items[request_id] = item
    self.num_waiting += 1
    self._changes[item] = None
    return item

  def begin_chunk(self, request_id: str, instance: int, max_chunk_tokens: int) -> None:
    """Marks a waiting request as running on an instance, for up to `max_chunk_tokens` more tokens.

    Its KV is on that instance from now on: kept, pulled, or prefilled.

    Raises:
      ValueError: if it is not waiting, or the chunk is longer than its remaining tokens.
    """
    item = self._in_state(request_id, State.WAITING, "begin_chunk")
    left = item.max_tokens - item.generated
    if instance < 0 or not 1 <= max_chunk_tokens <= left:
      raise ValueError(
        f"buffer: got a chunk of {max_chunk_tokens} tokens on instance {instance} for request"
        f" {request_id!r}, expected 1 to {left} tokens on an instance >= 0; pass the scheduler's"
        " decision unchanged."
      )
    item.state = State.RUNNING
    item.instance = item.kv_instance = instance
    item.kv_tokens = kv_positions(item)
    item.chunk_end = item.generated + max_chunk_tokens
    item.num_chunks += 1
    item.group.prompt_instances.add(instance)
    self.num_waiting -= 1
    self.num_running += 1
    self._changed(item)

  def progress(self, request_id: str, generated: int) -> None:
    """Updates the length of a running request, which schedulers use as a lower bound.

    Raises:
      ValueError: if it is not running, or `generated` decreases or exceeds the chunk.
    """
    item = self._in_state(request_id, State.RUNNING, "progress")
    self._grow(item, generated)
    self._changed(item)

  def end_chunk(self, request_id: str, generated: int, finished: bool) -> None:
    """Ends a running request's chunk: the request waits for the next one, or is finished.

    The KV of a finished request is dropped at once; that of a waiting one stays in place.

    Raises:
      ValueError: if it is not running, `generated` is out of range, or a request with all its
        tokens is not marked as finished.
    """
    item = self._in_state(request_id, State.RUNNING, "end_chunk")
    if not finished and generated >= item.max_tokens:
      raise ValueError(
        f"buffer: got end_chunk of request {request_id!r} at {generated} of {item.max_tokens}"
        " tokens and finished=False, expected finished=True there; nothing is left to generate."
      )
    self._grow(item, generated)
    item.instance = NOWHERE
    self.num_running -= 1
    if finished:
      item.state = State.FINISHED
      item.kv_instance, item.kv_tokens = NOWHERE, 0
      self.num_finished += 1
    else:
      item.state = State.WAITING
      self.num_waiting += 1
    self._changed(item)

  def lost_kv(self, request_id: str) -> None:
    """Records the loss of an unfinished request's KV.

    A running request is preempted and keeps its tokens.

    Raises:
      ValueError: if it is finished.
    """
    item = self._item(request_id)
    if item.state is State.FINISHED:
      raise self._wrong_state(item, "lost_kv", "waiting or running")
    if item.state is State.RUNNING:
      item.state = State.WAITING
      item.instance = NOWHERE
      self.num_running -= 1
      self.num_waiting += 1
    item.kv_instance, item.kv_tokens = NOWHERE, 0
    item.num_lost += 1
    self._changed(item)

  def moved(self, request_id: str, instance: int) -> None:
    """Records that a waiting request's KV moved to another instance (a spill into free pages).

    Raises:
      ValueError: if it is not waiting or has no KV, or `instance` is negative.
    """
    item = self._in_state(request_id, State.WAITING, "moved")
    if item.kv_instance == NOWHERE or instance < 0:
      raise ValueError(
        f"buffer: got moved({request_id!r}, {instance}) with its KV at {item.kv_instance}, expected"
        " a request with KV and an instance >= 0; call lost_kv if KV is dropped."
      )
    item.kv_instance = instance
    self._changed(item)

  def take_changes(self) -> list[Item]:
    """Returns the requests changed since the last call, each once, in order of first change."""
    changes, self._changes = list(self._changes), {}
    return changes

  def _changed(self, item: Item) -> None:
    item.version += 1
    self._changes[item] = None

  def _grow(self, item: Item, generated: int) -> None:
    if not item.generated <= generated <= item.chunk_end:
      raise ValueError(
        f"buffer: got {generated} generated tokens for request {item.request_id!r}, expected"
        f" {item.generated} to {item.chunk_end} (the chunk's end); report the total over all"
        " chunks."
      )
    item.generated = generated
    item.kv_tokens = kv_positions(item)

  def _item(self, request_id: str) -> Item:
    if request_id not in self.items:
      raise ValueError(
        f"buffer: got the unknown request {request_id!r}, expected one of the {len(self.items)}"
        " added requests; add it first."
      )
    return self.items[request_id]

  def _in_state(self, request_id: str, state: State, call: str) -> Item:
    item = self._item(request_id)
    if item.state is not state:
      raise self._wrong_state(item, call, state.name.lower())
    return item

  def _wrong_state(self, item: Item, call: str, expected: str) -> ValueError:
    return ValueError(
      f"buffer: got {call} of request {item.request_id!r}, which is {item.state.name.lower()},"
      f" expected a {expected} one; apply each decision and each end of a chunk once."
    )
