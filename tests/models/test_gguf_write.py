"""Round trips between directories and GGUF files, and the rounding of each quantisation kind."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib

import gguf_cases
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from seerjax import numerics as numerics_lib
from seerjax.models import (
  gguf_config,
  gguf_file,
  gguf_tensors,
  gguf_write,
  huggingface,
  loading,
  tokenizer as tokenizer_lib,
)
from seerjax.ops import rotary

CONFIGS = pytest.mark.parametrize("case", gguf_cases.CONFIGS)


def files_of(directory: pathlib.Path) -> dict[str, bytes]:
  return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def written(path: pathlib.Path, case: str, **settings) -> list[gguf_write.Written]:
  config = gguf_cases.CONFIGS[case]
  settings = {"tokenizer": gguf_cases.tokenizer("qwen2")} | settings
  return gguf_write.save(path, gguf_cases.weights(config), config, **settings)


def to_directory(path: pathlib.Path, directory: pathlib.Path) -> pathlib.Path:
  params, config = huggingface.load(path, gguf_cases.NUMERICS)
  huggingface.save(directory, params, config, dtype="float32", tokenizer=tokenizer_lib.load(path))
  return directory


@CONFIGS
def test_a_directory_comes_back_with_equal_tensors_and_configuration(case, tmp_path):
  config = gguf_cases.CONFIGS[case]
  first = gguf_cases.saved(tmp_path / "first", config)
  params, _ = huggingface.load(first, gguf_cases.NUMERICS)
  tokenizer = tokenizer_lib.load(first)
  gguf_write.save(tmp_path / "m.gguf", params, config, tokenizer=tokenizer)
  assert huggingface.load_config(tmp_path / "m.gguf") == config
  second = to_directory(tmp_path / "m.gguf", tmp_path / "second")
  one, other = files_of(first), files_of(second)
  assert one["model.safetensors"] == other["model.safetensors"]
  assert json.loads(one["config.json"]) == json.loads(other["config.json"])
  found = tokenizer_lib.load(second)
  for text in gguf_cases.TEXTS:
    assert tokenizer.encode(text) == found.encode(text)


@pytest.mark.few(3)
@CONFIGS
def test_a_file_comes_back_byte_by_byte(case, tmp_path):
  written(tmp_path / "first.gguf", case)
  directory = to_directory(tmp_path / "first.gguf", tmp_path / "model")
  params, config = huggingface.load(directory, gguf_cases.NUMERICS)
  gguf_write.save(tmp_path / "second.gguf", params, config, tokenizer=tokenizer_lib.load(directory))
  assert (tmp_path / "second.gguf").read_bytes() == (tmp_path / "first.gguf").read_bytes()


@pytest.mark.parametrize("shards", [1, 2])
def test_any_number_of_slabs_writes_the_same_file(shards, tmp_path):
  numerics = dataclasses.replace(gguf_cases.NUMERICS, reduction_shards=shards)
  written(tmp_path / "one.gguf", "llama")
  params, config = huggingface.load(tmp_path / "one.gguf", numerics)
  assert params["layers"][0]["down"].shape[0] == shards
  gguf_write.save(tmp_path / "two.gguf", params, config, tokenizer=gguf_cases.tokenizer("qwen2"))
  assert (tmp_path / "one.gguf").read_bytes() == (tmp_path / "two.gguf").read_bytes()


def block(numbers: np.ndarray, kind: str) -> np.ndarray:
  """Returns 32 numbers after rounding, by the definitions of llama.cpp's kinds."""
  if kind == "F32":
    return numbers
  if kind == "F16":
    return numbers.astype(np.float16)
  if kind == "BF16":
    return numbers.astype(ml_dtypes.bfloat16)
  if kind == "Q8_0":
    scale = np.abs(numbers).max() / np.float32(127)
    return np.round(numbers / scale) * np.float16(scale).astype(np.float32)
  if kind == "Q4_0":  # The largest, with its sign, is -8.
    scale = numbers[np.abs(numbers).argmax()] / np.float32(-8)
    steps = np.clip(np.floor(numbers / scale + np.float32(8.5)), 0, 15) - 8
    return steps * np.float16(scale).astype(np.float32)
  low, high = numbers.min(), numbers.max()  # Q4_1
  scale = (high - low) / np.float32(15)
  steps = np.clip(np.floor((numbers - low) / scale + np.float32(0.5)), 0, 15)
  return steps * np.float16(scale).astype(np.float32) + np.float16(low).astype(np.float32)


