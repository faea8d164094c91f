"""The race: laps on fresh inputs, answers compared, and what chooses a program's fields.

  inputs    fresh for each lap, weights too, from unknown seeds: nothing can be kept from
            one call for the next
  answers   those of the timed calls themselves are compared, after the clock has stopped; one wrong
            answer, and the schedule is no answer
  clock     stops when the outputs are on the device (`block_until_ready`)
  company   schedule and reference take turns on the same inputs, first and second in alternation,
            so that a busy machine slows both; the ratio is taken lap by lap
  tolerance |got - expected| <= 2e-2 + 2e-2 |expected|, as published; and, where all is float32 on
            a CPU, 1e-4 in place of 2e-2 (other devices round what they multiply)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import secrets
import statistics
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from seerjax.discovery import environment

TOLERANCE = 2e-2
FLOAT32_TOLERANCE = 1e-4

# Laps of `verify` and of `confirm`; odd, so that the median is a lap.
LAPS, CONFIRMING_LAPS = 9, 31

# What inputs are drawn from: normal, or Cauchy of scale 2, whose outliers try the norms.
KINDS = ("normal", "masked", "cauchy")


class Field(NamedTuple):
  """One choice of a schedule: its name, what may be chosen (at most 8), and what it means."""

  name: str
  choices: tuple[Any, ...]
  meaning: str


def complaint(artefact: Any, fields: Sequence[Field]) -> str:
  """Returns why something does not choose each field once; "" if it does."""
  names = [field.name for field in fields]
  if not isinstance(artefact, dict) or set(artefact) != set(names):
    return f"artefact: got {environment.shown(artefact)}, expected a dict of {', '.join(names)}"
  for field in fields:
    value = artefact[field.name]
    # True is 1 to `in`, and 1.0 as well.
    if not any(type(value) is type(choice) and value == choice for choice in field.choices):
      listed = ", ".join(map(str, field.choices))
      return f"{field.name}: got {environment.shown(value)}, expected one of {listed}"
  return ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Race:
  """What was measured of one contestant against the reference.

  Attributes:
    reason: why it is out; "" if every answer was right.
    ratios: by lap, wall time of the reference / of the contestant.
    cpu_ratios: by lap, the same of the process's CPU time.
    seconds: median wall time of the contestant.
    reference_seconds: median wall time of the reference.
    error: largest |got - expected| of all answers.
  """

  reason: str = ""
  ratios: tuple[float, ...] = ()
  cpu_ratios: tuple[float, ...] = ()
  seconds: float = 0.0
  reference_seconds: float = 0.0
  error: float = 0.0

  @property
  def speed_up(self) -> float:
    return statistics.median(self.ratios)

  @property
  def lower_quartile(self) -> float:
    return statistics.quantiles(self.ratios, n=4)[0]

  @property
  def cpu_speed_up(self) -> float:
    return statistics.median(self.cpu_ratios)


def race(
  contestant: Callable[[Any], Any],
  plain: Callable[[Any], Any],
  inputs_of: Callable[[int, int], Any],
  *,
  laps: int,
  tolerance: float,
  seed: int | None = None,
) -> Race:
  """Times a contestant against the reference by the rules above.

  Args:
    contestant: of the inputs; returns arrays on the device.
    plain: the reference; the same.
    inputs_of: of a seed and the lap's number, so that kinds can take turns.
    laps: that count; as many warming ones as there are `KINDS` come first, and are checked too.
    tolerance: absolute and relative.
    seed: None for an unknown one; a number only makes the inputs repeatable.
  """
  rng = np.random.Generator(np.random.PCG64(secrets.randbits(64) if seed is None else seed))
  warming = len(KINDS)
  kept, walls, cpus = [], ([], []), ([], [])
  for lap in range(-warming, laps):
    inputs = jax.block_until_ready(inputs_of(int(rng.integers(2**62)), lap))
    outputs: list[Any] = [None, None]
    for place in (0, 1) if lap % 2 else (1, 0):
      function = (contestant, plain)[place]
      cpu, wall = time.process_time(), time.perf_counter()
      try:
        outputs[place] = jax.block_until_ready(function(inputs))
      except Exception as error:
        # A kernel's tiles may ask for more than the machine has; the reference may not fail.
        if place:
          raise
        line = (str(error).splitlines() or [""])[0][:160]
        return Race(reason=f"program: got {type(error).__name__}: {line}, expected an answer")
      wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
      if lap >= 0:
        walls[place].append(wall)
        # Its clock may tick slower than a lap.
        cpus[place].append(max(cpu, 1e-6))
    kept.append(outputs)
    # What is wrong from the start need not be timed.
    if lap < 0:
      reason, error = differs(outputs[0], outputs[1], tolerance)
      if reason:
        return Race(reason=reason, error=error)
  worst = 0.0
  for got, expected in kept:
    reason, error = differs(got, expected, tolerance)
    worst = max(worst, error)
    if reason:
      return Race(reason=f"{reason}, in a timed call", error=worst)
  return Race(
    ratios=tuple(slow / fast for fast, slow in zip(*walls)),
    cpu_ratios=tuple(slow / fast for fast, slow in zip(*cpus)),
    seconds=statistics.median(walls[0]),
    reference_seconds=statistics.median(walls[1]),
    error=worst,
  )


def differs(got: Any, expected: Any, tolerance: float) -> tuple[str, float]:
  """Returns why an answer is wrong ("" if it is right) and the largest difference."""
  answers, truths = jax.tree.leaves(got), jax.tree.leaves(expected)
  if len(answers) != len(truths):
    return f"answer: got {len(answers)} arrays, expected {len(truths)}", 0.0
  worst = 0.0
  for answer, truth in zip(answers, truths):
    if not isinstance(answer, jax.Array) or answer.shape != truth.shape:
      shape = list(answer.shape) if isinstance(answer, jax.Array) else type(answer).__name__
      return f"answer: got {shape}, expected {list(truth.shape)}", 0.0
    if answer.dtype != truth.dtype:
      return f"answer: got {answer.dtype}, expected {truth.dtype}", 0.0
    a, b = (np.asarray(x.astype(jnp.float32)).astype(np.float64) for x in (answer, truth))
    # Equal infinities are no distance apart.
    apart = np.abs(np.subtract(a, b, out=np.zeros_like(a), where=a != b))
    # In this form NaN is wrong; and a distance from infinity is none that could be borne.
    right = (apart <= tolerance + tolerance * np.abs(b)) & np.isfinite(apart)
    worst = max(worst, float(apart.max(initial=0.0)))
    if not right.all():
      place = tuple(int(index) for index in np.argwhere(~right)[0])
      return (
        f"answer: got {a[place]:.6g} at {place}, expected {b[place]:.6g} within {tolerance}"
        f" absolute and relative ({1 - right.mean():.2%} of the entries are off)",
        worst,
      )
  return "", worst
