r"""Runs the protocol of sleep-time compute with a model or any OpenAI-style endpoint.

Claim: none; it measures the requested arms (seerjax/sleep/protocol.py).
Command: bash launch/local.sh experiments.sleep.protocol --num_contexts=20
  another model: --model=PATH_OR_HUB_ID
  an endpoint:   --endpoint=http://127.0.0.1:8000 --model=NAME [--key_variable=MY_KEY]
  own problems:  --task=stateful_gsm_symbolic_p2.jsonl, a folder of templates, or a git repository
Hardware: 2 CPU cores for nano; a minute for 20 contexts.

Each call is a line of --journal, so a killed run continues and pays for no call twice. Standard
errors of the accuracy are over contexts, because questions of one context are not independent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
import contextlib
import math
import pathlib
from typing import NamedTuple

from absl import flags
import numpy as np

from experiments import measure
import seerjax
from seerjax.run import placement
from seerjax.serve import identity
from seerjax.sleep import prompts as prompts_lib, protocol, thinkers
from seerjax.sleep.call_journal import CallJournal
from seerjax.sleep.endpoint import Endpoint, EndpointConfig
from seerjax.sleep.engine_thinker import EngineThinker
from seerjax.sleep.prompts import Prompts
from seerjax.sleep.protocol import ProtocolConfig, Row
from seerjax.sleep.thinkers import Ask
from seerjax.tasks import stateful_files, swe_features
from seerjax.tasks.stateful import StatefulConfig, StatefulTask, StatefulWordProblems

STORIES = "stateful_word_problems"
TAUGHT = ("nano", "nano-sleep")  # Models that get the prompts on which the stories were taught.


class Line(NamedTuple):
  """Results of an arm at one verbosity, number of rewrites and limit.

  Attributes:
    arm, verbosity, num_parallel, max_tokens: as in its rows.
    num_rows: questions with an answer.
    num_marked: questions without an answer.
    accuracy: mean reward.
    error: standard error of the accuracy over contexts, NaN for one context.
    num_tokens: mean tokens of an answer.
    num_sleep_tokens: mean sleep tokens per question.
    cost: mean price of a question, in sleep tokens.
  """

  arm: str
  verbosity: int
  num_parallel: int
  max_tokens: int
  num_rows: int
  num_marked: int
  accuracy: float
  error: float
  num_tokens: float
  num_sleep_tokens: float
  cost: float


def lines_of(rows: Iterable[Row], latency_price: float) -> list[Line]:
  """Returns a line for each arm, verbosity, number of rewrites and limit, in that order.

  Args:
    rows: rows of any number of contexts.
    latency_price: price of a token for which a user waits.
  """
  groups: dict[tuple[int, int, int, int], list[Row]] = {}
  for row in rows:
    place = protocol.ARMS.index(row.arm)
    groups.setdefault((place, row.verbosity, row.num_parallel, -row.max_tokens), []).append(row)
  return [_line(found, latency_price) for _, found in sorted(groups.items())]


def _line(rows: Sequence[Row], latency_price: float) -> Line:
  good = [row for row in rows if not row.error]
  by_context: dict[str, list[float]] = {}
  for row in good:
    by_context.setdefault(row.context_id, []).append(row.reward)
  means = [np.mean(rewards) for rewards in by_context.values()]
  several = len(means) > 1
  first = rows[0]
  return Line(
    arm=first.arm,
    verbosity=first.verbosity,
    num_parallel=first.num_parallel,
    max_tokens=first.max_tokens,
    num_rows=len(good),
    num_marked=len(rows) - len(good),
    accuracy=_mean(row.reward for row in good),
    error=float(np.std(means, ddof=1) / math.sqrt(len(means))) if several else math.nan,
    num_tokens=_mean(row.num_tokens for row in good),
    num_sleep_tokens=_mean(row.num_sleep_tokens / row.num_sharing for row in good),
    cost=_mean(row.cost(latency_price) for row in good),
  )


def _mean(values: Iterable[float]) -> float:
  found = list(values)
  return math.fsum(found) / len(found) if found else math.nan


def table(lines: Sequence[Line], latency_price: float) -> str:
  """Returns the lines as a Markdown table."""
  names = (
    "arm", "verbosity", "rewrites", "limit", "questions", "marked", "right %", "test tokens",
    "sleep tokens", f"cost at t = {latency_price:g}",
  )  # fmt: skip
  return measure.table(names, (
    (one.arm, one.verbosity, one.num_parallel or "", one.max_tokens, one.num_rows,
     one.num_marked or "", f"{100 * one.accuracy:.1f} ± {100 * one.error:.1f}",
     f"{one.num_tokens:.1f}", f"{one.num_sleep_tokens:.1f}", f"{one.cost:.0f}")
    for one in lines
  ))  # fmt: skip


def load_task(name: str, config: StatefulConfig) -> StatefulTask:
  """Returns the task: our stories, problems of a file or folder, or commits of a repository.

  Args:
    name: `STORIES`, or a path.
    config: configuration of the stories.

  Raises:
    FileNotFoundError: if the path does not exist.
    ValueError: as raised by the task that reads it.
  """
  if name == STORIES:
    return StatefulWordProblems(config=config)
  path = pathlib.Path(name)
  if path.is_dir() and ((path / ".git").exists() or (path / "HEAD").exists()):
    return swe_features.load(path)
  return stateful_files.load(path)


def prompts_for(task: StatefulTask, *, follows_orders: bool) -> Prompts:
  """Returns the prompts for a model; models trained on our stories have their own."""
  if isinstance(task, StatefulWordProblems):
    if follows_orders:
      return prompts_lib.ordered(task, rule=task.by_rule)
    return prompts_lib.taught(task)
  return prompts_lib.ordered(task)


def thinker_of(args: flags.FlagValues) -> tuple[Ask, dict[str, str]]:
  """Returns the function that answers calls, and its description for the journal.

  Raises:
    ValueError: for an invalid endpoint, or a model that cannot be loaded.
  """
  if args.endpoint:
    config = EndpointConfig(url=args.endpoint, model=args.model, key_variable=args.key_variable)
    ask = thinkers.asking(Endpoint(config), num_threads=args.num_threads)
    return ask, {"endpoint": config.url, "model": config.model}
  usual = seerjax.NumericsConfig()
  placed = placement.of_flags(args.model, usual)
  print(placed.describe())
  model = seerjax.load_model(args.model, placed.numerics)
  config = seerjax.EngineConfig(
    max_model_len=args.max_model_len or seerjax.EngineConfig().max_model_len,
    max_num_seqs=args.max_num_seqs,
  )
  engine = seerjax.Engine(model, config=config, mesh=placed.mesh)
  print(engine.memory_plan())
  key = seerjax.numerics.key(0)
  return EngineThinker(engine).ask, {"fingerprint": identity.fingerprint(model, key)}


def main(args: flags.FlagValues) -> None:
  if args.num_contexts < 1:
    raise ValueError(
      f"--num_contexts: got {args.num_contexts}, expected at least 1; 20 takes nano a minute."
    )
  steps = tuple(map(int, args.steps)) if args.steps else None
  stories = StatefulConfig(
    predictability=args.predictability,
    num_questions=args.num_questions,
    steps=(steps[0], steps[-1]) if steps else None,
  )
  config = ProtocolConfig(
    arms=tuple(args.arms),
    verbosities=tuple(map(int, args.verbosities)),
    parallel=tuple(map(int, args.parallel)),
    cuts=tuple(map(int, args.cuts)),
    wake_tokens=args.wake_tokens,
    sleep_tokens=args.sleep_tokens,
    seed=args.seed,
  )
  task = load_task(args.task, stories)
  follows_orders = bool(args.endpoint) or args.model not in TAUGHT
  prompts = prompts_for(task, follows_orders=follows_orders)
  places = range(min(args.num_contexts, len(task.contexts(args.split))))
  items = protocol.items(task, args.split, places)
  ask, who = thinker_of(args)
  rows: list[Row] = []
  with contextlib.ExitStack() as stack:
    if args.journal:
      journal = stack.enter_context(CallJournal(args.journal, settings=who))
      ask = journal.asking(ask)
    found = protocol.run(items, prompts=prompts, verdict=task.verdict, ask=ask, config=config)
    for number, of_context in enumerate(found, start=1):
      rows += of_context
      print(f"\r{number} of {len(items)} contexts", end="", flush=True)
  print(f"\n\n{table(lines_of(rows, args.latency_price), args.latency_price)}")
  marked = sorted({row.error for row in rows if row.error})
  for error in marked[:5]:
    print(f"marked: {error}")


def define_flags() -> None:
  """Defines the flags of the command."""
  flags.DEFINE_string("endpoint", "", "URL of an OpenAI-style endpoint; '' uses the engine.")
  flags.DEFINE_string(
    "model", "nano", "Shipped model, directory, GGUF file, Hub id, or the endpoint's model."
  )
  flags.DEFINE_string("key_variable", "", "Environment variable that holds the endpoint's key.")
  flags.DEFINE_integer("num_threads", 8, "Number of concurrent calls to an endpoint.")
  flags.DEFINE_string(
    "task", STORIES, "Task: built-in stories, or a path; see the top of this file."
  )
  flags.DEFINE_string("split", "test", "Split of the task.")
  flags.DEFINE_integer("num_contexts", 20, "Number of contexts, from the start of the split.")
  flags.DEFINE_integer("num_questions", 10, "Number of questions per story.")
  flags.DEFINE_float("predictability", 0.0, "Zipf exponent over a story's questions, 0 to 3.")
  flags.DEFINE_list("steps", [], "Minimum and maximum number of events per story, such as 6,6.")
  flags.DEFINE_list("arms", list(protocol.ARMS), "Arms to run, from seerjax.sleep.protocol.ARMS.")
  flags.DEFINE_list("verbosities", [], "Indices of the prompts' verbosities; all by default.")
  flags.DEFINE_list("parallel", ["1", "2", "5", "10"], "Numbers of parallel rewrites.")
  flags.DEFINE_list("cuts", [], "Hard token limits of responses, in addition to wake_tokens.")
  flags.DEFINE_integer("wake_tokens", 128, "Maximum tokens per response.")
  flags.DEFINE_integer("sleep_tokens", 256, "Maximum tokens per call of a rewrite.")
  flags.DEFINE_float("latency_price", 10.0, "Price t of a token while a user waits.")
  flags.DEFINE_integer("seed", 0, "Seed of the run.")
  flags.DEFINE_integer(
    "max_model_len", 0, "Maximum tokens of a prompt plus its response; 0 means 1,024."
  )
  flags.DEFINE_integer(
    "max_num_seqs",
    0,
    "Maximum number of concurrent sequences; 0 derives it from model and memory.",
  )
  placement.define_flags()
  flags.DEFINE_string("journal", "", "Journal file of the calls; '' keeps none.")


if __name__ == "__main__":
  define_flags()
  measure.command(main)
