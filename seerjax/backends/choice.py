"""Chooses the backend once, from the numerics, so that the fingerprint names it."""

from __future__ import annotations

import dataclasses
import functools

from absl import logging
import jax

from seerjax import numerics as numerics_lib
from seerjax.backends import layer_support
from seerjax.backends.plain import Plain
from seerjax.backends.protocol import Backend, FullShape
from seerjax.backends.tiled import Tiled


def decided(
  numerics: numerics_lib.NumericsConfig, shape: FullShape | None = None
) -> numerics_lib.NumericsConfig:
  """Returns the numerics with "auto" and the rows of a tile resolved for this machine.

  Args:
    numerics: numerics with a resolved number of slabs, if there is a shape.
    shape: shape of the model; without one, kernels are only checked against the device.

  Raises:
    ValueError: if "native" or kernels are named explicitly and cannot run here, or kernels not this
      model, with the reason, for kernels that of their `is_supported`.
  """
  numerics = numerics_lib.with_row_tile(numerics)
  if numerics.backend == "auto":
    return dataclasses.replace(numerics, backend=_of_this_machine(numerics, shape))
  if numerics.backend == "native" and (reason := _reason_against_native()):
    raise ValueError(
      f"NumericsConfig.backend: got 'native', but {reason}; expected a machine that can run it: use"
      " 'auto', which is 'tiled' here."
    )
  if numerics.uses_kernels and shape is not None:
    if reason := _reason_against_kernels(numerics, shape):
      raise ValueError(
        f"NumericsConfig.backend: got {numerics.backend!r}, but {reason}; expected a"
        " machine, a model and numerics that the kernels support: use 'auto', which falls back to"
        " another backend."
      )
  return numerics


def _of_this_machine(
  numerics: numerics_lib.NumericsConfig, shape: FullShape | None
) -> numerics_lib.Backend:
  if jax.default_backend() == "gpu":
    chosen, reason = chosen_on_gpu(numerics, shape)
  else:
    reason = _reason_against_native()
    chosen = "tiled" if reason else "native"
  if reason:
    _say_once(f"NumericsConfig.backend='auto' is {chosen!r} here: {reason}.")
  return chosen


def chosen_on_gpu(
  numerics: numerics_lib.NumericsConfig, shape: FullShape | None
) -> tuple[numerics_lib.Backend, str]:
  """Returns what "auto" resolves to on a GPU, and why not to "pallas"; "" if it does.

  Args:
    numerics: numerics with a resolved number of slabs, if there is a shape.
    shape: shape of the model; None checks the device alone.
  """
  if numerics.compute_dtype != "bfloat16":
    return "tiled", f"the kernels multiply bfloat16, and compute_dtype is {numerics.compute_dtype}"
  kernels = dataclasses.replace(numerics, backend="pallas")
  reason = _reason_against_kernels(kernels, shape)
  return ("tiled", reason) if reason else ("pallas", "")


def _reason_against_native() -> str | None:
  # Imported here: it compiles a first handler, for which other backends need not wait.
  from seerjax.backends.native import availability

  return availability.reason_against()


def _reason_against_kernels(
  numerics: numerics_lib.NumericsConfig, shape: FullShape | None
) -> str | None:
  if found := layer_support.beyond_dense(shape):
    return f"{found}, which the kernels do not compute"
  # Imported here, as in `backend_of`.
  from seerjax.backends import kernel_support

  return kernel_support.reason_against(numerics, shape)


@functools.cache
def _say_once(line: str) -> None:
  logging.warning(line)


def backend_of(numerics: numerics_lib.NumericsConfig) -> Backend:
  """Returns the backend that numerics name; they come from `decided`."""
  assert numerics.backend != "auto" and numerics.row_tile, f"got open {numerics}"
  if numerics.uses_kernels:
    # Imported here: its JAX imports take a fifth of a command's start, and no CPU needs it.
    from seerjax.backends.mosaic_gpu import MosaicGpu

    return MosaicGpu(numerics)
  if numerics.backend == "native":
    # Imported here: numba takes a second to import, and may be missing where nothing native runs.
    from seerjax.backends.numba_cpu import NumbaCpu

    return NumbaCpu(numerics)
  return Plain(numerics) if numerics.backend == "untiled" else Tiled(numerics)
