r"""Measures how much a full queue of sleep jobs slows down foreground requests.

Claim: by the step-time table, no step takes more than 1.05x of its foreground rows alone, and first
tokens take at most 1.05x plus one engine call; in a real run the mean step takes at most 1.10x, and
foreground requests have rows in the next step.
Command: bash launch/local.sh experiments.sleep_foreground
  bash launch/local.sh experiments.sleep_foreground --num_turns=20 --clock=cpu
Hardware: any; the table is measured first, or given by `--step_seconds`. Results:
docs/results/sleep_engine.md

Every engine call advances a virtual clock by the table's time for its rows. The same requests are
served without sleep jobs and with an inexhaustible queue of them, so the comparison shows the
engine's schedule without noise of the machine. Each client sends its next request as soon as the
previous one is finished; with `--arrivals=drawn`, requests arrive at random times instead. Steps
that take 5 % longer then increase the number of concurrent requests (by a fifth at a load of 0.7),
and so the share of expensive steps. A column compares each step with the time of its own foreground
rows, which is what the engine bounds.

`--num_turns` measures a real run instead: pairs of turns, with and without sleep jobs, in which all
foreground requests arrive at once after sleep jobs have used the engine for a while. The table is
measured with the same clock as the turns: wall seconds on a busy machine would be noise, and the
engine would give away rows that are not free.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import json
import math
import time
from typing import NamedTuple

from absl import app, flags
import numpy as np

import seerjax
from seerjax.engine.engine import Engine
from seerjax.run import command_line
from seerjax.speculation import step_times
from seerjax.speculation.times import StepTimes
from seerjax.types import Request, SamplingParams

CROWDS = (1, 4, 8, 16)
SHARES = (50, 99)
LOAD = 0.7


class Work(NamedTuple):
  """The last engine call.

  Attributes:
    requests: requests on the fullest instance.
    rows: rows on the fullest instance.
    num_front: foreground requests on all instances.
    front_rows: foreground rows on the fullest instance.
  """

  requests: int
  rows: int
  num_front: int
  front_rows: int


class WatchedEngine(Engine):
  """An engine that records its last call."""

  work = Work(0, 0, 0, 0)

  def _inputs(self, scheduled):
    front = [
      [piece for piece in pieces if not piece.sequence.is_background] for pieces in scheduled
    ]
    self.work = Work(
      max(map(len, scheduled)),
      max(sum(piece.num_rows for piece in pieces) for pieces in scheduled),
      sum(map(len, front)),
      max(sum(piece.num_rows for piece in pieces) for pieces in front),
    )
    return super()._inputs(scheduled)

  def begun(self) -> set[str]:
    """Returns the unfinished requests that have computed tokens."""
    return {name for name, sequence in self._requests.live.items() if sequence.num_written}


class Arrival(NamedTuple):
  """A request and its arrival time in virtual seconds."""

  seconds: float
  request: Request


ARRIVALS = ("answered", "drawn")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Served:
  """Results of serving arrivals in virtual time.

  Attributes:
    steps: f64[s], virtual seconds of each step with a foreground row.
    ratios: f64[s], ratio of each such step to the time of its foreground rows alone.
    first: f64[r], seconds from each arrival to its first token.
    longest_visit: virtual seconds of the longest engine call with only sleep jobs.
    sleep_tokens: tokens sampled for sleep jobs.
    seconds: total virtual seconds.
    waits: requests waiting for pages, summed over engine calls.
    tokens: tokens of the completion, by request.
  """

  steps: np.ndarray
  ratios: np.ndarray
  first: np.ndarray
  longest_visit: float
  sleep_tokens: int
  seconds: float
  waits: int
  tokens: dict[str, tuple[int, ...]]


def arrivals(
  crowd: int,
  *,
  num_requests: int,
  step: float,
  reading: float,
  vocab_size: int,
  prompt: int,
  answer: int,
  seed: int,
) -> list[Arrival]:
  """Returns requests at a rate that keeps about `crowd` of them in the engine.

  The rate is `LOAD` of the service rate: with a growing queue ratios would mean nothing.

  Args:
    crowd: mean number of concurrent requests.
    num_requests: number of requests.
    step: virtual seconds of a step of `crowd` requests.
    reading: virtual seconds to prefill a prompt.
    vocab_size: vocabulary size of the model.
    prompt: mean tokens of a prompt.
    answer: mean tokens of a completion.
    seed: seed of the draws.
  """
  rng = np.random.default_rng(seed)
  served = answer * step / crowd + reading
  moments = np.cumsum(rng.exponential(served / LOAD, num_requests))
  return [
    Arrival(
      float(moment),
      Request(
        request_id=f"front {place}",
        prompt=tuple(rng.integers(0, vocab_size, rng.integers(1, 2 * prompt)).tolist()),
        sampling=SamplingParams(max_tokens=int(rng.integers(answer // 2, 3 * answer // 2 + 1))),
        seed=place,
      ),
    )
    for place, moment in enumerate(moments)
  ]


def serve(
  engine: WatchedEngine,
  times: StepTimes,
  coming: Sequence[Arrival],
  *,
  num_sleepers: int,
  num_clients: int = 0,
) -> Served:
  """Serves arrivals in virtual time, with an inexhaustible queue of sleep jobs.

  Args:
    engine: an engine without requests.
    times: the step-time table of the clock and of the engine.
    coming: arrivals in order.
    num_sleepers: sleep jobs in the queue; 0 for none.
    num_clients: clients that send one request after the other, ignoring arrival times; 0 uses the
      arrival times.
  """
  engine.step_times = times
  coming = list(coming)
  began: dict[str, float] = {}
  first: dict[str, float] = {}
  tokens: dict[str, tuple[int, ...]] = {}
  steps: list[float] = []
  ratios: list[float] = []
  now = longest = 0.0
  num_slept = num_tokens = 0
  asleep: set[str] = set()
  waits = engine.counters.waits
  rng = np.random.default_rng(1)
  while coming or began:
    while coming and (len(began) < num_clients if num_clients else coming[0].seconds <= now):
      arrival = coming.pop(0)
      engine.submit(arrival.request)
      began[arrival.request.request_id] = now if num_clients else arrival.seconds
    while len(asleep) < num_sleepers:
      name = f"sleeper {num_slept}"
      context = engine.config.max_context
      length = rng.integers(context // 16, context // 4)
      prompt = tuple(rng.integers(0, engine.model.vocab_size, length).tolist())
      sampling = SamplingParams(max_tokens=context // 8)
      engine.submit(
        Request(request_id=name, prompt=prompt, sampling=sampling, seed=num_slept),
        is_background=True,
      )
      asleep.add(name)
      num_slept += 1
    if not began and not asleep:
      now = coming[0].seconds
      continue
    before, engine.work = engine.counters.steps, Work(0, 0, 0, 0)
    updates = engine.step()
    seconds = _seconds(times, engine, engine.counters.steps - before)
    now += seconds
    if engine.work.num_front:
      num_steps = engine.counters.steps - before
      steps += [seconds / num_steps] * num_steps
      ratios += [seconds / _seconds_alone(times, engine, num_steps)] * num_steps
    else:
      longest = max(longest, seconds)
    for update in updates:
      if update.request_id in asleep:
        num_tokens += len(update.tokens)
      elif update.tokens and update.request_id not in first:
        first[update.request_id] = now - began[update.request_id]
    for completion in engine.poll():
      if completion.request_id in asleep:
        asleep.remove(completion.request_id)
      else:
        del began[completion.request_id]
        tokens[completion.request_id] = completion.tokens
  for name in asleep:
    engine.cancel(name)
  return Served(
    steps=np.asarray(steps),
    ratios=np.asarray(ratios),
    first=np.asarray([first[name] for name in sorted(first)]),
    longest_visit=longest,
    sleep_tokens=num_tokens,
    seconds=now,
    waits=engine.counters.waits - waits,
    tokens=tokens,
  )


def _seconds(times: StepTimes, engine: WatchedEngine, num_steps: int) -> float:
  """Returns the virtual seconds of the last engine call."""
  instances, work = engine.num_instances, engine.work
  if num_steps > 1:
    return num_steps * times.decode(instances * work.requests)
  return times.step(instances * work.requests, instances * work.rows) if num_steps else 0.0


def _seconds_alone(times: StepTimes, engine: WatchedEngine, num_steps: int) -> float:
  """Returns the virtual seconds of the last engine call without its background rows.

  It assumes that foreground requests are on the fullest instance, which holds for one instance.
  """
  instances, work = engine.num_instances, engine.work
  if num_steps > 1:
    return num_steps * times.decode(work.num_front)
  return times.step(work.num_front, instances * work.front_rows)


# Real runs.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
  """Results of a turn of foreground requests in a real run.

  Attributes:
    seconds: mean seconds of a step with a foreground row.
    late: engine calls from submission until the last request has its first row.
    waits: requests waiting for pages, summed over engine calls.
    sleep_tokens: tokens sampled for sleep jobs meanwhile.
    total: total seconds.
    tokens: tokens of the completion, by request.
  """

  seconds: float
  late: int
  waits: int
  sleep_tokens: int
  total: float
  tokens: dict[str, tuple[int, ...]]


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def real_turn(
  engine: WatchedEngine,
  crowd: int,
  *,
  num_sleepers: int,
  prompt: int,
  answer: int,
  clock: str,
  seed: int,
) -> Turn:
  """Serves foreground requests that arrive at once, with or without sleep jobs already running.

  Args:
    engine: an engine without requests, with its step-time table.
    crowd: number of foreground requests; the first step has room for all of them.
    num_sleepers: sleep jobs in the queue; 0 for none.
    prompt: mean tokens of a prompt.
    answer: tokens of a completion.
    clock: a key of `CLOCKS`.
    seed: seed of the prompts.
  """
  rng = np.random.default_rng(seed)
  read, context, slept = CLOCKS[clock], engine.config.max_context, 0

  def drawn(name: str, length: int, most: int) -> Request:
    ids = tuple(rng.integers(0, engine.model.vocab_size, length).tolist())
    return Request(request_id=name, prompt=ids, sampling=SamplingParams(max_tokens=most))

  front = [drawn(f"front {i}", int(rng.integers(1, 2 * prompt)), answer) for i in range(crowd)]
  names, asleep = {one.request_id for one in front}, set[str]()

  def fill() -> None:
    nonlocal slept
    while len(asleep) < num_sleepers:
      one = drawn(f"sleeper {slept}", int(rng.integers(context // 16, context // 4)), context // 8)
      engine.submit(one, is_background=True)
      asleep.add(one.request_id)
      slept += 1

  for _ in range(4):
    fill()
    engine.step()
    asleep -= {completion.request_id for completion in engine.poll()}
  for one in front:
    engine.submit(one)
  waits, begun, late, visits = engine.counters.waits, set[str](), 0, 0
  seconds, num_steps, num_tokens = 0.0, 0, 0
  tokens: dict[str, tuple[int, ...]] = {}
  while len(tokens) < crowd:
    fill()
    before, begin = engine.counters.steps, read()
    updates = engine.step()
    seconds += read() - begin
    num_steps += engine.counters.steps - before
    visits += 1
    begun |= engine.begun() & names
    num_tokens += sum(len(u.tokens) for u in updates if u.request_id in asleep)
    for completion in engine.poll():
      if completion.request_id in asleep:
        asleep.remove(completion.request_id)
      else:
        begun.add(completion.request_id)
        tokens[completion.request_id] = completion.tokens
    if len(begun) < crowd:
      late = visits
  for name in asleep:
    engine.cancel(name)
  return Turn(
    seconds=seconds / num_steps,
    late=late,
    waits=engine.counters.waits - waits,
    sleep_tokens=num_tokens,
    total=seconds,
    tokens=tokens,
  )


def upper_bound(ratios: Sequence[float]) -> float:
  """Returns the upper end of the two-sided 95 % normal interval of a mean."""
  return float(np.mean(ratios) + 1.96 * np.std(ratios, ddof=1) / math.sqrt(len(ratios)))


def real_line(crowd: int, pairs: Sequence[tuple[Turn, Turn]]) -> str:
  """Returns one line of the real run's table, from pairs (without sleep jobs, with)."""
  assert all(one.tokens == other.tokens for one, other in pairs), "sleepers changed an answer"
  ratios = [beside.seconds / alone.seconds for alone, beside in pairs]
  alone, beside = (1e3 * float(np.mean([pair[i].seconds for pair in pairs])) for i in (0, 1))
  rate = sum(pair[1].sleep_tokens for pair in pairs) / sum(pair[1].total for pair in pairs)
  waits = [sum(pair[i].waits for pair in pairs) for i in (0, 1)]
  cells = [
    str(crowd), str(len(pairs)), f"{alone:.2f} → {beside:.2f}", f"{np.mean(ratios):.3f}",
    f"{upper_bound(ratios):.3f}", f"{rate:.0f}", f"{waits[0]} → {waits[1]}",
    f"{max(pair[0].late for pair in pairs)} → {max(pair[1].late for pair in pairs)}",
  ]  # fmt: skip
  return f"| {' | '.join(cells)} |"


