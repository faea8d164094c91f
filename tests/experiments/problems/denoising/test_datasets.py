"""Counts are simulated with known moments, or read from files that are checked first."""

from __future__ import annotations

import math
import pathlib
import subprocess
import sys
import zipfile

import h5py
import numpy as np
import pytest
from scipy import sparse

from experiments.problems import denoising
from experiments.problems.denoising import datasets


def test_simulated_counts_have_the_moments_of_a_negative_binomial():
  counts, truth, order = datasets.simulate(7)
  assert counts.shape == (datasets.SIMULATED_CELLS, datasets.SIMULATED_GENES)
  assert sorted(order) == list(range(len(counts)))
  assert truth is not None
  # Variance of gamma-Poisson: mean + mean^2 / 5.
  standardised = (counts - truth) / np.sqrt(truth + truth**2 / 5)
  assert standardised.mean() == pytest.approx(0, abs=0.02)
  assert standardised.var() == pytest.approx(1, abs=0.05)


def test_counts_come_from_npz(tmp_path):
  counts = np.random.default_rng(0).poisson(3.0, (60, 30))
  counts[:, 7] = 0
  np.savez(tmp_path / "cells.npz", counts=counts)
  environment = denoising.Denoising(tmp_path / "cells.npz", seed=4)
  assert environment.name == "denoising_cells"
  # A gene that no cell has is left out.
  assert environment.train.shape == (60, 29)
  assert (environment.counts.counts == np.delete(counts, 7, axis=1)).all()
  assert environment.verify(environment.start(0)).is_valid
  assert len(environment.picture(environment.start(0)).axes) == 3
  with pytest.raises(ValueError, match="got denoising_cells, expected a simulated set"):
    environment.against_truth(environment.start(0))


def refused_counts():
  good = np.full((20, 10), 3.0)
  negative, half, empty = good.copy(), good.copy(), good.copy()
  negative[2, 3] = -1
  half[1, 1] = 0.5
  empty[5] = 0
  unknown = good.copy()
  unknown[0, 0] = math.nan
  large, thin = good.copy(), 10 * good
  large[0, 0] = 2**40
  thin[:, 3:] = 0
  return [
    (negative, "got -1.0 at cell 2, gene 3 in .*expected whole numbers of molecules from 0 to"),
    (half, "got 0.5 at cell 1, gene 1 .*give raw counts, not normalised ones"),
    (unknown, "got nan at cell 0, gene 0"),
    (empty, "got 0 molecules of cell 5 .*expected at least 20; remove empty cells"),
    (large, "got 1099511627776.0 at cell 0, gene 0 .*molecules from 0 to 2147483647"),
    (thin, "got molecules of 3 genes in .*expected 4 at least; give genes that cells have"),
    (good[0], r"got counts\[10\] .*expected cells x genes"),
    (good[:3], r"got counts\[3, 10\]"),
    (good.astype(complex), "got dtype complex128 .*expected integers or whole floats"),
    (np.zeros((5000, 4001), np.int8), r"got an array of \[5000, 4001\] .*at most 20000000 entries"),
  ]


@pytest.mark.parametrize(("counts", "message"), refused_counts())
def test_what_are_no_counts_is_refused(counts, message: str, tmp_path):
  np.savez_compressed(tmp_path / "bad.npz", counts=counts)
  with pytest.raises(ValueError, match=f"denoising.load: {message}"):
    datasets.load(tmp_path / "bad.npz")


def test_files_that_are_none_of_ours_are_refused(tmp_path):
  np.savez(tmp_path / "other.npz", matrix=np.ones((5, 5)))
  with pytest.raises(ValueError, match=r"got arrays \['matrix'\] .*expected 'counts'"):
    datasets.load(tmp_path / "other.npz")
  with pytest.raises(ValueError, match="got 'cells.csv', expected a name that ends in .npz or"):
    datasets.load(tmp_path / "cells.csv")


def test_a_file_that_is_not_there_is_refused(tmp_path):
  with pytest.raises(FileNotFoundError, match="none.npz', expected a file; correct the path"):
    datasets.load(tmp_path / "none.npz")


