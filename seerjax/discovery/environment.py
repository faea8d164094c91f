"""Interface of a discovery problem: starts, verifier, description and picture.

An *artefact* is the object of the search and the user's result: plain JSON data (numbers, strings,
lists, dicts with string keys), which needs no code to cross processes and restarts. Its `Score` is
computed from the artefact alone, never reported by the program or model that made it.

A policy changes an artefact in one of two ways, through the same loop (`seerjax.ttt`):

  edits      tokens of a small vocabulary, applied to the artefact it started from (`EditLanguage`)
  programs   source text that a sandbox runs on it (`describe` says how, `sandbox.sandbox` runs it)

Everything here is a pure function of its arguments: equal (artefact, tokens, seed) give equal
results, in any order and process. A tool inside an edit is therefore bounded by iterations, not by
a clock. Verdicts are equal on all machines; a tool that multiplies matrices may round differently
on another kind of machine and then produce another artefact.

Source: Yuksekgonul et al. 2026 (TTT-Discover), https://arxiv.org/abs/2601.16175, section 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import dataclasses
import math
from typing import Any, NamedTuple, Protocol, runtime_checkable

from seerjax import fields, types

MAX_VALUE = 1e300  # Bound on absolute values, so that differences of two are finite.

# JSON: None, bool, int, float (finite), str, list and dict of these.
Artefact = Any


class Published(NamedTuple):
  """A published value, for comparison.

  Attributes:
    value: in the problem's unit.
    who: person, system or paper.
    year: year of publication.
    source: where it is published.
    is_comparable: whether it is for exactly this problem; a mean over other inputs is not.
  """

  value: float
  who: str
  year: int
  source: str
  is_comparable: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
  """Score of an artefact.

  Attributes:
    is_valid: whether the artefact is a solution at all.
    value: value in the problem's unit, which is reported; up to `MAX_VALUE` in size; NaN if
      invalid.
    reward: quantity to maximise, a continuous function of `value`; positive, up to `MAX_VALUE`, if
      valid; 0 if invalid.
    reason: why it is invalid; "" if it is valid.
    certificate: exact bound behind `value` as text (a fraction, an outward-rounded float); "" if
      `value` is exact.
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
        f" finite value and a positive reward, up to {MAX_VALUE} in size; fix the verifier, or"
        " return `invalid(reason)`."
      )
    if not self.is_valid and (not math.isnan(self.value) or self.reward or not self.reason):
      raise ValueError(
        f"Score: got value={self.value}, reward={self.reward}, reason={self.reason!r} of an invalid"
        " artefact, expected NaN, 0 and a reason; return `invalid(reason)`."
      )


def invalid(reason: str) -> Score:
  """Returns the score of an invalid artefact; `reason` states the got and the expected value."""
  return Score(is_valid=False, value=math.nan, reward=0.0, reason=reason)


@runtime_checkable
class EditLanguage(Protocol):
  """A small vocabulary with sentences that change an artefact.

  A sentence has one token per entry of `allowed`. The allowed ids depend only on the position, so
  every sample can be parsed. `stop_token` ends a sentence early where it is allowed.
  """

  @property
  def vocab_size(self) -> int:
    """Number of ids; divisible by 8."""
    ...

  @property
  def allowed(self) -> tuple[tuple[int, int], ...]:
    """Allowed range of ids [low, high) at each position of the sentence."""
    ...

  @property
  def stop_token(self) -> int | None:
    """Token that ends a sentence; None if all sentences have full length."""
    ...

  def prompt(self, artefact: Artefact) -> tuple[int, ...]:
    """Returns the policy's view of the artefact; at least one id, and at most about 100.

    It is truncated at the end if it does not fit the context together with a sentence.
    """
    ...

  def apply(self, artefact: Artefact, tokens: Sequence[int], seed: int) -> Artefact:
    """Returns the artefact that a sentence produces; does not modify the given one.

    Args:
      artefact: valid artefact.
      tokens: a sentence, including the stop token if there is one.
      seed: seed of random draws (for example a perturbation's noise).

    Raises:
      ValueError: if the sentence cannot be applied here (for example nothing to delete), with the
        reason; the attempt is then invalid.
    """
    ...


@runtime_checkable
class Environment(Protocol):
  """A problem. Plain attributes may implement the properties."""

  @property
  def name(self) -> str:
    """Name of the problem and its size, for logs and files, such as "circle_packing_26"."""
    ...

  @property
  def is_maximised(self) -> bool:
    """Whether higher values are better."""
    ...

  @property
  def published(self) -> tuple[Published, ...]:
    """Published values, best first; may be empty."""
    ...

  @property
  def language(self) -> EditLanguage | None:
    """The edit language; None if only programs can change artefacts."""
    ...

  def start(self, seed: int) -> Artefact:
    """Returns a valid artefact to start from, simple or random, but no published solution."""
    ...

  def describe(self, artefact: Artefact, score: Score) -> str:
    """Returns problem, rules and artefact as text, for a model that writes programs."""
    ...

  def verify(self, artefact: Artefact) -> Score:
    """Judges any object exactly; never raises."""
    ...

  def picture(self, artefact: Artefact) -> Any:
    """Returns a matplotlib Figure of a valid artefact."""
    ...


