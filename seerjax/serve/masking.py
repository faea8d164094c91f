"""Which answers a visit goes on with: those whose masks are there, and what is waited for.

    tokens --> `follow`: masks are asked for --> `hold`: a short wait --> Engine.hold(the others)

Whoever has no grammar, or whose mask is there, is not kept waiting by one whose mask takes long:
that answer grows by no token until its mask has come. No bit depends on it.
"""

from __future__ import annotations

from collections.abc import Mapping
import time

from seerjax.engine.engine import Engine
from seerjax.serve.grammar import AnswerMask

# Of the time that steps take, what may be waited for masks beside rows that need none.
SHARE = 0.06
MOST_SAVED_SECONDS = 0.03
# Where nothing else can go on, between two looks at what else there is to do.
PATIENCE_SECONDS = 0.01


class Masking:
  """The masks of the answers of one engine, on its thread."""

  def __init__(self, engine: Engine):
    self._engine = engine
    self._is_holding = False
    self._saved = MOST_SAVED_SECONDS  # Of the share.

  def spent(self, seconds: float) -> None:
    """Takes note of a step."""
    self._saved = min(MOST_SAVED_SECONDS, self._saved + SHARE * seconds)

  def hold(self, masks: Mapping[str, AnswerMask], num_others: int) -> bool:
    """Waits for masks, and holds the answers whose masks have not come.

    Args:
      masks: by request; those that have failed are the caller's to end.
      num_others: requests that have none.

    Returns:
      Whether a step has something to do.
    """
    if not masks:
      if self._is_holding:
        self._engine.hold(())
        self._is_holding = False
      return True
    compilers = {mask.compiler: None for mask in masks.values()}
    for compiler in compilers:
      compiler.gather(0)
    begun = time.monotonic()
    while waiting := [mask for mask in masks.values() if mask.is_awaited]:
      is_alone = not num_others and len(waiting) == len(masks)
      quick = [compiler for compiler in compilers if compiler.awaits_quick]
      left = (PATIENCE_SECONDS if is_alone else self._saved) - (time.monotonic() - begun)
      if left <= 0 or not (quick or is_alone):
        break
      for compiler in quick or compilers:
        compiler.gather(left)
    held = [name for name, mask in masks.items() if not mask.is_ready]
    if len(held) < len(masks) or num_others:
      self._saved = max(0.0, self._saved - (time.monotonic() - begun))
    self._engine.hold(held)
    self._is_holding = bool(held)
    return bool(num_others) or len(held) < len(masks)