def real_run(
  engine: WatchedEngine, num_turns: int, *, crowds: Sequence[int] = CROWDS, **settings
) -> None:
  """Prints the real run's table from pairs of turns; every other pair starts with sleep jobs.

  Args:
    engine: an engine without requests, with its step-time table.
    num_turns: pairs per number of foreground requests.
    crowds: numbers of foreground requests.
    settings: arguments of `real_turn`.

  Raises:
    ValueError: for fewer than two turns.
  """
  if num_turns < 2:
    raise ValueError(
      f"--num_turns: got {num_turns}, expected 0 or at least 2; an interval needs two."
    )
  names = (
    "in front", "pairs", "step ms", "ratio", "upper 95 %", "sleep tokens/s", "waits",
    "steps to the first row",
  )  # fmt: skip
  print(f"| {' | '.join(names)} |\n|{'---|' * len(names)}")
  num_sleepers, seed = settings.pop("num_sleepers"), settings.pop("seed")
  for crowd in crowds:
    pairs = []
    for turn in range(num_turns + 1):
      order = (0, num_sleepers) if turn % 2 else (num_sleepers, 0)
      found = {
        count: real_turn(
          engine, crowd, num_sleepers=count, seed=seed + 1000 * crowd + turn, **settings
        )
        for count in order
      }
      if turn:  # The first turn is a warm-up.
        pairs.append((found[0], found[num_sleepers]))
    print(real_line(crowd, pairs), flush=True)


