"""What a problem of discovery is: something to start from, to judge by, and to look at.

An *artefact* is what is searched for and what the user keeps: plain JSON data (numbers, strings,
lists, dicts with string keys), so that it crosses processes and restarts without code. Its `Score`
is recomputed from the artefact alone; nothing that wrote it is asked what it is worth.

A policy changes an artefact in one of two ways, through the same loop (`seerjax.ttt`):

  edits      tokens of a small vocabulary, applied to the artefact it started from (`EditLanguage`)
  programs   source text that a sandbox runs on it (`describe` says how, `sandbox.sandbox` runs it)

Everything here is a pure function of its arguments: equal (artefact, tokens, seed), equal outcome,
in any order and any process. A tool inside an edit is therefore bounded by iterations, never by a
clock. Verdicts are the same on every machine; a tool that multiplies matrices may round otherwise
on one of another kind, and then finds something else there.

Source: Yuksekgonul et al. 2026 (TTT-Discover), https://arxiv.org/abs/2601.16175, section 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import dataclasses
import math
from typing import Any, NamedTuple, Protocol, runtime_checkable

from seerjax import fields, types

MAX_VALUE = 1e300  # Of a score, in size: the archive takes differences of two.

# JSON: None, bool, int, float (finite), str, list and dict of these.
Artefact = Any


class Published(NamedTuple):
  """A value that was reached elsewhere, as printed there.

  Attributes:
    value: in the problem's own unit.
    who: person, system or paper.
    year: of it.
    source: where it is printed.
    is_comparable: whether it is of this very problem; a mean over other inputs is not.
  """

  value: float
  who: str
  year: int
  source: str
  is_comparable: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
  """What an artefact is worth.

  Attributes:
    is_valid: it is an answer to the problem at all.
    value: in the problem's own unit, the one that is printed, up to `MAX_VALUE` in size; NaN if it
      is not valid.
    reward: what is maximised, a continuous function of `value`, higher is better; 0 if it is not
      valid, and above 0, up to `MAX_VALUE`, if it is.
    reason: why it is not valid; "" if it is.
    certificate: an exact bound behind `value` as text (a fraction, an outward-rounded float); ""
      where `value` is exact itself.
  """

  is_valid: bool
  value: float
  reward: float
  reason: str = ""
  certificate: str = ""

  def __post_init__(self):
    fields.check(self, unbounded=("value", "reward"))
    if self.is_valid and not (abs(self.value) <= MAX_VALUE and 0 < self.reward <= MAX_VALUE):
      raise ValueError(
        f"Score: got value={self.value}, reward={self.reward} of a valid artefact, expected a"
        f" finite value and a positive reward, up to {MAX_VALUE} in size; mend the verifier, or"
        " return `invalid(reason)`."
      )
    if not self.is_valid and (not math.isnan(self.value) or self.reward or not self.reason):
      raise ValueError(
        f"Score: got value={self.value}, reward={self.reward}, reason={self.reason!r} of an invalid"
        " artefact, expected NaN, 0 and a reason; return `invalid(reason)`."
      )


def invalid(reason: str) -> Score:
  """Returns the score of what is no answer; `reason` says what was got and what was expected."""
  return Score(is_valid=False, value=math.nan, reward=0.0, reason=reason)


@runtime_checkable
class EditLanguage(Protocol):
  """A small vocabulary whose sentences change an artefact.

  A sentence has one token for each entry of `allowed`; its place alone says which ids may stand
  there, so that whatever is sampled can be parsed. It ends early with `stop_token`, where that is
  allowed.
  """

  @property
  def vocab_size(self) -> int:
    """Ids are 0 <= id < vocab_size; 8 divides it."""
    ...

  @property
  def allowed(self) -> tuple[tuple[int, int], ...]:
    """By place in the sentence, ids from the first number up to, not including, the second."""
    ...

  @property
  def stop_token(self) -> int | None:
    """Ends a sentence; None if all have full length."""
    ...

  def prompt(self, artefact: Artefact) -> tuple[int, ...]:
    """Returns what the policy sees of the artefact; at least one id, and never many (~100).

    What the context cannot hold beside a sentence is cut off at the end.
    """
    ...

  def apply(self, artefact: Artefact, tokens: Sequence[int], seed: int) -> Artefact:
    """Returns the artefact that a sentence makes of one; the given one is left as it is.

    Args:
      artefact: valid.
      tokens: a sentence, the stop token included if there is one.
      seed: of whatever is drawn at random (a perturbation's noise).

    Raises:
      ValueError: if the sentence cannot be applied here (there is nothing to delete, ...), with
        the reason; the attempt is invalid then.
    """
    ...


@runtime_checkable
class Environment(Protocol):
  """One problem. Plain attributes will do for what are properties here."""

  @property
  def name(self) -> str:
    """Of the problem and its size, for logs and files, such as "circle_packing_26"."""
    ...

  @property
  def is_maximised(self) -> bool:
    """Whether higher values are better."""
    ...

  @property
  def published(self) -> tuple[Published, ...]:
    """What others reached, the best first; empty if there is none."""
    ...

  @property
  def language(self) -> EditLanguage | None:
    """Of edits; None if only programs change its artefacts."""
    ...

  def start(self, seed: int) -> Artefact:
    """Returns a valid artefact to begin with, plain or random; no published construction."""
    ...

  def describe(self, artefact: Artefact, score: Score) -> str:
    """Returns the problem, its rules and this artefact as text for a model that writes programs."""
    ...

  def verify(self, artefact: Artefact) -> Score:
    """Judges anything whatever, exactly; never raises."""
    ...

  def picture(self, artefact: Artefact) -> Any:
    """Returns a matplotlib Figure of a valid artefact."""
    ...


@runtime_checkable
class Baselines(Protocol):
  """What an environment is compared with, at equal CPU time.

  Both are endless; an item takes about a CPU second at most, so that a comparison can stop by
  the clock.
  """

  def classical(self, seed: int) -> Iterator[Artefact]:
    """Yields the valid artefacts of the best classical method known for this problem."""
    ...

  def polished_starts(self, seed: int) -> Iterator[Artefact]:
    """Yields fresh starts, each polished by the tool that edits have: what the tool does alone."""
    ...


@runtime_checkable
class Timed(Protocol):
  """A verifier that uses a clock: two side by side would both be wrong, and one alone is luck."""

  def confirm(self, artefact: Artefact) -> Score:
    """Judges once more, for longer and warily: what a record counts by."""
    ...


@runtime_checkable
class Helped(Protocol):
  """A verifier that has other processes work for it."""

  @property
  def helper_cpu_seconds(self) -> float:
    """CPU seconds that they have spent since the environment was made."""
    ...


# An environment is its user's code. It gets copies and gives some, so that what it changes in an
# artefact, or keeps of one, changes nothing in the archive, in the prompts or in other verdicts.


def started(environment: Environment, seed: int) -> Artefact:
  """Returns a copy of the artefact that `Environment.start` gives."""
  return types.copied(environment.start(seed))


def verified(environment: Environment, artefact: Artefact) -> Score:
  """Returns the environment's verdict on a copy of an artefact; never raises."""
  try:
    own = types.copied(artefact)
  except Exception as error:  # Lists within themselves, or an object that no one can copy.
    return invalid(f"artefact: got what cannot be copied ({type(error).__name__}), expected JSON")
  return environment.verify(own)


def described(environment: Environment, artefact: Artefact) -> str:
  """Returns the environment's description of a copy of an artefact, with its verdict."""
  return environment.describe(types.copied(artefact), verified(environment, artefact))


def applied(
  language: EditLanguage, artefact: Artefact, tokens: Sequence[int], seed: int
) -> Artefact:
  """Returns a copy of what a sentence makes of a copy of an artefact; see `EditLanguage.apply`."""
  return types.copied(language.apply(types.copied(artefact), tokens, seed))


def helper_seconds(environment: Environment) -> float:
  """Returns the CPU seconds of other processes that an environment's verdicts have taken so far."""
  return environment.helper_cpu_seconds if isinstance(environment, Helped) else 0.0


def record_score(environment: Environment, artefact: Artefact) -> Score:
  """Returns what an artefact counts as a record: its verdict; if that is timed, a longer one."""
  if isinstance(environment, Timed):
    return environment.confirm(types.copied(artefact))
  return verified(environment, artefact)


def is_better(environment: Environment, value: float, than: float) -> bool:
  """Returns whether one value beats another; NaN beats nothing, and everything else beats NaN."""
  if math.isnan(value) or math.isnan(than):
    return not math.isnan(value)
  return value > than if environment.is_maximised else value < than


def check_numbers(artefact: Any, name: str, *, least: int, most: int) -> tuple[float, ...] | str:
  """Returns a list of real finite numbers as floats, or the reason why it is none.

  Args:
    artefact: anything.
    name: of the numbers, for the reason.
    least: fewest numbers.
    most: most numbers.
  """
  if not isinstance(artefact, list | tuple):
    return f"{name}: got {type(artefact).__name__}, expected a list of numbers"
  if not least <= len(artefact) <= most:
    expected = f"{least}" if least == most else f"{least} to {most}"
    return f"{name}: got {len(artefact)} numbers, expected {expected}"
  for place, number in enumerate(artefact):
    # A bool is an int to Python; an int may be too large for a float.
    if isinstance(number, bool) or not isinstance(number, int | float):
      return f"{name}[{place}]: got {type(number).__name__}, expected a real number"
    if not -1e300 < number < 1e300:
      # An int may have more digits than Python prints.
      got = f"an int of {number.bit_length()} bits" if isinstance(number, int) else str(number)
      return f"{name}[{place}]: got {got}, expected a finite number"
  return tuple(float(number) for number in artefact)


def shown(value: Any) -> str:
  """Returns the beginning of a value's text for a message, of anything whatever."""
  try:
    return str(value)[:60]
  except (ValueError, RecursionError):
    # Thousands of digits, or of brackets.
    return type(value).__name__


def signed(environment: Environment, value: float) -> float:
  """Returns a value in the problem's own unit as the archive orders it: higher is better.

  A change of sign is its own inverse, so that it also leads back from the archive's value to the
  problem's.
  """
  return value if environment.is_maximised else -value


def language_of(environment: Environment) -> EditLanguage:
  """Returns the environment's language of edits.

  Raises:
    ValueError: if it has none.
  """
  if environment.language is None:
    raise ValueError(
      f"{environment.name}: got a problem without a language of edits, expected one; give it"
      " LANGUAGE, or choose a model that writes programs with --config.model."
    )
  return environment.language
