"""Describes this machine and tests whether its bits can be trusted, by the self-test.

    seerjax doctor                              float32, with the backend for this machine
    seerjax doctor --compute_dtype=bfloat16     as a run of that type would be computed

Prints versions, devices, the self-test of rows (whether a row's bits depend on its batch) and the
numerics fingerprint of nano. Exit status: 0 if rows are invariant, 1 if not.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
import sys

from absl import flags
import jax

import seerjax
from seerjax import numerics as numerics_lib, parallel
from seerjax.run import command_line, placement, presets, self_test

# Packages to list in a bug report; the versions of the first ones affect bits.
PACKAGES = (
  "jax", "jaxlib", "numba", "numpy", "flax", "optax", "orbax-checkpoint", "tokenizers",
  "safetensors", "gguf", "llguidance", "reasoning-gym",
)  # fmt: skip


def versions() -> dict[str, str]:
  """Returns the versions of the library, of Python and of the installed packages of `PACKAGES`."""
  found = {"seerjax": seerjax.__version__, "python": platform.python_version()}
  for name in PACKAGES:
    try:
      found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      found[name] = "not installed"
  return found


def examine(numerics: numerics_lib.NumericsConfig) -> tuple[bool, str]:
  """Runs the self-test; returns (whether rows are invariant, a text with all that was found).

  Raises:
    ValueError: if the backend does not run on this machine.
  """
  placed = placement.placed("nano", numerics, data_parallel_size=1, tensor_parallel_size=1)
  finding = self_test.measure(placed.numerics)
  devices = jax.devices()
  facts = versions() | {
    "machine": f"{platform.system()} {platform.machine()}",
    "devices": f"{len(devices)} x {devices[0].platform} ({devices[0].device_kind})",
  }
  lines = [f"{name:24s} {value}" for name, value in facts.items()]
  lines += ["", "fingerprint"]
  fingerprint = numerics_lib.fingerprint(placed.numerics)
  lines += [f"  {name:22s} {value}" for name, value in fingerprint.items()]
  lines += ["", f"self-test in {placed.numerics.compute_dtype}: {finding}"]
  return finding.is_invariant, "\n".join(lines)


def main(argv: list[str]) -> None:
  args = flags.FLAGS
  with command_line.refusals():
    command_line.check_arguments(argv)
    parallel.start(parallel.SliceConfig(), num_devices=1)
    numerics = dataclasses.replace(
      presets.main_job().numerics,
      compute_dtype=args.compute_dtype,
      backend=args.backend,
    )
    is_sound, text = examine(numerics)
  print(text)
  sys.exit(0 if is_sound else 1)


def define_flags() -> None:
  """Defines the flags of the command."""
  placement.define_numerics_flags()
