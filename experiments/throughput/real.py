"""Compares decoding and prefill speed of a realistic model with llama.cpp and transformers.

Claim: natively, on a CPU, decoding one sequence is 1.1 times as fast as llama.cpp with weights of
the same type, and at least 0.6 of the memory limit; 8 and 32 sequences are 2.5 times as fast as
llama.cpp in float32 and 1.5 times as fast as transformers in both types; prefill of 512 tokens is
1.2 times as fast as either; and two cores are 1.7 times as fast as one.
Command: bash launch/local.sh experiments.throughput.real --model=DIR --workdir=runs/real_speed
  without --model: random weights in the shape of Qwen3-0.6B, 1.2 GB, created once in --workdir
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

from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
import dataclasses
import json
import os
import pathlib
import sys
import time
from typing import Any, NamedTuple

from absl import flags
import numpy as np

from experiments import cells as cells_lib, llama_cpp, measure, peer_models, peer_process

PROMPT_TOKENS, PREFILL_TOKENS = 16, 512
# Timed tokens per sequence, by batch size.
DECODED = {1: 32, 8: 16, 32: 8}
KINDS = ("decode 1", "decode 8", "decode 32", "prefill")
DTYPES = ("float32", "bfloat16")
BUFFER_BYTES = 2**29  # Size of each array of a bandwidth test: larger than any cache.
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

  numerics = numerics_lib.NumericsConfig(compute_dtype=dtype)
  model = loading.load_model(directory, numerics)
  config = engine_lib.EngineConfig(max_model_len=1024, max_num_seqs=MOST, num_pages=400)
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


def gguf_file(directory: pathlib.Path, kind: str) -> pathlib.Path:
  """Returns the path of the GGUF file of a type, next to a model's directory."""
  return directory.with_name(f"{directory.name}-{kind.lower()}.gguf")


def llama_answer(directory: pathlib.Path, dtype: str) -> Answer:
  """Returns llama.cpp on a GGUF file of this type, created once next to the directory."""
  kind = {"float32": "F32", "bfloat16": "BF16"}[dtype]
  file = gguf_file(directory, kind)
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


def answers(kind: str, directory: pathlib.Path, dtype: str) -> Iterator[dict[str, Any]]:
  """Runs a side: yields a record for each line [kind, cores] on stdin."""
  answer = BUILDERS[kind](directory, dtype)
  for line in sys.stdin:
    timed, cores = json.loads(line)
    set_cores(cores)
    yield dict(seconds=seconds_of(answer, timed), peak=peer_process.peak_memory())


class Process(peer_process.Process):
  """A side in a separate process."""

  def __init__(self, kind: str, directory: pathlib.Path, dtype: str, python: str):
    super().__init__(
      "experiments.throughput.real", f"--serve={kind}", f"--model={directory}", f"--dtypes={dtype}",
      python=python,
    )  # fmt: skip

  def time(self, timed: str, cores: int) -> dict[str, Any]:
    """Returns the seconds of a kind and the peak memory, or {"error": ...}."""
    return self.ask(json.dumps([timed, cores]))


def write_random(directory: pathlib.Path, model: Any) -> None:
  """Writes random bfloat16 weights with nano's tokenizer, which uses the vocabulary's first ids.

  Args:
    directory: the directory to create.
    model: a `TransformerConfig`.
  """
  import jax
  import jax.numpy as jnp

  from seerjax.models import (
    huggingface,
    loading,
    parameters,
    tokenizer as tokenizer_lib,
  )
  from seerjax.models.decoder import decide
  from seerjax.run import presets

  numerics = decide(model, presets.main_job().numerics).numerics
  random = np.random.default_rng(0)

  def leaf(path: Any, shape: Any) -> jax.Array:
    values = np.ones(shape.shape, np.float32)
    if not path[-1].key.endswith("norm"):
      values = 0.02 * random.standard_normal(shape.shape, np.float32)
    return jnp.asarray(values, jnp.bfloat16)

  shapes = parameters.shapes(model, numerics.reduction_shards)
  params = jax.tree_util.tree_map_with_path(leaf, shapes)
  huggingface.save(directory, params, model, tokenizer=tokenizer_lib.load(loading.NANO))


def bandwidth_of(
  move: Callable[[Any], Any], parts: Sequence[Any], num_bytes: int, rounds: int
) -> float:
  """Returns bytes/s of the fastest of several rounds, in which each part has a thread."""
  fastest = np.inf
  with futures.ThreadPoolExecutor(len(parts)) as pool:
    for _ in range(rounds):
      _, took = measure.clocked(lambda: list(pool.map(move, parts)))
      fastest = min(fastest, took.seconds)
  return num_bytes / fastest


