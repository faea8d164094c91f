"""A discovery problem that costs microseconds: six digits. The file is an own-problem example.

  value = sum over places of (place + 1) * GAIN[digit],  at most 126

Raising digits from 0 in steps of one is deceptive: 1 and 2 are worth less than 0, so only a larger
step pays. A sentence is a verb, a place and an amount; a stop token as place reverses the row:

  write place digit    digit 6 does not exist and makes the artefact invalid
  raise place amount   0 stands for a random amount; a digit above 5 is invalid
  verb stop            reversed, whatever the verb

A sentence that changes nothing cannot be applied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import random
from typing import Any

from seerjax.discovery import environment
from seerjax.discovery.environment import Artefact, Published, Score

PATH = __file__  # Argument for `problems.load`.
NUM_PLACES = 6
GAIN = (2, 1, 0, 3, 4, 6)  # By digit.
MOST = sum(range(1, NUM_PLACES + 1)) * max(GAIN)
WRITE, RAISE = 0, 1
FIRST_PLACE = 2  # Ids 2 to 7.
STOP = 8
FIRST_AMOUNT = 9  # Ids 9 to 15.


class Digits:
  """The language. Counts the sentences it applies, and can call `stop` at one of them."""

  vocab_size = 16
  allowed = ((0, 2), (2, 9), (9, 16))
  stop_token = STOP

  def __init__(self, stop_at: int = -1, stop: Callable[[], Any] = lambda: None):
    self.num_applied = 0
    self.stop_at = stop_at
    self.stop = stop

  def prompt(self, artefact: Artefact) -> tuple[int, ...]:
    return tuple(FIRST_AMOUNT + digit for digit in artefact)

  def apply(self, artefact: Artefact, tokens: Sequence[int], seed: int) -> Artefact:
    self.num_applied += 1
    if self.num_applied == self.stop_at:
      self.stop()
    verb, place, *rest = tokens
    if place == STOP:
      changed = artefact[::-1]
    else:
      changed, amount = list(artefact), rest[0] - FIRST_AMOUNT
      before = changed[place - FIRST_PLACE]
      if verb == RAISE:
        amount = before + (amount or random.Random(seed).randint(1, 5))
      changed[place - FIRST_PLACE] = amount
    if changed == artefact:
      raise ValueError(f"got {changed} again, expected a change")
    return changed


@dataclasses.dataclass(frozen=True)
class Row:
  """The environment; minimises the difference from the maximum value."""

  is_maximised: bool = True
  language: Digits | None = dataclasses.field(default_factory=Digits)
  begin: tuple[int, ...] = ()  # Start artefact; drawn from 0, 1, 2 if empty.

  name = "digits"
  published: tuple[Published, ...] = ()

  def start(self, seed: int) -> Artefact:
    return list(self.begin) or [random.Random(seed + i).randrange(3) for i in range(NUM_PLACES)]

  def describe(self, artefact: Artefact, score: Score) -> str:
    return f"Six digits with a large sum; now {artefact}: {score.value}"

  def verify(self, artefact: Artefact) -> Score:
    reason = reason_against(artefact)
    if reason:
      return environment.invalid(reason)
    value = value_of(artefact)
    if self.is_maximised:
      return Score(is_valid=True, value=float(value), reward=1.0 + value)
    return Score(is_valid=True, value=float(MOST - value), reward=1 / (1.0 + MOST - value))

  def picture(self, artefact: Artefact) -> Any:
    return picture(artefact)


def reason_against(artefact: Artefact) -> str:
  """Returns why an artefact is invalid, "" if it is a row of digits."""
  if not isinstance(artefact, list) or len(artefact) != NUM_PLACES:
    return "got no row, expected six digits"
  for digit in artefact:
    if type(digit) is not int or not 0 <= digit < len(GAIN):
      return f"got the digit {digit}, expected 0 to {len(GAIN) - 1}"
  return ""


def value_of(artefact: Artefact) -> int:
  return sum((place + 1) * GAIN[digit] for place, digit in enumerate(artefact))


# The names that an own-problem file exports.

NAME = "digits"
LANGUAGE = Digits()


def start(seed: int) -> Artefact:
  return Row().start(seed)


def describe(artefact: Artefact, value: float) -> str:
  return f"Six digits with a large sum; now {artefact}: {value}"


def verify(artefact: Artefact) -> Any:
  reason = reason_against(artefact)
  return (None, reason) if reason else value_of(artefact)


def picture(artefact: Artefact) -> Any:
  from matplotlib.figure import Figure

  figure = Figure()
  figure.subplots().bar(range(NUM_PLACES), artefact)
  return figure
