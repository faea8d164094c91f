"""Jobs that processes of one slice run together, and their launcher; as a script, one process.

    python slice_jobs.py JOB PROCESS_ID NUM_PROCESSES PORT [ARGUMENT]

Each process prints one JSON line as its last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
import hashlib
import json
import os
import pathlib
import socket
import subprocess
import sys
from typing import Any

TESTS = pathlib.Path(__file__).parents[1]
NUM_DEVICES = 2
SECONDS = 900  # Time limit on a loaded machine.


def run(job: str, argument: str = "", *, num_processes: int = 2) -> list[tuple[int, Any, str]]:
  """Runs a job in several processes; returns (status, last line, all lines) of each."""
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
  paths = [str(TESTS.parent), str(TESTS / "support")]
  environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu"}
  peers = [
    subprocess.Popen(
      [sys.executable, __file__, job, str(rank), str(num_processes), str(port), argument],
      env=environment,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )
    for rank in range(num_processes)
  ]
  found = []
  try:
    for peer in peers:
      text, _ = peer.communicate(timeout=SECONDS)
      lines = text.splitlines()
      last = next((line for line in reversed(lines) if line.startswith("{")), "{}")
      found.append((peer.returncode, json.loads(last), text))
  finally:
    for peer in peers:
      peer.kill()
      peer.wait()
  return found


def answers(mesh: tuple[int, int], first_seed: int = 0) -> str:
  """Returns the digest of a two-layer model's completions on a mesh (instance, model)."""
  import numpy as np
  import tiny_model

  from seerjax import parallel
  from seerjax.engine import engine as engine_lib
  from seerjax.models.loading import Model
  from seerjax.types import Request, SamplingParams

  params = tiny_model.random_master(tiny_model.CONFIG, tiny_model.NATIVE)
  engine = engine_lib.Engine(
    Model(tiny_model.CONFIG, params, tiny_model.NATIVE, None),
    config=engine_lib.EngineConfig(
      page_size=4, num_pages=40, max_num_seqs=4, max_model_len=48, batch_size_buckets=(16,)
    ),
    mesh=parallel.make_mesh(data_parallel_size=mesh[0], tensor_parallel_size=mesh[1]),
  )
  rng = np.random.default_rng(1)
  requests = [
    Request(
      request_id=f"request {index}",
      prompt=tuple(rng.integers(0, 64, int(rng.integers(1, 9))).tolist()),
      seed=first_seed + index,
      sampling=SamplingParams(max_tokens=int(rng.integers(3, 12))),
    )
    for index in range(7)
  ]
  digest = hashlib.sha256()
  for one in sorted(engine.generate(requests), key=lambda one: one.request_id):
    digest.update(repr((one.request_id, one.tokens)).encode())
    digest.update(one.behaviour_logprobs.tobytes() + one.raw_logprobs.tobytes())
  return digest.hexdigest()


def _answers(argument: str) -> dict[str, Any]:
  return {argument: answers(tuple(json.loads(argument)))}


def trained(
  directory: pathlib.Path, *, data_parallel_size: int, judges_apart: bool | None = None
) -> str:
  """Returns the digest of the weights that a run of a one-layer model learns.

  Args:
    directory: directory of the run.
    data_parallel_size: instances of the run's mesh.
    judges_apart: with a judge that gives different verdicts in every process: whether each process
      uses its own verdicts, as no real run does. None is a judge with equal verdicts everywhere.
  """
  import jax
  import small_run

  from seerjax import parallel, rl
  from seerjax.run import slices

  class OfProcess(small_run.Vowels):
    def verdict(self, problem, text):
      found = super().verdict(problem, text)
      # Rewards differ within a group, or the run would learn nothing from it.
      more = jax.process_index() * (1 + self.num_verdicts % 3)
      return dataclasses.replace(found, reward=found.reward + more)

  config = dataclasses.replace(
    small_run.CONFIG, num_steps=2, checkpoint_every=1, data_parallel_size=data_parallel_size
  )
  task = small_run.Vowels() if judges_apart is None else OfProcess()
  if not judges_apart:
    task = slices.shared_task(task)
  with slices.own_directory(directory) as own:
    result = rl.train(config, small_run.policy(), task, own, log=print)
  digest = hashlib.sha256()
  for leaf in jax.tree.leaves(parallel.on_host((result.state.params, result.state.opt_state))):
    digest.update(leaf.tobytes())
  return digest.hexdigest()


def _trained(argument: str) -> dict[str, Any]:
  return {"digest": trained(pathlib.Path(argument), data_parallel_size=NUM_DEVICES)}


def _judged(argument: str) -> dict[str, Any]:
  """Runs twice with an inconsistent judge: called by the first process only, then by each."""
  from seerjax import agreement

  directory = pathlib.Path(argument)
  found = {
    "digest": trained(directory / "first", data_parallel_size=NUM_DEVICES, judges_apart=False)
  }
  try:
    trained(directory / "each", data_parallel_size=NUM_DEVICES, judges_apart=True)
  except agreement.Disagreement as error:
    found["differs"] = str(error)
  return found


def _agreement(argument: str) -> dict[str, Any]:
  """Checks a value from the first process, one it cannot send, and a diverging decision."""
  import jax
  import small_run

  from seerjax import agreement, parallel
  from seerjax.cluster.config import ClusterConfig
  from seerjax.kv import pool
  from seerjax.run import off_policy, slices

  del argument
  rank, found = jax.process_index(), {}
  found["broadcast"] = agreement.from_first(lambda: {"rank": rank, "data": list(range(3000))})
  # In one piece, in two, and at a boundary.
  sizes = [0, *range(agreement.FIRST_BYTES - 24, agreement.FIRST_BYTES + 4), 2048]
  found["sizes"] = [len(agreement.from_first(lambda size=size: b"x" * size)) for size in sizes]
  found["least"], found["most"] = agreement.least(5.5 - rank), agreement.most(3 + rank)
  agreement.compare("a step", {"one": 1, "two": "same"})

  def refuses():
    raise OSError("the disk is full")

  mesh = parallel.make_mesh(data_parallel_size=NUM_DEVICES)
  found["host_pages"] = pool.usual(mesh).config.host_pages
  ahead = dataclasses.replace(
    small_run.CONFIG, data_parallel_size=2, off_policy=off_policy.OffPolicyConfig(max_policy_lag=1)
  )
  on_workers = dataclasses.replace(small_run.CONFIG, cluster=ClusterConfig(workers=3))
  for name, call in {
    "ahead": lambda: slices.require_supported(ahead),
    "workers": lambda: slices.require_supported(on_workers),
    "store": lambda: pool.config_of(pool.KVPoolConfig(disk="here"), mesh),
    "refused": lambda: agreement.from_first(refuses),
    "differs": lambda: agreement.compare("step 7", {"tokens": "same", "pages": 40 + rank}),
  }.items():
    try:
      call()
    except (agreement.Disagreement, NotImplementedError, OSError) as error:
      found[name] = f"{type(error).__name__}: {error}"
  return found


JOBS: Mapping[str, Callable[[str], dict[str, Any]]] = {
  "answers": _answers,
  "trained": _trained,
  "judged": _judged,
  "agreement": _agreement,
}


def main() -> None:
  """Runs as one process of a slice."""
  from seerjax import parallel

  job, rank, count, port, argument = sys.argv[1:]
  parallel.start(
    parallel.SliceConfig(
      num_processes=int(count), process_id=int(rank), coordinator=f"127.0.0.1:{port}"
    ),
    num_devices=NUM_DEVICES,
  )
  print(json.dumps(JOBS[job](argument)), flush=True)


if __name__ == "__main__":
  main()