def copy_bandwidth(num_threads: int, *, num_bytes: int = BUFFER_BYTES, rounds: int = 5) -> float:
  """Returns bytes/s, read plus written, of copies of an array."""
  source = np.ones(num_bytes // 8, np.float64)
  target = np.zeros_like(source)
  parts = list(zip(np.array_split(source, num_threads), np.array_split(target, num_threads)))
  copy = lambda part: np.copyto(part[1], part[0])
  return bandwidth_of(copy, parts, 2 * source.nbytes, rounds)


def read_bandwidth(num_threads: int, *, num_bytes: int = BUFFER_BYTES, rounds: int = 5) -> float:
  """Returns bytes/s of dot products of an array with itself."""
  parts = np.array_split(np.ones(num_bytes // 4, np.float32), num_threads)
  return bandwidth_of(lambda part: np.dot(part, part), parts, num_bytes, rounds)


def bytes_per_step(directory: pathlib.Path, dtype: str) -> int:
  """Returns the weight bytes that a step reads: all weights in this dtype, a tied head once."""
  from seerjax.models import huggingface

  config = huggingface.load_config(directory)
  width = {"float32": 4, "bfloat16": 2}[dtype]
  kind = config.only_kind("bytes_per_step")
  own = kind.attention
  attention = config.hidden_size * own.head_dim * 2 * (own.num_heads + own.num_kv_heads)
  mlp = 3 * config.hidden_size * kind.feed_forward.row_features
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
  return measure.spread(values, ".1f") if values else "-"


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
  speeds = ", ".join(f"{name} {value / 1e9:.1f} GB/s" for name, value in bandwidth.items())
  most = max(bandwidth.values())
  rates, aims = [], []
  for record in records:
    found = [record["faults"].get(name) or middle(record["rates"][name]) for name in names]
    rates.append((record["dtype"], record["kind"], *found))
  for aim in AIMS:
    for record in records:
      if record["kind"] not in aim.kinds or record["dtype"] not in aim.dtypes:
        continue
      found = ratio(record, aim.rival, most / weights[record["dtype"]])
      if found is not None:
        of = f"{record['dtype']}, {record['kind']}"
        holds = measure.holds(found >= aim.least)
        aims.append((aim.label, of, f"{aim.least:g}", f"{found:.2f}", holds))
  labels = (SIDES[name].label for name in names)
  return (
    f"Bandwidth: {speeds}. Tokens/s, median and range of the rounds:\n\n"
    f"{measure.table(('weights', '', *labels), rates)}\n\n"
    f"{measure.table(('aim', '', 'at least', 'found', ''), aims)}\n"
  )


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
      peer_process.check_names(f"real_speed: {field}", getattr(self, field), known)


def run(config: Config, directory: pathlib.Path, say: Say, torch_python: str = "") -> str:
  """Measures missing cells until the time is over; writes and returns the table."""
  begin = time.monotonic()
  interpreters = peer_process.pythons(torch_python)
  names = []
  for name in config.names:
    kind = SIDES[name].kind
    if missing := peer_process.missing_of(kind, interpreters[kind]):
      say(peer_process.left_out([name], missing))
    else:
      names.append(name)
  settings = dict(model=str(config.model), rounds=config.rounds)
  path = directory / cells_lib.FILE_NAME
  records = {(r["dtype"], r["kind"]): r for r in cells_lib.read(path, settings)}
  say(f"load {os.getloadavg()[0]:.2f}")
  bandwidth = {"copy": copy_bandwidth(2), "read": read_bandwidth(2)}
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
        rates = ", ".join(f"{name} {middle(values)}" for name, values in record["rates"].items())
        say(f"{cell.dtype}, {cell.kind}: {rates}")
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


def main(args: flags.FlagValues) -> None:
  if args.serve:
    peer_process.serve(answers(args.serve, pathlib.Path(args.model), args.dtypes[0]))
    return
  directory = pathlib.Path(args.workdir)
  model = pathlib.Path(args.model) if args.model else directory / "qwen3-0.6b"
  config = Config(
    model=model,
    names=tuple(args.sides),
    dtypes=tuple(args.dtypes),
    kinds=tuple(args.kinds),
    rounds=args.rounds,
    seconds=args.seconds,
  )
  if not args.model and not (model / "config.json").exists():
    from seerjax.models import presets

    measure.say(f"writing random weights to {model}")
    write_random(model, presets.get("qwen3-0.6b"))
  run(config, directory, measure.say, args.torch_python)


if __name__ == "__main__":
  flags.DEFINE_string(
    "model", "", "Hugging Face directory of the model; '' is a random Qwen3-0.6B in --workdir."
  )
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
  measure.command(main)
