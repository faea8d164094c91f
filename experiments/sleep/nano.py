r"""Measures sleep-time compute with nano, arm by arm and token by token.

Claim: nano-sleep, answering from its own notes, is more accurate than with any other use of as many
tokens, at a third of the test tokens, and about three points less accurate than nano without sleep:
docs/results/sleep.md.
Command: bash launch/local.sh experiments.sleep.nano
  less, sooner:  --num_contexts=10
  the people of its training:  --split=heldout
Hardware: 2 CPU cores. Numbers, including missed targets: docs/results/sleep.md

Each of three seeds has its own contexts of the split "test", with ten questions each; nano-sleep
was not trained on their people, verbs and stories. The settings below were chosen on "heldout".
Every call is a line of --workdir/MODEL.jsonl, so a killed run continues and pays for no call twice.
The models of --rivals only give whole answers, because they were not trained on other lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import functools
import json
import pathlib
from typing import NamedTuple

from absl import flags
import numpy as np
import rich.progress

from experiments import measure
from experiments.sleep import protocol as sleep_protocol, tables as sleep_tables
from experiments.sleep.tables import TEST, WAKE, About, Arm, Cells
import seerjax
from seerjax.engine.engine import Engine, EngineConfig
from seerjax.models.tokenizer import Tokenizer
from seerjax.serve import identity
from seerjax.sleep import planner, prompts as prompts_lib, protocol
from seerjax.sleep.call_journal import CallJournal
from seerjax.sleep.engine_thinker import EngineThinker
from seerjax.sleep.prompts import Prompts
from seerjax.sleep.protocol import ProtocolConfig, Row
from seerjax.sleep.thinkers import Ask
from seerjax.tasks.stateful import StatefulConfig, StatefulTask, StatefulWordProblems
from seerjax.types import Request, SamplingParams

CONTEXT = 512  # Positions of a sequence.
Score = Callable[[Sequence[int]], Sequence[float]]  # See `prompt_scores`.
# Indices in the split: each seed has its own range, followed by the contexts of the knob. The first
# indices of each range were used during development and are left out.
PLACES_A_SEED, FIRST_PLACE, FIRST_OF_KNOB = 1000, 300, 5300
MAX_CONTEXTS = PLACES_A_SEED - FIRST_PLACE

WHOLE = sleep_tables.WHOLE
BASE = ProtocolConfig(wake_tokens=192, sleep_tokens=192, max_samples=8)
WHOLES = dataclasses.replace(
  BASE,
  arms=("test", "cache", "wake", "both", "facts", "rule", "leak", "pass", "same"),
  verbosities=(WHOLE,),
  parallel=(1,),
)
LENGTHS = dataclasses.replace(BASE, arms=("test", "wake"), parallel=(1,))
CUTS = dataclasses.replace(
  BASE, arms=("test", "wake"), verbosities=(WHOLE,), parallel=(1,), cuts=(8, 12, 24, 40)
)
BOTH = dataclasses.replace(BASE, arms=("both",), verbosities=(0, WHOLE), parallel=(1,))
# Configurations by part, for models trained for sleep and for other models.
TAUGHT = {"main": (WHOLES,), "curves": (LENGTHS, CUTS, BOTH)}
PLAIN = {
  "main": (dataclasses.replace(WHOLES, arms=("test", "cache")),),
  "curves": (dataclasses.replace(CUTS, arms=("test",)),),
}
SEVERAL = dataclasses.replace(
  BASE, arms=("wake", "both"), verbosities=(WHOLE,), parallel=(1, 2, 5, 10)
)
KNOB = dataclasses.replace(BASE, arms=("test", "wake"), verbosities=(0, WHOLE), parallel=(1,))
EXPONENTS = (0.0, 1.0, 2.0, 3.0)


class Part(NamedTuple):
  """Some contexts with the protocol configurations to run on them.

  Attributes:
    name: name of the rows.
    task: the task of the contexts.
    split: split of the task.
    places: indices of the contexts in the split.
    seed: seed of the run.
    configs: protocol configurations, in order.
  """

  name: str
  task: StatefulWordProblems
  split: str
  places: range
  seed: int
  configs: tuple[ProtocolConfig, ...]


def parts(
  seeds: Sequence[int],
  num_contexts: int,
  num_of_curves: int,
  num_of_several: int,
  num_of_knob: int,
  *,
  is_taught: bool,
  split: str = "test",
) -> list[Part]:
  """Returns the parts of a model.

  The first contexts of each seed are also used for every length, hard cuts, and several rewrites.
  """
  usual = TAUGHT if is_taught else PLAIN
  found = []
  for name, count, configs in (
    ("main", num_contexts, usual["main"]),
    ("curves", min(num_of_curves, num_contexts), usual["curves"]),
    ("several", min(num_of_several, num_contexts) if is_taught else 0, (SEVERAL,)),
  ):
    for seed in seeds if count else ():
      first = seed * PLACES_A_SEED + FIRST_PLACE
      places = range(first, first + count)
      found.append(Part(name, StatefulWordProblems(), split, places, seed, configs))
  if is_taught:
    places = range(FIRST_OF_KNOB, FIRST_OF_KNOB + num_of_knob)
    for exponent in EXPONENTS if num_of_knob else ():
      task = StatefulWordProblems(config=StatefulConfig(predictability=exponent))
      found.append(Part(f"knob {exponent:g}", task, split, places, 0, (KNOB,)))
  return found


def rows_of(part: Part, prompts: Prompts, ask: Ask) -> Iterator[tuple[Row, ...]]:
  """Yields the rows of each context, for each configuration of the part."""
  items = protocol.items(part.task, part.split, part.places)
  for config in part.configs:
    config = dataclasses.replace(config, seed=part.seed)
    yield from protocol.run(
      items, prompts=prompts, verdict=part.task.verdict, ask=ask, config=config
    )


def prompt_scores(engine: Engine, tokens: Sequence[int]) -> list[float]:
  """Returns the log-probability of each token of a prompt but the first, in nats."""
  sampling = SamplingParams(temperature=0.0, max_tokens=1)
  engine.add_request(
    Request(request_id="scored", prompt=tuple(tokens), sampling=sampling), prompt_top=0
  )
  found: list[float] = []
  while engine.num_unfinished:
    for update in engine.step():
      found += [score for score, _ in update.prompt or ()]
  engine.poll()
  return found


def predictability(
  score: Score, tokenizer: Tokenizer, task: StatefulTask, context: str, asked: str
) -> float:
  """Returns log p(question | context), the mean of the question's tokens in nats.

  The tokens are those of the prompt with both; the end of the turn is not counted.
  """

  def ids(text: str) -> list[int]:
    return tokenizer.chat_ids([{"role": "user", "content": text}])

  whole, alone = ids(task.wake_prompt(asked, context, "")), ids(context)
  start = next(i for i, (one, two) in enumerate(zip(whole, alone, strict=False)) if one != two)
  # Both have the same end.
  num_after = next(
    i for i, (one, two) in enumerate(zip(whole[::-1], alone[::-1], strict=False)) if one != two
  )
  scores = score(whole)
  own = np.asarray(scores[start - 1 : len(whole) - num_after - 1], np.float32)
  return float(np.mean(own))


def about(part: Part, score: Score, tokenizer: Tokenizer) -> list[About]:
  """Returns the properties of a part's questions."""
  found = []
  for item in protocol.items(part.task, part.split, part.places):
    num_tokens = len(tokenizer.encode(item.context.text))
    for problem in item.questions:
      logprob = predictability(score, tokenizer, part.task, item.context.text, problem.question)
      found.append(
        About(
          part=part.name,
          problem_id=problem.problem_id,
          context_id=item.context.context_id,
          seed=part.seed,
          num_steps=problem.num_steps,
          context_steps=item.context.num_steps,
          context_tokens=num_tokens,
          logprob=logprob,
        )
      )
  return found


