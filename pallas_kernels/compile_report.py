"""Compiles the kernels for a Hopper GPU on any machine, and checks the compiled code.

    python -m pallas_kernels.compile_report [--only=matmul,attention] [--case=TEXT] [--out=DIR]

A case is one call at one shape, forward or backward. A line of the table is one kernel of one case:
registers per thread, spilled bytes, shared memory per block, warnings of ptxas, the number of
multiply-adds (FFMA, including those of exponentials), and the number of products with unspecified
rounding: LLVM or ptxas fused them with an addition, or was free to.
The report fails on:

  a case that does not compile;
  a warning that products of the tensor core are serialised (C7510 to C7512);
  more spilled bytes than `ALLOWANCES` permits for the kernel's file;
  floating-point opcodes or their numbers that depend on the number of rows; for products, numbers
    per element of a tile, since tiles of few rows are swapped;
  a product with unspecified rounding in a kernel that merges or folds (`FOLDS`): two programs that
    must agree would agree by chance.

`DIR` receives kernels.json and kernels.md. Requires JAX's CUDA plugin and no GPU: `bash
launch/gpu_compile.sh` creates an environment with it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import concurrent.futures
import dataclasses
import json
import multiprocessing
import os
import pathlib
import re
import sys
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from pallas_kernels import sass
from pallas_kernels.bench import cases as bench_cases
from pallas_kernels.bench.cases import GPT_OSS, QWEN3_8B, QWEN3_30B
from pallas_kernels.sass import Kernel, Launch

# Bytes per thread that a kernel's file may spill; the file gives the reason. Others spill none.
ALLOWANCES: Mapping[str, int] = {}
# Kernels with sums of products in the contract, where each product must be a `rounding.product`;
# and their number of three-register multiply-adds that approximate functions: a logarithm has one.
FOLDS = {
  "attention": 0,
  "attention_merge": 0,
  "token_logprobs_fold": 0,
  "token_logprobs_merge": 2,
}

# Opcodes and their counts in the code of a kernel.
Arithmetic: TypeAlias = tuple[tuple[str, float], ...]
# Kernels with possibly swapped tiles for few rows.
PRODUCTS = ("matmul", "matmul_parts")


@dataclasses.dataclass(frozen=True)
class Case:
  """A call to compile.

  Attributes:
    kernel: file of the kernel.
    name: name of the function and its shape.
    call: the function.
    inputs: its arguments, arrays or their shapes.
    family: cases of one family differ only in the number of rows and must have equal arithmetic.
  """

  kernel: str
  name: str
  call: Callable[..., Any]
  inputs: tuple[Any, ...]
  family: str = ""


@dataclasses.dataclass(frozen=True)
class Result:
  """The result of a case; `error` is empty if it compiled."""

  kernel: str
  name: str
  family: str = ""
  kernels: tuple[Kernel, ...] = ()
  launches: tuple[Launch, ...] = ()
  seconds: float = 0.0
  error: str = ""


def cases() -> Iterator[Case]:
  """Yields every case of the benchmark, and gradients; slowest to compile first."""
  forward = [of_bench(case) for case in bench_cases.cases()]
  yield from (case for case in forward if case.kernel == "token_logprobs")
  yield from gradients()
  yield from (case for case in forward if case.kernel != "token_logprobs")


def of_bench(case: bench_cases.Case) -> Case:
  """Converts a case of the benchmark to a case to compile."""
  what, _, _ = case.name.rpartition(", ")
  return Case(
    case.kernel,
    case.name,
    case.ours.call,
    case.ours.inputs,
    family=what if case.kernel in ("matmul", "rms_norm") else "",
  )


def gradients() -> Iterator[Case]:
  """Yields the backward pass of each kernel, once per model with a different program."""
  for case in (
    bench_cases.scores(QWEN3_8B, 4096),
    *(bench_cases.product(QWEN3_8B, layer, 1024) for layer in bench_cases.layers(QWEN3_8B)),
    bench_cases.gate_up(QWEN3_8B, 1024),
    bench_cases.prefill(QWEN3_8B, 4, 2048),
    bench_cases.prefill(GPT_OSS, 4, 2048),
    bench_cases.norm(QWEN3_8B, 4096),
    bench_cases.norm_of_heads(QWEN3_8B, 4096),
    bench_cases.experts(QWEN3_30B, "gate", QWEN3_30B.hidden, QWEN3_30B.intermediate, 4096),
  ):
    yield Case(case.kernel, f"{case.name}, gradient", gradient(case.ours.call), case.ours.inputs)


def gradient(call: Callable[..., Any]) -> Callable[..., Any]:
  """Returns the gradient of the sum of all results of `call` w.r.t. its bfloat16 inputs."""

  def of_inputs(*inputs: Any) -> Any:
    leaves, tree = jax.tree.flatten(inputs)
    varied = [i for i, leaf in enumerate(leaves) if leaf.dtype == jnp.bfloat16]

    def total(values: list[Any]) -> Any:
      whole = dict(enumerate(leaves)) | dict(zip(varied, values))
      out = jax.tree.leaves(call(*tree.unflatten([whole[i] for i in range(len(leaves))])))
      return sum(x.astype(jnp.float32).sum() for x in out if jnp.issubdtype(x.dtype, jnp.floating))

    return jax.grad(total)([leaves[i] for i in varied])

  return of_inputs


# ----- checks


def complaints(results: Sequence[Result], allowances: Mapping[str, int] = ALLOWANCES) -> list[str]:
  """Returns the failures of compiled cases, as sentences."""
  found = []
  for result in results:
    where = f"{result.kernel}: {result.name}"
    if result.error:
      found.append(f"{where}: does not compile: {result.error}")
    for kernel in result.kernels:
      of_kernel = kernel_complaints(kernel, allowances.get(result.kernel, 0))
      found += [f"{where}: {kernel.name}: {sentence}" for sentence in of_kernel]
  return found + arithmetic_complaints(results)


def kernel_complaints(kernel: Kernel, allowance: int) -> list[str]:
  """Returns the failures of one kernel, which may spill `allowance` bytes per thread."""
  found = [text for text in kernel.warnings if any(code in text for code in sass.SERIALIZED)]
  if max(kernel.spill_stores, kernel.spill_loads) > allowance:
    found.append(
      f"got {kernel.spill_stores} bytes of spill stores and {kernel.spill_loads} of spill loads,"
      f" expected at most {allowance} a thread"
    )
  if kernel.num_fusible > FOLDS.get(kernel.name, kernel.num_fusible):
    found.append(
      f"got {kernel.num_fusible} products in a fold that are rounded by chance, expected"
      f" {FOLDS[kernel.name]}; make those that are added `rounding.product`s"
    )
  return found


def arithmetic_of_an_element(kernel: Kernel) -> Arithmetic:
  """Returns a kernel's arithmetic; for a product, per column of its tile.

  Wgmma's n distinguishes tall and swapped tiles, widths of swapped tiles, and the unrolling of the
  loop over the contraction. Selections are not counted, because they do not round.
  """
  found = (re.match(r"HGMMA\.64x(\d+)x", opcode) for opcode in kernel.arithmetic)
  widths = {int(match[1]) for match in found if match}
  if kernel.name not in PRODUCTS or len(widths) != 1:
    return tuple(kernel.arithmetic.items())
  (width,) = widths
  return tuple(
    (opcode, count / width)
    for opcode, count in kernel.arithmetic.items()
    if not opcode.startswith(("HGMMA", "FSEL"))
  )


def arithmetic_complaints(results: Iterable[Result]) -> list[str]:
  """Returns where arithmetic depends on the number of rows, except folds that only few rows use."""
  first: dict[tuple[str, str], tuple[str, set[Arithmetic]]] = {}
  found = []
  for result in results:
    arithmetic: dict[str, set[Arithmetic]] = {}
    for kernel in result.kernels if result.family else ():
      if kernel.name not in FOLDS:
        arithmetic.setdefault(kernel.name, set()).add(arithmetic_of_an_element(kernel))
    for name, own in arithmetic.items():
      case, other = first.setdefault((result.family, name), (result.name, own))
      if own != other:
        items = [{item for one in some for item in one} for some in (own, other)]
        opcodes = ", ".join(sorted({opcode for opcode, _ in items[0] ^ items[1]}))
        found.append(
          f"{result.kernel}: {result.name}: {name}: got other numbers of {opcodes} than in"
          f" {case!r}, expected one arithmetic for every number of rows"
        )
  return found


# ----- compilation


def compiled(case: Case) -> Result:
  """Compiles a case in this process."""
  result = Result(case.kernel, case.name, case.family)
  try:
    made = sass.compile_for_hopper(case.call, *case.inputs)
  # The report shows any error of a case.
  except Exception as error:
    lines = str(error).strip().splitlines() or ["no message"]
    return dataclasses.replace(result, error=f"{type(error).__name__}: {lines[0]}"[:300])
  seconds = made.lowering_seconds + made.compile_seconds
  return dataclasses.replace(result, kernels=made.kernels, launches=made.launches, seconds=seconds)


def _compiled_by_name(kernel: str, name: str) -> Result:
  return compiled(next(c for c in cases() if (c.kernel, c.name) == (kernel, name)))


def all_compiled(chosen: Sequence[Case], num_processes: int) -> Iterator[Result]:
  """Compiles cases in several parallel processes; yields results as they finish."""
  spawning = multiprocessing.get_context("spawn")
  with concurrent.futures.ProcessPoolExecutor(num_processes, spawning) as pool:
    pending = [pool.submit(_compiled_by_name, case.kernel, case.name) for case in chosen]
    yield from (done.result() for done in concurrent.futures.as_completed(pending))


# ----- the table


HEADER = (
  "kernel", "case", "program", "blocks", "threads", "registers", "spill stores / loads, B",
  "shared memory, B", "FFMA", "by chance", "warnings",
)  # fmt: skip


def rows(result: Result) -> Iterator[tuple[str, ...]]:
  """Yields the lines of a case; launches of one name may have different sizes."""
  if result.error:
    yield (result.kernel, result.name, "does not compile", *[""] * 7, result.error)
  for kernel in result.kernels:
    launches = [launch for launch in result.launches if launch.name == kernel.name]
    yield (
      result.kernel,
      result.name,
      kernel.name,
      " or ".join(sorted({str(launch.num_blocks) for launch in launches}, key=int)),
      str(kernel.num_threads),
      str(kernel.registers),
      f"{kernel.spill_stores} / {kernel.spill_loads}",
      " or ".join(f"{size:,}" for size in sorted({launch.shared_memory for launch in launches})),
      str(kernel.num_fused),
      str(kernel.num_fusible),
      " ".join(sorted({text[1:6] for text in kernel.warnings})),
    )


def markdown(results: Iterable[Result]) -> str:
  """Returns the table of all kernels as Markdown."""
  lines = [HEADER, ["---"] * len(HEADER), *(row for result in results for row in rows(result))]
  return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main(arguments: Sequence[str]) -> int:
  """Returns the exit status: 1 if a check fails."""
  parser = argparse.ArgumentParser(prog="python -m pallas_kernels.compile_report")
  parser.add_argument("--only", default="", help="comma-separated kernels; all if empty")
  parser.add_argument("--case", default="", help="compile only cases with this text in their name")
  parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/gpu_compile"))
  parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
  options = parser.parse_args(arguments)
  if reason := sass.reason_against():
    parser.error(reason)
  everything = list(cases())
  known = sorted({case.kernel for case in everything})
  kernels = options.only.split(",") if options.only else known
  for name in kernels:
    if name not in known:
      parser.error(f"--only: got {name!r}, expected some of {', '.join(known)}")
  chosen = [c for c in everything if c.kernel in kernels and options.case in c.name]
  if not chosen:
    parser.error(f"--case: got {options.case!r}, which is in no case's name")
  places = {(case.kernel, case.name): place for place, case in enumerate(everything)}
  results = []
  for result in all_compiled(chosen, min(options.processes, len(chosen))):
    results.append(result)
    for row in rows(result):
      print(" | ".join(row), flush=True)
  results.sort(key=lambda r: places[r.kernel, r.name])
  options.out.mkdir(parents=True, exist_ok=True)
  record = [dataclasses.asdict(result) for result in results]
  (options.out / "kernels.json").write_text(json.dumps(record, indent=1) + "\n")
  (options.out / "kernels.md").write_text(markdown(results))
  refused = complaints(results)
  for sentence in refused:
    print(f"REFUSED  {sentence}")
  print(
    f"{len(results)} cases, {sum(len(r.kernels) for r in results)} kernels, {len(refused)} refused,"
    f" {sum(r.seconds for r in results):.0f} CPU seconds; {options.out / 'kernels.md'}"
  )
  return 1 if refused else 0


if __name__ == "__main__":
  os.environ["JAX_PLATFORMS"] = "cpu"
  sys.exit(main(sys.argv[1:]))
