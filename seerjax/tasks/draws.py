"""Reproducible random integers, derived from SHA-256.

Problems are a pure function of (task, split, index). Neither numpy nor `random` guarantees the same
numbers across versions, so tasks draw with `Draws`.
"""

from __future__ import annotations

from collections.abc import Sequence
import hashlib
from typing import TypeVar

T = TypeVar("T")


class Draws:
  """A stream of integers determined by the given names, on every machine and version.

  Draw number i is the first 8 bytes of SHA-256("name/name/.../i"). For example
  `Draws("word_problems", "train", 7).below(10)` is the same digit everywhere.
  """

  def __init__(self, *names: object):
    self._prefix = "/".join(str(name) for name in names).encode() + b"/"
    self._count = 0

  def below(self, limit: int) -> int:
    """Returns an integer in [0, limit); bias is below limit / 2**64."""
    if limit < 1:
      raise ValueError(f"Draws.below: got limit={limit}, expected at least 1; raise the limit.")
    digest = hashlib.sha256(self._prefix + str(self._count).encode()).digest()
    self._count += 1
    return (int.from_bytes(digest[:8], "big") * limit) >> 64

  def between(self, low: int, high: int) -> int:
    """Returns an integer in [low, high], both ends included."""
    return low + self.below(high - low + 1)

  def chance(self, probability: float) -> bool:
    """Returns True with this probability, rounded to a millionth."""
    return self.below(1_000_000) < round(probability * 1_000_000)

  def choice(self, items: Sequence[T]) -> T:
    """Returns one of `items`."""
    return items[self.below(len(items))]

  def sample(self, items: Sequence[T], count: int) -> list[T]:
    """Returns `count` distinct elements of `items`, in drawn order."""
    pool = list(items)
    return [pool.pop(self.below(len(pool))) for _ in range(count)]
