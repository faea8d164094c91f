"""Compares throughput with transformers and llama.cpp on one grouped, long-tailed workload.

Claim: on the same two cores the native backend, with several decode steps per engine call,
reaches at least 4x the useful tokens/s of the tiled one, 10x those of a static batch of
`transformers.generate`, 4x those of batches sorted by length, and 3x those of llama.cpp; every
completion is still batch-invariant.
Command: bash launch/local.sh experiments.throughput.engine --workdir=runs/engine_throughput
  peers need additional packages, which `bash launch/peers.sh` installs; the script names missing
  ones and measures the other peers
  in a minute: --num_prompts=2 --max_tokens=64 --repetitions=1
Hardware: 2 CPU cores, about 15 minutes. Numbers: docs/results/engine_throughput.md

The workload: 16 prompts x 8 completions with forced log-normal lengths, similar within a group and
clipped at 512. Useful tokens are the requested ones; tokens that a static batch computes beyond a
completion's length do not count. Every peer runs in its own process (so peak memory and CPU seconds
are its own), warms up once on the whole workload, and then the peers take turns. CPU seconds count
every thread of a process; on a busy machine they are more informative than wall seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
import dataclasses
import json
import pathlib
import sys
import tempfile
from typing import Any, NamedTuple

from absl import flags
import numpy as np

from experiments import llama_cpp, measure, peer_models, peer_process
from seerjax.run import policy as policy_lib, presets as run_presets


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
  """The workload.

  Attributes:
    model: "nano" or a Hugging Face directory.
    num_prompts: number of groups.
    group_size: completions per prompt.
    max_tokens: maximum length; longer draws are clipped.
    seed: seed of problems and lengths.
    data_parallel_size: instances of our engine, one virtual CPU device each.
    num_threads: threads of torch and of llama.cpp.
  """

  model: str = "nano"
  num_prompts: int = 16
  group_size: int = 8
  max_tokens: int = 512
  seed: int = 0
  data_parallel_size: int = 2
  num_threads: int = 2


class Peer(NamedTuple):
  """An engine to measure.

  Attributes:
    label: display name.
    kind: "ours", "transformers" or "llama.cpp".
    settings: for ours, fields of `NumericsConfig`; for others, how they batch.
    engine: for ours, fields of `EngineConfig`.
  """

  label: str
  kind: str
  settings: dict[str, Any]
  engine: dict[str, Any] = {}


PEERS = {
  "native-k": Peer(
    "SeerJAX, native, 8 steps per visit",
    "ours",
    dict(backend="native"),
    dict(decode_steps_per_call=8),
  ),
  "native": Peer(
    "SeerJAX, native, single steps",
    "ours",
    dict(backend="native"),
    dict(decode_steps_per_call=1),
  ),
  "tiled-8": Peer("SeerJAX, tiled, 8 slabs", "ours", dict(backend="tiled")),
  "tiled-1": Peer("SeerJAX, tiled, 1 slab", "ours", dict(reduction_shards=1, backend="tiled")),
  "untiled-1": Peer(
    "SeerJAX, untiled (not invariant), 1 slab",
    "ours",
    dict(reduction_shards=1, backend="untiled"),
  ),
  "hf-static": Peer("transformers generate, one batch of all", "transformers", dict(batch_size=0)),
  "hf-static-32": Peer(
    "transformers generate, batches of 32 in order", "transformers", dict(batch_size=32)
  ),
  "hf-sorted-32": Peer(
    "transformers generate, batches of 32 sorted by known length",
    "transformers",
    dict(batch_size=32, is_sorted=True),
  ),
  "hf-continuous": Peer(
    "transformers continuous batching", "transformers", dict(is_continuous=True)
  ),
  # The fastest setting: flash attention on, off or automatic, with f16 or f32 keys and values.
  "llama-cpp": Peer(
    "llama.cpp, float32, one stream per sequence, slots by known length",
    "llama.cpp",
    dict(flash=False, kv="f32"),
  ),
}
BASELINE = "hf-static"
# AIMED has to reach this multiple of each peer's useful tokens/s.
AIMED = "native-k"
AIMS = {"tiled-8": 4.0, "hf-static": 10.0, "hf-sorted-32": 4.0, "llama-cpp": 3.0}


def forced_lengths(workload: Workload) -> np.ndarray:
  """Returns log-normal lengths, i32[p, g]; half the variance of their logarithms is per group."""
  rng = np.random.default_rng(workload.seed)
  shape = (workload.num_prompts, workload.group_size)
  logarithm = 4.35 + 0.62 * rng.normal(size=(shape[0], 1)) + 0.62 * rng.normal(size=shape)
  return np.clip(np.rint(np.exp(logarithm)), 1, workload.max_tokens).astype(np.int32)


def prompts(workload: Workload) -> list[tuple[int, ...]]:
  """Returns one prompt per group: word problems as user turns."""
  # Imported here so that peers which do not need JAX do not import it.
  from seerjax.models import loading as model_loading, tokenizer as tokenizer_lib
  from seerjax.rollout import groups
  from seerjax.tasks import loading

  directory = model_loading.path_of(workload.model)
  tokenizer = tokenizer_lib.load(directory)
  task = loading.load("word_problems", path=None)
  count = task.num_problems("train")
  indices = [
    groups.problem_index(place, count, workload.seed) for place in range(workload.num_prompts)
  ]
  return [groups.prompt_tokens(task.problem("train", index), tokenizer) for index in indices]


# A peer: runs the whole workload once and returns the number of generated tokens.
Answer = Callable[[], int]


def our_answer(
  workload: Workload, texts: list[tuple[int, ...]], lengths: np.ndarray, peer: Peer
) -> Answer:
  """Returns the peer for this engine."""
  from seerjax import numerics as numerics_lib, parallel
  from seerjax.engine import engine as engine_lib
  from seerjax.models import parameters
  from seerjax.models.loading import Model
  from seerjax.types import Request, SamplingParams

  numerics = dataclasses.replace(run_presets.main_job().numerics, **peer.settings)
  policy = policy_lib.load_policy(workload.model, numerics)
  page_size = 32
  longest = max(map(len, texts)) + workload.max_tokens
  num_sequences = -(-lengths.size // workload.data_parallel_size)
  config = engine_lib.EngineConfig(
    page_size=page_size,
    num_pages=num_sequences * -(-longest // page_size) + 1,
    max_num_seqs=num_sequences,
    max_model_len=longest,
    # Small buckets help in the tail; on the tiled path they only save memory.
    batch_size_buckets=tuple(sorted({8, 32, num_sequences, max(256, num_sequences)})),
    **peer.engine,
  )
  engine = engine_lib.Engine(
    Model(policy.model, parameters.compute_params(policy.params, numerics), numerics),
    config=config,
    key=numerics_lib.key(workload.seed),
    mesh=parallel.make_mesh(data_parallel_size=workload.data_parallel_size),
  )
  requests = [
    Request(
      request_id=f"{group}/{member}",
      prompt=texts[group],
      sampling=SamplingParams(max_tokens=int(lengths[group, member])),
      seed=group * workload.group_size + member,
      group_id=str(group),
    )
    for group in range(workload.num_prompts)
    for member in range(workload.group_size)
  ]

  def answer() -> int:
    # Drops pages of the previous run, so that every run prefills.
    engine.update_weights(parameters.compute_params(policy.params, numerics), policy_version=0)
    return sum(len(completion.tokens) for completion in engine.generate(requests))

  return answer


def their_answer(
  workload: Workload, texts: list[tuple[int, ...]], lengths: np.ndarray, peer: Peer
) -> Answer:
  """Returns the peer for Hugging Face transformers on torch.

  Static batches are left-padded and run until the longest completion is done; no token ends a
  completion. Continuous batching gets every length in advance.
  """
  settings = peer.settings
  import torch  # pyright: ignore[reportMissingImports]
  import transformers  # pyright: ignore[reportMissingImports]

  from seerjax.models import loading

  torch.set_num_threads(workload.num_threads)
  torch.manual_seed(workload.seed)
  transformers.logging.set_verbosity_error()
  directory = loading.NANO if workload.model == "nano" else workload.model
  model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
  inputs = [list(text) for text in texts for _ in range(workload.group_size)]
  wanted = lengths.reshape(-1)
  common = dict(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0)

  def static_batch(rows: np.ndarray) -> int:
    width = max(len(inputs[row]) for row in rows)
    ids = torch.zeros((len(rows), width), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for place, row in enumerate(rows):
      ids[place, width - len(inputs[row]) :] = torch.tensor(inputs[row])
      mask[place, width - len(inputs[row]) :] = 1
    longest = int(wanted[rows].max())
    config = transformers.GenerationConfig(
      max_new_tokens=longest, min_new_tokens=longest, eos_token_id=None, use_cache=True, **common
    )
    with torch.inference_mode():
      out = model.generate(ids, attention_mask=mask, generation_config=config)
    assert out.shape == (len(rows), width + longest), "a response ended before its length"
    return int(wanted[rows].sum())

  def static() -> int:
    order = np.arange(len(wanted))
    if settings.get("is_sorted"):
      order = np.argsort(wanted, kind="stable")
    size = settings["batch_size"] or len(wanted)
    return sum(static_batch(order[first : first + size]) for first in range(0, len(order), size))

  def continuous() -> int:
    config = transformers.GenerationConfig(
      max_new_tokens=workload.max_tokens, eos_token_id=-1, **common
    )
    page_size = 32
    longest = max(map(len, inputs)) + workload.max_tokens
    batching = transformers.generation.ContinuousBatchingConfig(
      page_size=page_size,
      num_blocks=len(inputs) * -(-longest // page_size),
      max_batch_tokens=512,
      use_cuda_graph=False,
    )
    given = 0
    with (
      torch.inference_mode(),
      model.continuous_batching_context_manager(
        generation_config=config, continuous_batching_config=batching, warmup=False
      ) as manager,
    ):
      for row, length in zip(inputs, wanted, strict=True):
        manager.add_request(row, max_new_tokens=int(length), eos_token_id=-1)
      finished = 0
      while finished < len(inputs):
        result = manager.get_result(timeout=1)
        if result is None:
          if not manager.is_running():
            break  # It stopped by itself: `fault` reports the missing tokens.
        elif result.is_finished():
          finished += 1
          given += len(result.generated_tokens)
    return given

  return continuous if settings.get("is_continuous") else static


def llama_answer(
  workload: Workload, texts: list[tuple[int, ...]], lengths: np.ndarray, peer: Peer
) -> Answer:
  """Returns the peer for llama.cpp, on a float32 GGUF file of the same weights."""
  with tempfile.TemporaryDirectory() as directory:
    file = pathlib.Path(directory, "model.gguf")
    peer_models.write_gguf(workload.model, file)
    model = llama_cpp.Model(
      file,
      num_sequences=lengths.size,
      context=max(map(len, texts)) + workload.max_tokens,
      num_threads=workload.num_threads,
      **peer.settings,
    )
  rng = np.random.default_rng(workload.seed)
  return lambda: sum(map(len, llama_cpp.answer(model, texts, lengths, rng)))


BUILDERS = {"ours": our_answer, "transformers": their_answer, "llama.cpp": llama_answer}


def answers(
  name: str, workload: Workload, texts: list[tuple[int, ...]]
) -> Iterator[dict[str, Any]]:
  """Runs a peer in this process: yields the record of a run for each line on stdin."""
  peer = PEERS[name]
  answer = BUILDERS[peer.kind](workload, texts, forced_lengths(workload), peer)
  for _ in sys.stdin:
    num_tokens, took = measure.clocked(answer)
    yield dict(tokens=num_tokens, peak=peer_process.peak_memory(), **took._asdict())


def start(
  name: str, workload: Workload, texts: list[tuple[int, ...]], python: str = sys.executable
) -> peer_process.Process:
  """Starts a peer in a separate process."""
  what = json.dumps([name, dataclasses.asdict(workload), texts])
  process = peer_process.Process("experiments.throughput.engine", "--serve", python=python)
  process.send(what)
  return process


def fault(reply: dict[str, Any], num_tokens: int) -> str:
  """Returns why a peer's result does not count, "" if it does."""
  if "error" in reply:
    return reply["error"]
  if reply["tokens"] != num_tokens:
    return f"gave {reply['tokens']:,} tokens, {num_tokens:,} were requested"
  return ""


