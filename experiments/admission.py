"""Measures admission by expected tokens when KV memory holds only a few whole contexts.

Claim: with pages for 8 whole contexts, 64 requests without `max_tokens` (prompt and answer may fill
the context) have the bits that they have alone, all finish, and reach at least 0.9 of their
tokens/s with pages for 64.
Command: bash launch/local.sh experiments.admission
  in a minute: --num_requests=16 --repetitions=1
Hardware: 2 CPU cores, a few minutes. Numbers: docs/results/serving.md

Lengths are log-normal: each request has a stop id that first occurs in its completion at about the
drawn length, which the engine cannot know. Three configurations take turns in one process: ample
pages, whole completions reserved on few pages (`EngineConfig.reserved_tokens=0`), and tokens
reserved ahead on the same few pages. A second table lists the sizes that an engine would choose for
a model of realistic size, computed from the model's shape alone.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import json
import pathlib
import statistics
import time
from typing import NamedTuple

from absl import app, flags
import jax
import numpy as np

import seerjax
from seerjax import tasks
from seerjax.backends import choice
from seerjax.engine import runner as runner_lib, sizes
from seerjax.engine.engine import Engine, EngineConfig
from seerjax.models import config as model_config, presets
from seerjax.models.loading import Model
from seerjax.numerics import NumericsConfig
from seerjax.run import command_line
from seerjax.types import Completion, Request, SamplingParams

RESERVED = (0, 1, 32, 128)
PLANNED = ("qwen3-8b", 45, 40_960)  # Preset, free GiB, context.


class Outcome(NamedTuple):
  """Outcome of one run of all requests.

  Attributes:
    tokens: sampled tokens.
    seconds: wall time.
    displaced: number of preemptions.
    computed_again: preemptions after which the KV pages were recomputed.
    most_at_once: maximum number of requests with rows in one engine call.
    longest_pause: maximum number of engine calls between two tokens of a request.
  """

  tokens: int
  seconds: float
  displaced: int
  computed_again: int
  most_at_once: int
  longest_pause: int

  @property
  def rate(self) -> float:
    """Returns tokens per second."""
    return self.tokens / self.seconds


def questions(model: Model, num_requests: int, context: int) -> list[Request]:
  """Returns word problems whose answers fill the context."""
  assert model.tokenizer is not None
  task = tasks.load("word_problems")
  found = []
  for place in range(num_requests):
    prompt = tuple(model.tokenizer.chat_ids(task.problem("train", place).prompt))
    sampling = SamplingParams(max_tokens=context - len(prompt))
    found.append(Request(request_id=str(place), prompt=prompt, sampling=sampling, seed=place))
  return found


def ended(request: Request, tokens: Sequence[int], length: int) -> Request:
  """Returns the request with a stop id: the first token at or after `length` that is new there."""
  seen = set(tokens[:length])
  new = next((token for token in tokens[length:] if token not in seen), None)
  stops = () if new is None else (new,)
  sampling = dataclasses.replace(request.sampling, stop_token_ids=stops)
  return dataclasses.replace(request, sampling=sampling)


def run(engine: Engine, requests: Sequence[Request]) -> tuple[dict[str, Completion], Outcome]:
  """Runs all requests, submitted together; returns the completions and the outcome."""
  # Drops pages of the previous run, so that every run prefills its prompts.
  engine.memory.forget_all()
  before = dataclasses.replace(engine.counters)
  last, pause, most = {one.request_id: 0 for one in requests}, 0, 0
  begin = time.monotonic()
  for one in requests:
    engine.submit(one)
  found: dict[str, Completion] = {}
  visit = 0
  while engine.num_unfinished:
    visit += 1
    updates = engine.step()
    most = max(most, len(updates))
    for update in updates:
      if last[update.request_id]:
        pause = max(pause, visit - last[update.request_id])
      last[update.request_id] = visit
    found |= {one.request_id: one for one in engine.poll()}
  seconds, after = time.monotonic() - begin, engine.counters
  return found, Outcome(
    tokens=after.sampled_tokens - before.sampled_tokens,
    seconds=seconds,
    displaced=after.displaced - before.displaced,
    computed_again=after.preemptions - before.preemptions,
    most_at_once=most,
    longest_pause=pause,
  )


def same(left: Completion, right: Completion) -> bool:
  """Returns whether two completions have equal tokens and equal bits of log-probabilities."""
  bits = lambda one: [
    np.asarray(part, np.float32).view(np.uint32).tolist()
    for part in (one.behaviour_logprobs, one.raw_logprobs)
  ]
  return left.tokens == right.tokens and bits(left) == bits(right)


def planned(name: str, gib: float, context: int) -> list[str]:
  """Returns one line per dtype: the sizes that an engine chooses with `gib` of free memory."""
  model, lines = presets.get(name), []
  for dtype in ("float32", "bfloat16"):
    numerics = NumericsConfig(implementation="tiled", reduction_shards=0, compute_dtype=dtype)
    backend = choice.backend_of(model_config.numerics_for(model, numerics))
    for reserved in (0, EngineConfig().reserved_tokens):
      config = EngineConfig(max_context=context, reserved_tokens=reserved)
      found = sizes.fitted(config, model, backend, free_bytes=gib * 2**30)
      positions = (found.num_pages - 1) * found.page_size
      lines.append(
        f"| {name}, {gib:g} GiB free, {dtype} | {reserved or 'whole answers'} | {positions:,} |"
        f" {found.max_context:,} | {found.max_sequences} |"
      )
  return lines


def main(argv: list[str]) -> None:
  args = flags.FLAGS
  with command_line.refusals():
    command_line.check_arguments(argv)
    model = seerjax.load_model(args.model)
    context = min(args.context, model.config.max_context)
    requests = questions(model, args.num_requests, context)
    usual = EngineConfig(max_context=context, max_sequences=min(64, args.num_requests))
    pages = lambda contexts: contexts * -(-context // usual.page_size) + 1
    settings = {"ample": (args.num_requests, 0)}
    settings |= {f"few, {n or 'whole answers'}": (args.contexts, n) for n in RESERVED}
    # All engines share compiled programs; the number of pages is part of a program's key.
    mesh = seerjax.parallel.make_mesh()
    runner = runner_lib.Runner(model.config, model.numerics, mesh, max_programs=8)
    engines = {
      name: Engine(
        model,
        config=dataclasses.replace(usual, num_pages=pages(count), reserved_tokens=reserved),
        runner=runner,
      )
      for name, (count, reserved) in settings.items()
    }
    outcomes: dict[str, list[Outcome]] = {name: [] for name in engines}
    drawn = np.random.default_rng(0).lognormal(np.log(args.tokens) - 0.5, 1.0, len(requests))
    whole, _ = run(engines["ample"], requests)
    requests = [
      ended(one, whole[one.request_id].tokens, int(length))
      for one, length in zip(requests, drawn, strict=True)
    ]
    alone: dict[str, Completion] = {}
    for one in requests:
      alone |= run(engines["ample"], [one])[0]
    lengths = sorted(len(one.tokens) for one in alone.values())
    print(
      f"{len(requests)} requests of {min(len(r.prompt) for r in requests)} to"
      f" {max(len(r.prompt) for r in requests)} prompt tokens; answers of {lengths[0]} to"
      f" {lengths[-1]}, {statistics.mean(lengths):.0f} on average; context {context}",
      flush=True,
    )
    for repetition in range(args.repetitions + 1):
      for name, engine in engines.items():
        found, outcome = run(engine, requests)
        unlike = [key for key in alone if key not in found or not same(found[key], alone[key])]
        if unlike:
          raise ValueError(
            f"{name}: got different bits than alone for {unlike}, expected equal bits."
          )
        if repetition:  # The first one compiles.
          outcomes[name].append(outcome)
    print(
      "| pages for, ahead | tokens/s, median (range) | of ample's | at once | displaced |"
      " computed again | longest pause, visits |\n|---|---|---|---|---|---|---|"
    )
    for name, found in outcomes.items():
      rates = [one.rate for one in found]
      shares = [one.rate / other.rate for one, other in zip(found, outcomes["ample"], strict=True)]
      last = found[-1]
      print(
        f"| {settings[name][0]} contexts, {name} | {statistics.median(rates):,.0f}"
        f" ({min(rates):,.0f} to {max(rates):,.0f}) | {statistics.median(shares):.2f} |"
        f" {last.most_at_once} | {last.displaced} | {last.computed_again} | {last.longest_pause} |"
      )
    lines = planned(*PLANNED)
    print("\n| engine | tokens reserved ahead | tokens of context | longest request | at once |")
    print("|---|---|---|---|---|", *lines, sep="\n")
    if args.workdir:
      pathlib.Path(args.workdir).mkdir(parents=True, exist_ok=True)
      record = {name: [one._asdict() for one in found] for name, found in outcomes.items()}
      record["device"] = jax.devices()[0].device_kind
      (pathlib.Path(args.workdir) / "admission.json").write_text(json.dumps(record, indent=2))


def define_flags() -> None:
  """Defines the flags of the command."""
  flags.DEFINE_string("model", "nano", "Shipped model, directory, GGUF file, or Hub id.")
  flags.DEFINE_integer("num_requests", 64, "Number of requests to submit at once.", 1)
  flags.DEFINE_integer(
    "contexts", 8, "Number of whole contexts that fit into the small page pool.", 1
  )
  flags.DEFINE_integer("context", 512, "Maximum tokens of prompt plus response.", 2)
  flags.DEFINE_integer("tokens", 98, "Mean number of tokens per response.", 1)
  flags.DEFINE_integer("repetitions", 5, "Number of timed rounds, after one warm-up round.", 1)
  flags.DEFINE_string("workdir", "", "Directory for admission.json; '' writes nothing.")


if __name__ == "__main__":
  define_flags()
  app.run(main)
