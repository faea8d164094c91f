"""Compares decoding speed of a realistic model on CPU: ours, llama.cpp, transformers; bfloat16.

Claim: with native handlers a random Qwen3-0.6B decodes one sequence at 0.6 or more of (copy
bandwidth of this machine / bytes of the weights), and 8 and 32 sequences faster than both peers.
Command: bash launch/local.sh experiments.decode_speed --workdir=runs/decode_speed
  peers need additional packages, which `bash launch/peers.sh` installs; the script names missing
  ones and measures the other peers
  in minutes: --batches=1 --decode_steps=4 --repetitions=1; --peers=native,llama-cpp names some
Hardware: 2 CPU cores, 10 GiB, about 15 minutes. Numbers: docs/results/decode_speed.md

The model's directory (1.2 GB) is created once, below --workdir, from random weights. The sides run
one after the other, each in its own process, on both cores. Prompts are 8 random tokens; decoding
is greedy, with forced lengths. Decoding time is the time of completions of 1 + n tokens minus that
of one-token completions, which excludes prompts and start-up. Bandwidth is that of NumPy copying
large arrays: bytes read plus bytes written, per second.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent import futures
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

from experiments import engine_throughput, llama_cpp, peer_models
from seerjax.run import command_line

ROOT = pathlib.Path(__file__).parents[1]
PROMPT_TOKENS = 8
BUFFER_BYTES = 2**29  # Size of each copied array: larger than any cache.
# Targets for native: minimum share of the bandwidth limit at batch 1; batches where it beats peers.
LEAST_OF_BANDWIDTH, AHEAD_AT = 0.6, (8, 32)

Say = Callable[[str], None]
# Runs one batch: (batch size, tokens of each completion).
Answer = Callable[[int, int], None]


class Peer(NamedTuple):
  """A display label, and the kind in `engine_throughput.PEERS`, which determines the packages."""

  label: str
  kind: str


PEERS = {
  "native": Peer("SeerJAX, native", "ours"),
  "tiled": Peer("SeerJAX, tiled", "ours"),
  "llama-cpp": Peer("llama.cpp", "llama.cpp"),
  "transformers": Peer("transformers generate", "transformers"),
}
DEFAULT_PEERS = ("native", "llama-cpp", "transformers")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """Configuration of the measurement.

  Attributes:
    batches: batch sizes.
    decode_steps: n, the number of timed tokens per sequence.
    repetitions: repetitions after one that is not counted.
    num_threads: threads of both peers, and of the bandwidth test besides one thread.
  """

  batches: tuple[int, ...] = (1, 8, 32)
  decode_steps: int = 32
  repetitions: int = 3
  num_threads: int = 2


def write_random(directory: pathlib.Path, model: Any) -> None:
  """Writes random bfloat16 weights with nano's tokenizer, whose ids are the vocabulary's first.

  Args:
    directory: the directory to create.
    model: a `TransformerConfig`.
  """
  import jax
  import jax.numpy as jnp

  from seerjax.models import (
    config as model_config,
    huggingface,
    loading,
    parameters,
    tokenizer as tokenizer_lib,
  )
  from seerjax.run import presets

  numerics = model_config.numerics_for(model, presets.main_job().numerics)
  random = np.random.default_rng(0)

  def leaf(path: Any, shape: Any) -> jax.Array:
    values = np.ones(shape.shape, np.float32)
    if not path[-1].key.endswith("norm"):
      values = 0.02 * random.standard_normal(shape.shape, np.float32)
    return jnp.asarray(values, jnp.bfloat16)

  shapes = parameters.shapes(model, numerics.reduction_shards)
  params = jax.tree_util.tree_map_with_path(leaf, shapes)
  huggingface.save(directory, params, model, tokenizer=tokenizer_lib.load(loading.NANO))


def copy_bandwidth(num_threads: int, *, num_bytes: int = BUFFER_BYTES, rounds: int = 5) -> float:
  """Returns bytes/s, read plus written, of the fastest of several copies of an array."""
  source = np.ones(num_bytes // 8, np.float64)
  target = np.zeros_like(source)
  parts = list(zip(np.array_split(source, num_threads), np.array_split(target, num_threads)))
  fastest = np.inf
  with futures.ThreadPoolExecutor(num_threads) as pool:
    for _ in range(rounds):
      begin = time.perf_counter()
      list(pool.map(lambda part: np.copyto(part[1], part[0]), parts))
      fastest = min(fastest, time.perf_counter() - begin)
  return 2 * source.nbytes / fastest


def prompts_of(batch: int, vocab_size: int) -> list[tuple[int, ...]]:
  """Returns distinct random prompts."""
  random = np.random.default_rng(batch)
  return [tuple(map(int, random.integers(0, vocab_size, PROMPT_TOKENS))) for _ in range(batch)]


def our_answer(directory: pathlib.Path, config: Config, name: str) -> Answer:
  """Returns this engine, in bfloat16."""
  from seerjax import numerics as numerics_lib
  from seerjax.engine import engine as engine_lib
  from seerjax.models import loading
  from seerjax.run import presets
  from seerjax.types import Request, SamplingParams

  numerics = dataclasses.replace(
    presets.main_job().numerics, implementation=name, compute_dtype="bfloat16"
  )
  model = loading.load_model(directory, numerics)
  most, page_size = max(config.batches), 32
  longest = PROMPT_TOKENS + 1 + config.decode_steps
  engine = engine_lib.Engine(
    model,
    config=engine_lib.EngineConfig(
      page_size=page_size,
      num_pages=most * -(-longest // page_size) + 1,
      max_sequences=most,
      max_context=longest,
      row_buckets=tuple(sorted({*config.batches, PROMPT_TOKENS * most})),
      steps_per_visit=8,
      reuse_prefixes=False,
    ),
    key=numerics_lib.key(0),
  )

  def answer(batch: int, length: int) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=length)
    prompts = prompts_of(batch, model.config.vocab_size)
    requests = [
      Request(request_id=str(index), prompt=prompt, sampling=sampling)
      for index, prompt in enumerate(prompts)
    ]
    assert all(len(completion.tokens) == length for completion in engine.generate(requests))

  return answer


def gguf_file(directory: pathlib.Path) -> pathlib.Path:
  """Returns the path of the GGUF file next to a model's directory."""
  return directory.with_name(f"{directory.name}.gguf")


