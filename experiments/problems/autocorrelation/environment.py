"""The discovery environments: starts, verification, prompts, pictures and classical baselines."""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
from typing import Any

import numpy as np

from experiments.problems import step_functions
from experiments.problems.autocorrelation import rules
from experiments.problems.autocorrelation.edits import (
  ANNEALING_STEPS,
  MAX_PRODUCTS,
  POLISH_PROGRAMS,
  AutocorrelationEdits,
)
from experiments.problems.autocorrelation.rules import first_constant, second_constant
from experiments.problems.step_functions import MAX_HEIGHT, MIN_SUM, SIZES
from seerjax.discovery import environment
from seerjax.discovery.environment import Artefact, Published, Score


@dataclasses.dataclass(frozen=True)
class _Autocorrelation:
  """Base class of both problems."""

  num_steps: int

  def __post_init__(self):
    if not 2 <= self.num_steps <= step_functions.MAX_STEPS:
      raise ValueError(
        f"{type(self).__name__}.num_steps: got {self.num_steps}, expected 2 to"
        f" {step_functions.MAX_STEPS}; edits do best with some hundreds, programs take any."
      )

  @property
  def language(self) -> AutocorrelationEdits:
    raise NotImplementedError

  def start(self, seed: int) -> Artefact:
    """Returns a random constant with a little noise; the paper starts from the constant."""
    rng = np.random.default_rng([seed, 0xAC])
    heights = rng.uniform(0.5, 1.5) * (1 + 0.4 * rng.uniform(-1, 1, self.num_steps))
    return heights.tolist()

  def polished_starts(self, seed: int) -> Iterator[Artefact]:
    """Yields starts, each annealed once and then polished as edits do."""
    edits = self.language
    everywhere = np.ones(self.num_steps, bool)
    steps = max(min(ANNEALING_STEPS, MAX_PRODUCTS // self.num_steps**2), 1)
    index = 0
    while True:
      heights = edits.settle(np.array(self.start(seed * 1_000_003 + index)))
      heights = edits.anneal(heights, steps, 0.1, 0.01)
      yield edits.polish(heights, POLISH_PROGRAMS, SIZES[6], everywhere).tolist()
      index += 1

  def classical(self, seed: int) -> Iterator[Artefact]:
    """Yields annealed functions; large ones are first annealed in blocks of two or three steps.

    A round anneals 24 absolute values of smooth noise, with one height per block (uniform starts
    all end in one poor basin), then perturbations of the best of them until 40 in a row have gained
    nothing. Then every step has its own height, until 8 perturbations have gained nothing; linear
    programs end the round.
    """
    edits = self.language
    rng = np.random.default_rng([seed, 0xC1A551C])
    n = self.num_steps
    block = edits.block(min(max(n // 100, 1), 3))  # A hundred heights need no blocks.
    steps = {
      size: max(min(ANNEALING_STEPS, MAX_PRODUCTS * size**2 // n**2), 1) for size in (1, block)
    }

    def smooth(size: int) -> np.ndarray:
      width = max(int(size * rng.choice((0.1, 0.2, 0.3))), 1)
      draws = rng.standard_normal(size + width - 1)
      return np.convolve(draws, np.full(width, width**-0.5), "valid")

    def changed(heights: np.ndarray) -> np.ndarray:
      new, size = heights.copy(), 10 ** rng.uniform(-1.5, 0.0)
      match rng.integers(3):
        case 0:
          new *= np.exp(size * smooth(n))
        case 1:
          width = max(int(n * rng.uniform(0.05, 0.5)), 1)
          first = int(rng.integers(n - width + 1))
          part = slice(first, first + width)
          new[part] = (1 - size) * new[part] + size * 1.25 * np.abs(smooth(width))
        case _:
          new *= np.exp(0.05 * rng.standard_normal(n))
      return edits.settle(new)

    while True:
      best: np.ndarray | None = None
      for _ in range(24):
        start = edits.settle(np.repeat(np.abs(smooth(n // block)), block))
        found = edits.anneal(start, steps[block], 0.2, 0.02, block)
        best = found if best is None else edits.better(found, best)
        yield found.tolist()
      assert best is not None
      for size, patience, rates, temperatures in (
        (block, 40, (-1.7, -0.8), (-2.7, -1.7)),
        (1, 8, (-1.9, -1.2), (-2.7, -1.9)),
      ):
        num_failed = 0
        while num_failed < patience:
          rate, temperature = 10 ** rng.uniform(*rates), 10 ** rng.uniform(*temperatures)
          found = edits.anneal(changed(best), steps[size], rate, temperature, size)
          chosen = edits.better(found, best)
          num_failed = num_failed + 1 if chosen is best else 0
          best = chosen
          yield found.tolist()
      yield edits.polish(best, POLISH_PROGRAMS, 0.02, np.ones(n, bool)).tolist()

  def picture(self, artefact: Artefact) -> Any:
    """Returns a Figure of the function and of f*f, with the maximum marked."""
    heights = self.language.settle(np.array(artefact, np.float64))
    nodes = np.concatenate([[0.0], np.convolve(heights, heights), [0.0]])
    nodes = nodes / (2 * self.num_steps)  # f*f of the function with mean height 1 on width 1/2.
    name = "C2" if self.language.is_second else "C1"
    value = self.language.value(heights)
    return step_functions.picture(
      heights,
      (-0.25, 0.25),
      nodes,
      (-0.5, 0.5),
      left=dict(xlabel="x", ylabel="f(x)", title=f"{self.num_steps} steps, mean 1"),
      right=dict(xlabel="x", ylabel="(f*f)(x)", title=f"{name} = {value:.8f}"),
    )


@dataclasses.dataclass(frozen=True)
class FirstAutocorrelation(_Autocorrelation):
  """The first inequality: a function with a small maximum of its self-convolution.

  Attributes:
    num_steps: n; at 300, one annealing run takes a quarter of a CPU second.
  """

  num_steps: int = 300

  @property
  def name(self) -> str:
    return f"first_autocorrelation_{self.num_steps}"

  @property
  def is_maximised(self) -> bool:
    return False

  @property
  def published(self) -> tuple[Published, ...]:
    return rules.FIRST_PUBLISHED

  @property
  def language(self) -> AutocorrelationEdits:
    return AutocorrelationEdits(num_steps=self.num_steps, is_second=False, target=rules.FIRST_GOAL)

  def verify(self, artefact: Artefact) -> Score:
    """Returns C1, rounded up; the certificate is the fraction."""
    heights = step_functions.check_heights(artefact, self.num_steps)
    if isinstance(heights, str):
      return environment.invalid(heights)
    exact = first_constant(heights)
    value = step_functions.at_least(exact)
    proof = step_functions.certificate(exact, value)
    return Score(is_valid=True, value=value, reward=1 / value, certificate=proof)

  def describe(self, artefact: Artefact, score: Score) -> str:
    """Returns the problem's description for a model that writes programs."""
    return (
      "First autocorrelation inequality. For f >= 0 on [-1/4, 1/4], constant on"
      f" n = {self.num_steps} equal steps of heights a[0..n-1], make\n"
      "  C1 = 2 n max_k c[k] / (sum a)^2,  c = numpy.convolve(a, a),\n"
      "as small as possible: each value is an upper bound of the constant C1 with"
      " max (f*f) >= C1 (integral of f)^2.\n"
      f"Heights are 0 to {MAX_HEIGHT:g}, their sum at least {MIN_SUM:g}; scale does not matter.\n"
      + step_functions.program_rules(self.num_steps)
      + f"Now: C1 = {score.value:.10f}. Best known, with more steps: {self.published[0].value}."
      f" People reached 1.50992 in 2010.\nartefact = {step_functions.heights_text(artefact)}\n"
    )


@dataclasses.dataclass(frozen=True)
class SecondAutocorrelation(_Autocorrelation):
  """The second inequality: a function with a self-convolution as flat as possible.

  Attributes:
    num_steps: n; the records of 2026 have tens of thousands.
  """

  num_steps: int = 100

  @property
  def name(self) -> str:
    return f"second_autocorrelation_{self.num_steps}"

  @property
  def is_maximised(self) -> bool:
    return True

  @property
  def published(self) -> tuple[Published, ...]:
    return rules.SECOND_PUBLISHED

  @property
  def language(self) -> AutocorrelationEdits:
    return AutocorrelationEdits(num_steps=self.num_steps, is_second=True, target=rules.SECOND_GOAL)

  def verify(self, artefact: Artefact) -> Score:
    """Returns C2, rounded down; the certificate is the fraction."""
    heights = step_functions.check_heights(artefact, self.num_steps)
    if isinstance(heights, str):
      return environment.invalid(heights)
    exact = second_constant(heights)
    value = step_functions.at_most(exact)
    proof = step_functions.certificate(exact, value)
    return Score(is_valid=True, value=value, reward=value, certificate=proof)

  def describe(self, artefact: Artefact, score: Score) -> str:
    """Returns the problem's description for a model that writes programs."""
    return (
      "Second autocorrelation inequality. For f >= 0, constant on"
      f" n = {self.num_steps} equal steps of heights a[0..n-1], make\n"
      "  C2 = (2 sum c[k]^2 + sum c[k] c[k+1]) / 3 / (sum c * max c),  c = numpy.convolve(a, a),\n"
      "as large as possible: each value is a lower bound of the constant C2 with"
      " |f*f|_2^2 <= C2 |f*f|_1 |f*f|_inf, which is at most 1.\n"
      f"Heights are 0 to {MAX_HEIGHT:g}, their sum at least {MIN_SUM:g}; scale does not matter.\n"
      + step_functions.program_rules(self.num_steps)
      + f"Now: C2 = {score.value:.10f}. Best known, with more steps: {self.published[0].value}."
      f" People reached 0.88922 in 2010.\nartefact = {step_functions.heights_text(artefact)}\n"
    )
