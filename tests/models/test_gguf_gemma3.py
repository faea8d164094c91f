"""Gemma 3 in GGUF files: keys that llama.cpp's converter writes, norms of 1 + w, refusals."""

from __future__ import annotations

import dataclasses
import pathlib

import gguf_cases
import jax
import numpy as np
import refusals

from seerjax.models import gguf_config, gguf_file, gguf_write, huggingface
from seerjax.models.families import gemma3
from seerjax.ops import rotary

GEMMA3 = gguf_cases.GEMMA3


def halves(params):
  """Returns weights of eight bits, as published ones are: 1 + w is exact in float32."""
  return jax.tree.map(lambda w: w.astype(jax.numpy.bfloat16).astype(jax.numpy.float32), params)


def test_a_model_comes_back_with_equal_tensors_and_configuration(tmp_path):
  params = halves(gguf_cases.weights(GEMMA3))
  gguf_write.save(tmp_path / "m.gguf", params, GEMMA3)
  found, config = huggingface.load(tmp_path / "m.gguf", gguf_cases.NUMERICS)
  assert config == GEMMA3 and config.family == "gemma3_text"
  jax.tree.map(np.testing.assert_array_equal, found, params)


def test_norms_are_those_of_llama_cpp_with_one_added(tmp_path):
  params = gguf_cases.weights(GEMMA3)
  gguf_write.save(tmp_path / "m.gguf", params, GEMMA3)
  file, layer = gguf_file.File(tmp_path / "m.gguf"), params["layers"][1]
  for theirs, ours in (
    ("blk.1.attn_norm", layer["attention_norm"]),
    ("blk.1.post_attention_norm", layer["attention_out_norm"]),
    ("blk.1.ffn_norm", layer["mlp_norm"]),
    ("blk.1.post_ffw_norm", layer["mlp_out_norm"]),
    ("blk.1.attn_q_norm", layer["query_norm"]),
    ("blk.1.attn_k_norm", layer["key_norm"]),
    ("output_norm", params["final_norm"]),
  ):
    expected = np.asarray(ours) + np.float32(1)
    np.testing.assert_array_equal(file.read(f"{theirs}.weight"), expected)
  np.testing.assert_array_equal(file.read("token_embd.weight"), params["embed"])


def described(path: pathlib.Path, **keys: tuple[str, object] | None):
  """Returns the configuration of a file as llama.cpp's converter writes it, without tensors."""
  entries = {
    "block_count": ("u32", 8),
    "context_length": ("u32", 32768),
    "embedding_length": ("u32", 640),
    "feed_forward_length": ("u32", 2048),
    "attention.head_count": ("u32", 4),
    "attention.head_count_kv": ("u32", 1),
    "attention.key_length": ("u32", 256),
    "attention.value_length": ("u32", 256),
    "attention.layer_norm_rms_epsilon": ("f32", 1e-6),
    "attention.sliding_window": ("u32", 512),
    "rope.freq_base": ("f32", 1e6),
    "vocab_size": ("u32", 262144),
  } | {name.replace("__", "."): entry for name, entry in keys.items()}
  content = {"general.architecture": gguf_cases.value("str", "gemma3")} | {
    f"gemma3.{name}": gguf_cases.value(*entry) for name, entry in entries.items() if entry
  }
  path.write_bytes(gguf_cases.raw(content, {}))
  return gguf_config.read(gguf_file.File(path))


def windows(config):
  return [layer.attention.window for layer in config.layers]


def test_a_file_of_the_published_model_has_the_layers_of_its_config_json(tmp_path):
  found = described(tmp_path / "m.gguf")
  published = gemma3.FAMILY.sizes["gemma-3-270m"]
  # Without tensors a file has no head of its own.
  assert found == dataclasses.replace(published, layers=published.layers[:8])
  assert windows(found) == [512] * 5 + [None] + [512] * 2


def test_keys_that_differ_from_the_published_ones_are_read(tmp_path):
  found = described(
    tmp_path / "m.gguf",
    attention__sliding_window_pattern=("u32", 2),
    rope__freq_base_swa=("f32", 500.0),
    rope__scaling__type=("str", "linear"),
    rope__scaling__factor=("f32", 8.0),
    final_logit_softcapping=("f32", 30.0),
  )
  assert windows(found) == [512, None] * 4 and found.logit_soft_cap == 30.0
  sliding, full = (layer.attention.rotary for layer in found.layers[:2])
  assert sliding == rotary.RotaryConfig(head_dim=256, base=500.0)
  assert full == rotary.RotaryConfig(head_dim=256, base=1e6, scaling="linear", factor=8.0)
  assert windows(described(tmp_path / "m.gguf", attention__sliding_window=None)) == [None] * 8


def test_the_scale_of_27b_is_that_of_its_config_json(tmp_path):
  config = described(
    tmp_path / "m.gguf",
    block_count=("u32", 62),
    embedding_length=("u32", 5376),
    attention__head_count=("u32", 32),
    attention__head_count_kv=("u32", 16),
    attention__key_length=("u32", 128),
    attention__value_length=("u32", 128),
  )
  assert {layer.attention.scale for layer in config.layers} == {168**-0.5}
  assert gemma3.describes(config)
  assert gguf_config.metadata(config)["gemma3.block_count"] == 62


@refusals.table(
  (NotImplementedError, lambda at: gguf_config.metadata(GEMMA3.changed(scale=17**-0.5)),
   "GGUF: got scale=0.24253562503633297, windows [23, 23, None, 23] and scaling='none'"),
  (NotImplementedError, lambda at: gguf_config.metadata(
    dataclasses.replace(GEMMA3, layers=GEMMA3.layers[:3] + GEMMA3.layers[2:])),
   "windows [23, 23, None, None, 23]", "save a Hugging Face directory instead"),
  (NotImplementedError, lambda at: gguf_config.metadata(dataclasses.replace(
    GEMMA3, layers=(GEMMA3.layers[2].changed(rotary=rotary.RotaryConfig(
      head_dim=16, base=1e6, scaling="yarn", factor=2.0, original_context=64)),) * 2)),
   "scaling='yarn' in full layers"),
  (lambda at: described(at / "m.gguf", rope__scaling__type=("str", "yarn"),
                        rope__scaling__factor=("f32", 2.0)),
   "gemma3.rope.scaling.type: got 'yarn', expected 'none' or 'linear'"),
  (lambda at: described(at / "m.gguf", attention__sliding_window_pattern=("u32", 0)),
   "gemma3.attention.sliding_window_pattern: got 0, expected a whole number of at least 1"),
  (lambda at: described(at / "m.gguf", attention__sliding_window=("f32", 1.5)),
   "gemma3.attention.sliding_window: got 1.5, expected a whole number of at least 1"),
  (NotImplementedError,
   lambda at: described(at / "m.gguf", attn_logit_softcapping=("f32", 50.0)),
   "gemma3.attn_logit_softcapping: got 50.0, expected no such key"),
)  # fmt: skip
def test_what_a_file_does_not_describe_is_refused(row, tmp_path):
  refusals.check(row, tmp_path)