def llama_answer(directory: pathlib.Path, config: Config, name: str) -> Answer:
  """Returns llama.cpp on a bfloat16 GGUF file, which is created once next to the directory."""
  del name
  file = gguf_file(directory)
  if not file.exists():
    peer_models.write_gguf(directory, file, "BF16")
  models = {
    batch: llama_cpp.Model(
      file,
      num_sequences=batch,
      context=PROMPT_TOKENS + 1 + config.decode_steps,
      num_threads=config.num_threads,
      flash=False,
      kv="f32",
    )
    for batch in config.batches
  }

  def answer(batch: int, length: int) -> None:
    prompts = prompts_of(batch, models[batch].vocab_size)
    llama_cpp.answer(models[batch], prompts, np.full((batch, 1), length), None)

  return answer


def their_answer(directory: pathlib.Path, config: Config, name: str) -> Answer:
  """Returns Hugging Face transformers in bfloat16."""
  del name
  import torch  # pyright: ignore[reportMissingImports]
  import transformers  # pyright: ignore[reportMissingImports]

  torch.set_num_threads(config.num_threads)
  transformers.logging.set_verbosity_error()
  model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()

  def answer(batch: int, length: int) -> None:
    ids = torch.tensor(prompts_of(batch, model.config.vocab_size))
    generation = transformers.GenerationConfig(
      max_new_tokens=length, min_new_tokens=length, eos_token_id=None, pad_token_id=0,
      do_sample=False, use_cache=True,
    )  # fmt: skip
    with torch.inference_mode():
      out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=generation)
    assert out.shape == (batch, PROMPT_TOKENS + length), "a response ended before its length"

  return answer


BUILDERS = {"ours": our_answer, "llama.cpp": llama_answer, "transformers": their_answer}


def decoding(answer: Answer, config: Config) -> dict[str, Any]:
  """Returns, by batch, the wall and CPU seconds of decoding n tokens of each sequence."""

  def seconds(batch: int, length: int) -> tuple[float, float]:
    begin, cpu_begin = time.perf_counter(), time.process_time()
    answer(batch, length)
    return time.perf_counter() - begin, time.process_time() - cpu_begin

  results: dict[str, Any] = {}
  for batch in config.batches:
    wall, cpu = [], []
    for repetition in range(config.repetitions + 1):
      short, long = seconds(batch, 1), seconds(batch, 1 + config.decode_steps)
      if repetition:  # The first round compiles and loads the weights.
        wall.append(long[0] - short[0])
        cpu.append(long[1] - short[1])
    results[str(batch)] = dict(wall=wall, cpu=cpu)
  return results