def measured(
  names: list[str],
  workload: Workload,
  repetitions: int,
  say: Callable[[str], None],
  interpreters: dict[str, str],
) -> dict[str, Any]:
  """Returns, by peer, its seconds, tokens/s and peak memory, or its error."""
  texts = prompts(workload)
  useful = int(forced_lengths(workload).sum())
  results: dict[str, Any] = {}
  processes: dict[str, peer_process.Process] = {}

  def answer(name: str) -> dict[str, Any] | None:
    reply = processes[name].ask()
    if not (why := fault(reply, useful)):
      return reply
    say(f"{PEERS[name].label}: does not run here ({why})")
    results[name] = dict(error=why)
    processes.pop(name).close()
    return None

  try:
    for name in names:
      processes[name] = start(name, workload, texts, interpreters[PEERS[name].kind])
      if first := answer(name):
        say(f"{PEERS[name].label}: warmed up in {first['seconds']:.1f} s")
        results[name] = dict(seconds=[], cpu_seconds=[], warmup_seconds=first["seconds"])
    for repetition in range(repetitions):
      for name in measure.in_turn(processes, repetition):
        if reply := answer(name):
          results[name]["seconds"].append(reply["seconds"])
          results[name]["cpu_seconds"].append(reply["cpu_seconds"])
          results[name]["peak"] = reply["peak"]
          say(
            f"{repetition + 1}/{repetitions}  {name:14s} {useful / reply['seconds']:8.0f} tokens/s,"
            f" {useful / reply['cpu_seconds']:8.0f} a CPU second"
          )
  finally:
    for process in processes.values():
      process.close()
  for result in results.values():
    if "seconds" in result:
      rates = useful / np.asarray(result["seconds"])
      result |= dict(
        tokens_per_second=float(np.median(rates)),
        lowest=float(rates.min()),
        highest=float(rates.max()),
        tokens_per_cpu_second=float(np.median(useful / np.asarray(result["cpu_seconds"]))),
      )
  return results


