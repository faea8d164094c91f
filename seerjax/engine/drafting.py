"""What the engine asks of a drafter: guesses at the next tokens of requests.

A draft is verified by the request's own sampling: it is accepted as far as it equals what is
sampled anyway.

  draft    d1 d2 d3            rows of one segment: the last token, d1, d2, d3
  sampled  y1 y2 y3 y4         y is drawn by (request, position) alone, never by the draft
  answer   y1 .. y(m + 1)      m = how many of d1, d2, ... equal y1, y2, ... before the first that
                               does not; y(m + 1) is the bonus, or the correction

So a drafter changes how many steps a text takes and nothing else, whatever it guesses.

Several paths are one tree (`token_tree`): what they share is one row, and is sampled once. Its key
is written to the pages of each path, so that every path has its keys at their own positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import itertools
from typing import Any, NamedTuple, Protocol, runtime_checkable

from absl import logging
import numpy as np

from seerjax.types import Request, SamplingParams

MAX_PATHS = 64  # Of one request in one step; more are not read.


def group_name(request: Request) -> str:
  """Returns the name under which a drafter knows a request's group, "" for none of no namespace.

  Whatever a drafter learns under a name it drafts from under that name, or one of `namespace_of`
  equal, alone.
  """
  if not request.namespace:
    return request.group_id
  return f"\0{request.namespace}\0{request.group_id}"


def namespace_of(group_name: str) -> str:
  """Returns the namespace in a group's name, "" for none."""
  return group_name.split("\0")[1] if group_name.startswith("\0") else ""


def is_group(group_name: str) -> bool:
  """Returns whether a name is that of a group, and not of requests that have none."""
  return bool(group_name) and not group_name.endswith("\0")


class DraftQuery(NamedTuple):
  """One request that is about to sample its next token.

  Attributes:
    request_id: of the request.
    group_id: of its group, "" if it has none; in a namespace `group_name`.
    tokens: prompt and answer so far; the engine's own list, which grows, not to be changed.
    num_prompt: how many of `tokens` are the prompt.
    max_draft: most tokens that could be used, all paths together, what they share counted once; at
      least 1.
    seed: of the request: with a position it decides the noise that the target samples with.
    sampling: how the request is sampled.
  """

  request_id: str
  group_id: str
  tokens: list[int]
  num_prompt: int
  max_draft: int
  seed: int = 0
  sampling: SamplingParams = SamplingParams()


@runtime_checkable
class Hearer(Protocol):
  """A drafter that draws on texts of requests which another engine answers."""

  def hear(
    self,
    request_id: str,
    group_id: str,
    prompt: Sequence[int],
    start: int,
    answer: Sequence[int],
  ) -> bool:
    """Takes tokens of a request's answer, from its place `start` on.

    Returns:
      Whether they follow what is here of it; others are dropped, which costs drafts and no bit.
    """
    ...


@runtime_checkable
class Drafter(Protocol):
  """Guesses continuations. Called in the same order on every process."""

  def draft(self, queries: Sequence[DraftQuery]) -> Sequence[Sequence[Sequence[int]]]:
    """Returns paths of token ids for each query, none or more; the first is the likeliest.

    Asked once a visit (`Engine.step`): where nothing is drafted, a request may get several tokens
    before the next. The engine cuts what it has no rows, pages, key copies or vocabulary for, the
    last leaves first. A drafter that guesses nothing at all may return ().
    """
    ...

  def observe(
    self, request_id: str, group_id: str, num_drafted: int, num_accepted: int
  ) -> None:
    """Hears what came of a request's draft, if any of it was verified.

    Args:
      request_id: of the request.
      group_id: of its group.
      num_drafted: length of the path that held furthest.
      num_accepted: its tokens that were accepted.
    """
    ...

  def finish(
    self, request_id: str, group_id: str, tokens: Sequence[int], num_prompt: int
  ) -> None:
    """Hears that a request is over.

    Args:
      request_id: of the request.
      group_id: of its group.
      tokens: prompt and answer.
      num_prompt: how many of `tokens` are the prompt.
    """
    ...


def checked(
  drafts: Sequence[Sequence[Sequence[int]]],
  queries: Sequence[DraftQuery],
  vocab_size: int,
) -> list[list[tuple[int, ...]]]:
  """Returns a drafter's paths as plain ids, each cut at what is no id and at what can be used.

  Raises:
    ValueError: if there are paths for another number of requests, or something that is no token.
    Exception: whatever else what a drafter returned raises when it is read.
  """
  if not len(drafts):
    return []
  if len(drafts) != len(queries):
    raise ValueError(
      f"Drafter.draft: got paths for {len(drafts)} requests, expected them for {len(queries)}, or"
      " none at all; return [] for a request that has no guess."
    )
  found = []
  for paths, query in zip(drafts, queries, strict=True):
    plain = []
    for path in itertools.islice(paths, MAX_PATHS):
      ids = tuple(itertools.islice(path, query.max_draft))
      for place, token in enumerate(ids):
        if type(token) is not int and not isinstance(token, int | np.integer):
          raise ValueError(
            f"Drafter.draft: got {token!r} ({type(token).__name__}) for request"
            f" {query.request_id!r}, expected token ids; return whole numbers."
          )
        if not 0 <= token < vocab_size:
          ids = ids[:place]
          break
      plain.append(ids)
    found.append(plain)
  return found


class Drafting:
  """The drafter of one engine.

  Attributes:
    drafter: None drafts nothing.
  """

  def __init__(self, drafter: Drafter | None):
    self.drafter = drafter

  def ask(self, ask: Callable[[Drafter], Any]) -> Any:
    """Returns the drafter's answer; None without a drafter. One that fails is not asked again."""
    if self.drafter is None:
      return None
    try:
      return ask(self.drafter)
    except Exception as error:
      logging.warning(
        "Engine.drafter: got %s (%s) from %s, expected token ids for each request; it is not asked"
        " again, and all answers stay the same: mend it, and set Engine.drafter anew.",
        type(error).__name__, error, type(self.drafter).__name__, exc_info=error,
      )  # fmt: skip
      self.drafter = None
      return None

  def paths(
    self, queries: Sequence[DraftQuery], vocab_size: int
  ) -> Sequence[list[tuple[int, ...]]]:
    """Returns `checked` drafts for each query; () where there is nothing to be drafted."""
    if not queries:
      return ()
    return self.ask(lambda drafter: checked(drafter.draft(queries), queries, vocab_size)) or ()


class Verified(NamedTuple):
  """What became of the drafts of one request in a step.

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
  """Returns the outcome of several paths.

  Args:
    paths: one or more; `()` is plain decoding.
    sampled: for each, its samples, see `accepted`; paths have those of what they share in common.

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
