"""Molecule counts by cell and gene: simulated, or read from a file and validated."""

from __future__ import annotations

from collections.abc import Sequence
import importlib
import math
import os
import pathlib
from typing import NamedTuple

import numpy as np
from scipy import sparse

from experiments.problems.denoising import rules, smoothing

# Maximum cells x genes, which fits in memory several times.
MAX_ENTRIES = 20_000_000
LEAST_MOLECULES = 20
MAX_COUNT = 2**31 - 1  # Per cell and gene.

SIMULATED_CELLS, SIMULATED_GENES = 500, 200


class Counts(NamedTuple):
  """Molecule counts by cell and gene.

  Attributes:
    counts: f64[c, g], whole numbers.
    truth: f64[c, g], expected molecules of a simulated set; None for real data.
    order: i64[c], order of cells in pictures.
  """

  counts: np.ndarray
  truth: np.ndarray | None
  order: np.ndarray


def simulate(
  seed: int, *, num_cells: int = SIMULATED_CELLS, num_genes: int = SIMULATED_GENES
) -> Counts:
  """Draws negative-binomial counts with a known truth.

  Half of the cells are on two branches of a trajectory with a common root, the others belong to
  four types. The activity of ten gene programs depends on them. A cell's library size is log-normal
  (median 1500 molecules, standard deviation 0.4 of the logarithm); each entry is gamma distributed
  (shape 5) around the truth, then Poisson.
  """
  rng = np.random.default_rng([seed, num_cells, num_genes])
  num_types, num_programs, dispersion = 4, 10, 5.0
  base = rng.normal(0.0, 1.2, num_genes)
  loadings = rng.gamma(0.6, 1.0, (num_programs, num_genes)) * rng.choice(
    (-1.0, 1.0), (num_programs, num_genes), p=(0.3, 0.7)
  )
  activity = np.zeros((num_cells, num_programs))
  half = num_cells // 2
  progress = rng.random(half)
  branch = rng.integers(0, 2, half)
  # Programs 0 and 1 belong to one branch each; 2 to 4 rise and fall along the way.
  late = np.clip(2 * progress - 0.6, 0.0, None)
  activity[np.arange(half), branch] = late
  for program, centre in ((2, 0.1), (3, 0.4), (4, 0.75)):
    activity[:half, program] = np.exp(-(((progress - centre) / 0.2) ** 2))
  types = rng.integers(0, num_types, num_cells - half)
  activity[half:, 5:] = rng.gamma(2.0, 0.4, (num_types, num_programs - 5))[types]
  rates = np.exp(base + activity @ loadings)
  rates /= rates.sum(axis=1, keepdims=True)
  libraries = 1500 * np.exp(rng.normal(0.0, 0.4, (num_cells, 1)))
  truth = libraries * rates
  counts = rng.poisson(truth * rng.gamma(dispersion, 1 / dispersion, truth.shape))
  groups = np.concatenate([branch, 2 + types])
  order = np.lexsort((np.concatenate([progress, np.zeros(len(types))]), groups))
  return Counts(counts.astype(np.float64), truth, order)


def load(path: str | os.PathLike[str]) -> Counts:
  """Reads counts of cells by genes.

  Args:
    path: an `.npz` with the array "counts"[c, g]; or an `.h5ad` with counts in "layers/counts",
      else "X", dense or as compressed sparse rows (needs h5py).

  Raises:
    ValueError: if the counts are invalid or unreadable; the message names the entry and what to
      change. Arrays with too large a header are not read.
    FileNotFoundError: if there is no such file.
    ModuleNotFoundError: for an `.h5ad` without h5py.
  """
  file = pathlib.Path(path)
  readers = {".npz": _read_npz, ".h5ad": _read_h5ad}
  if file.suffix not in readers:
    raise ValueError(
      f"denoising.load: got {file.name!r}, expected a name that ends in .npz or .h5ad; convert"
      " the file."
    )
  if not file.is_file():
    raise FileNotFoundError(
      f"denoising.load: got {str(file)!r}, expected a file; correct the path behind 'denoising:'."
    )
  try:
    counts = readers[file.suffix](file)
  except (_Refused, ModuleNotFoundError):
    raise
  except Exception as error:  # Invalid bytes raise various errors of zipfile, zlib, NumPy, HDF5.
    raise ValueError(
      f"denoising.load: got {file}, which does not read ({error}), expected a whole {file.suffix}"
      " of counts; write it anew."
    ) from error
  return checked(counts, str(file))


