"""Parts of the compiled step: copies, placement, empty memory."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_model
from word_engine import CONFIG, NUMERICS, SIZES, params, request, run, runner, tokens_from

from seerjax import parallel
from seerjax.backends.tiled import Tiled
from seerjax.engine import runner as runner_lib
from seerjax.engine.engine import Engine, EngineConfig
from seerjax.kv import page_moves
from seerjax.models import kv_layout
from seerjax.models.decoder import decide
from seerjax.models.loading import Model
from seerjax.types import SamplingRows, TokenBatch


def test_pages_are_copied_in_order_and_padding_copies_nothing():
  # Two heads, four pages of one position; page m of head k holds 10 k + m.
  start = np.asarray([[0, 1, 2, 3], [10, 11, 12, 13]], np.float32)[:, :, None, None]
  pages = ((jnp.asarray(start), jnp.asarray(100 + start)),)
  copies = jnp.asarray([[1, 2], [2, 3], [3, 1]], jnp.int32)
  copy = jax.jit(kv_layout.copy_pages)
  for count, wanted in (
    (0, [0, 1, 2, 3]),
    (1, [0, 1, 1, 3]),
    (2, [0, 1, 1, 1]),  # The second copy reads what the first wrote.
  ):
    ((keys, values),) = copy(pages, copies, jnp.int32(count))
    np.testing.assert_array_equal(keys[:, :, 0, 0], [wanted, [10 + page for page in wanted]])
    np.testing.assert_array_equal(values, keys + 100)


def drawn_copies(seed):
  """Returns copies i32[2, 60, 2] between few pages, which later copies reread or overwrite."""
  rng = np.random.default_rng(seed)
  counts = rng.integers(0, 60, 2).astype(np.int32)
  return rng.integers(1, 40, (2, 60, 2)).astype(np.int32), counts


def in_order(copies, counts):
  """i32[2, 40]: what pages that held their own numbers hold after each instance's copies."""
  pages = np.tile(np.arange(40), (2, 1))
  for own, part, count in zip(pages, copies, counts, strict=True):
    for source, target in part[:count]:
      own[target] = own[source]
  return pages


def by_rounds(rounds):
  """Applies copies like `in_order`, but reads all pages of a round before it writes any."""
  pages = np.tile(np.arange(40), (2, 1))
  for one in rounds:
    read = np.take_along_axis(pages, one[..., 0], axis=1)
    np.put_along_axis(pages, one[..., 1], read, axis=1)
  return pages


@pytest.mark.parametrize("seed", range(4))
def test_rounds_copy_as_one_copy_after_the_other(seed):
  copies, counts = drawn_copies(seed)
  rounds = page_moves.copy_rounds(copies, counts)
  assert all(one.shape[1] in page_moves.BUCKETS for one in rounds)
  np.testing.assert_array_equal(by_rounds(rounds), in_order(copies, counts))


def test_copies_in_one_round_are_others():
  """Twin: a page that is copied again within a step must be written first."""
  copies, counts = drawn_copies(0)
  rounds = [np.where(np.arange(60)[None, :, None] < counts[:, None, None], copies, 0)]
  assert not np.array_equal(by_rounds(rounds), in_order(copies, counts))


def test_no_copies_are_no_rounds():
  copies, _ = drawn_copies(0)
  assert page_moves.copy_rounds(copies, np.zeros(2, np.int32)) == []


def test_a_round_is_copied_on_the_devices():
  moves = tiny_model.runner(tiny_model.NUMERICS, 2, 4).page_moves
  start = np.arange(2 * 8 * 6 * 2, dtype=np.float32).reshape(2, 8, 6, 1, 2)  # f[i, k, m, z, c]
  place = jax.sharding.NamedSharding(moves.mesh, jax.P("instance", "model"))
  copies = np.zeros((2, 4, 2), np.int32)
  copies[0, :3], copies[1, 0] = [[1, 2], [3, 4], [5, 1]], [2, 5]
  (found,) = moves.copy((jax.device_put(start, place),), copies)
  wanted = start.copy()
  for instance in range(2):
    wanted[instance][:, copies[instance, :, 1]] = start[instance][:, copies[instance, :, 0]]
  np.testing.assert_array_equal(found, wanted)


