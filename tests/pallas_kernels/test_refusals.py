"""Every `raise` of the room, with its message."""

from __future__ import annotations

from absl import app
import jax
import jax.numpy as jnp
import pytest
import refusals

from pallas_kernels import gpu, grouped_matmul, matmul, matmul_parts, rms_norm, token_logprobs
from pallas_kernels.bench import __main__ as bench

pytestmark = pytest.mark.usefixtures("unchecked_annotations")


def half(*shape: int) -> jax.Array:
  return jnp.zeros(shape, jnp.bfloat16)


def single(*shape: int) -> jax.Array:
  return jnp.zeros(shape)


def whole(*shape: int) -> jax.Array:
  return jnp.zeros(shape, jnp.int32)


def grouped(x, sizes, w, **more):
  return grouped_matmul.grouped_matmul(x, sizes, w, **more)


LARGE = "bytes of shared memory, expected at most 232448; make block_m, block_n or block_k smaller"
NORMS = rms_norm.rms_norm_each
SCALE = single(64)


@refusals.table(
  # Grouped matmul.
  (lambda: grouped(half(3, 64), whole(1), half(64, 64)),
   "grouped_matmul: got w[64, 64], expected w[e, k, n] of at least"),
  (lambda: grouped(half(3, 64), whole(0), half(0, 64, 64)),
   "got w[0, 64, 64], expected w[e, k, n] of at least one"),
  (lambda: grouped(half(3, 64), whole(3), half(2, 64, 64)),
   "got group_sizes int32[3], expected int32[2], one for each"),
  (lambda: grouped(half(3, 64), whole(2), half(2, 128, 64)),
   "got x[3, 64] and w[2, 128, 64], expected x[m, k] and w[e"),
  (lambda: grouped(half(3, 64), whole(2), half(2, 64, 128), transposed=True),
   "got x[3, 64] and w[2, 64, 128], expected x[m, k] and w[e, n, k]"),
  (lambda: grouped(half(3, 72), whole(2), half(2, 72, 64)),
   "got k=72, expected a positive multiple of 64: pad it"),
  (lambda: grouped(half(3, 64), whole(2), half(2, 64, 100)),
   "got n=100, expected a positive multiple of 64"),
  (lambda: grouped(half(3, 64), whole(2), half(2, 64, 64), out_dtype=jnp.int8),
   "got out_dtype=int8, expected bfloat16"),
  (lambda: grouped(half(300, 128), whole(1), half(1, 128, 2048), out_dtype=jnp.float32,
                   config=grouped_matmul.Config(block_k=128)), LARGE),
  (lambda: grouped(single(3, 64), whole(1), half(1, 64, 64)),
   "got x of float32, expected bfloat16"),
  (lambda: grouped(half(3, 64), whole(1), single(1, 64, 64)), "got w of float32, expected"),
  (lambda: grouped(half(3, 64), single(1), half(1, 64, 64)),
   "got group_sizes float32[1], expected int32[1]"),
  # Matmul.
  (lambda: matmul.matmul(half(3, 64), half(128, 64)),
   "matmul: got x[3, 64] and w[128, 64], expected x[m, k] and w[k, n]."),
  (lambda: matmul.matmul(half(3, 64), half(64, 128), transposed=True),
   "expected x[m, k] and w[n, k]"),
  (lambda: matmul.matmul(half(3, 72), half(72, 64)),
   "got k=72, expected a positive multiple of 64: pad it"),
  (lambda: matmul.matmul(half(3, 64), half(64, 100)),
   "got n=100, expected a positive multiple of 64"),
  (lambda: matmul.matmul(half(3, 64), half(64, 0)), "got n=0, expected"),
  (lambda: matmul.matmul(half(3, 64), half(0, 64, 64)),
   "got w[0, 64, 64], expected at least one slab"),
  (lambda: matmul.matmul(half(3, 64), half(2, 64, 64), bias=single(64)),
   "float32[64], expected bfloat16 or float"),
  (lambda: matmul.matmul(half(3, 64), half(64, 64), config=matmul.Config(shards=2)),
   "got k=64 in 2 shards, expected a multiple of shards * block_k = 128; take fewer shards"),
  (lambda: matmul.matmul(half(3, 64), half(64, 64), bias=single(3)),
   "got bias float32[3], expected bfloat16 or float"),
  (lambda: matmul.matmul(half(3, 64), half(64, 64), residual=single(2, 64)),
   "got residual float32[2, 64], expected bfloat16 or float32 [3, 64]"),
  (lambda: matmul.matmul(half(3, 64), half(64, 64), out_dtype=jnp.float16),
   "got out_dtype=float16, expected bfloat16"),
  (lambda: matmul.matmul(half(300, 128), half(128, 1088), out_dtype=jnp.float32,
                         config=matmul.Config(block_k=128)), LARGE),
  (lambda: matmul.matmul(single(64, 64), half(64, 64)), "got x of float32, expected bfloat16"),
  (lambda: matmul.matmul(half(3, 64), single(64, 64)), "got w of float32, expected bfloat16"),
  (lambda: matmul.swiglu(half(3, 64), half(64, 64), single(64, 64)),
   "swiglu: got up of float32, expected"),
  (lambda: matmul.swiglu(half(3, 64), half(64, 64), half(64, 32)),
   "got up[64, 32], expected gate's shape [64, 64]"),
  (lambda: matmul.swiglu(half(3, 64), half(64, 64)),
   "got n=64 for gate and up in one, expected a multiple of 128: pad each"),
  (lambda: matmul.swiglu(half(3, 64), half(64, 64), half(64, 64), config=matmul.Config(shards=2)),
   "got shards=2 for swiglu, expected 1"),
  (lambda: matmul.contract_slabs(half(3, 64), half(64, 64)),
   "contract_slabs: got w[64, 64], expected 1, 2, 4 or 8 slabs, w[r,"),
  (lambda: matmul.contract_slabs(half(3, 3, 64), half(3, 64, 64)),
   "got w[3, 64, 64], expected 1, 2, 4 or 8 slabs"),
  (lambda: matmul.contract_slabs(half(3, 64), half(2, 64, 64)),
   "got x[3, 64] and w[2, 64, 64], expected x[r, m, k] or x[m, r * k]"),
  (lambda: matmul.contract_slabs(half(4, 3, 64), half(2, 64, 64)),
   "expected the same number of slabs"),
  (lambda: matmul.contract_slabs(half(3, 128), half(2, 64, 64), config=matmul.Config(shards=2)),
   "got shards=2 for contract_slabs, expected 1: its slabs are the parts"),
  (lambda: matmul.contract_slabs(half(3, 128), half(2, 64, 64), config=matmul.Config(block_k=128)),
   "got k=64 for adjacent slabs, expected a multiple of block_k = 128; take a"),
  (lambda: matmul.contract_slabs(half(3, 128), half(2, 64, 64), stream=single(2, 3, 64)),
   "got stream float32[2, 3, 64], expected bfloat16 or float32 [3, 64]"),
  # Sums of parts.
  (lambda: matmul_parts.add_partials(single(3, 64)),
   "add_partials: got partials float32[3, 64], expected float32 [s, m, n]."),
  (lambda: matmul_parts.add_partials(single(3, 3, 64)),
   "got 3 partials, expected 1, 2, 4 or 8 for one tree"),
  (lambda: matmul_parts.add_partials(single(2, 3, 72)),
   "got n=72, expected a positive multiple of 64: pad it"),
  (lambda: matmul_parts.add_partials(single(2, 3, 64), stream=single(2, 64)),
   "got stream float32[2, 64], expected bfloat16 or float32 [3, 64]"),
  (lambda: matmul_parts.add_partials(single(2, 3, 64), out_dtype=jnp.float16),
   "got out_dtype=float16, expected bfloat16 or float"),
  # RMS norms.
  (lambda: rms_norm.rms_norm(half(3), half(3)),
   "got x[3] and scale[3], expected x[n, d] and scale[d]"),
  (lambda: rms_norm.rms_norm(half(3, 8), half(16)), "got x[3, 8] and scale[16], expected"),
  (lambda: rms_norm.add_rms_norm(half(3, 8), half(2, 8), half(8)),
   "got residual bfloat16[2, 8], expected x's bfloat16[3, 8]"),
  (lambda: rms_norm.rms_norm(half(3, 12), half(12)),
   "got 12 features, expected a multiple of 8 from 8 to 8192"),
  (lambda: rms_norm.rms_norm(half(3, 8200), half(8200)),
   "got 8200 features, expected a multiple of 8"),
  (lambda: rms_norm.rms_norm(half(3, 0), half(0)), "got 0 features"),
  (lambda: rms_norm.rms_norm(half(3, 4104), half(4104)),
   "TMA would copy as 513 runs of 8; expected at most 256 runs"),
  (lambda: NORMS((half(3, 64),), (single(3),)), "and scale[3], expected x[n, d]"),
  (lambda: rms_norm.rms_norm(single(3, 8).astype(jnp.float16), single(8)),
   "got x of float16, expected bfloat16 or float32"),
  (lambda: rms_norm.rms_norm(single(3, 8), whole(8)), "got scale of int32, expected bfloat16"),
  (lambda: NORMS((half(3, 64), single(3, 128)), (SCALE, SCALE)),
   "rms_norm: got arrays bfloat16[..., 64] and float32[..., 128], expected one dtype and one"
   " number of features."),
)  # fmt: skip
def test_arguments_that_no_kernel_takes_are_refused(row):
  with gpu.h200():
    refusals.check((NotImplementedError, *row))


