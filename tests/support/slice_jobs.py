"""Work that processes of one slice do together, and what starts them; by path it is one of them.

    python slice_jobs.py JOB PROCESS_ID NUM_PROCESSES PORT [ARGUMENT]

Each process prints one JSON line as its last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import json
import os
import pathlib
import socket
import subprocess
import sys
from typing import Any

TESTS = pathlib.Path(__file__).parents[1]
NUM_DEVICES = 2
SECONDS = 900  # Of a loaded machine.


def run(
  job: str, argument: str = "", *, num_processes: int = 2
) -> list[tuple[int, Any, str]]:
  """Runs a job in processes of its own; returns (status, its last line, all its lines) of each."""
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


def _agreement(argument: str) -> dict[str, Any]:
  """What the first tells, what it cannot tell, and a decision that differs."""
  import jax

  from seerjax import agreement

  del argument
  rank, found = jax.process_index(), {}
  found["told"] = agreement.from_first(lambda: {"rank": rank, "data": list(range(3000))})
  found["least"], found["most"] = agreement.least(5.5 - rank), agreement.most(3 + rank)
  agreement.compare("a step", {"one": 1, "two": "same"})

  def refuses():
    raise OSError("the disk is full")

  for name, call in {
    "refused": lambda: agreement.from_first(refuses),
    "differs": lambda: agreement.compare("step 7", {"tokens": "same", "pages": 40 + rank}),
  }.items():
    try:
      call()
    except (agreement.Disagreement, OSError) as error:
      found[name] = f"{type(error).__name__}: {error}"
  return found


JOBS: Mapping[str, Callable[[str], dict[str, Any]]] = {
  "agreement": _agreement,
}


def main() -> None:
  """Is one process of a slice."""
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
