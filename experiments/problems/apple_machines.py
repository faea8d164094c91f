"""Apple machines (AtCoder Heuristic Contest 058): what to buy, and when, so that apples multiply.

There are 10 kinds of machine on 4 levels, and 500 turns. By level i and kind j there are counts B,
at first 1, and powers P, at first 0. There is one apple. In each turn one machine may be bought,
then all of them work, from level 0 upwards:

  buy (i, j)   apples -= C[i, j] * (P[i, j] + 1),  P[i, j] += 1
  level 0      apples += A[j] * B[0, j] * P[0, j]
  level i      B[i-1, j] += B[i, j] * P[i, j]
  points       round(1e5 * log2(apples at the end))

The artefact is a painted timeline: runs [level, kind, end], one after the other. In the turns
before `end` that no earlier run has, that machine is wanted: it is bought whenever it can be paid
for. After the last run nothing is bought.

  [[0, 0, 16], [0, 8, 31], [1, 8, 60]]  turns 0-15: (0, 0), turns 16-30: (0, 8), turns 31-59: (1, 8)

Every order of purchases can be expressed (saving up is wanting what is dear), and a change early in
the plan leaves the times of the rest alone. In runs by count, the obvious other choice, it moves
all that follows: annealed for 100,000 simulations (four inputs), they ended two bits lower.

Inputs are our own, drawn as the contest's statement says. Source: AtCoder Heuristic Contest 058;
Yuksekgonul et al. 2026 (TTT-Discover), https://arxiv.org/abs/2601.16175.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import decimal
import functools
import itertools
import math
from typing import Any, NamedTuple

import numpy as np

from seerjax import compiled
from seerjax.discovery import environment

KINDS, LEVELS, TURNS = 10, 4, 500
MACHINES = LEVELS * KINDS
# Runs that the language can point at, and that its sentences and the annealer keep a plan within.
MAX_RUNS = 32
_FIRST_APPLES = 1
# Beyond this the kernel of integers gives up, far enough from 2**63 for a sum and its rounding.
_SAFE = 2.0**61
_TOO_MANY = -1
_MASK = 2**64 - 1

# Verbs. Their ids are their tokens; STOP ends a sentence.
STOP, PAINT, INSERT, DELETE, MOVE, SLIDE, CHANGE, SWAP, REKIND = range(9)
VERBS = ("stop", "paint", "insert", "delete", "move", "slide", "change", "swap", "rekind")
# What `shape` says where it is no place: below the first number one thing, below the second ...
_SHAPES, _FIRST_CUT, _SECOND_CUT = 16, 6, 11
LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 25, 32, 40, 64, 100)  # Turns.
SHIFTS = (-30, -16, -10, -6, -4, -3, -2, -1, 1, 2, 3, 4, 6, 10, 16, 30)  # Turns.
# Of a search: how much worse, in bits of apples, a step may make the plan now and then.
TEMPERATURES = (
  0.0, 0.0, 0.002, 0.004, 0.008, 0.015, 0.03, 0.05, 0.08, 0.12, 0.18, 0.25, 0.35, 0.5, 0.7, 1.0,
)  # fmt: skip

# Ids: verbs, then one range for each field of an edit. Prompts use the same ids.
_BEGIN = len(VERBS)
_RUN = 16
_SHAPE = _RUN + MAX_RUNS
_MACHINE = _SHAPE + _SHAPES
_AMOUNT = _MACHINE + MACHINES
VOCAB_SIZE = _AMOUNT + len(LENGTHS)
EDIT_TOKENS, EDITS = 5, 4
POLISHED_EDITS = 3  # Of a sentence that ends with a polish.
_TURNS_PER_ID = 16
# From so many purchases on, a run is shown with the next token.
_BOUGHT = (1, 2, 3, 4, 5, 7, 10, 14, 19, 26, 35, 47, 63, 85, 115)

# Of the annealer, in bits of apples, and in simulations (about half a CPU second a slice).
_HOT, _COLD = 1.0, 0.003
_SLICE = 64_000
_START_SLICES, _BURST = 16, 400

PUBLISHED = tuple(
  environment.Published(
    value=total / 150,
    who=who,
    year=year,
    source="arXiv 2601.16175; mean over the contest's 150 inputs, which are not ours",
    is_comparable=False,
  )
  for total, who, year in (
    (848_414_228, "TTT-Discover (gpt-oss-120b, C++)", 2026),
    (848_373_282, "ALE-Agent", 2025),
    (847_674_723, "the contest's best human", 2025),
    (772_429_752, "best of 25,600 (gpt-oss-120b, C++)", 2026),
  )
)

Run = tuple[int, int, int]


class Instance(NamedTuple):
  """One input of the problem.

  Attributes:
    apples: A, by kind.
    costs: C, by level and kind.
  """

  apples: tuple[int, ...]
  costs: tuple[tuple[int, ...], ...]


def instance(index: int) -> Instance:
  """Returns input `index`, drawn as the contest draws its own.

  A is 1 and nine draws of round(10^U(0,2)), sorted; C = round(A 500^level 10^U(0,2)), the first 1.
  """
  draws = np.random.Generator(np.random.PCG64([58, index]))
  others = np.sort(np.rint(10.0 ** draws.uniform(0.0, 2.0, KINDS - 1)))
  apples = np.concatenate([[1.0], others])
  levels = 500.0 ** np.arange(LEVELS)[:, None]
  costs = np.rint(apples[None, :] * levels * 10.0 ** draws.uniform(0.0, 2.0, (LEVELS, KINDS)))
  costs[0, 0] = 1.0
  return Instance(
    apples=tuple(int(a) for a in apples),
    costs=tuple(tuple(int(c) for c in row) for row in costs),
  )


class Turn(NamedTuple):
  """What one turn did.

  Attributes:
    run: whose turn it was; -1 after the last one.
    is_bought: whether its machine was bought.
    apples: at the end of the turn.
  """

  run: int
  is_bought: bool
  apples: int


def trace(problem: Instance, runs: Sequence[Run], turns: int = TURNS) -> list[Turn]:
  """Returns a plan's turns, in integers of any size: the reference of what follows."""
  counts = [[1] * KINDS for _ in range(LEVELS)]
  powers = [[0] * KINDS for _ in range(LEVELS)]
  apples, run, done = _FIRST_APPLES, 0, []
  for turn in range(turns):
    while run < len(runs) and turn >= runs[run][2]:
      run += 1
    is_bought = False
    if run < len(runs):
      level, kind, _ = runs[run]
      price = problem.costs[level][kind] * (powers[level][kind] + 1)
      if apples >= price:
        apples -= price
        powers[level][kind] += 1
        is_bought = True
    for kind in range(KINDS):
      apples += problem.apples[kind] * counts[0][kind] * powers[0][kind]
      for level in range(1, LEVELS):
        counts[level - 1][kind] += counts[level][kind] * powers[level][kind]
    done.append(Turn(run if run < len(runs) else -1, is_bought, apples))
  return done


