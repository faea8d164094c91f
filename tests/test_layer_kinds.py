"""Kinds of layers as data: their checks, how configs change, and how differences are named."""

from __future__ import annotations

import dataclasses

import pytest
import refusals
import tiny_model

from seerjax import layer_kinds
from seerjax.layer_kinds import Gated, Grouped, LayerConfig
from seerjax.models import growth, huggingface_config
from seerjax.models.config import TransformerConfig, largest_shards
from seerjax.ops import rotary

KIND = LayerConfig(
  attention=Grouped(
    num_heads=4, num_kv_heads=2, head_dim=8, rotary=rotary.RotaryConfig(head_dim=8)
  ),
  feed_forward=Gated(intermediate_size=24),
)
WIDE = KIND.changed(intermediate_size=32)


def config_of(*layers: LayerConfig) -> TransformerConfig:
  return TransformerConfig(vocab_size=64, hidden_size=16, layers=layers)


def test_fields_of_a_layer_and_of_its_parts_change_by_name():
  changed = KIND.changed(num_heads=2, intermediate_size=8)
  assert changed.attention == dataclasses.replace(KIND.attention, num_heads=2)
  assert changed.feed_forward == Gated(intermediate_size=8)
  given = KIND.changed(feed_forward=Gated(intermediate_size=3), intermediate_size=5)
  assert given.feed_forward == Gated(intermediate_size=5)
  with pytest.raises(TypeError, match="num_head"):
    KIND.changed(num_head=2)


def test_a_config_changes_every_layer_and_repeats_them_in_order():
  config = config_of(KIND, WIDE)
  assert config.changed(num_layers=5).layers == (KIND, WIDE, KIND, WIDE, KIND)
  assert config.changed(num_layers=1, vocab_size=8).layers == (KIND,)
  assert config.changed(vocab_size=8).vocab_size == 8
  narrow = config.changed(num_heads=2)
  assert [layer.attention.num_heads for layer in narrow.layers] == [2, 2]
  assert [layer.feed_forward.intermediate_size for layer in narrow.layers] == [24, 32]
  assert config.changed(layers=(WIDE,)).layers == (WIDE,)
  with pytest.raises(TypeError, match="num_head"):
    config.changed(num_head=2)


@pytest.mark.parametrize(
  ("layers", "period"),
  [
    ((KIND,), 1),
    (layer_kinds.uniform(KIND, 6), 1),
    ((KIND, WIDE) * 3, 2),
    ((KIND, KIND, WIDE) * 2, 3),
    ((KIND, WIDE, KIND), 3),
    ((*layer_kinds.uniform(KIND, 5), WIDE), 6),
  ],
)
def test_the_period_is_the_shortest_run_that_repeats(layers, period):
  assert config_of(*layers).period == period


def test_slabs_divide_every_layer():
  four = KIND.changed(num_kv_heads=4)
  assert largest_shards(config_of(four)) == 4
  assert largest_shards(config_of(four, KIND)) == 4
  assert largest_shards(config_of(four, KIND.changed(num_heads=2))) == 2
  assert largest_shards(config_of(four, four.changed(intermediate_size=27))) == 1


def test_slabs_share_heads_where_there_are_more_slabs():
  own = KIND.attention  # Four query heads, two key/value heads.
  assert [own.copies(count) for count in (1, 2, 4)] == [1, 1, 2]
  assert own.in_slabs(1) is own and KIND.in_slabs(2) is KIND
  assert KIND.in_slabs(4) == KIND.changed(num_kv_heads=4)


def test_sizes_of_keys_add_up_over_layers():
  config = config_of(KIND, KIND.changed(num_kv_heads=4, intermediate_size=8))
  assert config.kv_features == 2 * 2 * 8 + 2 * 4 * 8
  assert not config.shares_kv_shape and config_of(KIND, WIDE).shares_kv_shape


def test_equal_configs_are_one_key():
  one, two = (config_of(*layer_kinds.uniform(KIND.changed(), 3)) for _ in range(2))
  assert one == two and hash(one) == hash(two)
  assert one != config_of(KIND, WIDE, KIND)


def test_the_first_difference_is_named():
  assert layer_kinds.difference((KIND, KIND)) == ""
  other = WIDE.changed(num_heads=2)
  assert layer_kinds.difference((KIND, KIND, other)) == (
    "layer 2 has num_heads=2, intermediate_size=32, layer 0 has num_heads=4, intermediate_size=24"
  )
  assert config_of(KIND, KIND).only_kind("a test") is KIND


MIXED = dataclasses.replace(tiny_model.CONFIG, layers=(KIND, WIDE))


@refusals.table(
  (lambda: KIND.changed(num_heads=3), "Grouped.num_heads: got 3 query heads for 2 key/value heads"),
  (lambda: KIND.changed(head_dim=6), "Grouped.rotary.head_dim: got 8, expected head_dim=6"),
  (lambda: Gated(intermediate_size=0), "Gated.intermediate_size: got 0, expected at least 1"),
  (lambda: config_of(), "TransformerConfig.layers: got (), expected at least 1 layer"),
)  # fmt: skip
def test_wrong_kinds_are_refused(row):
  refusals.check(row)


@refusals.table(
  (lambda: KIND.changed(activation="gelu"), "Gated.activation: got 'gelu', expected"),
  (lambda: KIND.changed(norm_placement="post"), "LayerConfig.norm_placement: got 'post', expected"),
)
def test_unknown_words_are_refused(row, unchecked_annotations):
  refusals.check(row)


@pytest.mark.parametrize(
  ("what", "run"),
  [
    ("config.json", lambda: huggingface_config.to_object(MIXED, "float32", ())),
    ("growth", lambda: growth.check(MIXED, MIXED)),
  ],
)
def test_what_needs_equal_layers_says_which_differ(what, run):
  message = f"{what}: got layers of different kinds .layer 1 has intermediate_size=32, layer 0 has"
  with pytest.raises(NotImplementedError, match=message):
    run()
