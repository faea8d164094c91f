"""Description of a request's exported pages, with which another engine imports them.

    Chunks.export_kv -> KVManifest -> (any process) -> Engine.add_request(..., kv=manifest)

A manifest is frozen and contains no array, so it may be pickled and sent. The importing engine
compares it with the store's value and with its own weights and numerics; on a mismatch, the keys
and values are computed again, to the same bits.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple


class Part(NamedTuple):
  """One array of the pages.

  Attributes:
    shape: the array's shape.
    dtype: name of the array's dtype.
    crc32: CRC-32 of the array's bytes.
  """

  shape: tuple[int, ...]
  dtype: str
  crc32: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVManifest:
  """Pages of a request that were exported to a store.

  Attributes:
    key: store key; a function of numerics, weights, namespace and tokens (`values.Identity.key`).
    policy_version: policy version of the weights that wrote the pages.
    numerics_digest: digest of numerics, model and page layout (`values.Identity.fingerprint`).
    weights_digest: digest of the weights (`values.Identity.weights`).
    num_written: number of positions of prompt and response in the pages, from position 0.
    page_size: positions per page.
    parts: arrays of the value, ordered by round of pages, leaf, and shard of the model axis.
  """

  key: str
  policy_version: int
  numerics_digest: str
  weights_digest: str
  num_written: int
  page_size: int
  parts: tuple[Part, ...]

  @property
  def layout(self) -> set[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Dtype, and the shape before and after the page axis, of all parts."""
    return {(part.dtype, part.shape[:2], part.shape[3:]) for part in self.parts}
