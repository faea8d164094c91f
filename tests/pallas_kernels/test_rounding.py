"""Products that are rounded before they are added: the same in the interpreter and in PTX."""

from __future__ import annotations

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
from kernel_arrays import needs_interpreter
import numpy as np
import pytest

from pallas_kernels import gpu, rounding

SHAPE = (64, 128)


def sums(layout, shape, *, rounded: bool = True, interpret: bool = False):
  """Returns a kernel of x * y + z in `layout`; `rounded`, or as the compilers like it."""

  def body(x_ref, y_ref, z_ref, out_ref):
    x, y, z = (gpu.load(ref, layout) for ref in (x_ref, y_ref, z_ref))
    if rounded:
      out_ref[...] = rounding.product(x, y, layout=layout, interpret=interpret) + z
    else:
      out_ref[...] = x * y + z

  return gpu.kernel(
    body,
    name="sums",
    out_type=jax.ShapeDtypeStruct(shape, jnp.float32),
    scratch={},
    num_blocks=1,
    interpret=interpret,
  )


@needs_interpreter
def test_the_interpreter_rounds_twice(seed):
  rng = np.random.default_rng(seed)
  x, y = rng.standard_normal((2, *SHAPE)).astype(np.float32)
  # Of the product's magnitude, so that its last bits, which rounding drops, decide the sum's.
  z = -(x * y) * rng.choice(np.float32([1, 0.5, 0.99]), SHAPE)
  found = sums(rounding.TILE, SHAPE, interpret=True)(x, y, z)
  np.testing.assert_array_equal(found, x * y + z)
  # The twin: a sum that is rounded once, as a fused one is, differs.
  once = (x.astype(np.float64) * y + z).astype(np.float32)
  assert (np.asarray(found) != once).any()


@pytest.mark.parametrize(
  "layout, shape",
  [
    (rounding.TILE, SHAPE),
    (rounding.ROWS, SHAPE[:1]),
    (plgpu.Layout.WG_STRIDED((128,), vec_size=1), (128,)),
  ],
)
def test_ptx_is_told_to_round_in_every_layout(layout, shape):
  x = jax.ShapeDtypeStruct(shape, jnp.float32)
  assert "mul.rn.f32" in gpu.lower_for_cuda(sums(layout, shape), x, x, x)
  # The twin: a plain product is left to ptxas.
  assert "mul.rn.f32" not in gpu.lower_for_cuda(sums(layout, shape, rounded=False), x, x, x)
