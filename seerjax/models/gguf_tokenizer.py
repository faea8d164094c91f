"""Converts the tokenizer of a GGUF file to the files of a Hugging Face directory, and back.

    tokenizer.ggml.*, tokenizer.chat_template  -- files -->  tokenizer.json, tokenizer_config.json,
                                                             generation_config.json
    a tokenizer  -- metadata -->  tokenizer.ggml.*, tokenizer.chat_template

Byte-level byte-pair encoding is read and written. Such a file has the name of a llama.cpp
pre-tokenizer, which splits a text before it is encoded; each name here maps to the Hugging Face
pre-tokenizer from which llama.cpp's was derived. SentencePiece vocabularies with scores are read.
"""

from __future__ import annotations

from collections.abc import Mapping
import json
import math
import pathlib
import types
from typing import Any, NamedTuple

import numpy as np
import tokenizers
import tokenizers.decoders
import tokenizers.models
import tokenizers.normalizers
import tokenizers.pre_tokenizers
import tokenizers.processors

from seerjax import fields as fields_lib
from seerjax.models import gguf_file, gguf_sentence_pieces

PREFIX = "tokenizer.ggml."
MODEL, PRE = PREFIX + "model", PREFIX + "pre"
TOKENS, TYPES, MERGES = PREFIX + "tokens", PREFIX + "token_type", PREFIX + "merges"
ADD_BOS, ADD_EOS = PREFIX + "add_bos_token", PREFIX + "add_eos_token"
TEMPLATE = "tokenizer.chat_template"
WHOLE = "tokenizer.huggingface.json"
SCORES, ADD_SPACE = PREFIX + "scores", PREFIX + "add_space_prefix"
BYTE_PAIRS, SENTENCE_PIECES = "gpt2", "llama"
# Kinds of tokens.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
ROLES = {
  "bos_token": PREFIX + "bos_token_id",
  "eos_token": PREFIX + "eos_token_id",
  "unk_token": PREFIX + "unknown_token_id",
  "pad_token": PREFIX + "padding_token_id",
}
# Tokens that end a generation: end of text, of turn, of message.
EOT = PREFIX + "eot_token_id"
ENDS = (ROLES["eos_token"], EOT, PREFIX + "eom_token_id")
# Default sampling settings: field of generation_config.json -> (GGUF key, type).
SAMPLING: Mapping[str, tuple[str, type]] = {
  "temperature": ("general.sampling.temp", float),
  "top_k": ("general.sampling.top_k", int),
  "top_p": ("general.sampling.top_p", float),
  "min_p": ("general.sampling.min_p", float),
  "repetition_penalty": ("general.sampling.penalty_repeat", float),
}
# Control tokens that end a generation in a file without `EOT`; the same as llama.cpp's.
END_TEXTS = (
  "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>",
  "<｜end▁of▁sentence｜>", "<end_of_turn>",
)  # fmt: skip

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


class Cut(NamedTuple):
  """Rules that split a text before it is encoded.

  Attributes:
    patterns: regular expressions, applied in order; each match is a piece.
    digits: whether each digit is a piece first.
    by_words: whether GPT-2's pattern finally splits the pieces.
    composes: whether characters are composed first (NFC).
    ignores_merges: whether a piece that is a token becomes that token, regardless of the merges.
    adds_bos: whether a text begins with the bos token if the file does not specify it.
  """

  patterns: tuple[str, ...] = ()
  digits: bool = False
  by_words: bool = False
  composes: bool = False
  ignores_merges: bool = False
  adds_bos: bool = False


