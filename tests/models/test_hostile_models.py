"""False model directories are refused by field or tensor name before memory is allocated."""

from __future__ import annotations

import json
import pathlib
import shutil
import struct
import time
from typing import Any

import numpy as np
import pytest
import tiny_model

from seerjax.models import huggingface, huggingface_layout
from seerjax.models.loading import NANO

NUMERICS = tiny_model.ONE_SLAB
# Far more than a refusal takes; planning such models before refusing took minutes or gigabytes.
MOST_SECONDS = 20


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> pathlib.Path:
  directory = tmp_path_factory.mktemp("models") / "model"
  master = tiny_model.random_master(tiny_model.SMALLEST, NUMERICS)
  huggingface.save(directory, master, tiny_model.SMALLEST)
  return directory


def changed(exported: pathlib.Path, to: pathlib.Path, **changes: Any) -> pathlib.Path:
  """Returns a copy with other fields in config.json; ... leaves one out."""
  shutil.copytree(exported, to)
  config = json.loads((exported / "config.json").read_text()) | changes
  kept = {name: value for name, value in config.items() if value is not ...}
  (to / "config.json").write_text(json.dumps(kept))
  return to


ROPE = {"rope_type": "default", "rope_theta": 10000.0}
WHOLE, NUMBER = "expected a whole number of at least 1", "expected a positive number"
LIES = [
  ("num_hidden_layers", 10**9, "expected at most 2048"),
  ("num_hidden_layers", 10**6, "expected at most 2048"),
  ("num_hidden_layers", 2048, "the number of tensors"),
  ("num_hidden_layers", 10**100, "expected at most 1073741824"),
  ("num_hidden_layers", 3, "got no tensor model.layers.2"),
  ("num_hidden_layers", 0, WHOLE),
  ("num_hidden_layers", -1, WHOLE),
  ("num_hidden_layers", "2", WHOLE),
  ("num_hidden_layers", True, WHOLE),
  ("num_hidden_layers", 2.0, WHOLE),
  ("num_hidden_layers", ..., WHOLE),
  ("hidden_size", 2**31, "expected at most 1073741824"),
  ("hidden_size", 2**30, "embed_tokens.weight: got shape (32, 16), expected (32, 1073741824)"),
  ("hidden_size", 8, "embed_tokens.weight: got shape (32, 16), expected (32, 8)"),
  ("hidden_size", [16], WHOLE),
  ("hidden_size", float("nan"), WHOLE),
  ("hidden_size", float("inf"), WHOLE),
  ("intermediate_size", 2**29, "mlp.gate_proj.weight: got shape (16, 16), expected (536870912, 16"),
  ("intermediate_size", -16, WHOLE),
  ("vocab_size", 2**30, "got shape (32, 16), expected (1073741824, 16)"),
  ("vocab_size", 33, "got shape (32, 16), expected (33, 16)"),
  ("vocab_size", None, WHOLE),
  ("head_dim", 0, WHOLE),
  ("head_dim", 3, "RotaryConfig.head_dim: got 3, expected an even number"),
  ("head_dim", 2**29, "q_proj.weight: got shape"),
  ("num_attention_heads", 0, WHOLE),
  ("num_attention_heads", 2**29, "q_proj.weight: got shape"),
  ("num_key_value_heads", 3, "Grouped.num_heads: got 2 query heads for 3"),
  ("num_key_value_heads", "1", WHOLE),
  ("max_position_embeddings", 0, WHOLE),
  ("max_position_embeddings", 2**40, "expected at most 1073741824"),
  ("rms_norm_eps", float("nan"), NUMBER),
  ("rms_norm_eps", "1e-6", NUMBER),
  ("rms_norm_eps", 0, NUMBER),
  ("rms_norm_eps", True, NUMBER),
  ("rope_parameters", ROPE | {"rope_theta": float("nan")}, NUMBER),
  ("rope_parameters", ROPE | {"rope_theta": "10000"}, NUMBER),
  ("rope_parameters", ROPE | {"rope_theta": -1}, NUMBER),
  ("rope_parameters", ROPE | {"rope_type": "linear", "factor": float("nan")}, NUMBER),
  ("rope_parameters", ROPE | {"rope_type": "linear", "factor": float("inf")}, NUMBER),
  ("rope_parameters", [1], "expected an object"),
  ("rope_parameters", {"rope_type": ["default"]}, "expected one of"),
  ("tie_word_embeddings", "false", "expected true or false"),
  ("tie_word_embeddings", 1, "expected true or false"),
  ("tie_word_embeddings", False, "got no tensor lm_head.weight"),
  ("architectures", ["X"], "expected one of"),
  ("architectures", [["LlamaForCausalLM"]], "expected one of"),
  ("model_type", {"a": 1}, "expected one of"),
  ("hidden_act", 3, "expected 'silu'"),
]


