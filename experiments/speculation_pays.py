"""Drafts against none on the same engine: never slower, and much faster in a rollout's tail.

Claim: with a budget, drafting loses at no batch size from 1 to 64 (the lower 95 % bound of paired
ratios of speed is at least 0.95); when siblings have answered and few are left, it is at least 1.5x
as fast as plain decoding, tiled and untiled.
Command: bash launch/local.sh experiments.speculation_pays --workdir=runs/speculation_pays
Hardware: 2 CPU cores, about 40 minutes. Numbers: docs/results/speculation.md

Nano answers word problems at temperature 1. A pair asks the same questions with drafts and without,
one after the other, in turns; both say the same bits, so the ratio of tokens/s is that of seconds.
No question comes twice, so that no tree knows an answer from an earlier pair.

Never slower: `batch` slots, groups of 8 that begin together, twice as many requests as slots.
The tail: 15 members of every group have answered before the clock starts; then one more of each,
`batch` at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import json
import pathlib
import time
from typing import NamedTuple

from absl import app, flags
import jax
import numpy as np
import rich.progress
from scipy import stats

from experiments import configuration, grpo
from seerjax import metrics, parallel, rl, self_test
from seerjax.engine import engine as engine_lib, runner as runner_lib
from seerjax.models import transformer
from seerjax.rollout import rollout as rollout_lib
from seerjax.tasks import base
from seerjax.types import Completion, Request


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
  """What is asked.

  Attributes:
    model: "nano", a Hugging Face directory, or a Hub id.
    batches: numbers of slots.
    pairs: for each.
    group_size: of the first part.
    tail_batches: numbers of slots in the tail.
    tail_groups: that each timed run of the tail asks one more answer of.
    tail_siblings: answers of a group that are known then.
    max_tokens: of an answer.
    seed: of problems and samples.
  """

  model: str = "nano"
  batches: tuple[int, ...] = tuple(range(1, 65))
  pairs: int = 20
  group_size: int = 8
  tail_batches: tuple[int, ...] = (1, 2, 4, 8)
  tail_groups: int = 32
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


class Bound(NamedTuple):
  """Paired ratios of speed: the geometric mean, and the bounds of its 95 % interval."""

  mean: float
  low: float
  high: float


def bound(ratios: Sequence[float] | np.ndarray) -> Bound:
  """Returns Student's interval of the mean logarithm, as ratios."""
  logs = np.log(ratios)
  middle = float(logs.mean())
  half = float(stats.t.ppf(0.975, len(logs) - 1) * logs.std(ddof=1) / np.sqrt(len(logs)))
  return Bound(*(float(np.exp(x)) for x in (middle, middle - half, middle + half)))


class Asker:
  """Poses problems, none twice, to engines that differ in speed alone."""

  def __init__(self, workload: Workload):
    self.workload = workload
    job = grpo.main_job()
    self._job = dataclasses.replace(job, num_instances=1)
    self.policy = grpo.load_policy(workload.model, job.numerics)
    self._task = base.load(job.task)
    self._count = rollout_lib.num_problems(self._task, "train")
    self._num_posed = 0
    self._runners: dict[str, runner_lib.Runner] = {}

  def engine(self, *, implementation: str = "", drafts: bool = False) -> engine_lib.Engine:
    """Returns an engine; one that drafts has measured its step times."""
    job = self._job
    if implementation:
      numerics = dataclasses.replace(job.numerics, implementation=implementation)
      job = dataclasses.replace(job, numerics=numerics)
    if implementation not in self._runners:
      self._runners[implementation] = runner_lib.Runner(
        self.policy.model, job.numerics, parallel.make_mesh(), len(job.engine.row_buckets)
      )
    engine = engine_lib.Engine(
      self.policy.model,
      transformer.compute_params(self.policy.params, job.numerics),
      numerics=job.numerics,
      config=job.engine,
      key=jax.random.key(self.workload.seed),
      runner=self._runners[implementation],
    )
    if drafts:
      engine.drafter = rl.drafter_for(job, engine)
    return engine

  def groups(self, count: int, size: int) -> list[list[Request]]:
    """Returns the next `count` problems, asked `size` times each."""
    config = dataclasses.replace(
      self._job.rollout, group_size=max(size, 2), max_tokens=self.workload.max_tokens
    )
    found = []
    for _ in range(count):
      index = rollout_lib.problem_index(self._num_posed, self._count, self.workload.seed)
      requests = rollout_lib.group_requests(
        self._task.problem("train", index),
        group=self._num_posed,
        step=0,
        config=config,
        tokenizer=self.policy.tokenizer,
        seed=self.workload.seed,
      )
      found.append(requests[:size])
      self._num_posed += 1
    return found


def answer(
  engine: engine_lib.Engine, requests: Sequence[Request], batch: int
) -> tuple[float, list[Completion]]:
  """Returns the seconds and the answers of requests, `batch` of which run at once."""
  engine.config = dataclasses.replace(engine.config, max_sequences=batch)
  begin = time.perf_counter()
  completions = engine.generate(requests)
  return time.perf_counter() - begin, completions


def check_same(expected: Sequence[Completion], found: Sequence[Completion], what: str) -> None:
  """Refuses answers that differ by a bit.

  Raises:
    ValueError: naming the first.
  """
  for one, other in zip(expected, found, strict=True):
    if not one.has_bits_of(other):
      raise ValueError(
        f"{what}: got other bits for request {one.request_id!r} with drafts than without, expected"
        " equal ones; the contract is broken, report it with this command."
      )


