"""Tests whether the batch changes the completions of a pretrained model.

Claim: natively all completions of "Tell me about Richard Feynman" among random other requests have
the same text and bits, greedy or sampled, in float32 and bfloat16; plain XLA (untiled) in bfloat16
produces several texts. `transformers` and llama.cpp's server are measured for comparison.
Command: bash launch/local.sh experiments.invariance.real --model=models/smollm2-135m-instruct \
           --workdir=runs/real_invariance
  one path:       --paths=native,untiled --dtypes=bfloat16 --temperatures=0
  a quick look:   --completions=20 --max_tokens=100
  the peers:      --paths=transformers --python=.venv-3.11/bin/python (see launch/peers.sh)
                  --paths=llama.cpp --gguf=FILE
  continue after a kill: the same command; a finished cell is not run again
Hardware: 2 CPU cores. Numbers: docs/results/real/invariance.md

A cell is `BLOCK` completions of one path, dtype, temperature and seed; its batches depend only on
its block number, temperature and seed. The table compares all completions of a path, dtype and
temperature with the same seed.

Source: He et al. 2025, Defeating Nondeterminism in LLM Inference (Thinking Machines).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import functools
import json
import pathlib
import sys
import time
from typing import Any, NamedTuple

from absl import flags, logging
import numpy as np

from experiments import cells as cells_lib, measure as measure_lib, peer_process
from experiments.invariance import nano as invariance, peers as peers_lib
from seerjax import numerics as numerics_lib
from seerjax.commands import generate
from seerjax.engine import engine as engine_lib
from seerjax.run import policy as policy_lib
from seerjax.types import Completion

OURS = ("native", "untiled")
PEERS = ("transformers", "llama.cpp")
DTYPES = ("bfloat16", "float32")
BLOCK = 20  # Completions of a cell.
SEEDS = 5  # Seeds of sampled completions, used in turn.
# (maximum sequences, row buckets), drawn for each batch: low load and high load.
ENGINES = ((4, (1, 4, 64)), (16, (1, 4, 16, 64)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """Settings that all cells share.

  Attributes:
    model: a Hugging Face directory, or another name of a model.
    prompt: the prompt.
    max_tokens: maximum tokens of a completion.
  """

  model: str
  prompt: str = invariance.FEYNMAN
  max_tokens: int = 300


class Cell(NamedTuple):
  """A block of completions.

  Attributes:
    path: one of `OURS` or `PEERS`.
    dtype: dtype of weights and activations.
    temperature: 0 is greedy.
    seed: seed of the request.
    block: index of the block; determines the other requests of its batches.
  """

  path: str
  dtype: str
  temperature: float
  seed: int
  block: int


class Peers(NamedTuple):
  """Locations of the peers.

  Attributes:
    python: a Python interpreter with `transformers`.
    gguf: a GGUF file of the model, for llama.cpp.
  """

  python: str = ""
  gguf: str = ""


def cells_of(
  paths: Sequence[str], dtypes: Sequence[str], temperatures: Sequence[float], completions: int
) -> list[Cell]:
  """Returns the cells of a table, ordered by block so that all paths progress together."""
  found = []
  for block in range(-(-completions // BLOCK)):
    for temperature in temperatures:
      seed = block % SEEDS if temperature else 0
      of_seed = block // SEEDS if temperature else block
      found += [Cell(path, dtype, temperature, seed, of_seed) for dtype in dtypes for path in paths]
  return found


@functools.cache
def _engines(
  settings: Settings, path: str, dtype: str
) -> tuple[policy_lib.Policy, list[engine_lib.Engine]]:
  """Returns the policy and the engines of one of our paths; its cells share them."""
  asked = numerics_lib.NumericsConfig(
    backend="untiled" if path == "untiled" else "native",
    compute_dtype=dtype,
  )
  policy, numerics = generate.load(settings.model, asked)
  config = invariance.InvarianceConfig(model=settings.model, max_tokens=settings.max_tokens)
  length = len(generate.prompt_tokens(policy, settings.prompt))
  engines = [
    invariance.engine_of(
      config,
      policy,
      numerics,
      max_num_seqs=most,
      max_model_len=length + settings.max_tokens,
      batch_size_buckets=buckets,
    )
    for most, buckets in ENGINES
  ]
  return policy, engines


def ours(settings: Settings, cell: Cell, say: invariance.Say) -> list[Completion]:
  """Returns the completions of a cell on one of our paths."""
  policy, engines = _engines(settings, cell.path, cell.dtype)
  config = invariance.InvarianceConfig(
    model=settings.model, max_tokens=settings.max_tokens, seed=cell.seed
  )
  prompt = generate.prompt_tokens(policy, settings.prompt)

  def asked(name: str):
    return invariance.probe(config, policy, prompt, temperature=cell.temperature, name=name)

  return invariance.in_company(
    asked, engines, BLOCK, rng=rng_of(cell), name=f"{cell.path} {cell.dtype}", say=say
  )


def rng_of(cell: Cell) -> np.random.Generator:
  """Returns the generator that draws a cell's other requests; it is the same on every path."""
  return np.random.default_rng((cell.seed, cell.block, int(1000 * cell.temperature)))


