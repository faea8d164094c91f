"""What an engine tells of a request's pages that lie in a store, so that another may take them.

    Engine.export_kv -> KVManifest -> (any process) -> Engine.submit(..., kv=manifest)

Frozen, and without an array: it may be pickled and sent. What it says is compared with what is in
the store and with what the taker would compute; where they differ, the keys are computed again, to
the same bits.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple


class Part(NamedTuple):
  """One array of the pages.

  Attributes:
    shape: of it.
    dtype: of it, by name.
    crc32: of its bytes.
  """

  shape: tuple[int, ...]
  dtype: str
  crc32: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVManifest:
  """Pages of a request that lie in a store.

  Attributes:
    key: in the store; it follows from numerics, weights, namespace and tokens
      (`values.Identity.key`).
    policy_version: of the weights that wrote them.
    numerics_digest: of numerics, model and layout of pages (`values.Identity.fingerprint`).
    weights_digest: of those weights (`values.Identity.weights`).
    num_written: positions of prompt and answer whose keys these are, from the first on.
    page_size: positions of a page.
    parts: of the value, in its order: by round of pages, leaf, and shard of the model axis.
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
    """Dtype, and shape before and behind the axis of pages, of all parts."""
    return {(part.dtype, part.shape[:2], part.shape[3:]) for part in self.parts}