@pytest.mark.parametrize("kind", gguf_write.KINDS)
def test_matrices_are_rounded_block_by_block_and_vectors_are_not(kind, tmp_path):
  found = written(tmp_path / "m.gguf", "qwen2", kind=kind)
  file = gguf_file.File(tmp_path / "m.gguf")
  whole = gguf_cases.weights(gguf_cases.QWEN2)
  table = np.asarray(whole["embed"])
  expected = np.stack([block(row, kind) for row in table.reshape(-1, 32)]).reshape(table.shape)
  np.testing.assert_allclose(file.read("token_embd.weight"), expected, rtol=1e-6, atol=1e-9)
  for tensor in found:
    assert tensor.kind == ("F32" if len(tensor.shape) == 1 else kind)
    assert file.tensors[tensor.name][:2] == (tensor.shape, tensor.kind)
    assert file.tensors[tensor.name].size == tensor.size
  bias = "blk.1.attn_k.bias"
  assert file.tensors[bias].kind == "F32"
  lines = gguf_write.summary(found).splitlines()
  numbers = sum(math.prod(tensor.shape) for tensor in found if len(tensor.shape) == 2)
  matrices = sum(tensor.size for tensor in found if len(tensor.shape) == 2)
  if kind != "F32":
    assert lines[0] == f"{kind}: 16 tensors, {numbers:,} numbers, {matrices:,} bytes"
    assert lines[1].startswith("F32: 11 tensors, ")


def test_rows_that_are_no_whole_blocks_are_halves(tmp_path):
  config = gguf_cases.LLAMA.changed(
    hidden_size=48, head_dim=12, rotary=rotary.RotaryConfig(head_dim=12)
  )
  found = gguf_write.save(tmp_path / "m.gguf", gguf_cases.weights(config), config, kind="Q8_0")
  kinds = {tensor.name: tensor.kind for tensor in found}
  assert kinds["blk.0.ffn_down.weight"] == "Q8_0"  # Rows of 64.
  assert kinds["blk.0.ffn_up.weight"] == kinds["token_embd.weight"] == "F16"  # Of 48.
  assert "F16: " in gguf_write.summary(found)
  huggingface.load(tmp_path / "m.gguf", gguf_cases.NUMERICS)


def test_the_halves_of_a_llamas_heads_alternate(tmp_path):
  written(tmp_path / "m.gguf", "llama")
  file = gguf_file.File(tmp_path / "m.gguf")
  params = gguf_cases.weights(gguf_cases.LLAMA)
  qkv = np.asarray(params["layers"][0]["qkv"])[0]  # f32[d, queries | keys | values], one slab.
  for name, first, heads in (("attn_q", 0, 4), ("attn_k", 32, 2)):
    rows = file.read(f"blk.0.{name}.weight")
    for head in range(heads):
      ours = qkv[:, first + 8 * head : first + 8 * head + 8].T
      theirs = rows[8 * head : 8 * head + 8]
      for j in range(4):
        assert np.array_equal(theirs[2 * j], ours[j])
        assert np.array_equal(theirs[2 * j + 1], ours[j + 4])
  assert np.array_equal(file.read("blk.0.attn_v.weight"), qkv[:, 48:].T)
  # Families with contiguous halves in llama.cpp keep their row order.
  for family in ("qwen2", "qwen3"):
    config = gguf_cases.CONFIGS[family]
    assert gguf_tensors.turned_heads("model.layers.0.self_attn.q_proj.weight", config) == 0