def serve(name: str, directory: pathlib.Path, config: Config) -> None:
  """Runs one side in this process: measures, and prints one line of JSON."""
  reply = os.fdopen(os.dup(1), "w")
  os.dup2(2, 1)  # Output of libraries must not be mistaken for the reply.
  try:
    answer = BUILDERS[PEERS[name].kind](directory, config, name)
    batches = decoding(answer, config)
    record = dict(batches=batches, peak=engine_throughput.peak_memory())
    print(json.dumps(record), file=reply, flush=True)
  except Exception as error:  # A peer's failure is a result, reported under its name.
    print(json.dumps(dict(error=f"{type(error).__name__}: {error}")), file=reply, flush=True)
    raise


def measured(name: str, directory: pathlib.Path, config: Config, python: str) -> dict[str, Any]:
  """Returns the record of a side's process, or {"error": ...}."""
  path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH", "")])])
  done = subprocess.run(
    [python, "-P", "-m", "experiments.decode_speed", "--serve"],
    input=json.dumps([name, str(directory), dataclasses.asdict(config)]),
    stdout=subprocess.PIPE,
    text=True,
    check=False,
    env={**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
  )
  lines = done.stdout.splitlines()
  return json.loads(lines[-1]) if lines else dict(error=f"its process ended with {done.returncode}")


def rates(result: dict[str, Any], config: Config) -> dict[int, dict[str, float]]:
  """Returns a side's median tokens per second and per CPU second, by batch."""
  return {
    int(batch): dict(
      wall=int(batch) * config.decode_steps / float(np.median(seconds["wall"])),
      cpu=int(batch) * config.decode_steps / float(np.median(seconds["cpu"])),
    )
    for batch, seconds in result["batches"].items()
  }


def table(
  results: dict[str, Any], config: Config, bandwidths: dict[int, float], num_bytes: int
) -> str:
  """Returns tokens/s, their share of the bandwidth limit, and the targets as Markdown."""
  most = max(bandwidths.values())
  allowed = most / num_bytes
  copied = ", ".join(
    f"{bandwidth / 1e9:.1f} GB/s with {threads} thread{'s' if threads > 1 else ''}"
    for threads, bandwidth in bandwidths.items()
  )
  lines = [
    f"Weights of {num_bytes / 1e9:.2f} GB; copies (read and written) {copied}. So one reading of"
    f" the weights a token allows {allowed:.1f} tokens/s at batch 1.\n",
    "| side | batch | tokens/s | tokens per CPU second | tokens/s / (bandwidth / bytes of weights)"
    " | peak memory, MiB |",
    "|---|---|---|---|---|---|",
  ]
  found: dict[str, dict[int, dict[str, float]]] = {}
  for name, result in results.items():
    label = PEERS[name].label
    if "error" in result:
      lines.append(f"| {label} | does not run here: {result['error']} | | | | |")
      continue
    found[name] = rates(result, config)
    for batch, rate in found[name].items():
      lines.append(
        f"| {label} | {batch} | {rate['wall']:,.1f} | {rate['cpu']:,.1f} |"
        f" {rate['wall'] / allowed:.2f} | {result['peak'] / 2**20:,.0f} |"
      )
  lines += ["\n| aim of native | measured | holds |", "|---|---|---|"]
  native = found.get("native", {})
  if 1 in native:
    share = native[1]["wall"] / allowed
    holds = "yes" if share >= LEAST_OF_BANDWIDTH else "**no**"
    aim = f"batch 1: at least {LEAST_OF_BANDWIDTH:g} of what bandwidth allows"
    lines.append(f"| {aim} | {share:.2f} | {holds} |")
  for batch in AHEAD_AT:
    for name in ("llama-cpp", "transformers"):
      if batch in native and name in found:
        ratio = native[batch]["wall"] / found[name][batch]["wall"]
        holds = "yes" if ratio > 1 else "**no**"
        lines.append(f"| batch {batch}: ahead of {PEERS[name].label} | {ratio:.2f} | {holds} |")
  return "\n".join(lines) + "\n"


def weight_bytes(directory: pathlib.Path) -> int:
  """Returns the size of a directory's weights in bytes."""
  return sum(file.stat().st_size for file in directory.glob("*.safetensors"))


def chosen_peers(names: list[str], interpreters: dict[str, str], say: Say) -> list[str]:
  """Returns the named sides that can run here.

  Raises:
    ValueError: if a name is unknown.
  """
  if unknown := [name for name in names if name not in PEERS]:
    raise ValueError(
      f"--peers: got {', '.join(unknown)}, expected some of {', '.join(PEERS)}; correct the name."
    )
  chosen = []
  for name in names:
    kind = PEERS[name].kind
    if missing := engine_throughput.missing_packages(kind, interpreters[kind]):
      say(f"{' and '.join(missing)} not installed: {name} left out (`bash launch/peers.sh`)")
    else:
      chosen.append(name)
  return chosen


def run(
  model: pathlib.Path,
  names: list[str],
  config: Config,
  directory: pathlib.Path,
  say: Say,
  torch_python: str = "",
) -> dict[str, Any]:
  """Measures, prints, and writes results.json and table.md."""
  interpreters = engine_throughput.pythons(torch_python)
  names = chosen_peers(names, interpreters, say)
  bandwidths = {threads: copy_bandwidth(threads) for threads in sorted({1, config.num_threads})}
  num_bytes = weight_bytes(model)
  results: dict[str, Any] = {}
  for name in names:
    results[name] = result = measured(name, model, config, interpreters[PEERS[name].kind])
    if "error" in result:
      say(f"{PEERS[name].label}: does not run here ({result['error']})")
      continue
    told = ", ".join(f"{batch}: {r['wall']:.1f}" for batch, r in rates(result, config).items())
    say(f"{PEERS[name].label}: tokens/s by batch {told}")
  directory.mkdir(parents=True, exist_ok=True)
  text = table(results, config, bandwidths, num_bytes)
  record = dict(
    config=dataclasses.asdict(config), bandwidths=bandwidths, weight_bytes=num_bytes,
    results=results,
  )  # fmt: skip
  (directory / "results.json").write_text(json.dumps(record, indent=1) + "\n")
  (directory / "table.md").write_text(text)
  say(f"\n{text}\nwritten to {directory}")
  return results


def main(argv: list[str]) -> None:
  args = flags.FLAGS
  if args.serve:
    name, directory, config = json.loads(sys.stdin.read())
    config["batches"] = tuple(config["batches"])
    serve(name, pathlib.Path(directory), Config(**config))
    return
  with command_line.refusals():
    command_line.check_arguments(argv)
    directory = pathlib.Path(args.workdir)
    model = directory / "qwen3-0.6b"
    if args.model:
      model = pathlib.Path(peer_models.as_directory(args.model, directory))
    if not args.model and not (model / "config.json").exists():
      from seerjax.models import presets

      print(f"writing random weights to {model}", flush=True)
      write_random(model, presets.get("qwen3-0.6b"))
    config = Config(
      batches=tuple(map(int, args.batches)),
      decode_steps=args.decode_steps,
      repetitions=args.repetitions,
    )
    run(
      model, args.peers, config, directory, lambda line: print(line, flush=True), args.torch_python
    )


if __name__ == "__main__":
  flags.DEFINE_string("model", "", "Model directory or GGUF file; '' is a random Qwen3-0.6B.")
  flags.DEFINE_list("peers", list(DEFAULT_PEERS), f"Peers to measure, from {', '.join(PEERS)}.")
  flags.DEFINE_list("batches", ["1", "8", "32"], "Batch sizes to measure.")
  flags.DEFINE_integer("decode_steps", 32, "Number of timed tokens per sequence.", 1)
  flags.DEFINE_integer("repetitions", 3, "Number of rounds, after one warm-up round.", 1)
  flags.DEFINE_string(
    "torch_python", "", "Python of the torch peers; by default this one, or the one in .venv-3.11."
  )
  flags.DEFINE_string(
    "workdir", "runs/decode_speed", "Output directory for the model, numbers and table."
  )
  flags.DEFINE_bool("serve", False, "Internal: run the side named on stdin.")
  app.run(main)
