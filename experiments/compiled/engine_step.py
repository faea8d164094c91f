"""Times the engine's decoding step on a GPU: milliseconds, launches, weight bytes per millisecond.

Claim: on an H100 or H200 a decoding step of Qwen3-8B with the kernels takes at most 1.5 times as
long as copying its bytes (weights, and keys and values of the context); not measured yet.
Command: bash launch/gpu_check.sh --part=5
  one backend: python -m experiments.compiled.engine_step --backend=pallas --rows=1,64
  a check on a CPU: python -m experiments.compiled.engine_step --dry_run
Hardware: an H100 or H200; 16 GB of weights and 9 to 20 GB of pages. Numbers: none yet

The step is that of `decoding_step` at the end of `--context` positions, with random weights. Each
step uses the pages of the previous one; a time is the median over several turns of consecutive
steps. Launches are counted in the compiled program.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import statistics
import time
from typing import Any

from absl import flags
import jax
import jax.numpy as jnp

from experiments import measure
from experiments.compiled import decoding_step
from pallas_kernels import program
from pallas_kernels.bench import timing
from seerjax import layer_kinds, numerics as numerics_lib
from seerjax.layer_kinds import Gated, Grouped, LayerConfig
from seerjax.models import config as model_config, parameters, presets
from seerjax.models.decoder import decide
from seerjax.numerics import NumericsConfig
from seerjax.ops import rotary

TURNS = 5
# The model of a dry run: the smallest that the kernels support.
SMALL = model_config.TransformerConfig(
  vocab_size=128,
  hidden_size=64,
  layers=layer_kinds.uniform(
    LayerConfig(
      attention=Grouped(
        num_heads=2,
        num_kv_heads=1,
        head_dim=64,
        has_qk_norms=True,
        rotary=rotary.RotaryConfig(head_dim=64),
      ),
      feed_forward=Gated(intermediate_size=64),
    ),
    2,
  ),
)


@dataclasses.dataclass(frozen=True)
class Timed:
  """Measurements for one number of rows.

  Attributes:
    device: the device.
    backend: backend of the forward pass.
    xla_flags: XLA flags of the process.
    model: name of the model.
    rows: number of sequences.
    context: positions that each sequence attends to.
    compile_seconds: lowering and compilation.
    milliseconds: time of a step: median, minimum and maximum over the turns.
    kernels: launches of our kernels in a step; a loop of unknown length counts one iteration.
    others: launches of XLA's kernels, counted in the same way.
    host_reads: places at which the host waits for a predicate.
    weight_bytes: bytes of all layers and the head.
    page_bytes: bytes of the keys and values that a step reads.
  """

  device: str
  backend: str
  xla_flags: str
  model: str
  rows: int
  context: int
  compile_seconds: float
  milliseconds: tuple[float, float, float]
  kernels: int
  others: int
  host_reads: int
  weight_bytes: int
  page_bytes: int

  def line(self, copy_bandwidth: float) -> str:
    """Returns a readable line; `copy_bandwidth` is in bytes per second, 0 if unknown."""
    median, least, most = self.milliseconds
    text = (
      f"{self.model} {self.backend} {self.rows:4d} rows: {median:9.3f} ms ({least:.3f} to"
      f" {most:.3f}), {self.kernels:,} kernels of ours and {self.others:,} of XLA's,"
      f" {self.host_reads} host syncs, {self.weight_bytes / median / 1e6:,.1f} MB of weights a ms,"
      f" compiled in {self.compile_seconds:.0f} s"
    )
    if not copy_bandwidth:
      return text
    bound = 1e3 * (self.weight_bytes + self.page_bytes) / copy_bandwidth
    return f"{text}, {median / bound:.2f} times what a copy of its bytes takes ({bound:.3f} ms)"


def random_weights(
  model: model_config.TransformerConfig, numerics: NumericsConfig
) -> parameters.Params:
  """Returns random weights in the layout and dtype used at run time, drawn on the device."""

  @functools.partial(jax.jit, static_argnums=1)
  def uniform(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.uniform(key, shape, numerics.dtype, -0.03, 0.03)

  def leaf(path: Any, shape: jax.ShapeDtypeStruct) -> jax.Array:
    name = jax.tree_util.keystr(path)
    if "norm" in name:
      return jnp.ones(shape.shape, shape.dtype)
    return uniform(numerics_lib.key(sum(map(ord, name))), shape.shape)

  return jax.tree_util.tree_map_with_path(leaf, decoding_step.weights(model, numerics))


def timed(
  name: str,
  model: model_config.TransformerConfig,
  numerics: NumericsConfig,
  params: parameters.Params,
  rows: int,
  *,
  context: int,
  steps: int,
  turns: int,
) -> Timed:
  """Compiles the step for `rows` rows; times `turns` turns of `steps` steps after a warm-up."""
  inputs = jax.tree.map(jnp.asarray, decoding_step.inputs(model, rows, context))
  num_pages = 1 + rows * decoding_step.pages_of(context)
  pages = decoding_step.pages(model, numerics, num_pages)
  key = numerics_lib.key(0)
  step = decoding_step.program(model, numerics)
  started = time.perf_counter()
  compiled = jax.jit(step, donate_argnums=(1,)).lower(params, pages, inputs, key).compile()
  compile_seconds = time.perf_counter() - started

  def turn(pages: Any, count: int) -> tuple[Any, float]:
    started = time.perf_counter()
    for _ in range(count):
      pages, tokens, _ = compiled(params, pages, inputs, key)
    jax.block_until_ready(tokens)
    return pages, 1e3 * (time.perf_counter() - started) / count

  pages, _ = turn(pages, 1)
  milliseconds = []
  for _ in range(turns):
    pages, took = turn(pages, steps)
    milliseconds.append(took)
  launched = program.read(compiled.as_text() or "")
  read = {part: leaf for part, leaf in params.items() if part != "embed" or model.is_tied}
  of_pages = sum(leaf.nbytes for leaf in jax.tree.leaves(pages))
  return Timed(
    device=jax.devices()[0].device_kind,
    backend=numerics.backend,
    xla_flags=numerics_lib.fingerprint(numerics)["xla_flags"],
    model=name,
    rows=rows,
    context=context,
    compile_seconds=compile_seconds,
    milliseconds=(statistics.median(milliseconds), min(milliseconds), max(milliseconds)),
    kernels=launched.num_ours,
    others=launched.num_others,
    host_reads=launched.num_host_reads,
    weight_bytes=sum(leaf.nbytes for leaf in jax.tree.leaves(read)),
    page_bytes=of_pages,
  )


def main(args: flags.FlagValues) -> None:
  model, name, context, steps = presets.get(args.preset), args.preset, args.context, args.steps
  # Any: the flag is a string, which NumericsConfig validates.
  backend: Any = args.backend
  turns = TURNS
  if args.dry_run:
    model, name, steps, turns = SMALL, "a small model (dry run)", 1, 1
    context = decoding_step.PAGE_SIZE
    backend = "pallas_interpreted" if backend == "pallas" else backend
  elif args.layers:
    model = model.changed(num_layers=args.layers)
    name += f" of {args.layers} layers"
  numerics = decide(
    model,
    NumericsConfig(
      backend=backend,
      compute_dtype="bfloat16",
      row_tile=args.row_tile,
    ),
  ).numerics
  bandwidth = 0.0 if args.dry_run else timing.measure_machine().copy_bandwidth
  params = random_weights(model, numerics)
  out = pathlib.Path(args.out)
  out.parent.mkdir(parents=True, exist_ok=True)
  for rows in args.rows:
    found = timed(
      name, model, numerics, params, int(rows), context=context, steps=steps, turns=turns
    )
    print(found.line(bandwidth), flush=True)
    with out.open("a") as file:  # Written at once, because a later measurement may hang.
      file.write(json.dumps({"copy_bandwidth": bandwidth, **dataclasses.asdict(found)}) + "\n")


if __name__ == "__main__":
  flags.DEFINE_enum("preset", "qwen3-8b", sorted(presets.CONFIGS), "Preset of the model's shape.")
  flags.DEFINE_enum("backend", "auto", numerics_lib.BACKENDS, "Backend, as in NumericsConfig.")
  flags.DEFINE_list("rows", ["1", "16", "64", "256"], "Numbers of sequences to decode together.")
  flags.DEFINE_integer("layers", 0, "Number of layers; 0 means all.", lower_bound=0)
  flags.DEFINE_integer("context", 512, "Number of positions per sequence.", lower_bound=1)
  flags.DEFINE_integer("steps", 10, "Number of steps per turn.", lower_bound=1)
  flags.DEFINE_integer("row_tile", 16, "Row tile of the tiled backend.", lower_bound=2)
  flags.DEFINE_bool(
    "dry_run", False, "Whether to run only one step of a small model, on any machine."
  )
  flags.DEFINE_string("out", "runs/engine_step.jsonl", "Output file, one line per number of rows.")
  measure.command(main)