_GPT2 = Cut(by_words=True)
_SMOLLM = Cut(digits=True, by_words=True)
_QWEN2 = Cut(patterns=(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}",), composes=True)
_LLAMA3 = Cut(
  patterns=(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}",),
  ignores_merges=True,
  adds_bos=True,
)
_DEEPSEEK_CODER = Cut(
  patterns=("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+"), digits=True
)
PRE_TOKENIZERS: Mapping[str, Cut] = {
  "gpt-2": _GPT2,
  "smollm": _SMOLLM,
  "qwen2": _QWEN2,
  "deepseek-r1-qwen": _QWEN2,
  "deepseek-coder": _DEEPSEEK_CODER,
  "llama-bpe": _LLAMA3,
  "llama3": _LLAMA3,
  "llama-v3": _LLAMA3,
}


def files(path: pathlib.Path) -> dict[str, bytes]:
  """Returns the Hugging Face tokenizer files, by name, that a GGUF file describes.

  Raises:
    FileNotFoundError: if there is no such file.
    ImportError: if the `gguf` package is not installed.
    NotImplementedError: for an unsupported tokenizer or pre-tokenizer.
    ValueError: naming the key that is missing or wrong.
  """
  found = _Metadata(path, gguf_file.File(path).metadata)
  tokens, kinds = _tokens(found)
  roles = {
    role: tokens[token_id]
    for role, key in ROLES.items()
    if (token_id := found.token(key, tokens)) is not None
  }
  ends = [found.token(key, tokens) for key in ENDS]
  if EOT not in found.values:
    ends += [i for i, t in enumerate(tokens) if kinds[i] == CONTROL and t in END_TEXTS]
  eos_ids = list(dict.fromkeys(i for i in ends if i is not None))
  backend = _backend(found, tokens, kinds, roles)
  config = {
    **roles,
    "clean_up_tokenization_spaces": False,
    "tokenizer_class": "PreTrainedTokenizerFast",
  }
  if (template := found.text(TEMPLATE)) is not None:
    config["chat_template"] = template
  generation: dict[str, Any] = {"eos_token_id": eos_ids} if eos_ids else {}
  generation |= {
    field: kind(value)
    for field, (key, kind) in SAMPLING.items()
    if (value := found.number(key)) is not None
  }
  return {
    "tokenizer.json": backend.to_str(pretty=True).encode(),
    "tokenizer_config.json": _json(config),
    "generation_config.json": _json(generation),
  }


def metadata(
  backend: tokenizers.Tokenizer,
  *,
  vocab_size: int,
  chat_template: str,
  special_tokens: Mapping[str, str],
  eos_ids: tuple[int, ...],
  generation: Mapping[str, Any] = types.MappingProxyType({}),
  pre: str = "",
) -> dict[str, Any]:
  """Returns a tokenizer as the metadata of a GGUF file.

  Args:
    backend: the `tokenizers` object.
    vocab_size: rows of the model's embedding; ids without a token become unused ones.
    chat_template: jinja2 source, "" for none.
    special_tokens: special tokens by role.
    eos_ids: ids that end a generation.
    generation: generation_config.json, with the default sampling settings.
    pre: the pre-tokenizer, of `PRE_TOKENIZERS`, for llama.cpp to use if none of its own splits
      texts like this tokenizer. Such a file also contains the tokenizer.json.

  Raises:
    NotImplementedError: for a tokenizer that GGUF cannot describe, or that has no llama.cpp
      pre-tokenizer while `pre` is empty.
    ValueError: for an unknown pre-tokenizer, or more tokens than the model has rows.
  """
  written = json.loads(backend.to_str())
  _refuse_other_kinds(written)
  cut = _cut(written)
  same = [name for name, known in PRE_TOKENIZERS.items() if known._replace(adds_bos=False) == cut]
  if pre and pre not in PRE_TOKENIZERS:
    raise ValueError(
      f"GGUF: pre: got {pre!r}, expected one of {tuple(PRE_TOKENIZERS)}; pass the closest one."
    )
  if not pre and not same:
    raise NotImplementedError(
      f"GGUF: pre_tokenizer of tokenizer.json: got {fields_lib.shown(written['pre_tokenizer'])},"
      f" expected one that llama.cpp has, of {tuple(PRE_TOKENIZERS)}; pass the closest one as pre=,"
      " which llama.cpp then uses, or write the model without a tokenizer."
    )
  texts = {token_id: text for text, token_id in backend.get_vocab(with_added_tokens=True).items()}
  if texts and max(texts) >= vocab_size:
    raise ValueError(
      f"GGUF: tokenizer.json: got tokens up to id {max(texts)}, expected ids below the"
      f" {vocab_size} rows of the embedding; the tokenizer is another model's."
    )
  kinds = dict.fromkeys(range(vocab_size), UNUSED) | dict.fromkeys(texts, NORMAL)
  for token_id, token in backend.get_added_tokens_decoder().items():
    if token.lstrip or token.rstrip or token.single_word:
      raise NotImplementedError(
        f"GGUF: added_tokens of tokenizer.json: got {token.content!r} with lstrip, rstrip or"
        " single_word, expected none of them; GGUF cannot store them."
      )
    kinds[token_id] = CONTROL if token.special else USER_DEFINED
  around = _around(backend, special_tokens)
  roles = {role: backend.token_to_id(text) for role, text in special_tokens.items()} | around
  ends = list(dict.fromkeys(i for i in (roles.get("eos_token"), *eos_ids) if i is not None))
  if len(ends) > len(ENDS):
    raise NotImplementedError(
      f"GGUF: eos_token_id: got {ends}, expected at most {len(ENDS)} that end a generation; leave"
      " out some in generation_config.json."
    )
  # Every key is set: for a file without one, llama.cpp guesses end tokens by their texts.
  ends += ends[:1] * (len(ENDS) - len(ends))
  if generation.get("do_sample") is False:
    generation = {**generation, "temperature": 0.0}
  name = same[0] if same else pre
  merges = written["model"]["merges"]
  return {
    MODEL: BYTE_PAIRS,
    PRE: name,
    TOKENS: [texts.get(i, f"[PAD{i}]") for i in range(vocab_size)],
    TYPES: [kinds[i] for i in range(vocab_size)],
    MERGES: [merge if isinstance(merge, str) else " ".join(merge) for merge in merges],
    **{key: roles[role] for role, key in ROLES.items() if roles.get(role) is not None},
    **dict(zip(ENDS, ends)),
    ADD_BOS: "bos_token" in around,
    ADD_EOS: "eos_token" in around,
    **{
      key: kind(generation[field])
      for field, (key, kind) in SAMPLING.items()
      if generation.get(field) is not None
    },
    **({TEMPLATE: chat_template} if chat_template else {}),
    **({} if name in same else {WHOLE: json.dumps(written, ensure_ascii=False)}),
  }


def _cut(written: Mapping[str, Any]) -> Cut | None:
  """Returns how a tokenizer.json splits texts (`adds_bos` aside); None if not a `Cut`."""
  steps = _flat(written["pre_tokenizer"], "pretokenizers")
  normalizers = _flat(written["normalizer"], "normalizers")
  if not steps or normalizers not in ([], [{"type": "NFC"}]):
    return None
  level = steps.pop()
  if level["type"] != "ByteLevel" or level["add_prefix_space"]:
    return None
  patterns, digits = [], False
  for step in steps:
    if step["type"] == "Digits" and step["individual_digits"] and not digits:
      digits = True
    elif (
      step["type"] == "Split"
      and step["behavior"] == "Isolated"
      and not step["invert"]
      and not digits
      and "Regex" in step["pattern"]
    ):
      patterns.append(step["pattern"]["Regex"])
    else:
      return None
  return Cut(
    patterns=tuple(patterns),
    digits=digits,
    by_words=level["use_regex"],
    composes=bool(normalizers),
    ignores_merges=bool(written["model"].get("ignore_merges")),
  )


def _refuse_other_kinds(written: Mapping[str, Any]) -> None:
  """Refuses a tokenizer.json that is not byte-level byte-pair encoding, naming the field."""
  model, decoder = written["model"], (written.get("decoder") or {}).get("type")
  odd = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
  for field, got, expected in (
    ("model.type", model["type"], "BPE"),
    ("decoder.type", decoder, "ByteLevel"),
    *((f"model.{field}", model.get(field) or None, None) for field in odd),
  ):
    if got != expected:
      raise NotImplementedError(
        f"GGUF: {field} of tokenizer.json: got {got!r}, expected {expected!r}; write the model"
        " without a tokenizer, only byte-level byte-pair encoding is implemented."
      )


def _around(backend: tokenizers.Tokenizer, special_tokens: Mapping[str, str]) -> dict[str, int]:
  """Returns the tokens that a tokenizer adds before and after a text, by role."""
  plain = backend.encode("a", add_special_tokens=False).ids
  whole = backend.encode("a", add_special_tokens=True).ids
  start = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), 0)
  before, behind = whole[:start], whole[start + len(plain) :]
  if len(before) > 1 or len(behind) > 1 or before + plain + behind != whole:
    raise NotImplementedError(
      f"GGUF: post_processor of tokenizer.json: got {whole} for a text with ids {plain}, expected"
      " at most a bos token before them and an eos token after them; write the model without a"
      " tokenizer."
    )
  around: dict[str, int] = dict(zip(("bos_token",), before))
  return around | dict(zip(("eos_token",), behind))


