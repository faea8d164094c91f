"""Measures the speed-up of a draft model at equal bits, by batch and shape of drafts.

Claim: reports, for a draft model of an eighth of nano's size, at batches from 1 to 128, with chains
and combs: tokens per step, the cost of drafting, and the net change in tokens/s, next to the
speed-up predicted by Leviathan's model and the "alpha" of an article on "SpecInfer". A budget,
which knows the cost of drafts and learns their acceptance, drafts with the model, from a text's own
past (`hybrid_drafter`), or not at all.
Command: bash launch/local.sh experiments.speculation.draft_model --workdir=runs/speculation
Hardware: 2 CPU cores, 2 GiB, under 20 minutes. Numbers: docs/results/speculation_speed.md

A cell is a target, its draft, a task, a batch and a shape of draft: `length` tokens ahead, each
with `width` - 1 leaf siblings (a comb; width 1 is a chain). In each turn two engines answer the
same held-out problems, one with drafts and one with plain decoding in its fastest mode. Their steps
alternate, each on its own clock, so that other load on the machine affects both alike; then all
tokens and log-probabilities are compared. Prefill is included in the time. A finished cell is
stored in --workdir, and the same command continues after the last one. report.html there shows the
drafts of one completion of each shape, step by step, with the accepted tokens.

  a        accepted draft tokens / draft tokens after accepted ones only
  c        time of one draft position / of a step of plain decoding, measured before at this batch
  E        (1 - a^(N + 1)) / (1 - a), tokens per step
  priced   E V / (D + T): the speed-up including the cost of rows, from the table used by budgets
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import itertools
import math
import pathlib
from typing import Any, NamedTuple

from absl import flags
import numpy as np

from experiments import cells as cells_lib, measure
from experiments.speculation import pays as speculation_pays
from seerjax import parallel
from seerjax.commands import flags as flags_lib
from seerjax.engine import engine as engine_lib, runner as runner_lib, timing
from seerjax.engine.drafting import Drafter, DraftQuery
from seerjax.engine.step_times import DraftTimes
from seerjax.models import loading as models
from seerjax.reports import draft_report
from seerjax.reports.draft_report import Drafted
from seerjax.rollout import groups as groups_lib
from seerjax.run import energy, presets as run_presets, self_test
from seerjax.simulate import speculation as theory
from seerjax.speculation import draft_loading, draft_times
from seerjax.speculation.budget import Budget, BudgetConfig
from seerjax.speculation.draft_model import DraftModelConfig, ModelDrafter
from seerjax.speculation.hybrid_drafter import HybridDrafter
from seerjax.speculation.statistics import Acceptance
from seerjax.speculation.suffix_drafter import SuffixDrafter
from seerjax.tasks import loading as tasks
from seerjax.types import Completion, Problem, Request, SamplingParams, Task

ROW_BUCKETS = (64, 512)
BUDGET = "budget"
MAX_LENGTH = BudgetConfig.num_speculative_tokens
# Minimum completions per turn: with one slot, fewer would be too short to time.
LEAST_REQUESTS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
  """The workload.

  Attributes:
    targets: target models: "nano", a Hugging Face directory, a GGUF file, or a Hub id each.
    drafts: the draft model of each target.
    tasks: names, as in the main job: "word_problems", "countdown", "sudoku", "puzzles"; and tasks
      that read a file or directory: "gsm8k=PATH", "code=", "math=", "mmlu=", "commonsense_qa=".
    batches: numbers of concurrent requests.
    lengths: draft lengths, 1 to 16, or "budget": at most 8, and none if drafting does not pay.
    widths: children per position of a draft, including the one that continues; with a budget, the
      maximum.
    turns: turns of a cell; an interval needs two, and about twenty to be quotable. A batch above 8
      has half as many turns, with more completions each.
    temperature: sampling temperature.
    max_tokens: maximum tokens of a completion.
    max_model_len: positions of a request.
    backend: backend of the target: "auto" (native where it runs), "native" or
      "tiled".
    clock: "wall", or "cpu": CPU seconds of the process, for machines with other load.
    untiled: whether to also measure plain XLA, with other bits, fitting row buckets and its own
      number of steps per engine call.
    seed: seed of problems and samples.
  """

  targets: tuple[str, ...] = ("nano",)
  drafts: tuple[str, ...] = ("nano-draft",)
  tasks: tuple[str, ...] = ("word_problems",)
  batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)
  lengths: tuple[str, ...] = ("1", "2", "4", "6", "8", BUDGET)
  widths: tuple[int, ...] = (1, 2, 4)
  turns: int = 4
  temperature: float = 1.0
  max_tokens: int = 216
  max_model_len: int = 512
  backend: str = "auto"
  clock: str = "wall"
  untiled: bool = False
  seed: int = 0

  def __post_init__(self):
    if len(self.targets) != len(self.drafts) or not self.targets:
      raise ValueError(
        f"Workload: got targets={self.targets} and drafts={self.drafts}, expected a draft for each"
        " target, in their order; name a target twice for two drafts."
      )
    for name in self.lengths:
      if name != BUDGET and not (name.isdecimal() and 1 <= int(name) <= 16):
        raise ValueError(
          f"Workload.lengths: got {name!r}, expected whole numbers from 1 to 16, or {BUDGET!r};"
          " none is what every cell is compared with, and has no entry."
        )
    if not self.batches or min(self.batches) < 1 or self.turns < 2:
      raise ValueError(
        f"Workload: got batches={self.batches}, turns={self.turns}, expected batches of at least 1"
        " and at least 2 turns; an interval needs two."
      )
    if self.clock not in measure.CLOCKS:
      raise ValueError(
        f"Workload.clock: got {self.clock!r}, expected one of {tuple(measure.CLOCKS)};"
        " 'cpu' where others use the machine."
      )

  def cells(self) -> list[Cell]:
    """Returns all cells."""
    grid = itertools.product(
      zip(self.targets, self.drafts), self.tasks, self.batches, self.widths, self.lengths
    )
    return [Cell(*pair, task, batch, length, width) for pair, task, batch, width, length in grid]

  def turns_of(self, batch: int) -> int:
    """Returns the number of turns of a cell with this batch."""
    return self.turns if batch <= 8 else max(2, self.turns // 2)

  @property
  def settings(self) -> dict[str, Any]:
    """Returns the settings that all cells share: everything except the lists of cells."""
    grid = ("targets", "drafts", "tasks", "batches", "lengths", "widths")
    return {name: value for name, value in vars(self).items() if name not in grid}


class Cell(NamedTuple):
  """One entry of the table; see `Workload`."""

  target: str
  draft: str
  task: str
  batch: int
  length: str
  width: int

  @property
  def shape(self) -> str:
    return f"{self.length}, comb of {self.width}" if self.width > 1 else self.length


class Timed:
  """A drafter that measures its own time.

  Attributes:
    seconds: seconds spent in `draft`.
    drafts: recorded drafts by request; None records nothing.
  """

  def __init__(self, drafter: Drafter, clock: Callable[[], float]):
    self.seconds = 0.0
    self.drafts: dict[str, list[Drafted]] | None = None
    self._drafter, self._clock = drafter, clock

  def draft(self, queries: Sequence[DraftQuery]) -> Sequence[Sequence[Sequence[int]]]:
    """Returns the drafter's paths, and measures the time."""
    begin = self._clock()
    found = self._drafter.draft(queries)
    self.seconds += self._clock() - begin
    if self.drafts is not None:
      for query, paths in zip(queries, found or [()] * len(queries), strict=True):
        one = Drafted(len(query.tokens), tuple(tuple(map(int, path)) for path in paths))
        self.drafts.setdefault(query.request_id, []).append(one)
    return found

  def observe(self, request_id: str, group_id: str, num_drafted: int, num_accepted: int) -> None:
    """Forwards the outcome of a draft to the drafter."""
    self._drafter.observe(request_id, group_id, num_drafted, num_accepted)

  def finish(self, request_id: str, group_id: str, tokens: Sequence[int], num_prompt: int) -> None:
    """Forwards the end of a request to the drafter."""
    self._drafter.finish(request_id, group_id, tokens, num_prompt)


