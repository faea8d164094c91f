"""Requirements of all kernels on the GPU, the JAX version and the interpreter.

A kernel is one Mosaic GPU program for Hopper (compute capability 9.0). The same program can be used
in three ways: it runs on the GPU; `interpret=True` runs it on a CPU, where a data race is an error
(on JAX 0.11, a printed message); under `h200()` a machine without a GPU lowers it for one, which
checks layouts and shared memory.

Source: https://docs.jax.dev/en/latest/pallas/gpu/reference.html.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import math
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import device as device_lib
from pallas_kernels.device import SHARED_MEMORY_LIMIT_BYTES

# Used by Mosaic itself, for sums over the four warps of a warpgroup.
REDUCTION_SCRATCH_BYTES = 128 * 4 * 4
# Alignment of every buffer in shared memory.
BUFFER_ALIGNMENT_BYTES = 1024
BARRIER_BYTES = 8
# Limits of a TMA copy: maximum elements along each axis; rows are a multiple of these bytes.
TMA_LIMIT = 256
TMA_ROW_BYTES = 16
# The interpreter runs blocks one after the other: two are enough to test a persistent grid.
INTERPRETED_MULTIPROCESSORS = 2
HOPPER = ("H100", "H200", "H800", "H20", "GH200")


@dataclasses.dataclass(frozen=True)
class Buffer:
  """An array in shared memory; `swizzled` is the layout for wgmma and conflict-free TMA."""

  shape: tuple[int, ...]
  dtype: Any
  swizzled: bool = False

  @property
  def num_bytes(self) -> int:
    size = math.prod(self.shape) * jnp.dtype(self.dtype).itemsize
    return -(-size // BUFFER_ALIGNMENT_BYTES) * BUFFER_ALIGNMENT_BYTES

  def allocation(self) -> Any:
    if not self.swizzled:
      return plgpu.SMEM(self.shape, self.dtype)
    itemsize = jnp.dtype(self.dtype).itemsize
    swizzle = plgpu.find_swizzle(self.shape[-1] * itemsize * 8)
    # pyright mistakes a protocol's default methods for abstract ones here.
    tiling = plgpu.TilingTransform((8, swizzle // itemsize))  # pyright: ignore[reportAbstractUsage]
    pattern = plgpu.SwizzleTransform(swizzle)  # pyright: ignore[reportAbstractUsage]
    return plgpu.SMEM(self.shape, self.dtype, transforms=(tiling, pattern))


@dataclasses.dataclass(frozen=True)
class Barriers:
  """Barriers in shared memory; each opens after `num_arrivals` arrivals."""

  num_arrivals: int = 1
  num_barriers: int = 1

  @property
  def num_bytes(self) -> int:
    return self.num_barriers * BARRIER_BYTES

  def allocation(self) -> Any:
    return plgpu.Barrier(num_arrivals=self.num_arrivals, num_barriers=self.num_barriers)


Scratch = Mapping[str, Buffer | Barriers]


def shared_memory_bytes(scratch: Scratch) -> int:
  """Returns the shared memory of a block with this scratch, including Mosaic's own."""
  barriers = sum(s.num_bytes for s in scratch.values() if isinstance(s, Barriers))
  buffers = sum(s.num_bytes for s in scratch.values() if isinstance(s, Buffer))
  reserved = REDUCTION_SCRATCH_BYTES + barriers
  return buffers + -(-reserved // BUFFER_ALIGNMENT_BYTES) * BUFFER_ALIGNMENT_BYTES


def shared_memory_reason(scratch: Scratch, change: str) -> str | None:
  """Returns None if the scratch fits in a block, else a sentence with the excess.

  Args:
    scratch: scratch of one block.
    change: names of the fields that reduce it.
  """
  needed = shared_memory_bytes(scratch)
  if needed <= SHARED_MEMORY_LIMIT_BYTES:
    return None
  return (
    f"got {needed} bytes of shared memory, expected at most {SHARED_MEMORY_LIMIT_BYTES};"
    f" make {change} smaller"
  )


def deepest_ring(scratch: Callable[[int], Scratch], most: int) -> int:
  """Returns the maximum number of stages, up to `most`, that fit in a block; at least 2."""
  for stages in range(most, 2, -1):
    if shared_memory_bytes(scratch(stages)) <= SHARED_MEMORY_LIMIT_BYTES:
      return stages
  return 2


def check_config(
  config: Any, choices: Mapping[str, Sequence[Any]], least: Mapping[str, int]
) -> None:
  """Validates the fields of a kernel's Config against choices and minima.

  Raises:
    ValueError: naming the field, its value and the allowed values.
  """
  for name, allowed in choices.items():
    if getattr(config, name) not in allowed:
      raise ValueError(f"got {name}={getattr(config, name)}; expected one of {allowed}.")
  for name, smallest in least.items():
    if getattr(config, name) < smallest:
      raise ValueError(f"got {name}={getattr(config, name)}; expected at least {smallest}.")


def refuse(kernel: str, reason: str | None) -> None:
  """Raises an error if there is a reason why a kernel cannot run.

  Raises:
    NotImplementedError: with the kernel's name and the reason.
  """
  if reason is not None:
    raise NotImplementedError(f"{kernel}: {reason}.")


def device_reason(interpret: bool) -> str | None:
  """Returns None if a kernel can run or be lowered here, else the reason as a sentence."""
  if interpret:
    if hasattr(plgpu, "InterpretGPUParams"):
      return None
    return (
      f"got interpret=True with JAX {jax.__version__}, expected JAX 0.11.1 or later, where the GPU"
      " interpreter is public; upgrade JAX (which needs Python 3.12)"
    )
  abstract = jax.sharding.get_abstract_mesh().abstract_device
  if abstract is not None:
    if any(name in abstract.device_kind for name in HOPPER):
      return None
    got = f"got the abstract device {abstract.device_kind!r}"
    return f"{got}, {device_lib.EXPECTED}; {device_lib.ADVICE}"
  platform = jax.devices()[0].platform
  if platform != "gpu":
    return f"got the platform {platform!r}, {device_lib.EXPECTED}; {device_lib.ADVICE}"
  return device_lib.reason_against(device_lib.facts())


def num_multiprocessors(interpret: bool) -> int:
  """Returns the number of blocks of a persistent grid. It never affects bits."""
  if interpret:
    return INTERPRETED_MULTIPROCESSORS
  abstract = jax.sharding.get_abstract_mesh().abstract_device
  return jax.devices()[0].core_count if abstract is None else abstract.num_cores


def kernel(
  body: Callable[..., None],
  *,
  name: str,
  out_type: Any,
  scratch: Scratch,
  num_blocks: int,
  interpret: bool,
  approximate: bool = False,
  **threads: Any,
) -> Callable[..., Any]:
  """Returns `body` as a function of arrays, on a grid with one axis named "block".

  Args:
    body: the kernel; takes references to inputs and outputs, and the scratch by name.
    name: name of the kernel in profiles.
    out_type: `jax.ShapeDtypeStruct`, or a tuple of them.
    scratch: scratch of one block.
    num_blocks: length of the grid.
    interpret: run on the CPU, with race detection. It may then be vmapped, as sequential calls,
      which replaces a mesh: the interpreter itself supports one device at a time.
    approximate: use one instruction each for exp2, exp, log, tanh and roots, which treats subnormal
      numbers as zero. Otherwise they need three or more.
    **threads: `num_threads` and `thread_name`, for several warpgroups per block.
  """
  call = plgpu.kernel(
    body,
    out_type=out_type,
    scratch_types={key: item.allocation() for key, item in scratch.items()},
    grid=(num_blocks,),
    grid_names=("block",),
    interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret else None,
    compiler_params=plgpu.CompilerParams(
      lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
      approx_math=approximate,
      reduction_scratch_bytes=REDUCTION_SCRATCH_BYTES,
    ),
    kernel_name=name,
    **threads,
  )
  return jax.custom_batching.sequential_vmap(call) if interpret else call


def load(ref: Any, layout: Any) -> Any:
  """Reads `ref` (shared memory or GMEM) into registers with `layout`."""
  # JAX 0.10 requires an index, 0.12 has none; before 0.12, GMEM is rejected if `optimized`.
  index = ((),) if jax.__version_info__ < (0, 11) else ()
  return plgpu.load(ref, *index, layout=layout, optimized=False)


@contextlib.contextmanager
def h200() -> Iterator[None]:
  """Context manager in which kernels are lowered for an H200, on any machine."""
  device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
  with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
    yield


def lower_for_cuda(function: Callable[..., Any], *args: Any) -> str:
  """Returns the module of `function` lowered for an H200; needs no GPU and does not compile.

  Checks layout inference and the limit of shared memory, but not registers.

  Args:
    function: a function of arrays.
    *args: arrays, or `jax.ShapeDtypeStruct`s instead.
  """
  with h200():
    return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
