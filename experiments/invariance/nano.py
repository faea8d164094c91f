"""Tests whether the batch changes samples: the Thinking Machines experiments at our scale.

Claim: on the tiled path 1,000 completions of one prompt inside random batches are identical, to the
last bit of every log-probability, greedy or sampled, and on-policy KL is 0.0 throughout. On plain
XLA (untiled) bits differ, and KL is not 0. The native path is not slower: at least 1.5x the
tokens/s of untiled with fitting buckets at 1, 8 and 64 rows, and 4x those of tiled at 1.
Command: bash launch/local.sh experiments.invariance.nano --workdir=runs/invariance
  some parts:    --part=a,d          (a greedy, b sampled, c on-policy training, d the cost)
  (d) in a minute: --part=d --batch_sizes=1,8 --repetitions=2
  another model: --model=PATH_OR_HUB_ID (a Qwen3 with the article's own prompt, for example), with
                 --prompt="Tell me about Richard Feynman" --max_tokens=1000
Hardware: 2 CPU cores, about 20 minutes for all parts. Numbers: docs/results/invariance.md

Source: He et al. 2025, Defeating Nondeterminism in LLM Inference (Thinking Machines).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import json
import math
import pathlib
import time
from typing import Any

from absl import flags, logging
import jax
import numpy as np

from experiments import measure
from seerjax import metrics, numerics as numerics_lib, rl
from seerjax.commands import generate, train
from seerjax.engine import engine as engine_lib
from seerjax.models import parameters
from seerjax.models.loading import Model
from seerjax.rollout import groups
from seerjax.run import (
  directory as directory_lib,
  policy as policy_lib,
  presets as run_presets,
  programs as programs_lib,
)
from seerjax.run.config import RunConfig, TrainerConfig
from seerjax.run.evaluation import EvaluationConfig
from seerjax.run.policy import Policy
from seerjax.tasks import loading
from seerjax.trainer import losses
from seerjax.types import Completion, Request, SamplingParams

PARTS = ("a", "b", "c", "d")
FEYNMAN = "Tell me about Richard Feynman"
# Engines with batches of other shapes: (maximum sequences, row buckets).
ENGINES = ((8, (1, 2, 8, 64)), (64, (16, 64, 256)))
CANDIDATES = 64  # Held-out problems from which (a) and (b) choose the one with the longest answer.

# Targets of native in part (d), by batch size: multiples of untiled's and of tiled's tokens/s.
UNTILED_AIMS = {1: 1.5, 8: 1.5, 64: 1.5}
LEAST_OF_UNTILED = 1.0
TILED_AIMS = {1: 4.0}

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class InvarianceConfig:
  """Sizes of the experiments.

  Attributes:
    model: "nano", a Hugging Face directory, a GGUF file, or a Hub id.
    prompt: prompt of (a) and (b); if empty, the word problem chosen by `longest_answered`.
    completions: completions of that prompt, for each path and part.
    max_tokens: maximum tokens of a completion in (a) and (b).
    temperature: temperature of (b).
    rl_steps: optimiser steps of (c).
    rl_groups: problems per step in (c).
    batch_sizes: batch sizes of (d), which are also the row buckets.
    decode_steps: decode steps per timing in (d).
    repetitions: repetitions in (d), with the paths taking turns.
    seed: seed of prompts, batches and samples.
  """

  model: str = "nano"
  prompt: str = ""
  completions: int = 1000
  max_tokens: int = 128
  temperature: float = 1.0
  rl_steps: int = 6
  rl_groups: int = 8
  batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)
  decode_steps: int = 16
  repetitions: int = 5
  seed: int = 0


def paths(config: InvarianceConfig) -> dict[str, numerics_lib.NumericsConfig]:
  """Returns the numerics to compare: tiled, with one slab, and plain XLA."""
  _, numerics = generate.load(config.model)
  numerics = dataclasses.replace(numerics, backend="tiled")
  one = dataclasses.replace(numerics, reduction_shards=1)
  return {
    "tiled": numerics,
    "tiled, 1 slab": one,
    "untiled": dataclasses.replace(one, backend="untiled"),
  }


def priced_paths(config: InvarianceConfig) -> dict[str, numerics_lib.NumericsConfig]:
  """Returns the numerics that part (d) times: those of `paths`, and native."""
  compared = paths(config)
  return compared | {"native": dataclasses.replace(compared["tiled"], backend="native")}


# (a) and (b): one prompt in random batches.


def engine_of(
  config: InvarianceConfig,
  policy: Policy,
  numerics: numerics_lib.NumericsConfig,
  *,
  max_num_seqs: int,
  max_model_len: int,
  batch_size_buckets: tuple[int, ...],
) -> engine_lib.Engine:
  """Returns an engine with pages for all sequences at full length, without prefix reuse."""
  page_size = min(32, numerics.kv_split)
  return engine_lib.Engine(
    Model(
      policy.model,
      parameters.compute_params(policy.params, numerics),
      numerics,
      policy.require_tokenizer(),
    ),
    config=engine_lib.EngineConfig(
      page_size=page_size,
      num_pages=max_num_seqs * math.ceil(max_model_len / page_size) + 1,
      max_num_seqs=max_num_seqs,
      max_model_len=max_model_len,
      batch_size_buckets=batch_size_buckets,
      enable_prefix_caching=False,
    ),
    key=numerics_lib.key(config.seed),
  )


def probe(
  config: InvarianceConfig,
  policy: Policy,
  prompt: tuple[int, ...],
  *,
  temperature: float,
  name: str,
) -> Request:
  """Returns the request of (a) and (b) for a prompt; its seed does not depend on its name."""
  sampling = SamplingParams(
    temperature=temperature,
    max_tokens=config.max_tokens,
    stop_token_ids=policy.require_tokenizer().eos_ids,
  )
  return Request(request_id=name, prompt=prompt, sampling=sampling, seed=config.seed)


def longest_answered(config: InvarianceConfig, temperature: float) -> tuple[tuple[int, ...], int]:
  """Chooses the word problem of (a) or (b) with the longest answer.

  A short answer could end before any path diverges. The candidates are the first `CANDIDATES`
  held-out problems in the seed's order, each answered on the tiled path with the temperature and
  seed of the part. The choice is the longest answer among those that end by themselves within
  `max_tokens` (the longest of all if none does), the first one of equal lengths.

  Returns:
    (the prompt's tokens, the length of that answer in tokens).
  """
  policy, numerics = generate.load(config.model)
  task = loading.load("word_problems", path=None)
  count = task.num_problems("heldout")
  requests = []
  for place in range(CANDIDATES):
    problem = task.problem("heldout", groups.problem_index(place, count, config.seed))
    prompt = groups.prompt_tokens(problem, policy.require_tokenizer())
    requests.append(probe(config, policy, prompt, temperature=temperature, name=str(place)))
  engine = engine_of(
    config,
    policy,
    numerics,
    max_num_seqs=CANDIDATES,
    max_model_len=max(len(request.prompt) for request in requests) + config.max_tokens,
    batch_size_buckets=(CANDIDATES, 4 * CANDIDATES),
  )
  by_name = {completion.request_id: completion for completion in engine.generate(requests)}
  answers = [by_name[request.request_id] for request in requests]
  best = max(
    range(CANDIDATES),
    key=lambda place: (answers[place].finish_reason == "stop", len(answers[place].tokens)),
  )
  return requests[best].prompt, len(answers[best].tokens)


def random_batches(
  config: InvarianceConfig,
  numerics: numerics_lib.NumericsConfig,
  prompt: tuple[int, ...],
  *,
  temperature: float,
  name: str,
  say: Say,
) -> list[Completion]:
  """Returns completions of the prompt, each sampled in a batch of random other requests."""
  policy = policy_lib.load_policy(config.model, numerics)
  engines = [
    engine_of(
      config,
      policy,
      numerics,
      max_num_seqs=most,
      max_model_len=len(prompt) + config.max_tokens,
      batch_size_buckets=buckets,
    )
    for most, buckets in ENGINES
  ]
  asked = lambda name: probe(config, policy, prompt, temperature=temperature, name=name)
  rng = np.random.default_rng(config.seed)
  return in_company(asked, engines, config.completions, rng=rng, name=name, say=say)


def in_company(
  asked: Callable[[str], Request],
  engines: Sequence[engine_lib.Engine],
  count: int,
  *,
  rng: np.random.Generator,
  name: str,
  say: Say,
) -> list[Completion]:
  """Returns `count` completions of one request, each sampled in a batch of random other requests.

  For each batch the engine, the number of probes, the prompts, lengths and parameters of the other
  requests, and all arrival steps are drawn anew.

  Args:
    asked: makes the request with a given name; only the name differs.
    engines: engines to choose from, with a tokenizer and without running requests.
    count: number of completions.
    rng: draws the batches.
    name: display name of the path.
    say: receives a line at least every ten seconds or every batch.
  """
  first, tokenizer = asked("probe"), engines[0].tokenizer
  assert tokenizer is not None
  completions: list[Completion] = []
  batch, reported = 0, time.monotonic()
  while len(completions) < count:
    engine = engines[int(rng.integers(len(engines)))]
    most = engine.config.max_num_seqs
    num_probes = int(rng.integers(1, most + 1))
    num_probes = min(num_probes, count - len(completions))
    num_others = int(rng.integers(0, most - num_probes + 1))
    requests = [asked(f"probe/{batch}/{i}") for i in range(num_probes)]
    for i in range(num_others):
      length = int(rng.integers(1, len(first.prompt) + 1))
      other = SamplingParams(
        temperature=float(rng.choice([0.0, 0.7, 1.0])),
        max_tokens=int(rng.integers(1, first.sampling.max_tokens + 1)),
      )
      tokens = tuple(int(t) for t in rng.integers(0, tokenizer.vocab_size, length))
      requests.append(
        Request(request_id=f"other/{batch}/{i}", prompt=tokens, sampling=other, seed=i)
      )
    order = [requests[i] for i in rng.permutation(len(requests))]
    while order or engine.num_unfinished:
      for _ in range(int(rng.integers(0, 9)) if order else 0):
        if order:
          engine.add_request(order.pop())
      engine.step()
      if time.monotonic() - reported > 10:
        reported = time.monotonic()
        say(
          f"  {name}: {len(completions)} of {count} completions, {batch} batches and"
          f" {engine.num_unfinished} running"
        )
    completions += [c for c in engine.poll() if c.request_id.startswith("probe/")]
    batch += 1
  return completions


def differences(completions: list[Completion]) -> dict[str, Any]:
  """Returns the number of distinct completions and where they first differ.

  Keys: completions, distinct_tokens (token sequences), most_common (count of the most frequent
  one), first_divergence (first token index at which any two differ, None if none does),
  distinct_bits (patterns of both log-probabilities and tokens), first_bit_divergence.
  """
  tokens = [completion.tokens for completion in completions]
  bits = [
    np.stack(
      [
        np.asarray(completion.tokens, np.int32).view(np.uint32),
        np.asarray(completion.behaviour_logprobs, np.float32).view(np.uint32),
        np.asarray(completion.raw_logprobs, np.float32).view(np.uint32),
      ],
      axis=1,
    )
    for completion in completions
  ]
  counts: dict[tuple[int, ...], int] = {}
  for sequence in tokens:
    counts[sequence] = counts.get(sequence, 0) + 1
  return dict(
    completions=len(completions),
    distinct_tokens=len(counts),
    most_common=max(counts.values()),
    first_divergence=_first_difference([np.asarray(sequence)[:, None] for sequence in tokens]),
    distinct_bits=len({part.tobytes() for part in bits}),
    first_bit_divergence=_first_difference(bits),
    length=float(np.mean([len(sequence) for sequence in tokens])),
  )


def _first_difference(rows: list[np.ndarray]) -> int | None:
  """Returns the first index at which an array differs from the first one or ends, else None."""
  first = rows[0]
  found = []
  for other in rows[1:]:
    shared = min(len(first), len(other))
    differing = np.flatnonzero(np.any(first[:shared] != other[:shared], axis=1))
    if len(differing):
      found.append(int(differing[0]))
    elif len(first) != len(other):
      found.append(shared)
  return min(found, default=None)


def one_prompt(config: InvarianceConfig, part: str, say: Say) -> dict[str, Any]:
  """Runs part (a), greedy, or (b), sampled with one seed, on the tiled and the untiled path."""
  temperature = 0.0 if part == "a" else config.temperature
  if config.prompt:
    policy, _ = generate.load(config.model)
    prompt = generate.prompt_tokens(policy, config.prompt)
  else:
    prompt, length = longest_answered(config, temperature)
    say(f"  a word problem of {len(prompt)} tokens, answered in {length}")
  results = {}
  for name, numerics in paths(config).items():
    if name == "tiled, 1 slab":
      continue
    begin = time.monotonic()
    completions = random_batches(
      config, numerics, prompt, temperature=temperature, name=name, say=say
    )
    results[name] = differences(completions) | dict(seconds=time.monotonic() - begin)
    say(f"  {name}: {results[name]['distinct_tokens']} distinct completions")
  return results


# (c): on-policy training.


def compared_runs(
  config: InvarianceConfig, directory: pathlib.Path
) -> dict[str, tuple[RunConfig, pathlib.Path]]:
  """Returns the run of part (c) and its directory, by path."""
  runs = {}
  for name, numerics in paths(config).items():
    if name == "tiled, 1 slab":
      continue
    run = RunConfig(
      model=config.model,
      seed=config.seed,
      num_steps=config.rl_steps,
      checkpoint_every=config.rl_steps,
      numerics=numerics,
      engine=engine_lib.EngineConfig(
        page_size=min(32, numerics.kv_split),
        num_pages=64 * 12 + 1,
        max_num_seqs=64,
        max_model_len=384,
        batch_size_buckets=(64, 256),
      ),
      rollout=groups.RolloutConfig(
        prompts_per_step=config.rl_groups, group_size=8, max_tokens=config.max_tokens
      ),
      trainer=TrainerConfig(rows_per_micro_batch=2048),
      loss=losses.dapo(),
      optimizer=dataclasses.replace(run_presets.main_job().optimizer, warmup_steps=0),
      evaluation=EvaluationConfig(num_problems=8),
    )
    runs[name] = run, directory / f"rl_{name}"
  return runs


def on_policy(config: InvarianceConfig, directory: pathlib.Path, say: Say) -> dict[str, Any]:
  """Runs part (c): a short run per path, with KL and largest log-probability gap of every step."""
  results = {}
  for name, (run, place) in compared_runs(config, directory).items():
    policy = policy_lib.load_policy(config.model, run.numerics)
    task = loading.load(run.task, path=None)
    rl.train(run, policy, task, place, log=lambda line: say(f"  {line}"))
    rows = [row for row in metrics.read(place / "metrics.jsonl") if "rollout_train/kl" in row]
    results[name] = {
      key: [float(metrics.decode_number(row[f"rollout_train/{key}"])) for row in rows]
      for key in ("kl", "raw_kl", "max_abs_logprob_gap", "max_abs_raw_logprob_gap")
    }
    largest = max(results[name]["max_abs_logprob_gap"])
    say(f"  {name}: largest |log-probability gap| {largest}")
  return results


# (d): the cost.


def price(config: InvarianceConfig, say: Say) -> dict[str, Any]:
  """Runs part (d): median decoded tokens/s by batch size and path, with the paths taking turns.

  All sequences decode from the same position, so that no path gains from ragged lengths.
  """
  prompt_length, context = 32, 128
  results: dict[str, Any] = {name: {} for name in priced_paths(config)}
  for size in config.batch_sizes:
    engines = {}
    for name, numerics in priced_paths(config).items():
      policy = policy_lib.load_policy(config.model, numerics)
      page_size = min(32, numerics.kv_split)
      engines[name] = engine_lib.Engine(
        Model(policy.model, parameters.compute_params(policy.params, numerics), numerics),
        config=engine_lib.EngineConfig(
          page_size=page_size,
          num_pages=size * (context // page_size) + 1,
          max_num_seqs=size,
          max_model_len=context,
          batch_size_buckets=(size, 2 * max(size, 64)),
          decode_steps_per_call=1,  # Steps are timed individually.
        ),
        key=numerics_lib.key(config.seed),
      )
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for repetition in range(config.repetitions + 1):
      for name, engine in list(engines.items())[:: 1 if repetition % 2 else -1]:
        elapsed = _time_decoding(config, engine, size, prompt_length, context)
        if repetition:  # The first round compiles.
          seconds[name].append(elapsed)
    for name, values in seconds.items():
      rates = size * config.decode_steps / np.asarray(values)
      results[name][size] = dict(
        median=float(np.median(rates)), lowest=float(rates.min()), highest=float(rates.max())
      )
    say(
      f"  batch {size}: "
      + ", ".join(f"{name} {results[name][size]['median']:,.0f} tokens/s" for name in engines)
    )
  return results


def _time_decoding(
  config: InvarianceConfig, engine: engine_lib.Engine, size: int, prompt_length: int, context: int
) -> float:
  """Returns the seconds of `decode_steps` steps in which all sequences decode."""
  sampling = SamplingParams(max_tokens=context - prompt_length)
  for index in range(size):
    places = range(prompt_length)
    prompt = tuple((7 * index + 3 * place) % engine.model.vocab_size for place in places)
    engine.add_request(Request(request_id=str(index), prompt=prompt, sampling=sampling, seed=index))
  while len(engine.step()) < size:  # Until every prompt is prefilled.
    pass
  begin = time.perf_counter()
  for _ in range(config.decode_steps):
    engine.step()
  elapsed = time.perf_counter() - begin
  for index in range(size):
    engine.abort_request(str(index))
  return elapsed


# Reports.


def tables(results: dict[str, Any]) -> str:
  """Returns all parts' results as Markdown."""
  sections = []
  for part, title in (("a", "(a) temperature 0"), ("b", "(b) sampled, one seed")):
    if part not in results:
      continue
    names = (
      "path", "completions", "distinct completions", "first differing token",
      "distinct bit patterns of the log-probabilities", "first differing bits at token",
    )  # fmt: skip
    rows = (
      (name, f"{row['completions']:,}", f"{row['distinct_tokens']:,}",
       _place(row["first_divergence"]), f"{row['distinct_bits']:,}",
       _place(row["first_bit_divergence"]))
      for name, row in results[part].items()
    )  # fmt: skip
    sections.append(
      f"**{title}: one prompt inside random batches**\n\n{measure.table(names, rows)}"
    )
  if "c" in results:
    found = results["c"]
    columns = [(name, key) for name in found for key in ("kl", "max_abs_logprob_gap")]
    head = [f"{name}: {'KL' if key == 'kl' else 'largest gap'}" for name, key in columns]
    rows = (
      (step + 1, *(f"{found[name][key][step]:.3g}" for name, key in columns))
      for step in range(len(next(iter(found.values()))["kl"]))
    )
    title = "**(c) on-policy training: KL(rollout, trainer) before each step, nats**"
    sections.append(f"{title}\n\n{measure.table(('step', *head), rows)}")
  if "d" in results:
    sections += [price_table(results["d"]), aims(results["d"])]
  return "\n\n".join(sections) + "\n"


def price_table(results: dict[str, Any]) -> str:
  """Returns part (d) as Markdown."""
  names = list(results)
  ratios = (*((name, "untiled") for name in names if name != "untiled"), ("native", "tiled"))
  lines = []
  for size in results[names[0]]:
    rows = {name: results[name][size] for name in names}
    rates = (
      f"{row['median']:,.0f} ({row['lowest']:,.0f} to {row['highest']:,.0f})"
      for row in rows.values()
    )
    times = (f"{rows[name]['median'] / rows[other]['median']:.2f}" for name, other in ratios)
    lines.append((size, *rates, *times))
  head = ("batch", *names, *(f"{name} / {other}" for name, other in ratios))
  return (
    "**(d) the price: decoded tokens/s, median (range); one device**\n\nThe row bucket is the"
    f" batch, since untiled computes its whole bucket.\n\n{measure.table(head, lines)}"
  )


def aims(results: dict[str, Any]) -> str:
  """Returns the targets of native at each timed batch size, and whether they are met."""
  rows = []
  for other, aim_of in (("untiled", UNTILED_AIMS), ("tiled", TILED_AIMS)):
    for size in results["native"]:
      if aim := aim_of.get(size, LEAST_OF_UNTILED if other == "untiled" else 0.0):
        ratio = results["native"][size]["median"] / results[other][size]["median"]
        rows.append((other, size, f"{aim:g}", f"{ratio:.2f}", measure.holds(ratio >= aim)))
  return measure.table(("native, times", "batch", "aimed at", "measured", "holds"), rows)


def _place(index: int | None) -> str:
  return "none" if index is None else str(index)


def picture(results: dict[str, Any], path: pathlib.Path) -> None:
  """Draws one panel per part: distinct bits (a, b), gaps (c), tokens/s (d)."""
  import matplotlib

  matplotlib.use("Agg")
  from matplotlib import pyplot

  figure, row = pyplot.subplots(
    1, len(results), figsize=(3.6 * len(results), 3.2), squeeze=False, layout="constrained"
  )
  for axes, (part, values) in zip(row[0], results.items(), strict=True):
    if part in ("a", "b"):
      names = list(values)
      for offset, (key, label) in enumerate(
        (("distinct_tokens", "token sequences"), ("distinct_bits", "bit patterns"))
      ):
        heights = [values[name][key] for name in names]
        bars = axes.bar([i + 0.4 * offset for i in range(len(names))], heights, 0.38, label=label)
        axes.bar_label(bars, fontsize=8)
      axes.set_xticks([i + 0.2 for i in range(len(names))], names)
      axes.set_yscale("symlog", linthresh=1)
      axes.margins(y=0.25)
      axes.set_title(f"({part}) distinct completions", fontsize=9)
      axes.legend(fontsize=7)
    elif part == "c":
      for name, rows in values.items():
        axes.plot(range(1, len(rows["kl"]) + 1), rows["max_abs_logprob_gap"], "o-", label=name)
      axes.set_title("(c) largest |log-probability gap|, nats", fontsize=9)
      axes.set_xlabel("step")
      axes.set_yscale("symlog", linthresh=1e-8)
      axes.legend(fontsize=7)
    else:
      for name, sizes in values.items():
        axes.plot(list(sizes), [size["median"] for size in sizes.values()], "o-", label=name)
      axes.set_title("(d) decoded tokens/s", fontsize=9)
      axes.set_xlabel("batch")
      axes.set_xscale("log", base=2)
      axes.set_yscale("log")
      axes.legend(fontsize=7)
  figure.savefig(path, dpi=80)
  pyplot.close(figure)


def run(
  config: InvarianceConfig, parts: tuple[str, ...], directory: pathlib.Path, say: Say
) -> dict[str, Any]:
  """Runs parts; writes results.json, table.md and invariance.png after each.

  Raises:
    ValueError: for an unknown part, or if part (c) cannot run.
  """
  unknown = [part for part in parts if part not in PARTS]
  if unknown or not parts:
    raise ValueError(
      f"--part: got {', '.join(unknown) or 'none'}, expected some of {', '.join(PARTS)};"
      " --part=a,d runs two."
    )
  for job, place in compared_runs(config, directory).values() if "c" in parts else ():
    # Checked now rather than after parts that take minutes.
    directory_lib.check_directory(place, resume=False)
    policy = policy_lib.load_policy(config.model, job.numerics)
    decided = programs_lib.make_programs(job.shared, policy.model).config.parts
    train.check_prompts(
      dataclasses.replace(job, **decided), loading.load(job.task, path=None), policy
    )
  directory.mkdir(parents=True, exist_ok=True)
  results: dict[str, Any] = {}
  for part in parts:
    say(f"part {part}")
    if part in ("a", "b"):
      results[part] = one_prompt(config, part, say)
    elif part == "c":
      results[part] = on_policy(config, directory, say)
    else:
      results[part] = price(config, say)
    record = dict(config=dataclasses.asdict(config), device=jax.devices()[0].device_kind)
    record |= dict(jax_version=jax.__version__, results=results)
    (directory / "results.json").write_text(json.dumps(record, indent=1) + "\n")
    (directory / "table.md").write_text(tables(results))
    picture(results, directory / "invariance.png")
  say("\n" + tables(results))
  say(f"written to {directory}")
  return results


def main(args: flags.FlagValues) -> None:
  logging.set_verbosity(logging.WARNING)  # Orbax logs every file.
  config = InvarianceConfig(
    model=args.model,
    prompt=args.prompt,
    completions=args.completions,
    max_tokens=args.max_tokens,
    rl_steps=args.rl_steps,
    repetitions=args.repetitions,
    batch_sizes=tuple(map(int, args.batch_sizes)),
    seed=args.seed,
  )
  run(config, tuple(args.part), pathlib.Path(args.workdir), measure.say)


if __name__ == "__main__":
  flags.DEFINE_list("part", list(PARTS), "Parts to run: a, b, c, d.")
  flags.DEFINE_string(
    "model", "nano", "Model: nano, a Hugging Face directory, a GGUF file, or a Hub id."
  )
  flags.DEFINE_string(
    "prompt", "", f"Prompt of parts a and b; a word problem if empty, or {FEYNMAN!r}."
  )
  flags.DEFINE_integer(
    "completions", 1000, "Number of completions of the prompt, in each of a and b.", 2
  )
  flags.DEFINE_integer("max_tokens", 128, "Maximum completion length in tokens.", 1)
  flags.DEFINE_integer("rl_steps", 6, "Number of training steps in part c.", 1)
  flags.DEFINE_integer("repetitions", 5, "Number of rounds in part d.", 1)
  flags.DEFINE_list(
    "batch_sizes", ["1", "2", "4", "8", "16", "32", "64", "128"], "Batch sizes in part d."
  )
  flags.DEFINE_integer("seed", 0, "Seed of all random draws.")
  flags.DEFINE_string(
    "workdir", "runs/invariance", "Output directory for numbers, tables and the plot."
  )
  measure.command(main)