def known(
  path: pathlib.Path, found: Sequence[Part], scorer_of: Callable[[], tuple[Score, Tokenizer]]
) -> dict[str, list[About]]:
  """Returns the properties of the questions of all parts, by the parts' names.

  Args:
    path: file of properties computed before; missing parts are added.
    found: the parts.
    scorer_of: loads the model that scores, if it is needed.
  """
  lines = path.read_text().splitlines() if path.exists() else []
  before = {
    (one.part, one.problem_id): one for one in (About(**json.loads(line)) for line in lines)
  }
  result: dict[str, list[About]] = {}
  for part in found:
    items = protocol.items(part.task, part.split, part.places)
    names = [(part.name, problem.problem_id) for item in items for problem in item.questions]
    if any(name not in before for name in names):
      new = about(part, *scorer_of())
      with path.open("a") as file:
        file.writelines(json.dumps(one._asdict()) + "\n" for one in new)
    else:
      new = [before[name] for name in names]
    result.setdefault(part.name, []).extend(new)
  return result


def asked(
  name: str, found: Sequence[Part], workdir: pathlib.Path, progress: rich.progress.Progress
) -> dict[str, list[Row]]:
  """Runs all parts of a model; returns the rows by the parts' names."""
  model = seerjax.load_model(name)
  config = EngineConfig(page_size=16, max_num_seqs=64, max_model_len=CONTEXT)
  thinker = EngineThinker(Engine(model, config=config))
  who = {"fingerprint": identity.fingerprint(model, seerjax.numerics.key(0))}
  bar = progress.add_task(name, total=sum(len(p.places) * len(p.configs) for p in found), note="")
  rows: dict[str, list[Row]] = {}
  with CallJournal(workdir / f"{pathlib.Path(name).name}.jsonl", settings=who) as journal:
    for part in found:
      for of_context in rows_of(part, prompts_lib.taught(part.task), journal.asking(thinker.ask)):
        rows.setdefault(part.name, []).extend(of_context)
        note = f"{part.name}, seed {part.seed}: {journal.num_asked:,} calls"
        progress.update(bar, advance=1, note=f"{note}, {journal.num_found:,} from the journal")
        done = int(progress.tasks[bar].completed)
        if not progress.console.is_terminal and done % 20 == 0:
          print(f"{name}: {done} of {progress.tasks[bar].total:.0f}, {note}", flush=True)
  return rows


