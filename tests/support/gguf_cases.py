"""GGUF files for tests: small models with tokenizers, and arbitrary, possibly invalid files."""

from __future__ import annotations

import collections
from collections.abc import Iterator
import dataclasses
import functools
import json
import pathlib
import re
import struct
from typing import Any

import numpy as np
import tiny_model
import tokenizers
import tokenizers.models
import tokenizers.pre_tokenizers
import tokenizers.trainers

from seerjax import layer_kinds, numerics as numerics_lib
from seerjax.layer_kinds import Gated, Grouped, LayerConfig
from seerjax.models import (
  config as model_config,
  huggingface,
  parameters,
  tokenizer as tokenizer_lib,
)
from seerjax.models.families import gemma3
from seerjax.ops import rotary

NUMERICS = tiny_model.ONE_SLAB
TOKENS = 400
TEMPLATE = (
  "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content +"
  " '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
  "{% endif %}"
)

# Small models of each family; rows of 32 are one block of the simple quantisation kinds.
QWEN3 = model_config.TransformerConfig(
  vocab_size=TOKENS,
  hidden_size=32,
  layers=layer_kinds.uniform(
    LayerConfig(
      attention=Grouped(
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        has_qk_norms=True,
        rotary=rotary.RotaryConfig(head_dim=16, base=1e6),
      ),
      feed_forward=Gated(intermediate_size=64),
    ),
    2,
  ),
  max_model_len=128,
)
LLAMA = QWEN3.changed(
  has_qk_norms=False, head_dim=8, norm_eps=1e-5, rotary=rotary.RotaryConfig(head_dim=8, base=5e5)
)
QWEN2 = LLAMA.changed(has_qkv_biases=True, norm_eps=1e-6, is_tied=False)
LLAMA3 = LLAMA.changed(
  head_dim=32,
  rotary=rotary.RotaryConfig(
    head_dim=32, base=5e5, scaling="llama3", factor=32.0, original_context=8192
  ),
)
# Windows of 23 positions in two of three layers, with a rotary base of their own.
GEMMA3 = dataclasses.replace(
  QWEN3,
  layers=tuple(
    gemma3.layer(
      num_heads=4,
      num_kv_heads=2,
      head_dim=16,
      intermediate_size=64,
      turn=rotary.RotaryConfig(head_dim=16, base=1e6 if window is None else 700.0),
      window=window,
      scale=None,
    )
    for window in (23, 23, None, 23)
  ),
  norm_weights="1 + w",
  embedding_scale=32**0.5,
  logit_soft_cap=3.0,
)
CONFIGS = {
  "llama": LLAMA,
  "qwen2": QWEN2,
  "qwen3": QWEN3,
  "llama, scaled as Llama 3": LLAMA3,
  "llama, scaled otherwise": LLAMA3.changed(
    rotary=dataclasses.replace(
      LLAMA3.layers[0].attention.rotary,
      factor=4.0,
      original_context=512,
      low_frequency_factor=2.0,
      high_frequency_factor=16.0,
    )
  ),
  "qwen2, linear": QWEN2.changed(
    rotary=rotary.RotaryConfig(head_dim=8, scaling="linear", factor=4.0)
  ),
  "qwen3, yarn": QWEN3.changed(
    rotary=rotary.RotaryConfig(
      head_dim=16, base=1e6, scaling="yarn", factor=4.0, original_context=32, beta_fast=16.0
    )
  ),
}

# Texts about which tokenizers are most likely to disagree.
TEXTS = (
  "12345 7 3.14 1,000,000 x2y ٣٤ ½",
  "naïve café — ÆØÅ ß İı",
  "e\u0301 and é, \u1112\u1161\u11ab and 한, ﬁ",
  "你好，世界！こんにちは 안녕하세요 नमस्ते",
  "🙂👍🏽👩\u200d👩\u200d👧 \u00a0\u2003\u200b\ufeff",
  "a  b   c\t\td \n\n\n  e\r\n\r\nf   ",
  "   leading, trailing \n",
  "I'm you're we've he'll she'd it's don't",
  "I'M YOU'RE WE'VE 'S'T 'ſ",
  "def f(x):\n    return x**2  # ok\n\n\tif x != 0: y += 1;\n",
  "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
  "<|im_start| > <|im_end|>x<think>y</think>",
  'https://example.org/a?b=c&d=%20#e {"k": [1, 2.5e-3]}',
  "-----=====!!!???...",
  "\x00\x01\x7f",
)