def points(apples: int) -> int:
  """Returns round(1e5 * log2(apples)), exactly.

  Where the float stands too near to a half to know the side, 60 decimals decide; a half itself
  cannot be, as no power of 2 with an odd exponent over 2e5 is an integer, and 1 has 0 points.
  """
  near = 1e5 * math.log2(apples)
  if abs(near - math.floor(near) - 0.5) > 1e-6:
    return round(near)
  with decimal.localcontext() as context:
    context.prec = 60
    fine = 100_000 * decimal.Decimal(apples).ln() / decimal.Decimal(2).ln()
    return int(fine.to_integral_value(rounding=decimal.ROUND_HALF_UP))


def parse(artefact: Any) -> tuple[Run, ...] | str:
  """Returns a plan's runs, or the reason why it is no plan."""
  if not isinstance(artefact, list | tuple):
    return f"plan: got {type(artefact).__name__}, expected a list of runs [level, kind, end]"
  if len(artefact) > TURNS:
    return f"plan: got {len(artefact)} runs, expected at most {TURNS}, one a turn"
  runs, before = [], 0
  for place, run in enumerate(artefact):
    if not isinstance(run, list | tuple):
      return f"plan[{place}]: got {type(run).__name__}, expected [level, kind, end]"
    if len(run) != 3:
      return f"plan[{place}]: got {len(run)} entries, expected [level, kind, end]"
    level, kind, end = run
    # A bool is an int to Python.
    if not (type(level) is int and type(kind) is int and type(end) is int):
      types = ", ".join(type(entry).__name__ for entry in run)
      return f"plan[{place}]: got [{types}], expected three integers [level, kind, end]"
    if not 0 <= level < LEVELS:
      return f"plan[{place}]: got level {environment.shown(level)}, expected 0 to {LEVELS - 1}"
    if not 0 <= kind < KINDS:
      return f"plan[{place}]: got kind {environment.shown(kind)}, expected 0 to {KINDS - 1}"
    if not before < end <= TURNS:
      return f"plan[{place}]: got end {environment.shown(end)}, expected {before + 1} to {TURNS}"
    runs.append((level, kind, end))
    before = end
  return tuple(runs)


def final_apples(problem: Instance, runs: Sequence[Run]) -> int:
  """Returns the apples at the end, exactly: as `trace`, in microseconds where int64 will do."""
  tables = _tables(problem)
  machines, ends = _arrays(runs)
  apples = _exact(tables.whole_apples, tables.whole_costs, machines, ends, len(runs))
  return trace(problem, runs)[-1].apples if apples == _TOO_MANY else int(apples)


