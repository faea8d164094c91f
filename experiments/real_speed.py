"""Compares decoding and prefill speed of a realistic model with llama.cpp and transformers.

Claim: natively, on a CPU, decoding one sequence is 1.1 times as fast as llama.cpp with weights of
the same type, and at least 0.6 of the memory limit; 8 and 32 sequences are 2.5 times as fast as
llama.cpp in float32 and 1.5 times as fast as transformers in both types; prefill of 512 tokens is
1.2 times as fast as either; and two cores are 1.7 times as fast as one.
Command: bash launch/local.sh experiments.real_speed --model=DIR --workdir=runs/real_speed
  peers need additional packages (`bash launch/peers.sh`); the script names missing ones
  --seconds=200 ends after the cell that is running then; the same command continues
Hardware: 2 CPU cores, 12 GiB; about 25 minutes. Numbers: docs/results/real/speed.md

Every side runs in its own process with its own model. The sides of a cell (a dtype and a kind of
work) take turns, `--rounds` times, so that other load affects all of them; waiting processes use no
CPU. Decoding time is the time of completions of 1 + n tokens minus that of one-token completions;
prompts are 16 random tokens, decoding is greedy, lengths are forced. Prefill is one prompt of 512
tokens and the first generated token. The memory limit is the faster of NumPy's copy (bytes read and
written) and its dot product (bytes read), on both cores, measured in the same run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import time
from typing import Any, NamedTuple

from absl import app, flags
import numpy as np

from experiments import (
  cells as cells_lib,
  decode_speed,
  engine_throughput,
  llama_cpp,
  peer_models,
)
from seerjax.run import command_line

PROMPT_TOKENS, PREFILL_TOKENS = 16, 512
# Timed tokens per sequence, by batch size.
DECODED = {1: 32, 8: 16, 32: 8}
KINDS = ("decode 1", "decode 8", "decode 32", "prefill")
DTYPES = ("float32", "bfloat16")
MOST = 32

Say = Callable[[str], None]
# Runs a batch once: (number of prompts, tokens per prompt, tokens per completion).
Answer = Callable[[int, int, int], None]


class Side(NamedTuple):
  """A display label, the kind of builder, and the number of cores."""

  label: str
  kind: str
  cores: int


SIDES = {
  "native": Side("SeerJAX, two cores", "ours", 2),
  "native-1": Side("SeerJAX, one core", "ours", 1),
  "llama-cpp": Side("llama.cpp", "llama.cpp", 2),
  "transformers": Side("transformers", "transformers", 2),
}


class Cell(NamedTuple):
  """One comparison of the sides: a dtype of the weights, and one of `KINDS`."""

  dtype: str
  kind: str


class Aim(NamedTuple):
  """A target: a minimum ratio in some cells.

  Attributes:
    label: display label.
    kinds: kinds of the cells.
    dtypes: dtypes of the cells.
    rival: the side to compare with, or "memory".
    least: minimum ratio.
  """

  label: str
  kinds: tuple[str, ...]
  dtypes: tuple[str, ...]
  rival: str
  least: float


AIMS = (
  Aim("one sequence, against llama.cpp", KINDS[:1], DTYPES, "llama-cpp", 1.1),
  Aim("one sequence, of what memory allows", KINDS[:1], DTYPES, "memory", 0.6),
  Aim("two cores, against one", KINDS, DTYPES, "native-1", 1.7),
  Aim("8 and 32 sequences, against llama.cpp", KINDS[1:3], DTYPES[:1], "llama-cpp", 2.5),
  Aim("8 and 32 sequences, against transformers", KINDS[1:3], DTYPES, "transformers", 1.5),
  Aim("prefill, against llama.cpp", KINDS[3:], DTYPES, "llama-cpp", 1.2),
  Aim("prefill, against transformers", KINDS[3:], DTYPES, "transformers", 1.2),
)


def work_of(kind: str) -> tuple[int, int, int]:
  """Returns (sequences, tokens per prompt, timed tokens per completion) of a kind."""
  if kind == "prefill":
    return 1, PREFILL_TOKENS, 0
  batch = int(kind.split()[1])
  return batch, PROMPT_TOKENS, DECODED[batch]


def prompts_of(batch: int, length: int, vocab_size: int) -> list[tuple[int, ...]]:
  """Returns distinct random prompts, different at every call."""
  random = np.random.default_rng()
  return [tuple(map(int, random.integers(0, vocab_size, length))) for _ in range(batch)]


def our_answer(directory: pathlib.Path, dtype: str) -> Answer:
  """Returns this engine."""
  from seerjax import numerics as numerics_lib
  from seerjax.engine import engine as engine_lib
  from seerjax.models import loading
  from seerjax.types import Request, SamplingParams

  numerics = numerics_lib.NumericsConfig(compute_dtype=dtype, reduction_shards=0)
  model = loading.load_model(directory, numerics)
  config = engine_lib.EngineConfig(max_context=1024, max_sequences=MOST, num_pages=400)
  engine = engine_lib.Engine(model, config=config, key=numerics_lib.key(0))

  def answer(batch: int, length: int, count: int) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=count)
    prompts = prompts_of(batch, length, model.config.vocab_size)
    requests = [
      Request(request_id=str(index), prompt=prompt, sampling=sampling)
      for index, prompt in enumerate(prompts)
    ]
    assert all(len(completion.tokens) == count for completion in engine.generate(requests))

  return answer


def llama_answer(directory: pathlib.Path, dtype: str) -> Answer:
  """Returns llama.cpp on a GGUF file of this type, created once next to the directory."""
  kind = {"float32": "F32", "bfloat16": "BF16"}[dtype]
  file = directory.with_name(f"{directory.name}-{kind.lower()}.gguf")
  if not file.exists():
    partial = file.with_name(f"{file.stem}.partial.gguf")
    partial.unlink(missing_ok=True)  # Of a run that was killed.
    peer_models.write_gguf(directory, partial, kind)
    partial.replace(file)
  models: dict[int, llama_cpp.Model] = {}

  def answer(batch: int, length: int, count: int) -> None:
    if batch not in models:
      context = PREFILL_TOKENS + 2 if batch == 1 else PROMPT_TOKENS + 2 + max(DECODED.values())
      models[batch] = llama_cpp.Model(
        file, num_sequences=batch, context=context, num_threads=2, kv="f32"
      )
    prompts = prompts_of(batch, length, models[batch].vocab_size)
    llama_cpp.answer(models[batch], prompts, np.full((batch, 1), count), None)

  return answer


def their_answer(directory: pathlib.Path, dtype: str) -> Answer:
  """Returns Hugging Face transformers."""
  import torch  # pyright: ignore[reportMissingImports]
  import transformers  # pyright: ignore[reportMissingImports]

  torch.set_num_threads(2)
  transformers.logging.set_verbosity_error()
  kind = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
  model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=kind).eval()

  def answer(batch: int, length: int, count: int) -> None:
    ids = torch.tensor(prompts_of(batch, length, model.config.vocab_size))
    generation = transformers.GenerationConfig(
      max_new_tokens=count, min_new_tokens=count, eos_token_id=None, pad_token_id=0,
      do_sample=False, use_cache=True,
    )  # fmt: skip
    with torch.inference_mode():
      out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=generation)
    assert out.shape == (batch, length + count), "a response ended before its length"

  return answer


BUILDERS = {"ours": our_answer, "llama.cpp": llama_answer, "transformers": their_answer}


def set_cores(count: int) -> None:
  """Binds all threads of this process to the last `count` cores of the machine."""
  cores = sorted(range(os.cpu_count() or 1))[-count:]
  for thread in os.listdir("/proc/self/task"):
    os.sched_setaffinity(int(thread), cores)


def seconds_of(answer: Answer, kind: str) -> float:
  """Runs the work of a kind once; returns the seconds."""

  def seconds(count: int) -> float:
    begin = time.perf_counter()
    answer(batch, length, count)
    return time.perf_counter() - begin

  batch, length, counted = work_of(kind)
  if not counted:
    return seconds(1)
  short = seconds(1)
  return seconds(1 + counted) - short


def tokens_of(kind: str) -> int:
  """Returns the number of tokens that a kind times."""
  batch, length, counted = work_of(kind)
  return batch * counted if counted else length


def serve(kind: str, directory: pathlib.Path, dtype: str) -> None:
  """Runs a side: prints a line of JSON for each line [kind, cores] on stdin."""
  reply = os.fdopen(os.dup(1), "w")
  os.dup2(2, 1)  # Output of libraries must not be mistaken for a reply.
  try:
    answer = BUILDERS[kind](directory, dtype)
    for line in sys.stdin:
      timed, cores = json.loads(line)
      set_cores(cores)
      seconds = seconds_of(answer, timed)
      record = dict(seconds=seconds, peak=engine_throughput.peak_memory())
      print(json.dumps(record), file=reply, flush=True)
  except Exception as error:  # A peer's failure is a result, reported under its name.
    print(json.dumps(dict(error=f"{type(error).__name__}: {error}")), file=reply, flush=True)
    raise


class Process:
  """A side in a separate process."""

  def __init__(self, kind: str, directory: pathlib.Path, dtype: str, python: str):
    path = [str(decode_speed.ROOT), *filter(None, [os.environ.get("PYTHONPATH", "")])]
    self._process = subprocess.Popen(
      [python, "-P", "-m", "experiments.real_speed", f"--serve={kind}", f"--model={directory}",
       f"--dtypes={dtype}"],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
      env={**os.environ, "PYTHONPATH": os.pathsep.join(path), "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip

  def time(self, timed: str, cores: int) -> dict[str, Any]:
    """Returns the seconds of a kind and the peak memory, or {"error": ...}."""
    assert self._process.stdin is not None
    assert self._process.stdout is not None
    try:
      print(json.dumps([timed, cores]), file=self._process.stdin, flush=True)
      line = self._process.stdout.readline()
    except BrokenPipeError:
      line = ""
    return json.loads(line) if line else dict(error="its process ended")

  def close(self) -> None:
    """Ends the process."""
    assert self._process.stdin is not None
    assert self._process.stdout is not None
    self._process.stdin.close()
    self._process.wait()
    self._process.stdout.close()


def read_bandwidth(num_threads: int, *, num_bytes: int = 2**29, rounds: int = 5) -> float:
  """Returns bytes/s of the fastest of several dot products of a large array with itself."""
  from concurrent import futures

  parts = np.array_split(np.ones(num_bytes // 4, np.float32), num_threads)
  fastest = np.inf
  with futures.ThreadPoolExecutor(num_threads) as pool:
    for _ in range(rounds):
      begin = time.perf_counter()
      list(pool.map(lambda part: np.dot(part, part), parts))
      fastest = min(fastest, time.perf_counter() - begin)
  return num_bytes / fastest


def bytes_per_step(directory: pathlib.Path, dtype: str) -> int:
  """Returns the weight bytes that a step reads: all weights in this dtype, a tied head once."""
  from seerjax.models import huggingface

  config = huggingface.load_config(directory)
  width = {"float32": 4, "bfloat16": 2}[dtype]
  heads = config.num_heads + 2 * config.num_kv_heads
  attention = config.hidden_size * config.head_dim * (heads + config.num_heads)
  mlp = 3 * config.hidden_size * config.intermediate_size
  table = config.vocab_size * config.hidden_size
  return width * (config.num_layers * (attention + mlp) + table)


def measured(
  cell: Cell, processes: dict[str, Process], names: Sequence[str], rounds: int
) -> dict[str, Any]:
  """Measures a cell; returns tokens/s of every round by side, and each side's peak memory."""
  rates: dict[str, list[float]] = {name: [] for name in names}
  peaks: dict[str, int] = {}
  faults: dict[str, str] = {}
  begin = os.getloadavg()[0]
  for number in range(rounds + 1):  # The first round compiles and is not counted.
    for name in names:
      if name in faults:
        continue
      side = SIDES[name]
      found = processes[side.kind].time(cell.kind, side.cores)
      if "error" in found:
        faults[name] = found["error"]
      elif number:
        rates[name].append(tokens_of(cell.kind) / found["seconds"])
        peaks[name] = found["peak"]
  return dict(cell._asdict(), rates=rates, peaks=peaks, faults=faults, load=begin)