class _Metadata:
  """The metadata of a file, with checked access; errors name the key."""

  def __init__(self, path: pathlib.Path, values: Mapping[str, Any]):
    self.path, self.values = path, values

  def refuse(self, key: str, expected: str, fix: str, kind: type = ValueError) -> Exception:
    got = fields_lib.shown(self.values[key]) if key in self.values else "nothing"
    return kind(f"{self.path}: {key}: got {got}, expected {expected}; {fix}.")

  def text(self, key: str) -> str | None:
    value = self.values.get(key)
    if value is not None and not isinstance(value, str):
      raise self.refuse(key, "text", "download it again")
    return value

  def flag(self, key: str, default: bool) -> bool:
    value = self.values.get(key, default)
    if not isinstance(value, bool):
      raise self.refuse(key, "true or false", "download it again")
    return value

  def number(self, key: str) -> float | None:
    value = self.values.get(key)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (is_number and math.isfinite(value)):
      raise self.refuse(key, "a number", "download it again")
    return value

  def token(self, key: str, tokens: list[str]) -> int | None:
    """Returns the id at a key, None if it is missing."""
    value = self.values.get(key)
    if value is None:
      return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < len(tokens):
      raise self.refuse(key, f"the id of one of {len(tokens)} tokens", "download it again")
    return value

  def texts(self, key: str) -> list[str]:
    value = self.values.get(key)
    if not isinstance(value, list):
      raise self.refuse(key, "a list of texts", "choose a file with a tokenizer")
    return value


