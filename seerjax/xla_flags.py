"""XLA flags for reproducible runs on a GPU, set before a backend reads them.

Without them, XLA chooses tilings by timing them at compile time, so that two processes with the
same fingerprint may add in another order, and scatters add in the order of arrival.
"""

from __future__ import annotations

from collections.abc import Callable
import importlib.util
import os
import pathlib
import shutil

VARIABLE = "XLA_FLAGS"
# Each flag with its equivalent values. Source: xla/xla.proto, DebugOptions.
GPU_FLAGS = {
  "--xla_gpu_autotune_level": ("0",),
  "--xla_gpu_deterministic_ops": ("true", "1", ""),
}
PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
DEVICES = pathlib.Path("/dev")


def with_gpu_flags(flags: str) -> str:
  """Returns XLA_FLAGS with the GPU flags last, in one spelling if they were set before.

  Raises:
    ValueError: if one of them is set to another value.
  """
  others = []
  for flag in flags.split():
    name, _, value = flag.partition("=")
    if name not in GPU_FLAGS:
      others.append(flag)
    elif value.lower() not in GPU_FLAGS[name]:
      raise ValueError(
        f"{VARIABLE}: got {flag}, expected {name}={GPU_FLAGS[name][0]} on a GPU, where bits must"
        " not depend on autotuning at compile time; remove it."
      )
  return " ".join([*others, *(f"{name}={values[0]}" for name, values in GPU_FLAGS.items())])


def require_gpu_flags(flags: str) -> None:
  """Refuses XLA_FLAGS with which two processes on equal GPUs may differ.

  Raises:
    ValueError: with the expected flags.
  """
  if flags.split() != with_gpu_flags(flags).split():
    raise ValueError(
      f"{VARIABLE}: got {flags!r} on a GPU, expected {with_gpu_flags(flags)!r} before the first use"
      " of a device: call seerjax.xla_flags.pin(print) at the start of the program."
    )


def given() -> str:
  """Returns the flags that XLA reads from `XLA_FLAGS`: its text, or that of the file it names."""
  flags = os.environ.get(VARIABLE, "").strip()
  is_file = bool(flags) and not flags.startswith("-") and pathlib.Path(flags).is_file()
  return pathlib.Path(flags).read_text() if is_file else os.environ.get(VARIABLE, "")


def takes_gpu(platforms: str, has_plugin: bool, has_device: bool) -> bool:
  """Returns whether JAX will run on an NVIDIA GPU.

  Args:
    platforms: JAX_PLATFORMS, "" if JAX chooses.
    has_plugin: whether JAX's plugin for CUDA is installed.
    has_device: whether the machine has such a GPU.
  """
  if platforms:
    return platforms.split(",")[0] in ("cuda", "gpu")
  return has_plugin and has_device


def pin(say: Callable[[str], None]) -> None:
  """Sets the GPU flags if JAX will run on a GPU, and reports it; otherwise does nothing.

  A backend reads the flags once, when it starts: call this before the first use of a device.

  Args:
    say: receives one line of text.

  Raises:
    ValueError: as `with_gpu_flags`.
  """
  if not takes_gpu(os.environ.get("JAX_PLATFORMS", ""), _has_plugin(), _has_device()):
    return
  before = os.environ.get(VARIABLE, "")
  if (flags := with_gpu_flags(before)) != before:
    os.environ[VARIABLE] = flags
    say(f"on a GPU, {VARIABLE} is now {flags!r}: bits do not depend on autotuning")


def _has_plugin() -> bool:
  # `find_spec` of a dotted name needs the parent package to exist.
  if importlib.util.find_spec("jax_plugins") is None:
    return False
  return any(importlib.util.find_spec(name) is not None for name in PLUGINS)


def _has_device() -> bool:
  return any(DEVICES.glob("nvidia[0-9]*")) or shutil.which("nvidia-smi") is not None