def test_factors_of_llama_3s_rotations_are_those_of_its_definition(tmp_path):
  written(tmp_path / "m.gguf", "llama, scaled as Llama 3")
  file = gguf_file.File(tmp_path / "m.gguf")
  expected = []
  for i in range(16):
    wavelength = 2 * math.pi * 5e5 ** (2 * i / 32)
    if wavelength < 8192 / 4:
      expected.append(1.0)
    elif wavelength > 8192 / 1:
      expected.append(32.0)
    else:
      smooth = (8192 / wavelength - 1) / (4 - 1)
      expected.append(1 / ((1 - smooth) / 32 + smooth))
  factors = file.read(gguf_config.ROPE_FACTORS)
  np.testing.assert_allclose(factors, expected, rtol=1e-6)
  assert 1 < sorted(factors)[8] < 32 or len(set(factors)) > 2


def test_llama_3_without_what_it_was_made_from_is_its_published_scaling(tmp_path):
  """Files of llama.cpp's converter contain the RoPE factors only."""
  entries, records = gguf_cases.parts(gguf_cases.LLAMA3)
  entries["llama.attention.key_length"] = gguf_cases.value("u32", 32)
  entries["llama.attention.value_length"] = gguf_cases.value("u32", 32)
  factors = gguf_config.rope_factors(gguf_cases.LLAMA3.layers[0].attention.rotary)
  assert factors is not None
  records["rope_freqs.weight"] = gguf_cases.Record((16,), "F32", factors.tobytes())
  path = tmp_path / "m.gguf"
  path.write_bytes(gguf_cases.raw(entries, records))
  assert (
    huggingface.load_config(path).layers[0].attention.rotary
    == gguf_cases.LLAMA3.layers[0].attention.rotary
  )
  # Factors of one change no rotation.
  records["rope_freqs.weight"].data = np.ones(16, np.float32).tobytes()
  path.write_bytes(gguf_cases.raw(entries, records))
  assert huggingface.load_config(path).layers[0].attention.rotary.scaling == "none"


def test_a_head_of_another_kind_is_loaded_apart_with_one_line(tmp_path, caplog):
  entries, records = gguf_cases.parts()
  table = np.frombuffer(records["token_embd.weight"].data, np.float32).reshape(400, 32)
  halves = gguf_cases.Record((400, 32), "F16", table.astype(np.float16).tobytes())
  records["output.weight"] = halves
  path = tmp_path / "m.gguf"
  path.write_bytes(gguf_cases.raw(entries, records))
  with caplog.at_level("WARNING"):
    model = loading.load_model(path, gguf_cases.NUMERICS)
  assert not model.config.is_tied
  lines = [r.getMessage() for r in caplog.records if "output.weight" in r.getMessage()]
  [line] = lines
  assert (
    "token_embd.weight is F32 and output.weight is F16" in line and "12,800 more numbers" in line
  )
  assert np.array_equal(model.params["head"][0], table.astype(np.float16).astype(np.float32))
  # Equal kinds give no warning.
  records["output.weight"] = records["token_embd.weight"]
  path.write_bytes(gguf_cases.raw(entries, records))
  caplog.clear()
  with caplog.at_level("WARNING"):
    assert not loading.load_model(path, gguf_cases.NUMERICS).config.is_tied
  assert not [r for r in caplog.records if "output.weight" in r.getMessage()]