_QWEN2_CUT = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
  r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_CUT = _QWEN2_CUT.replace(r"\p{N}|", r"\p{N}{1,3}|")


def _split(pattern: str) -> dict[str, Any]:
  return {
    "type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False
  }  # fmt: skip


def _level(use_regex: bool, **more: Any) -> dict[str, Any]:
  level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
  return level | {"use_regex": use_regex} | more


def _sequence(*steps: dict[str, Any]) -> dict[str, Any]:
  return {"type": "Sequence", "pretokenizers": list(steps)}


_BOS_FIRST = {
  "type": "TemplateProcessing",
  "single": [
    {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
    {"Sequence": {"id": "A", "type_id": 0}},
  ],
  "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
  "special_tokens": {
    "<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}
  },
}
# Fields of tokenizer.json as in the families' own directories, by llama.cpp's name.
FORMS: dict[str, dict[str, Any]] = {
  "gpt-2": {"pre_tokenizer": _level(True)},
  "smollm": {
    "pre_tokenizer": _sequence({"type": "Digits", "individual_digits": True}, _level(True))
  },
  "deepseek-coder": {
    "pre_tokenizer": _sequence(
      _split("[\r\n]"),
      _split(r"\s?\p{L}+"),
      _split(r"\s?\p{P}+"),
      _split("[一-龥ࠀ-一가-\ud7ff]+"),
      {"type": "Digits", "individual_digits": True},
      _level(False),
    )
  },
  "qwen2": {
    "normalizer": {"type": "NFC"},
    "pre_tokenizer": _sequence(_split(_QWEN2_CUT), _level(False, trim_offsets=False)),
  },
  "llama-bpe": {
    "pre_tokenizer": _sequence(_split(_LLAMA3_CUT), _level(False)),
    "post_processor": {"type": "Sequence", "processors": [_level(True), _BOS_FIRST]},
  },
}


@functools.cache
def tokenizer(form: str, num_tokens: int = 390) -> tokenizer_lib.Tokenizer:
  """A tokenizer of a published form: special tokens first, bytes, and the merges of `TEXTS`."""
  whole = tokenizers.Tokenizer(tokenizers.models.BPE())
  written = json.loads(whole.to_str()) | FORMS[form] | {"decoder": _level(True)}
  backend = tokenizers.Tokenizer.from_str(json.dumps(written | {"post_processor": None}))
  special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=num_tokens - 2,
    special_tokens=special,
    initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  backend.train_from_iterator(TEXTS * 3, trainer)
  backend.add_tokens(["<think>", "</think>"])
  written = json.loads(backend.to_str()) | FORMS[form]
  written["model"]["ignore_merges"] = form == "llama-bpe"
  config = {
    "bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
    "chat_template": TEMPLATE, "tokenizer_class": "PreTrainedTokenizerFast",
  }  # fmt: skip
  files = {
    "tokenizer.json": json.dumps(written).encode(),
    "tokenizer_config.json": json.dumps(config).encode(),
    "generation_config.json": json.dumps({"eos_token_id": [2, 0]}).encode(),
  }
  return tokenizer_lib.Tokenizer(
    backend=tokenizers.Tokenizer.from_buffer(files["tokenizer.json"]),
    chat_template=TEMPLATE,
    special_tokens={role: config[role] for role in ("bos_token", "eos_token", "pad_token")},
    eos_ids=(2, 0),
    files=files,
  )


def weights(
  config: model_config.TransformerConfig, numerics: numerics_lib.NumericsConfig = NUMERICS
) -> parameters.Params:
  return tiny_model.random_master(config, numerics)


def saved(
  directory: pathlib.Path, config: model_config.TransformerConfig, form: str = "qwen2"
) -> pathlib.Path:
  """Writes a Hugging Face directory in float32, with a tokenizer."""
  huggingface.save(directory, weights(config), config, dtype="float32", tokenizer=tokenizer(form))
  return directory


@functools.cache
def sentence_pieces(num_tokens: int = 400) -> tuple[list[str], list[float], list[int]]:
  """Tokens, scores and kinds of a SentencePiece vocabulary: special ones, bytes, then pieces.

  Pieces join the most frequent neighbours of `TEXTS` first; most characters have no token.
  """
  backend = tokenizers.Tokenizer(tokenizers.models.BPE())
  trainer = tokenizers.trainers.BpeTrainer(vocab_size=num_tokens - 262, show_progress=False)
  escaped = [text.replace(" ", "▁").replace("\n", "") for text in TEXTS * 3]
  # The trainer's own limit chooses among equally frequent characters at random.
  counts = collections.Counter("".join(escaped))
  alphabet = sorted(counts, key=lambda letter: (-counts[letter], letter))[:60]
  between = re.compile(f"[^{re.escape(''.join(alphabet))}]")
  backend.train_from_iterator([part for text in escaped for part in between.split(text)], trainer)
  ids = backend.get_vocab()
  # Joined pieces in the order in which they were found, then single characters.
  pieces = sorted(ids, key=lambda text: (len(text) == 1, ids[text]))
  tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "  ", "\n\n"]
  tokens += [f"<0x{byte:02X}>" for byte in range(256)]
  kinds = [3, 3, 3, 2, 4, 4] + [6] * 256 + [1] * len(pieces)
  scores = [0.0] * len(tokens) + [-float(rank) for rank in range(len(pieces))]
  unused = num_tokens - len(tokens) - len(pieces)
  tokens += pieces + [f"<unused{i}>" for i in range(unused)]
  return tokens, scores + [0.0] * unused, kinds + [5] * unused


