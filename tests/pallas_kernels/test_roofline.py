"""Lower bounds of launches, computed by hand."""

from __future__ import annotations

import math

import pytest

from pallas_kernels import program, roofline
from pallas_kernels.sass import Launch

# A device of 10 multiprocessors, each with 2 bytes and 10 operations a second.
MACHINE = roofline.Machine(10.0, 100.0, 10, 2.0)


@pytest.mark.parametrize(
  "work, seconds",
  [
    (roofline.Work("", "", 100.0), 10.0),  # The memory's bandwidth.
    (roofline.Work("", "", 100.0, num_blocks=2), 25.0),  # That of two multiprocessors.
    (roofline.Work("", "", 100.0, num_blocks=99), 10.0),
    (roofline.Work("", "", 1.0, 4000.0), 40.0),  # All tensor cores.
    (roofline.Work("", "", 1.0, 4000.0, num_blocks=5), 80.0),  # Half of them.
  ],
)
def test_the_slowest_limit_counts(work: roofline.Work, seconds: float):
  assert work.seconds(MACHINE) == seconds


def test_a_product_pays_for_rows_of_whole_tiles_and_not_for_its_residual():
  launch = Launch(
    "matmul",
    16,
    0,
    ("bfloat16[1,4096]", "bfloat16[4096,512]", "bfloat16[1,512]"),
    ("bfloat16[1,512]",),
  )
  work = roofline.of_launch(launch, 2048)
  assert work.num_bytes == 2 * (4096 + 4096 * 512 + 512 + 512)
  assert work.num_operations == 2 * 64 * 4096 * 512
  assert (work.what, work.num_blocks) == ("bfloat16[4096,512]", 16)


def test_slabs_and_pairs_of_weights_are_all_multiplied():
  slabs = Launch("matmul", 1, 0, ("bfloat16[64,512]", "bfloat16[8,512,64]"), ("float32[8,64,64]",))
  assert roofline.of_launch(slabs, 1).num_operations == 2 * 64 * 8 * 512 * 64
  shapes = ("bfloat16[64,512]", "bfloat16[512,128]", "bfloat16[512,128]")
  pair = Launch("matmul", 1, 0, shapes, ("bfloat16[64,128]",))
  assert roofline.of_launch(pair, 1).num_operations == 2 * 64 * 2 * 512 * 128


def test_attention_reads_the_keys_of_its_context_and_not_all_pages():
  shapes = ("bfloat16[2,8,64,128]", "bfloat16[8,9999,64,128]", "bfloat16[8,9999,64,128]")
  launch = Launch("attention", 16, 0, shapes, ("bfloat16[2,8,64,128]",))
  work = roofline.of_launch(launch, 1000)
  queries = 2 * 8 * 64 * 128
  assert work.num_bytes == 2 * (2 * 2 * 8 * 1000 * 128) + 2 * (2 * queries)
  assert work.num_operations == 4 * queries * 1000


def test_partials_of_the_merge_follow_the_context():
  out = "bfloat16[2,8,64,128]"
  launch = Launch("attention_merge", 16, 0, ("float32[999,8,128]", "float32[9,1,2,64]"), (out,))
  partials = 2 * 8 * 4 * 8 * 128 * 4  # Four splits of 256 hold 1,000 keys.
  assert roofline.of_launch(launch, 1000).num_bytes == partials + 2 * 2 * 8 * 64 * 128


def test_what_xla_writes_in_place_is_not_read_whole():
  pages = "bf16[8,2048,64,128]"
  scatter = program.Start("scatter", False, (pages, "bf16[64,128]", "s32[64]"), (pages,))
  assert roofline.of_start(scatter).num_bytes == 64 * 128 * 2 + 64 * 4
  gather = program.Start("gather", False, ("bf16[151936,4096]", "s32[1]"), ("bf16[1,4096]",))
  assert roofline.of_start(gather).num_bytes == 2 * 4096 * 2 + 4
  assert roofline.of_start(gather).num_blocks == math.inf
  nothing = program.Start("iota", False, (), ())
  assert roofline.of_start(nothing).num_bytes == 0


def test_peers_read_each_weight_once():
  launches = roofline.peers(
    1, 16, hidden=8, intermediate=32, heads=4, kv_heads=2, head_dim=2, vocabulary=64, num_layers=3
  )
  products = [(work, number) for work, number in launches if work.name.startswith("cuBLAS")]
  assert [number for _, number in products] == [3, 3, 3, 3, 1]
  weights = 8 * 16 + 8 * 8 + 8 * 64 + 32 * 8 + 8 * 64
  assert sum(work.num_operations for work, _ in products) == 2 * weights
  (attention,) = (work for work, _ in launches if work.name == "FlashInfer attention")
  assert attention.num_bytes == 2 * (2 * 16 * 2 * 2 + 2 * 8)