def test_bfloat16_weights_are_written_as_they_are(tmp_path):
  half = jax.tree.map(lambda w: w.astype(jnp.bfloat16), gguf_cases.weights(gguf_cases.QWEN3))
  gguf_write.save(tmp_path / "m.gguf", half, gguf_cases.QWEN3, kind="BF16")
  params, _ = huggingface.load(tmp_path / "m.gguf", gguf_cases.NUMERICS)
  assert np.array_equal(params["embed"], half["embed"].astype(jnp.float32))
  assert np.array_equal(params["layers"][1]["qkv"], half["layers"][1]["qkv"].astype(jnp.float32))


def spoilt(value: float) -> dict:
  params = gguf_cases.weights(gguf_cases.QWEN3)
  return params | {"embed": params["embed"].at[3, 4].set(value)}


@pytest.mark.parametrize(
  "settings, error, fragments",
  [
    (dict(kind="Q6_K"), ValueError, ["kind: got 'Q6_K'", "'Q8_0'"]),
    (dict(path="model.bin"), ValueError, ["model.bin", ".gguf"]),
    (dict(path="there.gguf"), FileExistsError, ["there.gguf: got an existing file"]),
    (dict(path="folder.gguf", overwrite=True), FileExistsError, ["folder.gguf"]),
    (dict(params=spoilt(float("nan"))), ValueError, ["GGUF: params", "embed"]),
    (dict(params=spoilt(1e6), kind="F16"), ValueError, ["token_embd.weight", "65504.0", "F16"]),
    (dict(params=spoilt(1e6), kind="Q4_0"), ValueError, ["token_embd.weight", "write F32"]),
    (dict(config=gguf_cases.LLAMA), ValueError, ["params", "expected nothing with 1 slabs"]),
    (
      dict(config=gguf_cases.QWEN3.changed(has_qkv_biases=True)), ValueError,
      ["qkv_bias"],
    ),
    (
      dict(
        config=gguf_cases.QWEN3.changed(
          rotary=rotary.RotaryConfig(head_dim=16, scaling="yarn", factor=2.0, attention_factor=1.5),
        )
      ),
      NotImplementedError,
      ["attention_factor: got 1.5"],
    ),
  ],
)  # fmt: skip
def test_what_cannot_be_written_is_refused(settings, error, fragments, tmp_path):
  (tmp_path / "there.gguf").write_text("")
  (tmp_path / "folder.gguf").mkdir()
  settings = {
    "path": "m.gguf", "params": gguf_cases.weights(gguf_cases.QWEN3), "config": gguf_cases.QWEN3
  } | settings  # fmt: skip
  with pytest.raises(error) as found:
    gguf_write.save(tmp_path / settings.pop("path"), **settings)
  for fragment in fragments:
    assert fragment in str(found.value)
  assert sorted(p.name for p in tmp_path.iterdir()) == ["folder.gguf", "there.gguf"]


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
  path = tmp_path / "m.gguf"
  written(path, "llama")
  before = path.read_bytes()
  with pytest.raises(ValueError, match="token_embd"):
    gguf_write.save(path, spoilt(1e6), gguf_cases.QWEN3, kind="F16", overwrite=True)
  assert path.read_bytes() == before
  written(path, "qwen3", overwrite=True)
  assert huggingface.load_config(path) == gguf_cases.QWEN3


def test_a_model_from_a_file_is_one_from_its_directory(tmp_path):
  """A completion's bits do not depend on which of the two was named."""
  directory = gguf_cases.saved(tmp_path / "model", gguf_cases.QWEN2)
  params, config = huggingface.load(directory, gguf_cases.NUMERICS)
  gguf_write.save(tmp_path / "m.gguf", params, config, tokenizer=tokenizer_lib.load(directory))
  numerics = numerics_lib.NumericsConfig()
  one, other = (loading.load_model(p, numerics) for p in (directory, tmp_path / "m.gguf"))
  assert one.config == other.config and one.numerics == other.numerics
  assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), one.params, other.params))
  assert one.tokenizer is not None and other.tokenizer is not None
  assert one.tokenizer.chat_ids("hi <|im_end|>") == other.tokenizer.chat_ids("hi <|im_end|>")
