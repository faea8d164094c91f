"""Compiles the engine step and the train step for TPU, without a TPU.

Claim: the portable path compiles for TPU v5e and v6e, on one chip and on four.
Command: bash launch/tpu_compile.sh
Hardware: 2 CPU cores, no TPU; about an hour. Numbers: docs/results/tpu_compile.md

libtpu compiles for an absent topology from shapes alone: no weights are allocated, and nothing
runs. A case names a program, a model and chips. Steps are compiled in separate processes, because
the compiler may abort its process. There are three kinds:

    engine   `runner.instance_step` as `Runner` runs it, one instance, slabs over all chips
    train    the gradient of one micro-batch as `Trainer` runs it, one instance per chip
    tile     the token-wise work of one tile of rows: all layers without attention, and the head

The third kind is used to choose the tile height (`numerics.ROW_TILES`), by the compiler's estimate
of cycles (which it uses to choose tilings) instead of measured time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import datetime
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

from absl import flags
import jax
from jax.experimental import topologies
import jax.numpy as jnp
import numpy as np

from experiments import measure
from experiments.compiled import hlo
from seerjax import numerics as numerics_lib, parallel
from seerjax.backends.tiled import Tiled
from seerjax.engine import batching, runner as runner_lib, sizes
from seerjax.models import (
  attention as model_attention,
  config as model_config,
  head,
  kv_layout,
  mlp,
  parameters,
  presets,
  transformer,
)
from seerjax.models.decoder import decide
from seerjax.ops import tiles
from seerjax.trainer import losses, optimizer as optimizer_lib, packing, step as step_lib
from seerjax.types import SamplingRows, TokenBatch, TrainBatch

# GiB of one chip, as published: https://cloud.google.com/tpu/docs/v5e and .../v6e
CHIPS = {"v5e": 16, "v6e": 32}
# Google's names for four chips.
ACCELERATORS = {"v5e": "v5litepod-4", "v6e": "v6e-4"}
MODELS = ("qwen3-0.6b", "qwen3-8b")
TILES = (16, 32, 64, 128, 256, 512)
# Of the engine: whole contexts that fit in its pages, tokens per context, positions per page.
SEQUENCES, CONTEXT, PAGE = 32, 1024, 32
MICRO_ROWS = 2048
BIASES = 1
# The smallest number of layers with which the layers' program becomes a loop.
FEW_LAYERS = parameters.UNROLLED_LAYERS + 1

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """One program to compile.

  Attributes:
    kind: "engine", "train" or "tile".
    model: name of a preset (`presets.get`).
    chip: a key of `CHIPS`.
    num_chips: 1 or 4.
    rows: rows of the step, micro-batch or tile.
    row_tile: `NumericsConfig.row_tile`; for a tile its rows.
    num_layers: number of layers; 0 for all.
  """

  kind: str
  model: str
  chip: str
  num_chips: int
  rows: int
  row_tile: int
  num_layers: int = 0

  @property
  def name(self) -> str:
    """Returns the name of the case in results and in --cases."""
    layers = f"-{self.num_layers}layers" if self.num_layers else ""
    return (
      f"{self.kind}-{self.model}{layers}-{self.chip}-x{self.num_chips}-rows{self.rows}"
      f"-tile{self.row_tile}"
    )

  @property
  def shape(self) -> model_config.TransformerConfig:
    """Returns the shape of the model with `num_layers` layers."""
    whole = presets.get(self.model)
    return whole.changed(num_layers=self.num_layers or whole.num_layers)

  @property
  def numerics(self) -> numerics_lib.NumericsConfig:
    """Returns the numerics."""
    return numerics_lib.NumericsConfig(
      backend="tiled", compute_dtype="bfloat16", row_tile=self.row_tile, reduction_shards=8
    )


def cases() -> list[Case]:
  """Returns all cases, cheapest first."""
  found = [
    Case(kind="tile", model=model, chip=chip, num_chips=1, rows=tile, row_tile=tile)
    for model in MODELS
    for chip in CHIPS
    for tile in TILES
  ]
  for kind, rows in (("engine", 512), ("engine", 64), ("train", MICRO_ROWS)):
    found += [
      Case(
        kind=kind, model=model, chip=chip, num_chips=count, rows=rows,
        row_tile=numerics_lib.ROW_TILES["tpu"],
      )
      for model in MODELS
      for chip in CHIPS
      for count in (1, 4)
    ]  # fmt: skip
  # No chip has room for all weights and sums of 8B; with few layers the looped program is the same.
  return found + [
    Case(
      kind="train", model="qwen3-8b", chip=chip, num_chips=1, rows=MICRO_ROWS,
      row_tile=numerics_lib.ROW_TILES["tpu"], num_layers=count,
    )
    for chip in CHIPS
    for count in (FEW_LAYERS, FEW_LAYERS + 1)
  ]  # fmt: skip


def require_compiler() -> None:
  """Checks that the TPU compiler is installed.

  Raises:
    ValueError: naming the command that installs it.
  """
  if importlib.util.find_spec("libtpu") is None:
    raise ValueError(
      "tpu_compile: got a Python without libtpu, the TPU compiler, expected one of"
      " launch/tpu_compile.sh; run bash launch/tpu_compile.sh."
    )


def mesh_of(case: Case) -> jax.sharding.Mesh:
  """Returns a mesh of absent chips, over an engine's slabs or a trainer's instances.

  Raises:
    ValueError: as in `require_compiler`.
  """
  require_compiler()
  # Without these settings libtpu waits for a metadata server, and refuses to be loaded by a second
  # process.
  os.environ.update(
    TPU_SKIP_MDS_QUERY="1",
    TPU_WORKER_HOSTNAMES="localhost",
    TPU_ACCELERATOR_TYPE=ACCELERATORS[case.chip],
    ALLOW_MULTIPLE_LIBTPU_LOAD="1",
  )
  topology = topologies.get_topology_desc(f"{case.chip}:2x2", "tpu")
  devices = np.asarray(topology.devices[: case.num_chips])
  shape = (-1, 1) if case.kind == "train" else (1, -1)
  names = (parallel.INSTANCE_AXIS, parallel.MODEL_AXIS)
  return jax.sharding.Mesh(devices.reshape(shape), names)


def _placed(tree: Any, mesh: jax.sharding.Mesh, specs: Any) -> Any:
  """Returns the shapes of a pytree with shardings; `specs` is a pytree, or one spec for all."""
  if isinstance(specs, jax.P):
    specs = jax.tree.map(lambda _: specs, tree)

  def placed(leaf: Any, spec: jax.P) -> jax.ShapeDtypeStruct:
    sharding = jax.sharding.NamedSharding(mesh, spec)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

  return jax.tree.map(placed, tree, specs)


def _params(case: Case) -> parameters.Params:
  """Returns the shapes of the weights used at run time."""
  master = parameters.shapes(case.shape, case.numerics.reduction_shards)
  return jax.eval_shape(lambda tree: parameters.compute_params(tree, case.numerics), master)


def lowered_engine(case: Case, mesh: jax.sharding.Mesh) -> Any:
  """Returns the lowered step of `case.rows` rows."""
  runner = runner_lib.Runner(decide(case.shape, case.numerics), mesh, max_programs=1)
  stages = runner.decoder.backend
  inputs = batching.instance_inputs(
    [],
    [],
    num_rows=stages.whole_rows(case.rows),
    num_segments=stages.whole_segments(case.rows),
    max_copies=2 * case.rows,
    max_key_copies=sizes.KEY_COPIES_PER_ROW * case.rows,
    query_tile=case.numerics.query_tile,
    page_size=PAGE,
    table_width=CONTEXT // PAGE,
  )
  words, layout = runner_lib.pack(jax.tree.map(lambda leaf: np.asarray(leaf)[None], inputs))
  pages = jax.eval_shape(
    lambda: kv_layout.empty_pages(
      runner.decoder,
      num_pages=1 + SEQUENCES * CONTEXT // PAGE,
      page_size=PAGE,
      tensor_parallel_size=mesh.shape[parallel.MODEL_AXIS],
    )
  )
  pages = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((1, *leaf.shape), leaf.dtype), pages)
  params = _params(case)
  traced = runner._step_program.trace(
    _placed(params, mesh, parameters.specs_of(params)),
    _placed(pages, mesh, jax.P(parallel.INSTANCE_AXIS, parallel.MODEL_AXIS)),
    _placed(words, mesh, jax.P(parallel.INSTANCE_AXIS)),
    _placed(jax.eval_shape(lambda: numerics_lib.key(0)), mesh, jax.P()),
    layout,
    False,  # Rows may have filters.
  )
  return traced.lower(lowering_platforms=("tpu",))


def lowered_gradient(case: Case, mesh: jax.sharding.Mesh) -> Any:
  """Returns the lowered gradient of a micro-batch of `case.rows` rows per instance."""
  shape, numerics = case.shape, case.numerics
  rows, sequences = packing.derived_sizes(
    context=CONTEXT,
    bytes_per_position=4 * shape.kv_features,
    rows=case.rows,
  )
  decoder = decide(shape, numerics)
  layout = packing.layout(
    decoder=decoder,
    page_size=PAGE,
    rows_per_micro_batch=rows,
    max_num_seqs=sequences,
    max_sequence_tokens=CONTEXT,
  )
  trainer = step_lib.Trainer(
    decoder,
    losses.dapo(),
    optimizer_lib.make_optimizer(optimizer_lib.OptimizerConfig(learning_rate=1e-4)),
    mesh,
    layout.num_pages,
    PAGE,
    remat="layer",
  )
  leading = (mesh.size,) if mesh.size > 1 else ()

  def of(dtype: Any, *sizes: int) -> Any:
    return jax.ShapeDtypeStruct((*leading, *sizes), dtype)

  i32, f32, n, s = jnp.int32, jnp.float32, layout.num_rows, layout.num_segments
  micro = step_lib.MicroBatch(
    batch=TrainBatch(
      tokens=TokenBatch(
        tokens=of(i32, n),
        positions=of(i32, n),
        slots=of(i32, n),
        num_rows=of(i32),
        segment_start=of(i32, s),
        segment_length=of(i32, s),
        page_table=of(i32, s, layout.pages_per_sequence),
        num_segments=of(i32),
      ),
      targets=of(i32, n),
      loss_mask=of(jnp.bool_, n),
      sequence_index=of(i32, n),
      advantages=of(f32, n),
      behaviour_logprobs=None,
      raw_logprobs=None,
      sampling=SamplingRows(
        of(f32, n), of(i32, n), of(f32, n), of(f32, n), of(i32, n, BIASES), of(f32, n, BIASES),
        of(i32, n), of(i32, n),
      ),
    ),
    old_logprobs=of(f32, n),
    is_first=of(jnp.bool_),
  )  # fmt: skip
  params, by_instance = _params(case), step_lib.BY_INSTANCE if leading else jax.P()
  number: Any = jax.ShapeDtypeStruct((), f32)
  traced = trainer._gradient.trace(
    _placed(params, mesh, jax.P()),
    _placed(micro, mesh, by_instance),
    _placed(step_lib.BatchTotals(losses.Denominators(number, number)), mesh, jax.P()),
    _placed(jax.tree.map(lambda leaf: of(f32, *leaf.shape), params), mesh, by_instance),
  )
  return traced.lower(lowering_platforms=("tpu",))


def lowered_tile(case: Case, mesh: jax.sharding.Mesh) -> Any:
  """Returns the lowered token-wise work of one tile, through all layers and the head.

  Attention is replaced by the sum of queries, keys and values.
  """
  shape, operations = case.shape, Tiled(case.numerics)
  shape.only_kind("a tile")
  of_layer = shape.layer_shape(0, case.numerics.reduction_shards)
  params = _params(case)
  if "head" not in params:  # A tied head: the embedding table in slabs.
    slabs = (case.numerics.reduction_shards, -1, shape.hidden_size)
    params["head"] = jax.eval_shape(lambda table: table.reshape(slabs), params["embed"])
  del params["embed"]

  def of_tile(params, x, cos, sin, anchor):
    one = tiles.traced_one(anchor)

    def layer(x: Any, turn: Any) -> tuple[Any, None]:
      rest, index = turn
      own = rest | {n: tiles.LayerSlabs(params["layers"][n], index) for n in transformer.SLABS}
      q, k, v = model_attention.input_rows(operations, of_layer, None, own, (x, cos, sin), one)
      mixed = q + (k + v)[:, :, None]
      return mlp.output_rows(operations, of_layer, None, own, (x, mixed), one), None

    rest = {n: leaf for n, leaf in params["layers"].items() if n not in transformer.SLABS}
    x, _ = jax.lax.scan(layer, x, (rest, jnp.arange(shape.num_layers, dtype=jnp.int32)))
    return head.logits_rows(operations, shape, None, params, x, one)

  turns = jax.ShapeDtypeStruct((case.rows, of_layer.kind.attention.head_dim // 2), jnp.float32)
  hidden = jax.ShapeDtypeStruct((case.rows, shape.hidden_size), jnp.bfloat16)
  anchor = jax.ShapeDtypeStruct((), jnp.int32)
  arguments = _placed((params, hidden, turns, turns, anchor), mesh, jax.P())
  return jax.jit(of_tile).trace(*arguments).lower(lowering_platforms=("tpu",))


LOWERED = {"engine": lowered_engine, "train": lowered_gradient, "tile": lowered_tile}


def compiled(case: Case) -> dict[str, Any]:
  """Compiles a case; returns its record as JSON.

  A compiler error is a result too: "refused" has the beginning of its message.
  """
  mesh, begin = mesh_of(case), time.perf_counter()
  lowered = LOWERED[case.kind](case, mesh)
  record: dict[str, Any] = dict(lower_seconds=time.perf_counter() - begin, refused="")
  begin = time.perf_counter()
  try:
    program = lowered.compile()
  except jax.errors.JaxRuntimeError as error:
    return record | dict(compile_seconds=time.perf_counter() - begin, refused=str(error)[:2000])
  record["compile_seconds"] = time.perf_counter() - begin
  memory, costs = program.memory_analysis(), program.cost_analysis()
  text = hlo.parsed(program.as_text())
  loops = text.loops()
  return record | dict(
    temporaries=memory.temp_size_in_bytes,
    arguments=memory.argument_size_in_bytes,
    results=memory.output_size_in_bytes - memory.alias_size_in_bytes,
    code=memory.generated_code_size_in_bytes,
    flops=costs["flops"],
    loops=len(loops),
    unknown_loops=sum(loop.trips is None for loop in loops),
    # A tile has loops over layers, of known length, and loops over slabs.
    cycles=text.cycles(case.numerics.reduction_shards) if case.kind == "tile" else 0,
  )


def in_their_own_process(
  batch: Sequence[Case], timeout_seconds: int, say: Say
) -> dict[str, dict[str, Any]]:
  """Compiles cases in one new process; returns their records by name.

  A case that the process did not finish only has "ended", which says how the process ended.
  """
  names = ",".join(case.name for case in batch)
  command = [sys.executable, "-P", "-m", "experiments.compiled.tpu_compile", f"--only={names}"]
  say(f"{datetime.datetime.now():%H:%M:%S} {names}")
  try:
    done = subprocess.run(
      command, capture_output=True, text=True, timeout=timeout_seconds, check=False
    )
    out, status = done.stdout, f"with status {done.returncode}"
    errors = " ".join(done.stderr.strip().splitlines()[-3:])[:1000]
  except subprocess.TimeoutExpired as expired:
    out = expired.stdout or b""
    out = out.decode() if isinstance(out, bytes) else out
    status, errors = f"after {timeout_seconds} s", "unfinished"
  lines = [line for line in out.splitlines() if line.startswith('{"lower_seconds"')]
  records = {case.name: json.loads(line) for case, line in zip(batch, lines, strict=False)}
  ended = {case.name: dict(ended=f"{status}: {errors}") for case in batch[len(records) :]}
  return records | ended


def batches(wanted: Sequence[Case]) -> list[list[Case]]:
  """Returns the cases grouped by process: tiles together, each step alone."""
  found: list[list[Case]] = []
  for case in wanted:
    last = found[-1][-1] if found else None
    same = last and (last.kind, last.model, last.chip) == (case.kind, case.model, case.chip)
    if case.kind == "tile" and same:
      found[-1].append(case)
    else:
      found.append([case])
  return found


def run(wanted: Sequence[Case], directory: pathlib.Path, timeout_seconds: int, say: Say) -> None:
  """Compiles the cases missing in `directory`/results.jsonl; appends them, and writes table.md."""
  directory.mkdir(parents=True, exist_ok=True)
  path = directory / "results.jsonl"
  lines = path.read_text().splitlines() if path.is_file() else []
  records = {record["name"]: record for record in map(json.loads, lines)}
  commit = subprocess.run(
    ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
  ).stdout.strip()
  is_known = lambda case: case.name in records and "ended" not in records[case.name]
  for batch in batches([case for case in wanted if not is_known(case)]):
    found = in_their_own_process(batch, timeout_seconds * len(batch), say)
    for case in batch:
      record = dict(
        name=case.name,
        case=dataclasses.asdict(case),
        commit=commit,
        date=f"{datetime.date.today()}",
        jax=jax.__version__,
        libtpu=importlib.metadata.version("libtpu"),
      )
      records[case.name] = record | found[case.name]
      with path.open("a") as file:
        file.write(json.dumps(records[case.name]) + "\n")
    known = [records[case.name] for case in cases() if case.name in records]
    (directory / "table.md").write_text(table(known))
  say(f"written to {directory}")


def table(records: Sequence[dict[str, Any]]) -> str:
  """Returns the records as Markdown: steps first, then tiles."""
  return steps_table(records) + "\n" + tiles_table(records)


def steps_table(records: Sequence[dict[str, Any]]) -> str:
  """Returns one line per step of engine and trainer; sizes are per chip."""
  rows = []
  for record in records:
    case = Case(**record["case"])
    if case.kind == "tile":
      continue
    layers = f", {case.num_layers} layers" if case.num_layers else ""
    cells = [case.kind, case.model + layers, f"{case.chip} x{case.num_chips}", f"{case.rows:,}"]
    if "ended" in record or record["refused"]:
      cells += [f"**refused**: {verdict(record)}", "", "", "", "", ""]
    else:
      used = record["arguments"] + record["temporaries"] + record["results"] + record["code"]
      cells += [
        f"{record['arguments'] / 2**20:,.0f}",
        f"{record['temporaries'] / 2**20:,.0f}",
        f"{used / 2**30 / CHIPS[case.chip]:.0%}",
        f"{record['loops']} ({record['unknown_loops']})",
        f"{record['flops']:.3g}",
        f"{record['lower_seconds']:.0f} + {record['compile_seconds']:.0f}",
      ]
    rows.append(cells)
  names = (
    "step", "model", "chips", "rows", "arguments, MiB", "temporaries, MiB",
    "of the chip's memory", "loops (unknown)", "FLOPs, each loop's body once",
    "lowering + compiling, s",
  )  # fmt: skip
  return measure.table(names, rows) + "\n"


def verdict(record: dict[str, Any]) -> str:
  """Returns the first sentence of the compiler's error, or how its process ended."""
  if "ended" in record:
    return f"ended {record['ended']}"
  return " ".join(record["refused"].split("\n")[0].split())


