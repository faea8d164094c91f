"""What prompts were answered before: texts that a prompt which comes again drafts from.

Epochs ask the same problems, and so do evaluations. Answers are kept by a digest of the prompt, a
few of each, as tokens alone: 4 bytes each, where a tree takes some hundred. They go into a group's
tree when it first drafts, beside what its own requests say.

Old policies answered otherwise: a text is dropped when so many answers came after it, and the
oldest are dropped where there is no room. A process that starts has none; that costs drafts and no
bit.

Source: DAS (arXiv 2511.13841) drafts rollouts from those of recent epochs. No clock, no JAX.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
import dataclasses
import hashlib

import numpy as np

from seerjax import fields

# Of one prompt, the newest ones: as many as a group has siblings.
TEXTS_PER_PROMPT = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class HistoryConfig:
  """Which answers are remembered.

  Attributes:
    max_bytes: of all texts together, 4 a token; 0 remembers nothing.
    max_age: answers after which one is forgotten.
  """

  max_bytes: int = 2**26
  max_age: int = 2**16

  def __post_init__(self):
    fields.check(self)
    if self.max_bytes < 0 or self.max_age < 1:
      raise ValueError(
        f"HistoryConfig: got max_bytes={self.max_bytes}, max_age={self.max_age}, expected at least"
        f" 0 and 1; {HistoryConfig.max_bytes} and {HistoryConfig.max_age} are usual, max_bytes=0 is"
        " off."
      )


class History:
  """Answers by prompt, the newest ones.

  Attributes:
    config: how many.
    num_bytes: of the texts that are here.
    num_found: prompts that were asked for and had been answered before.
  """

  def __init__(self, config: HistoryConfig | None = None):
    self.config = HistoryConfig() if config is None else config
    self.num_bytes = self.num_found = 0
    self._num_added = 0
    # By prompt, oldest first: (number of the answer, its text).
    self._texts: dict[bytes, collections.deque[tuple[int, np.ndarray]]] = {}
    # Of all answers that are here or were, oldest first: (number, prompt).
    self._order: collections.deque[tuple[int, bytes]] = collections.deque()

  def __len__(self) -> int:
    return sum(map(len, self._texts.values()))

  def texts(self, prompt: Sequence[int], namespace: str = "") -> tuple[np.ndarray, ...]:
    """Returns what a namespace remembers of a prompt, i32[n] each, the oldest first."""
    if not self._texts:
      return ()
    found = self._texts.get(_digest(prompt, namespace), ())
    self.num_found += bool(found)
    return tuple(text for _, text in found)

  def add(self, prompt: Sequence[int], text: Sequence[int], namespace: str = "") -> None:
    """Remembers an answer.

    Args:
      prompt: tokens.
      text: tokens to draft from: the answer, and what of the prompt stands before it.
      namespace: whose; no other finds it.
    """
    if not self.config.max_bytes or not len(text):
      return
    name, tokens = _digest(prompt, namespace), np.asarray(text, np.int32)
    self._num_added += 1
    texts = self._texts.setdefault(name, collections.deque())
    texts.append((self._num_added, tokens))
    self._order.append((self._num_added, name))
    self.num_bytes += tokens.nbytes
    if len(texts) > TEXTS_PER_PROMPT:
      self._drop(name)
    last_kept = self._num_added - self.config.max_age
    while self._order and (
      self.num_bytes > self.config.max_bytes or self._order[0][0] <= last_kept
    ):
      number, oldest = self._order.popleft()
      if (texts := self._texts.get(oldest)) and texts[0][0] == number:
        self._drop(oldest)

  def _drop(self, name: bytes) -> None:
    """Forgets the oldest text of a prompt."""
    texts = self._texts[name]
    self.num_bytes -= texts.popleft()[1].nbytes
    if not texts:
      del self._texts[name]


def _digest(prompt: Sequence[int], namespace: str) -> bytes:
  tokens = np.asarray(prompt, np.int32).tobytes()
  key = hashlib.sha256(namespace.encode("utf-8", "surrogatepass")).digest() if namespace else b""
  return hashlib.blake2b(tokens, digest_size=16, key=key).digest()
