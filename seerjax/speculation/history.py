"""Earlier completions by prompt, from which a repeated prompt drafts.

Epochs and evaluations repeat prompts. A few completions are kept per digest of the prompt, as plain
tokens of 4 bytes each; a tree would take hundreds. They are added to a group's tree when the group
first drafts, together with the texts of its own requests.

Completions become outdated as the policy changes: a text is dropped after a number of later
completions, and the oldest are dropped when there is no room. A new process starts without history,
which costs drafts but never affects results.

Source: DAS (arXiv 2511.13841) drafts rollouts from those of recent epochs. No clock, no JAX.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
import dataclasses
import hashlib

import numpy as np

from seerjax import fields

# Newest completions kept per prompt: the usual size of a group.
TEXTS_PER_PROMPT = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class HistoryConfig:
  """Limits of the history.

  Attributes:
    max_bytes: maximum size of all texts, 4 bytes per token; 0 disables the history.
    max_age: number of later completions after which one is dropped.
  """

  max_bytes: int = 2**26
  max_age: int = 2**16

  def __post_init__(self):
    fields.check(
      self,
      max_bytes=fields.at_least(0, f"{HistoryConfig.max_bytes} is usual, 0 is off"),
      max_age=fields.at_least(1, f"{HistoryConfig.max_age} is usual"),
    )


class History:
  """The newest completions by prompt.

  Attributes:
    config: limits.
    num_bytes: size of all stored texts.
    num_found: number of lookups that found earlier completions.
  """

  def __init__(self, config: HistoryConfig | None = None):
    self.config = HistoryConfig() if config is None else config
    self.num_bytes = self.num_found = 0
    self._num_added = 0
    # By prompt, oldest first: (number of the completion, text).
    self._texts: dict[bytes, collections.deque[tuple[int, np.ndarray]]] = {}
    # All completions, including dropped ones, oldest first: (number, prompt).
    self._order: collections.deque[tuple[int, bytes]] = collections.deque()

  def __len__(self) -> int:
    return sum(map(len, self._texts.values()))

  def texts(self, prompt: Sequence[int], namespace: str = "") -> tuple[np.ndarray, ...]:
    """Returns a namespace's completions of a prompt, i32[n] each, oldest first."""
    if not self._texts:
      return ()
    found = self._texts.get(_digest(prompt, namespace), ())
    self.num_found += bool(found)
    return tuple(text for _, text in found)

  def add(self, prompt: Sequence[int], text: Sequence[int], namespace: str = "") -> None:
    """Stores a completion.

    Args:
      prompt: tokens.
      text: tokens to draft from: the completion, preceded by the end of the prompt.
      namespace: only lookups in the same namespace find it.
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
    """Drops the oldest text of a prompt."""
    texts = self._texts[name]
    self.num_bytes -= texts.popleft()[1].nbytes
    if not texts:
      del self._texts[name]


def _digest(prompt: Sequence[int], namespace: str) -> bytes:
  tokens = np.asarray(prompt, np.int32).tobytes()
  key = hashlib.sha256(namespace.encode("utf-8", "surrogatepass")).digest() if namespace else b""
  return hashlib.blake2b(tokens, digest_size=16, key=key).digest()