class AppleMachines:
  """One input of the problem; the plain start buys one machine, (0, 0), all along.

  Attributes:
    name: "apple_machines_0007" for input 7.
    is_maximised: true.
    published: means over the contest's 150 inputs, in points per input; ours are other inputs.
    language: of edits.
    problem: the input.
  """

  name: str
  is_maximised: bool
  published: tuple[environment.Published, ...]
  language: environment.EditLanguage | None
  problem: Instance

  def __init__(
    self,
    instance: int = 0,
    *,
    with_polish: bool = False,
    polish_steps: int = 400,
    polish_rounds: int = 0,
  ):
    """Draws the input.

    Args:
      instance: which input, 0 to 9999.
      with_polish: every sentence ends with a polish; see `PlanEdits`.
      polish_steps: simulations of a search, about 7 microseconds each.
      polish_rounds: searches after the first one.

    Raises:
      ValueError: if the number of the input, the steps or the rounds are impossible.
    """
    if not 0 <= instance < 10_000:
      raise ValueError(
        f"AppleMachines.instance: got {instance}, expected 0 to 9999; 0 to 149 are usual."
      )
    if not 1 <= polish_steps <= 1_000_000:
      raise ValueError(
        f"AppleMachines.polish_steps: got {polish_steps}, expected 1 to 1000000; 400 is usual."
      )
    if not 0 <= polish_rounds <= 1_000:
      raise ValueError(
        f"AppleMachines.polish_rounds: got {polish_rounds}, expected 0 to 1000; 4 is usual."
      )
    self.name = f"apple_machines_{instance:04d}"
    self.is_maximised = True
    self.published = PUBLISHED
    self.problem = _instance(instance)
    self._tables = _tables(self.problem)
    self._polish = Polish(polish_steps, polish_rounds)
    self.language = PlanEdits(self.problem, self._polish if with_polish else None)

  def start(self, seed: int) -> environment.Artefact:
    """Returns the plain plan, whatever the seed: the first machine, whenever it can be paid for.

    From the empty plan, half of all sentences drawn at random would change nothing.
    """
    return [[0, 0, TURNS]]

  def verify(self, artefact: environment.Artefact) -> environment.Score:
    """Plays a plan in integers; the value is the contest's points, the reward 1 + log2(apples)."""
    runs = parse(artefact)
    if isinstance(runs, str):
      return environment.invalid(runs)
    apples = final_apples(self.problem, runs)
    return environment.Score(
      is_valid=True, value=float(points(apples)), reward=1.0 + math.log2(apples)
    )

  def describe(self, artefact: environment.Artefact, score: environment.Score) -> str:
    """Returns the rules, the input and the plan as text."""
    rows = "\n".join(
      f"  level {level}: {', '.join(map(str, row))}" for level, row in enumerate(self.problem.costs)
    )
    return f"""Apple machines (AtCoder Heuristic Contest 058), input {self.name}.

There are {KINDS} kinds of machine (j = 0..{KINDS - 1}) on {LEVELS} levels (i = 0..{LEVELS - 1})\
 and {TURNS} turns.
At first there is {_FIRST_APPLES} apple; every machine has count B[i][j] = 1 and power P[i][j] = 0.
In each turn at most one machine (i, j) is bought: it costs C[i][j] * (P[i][j] + 1) apples, which
must be there, and raises P[i][j] by 1. Then, for i = 0, 1, 2, 3 in this order and every j:
  i = 0:  apples += A[j] * B[0][j] * P[0][j]
  i > 0:  B[i-1][j] += B[i][j] * P[i][j]
The score is round(1e5 * log2(apples at the end)); more is better.

A[j]: {", ".join(map(str, self.problem.apples))}
C[i][j], by level:
{rows}

A plan is a list of runs [level, kind, end] with 0 < end of the first < end of the second < ... <=\
 {TURNS}.
In the turns before `end` that no earlier run has, that machine is bought whenever there are apples
enough; otherwise the turn waits. After the last run nothing is bought.

This plan has {score.value:.0f} points:
{artefact}

Define improve(artefact, seconds, seed), which returns a better plan of the same form within that\
 many seconds.
"""

  def picture(self, artefact: environment.Artefact) -> Any:
    """Returns a Figure: what is wanted and bought, by level over turns, above the apples."""
    from matplotlib import figure  # Slow to import, and needed here alone.

    runs = parse(artefact)
    if isinstance(runs, str):
      raise ValueError(f"{self.name}.picture: got no plan ({runs}); verify it first.")
    turns = trace(self.problem, runs)
    picture = figure.Figure(figsize=(10, 6), layout="constrained")
    plan, amount = picture.subplots(2, 1, sharex=True)
    colours = [f"C{kind}" for kind in range(KINDS)]
    before = 0
    for level, kind, end in runs:
      plan.broken_barh(
        [(before, end - before)], (level - 0.4, 0.8), facecolors=colours[kind], alpha=0.3
      )
      before = end
    for turn, (run, is_bought, _) in enumerate(turns):
      if is_bought:
        level, kind, _ = runs[run]
        plan.plot([turn + 0.5] * 2, [level - 0.4, level + 0.4], color=colours[kind], linewidth=1)
    for kind in sorted({kind for _, kind, _ in runs}):
      plan.plot([], [], color=colours[kind], label=f"kind {kind}")
    if runs:
      plan.legend(loc="upper left", fontsize="small")
    plan.set_yticks(range(LEVELS), [f"level {level}" for level in range(LEVELS)])
    plan.set_ylim(-0.6, LEVELS - 0.4)
    plan.set_title(f"{self.name}: {points(turns[-1].apples):,} points (lines are purchases)")
    # Between a purchase and the work of its turn there may be none: a turn ends with one at least.
    amount.semilogy(range(1, TURNS + 1), [float(turn.apples) for turn in turns], color="black")
    amount.set_xlim(0, TURNS)
    amount.set_xlabel("turn")
    amount.set_ylabel("apples")
    return picture

  def classical(self, seed: int) -> Iterator[environment.Artefact]:
    """Yields the best plan so far, after each slice of about half a CPU second.

    Each start anneals the empty plan for two slices, from 1 to 0.003 bits. Then come slices of
    iterated annealing: a few edits at random, a short annealing, and what is not worse is kept.
    Starts are as long as Luby's sequence says (1 1 2 1 1 2 4 ..., 16 slices the unit), which loses
    a logarithm at most to the best length, so that none has to be known beforehand.
    """
    tables = self._tables
    best, best_bits = [], -1.0
    for number in itertools.count():
      state = _seeded(seed, 1, number)
      machines, ends = _arrays(())
      num_runs, middle = 0, math.sqrt(_HOT * _COLD)
      for hot, cold in ((_HOT, middle), (middle, _COLD)):
        num_runs, found, bits, found_machines, found_ends = _anneal(
          tables.apples, tables.costs, machines, ends, num_runs, _SLICE, hot, cold, state, MAX_RUNS
        )
        if bits > best_bits:
          best, best_bits = _artefact(found_machines, found_ends, found), bits
        yield best
      machines, ends, num_runs = found_machines, found_ends, found
      for _ in range(_START_SLICES * _luby(number + 1)):
        num_runs, bits = _iterate(
          tables.apples, tables.costs, machines, ends, num_runs, _SLICE // _BURST, _BURST, state
        )
        if bits > best_bits:
          best, best_bits = _artefact(machines, ends, num_runs), bits
        yield best

  def polished_starts(self, seed: int) -> Iterator[environment.Artefact]:
    """Yields random plans of up to eight runs, each after a polish at a temperature of its own."""
    for number in itertools.count():
      state = _seeded(seed, 2, number)
      machines, ends = _arrays(())
      num_runs = _random_plan(machines, ends, state)
      temperature = TEMPERATURES[_below(state, len(TEMPERATURES))]
      yield _artefact(
        *_polished(
          self._tables, machines, ends, num_runs, temperature, self._polish, state, MAX_RUNS
        )
      )


