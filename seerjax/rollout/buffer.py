"""The global view of a rollout: what every request has generated, and where its KV lies.

    add -> WAITING --begin_chunk--> RUNNING --end_chunk--> WAITING -> ... -> FINISHED
                   <---lost_kv-----

A chunk is a bounded piece of one request's generation. Between two chunks a request waits here, and
any instance may run the next one.

Source: arXiv 2511.14617v3, section 3.2 (the request buffer).
"""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
import enum

NOWHERE = -1  # The instance of a request that runs nowhere, or has no KV.


class State(enum.IntEnum):
  """Where a request is."""

  WAITING = 0
  RUNNING = 1
  FINISHED = 2


@dataclasses.dataclass(slots=True, eq=False)
class Group:
  """The requests of one prompt.

  Attributes:
    name: of the group.
    index: by arrival, from 0.
    members: by arrival; the first is the probe.
    prompt_instances: those where a member has run, so that the prompt's KV may lie there: a hint,
      for another request may have taken the memory since.
    max_tokens: the largest of its members'.
  """

  name: str
  index: int
  max_tokens: int = 0
  members: list[Item] = dataclasses.field(default_factory=list)
  prompt_instances: set[int] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(slots=True, eq=False)
class Item:
  """One request, as far as it has come. Read it; `Buffer` writes it.

  Attributes:
    request_id: unique in its buffer.
    group: of the prompt.
    member: place in the group, from 0; 0 is the probe.
    index: by arrival, from 0.
    prompt_tokens: length of the prompt.
    max_tokens: most generated tokens, over all chunks.
    generated: tokens generated so far.
    state: waiting, running or finished.
    instance: that runs it now, or NOWHERE.
    kv_instance: that holds its KV, on the device or spilled to its host, or NOWHERE.
    kv_tokens: positions whose KV is held there.
    chunk_end: value of `generated` at which the running chunk ends at the latest.
    num_chunks: begun so far.
    num_lost: how often its KV was lost.
    version: counts changes; an entry of a queue that names an older one is stale.
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
  """Returns how many positions a request has KV for, once it runs."""
  # The last token's KV is written when it is fed to the next step.
  return item.prompt_tokens + max(item.generated - 1, 0)


class Buffer:
  """Every request of a rollout; requests may be added while others run.

  One scheduler reads a buffer: it takes the changes (`take_changes`) since it last looked.
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
    """Returns how many requests wait or run."""
    return self.num_waiting + self.num_running

  def __iter__(self) -> Iterator[Item]:
    return iter(self.items.values())

  def __getitem__(self, request_id: str) -> Item:
    return self._item(request_id)

  def add(
    self, request_id: str, group: str, *, prompt_tokens: int, max_tokens: int, generated: int = 0
  ) -> Item:
    """Adds a waiting request; its group's first one is the group's probe.

    Args:
      request_id: unique.
      group: name of its group; a group may grow at any time.
      prompt_tokens: at least 1.
      max_tokens: most generated tokens.
      generated: tokens that a journal already holds; their KV is not here.

    Raises:
      ValueError: if the id is known, or a length is out of range.
    """
    if request_id in self.items:
      raise ValueError(
        f"buffer: got request {request_id!r} twice, expected ids that are unique; name requests by"
        " step, group and member."
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
    """A waiting request runs on an instance, for at most `max_chunk_tokens` more tokens.

    Its KV lies there from now on: kept, pulled, or prefilled.

    Raises:
      ValueError: if it does not wait, or the chunk is longer than what it may still generate.
    """
    item = self._in_state(request_id, State.WAITING, "begin_chunk")
    left = item.max_tokens - item.generated
    if instance < 0 or not 1 <= max_chunk_tokens <= left:
      raise ValueError(
        f"buffer: got a chunk of {max_chunk_tokens} tokens on instance {instance} for request"
        f" {request_id!r}, expected 1 to {left} tokens on an instance from 0; take the scheduler's"
        " decision as it is."
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
    """A running request has come this far; schedulers use it as a lower bound of its length.

    Raises:
      ValueError: if it does not run, or `generated` goes back or beyond the chunk.
    """
    item = self._in_state(request_id, State.RUNNING, "progress")
    self._grow(item, generated)
    self._changed(item)

  def end_chunk(self, request_id: str, generated: int, finished: bool) -> None:
    """A running request's chunk has ended: it waits for the next one, or is finished.

    A finished request's KV is dropped at once; a waiting one's stays where it is.

    Raises:
      ValueError: if it does not run, `generated` is out of the chunk's range, or a request that has
        all its tokens is not finished.
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
    """An unfinished request's KV is gone; one that ran waits (preempted) and keeps its tokens.

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
    """A waiting request's KV lies with another instance now (a spill into its free pages).

    Raises:
      ValueError: if it does not wait, has no KV, or the instance is none.
    """
    item = self._in_state(request_id, State.WAITING, "moved")
    if item.kv_instance == NOWHERE or instance < 0:
      raise ValueError(
        f"buffer: got moved({request_id!r}, {instance}) with its KV at {item.kv_instance}, expected"
        " a request with KV and an instance from 0; call lost_kv where KV is dropped."
      )
    item.kv_instance = instance
    self._changed(item)

  def take_changes(self) -> list[Item]:
    """Returns the requests that changed since the last call, each once, by first change."""
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
        f"buffer: got the unknown request {request_id!r}, expected one of the"
        f" {len(self.items)} that were added; add it first."
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
