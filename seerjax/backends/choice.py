"""Which implementation runs: chosen once, from the numerics, so that the fingerprint names it."""

from __future__ import annotations

import dataclasses
import functools

from absl import logging

from seerjax import numerics as numerics_lib
from seerjax.backends.plain import Plain
from seerjax.backends.protocol import Backend
from seerjax.backends.tiled import Tiled


def decided(numerics: numerics_lib.NumericsConfig) -> numerics_lib.NumericsConfig:
  """Returns the numerics with the implementation that "auto" stands for on this machine.

  Raises:
    ValueError: if "native" is asked for by name and cannot run here.
  """
  if numerics.implementation == "auto":
    return dataclasses.replace(numerics, implementation=_of_this_machine())
  if numerics.implementation == "native" and (reason := _reason_against_native()):
    raise ValueError(
      f"NumericsConfig.implementation: got 'native', and {reason}; expected a machine that can run"
      " it: use 'auto', which takes 'tiled' here."
    )
  return numerics


def _of_this_machine() -> numerics_lib.Implementation:
  if reason := _reason_against_native():
    _say_once(f"NumericsConfig.implementation='auto' is 'tiled' here: {reason}.")
    return "tiled"
  return "native"


def _reason_against_native() -> str | None:
  # Imported here: it has a first handler compiled, which another implementation need not wait for.
  from seerjax.backends.native import availability

  return availability.reason_against()


@functools.cache
def _say_once(line: str) -> None:
  logging.warning(line)


def backend_of(numerics: numerics_lib.NumericsConfig) -> Backend:
  """Returns the implementation that the numerics name, or that runs here if they leave it open.

  Raises:
    ValueError: as `decided`.
  """
  numerics = decided(numerics)
  if numerics.uses_kernels:
    # Imported here: what it needs of JAX takes a fifth of a command's start, and no CPU runs it.
    from seerjax.backends.mosaic_gpu import MosaicGpu

    return MosaicGpu(numerics)
  if numerics.implementation == "native":
    # Imported here: numba takes a second, and may be missing where nothing native runs.
    from seerjax.backends.numba_cpu import NumbaCpu

    return NumbaCpu(numerics)
  return Plain(numerics) if numerics.implementation == "untiled" else Tiled(numerics)
