"""Runs a pipeline: each step maps a matrix and its pending transforms to the next state."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
from typing import Any

import numpy as np

from experiments.problems.denoising import smoothing

# Maximum of log(1 + v) when it is exponentiated back.
MAX_LOG = 50.0


@dataclasses.dataclass(frozen=True)
class _State:
  """State of a pipeline: a matrix, and the transforms applied to it."""

  x: np.ndarray
  transforms: tuple[str, ...] = ()

  def plain(self) -> np.ndarray:
    """Returns the matrix with all transforms undone, f64[c, g] >= 0."""
    x = self.x
    for transform in reversed(self.transforms):
      x = _undone(x, transform)
    return np.maximum(x, 0.0)


def run(steps: Sequence[dict[str, Any]], train: np.ndarray) -> np.ndarray:
  """Applies a valid pipeline to counts; returns f64[c, g] >= 0 with the counts' sums per cell."""
  libraries = train.sum(axis=1, keepdims=True)
  # 1 for a cell without molecules, which stays empty.
  size = np.where(libraries > 0, libraries, 1.0) / np.median(libraries)
  state = _State(train)
  saved = state
  for step in steps:
    if step["op"] == "save":
      saved = state
    else:
      state = _taken(step, state, saved, train, size)
  plain = state.plain()
  sums = plain.sum(axis=1, keepdims=True)
  return plain * np.divide(libraries, sums, out=np.zeros_like(sums), where=sums > 0)


def _taken(
  step: dict[str, Any], state: _State, saved: _State, train: np.ndarray, size: np.ndarray
) -> _State:
  """Returns the state after a step; `size`, f64[c, 1], is the library size over the median."""
  x = state.x
  match step["op"]:
    case "normalise":
      plain = state.plain()
      sums = plain.sum(axis=1, keepdims=True)
      target = np.median(train.sum(axis=1))
      return _with_plain(
        state, plain * np.divide(target, sums, out=np.zeros_like(sums), where=sums > 0)
      )
    case "sqrt" | "log":
      return _State(_done(x, step["op"]), (*state.transforms, step["op"]))
    case "invert":
      return _State(_undone(x, state.transforms[-1]), state.transforms[:-1])
    case "svd":
      mean = x.mean(axis=0)
      return dataclasses.replace(state, x=smoothing.low_rank(x - mean, step["rank"]) + mean)
    case "diffuse":
      return dataclasses.replace(
        state, x=smoothing.diffuse(x, step["neighbours"], step["times"], step["decay"])
      )
    case "genes":
      smooth = smoothing.genes(x, step["neighbours"])
      return dataclasses.replace(state, x=(1 - step["weight"]) * x + step["weight"] * smooth)
    case "alra":
      return dataclasses.replace(state, x=smoothing.alra(x, step["rank"], step["quantile"]))
    case "nmf":
      found = smoothing.nmf(np.maximum(x, 0), step["rank"], step["iterations"])
      return dataclasses.replace(state, x=found)
    case "shrink":
      plain = state.plain()
      sums = plain.sum(axis=1, keepdims=True)
      prior = sums * _gene_means(train)
      return _with_plain(
        state, (size * plain + step["strength"] * prior) / (size + step["strength"])
      )
    case "blend":
      plain = state.plain()
      sources = {"raw": train, "mean": _gene_means(train), "saved": saved.plain()}
      source = np.broadcast_to(sources[step["source"]], plain.shape)
      sums = source.sum(axis=1, keepdims=True)
      ratio = np.divide(
        plain.sum(axis=1, keepdims=True), sums, out=np.zeros_like(sums), where=sums > 0
      )
      other = _with_plain(state, source * ratio)
      return dataclasses.replace(state, x=(1 - step["weight"]) * x + step["weight"] * other.x)
    case "rescale":
      plain = state.plain()
      # Gene totals over cells of equal size, so that large cells have no higher weight.
      wanted = (train / size).sum(axis=0)
      sums = plain.sum(axis=0)
      return _with_plain(
        state, plain * np.divide(wanted, sums, out=np.zeros_like(sums), where=sums > 0)
      )
    case _:  # power
      return _with_plain(state, state.plain() ** step["exponent"])


def _with_plain(state: _State, plain: np.ndarray) -> _State:
  """Returns a state with the transforms of another state and these plain values."""
  x = plain
  for transform in state.transforms:
    x = _done(x, transform)
  return _State(x, state.transforms)


def _done(x: np.ndarray, transform: str) -> np.ndarray:
  positive = np.maximum(x, 0.0)
  return np.sqrt(positive) if transform == "sqrt" else np.log1p(positive)


def _undone(x: np.ndarray, transform: str) -> np.ndarray:
  positive = np.maximum(x, 0.0)
  return positive**2 if transform == "sqrt" else np.expm1(np.minimum(positive, MAX_LOG))


def _gene_means(train: np.ndarray) -> np.ndarray:
  """Returns each gene's share of all molecules, f64[1, g]."""
  return train.sum(axis=0, keepdims=True) / train.sum()