def middle(values: Sequence[float]) -> str:
  """Returns the median and range as text."""
  if not values:
    return "-"
  return f"{np.median(values):.1f} ({min(values):.1f}–{max(values):.1f})"


def ratio(record: dict[str, Any], rival: str, allowed: float) -> float | None:
  """Returns the ratio of our median rate to a rival's; None if one of them is missing."""
  ours = record["rates"].get("native", [])
  theirs = [allowed] if rival == "memory" else record["rates"].get(rival, [])
  return float(np.median(ours) / np.median(theirs)) if ours and theirs else None


def table(
  records: Sequence[dict[str, Any]], names: Sequence[str], bandwidth: dict[str, float],
  weights: dict[str, int],
) -> str:  # fmt: skip
  """Returns tokens/s, and the targets with the measured ratios, as Markdown."""
  said = ", ".join(f"{name} {value / 1e9:.1f} GB/s" for name, value in bandwidth.items())
  most = max(bandwidth.values())
  lines = [
    f"Bandwidth: {said}. Tokens/s, median and range of the rounds:",
    "",
    "| weights | | " + " | ".join(SIDES[name].label for name in names) + " |",
    "|---|---|" + "---|" * len(names),
  ]
  for record in records:
    found = [record["faults"].get(name) or middle(record["rates"][name]) for name in names]
    lines.append(f"| {record['dtype']} | {record['kind']} | " + " | ".join(found) + " |")
  lines += ["", "| aim | | at least | found | |", "|---|---|---|---|---|"]
  for aim in AIMS:
    for record in records:
      if record["kind"] not in aim.kinds or record["dtype"] not in aim.dtypes:
        continue
      found = ratio(record, aim.rival, most / weights[record["dtype"]])
      if found is not None:
        holds = "yes" if found >= aim.least else "**no**"
        of = f"{record['dtype']}, {record['kind']}"
        lines.append(f"| {aim.label} | {of} | {aim.least:g} | {found:.2f} | {holds} |")
  return "\n".join(lines) + "\n"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """Configuration of the measurement.

  Attributes:
    model: a Hugging Face directory.
    names: sides, keys of `SIDES`.
    dtypes: weight dtypes, of `DTYPES`.
    kinds: kinds of work, of `KINDS`.
    rounds: rounds after one that is not counted.
    seconds: time after which no further cell starts.
  """

  model: pathlib.Path
  names: tuple[str, ...]
  dtypes: tuple[str, ...] = DTYPES
  kinds: tuple[str, ...] = KINDS
  rounds: int = 5
  seconds: float = float("inf")

  def __post_init__(self):
    for field, known in (("names", [*SIDES]), ("dtypes", DTYPES), ("kinds", KINDS)):
      if unknown := [value for value in getattr(self, field) if value not in known]:
        raise ValueError(
          f"real_speed: {field}: got {', '.join(unknown)}, expected some of {', '.join(known)};"
          " correct the name."
        )