@runtime_checkable
class Baselines(Protocol):
  """Baselines of a problem, for comparison at equal CPU time.

  Both iterators are endless; an item takes at most about a CPU second, so that a comparison can
  stop by the clock.
  """

  def classical(self, seed: int) -> Iterator[Artefact]:
    """Yields valid artefacts of the best known classical method for this problem."""
    ...

  def polished_starts(self, seed: int) -> Iterator[Artefact]:
    """Yields fresh starts, each polished by the edits' tool: the effect of the tool alone."""
    ...


@runtime_checkable
class Timed(Protocol):
  """A verifier that measures time: concurrent runs distort it, and single runs are noisy."""

  def confirm(self, artefact: Artefact) -> Score:
    """Measures again, for longer and more carefully; used for records."""
    ...


@runtime_checkable
class Helped(Protocol):
  """A verifier that uses helper processes."""

  @property
  def helper_cpu_seconds(self) -> float:
    """CPU seconds of the helpers since the environment was made."""
    ...


# An environment is user code. Artefacts are copied on the way in and out, so that it cannot modify
# the archive, prompts or other verdicts through them.


def started(environment: Environment, seed: int) -> Artefact:
  """Returns a copy of the artefact from `Environment.start`."""
  return types.copied(environment.start(seed))


def verified(environment: Environment, artefact: Artefact) -> Score:
  """Returns the environment's score of a copy of an artefact; never raises."""
  try:
    own = types.copied(artefact)
  except Exception as error:  # A list that contains itself, or an object that cannot be copied.
    return invalid(
      f"artefact: got data that cannot be copied ({type(error).__name__}), expected JSON"
    )
  return environment.verify(own)


def described(environment: Environment, artefact: Artefact) -> str:
  """Returns the environment's description of a copy of an artefact, with its score."""
  return environment.describe(types.copied(artefact), verified(environment, artefact))


def applied(
  language: EditLanguage, artefact: Artefact, tokens: Sequence[int], seed: int
) -> Artefact:
  """Applies a sentence to a copy of an artefact; see `EditLanguage.apply`. Returns a copy."""
  return types.copied(language.apply(types.copied(artefact), tokens, seed))


def helper_seconds(environment: Environment) -> float:
  """Returns the CPU seconds of an environment's helper processes so far."""
  return environment.helper_cpu_seconds if isinstance(environment, Helped) else 0.0


def record_score(environment: Environment, artefact: Artefact) -> Score:
  """Returns the score that counts for a record: the verdict, confirmed if it is timed."""
  if isinstance(environment, Timed):
    return environment.confirm(types.copied(artefact))
  return verified(environment, artefact)


def is_better(environment: Environment, value: float, than: float) -> bool:
  """Returns whether one value beats another; NaN beats nothing, and any number beats NaN."""
  if math.isnan(value) or math.isnan(than):
    return not math.isnan(value)
  return value > than if environment.is_maximised else value < than


def check_numbers(artefact: Any, name: str, *, least: int, most: int) -> tuple[float, ...] | str:
  """Returns a list of finite real numbers as floats, or the reason why it is invalid.

  Args:
    artefact: any object.
    name: name of the numbers, for the reason.
    least: minimum length.
    most: maximum length.
  """
  if not isinstance(artefact, list | tuple):
    return f"{name}: got {type(artefact).__name__}, expected a list of numbers"
  if not least <= len(artefact) <= most:
    expected = f"{least}" if least == most else f"{least} to {most}"
    return f"{name}: got {len(artefact)} numbers, expected {expected}"
  for place, number in enumerate(artefact):
    # In Python a bool is an int, and an int may be too large for a float.
    if isinstance(number, bool) or not isinstance(number, int | float):
      return f"{name}[{place}]: got {type(number).__name__}, expected a real number"
    if not -1e300 < number < 1e300:
      # Python refuses to print very long ints.
      got = f"an int of {number.bit_length()} bits" if isinstance(number, int) else str(number)
      return f"{name}[{place}]: got {got}, expected a finite number"
  return tuple(float(number) for number in artefact)


def shown(value: Any) -> str:
  """Returns the beginning of a value's text for a message; accepts any object."""
  try:
    return str(value)[:60]
  except (ValueError, RecursionError):
    # A very long int, or very deep nesting.
    return type(value).__name__


def signed(environment: Environment, value: float) -> float:
  """Returns a value with the sign that the archive uses: higher is better.

  It is its own inverse, so it also converts from the archive's values back to the problem's.
  """
  return value if environment.is_maximised else -value


def language_of(environment: Environment) -> EditLanguage:
  """Returns the environment's edit language.

  Raises:
    ValueError: if it has none.
  """
  if environment.language is None:
    raise ValueError(
      f"{environment.name}: got a problem without an edit language, expected one; define LANGUAGE,"
      " or choose a model that writes programs with --config.model."
    )
  return environment.language
