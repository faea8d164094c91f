"""Writes a model as a GGUF file for llama.cpp.

params -- Hugging Face's tensors -- names and rows of GGUF -- rounded to a kind --> model.gguf
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import contextlib
import math
import os
import pathlib
from typing import Any, NamedTuple

import numpy as np

from seerjax import numerics as numerics_lib
from seerjax.models import (
  config as model_config,
  gguf_config,
  gguf_file,
  gguf_tensors,
  gguf_tokenizer,
  huggingface,
  huggingface_layout,
  parameters,
  tokenizer as tokenizer_lib,
)

# Kinds to which the `gguf` package rounds, with the value of general.file_type.
KINDS = {"F32": 0, "F16": 1, "BF16": 32, "Q8_0": 7, "Q4_0": 2, "Q4_1": 3}
WITHOUT_BLOCKS = "F16"  # For rows that do not divide into blocks of the requested kind.
NUMBERS_AT_ONCE = 2**20  # Numbers rounded at once.
QUANTIZATION_VERSION = 2
MAX_HALF = float(np.finfo(np.float16).max)


class Written(NamedTuple):
  """A tensor of a file.

  Attributes:
    name: name in GGUF.
    shape: rows first.
    kind: kind to which its numbers were rounded.
    size: bytes.
  """

  name: str
  shape: tuple[int, ...]
  kind: str
  size: int


def save(
  path: str | os.PathLike[str],
  params: parameters.Params,
  config: model_config.TransformerConfig,
  *,
  kind: str = "F32",
  tokenizer: tokenizer_lib.Tokenizer | None = None,
  pre: str = "",
  overwrite: bool = False,
) -> list[Written]:
  """Writes a GGUF file, atomically, that llama.cpp and `huggingface.load` read.

  Args:
    path: path of the file, which is created.
    params: weights in our layout, of any `reduction_shards`.
    config: shape of the model.
    kind: kind of the matrices, one of `KINDS`. Vectors are F32, as llama.cpp requires, and matrices
      with rows that do not divide into blocks are F16.
    tokenizer: is written too, with its chat template and the tokens that end a generation; without
      one, the file works with token ids only.
    pre: the pre-tokenizer, of `gguf_tokenizer.PRE_TOKENIZERS`, for llama.cpp to use if none of its
      own splits texts like this tokenizer.
    overwrite: replace an existing file.

  Returns:
    The written tensors, in the file's order.

  Raises:
    FileExistsError: if the file exists and may not be replaced.
    ImportError: if the `gguf` package is not installed.
    NotImplementedError: for a shape, a rotary scaling or a tokenizer that GGUF cannot describe.
    OSError: if the disk has too little free space, with both numbers.
    ValueError: if `params` is not in the layout of `config` or not finite, or for an unknown kind.
  """
  gguf = gguf_file.package()
  path = pathlib.Path(os.path.abspath(path))
  if kind not in KINDS:
    raise ValueError(f"GGUF: kind: got {kind!r}, expected one of {tuple(KINDS)}; 'Q8_0' is usual.")
  if not gguf_file.is_named(path):
    raise ValueError(
      f"{path}: got another suffix, expected a name that ends in {gguf_file.SUFFIX}."
    )
  if path.exists() and not (overwrite and path.is_file()):
    raise FileExistsError(
      f"{path}: got an existing file, expected none; choose another path, or pass overwrite=True."
    )
  huggingface_layout.check_layout(params, config)
  values = gguf_config.metadata(config) | {
    "general.file_type": KINDS[kind],
    "general.quantization_version": QUANTIZATION_VERSION,
    gguf_tokenizer.MODEL: "no_vocab",
  }
  if tokenizer is not None:
    values |= gguf_tokenizer.metadata(
      tokenizer.backend,
      vocab_size=config.vocab_size,
      chat_template=tokenizer.chat_template,
      special_tokens=tokenizer.special_tokens,
      eos_ids=tokenizer.eos_ids,
      generation=tokenizer.generation,
      pre=pre,
    )
  numerics_lib.require_finite(
    params, what="GGUF: params", remedy="export an earlier step, with finite weights"
  )
  plan = huggingface_layout.plan(config)
  form, (plain, _) = gguf_config.form_of(config), gguf_config.divided(config)
  factors = gguf_config.rope_factors(plain.attention.rotary)
  written = [
    _written(gguf_tensors.gguf_name(name, form), shape, kind, gguf)
    for _, leaf in plan
    for name, shape in leaf.tensors
  ]
  if factors is not None:
    written.append(_written(gguf_config.ROPE_FACTORS, factors.shape, kind, gguf))
  path.parent.mkdir(parents=True, exist_ok=True)
  huggingface.require_space(path.parent, sum(tensor.size for tensor in written) + 2**25)
  partial = path.with_name(f".{path.name}.partial.{os.getpid()}")
  try:
    with contextlib.closing(gguf.GGUFWriter(partial, values["general.architecture"])) as writer:
      _add_values(writer, values)
      for tensor in written:
        number = gguf.GGMLQuantizationType[tensor.kind]
        writer.add_tensor_info(tensor.name, tensor.shape, np.float32, tensor.size, number)
      writer.write_header_to_file()
      writer.write_kv_data_to_file()
      writer.write_ti_data_to_file()
      for tensor, data in zip(written, _data(params, plan, config, factors), strict=True):
        writer.write_tensor_data(_rounded(tensor, data, gguf))
    huggingface.flush(partial)
    partial.replace(path)
  finally:
    partial.unlink(missing_ok=True)
  return written


def summary(written: Sequence[Written]) -> str:
  """Returns a summary of the written tensors, a line per kind."""
  lines = []
  for kind in dict.fromkeys(tensor.kind for tensor in written):
    of_kind = [tensor for tensor in written if tensor.kind == kind]
    count = sum(math.prod(tensor.shape) for tensor in of_kind)
    size = sum(tensor.size for tensor in of_kind)
    lines.append(f"{kind}: {len(of_kind)} tensors, {count:,} numbers, {size:,} bytes")
  return "\n".join(lines)


def _written(name: str, shape: tuple[int, ...], kind: str, gguf: Any) -> Written:
  if len(shape) == 1:
    kind = "F32"
  length, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
  if shape[-1] % length:
    kind = WITHOUT_BLOCKS
    length, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
  return Written(name, shape, kind, math.prod(shape) // length * size)


def _add_values(writer: Any, values: dict[str, Any]) -> None:
  for key, value in values.items():
    if key == "general.architecture":  # The writer adds it.
      continue
    if isinstance(value, bool):
      writer.add_bool(key, value)
    elif isinstance(value, int):
      writer.add_uint32(key, value)
    elif isinstance(value, float):
      writer.add_float32(key, value)
    elif isinstance(value, str):
      writer.add_string(key, value)
    else:
      writer.add_array(key, value)


def _data(
  params: parameters.Params,
  plan: list[tuple[tuple[Any, ...], huggingface_layout.Leaf]],
  config: model_config.TransformerConfig,
  factors: np.ndarray | None,
) -> Iterator[np.ndarray]:
  """Yields every tensor of the file as f32, in order."""
  form = gguf_config.form_of(config)
  for name, tensor in huggingface_layout.tensors(params, plan, np.dtype(np.float32)):
    heads = gguf_tensors.turned_heads(name, config)
    offset = gguf_tensors.norm_offset(gguf_tensors.gguf_name(name, form), form)
    if heads:
      yield gguf_tensors.interleave(tensor, heads)
    else:
      yield tensor + offset if offset else tensor
  if factors is not None:
    yield factors.astype(np.float32)


def _rounded(tensor: Written, data: np.ndarray, gguf: Any) -> np.ndarray:
  """Returns a tensor's bytes, rounded a few rows at a time.

  Raises:
    ValueError: naming the tensor, if its numbers are too large for the kind.
  """
  kind = gguf.GGMLQuantizationType[tensor.kind]
  if tensor.kind == "F32":
    return np.ascontiguousarray(data)
  step = max(1, NUMBERS_AT_ONCE // data.shape[1])
  # The scales of blocks are float16 too; larger numbers would make them infinite.
  most = float(np.abs(data).max()) if tensor.kind != "BF16" else 0.0
  if most > MAX_HALF:
    raise ValueError(
      f"GGUF: {tensor.name}: got numbers up to {most}, expected at most"
      f" {MAX_HALF} in {tensor.kind}; write F32 or BF16."
    )
  blocks = [
    gguf.quantize(np.ascontiguousarray(data[first : first + step]), kind)
    for first in range(0, len(data), step)
  ]
  return np.ascontiguousarray(np.concatenate(blocks))
