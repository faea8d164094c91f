"""Shared code of problems over step functions: exact arithmetic, and a language of edits.

A function has n equal steps with heights given as floats. A float is an integer over a power of
two, so a verifier multiplies integers, needs no tolerance, and rounds its result in the direction
that does not favour the claim.

A sentence is up to four edits of three tokens each: verb, amount, place. The verbs up to `mirror`
reshape a region and mean the same in all problems; `polish` and `last` are specific to a problem.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import decimal
from fractions import Fraction
import math
from typing import Any, NamedTuple

import numpy as np

from seerjax.discovery import environment
from seerjax.discovery.environment import Artefact

MAX_HEIGHT = 1000.0  # As in the paper's verifiers; the scale is arbitrary.
MIN_SUM = 0.01
MAX_STEPS = 1_000_000  # Maximum steps for the verifier, which then takes ten CPU seconds.
TOOL_STEPS = 1000  # Maximum steps for the edits' linear programs.
_MAX_FRACTION_BITS = 2048  # Longer fractions are certified only by the rounded float.
# Convolutions of more decimal digits (some seconds) use rounded numbers.
MAX_EXACT_DIGITS = 20_000_000
_ROUNDED_BITS = 96
_EXACT = decimal.Context(
  prec=decimal.MAX_PREC, Emax=decimal.MAX_EMAX, Emin=decimal.MIN_EMIN, traps=[decimal.Inexact]
)

# The language: a sentence is up to `NUM_EDITS` triples (verb, amount, place). Ids by kind:
STOP_TOKEN = 0
_VERB, NUM_VERBS = 1, 9
_AMOUNT, NUM_AMOUNTS = 16, 16
_PLACE, NUM_PLACES = 32, 16
_LEVEL, NUM_LEVELS = 48, 16
_BUCKET, NUM_BUCKETS = 64, 16
VOCAB_SIZE = 80
NUM_EDITS = 4
NUM_CELLS = 32  # Cells of the policy's view.
NOISE, REMELT, SET, SHIFT, SMOOTH, STRETCH, MIRROR, POLISH, LAST = range(NUM_VERBS)

SIZES = tuple(float(size) for size in np.geomspace(1e-4, 1.0, NUM_AMOUNTS))
# Regions: (start, end) in sixteenths of the function.
REGIONS = (
  (0, 16),
  *((8 * i, 8 * i + 8) for i in range(2)),
  *((4 * i, 4 * i + 4) for i in range(4)),
  *((2 * i, 2 * i + 2) for i in range(8)),
  (4, 12),
)


class Edit(NamedTuple):
  """One triple of a sentence, each number counted from 0."""

  verb: int
  amount: int
  place: int


def allowed() -> tuple[tuple[int, int], ...]:
  """Returns the allowed id range at each position; the stop token is allowed instead of a verb."""
  triples = []
  for index in range(NUM_EDITS):
    first = _VERB if index == 0 else STOP_TOKEN
    triples.append((first, _VERB + NUM_VERBS))
    triples.append((_AMOUNT, _AMOUNT + NUM_AMOUNTS))
    triples.append((_PLACE, _PLACE + NUM_PLACES))
  return tuple(triples)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepEdits:
  """Base of these problems' languages: ids and the form of a sentence.

  Attributes:
    num_steps: steps of the function.
  """

  num_steps: int

  @property
  def vocab_size(self) -> int:
    """Ids are 0 <= id < vocab_size."""
    return VOCAB_SIZE

  @property
  def allowed(self) -> tuple[tuple[int, int], ...]:
    """By position in the sentence, the range of allowed ids (start, end)."""
    return allowed()

  @property
  def stop_token(self) -> int | None:
    """0, allowed instead of any verb except the first."""
    return STOP_TOKEN


def parse(tokens: Sequence[int]) -> tuple[Edit, ...]:
  """Returns the edits of a sentence.

  Raises:
    ValueError: if it is empty, too long, incomplete, or has an id that is not allowed there.
  """
  ids = [int(token) for token in tokens]
  ranges = allowed()
  if ids and ids[-1] == STOP_TOKEN and len(ids) % 3 == 1:
    ids = ids[:-1]
  if not ids or len(ids) > len(ranges) or len(ids) % 3:
    raise ValueError(
      f"sentence: got {len(tokens)} tokens, expected 1 to {NUM_EDITS} triples, and then"
      f" {STOP_TOKEN} if there are fewer than {NUM_EDITS}; sample with `allowed`."
    )
  for place, (token, (first, end)) in enumerate(zip(ids, ranges, strict=False)):
    if not first <= token < end or (token == STOP_TOKEN and place % 3 == 0):
      raise ValueError(
        f"sentence: got id {token} at place {place}, expected {max(first, _VERB)} to {end - 1};"
        " sample with `allowed`."
      )
  return tuple(
    Edit(ids[i] - _VERB, ids[i + 1] - _AMOUNT, ids[i + 2] - _PLACE) for i in range(0, len(ids), 3)
  )


def region(place: int, num_steps: int) -> slice:
  """Returns the steps of a place's region, at least one."""
  first, end = REGIONS[place]
  begin = min(first * num_steps // 16, num_steps - 1)
  return slice(begin, max(end * num_steps // 16, begin + 1))


def smooth_noise(num_steps: int, rng: np.random.Generator) -> np.ndarray:
  """Returns correlated standard normal numbers, f64[n].

  They are sums over a moving window: of one number, or of 10 to 30 % of all. With white noise only,
  descent tools end in one poor basin.
  """
  width = max(int(num_steps * rng.choice((0.0, 0.1, 0.2, 0.3))), 1)
  draws = rng.standard_normal(num_steps + width - 1)
  return np.convolve(draws, np.full(width, width**-0.5), mode="valid")


def reshape(heights: np.ndarray, edit: Edit, rng: np.random.Generator, top: float) -> np.ndarray:
  """Returns the heights after one of the first seven verbs; they may be out of range.

  Args:
    heights: f64[n].
    edit: an edit with a verb from NOISE to MIRROR.
    rng: generator of noise and of remelted regions (`smooth_noise`).
    top: height of level 15.
  """
  changed = heights.copy()
  part = region(edit.place, heights.size)
  old = heights[part]
  mean = float(heights.mean())
  size = SIZES[edit.amount]
  if edit.verb == NOISE:
    changed[part] = old + size * mean * smooth_noise(old.size, rng)
  elif edit.verb == REMELT:
    new = 1.25 * mean * np.abs(smooth_noise(old.size, rng))  # Mean is `mean`: E|N(0, 1)| = 0.8.
    changed[part] = (1 - size) * old + size * new
  elif edit.verb == SET:
    changed[part] = top * edit.amount / (NUM_AMOUNTS - 1)
  elif edit.verb == SHIFT:
    changed[part] = np.roll(old, edit.amount - 8 if edit.amount < 8 else edit.amount - 7)
  elif edit.verb == SMOOTH:
    width, weight = 1 + edit.amount // 4, (0.1, 0.3, 0.6, 1.0)[edit.amount % 4]
    padded = np.pad(heights, width, mode="edge")
    window = np.full(2 * width + 1, 1 / (2 * width + 1))
    smooth = np.convolve(padded, window, mode="valid")
    changed[part] = (1 - weight) * old + weight * smooth[part]
  elif edit.verb == STRETCH:
    changed[part] = old.mean() + (0.25 + 0.1 * edit.amount) * (old - old.mean())
  else:
    assert edit.verb == MIRROR
    weight = (edit.amount + 1) / (2 * NUM_AMOUNTS)  # 1/2 on the whole makes it symmetric.
    changed[part] = (1 - weight) * old + weight * heights[::-1][part]
  return changed


def view(heights: np.ndarray, top: float, gap: float, peak: float) -> tuple[int, ...]:
  """Returns the policy's view: distance to the goal, position of the maximum, heights.

  Args:
    heights: f64[n].
    top: height of level 15.
    gap: distance to the problem's goal, in the problem's unit; its logarithm is shown.
    peak: position of the relevant maximum, 0 to 1.
  """
  num = heights.size
  bucket = 2 * (math.log10(min(max(gap, 1e-8), 1.0)) + 7.5)
  sums = np.concatenate([[0.0], np.cumsum(heights)])
  edges = np.linspace(0.0, num, NUM_CELLS + 1)
  means = np.diff(np.interp(edges, np.arange(num + 1), sums)) * NUM_CELLS / num
  levels = np.clip(np.rint(means / top * (NUM_LEVELS - 1)), 0, NUM_LEVELS - 1).astype(int)
  return (
    _BUCKET + min(max(int(bucket), 0), NUM_BUCKETS - 1),
    _BUCKET + min(max(int(peak * NUM_BUCKETS), 0), NUM_BUCKETS - 1),
    *(_LEVEL + int(level) for level in levels),
  )


def picture(
  heights: np.ndarray,
  span: tuple[float, float],
  values: np.ndarray,
  reach: tuple[float, float],
  *,
  left: Mapping[str, Any],
  right: Mapping[str, Any],
) -> Any:
  """Returns a Figure of the function and of the judged quantity, with its maximum marked.

  Args:
    heights: f64[n].
    span: start and end of the function.
    values: f64[m], the judged quantity, linear between evenly spaced positions.
    reach: the first and the last of these positions.
    left, right: titles and labels of both plots.
  """
  from matplotlib import figure  # Slow to import, and only needed here.

  drawing = figure.Figure(figsize=(9, 4), layout="constrained")
  function, judged = drawing.subplots(1, 2)
  function.stairs(heights, np.linspace(*span, heights.size + 1), fill=True)
  function.set(**left)
  at, peak = np.linspace(*reach, values.size), int(values.argmax())
  judged.plot(at, values)
  judged.axhline(values[peak], linestyle="--", linewidth=0.8, color="C3")
  judged.plot([at[peak]], [values[peak]], "o", color="C3")
  judged.set(**right)
  return drawing


def check_heights(artefact: Any, num_steps: int) -> tuple[float, ...] | str:
  """Returns the heights as floats, or the reason why the artefact is not a step function."""
  heights = environment.check_numbers(artefact, "heights", least=num_steps, most=num_steps)
  if isinstance(heights, str):
    return heights
  for place, height in enumerate(heights):
    if not 0.0 <= height <= MAX_HEIGHT:
      return f"heights[{place}]: got {height!r}, expected 0 to {MAX_HEIGHT:g}"
  if not math.fsum(heights) >= MIN_SUM:
    return f"heights: got a sum of {math.fsum(heights)!r}, expected at least {MIN_SUM:g}"
  return heights


def dyadic(heights: Sequence[float]) -> list[int]:
  """Returns non-negative integers with exactly the ratios of the heights."""
  ratios = [float(height).as_integer_ratio() for height in heights]
  denominator = max(below for _, below in ratios)  # Powers of two: the largest is a multiple.
  return [above * (denominator // below) for above, below in ratios]


def convolve(first: Sequence[int], second: Sequence[int]) -> list[int]:
  """Returns the exact full convolution of two non-negative integer sequences.

  Each is written as the digits of one large number, in a base above every sum of products, so that
  a single product contains all sums (Kronecker's substitution). Decimal numbers are used because
  they are multiplied by a number-theoretic transform, in n log n steps: 50,000 floats take 0.3 CPU
  seconds, Python's integers 1.5.
  """
  largest = max(first) * max(second) * min(len(first), len(second))
  width, length = len(str(largest)), len(first) + len(second) - 1

  def pack(digits: Sequence[int]) -> decimal.Decimal:
    return decimal.Decimal("".join(f"{digit:0{width}d}" for digit in reversed(digits)))

  with decimal.localcontext(_EXACT):
    text = str(pack(first) * pack(second)).zfill(width * length)
  return [int(text[width * k : width * (k + 1)]) for k in reversed(range(length))]


class Rounded(NamedTuple):
  """Bounds of non-negative integers, with `_ROUNDED_BITS` bits times a power of two.

  Attributes:
    low: lower bounds, in units.
    high: upper bounds, in units.
    unit: the power of two; 1 if nothing is rounded.
  """

  low: list[int]
  high: list[int]
  unit: int


def rounded(numbers: Sequence[int], most_digits: int = MAX_EXACT_DIGITS) -> Rounded:
  """Returns the integers unchanged if `convolve` is fast for them, else rounded down and up.

  A bound from the rounded numbers is certified, and within one float rounding of the exact value:
  an entry changes by less than 2^-96 of the largest, a sum of n products by 4n 2^-96 of itself.

  Args:
    numbers: non-negative integers.
    most_digits: largest number of digits of a self-convolution that counts as fast.
  """
  bits = max(numbers).bit_length()
  digits = 2 * len(numbers) * (2 * bits + len(numbers).bit_length()) * math.log10(2)
  shift = bits - _ROUNDED_BITS
  if digits <= most_digits or shift <= 0:
    return Rounded(list(numbers), list(numbers), 1)
  low = [number >> shift for number in numbers]
  return Rounded(low, [-(-number >> shift) for number in numbers], 1 << shift)


def at_least(exact: Fraction) -> float:
  """Returns the smallest float that is not below the fraction."""
  value = float(exact)
  return value if Fraction(value) >= exact else math.nextafter(value, math.inf)


def at_most(exact: Fraction) -> float:
  """Returns the largest float that is not above the fraction."""
  return -at_least(-exact)


def certificate(exact: Fraction, rounded: float) -> str:
  """Returns the fraction as text or, if it is too long, the rounded float in hexadecimal."""
  if exact.denominator.bit_length() > _MAX_FRACTION_BITS:
    return rounded.hex()
  return f"{exact.numerator}/{exact.denominator}"


def program_rules(num_steps: int) -> str:
  """Returns the rules for programs that change step heights, as text."""
  return (
    f"The artefact is a list of {num_steps} real numbers, the step heights from left to right. It"
    " is judged in exact arithmetic from the list alone, without tolerance; a number that is not"
    " finite, negative, boolean, complex or nested makes it worth nothing.\n"
    "Write a Python program that defines `improve(artefact, seconds, seed)`: it takes such a list,"
    " works at most `seconds` seconds (numpy and scipy are there), draws at random from `seed`"
    " alone, and returns a better list. Start from the artefact given; do not begin anew unless"
    " that is better.\n"
  )


def heights_text(artefact: Artefact) -> str:
  """Returns the heights with six digits, for a model's prompt."""
  return "[" + ", ".join(f"{height:.6g}" for height in artefact) + "]"