def with_sentence_pieces(entries: dict[str, bytes]) -> dict[str, bytes]:
  """Returns a file's entries with the tokenizer of `sentence_pieces`."""
  tokens, scores, kinds = sentence_pieces()
  left_out = ("tokenizer.ggml.pre", "tokenizer.ggml.merges", "tokenizer.ggml.add_bos_token")
  return {key: content for key, content in entries.items() if key not in left_out} | {
    "tokenizer.ggml.model": value("str", "llama"),
    "tokenizer.ggml.tokens": value("list str", tokens),
    "tokenizer.ggml.scores": value("list f32", scores),
    "tokenizer.ggml.token_type": value("list i32", kinds),
    "tokenizer.ggml.bos_token_id": value("u32", 2),
    "tokenizer.ggml.eos_token_id": value("u32", 1),
    "tokenizer.ggml.unknown_token_id": value("u32", 3),
    "tokenizer.ggml.add_space_prefix": value("bool", 0),
  }


# Files made byte by byte.

LETTERS = {
  "u8": (0, "B"), "i8": (1, "b"), "u16": (2, "H"), "i16": (3, "h"), "u32": (4, "I"),
  "i32": (5, "i"), "f32": (6, "f"), "bool": (7, "B"),
  "u64": (10, "Q"), "i64": (11, "q"), "f64": (12, "d"),
}  # fmt: skip
KINDS = {
  "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q8_0": 8, "Q4_K": 12, "Q5_K": 13,
  "Q6_K": 14, "IQ2_XS": 17, "BF16": 30,
}  # fmt: skip


@dataclasses.dataclass
class Record:
  """A tensor record, possibly false: shape (rows first), kind, and offset of the data."""

  shape: tuple[int, ...]
  kind: str | int
  data: bytes
  offset: int | None = None


def text(value: str | bytes) -> bytes:
  content = value.encode() if isinstance(value, str) else value
  return struct.pack("<Q", len(content)) + content


def value(kind: str, content: Any) -> bytes:
  """Kind and value of a metadata entry: "str", a number of `LETTERS`, or ("list", KIND)."""
  if kind == "str":
    return struct.pack("<I", 8) + text(content)
  if kind.startswith("list "):
    inner = kind.removeprefix("list ")
    number = 8 if inner == "str" else LETTERS[inner][0]
    items = b"".join(value(inner, item)[4:] for item in content)
    return struct.pack("<IIQ", 9, number, len(content)) + items
  number, letter = LETTERS[kind]
  return struct.pack("<I" + letter, number, content)