class _Refused(ValueError):
  """Invalid counts with a specific message."""


def _check_header(shape: Sequence[int], dtype: np.dtype, name: str) -> None:
  """Rejects an array that is too large or has the wrong type, before it is read."""
  if dtype.kind not in "iuf":
    raise _Refused(
      f"denoising.load: got dtype {dtype} in {name}, expected integers or whole floats; convert"
      " them."
    )
  if math.prod(shape) > MAX_ENTRIES:
    raise _Refused(
      f"denoising.load: got an array of {list(shape)} in {name}, expected at most {MAX_ENTRIES}"
      " entries; take fewer cells, or the most variable genes."
    )


def _read_npz(file: pathlib.Path) -> np.ndarray:
  with np.load(file, allow_pickle=False) as archive:
    if "counts" not in archive:
      raise _Refused(
        f"denoising.load: got arrays {sorted(archive)} in {file}, expected 'counts' (cells x"
        " genes); write it with numpy.savez(path, counts=...)."
      )
    # Checks the header first: a few kilobytes may unpack to a terabyte of zeros.
    with archive.zip.open("counts.npy") as member:
      npy = np.lib.format
      is_first = npy.read_magic(member) == (1, 0)
      read_header = npy.read_array_header_1_0 if is_first else npy.read_array_header_2_0
      shape, _, dtype = read_header(member)
      _check_header(shape, dtype, str(file))
    return archive["counts.npy"]  # This exact member; another one may be called "counts".


def _read_h5ad(file: pathlib.Path) -> np.ndarray:
  try:
    h5py = importlib.import_module("h5py")
  except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
      f"denoising.load: got {file.name!r}, which h5py reads, and h5py is not installed; run"
      " `pip install h5py`, or save the counts as .npz."
    ) from error
  with h5py.File(file, "r") as data:
    node = data["layers/counts" if "layers/counts" in data else "X"]
    if not isinstance(node, h5py.Group):
      _check_header(node.shape, node.dtype, str(file))
      return np.asarray(node)
    shape = tuple(int(size) for size in node.attrs["shape"])
    parts = [node[name] for name in ("data", "indices", "indptr")]
    for one in (shape, *(part.shape for part in parts)):
      _check_header(one, parts[0].dtype, str(file))
    kind = node.attrs["encoding-type"]
    compressed = sparse.csc_matrix if kind == "csc_matrix" else sparse.csr_matrix
    matrix = compressed(tuple(np.asarray(part) for part in parts), shape=shape)
    matrix.check_format(full_check=True)  # `toarray` would write to unchecked indices.
    return matrix.toarray()


def checked(counts: np.ndarray, name: str) -> Counts:
  """Validates counts; returns them without genes that occur in no cell.

  Args:
    counts: [c, g], of any real dtype.
    name: name of the source, for messages.

  Raises:
    ValueError: as in `load`.
  """

  def refuse(got: str, expected: str, fix: str):
    raise ValueError(f"denoising.load: got {got} in {name}, expected {expected}; {fix}.")

  if counts.ndim != 2 or min(counts.shape, default=0) < 4:
    refuse(f"counts{list(counts.shape)}", "cells x genes, 4 of each at least", "give a matrix")
  _check_header(counts.shape, counts.dtype, name)
  values = counts.astype(np.float64)
  wrong = np.argwhere(~((values >= 0) & (values <= MAX_COUNT) & (values == np.floor(values))))
  if len(wrong):
    cell, gene = wrong[0]
    refuse(
      f"{values[cell, gene]} at cell {cell}, gene {gene}",
      f"whole numbers of molecules from 0 to {MAX_COUNT}",
      "give raw counts, not normalised ones",
    )
  values = values[:, values.sum(axis=0) > 0]
  if values.shape[1] < 4:
    refuse(f"molecules of {values.shape[1]} genes", "4 at least", "give genes that cells have")
  libraries = values.sum(axis=1)
  if (libraries < LEAST_MOLECULES).any():
    cell = int(np.argmin(libraries))
    refuse(
      f"{libraries[cell]:.0f} molecules of cell {cell}",
      f"at least {LEAST_MOLECULES}",
      "remove empty cells",
    )
  centred = rules.log_normalised(values)
  centred -= centred.mean(axis=0)
  order = np.argsort(smoothing.leading(centred, 1)[0][:, 0], kind="stable")
  return Counts(values, None, order)