class Polish(NamedTuple):
  """The tool that ends a sentence: searches around the plan, each for some steps at a temperature.

  The first takes the best plan that it meets. Each of the others begins with up to four random
  edits, as the annealer's, at a random temperature, and counts only if it ends no worse.

  Attributes:
    steps: simulations of each.
    rounds: how many there are after the first.
  """

  steps: int
  rounds: int = 0


class PlanEdits:
  """Sentences of up to four edits, each of five tokens: verb, run, shape, machine, amount.

  With a polish, a sentence is an amount, which is the temperature of the first search, and up to
  three edits, after which the plan is polished.

    paint    the machine, for `amount` turns, over what is there, from `shape` 16ths into the run
    insert   the same, but what comes after happens later
    delete   the run; by shape, the one before or after gets its turns, or the rest comes earlier
    move     the run's end by -30 to 30 turns, as far as its neighbours allow
    slide    the ends of the run and of up to 15 (`shape`) after it
    change   the run's level, kind, or both (by shape) to those of the machine
    swap     the run and the next one
    rekind   all runs of the run's kind, or only those from it on (by shape), get another kind

  A verb ignores the fields that it has no use for. Runs are counted from 0, and modulo their
  number, so that every edit can be applied; `paint` and `insert` count the idle end as a run. What
  a sentence may do is refused only where it changes nothing: otherwise the policy could keep what
  it was given, and be paid for it.
  """

  def __init__(self, problem: Instance, polish: Polish | None = None):
    """Makes the language of an input; `polish` ends every sentence, if there is one."""
    self._tables = _tables(problem)
    self._polish = polish
    amount = (_AMOUNT, VOCAB_SIZE)
    edit = (
      (STOP, len(VERBS)), (_RUN, _SHAPE), (_SHAPE, _MACHINE), (_MACHINE, _AMOUNT), amount
    )  # fmt: skip
    self._head = (amount,) if polish else ()
    self._allowed = self._head + edit * (POLISHED_EDITS if polish else EDITS)

  @property
  def vocab_size(self) -> int:
    """120: 16 verbs and marks, 32 runs, 16 shapes, 40 machines, 16 amounts."""
    return VOCAB_SIZE

  @property
  def allowed(self) -> tuple[tuple[int, int], ...]:
    """Ranges of ids by place: 20 of them, 16 with a polish."""
    return self._allowed

  @property
  def stop_token(self) -> int | None:
    """0, allowed in the place of a verb."""
    return STOP

  def prompt(self, artefact: environment.Artefact) -> tuple[int, ...]:
    """Returns three tokens a run (machine, end, how many were bought) and a mark; at most 97 ids.

    A token of a run's end stands for 16 turns, with the ids of runs; one of purchases for a
    doubling or less, with the ids of amounts. Runs after the 32nd are not shown.
    """
    runs = _plan(artefact)
    machines, ends = _arrays(runs)
    bought = np.zeros(len(runs) + 1, np.int64)
    _play(self._tables.apples, self._tables.costs, machines, ends, len(runs), bought)
    shown = min(len(runs), MAX_RUNS)
    tokens = np.empty((shown, 3), np.int64)
    tokens[:, 0] = machines[:shown] + _MACHINE
    tokens[:, 1] = (ends[:shown] - 1) // _TURNS_PER_ID + _RUN
    tokens[:, 2] = np.searchsorted(_BOUGHT, bought[:shown], side="right") + _AMOUNT
    return (_BEGIN, *tokens.ravel().tolist())

  def apply(
    self, artefact: environment.Artefact, tokens: Sequence[int], seed: int
  ) -> environment.Artefact:
    """Returns the plan after a sentence's edits, one after the other.

    Should it have more than 32 runs (and more than before), the shortest ones are given to the run
    before them.

    Raises:
      ValueError: if the sentence is none of the language's, or the plan is as it was.
    """
    runs = _plan(artefact)
    num_edits = self._num_edits(tokens)
    first = len(self._head)
    sentence = np.array(tokens[first : first + num_edits * EDIT_TOKENS], np.int64)
    machines, ends = _arrays(runs)
    num_runs = _apply(machines, ends, len(runs), sentence, num_edits)
    if self._polish is not None:
      machines, ends, num_runs = _polished(
        self._tables, machines, ends, num_runs, TEMPERATURES[tokens[0] - _AMOUNT], self._polish,
        _seeded(seed, 3), max(len(runs), MAX_RUNS),
      )  # fmt: skip
    made = _artefact(machines, ends, num_runs)
    if made == [list(run) for run in runs]:
      raise ValueError(
        "apple_machines.apply: got a sentence that leaves the plan as it was; expected an edit"
        " that changes it."
      )
    return made

  def _num_edits(self, tokens: Sequence[int]) -> int:
    """Returns how many edits a sentence has.

    Raises:
      ValueError: if an id stands where it is not allowed, or the sentence ends within an edit.
    """
    for place, token in enumerate(tokens):
      if place == len(self._allowed):
        raise ValueError(
          f"apple_machines.apply: got {len(tokens)} tokens, expected at most {len(self._allowed)}."
        )
      least, end = self._allowed[place]
      if not least <= token < end:
        raise ValueError(
          f"apple_machines.apply: got id {token} in place {place}, expected {least} to {end - 1}."
        )
      if token == STOP:
        if place + 1 != len(tokens):
          raise ValueError(
            f"apple_machines.apply: got tokens after the stop token in place {place}, expected"
            " none; cut the sentence there."
          )
        return (place - len(self._head)) // EDIT_TOKENS
    if len(tokens) != len(self._allowed):
      raise ValueError(
        f"apple_machines.apply: got {len(tokens)} tokens without a stop token, expected"
        f" {len(self._allowed)}; let it end with {STOP}."
      )
    return (len(tokens) - len(self._head)) // EDIT_TOKENS


