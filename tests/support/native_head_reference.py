"""The native head in NumPy: the chains, chunks and noise that `backends.native.head` defines."""

from __future__ import annotations

from typing import NamedTuple

import native_reference as reference
from native_reference import flush, fma
import numpy as np

f32, u32 = np.float32, np.uint32
CHUNK = 768


def norm(x: np.ndarray, scale: np.ndarray, eps: float, dtype: str) -> np.ndarray:
  """f32[n, d]: the root-mean-square norm, rounded twice."""
  mean = flush(reference.dot(x, x) / f32(x.shape[1]))
  inverse = f32(1) / np.sqrt(mean + f32(eps))
  normed = reference.rounded(flush(x * inverse[:, None]), dtype)
  return reference.rounded(flush(normed * scale), dtype)


def threefry(key: tuple[np.ndarray, np.ndarray], a: np.ndarray, b: np.ndarray):
  """Threefry-2x32, u32 arrays."""
  keys = (*key, key[0] ^ key[1] ^ u32(0x1BD11BDA))
  a, b = a + keys[0], b + keys[1]
  for group in range(5):
    for turn in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
      a = a + b
      b = ((b << u32(turn)) | (b >> u32(32 - turn))) ^ a
    a = a + keys[(group + 1) % 3]
    b = b + keys[(group + 2) % 3] + u32(group + 1)
  return a, b


def gumbel(key: np.ndarray, seed: int, position: int, vocabulary: int) -> np.ndarray:
  """Returns f32[v], the noise at a request's position."""
  with np.errstate(over="ignore"):
    folded = threefry((u32(key[0]), u32(key[1])), u32(0), u32(seed))
    folded = threefry(folded, u32(0), u32(position))
    a, b = threefry(folded, u32(0), np.arange(vocabulary, dtype=u32))
  uniform = (((a ^ b) >> u32(9)) | u32(0x3F800000)).view(f32) - f32(1)
  uniform = np.maximum(uniform, np.finfo(f32).tiny)
  return -reference.log(-reference.log(uniform))


class Scores(NamedTuple):
  """[n] each, as the handlers return them."""

  tokens: np.ndarray
  logprob: np.ndarray
  raw_logprob: np.ndarray
  entropy: np.ndarray
  normaliser: np.ndarray
  raw_normaliser: np.ndarray


def _merged(z: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
  """Reduces chunks f32[n, c] to (logsumexp, entropy), [n] each."""
  partials = []
  for chunk in z:
    most = chunk.max(axis=1)
    below = flush(chunk - most[:, None])
    weights = reference.exp(below)
    partials.append((most, reference.total(weights), reference.dot(weights, below)))
  most = np.max([m for m, _, _ in partials], axis=0)
  total = weighted = np.zeros_like(most)
  for own, part, weight in partials:
    below = flush(own - most)
    factor = reference.exp(below)
    total = fma(factor, part, total)
    weighted = fma(factor, fma(below, part, weight), weighted)
  log = reference.log(total)
  return flush(most + log), flush(log - flush(weighted / total))


def score(
  normed: np.ndarray,
  table: np.ndarray,
  temperature: np.ndarray,
  forced: np.ndarray,
  seeds: np.ndarray,
  positions: np.ndarray,
  key: np.ndarray,
) -> Scores:
  """Applies the head to normed rows f32[n, d] with a table f[r, w, d]."""
  count, (slabs, width, d) = normed.shape[0], table.shape
  logits = reference.product(normed, table.reshape(-1, d).T)
  divisor = np.where(temperature > 0, temperature, f32(1))
  z = flush(logits / divisor[:, None])
  cuts = [
    (slab * width + begin, slab * width + min(begin + CHUNK, width))
    for slab in range(slabs)
    for begin in range(0, width, CHUNK)
  ]
  normaliser, entropy = _merged([z[:, low:high] for low, high in cuts])
  raw_normaliser, _ = _merged([logits[:, low:high] for low, high in cuts])
  noisy = z.copy()
  for row in range(count):
    if temperature[row] > 0:
      noisy[row] += gumbel(key, int(seeds[row]), int(positions[row]), slabs * width)
  tokens = np.where(forced >= 0, forced, np.argmax(flush(noisy), axis=1)).astype(np.int32)
  rows = np.arange(count)
  raw = logits[rows, tokens]
  logprob, raw_logprob = flush(flush(raw / divisor) - normaliser), flush(raw - raw_normaliser)
  return Scores(tokens, logprob, raw_logprob, entropy, normaliser, raw_normaliser)


class Gradient(NamedTuple):
  """Gradients in f32, before they are rounded to the compute dtype."""

  norm: np.ndarray
  table: np.ndarray
  hidden: np.ndarray


def gradient(
  hidden: np.ndarray,
  scale: np.ndarray,
  table: np.ndarray,
  temperature: np.ndarray,
  scores: Scores,
  cotangent: np.ndarray,
  eps: float,
  dtype: str,
) -> Gradient:
  """Returns the gradient of the scores of tokens; `cotangent` is f32[3, n], as `TokenScores`."""
  count, (slabs, width, d) = hidden.shape[0], table.shape
  normed = norm(hidden, scale, eps, dtype)
  logits = reference.product(normed, table.reshape(-1, d).T)
  column = lambda x: x[:, None]
  divisor = column(np.where(temperature > 0, temperature, f32(1)))
  logprob, raw, entropy = (column(x) for x in cotangent)
  below = flush(flush(logits / divisor) - column(scores.normaliser))
  factor = flush(logprob + flush(entropy * flush(below + column(scores.entropy))))
  processed = flush(flush(-reference.exp(below) * factor) / divisor)
  weights = reference.exp(flush(logits - column(scores.raw_normaliser)))
  found = flush(processed - flush(raw * weights))
  rows = np.arange(count)
  at_token = flush(flush(logprob / divisor) + raw)[:, 0]
  found[rows, scores.tokens] = flush(found[rows, scores.tokens] + at_token)
  table_gradient = reference.product(found.T, normed).reshape(table.shape)
  by_slab = [
    reference.product(found[:, slab * width : (slab + 1) * width], table[slab])
    for slab in range(slabs)
  ]
  cotangent_of_normed = reference.tree_sum(np.stack(by_slab))
  inverse = flush(f32(1) / np.sqrt(flush(reference.dot(hidden, hidden) / f32(d)) + f32(eps)))
  x = flush(hidden * column(inverse))
  norm_gradient = np.zeros(d, f32)
  for row in range(count):
    one = reference.rounded(x[row], dtype)
    norm_gradient = fma(cotangent_of_normed[row], one, norm_gradient)
  scaled = flush(cotangent_of_normed * scale)
  mean = column(flush(reference.dot(scaled, x) / f32(d)))
  return Gradient(
    norm_gradient, table_gradient, flush(column(inverse) * flush(scaled - flush(x * mean)))
  )
