"""Prints SHA-256 of tokens and log-probabilities, of weights and of an archive, to compare commits.

Command: PYTHONPATH=. python docs/results/house/measure.py [engine filters gradient run discovery]

  engine     nano on two instances, with drafts, chunks, spills and moves; float32 and bfloat16
  filters    nano on one device: filters, biases, penalties and an adapter among plain requests
  gradient   the weights after one step of a run, as exported, on 1, 2 and 2 x 2 devices
  run        the weights after three steps of the main job, as exported
  discovery  the archive after five steps on apple_machines:0

`engine` and `filters` also print how many programs were compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
import hashlib
import pathlib
import subprocess
import sys
import tempfile

import jax
import numpy as np

import seerjax
from seerjax import (
  Completion,
  NumericsConfig,
  Request,
  SamplingParams,
  checkpoint,
  numerics as numerics_lib,
  parallel,
)
from seerjax.engine import sizes
from seerjax.kv import pool
from seerjax.models import lora
from seerjax.models.loading import Model

# Four questions, each asked with four seeds, in chunks.
NUM_GROUPS, GROUP_SIZE, CHUNK_TOKENS = 4, 4, 24
num_programs = 0


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
        page_size=16, num_pages=40, max_num_seqs=4, max_model_len=256, batch_size_buckets=(64,)
      ),
      mesh=parallel.make_mesh(data_parallel_size=2),
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
        engine.add_request(request, chunk_tokens=CHUNK_TOKENS, instance=place % 2)
        place += 1
    answers, num_paused, num_spilled = [], 0, 0
    while engine.num_unfinished:
      engine.step()
      answers += engine.poll()
      for name in engine.chunks.poll_paused():
        num_paused += 1
        if num_paused % 3 == 0:
          num_spilled += len(engine.chunks.spill([name]))
        engine.chunks.resume(name, chunk_tokens=CHUNK_TOKENS, instance=num_paused % 2)
    print(
      f"engine, {dtype}: {digest_of(answers)} ({len(answers)} answers, {num_spilled} spilled,"
      f" {engine.counters.accepted_tokens} accepted tokens, {num_programs} programs)",
      flush=True,
    )


def digest_of(answers: Sequence[Completion]) -> str:
  """Returns SHA-256 of tokens and both log-probabilities, by request ids."""
  digest = hashlib.sha256()
  for answer in sorted(answers, key=lambda answer: answer.request_id):
    digest.update(np.asarray(answer.tokens, np.int32).tobytes())
    digest.update(np.asarray(answer.behaviour_logprobs, np.float32).tobytes())
    digest.update(np.asarray(answer.raw_logprobs, np.float32).tobytes())
  return digest.hexdigest()


def drawn_adapter(model: Model) -> lora.Adapter:
  """Returns an adapter of rank 4 with two nonzero matrices."""
  rng = np.random.default_rng(0)
  fresh = lora.init(numerics_lib.key(3), model.config, model.numerics, rank=4)
  return jax.tree.map(lambda a: 0.05 * rng.standard_normal(a.shape).astype(np.float32), fresh)


def filters() -> None:
  """Prints a digest of twelve answers for each backend of a CPU."""
  kinds = (
    dict(temperature=1.0),
    dict(temperature=0.8, top_k=20, top_p=0.95),
    dict(temperature=1.1, min_p=0.02, logit_bias=((5, 2.0), (9, -100.0))),
    dict(temperature=1.0, presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=1.1),
  )
  for backend in ("native", "tiled"):
    model = seerjax.load_model("nano", NumericsConfig(backend=backend))
    assert model.tokenizer is not None
    engine = seerjax.Engine(model, config=sizes.EngineConfig(max_num_seqs=8, max_model_len=256))
    engine.set_adapters({"drawn": (drawn_adapter(model), 2.0)})
    requests = [
      Request(
        request_id=f"{kind}/{member}",
        prompt=tuple(model.tokenizer.chat_ids(f"Mia has {kind + 2} bags of {member} nuts.")),
        sampling=SamplingParams(max_tokens=60, **kinds[kind]),
        seed=10 * kind + member,
        adapter="drawn" if member == 2 else "",
      )
      for kind in range(len(kinds))
      for member in range(3)
    ]
    answers = engine.generate(requests)
    print(f"filters, {backend}: {digest_of(answers)} ({num_programs} programs)", flush=True)


def command(name: str, directory: pathlib.Path, *settings: str) -> None:
  """Runs a command of seerjax."""
  command = [sys.executable, "-m", "seerjax.commands", name, f"--workdir={directory}", *settings]
  subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def weights_of(num_steps: int, *settings: str) -> str:
  """Returns SHA-256 of the weights that the main job exports."""
  with tempfile.TemporaryDirectory() as directory:
    path = pathlib.Path(directory, "run")
    settings = ("--config.evaluation.num_problems=64", *settings)
    command("train", path, f"--config.num_steps={num_steps}", *settings)
    weights = (path / "model/model.safetensors").read_bytes()
  return hashlib.sha256(weights).hexdigest()


def gradient() -> None:
  """Prints a digest of the weights after one step on each of three meshes."""
  for instances, shards in ((1, 1), (2, 1), (2, 2)):
    mesh = (f"--config.data_parallel_size={instances}", f"--config.tensor_parallel_size={shards}")
    print(f"gradient, {instances} x {shards}: {weights_of(1, *mesh)}", flush=True)


def run() -> None:
  """Prints a digest of the exported weights."""
  print(f"run: {weights_of(3)}", flush=True)


def discovery() -> None:
  """Prints a digest of the archive."""
  with tempfile.TemporaryDirectory() as directory:
    path = pathlib.Path(directory, "run")
    command(
      "discover",
      path,
      "--problems=experiments.problems.names:load",
      "--config.problem=apple_machines:0",
      "--config.num_steps=5",
      "--config.prompts_per_step=4",
      "--config.group_size=32",
    )
    archive = checkpoint.read_host_state(path / "checkpoints")["archive"]
  print(f"discovery: {hashlib.sha256(archive.encode()).hexdigest()}", flush=True)


def count_program(event: str, *_, **__) -> None:
  """Counts a program that XLA compiled, or that was read from the cache of programs."""
  global num_programs
  num_programs += event == "/jax/core/compile/backend_compile_duration"


if __name__ == "__main__":
  jax.config.update("jax_num_cpu_devices", 2)
  jax.monitoring.register_event_duration_secs_listener(count_program)
  parts = dict(engine=engine, filters=filters, gradient=gradient, run=run, discovery=discovery)
  for part in sys.argv[1:] or parts:
    parts[part]()
