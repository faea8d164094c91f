"""Reads and writes Hugging Face model directories: config.json (`huggingface_config`), safetensors.

Directories are untrusted: their files are checked before use, and errors name the file, field or
tensor that is wrong. Nothing is ever unpickled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
import contextlib
import itertools
import json
import math
import os
import pathlib
import re
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

from seerjax import host_memory, numerics as numerics_lib
from seerjax.models import (
  config as model_config,
  config_fields,
  families,
  gguf_config,
  gguf_file,
  gguf_tensors,
  huggingface_config,
  huggingface_layout,
  parameters,
  tokenizer as tokenizer_lib,
)

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
GENERATION_FILE = "generation_config.json"
READABLE_DTYPES = ("F32", "BF16", "F16")  # Each converts to float32 without loss.
INT8 = "int8"  # A dtype for draft models only.
SCALE = "_scale"  # Suffix of the name of an INT8 tensor's row scales.
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
HUB_PATTERNS = ("*.safetensors", "*.json", "*.jinja")
MAX_SHARD_BYTES = 4 * 2**30  # Bounds the memory of `save` too: one shard is held at a time.
# Old Llama checkpoints have this buffer, which is derived from config.json.
IGNORED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def load_config(path: str | os.PathLike[str], family: str = "") -> model_config.TransformerConfig:
  """Returns the shape of the model in a directory or GGUF file.

  Args:
    path: a directory, with a config.json in the spelling of transformers 4 or 5, or a file.
    family: "my_module:FAMILY" for a family outside this package (`models.families`).

  Raises:
    FileNotFoundError: if there is no config.json, or no such file.
    NotImplementedError: for a GGUF file with an unsupported architecture or kind.
    ValueError: naming the field that is missing, malformed or not supported.
  """
  if gguf_file.is_named(path):
    _refuse_family(path, family)
    return gguf_config.read(gguf_file.File(path))
  return huggingface_config.read(pathlib.Path(path) / CONFIG_FILE, family)


def _refuse_family(path: str | os.PathLike[str], family: str) -> None:
  if family:
    raise ValueError(
      f"{path}: got family {family!r} for a GGUF file, expected none because its metadata name the"
      " architecture; pass a directory, or no family."
    )


# Reading weights.


def load(
  path: str | os.PathLike[str],
  numerics: numerics_lib.NumericsConfig,
  dtype: Any = jnp.float32,
  *,
  allow_int8: bool = False,
  family: str = "",
) -> tuple[parameters.Params, model_config.TransformerConfig]:
  """Reads a model directory or GGUF file into our layout, tensor by tensor from mapped files.

  Args:
    path: a directory with config.json and safetensors, or a GGUF file.
    numerics: `reduction_shards` decides the layout.
    dtype: dtype of the parameters; bfloat16 and float16 checkpoints convert to float32 exactly.
    allow_int8: whether weights may be "int8" as written by `save`. A draft model's may, since
      drafts change no bit of a response.
    family: as for `load_config`.

  Returns:
    (master weights, the model's configuration). Peak memory beyond the result: one parameter.

  Raises:
    FileNotFoundError: if config.json or the weights are missing.
    NotImplementedError: for a GGUF file with an unsupported architecture or kind.
    ValueError: naming the file, field or tensor that is wrong.
  """
  path = pathlib.Path(path)
  with contextlib.ExitStack() as stack:
    if gguf_file.is_named(path):
      _refuse_family(path, family)
      checkpoint = gguf_tensors.Checkpoint(path)
    else:
      checkpoint = _Checkpoint(path, stack, family)
    config = checkpoint.config
    slabs = model_config.slabs_for(config, numerics)
    found = {name for name in checkpoint.names if not IGNORED.fullmatch(name)}
    if config.num_layers > len(found):  # Checked before a plan of that many layers is made.
      raise ValueError(
        f"{checkpoint.layers_field}: got {config.num_layers}, expected at most {len(found)}, the"
        " number of tensors; the files do not belong together."
      )
    plan = checkpoint.plan()
    expected = {name: shape for _, leaf in plan for name, shape in leaf.tensors}
    scales = {name + SCALE for name in expected} & found
    if scales and not allow_int8:
      raise ValueError(
        f"{path}: got INT8 weights, expected one of {READABLE_DTYPES}; only draft models may be"
        " INT8: pass it as the draft, or use an unquantised checkpoint."
      )
    found -= scales
    if missing := set(expected) - found:
      raise ValueError(
        f"{path}: got no tensor {_names(map(checkpoint.shown, missing))}, expected all"
        f" {len(expected)} of {checkpoint.described_by}; download it again, or check its number of"
        " layers and its tied embeddings."
      )
    if config.is_tied and "lm_head.weight" in found:
      _require_tied(checkpoint, expected["model.embed_tokens.weight"])
      found -= {"lm_head.weight"}
    if unexpected := found - set(expected):
      raise ValueError(
        f"{path}: got the tensors {_names(map(checkpoint.shown, unexpected))}, expected none of"
        f" them in a model of family {families.of(config).model_type!r} with"
        f" {config.num_layers} layers; check {checkpoint.described_by}."
      )
    for name, shape in expected.items():
      checkpoint.check_shape(name, shape)
    _require_memory(path, expected, dtype)
    layout = parameters.shapes(config, slabs)
    params: parameters.Params = {"layers": [{} for _ in range(config.num_layers)]}
    for leaf_path, leaf in plan:
      owner: Any = params
      shape: Any = layout
      for key in leaf_path[:-1]:
        owner, shape = owner[key], shape[key]
      shape = shape[leaf_path[-1]].shape
      values = huggingface_layout.assembled(leaf, checkpoint.read, shape, dtype)
      owner[leaf_path[-1]] = jnp.asarray(values)
  return params, config


class _Checkpoint:
  """Open safetensors files of one directory, with the file of each tensor."""

  described_by = CONFIG_FILE

  def __init__(self, directory: pathlib.Path, stack: contextlib.ExitStack, family: str):
    self.config = load_config(directory, family)
    self.layers_field = f"{directory / CONFIG_FILE}: num_hidden_layers"
    self.file_of: dict[str, str] = {}
    self._files: dict[str, Any] = {}
    index = _weight_map(directory)
    for name in sorted(set(index.values())) if index else [WEIGHTS_FILE]:
      path = directory / name
      if not path.is_file():
        raise FileNotFoundError(
          f"{path}: got no such file, expected the shard that {INDEX_FILE} names; download it"
          " again."
        )
      try:
        self._files[name] = stack.enter_context(safetensors.safe_open(path, framework="numpy"))
      except safetensors.SafetensorError as error:
        raise ValueError(
          f"{path}: got an incomplete safetensors file ({error}; it has {path.stat().st_size}"
          " bytes), expected a complete one; it may be truncated, download it again."
        ) from error
      for tensor in self._files[name].keys():  # noqa: SIM118 (not a mapping)
        if index and (tensor not in index or index[tensor] != name):
          raise ValueError(
            f"{path}: got the tensor {tensor!r}, expected only those that {INDEX_FILE} places"
            " there; the files do not belong together."
          )
        self.file_of[tensor] = name
    for tensor, name in (index or {}).items():
      if tensor not in self.file_of:
        raise ValueError(
          f"{directory / name}: got no tensor {tensor!r}, expected it by {INDEX_FILE}; the files do"
          " not belong together."
        )
    self.path = directory
    self.names = self.file_of.keys()

  def plan(self) -> huggingface_layout.Plan:
    """Returns the checkpoint's tensors of every parameter."""
    plan = families.of(self.config).tensors(self.config)
    return huggingface_layout.as_stored(plan, self.names)

  def shown(self, name: str) -> str:
    """Returns the name of a tensor in the files."""
    return name

  def check_shape(self, name: str, shape: tuple[int, ...]) -> None:
    """Refuses a tensor with another shape in its header; no data is read.

    Raises:
      ValueError: naming the tensor.
    """
    found = tuple(self._files[self.file_of[name]].get_slice(name).get_shape())
    if found != shape:
      raise ValueError(
        f"{self.path / self.file_of[name]}: {name}: got shape {found}, expected {shape} by"
        f" {CONFIG_FILE}; the two files do not belong together."
      )

  def read(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns one tensor as finite f32.

    Raises:
      ValueError: naming the tensor, for another shape or dtype, or for NaN and infinities.
    """
    file = self._files[self.file_of[name]]
    where = f"{self.path / self.file_of[name]}: {name}"
    part = file.get_slice(name)
    self.check_shape(name, shape)
    if part.get_dtype() == "I8" and name + SCALE in self.file_of:
      scale = self.read(name + SCALE, (shape[0], 1))
      return file.get_tensor(name).astype(np.float32) * scale
    if part.get_dtype() not in READABLE_DTYPES:
      raise ValueError(
        f"{where}: got dtype {part.get_dtype()}, expected one of {READABLE_DTYPES}; use an"
        " unquantised checkpoint."
      )
    tensor = file.get_tensor(name).astype(np.float32)
    if not np.isfinite(tensor).all():
      count = int(tensor.size - np.isfinite(tensor).sum())
      raise ValueError(
        f"{where}: got {count} entries that are NaN or infinite, expected finite weights; the file"
        " is corrupt, or its training diverged."
      )
    return tensor


def _require_memory(path: pathlib.Path, shapes: Mapping[str, tuple[int, ...]], dtype: Any) -> None:
  """Refuses weights that do not fit into free memory, before any of them is read.

  Raises:
    ValueError: with both sizes.
  """
  sizes = [math.prod(shape) for shape in shapes.values()]
  # The largest tensor is also in memory as float32 during conversion.
  needed = sum(sizes) * np.dtype(dtype).itemsize + max(sizes) * 4
  if jax.devices()[0].platform != "cpu":  # What a device holds is planned by the engine.
    return
  free = host_memory.free_bytes()
  if needed > free:
    raise ValueError(
      f"{path}: got weights of {sum(sizes):,} numbers, which take {needed / 2**20:,.0f} MiB as"
      f" {np.dtype(dtype).name}, expected at most the {free / 2**20:,.0f} MiB that are free; choose"
      " a smaller model, or free some memory."
    )


def _weight_map(directory: pathlib.Path) -> dict[str, str]:
  """Returns the file of each tensor by the index; {} for a directory with one weights file."""
  if (directory / WEIGHTS_FILE).is_file():
    return {}
  path = directory / INDEX_FILE
  if not path.is_file():
    pickles = sorted(file.name for pattern in PICKLES for file in directory.glob(pattern))
    if pickles:
      raise ValueError(
        f"{directory}: got weights as pickles only ({pickles[0]}), which run code when they are"
        f" loaded, expected {WEIGHTS_FILE}; convert to safetensors."
      )
    raise FileNotFoundError(
      f"{directory}: got neither {WEIGHTS_FILE} nor {INDEX_FILE}, expected the weights; check the"
      " path, or download them."
    )
  weight_map = config_fields.read_object(path).get("weight_map")
  if not isinstance(weight_map, dict) or not weight_map:
    raise ValueError(
      f"{path}: weight_map: got {type(weight_map).__name__}, expected an object of tensor names and"
      " files; download it again."
    )
  for tensor, name in weight_map.items():
    is_plain = isinstance(name, str) and re.fullmatch(r"[\w-][\w.-]*\.safetensors", name)
    if not is_plain:
      raise ValueError(
        f"{path}: weight_map[{tensor!r}]: got {name!r}, expected the plain name of a .safetensors"
        " file next to it; do not trust this directory."
      )
  return weight_map


def _names(names: Iterable[str]) -> str:
  names = sorted(names)
  return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _require_tied(
  checkpoint: _Checkpoint | gguf_tensors.Checkpoint, shape: tuple[int, ...]
) -> None:
  head = checkpoint.read("lm_head.weight", shape)
  if not np.array_equal(head, checkpoint.read("model.embed_tokens.weight", shape)):
    raise ValueError(
      f"{checkpoint.path}: lm_head.weight: got other values than model.embed_tokens.weight,"
      " expected equal values with tie_word_embeddings=true; set it to false, or remove the tensor."
    )


# Writing weights.


def save(
  directory: str | os.PathLike[str],
  params: parameters.Params,
  config: model_config.TransformerConfig,
  *,
  dtype: str = "bfloat16",
  tokenizer: tokenizer_lib.Tokenizer | None = None,
  max_shard_bytes: int = MAX_SHARD_BYTES,
  overwrite: bool = False,
) -> None:
  """Writes a model directory that `load` and transformers read; equal weights give equal bytes.

  The files are written to a temporary directory next to the target, flushed to disk and renamed, so
  that a kill leaves either no directory (or the old one), or the complete new one.

  Args:
    directory: created.
    params: weights in our layout, of any `reduction_shards`.
    config: shape of the model.
    dtype: dtype of the tensors: "bfloat16" (masters are rounded to nearest even), "float32", or
      "int8": matrices symmetrically by output channel, with a tensor of scales each, for draft
      models only.
    tokenizer: its files are written too, and its `eos_ids` as generation_config.json.
    max_shard_bytes: larger models are split into several files with an index.
    overwrite: replace an existing model directory, including its other files.

  Raises:
    FileExistsError: if the directory is not empty and may not be replaced.
    OSError: if the disk has too little free space, with both numbers.
    ValueError: if `params` is not in the layout of `config` or not finite, for an unknown dtype, or
      if no checkpoint family has this `config`.
  """
  directory = pathlib.Path(os.path.abspath(directory))
  if dtype not in (*numerics_lib.DTYPES, INT8):
    raise ValueError(
      f"save: got dtype={dtype!r}, expected one of {(*numerics_lib.DTYPES, INT8)}; 'bfloat16' is"
      " usual."
    )
  huggingface_layout.check_layout(params, config)
  check_target(directory, overwrite, CONFIG_FILE)
  if max_shard_bytes < 1:
    raise ValueError(
      f"save: got max_shard_bytes={max_shard_bytes}, expected at least 1; 5 GB is usual."
    )
  eos_ids = () if tokenizer is None else tokenizer.eos_ids
  # The config names the dtype into which INT8 is read, so other programs fail on the INT8 files.
  described = huggingface_config.to_object(config, "float32" if dtype == INT8 else dtype, eos_ids)
  directory.parent.mkdir(parents=True, exist_ok=True)
  plan = families.of(config).tensors(config)
  sizes = {
    name: size
    for _, leaf in plan
    for tensor, shape in leaf.tensors
    for name, size in _sizes(tensor, shape, dtype).items()
  }
  token_files = {} if tokenizer is None else tokenizer.files
  # Headers and JSON files: far below 1 KiB per tensor.
  others = 2**16 + 1024 * len(sizes) + sum(len(content) for content in token_files.values())
  require_space(directory.parent, sum(sizes.values()) + others)
  numerics_lib.require_finite(
    params, what="save: params", remedy="export an earlier step, with finite weights"
  )

  with whole_directory(directory) as partial:
    _write_weights(partial, params, plan, sizes, dtype, max_shard_bytes)
    write_json(partial / CONFIG_FILE, described)
    if tokenizer is not None:
      tokenizer.save(partial)
      if GENERATION_FILE not in tokenizer.files and eos_ids:
        write_json(partial / GENERATION_FILE, {"eos_token_id": list(eos_ids)})


@contextlib.contextmanager
def whole_directory(directory: pathlib.Path) -> Iterator[pathlib.Path]:
  """Yields a temporary directory for files, which then replaces `directory` atomically.

  Files get the mode of the umask, and are flushed to disk before the replacement.
  """
  partial = directory.parent / f".{directory.name}.partial.{os.getpid()}"
  shutil.rmtree(partial, ignore_errors=True)
  partial.mkdir()
  try:
    yield partial
    for path in partial.iterdir():
      path.chmod(0o666 & ~_umask())  # safetensors creates its files with mode 0600.
      flush(path)
    flush(partial)
    _place(partial, directory)
  finally:
    shutil.rmtree(partial, ignore_errors=True)


def check_target(directory: pathlib.Path, overwrite: bool, marker: str) -> None:
  """Refuses a target that may not be replaced, such as a directory without the file `marker`.

  Raises:
    FileExistsError: describing what exists there.
  """
  if not directory.exists():
    return
  if not directory.is_dir():
    raise FileExistsError(f"{directory}: got a file, expected no file there; choose another path.")
  if not any(directory.iterdir()):
    return
  if not overwrite:
    raise FileExistsError(
      f"{directory}: got a directory with files in it, expected none; choose another path, or pass"
      " overwrite=True."
    )
  if not (directory / marker).is_file():
    kind = "a model" if marker == CONFIG_FILE else "an adapter"
    raise FileExistsError(
      f"{directory}: got a directory without {marker}, expected {kind} directory to overwrite;"
      " choose another path."
    )


def require_space(parent: pathlib.Path, needed_bytes: int) -> None:
  """Refuses to write on a disk that is too full.

  Raises:
    OSError: with both numbers.
  """
  free_bytes = shutil.disk_usage(parent).free
  if free_bytes < needed_bytes:
    raise OSError(
      f"{parent}: got {free_bytes / 2**30:.2f} GiB of free space, expected at least"
      f" {needed_bytes / 2**30:.2f} GiB for the model; free some, or choose another disk."
    )


def _shards_of(sizes: Mapping[str, int], max_shard_bytes: int) -> list[list[str]]:
  """Returns tensor names by file, in order; a tensor larger than the limit has its own file."""
  shards: list[list[str]] = [[]]
  total = 0
  for name, size in sizes.items():
    if shards[-1] and total + size > max_shard_bytes:
      shards.append([])
      total = 0
    shards[-1].append(name)
    total += size
  return shards


def _sizes(name: str, shape: tuple[int, ...], dtype: str) -> dict[str, int]:
  """Returns the bytes of a tensor and of its scales, if it has some, by name."""
  count = int(np.prod(shape, dtype=np.int64))
  if dtype == INT8 and len(shape) == 2:
    return {name: count, name + SCALE: 4 * shape[0]}
  return {name: count * (2 if dtype == "bfloat16" else 4)}


def _with_scales(
  tensors: Iterator[tuple[str, np.ndarray]],
) -> Iterator[tuple[str, np.ndarray]]:
  """Yields f32 matrices as INT8, followed by the scales of their rows, the output channels."""
  for name, tensor in tensors:
    if tensor.ndim != 2:
      yield name, tensor
      continue
    # For a row of zeros, any scale will do.
    most = np.maximum(np.abs(tensor).max(axis=1, keepdims=True), np.float32(1e-9))
    scale = most / np.float32(127)
    yield name, np.rint(tensor / scale).astype(np.int8)
    yield name + SCALE, scale


def _write_weights(
  directory: pathlib.Path,
  params: parameters.Params,
  plan: list[tuple[tuple[Any, ...], huggingface_layout.Leaf]],
  sizes: Mapping[str, int],
  dtype: str,
  max_shard_bytes: int,
) -> None:
  shards = _shards_of(sizes, max_shard_bytes)
  numpy_dtype = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32)
  tensors = huggingface_layout.tensors(params, plan, numpy_dtype)
  if dtype == INT8:
    tensors = _with_scales(tensors)
  weight_map = {}
  for number, names in enumerate(shards, start=1):
    file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
    file = WEIGHTS_FILE if len(shards) == 1 else file
    content = dict(itertools.islice(tensors, len(names)))
    safetensors.numpy.save_file(content, directory / file, metadata={"format": "pt"})
    weight_map.update(dict.fromkeys(names, file))
  if len(shards) > 1:
    metadata = {"total_size": sum(sizes.values())}
    write_json(directory / INDEX_FILE, {"metadata": metadata, "weight_map": weight_map})


def write_json(path: pathlib.Path, value: Mapping[str, Any]) -> None:
  """Writes an object, keys sorted."""
  path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _umask() -> int:
  """Returns the umask of the process, which can only be read by setting it."""
  mask = os.umask(0)
  os.umask(mask)
  return mask


def flush(path: pathlib.Path) -> None:
  """Flushes a file or directory to disk."""
  descriptor = os.open(path, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)


def _place(partial: pathlib.Path, directory: pathlib.Path) -> None:
  """Renames `partial` to `directory`; an old directory is moved aside first and then removed."""
  old = directory.parent / f".{directory.name}.old.{os.getpid()}"
  shutil.rmtree(old, ignore_errors=True)
  if directory.exists():
    directory.rename(old)
  partial.rename(directory)
  flush(directory.parent)
  shutil.rmtree(old, ignore_errors=True)


# The Hub.


def resolve(name_or_path: str | os.PathLike[str]) -> pathlib.Path:
  """Returns the directory or GGUF file of a model, or a Hub id's directory in the Hub's cache.

  Args:
    name_or_path: a directory or GGUF file (which win), or an id such as "Qwen/Qwen3-0.6B".

  Raises:
    FileNotFoundError: if there is no such directory or file, or the Hub is unreachable or refuses.
    ImportError: if a Hub id is given and `huggingface_hub` is not installed.
  """
  path = pathlib.Path(name_or_path).expanduser()
  if path.is_dir() and str(name_or_path):  # The empty path is not the current directory.
    files = sorted(path.glob(f"*{gguf_file.SUFFIX}"))
    if files and not (path / CONFIG_FILE).is_file():
      raise FileNotFoundError(
        f"resolve: got {str(path)!r}, a directory with {files[0].name} but without {CONFIG_FILE},"
        f" expected a model directory or a GGUF file; pass {files[0]}."
      )
    return path
  name = str(name_or_path)
  if gguf_file.is_named(path):
    if not path.is_file():
      raise FileNotFoundError(
        f"resolve: got {name!r}, expected a GGUF file; the file does not exist."
      )
    return path
  if not HUB_ID.fullmatch(name):
    raise FileNotFoundError(
      f"resolve: got {name!r}, which is not a directory, expected a model directory, a GGUF file or"
      " a Hub id such as 'Qwen/Qwen3-0.6B'; check the path."
    )
  try:
    import huggingface_hub  # Lazy: only Hub ids need it, and importing it takes long.
  except ImportError as error:
    raise ImportError(
      f"resolve: got the Hub id {name!r} without huggingface_hub, expected it to be installed; run"
      " `pip install huggingface_hub`, or pass a local directory."
    ) from error
  try:
    return pathlib.Path(huggingface_hub.snapshot_download(name, allow_patterns=list(HUB_PATTERNS)))
  except Exception as error:  # A proxy's refusal has the HTTP library's type, not a narrower one.
    raise FileNotFoundError(
      f"resolve: got no files of {name!r} from the Hub ({type(error).__name__}: {error}), expected"
      " a local directory or a reachable Hub; check the name and the network, log in for a gated"
      " model, or pass the path of a download."
    ) from error
