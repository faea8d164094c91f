"""One grouped, long-tailed workload: this engine against Hugging Face transformers.

Claim: at least 10x the useful tokens/s of a static batch of `transformers.generate` on the same two
cores; invariance costs at most 25 % there with one reduction slab and 60 % with the shipped eight.
Command: bash launch/local.sh experiments.engine_throughput --workdir=runs/engine_throughput
  peers need torch and transformers (the parity packages of launch/test.sh); without them the script
  says so and measures this engine alone
Hardware: 2 CPU cores, about 15 minutes. Numbers: docs/results/engine_throughput.md

The workload: 16 prompts x 8 answers whose lengths are forced, log-normal and alike within a group,
clipped at 512. Useful tokens are those asked for; what a static batch computes beyond an answer's
length is not. Every peer runs in a process of its own (its peak memory is its own too), warms up
once on the whole workload, and then the peers take turns.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import importlib.util
import json
import os
import pathlib
import resource
import subprocess
import sys
import time
from typing import Any, NamedTuple

from absl import app, flags
import numpy as np

from seerjax.run import command_line, policy as policy_lib, presets as run_presets

ROOT = pathlib.Path(__file__).parents[1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
  """What is asked.

  Attributes:
    model: "nano" or a Hugging Face directory.
    num_prompts: groups.
    group_size: answers to each prompt.
    max_tokens: the longest answer; longer draws are clipped.
    seed: of problems and lengths.
    num_instances: of our engine; one virtual CPU device each.
    num_threads: of torch.
  """

  model: str = "nano"
  num_prompts: int = 16
  group_size: int = 8
  max_tokens: int = 512
  seed: int = 0
  num_instances: int = 2
  num_threads: int = 2


class Peer(NamedTuple):
  """Who answers: a label for people, whether it needs torch, and its settings."""

  label: str
  needs_torch: bool
  settings: dict[str, Any]


PEERS = {
  "tiled-8": Peer("SeerJAX, tiled, 8 slabs (as shipped)", False, {}),
  "tiled-1": Peer("SeerJAX, tiled, 1 slab", False, dict(reduction_shards=1)),
  "untiled-1": Peer(
    "SeerJAX, untiled (not invariant), 1 slab",
    False,
    dict(reduction_shards=1, implementation="untiled"),
  ),
  "hf-static": Peer("transformers generate, one batch of all", True, dict(batch_size=0)),
  "hf-static-32": Peer(
    "transformers generate, batches of 32 in order", True, dict(batch_size=32)
  ),
  "hf-sorted-32": Peer(
    "transformers generate, batches of 32 sorted by the (foreknown) length",
    True,
    dict(batch_size=32, is_sorted=True),
  ),
  "hf-continuous": Peer("transformers continuous batching", True, dict(is_continuous=True)),
}
BASELINE = "hf-static"


def forced_lengths(workload: Workload) -> np.ndarray:
  """Returns i32[p, g], log-normal lengths whose logarithms share half their variance in a group."""
  rng = np.random.default_rng(workload.seed)
  shape = (workload.num_prompts, workload.group_size)
  logarithm = 4.35 + 0.62 * rng.normal(size=(shape[0], 1)) + 0.62 * rng.normal(size=shape)
  return np.clip(np.rint(np.exp(logarithm)), 1, workload.max_tokens).astype(np.int32)


def prompts(workload: Workload) -> list[tuple[int, ...]]:
  """Returns one prompt a group: word problems as user turns."""
  # JAX stays out of the peers that do not need it.
  from seerjax.models import loading as model_loading, tokenizer as tokenizer_lib
  from seerjax.rollout import groups
  from seerjax.tasks import loading

  directory = model_loading.directory_of(workload.model)
  tokenizer = tokenizer_lib.load(directory)
  task = loading.load("word_problems", path=None)
  count = task.num_problems("train")
  indices = [
    groups.problem_index(place, count, workload.seed) for place in range(workload.num_prompts)
  ]
  return [groups.prompt_tokens(task.problem("train", index), tokenizer) for index in indices]


# What a peer is: a function that answers everything once and returns how many tokens it gave.
Answer = Callable[[], int]


def our_answer(
  workload: Workload, texts: list[tuple[int, ...]], lengths: np.ndarray, settings: dict[str, Any]
) -> Answer:
  """Returns a peer that is this engine."""
  from seerjax import numerics as numerics_lib, parallel
  from seerjax.engine import engine as engine_lib
  from seerjax.models import parameters
  from seerjax.models.loading import Model
  from seerjax.types import Request, SamplingParams

  numerics = dataclasses.replace(run_presets.main_job().numerics, **settings)
  policy = policy_lib.load_policy(workload.model, numerics)
  page_size = 32
  longest = max(map(len, texts)) + workload.max_tokens
  num_sequences = -(-lengths.size // workload.num_instances)
  config = engine_lib.EngineConfig(
    page_size=page_size,
    num_pages=num_sequences * -(-longest // page_size) + 1,
    max_sequences=num_sequences,
    max_context=longest,
    # Small buckets serve the tail; for the tiled path they only save memory.
    row_buckets=tuple(sorted({8, 32, num_sequences, max(256, num_sequences)})),
  )
  engine = engine_lib.Engine(
    Model(policy.model, parameters.compute_params(policy.params, numerics), numerics),
    config=config,
    key=numerics_lib.key(workload.seed),
    mesh=parallel.make_mesh(num_instances=workload.num_instances),
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
    # Pages of the run before are forgotten, so that every run prefills.
    engine.set_params(parameters.compute_params(policy.params, numerics), policy_version=0)
    return sum(len(completion.tokens) for completion in engine.generate(requests))

  return answer


def their_answer(
  workload: Workload, texts: list[tuple[int, ...]], lengths: np.ndarray, settings: dict[str, Any]
) -> Answer:
  """Returns a peer that is Hugging Face transformers on torch.

  Static batches are padded on the left and run until their longest answer is there; no token ends
  an answer. Continuous batching is told every length beforehand.
  """
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
    assert out.shape == (len(rows), width + longest), "an answer ended before its length"
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
            break  # It stopped by itself: `fault` misses the tokens.
        elif result.is_finished():
          finished += 1
          given += len(result.generated_tokens)
    return given

  return continuous if settings.get("is_continuous") else static


def serve(name: str, workload: Workload, texts: list[tuple[int, ...]]) -> None:
  """A peer's process: answers once for each line on stdin, one JSON line each."""
  lengths = forced_lengths(workload)
  peer = PEERS[name]
  build = their_answer if peer.needs_torch else our_answer
  reply = os.fdopen(os.dup(1), "w")
  os.dup2(2, 1)  # What libraries print must not look like a reply.
  try:
    answer = build(workload, texts, lengths, peer.settings)
    for _ in sys.stdin:
      begin = time.perf_counter()
      num_tokens = answer()
      seconds = time.perf_counter() - begin
      peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
      print(json.dumps(dict(seconds=seconds, tokens=num_tokens, peak=peak)), file=reply, flush=True)
  except Exception as error:  # Another library's failure is a finding, to be told with its name.
    print(json.dumps(dict(error=f"{type(error).__name__}: {error}")), file=reply, flush=True)
    raise


