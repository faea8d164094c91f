"""Compiles the engine step and a train step for an H200, without one: launches, waits, roofline.

Claim: a layer of the engine step launches at most 10 of our kernels and 12 of XLA's at 64 rows;
the host reads nothing within a step; the step of 36 layers compiles in 3 CPU minutes.
Command: bash launch/gpu_compile.sh --only=step
Hardware: 2 CPU cores, minutes; no GPU. Numbers: docs/results/gpu_compile.md

A layer's launches are the difference between a step of two layers and a step of one. Nothing here
is measured on a GPU: the roofline is computed (`pallas_kernels/roofline.py`).
"""

from __future__ import annotations

import argparse
import collections
from collections.abc import Callable, Iterator, Sequence
import concurrent.futures
import dataclasses
import json
import multiprocessing
import os
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp

from experiments import measure
from experiments.compiled import decoding_step
from pallas_kernels import compile_report, gpu, program, roofline, sass
from seerjax import numerics as numerics_lib, types
from seerjax.models import config as model_config, presets
from seerjax.models.decoder import decide
from seerjax.trainer import step as trainer_step

MODEL = "qwen3-8b"
# Rows of a step, each the last position of a sequence of `CONTEXT` tokens: 256 fit in memory.
ENGINE_ROWS = (1, 64, 256, 1024)
ROOFLINE_ROWS = (1, 64, 256)
TRAIN_ROWS = (64, 1024)
FLAT_LAYERS = (2, 8, 36)
CONTEXT = 2048
NUM_PAGES = 2048
MAX_CONTEXT = 8192
# Limits of a step; see the claim.
MOST_OURS, MOST_OTHERS, MOST_SECONDS = 10, 12, 180.0
CLAIMED_ROWS = 64


def counted(number: int, what: str) -> str:
  return f"{number:,} {what}" + ("s" if number != 1 else "")


@dataclasses.dataclass(frozen=True)
class Step:
  """A compiled step of `num_layers` layers and `num_rows` rows, or the `error` of compiling it."""

  kind: str
  num_rows: int
  num_layers: int
  kernels: tuple[sass.Kernel, ...] = ()
  launches: tuple[sass.Launch, ...] = ()
  starts: tuple[program.Start, ...] = ()
  unknown_loops: tuple[str, ...] = ()
  branches: tuple[str, ...] = ()
  temporary_bytes: int = 0
  lowering_seconds: float = 0.0
  compile_seconds: float = 0.0
  error: str = ""

  @property
  def name(self) -> str:
    return f"{counted(self.num_rows, 'row')}, {counted(self.num_layers, 'layer')}"

  def num_starts(self, is_ours: bool) -> int:
    return sum(start.num_times for start in self.starts if start.is_ours == is_ours)


# ----- compilation


def model(num_layers: int) -> model_config.TransformerConfig:
  """Returns the model cut to `num_layers` layers."""
  return presets.get(MODEL).changed(num_layers=num_layers)


def numerics() -> numerics_lib.NumericsConfig:
  """Returns the numerics of a GPU."""
  return numerics_lib.NumericsConfig(backend="pallas", reduction_shards=8, compute_dtype="bfloat16")