# Reports.


class Section(NamedTuple):
  """A section of the report: its title, and its text in Markdown."""

  title: str
  text: str


def percent(value: float) -> str:
  """Returns a share as a percentage, such as "53.3"."""
  return f"{100 * value:.1f}"


class Main(NamedTuple):
  """Rows of a part.

  Attributes:
    own: rows of the model trained for sleep.
    base: rows of the baseline: the model that is most accurate without sleep.
    base_name: name of the baseline.
    rows: rows by model.
  """

  own: Cells
  base: Cells
  base_name: str
  rows: Mapping[str, list[Row]]


def main_of(
  model: str,
  rows: Mapping[str, dict[str, list[Row]]],
  about: Sequence[About],
  *,
  part: str = "main",
  base_name: str = "",
) -> Main:
  """Returns the rows of a part; the baseline is `base_name`, or the most accurate model if ""."""
  cells = {name: Cells(of[part], about) for name, of in rows.items()}
  best = base_name or max(cells, key=lambda name: float(cells[name].right(TEST).mean()))
  return Main(cells[model], cells[best], best, {name: of[part] for name, of in rows.items()})


def of_rows(about: Sequence[About], rows: Sequence[Row]) -> list[About]:
  """Returns the properties of the questions that have rows."""
  ids = {row.problem_id for row in rows}
  return [one for one in about if one.problem_id in ids]


def of_seed(main: Main, seed: int) -> tuple[Cells, Cells]:
  """Returns (own, base) with only the contexts of a seed."""
  return main.own.some(lambda one: one.seed == seed), main.base.some(lambda one: one.seed == seed)


def ratio(own: Cells, base: Cells) -> measure.Interval:
  """Returns the ratio of test tokens with sleep to those without, with its interval."""
  columns = {"wake": own.tokens(WAKE), "test": base.tokens(TEST)}
  return sleep_tables.bootstrap(own, columns, lambda means: means["wake"] / means["test"])