def run(config: Config, directory: pathlib.Path, say: Say, torch_python: str = "") -> str:
  """Measures missing cells until the time is over; writes and returns the table."""
  begin = time.monotonic()
  interpreters = engine_throughput.pythons(torch_python)
  names = []
  for name in config.names:
    kind = SIDES[name].kind
    if missing := engine_throughput.missing_packages(kind, interpreters[kind]):
      say(f"{' and '.join(missing)} not installed: {name} left out (`bash launch/peers.sh`)")
    else:
      names.append(name)
  settings = dict(model=str(config.model), rounds=config.rounds)
  path = directory / cells_lib.FILE_NAME
  records = {(r["dtype"], r["kind"]): r for r in cells_lib.read(path, settings)}
  say(f"load {os.getloadavg()[0]:.2f}")
  bandwidth = {"copy": decode_speed.copy_bandwidth(2), "read": read_bandwidth(2)}
  for dtype in config.dtypes:
    cells = [Cell(dtype, kind) for kind in config.kinds if (dtype, kind) not in records]
    if not cells or time.monotonic() - begin > config.seconds:
      continue
    kinds = {SIDES[name].kind for name in names}
    processes = {k: Process(k, config.model, dtype, interpreters[k]) for k in sorted(kinds)}
    try:
      for cell in cells:
        if time.monotonic() - begin > config.seconds:
          break
        record = measured(cell, processes, names, config.rounds)
        record |= dict(settings=settings, bandwidth=bandwidth)
        cells_lib.append(path, record)
        records[cell] = record
        said = ", ".join(f"{name} {middle(values)}" for name, values in record["rates"].items())
        say(f"{cell.dtype}, {cell.kind}: {said}")
    finally:
      for process in processes.values():
        process.close()
  found = [records[d, k] for d in config.dtypes for k in config.kinds if (d, k) in records]
  most = {n: max(record["bandwidth"][n] for record in found) for n in bandwidth}
  weights = {dtype: bytes_per_step(config.model, dtype) for dtype in config.dtypes}
  text = table(found, names, most, weights)
  (directory / "table.md").write_text(text)
  say(text)
  return text


