"""Schedules, inputs and a small kernel-speed problem that several tests use."""

from __future__ import annotations

from experiments.problems import kernel_speed
from experiments.problems.kernel_speed import trimul

SIZE, DIM, HIDDEN = 8, 16, 24
TINY = kernel_speed.TriMulSpeed(SIZE, dim=DIM, hidden=HIDDEN, laps=3)
PLAIN = TINY.start(0)
# The contraction needs the feature axis first; after it no layout changes.
FEATURES = {
  **PLAIN, "layout": "features", "output_layout": "features", "contraction": "batched",
}  # fmt: skip
LANGUAGE = TINY.language


def drawn(seed: int, kind: str = "masked") -> trimul.Inputs:
  return trimul.draw(seed, kind, size=SIZE, dim=DIM, hidden=HIDDEN)
