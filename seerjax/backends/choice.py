"""Which implementation runs: chosen once, from the numerics, so that the fingerprint names it."""

from __future__ import annotations

from seerjax import numerics as numerics_lib
from seerjax.backends.plain import Plain
from seerjax.backends.protocol import Backend
from seerjax.backends.tiled import Tiled


def backend_of(numerics: numerics_lib.NumericsConfig) -> Backend:
  """Returns the implementation that the numerics name."""
  if numerics.uses_kernels:
    # Imported here: what it needs of JAX takes a fifth of a command's start, and no CPU runs it.
    from seerjax.backends.mosaic_gpu import MosaicGpu

    return MosaicGpu(numerics)
  if numerics.implementation == "native":
    # Imported here: numba takes a second, and may be missing where nothing native runs.
    from seerjax.backends.numba_cpu import NumbaCpu

    return NumbaCpu(numerics)
  return Plain(numerics) if numerics.implementation == "untiled" else Tiled(numerics)