def against(main: Main) -> Section:
  """Compares T_b(q, c') with every other way to spend tokens."""
  own, base = main.own, main.base
  seeds = sorted({one.seed for one in own.about})

  def line(name: str, cells: Cells, other: Cells, arm: Arm) -> tuple[str, ...]:
    gain = sleep_tables.mean(cells, cells.right(WAKE) - other.right(arm))
    tokens = float(other.tokens(arm).mean())
    share = float(cells.tokens(WAKE).mean()) / tokens
    right = percent(float(other.right(arm).mean()))
    return name, right, f"{tokens:.1f}", gain.text(100), f"{share:.2f}"

  found = [line(f"T_B(q, c) of {main.base_name}", own, base, TEST)]
  for seed in seeds if len(seeds) > 1 else ():
    found.append(line(f"the same, seed {seed}", *of_seed(main, seed), TEST))
  for name, arm in (
    ("T_B(q, c), kept KV of c", Arm("cache")),
    ("T_b(q, c, c')", Arm("both", num_parallel=1)),
    ("T_b(q, perfect c')", Arm("facts")),
    ("T_b(q, c' by rule)", Arm("rule")),
    ("c without q", Arm("leak")),
    ("pass@k with an oracle, equal test tokens", Arm("pass")),
    ("the same total without sleep", Arm("same")),
  ):
    found.append(line(name, own, own, arm))
  names = (
    "instead of T_b(q, c')", "right %", "test tokens", "T_b(q, c') is ahead by, points (95 %)",
    "its share of the test tokens",
  )  # fmt: skip
  return Section("T_b(q, c') against other ways to spend tokens", measure.table(names, found))


def budgets(main: Main) -> Section:
  """Reports gains at equal test tokens, with requested lengths and with hard cuts as budgets.

  Args:
    main: the part "curves".
  """
  own, base = main.own, main.base
  lengths = [Arm("test", verbosity) for verbosity in range(WHOLE + 1)]
  cuts = [Arm("test", cut=cut) for cut in (0, *CUTS.cuts)]
  rows = [
    ("lengths of nano-sleep", sleep_tables.gain_at_equal_tokens(own, own, WAKE, lengths)),
    (f"hard cuts of {main.base_name}", sleep_tables.gain_at_equal_tokens(own, base, WAKE, cuts)),
  ]
  for verbosity in range(WHOLE):
    arm = Arm("wake", verbosity, 1)
    gain = sleep_tables.mean(own, own.right(arm) - own.right(Arm("test", verbosity)))
    rows.append((f"both with length {verbosity}", gain))
  found = [(name, gain.text(100)) for name, gain in rows]
  names = ("budgets of T_B(q, c)", "T_b(q, c') is ahead at as many test tokens, points (95 %)")
  title = f"Gain at equal test tokens, {len(own.starts)} contexts"
  return Section(title, measure.table(names, found))


def steps(main: Main) -> Section:
  """Reports results by the number of reasoning steps."""
  of_context = sleep_tables.by_steps(main.base, main.own, lambda one: one.context_steps)
  of_question = sleep_tables.by_steps(main.base, main.own, lambda one: one.num_steps)
  long = sleep_tables.where_test_is_long(main.base, main.own, 55)
  found = [
    (kind, one.name, one.count, percent(one.test), percent(one.wake), f"{one.test_tokens:.1f}",
     f"{one.wake_tokens:.1f}", f"{one.ratio:.1f}")
    for kind, several in (("context", of_context), ("question", of_question), ("", [long]))
    for one in several
    if one.count
  ]  # fmt: skip
  names = (
    "of the", "steps", "questions", "T_B right %", "T_b right %", "T_B tokens", "T_b tokens",
    "ratio",
  )  # fmt: skip
  return Section("By the number of steps", measure.table(names, found))


def prices(main: Main) -> Section:
  """Reports the price of a question."""
  found = []
  for latency_price in sleep_tables.PRICES:
    without = sleep_tables.price(main.base, TEST, latency_price, 1)
    for count in (1, 2, 3, 5, 10):
      with_sleep = sleep_tables.price(main.own, WAKE, latency_price, count)
      found.append((
        f"{latency_price:g}", count, f"{without:.1f}", f"{with_sleep:.1f}",
        f"{without / with_sleep:.2f}",
      ))  # fmt: skip
  names = ("t", "questions a context", "without sleep", "with", "times cheaper")
  return Section(
    "Price of a question, t b + S / N_q, in tokens of sleep", measure.table(names, found)
  )


