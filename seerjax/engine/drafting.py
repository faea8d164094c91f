"""Interface between the engine and a drafter, and exact verification of drafts.

A draft is verified by the request's own sampling: it is accepted as long as it equals the tokens
that are sampled anyway.

  draft    d1 d2 d3            rows of one segment: the last token, d1, d2, d3
  sampled  y1 y2 y3 y4         y depends on (request, position) alone, never on the draft
  output   y1 .. y(m + 1)      m = number of leading d1, d2, ... that equal y1, y2, ...;
                               y(m + 1) is the bonus, or the correction

So a drafter changes how many steps a text takes and nothing else, whatever it guesses.

Several paths form one tree (`token_tree`): a shared token is one row and is sampled once. Its key
is written to the pages of each path, so that every path has its keys at their own positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import itertools
from typing import Any, NamedTuple, Protocol, runtime_checkable

from absl import logging
import numpy as np

from seerjax.types import Request, SamplingParams

MAX_PATHS = 64  # Per request and step; further paths are ignored.


def group_name(request: Request) -> str:
  """Returns a group's name for drafters, which includes the namespace; "" without either.

  A drafter uses data that it collected under a name only for that name, or for names with an equal
  `namespace_of`.
  """
  if not request.namespace:
    return request.group_id
  return f"\0{request.namespace}\0{request.group_id}"


def namespace_of(group_name: str) -> str:
  """Returns the namespace in a group's name, "" for none."""
  return group_name.split("\0")[1] if group_name.startswith("\0") else ""


def is_group(group_name: str) -> bool:
  """Returns whether a name belongs to a group, rather than to requests without one."""
  return bool(group_name) and not group_name.endswith("\0")


class DraftQuery(NamedTuple):
  """One request that is about to sample its next token.

  Attributes:
    request_id: id of the request.
    group_id: `group_name` of the request: its group, "" if it has none, with the namespace.
    tokens: prompt and response so far; the engine's own growing list, which must not be modified.
    num_prompt: number of prompt tokens in `tokens`.
    max_draft: maximum useful tokens over all paths, shared tokens counted once; at least 1.
    seed: seed of the request; with the position it determines the noise of the target's sample.
    sampling: sampling parameters of the request.
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
  """A drafter that also learns from responses that another engine generates."""

  def hear(
    self,
    request_id: str,
    group_id: str,
    prompt: Sequence[int],
    start: int,
    answer: Sequence[int],
  ) -> bool:
    """Adds tokens of a request's response, starting at its index `start`.

    Returns:
      Whether the tokens continue the known ones; otherwise they are dropped, which costs drafts
      but changes no bit.
    """
    ...


@runtime_checkable
class Drafter(Protocol):
  """Guesses continuations. Called in the same order on every process."""

  def draft(self, queries: Sequence[DraftQuery]) -> Sequence[Sequence[Sequence[int]]]:
    """Returns paths of token ids for each query, none or more; the likeliest one first.

    Called once a visit (`Engine.step`); without a draft, a request may get several tokens before
    the next call. The engine cuts paths for lack of rows, pages or key copies, last leaves first,
    and at ids outside the vocabulary. A drafter without any guess may return ().
    """
    ...

  def observe(self, request_id: str, group_id: str, num_drafted: int, num_accepted: int) -> None:
    """Reports the verification of a request's draft, if any of it was verified.

    Args:
      request_id: id of the request.
      group_id: as in `DraftQuery`.
      num_drafted: length of the path with the longest acceptance.
      num_accepted: number of its accepted tokens.
    """
    ...

  def finish(self, request_id: str, group_id: str, tokens: Sequence[int], num_prompt: int) -> None:
    """Reports that a request has ended.

    Args:
      request_id: id of the request.
      group_id: as in `DraftQuery`.
      tokens: prompt and response.
      num_prompt: number of prompt tokens in `tokens`.
    """
    ...


def checked(
  drafts: Sequence[Sequence[Sequence[int]]],
  queries: Sequence[DraftQuery],
  vocab_size: int,
) -> list[list[tuple[int, ...]]]:
  """Returns a drafter's paths as plain ids, cut at invalid ids and at `max_draft` tokens.

  Raises:
    ValueError: if the number of requests differs, or a path contains something other than whole
      numbers.
    Exception: any error from iterating over the drafter's result.
  """
  if not len(drafts):
    return []
  if len(drafts) != len(queries):
    raise ValueError(
      f"Drafter.draft: got paths for {len(drafts)} requests, expected paths for {len(queries)}, or"
      " for none; return [] for a request without a draft."
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
    drafter: None disables drafting.
  """

  def __init__(self, drafter: Drafter | None):
    self.drafter = drafter

  def ask(self, ask: Callable[[Drafter], Any]) -> Any:
    """Returns the result of a drafter call; None without a drafter. A failure disables it."""
    if self.drafter is None:
      return None
    try:
      return ask(self.drafter)
    except Exception as error:
      logging.warning(
        "Engine.drafter: got %s (%s) from %s, expected token ids for each request; the drafter is"
        " disabled, and responses do not change: fix it, and set Engine.drafter again.",
        type(error).__name__, error, type(self.drafter).__name__, exc_info=error,
      )  # fmt: skip
      self.drafter = None
      return None

  def paths(
    self, queries: Sequence[DraftQuery], vocab_size: int
  ) -> Sequence[list[tuple[int, ...]]]:
    """Returns `checked` drafts for each query; () if there are no queries or no drafts."""
    if not queries:
      return ()
    return self.ask(lambda drafter: checked(drafter.draft(queries), queries, vocab_size)) or ()


class Verified(NamedTuple):
  """Outcome of verifying the drafts of one request in a step.

  Attributes:
    path: index of the path with the longest acceptance; the first of equals.
    num_accepted: number of its accepted tokens.
    tokens: the accepted tokens and the bonus token.
  """

  path: int
  num_accepted: int
  tokens: tuple[int, ...]


def accepted(path: Sequence[int], sampled: Sequence[int]) -> int:
  """Returns the number of accepted tokens of a path.

  Args:
    path: k drafted tokens.
    sampled: k + 1 tokens: the target's samples after the context and after each drafted token.

  Raises:
    ValueError: if `sampled` does not have exactly one more token than `path`.
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
    sampled: samples of each path, see `accepted`; paths have equal samples for shared tokens.

  Raises:
    ValueError: if there is no path, or the numbers of paths or samples do not match.
  """
  if not paths or len(paths) != len(sampled):
    raise ValueError(
      f"verify: got {len(paths)} paths and {len(sampled)} lists of samples, expected equal numbers,"
      " at least 1; plain decoding is the path ()."
    )
  counts = [accepted(path, samples) for path, samples in zip(paths, sampled)]
  best = counts.index(max(counts))
  return Verified(best, counts[best], tuple(sampled[best][: counts[best] + 1]))