def table(results: dict[str, Any]) -> str:
  """Returns the results as Markdown, with ratios to the static batch."""
  baseline = results.get(BASELINE, {}).get("tokens_per_second")
  rows = []
  for name, result in results.items():
    label = PEERS[name].label
    if "error" in result:
      rows.append((label, f"does not run here: {result['error']}", *[""] * 5))
      continue
    rows.append((
      label,
      f"{result['tokens_per_second']:,.0f} ({result['lowest']:,.0f} to {result['highest']:,.0f})",
      f"{result['tokens_per_second'] / baseline:.1f}" if baseline else "not measured",
      f"{result['tokens_per_cpu_second']:,.0f}",
      f"{np.median(result['seconds']):.2f}",
      f"{np.median(result['cpu_seconds']):.2f}",
      f"{result['peak'] / 2**20:,.0f}",
    ))  # fmt: skip
  names = (
    "engine", "useful tokens/s, median (range)", "times static batch",
    "useful tokens per CPU second", "wall s", "CPU s", "peak memory, MiB",
  )  # fmt: skip
  return measure.table(names, rows)


def aims(results: dict[str, Any]) -> str:
  """Returns the target ratios as Markdown, and which of them are met."""
  ours = results.get(AIMED, {})
  if "tokens_per_second" not in ours:
    return f"{PEERS[AIMED].label} was not measured, so no aim is checked."
  rows = []
  for name, aim in AIMS.items():
    label, theirs = PEERS[name].label, results.get(name, {})
    if "tokens_per_second" not in theirs:
      rows.append((label, f"{aim:g}", "not measured", "", ""))
      continue
    ratio = ours["tokens_per_second"] / theirs["tokens_per_second"]
    by_cpu = ours["tokens_per_cpu_second"] / theirs["tokens_per_cpu_second"]
    rows.append((label, f"{aim:g}", f"{ratio:.1f}", f"{by_cpu:.1f}", measure.holds(ratio >= aim)))
  names = (
    f"useful tokens of {PEERS[AIMED].label}, times those of", "aimed at", "per wall second",
    "per CPU second", "holds (wall)",
  )  # fmt: skip
  return measure.table(names, rows)


