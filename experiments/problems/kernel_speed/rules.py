"""The race: laps on new inputs with compared results, and the validation of fields.

inputs    new for each lap, weights too, from unknown seeds: nothing can be reused from the
          previous call
results   results of the timed calls are compared after the clock has stopped; one wrong result
          makes the schedule invalid
clock     stops when the outputs are on the device (`block_until_ready`)
order     schedule and reference take turns on the same inputs, alternating which is first, so
          that a busy machine slows both; ratios are per lap
tolerance |got - expected| <= 2e-2 + 2e-2 |expected|, as published; for pure float32 on a CPU,
          1e-4 instead of 2e-2 (other devices round the operands of products)
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

# Laps of `verify` and of `confirm`; odd, so that the median is the ratio of a lap.
LAPS, CONFIRMING_LAPS = 9, 31

# Distributions of inputs: normal, or Cauchy of scale 2 (outliers stress the norms).
KINDS = ("normal", "masked", "cauchy")


class Field(NamedTuple):
  """A field of a schedule: its name, its choices (at most 8), and its meaning."""

  name: str
  choices: tuple[Any, ...]
  meaning: str


def complaint(artefact: Any, fields: Sequence[Field]) -> str:
  """Returns why an object does not choose each field once; "" if it does."""
  names = [field.name for field in fields]
  if not isinstance(artefact, dict) or set(artefact) != set(names):
    return f"artefact: got {environment.shown(artefact)}, expected a dict of {', '.join(names)}"
  for field in fields:
    value = artefact[field.name]
    # Compares types too, because True == 1 == 1.0.
    if not any(type(value) is type(choice) and value == choice for choice in field.choices):
      listed = ", ".join(map(str, field.choices))
      return f"{field.name}: got {environment.shown(value)}, expected one of {listed}"
  return ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Race:
  """Result of a race of a contestant against the reference.

  Attributes:
    reason: why the contestant is invalid; "" if every result was right.
    ratios: by lap, wall time of the reference / of the contestant.
    cpu_ratios: by lap, the same ratio of the process's CPU times.
    seconds: median wall time of the contestant.
    reference_seconds: median wall time of the reference.
    error: largest |got - expected| over all results.
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
    contestant: function of the inputs; returns arrays on the device.
    plain: the reference, with the same signature.
    inputs_of: function of a seed and the lap's number, so that kinds can take turns.
    laps: timed laps; `len(KINDS)` warm-up laps come first and are checked too.
    tolerance: absolute and relative tolerance.
    seed: None for an unknown seed; a number makes the inputs repeatable.
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
        # Tiles may exceed the machine's resources; the reference must not fail.
        if place:
          raise
        line = (str(error).splitlines() or [""])[0][:160]
        return Race(reason=f"program: got {type(error).__name__}: {line}, expected an answer")
      wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
      if lap >= 0:
        walls[place].append(wall)
        # The clock's resolution may be coarser than a lap.
        cpus[place].append(max(cpu, 1e-6))
    kept.append(outputs)
    # A contestant that fails in warm-up is not timed.
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
  """Returns why a result is wrong ("" if it is right), and the largest difference."""
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
    # Equal infinities have distance zero.
    apart = np.abs(np.subtract(a, b, out=np.zeros_like(a), where=a != b))
    # In this form NaN is wrong, and so is any distance from infinity.
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
