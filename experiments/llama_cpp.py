"""Calls llama.cpp through the C interface in the package xllamacpp.

Claim: none; `throughput.engine` and `throughput.real` compare us with it.

The wheel on PyPI is built for every x86 processor with AVX2, and uses no AVX-512. Its extension
module exports llama.cpp's C functions but comes without a header, so `_parameters` compares the
default parameters with those of the version from which the layout here was taken, and rejects
others.

Each sequence has its own stream in the cache (`kv_unified` is off): in a unified cache every
sequence attends to the keys of all sequences.
"""

from __future__ import annotations

import ctypes
import importlib.util
import pathlib
from typing import Any

import numpy as np

PACKAGE = "xllamacpp"
# Fields of `llama_context_params`: (offset in 32-bit words, default in the locked version).
CONTEXT_WORDS = {
  "n_ctx": (0, 512),
  "n_batch": (1, 2048),
  "n_ubatch": (2, 512),
  "n_seq_max": (3, 1),
  "n_threads": (7, 4),
  "n_threads_batch": (8, 4),
  "flash_attn_type": (13, 2**32 - 1),
  "type_k": (26, 1),
  "type_v": (27, 1),
  # embeddings, offload_kqv, no_perf, op_offload; swa_full, kv_unified: one byte each.
  "flags": (34, 0x01010100),
  "more_flags": (35, 0x00000001),
}
# Types of the cache's tensors.
KV_KINDS = {"f32": 0, "f16": 1, "bf16": 30}


class _Parameters(ctypes.Structure):
  """A parameter record passed by value; longer than llama.cpp's, which read its beginning."""

  _fields_ = [("words", ctypes.c_uint32 * 128)]


class _Batch(ctypes.Structure):
  """`llama_batch`: one row per token."""

  _fields_ = [
    ("n_tokens", ctypes.c_int32),
    ("token", ctypes.c_void_p),
    ("embd", ctypes.c_void_p),
    ("pos", ctypes.c_void_p),
    ("n_seq_id", ctypes.c_void_p),
    ("seq_id", ctypes.c_void_p),
    ("logits", ctypes.c_void_p),
  ]


def is_installed() -> bool:
  """Returns whether the package is installed."""
  return importlib.util.find_spec(PACKAGE) is not None


def library() -> ctypes.CDLL:
  """Returns the llama.cpp library with the types of the functions used here.

  Raises:
    ModuleNotFoundError: if it is not installed.
  """
  spec = importlib.util.find_spec(PACKAGE)
  if spec is None or spec.origin is None:
    raise ModuleNotFoundError(
      f"llama.cpp: got no package {PACKAGE}, expected the one of launch/locks/llama.txt; run"
      " `bash launch/peers.sh`."
    )
  (path,) = pathlib.Path(spec.origin).parent.glob("xllamacpp*.so")
  library = ctypes.CDLL(str(path))
  pointer = ctypes.c_void_p
  types: dict[str, tuple[Any, list[Any]]] = {
    "llama_backend_init": (None, []),
    "llama_log_set": (None, [pointer, pointer]),
    "llama_model_default_params": (_Parameters, []),
    "llama_context_default_params": (_Parameters, []),
    "llama_model_load_from_file": (pointer, [ctypes.c_char_p, _Parameters]),
    "llama_init_from_model": (pointer, [pointer, _Parameters]),
    "llama_model_get_vocab": (pointer, [pointer]),
    "llama_vocab_n_tokens": (ctypes.c_int32, [pointer]),
    "llama_tokenize": (
      ctypes.c_int32,
      [pointer, ctypes.c_char_p, ctypes.c_int32, pointer, ctypes.c_int32, *2 * [ctypes.c_bool]],
    ),
    "llama_get_memory": (pointer, [pointer]),
    "llama_memory_clear": (None, [pointer, ctypes.c_bool]),
    "llama_memory_seq_cp": (None, [pointer, *4 * [ctypes.c_int32]]),
    "llama_decode": (ctypes.c_int32, [pointer, _Batch]),
    "llama_get_logits": (ctypes.POINTER(ctypes.c_float), [pointer]),
    "llama_free": (None, [pointer]),
    "llama_model_free": (None, [pointer]),
  }
  for name, (result, arguments) in types.items():
    function = getattr(library, name)  # Cached by the library, unlike library[name].
    function.restype, function.argtypes = result, arguments
  return library