def line(crowd: int, without: Served, beside: Served) -> str:
  """Returns one line of the table, with both results."""
  assert without.tokens == beside.tokens, "sleepers changed an answer"
  cells = [str(crowd)]
  for field in ("steps", "first"):
    for share in SHARES:
      alone, both = (np.percentile(getattr(one, field), share) for one in (without, beside))
      cells.append(f"{1e3 * alone:.2f} → {1e3 * both:.2f} ({both / alone:.3f}x)")
  cells += [
    f"{np.percentile(beside.ratios, 99):.3f}",
    f"{1e3 * beside.longest_visit:.2f}",
    f"{beside.sleep_tokens / beside.seconds:.0f}",
    f"{without.waits} → {beside.waits}",
  ]
  return f"| {' | '.join(cells)} |"


def crowds_of(values: Sequence[str]) -> list[int]:
  """Parses numbers of foreground requests; raises ValueError if there is none or one is invalid."""
  if not values or not all(value.isdecimal() and int(value) for value in values):
    raise ValueError(
      f"--crowds: got {','.join(values)!r}, expected numbers of at least 1; write 1,4."
    )
  return [int(value) for value in values]


def main(argv: list[str]) -> None:
  args = flags.FLAGS
  with command_line.refusals():
    command_line.check_arguments(argv)
    for name, least in (
      ("num_turns", 0), ("num_requests", 2), ("num_sleepers", 1), ("answer", 2), ("prompt", 1),
    ):  # fmt: skip
      value = getattr(args, name)
      if value < least:
        raise ValueError(f"--{name}: got {value}, expected at least {least}; raise it.")
    crowds = crowds_of(args.crowds)
    model = seerjax.load_model(args.model)
    # Without prefix reuse, because cached pages would be a further difference between the runs.
    config = seerjax.EngineConfig(max_context=512, max_sequences=32, reuse_prefixes=False)
    engine = WatchedEngine(model, config=config)
    if args.step_seconds:
      given = {int(rows): float(seconds) for rows, seconds in json.loads(args.step_seconds).items()}
      times = StepTimes(rows=tuple(sorted(given)), seconds=tuple(given[n] for n in sorted(given)))
    else:
      times = step_times.measure(engine, seconds=math.inf, clock=CLOCKS[args.clock])
    engine.step_times = times
    print(f"seconds by rows: {dict(zip(times.rows, times.seconds))}")
    if args.num_turns:
      real_run(
        engine,
        args.num_turns,
        crowds=crowds,
        num_sleepers=args.num_sleepers,
        prompt=args.prompt,
        answer=args.answer,
        clock=args.clock,
        seed=args.seed,
      )
      return
    heads = [f"{what} p{share} ms" for what in ("step", "first token") for share in SHARES]
    names = (
      "in front", *heads, "step over its front p99", "longest visit asleep ms", "sleep tokens/s",
      "waits",
    )  # fmt: skip
    print(f"| {' | '.join(names)} |\n|{'---|' * len(names)}")
    for crowd in crowds:
      coming = arrivals(
        crowd,
        num_requests=args.num_requests,
        step=times.decode(crowd),
        reading=times.step(1, args.prompt),
        vocab_size=model.config.vocab_size,
        prompt=args.prompt,
        answer=args.answer,
        seed=args.seed,
      )
      num_clients = crowd if args.arrivals == "answered" else 0
      without, beside = (
        serve(engine, times, coming, num_sleepers=count, num_clients=num_clients)
        for count in (0, args.num_sleepers)
      )
      print(line(crowd, without, beside), flush=True)