def test_inputs_travel_as_words_and_keep_every_bit():
  rng = np.random.default_rng(0)

  def words(*shape) -> np.ndarray:
    return rng.integers(-(2**31), 2**31, shape, dtype=np.int64).astype(np.int32)

  # All bit patterns, NaNs and negative zeros of every kind among them; and parts of no size.
  inputs = runner_lib.StepInputs(
    batch=TokenBatch(
      *(words(2, *shape) for shape in [(3,)] * 3 + [()] + [(3,)] * 2 + [(3, 5), ()])
    ),
    sample_rows=words(2, 3),
    sampling=SamplingRows(
      words(2, 3).view(np.float32), words(2, 3), *(words(2, 3).view(np.float32) for _ in range(2)),
      words(2, 3, 0), words(2, 3, 0).view(np.float32), words(2, 3), words(2, 3),
    ),
    seeds=words(2, 3).view(np.uint32),
    positions=words(2, 3),
    num_samples=words(2),
    copies=words(2, 4, 2),
    num_copies=words(2),
  )  # fmt: skip
  packed, layout = runner_lib.pack(inputs)
  assert packed.dtype == np.int32 and packed.shape[0] == 2
  for instance in range(2):
    found = jax.jit(runner_lib.unpack, static_argnums=1)(packed[instance], layout)
    for leaf, expected in zip(jax.tree.leaves(found), jax.tree.leaves(inputs), strict=True):
      assert leaf.dtype == expected.dtype and leaf.shape == expected.shape[1:]
      assert np.asarray(leaf).tobytes() == expected[instance].tobytes()


