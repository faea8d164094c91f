"""Adapters by name in the engine: errors, and the state after an error."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_model

from seerjax.engine.engine import Engine, EngineConfig
from seerjax.kv.disk_store import DiskStore
from seerjax.kv.owner import BASE, Owner
from seerjax.kv.pool import KVPool, KVPoolConfig
from seerjax.kv.prefix_index import PrefixIndex
from seerjax.models import lora
from seerjax.models.loading import Model
from seerjax.types import Request, SamplingParams

FEW = SamplingParams(max_tokens=4)
CONFIG, NUMERICS = tiny_model.CONFIG, tiny_model.NUMERICS
SIZES = EngineConfig(
  page_size=16, num_pages=20, max_num_seqs=4, max_model_len=64, batch_size_buckets=(8,)
)


@functools.cache
def adapter(rank: int = 2, targets: tuple[str, ...] = ("out",)):
  return lora.init(jax.random.key(2), CONFIG, NUMERICS, rank, targets)


def make_engine(**others) -> Engine:
  # Nothing is compiled here: no step is run.
  return tiny_model.make_engine(SIZES, **others)


def with_leaf(target: str, name: str, leaf) -> dict:
  layers = [{**layer} for layer in adapter()["layers"]]
  layers[1][target] = {**layers[1].get(target, {}), name: leaf}
  return {"layers": layers}


def renamed(new: str) -> dict:
  return {"layers": [{new: layer["out"]} for layer in adapter()["layers"]]}


@pytest.mark.parametrize(
  "named, message",
  [
    ({"": (adapter(), 1.0)}, r"\[''\]: got an empty name, expected .* '' is the base; rename it"),
    ({"a": adapter()}, r"\['a'\]: got dict, expected \(adapter, scale\); pass the result"),
    ({"a": ([], 1.0)}, r"\['a'\]: got list, expected \{'layers': \[...\]\} with one dict per"),
    ({"b": (adapter(), 1.0), "a": ({"layers": adapter()["layers"][:1]}, 1.0)},
     r"\['a'\]: lora adapter: got 1 layers, expected the base's 2; it was made for another model"),
    ({"a": (renamed("gate"), 1.0)},
     r"\['a'\]: got the unknown targets \['gate'\], expected some of \('qkv', 'out', .*adapt only"),
    ({"a": (with_leaf("down", "a", jnp.zeros(3)), 1.0)},
     r"\['a'\]: layers\[1\]\['down'\]: got a dict, expected \{'a': ..., 'b': ...\}; save it again"),
    ({"a": (with_leaf("out", "a", jnp.zeros((8, 15, 2))), 1.0)},
     r"\['a'\]: lora adapter: got layers\[1\]\['out'\] with a \(8, 15, 2\) and b \(2, 32\), expe"),
    (
      {"a": (with_leaf("out", "b", jnp.full((2, 32), jnp.nan)), 1.0)},
      r"\['a'\]: adapter: got values that are not finite in \['layers'\]\[1\]\['out'\]\['b'\], .*;"
      r" they cannot be sampled from: save the adapter again",
    ),
    ({"a": (adapter(), float("inf"))}, r"\['a'\]: lora scale: got inf, expected a finite number"),
  ],
)  # fmt: skip
def test_adapters_that_are_not_the_bases_are_refused_and_the_old_ones_stay(named, message):
  engine = make_engine(adapters={"old": (adapter(), 1.0)})
  with pytest.raises(ValueError, match=rf"Engine.set_adapters{message}"):
    engine.set_adapters(named)
  assert engine.adapters == ("old",)
  with pytest.raises(ValueError, match=rf"Engine.adapters{message}"):
    make_engine(adapters=named)


def test_a_request_of_an_adapter_that_is_not_there_is_refused():
  asked = Request(request_id="r", prompt=(3,), sampling=FEW, adapter="poet")
  with pytest.raises(ValueError, match=r"got the adapter 'poet', expected none, as this engine ha"):
    make_engine().add_request(asked)
  engine = make_engine(adapters={"judge": (adapter(), 1.0), "cook": (adapter(3), 1.0)})
  message = r"got the adapter 'poet', expected 'judge', 'cook', or '' for the base; add it with"
  with pytest.raises(ValueError, match=message):
    engine.add_request(asked)


def test_adapters_are_not_replaced_under_a_request():
  engine = make_engine(adapters={"poet": (adapter(), 1.0)})
  engine.add_request(Request(request_id="r", prompt=(3,), sampling=FEW, adapter="poet"))
  with pytest.raises(ValueError, match=r"Engine.set_adapters: got 1 unfinished requests, expected"):
    engine.set_adapters({})
  engine.abort_request("r")
  engine.set_adapters({})
  assert engine.adapters == ()


def test_weights_that_have_an_adapter_take_none_by_name():
  attached = lora.attach(tiny_model.params(NUMERICS), adapter(), 1.0)
  engine = make_engine(adapters={"poet": (adapter(), 1.0)})
  message = r"got named adapters for weights that already contain one, expected weights of the ba"
  with pytest.raises(ValueError, match=rf"Engine.update_weights: params: {message}"):
    engine.update_weights(attached, 1)
  assert engine.policy_version == 0
  other = Engine(
    Model(CONFIG, attached, NUMERICS), config=SIZES, runner=tiny_model.runner(NUMERICS)
  )
  with pytest.raises(ValueError, match=rf"Engine.set_adapters: {message}"):
    other.set_adapters({"poet": (adapter(), 1.0)})


def test_weights_that_are_swapped_leave_the_adapters():
  engine = make_engine(adapters={"poet": (adapter(), 1.0)})
  engine.update_weights(jax.tree.map(lambda leaf: leaf * 2, tiny_model.params(NUMERICS)), 3)
  assert engine.adapters == ("poet",) and engine.policy_version == 3
  engine.check(Request(request_id="r", prompt=(3,), sampling=FEW, adapter="poet"))


def test_a_page_is_found_by_the_adapter_that_wrote_it_alone():
  index = PrefixIndex(2)
  poet, judge = Owner("poet"), Owner("judge")
  index.remember([1, 2, 3], [1, 2], poet)
  found = index.find([1, 2, 3], poet)
  assert found.pages == (1,) and found.copy_from == 2
  for other in (BASE, judge):
    assert index.find([1, 2, 3], other).num_tokens == 0
  index.remember([1, 2], [3])
  assert index.find([1, 2]).pages == (3,) and index.find([1, 2], poet).pages == (1,)


def test_what_lies_in_a_store_is_named_by_what_the_adapter_is(tmp_path):
  def keys_of(named):
    pool = KVPool(KVPoolConfig(host_pages=4), DiskStore(tmp_path, max_bytes=10**6))
    make_engine(adapters=named, kv_pool=pool)
    return {name: pool.identity_of(Owner(name)).key([1, 2]) for name in ("", *named)}

  first = keys_of({"poet": (adapter(), 1.0), "judge": (adapter(3), 1.0)})
  assert len(set(first.values())) == 3
  # Identified by content, not by name; the base's pages are those of an engine without adapters.
  turned = keys_of({"judge": (adapter(), 1.0), "poet": (adapter(), 2.0)})
  assert turned["judge"] == first["poet"] and turned["poet"] not in first.values()
  assert turned[""] == first[""] == keys_of({})[""]


def test_the_numbers_of_rows_follow_the_shapes():
  chosen = make_engine()._runner.place_adapters(
    tiny_model.params(NUMERICS),
    {"a": (adapter(), 1.0), "b": (adapter(3), 1.0), "c": (adapter(), 2.0)},
  )
  assert chosen.index_of == {"": 0, "a": 1, "c": 2, "b": 3}
  assert [form.count for form in chosen.forms] == [2, 1]
  np.testing.assert_array_equal(chosen.forms[0].scales, [1.0, 2.0])