def check_defaults(words: list[int]) -> None:
  """Compares a record of default parameters with the layout used here.

  Raises:
    RuntimeError: if they differ, as in another version.
  """
  for name, (place, expected) in CONTEXT_WORDS.items():
    if words[place] != expected:
      raise RuntimeError(
        f"llama.cpp: got {words[place]} in place of the default {name}, expected {expected}, as the"
        " locked version says; install that one (`bash launch/peers.sh`)."
      )


class Model:
  """A model with a KV cache of `num_sequences` streams.

  Args:
    path: a GGUF file.
    num_sequences: streams of the cache.
    context: positions per stream.
    num_threads: compute threads.
    flash: whether to use flash attention; None lets llama.cpp decide.
    kv: type of the cached keys and values, of `KV_KINDS`.
  """

  def __init__(
    self,
    path: pathlib.Path,
    *,
    num_sequences: int,
    context: int,
    num_threads: int,
    flash: bool | None = None,
    kv: str = "f16",
  ):
    self._library = library()
    silent = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
    self._log = silent(lambda level, text, data: None)
    self._library.llama_log_set(self._log, None)
    self._library.llama_backend_init()
    parameters = self._library.llama_context_default_params()
    check_defaults(list(parameters.words))
    chosen = dict(
      n_ctx=num_sequences * -(-context // 256) * 256,
      n_batch=2048,
      n_ubatch=512,
      n_seq_max=num_sequences,
      n_threads=num_threads,
      n_threads_batch=num_threads,
      flash_attn_type=2**32 - 1 if flash is None else int(flash),
      type_k=KV_KINDS[kv],
      type_v=KV_KINDS[kv],
    )
    for name, value in chosen.items():
      parameters.words[CONTEXT_WORDS[name][0]] = value
    model_parameters = self._library.llama_model_default_params()
    self._model = self._library.llama_model_load_from_file(str(path).encode(), model_parameters)
    if not self._model:
      raise ValueError(
        f"{path}: got a file that llama.cpp does not load, expected a GGUF file; write it again"
        " with `seerjax export`."
      )
    self._context = self._library.llama_init_from_model(self._model, parameters)
    if not self._context:
      raise MemoryError(
        f"llama.cpp: got no context of {num_sequences} sequences of {context} positions; request"
        " fewer."
      )
    self._vocab = self._library.llama_model_get_vocab(self._model)
    self.vocab_size: int = self._library.llama_vocab_n_tokens(self._vocab)
    self._memory = self._library.llama_get_memory(self._context)

  def encode(self, text: str) -> list[int]:
    """Returns the ids of a text; special tokens in it are parsed, and none are added."""
    content = text.encode()
    ids = np.empty(len(content) + 8, np.int32)
    count = self._library.llama_tokenize(
      self._vocab, content, len(content), ids.ctypes.data, len(ids), False, True
    )
    return ids[:count].tolist()

  def forget(self) -> None:
    """Empties every stream."""
    self._library.llama_memory_clear(self._memory, False)

  def copy(self, source: int, target: int) -> None:
    """Copies a stream's keys and values to another stream."""
    self._library.llama_memory_seq_cp(self._memory, source, target, -1, -1)

  def forward(
    self, tokens: np.ndarray, positions: np.ndarray, sequences: np.ndarray, is_read: np.ndarray
  ) -> np.ndarray:
    """Computes up to 2,048 rows and appends their keys and values to their streams.

    Args:
      tokens: i32[n].
      positions: i32[n], the next positions of each stream.
      sequences: i32[n].
      is_read: bool[n], whether to return a row's logits.

    Returns:
      f32[k, v], the logits of the k rows with `is_read`, in order; valid until the next call.

    Raises:
      RuntimeError: if llama.cpp rejects the rows.
    """
    rows = [np.ascontiguousarray(values, np.int32) for values in (tokens, positions, sequences)]
    one = np.ones(len(tokens), np.int32)
    lists = (rows[2].ctypes.data + 4 * np.arange(len(tokens))).astype(np.uint64)
    wanted = np.ascontiguousarray(is_read, np.int8)
    batch = _Batch(
      len(tokens), rows[0].ctypes.data, None, rows[1].ctypes.data, one.ctypes.data,
      lists.ctypes.data, wanted.ctypes.data,
    )  # fmt: skip
    if status := self._library.llama_decode(self._context, batch):
      raise RuntimeError(
        f"llama.cpp: got status {status} for {len(tokens)} rows, expected 0; the cache holds fewer"
        " positions than requested."
      )
    count = int(wanted.sum())
    logits = self._library.llama_get_logits(self._context)
    return np.ctypeslib.as_array(logits, (count, self.vocab_size))

  def close(self) -> None:
    """Frees the memory."""
    self._library.llama_free(self._context)
    self._library.llama_model_free(self._model)


def sample(logits: np.ndarray, rng: np.random.Generator) -> np.ndarray:
  """Draws i32[n] from the softmax of f32[n, v], as the minimum of exponential variables."""
  weights = np.exp(logits - logits.max(axis=1, keepdims=True))
  clocks = rng.standard_exponential(logits.shape, dtype=np.float32)
  return np.argmax(weights / clocks, axis=1).astype(np.int32)


def prefill(model: Model, prompt: tuple[int, ...], sequence: int) -> np.ndarray:
  """Writes a prompt to an empty stream; returns f32[v], the logits after its last token."""
  length = len(prompt)
  last = np.arange(length) == length - 1
  tokens, places = np.asarray(prompt, np.int32), np.arange(length)
  return model.forward(tokens, places, np.full(length, sequence), last)[0].copy()


def answer(
  model: Model,
  prompts: list[tuple[int, ...]],
  lengths: np.ndarray,
  rng: np.random.Generator | None,
) -> list[list[int]]:
  """Generates completions of given lengths for all prompts concurrently.

  A prompt is computed once, and its stream is copied to the other members of its group. Streams
  are sorted by length, longest first: llama.cpp batches only neighbouring streams, and in this
  order the unfinished ones stay neighbours.

  Args:
    model: a model with a stream for each completion, at most 2,048.
    prompts: one prompt per group.
    lengths: i32[g, m] at least 1, lengths of the members' completions.
    rng: random generator for sampling; None decodes greedily.

  Returns:
    tokens of the completions, with a group's members together.
  """

  def choose(logits: np.ndarray) -> np.ndarray:
    return np.argmax(logits, axis=1).astype(np.int32) if rng is None else sample(logits, rng)

  num_members = lengths.shape[1]
  wanted = lengths.reshape(-1)
  order = np.argsort(-wanted, kind="stable")  # The completion of each stream.
  stream_of = np.argsort(order)
  model.forget()
  first = np.empty((len(wanted), model.vocab_size), np.float32)
  for group, prompt in enumerate(prompts):
    streams = stream_of[group * num_members : (group + 1) * num_members]
    first[streams] = prefill(model, prompt, int(streams[0]))
    for stream in streams[1:]:
      model.copy(int(streams[0]), int(stream))
  positions = np.repeat([len(prompt) for prompt in prompts], num_members)[order].astype(np.int32)
  remaining = wanted[order]
  steps = [choose(first)]
  for step in range(1, int(remaining[0])):
    living = int(np.searchsorted(-remaining, -step))
    streams = np.arange(living)
    logits = model.forward(steps[-1][:living], positions[:living], streams, streams >= 0)
    positions[:living] += 1
    steps.append(choose(logits))
  return [
    [int(tokens[stream]) for tokens in steps[: int(remaining[stream])]] for stream in stream_of
  ]