def never_slower(asker: Asker) -> dict[int, list[tuple[float, float, int]]]:
  """Returns by batch size the pairs (seconds without, seconds with drafts, tokens)."""
  workload = asker.workload
  plain, drafting = asker.engine(), asker.engine(drafts=True)
  pairs: dict[int, list[tuple[float, float, int]]] = {batch: [] for batch in workload.batches}
  # Batch sizes in turn: what the machine does meanwhile hits all alike. The first turn warms up.
  for turn in rich.progress.track(range(workload.pairs + 1), "pairs"):
    for batch in workload.batches:
      count = -(-2 * batch // workload.group_size)
      groups = asker.groups(count, workload.group_size)
      requests = [request for group in groups for request in group][: 2 * batch]
      engines = (plain, drafting) if turn % 2 else (drafting, plain)
      done = {engine: answer(engine, requests, batch) for engine in engines}
      check_same(done[plain][1], done[drafting][1], f"batch {batch}")
      if turn:
        num_tokens = sum(len(completion.tokens) for completion in done[plain][1])
        pairs[batch].append((done[plain][0], done[drafting][0], num_tokens))
  return pairs


def tail(asker: Asker) -> dict[int, list[tuple[float, float, float]]]:
  """Returns by batch size tokens/s of (plain, untiled plain, with drafts)."""
  workload = asker.workload
  engines = [
    asker.engine(), asker.engine(implementation="untiled"), asker.engine(drafts=True)
  ]  # fmt: skip
  most = engines[0].config.max_sequences
  rates: dict[int, list[tuple[float, float, float]]] = {b: [] for b in workload.tail_batches}
  num_known = workload.tail_siblings
  for turn in rich.progress.track(range(workload.pairs + 1), "tails"):
    groups = asker.groups(workload.tail_groups, num_known + len(workload.tail_batches))
    for engine in engines:
      answer(engine, [request for group in groups for request in group[:num_known]], most)
    for place, batch in enumerate(workload.tail_batches):
      requests = [group[num_known + place] for group in groups]
      order = range(3) if turn % 2 else range(2, -1, -1)
      done = {index: answer(engines[index], requests, batch) for index in order}
      check_same(done[0][1], done[2][1], f"tail of batch {batch}")
      if turn:
        rates[batch].append(
          tuple(  # pyright: ignore[reportArgumentType]
            sum(len(completion.tokens) for completion in done[index][1]) / done[index][0]
            for index in range(3)
          )
        )
  return rates


def tables(
  pairs: dict[int, list[tuple[float, float, int]]],
  rates: dict[int, list[tuple[float, float, float]]],
) -> str:
  """Returns both parts as Markdown."""
  lines = [
    "| batch | plain, tokens/s | with drafts | ratio | 95 % interval |",
    "|---|---|---|---|---|",
  ]
  for batch, rows in pairs.items():
    without, drafts, tokens = (np.asarray(column) for column in zip(*rows))
    ratio = bound(without / drafts)
    lines.append(
      f"| {batch} | {np.median(tokens / without):,.0f} | {np.median(tokens / drafts):,.0f} |"
      f" {ratio.mean:.2f} | {ratio.low:.2f} to {ratio.high:.2f} |"
    )
  lines += [
    "",
    "| batch in the tail | plain, tiled | plain, untiled | with drafts | against tiled (95 %) |"
    " against untiled (95 %) |",
    "|---|---|---|---|---|---|",
  ]
  for batch, rows in rates.items():
    tiled, untiled, drafts = (np.asarray(column) for column in zip(*rows))
    ratios = [bound(drafts / other) for other in (tiled, untiled)]
    cells = " | ".join(f"{one.mean:.2f} ({one.low:.2f} to {one.high:.2f})" for one in ratios)
    lines.append(
      f"| {batch} | {np.median(tiled):,.0f} | {np.median(untiled):,.0f} |"
      f" {np.median(drafts):,.0f} | {cells} |"
    )
  return "\n".join(lines)


def run(workload: Workload, directory: pathlib.Path) -> str:
  """Measures and writes results.json, with every pair, and table.md; returns the tables.

  Raises:
    ValueError: if drafts change a bit.
  """
  asker = Asker(workload)
  rates = tail(asker)
  pairs = never_slower(asker)
  text = tables(pairs, rates)
  directory.mkdir(parents=True, exist_ok=True)
  record = {"workload": dataclasses.asdict(workload), "pairs": pairs, "tail": rates}
  metrics.write_summary(directory / "results.json", json.loads(json.dumps(record)))
  (directory / "table.md").write_text(text + "\n")
  return text


def main(argv: list[str]) -> None:
  args = flags.FLAGS
  with configuration.refusals():
    configuration.check_arguments(argv)
    workload = configuration.from_flags(Workload, args.config)
    print(self_test.describe(grpo.main_job().numerics), flush=True)
    text = run(workload, pathlib.Path(args.workdir))
  print(f"\n{text}\n\nwritten to {args.workdir}")


if __name__ == "__main__":
  configuration.define_flags(Workload(), "runs/speculation_pays")
  app.run(main)
