"""Times decoding steps of a pretrained model by batch size and context length.

Claim: natively, on a CPU, a decoding step costs as much more with context as it reads more bytes:
weights once, and the keys and values of every sequence.
Command: bash launch/local.sh experiments.throughput.context --model=models/smollm2-135m-instruct
Hardware: 2 CPU cores, 8 GiB, nothing else running; 5 minutes. Numbers: docs/results/real/speed.md

Each sequence has its own random prompt. The engine keeps a prompt's pages, so a second request with
the same prompt only decodes: a step's time is that of `STEPS` further tokens, divided by `STEPS`,
the fastest of `--rounds`.
"""

from __future__ import annotations

import pathlib
from typing import Any

from absl import flags
import numpy as np

from experiments import measure
from experiments.throughput import real as real_speed
from seerjax import numerics as numerics_lib
from seerjax.engine import engine as engine_lib
from seerjax.models import loading
from seerjax.types import Request, SamplingParams

# Contexts by batch size; more positions of 16 sequences do not fit the pages.
CONTEXTS = {1: (128, 1024, 4096, 7900), 4: (128, 1024, 4096, 7900), 16: (128, 1024, 2048)}
PAGE_SIZE, NUM_PAGES = 32, 1100
STEPS = 16


def step_seconds(engine: engine_lib.Engine, batch: int, context: int, rounds: int) -> float:
  """Returns the seconds of a decoding step of `batch` sequences after `context` positions."""
  prompts = np.random.default_rng((batch, context)).integers(0, 40_000, (batch, context))

  def seconds(count: int) -> float:
    sampling = SamplingParams(temperature=0.0, max_tokens=count)
    requests = [
      Request(request_id=str(index), prompt=tuple(map(int, prompt)), sampling=sampling)
      for index, prompt in enumerate(prompts)
    ]
    found, took = measure.clocked(lambda: engine.generate(requests))
    assert all(len(done.tokens) == count for done in found), "a response ended before its length"
    return took.seconds

  seconds(1)
  return min(seconds(1 + STEPS) - seconds(1) for _ in range(rounds)) / STEPS


def table(model: pathlib.Path, dtype: str, rounds: int) -> str:
  """Measures all batches and contexts; returns a Markdown table."""
  numerics = numerics_lib.NumericsConfig(compute_dtype=dtype)
  loaded = loading.load_model(model, numerics)
  sizes = engine_lib.EngineConfig(max_model_len=8192, max_num_seqs=16, num_pages=NUM_PAGES)
  engine = engine_lib.Engine(loaded, config=sizes, key=numerics_lib.key(0))
  shape, width = loaded.config, {"float32": 4, "bfloat16": 2}[dtype]
  weights = real_speed.bytes_per_step(model, dtype)
  per_position = width * shape.kv_features
  names = (
    f"{dtype}: sequences", "positions of each", "ms a step", "MB read a step", "GB/s",
    "time, relative to the shortest context", "bytes, relative to it",
  )  # fmt: skip
  rows = []
  for batch, contexts in CONTEXTS.items():
    first: tuple[float, float] | None = None
    for context in contexts:
      seconds = step_seconds(engine, batch, context, rounds)
      read = weights + batch * context * per_position
      first = first or (seconds, read)
      rows.append((
        batch, f"{context:,}", f"{1000 * seconds:.1f}", f"{read / 1e6:.0f}",
        f"{read / seconds / 1e9:.1f}", f"{seconds / first[0]:.2f}", f"{read / first[1]:.2f}",
      ))  # fmt: skip
      measure.say(f"{dtype}, {batch} sequences of {context:,}: {rows[-1][2]} ms a step")
  return f"{measure.table(names, rows)}\n"


def main(args: Any) -> None:
  directory = pathlib.Path(args.workdir)
  directory.mkdir(parents=True, exist_ok=True)
  text = "\n".join(table(pathlib.Path(args.model), dtype, args.rounds) for dtype in args.dtypes)
  (directory / "table.md").write_text(text)
  measure.say(text)


if __name__ == "__main__":
  flags.DEFINE_string("model", None, "Hugging Face directory of the model.", required=True)
  flags.DEFINE_list("dtypes", list(real_speed.DTYPES), "Data types to measure.")
  flags.DEFINE_integer("rounds", 5, "Number of rounds.", 1)
  flags.DEFINE_string("workdir", "runs/real_context", "Output directory of table.md.")
  measure.command(main)
