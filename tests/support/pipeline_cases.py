"""Denoising pipelines and data sets that several tests use."""

from __future__ import annotations

import functools
import tempfile

import numpy as np

from experiments.problems import denoising
from experiments.problems.denoising import datasets

ENVIRONMENT = denoising.Denoising()
LANGUAGE = ENVIRONMENT.language
MAGIC = {
  "steps": [
    {"op": "normalise"},
    {"op": "sqrt"},
    {"op": "diffuse", "neighbours": 5, "times": 2, "decay": 1.0},
    {"op": "invert"},
  ]
}
# One of each operation, in an order that forms a pipeline.
EVERY_STEP = {
  "normalise": [{"op": "normalise"}],
  "sqrt": [{"op": "sqrt"}],
  "log": [{"op": "log"}],
  "invert": [{"op": "log"}, {"op": "invert"}],
  "svd": [{"op": "sqrt"}, {"op": "svd", "rank": 8}],
  "diffuse": [{"op": "diffuse", "neighbours": 40, "times": 6, "decay": 0.5}],
  "genes": [{"op": "genes", "neighbours": 60, "weight": 0.5}],
  "alra": [{"op": "alra", "rank": 8, "quantile": 0.05}],
  "nmf": [{"op": "nmf", "rank": 4, "iterations": 10}],
  "shrink": [{"op": "shrink", "strength": 0.1}],
  "blend": [{"op": "blend", "source": "mean", "weight": 0.1}],
  "save": [{"op": "save"}, {"op": "sqrt"}, {"op": "blend", "source": "saved", "weight": 0.5}],
  "rescale": [{"op": "rescale"}],
  "power": [{"op": "power", "exponent": 0.9}],
}


@functools.cache
def small() -> denoising.Denoising:
  """Returns a sparse set of 150 cells x 40 genes, for tests that run many pipelines."""
  rng = np.random.default_rng(0)
  whole = datasets.simulate(5, num_cells=150, num_genes=40).counts
  counts = rng.binomial(whole.astype(int), 0.15)
  with tempfile.TemporaryDirectory() as folder:
    np.savez(f"{folder}/small.npz", counts=counts)
    return denoising.Denoising(f"{folder}/small.npz")