class Pair:
  """A target model with two engines, plain and drafting, and its draft model."""

  def __init__(self, workload: Workload, target: str, draft: str):
    """Loads both models, checks the target's batch invariance, and measures its step times.

    Raises:
      FileNotFoundError: if a model does not exist, or is a shape without weights.
      ValueError: if the draft does not fit the target, or the target is not batch-invariant.
    """
    self.workload, self._clock = workload, measure.CLOCKS[workload.clock]
    backend: Any = workload.backend  # Validated by NumericsConfig.
    numerics = dataclasses.replace(run_presets.main_job().numerics, backend=backend)
    self.model = model = models.load_model(target, numerics)
    config = engine_lib.EngineConfig(
      page_size=32,
      max_num_seqs=max(workload.batches),
      max_model_len=workload.max_model_len,
      batch_size_buckets=ROW_BUCKETS,
    )
    runner = runner_lib.Runner(model.decoder, parallel.make_mesh(), len(ROW_BUCKETS))
    self.plain, self.drafting = (
      engine_lib.Engine(model, config=config, runner=runner) for _ in range(2)
    )
    self.rivals = [self._untiled(target, config)] if workload.untiled else []
    self.draft = draft_loading.load_draft(draft, self.drafting)
    self_test.check_model(model.decoder, model.params, config=config, runner=runner)
    self.times = timing.measure(self.plain, seconds=math.inf)
    # Compiles the suffix trees' kernels now, so that no turn includes it.
    SuffixDrafter(budget=None).draft([DraftQuery("warm", "", [1, 2, 1, 2, 1], 3, 4)])
    self._programs: dict[int, Any] = {}
    self._costs: dict[int, DraftTimes] = {}

  def _untiled(self, target: str, config: engine_lib.EngineConfig) -> engine_lib.Engine:
    """Returns an engine on plain XLA."""
    numerics = dataclasses.replace(run_presets.main_job().numerics, backend="untiled")
    config = dataclasses.replace(
      config,
      batch_size_buckets=speculation_pays.UNTILED_ROW_BUCKETS,
      decode_steps_per_call=speculation_pays.UNTILED_STEPS,
    )
    return engine_lib.Engine(models.load_model(target, numerics), config=config)

  def drafter(self, width: int) -> ModelDrafter:
    """Returns a drafter without history; drafters of one width share a compiled program."""
    made = ModelDrafter(
      self.draft,
      context=draft_loading.context_of(self.drafting),
      key=self.drafting.key,
      config=DraftModelConfig(
        length=MAX_LENGTH,
        width=width,
        num_slots=max(self.workload.batches),
        batch_size_buckets=(8, *ROW_BUCKETS),
      ),
      program=self._programs.get(width),
    )
    self._programs[width] = made.program
    return made

  def costs(self, width: int) -> DraftTimes:
    """Returns the draft times of a width, measured on first use."""
    if width not in self._costs:
      model = self.drafter(width)
      self._costs[width] = draft_times.measure_model(model, self.drafting, MAX_LENGTH)
    return self._costs[width]

  def planned(self, model: ModelDrafter) -> HybridDrafter:
    """Returns a budgeted drafter that uses the model, a text's own past, or no draft."""
    width = model.config.width
    budget = Budget(self.times, model=self.costs(width), max_width=width)
    return HybridDrafter(SuffixDrafter(budget=None), model, budget)


