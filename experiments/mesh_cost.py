"""Measures the cost of equal bits on a mesh: tree sums in a gradient over the model axis.

Claim: adding partial sums as one tree over logical slabs takes at most 10 % of a gradient's time
more than `psum`, whose rounding depends on the number of devices.
Command: bash launch/local.sh experiments.mesh_cost --workdir=runs/mesh_cost
  in a minute: --groups=1 --repetitions=1 --implementations=native
Hardware: 2 CPU cores, some minutes. The devices are virtual devices of this CPU and share its
cores, so no mesh is faster than one device here. Numbers: docs/results/cluster_cost.md

The micro-batch is that of `gradient_cost`, on 1, 2, 4 and 8 devices of the model axis, which take
turns. The sum of a layer over its slabs, f32[slabs, rows, hidden], is also timed alone: as a tree
(`parallel.sum_slabs`), which forward and backward each do twice per layer, and as `psum` of each
device's local sum. Seconds are CPU seconds of the process, over all threads.
"""

from __future__ import annotations

from collections.abc import Callable
import json
import pathlib
import time
from typing import Any

from absl import app, flags
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import rich.console

from experiments import gradient_cost
from seerjax import metrics, parallel
from seerjax.array_typing import Array
from seerjax.run import command_line

MESHES = (1, 2, 4, 8)
MOST_OF_GRADIENT = 0.10
# Sums per timing: one is too short to time.
SUMS_A_TURN = 20


def sums(num_slabs: int, num_rows: int, width: int, devices: int) -> dict[str, Callable[[], Any]]:
  """Returns functions that add f32[r, n, d] over the slabs of a mesh: "tree" and "psum"."""
  mesh = parallel.make_mesh(model_shards=devices)
  spread = jax.sharding.NamedSharding(mesh, jax.P(parallel.MODEL_AXIS))
  drawn = np.random.default_rng(0).standard_normal((num_slabs, num_rows, width), np.float32)
  slabs = jax.device_put(jnp.asarray(drawn), spread)

  def tree(local: Array) -> Array:
    return parallel.sum_slabs(local, parallel.MODEL_AXIS)

  def psum(local: Array) -> Array:
    return lax.psum(jnp.sum(local, axis=0), parallel.MODEL_AXIS)

  def timed(function: Callable[[Array], Array]) -> Callable[[], Any]:
    program = jax.jit(
      jax.shard_map(
        function, mesh=mesh, in_specs=jax.P(parallel.MODEL_AXIS), out_specs=jax.P(),
        check_vma=False,
      )
    )  # fmt: skip

    def run() -> None:
      for _ in range(SUMS_A_TURN):
        jax.block_until_ready(program(slabs))

    return run

  return {"tree": timed(tree), "psum": timed(psum)}


def measure(
  model: str, implementation: str, num_groups: int, repetitions: int, say: Callable[[str], None]
) -> list[dict[str, Any]]:
  """Returns one record per mesh.

  Raises:
    AssertionError: if a gradient's bits differ between two meshes.
  """
  policy, config = gradient_cost.job(model, implementation)
  num_slabs, shape = config.numerics.reduction_shards, policy.model
  timed: dict[tuple[int, str], Callable[[], Any]] = {}
  gradients: dict[int, Any] = {}
  meshes = [devices for devices in MESHES if num_slabs % devices == 0]
  num_rows = 0
  for devices in meshes:
    batch, calls = gradient_cost.calls(model, implementation, num_groups, devices)
    num_rows = batch.targets.shape[-1]
    timed[devices, "gradient"] = calls["gradient"]
    gradients[devices] = jax.device_get(calls["gradient"]())
    for name, call in sums(num_slabs, num_rows, shape.hidden_size, devices).items():
      timed[devices, name] = call
  for devices in meshes:
    # The instance axis of each mesh has size one.
    pairs = zip(jax.tree.leaves(gradients[1]), jax.tree.leaves(gradients[devices]), strict=True)
    assert all(a.tobytes() == b.tobytes() for a, b in pairs), f"{devices} devices: other bits"
  seconds: dict[tuple[int, str], list[float]] = {key: [] for key in timed}
  for repetition in range(repetitions + 1):
    for key in list(timed)[:: 1 if repetition % 2 else -1]:
      begin = time.process_time()
      timed[key]()
      if repetition:  # The first round compiles.
        seconds[key].append(time.process_time() - begin)
    say(f"  {implementation}: round {repetition} of {repetitions}")
  # Each layer sums the outputs of attention and MLP, and in the backward pass the input gradients.
  num_sums = 4 * shape.num_layers
  found = []
  for devices in meshes:
    gradient, tree, psum = (
      float(np.median(seconds[devices, name])) for name in ("gradient", "tree", "psum")
    )
    price = num_sums * (tree - psum) / SUMS_A_TURN
    found.append(
      dict(
        implementation=implementation, devices=devices, rows=num_rows, slabs=num_slabs,
        gradient=gradient, tree=tree / SUMS_A_TURN, psum=psum / SUMS_A_TURN,
        share=price / gradient, turns={name: seconds[devices, name] for name in ("gradient",)},
      )
    )  # fmt: skip
  return found


def table(records: list[dict[str, Any]]) -> str:
  """Returns the records as Markdown."""
  lines = [
    "| implementation | devices | gradient, CPU s | of one device's | one sum as a tree, ms | by"
    " psum, ms | the tree's price, of the gradient |",
    "|---|---:|---:|---:|---:|---:|---:|",
  ]
  one = {
    record["implementation"]: record["gradient"] for record in records if record["devices"] == 1
  }
  for record in records:
    cells = [
      record["implementation"],
      str(record["devices"]),
      f"{record['gradient']:.3f}",
      f"{record['gradient'] / one[record['implementation']]:.2f}",
      f"{1e3 * record['tree']:.2f}",
      f"{1e3 * record['psum']:.2f}",
      f"{record['share']:.1%}",
    ]
    lines.append(f"| {' | '.join(cells)} |")
  return "\n".join(lines)


def main(argv: list[str]) -> None:
  args = flags.FLAGS
  with command_line.refusals():
    command_line.check_arguments(argv)
    jax.config.update("jax_num_cpu_devices", max(MESHES))
    say = rich.console.Console(stderr=True).print
    records = [
      record
      for implementation in args.implementations
      for record in measure(args.model, implementation, args.groups, args.repetitions, say)
    ]
  directory = pathlib.Path(args.workdir)
  directory.mkdir(parents=True, exist_ok=True)
  metrics.write_summary(directory / "results.json", {"cells": json.loads(json.dumps(records))})
  (directory / "table.md").write_text(table(records) + "\n")
  print(table(records))
  print("all gradients have the bits of one device's")


if __name__ == "__main__":
  flags.DEFINE_string(
    "model", "nano", "Model: nano, a Hugging Face directory, a GGUF file, or a Hub id."
  )
  flags.DEFINE_list(
    "implementations",
    list(gradient_cost.IMPLEMENTATIONS),
    "Implementations to measure, from tiled, native.",
  )
  flags.DEFINE_integer(
    "groups", 4, f"Number of groups of {gradient_cost.MEMBERS} responses each.", 1
  )
  flags.DEFINE_integer("repetitions", 7, "Number of timed rounds, after one warm-up round.", 1)
  flags.DEFINE_string("workdir", "runs/mesh_cost", "Output directory for numbers and table.")
  app.run(main)
