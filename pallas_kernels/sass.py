"""What a function becomes on a Hopper GPU: compiled to SASS on a machine without one.

    function --trace, lower--> StableHLO --XLA--> program of launches --Mosaic, ptxas--> SASS

XLA's road without a device needs JAX's CUDA plugin and `h200.txtpb`, which describes the GPU, but
no driver. ptxas then says how many registers a kernel takes, how many bytes of them it spills to
memory, and whether it had to put products of the tensor core one after the other. Nothing here says
how fast a kernel is; and XLA's choices among its own products are not those of a machine that has a
GPU to time them.

Mosaic writes what it makes into one folder, whose name it asks for when it makes the first kernel
of a process: `use_folder` comes before that. Equal kernels are made once a process, so that each
compilation here begins with empty caches.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping
import dataclasses
import functools
import importlib.util
import os
import pathlib
import re
import shutil
import time
from typing import Any

import jax
from jax.experimental import topologies

from pallas_kernels import gpu

TARGET = pathlib.Path(__file__).with_name("h200.txtpb")
PLUGIN = "jax_cuda13_plugin"
FOLDER = "MOSAIC_GPU_DUMP_TO"
DUMPS = ("MOSAIC_GPU_DUMP_PTX", "MOSAIC_GPU_DUMP_PTXAS", "MOSAIC_GPU_DUMP_SASS")
# Where Mosaic looks for nvdisasm, which a wheel brings.
TOOLS = "MOSAIC_GPU_CUDA_ROOT"
# What ptxas says where it puts products of the tensor core one after the other.
SERIALIZED = ("C7510", "C7511", "C7512")
# What decides the bits of floating-point numbers, of all opcodes.
ARITHMETIC = ("FFMA", "FMUL", "FADD", "FMNMX", "FSEL", "MUFU", "HGMMA", "F2FP", "DFMA", "DADD")


@dataclasses.dataclass(frozen=True)
class Kernel:
  """A Mosaic GPU kernel as ptxas left it.

  Attributes:
    name: of the kernel, as profiles show it.
    num_blocks: the grid.
    num_threads: of a block.
    registers: of a thread, on average where warpgroups have different numbers.
    spill_stores: bytes of registers that a thread writes to memory, in all places of the code.
    spill_loads: the same, read back.
    shared_memory: bytes of a block.
    warnings: of ptxas, each with its number.
    arithmetic: how often each floating-point opcode stands in the code; empty without nvdisasm.
    num_fusible: multiplications whose result goes into an addition or subtraction, both without a
      rounding of their own in PTX: ptxas may make one operation of the two, or not.
  """

  name: str
  num_blocks: int
  num_threads: int
  registers: int
  spill_stores: int
  spill_loads: int
  shared_memory: int
  warnings: tuple[str, ...]
  arithmetic: Mapping[str, int]
  num_fusible: int

  @property
  def num_fused(self) -> int:
    """Multiply-adds that are rounded once."""
    return sum(count for name, count in self.arithmetic.items() if name.split(".")[0] == "FFMA")


@dataclasses.dataclass(frozen=True)
class Compiled:
  """A function, compiled.

  Attributes:
    kernels: in the order in which Mosaic made them; equal ones once.
    program: XLA's text of the program, after all its passes.
    temporary_bytes: of device memory beside arguments and results.
    lowering_seconds: of this process's time, tracing included.
    compile_seconds: the same, of XLA, Mosaic and ptxas.
  """

  kernels: tuple[Kernel, ...]
  program: str
  temporary_bytes: int
  lowering_seconds: float
  compile_seconds: float


def reason_against() -> str | None:
  """Returns None if this Python can compile for a GPU that it does not have, else why it cannot."""
  if importlib.util.find_spec(PLUGIN) is None:
    return (
      f"got no module {PLUGIN}, expected JAX's CUDA plugin beside JAX {jax.__version__}; `bash"
      " launch/gpu_compile.sh` makes an environment that has it"
    )
  return None


def use_folder(folder: pathlib.Path) -> None:
  """Has Mosaic write what it makes into `folder`, for the rest of this process."""
  folder.mkdir(parents=True, exist_ok=True)
  os.environ[FOLDER] = str(folder)
  os.environ.update(dict.fromkeys(DUMPS, "1"))
  spec = importlib.util.find_spec("nvidia")
  for root in (spec.submodule_search_locations or ()) if spec else ():
    for tool in pathlib.Path(root).glob("*/bin/nvdisasm"):
      os.environ[TOOLS] = str(tool.parents[1])


@functools.cache
def _sharding() -> jax.sharding.NamedSharding:
  """One H200, as a mesh that everything lies on."""
  topology = topologies.get_topology_desc(
    platform="cuda", target_config=TARGET.read_text(), topology="1x1x1"
  )
  mesh = topologies.make_mesh(topology, (1,), ("gpu",))
  return jax.sharding.NamedSharding(mesh, jax.P())


def compile_for_hopper(
  function: Callable[..., Any], *args: Any, donated: tuple[int, ...] = ()
) -> Compiled:
  """Compiles `function` for an H200.

  Args:
    function: of arrays, or of trees of them.
    *args: arrays, or `jax.ShapeDtypeStruct`s in their place.
    donated: arguments whose memory the results may take.

  Raises:
    RuntimeError: without a folder (`use_folder`), or without the plugin.
    Exception: of any kind, where a kernel cannot be lowered or compiled.
  """
  if FOLDER not in os.environ:
    raise RuntimeError(
      f"compile_for_hopper: got no folder in {FOLDER}, expected one; call use_folder before the"
      " first kernel of the process."
    )
  if reason := reason_against():
    raise RuntimeError(f"compile_for_hopper: {reason}.")
  folder = pathlib.Path(os.environ[FOLDER])
  jax.clear_caches()
  for path in folder.iterdir():
    path.unlink()
  placed = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=_sharding())
  structs = jax.tree.map(placed, args)
  started = time.process_time()
  with gpu.h200():
    traced = jax.jit(function, donate_argnums=donated).trace(*structs)
    lowered = traced.lower(lowering_platforms=("cuda",))
  is_lowered = time.process_time()
  compiled = lowered.compile()
  ended = time.process_time()
  memory = compiled.memory_analysis()
  assert memory is not None, "XLA knows what memory a program for a GPU takes"
  return Compiled(
    read_kernels(folder),
    compiled.as_text() or "",
    memory.temp_size_in_bytes,
    is_lowered - started,
    ended - is_lowered,
  )


# ----- what lies in the folder


def read_kernels(folder: pathlib.Path) -> tuple[Kernel, ...]:
  """Returns the kernels whose files lie in `folder`, in the order of their numbers."""
  number = lambda path: int(path.stem.rpartition("_")[2])
  return tuple(read_kernel(path) for path in sorted(folder.glob("*.ptxas"), key=number))


def read_kernel(ptxas: pathlib.Path) -> Kernel:
  """Returns a kernel from the file of what ptxas said, and those beside it.

  Raises:
    ValueError: if ptxas says nothing of a kernel.
  """
  said, ptx = ptxas.read_text(), ptxas.with_suffix(".ptx").read_text()
  registers = re.search(r"Used (\d+) registers", said)
  spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
  if registers is None or spills is None:
    raise ValueError(
      f"{ptxas.name}: got {said[:300]!r}, expected what ptxas says of a kernel with --verbose."
    )
  launch = ptxas.with_suffix(".before_layout_inference.txt")
  disassembled = ptxas.with_suffix(".sass_ctrl")
  threads = re.search(r"\.maxntid (\d+)", ptx)
  memory = re.search(r"smem_scratch_bytes=(\d+)", ptxas.with_suffix(".resources.txt").read_text())
  return Kernel(
    name=ptxas.stem.rpartition("_")[0],
    num_blocks=num_blocks_of(launch.read_text()) if launch.exists() else 0,
    num_threads=int(threads[1]) if threads else 0,
    registers=int(registers[1]),
    spill_stores=int(spills[1]),
    spill_loads=int(spills[2]),
    shared_memory=int(memory[1]) if memory else 0,
    warnings=warnings_of(said),
    arithmetic=arithmetic_of(disassembled.read_text()) if disassembled.exists() else {},
    num_fusible=num_fusible(ptx),
  )


def warnings_of(said: str) -> tuple[str, ...]:
  """Returns what ptxas complains of; that registers spill is a number already."""
  return tuple(
    text.strip()
    for kind, text in re.findall(r"^ptxas (warning|info) *: (.*)$", said, re.MULTILINE)
    if (kind == "warning" and "spilled" not in text) or any(code in text for code in SERIALIZED)
  )


def num_blocks_of(mlir: str) -> int:
  """Returns the size of the grid of a kernel that is launched in a module's text; 0 if none is."""
  launch = re.search(r"gpu\.launch .*? in \(([^)]*)\)", mlir)
  if launch is None:
    return 0
  sizes = dict(re.findall(r"(%\w+) = arith\.constant (\d+) : index", mlir))
  grid = 1
  for size in re.findall(r"= (%\w+)", launch[1]):
    grid *= int(sizes[size])
  return grid