def _tokens(found: _Metadata) -> tuple[list[str], list[int]]:
  """Returns the texts and kinds of all tokens."""
  model = found.text(MODEL)
  if model not in (BYTE_PAIRS, SENTENCE_PIECES):
    raise found.refuse(
      MODEL,
      f"{BYTE_PAIRS!r}, byte-level byte-pair encoding, or {SENTENCE_PIECES!r}, SentencePiece",
      "other tokenizers are not implemented",
      NotImplementedError,
    )
  tokens = found.texts(TOKENS)
  kinds = found.values.get(TYPES, np.full(len(tokens), NORMAL))
  if not isinstance(kinds, np.ndarray) or kinds.shape != (len(tokens),):
    raise found.refuse(TYPES, f"{len(tokens)} numbers, one per token", "download it again")
  last = BYTE if model == SENTENCE_PIECES else UNUSED
  if odd := set(kinds.tolist()) - {*range(NORMAL, last + 1)}:
    raise ValueError(
      f"{found.path}: {TYPES}: got the kinds {sorted(odd)}, expected 1 to {last}; download it"
      " again."
    )
  return tokens, kinds.tolist()


def _backend(
  found: _Metadata, tokens: list[str], kinds: list[int], roles: Mapping[str, str]
) -> tokenizers.Tokenizer:
  # Unused tokens pad the embedding; no text is encoded as one of them.
  used = [(text, i) for i, (text, kind) in enumerate(zip(tokens, kinds)) if kind != UNUSED]
  vocab = dict(used)
  if len(vocab) < len(used):
    again = next(text for text, token_id in used if vocab[text] != token_id)
    raise ValueError(
      f"{found.path}: {TOKENS}: got {again!r} twice, expected each token once; download it again."
    )
  if (whole := found.text(WHOLE)) is not None:
    return _whole(found, whole, vocab)
  if found.text(MODEL) == SENTENCE_PIECES:
    backend, level, adds_bos = _sentence_pieces(found, vocab, kinds, roles), None, True
    special = (CONTROL, UNKNOWN)
  else:
    backend, adds_bos = _byte_pairs(found, vocab)
    level, special = tokenizers.processors.ByteLevel(trim_offsets=False), (CONTROL,)
  for of_kind, add in (
    (special, backend.add_special_tokens),
    ((USER_DEFINED,), backend.add_tokens),
  ):
    chosen = [text for text, token_id in used if kinds[token_id] in of_kind]
    is_special = of_kind == special
    add([tokenizers.AddedToken(t, special=is_special, normalized=False) for t in chosen])
  if (processor := _post_processor(found, adds_bos, level, vocab, roles)) is not None:
    backend.post_processor = processor
  return backend


def _byte_pairs(found: _Metadata, vocab: dict[str, int]) -> tuple[tokenizers.Tokenizer, bool]:
  """Returns a tokenizer of byte-level pairs, and whether its pre-tokenizer adds a bos token."""
  name = found.text(PRE)
  if name is None or name not in PRE_TOKENIZERS:
    raise found.refuse(
      PRE,
      f"one of {tuple(PRE_TOKENIZERS)}",
      "other pre-tokenizers are not implemented: choose another file of this model",
      NotImplementedError,
    )
  cut = PRE_TOKENIZERS[name]
  merges = _merges(found, vocab)
  backend = tokenizers.Tokenizer(
    tokenizers.models.BPE(vocab=vocab, merges=merges, ignore_merges=cut.ignores_merges)
  )
  if cut.composes:
    backend.normalizer = tokenizers.normalizers.NFC()
  backend.pre_tokenizer = _pre_tokenizer(cut)
  backend.decoder = tokenizers.decoders.ByteLevel()
  return backend, cut.adds_bos