def costs(results: dict[str, Any]) -> str:
  """Returns sentences on the cost of determinism: the extra time of the tiled path."""
  plain = results.get("untiled-1", {}).get("tokens_per_second")
  sentences = []
  for name, slabs in (("tiled-1", "1 slab"), ("tiled-8", "8 slabs")):
    rate = results.get(name, {}).get("tokens_per_second")
    if rate and plain:
      sentences.append(
        f"Invariance with {slabs} costs {plain / rate - 1:+.0%} time (untiled {plain:,.0f}, tiled"
        f" {rate:,.0f} tokens/s)."
      )
  if sentences:
    sentences.append(
      "Untiled computes its whole row bucket: of 8, 32 or all the sequences of an instance."
    )
  return "\n".join(sentences)


def picture(results: dict[str, Any], path: pathlib.Path) -> None:
  """Draws a bar of tokens/s for each peer."""
  found = [
    measure.Bar(
      PEERS[name].label,
      result["tokens_per_second"],
      "tab:blue" if PEERS[name].kind == "ours" else "tab:gray",
    )
    for name, result in results.items()
    if "error" not in result
  ]
  measure.bars(found, "useful tokens/s", path)


def chosen_peers(
  names: list[str], missing: dict[str, list[str]], say: Callable[[str], None]
) -> list[str]:
  """Returns the named peers (all if none is named) that can run here.

  Args:
    names: names of peers.
    missing: by kind, the packages that are not installed.
    say: receives a line for each kind that is left out.

  Raises:
    ValueError: if a name is unknown.
  """
  peer_process.check_names("--peers", names, PEERS)
  names = names or list(PEERS)
  for kind, packages in missing.items():
    left_out = [name for name in names if PEERS[name].kind == kind and packages]
    if left_out:
      say(peer_process.left_out(left_out, packages))
    names = [name for name in names if name not in left_out]
  return names