def tiles_table(records: Sequence[dict[str, Any]]) -> str:
  """Returns the compiler's estimate of cycles by tile height, for steps of 64 and of 512 rows."""
  rows = []
  for record in records:
    case = Case(**record["case"])
    if case.kind != "tile" or "cycles" not in record:
      continue
    by_step = [f"{-(-rows // case.rows) * record['cycles']:,}" for rows in (64, 512)]
    cells = (case.model, case.chip, case.rows, f"{record['cycles']:,}", *by_step)
    rows.append((*cells, f"{record['temporaries'] / 2**20:.1f}"))
  names = (
    "model", "chip", "tile", "cycles of a tile", "of 64 rows", "of 512 rows", "temporaries, MiB",
  )  # fmt: skip
  return measure.table(names, rows) + "\n"


def main(args: flags.FlagValues) -> None:
  if args.only:
    for name in args.only.split(","):
      case = next(case for case in cases() if case.name == name)
      print(json.dumps(compiled(case)), flush=True)
    return
  wanted = [case for case in cases() if args.cases in case.name]
  if args.list:
    print("\n".join(case.name for case in wanted))
    return
  require_compiler()
  run(wanted, pathlib.Path(args.workdir), args.timeout_seconds, print)


if __name__ == "__main__":
  flags.DEFINE_string("cases", "", "compile only cases with this text in their name")
  flags.DEFINE_bool("list", False, "list the cases without compiling")
  flags.DEFINE_string(
    "workdir", "runs/tpu_compile", "output directory for results.jsonl and table.md"
  )
  flags.DEFINE_integer("timeout_seconds", 1800, "time limit per case", lower_bound=1)
  flags.DEFINE_string("only", "", "compile these cases in this process, and print their records")
  measure.command(main)
