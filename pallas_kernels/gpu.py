"""What every kernel here asks of the GPU, of JAX's version and of the interpreter.

A kernel is one Mosaic GPU program for Hopper (compute capability 9.0). The same program takes three
roads: it runs on the GPU; `interpret=True` runs it on a CPU, where a data race is an error (on JAX
0.11, a printed message); under `h200()` a machine without a GPU lowers it for one, which checks
layouts and the shared memory.

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

# Mosaic's own use: room for sums over the four warps of a warpgroup.
REDUCTION_SCRATCH_BYTES = 128 * 4 * 4
# Every buffer in shared memory starts at a multiple of this.
BUFFER_ALIGNMENT_BYTES = 1024
BARRIER_BYTES = 8
# A TMA copy moves at most so many elements along each axis, and rows a multiple of so many bytes.
TMA_LIMIT = 256
TMA_ROW_BYTES = 16
# The interpreter's blocks run one after the other: two are enough to go round a persistent grid.
INTERPRETED_MULTIPROCESSORS = 2
HOPPER = ("H100", "H200", "H800", "H20", "GH200")


@dataclasses.dataclass(frozen=True)
class Buffer:
  """An array in shared memory; `swizzled` is the layout that wgmma reads and conflict-free TMA."""

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
    # pyright takes a protocol's default methods for abstract ones here.
    tiling = plgpu.TilingTransform((8, swizzle // itemsize))  # pyright: ignore[reportAbstractUsage]
    pattern = plgpu.SwizzleTransform(swizzle)  # pyright: ignore[reportAbstractUsage]
    return plgpu.SMEM(self.shape, self.dtype, transforms=(tiling, pattern))


@dataclasses.dataclass(frozen=True)
class Barriers:
  """`num_barriers` barriers in shared memory; each opens after `num_arrivals` arrivals."""

  num_arrivals: int = 1
  num_barriers: int = 1

  @property
  def num_bytes(self) -> int:
    return self.num_barriers * BARRIER_BYTES

  def allocation(self) -> Any:
    return plgpu.Barrier(num_arrivals=self.num_arrivals, num_barriers=self.num_barriers)


Scratch = Mapping[str, Buffer | Barriers]


def shared_memory_bytes(scratch: Scratch) -> int:
  """Returns what a block with this scratch takes, Mosaic's own share included."""
  barriers = sum(s.num_bytes for s in scratch.values() if isinstance(s, Barriers))
  buffers = sum(s.num_bytes for s in scratch.values() if isinstance(s, Buffer))
  reserved = REDUCTION_SCRATCH_BYTES + barriers
  return buffers + -(-reserved // BUFFER_ALIGNMENT_BYTES) * BUFFER_ALIGNMENT_BYTES


def shared_memory_reason(scratch: Scratch, change: str) -> str | None:
  """Returns None if the scratch fits a block, else the sentence that says by how much it does not.

  Args:
    scratch: of one block.
    change: names the fields that make it smaller.
  """
  needed = shared_memory_bytes(scratch)
  if needed <= SHARED_MEMORY_LIMIT_BYTES:
    return None
  return (
    f"got {needed} bytes of shared memory, expected at most {SHARED_MEMORY_LIMIT_BYTES};"
    f" make {change} smaller"
  )


def deepest_ring(scratch: Callable[[int], Scratch], most: int) -> int:
  """Returns the most stages, up to `most`, whose scratch fits a block; 2 where three do not."""
  for stages in range(most, 2, -1):
    if shared_memory_bytes(scratch(stages)) <= SHARED_MEMORY_LIMIT_BYTES:
      return stages
  return 2


def check_config(
  config: Any, choices: Mapping[str, Sequence[Any]], least: Mapping[str, int]
) -> None:
  """Refuses a kernel's Config whose fields are none of their choices, or less than they may be.

  Raises:
    ValueError: that names the field, what it holds and what it may.
  """
  for name, allowed in choices.items():
    if getattr(config, name) not in allowed:
      raise ValueError(f"got {name}={getattr(config, name)}; expected one of {allowed}.")
  for name, smallest in least.items():
    if getattr(config, name) < smallest:
      raise ValueError(f"got {name}={getattr(config, name)}; expected at least {smallest}.")


def refuse(kernel: str, reason: str | None) -> None:
  """Raises the sentence that says why a kernel cannot run, where there is one.

  Raises:
    NotImplementedError: the kernel's name, and the reason.
  """
  if reason is not None:
    raise NotImplementedError(f"{kernel}: {reason}.")


def device_reason(interpret: bool) -> str | None:
  """Returns None if a kernel can run, or be lowered, here; else the sentence that says why not."""
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
  """Returns how many blocks a persistent grid holds at once. It never decides a bit."""
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
  """Returns `body` as a function of arrays, on a grid of one axis named "block".

  Args:
    body: takes references to the inputs, to the outputs, and the scratch by name.
    name: of the kernel, in profiles.
    out_type: `jax.ShapeDtypeStruct`, or a tuple of them.
    scratch: what one block allocates.
    num_blocks: the length of the grid.
    interpret: run on the CPU, with race detection. Then it may be vmapped, one call after the
      other, which stands for a mesh: the interpreter itself knows one device at a time.
    approximate: exp2, exp, log, tanh and roots are one instruction each, which takes and gives no
      subnormal number: zero in its place. Without it they need three or more.
    **threads: `num_threads` and `thread_name`, for several warpgroups a block.
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
  """Reads `ref` into registers of `layout`, from GMEM too."""
  # JAX 0.10 wants an index, 0.12 has none; before 0.12, GMEM is refused if `optimized`.
  index = ((),) if jax.__version_info__ < (0, 11) else ()
  return plgpu.load(ref, *index, layout=layout, optimized=False)


@contextlib.contextmanager
def h200() -> Iterator[None]:
  """Within, kernels are lowered for an H200, on any machine."""
  device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
  with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
    yield


def lower_for_cuda(function: Callable[..., Any], *args: Any) -> str:
  """Returns the lowered module of `function` for an H200; no GPU is needed, and nothing compiles.

  Layout inference and the limit of shared memory are checked; registers are not.

  Args:
    function: of arrays.
    *args: arrays, or `jax.ShapeDtypeStruct`s in their place.
  """
  with h200():
    return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
