"""GGUF files read back by the format's description, and what has no name in them."""

from __future__ import annotations

import json
import pathlib
import struct
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from experiments import gguf
from seerjax.models import loading, tokenizer as tokenizer_lib

FLOAT32, BFLOAT16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)
CONFIG = {
  "model_type": "qwen3",
  "vocab_size": 6,
  "num_hidden_layers": 1,
  "max_position_embeddings": 64,
  "hidden_size": 4,
  "intermediate_size": 8,
  "num_attention_heads": 2,
  "num_key_value_heads": 1,
  "head_dim": 3,
  "rms_norm_eps": 1e-6,
  "rope_theta": 10000.0,
  "tie_word_embeddings": True,
}


def read(path: pathlib.Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
  """A second reading of the format: (metadata, tensors)."""
  data = path.read_bytes()
  place = 0

  def take(layout: str) -> Any:
    nonlocal place
    values = struct.unpack_from("<" + layout, data, place)
    place += struct.calcsize("<" + layout)
    return values if len(values) > 1 else values[0]

  def text() -> str:
    return bytes(take(f"{take('Q')}s")).decode()

  assert data[:4] == b"GGUF"
  place = 4
  version, num_tensors, num_entries = take("IQQ")
  assert version == 3
  entries = {}
  for _ in range(num_entries):
    key = text()
    kind = take("I")
    if kind == 9:
      kind, count = take("IQ")
      entries[key] = [text() if kind == 8 else take({5: "i"}[kind]) for _ in range(count)]
    else:
      entries[key] = text() if kind == 8 else take({4: "I", 6: "f"}[kind])
  records = []
  for _ in range(num_tensors):
    name = text()
    shape = [take("Q") for _ in range(take("I"))]
    records.append((name, shape[::-1], *take("IQ")))
  start = -(-place // 32) * 32
  tensors = {}
  for name, shape, kind, offset in records:
    assert offset % 32 == 0
    dtype = {0: FLOAT32, 30: BFLOAT16}[kind]
    tensors[name] = np.frombuffer(data, dtype, int(np.prod(shape)), start + offset).reshape(shape)
  return entries, tensors


def write_model(directory: pathlib.Path, config: dict[str, Any]) -> dict[str, np.ndarray]:
  """Writes a directory of a few tensors in bfloat16, and returns them."""
  random = np.random.default_rng(0)
  shapes = {
    "model.embed_tokens.weight": (6, 4),
    "model.layers.0.self_attn.q_norm.weight": (3,),
    "model.layers.0.mlp.down_proj.weight": (4, 8),
    "model.norm.weight": (4,),
    "lm_head.weight": (6, 4),
  }
  tensors = {name: random.normal(size=shape).astype(BFLOAT16) for name, shape in shapes.items()}
  directory.mkdir(exist_ok=True)
  (directory / "config.json").write_text(json.dumps(config))
  safetensors.numpy.save_file(tensors, directory / "model.safetensors")
  return tensors


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_what_is_written_is_read_back(tmp_path: pathlib.Path, dtype: np.dtype):
  tensors = write_model(tmp_path / "model", CONFIG)
  gguf.write(tmp_path / "model", tmp_path / "model.gguf", dtype)
  entries, found = read(tmp_path / "model.gguf")
  assert entries["general.architecture"] == "qwen3"
  assert entries["tokenizer.ggml.model"] == "no_vocab"
  assert entries["qwen3.attention.key_length"] == 3
  assert entries["qwen3.rope.freq_base"] == 10000.0
  assert set(found) == {  # The head is tied.
    "token_embd.weight",
    "blk.0.attn_q_norm.weight",
    "blk.0.ffn_down.weight",
    "output_norm.weight",
  }
  assert found["blk.0.ffn_down.weight"].dtype == dtype
  assert found["blk.0.attn_q_norm.weight"].dtype == FLOAT32
  for theirs, ours in (
    ("model.embed_tokens.weight", "token_embd.weight"),
    ("model.layers.0.mlp.down_proj.weight", "blk.0.ffn_down.weight"),
    ("model.norm.weight", "output_norm.weight"),
  ):
    np.testing.assert_array_equal(found[ours].astype(FLOAT32), tensors[theirs].astype(FLOAT32))


def test_a_head_of_its_own_is_written(tmp_path: pathlib.Path):
  write_model(tmp_path / "model", CONFIG | {"tie_word_embeddings": False})
  gguf.write(tmp_path / "model", tmp_path / "model.gguf", FLOAT32)
  assert "output.weight" in read(tmp_path / "model.gguf")[1]


def test_a_tokenizer_is_written_for_who_needs_one(tmp_path: pathlib.Path):
  gguf.write(loading.NANO, tmp_path / "nano.gguf", FLOAT32, has_tokenizer=True)
  entries = read(tmp_path / "nano.gguf")[0]
  backend = tokenizer_lib.load(loading.NANO).backend
  tokens = entries["tokenizer.ggml.tokens"]
  assert tokens == [backend.id_to_token(place) for place in range(512)]
  kinds = entries["tokenizer.ggml.token_type"]
  assert [tokens[place] for place, kind in enumerate(kinds) if kind == gguf.CONTROL] == [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>"
  ]  # fmt: skip
  assert entries["tokenizer.ggml.eos_token_id"] == 2
  assert entries["tokenizer.ggml.merges"][:2] == ["a n", "# #"]
  (tmp_path / "tokenizer.json").write_text('{"model": {"type": "Unigram"}}')
  with pytest.raises(ValueError, match="got a tokenizer of kind 'Unigram' with the decoder None"):
    gguf.tokenizer_metadata(tmp_path, 6)


def test_what_is_not_plain_qwen3_is_refused(tmp_path: pathlib.Path):
  with pytest.raises(ValueError, match="got the tensor 'model.layers.0.self_attn.q_proj.bias'"):
    gguf.tensor_name("model.layers.0.self_attn.q_proj.bias")
  with pytest.raises(ValueError, match="got model_type 'llama', expected 'qwen3'"):
    gguf.metadata(CONFIG | {"model_type": "llama"}, FLOAT32)
  with pytest.raises(ValueError, match="got rope_scaling 'yarn', expected none"):
    gguf.metadata(CONFIG | {"rope_parameters": {"rope_type": "yarn"}}, FLOAT32)
  with pytest.raises(ValueError, match="got the dtype float16, expected float32 or bfloat16"):
    gguf.write(tmp_path, tmp_path / "model.gguf", np.dtype(np.float16))