@refusals.table(
  (lambda: grouped(half(3, 64), whole(1), half(1, 64, 64)), "grouped_matmul"),
  (lambda: matmul.matmul(half(3, 64), half(64, 64)), "matmul"),
  (lambda: matmul_parts.add_partials(single(2, 3, 64)), "add_partials"),
  (lambda: rms_norm.rms_norm(half(3, 64), half(64)), "rms_norm"),
)
def test_a_cpu_is_refused(row):
  refusals.check((NotImplementedError, *row, ": got the platform 'cpu', expected an NVIDIA GPU"))


@refusals.table(
  (lambda: NORMS((half(3, 64), half(3, 64)), (SCALE,)),
   "got 2 arrays and 1 scales; expected one scale per array."),
  # Bench.
  (app.UsageError, lambda: bench.named(["relu"], ("matmul", "rms_norm"), "--only"),
   "--only: got 'relu', expected some of matmul"),
  (app.UsageError, lambda: bench.chosen_questions("all_of"),
   "got 'all_of', expected one of all, wgmma_width"),
  (app.UsageError, lambda: bench.main(["bench", "fast"]), "got 'fast', expected flags only."),
  # Grouped matmul.
  (lambda: grouped_matmul.Config(block_k=32), "got block_k=32; expected one of (64, 128)."),
  (lambda: grouped_matmul.Config(block_m=256), "got block_m=256; expected one of (64, 128)."),
  (lambda: grouped_matmul.Config(block_n=512), "got block_n=512; expected one of (128, 256)."),
  (lambda: grouped_matmul.Config(max_stages=1), "got max_stages=1; expected at least 2."),
  (lambda: grouped_matmul.Config(snake_width=0), "got snake_width=0; expected at least 1."),
  # Matmul.
  (lambda: matmul.Config(block_k=32), "got block_k=32; expected one of (64, 128)."),
  (lambda: matmul.Config(shards=3), "got shards=3; expected one of (1, 2, 4, 8)."),
  (lambda: matmul.Config(swapped_rows=128),
   "got swapped_rows=128; expected one of (None, 0, 8, 16, 32, 64)."),
  (lambda: matmul.Config(block_m=256), "got block_m=256; expected one of (64, 128)."),
  (lambda: matmul.Config(block_n=512), "got block_n=512; expected one of (128, 256)."),
  (lambda: matmul.Config(swapped_block_n=32), "got swapped_block_n=32; expected one of (64, 128)."),
  (lambda: matmul.Config(max_stages=1), "got max_stages=1; expected at least 2."),
  (lambda: matmul.Config(snake_width=0), "got snake_width=0; expected at least 1."),
  (lambda: matmul.Config(mode="both"),
   "got mode=both; expected one of ('auto', 'sequential', 'parallel')."),
  # RMS norms.
  (lambda: rms_norm.Config(padding=512), "got padding=512; expected a positive multiple of 1024."),
  (lambda: rms_norm.Config(chunk_rows=0), "got chunk_rows=0; expected at least 1."),
  (lambda: rms_norm.Config(blocks_per_multiprocessor=0), "got blocks_per_multiprocessor=0"),
  # Log-probabilities.
  (lambda: token_logprobs.Config(shards=3), "got shards=3; expected one of (1, 2, 4, 8)."),
  (lambda: token_logprobs.Config(vocabulary_tile=96),
   "got vocabulary_tile=96; expected one of (64, 128, 256)."),
  (lambda: token_logprobs.Config(block_k=32), "got block_k=32; expected one of (64, 128)."),
  (lambda: token_logprobs.Config(max_stages=1), "got max_stages=1; expected at least 2."),
  (lambda: token_logprobs.Config(snake_width=0), "got snake_width=0; expected at least 1."),
  (lambda: token_logprobs.Config(gradient_columns=100),
   "got gradient_columns=100; expected a positive multiple of 64."),
  (lambda: token_logprobs.Config(gradient=matmul.Config(shards=2)),
   "got gradient.shards=2; expected 1."),
)  # fmt: skip
def test_refusals(row):
  refusals.check(row)
