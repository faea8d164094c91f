"""Programs as a speed target: find the schedule that computes the same thing in less time.

`TriMulSpeed`: AlphaFold 3's outgoing triangle multiplication, on whatever device JAX has. With
x f32[n, n, c], mask m[n, n] and hidden size h,

  y = LayerNorm(x)
  a = m (y A) sigmoid(y A'),   b = m (y B) sigmoid(y B'),   g = sigmoid(y G)
  z[i, j] = (LayerNorm(sum over k of a[i, k] b[j, k]) g[i, j]) Z

An artefact is a `Schedule`, which is data: how the five projections are grouped, which axis lies
last, how sums of a norm are taken, and so on. `trimul` builds the program: what is searched is
never code. `TileSpeed` does the same for the tiles of our GPU kernels, against XLA; on a CPU, which
cannot run them, for the same tiles walked in the same order by XLA itself.

  value = median over laps of (time of the plain jitted reference / time of the schedule)

The rules of the race, so that only speed can win it, stand in `rules`.

**This is the one exception to determinism: `verify` times.** Whether a schedule is right is as good
as certain, what it is worth is noisy. A record should count only after `confirm`, which races it
again for longer and takes the lower quartile: an elite kept for one lucky lap would stay for ever.

`schedules` and `trimul` are the one program, `tiles` the kernels', `edits` is the language of both,
`environment` the problems.

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