_instance = instance  # The class has an argument of that name.


class _Tables(NamedTuple):
  """An input as arrays: f64 for the search, i64 for the verdict. Costs are f64[level, kind]."""

  apples: np.ndarray
  costs: np.ndarray
  whole_apples: np.ndarray
  whole_costs: np.ndarray


@functools.lru_cache(maxsize=256)
def _tables(problem: Instance) -> _Tables:
  """Returns an input's arrays, which are not written to."""
  apples, costs = np.array(problem.apples, np.int64), np.array(problem.costs, np.int64)
  return _Tables(apples.astype(np.float64), costs.astype(np.float64), apples, costs)


def _plan(artefact: environment.Artefact) -> tuple[Run, ...]:
  """Returns a plan's runs; raises ValueError if it is none."""
  runs = parse(artefact)
  if isinstance(runs, str):
    raise ValueError(f"apple_machines: got no plan ({runs}); verify it first.")
  return runs


def _arrays(runs: Sequence[Run]) -> tuple[np.ndarray, np.ndarray]:
  """Returns machines (level * 10 + kind) and ends, i64, with room for whatever edits add."""
  machines, ends = np.zeros(TURNS + 4, np.int64), np.zeros(TURNS + 4, np.int64)
  if runs:
    table = np.array(runs, np.int64)
    machines[: len(runs)] = table[:, 0] * KINDS + table[:, 1]
    ends[: len(runs)] = table[:, 2]
  return machines, ends


def _artefact(machines: np.ndarray, ends: np.ndarray, num_runs: int) -> list[list[int]]:
  return [
    [machine // KINDS, machine % KINDS, end]
    for machine, end in zip(machines[:num_runs].tolist(), ends[:num_runs].tolist())
  ]


def _polished(
  tables: _Tables,
  machines: np.ndarray,
  ends: np.ndarray,
  num_runs: int,
  temperature: float,
  polish: Polish,
  state: np.ndarray,
  max_runs: int,
) -> tuple[np.ndarray, np.ndarray, int]:
  """Returns machines, ends and number of runs of a plan after a polish; the given is used up."""
  _, found, _, machines, ends = _anneal(
    tables.apples, tables.costs, machines, ends, num_runs, polish.steps, temperature, temperature,
    state, max_runs,
  )  # fmt: skip
  if polish.rounds:
    found, _ = _iterate(
      tables.apples, tables.costs, machines, ends, found, polish.rounds, polish.steps, state
    )
  return machines, ends, found


def _luby(number: int) -> int:
  """Returns number 1, 2, 3, ... of Luby's sequence 1 1 2 1 1 2 4 1 1 2 1 1 2 4 8 ..."""
  bits = number.bit_length()
  return 1 << bits - 1 if number == (1 << bits) - 1 else _luby(number - (1 << bits - 1) + 1)


def _seeded(*numbers: int) -> np.ndarray:
  """Returns the state of a kernel's generator, u64[1], by Steele's SplitMix64 of the numbers."""
  state = 0
  for number in numbers:
    state = ((state ^ number) + 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ state >> 27) * 0x94D049BB133111EB) & _MASK
    state ^= state >> 31
  return np.array([state | 1], np.uint64)