def _sentence_pieces(
  found: _Metadata, vocab: Mapping[str, int], kinds: list[int], roles: Mapping[str, str]
) -> tokenizers.Tokenizer:
  """Returns a tokenizer of SentencePiece's tokens, by their scores."""
  if found.flag(ADD_SPACE, True):
    raise found.refuse(
      ADD_SPACE,
      "false",
      "a space before every text is not implemented: choose another file of this model",
      NotImplementedError,
    )
  scores = found.values.get(SCORES)
  if (
    not isinstance(scores, np.ndarray)
    or scores.shape != (len(kinds),)
    or not np.isfinite(scores).all()
  ):
    raise found.refuse(SCORES, f"{len(kinds)} numbers, one per token", "download it again")
  for byte in range(256):
    text = f"<0x{byte:02X}>"
    if text not in vocab or kinds[vocab[text]] != BYTE:
      raise ValueError(
        f"{found.path}: {TOKENS}: got no token {text} of the kind {BYTE}, expected one for every"
        " byte; download it again."
      )
  normal = {text: i for text, i in vocab.items() if kinds[i] == NORMAL}
  return gguf_sentence_pieces.backend(vocab, normal, scores, roles.get("unk_token"))


def _whole(found: _Metadata, whole: str, vocab: Mapping[str, int]) -> tokenizers.Tokenizer:
  """Returns the tokenizer that a file contains in Hugging Face's format, next to llama.cpp's."""
  try:
    backend = tokenizers.Tokenizer.from_str(whole)
  except Exception as error:  # `tokenizers` raises bare Exception, and nothing narrower.
    raise ValueError(
      f"{found.path}: {WHOLE}: got text that `tokenizers` cannot read ({error}), expected the JSON"
      " of a tokenizer; download it again."
    ) from error
  if backend.get_vocab(with_added_tokens=True) != vocab:
    raise ValueError(
      f"{found.path}: {WHOLE}: got tokens that differ from {TOKENS}, expected the same; download it"
      " again."
    )
  return backend


def _merges(found: _Metadata, vocab: Mapping[str, int]) -> list[tuple[str, str]]:
  merges = []
  for number, merge in enumerate(found.texts(MERGES)):
    first, space, second = merge.partition(" ")
    if not space or first not in vocab or second not in vocab or first + second not in vocab:
      raise ValueError(
        f"{found.path}: {MERGES}[{number}]: got {merge!r}, expected two tokens, separated by a"
        " space, that form a third one; download it again."
      )
    merges.append((first, second))
  return merges


def _pre_tokenizer(cut: Cut) -> Any:
  steps: list[Any] = [
    tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")
    for pattern in cut.patterns
  ]
  if cut.digits:
    steps.append(tokenizers.pre_tokenizers.Digits(individual_digits=True))
  steps.append(tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut.by_words))
  return tokenizers.pre_tokenizers.Sequence(steps)


def _post_processor(
  found: _Metadata, adds_bos: bool, level: Any, vocab: Mapping[str, int], roles: Mapping[str, str]
) -> Any:
  """Returns the post-processor that adds the bos and eos tokens for which the file asks.

  Args:
    found: the metadata.
    adds_bos: whether a text begins with the bos token if the file does not specify it.
    level: the post-processor that comes first; None for none.
    vocab: ids by text.
    roles: special tokens by role.
  """
  around = {
    "bos_token": found.flag(ADD_BOS, adds_bos and "bos_token" in roles),
    "eos_token": found.flag(ADD_EOS, False),
  }
  for role, key in (("bos_token", ADD_BOS), ("eos_token", ADD_EOS)):
    if around[role] and role not in roles:
      raise found.refuse(key, f"false without {ROLES[role]}", "download it again")
  added = {role: roles[role] for role, is_added in around.items() if is_added}
  if not added:
    return level
  template = [added.get("bos_token"), "$A", added.get("eos_token")]
  adding = tokenizers.processors.TemplateProcessing(
    single=[part for part in template if part],
    pair=None,
    special_tokens=[(token, vocab[token]) for token in dict.fromkeys(added.values())],
  )
  return tokenizers.processors.Sequence([level, adding]) if level is not None else adding


def _flat(step: dict[str, Any] | None, inner: str) -> list[dict[str, Any]]:
  """Returns the steps of a part of tokenizer.json, whether a sequence or a single step."""
  if step is None:
    return []
  return list(step[inner]) if step["type"] == "Sequence" else [step]


def _json(value: Mapping[str, Any]) -> bytes:
  return (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()