def arithmetic_of(sass: str) -> dict[str, int]:
  """Returns how often each floating-point opcode stands in disassembled code."""
  pattern = r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)([.\w]*)"
  counts = collections.Counter(
    name + kind for name, kind in re.findall(pattern, sass) if name in ARITHMETIC
  )
  return dict(sorted(counts.items()))


def num_fusible(ptx: str) -> int:
  """Returns how many products without a rounding of their own go into such a sum.

  An operation that names its rounding (`mul.rn.f32`) is never fused; one that does not may be. A
  register that is copied, in inline assembly too, which ptxas sees through, is followed.
  """
  products: set[str] = set()
  count = 0
  for line in ptx.splitlines():
    found = re.match(r"\s*(?:@!?%p\d+ )?(mul|add|sub|mov)\.(?:ftz\.)?[bf]32\s+(%\w+), (.*);", line)
    if found is None:
      continue
    operation, target, operands = found[1], found[2], re.findall(r"%\w+", found[3])
    if operation == "mul" or (operation == "mov" and operands and operands[0] in products):
      products.add(target)
      continue
    if operation in ("add", "sub"):
      count += any(operand in products for operand in operands)
  return count


def cleared(folder: pathlib.Path) -> None:
  """Removes a folder that `use_folder` made."""
  shutil.rmtree(folder, ignore_errors=True)
