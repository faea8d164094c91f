"""Weights of other numerics, truncated or missing ones, and NaNs, at every entry point."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
import tiny_model
import trainers

from seerjax import checkpoint, numerics as numerics_lib
from seerjax.engine import engine as engine_lib
from seerjax.models import huggingface, lora, parameters, weights
from seerjax.models.decoder import decide
from seerjax.models.loading import Model

MODEL, NUMERICS = tiny_model.SMALLEST, tiny_model.ONE_SLAB


def running(config=MODEL, numerics=NUMERICS):
  return tiny_model.random_params(config, numerics)


def without(params, name):
  first = {key: leaf for key, leaf in params["layers"][0].items() if key != name}
  return {**params, "layers": [first, *params["layers"][1:]]}


def changed(params, name, change):
  first = {**params["layers"][0], name: change(params["layers"][0][name])}
  return {**params, "layers": [first, *params["layers"][1:]]}


def adapted(rank=3):
  adapter = lora.init(numerics_lib.key(0), MODEL, NUMERICS, rank)
  return lora.attach(running(), adapter, 2.0)


WRONG = {
  "slabs of other numerics": (
    lambda: jax.tree.map(lambda leaf: leaf, running(MODEL, NUMERICS))
    | {"layers": [
      {**layer, "down": layer["down"].reshape(2, -1, MODEL.hidden_size)}
      for layer in running()["layers"]
    ]},
    r"['layers'][0]['down']: got float32[2, 8, 16], expected float32[1, 16, 16]",
  ),
  "masters of another dtype": (
    lambda: jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), running()),
    r"['embed']: got bfloat16[32, 16], expected float32[32, 16]",
  ),
  "one leaf in another dtype": (
    lambda: changed(running(), "gate_up", lambda leaf: leaf.astype(jnp.bfloat16)),
    r"['layers'][0]['gate_up']: got bfloat16[1, 16, 32], expected float32[1, 16, 32]",
  ),
  "a cut leaf": (
    lambda: changed(running(), "out", lambda leaf: leaf[:, :, :15]),
    r"['layers'][0]['out']: got float32[1, 16, 15], expected float32[1, 16, 16]",
  ),
  "a missing leaf": (
    lambda: without(running(), "mlp_norm"),
    r"['layers'][0]['mlp_norm']: got nothing, expected float32[16]",
  ),
  "a missing layer": (
    lambda: {**running(), "layers": running()["layers"][:1]},
    r"['layers'][1]['attention_norm']: got nothing, expected float32[16]",
  ),
  "a leaf too many": (
    lambda: {**running(), "head": running()["embed"][None]},
    r"['head']: got float32[1, 32, 16], expected nothing",
  ),
  "an adapter in another dtype": (
    lambda: changed(
      adapted(), "down_lora", lambda pair: {**pair, "b": pair["b"].astype(jnp.bfloat16)}
    ),
    r"['layers'][0]['down_lora']['b']: got bfloat16[3, 16], expected float32[3, 16]",
  ),
  "an adapter of other slabs": (
    lambda: changed(adapted(), "out_lora", lambda pair: {**pair, "a": pair["a"][0]}),
    r"['layers'][0]['out_lora']['a']: got float32[16, 3], expected float32[1, 16, 3]",
  ),
}  # fmt: skip
SIZES = engine_lib.EngineConfig(
  page_size=8, num_pages=5, max_num_seqs=1, max_model_len=16, batch_size_buckets=(8,)
)


def engine_of(params):
  return engine_lib.Engine(Model(MODEL, params, NUMERICS), config=SIZES, key=numerics_lib.key(0))


def trainer_of():
  return trainers.make(decoder=decide(MODEL, NUMERICS), page_size=8, rows_per_micro_batch=16)


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.usefixtures("unchecked_annotations")
def test_weights_of_other_numerics_are_refused_by_path(name):
  make, message = WRONG[name]
  params = make()
  engine = engine_of(running())
  for door, take in {
    "Engine.params": lambda: engine_of(params),
    "Engine.update_weights: params": lambda: engine.update_weights(params, 1),
    "Trainer.scores: params": lambda: trainer_of().scores(params, None),
    "Trainer.gradient: params": lambda: trainer_of().gradient(params, None, None, None),
  }.items():
    with pytest.raises(ValueError, match=re.escape(f"{door}{message} in a model of 2")):
      take()
  assert engine.policy_version == 0


def test_a_trainer_begins_from_masters_of_its_numerics():
  assert trainer_of().init(tiny_model.random_master(MODEL, NUMERICS)).step == 0
  with pytest.raises(ValueError, match=r"Trainer.init: params\['embed'\]: got bfloat16"):
    trainer_of().init(jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), running()))


def test_weights_and_adapters_of_the_numerics_are_taken():
  for params in (running(), adapted(), adapted(rank=1)):
    weights.check(params, decide(MODEL, NUMERICS), dtype=jnp.float32, what="params")
  bfloat16 = dataclasses.replace(tiny_model.NUMERICS, compute_dtype="bfloat16")
  deep = MODEL.changed(num_layers=parameters.UNROLLED_LAYERS + 1)
  stacked = running(deep)
  assert parameters.is_stacked(stacked)
  weights.check(stacked, decide(deep, NUMERICS), dtype=jnp.float32, what="params")
  cut = stacked["layers"] | {"out": stacked["layers"]["out"][:-1]}
  cut_short = {**stacked, "layers": cut}
  with pytest.raises(ValueError, match=r"params\['layers'\]\[8\]\['out'\]: got nothing, expected"):
    weights.check(cut_short, decide(deep, NUMERICS), dtype=jnp.float32, what="params")
  slabs = tiny_model.random_params(tiny_model.CONFIG, bfloat16)
  weights.check(slabs, decide(tiny_model.CONFIG, bfloat16), dtype=jnp.bfloat16, what="params")


def poisoned(value, params=None):
  params = tiny_model.random_master(MODEL, NUMERICS) if params is None else params
  return changed(params, "down", lambda leaf: leaf.at[0, 1, 2].set(value))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_pass_no_door(value, tmp_path):
  master, engine = poisoned(value), engine_of(running())
  bad = r"values that are not finite in \['layers'\]\[0\]\['down'\], expected finite numbers in all"
  with pytest.raises(ValueError, match=f"Engine.params: got {bad}"):
    engine_of(master)
  with pytest.raises(ValueError, match=f"Engine.update_weights: params: got {bad}"):
    engine.update_weights(master, 1)
  with pytest.raises(ValueError, match=f"Trainer.init: params: got {bad}"):
    trainer_of().init(master)
  with pytest.raises(ValueError, match=f"save: params: got {bad}.*; export an earlier step"):
    huggingface.save(tmp_path / "model", master, MODEL)
  assert not (tmp_path / "model").exists()
  with pytest.raises(ValueError, match="checkpoint.save: state of step 1: got values .*down"):
    checkpoint.save(tmp_path / "steps", 1, master, host_state={}, fingerprint={"digest": "a"})
  assert checkpoint.latest_step(tmp_path / "steps") is None


@pytest.mark.standard_promotion
def test_an_update_that_diverges_gives_no_state():
  trainer = trainer_of()
  master = tiny_model.random_master(MODEL, NUMERICS)
  gradient = poisoned(float("nan"), jax.tree.map(jnp.zeros_like, master))
  with pytest.raises(ValueError, match="Trainer.update: weights after a gradient of norm nan: "):
    trainer.update(trainer.init(master), gradient)
