"""Program speed: find a schedule that computes the same result in less time.

`TriMulSpeed`: AlphaFold 3's outgoing triangle multiplication, on JAX's default device. With
x f32[n, n, c], mask m[n, n] and hidden size h,

  y = LayerNorm(x)
  a = m (y A) sigmoid(y A'),   b = m (y B) sigmoid(y B'),   g = sigmoid(y G)
  z[i, j] = (LayerNorm(sum over k of a[i, k] b[j, k]) g[i, j]) Z

An artefact is a `Schedule`, which is data: how the five projections are grouped, which axis is
last, how the sums of a norm are computed, and so on. `trimul` builds the program, so the search
never executes generated code. `TileSpeed` does the same for the tiles of our GPU kernels, compared
with XLA. On a CPU, which cannot run them, XLA computes the same tiles in the same order.

  value = median over laps of (time of the plain jitted reference / time of the schedule)

`rules` has the rules of the race, which ensure that only speed can win.

**This is the one exception to determinism: `verify` measures time.** Correctness is practically
certain, but values are noisy. A record should count only after `confirm`, which races it again for
longer and takes the lower quartile: otherwise an elite with one lucky lap would stay for ever.

`schedules` and `trimul` define the first program, `tiles` the kernels' tiles, `edits` the language
of both, `environment` the problems.

Source: Abramson et al. 2024 (AlphaFold 3), https://doi.org/10.1038/s41586-024-07487-w, supplement,
algorithm 12; TTT-Discover, https://arxiv.org/abs/2601.16175, for it as a target.
"""

from __future__ import annotations

from experiments.problems.kernel_speed.environment import (
  TileSpeed,
  TriMulSpeed,
  matmul_tiles,
  rms_norm_tiles,
)

__all__ = ["TileSpeed", "TriMulSpeed", "matmul_tiles", "rms_norm_tiles"]
