"""Products that are rounded where the definition says, whatever the compilers make of the rest.

Mosaic marks every f32 product and sum as one that may be contracted, and PTX without `.rn` allows
the same to ptxas: x * a + y * b then becomes one product and one fused multiply-add, which rounds
once where the definition rounds twice. Which of the two products is fused, and whether any is,
depends on the program around and on ptxas' version. So two programs that must give the same bits (a
fold in registers, and a second kernel that folds partials from memory) agree by chance.
`lax.optimization_barrier` does not help: Mosaic makes it empty inline assembly, of which ptxas sees
nothing.

`product` is `mul.rn.f32`, which PTX never contracts. A sum of such products needs nothing more: an
addition is fused only into a product that feeds it. So the rule for every kernel here: a product
that feeds a sum, where that sum is in a contract (merges of splits, of shards, of parts of a
vocabulary or of a row), is a `product`; all other products stay plain, and may be fused.

The interpreter on a CPU computes the same: there a barrier does keep the two apart.

Source: PTX ISA, https://docs.nvidia.com/cuda/parallel-thread-execution/, `mul` of floating point:
sequences of mul and add may be fused where no rounding is named, and are kept where it is.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax
from jax.experimental.mosaic import gpu as mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu

# How a warpgroup holds the result f32[64 i, 8 j] of a wgmma, and f32[64 i], one value a row of it.
TILE = plgpu.Layout.WGMMA
ROWS = plgpu.Layout.WGMMA.reduce(1)


def product(x: jax.Array, y: jax.Array, *, layout: Any, interpret: bool) -> jax.Array:
  """Returns x * y rounded to f32, which is never fused into a sum.

  It has no gradient: kernels have their own.

  Args:
    x: f32[...], in registers, and no constant: Mosaic has no layout for one here.
    y: f32[...], of the same shape, likewise.
    layout: how registers hold all three, `TILE` or `ROWS` where wgmma decides it; else
      `plgpu.Layout.WG_STRIDED(shape, vec_size)`. Where an operand lies otherwise, Mosaic moves it.
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
