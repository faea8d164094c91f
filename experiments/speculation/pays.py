"""Compares an engine with and without drafts: never slower, and much faster in a rollout's tail.

Claim: with a budget, drafting is not slower at any batch size up to 64 (the lower 95 % bound of
paired speed ratios is at least 0.95). When siblings have finished and few requests are left, it is
at least 1.5x as fast as plain decoding by the same backend in its fastest mode. Plain XLA
(untiled), with fitting row buckets and several steps per engine call, is measured for comparison.
Command: bash launch/local.sh experiments.speculation.pays --workdir=runs/speculation_pays
Hardware: 2 CPU cores, about half an hour. Numbers: docs/results/speculation.md

Nano answers word problems at temperature 1. A pair runs the same requests with drafts and without.
The steps of both engines alternate, each on its own clock, so that other load on the machine
affects both alike. Both produce the same bits, so the ratio of tokens/s is that of seconds. No
problem is used twice, so no tree knows a completion from an earlier pair.

Never slower: `batch` slots, groups of 8 that start together, 1.5 times as many requests as slots.
The tail: 15 members of every group have finished before the clock starts; then one more of each
group, `batch` at a time.

A turn is one pair of every batch size, and is stored in --workdir when it is measured; the same
command continues after the last one.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
import dataclasses
import json
import pathlib
from typing import Any, NamedTuple

from absl import flags
import numpy as np
import rich.progress

from experiments import measure
from seerjax import metrics, numerics as numerics_lib, parallel
from seerjax.commands import flags as flags_lib
from seerjax.engine import engine as engine_lib, runner as runner_lib
from seerjax.models import parameters
from seerjax.models.decoder import decide
from seerjax.models.loading import Model
from seerjax.rollout import groups as groups_lib
from seerjax.run import (
  config as config_lib,
  drafter as drafter_lib,
  policy as policy_lib,
  presets as run_presets,
  self_test,
)
from seerjax.tasks import loading
from seerjax.types import Completion, Request

ROW_BUCKETS = (64, 512)
# Plain XLA computes its whole bucket, so it gets fitting ones.
UNTILED_ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64)
# Steps per engine call of plain XLA, which host work between steps would slow down like native.
UNTILED_STEPS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
  """The workload.

  Attributes:
    model: "nano", a Hugging Face directory, a GGUF file, or a Hub id.
    backend: our backend: "auto" (native where it runs), "native" or "tiled".
    clock: "wall", or "cpu": CPU seconds of the process, for machines with other load; bound to one
      core (taskset) these equal wall seconds.
    batches: numbers of slots.
    pairs: pairs per number of slots, that is, turns.
    group_size: group size of the first part.
    tail_batches: numbers of slots in the tail.
    tail_groups: groups in each timed run of the tail, with one request each.
    tail_siblings: finished completions of a group in the tail.
    max_tokens: maximum tokens of a completion.
    seed: seed of problems and samples.
  """

  model: str = "nano"
  backend: str = "auto"
  clock: str = "wall"
  batches: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
  pairs: int = 20
  group_size: int = 8
  tail_batches: tuple[int, ...] = (1, 2, 4, 8)
  tail_groups: int = 16
  tail_siblings: int = 15
  max_tokens: int = 216
  seed: int = 0

  def __post_init__(self):
    if self.pairs < 2 or min((*self.batches, *self.tail_batches, self.tail_groups)) < 1:
      raise ValueError(
        f"Workload: got pairs={self.pairs}, batches={self.batches},"
        f" tail_batches={self.tail_batches}, tail_groups={self.tail_groups}, expected at least 2"
        " pairs and batches and groups of at least 1; an interval needs two."
      )
    if self.clock not in measure.CLOCKS:
      raise ValueError(
        f"Workload.clock: got {self.clock!r}, expected one of {tuple(measure.CLOCKS)}; 'cpu' where"
        " others use the machine."
      )

  def groups_of(self, batch: int) -> int:
    """Returns the number of groups of a pair."""
    return -(-self.requests_of(batch) // self.group_size)

  def requests_of(self, batch: int) -> int:
    """Returns the number of requests of a pair: half as many again as slots."""
    return batch + -(-batch // 2)

  @property
  def groups_per_turn(self) -> int:
    """Returns the number of problems of a turn."""
    return sum(map(self.groups_of, self.batches)) + self.tail_groups


class Pair(NamedTuple):
  """Seconds of the same requests without and with drafts, and their sampled tokens."""

  plain: float
  drafts: float
  num_tokens: int


class TailRates(NamedTuple):
  """Tokens/s in the tail: plain decoding by the tested backend, plain XLA, with drafts."""

  plain: float
  untiled: float
  drafts: float


class Turn(NamedTuple):
  """One pair of every batch size, and one measurement of every batch size in the tail."""

  pairs: list[Pair]
  tail: list[TailRates]


class Comparison:
  """Engines to compare, and new problems for every turn.

  Attributes:
    plain: decodes without drafts, with its backend's default steps per engine call.
    untiled: the same on plain XLA, with different bits.
    drafting: has a drafter with a budget, and a measured step-time table.
  """

  def __init__(self, workload: Workload):
    self.workload = workload
    job = run_presets.main_job()
    engine = dataclasses.replace(job.engine, batch_size_buckets=ROW_BUCKETS)
    backend: Any = workload.backend  # Validated by NumericsConfig.
    numerics = dataclasses.replace(job.numerics, backend=backend)
    job = dataclasses.replace(job, data_parallel_size=1, engine=engine, numerics=numerics)
    self.policy = policy_lib.load_policy(workload.model, job.numerics)
    decided, _ = config_lib.for_model(job.shared, self.policy.model)
    self._job = job = dataclasses.replace(job, **decided.parts)
    self._task = loading.load(job.task)
    self._count = groups_lib.num_problems(self._task, "train")
    self._num_posed = 0
    runner = self._runner(job.numerics, job.engine)
    untiled = dataclasses.replace(job.numerics, backend="untiled")
    of_untiled = dataclasses.replace(
      job.engine, batch_size_buckets=UNTILED_ROW_BUCKETS, decode_steps_per_call=UNTILED_STEPS
    )
    self_test.check_model(
      runner.decoder,
      parameters.compute_params(self.policy.params, job.numerics),
      config=job.engine,
      runner=runner,
    )
    self.plain = self._engine(job.numerics, job.engine, runner)
    self.untiled = self._engine(untiled, of_untiled, self._runner(untiled, of_untiled))
    self.drafting = self._engine(job.numerics, job.engine, runner)
    # Each part has its own budget. In a rollout a long tail follows a long beginning; here parts
    # alternate within seconds, and acceptance learnt in one says little about the other.
    self._drafters = {}
    for part in ("slots", "tail"):
      drafter_lib.RunDrafts(job.speculation).begin(self.drafting)
      self._drafters[part] = self.drafting.drafter

  def _runner(
    self, numerics: numerics_lib.NumericsConfig, config: engine_lib.EngineConfig
  ) -> runner_lib.Runner:
    num_programs = len(config.batch_size_buckets)
    return runner_lib.Runner(
      decide(self.policy.model, numerics), parallel.make_mesh(), num_programs
    )

  def _engine(
    self,
    numerics: numerics_lib.NumericsConfig,
    config: engine_lib.EngineConfig,
    runner: runner_lib.Runner,
  ) -> engine_lib.Engine:
    return engine_lib.Engine(
      Model(self.policy.model, parameters.compute_params(self.policy.params, numerics), numerics),
      config=config,
      key=numerics_lib.key(self.workload.seed),
      runner=runner,
    )

  def turn(self, number: int) -> Turn:
    """Measures one turn, on problems of no other turn.

    Raises:
      ValueError: if drafts change a bit.
    """
    self._num_posed = number * self.workload.groups_per_turn
    is_even = number % 2 == 0
    self.drafting.drafter = self._drafters["slots"]
    pairs = [self._pair(batch, drafts_first=is_even) for batch in self.workload.batches]
    self.drafting.drafter = self._drafters["tail"]
    return Turn(pairs, self._tail(drafts_first=is_even))

  def _pair(self, batch: int, *, drafts_first: bool) -> Pair:
    workload = self.workload
    groups = self._groups(workload.groups_of(batch), workload.group_size)
    requests = [request for group in groups for request in group][: workload.requests_of(batch)]
    engines = [self.plain, self.drafting]
    plain, drafted = answers(
      engines, requests, batch, backwards=drafts_first, clock=measure.CLOCKS[workload.clock]
    )
    check_same(plain.completions, drafted.completions, f"batch {batch}")
    return Pair(plain.seconds, drafted.seconds, plain.num_tokens)

  def _tail(self, *, drafts_first: bool) -> list[TailRates]:
    workload, num_known = self.workload, self.workload.tail_siblings
    groups = self._groups(workload.tail_groups, num_known + len(workload.tail_batches))
    engines = [self.plain, self.untiled, self.drafting]
    known = [request for group in groups for request in group[:num_known]]
    clock = measure.CLOCKS[workload.clock]
    # Only the drafting engine runs the siblings; the others do not need them.
    answers([self.drafting], known, self._job.engine.max_num_seqs, clock=clock)
    found = []
    for place, batch in enumerate(workload.tail_batches):
      requests = [group[num_known + place] for group in groups]
      done = answers(engines, requests, batch, backwards=drafts_first, clock=clock)
      check_same(done[0].completions, done[2].completions, f"tail of batch {batch}")
      found.append(TailRates(*(one.num_tokens / one.seconds for one in done)))
    return found

  def _groups(self, count: int, size: int) -> list[list[Request]]:
    """Returns `size` requests for each of the next `count` problems."""
    config = dataclasses.replace(
      self._job.rollout, group_size=max(size, 2), max_tokens=self.workload.max_tokens
    )
    found = []
    for _ in range(count):
      index = groups_lib.problem_index(self._num_posed, self._count, self.workload.seed)
      requests = groups_lib.group_requests(
        self._task.problem("train", index),
        group=self._num_posed,
        step=0,
        config=config,
        tokenizer=self.policy.require_tokenizer(),
        seed=self.workload.seed,
      )
      found.append(requests[:size])
      self._num_posed += 1
    return found


class Answered(NamedTuple):
  """Completions of an engine, in the order of requests, and the seconds of its steps."""

  completions: list[Completion]
  seconds: float

  @property
  def num_tokens(self) -> int:
    return sum(len(completion.tokens) for completion in self.completions)


def answers(
  engines: Sequence[engine_lib.Engine],
  requests: Sequence[Request],
  batch: int,
  *,
  clock: Callable[[], float],
  backwards: bool = False,
) -> list[Answered]:
  """Runs requests on each engine, `batch` at once; the engines' steps alternate."""
  order = list(enumerate(engines))[:: -1 if backwards else 1]
  seconds = [0.0] * len(engines)
  waiting = [collections.deque(requests) for _ in engines]
  while any(waiting) or any(engine.num_unfinished for engine in engines):
    for place, engine in order:
      begin = clock()
      while waiting[place] and engine.num_unfinished < batch:
        engine.add_request(waiting[place].popleft())
      if engine.num_unfinished:
        engine.step()
      seconds[place] += clock() - begin
  found = []
  for engine, own_seconds in zip(engines, seconds):
    by_id = {completion.request_id: completion for completion in engine.poll()}
    found.append(Answered([by_id[request.request_id] for request in requests], own_seconds))
  return found