def break_even(main: Main) -> Section:
  """Compares break-even predicted from the first seed's contexts with that on the other seeds'.

  The planner knows only the lengths of the other seeds' contexts.
  """
  seeds = sorted({one.seed for one in main.own.about})
  is_first: Callable[[About], bool] = lambda one: one.seed == seeds[0]
  is_later: Callable[[About], bool] = lambda one: one.seed != seeds[0]
  if len(seeds) == 1:
    half = main.own.about[len(main.own.about) // 2].context_id
    firsts = {one.context_id for one in main.own.about[: len(main.own.about) // 2]} - {half}
    is_first = lambda one: one.context_id in firsts
    is_later = lambda one: one.context_id not in firsts
  own = [main.own.some(chosen) for chosen in (is_first, is_later)]
  base = [main.base.some(chosen) for chosen in (is_first, is_later)]
  expected = sleep_tables.foreseen(base[0], own[0], TEST, WAKE, own[1])
  found = []
  for latency_price in sleep_tables.PRICES:
    predicted = planner.break_even(**expected._asdict(), latency_price=latency_price)
    seen = sleep_tables.crossing(base[1], own[1], TEST, WAKE, latency_price)
    found.append(
      (f"{latency_price:g}", f"{predicted:.2f}", f"{seen:.2f}", percent(predicted / seen - 1))
    )
  names = ("t", "predicted from other contexts", "realised", "error %")
  return Section("Break-even, questions a context", measure.table(names, found))


def planning(main: Main) -> Section:
  """Reports the cost with the planner's decisions."""
  found = []
  for latency_price in sleep_tables.PRICES:
    for mean_questions in (1.2, 2.0, 3.0, 5.0):
      one = sleep_tables.planned(main.base, main.own, TEST, WAKE, latency_price, mean_questions)
      found.append((
        f"{latency_price:g}", f"{mean_questions:g}", f"{one.never:,.0f}", f"{one.always:,.0f}",
        f"{one.planner:,.0f}", one.num_slept, percent(one.excess),
      ))  # fmt: skip
  names = (
    "t", "mean questions", "never", "always", "planner", "slept for", "dearer than the better %",
  )  # fmt: skip
  count = len(main.own.starts)
  return Section(
    f"The planner over {count} contexts, tokens of sleep in all", measure.table(names, found)
  )


def predicted(main: Main, curves: Main | None) -> Section:
  """Reports the gain by quintile of log p(q|c)."""
  found, edges = [], ""
  for verbosity, cells in ((WHOLE, main.own), *(((0, curves.own),) if curves else ())):
    one = sleep_tables.by_predictability(cells, Arm("test", verbosity), Arm("wake", verbosity, 1))
    gains = (f"{100 * gain:.1f}" for gain in one.gains)
    found.append((verbosity, len(cells.starts), *gains, one.slope.text(100)))
    edges = edges or ", ".join(f"{edge:.2f}" for edge in one.edges)
  names = ("length", "contexts", "1st", "2nd", "3rd", "4th", "5th", "slope, points a nat (95 %)")
  title = f"Gain of T_b(q, c') over T_B(q, c), points, by quintile of log p(q|c) ({edges})"
  return Section(title, measure.table(names, found))


def several(rows: Sequence[Row], about: Sequence[About]) -> Section:
  """Reports results with several rewrites of a context in the prompt."""
  cells = Cells(rows, of_rows(about, rows))
  found = []
  for count in SEVERAL.parallel:
    wake = Arm("wake", num_parallel=count)
    gain = sleep_tables.mean(cells, cells.right(wake) - cells.right(WAKE))
    both = cells.right(Arm("both", num_parallel=count))
    found.append((
      count, percent(float(cells.right(wake).mean())), f"{cells.tokens(wake).mean():.1f}",
      f"{cells.sleep(wake).mean():.0f}", gain.text(100), percent(float(both.mean())),
    ))  # fmt: skip
  names = (
    "c' side by side", "T_b(q, c') right %", "test tokens", "sleep tokens a context",
    "ahead of one, points (95 %)", "T_b(q, c, c') right %",
  )  # fmt: skip
  return Section(f"Several rewrites, {len(cells.starts)} contexts", measure.table(names, found))


def knob(rows: Mapping[str, list[Row]], about: Mapping[str, list[About]]) -> Section:
  """Reports the gain for each Zipf exponent of the questions."""
  found = []
  for name in rows:
    if not name.startswith("knob"):
      continue
    cells = Cells(rows[name], about[name])
    gains = [
      sleep_tables.mean(
        cells, cells.right(Arm("wake", length, 1)) - cells.right(Arm("test", length))
      ).text(100)
      for length in (0, WHOLE)
    ]
    logprob = float(np.mean([one.logprob for one in cells.about]))
    found.append((name.partition(" ")[2], len(cells.starts), f"{logprob:.2f}", *gains))
  names = (
    "exponent",
    "contexts",
    "mean log p(q|c)",
    "gain at length 0, points (95 %)",
    "in whole answers",
  )
  return Section("By the law of Zipf that questions follow", measure.table(names, found))


class Curve(NamedTuple):
  """A curve of a chart.

  Attributes:
    label: label of the curve.
    x, y: f64[n] each, x ascending.
  """

  label: str
  x: np.ndarray
  y: np.ndarray


class Curves(NamedTuple):
  """A chart of up to three curves.

  Attributes:
    title: title of the chart.
    x_label: label of the x axis.
    curves: one to three curves.
    is_percent: whether y is a share.
  """

  title: str
  x_label: str
  curves: tuple[Curve, ...]
  is_percent: bool = False


def curves(main: Main, short: Main) -> list[Curves]:
  """Returns the charts of the picture.

  Args:
    main: the part to plot.
    short: the part "curves".
  """
  own, base = short.own, short.base

  def of(label: str, cells: Cells, arms: Sequence[Arm]) -> Curve:
    points = sorted(
      (float(cells.tokens(arm).mean()), float(cells.right(arm).mean())) for arm in arms
    )
    x, y = zip(*points, strict=True)
    return Curve(label, np.array(x), np.array(y))

  lengths, cuts = range(WHOLE + 1), (0, *CUTS.cuts)
  without = of("T_B(q, c)", own, [Arm("test", length) for length in lengths])
  wake = of("T_b(q, c')", own, [Arm("wake", length, 1) for length in lengths])
  both = of("T_b(q, c, c')", own, [Arm("both", length, 1) for length in BOTH.verbosities])
  found = [
    Curves("Right against test tokens, by requested length", "tokens", (without, wake, both),
           is_percent=True),
    Curves("Right against test tokens, by hard cuts", "tokens",
           (of(f"T_B(q, c) of {main.base_name}", base, [Arm("test", cut=cut) for cut in cuts]),
            of("T_b(q, c')", own, [Arm("wake", WHOLE, 1, cut) for cut in cuts])), is_percent=True),
  ]  # fmt: skip
  counts = np.arange(1, sleep_tables.MAX_QUESTIONS + 1)
  pair = [
    Curve(label, counts.astype(float), np.array([
      sleep_tables.price(cells, arm, 10.0, int(count)) for count in counts
    ]))
    for label, cells, arm in (("without sleep", main.base, TEST), ("with", main.own, WAKE))
  ]  # fmt: skip
  return [*found, Curves("Price of a question, t = 10", "questions", tuple(pair))]


def draw(curves: Sequence[Curves], path: pathlib.Path) -> None:
  """Draws the charts side by side into a picture."""
  import matplotlib

  matplotlib.use("Agg")
  from matplotlib import pyplot

  drawn, axes = pyplot.subplots(1, len(curves), figsize=(4.6 * len(curves), 3.4), squeeze=False)
  for axis, one in zip(axes[0], curves, strict=True):
    scale = 100 if one.is_percent else 1
    for curve in one.curves:
      axis.plot(curve.x, scale * curve.y, marker="o", markersize=4, label=curve.label)
    axis.set_title(one.title, fontsize=10)
    axis.set_xlabel(one.x_label)
    axis.set_ylabel("%" if one.is_percent else "tokens of sleep")
    axis.set_ylim(bottom=min(0, axis.get_ylim()[0]))
    axis.legend(fontsize=8)
    axis.grid(alpha=0.3)
  drawn.tight_layout()
  drawn.savefig(path, dpi=90)
  pyplot.close(drawn)


def report(
  model: str,
  rows: Mapping[str, dict[str, list[Row]]],
  about: Mapping[str, list[About]],
  workdir: pathlib.Path,
) -> None:
  """Prints the tables, and writes tables and picture."""
  main = main_of(model, rows, about["main"])
  sections = [
    Section(f"Arms of {name}", sleep_protocol.table(sleep_protocol.lines_of(found, 10), 10))
    for name, found in main.rows.items()
  ]
  short = None
  if "curves" in rows[model]:
    asked_about = of_rows(about["main"], rows[model]["curves"])
    short = main_of(model, rows, asked_about, part="curves", base_name=main.base_name)
    sections += [
      Section(
        f"Arms of {name}, at each length and with cuts",
        sleep_protocol.table(sleep_protocol.lines_of(found, 10), 10),
      )
      for name, found in short.rows.items()
    ]
    sections.append(budgets(short))
  sections += [make(main) for make in (against, steps, prices, break_even, planning)]
  sections.append(predicted(main, short))
  if "several" in rows[model]:
    sections.append(several(rows[model]["several"], about["main"]))
  if any(name.startswith("knob") for name in rows[model]):
    sections.append(knob(rows[model], about))
  text = "\n\n".join(f"## {one.title}\n\n{one.text}" for one in sections)
  (workdir / "tables.md").write_text(f"{text}\n")
  gain = sleep_tables.mean(main.own, main.own.right(WAKE) - main.base.right(TEST))
  if short:
    draw(curves(main, short), workdir / "sleep.png")
  print(
    f"\n{text}\n\n{gain.text(100)} points ahead of T_B(q, c) of {main.base_name} (95 %) with"
    f" {ratio(main.own, main.base).value:.2f} of its test tokens; written to {workdir}"
  )


def main(args: flags.FlagValues) -> None:
  seeds = sorted({int(seed) for seed in args.seeds})
  if not 2 <= args.num_contexts <= MAX_CONTEXTS or not seeds or not 0 <= seeds[-1] < 5:
    raise ValueError(
      f"--num_contexts, --seeds: got {args.num_contexts} and {args.seeds}, expected 2 to"
      f" {MAX_CONTEXTS} contexts of each seed, and seeds of 0 to 4; 100 and 0,1,2 are usual."
    )
  if args.model in args.rivals:
    raise ValueError(
      f"--rivals: got {args.rivals} with --model={args.model}, expected other models; drop it."
    )
  workdir = pathlib.Path(args.workdir)
  workdir.mkdir(parents=True, exist_ok=True)
  counts = args.num_contexts, args.num_of_curves, args.num_of_several, args.num_of_knob
  own = parts(seeds, *counts, is_taught=True, split=args.split)
  plain = parts(seeds, *counts, is_taught=False, split=args.split)

  def scorer_of() -> tuple[Score, Tokenizer]:
    model = seerjax.load_model("nano")
    assert model.tokenizer is not None
    engine = Engine(model, config=EngineConfig(max_model_len=CONTEXT))
    return functools.partial(prompt_scores, engine), model.tokenizer

  columns = (*rich.progress.Progress.get_default_columns(), "{task.fields[note]}")
  with rich.progress.Progress(*columns) as progress:
    rows = {name: asked(name, plain, workdir, progress) for name in args.rivals}
    rows[args.model] = asked(args.model, own, workdir, progress)
  # The contexts of these two parts are in "main" too.
  scored = [part for part in own if part.name not in ("curves", "several")]
  found = known(workdir / "questions.jsonl", scored, scorer_of)
  report(args.model, rows, found, workdir)


if __name__ == "__main__":
  flags.DEFINE_string("model", "nano-sleep", "Model that was trained to sleep.")
  flags.DEFINE_list("rivals", ["nano"], "Baseline models, only for complete answers.")
  flags.DEFINE_enum(
    "split", "test", ["test", "heldout"], "Split of the task; heldout has the people of training."
  )
  flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds of contexts and noise.")
  flags.DEFINE_integer("num_contexts", 100, "Number of contexts per seed.")
  flags.DEFINE_integer(
    "num_of_curves", 20, "Number of these contexts also run at each length and with cuts.", 0
  )
  flags.DEFINE_integer(
    "num_of_several", 5, "Number of these contexts with several rewrites; 0 for none.", 0
  )
  flags.DEFINE_integer("num_of_knob", 10, "Number of contexts per Zipf exponent; 0 for none.", 0)
  flags.DEFINE_string(
    "workdir", "runs/sleep_time", "Output directory for journals, tables and the picture."
  )
  measure.command(main)
