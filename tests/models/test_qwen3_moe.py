"""Qwen3-MoE checkpoints: which layers have experts, their tensors by hand, and both spellings."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import refusals
import safetensors.numpy
from small_configs import QWEN3, QWEN3_MOE

from seerjax import numerics as numerics_lib
from seerjax.layer_kinds import Experts, Gated
from seerjax.models import huggingface, huggingface_config, huggingface_layout, parameters
from seerjax.ops.routing import RoutingConfig

NUMERICS = numerics_lib.NumericsConfig(reduction_shards=2)
EXPERTS = QWEN3_MOE.layers[0].feed_forward


def edited(directory, config=QWEN3_MOE, **changes):
  path = directory / "config.json"
  values = huggingface_config.to_object(config, "bfloat16", ()) | changes
  path.write_text(json.dumps({name: value for name, value in values.items() if value is not ...}))
  return huggingface_config.read(path)


def which(config) -> list[bool]:
  return [isinstance(layer.feed_forward, Experts) for layer in config.layers]


def test_layers_with_experts_are_every_nth_but_those_named(tmp_path):
  some = dict(num_hidden_layers=6)
  assert which(edited(tmp_path)) == [True, False]
  assert which(edited(tmp_path, **some, mlp_only_layers=[])) == 6 * [True]
  assert which(edited(tmp_path, **some, mlp_only_layers=None, decoder_sparse_step=2)) == (
    3 * [False, True]
  )
  found = edited(tmp_path, **some, mlp_only_layers=[2, 5], decoder_sparse_step=3)
  assert which(found) == 6 * [False] and found.layers[0].feed_forward == Gated(intermediate_size=8)
  alone = edited(tmp_path, mlp_only_layers=[], intermediate_size=...)
  assert alone.layers[0].feed_forward == EXPERTS


def test_weights_are_renormalised_if_the_file_says_so(tmp_path):
  assert EXPERTS.routing.is_renormalised
  found = edited(tmp_path, norm_topk_prob=...)
  assert found.layers[0].feed_forward.routing == RoutingConfig(num_experts=4, num_chosen=2)


def test_the_number_of_experts_has_two_spellings(tmp_path):
  assert edited(tmp_path, num_experts=..., num_local_experts=4) == QWEN3_MOE
  assert edited(tmp_path, num_local_experts=4) == QWEN3_MOE


@refusals.table(
  (dict(num_experts=...), "num_experts: got nothing, expected a whole number of at least 1"),
  (dict(num_local_experts=5), "num_experts: got 4, expected the 5 of num_local_experts"),
  (dict(num_experts_per_tok=5), "num_experts_per_tok: got 5, expected at most 4 experts"),
  (dict(moe_intermediate_size=0), "moe_intermediate_size: got 0, expected a whole number"),
  (dict(mlp_only_layers=3), "mlp_only_layers: got 3, expected a list of whole numbers"),
  (dict(num_experts=2**16 + 1), "num_experts: got 65537, expected at most 131072 in all 2 layers"),
  (dict(num_experts=..., num_local_experts=2**30), "num_local_experts: got 1073741824, expected"),
  (dict(use_sliding_window=True), "use_sliding_window: got True, expected false"),
  (dict(norm_topk_prob=1), "norm_topk_prob: got 1, expected true or false"),
)  # fmt: skip
def test_a_malformed_field_is_refused_by_name(row, tmp_path):
  changes, *pieces = row
  refusals.check((lambda: edited(tmp_path, **changes), *pieces))


def layers_of(*parts):
  return QWEN3.changed(layers=tuple(QWEN3.layers[0].changed(feed_forward=part) for part in parts))


def changed(**changes):
  return Experts(**(vars(EXPERTS) | changes))


GROUPED = RoutingConfig(num_experts=4, num_chosen=2, num_groups=2)


COMBINATION = "expected the combination of one of"


@refusals.table(
  (lambda: layers_of(EXPERTS, changed(expert_size=5)), "expert_size=3", "expert_size=5",
   COMBINATION),
  (lambda: layers_of(Gated(intermediate_size=2), EXPERTS, Gated(intermediate_size=4)),
   "intermediate_size=2", "intermediate_size=4", COMBINATION),
  (lambda: layers_of(changed(shared_size=2)), "shared_size=2", COMBINATION),
  (lambda: layers_of(changed(routing=GROUPED)), "num_groups=2", COMBINATION),
  (lambda: layers_of(EXPERTS).changed(has_qkv_biases=True),
   "has_qkv_biases=True with Experts(", COMBINATION),
  (lambda: layers_of(EXPERTS).changed(window=8), "layer 0 has window=8, expected one"),
)  # fmt: skip
def test_a_shape_of_no_family_is_refused(row):
  config, *pieces = row
  refusals.check((lambda: huggingface_config.to_object(config(), "float32", ()), *pieces))


@pytest.mark.parametrize(
  "changes",
  [
    dict(shared_size=2),
    dict(routing=RoutingConfig(num_experts=4, num_chosen=2, has_bias=True)),
  ],
)
def test_experts_with_tensors_of_no_name_have_no_plan(changes):
  config = layers_of(changed(**changes))
  with pytest.raises(
    NotImplementedError, match=r"checkpoint: got Experts\(.*shared MLP and without"
  ):
    huggingface_layout.plan(config)


def test_layers_that_differ_in_more_than_experts_are_refused():
  layers = (QWEN3_MOE.layers[0], QWEN3.layers[0].changed(num_kv_heads=1))
  with pytest.raises(NotImplementedError, match="layer 1 has num_kv_heads=1, layer 0 has"):
    huggingface_config.to_object(QWEN3.changed(layers=layers), "float32", ())


def random_params(seed=0):
  rng = np.random.default_rng(seed)
  array = lambda shape: jnp.asarray(rng.standard_normal(shape.shape), jnp.float32)
  return jax.tree.map(array, parameters.shapes(QWEN3_MOE, 2))


def test_tensors_of_experts_by_hand(tmp_path):
  params = random_params()
  huggingface.save(tmp_path / "model", params, QWEN3_MOE, dtype="float32")
  tensors = safetensors.numpy.load_file(tmp_path / "model" / huggingface.WEIGHTS_FILE)
  layer, mlp = params["layers"][0], "model.layers.0.mlp."
  np.testing.assert_array_equal(tensors[mlp + "gate.weight"], layer["router"].T)
  for index in range(4):  # Two slabs of two experts each.
    own = f"{mlp}experts.{index}."
    gate, up = np.split(np.asarray(layer["expert_gate_up"][index // 2, index % 2]), 2, axis=1)
    np.testing.assert_array_equal(tensors[own + "gate_proj.weight"], gate.T)
    np.testing.assert_array_equal(tensors[own + "up_proj.weight"], up.T)
    down = np.asarray(layer["expert_down"][index // 2, index % 2])
    np.testing.assert_array_equal(tensors[own + "down_proj.weight"], down.T)
  assert "model.layers.1.mlp.gate_proj.weight" in tensors


@pytest.mark.parametrize("shards", [1, 2])
def test_stacked_experts_are_read_as_single_ones(tmp_path, shards):
  numerics = numerics_lib.NumericsConfig(reduction_shards=shards)
  huggingface.save(tmp_path / "model", random_params(), QWEN3_MOE, dtype="float32")
  expected, _ = huggingface.load(tmp_path / "model", numerics)
  path = tmp_path / "model" / huggingface.WEIGHTS_FILE
  tensors = safetensors.numpy.load_file(path)
  own = "model.layers.0.mlp.experts."
  taken = lambda name: [tensors.pop(f"{own}{index}.{name}_proj.weight") for index in range(4)]
  gate, up, down = map(np.stack, map(taken, ("gate", "up", "down")))
  tensors |= {
    own + "gate_up_proj": np.concatenate([gate, up], axis=1),
    own + "down_proj": np.ascontiguousarray(down),
  }
  safetensors.numpy.save_file(tensors, path)
  found, config = huggingface.load(tmp_path / "model", numerics)
  assert config == QWEN3_MOE
  jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_a_missing_expert_is_refused_by_name(tmp_path):
  huggingface.save(tmp_path / "model", random_params(), QWEN3_MOE, dtype="float32")
  path = tmp_path / "model" / huggingface.WEIGHTS_FILE
  tensors = safetensors.numpy.load_file(path)
  del tensors["model.layers.0.mlp.experts.3.up_proj.weight"]
  safetensors.numpy.save_file(tensors, path)
  with pytest.raises(ValueError, match=r"got no tensor .*layers\.0\.mlp\.experts\.3\.up_proj"):
    huggingface.load(tmp_path / "model", NUMERICS)
