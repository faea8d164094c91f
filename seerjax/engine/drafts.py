"""What the engine asks of a drafter: guesses at what requests will say next.

A draft is verified by the request's own sampling: at each drafted position the engine samples as it
would have without the draft, and keeps going while what it sampled is what was drafted. So a
drafter changes how many steps a text takes and nothing else, whatever it guesses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable


class DraftQuery(NamedTuple):
  """One request that is about to sample its next token.

  Attributes:
    request_id: of the request.
    group_id: of its group, "" if it has none.
    tokens: prompt and answer so far; the engine's own list, not to be changed.
    num_prompt: how many of `tokens` are the prompt.
    max_draft: most tokens of a path that could be used, at least 1.
  """

  request_id: str
  group_id: str
  tokens: list[int]
  num_prompt: int
  max_draft: int


@runtime_checkable
class Drafter(Protocol):
  """Guesses continuations. Called once a step, in the same order on every process."""

  def draft(self, queries: Sequence[DraftQuery]) -> Sequence[Sequence[Sequence[int]]]:
    """Returns paths of token ids for each query, none or more; the first is the likeliest.

    The engine cuts what it has no rows, pages or vocabulary for.
    """
    ...

  def observe(
    self,
    request_id: str,
    group_id: str,
    new_tokens: Sequence[int],
    num_drafted: int,
    num_accepted: int,
    is_finished: bool,
  ) -> None:
    """Hears what a step said of a request.

    Args:
      request_id: of the request.
      group_id: of its group.
      new_tokens: what was said, at least one token.
      num_drafted: length of the longest path that was verified, 0 if there was none.
      num_accepted: drafted tokens that were said.
      is_finished: whether the request is over.
    """
    ...


def num_accepted(draft: Sequence[int], sampled: Sequence[int]) -> int:
  """Returns how many tokens of a draft are what was sampled in their place."""
  count = 0
  while count < len(draft) and draft[count] == sampled[count]:
    count += 1
  return count