def run(
  workload: Workload,
  names: list[str],
  repetitions: int,
  directory: pathlib.Path,
  say: Callable[[str], None],
  torch_python: str = "",
) -> dict[str, Any]:
  """Measures, prints, and writes results.json, table.md and throughput.png."""
  interpreters = peer_process.pythons(torch_python)
  missing = {
    kind: peer_process.missing_of(kind, interpreters[kind]) for kind in peer_process.PACKAGES
  }
  names = chosen_peers(names, missing, say)
  lengths = forced_lengths(workload)
  say(
    f"{lengths.size} requests in {len(lengths)} groups, answers of {lengths.mean():.0f} tokens on"
    f" average, {lengths.max()} at most, {lengths.sum():,} together"
  )
  results = measured(names, workload, repetitions, say, interpreters)
  directory.mkdir(parents=True, exist_ok=True)
  record = dict(workload=dataclasses.asdict(workload), repetitions=repetitions, results=results)
  (directory / "results.json").write_text(json.dumps(record, indent=1) + "\n")
  text = f"{table(results)}\n\n{aims(results)}\n\n{costs(results)}\n"
  (directory / "table.md").write_text(text)
  picture(results, directory / "throughput.png")
  say(f"\n{text}\nwritten to {directory}")
  return results


def main(args: flags.FlagValues) -> None:
  if args.serve:
    name, workload, texts = json.loads(sys.stdin.readline())
    if PEERS[name].kind == "ours":
      import jax

      jax.config.update("jax_num_cpu_devices", workload["data_parallel_size"])
    peer_process.serve(answers(name, Workload(**workload), [tuple(text) for text in texts]))
    return
  directory = pathlib.Path(args.workdir)
  workload = Workload(
    model=peer_models.as_directory(args.model, directory),
    max_tokens=args.max_tokens,
    num_prompts=args.num_prompts,
  )
  run(workload, args.peers, args.repetitions, directory, measure.say, args.torch_python)


if __name__ == "__main__":
  flags.DEFINE_string("model", "nano", "Model: nano, a Hugging Face directory or a GGUF file.")
  flags.DEFINE_list("peers", [], f"Peers to measure, from {', '.join(PEERS)}; all by default.")
  flags.DEFINE_integer("repetitions", 3, "Number of rounds per peer, after its warm-up.", 1)
  flags.DEFINE_integer("num_prompts", 16, "Number of prompts, each with a group of 8 requests.", 1)
  flags.DEFINE_integer("max_tokens", 512, "Maximum response length in tokens.", 1)
  flags.DEFINE_string(
    "torch_python", "", "Python of the torch peers; by default this one, or the one in .venv-3.11."
  )
  flags.DEFINE_string(
    "workdir", "runs/engine_throughput", "Output directory for numbers, table and plot."
  )
  flags.DEFINE_bool("serve", False, "Internal: run the peer named on stdin.")
  measure.command(main)
