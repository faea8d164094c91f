"""The discovery environment: verification, reports, polish, prompts and classical baselines."""

from __future__ import annotations

from collections.abc import Iterator
import os
import pathlib
from typing import Any

import numpy as np

from experiments.problems.denoising import datasets, operations, pipeline, rules
from experiments.problems.denoising.edits import PipelineEdits
from experiments.problems.denoising.operations import BY_NAME, MAX_STEPS, OPERATIONS
from experiments.problems.denoising.rules import TARGET_SUM, TRAIN_SHARE
from seerjax.discovery import environment as environment_lib
from seerjax.discovery.environment import Artefact, Published, Score


class Denoising:
  """The environment of pipelines on one data set.

  Attributes:
    name, is_maximised, published, language: as in `discovery.Environment`.
    counts: counts of the data set, with `counts.truth` if it is simulated.
    train, validation: f64[c, g], the data visible to search.
    poisson_limit: maximum of a pipeline's Poisson number, nats.
  """

  def __init__(self, path: str | os.PathLike[str] = "", *, seed: int = 0):
    """Loads or simulates the data and splits its molecules.

    Args:
      path: as in `load`; "" for the simulated set.
      seed: seed of the simulation and of the split.

    Raises:
      ValueError, ModuleNotFoundError: as in `load`.
    """
    self.is_maximised = False
    # Published results are for other counts and splits, which would have to be downloaded.
    self.published: tuple[Published, ...] = ()
    self.counts = datasets.load(path) if path else datasets.simulate(seed)
    label = pathlib.Path(path).stem if path else "simulated"
    self.name = f"denoising_{label}"
    self.train, self.validation, self._heldout = rules.split(self.counts.counts, seed)
    self._total = float(self.train.sum())
    self.language = PipelineEdits(self.polish)
    plain = [
      [{"op": "normalise"}, {"op": "shrink", "strength": strength}]
      for strength in BY_NAME["shrink"].parameters[0].choices
    ]
    likelihoods = [self._poisson(pipeline.run(steps, self.train)) for steps in plain]
    self._plain = plain[int(np.argmin(likelihoods))]
    self.poisson_limit = min(likelihoods)

  def start(self, seed: int) -> Artefact:
    """Returns normalised counts, shrunk towards the mean cell with the most likely strength."""
    return {"steps": [dict(step) for step in self._plain]}

  def verify(self, artefact: Artefact) -> Score:
    reason = operations.complaint(artefact)
    if reason:
      return environment_lib.invalid(reason)
    try:
      with np.errstate(over="ignore", invalid="ignore"):  # Non-finite results are rejected below.
        denoised = pipeline.run(artefact["steps"], self.train)
    except np.linalg.LinAlgError as error:
      return environment_lib.invalid(
        f"steps: {error}; expected numbers that stay far from overflow"
      )
    reason = self._refusal(denoised)
    if reason:
      return environment_lib.invalid(reason)
    value = rules.mse(denoised, self.validation)
    return Score(is_valid=True, value=value, reward=1 / (1e-8 + value))

  def poisson_share(self, artefact: Artefact) -> float:
    """Returns the likelihood on a scale from train (0) to validation itself (1).

    Raises:
      ValueError: if the artefact is not a pipeline.
    """
    worst = self._poisson(self.train)
    best = self._poisson(self.validation * (self._total / self.validation.sum()))
    return (worst - self._poisson(self.denoise(artefact))) / (worst - best)

  def heldout(self, artefact: Artefact) -> float:
    """Returns the MSE on the held-out molecules, which search does not use.

    Raises:
      ValueError: if the artefact is not a pipeline.
    """
    return rules.mse(self.denoise(artefact), self._heldout)

  def against_truth(self, artefact: Artefact) -> float:
    """Returns the MSE against the true expression of a simulated set.

    Raises:
      ValueError: if the artefact is not a pipeline, or the data has no known truth.
    """
    if self.counts.truth is None:
      raise ValueError(
        f"Denoising.against_truth: got {self.name}, expected a simulated set; nothing tells the"
        " truth of a measured one: use `heldout`."
      )
    return rules.mse(self.denoise(artefact), self.counts.truth)

  def denoise(self, artefact: Artefact) -> np.ndarray:
    """Applies a pipeline to train; returns f64[c, g] with the same total per cell.

    Raises:
      ValueError: if the artefact is not a pipeline.
    """
    reason = operations.complaint(artefact)
    if reason:
      raise ValueError(f"Denoising: {reason}; see `OPERATIONS`.")
    return pipeline.run(artefact["steps"], self.train)

  def polish(self, steps: list[dict[str, Any]], at: int) -> list[dict[str, Any]]:
    """Moves each knob of one step to neighbouring choices while the score improves.

    A knob moves at most twice, so at most twelve pipelines are tried.
    """
    best = [dict(step) for step in steps]
    score = self.verify({"steps": best})
    for parameter in BY_NAME[best[at]["op"]].parameters:
      for direction in (-1, 1):
        improved = False
        for _ in range(2):
          moved = dict(best[at])
          moved[parameter.name] = operations.shifted(parameter, moved[parameter.name], direction)
          if moved == best[at]:
            break
          tried = [*best[:at], moved, *best[at + 1 :]]
          outcome = self.verify({"steps": tried})
          if not environment_lib.is_better(self, outcome.value, score.value):
            break
          best, score, improved = tried, outcome, True
        if improved:
          break
    return best

  def classical(self, seed: int) -> Iterator[Artefact]:
    """Yields the best MAGIC-style diffusion so far, over a shuffled grid of its knobs.

    A pipeline normalises, takes the square root or logarithm, optionally principal components,
    diffuses with the given neighbours, steps and decay, transforms back, and optionally rescales
    genes (MAGIC's last step).
    """
    diffusion = BY_NAME["diffuse"]
    grid = [
      [
        {"op": "normalise"},
        {"op": transform},
        *([{"op": "svd", "rank": rank}] if rank else []),
        {"op": "diffuse", "neighbours": neighbours, "times": times, "decay": decay},
        {"op": "invert"},
        *([{"op": "rescale"}] if is_rescaled else []),
      ]
      for transform in ("sqrt", "log")
      for rank in (0, 20, 48)
      for neighbours in diffusion.parameters[0].choices
      for times in diffusion.parameters[1].choices
      for decay in diffusion.parameters[2].choices[1:6:2]
      for is_rescaled in (False, True)
    ]
    rng = np.random.default_rng([seed, 1])
    best = self.start(seed)
    score = self.verify(best)
    while True:
      for place in rng.permutation(len(grid)):
        candidate = {"steps": [dict(step) for step in grid[place]]}
        outcome = self.verify(candidate)
        if environment_lib.is_better(self, outcome.value, score.value):
          best, score = candidate, outcome
        yield best

  def polished_starts(self, seed: int) -> Iterator[Artefact]:
    """Yields random pipelines of two to five steps, polished step by step.

    If none of a dozen is valid, the plain start is polished.
    """
    rng = np.random.default_rng([seed, 2])
    while True:
      steps = self.start(seed)["steps"]
      # Most random pipelines are invalid; a dozen tries keep an item within a second.
      for _ in range(12):
        tried = [{"op": "normalise"}]
        for _ in range(rng.integers(1, 5)):
          operation = OPERATIONS[rng.integers(len(OPERATIONS))]
          tried.append(operations.step(operation, rng.integers(0, 16, 3).tolist()))
        if self.verify({"steps": tried}).is_valid:
          steps = tried
          break
      for at in range(len(steps)):
        steps = self.polish(steps, at)
      yield {"steps": steps}

  def describe(self, artefact: Artefact, score: Score) -> str:
    cells, genes = self.train.shape
    listed = "\n".join(
      f"  {operation.name}: {operation.meaning}"
      + "".join(
        f"\n      {parameter.name}: {parameter.meaning}, "
        + (
          f"one of {', '.join(map(str, parameter.choices))}"
          if isinstance(parameter.choices[0], str)
          else f"{parameter.choices[0]} to {parameter.choices[-1]}"
        )
        for parameter in operation.parameters
      )
      for operation in OPERATIONS
    )
    return (
      f"Single-cell denoising, {cells} cells x {genes} genes. Molecules were dealt at random to"
      f" train ({TRAIN_SHARE:.0%}), validation and a part that you never see. A pipeline of 1 to"
      f" {MAX_STEPS} steps runs on train; its output is made non-negative and each cell is scaled"
      " to its train molecules.\n"
      f"Minimise the MSE to validation after normalising cells to {TARGET_SUM:.0f} and log(1 + x)."
      " The mean Poisson negative log-likelihood of validation (its total given) must be at most"
      f" {self.poisson_limit:.6f} nats, else the pipeline is invalid.\n"
      f'Steps, each a dict with "op" and its knobs:\n{listed}\n'
      f"Now: {artefact}\n"
      f"Its MSE: {score.value:.6f}.\n"
      "Write Python that defines improve(artefact, seconds, seed) and returns a better pipeline,"
      ' {"steps": [...]}; plain data, within `seconds`.'
    )

  def picture(self, artefact: Artefact) -> Any:
    """Returns heatmaps of cells by genes: train, denoised and, if simulated, the truth.

    The title has the MSE on the held-out molecules.
    """
    from matplotlib import figure

    panels = [("train", self.train), ("denoised", self.denoise(artefact))]
    if self.counts.truth is not None:
      panels.append(("truth", self.counts.truth))
    means = rules.log_normalised(self.train).mean(axis=0)
    genes = np.argsort(-means, kind="stable")
    drawing = figure.Figure(figsize=(4 * len(panels), 4.5), layout="constrained")
    axes = drawing.subplots(1, len(panels), sharey=True)
    top = float(rules.log_normalised(panels[-1][1]).max())
    for axis, (title, matrix) in zip(axes, panels):
      values = rules.log_normalised(matrix)[self.counts.order][:, genes]
      axis.imshow(values, aspect="auto", vmin=0, vmax=top, interpolation="nearest")
      axis.set(title=title, xlabel="genes")
    axes[0].set_ylabel("cells")
    found, plain = (self.heldout(one) for one in (artefact, self.start(0)))
    drawing.suptitle(f"MSE on held-out molecules {found:.4f}; the plain start's {plain:.4f}")
    drawing.colorbar(axes[0].images[0], ax=axes, label="log(1 + molecules in 10,000)")
    return drawing

  def _poisson(self, denoised: np.ndarray) -> float:
    return rules.poisson(denoised, self.validation, self._total)

  def _refusal(self, denoised: np.ndarray) -> str:
    if not np.isfinite(denoised).all():
      return "pipeline: got values that are not finite, expected finite counts"
    if not (denoised.max() <= self._total and denoised.min() >= 0):
      return f"pipeline: got {denoised.max():.3g} molecules, expected 0 to {self._total:.0f}"
    likelihood = self._poisson(denoised)
    if not likelihood <= self.poisson_limit:
      return (
        f"pipeline: got a Poisson number of {likelihood:.5f} nats, expected at most"
        f" {self.poisson_limit:.5f}, the plain start's; keep seen genes above zero, and the scale"
      )
    return ""