def load_task(name: str) -> Task:
  """Returns a task by its name, or NAME=PATH."""
  name, _, path = name.partition("=")
  return tasks.load(name, path=path or None)


def requests_of(
  workload: Workload, task: Task, model: models.Model, batch: int, turn: int
) -> list[tuple[Problem, Request]]:
  """Returns the requests of a turn: held-out problems, 1.5 times as many as slots.

  The surplus is at most 16, because a turn of 128 slots is long enough.
  """
  assert model.tokenizer is not None
  sampling = SamplingParams(
    temperature=workload.temperature,
    max_tokens=workload.max_tokens,
    stop_token_ids=model.tokenizer.eos_ids,
  )
  count = max(LEAST_REQUESTS, batch + min(-(-batch // 2), 16))
  found = []
  for place in range(count):
    index = groups_lib.problem_index(
      turn * count + place, groups_lib.num_problems(task, "heldout"), workload.seed
    )
    problem = task.problem("heldout", index)
    prompt = groups_lib.prompt_tokens(problem, model.tokenizer)
    seed = groups_lib.request_seed(workload.seed, turn, place)
    name = f"{turn}/{place}"
    found.append((problem, Request(request_id=name, prompt=prompt, sampling=sampling, seed=seed)))
  return found


def measured(workload: Workload, pair: Pair, task: Task, cell: Cell) -> dict[str, Any]:
  """Measures a cell; returns its record.

  Raises:
    ValueError: if drafts change a bit.
  """
  clock = measure.CLOCKS[workload.clock]
  model = pair.drafter(cell.width)
  drafter: ModelDrafter | HybridDrafter = model
  if cell.length == BUDGET:
    drafter = pair.planned(model)
  else:
    model.length = int(cell.length)
  pair.drafting.drafter = timed = Timed(drafter, clock)
  engines = [pair.plain, pair.drafting, *pair.rivals]
  turns: list[tuple[float, float, int]] = []
  untiled: list[float] = []
  correct = [0, 0]
  num_answers = 0
  shown: draft_report.Transcript | None = None
  timed.drafts = {}
  # A warm-up turn on problems of no other turn: it compiles, and a budget learns.
  num_turns = workload.turns_of(cell.batch)
  for turn in (num_turns, *range(num_turns)):
    asked = requests_of(workload, task, pair.model, cell.batch, turn)
    requests = [request for _, request in asked]
    plain, drafted, *others = speculation_pays.answers(
      engines, requests, cell.batch, clock=clock, backwards=turn % 2 == 0
    )
    what = f"{cell.target} with {cell.draft}, {cell.task}, batch {cell.batch}, {cell.shape}"
    speculation_pays.check_same(plain.completions, drafted.completions, what)
    if pair.drafting.drafter is not timed:
      raise ValueError(
        f"{what}: got a drafter that failed, expected one that drafts; what it failed by is logged."
      )
    if turn == num_turns:
      shown = transcript(pair, cell, asked[0], drafted.completions[0], timed.drafts or {})
      drafter.acceptance.take()
      timed.seconds, timed.drafts = 0.0, None
      continue
    turns.append((plain.seconds, drafted.seconds, plain.num_tokens))
    untiled += [other.num_tokens / other.seconds for other in others]
    num_answers += len(requests)
    for place, answers in enumerate((plain.completions, drafted.completions)):
      correct[place] += num_correct(task, asked, answers)
  first = requests_of(workload, task, pair.model, cell.batch, 0)
  record = {
    "settings": workload.settings,
    **cell._asdict(),
    "turns": turns,
    "untiled": untiled,
    "num_answers": num_answers,
    "correct": correct,
    "num_steps": drafter.acceptance.num_steps,
    "drafted_at": drafter.acceptance.drafted_at,
    "accepted_at": drafter.acceptance.accepted_at,
    "draft_seconds": timed.seconds,
    "costs": priced(pair, cell),
    "joules": joules(engines[:2], first, cell.batch),
    "transcript": shown,
  }
  pair.drafting.drafter = None
  return record


def transcript(
  pair: Pair,
  cell: Cell,
  asked: tuple[Problem, Request],
  answer: Completion,
  drafts: Mapping[str, Sequence[Drafted]],
) -> draft_report.Transcript:
  """Returns a completion with its drafts."""
  problem, request = asked
  tokenizer = pair.model.tokenizer
  assert tokenizer is not None
  tokens = [*request.prompt, *answer.tokens]
  steps = draft_report.steps_of(drafts.get(request.request_id, ()), tokens, len(request.prompt))
  title = f"{cell.target} with {cell.draft}, {cell.task}, batch {cell.batch}, {cell.shape}"
  decode = functools.partial(tokenizer.decode, skip_special_tokens=False)
  return draft_report.transcript(title, problem.prompt, steps, decode)


def num_correct(
  task: Task, asked: Sequence[tuple[Problem, Request]], answers: Sequence[Completion]
) -> int:
  """Returns the number of correct completions."""
  pairs = zip(asked, answers, strict=True)
  return sum(task.verdict(problem, answer.text).correct for (problem, _), answer in pairs)


def priced(pair: Pair, cell: Cell) -> dict[str, float] | None:
  """Returns step times at a cell's batch, those in Leviathan's model and others.

  Returns:
    seconds of "plain", a step of plain decoding; "position", one draft position; "draft" and
    "verify", the parts of a step with drafts. None for a budget, which has many lengths.
  """
  if cell.length == BUDGET:
    return None
  batch, length, of_draft = cell.batch, int(cell.length), pair.costs(cell.width)
  # Drafted tokens beyond a step's rows are not verified.
  rows = min(batch * (1 + length * cell.width), ROW_BUCKETS[-1])
  return {
    "plain": pair.times.decode(batch),
    "position": of_draft.position + batch * of_draft.token,
    "draft": of_draft.seconds(batch, length),
    "verify": pair.times.step(batch, rows),
  }


def joules(
  engines: Sequence[engine_lib.Engine], asked: Sequence[tuple[Problem, Request]], batch: int
) -> list[float] | None:
  """Returns the joules per token of each engine, run one after the other; None without a meter."""
  meter = energy.Meter()
  if meter.read() is None:
    return None
  requests = [request for _, request in asked]
  found = []
  for engine in engines:
    # Counters have millisecond resolution and cover the whole machine: measures runs, not steps.
    before = meter.read() or 0.0
    (answered,) = speculation_pays.answers([engine], requests, batch, clock=lambda: 0.0)
    found.append(((meter.read() or 0.0) - before) / answered.num_tokens)
  return found


# Tables.


def hold_rate(drafted_at: Sequence[int], accepted_at: Sequence[int]) -> float:
  """Returns a: accepted tokens / draft tokens after accepted ones only; 0 for none."""
  tried = [min(a, b) for a, b in zip(drafted_at, [*drafted_at[:1], *accepted_at])]
  return sum(accepted_at) / max(sum(tried), 1)


def cell_of(record: Mapping[str, Any]) -> Cell:
  """Returns the cell of a record."""
  return Cell(*(record[name] for name in Cell._fields))


def tables(records: Sequence[dict[str, Any]], price_per_hour: float = 0.0) -> str:
  """Returns the cells as Markdown, one section per pair and task.

  Args:
    records: records of cells.
    price_per_hour: price of the machine; 0 omits prices.
  """
  sections: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
  for record in records:
    sections.setdefault((record["target"], record["draft"], record["task"]), []).append(record)
  return "\n\n".join(_section(*one, price_per_hour) for one in sections.items())


def _section(
  key: tuple[str, str, str], records: Sequence[dict[str, Any]], price_per_hour: float
) -> str:
  target, draft, task = key
  answers, without, with_drafts = (
    sum(values)
    for values in zip(*((r["num_answers"], *r["correct"]) for r in records), strict=True)
  )
  lines = [
    f"## {target} with {draft}: {task}",
    "",
    f"{answers:,} pairs of answers, all bits equal; {without / answers:.2%} correct without drafts,"
    f" {with_drafts / answers:.2%} with.",
    "",
    _cells_table(records, price_per_hour),
    "",
    "Of steps that drafted so far, the share that held so far (steps that drafted so far); all"
    " batches.",
    "",
    _positions_table(records),
  ]
  if all(record["joules"] is None for record in records):
    lines[2] += " Joules per token: not readable here."
  return "\n".join(lines)


def _cells_table(records: Sequence[dict[str, Any]], price_per_hour: float) -> str:
  head = ["batch", "draft", "plain, tokens/s", "with drafts", "ratio (95 %)", "tokens per step"]
  head += ["draft's share", "a", "c", "E/(Nc+1)", "priced", "the article's alpha"]
  has_joules = any(record["joules"] is not None for record in records)
  has_untiled = any(record.get("untiled") for record in records)
  if has_untiled:
    head += ["untiled, tokens/s", "drafts against untiled (95 %)"]
  if has_joules:
    head += ["joules per token, plain", "with drafts"]
  if price_per_hour:
    head += ["price of 1,000 answers, plain", "with drafts"]
  rows = []
  for record in records:
    cell = cell_of(record)
    plain, drafted, tokens = np.asarray(record["turns"]).T
    ratio = measure.ratio(plain / drafted)
    row = [
      str(cell.batch),
      cell.shape,
      f"{np.median(tokens / plain):,.0f}",
      f"{np.median(tokens / drafted):,.0f}",
      ratio.text(digits=2),
      _or_none(record["num_steps"], 1 + sum(record["accepted_at"]) / max(record["num_steps"], 1)),
      f"{record['draft_seconds'] / drafted.sum():.0%}",
      *_foretold(cell, record),
    ]
    if has_untiled:
      rates = np.asarray(record["untiled"])
      ratio = measure.ratio(tokens / drafted / rates)
      row += [f"{np.median(rates):,.0f}", ratio.text(digits=2)]
    if has_joules:
      row += [f"{value:.4f}" for value in record["joules"] or ()] or ["-", "-"]
    if price_per_hour:
      per_second = price_per_hour / 3600 * 1000 / record["num_answers"]
      row += [f"{per_second * seconds.sum():.3g}" for seconds in (plain, drafted)]
    rows.append(row)
  return measure.table(head, rows)


def _foretold(cell: Cell, record: dict[str, Any]) -> list[str]:
  """Returns a, c, Leviathan's speed-up, the speed-up including row costs, and the article's."""
  a = hold_rate(record["drafted_at"], record["accepted_at"])
  costs = record["costs"]
  if costs is None:
    return [_or_none(record["num_steps"], a), "-", "-", "-", "-"]
  length, c = int(cell.length), costs["position"] / costs["plain"]
  tokens = theory.leviathan(a, length, 0.0)
  paid = tokens * costs["plain"] / (costs["draft"] + costs["verify"])
  speeds = (theory.leviathan(a, length, c), paid, theory.article(a, length))
  return [f"{a:.2f}", f"{c:.3f}", *(f"{speed:.2f}" for speed in speeds)]


def _or_none(count: int, value: float) -> str:
  return f"{value:.2f}" if count else "-"


def _positions_table(records: Sequence[dict[str, Any]]) -> str:
  """Returns acceptance by position for each shape of draft, over all batches."""
  totals: dict[str, Acceptance] = {}
  for record in records:
    cell = cell_of(record)
    one = Acceptance(record["num_steps"], record["drafted_at"][:], record["accepted_at"][:])
    totals.setdefault(cell.shape, Acceptance()).include(one)
  most = max((len(total.drafted_at) for total in totals.values()), default=0)
  places = [str(place) for place in range(1, most + 1)]
  rows = []
  for shape, total in totals.items():
    held = [f"{rate:.3f} ({n:,})" for rate, n in zip(total.rate_at, total.drafted_at)]
    length = _or_none(total.num_steps, total.length)
    rows.append([shape, f"{total.num_steps:,}", length, *held, *[""] * (most - len(held))])
  return measure.table(["draft", "steps", "tokens per step", *places], rows)


def run(workload: Workload, directory: pathlib.Path, price_per_hour: float = 0.0) -> str:
  """Measures unfinished cells; writes table.md and report.html; returns the tables.

  Raises:
    ValueError: if drafts change a bit, or the directory holds cells of another workload.
  """
  found_tasks = {name: load_task(name) for name in workload.tasks}
  pairs: dict[tuple[str, str], Pair] = {}

  def measure(cell: Cell, *_: Any) -> dict[str, Any]:
    names = cell[:2]
    if names not in pairs:
      pairs.clear()  # Keeps the KV pages of only one pair in memory.
      pairs[names] = Pair(workload, *names)
    return measured(workload, pairs[names], found_tasks[cell.task], cell)

  records = cells_lib.completed(workload.cells(), directory, workload.settings, measure)
  text = tables(records, price_per_hour)
  (directory / "table.md").write_text(text + "\n")
  shown: dict[tuple[str, ...], Any] = {}  # The first cell of each shape.
  for record in records:
    shown.setdefault((*cell_of(record)[:3], cell_of(record).shape), record.get("transcript"))
  found = [draft_report.read(one) for one in shown.values() if one]
  draft_report.write(directory, "Drafts over transcripts", found)
  return text


def main(args: flags.FlagValues) -> None:
  workload = flags_lib.from_flags(Workload, args.config)
  text = run(workload, pathlib.Path(args.workdir), args.price_per_hour)
  print(f"\n{text}\n\nwritten to {args.workdir}")


if __name__ == "__main__":
  flags_lib.define_flags(Workload(), "runs/speculation")
  flags.DEFINE_float(
    "price_per_hour",
    0.0,
    "Price of the machine per hour, in any currency; 0 reports no price.",
    lower_bound=0.0,
  )
  measure.command(main)