@compiled.function
def _below(state: np.ndarray, bound: int) -> int:
  """Returns an integer in [0, bound), bound far below 2**32, by Vigna's xorshift64*."""
  x = state[0]
  x ^= x >> np.uint64(12)
  x ^= x << np.uint64(25)
  x ^= x >> np.uint64(27)
  state[0] = x
  high = (x * np.uint64(2685821657736338717)) >> np.uint64(33)
  return int(np.int64((high * np.uint64(bound)) >> np.uint64(31)))


@compiled.function
def _uniform(state: np.ndarray) -> float:
  """Returns a number in (0, 1)."""
  return (_below(state, 1 << 30) + 0.5) / (1 << 30)


@compiled.function
def _play(
  apples_of: np.ndarray,
  costs: np.ndarray,
  machines: np.ndarray,
  ends: np.ndarray,
  num_runs: int,
  bought: np.ndarray,
) -> float:
  """Returns log2(apples) of a plan, in float64; with room in `bought`, purchases by run are added.

  Only kinds that own a machine are worked. Beyond 2**53 apples are rounded: good enough to search
  by, and `_exact` says what a plan is worth.
  """
  powers, counts = np.zeros((KINDS, LEVELS)), np.ones((KINDS, LEVELS))
  active, is_active, num_active = np.zeros(KINDS, np.int64), np.zeros(KINDS, np.int64), 0
  apples, run = 1.0, 0
  for turn in range(TURNS):
    while run < num_runs and turn >= ends[run]:
      run += 1
    if run < num_runs:
      level, kind = machines[run] // KINDS, machines[run] % KINDS
      price = costs[level, kind] * (powers[kind, level] + 1.0)
      if apples >= price:
        apples -= price
        powers[kind, level] += 1.0
        if len(bought) > 0:
          bought[run] += 1
        if is_active[kind] == 0:
          is_active[kind] = 1
          active[num_active] = kind
          num_active += 1
    for place in range(num_active):
      kind = active[place]
      apples += apples_of[kind] * counts[kind, 0] * powers[kind, 0]
      counts[kind, 0] += counts[kind, 1] * powers[kind, 1]
      counts[kind, 1] += counts[kind, 2] * powers[kind, 2]
      counts[kind, 2] += counts[kind, 3] * powers[kind, 3]
  return math.log2(apples)


@compiled.function
def _exact(
  apples_of: np.ndarray, costs: np.ndarray, machines: np.ndarray, ends: np.ndarray, num_runs: int
) -> int:
  """Returns the apples of a plan in int64, exactly, or _TOO_MANY if a number might outgrow it.

  Every product is first taken in float64, and then in integers only if that is below 2**61: the
  float is right to 2**-51 of it (three roundings at most), so the product is below 2**62. Every sum
  is of two such numbers, below 2**63, and is checked to be below 2**61 before it is used again.
  Prices are below 2**50.
  """
  powers, counts = (
    np.zeros((KINDS, LEVELS), np.int64),
    np.ones((KINDS, LEVELS), np.int64),
  )
  apples, run = np.int64(1), 0
  for turn in range(TURNS):
    while run < num_runs and turn >= ends[run]:
      run += 1
    if run < num_runs:
      level, kind = machines[run] // KINDS, machines[run] % KINDS
      price = costs[level, kind] * (powers[kind, level] + 1)
      if apples >= price:
        apples -= price
        powers[kind, level] += 1
    for kind in range(KINDS):
      if powers[kind, 0] > 0:
        factor = apples_of[kind] * powers[kind, 0]
        if float(factor) * float(counts[kind, 0]) >= _SAFE:
          return _TOO_MANY
        apples += factor * counts[kind, 0]
        if float(apples) >= _SAFE:
          return _TOO_MANY
      for level in range(1, LEVELS):
        if powers[kind, level] > 0:
          if float(counts[kind, level]) * float(powers[kind, level]) >= _SAFE:
            return _TOO_MANY
          counts[kind, level - 1] += counts[kind, level] * powers[kind, level]
          if float(counts[kind, level - 1]) >= _SAFE:
            return _TOO_MANY
  return int(apples)


@compiled.function
def _clean(machines: np.ndarray, ends: np.ndarray, num_runs: int) -> int:
  """Clips ends to the turns, drops runs without turns, joins neighbours alike; returns how many."""
  kept, before = 0, 0
  for run in range(num_runs):
    end = min(ends[run], TURNS)
    if end <= before:
      continue
    if kept > 0 and machines[kept - 1] == machines[run]:
      ends[kept - 1] = end
    else:
      machines[kept], ends[kept] = machines[run], end
      kept += 1
    before = end
  return kept


