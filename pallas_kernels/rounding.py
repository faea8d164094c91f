"""Products with a specified rounding that compilers cannot fuse.

Mosaic marks every f32 product and sum as contractible, and PTX without `.rn` allows ptxas the same:
x * a + y * b then becomes one product and one fused multiply-add, which rounds once where the
definition rounds twice. Whether and which product is fused depends on the surrounding program and
on the version of ptxas. Two programs that must give the same bits (a fold in registers, and a
second kernel that folds partials from memory) would then agree only by chance.
`lax.optimization_barrier` does not help: Mosaic turns it into empty inline assembly, which ptxas
does not see.

`product` is `mul.rn.f32`, which PTX never contracts. A sum of such products needs nothing more,
because an addition is only fused with a product that feeds it. The rule for every kernel here: a
product that feeds a sum in a contract (merges of splits, of shards, of parts of a vocabulary or of
a row) is a `product`; all other products stay plain and may be fused.

The interpreter on a CPU computes the same; there a barrier does prevent the fusion.

Source: PTX ISA, https://docs.nvidia.com/cuda/parallel-thread-execution/, floating-point `mul`:
sequences of mul and add may be fused if no rounding is specified, and are kept if it is.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax
from jax.experimental.mosaic import gpu as mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu

# Register layouts of a warpgroup: the result f32[64 i, 8 j] of a wgmma, and one value per row.
TILE = plgpu.Layout.WGMMA
ROWS = plgpu.Layout.WGMMA.reduce(1)


def product(x: jax.Array, y: jax.Array, *, layout: Any, interpret: bool) -> jax.Array:
  """Returns x * y rounded to f32, which is never fused with a sum.

  It has no gradient; kernels define their own.

  Args:
    x: f32[...], in registers, not a constant: Mosaic has no layout for constants here.
    y: f32[...], of the same shape, also not a constant.
    layout: register layout of all three: `TILE` or `ROWS` for wgmma results, else
      `plgpu.Layout.WG_STRIDED(shape, vec_size)`. Mosaic converts operands with another layout.
    interpret: whether the kernel is interpreted.
  """
  if interpret:
    return lax.optimization_barrier(x * y)

  def multiply(context, a, b):
    del context
    return a._pointwise(mosaic.FragmentedArray._lift_fast_instr("mul.rn.f32"), b)

  return plgpu.inline_mgpu(
    arg_types=(layout, layout),
    return_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=layout),
  )(multiply)(x, y)
