"""Drafters from random to perfect, for tests of code that must not depend on draft quality.

A drafter is any object with these methods (the engine's protocol, `seerjax/engine/drafting`):

  draft(queries) -> for each query, paths of tokens; the first is the main one
  observe(request_id, group_id, num_drafted, num_accepted)
  finish(request_id, group_id, tokens, num_prompt)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import hashlib

from seerjax.engine.drafting import DraftQuery
from seerjax.speculation.suffix_drafter import Paths


def number(*key: object) -> int:
  """Returns a number below 2**64 that depends on `key` only, on every machine."""
  return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little")


class Observed:
  """Records calls of `observe` and `finish`, in order.

  Attributes:
    observations: (request, drafted, accepted) of every verified draft.
    finished: maps a request to its whole completion.
  """

  def __init__(self):
    self.observations: list[tuple[str, int, int]] = []
    self.finished: dict[str, list[int]] = {}

  def observe(self, request_id: str, group_id: str, num_drafted: int, num_accepted: int) -> None:
    assert 0 <= num_accepted <= num_drafted > 0
    self.observations.append((request_id, num_drafted, num_accepted))

  def finish(self, request_id: str, group_id: str, tokens: Sequence[int], num_prompt: int) -> None:
    assert request_id not in self.finished
    self.finished[request_id] = list(tokens[num_prompt:])


class JunkDrafter(Observed):
  """Drafts random tokens in paths of random number and length; some are empty."""

  def __init__(self, seed: int, vocab_size: int, max_paths: int = 1):
    super().__init__()
    self.seed, self.vocab_size, self.max_paths = seed, vocab_size, max_paths

  def draft(self, queries: Sequence[DraftQuery]) -> Sequence[Paths]:
    drafts = []
    for query in queries:
      key = (self.seed, query.request_id, len(query.tokens))
      left, paths = query.max_draft, []
      for path in range(number(*key, "paths") % (self.max_paths + 1)):
        length = number(*key, path) % (left + 1)
        left -= length
        paths.append(tuple(number(*key, path, place) % self.vocab_size for place in range(length)))
      drafts.append(paths)
    return drafts


class OracleDrafter(Observed):
  """Drafts the request's completion, with every token replaced at a given rate.

  Attributes:
    texts: maps a request id to the whole completion.
    error_rate: 0 is always right, 1 always wrong.
    num_right: number of leading tokens of each draft that are never replaced; with `error_rate=1`
      all later tokens are wrong.
  """

  def __init__(
    self,
    texts: Mapping[str, Sequence[int]],
    *,
    vocab_size: int,
    error_rate: float = 0.0,
    num_right: int = 0,
    seed: int = 0,
  ):
    super().__init__()
    self.texts = texts
    self.vocab_size, self.error_rate, self.num_right = vocab_size, error_rate, num_right
    self.seed = seed

  def draft(self, queries: Sequence[DraftQuery]) -> Sequence[Paths]:
    return [[self._path(query)] for query in queries]

  def _path(self, query: DraftQuery) -> tuple[int, ...]:
    start = len(query.tokens) - query.num_prompt
    path = []
    for place, token in enumerate(self.texts[query.request_id][start : start + query.max_draft]):
      draw = number(self.seed, query.request_id, start + place)
      if place >= self.num_right and draw % 2**20 < self.error_rate * 2**20:
        token = (token + 1 + (draw >> 20) % (self.vocab_size - 1)) % self.vocab_size
      path.append(token)
    return tuple(path)