def check_same(expected: Sequence[Completion], found: Sequence[Completion], what: str) -> None:
  """Checks that completions are bit-identical.

  Raises:
    ValueError: naming the first that differs.
  """
  for one, other in zip(expected, found, strict=True):
    if not one.has_bits_of(other):
      raise ValueError(
        f"{what}: got other bits for request {one.request_id!r} with drafts than without, expected"
        " equal ones; the contract is broken, report it with this command."
      )


def tables(workload: Workload, turns: Sequence[Turn]) -> str:
  """Returns both parts as Markdown."""
  pairs, tail = [], []
  for place, batch in enumerate(workload.batches):
    plain, drafts, tokens = np.asarray([turn.pairs[place] for turn in turns]).T
    ratio = measure.ratio(plain / drafts)
    rates = (f"{np.median(tokens / seconds):,.0f}" for seconds in (plain, drafts))
    pairs.append((batch, *rates, f"{ratio.value:.2f}", f"{ratio.low:.2f} to {ratio.high:.2f}"))
  for place, batch in enumerate(workload.tail_batches):
    plain, untiled, drafts = found = np.asarray([turn.tail[place] for turn in turns]).T
    ratios = (measure.ratio(drafts / other).text(digits=2) for other in (plain, untiled))
    tail.append((batch, *(f"{np.median(rates):,.0f}" for rates in found), *ratios))
  buckets = ", ".join(map(str, UNTILED_ROW_BUCKETS))
  of_pairs = ("batch", "plain, tokens/s", "with drafts", "ratio", "95 % interval")
  of_tail = (
    "batch in the tail", "plain", "plain, untiled", "with drafts", "against plain (95 %)",
    "against untiled (95 %)",
  )  # fmt: skip
  return (
    f"{measure.table(of_pairs, pairs)}\n\nUntiled computes its whole row bucket ({buckets} rows),"
    f" {UNTILED_STEPS} steps per visit.\n\n{measure.table(of_tail, tail)}"
  )