def raw(
  entries: dict[str, bytes],
  records: dict[str, Record],
  *,
  start: bytes = b"GGUF" + struct.pack("<I", 3),
  counts: tuple[int, int] | None = None,
  alignment: int = 32,
) -> bytes:
  """Returns the bytes of a file."""
  num_tensors, num_entries = counts or (len(records), len(entries))
  head = start + struct.pack("<QQ", num_tensors, num_entries)
  head += b"".join(text(key) + content for key, content in entries.items())
  data = b""
  for name, record in records.items():
    offset = len(data) if record.offset is None else record.offset
    kind = KINDS[record.kind] if isinstance(record.kind, str) else record.kind
    head += text(name) + struct.pack("<I", len(record.shape))
    head += struct.pack(f"<{len(record.shape)}Q", *reversed(record.shape))
    head += struct.pack("<IQ", kind, offset)
    data += record.data + bytes(-len(record.data) % alignment)
  return head + bytes(-len(head) % alignment) + data


def parts(
  config: model_config.TransformerConfig = LLAMA,
) -> tuple[dict[str, bytes], dict[str, Record]]:
  """Returns entries and records of a whole small Llama file with a tokenizer of 300 tokens."""
  rng = np.random.default_rng(5)
  d, inner, q = (
    config.hidden_size,
    config.layers[0].feed_forward.intermediate_size,
    config.layers[0].attention.num_heads * config.layers[0].attention.head_dim,
  )
  kv = config.layers[0].attention.num_kv_heads * config.layers[0].attention.head_dim

  def shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "token_embd.weight", (config.vocab_size, d)
    for layer in range(config.num_layers):
      for name, shape in (
        ("attn_norm", (d,)), ("attn_q", (q, d)), ("attn_k", (kv, d)), ("attn_v", (kv, d)),
        ("attn_output", (d, q)), ("ffn_norm", (d,)), ("ffn_gate", (inner, d)),
        ("ffn_up", (inner, d)), ("ffn_down", (d, inner)),
      ):  # fmt: skip
        yield f"blk.{layer}.{name}.weight", shape
    yield "output_norm.weight", (d,)

  records = {
    name: Record(shape, "F32", rng.standard_normal(shape, np.float32).tobytes())
    for name, shape in shapes()
  }
  backend = tokenizer("gpt-2").backend
  model = json.loads(backend.to_str())["model"]
  tokens = {i: t for t, i in backend.get_vocab(with_added_tokens=True).items()}
  kinds = [3 if i < 3 else 1 if i in tokens else 5 for i in range(config.vocab_size)]
  entries = {
    "general.architecture": value("str", "llama"),
    "llama.block_count": value("u32", config.num_layers),
    "llama.context_length": value("u32", config.max_model_len),
    "llama.embedding_length": value("u32", d),
    "llama.feed_forward_length": value("u32", inner),
    "llama.attention.head_count": value("u32", config.layers[0].attention.num_heads),
    "llama.attention.head_count_kv": value("u32", config.layers[0].attention.num_kv_heads),
    "llama.attention.layer_norm_rms_epsilon": value("f32", config.norm_eps),
    "llama.rope.freq_base": value("f32", config.layers[0].attention.rotary.base),
    "llama.vocab_size": value("u32", config.vocab_size),
    "tokenizer.ggml.model": value("str", "gpt2"),
    "tokenizer.ggml.pre": value("str", "gpt-2"),
    "tokenizer.ggml.tokens": value(
      "list str", [tokens.get(i, f"[PAD{i}]") for i in range(config.vocab_size)]
    ),
    "tokenizer.ggml.token_type": value("list i32", kinds),
    "tokenizer.ggml.merges": value("list str", [" ".join(merge) for merge in model["merges"]]),
    "tokenizer.ggml.bos_token_id": value("u32", 0),
    "tokenizer.ggml.eos_token_id": value("u32", 2),
    "tokenizer.ggml.add_bos_token": value("bool", 0),
    "tokenizer.chat_template": value("str", TEMPLATE),
  }
  return entries, records