def test_a_truncated_file_is_refused(tmp_path):
  path = tmp_path / "cells.npz"
  np.savez_compressed(path, counts=np.random.default_rng(0).poisson(3.0, (30, 12)))
  whole = path.read_bytes()
  for size in (0, 10, len(whole) // 2, len(whole) - 1):
    path.write_bytes(whole[:size])
    with pytest.raises(ValueError, match="which does not read .*expected a whole .npz of counts"):
      datasets.load(path)


def test_a_file_with_other_bytes_in_it_is_refused_or_read_as_it_was(tmp_path):
  path = tmp_path / "cells.npz"
  counts = np.random.default_rng(0).poisson(3.0, (30, 12))
  np.savez_compressed(path, counts=counts)
  whole, messages = path.read_bytes(), []
  for place in range(0, len(whole), 3):
    path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
    try:
      assert (datasets.load(path).counts == counts).all()  # Dates, for one, are not looked at.
    except ValueError as error:
      messages.append(str(error))
  assert len(messages) > len(whole) // 6
  assert all(message.startswith("denoising.load: got ") for message in messages)


def test_the_array_that_was_checked_is_the_one_that_is_read(tmp_path):
  counts = np.random.default_rng(0).poisson(3.0, (30, 12))
  np.savez(tmp_path / "cells.npz", counts=counts)
  archive = zipfile.ZipFile(tmp_path / "cells.npz", "a")
  with archive, archive.open("counts", "w") as member:  # numpy would take this one for "counts".
    np.save(member, counts + 1)
  assert (datasets.load(tmp_path / "cells.npz").counts == counts).all()


def test_pickled_objects_are_refused(tmp_path):
  np.savez(tmp_path / "cells.npz", counts=np.array([[object()] * 5] * 5))
  with pytest.raises(ValueError, match="got dtype object in .*expected integers or whole floats"):
    datasets.load(tmp_path / "cells.npz")


def test_an_array_that_would_fill_the_memory_is_refused_unread(tmp_path):
  header = {"descr": "|i1", "fortran_order": False, "shape": (10**6, 10**6)}
  path = tmp_path / "cells.npz"
  with zipfile.ZipFile(path, "w") as archive, archive.open("counts.npy", "w") as member:
    np.lib.format.write_array_header_1_0(member, header)
  with pytest.raises(ValueError, match=r"got an array of \[1000000, 1000000\] .*take fewer cells"):
    datasets.load(path)


def test_h5ad_without_h5py_says_what_to_install(tmp_path):
  # In a separate process, in which the package cannot be found.
  program = """
import sys
sys.modules["h5py"] = None
from experiments.problems.denoising import datasets
datasets.load(sys.argv[1])
"""
  path = tmp_path / "cells.h5ad"
  path.touch()
  done = subprocess.run(
    [sys.executable, "-c", program, path],
    capture_output=True,
    text=True,
    cwd=pathlib.Path(__file__).parents[4],
    check=False,
  )
  assert "h5py is not installed; run `pip install h5py`" in done.stderr


def write_sparse(path, matrix, **changes) -> None:
  """Writes X as AnnData does, except for the given changes."""
  parts = {name: getattr(matrix, name) for name in ("data", "indices", "indptr")} | changes
  shape = parts.pop("shape", matrix.shape)
  with h5py.File(path, "w") as file:
    for name, part in parts.items():
      file[f"X/{name}"] = part
    file["X"].attrs["shape"] = shape
    file["X"].attrs["encoding-type"] = f"{matrix.format}_matrix"


def test_h5ad_files_that_are_none_of_ours_are_refused(tmp_path):
  path = tmp_path / "cells.h5ad"
  matrix = sparse.csr_matrix(np.full((6, 5), 9))
  with h5py.File(path, "w") as file:
    file["obs"] = np.ones(5)
  with pytest.raises(ValueError, match="which does not read .*expected a whole .h5ad of counts"):
    datasets.load(path)
  path.write_bytes(path.read_bytes()[:100])
  with pytest.raises(ValueError, match="which does not read"):
    datasets.load(path)
  # `toarray` writes wherever an index points.
  write_sparse(path, matrix, indices=matrix.indices + 1000)
  with pytest.raises(ValueError, match="which does not read .*indices"):
    datasets.load(path)
  write_sparse(path, matrix, shape=(10**6, 10**6))
  with pytest.raises(ValueError, match=r"got an array of \[1000000, 1000000\]"):
    datasets.load(path)


@pytest.mark.parametrize("form", ["dense", "csr_matrix", "csc_matrix", "layer"])
def test_counts_come_from_h5ad(form: str, tmp_path):
  counts = np.random.default_rng(1).poisson(3.0, (30, 12))
  path = tmp_path / "cells.h5ad"
  match form:
    case "dense" | "layer":
      with h5py.File(path, "w") as file:
        file["X"] = counts if form == "dense" else np.log1p(counts)
        if form == "layer":
          file["layers/counts"] = counts
    case _:
      write_sparse(path, getattr(sparse, form)(counts))
  assert (datasets.load(tmp_path / "cells.h5ad").counts == counts).all()