def measured(workload: Workload, path: pathlib.Path) -> list[Turn]:
  """Returns the turns of a results.json; [] if it does not exist.

  Raises:
    ValueError: if they are of another workload.
  """
  if not path.exists():
    return []
  record = json.loads(path.read_text())
  expected = json.loads(json.dumps(dataclasses.asdict(workload)))
  if record["workload"] != expected:
    raise ValueError(
      f"{path}: got turns of {record['workload']}, expected {expected}; name another --workdir."
    )
  return [
    Turn([Pair(*one) for one in turn["pairs"]], [TailRates(*one) for one in turn["tail"]])
    for turn in record["turns"]
  ]


def run(workload: Workload, directory: pathlib.Path) -> str:
  """Measures; writes results.json after every turn, and table.md; returns the tables.

  Raises:
    ValueError: if drafts change a bit, or the directory has turns of another workload.
  """
  path = directory / "results.json"
  turns = measured(workload, path)
  if len(turns) < workload.pairs:
    comparison = Comparison(workload)
    comparison.turn(workload.pairs)  # Compiles; not recorded.
    left = range(len(turns), workload.pairs)
    for number in rich.progress.track(left, f"turns from {left.start}"):
      turns.append(comparison.turn(number))
      record = {"workload": dataclasses.asdict(workload), "turns": [t._asdict() for t in turns]}
      metrics.write_summary(path, json.loads(json.dumps(record)))
  text = tables(workload, turns)
  (directory / "table.md").write_text(text + "\n")
  return text


def main(args: flags.FlagValues) -> None:
  workload = flags_lib.from_flags(Workload, args.config)
  usual, backend = run_presets.main_job().numerics, workload.backend
  numerics = dataclasses.replace(usual, backend=backend)
  print(self_test.describe(numerics), flush=True)
  text = run(workload, pathlib.Path(args.workdir))
  print(f"\n{text}\n\nwritten to {args.workdir}")


if __name__ == "__main__":
  flags_lib.define_flags(Workload(), "runs/speculation_pays")
  measure.command(main)
