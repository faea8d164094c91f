"""The row bucket changes no bit: arrays are whole tiles, even with an odd bucket.

The model is one in which odd buckets once changed bits: no tile divides its sizes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import made_rollouts
import numpy as np
import pytest
from seen_inputs import SeesInputs
import tiny_model
import trainers

from seerjax import layer_kinds, numerics as numerics_lib
from seerjax.engine import engine as engine_lib
from seerjax.layer_kinds import Gated, Grouped, LayerConfig
from seerjax.models import config as model_config, parameters
from seerjax.models.decoder import decide
from seerjax.models.loading import Model
from seerjax.ops import rotary, tiles
from seerjax.trainer import packing, step as step_lib
from seerjax.types import Request, SamplingParams

MODEL = model_config.TransformerConfig(
  vocab_size=46,
  hidden_size=88,
  layers=layer_kinds.uniform(
    LayerConfig(
      attention=Grouped(
        num_heads=3,
        num_kv_heads=1,
        head_dim=10,
        has_qk_norms=True,
        rotary=rotary.RotaryConfig(head_dim=10),
      ),
      feed_forward=Gated(intermediate_size=21),
    ),
    3,
  ),
)
PAGE_SIZE = 8
REQUEST = Request(
  request_id="alone", prompt=tuple(range(1, 12)), sampling=SamplingParams(max_tokens=24), seed=3
)


def numerics_of(row_tile: int) -> numerics_lib.NumericsConfig:
  return numerics_lib.NumericsConfig(
    backend="tiled",
    row_tile=row_tile,
    query_tile=2,
    slot_tile=4,
    kv_split=16,
    reduction_shards=1,
  )


def weights() -> parameters.Params:
  rng = np.random.default_rng(0)
  return jax.tree.map(
    lambda leaf: jnp.asarray(0.25 * rng.standard_normal(leaf.shape, np.float32)),
    parameters.shapes(MODEL, 1),
  )


class Seen(SeesInputs):
  """An engine that records the shapes of the last step's rows and segments."""

  shapes = (0, 0)

  def _inputs(self, work):
    inputs = super()._inputs(work)
    self.shapes = inputs.batch.tokens.shape[1], inputs.batch.segment_start.shape[1]
    return inputs


def answer(row_tile: int, bucket: int):
  engine = Seen(
    Model(MODEL, weights(), numerics_of(row_tile)),
    config=engine_lib.EngineConfig(
      page_size=PAGE_SIZE,
      num_pages=9,
      max_num_seqs=1,
      max_model_len=64,
      batch_size_buckets=(bucket,),
    ),
    key=jax.random.key(0),
  )
  return engine.generate([REQUEST])[0], engine


CASES = [
  pytest.param(row_tile, bucket, marks=() if (row_tile, bucket) == (16, 9) else pytest.mark.long)
  for row_tile, bucket in [
    *((16, bucket) for bucket in (3, 5, 9, 11, 13, 15, 17, 19)),
    *((32, bucket) for bucket in (25, 27, 29, 31, 33)),
  ]
]


@pytest.mark.thorough
@pytest.mark.parametrize("row_tile, bucket", CASES)
def test_odd_buckets_say_what_whole_tiles_say_and_the_trainer_too(row_tile, bucket):
  wanted, _ = answer(row_tile, 64)
  found, engine = answer(row_tile, bucket)
  assert engine.shapes == (max(2, -(-bucket // row_tile)) * row_tile, max(8, -(-bucket // 4) * 4))
  assert tiny_model.same(found, wanted)
  assert gap_of(found, row_tile) == {
    "kl": 0.0, "raw_kl": 0.0, "max_abs_logprob_gap": 0.0, "max_abs_raw_logprob_gap": 0.0,
  }  # fmt: skip


def gap_of(completion, row_tile: int) -> dict[str, float]:
  """Returns the trainer's gap, in micro-batches no longer than the sequence needs."""
  numerics = numerics_of(row_tile)
  group = made_rollouts.of_pairs([(REQUEST, completion)])
  rows = 48 if row_tile == 16 else 64
  sizes = dict(decoder=decide(MODEL, numerics), page_size=PAGE_SIZE, rows_per_micro_batch=rows)
  batch = packing.pack([group], np.zeros((1, 1)), **sizes)
  return step_lib.rollout_gap(trainers.make(**sizes).scores(weights(), batch), batch)


@pytest.mark.thorough
def test_a_step_is_allocated_in_whole_tiles_of_rows_and_segments_and_the_plan_names_them():
  sizes = engine_lib.EngineConfig(
    page_size=8, num_pages=9, max_num_seqs=1, max_model_len=64, batch_size_buckets=(3, 9)
  )
  engine = tiny_model.make_engine(sizes, kind=Seen)  # Row tile 4, slot tile 2.
  assert "steps of 3, 9 rows in arrays of 8, 12;" in engine.memory_plan()
  assert isinstance(engine, Seen)
  sampling = SamplingParams(max_tokens=3)
  engine.add_request(Request(request_id="a", prompt=tuple(range(9)), sampling=sampling))
  engine.step()
  assert engine.shapes == (12, 10)
  engine.step()
  assert engine.shapes == (8, 4)


def test_a_micro_batch_of_one_tile_is_allocated_as_two():
  sizes = dict(decoder=decide(MODEL, numerics_of(16)), page_size=8, rows_per_micro_batch=16)
  layout = packing.layout(**sizes)
  assert layout.num_rows == 32 and layout.num_segments % 4 == 0


@pytest.mark.parametrize(
  "count, tile, wanted", [(1, 16, 32), (32, 16, 32), (33, 16, 48), (3, 4, 8), (9, 4, 12)]
)
def test_whole_tiles_are_two_at_least(count, tile, wanted):
  assert tiles.whole(count, tile) == wanted
