"""Selects the requests that the next step advances: those without a pending grammar mask.

    tokens --AnswerMask.ask--> worker computes --hold: a short wait--> Engine.hold(requests without)

A request with a slow mask does not delay requests without a grammar or with a ready mask: it gets
no token until its mask has arrived. This changes timing only, never bits.
"""

from __future__ import annotations

from collections.abc import Mapping
import time

from seerjax.engine.engine import Engine
from seerjax.serve.grammar import AnswerMask

# Share of the step time that may be spent waiting for masks while rows without one are running.
SHARE = 0.06
MOST_SAVED_SECONDS = 0.03
# Longest wait when nothing else can advance, before other work is checked again.
PATIENCE_SECONDS = 0.01


class Masking:
  """Mask scheduling for the requests of one engine, on the engine thread."""

  def __init__(self, engine: Engine):
    self._engine = engine
    self._is_holding = False
    self._saved = MOST_SAVED_SECONDS  # Unused part of the share.

  def spent(self, seconds: float) -> None:
    """Accounts for the duration of a step."""
    self._saved = min(MOST_SAVED_SECONDS, self._saved + SHARE * seconds)

  def hold(self, masks: Mapping[str, AnswerMask], num_others: int) -> bool:
    """Waits for masks, and holds the requests without a ready mask.

    Args:
      masks: masks by request id; the caller ends requests with a failed mask.
      num_others: number of requests without a mask.

    Returns:
      Whether a step has anything to do.
    """
    if not masks:
      if self._is_holding:
        self._engine.hold(())
        self._is_holding = False
      return True
    compilers = {mask.compiler: None for mask in masks.values()}
    for compiler in compilers:
      compiler.gather(0)
    start = time.monotonic()
    while waiting := [mask for mask in masks.values() if mask.is_awaited]:
      is_alone = not num_others and len(waiting) == len(masks)
      quick = [compiler for compiler in compilers if compiler.awaits_quick]
      left = (PATIENCE_SECONDS if is_alone else self._saved) - (time.monotonic() - start)
      if left <= 0 or not (quick or is_alone):
        break
      for compiler in quick or compilers:
        compiler.gather(left)
    held = [name for name, mask in masks.items() if not mask.is_ready]
    if len(held) < len(masks) or num_others:
      self._saved = max(0.0, self._saved - (time.monotonic() - start))
    self._engine.hold(held)
    self._is_holding = bool(held)
    return bool(num_others) or len(held) < len(masks)
