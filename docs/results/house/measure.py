"""Prints SHA-256 of tokens and log-probabilities, of weights and of an archive, to compare commits.

Command: PYTHONPATH=. python docs/results/house/measure.py engine run discovery

  engine     nano on two instances, with drafts, chunks, spills and moves; float32 and bfloat16
  run        the weights after three steps of the main job, as exported
  discovery  the archive after five steps on apple_machines:0
"""

from __future__ import annotations

import hashlib
import pathlib
import subprocess
import sys
import tempfile

import jax
import numpy as np

import seerjax
from seerjax import NumericsConfig, Request, SamplingParams, checkpoint, parallel
from seerjax.engine import sizes
from seerjax.engine.kv import pool

# Four questions, each asked with four seeds, in chunks.
NUM_GROUPS, GROUP_SIZE, CHUNK_TOKENS = 4, 4, 24


class Repeater:
  """Drafts what followed the last two tokens the time before."""

  def draft(self, queries):
    return [[self._path(list(query.tokens), query.max_draft)] for query in queries]

  def _path(self, tokens: list[int], most: int) -> tuple[int, ...]:
    for place in range(len(tokens) - 2, 0, -1):
      if tokens[place - 1 : place + 1] == tokens[-2:]:
        return tuple(tokens[place + 1 : place + 1 + most])
    return ()

  def observe(self, *observed) -> None:
    pass

  def finish(self, *finished) -> None:
    pass


def engine() -> None:
  """Prints a digest of sixteen answers for each dtype."""
  for dtype in ("float32", "bfloat16"):
    model = seerjax.load_model(
      "nano", NumericsConfig(query_tile=4, kv_split=64, compute_dtype=dtype)
    )
    assert model.tokenizer is not None
    engine = seerjax.Engine(
      model,
      config=sizes.EngineConfig(
        page_size=16, num_pages=40, max_sequences=4, max_context=256, row_buckets=(64,)
      ),
      mesh=parallel.make_mesh(num_instances=2),
      drafter=Repeater(),
      kv_pool=pool.KVPool(pool.KVPoolConfig(host_pages=12)),
    )
    place = 0
    for group in range(NUM_GROUPS):
      question = f"Leo has {group + 3} boxes of {7 + group} eggs. How many?"
      prompt = tuple(model.tokenizer.chat_ids(question))
      for member in range(GROUP_SIZE):
        request = Request(
          request_id=f"{group}/{member}",
          prompt=prompt,
          sampling=SamplingParams(max_tokens=110, temperature=0.7),
          seed=member,
          group_id=str(group),
        )
        engine.submit(request, chunk_tokens=CHUNK_TOKENS, instance=place % 2)
        place += 1
    answers, num_paused, num_spilled = [], 0, 0
    while engine.num_unfinished:
      engine.step()
      answers += engine.poll()
      for name in engine.poll_paused():
        num_paused += 1
        if num_paused % 3 == 0:
          num_spilled += len(engine.spill([name]))
        engine.resume(name, chunk_tokens=CHUNK_TOKENS, instance=num_paused % 2)
    digest = hashlib.sha256()
    for answer in sorted(answers, key=lambda answer: answer.request_id):
      digest.update(np.asarray(answer.tokens, np.int32).tobytes())
      digest.update(np.asarray(answer.behaviour_logprobs, np.float32).tobytes())
      digest.update(np.asarray(answer.raw_logprobs, np.float32).tobytes())
    print(
      f"engine, {dtype}: {digest.hexdigest()} ({len(answers)} answers, {num_spilled} spilled,"
      f" {engine.counters.accepted_tokens} accepted tokens)",
      flush=True,
    )


def experiment(name: str, directory: pathlib.Path, *settings: str) -> None:
  """Runs an experiment by its command."""
  command = [sys.executable, "-m", f"experiments.{name}", f"--workdir={directory}", *settings]
  subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def run() -> None:
  """Prints a digest of the exported weights."""
  with tempfile.TemporaryDirectory() as directory:
    path = pathlib.Path(directory, "run")
    experiment("grpo", path, "--config.num_steps=3", "--config.evaluation.num_problems=64")
    weights = (path / "model/model.safetensors").read_bytes()
  print(f"run: {hashlib.sha256(weights).hexdigest()}", flush=True)


def discovery() -> None:
  """Prints a digest of the archive."""
  with tempfile.TemporaryDirectory() as directory:
    path = pathlib.Path(directory, "run")
    experiment(
      "ttt_discover",
      path,
      "--config.problem=apple_machines:0",
      "--config.num_steps=5",
      "--config.groups_per_step=4",
      "--config.group_size=32",
    )
    archive = checkpoint.read_host_state(path / "checkpoints")["archive"]
  print(f"discovery: {hashlib.sha256(archive.encode()).hexdigest()}", flush=True)


if __name__ == "__main__":
  jax.config.update("jax_num_cpu_devices", 2)
  parts = {"engine": engine, "run": run, "discovery": discovery}
  for part in sys.argv[1:] or parts:
    parts[part]()
