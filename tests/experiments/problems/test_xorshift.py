"""The random generator of compiled functions, against integers of any size."""

from __future__ import annotations

import numpy as np

from experiments.problems import xorshift

MASK = 2**64 - 1


def test_bits_are_those_of_the_formula(seed: int):
  state, x = np.array([seed + 1], np.uint64), seed + 1
  for _ in range(50):
    x ^= x >> 12
    x = (x ^ x << 25) & MASK
    x ^= x >> 27
    assert int(xorshift.bits(state)) == x * 2685821657736338717 & MASK and int(state[0]) == x
