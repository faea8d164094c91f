"""Sizes of the checks: those of the models' layers on a GPU, and tiny in the interpreter."""

from __future__ import annotations

import dataclasses

from pallas_kernels import attention


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
  """The sizes of checks.

  Attributes:
    interpret: run on a CPU.
    weights: (k, n, shards) of matmul; the first is checked with every number of rows.
    rows: numbers of rows for agreement, of matmul and norms.
    sweeps: numbers of rows that must not affect bits, by name.
    claim_rows: rows of matmul's claims.
    swapped_rows: rows of its swapped orientation, one number per width of a tile.
    features: features of norms.
    layers: (key/value heads, group, head_dim, window) of attention; those with a window have sinks.
    context: positions of a sequence.
    lengths: contexts of single rows and drafts, in visible positions.
    attention: `Config` of attention.
    tables: (features, vocabulary) of token_logprobs.
    scored_rows: numbers of scored rows, the largest first.
    experts: (experts, k, n, rows) of grouped_matmul.
  """

  interpret: bool
  weights: tuple[tuple[int, int, int], ...]
  rows: tuple[int, ...]
  sweeps: tuple[tuple[str, tuple[int, ...]], ...]
  claim_rows: int
  swapped_rows: tuple[int, ...]
  features: tuple[int, ...]
  layers: tuple[tuple[int, int, int, int | None], ...]
  context: int
  lengths: tuple[int, ...]
  attention: attention.Config
  tables: tuple[tuple[int, int], ...]
  scored_rows: tuple[int, ...]
  experts: tuple[tuple[int, int, int, int], ...]


# Layers of Qwen3-8B, Qwen3-30B-A3B and gpt-oss-120b.
FULL = Sizes(
  interpret=False,
  weights=((4096, 4096, 8), (4096, 6144, 1), (12288, 4096, 8), (2880, 5120, 1)),
  rows=(1, 8, 64, 1000, 4096),
  sweeps=(
    ("1 to 65 rows", tuple(range(1, 66))),
    ("127 to 129 and 255 to 257 rows", (127, 128, 129, 255, 256, 257)),
    ("1000 and 4096 rows", (1000, 4096)),
  ),
  claim_rows=257,
  swapped_rows=(8, 16, 32, 64),
  features=(4096, 2880),
  layers=((8, 4, 128, None), (8, 8, 64, 128)),
  context=4352,
  lengths=(1, 255, 256, 257, 511, 2048, 4097),
  attention=attention.Config(),
  tables=((4096, 151936), (2880, 201088)),
  scored_rows=(200, 1, 64, 65),
  experts=((128, 2048, 768, 512), (128, 2048, 768, 4096), (128, 2880, 2880, 256)),
)
TINY = Sizes(
  interpret=False,
  weights=((512, 64, 8), (128, 192, 1)),
  rows=(1, 9, 70),
  sweeps=(("1, 8, 9 and 65 rows", (1, 8, 9, 65)),),
  claim_rows=70,
  swapped_rows=(8, 64),
  features=(64,),
  layers=((1, 2, 64, 70),),
  context=160,
  lengths=(1, 64, 65, 130),
  attention=attention.Config(kv_split=64, key_block=64, query_tile=8),
  tables=((64, 512),),
  scored_rows=(70, 1),
  experts=((3, 64, 64, 20),),
)