@compiled.function
def _write(
  machines: np.ndarray,
  ends: np.ndarray,
  num_runs: int,
  start: int,
  length: int,
  machine: int,
  is_later: bool,
) -> int:
  """Writes a run at turn `start`, over what is there or (`is_later`) before it; returns how many.

  The plan is at least `start` turns long.
  """
  old_machines, old_ends = machines[:num_runs].copy(), ends[:num_runs].copy()
  made, before, stop = 0, 0, min(start + length, TURNS)
  for run in range(num_runs):
    if before < start:
      machines[made], ends[made] = old_machines[run], min(old_ends[run], start)
      made += 1
    before = old_ends[run]
  machines[made], ends[made] = machine, stop
  made += 1
  shift = stop - start if is_later else 0
  passed = start if is_later else stop
  for run in range(num_runs):
    if old_ends[run] > passed:
      machines[made], ends[made] = old_machines[run], old_ends[run] + shift
      made += 1
  return _clean(machines, ends, made)


@compiled.function
def _edit(
  machines: np.ndarray,
  ends: np.ndarray,
  num_runs: int,
  verb: int,
  run: int,
  shape: int,
  machine: int,
  amount: int,
) -> int:
  """Changes a plan in place by one edit; returns its number of runs.

  Args:
    machines, ends: of the plan, with room for two more runs.
    num_runs: of the plan.
    verb, run, shape, machine: as the language says; any run from 0 on.
    amount: turns, of either sign for move and slide.
  """
  if verb in (PAINT, INSERT):
    has_end = num_runs == 0 or ends[num_runs - 1] < TURNS
    run %= num_runs + 1 if has_end else num_runs
    start = ends[run - 1] if run > 0 else 0
    if run < num_runs:
      start += (ends[run] - start) * shape // _SHAPES
    return _write(machines, ends, num_runs, start, amount, machine, verb == INSERT)
  if num_runs == 0:
    return 0
  run %= num_runs
  if verb == DELETE:
    start, end = ends[run - 1] if run > 0 else 0, ends[run]
    if shape < _FIRST_CUT and run > 0:
      ends[run - 1] = end
    elif shape >= _SECOND_CUT:
      for later in range(run + 1, num_runs):
        ends[later] -= end - start
    # Otherwise the next run begins earlier, by itself.
    for later in range(run, num_runs - 1):
      machines[later], ends[later] = machines[later + 1], ends[later + 1]
    return _clean(machines, ends, num_runs - 1)
  if verb == MOVE:
    least = ends[run - 1] if run > 0 else 0
    most = ends[run + 1] if run + 1 < num_runs else TURNS
    ends[run] = min(max(ends[run] + amount, least), most)
  elif verb == SLIDE:
    for later in range(run, min(run + 1 + shape, num_runs)):
      ends[later] = min(max(ends[later] + amount, 0), TURNS)
    # Those before and after give way.
    for later in range(1, num_runs):
      if later <= run:
        ends[later - 1] = min(ends[later - 1], ends[run])
      else:
        ends[later] = max(ends[later], ends[later - 1])
  elif verb == CHANGE:
    level, kind = machines[run] // KINDS, machines[run] % KINDS
    if shape < _FIRST_CUT or shape >= _SECOND_CUT:
      level = machine // KINDS
    if shape >= _FIRST_CUT:
      kind = machine % KINDS
    machines[run] = level * KINDS + kind
  elif verb == SWAP and run + 1 < num_runs:
    start = ends[run - 1] if run > 0 else 0
    machines[run], machines[run + 1] = machines[run + 1], machines[run]
    ends[run] = start + ends[run + 1] - ends[run]
  elif verb == REKIND:
    kind = machines[run] % KINDS
    for other in range(run if 2 * shape >= _SHAPES else 0, num_runs):
      if machines[other] % KINDS == kind:
        machines[other] += machine % KINDS - kind
  return _clean(machines, ends, num_runs)


@compiled.function
def _propose(machines: np.ndarray, ends: np.ndarray, num_runs: int, state: np.ndarray) -> int:
  """Changes a plan in place by one random edit, as the annealer draws them; returns its runs."""
  draw = _below(state, 32)
  run, shape, machine = _below(state, max(num_runs, 1)), _below(state, 16), _below(state, MACHINES)
  amount = int(math.exp(3.0 * _uniform(state)))
  if _below(state, 2) == 0:
    amount = -amount
  if num_runs == 0 or draw < 6:
    verb = INSERT if draw == 0 else PAINT
    run, amount = _below(state, num_runs + 1), 1 + int(math.exp(4.0 * _uniform(state)))
    # Half of them within the kinds that are there, half of them at the beginning of a run.
    if num_runs > 0 and _below(state, 2) == 0:
      machine = machine // KINDS * KINDS + machines[max(run - 1, 0)] % KINDS
    if _below(state, 2) == 0:
      shape = 0
  elif draw < 9:
    verb = DELETE
  elif draw < 12:
    verb = CHANGE
  elif draw < 15:
    verb = SWAP
  elif draw == 15:
    verb = REKIND
  elif draw < 26:
    verb = MOVE
  else:
    verb, shape = SLIDE, shape // 2
  return _edit(machines, ends, num_runs, verb, run, shape, machine, amount)