def shapes_of(tree: Any) -> Any:
  """Returns the shapes and dtypes of host arrays."""
  return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def engine_step(num_rows: int, num_layers: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
  """Returns the step of `decoding_step` and the shapes of its arguments."""
  config = model(num_layers)
  inputs = decoding_step.inputs(config, num_rows, CONTEXT, max_model_len=MAX_CONTEXT)
  pages = jax.eval_shape(lambda: decoding_step.pages(config, numerics(), NUM_PAGES))
  key = jax.eval_shape(lambda: numerics_lib.key(0))
  weights = decoding_step.weights(config, numerics())
  return decoding_step.program(config, numerics()), (weights, pages, shapes_of(inputs), key)


def train_step(num_rows: int, num_layers: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
  """Returns the gradient of a micro-batch's scores and the shapes of its arguments."""
  config = model(num_layers)
  # As many rows as a decoding step, in segments of `query_tile` positions.
  step = shapes_of(decoding_step.inputs(config, num_rows, CONTEXT, max_model_len=MAX_CONTEXT))
  num_segments = -(-num_rows // numerics().query_tile)
  segments = jax.ShapeDtypeStruct((num_segments,), jnp.int32)
  table = jax.ShapeDtypeStruct((num_segments, step.batch.page_table.shape[1]), jnp.int32)
  batch = types.TrainBatch(
    tokens=step.batch._replace(segment_start=segments, segment_length=segments, page_table=table),
    targets=step.positions,
    loss_mask=jax.ShapeDtypeStruct((num_rows,), jnp.bool_),
    sequence_index=step.positions,
    advantages=step.sampling.temperature,
    behaviour_logprobs=None,
    raw_logprobs=None,
    sampling=step.sampling,
  )

  def call(params: Any, batch: Any) -> Any:
    def loss(params: Any) -> Any:
      _, scores = trainer_step.score(
        params,
        batch,
        num_pages=num_rows // decoding_step.PAGE_SIZE + 1,
        page_size=decoding_step.PAGE_SIZE,
        decoder=decide(config, numerics()).for_rows(is_plain=True),
      )
      return jnp.sum(scores.logprob * batch.advantages)

    return jax.grad(loss)(params)

  return call, (decoding_step.weights(config, numerics()), batch)


KINDS = {"engine step": engine_step, "train step": train_step}


def compiled(kind: str, num_rows: int, num_layers: int) -> Step:
  """Compiles a step in this process."""
  step = Step(kind, num_rows, num_layers)
  try:
    with gpu.h200():  # Decisions made here are for the GPU.
      call, arguments = KINDS[kind](num_rows, num_layers)
    made = sass.compile_for_hopper(call, *arguments, donated=(1,) if kind == "engine step" else ())
  # The report shows any error of a step.
  except Exception as error:
    lines = str(error).strip().splitlines() or ["no message"]
    return dataclasses.replace(step, error=f"{type(error).__name__}: {lines[0]}"[:300])
  read = program.read(made.program)
  return dataclasses.replace(
    step,
    kernels=made.kernels,
    launches=made.launches,
    starts=read.starts,
    unknown_loops=read.unknown_loops,
    branches=read.branches,
    temporary_bytes=made.temporary_bytes,
    lowering_seconds=made.lowering_seconds,
    compile_seconds=made.compile_seconds,
  )


def wanted() -> list[tuple[str, int, int]]:
  """Returns the steps of the report, slowest to compile first."""
  flat = [("engine step", CLAIMED_ROWS, layers) for layers in reversed(FLAT_LAYERS)]
  train = [("train step", rows, 1) for rows in reversed(TRAIN_ROWS)]
  engine = [("engine step", rows, 1) for rows in reversed(ENGINE_ROWS)]
  engine += [("engine step", rows, 2) for rows in ROOFLINE_ROWS if rows != CLAIMED_ROWS]
  return [*flat, *train, *engine]


# ----- limits


def of_layer(steps: Sequence[Step], num_rows: int) -> tuple[int, int] | None:
  """Returns one layer's launches (ours, others); None unless steps of one and two layers exist."""
  of = {s.num_layers: s for s in steps if (s.kind, s.num_rows) == ("engine step", num_rows)}
  if not {1, 2} <= of.keys() or of[1].error or of[2].error:
    return None
  ours, others = (of[2].num_starts(ours) - of[1].num_starts(ours) for ours in (True, False))
  return ours, others


def complaints(steps: Sequence[Step]) -> list[str]:
  """Returns the violated limits of compiled steps, as sentences."""
  found = compile_report.complaints([result_of(step) for step in steps])
  for step in steps:
    where = f"{step.kind}: {step.name}"
    if step.kind == "engine step" and (step.unknown_loops or step.branches):
      found.append(
        f"{where}: got loops of unknown length {list(step.unknown_loops)} and branches"
        f" {list(step.branches)}, expected none: the host would wait for each"
      )
    seconds = step.lowering_seconds + step.compile_seconds
    if step.num_layers == max(FLAT_LAYERS) and seconds > MOST_SECONDS:
      found.append(f"{where}: got {seconds:.0f} CPU seconds, expected at most {MOST_SECONDS:.0f}")
  layer = of_layer(steps, CLAIMED_ROWS)
  if layer and (layer[0] > MOST_OURS or layer[1] > MOST_OTHERS):
    found.append(
      f"engine step: {CLAIMED_ROWS} rows: got {layer[0]} launches of our kernels and {layer[1]}"
      f" others a layer, expected at most {MOST_OURS} and {MOST_OTHERS}"
    )
  return found


def result_of(step: Step) -> compile_report.Result:
  """Returns a step as a case of the kernels' report.

  It has no family, because contractions and attention use different programs for few rows and many.
  """
  return compile_report.Result(
    step.kind,
    step.name,
    kernels=step.kernels,
    launches=step.launches,
    seconds=step.lowering_seconds + step.compile_seconds,
    error=step.error,
  )


# ----- the tables


def steps_table(steps: Sequence[Step]) -> str:
  """Returns a table of the launches of each step and of where the host waits."""
  header = (
    "step", "ours", "others", "loops of unknown length", "host reads", "temporaries, MiB",
    "lowering, CPU s", "compiling, CPU s",
  )  # fmt: skip

  def lines() -> Iterator[Sequence[Any]]:
    for step in steps:
      if step.error:
        yield f"{step.kind}, {step.name}", step.error, *[""] * 6
        continue
      yield (
        f"{step.kind}, {step.name}",
        step.num_starts(True),
        step.num_starts(False),
        len(step.unknown_loops),
        len(step.unknown_loops) + len(step.branches),
        step.temporary_bytes >> 20,
        f"{step.lowering_seconds:.1f}",
        f"{step.compile_seconds:.1f}",
      )

  return measure.table(header, lines()) + "\n"


def works(steps: Sequence[Step], num_rows: int) -> list[tuple[roofline.Work, int]]:
  """Returns the launches of the whole model's step with their counts; equal launches are merged.

  Every further layer adds the difference between a step of two layers and a step of one.
  """
  num_layers = presets.get(MODEL).num_layers
  counts: dict[int, collections.Counter[roofline.Work]] = {}
  for step in steps:
    if (step.kind, step.num_rows) == ("engine step", num_rows) and step.num_layers <= 2:
      count = counts.setdefault(step.num_layers, collections.Counter())
      count.update(roofline.of_launch(launch, CONTEXT) for launch in step.launches)
      for start in step.starts:
        if not start.is_ours:
          count[roofline.of_start(start)] += start.num_times
  if counts.keys() != {1, 2}:
    return []
  return [
    (work, number)
    for work in {**counts[1], **counts[2]}
    if (number := counts[1][work] + (num_layers - 1) * (counts[2][work] - counts[1][work])) > 0
  ]


def peers(num_rows: int) -> Sequence[tuple[roofline.Work, int]]:
  """Returns the launches of cuBLAS and FlashInfer for the same step."""
  config = presets.get(MODEL)
  kind = config.only_kind("roofline.peers")
  return roofline.peers(
    num_rows,
    CONTEXT,
    hidden=config.hidden_size,
    intermediate=kind.gated("gpu_step").intermediate_size,
    heads=kind.attention.num_heads,
    kv_heads=kind.attention.num_kv_heads,
    head_dim=kind.attention.head_dim,
    vocabulary=config.vocab_size,
    num_layers=config.num_layers,
  )


def roofline_table(launches: Sequence[tuple[roofline.Work, int]], least_seconds: float) -> str:
  """Returns a table of launches and their sum; those below `least_seconds` share one line."""
  header = (
    "launch", "largest operand", "a step", "MB", "GFLOP", "multiprocessors", "at least, µs",
    "of the step, µs",
  )  # fmt: skip
  machine = roofline.H200
  bound = lambda work: work.seconds(machine)
  large = [item for item in launches if bound(item[0]) * item[1] >= least_seconds]
  small = [item for item in launches if bound(item[0]) * item[1] < least_seconds]

  def lines() -> Iterator[Sequence[Any]]:
    for work, number in large:
      yield (
        work.name,
        work.what,
        number,
        f"{work.num_bytes / 1e6:,.2f}",
        f"{work.num_operations / 1e9:,.2f}",
        work.occupied(machine),
        f"{bound(work) * 1e6:,.2f}",
        f"{bound(work) * number * 1e6:,.0f}",
      )
    if small:
      total = sum(bound(work) * number for work, number in small)
      count = sum(number for _, number in small)
      yield "smaller ones", "", count, "", "", "", "", f"{total * 1e6:,.0f}"
    total = sum(bound(work) * number for work, number in launches)
    count = sum(number for _, number in launches)
    yield "**all**", "", count, "", "", "", "", f"**{total * 1e6:,.0f}**"

  return measure.table(header, lines()) + "\n"


def markdown(steps: Sequence[Step]) -> str:
  """Returns all tables."""
  text = "## Steps\n\n" + steps_table(steps) + "\n"
  lines = []
  for num_rows in ENGINE_ROWS:
    layer = of_layer(steps, num_rows)
    if layer:
      lines.append((f"{num_rows:,}", *layer))
  text += "A layer of the engine's step:\n\n"
  text += measure.table(("rows", "ours", "others"), lines) + "\n"
  text += "\n## Paper roofline: computed, not measured\n"
  for num_rows in ROOFLINE_ROWS:
    ours = works(steps, num_rows)
    text += f"\n### {counted(num_rows, 'row')}, {CONTEXT:,} keys each\n\nOurs:\n\n"
    text += roofline_table(ours, 20e-6) + "\ncuBLAS and FlashInfer:\n\n"
    text += roofline_table(peers(num_rows), 0.0)
  return text


def main(arguments: Sequence[str]) -> int:
  """Returns the exit status: 1 if a limit is violated."""
  parser = argparse.ArgumentParser(prog="python -m experiments.compiled.gpu_step")
  parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/gpu_compile"))
  parser.add_argument(
    "--rows", default="", help="measure only engine steps with these rows, 1 and 2 layers"
  )
  parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
  options = parser.parse_args(arguments)
  if reason := sass.reason_against():
    parser.error(reason)
  chosen = wanted()
  if options.rows:
    chosen = [("engine step", int(r), n) for r in options.rows.split(",") for n in (1, 2)]
  steps: list[Step] = []
  spawning = multiprocessing.get_context("spawn")
  with concurrent.futures.ProcessPoolExecutor(options.processes, spawning) as pool:
    pending = [pool.submit(compiled, *one) for one in chosen]
    for done in concurrent.futures.as_completed(pending):
      steps.append(done.result())
      print(steps_table(steps[-1:]).splitlines()[-1], flush=True)
  steps.sort(key=lambda s: (s.kind, s.num_rows, s.num_layers))
  options.out.mkdir(parents=True, exist_ok=True)
  record = [dataclasses.asdict(step) for step in steps]
  (options.out / "steps.json").write_text(json.dumps(record, indent=1) + "\n")
  (options.out / "steps.md").write_text(
    markdown(steps) + "\n" + compile_report.markdown(result_of(s) for s in steps)
  )
  refused = complaints(steps)
  for sentence in refused:
    print(f"REFUSED  {sentence}")
  print(f"{len(steps)} steps, {len(refused)} refused; {options.out / 'steps.md'}")
  return 1 if refused else 0


if __name__ == "__main__":
  os.environ["JAX_PLATFORMS"] = "cpu"
  sys.exit(main(sys.argv[1:]))
