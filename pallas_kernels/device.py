"""Properties of a GPU and its software as plain values, and reasons why kernels cannot use them.

`facts` is computed once per process; `reason_against` is a function of these values, so that other
machines can be checked too. This module does not import Pallas.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import importlib.util
import pathlib
import re
import shutil
import subprocess

import jax

# Shared memory of one block on Hopper, 227 KiB.
SHARED_MEMORY_LIMIT_BYTES = 232_448
COMPUTE_CAPABILITY = "9.0"
ADVICE = "run on an H100 or H200, or pass interpret=True to run the kernel slowly on a CPU"
EXPECTED = "expected an NVIDIA GPU of compute capability 9.0 (Hopper)"
# JAX's packages for NVIDIA GPUs, newest CUDA first; one of the pairs is installed.
PLUGINS = (
  ("jax-cuda13-plugin", "jax-cuda13-pjrt"),
  ("jax-cuda12-plugin", "jax-cuda12-pjrt"),
)
# Location of ptxas in wheels, below the package `nvidia`, and in CUDA's installation.
WHEELS = ("cu13/bin/ptxas", "cuda_nvcc/bin/ptxas")
INSTALLED = pathlib.Path("/usr/local/cuda/bin/ptxas")
DRIVER = pathlib.Path("/proc/driver/nvidia/version")
SECONDS = 30  # Timeout of a program that prints its version.
UNKNOWN = "unknown"


@dataclasses.dataclass(frozen=True)
class Fault:
  """A known miscompilation of NVIDIA's assembler.

  Attributes:
    first: first affected version of ptxas.
    mended: first fixed version.
    what: the construct that it miscompiles.
    cuda: the CUDA release of `mended`.
  """

  first: tuple[int, ...]
  mended: tuple[int, ...]
  what: str
  cuda: str


# Sources: XLA's own warning (xla/stream_executor/cuda/ptx_compiler_helpers.cc; the release in
# https://github.com/jax-ml/jax/pull/25091), and the refusal in JAX's attention for Hopper
# (jax/experimental/pallas/ops/gpu/attention_mgpu.py).
FAULTS = (
  Fault((12, 0), (12, 6, 85), "limits of indices", "12.6.3"),
  Fault((12, 8), (12, 9, 86), "causal masks", "12.9.1"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
  """Properties of a device and its software; `UNKNOWN` or () if not available.

  Attributes:
    kind: kind of the device in JAX, such as "NVIDIA H200".
    compute_capability: such as "9.0"; for GPUs of other vendors, the vendor's term.
    shared_memory_bytes: maximum shared memory of one block; 0 if unknown.
    ptxas: version of the assembler, such as (13, 0, 88).
    plugin: JAX's plugin, with its version.
    driver: version of the driver.
  """

  kind: str
  compute_capability: str
  shared_memory_bytes: int = 0
  ptxas: tuple[int, ...] = ()
  plugin: str = UNKNOWN
  driver: str = UNKNOWN


def reason_against(facts: Facts) -> str | None:
  """Returns None if the kernels run on such a device, else the reason as a sentence."""
  if facts.compute_capability != COMPUTE_CAPABILITY:
    capability = f"compute capability {facts.compute_capability}"
    return f"got {facts.kind} of {capability}, {EXPECTED}; {ADVICE}"
  if 0 < facts.shared_memory_bytes < SHARED_MEMORY_LIMIT_BYTES:
    return (
      f"got {facts.kind} with {facts.shared_memory_bytes} bytes of shared memory per block,"
      f" expected {SHARED_MEMORY_LIMIT_BYTES}, as on Hopper; {ADVICE}"
    )
  for fault in FAULTS:
    if fault.first <= facts.ptxas < fault.mended:
      return (
        f"got ptxas {version_text(facts.ptxas)}, which miscompiles {fault.what}, expected"
        f" {version_text(fault.mended)} (CUDA {fault.cuda}) or later; upgrade CUDA's compiler"
        " (pip install -U nvidia-cuda-nvcc-cu12), or JAX to its plugin for CUDA 13"
      )
  return None


def version_text(version: tuple[int, ...]) -> str:
  """Returns a version as text such as "13.0.88"; `UNKNOWN` for ()."""
  return ".".join(map(str, version)) or UNKNOWN


@functools.cache
def facts() -> Facts:
  """Returns the properties of this process's first device, a GPU, and of its software."""
  first = jax.devices()[0]
  return Facts(
    kind=first.device_kind,
    compute_capability=str(first.compute_capability),
    shared_memory_bytes=(
      first.shared_memory_per_block_optin if hasattr(first, "shared_memory_per_block_optin") else 0
    ),
    ptxas=ptxas_version(_ptxas_text()) or cuda_version(first.client.platform_version),
    plugin=_plugin(),
    driver=driver_version(_driver_text()),
  )


def ptxas_version(text: str) -> tuple[int, ...]:
  """Parses the output of `ptxas --version`, such as (13, 0, 88); () if there is no version."""
  found = re.search(r"\bV(\d+)\.(\d+)\.(\d+)", text)
  return tuple(map(int, found.groups())) if found else ()


def cuda_version(text: str) -> tuple[int, ...]:
  """Parses CUDA's version in the platform version of JAX's plugin: "cuda 13000" is (13, 0)."""
  found = re.search(r"\bcuda (\d+)", text)
  return divmod(int(found.group(1)) // 10, 100) if found else ()


def driver_version(text: str) -> str:
  """Parses the version in `DRIVER`, or in the output of nvidia-smi; `UNKNOWN` if there is none."""
  found = re.search(r"(?<![\w.])\d+\.\d+(\.\d+)?(?![\w.])", text)
  return found.group() if found else UNKNOWN


def _ptxas_text() -> str:
  """Returns the version output of the ptxas that XLA uses; "" if it uses the plugin's own.

  XLA looks in the wheel, on PATH and in CUDA's installation directory, and uses the first.
  """
  spec = importlib.util.find_spec("nvidia")
  packages = [] if spec is None else list(spec.submodule_search_locations or ())
  paths = [pathlib.Path(package) / name for package in packages for name in WHEELS]
  if on_path := shutil.which("ptxas"):
    paths.append(pathlib.Path(on_path))
  found = next((path for path in [*paths, INSTALLED] if path.is_file()), None)
  return _said(str(found), "--version") if found else ""


def _driver_text() -> str:
  if DRIVER.is_file():
    return DRIVER.read_text()
  return _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def _said(*command: str) -> str:
  """Returns the output of a program; "" if it does not exist or fails."""
  try:
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=SECONDS)
  except (OSError, subprocess.SubprocessError):
    return ""
  return done.stdout


def _plugin() -> str:
  for names in PLUGINS:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
  return UNKNOWN
