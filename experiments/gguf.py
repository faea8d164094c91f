"""Qwen3 directories of Hugging Face as GGUF files, which llama.cpp reads.

Claim: none; `llama_cpp` and the experiments that measure it beside us write their weights so.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Version 3, little-endian:
counts, metadata, one record a tensor, then the tensors' data, each at a multiple of 32 bytes.
Where token ids alone go in and out the file holds no tokenizer ("no_vocab"); a server needs one.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import struct
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
import safetensors

ALIGNMENT = 32
# Of the format: kinds of metadata values, and of tensors by their NumPy dtype.
UINT32, INT32, FLOAT32, STRING, ARRAY = 4, 5, 6, 8, 9
TENSOR_KINDS = {np.dtype(np.float32): 0, np.dtype(ml_dtypes.bfloat16): 30}
# `general.file_type`, which says what most of the tensors are.
FILE_TYPES = {np.dtype(np.float32): 0, np.dtype(ml_dtypes.bfloat16): 32}
# Kinds of tokens.
NORMAL, CONTROL = 1, 3
Value = str | int | float | list[str] | list[int]
# A layer's tensors: theirs, and ours without "blk.N." and ".weight".
LAYER_NAMES = {
  "input_layernorm": "attn_norm",
  "self_attn.q_proj": "attn_q",
  "self_attn.k_proj": "attn_k",
  "self_attn.v_proj": "attn_v",
  "self_attn.o_proj": "attn_output",
  "self_attn.q_norm": "attn_q_norm",
  "self_attn.k_norm": "attn_k_norm",
  "post_attention_layernorm": "ffn_norm",
  "mlp.gate_proj": "ffn_gate",
  "mlp.up_proj": "ffn_up",
  "mlp.down_proj": "ffn_down",
}


def tensor_name(name: str) -> str:
  """Returns GGUF's name of one of Hugging Face's Qwen3 tensors.

  Raises:
    ValueError: for a tensor that Qwen3 does not have.
  """
  whole = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
  }
  if name in whole:
    return whole[name]
  parts = name.split(".", 3)
  middle = parts[3].removesuffix(".weight") if len(parts) == 4 else ""
  if parts[:2] != ["model", "layers"] or middle not in LAYER_NAMES or not name.endswith(".weight"):
    raise ValueError(
      f"gguf: got the tensor {name!r}, expected those of Qwen3 alone (no biases); give a directory"
      " whose config.json says model_type qwen3."
    )
  return f"blk.{parts[2]}.{LAYER_NAMES[middle]}.weight"


def metadata(config: dict[str, Any], dtype: np.dtype) -> dict[str, Value]:
  """Returns GGUF's metadata for the contents of a Qwen3 config.json.

  Raises:
    ValueError: for another architecture, or rotations that are scaled.
  """
  if config["model_type"] != "qwen3":
    raise ValueError(
      f"gguf: got model_type {config['model_type']!r}, expected 'qwen3'; other architectures name"
      " their tensors otherwise."
    )
  rope = config.get("rope_parameters") or {}
  scaling = rope.get("rope_type", "default")
  if config.get("rope_scaling") or scaling != "default":
    raise ValueError(
      f"gguf: got rope_scaling {config.get('rope_scaling') or scaling!r}, expected none; give a"
      " model whose rotations are plain."
    )
  head_dim = config["head_dim"]
  return {
    "general.architecture": "qwen3",
    "general.file_type": FILE_TYPES[dtype],
    "qwen3.vocab_size": config["vocab_size"],
    "qwen3.block_count": config["num_hidden_layers"],
    "qwen3.context_length": config["max_position_embeddings"],
    "qwen3.embedding_length": config["hidden_size"],
    "qwen3.feed_forward_length": config["intermediate_size"],
    "qwen3.attention.head_count": config["num_attention_heads"],
    "qwen3.attention.head_count_kv": config["num_key_value_heads"],
    "qwen3.attention.key_length": head_dim,
    "qwen3.attention.value_length": head_dim,
    "qwen3.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
    "qwen3.rope.freq_base": float(rope.get("rope_theta") or config["rope_theta"]),
    "tokenizer.ggml.model": "no_vocab",
  }


def tokenizer_metadata(directory: pathlib.Path, vocab_size: int) -> dict[str, Value]:
  """Returns GGUF's metadata for a tokenizer of byte pairs whose letters are bytes, as GPT-2's.

  Texts are cut before they are encoded as Qwen2's are; ids become text exactly in any case.

  Raises:
    ValueError: for a tokenizer of another kind.
  """
  written = json.loads((directory / "tokenizer.json").read_text())
  kind, decoder = written["model"]["type"], (written.get("decoder") or {}).get("type")
  if (kind, decoder) != ("BPE", "ByteLevel"):
    raise ValueError(
      f"gguf: got a tokenizer of kind {kind!r} with the decoder {decoder!r}, expected 'BPE' and"
      " 'ByteLevel'; give a directory with a tokenizer of byte pairs."
    )
  ids = {token_id: token for token, token_id in written["model"]["vocab"].items()}
  special = {token["id"]: token["content"] for token in written["added_tokens"]}
  ids |= special
  merges = written["model"]["merges"]
  configured = json.loads((directory / "generation_config.json").read_text())["eos_token_id"]
  end = configured[0] if isinstance(configured, list) else configured
  return {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "qwen2",
    "tokenizer.ggml.tokens": [ids.get(place, f"<unused {place}>") for place in range(vocab_size)],
    "tokenizer.ggml.token_type": [
      CONTROL if place in special else NORMAL for place in range(vocab_size)
    ],
    "tokenizer.ggml.merges": [one if isinstance(one, str) else " ".join(one) for one in merges],
    "tokenizer.ggml.eos_token_id": end,
  }


def _string(text: str) -> bytes:
  data = text.encode()
  return struct.pack("<Q", len(data)) + data


def _entry(key: str, value: Value) -> bytes:
  if isinstance(value, list):
    head = _string(key) + struct.pack("<I", ARRAY)
    if isinstance(value[0], str):
      return head + struct.pack("<IQ", STRING, len(value)) + b"".join(map(_string, map(str, value)))
    return head + struct.pack(f"<IQ{len(value)}i", INT32, len(value), *value)
  if isinstance(value, str):
    return _string(key) + struct.pack("<I", STRING) + _string(value)
  if isinstance(value, int):
    return _string(key) + struct.pack("<II", UINT32, value)
  return _string(key) + struct.pack("<If", FLOAT32, value)


def _padding(size: int) -> int:
  return -size % ALIGNMENT


def write(
  directory: pathlib.Path, path: pathlib.Path, dtype: np.dtype, *, has_tokenizer: bool = False
) -> None:
  """Writes a Qwen3 directory as one GGUF file, a tensor at a time.

  Args:
    directory: holds config.json and safetensors; a head that is tied is not written again.
    path: of the file.
    dtype: float32 or bfloat16, of the matrices; vectors are float32, as llama.cpp wants them.
    has_tokenizer: whether the directory's tokenizer is written too.

  Raises:
    ValueError: for what Qwen3 does not have, a dtype that is neither, or another tokenizer.
  """
  if dtype not in TENSOR_KINDS:
    raise ValueError(f"gguf: got the dtype {dtype}, expected float32 or bfloat16; choose one.")
  config = json.loads((directory / "config.json").read_text())
  entries = metadata(config, dtype)
  if has_tokenizer:
    entries |= tokenizer_metadata(directory, config["vocab_size"])
  with contextlib.ExitStack() as stack:
    tensors = {}
    for file in sorted(directory.glob("*.safetensors")):
      weights = stack.enter_context(safetensors.safe_open(file, framework="numpy"))
      tensors |= dict.fromkeys(weights.keys(), weights)
    if config["tie_word_embeddings"]:
      tensors.pop("lm_head.weight", None)
    kinds = {
      name: np.dtype(np.float32) if len(weights.get_slice(name).get_shape()) == 1 else dtype
      for name, weights in tensors.items()
    }
    out = stack.enter_context(path.open("wb"))
    _write_head(out, entries, tensors, kinds)
    for name, weights in tensors.items():
      data = np.ascontiguousarray(weights.get_tensor(name).astype(kinds[name])).tobytes()
      out.write(data + bytes(_padding(len(data))))


def _write_head(
  out: BinaryIO,
  entries: dict[str, Value],
  tensors: dict[str, Any],
  kinds: dict[str, np.dtype],
) -> None:
  """Writes counts, metadata and where each tensor lies in the data that follows."""
  head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(entries))
  head += b"".join(_entry(key, value) for key, value in entries.items())
  offset = 0
  for name, weights in tensors.items():
    shape = weights.get_slice(name).get_shape()
    head += _string(tensor_name(name)) + struct.pack("<I", len(shape))
    head += struct.pack(f"<{len(shape)}Q", *reversed(shape))  # The fastest axis first.
    head += struct.pack("<IQ", TENSOR_KINDS[kinds[name]], offset)
    size = int(np.prod(shape)) * kinds[name].itemsize
    offset += size + _padding(size)
  out.write(head + bytes(_padding(len(head))))
