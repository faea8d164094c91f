"""The language: sentences of edits, and the policy's view of a plan."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from experiments.problems.apple_machines import anneal, changes, plans
from experiments.problems.apple_machines.anneal import Polish
from experiments.problems.apple_machines.changes import (
  DELETE,
  EDIT_TOKENS,
  EDITS,
  LENGTHS,
  MOVE,
  SHAPES,
  SHIFTS,
  SLIDE,
  STOP,
  VERBS,
)
from experiments.problems.apple_machines.plans import MAX_RUNS
from experiments.problems.apple_machines.rules import MACHINES, TURNS, Instance
from seerjax import compiled
from seerjax.discovery import environment

# Ids: verbs, then one range per field of an edit. Prompts use the same ids.
_BEGIN = len(VERBS)
_RUN = 16
_SHAPE = _RUN + MAX_RUNS
_MACHINE = _SHAPE + SHAPES
_AMOUNT = _MACHINE + MACHINES
VOCAB_SIZE = _AMOUNT + len(LENGTHS)

POLISHED_EDITS = 3  # Edits of a sentence that ends with a polish.
_TURNS_PER_ID = 16
# Numbers of purchases at which a run is shown with the next token.
_BOUGHT = (1, 2, 3, 4, 5, 7, 10, 14, 19, 26, 35, 47, 63, 85, 115)


class PlanEdits:
  """Sentences of up to four edits, each of five tokens: verb, run, shape, machine, amount.

  With a polish, a sentence is an amount (the temperature of the first search) and up to three
  edits, after which the plan is polished.

    paint    overwrites `amount` turns with the machine, from `shape` 16ths into the run
    insert   the same, delaying what comes after
    delete   the run; by shape, its turns go to the run before or after, or the rest moves earlier
    move     the run's end by -30 to 30 turns, as far as its neighbours allow
    slide    the ends of the run and of up to 15 (`shape`) runs after it
    change   the run's level, kind, or both (by shape) to those of the machine
    swap     the run and the next one
    rekind   changes the kind of all runs of the run's kind, or only of those from it on (by shape)

  A verb ignores fields that it does not need. Runs are counted from 0, modulo their number, so that
  every edit is applicable; `paint` and `insert` count the idle end as a run. A sentence is rejected
  only if it changes nothing: otherwise the policy would be rewarded for keeping the given plan.
  """

  def __init__(self, problem: Instance, polish: Polish | None = None):
    """Creates the language of an input; with `polish`, every sentence ends with it."""
    self._tables = plans.tables_of(problem)
    self._polish = polish
    amount = (_AMOUNT, VOCAB_SIZE)
    edit = (
      (STOP, len(VERBS)), (_RUN, _SHAPE), (_SHAPE, _MACHINE), (_MACHINE, _AMOUNT), amount
    )  # fmt: skip
    self._head = (amount,) if polish else ()
    self._allowed = self._head + edit * (POLISHED_EDITS if polish else EDITS)

  @property
  def vocab_size(self) -> int:
    """120: 16 verbs and markers, 32 runs, 16 shapes, 40 machines, 16 amounts."""
    return VOCAB_SIZE

  @property
  def allowed(self) -> tuple[tuple[int, int], ...]:
    """Allowed id ranges by position: 20 positions, 16 with a polish."""
    return self._allowed

  @property
  def stop_token(self) -> int | None:
    """0, allowed instead of a verb."""
    return STOP

  def prompt(self, artefact: environment.Artefact) -> tuple[int, ...]:
    """Returns three tokens per run (machine, end, purchases) and a marker; at most 97 ids.

    Ends are in units of 16 turns, with the ids of runs; purchases in classes that at most double,
    with the ids of amounts. Runs after the 32nd are not shown.
    """
    runs = plans.plan(artefact)
    machines, ends = plans.arrays(runs)
    bought = np.zeros(len(runs) + 1, np.int64)
    plans.play(self._tables.apples, self._tables.costs, machines, ends, len(runs), bought)
    shown = min(len(runs), MAX_RUNS)
    tokens = np.empty((shown, 3), np.int64)
    tokens[:, 0] = machines[:shown] + _MACHINE
    tokens[:, 1] = (ends[:shown] - 1) // _TURNS_PER_ID + _RUN
    tokens[:, 2] = np.searchsorted(_BOUGHT, bought[:shown], side="right") + _AMOUNT
    return (_BEGIN, *tokens.ravel().tolist())

  def apply(
    self, artefact: environment.Artefact, tokens: Sequence[int], seed: int
  ) -> environment.Artefact:
    """Returns the plan after a sentence's edits, in order.

    If it has more than 32 runs (and more than before), the shortest runs are merged into the run
    before them.

    Raises:
      ValueError: if the sentence is not valid, or does not change the plan.
    """
    runs = plans.plan(artefact)
    num_edits = self._num_edits(tokens)
    first = len(self._head)
    sentence = np.array(tokens[first : first + num_edits * EDIT_TOKENS], np.int64)
    machines, ends = plans.arrays(runs)
    num_runs = _apply(machines, ends, len(runs), sentence, num_edits)
    if self._polish is not None:
      machines, ends, num_runs = anneal.polished(
        self._tables, machines, ends, num_runs, anneal.TEMPERATURES[tokens[0] - _AMOUNT],
        self._polish, anneal.seeded(seed, 3), max(len(runs), MAX_RUNS),
      )  # fmt: skip
    made = plans.artefact(machines, ends, num_runs)
    if made == [list(run) for run in runs]:
      raise ValueError(
        "apple_machines.apply: got a sentence that leaves the plan as it was; expected an edit"
        " that changes it."
      )
    return made

  def _num_edits(self, tokens: Sequence[int]) -> int:
    """Returns the number of edits of a sentence.

    Raises:
      ValueError: if an id is not allowed at its position, or the sentence ends within an edit.
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


@compiled.function
def _apply(
  machines: np.ndarray, ends: np.ndarray, num_runs: int, sentence: np.ndarray, num_edits: int
) -> int:
  """Applies the edits of a sentence, i64[num_edits * 5], to a plan in place; returns its runs."""
  room = max(num_runs, MAX_RUNS)
  for number in range(num_edits):
    verb, run, shape, machine, amount = sentence[number * EDIT_TOKENS : (number + 1) * EDIT_TOKENS]
    amount -= _AMOUNT
    turns = SHIFTS[amount] if verb in (MOVE, SLIDE) else LENGTHS[amount]
    num_runs = changes.edit(
      machines, ends, num_runs, verb, run - _RUN, shape - _SHAPE, machine - _MACHINE, turns
    )
    while num_runs > room:
      shortest, least = 1, TURNS + 1
      for other in range(1, num_runs):
        if ends[other] - ends[other - 1] < least:
          shortest, least = other, ends[other] - ends[other - 1]
      num_runs = changes.edit(machines, ends, num_runs, DELETE, shortest, 0, 0, 0)
  return num_runs