@compiled.function
def _anneal(
  apples_of: np.ndarray,
  costs: np.ndarray,
  machines: np.ndarray,
  ends: np.ndarray,
  num_runs: int,
  steps: int,
  hot: float,
  cold: float,
  state: np.ndarray,
  max_runs: int,
) -> tuple[int, int, float, np.ndarray, np.ndarray]:
  """Anneals a plan in place, from temperature `hot` to `cold` bits; 0 climbs.

  Returns:
    The plan's number of runs; and of the best plan met, the start included, its number of runs, its
    log2(apples), machines and ends.
  """
  nothing = np.zeros(0, np.int64)
  bits = _play(apples_of, costs, machines, ends, num_runs, nothing)
  best, best_runs = bits, num_runs
  best_machines, best_ends = machines.copy(), ends.copy()
  new_machines, new_ends = machines.copy(), ends.copy()
  ratio = math.log(cold / hot) if hot > 0.0 else 0.0
  for step in range(steps):
    new_machines[:num_runs], new_ends[:num_runs] = machines[:num_runs], ends[:num_runs]
    new_runs = _propose(new_machines, new_ends, num_runs, state)
    # Now and then several at once, to cross what no single one does.
    while new_runs <= max_runs and _below(state, 4) == 0:
      new_runs = _propose(new_machines, new_ends, new_runs, state)
    if new_runs > max_runs and new_runs > num_runs:
      continue
    new_bits = _play(apples_of, costs, new_machines, new_ends, new_runs, nothing)
    temperature = hot * math.exp(ratio * step / steps)
    # -log(u) is how many temperatures a step may fall.
    if new_bits >= bits or (
      temperature > 0.0 and bits - new_bits < -math.log(_uniform(state)) * temperature
    ):
      num_runs, bits = new_runs, new_bits
      machines[:num_runs], ends[:num_runs] = new_machines[:num_runs], new_ends[:num_runs]
      if bits > best:
        best, best_runs = bits, num_runs
        best_machines[:num_runs], best_ends[:num_runs] = machines[:num_runs], ends[:num_runs]
  return num_runs, best_runs, best, best_machines, best_ends


@compiled.function
def _iterate(
  apples_of: np.ndarray,
  costs: np.ndarray,
  machines: np.ndarray,
  ends: np.ndarray,
  num_runs: int,
  rounds: int,
  steps: int,
  state: np.ndarray,
) -> tuple[int, float]:
  """Improves a plan in place: edits at random, a short annealing, keep what is not worse.

  Returns:
    The plan's number of runs, and its log2(apples).
  """
  bits = _play(apples_of, costs, machines, ends, num_runs, np.zeros(0, np.int64))
  new_machines, new_ends = machines.copy(), ends.copy()
  for _ in range(rounds):
    new_machines[:num_runs], new_ends[:num_runs] = machines[:num_runs], ends[:num_runs]
    new_runs = num_runs
    for _ in range(_below(state, EDITS + 1)):
      verb, amount = PAINT + _below(state, len(VERBS) - PAINT), _below(state, len(LENGTHS))
      turns = SHIFTS[amount] if verb in (MOVE, SLIDE) else LENGTHS[amount]
      new_runs = _edit(
        new_machines, new_ends, new_runs, verb, _below(state, MAX_RUNS), _below(state, _SHAPES),
        _below(state, MACHINES), turns,
      )  # fmt: skip
    if new_runs > MAX_RUNS:
      continue
    temperature = TEMPERATURES[_below(state, len(TEMPERATURES))]
    _, new_runs, new_bits, found_machines, found_ends = _anneal(
      apples_of, costs, new_machines, new_ends, new_runs, steps, temperature, temperature, state,
      MAX_RUNS,
    )  # fmt: skip
    if new_bits >= bits:
      num_runs, bits = new_runs, new_bits
      machines[:num_runs], ends[:num_runs] = found_machines[:num_runs], found_ends[:num_runs]
  return num_runs, bits


@compiled.function
def _random_plan(machines: np.ndarray, ends: np.ndarray, state: np.ndarray) -> int:
  """Writes a plan of up to eight runs of random machines and lengths; returns how many."""
  num_runs = 1 + _below(state, 8)
  end = 0
  for run in range(num_runs):
    end += 1 + _below(state, 2 * TURNS // num_runs)
    machines[run], ends[run] = _below(state, MACHINES), end
  return _clean(machines, ends, num_runs)


@compiled.function
def _apply(
  machines: np.ndarray, ends: np.ndarray, num_runs: int, sentence: np.ndarray, num_edits: int
) -> int:
  """Changes a plan in place by the edits of a sentence, i64[num_edits * 5]; returns its runs."""
  room = max(num_runs, MAX_RUNS)
  for number in range(num_edits):
    verb, run, shape, machine, amount = sentence[number * EDIT_TOKENS : (number + 1) * EDIT_TOKENS]
    amount -= _AMOUNT
    turns = SHIFTS[amount] if verb in (MOVE, SLIDE) else LENGTHS[amount]
    num_runs = _edit(
      machines, ends, num_runs, verb, run - _RUN, shape - _SHAPE, machine - _MACHINE, turns
    )
    while num_runs > room:
      shortest, least = 1, TURNS + 1
      for other in range(1, num_runs):
        if ends[other] - ends[other - 1] < least:
          shortest, least = other, ends[other] - ends[other - 1]
      num_runs = _edit(machines, ends, num_runs, DELETE, shortest, 0, 0, 0)
  return num_runs