@pytest.mark.parametrize("field, value, expected", LIES)
def test_a_config_that_lies_is_refused_by_its_field(field, value, expected, exported, tmp_path):
  directory = changed(exported, tmp_path / "model", **{field: value})
  begin = time.monotonic()
  with pytest.raises(ValueError) as refused:
    huggingface.load(directory, NUMERICS)
  text = str(refused.value)
  assert expected in text and len(text) < 700
  places = (field, "TransformerConfig", "Grouped", "model.", "lm_head")
  assert any(place in text for place in places)
  assert time.monotonic() - begin < MOST_SECONDS


def holes(directory: pathlib.Path, shapes: dict[str, tuple[int, ...]]) -> None:
  """Writes safetensors with a true header and a hole in the file as data: zeros."""
  header, place = {}, 0
  for name, shape in shapes.items():
    end = place + 4 * int(np.prod(shape, dtype=np.int64))
    header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [place, end]}
    place = end
  text = json.dumps(header).encode()
  with (directory / "model.safetensors").open("wb") as file:
    file.write(struct.pack("<Q", len(text)) + text)
    file.truncate(8 + len(text) + place)


def test_weights_beyond_the_free_memory_are_refused_with_both_sizes(exported, tmp_path):
  directory = changed(exported, tmp_path / "model", vocab_size=2**30)
  _, config = huggingface.load(exported, NUMERICS)
  leaves = [leaf for _, leaf in huggingface_layout.plan(config)]
  shapes = {name: shape for leaf in leaves for name, shape in leaf.tensors}
  shapes["model.embed_tokens.weight"] = (2**30, 16)
  holes(directory, shapes)
  with pytest.raises(ValueError, match=r"take 131,\d+ MiB as float32, expected at most the [\d,]+"):
    huggingface.load(directory, NUMERICS)


def with_header(text: bytes, length: int = -1) -> bytes:
  """A header of this text, with its length or another one."""
  return struct.pack("<Q", len(text) if length < 0 else length) + text


def of_tensor(dtype: str, shape: list[int], *offsets: int) -> bytes:
  """Weights of one tensor, with a header that may be false."""
  entry = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
  return with_header(json.dumps({"model.embed_tokens.weight": entry}).encode()) + bytes(2048)


INCOMPLETE = "incomplete safetensors file"


@pytest.mark.parametrize(
  "content, expected",
  [
    (b"", INCOMPLETE),
    (with_header(b"", 2**63), INCOMPLETE),
    (with_header(b"{}", 10), INCOMPLETE),
    (with_header(b"{}"), "num_hidden_layers"),
    (with_header(b"[[]]"), INCOMPLETE),
    (of_tensor("F32", [32, 16], 0, 2**40), INCOMPLETE),
    (of_tensor("F32", [2**40, 16], 0, 2048), INCOMPLETE),
    (of_tensor("F32", [-32, 16], 0, 2048), INCOMPLETE),
    (of_tensor("F32", [2**62, 2**62], 0, 2048), INCOMPLETE),
    (of_tensor("F99", [32, 16], 0, 2048), INCOMPLETE),
    (of_tensor("F32", [32, 16], 2048, 0), INCOMPLETE),
  ],
)
def test_weights_that_lie_are_refused(content, expected, exported, tmp_path):
  directory = changed(exported, tmp_path / "model")
  (directory / "model.safetensors").write_bytes(content)
  with pytest.raises(ValueError, match=expected):
    huggingface.load(directory, NUMERICS)


def test_what_is_true_is_loaded(exported):
  _, config = huggingface.load(exported, NUMERICS)
  assert config == tiny_model.SMALLEST
  assert huggingface.load_config(NANO).num_layers > 0