def of_peer(settings: Settings, cell: Cell, peers: Peers) -> list[Completion]:
  """Returns the completions of a peer, which runs in a separate process.

  Raises:
    ValueError: if the peer's location is not given.
    RuntimeError: with the end of its output, if it fails.
  """
  needed, flag = (peers.python, "python") if cell.path == "transformers" else (peers.gguf, "gguf")
  if not needed:
    raise ValueError(
      f"--{flag}: got none with --paths={cell.path}, expected where it is; see launch/peers.sh."
    )
  policy, _ = generate.load(settings.model)
  rng = rng_of(cell)
  question = list(generate.prompt_tokens(policy, settings.prompt))
  request = dict(
    path=cell.path,
    model=settings.model if cell.path == "transformers" else peers.gguf,
    dtype=cell.dtype,
    prompt=question,
    eos_ids=list(policy.require_tokenizer().eos_ids),
    max_tokens=settings.max_tokens,
    temperature=cell.temperature,
    seed=cell.seed,
    # Prompts of batches of up to 8; some are the prompt under test.
    batches=peer_batches(rng, question, policy.require_tokenizer().vocab_size),
  )
  python = peers.python if cell.path == "transformers" else sys.executable
  found = peer_process.answer(cell.path, python, peers_lib, request)
  return [
    Completion(
      request_id=f"probe/{place}",
      tokens=tuple(one["tokens"]),
      behaviour_logprobs=np.asarray(one["logprobs"], np.float32),
      raw_logprobs=np.asarray(one["logprobs"], np.float32),
      text="",
      finish_reason="stop",
      policy_version=0,
    )
    for place, one in enumerate(found)
  ]


def peer_batches(
  rng: np.random.Generator, question: list[int], vocab_size: int, count: int = BLOCK
) -> list[list[list[int]]]:
  """Returns batches of 1 to 8 prompts, in which the tested prompt occurs `count` times in all."""
  batches: list[list[list[int]]] = []
  left = count
  while left:
    num_probes = min(left, int(rng.integers(1, 9)))
    batch = [question] * num_probes
    for _ in range(int(rng.integers(0, 9 - num_probes))):
      length = int(rng.integers(1, len(question) + 1))
      batch.append(rng.integers(0, vocab_size, length).tolist())
    batches.append([batch[place] for place in rng.permutation(len(batch))])
    left -= num_probes
  return batches


def patterns(completions: Sequence[Completion]) -> list[dict[str, Any]]:
  """Returns each distinct completion with its count, as JSON that keeps all bits."""
  found: dict[str, dict[str, Any]] = {}
  for one in completions:
    record = dict(
      tokens=list(one.tokens),
      behaviour=np.asarray(one.behaviour_logprobs, np.float32).tobytes().hex(),
      raw=np.asarray(one.raw_logprobs, np.float32).tobytes().hex(),
    )
    found.setdefault(json.dumps(record), record | dict(count=0))["count"] += 1
  return list(found.values())


def completions_of(records: Sequence[dict[str, Any]]) -> list[Completion]:
  """Returns the completions given to `patterns`, up to names and order."""
  return [
    Completion(
      request_id="probe",
      tokens=tuple(one["tokens"]),
      behaviour_logprobs=np.frombuffer(bytes.fromhex(one["behaviour"]), np.float32),
      raw_logprobs=np.frombuffer(bytes.fromhex(one["raw"]), np.float32),
      text="",
      finish_reason="stop",
      policy_version=0,
    )
    for one in records
    for _ in range(one["count"])
  ]


def measure(
  settings: Settings,
  peers: Peers,
  say: invariance.Say,
  cell: Cell,
  finished: Any,
  programs: Any,
) -> dict[str, Any]:
  """Runs a cell; returns its record."""
  del finished, programs
  begin, cpu = time.monotonic(), time.process_time()
  if cell.path in PEERS:
    completions = of_peer(settings, cell, peers)
  else:
    completions = ours(settings, cell, say)
  record = cell._asdict() | dict(
    settings=dataclasses.asdict(settings),
    patterns=patterns(completions),
    seconds=time.monotonic() - begin,
    cpu_seconds=time.process_time() - cpu,
  )
  found = invariance.differences(completions)
  say(
    f"{cell.path}, {cell.dtype}, temperature {cell.temperature:g}, seed {cell.seed}, block"
    f" {cell.block}: {found['completions']} completions of {found['length']:.0f} tokens,"
    f" {found['distinct_tokens']} distinct texts, {found['distinct_bits']} patterns of bits"
    f" ({record['seconds']:.0f} s)"
  )
  return record


