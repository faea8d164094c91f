"""The presets have the parameter counts of the published models."""

from __future__ import annotations

import math

import jax
import pytest

from seerjax import numerics as numerics_lib
from seerjax.engine import sizes
from seerjax.models import config as model_config, kv_layout, parameters, presets, shared_heads
from seerjax.models.decoder import decide
from seerjax.ops import rotary

# Parameters by the safetensors metadata of each repository; tied heads count once.
PARAMETERS = {
  "qwen3-0.6b": 596_049_920,
  "qwen3-1.7b": 1_720_574_976,
  "qwen3-4b": 4_022_468_096,
  "qwen3-8b": 8_190_735_360,
  "qwen3-14b": 14_768_307_200,
  "qwen3-32b": 32_762_123_264,
  "qwen3-30b-a3b": 30_532_122_624,
  "qwen3-235b-a22b": 235_093_634_560,
  "qwen2.5-0.5b": 494_032_768,
  "qwen2.5-1.5b": 1_543_714_304,
  "qwen2.5-3b": 3_085_938_688,
  "qwen2.5-7b": 7_615_616_512,
  "llama-3.2-1b": 1_235_814_400,
  "llama-3.2-3b": 3_212_749_824,
  "llama-3.1-8b": 8_030_261_248,
  "gemma-3-270m": 268_098_176,
  "gemma-3-1b": 999_885_952,
  "mistral-7b-v0.3": 7_248_023_552,
  "mistral-nemo-base-2407": 12_247_782_400,
  "mistral-small-24b-base-2501": 23_572_403_200,
}

OURS = {"nano", "nano-gpu", "nano-draft", "nano-10m", "nano-moe"}


def count(config: model_config.TransformerConfig, shards: int) -> int:
  """Returns the number of weights; of a head that several slabs share, the first copy counts."""
  layout, total = parameters.shapes(config, shards), 0
  shared = shared_heads.of_leaves(layout, config, shards)
  for leaf, own in zip(jax.tree.leaves(layout), shared, strict=True):
    total += math.prod(leaf.shape)
    if own is not None:
      (copies,) = own.copies
      total -= math.prod(leaf.shape[:-1]) * own.columns * (copies - 1) // copies
  return total


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_count_is_the_published_one(name):
  config = presets.get(name)
  assert count(config, 1) == PARAMETERS[name]
  assert count(config, presets.REDUCTION_SHARDS[name]) == PARAMETERS[name]


def test_every_preset_but_ours_has_a_published_count():
  assert set(PARAMETERS) == set(presets.CONFIGS) - OURS
  assert count(presets.nano(), 8) == 1_132_064
  assert 50e6 < count(presets.nano_gpu(), 8) < 100e6


@pytest.mark.parametrize("name", presets.CONFIGS)
def test_every_preset_divides_into_its_slabs(name):
  shards = presets.REDUCTION_SHARDS[name]
  numerics = numerics_lib.NumericsConfig(
    reduction_shards=shards, backend="tiled", row_tile=16, expert_tile=8
  )
  assert decide(presets.get(name), numerics).numerics == numerics
  assert shards == (
    2
    if name == "qwen2.5-0.5b"
    else 4
    if name in ("qwen2.5-1.5b", "qwen2.5-7b", "nano-draft", "gemma-3-270m", "gemma-3-1b")
    else 8
  )


def test_nano_is_small_and_divides_by_eight():
  config = presets.nano()
  assert config == presets.get("nano")
  assert config.layers[0].attention.rotary == rotary.RotaryConfig(head_dim=16, base=10_000.0)
  assert count(config, 8) <= 3_900_000
  sizes = (
    config.layers[0].attention.num_heads,
    config.layers[0].attention.num_kv_heads,
    config.hidden_size,
    config.layers[0].feed_forward.intermediate_size,
  )
  assert not any(size % 8 for size in (*sizes, config.vocab_size))


def test_presets_cannot_be_changed():
  with pytest.raises(TypeError, match="does not support item assignment"):
    presets.CONFIGS["nano"] = presets.nano()


def test_an_unknown_name_is_refused():
  with pytest.raises(ValueError, match="presets.get: got 'gpt-2', expected one of .*'qwen3-8b'"):
    presets.get("gpt-2")


@pytest.mark.parametrize(
  "name, expected", [("qwen3-30b-a3b", 98_304), ("qwen3-235b-a22b", 192_512)]
)
def test_bytes_of_keys_and_values_a_token_are_the_formula_and_the_arrays(name, expected):
  config = presets.get(name)
  kind = config.layers[0].attention
  assert 2 * 2 * config.num_layers * kind.num_kv_heads * kind.head_dim == expected
  numerics = numerics_lib.NumericsConfig(backend="tiled", compute_dtype="bfloat16")
  decoder = decide(config, numerics)
  pages = jax.eval_shape(lambda: kv_layout.empty_pages(decoder, num_pages=1, page_size=16))
  num_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pages))
  assert num_bytes == 16 * expected == 16 * 2 * config.kv_features
  assert sizes.page_bytes(decoder, page_size=16) == num_bytes
