"""Maps tensors between a GGUF file and Hugging Face: names, and order of rows.

    model.layers.3.self_attn.q_proj.weight  <->  blk.3.attn_q.weight

llama.cpp rotates neighbouring features of a Llama's queries and keys, (0, 1), (2, 3), ..., while we
rotate feature j with j + c / 2, so the rows of these two matrices have another order. Where a model
multiplies by 1 + w after a norm (Gemma), the file has 1 + w.
"""

from __future__ import annotations

from collections.abc import Mapping
import pathlib
import re

from absl import logging
import numpy as np

from seerjax.models import (
  config as model_config,
  families,
  gguf_config,
  gguf_file,
  huggingface_layout,
)

WHOLE = {
  "model.embed_tokens": "token_embd",
  "model.norm": "output_norm",
  "lm_head": "output",
}
LAYER = {
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
# Keys of the architecture that determine the shape of a tensor.
WIDTH, INNER = "embedding_length", "feed_forward_length"
QUERIES, KEYS = "attention.head_count", "attention.head_count_kv"
HEAD_WIDTH = "attention.key_length"
NORM = "_norm.weight"
SHAPED_BY = {
  "token_embd": ("vocab_size", WIDTH),
  "output": ("vocab_size", WIDTH),
  "attn_q": (QUERIES, HEAD_WIDTH, WIDTH),
  "attn_k": (KEYS, HEAD_WIDTH, WIDTH),
  "attn_v": (KEYS, HEAD_WIDTH, WIDTH),
  "attn_output": (WIDTH, QUERIES, HEAD_WIDTH),
  "attn_q_norm": (HEAD_WIDTH,),
  "attn_k_norm": (HEAD_WIDTH,),
  "ffn_gate": (INNER, WIDTH),
  "ffn_up": (INNER, WIDTH),
  "ffn_down": (WIDTH, INNER),
}
_HUGGING_FACE = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_GGUF = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def gguf_name(name: str, form: families.Gguf | None = None) -> str:
  """Returns the GGUF name of a Hugging Face tensor; an unknown name is returned unchanged.

  Args:
    name: the tensor's name.
    form: form of the model's family; None for the names that most families have.
  """
  if found := _HUGGING_FACE.fullmatch(name):
    number, middle, kind = found.groups()
    theirs = _layer(form).get(middle)
    return f"blk.{number}.{theirs}.{kind}" if theirs else name
  start, _, kind = name.rpartition(".")
  return f"{WHOLE[start]}.{kind}" if start in WHOLE else name


def hugging_face_name(name: str, form: families.Gguf | None = None) -> str:
  """Inverts `gguf_name`; an unknown name is returned unchanged."""
  if found := _GGUF.fullmatch(name):
    number, middle, kind = found.groups()
    ours = _reverse(_layer(form)).get(middle)
    return f"model.layers.{number}.{ours}.{kind}" if ours else name
  start, _, kind = name.rpartition(".")
  ours = _reverse(WHOLE).get(start)
  return f"{ours}.{kind}" if ours else name


def _layer(form: families.Gguf | None) -> Mapping[str, str]:
  return LAYER if form is None else {**LAYER, **form.names}


def _reverse(names: Mapping[str, str]) -> dict[str, str]:
  return {theirs: ours for ours, theirs in names.items()}


def norm_offset(name: str, form: families.Gguf) -> np.float32:
  """Returns the number by which a file's tensor (GGUF name) exceeds ours."""
  return np.float32(form.norm_offset if name.endswith(NORM) else 0.0)


def turned_heads(name: str, config: model_config.TransformerConfig) -> int:
  """Returns the number of heads of a tensor with reordered rows (Hugging Face name), else 0."""
  form = families.of(config).gguf
  if form is None or not form.turns_heads:
    return 0
  kind = config.only_kind("GGUF").attention
  if name.endswith("self_attn.q_proj.weight"):
    return kind.num_heads
  return kind.num_kv_heads if name.endswith("self_attn.k_proj.weight") else 0


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
  """Returns rows f32[h c, d] with each head's halves interleaved: 0, c / 2, 1, c / 2 + 1, ..."""
  return rows.reshape(heads, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def put_back(rows: np.ndarray, heads: int) -> np.ndarray:
  """Inverts `interleave`, for f32[h c, d]."""
  return rows.reshape(heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


class Checkpoint:
  """The tensors of a GGUF file by their Hugging Face names, for `huggingface.load`.

  Attributes:
    path: path of the file.
    config: shape of the model.
    names: names of the tensors, without those that follow from the configuration.
    described_by: source of the expected tensors and shapes, for messages.
    layers_field: the key with the number of layers, for messages.
  """

  described_by = "its metadata"

  def __init__(self, path: pathlib.Path):
    """Reads the file's head.

    Raises:
      FileNotFoundError: if the file, or another one of a split model, is missing.
      ImportError: if the `gguf` package is not installed.
      NotImplementedError: for a file with an unsupported architecture or kind.
      ValueError: naming the file and the fault in it.
    """
    self._file = gguf_file.File(path)
    self.path = path
    self.config = gguf_config.read(self._file)
    self._form = gguf_config.form_of(self.config)
    tensors = self._file.tensors
    self.names = {hugging_face_name(name, self._form) for name in tensors}
    self.names -= {gguf_config.ROPE_FACTORS}
    self.layers_field = f"{path}: {self._key('block_count')}"
    head, table = (tensors.get(name) for name in (gguf_config.HEAD, gguf_config.EMBEDDING))
    if head is not None and table is not None and head.kind != table.kind:
      logging.warning(
        "%s: %s is %s and %s is %s: they are loaded as two matrices, with %s more numbers than a"
        " model with tied embeddings.",
        path, gguf_config.EMBEDDING, table.kind, gguf_config.HEAD, head.kind,
        f"{head.shape[0] * head.shape[-1]:,}",
      )  # fmt: skip

  def plan(self) -> huggingface_layout.Plan:
    """Returns the tensors of every parameter, by their Hugging Face names."""
    return huggingface_layout.plan(self.config)

  def shown(self, name: str) -> str:
    """Returns the name of a tensor in the file."""
    return gguf_name(name, self._form)

  def check_shape(self, name: str, shape: tuple[int, ...]) -> None:
    """Refuses a tensor with another shape in its record; no data is read.

    Raises:
      ValueError: naming the tensor and the keys that determine its shape.
    """
    theirs = self.shown(name)
    found = self._file.tensors[theirs].shape
    if found != shape:
      part = theirs.rsplit(".", 2)[-2]
      keys = SHAPED_BY.get(part, (WIDTH,))
      if theirs.endswith(".bias"):
        keys = keys[:2]
      named = ", ".join(map(self._key, keys))
      raise ValueError(
        f"{self._file.file_of(theirs)}: {theirs}: got shape {found}, expected {shape} by {named};"
        " the metadata and the tensors do not belong together, download it again."
      )

  def read(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns one tensor as f32, dequantised, with our norms and its rows in our order.

    Raises:
      ValueError: naming the tensor, for another shape, or for NaN and infinities.
    """
    self.check_shape(name, shape)
    theirs = self.shown(name)
    tensor = self._file.read(theirs)
    if not np.isfinite(tensor).all():
      count = int(tensor.size - np.isfinite(tensor).sum())
      raise ValueError(
        f"{self._file.file_of(theirs)}: {theirs}: got {count} entries that are NaN or infinite,"
        " expected finite weights; the file is corrupt, download it again."
      )
    heads = turned_heads(name, self.config)
    if heads:
      return put_back(tensor, heads)
    offset = norm_offset(theirs, self._form)
    return tensor - offset if offset else tensor

  def _key(self, key: str) -> str:
    return f"{self._form.architecture}.{key}"