def define_flags() -> None:
  """Defines the flags of the command."""
  flags.DEFINE_string("model", "nano", "Model: nano, a directory, a GGUF file or a Hub id.")
  flags.DEFINE_string("step_seconds", "", 'Table {"rows": seconds} to use instead of measuring.')
  flags.DEFINE_list(
    "crowds",
    [str(crowd) for crowd in CROWDS],
    "Numbers of foreground requests, one per table line.",
  )
  flags.DEFINE_integer("num_requests", 200, "Number of requests per crowd with the virtual clock.")
  flags.DEFINE_enum(
    "arrivals", ARRIVALS[0], ARRIVALS, "Arrivals: after each response, or at random times."
  )
  flags.DEFINE_integer(
    "num_turns", 0, "Number of turn pairs of a real run; 0 uses the virtual clock."
  )
  flags.DEFINE_enum(
    "clock", "wall", sorted(CLOCKS), "Clock of table and turns; use cpu on a busy machine."
  )
  flags.DEFINE_integer("num_sleepers", 16, "Number of sleep jobs kept in the queue.")
  flags.DEFINE_integer("prompt", 60, "Mean number of prompt tokens.")
  flags.DEFINE_integer("answer", 40, "Mean number of response tokens.")
  flags.DEFINE_integer("seed", 0, "Seed of the arrivals.")


if __name__ == "__main__":
  define_flags()
  app.run(main)