class Process:
  """A peer in a process of its own."""

  def __init__(self, name: str, workload: Workload, texts: list[tuple[int, ...]]):
    arguments = json.dumps([name, dataclasses.asdict(workload), texts])
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH", "")])])
    self._process = subprocess.Popen(
      [sys.executable, "-P", "-m", "experiments.engine_throughput", "--serve"],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
      env={**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
    )
    assert self._process.stdin is not None
    print(arguments, file=self._process.stdin, flush=True)

  def answer(self) -> dict[str, Any]:
    """Answers the workload once; {"error": ...} if the peer cannot."""
    assert self._process.stdin is not None
    assert self._process.stdout is not None
    try:
      print("go", file=self._process.stdin, flush=True)
      line = self._process.stdout.readline()
    except BrokenPipeError:
      line = ""
    return json.loads(line) if line else dict(error="its process ended")

  def close(self) -> None:
    """Lets the process end."""
    assert self._process.stdin is not None
    assert self._process.stdout is not None
    self._process.stdin.close()
    self._process.wait()
    self._process.stdout.close()


def missing_packages() -> list[str]:
  """Returns which of the packages that the peers need are not installed."""
  return [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]


def fault(reply: dict[str, Any], num_tokens: int) -> str:
  """Returns why a peer's answer does not count, "" if it does."""
  if "error" in reply:
    return reply["error"]
  if reply["tokens"] != num_tokens:
    return f"gave {reply['tokens']:,} tokens where {num_tokens:,} were asked for"
  return ""


def measure(
  names: list[str], workload: Workload, repetitions: int, say: Callable[[str], None]
) -> dict[str, Any]:
  """Returns, by peer, its seconds, tokens/s and peak memory, or why it has none."""
  texts = prompts(workload)
  useful = int(forced_lengths(workload).sum())
  results: dict[str, Any] = {}
  processes: dict[str, Process] = {}

  def answer(name: str) -> dict[str, Any] | None:
    reply = processes[name].answer()
    if not (why := fault(reply, useful)):
      return reply
    say(f"{PEERS[name].label}: does not run here ({why})")
    results[name] = dict(error=why)
    processes.pop(name).close()
    return None

  try:
    for name in names:
      processes[name] = Process(name, workload, texts)
      if first := answer(name):
        say(f"{PEERS[name].label}: warmed up in {first['seconds']:.1f} s")
        results[name] = dict(seconds=[], warmup_seconds=first["seconds"])
    for repetition in range(repetitions):
      # Backwards every second time: what the machine does meanwhile then hits all peers alike.
      for name in list(processes)[:: 1 if repetition % 2 == 0 else -1]:
        if reply := answer(name):
          results[name]["seconds"].append(reply["seconds"])
          results[name]["peak"] = reply["peak"]
          rate = useful / reply["seconds"]
          say(f"{repetition + 1}/{repetitions}  {name:14s} {rate:8.0f} tokens/s")
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
      )
  return results


