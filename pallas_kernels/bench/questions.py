"""Questions that only a GPU can answer, and the field of a `Config` that each answer may change.

Each is a function of a `Setting`, named by `--question`. A dry run uses the interpreter instead of
a GPU, or lowers what it cannot run: its answers say nothing about hardware.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import functools
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np

from pallas_kernels import attention, gpu, matmul
from pallas_kernels.bench import attention_checks, cases as cases_lib, comparison
from pallas_kernels.bench.check_sizes import Sizes
from pallas_kernels.bench.timing import Contestant, Machine, race, shapes_of

# Of the product with its left operand in registers or in shared memory.
ROWS, COLUMNS, K = 64, 128, 256
SECONDS_OF_A_RACE = 2.0


@dataclasses.dataclass(frozen=True)
class Answer:
  """A question, the observation, and the change that it permits."""

  name: str
  asked: str
  seen: str
  change: str


@dataclasses.dataclass(frozen=True)
class Setting:
  """The setting of a question.

  Attributes:
    sizes: sizes of comparisons.
    machine: the machine that times; None in a dry run, which lowers instead.
  """

  sizes: Sizes
  machine: Machine | None


def _count(pairs: list[tuple[str, Any, Any]]) -> tuple[str, bool]:
  """Returns the numbers of differing entries by name as text, and whether there are none."""
  counts = [
    (name, comparison.num_differing(found, expected), np.size(expected))
    for name, found, expected in pairs
  ]
  seen = "; ".join(f"{name}: {count:,} of {size:,} differ" for name, count, size in counts)
  return seen, not any(count for _, count, _ in counts)


def _products(setting: Setting, num_rows: int) -> tuple[Callable[..., Any], jax.Array, jax.Array]:
  """Returns a function of fields of `matmul.Config` that computes x @ w in f32, and x and w."""
  k, n, _ = setting.sizes.weights[-1]
  x, w = comparison.uneven(0, num_rows, k), comparison.uneven(1, k, n)

  def product(rows: jax.Array, **fields: Any) -> jax.Array:
    return matmul.matmul(
      rows,
      w,
      out_dtype=jnp.float32,
      config=matmul.Config(**fields),
      interpret=setting.sizes.interpret,
    )

  return product, x, w


def wgmma_width(setting: Setting) -> Answer:
  product, x, _ = _products(setting, setting.sizes.claim_rows)
  rows = setting.sizes.swapped_rows
  narrow = product(x[: rows[0]], swapped_rows=64)
  tall = functools.partial(product, x, swapped_rows=0)
  pairs = [("n = 128 against 256", tall(block_n=128), tall())]
  for width in rows[1:]:
    wide = product(x[:width], swapped_rows=64)[: rows[0]]
    pairs.append((f"n = {rows[0]} against {width}", narrow, wide))
  seen, equal = _count(pairs)
  change = (
    "matmul.Config.block_n may follow the number of rows, and swapped tiles may have any width"
  )
  other = "matmul.Config.block_n is contract: call it so, and set swapped_rows to 0"
  return Answer("wgmma_width", "Does wgmma's n change bits?", seen, change if equal else other)


def wgmma_height(setting: Setting) -> Answer:
  product, x, _ = _products(setting, setting.sizes.claim_rows)
  seen, equal = _count(
    [
      (
        "block_m = 64 against 128",
        product(x, block_m=64, swapped_rows=0),
        product(x, block_m=128, swapped_rows=0),
      )
    ]
  )
  change = "matmul.Config.block_m may follow the number of rows"
  other = "matmul.Config.block_m is contract: call it so"
  return Answer(
    "wgmma_height", "Does a tile's height change bits?", seen, change if equal else other
  )


def operand_order(setting: Setting) -> Answer:
  product, x, _ = _products(setting, max(setting.sizes.swapped_rows))
  seen, equal = _count(
    [
      (
        f"{rows} rows, swapped against tall",
        product(x[:rows], swapped_rows=64),
        product(x[:rows], swapped_rows=0),
      )
      for rows in setting.sizes.swapped_rows
    ]
  )
  change = "matmul.Config.swapped_rows is 64 by default"
  other = "matmul.Config.swapped_rows has to be 0 here"
  return Answer(
    "operand_order", "Do swapped operands change bits?", seen, change if equal else other
  )


def left_operand_product(x: jax.Array, w: jax.Array, from_registers: bool) -> jax.Array:
  """Returns x @ w, f32[64, 128], of bf16[64, 256] and bf16[256, 128]; one wgmma per block of k."""

  def body(x_ref, w_ref, y_ref, *, x, w, y, loaded):
    plgpu.copy_gmem_to_smem(x_ref, x, loaded)
    plgpu.copy_gmem_to_smem(w_ref, w, loaded)
    plgpu.barrier_wait(loaded)

    def scope(accumulator):
      plgpu.wgmma(accumulator, x[...] if from_registers else x, w)
      plgpu.wgmma_wait(0)
      return accumulator[...]

    y[...] = pl.run_scoped(scope, plgpu.WGMMAAccumulatorRef((ROWS, COLUMNS), jnp.float32))
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(y, y_ref)
    plgpu.wait_smem_to_gmem(0)

  return gpu.kernel(
    body,
    name="left_operand",
    out_type=jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32),
    scratch={
      "x": gpu.Buffer((ROWS, K), jnp.bfloat16, swizzled=True),
      "w": gpu.Buffer((K, COLUMNS), jnp.bfloat16, swizzled=True),
      "y": gpu.Buffer((ROWS, COLUMNS), jnp.float32, swizzled=True),
      "loaded": gpu.Barriers(num_arrivals=2),
    },
    num_blocks=1,
    interpret=False,
  )(x, w)


def register_operand(setting: Setting) -> Answer:
  asked = "Does a left operand in registers change bits?"
  x, w = comparison.normal(0, ROWS, K), comparison.normal(1, K, COLUMNS)
  registers, memory = (
    functools.partial(left_operand_product, from_registers=where) for where in (True, False)
  )
  if setting.machine is None:
    for call in (registers, memory):
      gpu.lower_for_cuda(call, x, w)
    return Answer("register_operand", asked, "both programs lower", "")
  seen, equal = _count([("registers against shared memory", registers(x, w), memory(x, w))])
  change = "attention may keep p in registers: its buffer in Config.scratch can go"
  other = "attention keeps p in shared memory, in every kernel of it"
  return Answer("register_operand", asked, seen, change if equal else other)


def rotary(x: jax.Array, angle: jax.Array) -> jax.Array:
  """Rotates the two halves of every row, in f32."""
  a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  cos, sin = jnp.cos(angle), jnp.sin(angle)
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def residual(x: jax.Array, y: jax.Array) -> jax.Array:
  """Adds a scaled update to the residual stream, in f32."""
  return (x.astype(jnp.float32) + 0.7 * y.astype(jnp.float32)).astype(x.dtype)


def gated(gate: jax.Array, up: jax.Array) -> jax.Array:
  """Multiplies silu(gate) by up, in f32."""
  return (jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(gate.dtype)


def glue_fma(setting: Setting) -> Answer:
  most, features = (4096, 4096) if setting.machine is not None else (128, 64)
  x, y = comparison.normal(0, most, features), comparison.normal(1, most, features)
  angle = 100 * comparison.normal(2, most, features // 2, dtype=jnp.float32)
  pairs = []
  for function, *inputs in ((rotary, x, angle), (residual, x, y), (gated, x, y)):
    call = jax.jit(function)
    whole = call(*inputs)
    for rows in (1, 2, 8, 17, 64):
      few = call(*(array[:rows] for array in inputs))
      pairs.append((f"{function.__name__}, {rows} of {most} rows", few, whole[:rows]))
  seen, equal = _count(pairs)
  change = "rotary, residual and silu may stay in XLA at any number of rows; row tiles are then for"
  change += " the CPU alone"
  other = (
    "what differs keeps its row tiles, or moves into an epilogue (matmul has residual, swiglu)"
  )
  return Answer(
    "glue_fma", "Does XLA contract multiply-adds by size?", seen, change if equal else other
  )


def parallel_merge(setting: Setting) -> Answer:
  sizes = setting.sizes
  heads, group, head_dim, _ = sizes.layers[0]
  sequences = attention_checks.Sequences.normal(heads, group, head_dim, sizes.context)
  pieces = [(i % 2, length - 1, 1) for i, length in enumerate(sizes.lengths)]
  batch = sequences.batch(pieces, 0, len(pieces), len(pieces))
  parallel, sequential = (
    attention.attention(
      *batch,
      config=dataclasses.replace(sizes.attention, mode=mode),
      interpret=sizes.interpret,
    )
    for mode in ("parallel", "sequential")
  )
  seen, equal = _count([("parallel against sequential", parallel, sequential)])
  change = "attention.Config.mode may follow the batch"
  other = "attention.Config.mode is contract: one value for prefill, decode and training"
  return Answer(
    "parallel_merge", "Does the parallel merge change bits?", seen, change if equal else other
  )


def _raced(setting: Setting, case: cases_lib.Case, contestants: list[Contestant]) -> list[str]:
  """Times or lowers contestants; returns a sentence for each."""
  if setting.machine is None:
    for contestant in contestants:
      gpu.lower_for_cuda(contestant.call, *shapes_of(contestant.inputs))
    return [f"{contestant.name}: lowers" for contestant in contestants]
  machine = setting.machine
  expected = case.expected_seconds(machine.copy_bandwidth, machine.matmul_peak)
  return [
    f"{t.name}: {t.reason}"
    if t.reason
    else f"{t.name}: {t.median * 1e6:,.1f} us, {100 * expected / t.median:.0f} % of the machine"
    for t in race(contestants, case.num_bytes, expected, SECONDS_OF_A_RACE)
  ]


def prefill_merge(setting: Setting) -> Answer:
  model = cases_lib.QWEN3_8B
  case = cases_lib.prefill(model, 4, 2048)
  contestants = [
    cases_lib.attended(
      f"kv_split = {split}", model, 4, 2048, 2048, attention.Config(kv_split=split)
    )
    for split in (128, 256)
  ]
  return Answer(
    "prefill_merge",
    "What does a merge at every split cost in prefill?",
    "; ".join(_raced(setting, case, contestants)),
    "the gap between the two is one merge more every 256 keys; if it is large,"
    " attention.Config.kv_split = 512 with stages = 1 (contract: another fingerprint)",
  )


def decode_bandwidth(setting: Setting) -> Answer:
  model, seen = cases_lib.QWEN3_8B, []
  for sequences, context in cases_lib.DECODES:
    case = cases_lib.decode(model, sequences, context)
    contestants = [
      cases_lib.attended(mode, model, sequences, context, 1, attention.Config(mode=mode))
      for mode in ("sequential", "parallel")
    ]
    seen.append(f"{case.name}: " + ", ".join(_raced(setting, case, contestants)))
  return Answer(
    "decode_bandwidth",
    "What bandwidth does decoding reach with splits of 256?",
    "; ".join(seen),
    "attention.Config.mode by batch, if parallel_merge allows; kv_split = 512 if 64 x 8192 stays"
    " below 75 % (contract: another fingerprint)",
  )


def lowered_matmul(x: jax.Array, w: jax.Array) -> jax.Array:
  return matmul.matmul(x, w)


def export_matmul() -> jax.export.Exported:
  """Lowers a matmul for an H200, on any machine."""
  shapes = (cases_lib.struct(64, 4096), cases_lib.struct(4096, 6144))
  with gpu.h200():
    return jax.export.export(jax.jit(lowered_matmul), platforms=["cuda"])(*shapes)


def cpu_lowering(setting: Setting) -> Answer:
  asked = "Does a module that was lowered on a CPU compile unchanged?"
  if setting.machine is None:
    size = len(export_matmul().mlir_module_serialized)
    return Answer("cpu_lowering", asked, f"exported, {size:,} bytes", "")
  root = pathlib.Path(__file__).parents[2]
  with tempfile.TemporaryDirectory() as directory:
    path = pathlib.Path(directory) / "matmul"
    program = "import pathlib; from pallas_kernels.bench import questions as q;"
    program += f" pathlib.Path({str(path)!r}).write_bytes(q.export_matmul().serialize())"
    # A process without access to a GPU.
    subprocess.run(
      [sys.executable, "-c", program],
      cwd=root,
      env=os.environ | {"JAX_PLATFORMS": "cpu"},
      check=True,
      timeout=120,
    )
    exported = jax.export.deserialize(bytearray(path.read_bytes()))
  x, w = comparison.normal(0, 64, 4096), comparison.normal(1, 4096, 6144)
  seen, equal = _count(
    [("lowered on a CPU against here", exported.call(x, w), lowered_matmul(x, w))]
  )
  change = "no field: the exports that CI makes are what a GPU runs"
  other = "no field: exports of CI prove layouts alone"
  return Answer("cpu_lowering", asked, seen, change if equal else other)


def ask(question: Callable[[Setting], Answer], setting: Setting) -> Answer:
  """Returns a question's answer; in a dry run, without the permitted change."""
  answer = question(setting)
  if setting.machine is not None:
    return answer
  return dataclasses.replace(answer, seen=f"dry run: {answer.seen}", change="none: ask on a GPU")


# In the order of docs/results/GPU_TODO.md.
QUESTIONS: tuple[Callable[[Setting], Answer], ...] = (
  wgmma_width,
  wgmma_height,
  operand_order,
  register_operand,
  glue_fma,
  parallel_merge,
  prefill_merge,
  decode_bandwidth,
  cpu_lowering,
)
