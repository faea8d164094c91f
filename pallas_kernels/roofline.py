"""Computes lower bounds of launch times from bytes, tensor core operations and multiprocessors.

  seconds >= max(bytes / min(bandwidth, occupied * own), operations / (peak * occupied / all))

A launch with fewer blocks than multiprocessors occupies one per block, and each can read at most
`own` bytes per second from L2. Nothing here is measured, and time between launches is left out: a
kernel may be slower by any factor, but not faster.

Sources: NVIDIA's H200 data sheet (4.8 TB/s, 989 TFLOP/s of dense bfloat16, 132 multiprocessors).
64 bytes per cycle from L2 to a multiprocessor is an assumption.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import math

from pallas_kernels import program
from pallas_kernels.sass import Launch

# Kernels that multiply rows with weights.
PRODUCTS = ("matmul", "matmul_parts", "token_logprobs")
# Live query rows of one partial, if partials are written; keys of one split.
PARTIAL_ROWS = 8
SPLIT = 256


@dataclasses.dataclass(frozen=True)
class Machine:
  """Limits of a GPU per second: memory bytes, operations, and L2 bytes of one multiprocessor."""

  bandwidth: float
  matmul_peak: float
  num_multiprocessors: int
  own_bandwidth: float


H200 = Machine(4.8e12, 989e12, 132, 64 * 1.98e9)


@dataclasses.dataclass(frozen=True)
class Work:
  """The work of one launch.

  Attributes:
    name: name of the kernel, or XLA's name.
    what: its largest operand, as text.
    num_bytes: bytes of memory, each read or written once.
    num_operations: tensor core operations, including rows that pad a tile of 64.
    num_blocks: blocks of the grid; `math.inf` if it is assumed to fill the GPU.
  """

  name: str
  what: str
  num_bytes: float
  num_operations: float = 0.0
  num_blocks: float = math.inf

  def occupied(self, machine: Machine) -> int:
    """Returns the number of occupied multiprocessors."""
    return int(min(self.num_blocks, machine.num_multiprocessors))

  def seconds(self, machine: Machine) -> float:
    """Returns the lower bound in seconds."""
    occupied = self.occupied(machine)
    bandwidth = min(machine.bandwidth, occupied * machine.own_bandwidth)
    peak = machine.matmul_peak * occupied / machine.num_multiprocessors
    return max(self.num_bytes / bandwidth, self.num_operations / peak)


def of_launch(launch: Launch, context: int) -> Work:
  """Returns the work of one of our kernels.

  Args:
    launch: launch of the kernel.
    context: keys of every sequence in attention.
  """
  sizes = [_sizes(shape) for shape in launch.inputs]
  arrays = [shape for shape in launch.inputs if shape.startswith(("bfloat16", "float32"))]
  largest = max(arrays, key=_bytes)
  num_bytes = float(sum(_bytes(shape) for shape in (*launch.inputs, *launch.outputs)))
  operations = 0.0
  if launch.name == "attention_merge":
    rows = math.prod(_sizes(launch.outputs[0])[:2])
    partial = rows * -(-context // SPLIT) * PARTIAL_ROWS * _sizes(launch.outputs[0])[-1] * 4
    num_bytes = float(partial + _bytes(launch.outputs[0]))
  elif launch.name == "attention":
    num_segments, num_heads, num_rows, width = sizes[0]
    keys = 2 * num_segments * num_heads * context * width
    num_bytes = 2.0 * keys + 2.0 * _bytes(launch.inputs[0])
    operations = 4.0 * num_segments * num_heads * num_rows * context * width
    largest = launch.inputs[0]
  elif launch.name in PRODUCTS:
    x, *weights = [shape for shape in launch.inputs if shape.startswith("bfloat16")]
    width, outputs = _sizes(x)[-1], set(launch.outputs)
    weights = [w for w in weights if w not in outputs and width in _sizes(w)[-2:]]
    num_rows = -(-_sizes(x)[-2] // 64) * 64
    operations = 2.0 * num_rows * sum(math.prod(_sizes(w)) for w in weights[:2])
  return Work(launch.name, largest, num_bytes, operations, launch.num_blocks)


def of_start(start: program.Start) -> Work:
  """Returns the work of an XLA launch, which is assumed to fill the GPU.

  Inputs of a megabyte or more with the shape of an output are assumed to be updated in place, in
  part; a gather is assumed to read no more than it writes.
  """
  sizes = [program.num_bytes(shape) for shape in start.outputs]
  in_place = {s for s in start.outputs if s in start.inputs and program.num_bytes(s) >= 1 << 20}
  written = sum(size for size, shape in zip(sizes, start.outputs) if shape not in in_place)
  small = [program.num_bytes(s) for s in start.inputs if s not in in_place]
  most = written or max((size for size in small), default=0)
  largest = max((*start.outputs, *start.inputs), key=program.num_bytes, default="")
  return Work("XLA", largest, float(written + sum(min(size, most) for size in small)))


def peers(
  num_rows: int,
  context: int,
  *,
  hidden: int,
  intermediate: int,
  heads: int,
  kv_heads: int,
  head_dim: int,
  vocabulary: int,
  num_layers: int,
) -> Sequence[tuple[Work, int]]:
  """Returns the launches and their counts of a decoding step with cuBLAS and FlashInfer.

  Each is assumed to fill the GPU: one product per weight, attention over pages, two fused norms,
  one kernel that normalises and rotates queries and keys and writes pages, one for SwiGLU; softmax
  and sampling are one more pass over float32 logits.
  """
  wide, out = (heads + 2 * kv_heads) * head_dim, heads * head_dim

  def product(name: str, k: int, n: int) -> Work:
    num_bytes = 2.0 * (num_rows * k + k * n + num_rows * n)
    return Work(name, f"bfloat16[{k},{n}]", num_bytes, 2.0 * num_rows * k * n)

  def passing(name: str, elements: float) -> Work:
    return Work(name, f"{num_rows} x {elements / num_rows:,.0f}", 2.0 * elements)

  keys = 2.0 * num_rows * context * kv_heads * head_dim
  attention = Work(
    "FlashInfer attention",
    f"{num_rows} x {context} keys",
    2.0 * (keys + 2 * num_rows * out),
    4.0 * num_rows * context * out,
  )
  layer = (
    product("cuBLAS qkv", hidden, wide),
    passing("norms, rotary, page writes", 2.0 * num_rows * wide),
    attention,
    product("cuBLAS out", out, hidden),
    passing("sum and norm", 4.0 * num_rows * hidden),
    product("cuBLAS gate_up", hidden, 2 * intermediate),
    passing("SwiGLU", 3.0 * num_rows * intermediate),
    product("cuBLAS down", intermediate, hidden),
    passing("sum and norm", 4.0 * num_rows * hidden),
  )
  logits = num_rows * vocabulary
  end = (
    product("cuBLAS head", hidden, vocabulary),
    passing("softmax and sample", 2.0 * logits),
  )
  return [*((work, num_layers) for work in layer), *((work, 1) for work in end)]


def _sizes(shape: str) -> tuple[int, ...]:
  """Returns the sizes in a text such as "bfloat16[64,4096]"."""
  return tuple(int(size) for size in shape.partition("[")[2].rstrip("]").split(",") if size)


def _bytes(shape: str) -> int:
  """Returns the bytes of a text such as "bfloat16[64,4096]"."""
  dtype = shape.partition("[")[0]
  itemsize = {"bfloat16": 2, "float32": 4, "int32": 4, "uint32": 4}.get(dtype, 4)
  return math.prod(_sizes(shape)) * itemsize