def table(results: dict[str, Any]) -> str:
  """Returns the results as Markdown, with ratios to the static batch."""
  baseline = results.get(BASELINE, {}).get("tokens_per_second")
  lines = [
    "| engine | useful tokens/s, median (range) | times static batch | peak memory, MiB |",
    "|---|---|---|---|",
  ]
  for name, result in results.items():
    label = PEERS[name].label
    if "error" in result:
      lines.append(f"| {label} | does not run here: {result['error']} | | |")
      continue
    ratio = f"{result['tokens_per_second'] / baseline:.1f}" if baseline else "not measured"
    lines.append(
      f"| {label} | {result['tokens_per_second']:,.0f} ({result['lowest']:,.0f} to"
      f" {result['highest']:,.0f}) | {ratio} | {result['peak'] / 2**20:,.0f} |"
    )
  return "\n".join(lines)


def costs(results: dict[str, Any]) -> str:
  """Returns sentences on the price of determinism: extra time of the tiled path."""
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
  import matplotlib

  matplotlib.use("Agg")
  from matplotlib import pyplot

  rows = {name: result for name, result in results.items() if "error" not in result}
  figure, axes = pyplot.subplots(figsize=(7, 0.5 + 0.45 * len(rows)))
  for place, (name, result) in enumerate(reversed(rows.items())):
    color = "tab:gray" if PEERS[name].needs_torch else "tab:blue"
    rate = result["tokens_per_second"]
    axes.barh(place, rate, color=color)
    axes.text(rate, place, f" {rate:,.0f}", va="center")
  axes.set_yticks(range(len(rows)), [PEERS[name].label for name in reversed(rows)], fontsize=8)
  axes.set_xlabel("useful tokens/s")
  axes.margins(x=0.15)
  figure.tight_layout()
  figure.savefig(path, dpi=90)
  pyplot.close(figure)


def chosen_peers(names: list[str], say: Callable[[str], None]) -> list[str]:
  """Returns the peers that can run here, all of them if none is named.

  Raises:
    ValueError: if a name is not known.
  """
  if unknown := [name for name in names if name not in PEERS]:
    raise ValueError(
      f"--peers: got {', '.join(unknown)}, expected some of {', '.join(PEERS)}; correct the name."
    )
  names = names or list(PEERS)
  missing = missing_packages()
  if missing and any(PEERS[name].needs_torch for name in names):
    say(
      f"{' and '.join(missing)} not installed: this engine is measured alone (install the parity"
      " packages of this project to compare with transformers)"
    )
    names = [name for name in names if not PEERS[name].needs_torch]
  return names


def run(
  workload: Workload,
  names: list[str],
  repetitions: int,
  directory: pathlib.Path,
  say: Callable[[str], None],
) -> dict[str, Any]:
  """Measures, prints, and writes results.json, table.md and throughput.png."""
  names = chosen_peers(names, say)
  lengths = forced_lengths(workload)
  say(
    f"{lengths.size} requests in {len(lengths)} groups, answers of {lengths.mean():.0f} tokens on"
    f" average, {lengths.max()} at most, {lengths.sum():,} together"
  )
  results = measure(names, workload, repetitions, say)
  directory.mkdir(parents=True, exist_ok=True)
  record = dict(workload=dataclasses.asdict(workload), repetitions=repetitions, results=results)
  (directory / "results.json").write_text(json.dumps(record, indent=1) + "\n")
  text = f"{table(results)}\n\n{costs(results)}\n"
  (directory / "table.md").write_text(text)
  picture(results, directory / "throughput.png")
  say(f"\n{text}\nwritten to {directory}")
  return results


def main(argv: list[str]) -> None:
  args = flags.FLAGS
  if args.serve:
    name, workload, texts = json.loads(sys.stdin.readline())
    if not PEERS[name].needs_torch:
      import jax

      jax.config.update("jax_num_cpu_devices", workload["num_instances"])
    serve(name, Workload(**workload), [tuple(text) for text in texts])
    return
  with command_line.refusals():
    command_line.check_arguments(argv)
    workload = Workload(
      model=args.model, max_tokens=args.max_tokens, num_prompts=args.num_prompts
    )
    run(
      workload,
      args.peers,
      args.repetitions,
      pathlib.Path(args.workdir),
      lambda line: print(line, flush=True),
    )


if __name__ == "__main__":
  flags.DEFINE_string("model", "nano", "nano or a Hugging Face directory.")
  flags.DEFINE_list("peers", [], f"Some of {', '.join(PEERS)}; all by default.")
  flags.DEFINE_integer("repetitions", 3, "How often each peer answers after its warm-up.", 1)
  flags.DEFINE_integer("num_prompts", 16, "Groups of 8.", 1)
  flags.DEFINE_integer("max_tokens", 512, "Longest answer.", 1)
  flags.DEFINE_string("workdir", "runs/engine_throughput", "Takes numbers, table and picture.")
  flags.DEFINE_bool("serve", False, "Internal: be the peer that stdin names.")
  app.run(main)