@pytest.mark.parametrize("data_parallel_size, tensor_parallel_size", [(1, 1), (2, 1), (2, 4)])
def test_empty_pages_are_zero_and_lie_where_the_mesh_says(data_parallel_size, tensor_parallel_size):
  runner = tiny_model.runner(tiny_model.NUMERICS, data_parallel_size, tensor_parallel_size)
  assert runner.data_parallel_size == data_parallel_size
  layers = runner.empty_pages(5, 8)
  assert len(layers) == tiny_model.CONFIG.num_layers
  for leaf in jax.tree.leaves(layers):
    assert leaf.shape == (data_parallel_size, 8, 5, 8, 8) and leaf.dtype == jnp.float32
    assert {shard.data.shape for shard in leaf.addressable_shards} == {
      (1, 8 // tensor_parallel_size, 5, 8, 8)
    }
    np.testing.assert_array_equal(leaf, 0)


def test_empty_pages_have_the_compute_dtype():
  leaves = jax.tree.leaves(tiny_model.runner(tiny_model.BFLOAT16).empty_pages(3, 16))
  assert {leaf.dtype for leaf in leaves} == {jnp.dtype("bfloat16")}


def test_weights_keep_their_values_and_slabs_are_spread_over_the_model_axis():
  params = tiny_model.params(tiny_model.NUMERICS)
  placed = tiny_model.runner(tiny_model.NUMERICS, 2, 4).place_params(params)
  jax.tree.map(np.testing.assert_array_equal, placed, params)
  layer = placed["layers"][0]
  assert {shard.data.shape[0] for shard in layer["qkv"].addressable_shards} == {2}
  rows = params["embed"].shape[0] // 4
  assert {shard.data.shape[0] for shard in placed["embed"].addressable_shards} == {rows}
  assert layer["attention_norm"].sharding.is_fully_replicated


def test_a_runner_is_equal_to_one_of_the_same_things():
  # Engines check the settings of a shared runner.
  mesh = parallel.make_mesh()
  one = runner_lib.Runner(decide(tiny_model.CONFIG, tiny_model.NUMERICS), mesh, 1)
  assert one == runner_lib.Runner(decide(tiny_model.CONFIG, tiny_model.NUMERICS), mesh, 1)
  assert one != runner_lib.Runner(decide(tiny_model.CONFIG, tiny_model.BFLOAT16), mesh, 1)


@pytest.mark.thorough
def test_nothing_is_traced_after_the_first_step_of_each_bucket():
  own = runner_lib.Runner(decide(tiny_model.CONFIG, NUMERICS), parallel.make_mesh(), max_programs=1)
  sizes = EngineConfig(
    page_size=8, num_pages=9, max_num_seqs=2, max_model_len=32, batch_size_buckets=(8,)
  )

  def engine(config):
    return Engine(
      Model(tiny_model.CONFIG, tiny_model.params(NUMERICS), NUMERICS),
      config=config,
      key=jax.random.key(3),
      runner=own,
    )

  one = engine(sizes)
  one.generate([request()])
  one.update_weights(tiny_model.params(NUMERICS, 1), 1)
  # Filters, biases, lengths, other weights, another engine, more sequences: the same program.
  one.generate([request("b", tokens_from(0, 5)[:1], top_k=3, logit_bias=((1, 1.0),)), request("c")])
  engine(dataclasses.replace(sizes, max_num_seqs=3)).generate([request()])
  with pytest.raises(
    AssertionError, match="engine step: got trace 2, expected one for each of 1 row buckets"
  ):
    engine(dataclasses.replace(sizes, batch_size_buckets=(9,))).generate([request()])
  assert "_visit_program" not in vars(own)  # Never built when every visit has one step.


@dataclasses.dataclass(frozen=True)
class Waiting(Tiled):
  """The tiled backend, as if the host blocked to read a number from the device."""

  traits = dataclasses.replace(Tiled.traits, waits_for_predicates=True)


@dataclasses.dataclass(frozen=True)
class SeesNoCopies(page_moves.PageMoves):
  """Twin: pages are not copied."""

  def copy(self, pages, copies):
    del copies
    return pages


def said_by(backend, moves=page_moves.PageMoves):
  """Returns completions of six requests that share (part) pages; some are filtered or biased."""
  mesh = parallel.make_mesh()
  own = runner_lib.Runner(decide(CONFIG, NUMERICS, backend=backend), mesh, max_programs=1)
  vars(own)["page_moves"] = moves(mesh)
  engine = Engine(
    Model(CONFIG, params(), NUMERICS),
    config=EngineConfig(
      page_size=8, num_pages=40, max_num_seqs=3, max_model_len=64, batch_size_buckets=(16,)
    ),
    key=jax.random.key(3),
    runner=own,
  )
  more = ({}, {"top_k": 3}, {"logit_bias": ((1, 5.0),)}, {}, {"top_p": 0.5}, {})
  found = {}
  for index, sampling in enumerate(more):
    prompt = tokens_from(0, 13 + index)
    engine.add_request(request(str(index), prompt, seed=index, max_tokens=6, **sampling))
    found |= run(engine) if index % 2 else {}
  assert engine.counters.page_copies
  return {name: (one.tokens, one.behaviour_logprobs.tobytes()) for name, one in found.items()}


@pytest.mark.thorough
def test_copies_and_plain_heads_of_their_own_change_no_bit():
  assert said_by(Waiting(NUMERICS)) == said_by(Tiled(NUMERICS))


@pytest.mark.thorough
def test_without_its_copies_a_step_says_something_else():
  """The twin."""
  assert said_by(Waiting(NUMERICS), SeesNoCopies) != said_by(Waiting(NUMERICS))


@pytest.mark.parametrize("what", ["model", "numerics", "mesh"])
def test_a_runner_made_for_something_else_is_refused(what):
  model = CONFIG.changed(num_layers=3) if what == "model" else CONFIG
  numerics = tiny_model.BFLOAT16 if what == "numerics" else NUMERICS
  mesh = parallel.make_mesh(data_parallel_size=2) if what == "mesh" else None
  with pytest.raises(
    ValueError, match=r"Engine.runner: got a runner of .* for a model of 2 layers on 1 device\(s\)"
  ):
    Engine(
      Model(model, params(), numerics),
      config=SIZES,
      key=jax.random.key(0),
      mesh=mesh,
      runner=runner(),
    )
