"""Low rank approximation, diffusion and other smoothing of a matrix of cells by genes."""

from __future__ import annotations

import numpy as np
from scipy import sparse

# Principal components used to find neighbouring cells.
EMBEDDING_RANK = 20


def leading(x: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns the leading singular vectors, scaled: x ~ left @ right, f64[c, k] and f64[k, g].

  Uses the eigenvectors of the smaller Gram matrix. They have half the digits, and the remaining
  error is far below the noise.
  """
  if x.shape[1] <= x.shape[0]:
    vectors = np.linalg.eigh(x.T @ x)[1][:, ::-1][:, :rank]
    return x @ vectors, vectors.T
  vectors = np.linalg.eigh(x @ x.T)[1][:, ::-1][:, :rank]
  return vectors, vectors.T @ x


def low_rank(x: np.ndarray, rank: int) -> np.ndarray:
  left, right = leading(x, rank)
  return left @ right


def diffuse(x: np.ndarray, neighbours: int, times: int, decay: float) -> np.ndarray:
  """Returns P^times x, f64[c, g]: rows averaged along random walks between similar rows.

    K_ij = exp(-(|e_i - e_j| / s_i)^decay), s_i the distance to neighbour number `neighbours`,
           over the 3 * neighbours nearest rows; 1 for i = j
    P    = (K + K^T) with rows normalised to sum 1

  Args:
    x: f64[c, g].
    neighbours: number of neighbours of a row.
    times: length of the walk.
    decay: exponent of the kernel's decay.

  Source: van Dijk et al. 2018 (MAGIC), methods.
  """
  num_cells = len(x)
  centred = x - x.mean(axis=0)
  left, right = leading(centred, EMBEDDING_RANK)
  # Rows of `right` are orthogonal, whichever side has the singular values.
  embedding = left * np.linalg.norm(right, axis=1)
  near = min(neighbours, num_cells - 1)
  kept = min(3 * near, num_cells - 1)
  squares = (embedding**2).sum(axis=1)
  columns, weights = [], []
  for start in range(0, num_cells, 1024):
    rows = embedding[start : start + 1024]
    distances = squares[start : start + 1024, None] + squares - 2 * rows @ embedding.T
    distances[np.arange(len(rows)), start + np.arange(len(rows))] = -1.0
    found = np.argpartition(distances, kept, axis=1)[:, : kept + 1]
    chosen = np.take_along_axis(distances, found, axis=1)
    order = np.argsort(chosen, axis=1, kind="stable")
    found = np.take_along_axis(found, order, axis=1)
    # The nearest row is the row itself.
    apart = np.sqrt(np.maximum(np.take_along_axis(chosen, order, axis=1), 0.0))
    width = np.maximum(apart[:, near : near + 1], 1e-12)
    columns.append(found)
    weights.append(np.exp(-(np.minimum((apart / width), 1e3) ** decay)))
  rows = np.repeat(np.arange(num_cells), kept + 1)
  kernel = sparse.csr_matrix(
    (np.concatenate(weights).ravel(), (rows, np.concatenate(columns).ravel())),
    shape=(num_cells, num_cells),
  )
  kernel = sparse.csr_matrix(kernel + kernel.T)
  walk = sparse.csr_matrix(sparse.diags(1 / np.asarray(kernel.sum(axis=1)).ravel()) @ kernel)
  for _ in range(times):
    x = walk @ x
  return x


def genes(x: np.ndarray, neighbours: int) -> np.ndarray:
  """Returns each gene predicted from correlated genes, f64[c, g]."""
  mean, deviation = x.mean(axis=0), x.std(axis=0)
  deviation = np.where(deviation > 1e-12, deviation, 1.0)
  scaled = (x - mean) / deviation
  correlation = scaled.T @ scaled / len(x)
  np.fill_diagonal(correlation, 0.0)
  kept = min(neighbours, x.shape[1] - 1)
  found = np.argpartition(-np.abs(correlation), kept - 1, axis=1)[:, :kept]
  weights = np.zeros_like(correlation)
  values = np.take_along_axis(correlation, found, axis=1)
  np.put_along_axis(weights, found, values, axis=1)
  # Weights are signed for anticorrelated genes; dividing by the sum of magnitudes averages.
  total = np.abs(weights).sum(axis=1)
  return mean + deviation * (scaled @ weights.T) / np.maximum(total, 1e-12)


def alra(x: np.ndarray, rank: int, quantile: float) -> np.ndarray:
  """Returns the low rank approximation of x >= 0 with values within a gene's noise set to 0.

  Source: Linderman et al. 2022, steps 2 and 3 of the algorithm.
  """
  x = np.maximum(x, 0.0)
  low = low_rank(x, rank)
  # Negative values are noise, which is assumed to be symmetric around zero.
  threshold = np.abs(np.minimum(np.quantile(low, quantile, axis=0), 0.0))
  seen, kept = x > 0, low > threshold

  def moments(values: np.ndarray, where: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    count = np.maximum(where.sum(axis=0), 1)
    mean = np.where(where, values, 0.0).sum(axis=0) / count
    square = np.where(where, (values - mean) ** 2, 0.0).sum(axis=0) / count
    return mean, np.sqrt(square)

  (wanted, wide), (mean, deviation) = moments(x, seen), moments(low, kept)
  factor = np.divide(wide, deviation, out=np.ones_like(wide), where=deviation > 1e-9)
  scaled = np.where(kept, (low - mean) * factor + wanted, 0.0)
  return np.where((scaled <= 0) & seen, x, np.maximum(scaled, 0.0))


def nmf(x: np.ndarray, rank: int, iterations: int) -> np.ndarray:
  """Returns left @ right >= 0, fitted by multiplicative updates of the Poisson likelihood.

  Source: Lee & Seung 2001, Algorithms for non-negative matrix factorization, theorem 2.
  """
  rng = np.random.default_rng([rank, *x.shape])
  scale = np.sqrt(max(x.mean(), 1e-12) / rank)
  left = scale * (0.5 + rng.random((x.shape[0], rank)))
  right = scale * (0.5 + rng.random((rank, x.shape[1])))
  for _ in range(iterations):
    left *= (x / (left @ right + 1e-12)) @ right.T / (right.sum(axis=1) + 1e-12)
    right *= left.T @ (x / (left @ right + 1e-12)) / (left.sum(axis=0)[:, None] + 1e-12)
  return left @ right