def rows_of(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
  """Returns one row per path, dtype and temperature, over all seeds and blocks.

  Numbers of distinct texts and bit patterns are summed over seeds; the position of the first
  difference is the minimum.
  """
  groups: dict[tuple[str, str, float], dict[int, list[Completion]]] = {}
  seconds: dict[tuple[str, str, float], float] = {}
  for record in records:
    key = record["path"], record["dtype"], record["temperature"]
    by_seed = groups.setdefault(key, {})
    by_seed.setdefault(record["seed"], []).extend(completions_of(record["patterns"]))
    seconds[key] = seconds.get(key, 0.0) + record["seconds"]
  rows = []
  for key, by_seed in groups.items():
    found = [invariance.differences(completions) for completions in by_seed.values()]
    total = lambda name, found=found: sum(one[name] for one in found)
    least = lambda name, found=found: min(
      (one[name] for one in found if one[name] is not None), default=None
    )
    rows.append(
      dict(
        zip(("path", "dtype", "temperature"), key, strict=True),
        seeds=len(by_seed),
        completions=total("completions"),
        distinct_tokens=total("distinct_tokens"),
        distinct_bits=total("distinct_bits"),
        most_common=total("most_common"),
        first_divergence=least("first_divergence"),
        first_bit_divergence=least("first_bit_divergence"),
        length=float(np.mean([one["length"] for one in found])),
        seconds=seconds[key],
      )
    )
  return rows


def table(records: Sequence[dict[str, Any]]) -> str:
  """Returns all rows as Markdown."""
  place = lambda index: "none" if index is None else str(index)
  rows = (
    (row["path"], row["dtype"], f"{row['temperature']:g}", row["seeds"],
     f"{row['completions']:,}", f"{row['length']:.0f}", f"{row['distinct_tokens']:,}",
     place(row["first_divergence"]), f"{row['distinct_bits']:,}",
     place(row["first_bit_divergence"]), f"{row['seconds']:,.0f}")
    for row in rows_of(records)
  )  # fmt: skip
  names = (
    "path", "dtype", "temperature", "questions x seeds", "completions", "tokens each",
    "distinct texts", "first token that differs", "distinct patterns of bits",
    "first bits that differ at token", "seconds",
  )  # fmt: skip
  return measure_lib.table(names, rows) + "\n"


def run(
  settings: Settings,
  wanted: Sequence[Cell],
  directory: pathlib.Path,
  *,
  peers: Peers,
  say: invariance.Say = print,
) -> str:
  """Runs the missing cells of `wanted`; returns the table of all finished cells."""
  kept = dataclasses.asdict(settings)
  measuring: Callable[..., dict[str, Any]] = functools.partial(measure, settings, peers, say)
  try:
    cells_lib.completed(list(wanted), directory, kept, measuring)
  finally:
    found = cells_lib.read(directory / cells_lib.FILE_NAME, kept)
    if found:
      (directory / "table.md").write_text(table(found))
  return table(found)


def check(paths: Sequence[str], dtypes: Sequence[str]) -> None:
  """Rejects unknown paths and dtypes.

  Raises:
    ValueError: naming the flag.
  """
  for flag, given, known in (("paths", paths, (*OURS, *PEERS)), ("dtypes", dtypes, DTYPES)):
    unknown = [one for one in given if one not in known]
    if unknown or not given:
      raise ValueError(
        f"--{flag}: got {', '.join(unknown) or 'none'}, expected some of {', '.join(known)};"
        f" --{flag}={known[0]} runs one."
      )


def main(args: flags.FlagValues) -> None:
  logging.set_verbosity(logging.WARNING)
  check(args.paths, args.dtypes)
  temperatures = tuple(map(float, args.temperatures))
  wanted = cells_of(args.paths, args.dtypes, temperatures, args.completions)
  say = measure_lib.say
  settings = Settings(model=args.model, prompt=args.prompt, max_tokens=args.max_tokens)
  peers = Peers(args.python, args.gguf)
  say("\n" + run(settings, wanted, pathlib.Path(args.workdir), peers=peers, say=say))


if __name__ == "__main__":
  flags.DEFINE_string("model", "models/smollm2-135m-instruct", "Model directory, or a Hub id.")
  flags.DEFINE_string("prompt", invariance.FEYNMAN, "Prompt of all completions.")
  flags.DEFINE_integer(
    "completions", 1000, "Number of completions per path, dtype and temperature.", 2
  )
  flags.DEFINE_integer("max_tokens", 300, "Maximum completion length in tokens.", 1)
  flags.DEFINE_list(
    "paths", list(OURS), "Paths to run, from native, untiled, transformers, llama.cpp."
  )
  flags.DEFINE_list("dtypes", list(DTYPES), "Data types to run, from bfloat16, float32.")
  flags.DEFINE_list("temperatures", ["0", "1"], "Sampling temperatures; 0 is greedy.")
  flags.DEFINE_string("python", "", "Python that has transformers and torch.")
  flags.DEFINE_string("gguf", "", "GGUF file of the model for llama.cpp.")
  flags.DEFINE_string(
    "workdir", "runs/real_invariance", "Output directory for cells and the table."
  )
  measure_lib.command(main)