def main(argv: list[str]) -> None:
  args = flags.FLAGS
  if args.serve:
    serve(args.serve, pathlib.Path(args.model), args.dtypes[0])
    return
  with command_line.refusals():
    command_line.check_arguments(argv)
    config = Config(
      model=pathlib.Path(args.model),
      names=tuple(args.sides),
      dtypes=tuple(args.dtypes),
      kinds=tuple(args.kinds),
      rounds=args.rounds,
      seconds=args.seconds,
    )
    run(config, pathlib.Path(args.workdir), lambda line: print(line, flush=True), args.torch_python)


if __name__ == "__main__":
  flags.DEFINE_string("model", None, "Hugging Face directory of the model.", required=True)
  flags.DEFINE_list("sides", list(SIDES), f"Sides to measure, from {', '.join(SIDES)}.")
  flags.DEFINE_list("dtypes", list(DTYPES), f"Data types to measure, from {', '.join(DTYPES)}.")
  flags.DEFINE_list("kinds", list(KINDS), f"Kinds to measure, from {', '.join(KINDS)}.")
  flags.DEFINE_integer("rounds", 5, "Number of rounds, after one warm-up round.", 1)
  flags.DEFINE_float(
    "seconds", float("inf"), "Time budget: no cell starts after this many seconds."
  )
  flags.DEFINE_string(
    "torch_python", "", "Python with transformers; by default this one, or the one in .venv-3.11."
  )
  flags.DEFINE_string(
    "workdir", "runs/real_speed", "Output directory for cells.jsonl and table.md."
  )
  flags.DEFINE_string("serve", "", "Internal: run this side.")
  app.run(main)
