r"""Compares digests of one training run on several meshes, process counts and clusters.

Claim: weights, optimiser, tokens and both log-probabilities of a GRPO run are bit-identical on
meshes of 1 and 8 devices, in 1, 2 and 4 processes, on clusters of 1, 2 and 3 workers, and for a
run that starts on a cluster and continues as a slice.
Command: bash launch/local.sh experiments.cluster.training --workdir=runs/cluster_digests
  some of them:          --cells=1x1,2x4
  workers by Ray:        --config.cluster.address= (needs the extra seerjax[cluster])
  the portable path:     --config.numerics.backend=tiled --workdir=runs/digests_tiled
Hardware: 2 CPU cores, some minutes a cell. Numbers: docs/results/cluster.md

A finished cell is a line of cells.jsonl and is not run again; an interrupted one continues from its
last checkpoint. The output of each process is in the cell's directory.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
from typing import Any, NamedTuple

from absl import flags, logging
import jax
import numpy as np

from experiments import cells as cells_lib, measure, peer_process
from seerjax import agreement, checkpoint, metrics, parallel, rl
from seerjax.array_typing import Array
from seerjax.cluster import config as cluster_config
from seerjax.commands import flags as flags_lib
from seerjax.engine import engine as engine_lib
from seerjax.rollout import groups, journal as journal_lib
from seerjax.run import policy as policy_lib, presets, slices
from seerjax.run.config import RunConfig
from seerjax.run.evaluation import EvaluationConfig
from seerjax.tasks import loading

DIGEST_FILE = "digest.json"


class Phase(NamedTuple):
  """A run, or the part of it on one layout.

  Attributes:
    num_processes: processes of the slice.
    data_parallel_size: instances of the mesh.
    tensor_parallel_size: model shards of the mesh.
    workers: cluster workers that sample instead of the run's own engine.
    share: fraction of all steps after which the phase ends.
  """

  num_processes: int = 1
  data_parallel_size: int = 1
  tensor_parallel_size: int = 1
  workers: int = 0
  share: float = 1.0


PHASES: dict[str, tuple[Phase, ...]] = {
  "1x1": (Phase(),),
  "8x1": (Phase(data_parallel_size=8),),
  "4x2": (Phase(data_parallel_size=4, tensor_parallel_size=2),),
  "2x4": (Phase(data_parallel_size=2, tensor_parallel_size=4),),
  "1x8": (Phase(tensor_parallel_size=8),),
  "2_processes_2x4": (Phase(2, 2, 4),),
  "4_processes_4x2": (Phase(4, 4, 2),),
  "1_worker": (Phase(workers=1),),
  "2_workers": (Phase(workers=2),),
  "3_workers": (Phase(workers=3),),
  "2x4_resumed_on_8x1": (Phase(1, 2, 4, share=0.5), Phase(data_parallel_size=8)),
  "2_workers_resumed_in_2_processes_2x4": (Phase(workers=2, share=0.5), Phase(2, 2, 4)),
}


class Cell(NamedTuple):
  """One line of the table."""

  name: str


def default() -> RunConfig:
  """Returns the configuration that every cell runs: a small run of nano."""
  main = presets.main_job()
  return dataclasses.replace(
    main,
    data_parallel_size=1,
    checkpoint_every=5,
    # Equal in every cell, and enough for the cell with the most devices.
    numerics=dataclasses.replace(main.numerics, reduction_shards=8),
    engine=engine_lib.EngineConfig(page_size=32, num_pages=64, max_num_seqs=16, max_model_len=256),
    rollout=groups.RolloutConfig(prompts_per_step=4, group_size=4, temperature=1.0, max_tokens=96),
    cluster=cluster_config.ClusterConfig(address=cluster_config.LOCAL),
    evaluation=EvaluationConfig(num_problems=8, temperature=1.0),
  )


def config_of(config: RunConfig, phase: Phase) -> RunConfig:
  """Returns the configuration of a phase."""
  return dataclasses.replace(
    config,
    num_steps=max(round(config.num_steps * phase.share), 1),
    data_parallel_size=phase.data_parallel_size,
    tensor_parallel_size=phase.tensor_parallel_size,
    cluster=dataclasses.replace(config.cluster, workers=phase.workers),
  )


# Code that runs in the processes of a cell.


def learn(config: RunConfig, directory: pathlib.Path) -> None:
  """Trains as one process of a phase; the first process writes the digest of the weights."""
  resume = checkpoint.latest_step(directory / slices.CHECKPOINTS) is not None
  task = loading.load(config.task, path=config.task_path or None, options=config.task_options)
  policy = policy_lib.load_policy(config.model, config.numerics)
  with slices.own_directory(directory) as own:
    result = rl.train(config, policy, slices.shared_task(task), own, resume=resume)
  digest = hashlib.sha256()
  for leaf in jax.tree.leaves((result.state.params, result.state.opt_state)):
    digest.update(_whole(leaf).tobytes())
  if agreement.is_first():
    metrics.write_summary(directory / DIGEST_FILE, {"learnt": digest.hexdigest()})


def _whole(leaf: Array) -> np.ndarray:
  """Returns the whole array; parts of it may be in other processes."""
  if leaf.is_fully_addressable:
    return np.asarray(jax.device_get(leaf))
  assert isinstance(leaf.sharding, jax.sharding.NamedSharding)
  everywhere = jax.sharding.NamedSharding(leaf.sharding.mesh, jax.P())
  return np.asarray(jax.jit(lambda one: one, out_shardings=everywhere)(leaf))


# Code that runs in the process that starts them.


def rollouts_digest(path: pathlib.Path) -> tuple[str, int]:
  """Returns (digest of tokens and both log-probabilities, number of tokens) of a journal."""
  digest, count = hashlib.sha256(), 0
  _, entries = journal_lib.read(path)
  for entry in sorted(entries, key=lambda one: (one.step, one.group, one.member)):
    one = entry.rollout.completion
    digest.update(repr((entry.step, entry.group, entry.member)).encode())
    digest.update(repr((one.tokens, one.finish_reason)).encode())
    digest.update(one.behaviour_logprobs.tobytes() + one.raw_logprobs.tobytes())
    count += len(one.tokens)
  return digest.hexdigest(), count


def commands(name: str, index: int, phase: Phase, arguments: Sequence[str]) -> list[list[str]]:
  """Returns the command of each process of a phase."""
  run = [sys.executable, "-m", "experiments.cluster.training", *arguments]
  run += [f"--cells={name}", f"--phase={index}"]
  count = phase.num_processes
  of_slice = [f"--num_processes={count}", f"--coordinator=127.0.0.1:{peer_process.free_port()}"]
  return [[*run, *(of_slice if count > 1 else ()), f"--process_id={rank}"] for rank in range(count)]


def run_cell(
  name: str, config: RunConfig, arguments: Sequence[str], directory: pathlib.Path
) -> dict[str, Any]:
  """Runs a cell in separate processes; continues an interrupted one.

  Raises:
    RuntimeError: if a process fails; the message has the end of its output.
  """
  own = directory / name
  if own.is_dir() and checkpoint.latest_step(own / slices.CHECKPOINTS) is None:
    shutil.rmtree(own)  # It was interrupted before its first checkpoint.
  own.mkdir(parents=True, exist_ok=True)
  for index, phase in enumerate(PHASES[name]):
    done = checkpoint.latest_step(own / slices.CHECKPOINTS) or 0
    is_last = phase is PHASES[name][-1]
    if not is_last and done >= config_of(config, phase).num_steps:
      continue
    _run_phase(own, commands(name, index, phase, [*arguments, f"--workdir={own}"]))
  rollouts, num_tokens = rollouts_digest(own / journal_lib.FILE_NAME)
  rows = [row for row in metrics.read(own / metrics.FILE_NAME) if "rollout_train/kl" in row]
  return {
    "name": name,
    "settings": settings_of(config),
    "learnt": json.loads((own / DIGEST_FILE).read_text())["learnt"],
    "rollouts": rollouts,
    "tokens": num_tokens,
    "steps": len(rows),
    "updates_with_gradient": sum(row["train/grad_norm"] > 0 for row in rows),
    "kl_max": max((abs(row["rollout_train/kl"]) for row in rows), default=0.0),
  }


def _run_phase(own: pathlib.Path, runs: list[list[str]]) -> None:
  logs = [own / f"process_{rank}.log" for rank in range(len(runs))]
  peers = []
  try:
    for command, log in zip(runs, logs):
      with log.open("ab") as file:
        peers.append(subprocess.Popen(command, stdout=file, stderr=file))
    for peer, log in zip(peers, logs):
      if peer.wait():
        raise _failure(peer.returncode, log)
  finally:
    for peer in peers:
      peer.kill()
      peer.wait()


def _failure(status: int, log: pathlib.Path) -> RuntimeError:
  return RuntimeError(
    f"cluster_digests: got status {status} of a process, expected 0; see {log}; the same command"
    " continues:\n"
    f"{os.linesep.join(log.read_text().splitlines()[-15:])}"
  )


def settings_of(config: RunConfig) -> dict[str, Any]:
  """Returns the settings that all cells share."""
  return json.loads(json.dumps(dataclasses.asdict(config)))


def chosen(names: Sequence[str]) -> list[str]:
  """Returns the requested cells in the table's order; by default all.

  Raises:
    ValueError: naming an unknown cell.
  """
  for name in names:
    if name not in PHASES:
      raise ValueError(
        f"--cells: got {name!r}, expected some of {[*PHASES]}; leave it out for all."
      )
  return [name for name in PHASES if not names or name in names]


def table(records: Sequence[dict[str, Any]]) -> str:
  """Returns the table of docs/results/cluster.md."""
  names = ("system", "weights and moments", "tokens and log-probabilities", "tokens", "steps", "KL")
  return measure.table(names, (
    (one["name"].replace("_", " "), f"`{one['learnt'][:16]}`", f"`{one['rollouts'][:16]}`",
     f"{one['tokens']:,}", one["steps"], one["kl_max"])
    for one in records
  ))  # fmt: skip


def run(
  config: RunConfig,
  names: Sequence[str],
  arguments: Sequence[str],
  directory: pathlib.Path,
) -> list[dict[str, Any]]:
  """Runs the missing cells; writes table.md.

  Args:
    config: the run.
    names: the cells.
    arguments: command-line arguments that turn the default config into this one.
    directory: the output directory.

  Raises:
    AssertionError: if a bit differs.
    RuntimeError: if a process fails.
  """
  records = cells_lib.completed(
    [Cell(name) for name in names],
    directory,
    settings_of(config),
    lambda cell, *_: run_cell(cell.name, config, arguments, directory),
  )
  (directory / "table.md").write_text(table(records) + "\n")
  for part in ("learnt", "rollouts"):
    digests = {one["name"]: one[part] for one in records}
    assert len({*digests.values()}) == 1, f"got several digests of what was {part}: {digests}"
  return records


def main(args: flags.FlagValues) -> None:
  logging.set_verbosity(logging.WARNING)
  config = flags_lib.from_flags(RunConfig, args.config)
  directory = pathlib.Path(args.workdir)
  if args.phase >= 0:
    phase = PHASES[args.cells[0]][args.phase]
    config = config_of(config, phase)
    num_devices = config.data_parallel_size * config.tensor_parallel_size
    parallel.start(flags_lib.slice_of_flags(), num_devices=num_devices)
    return learn(config, directory)
  names = chosen(args.cells)
  arguments = [one for one in sys.argv[1:] if one.lstrip("-").startswith("config.")]
  records = run(config, names, arguments, directory)
  print(table(records))
  print(f"equal bits: {len(records)} systems learnt one thing from the same answers")


if __name__ == "__main__":
  flags_lib.define_flags(default(), "runs/cluster_digests")
  flags_lib.define_slice_flags()
  flags.DEFINE_list(
    "cells", [], f"Lines of the table to compute, all by default: {', '.join(PHASES)}."
  )
  flags.DEFINE_integer("phase", -1, "Internal: phase of a subprocess.")
  measure.command(main)
