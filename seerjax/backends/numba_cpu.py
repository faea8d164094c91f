"""The native CPU implementation: handlers that numba compiles, with bits by construction.

A product's output is one chain of fused multiply-adds in ascending k, a sum is 16 partial sums and
a tree, exp and log are polynomials of IEEE operations (`native`): a row's bits know nothing of
tiles, batches, buckets or threads. Where a mesh may shard a contraction a slab has its own chain.
"""

from __future__ import annotations

import dataclasses

from seerjax.array_typing import Array
from seerjax.backends.native import rotation
from seerjax.backends.tiled import Tiled
from seerjax.ops import rotary


@dataclasses.dataclass(frozen=True)
class NumbaCpu(Tiled):
  """See `protocol.Backend`."""

  def turns(
    self, config: rotary.RotaryConfig, positions: Array, num_rows: Array
  ) -> tuple[Array, Array]:
    cos, sin = rotation.table_rows(config, positions, num_rows)
    return cos, sin
