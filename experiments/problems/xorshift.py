"""Random bits in compiled functions: Vigna's xorshift64* with state u64[1], never 0.

Source: Vigna 2016, https://arxiv.org/abs/1402.6246.
"""

from __future__ import annotations

import numpy as np

from seerjax import compiled


@compiled.function
def bits(state: np.ndarray) -> int:
  """Advances the state; returns the next 64 bits, u64; the upper ones are the most random."""
  x = state[0]
  x ^= x >> np.uint64(12)
  x ^= x << np.uint64(25)
  x ^= x >> np.uint64(27)
  state[0] = x
  return x * np.uint64(0x2545F4914F6CDD1D)
