"""SentencePiece tokenizers of GGUF files: the ids of the definition, bytes, refusals."""

from __future__ import annotations

import itertools
import pathlib

import gguf_cases
import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest
import refusals

from seerjax.models import gguf_sentence_pieces, tokenizer as tokenizer_lib

TOKENS, SCORES, KINDS = gguf_cases.sentence_pieces()
PIECES = {text: score for text, score, kind in zip(TOKENS, SCORES, KINDS, strict=True) if kind == 1}
LETTERS = sorted({letter for text in PIECES for letter in text if letter != "▁"})


def loaded(path: pathlib.Path, **entries: bytes | None) -> tokenizer_lib.Tokenizer:
  """Returns the tokenizer of a small file with some entries changed; None leaves one out."""
  found, records = gguf_cases.parts()
  found = gguf_cases.with_sentence_pieces(found) | {
    f"tokenizer.ggml.{name}": content for name, content in entries.items() if content is not None
  }
  left_out = {f"tokenizer.ggml.{name}" for name, content in entries.items() if content is None}
  content = {name: entry for name, entry in found.items() if name not in left_out}
  path.write_bytes(gguf_cases.raw(content, records))
  return tokenizer_lib.load(path)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
  return loaded(tmp_path_factory.mktemp("pieces") / "m.gguf")


def joined(text: str) -> list[int]:
  """Ids of a text without special tokens: the best union of neighbours first, the leftmost."""
  symbols = list(text.replace(" ", "▁"))
  while True:
    unions = [left + right for left, right in itertools.pairwise(symbols)]
    known = [place for place, union in enumerate(unions) if union in PIECES]
    if not known:
      break
    best = max(known, key=lambda place: (PIECES[unions[place]], -place))
    symbols[best : best + 2] = [unions[best]]
  ids = []
  for symbol in symbols:
    if symbol in PIECES:
      ids.append(TOKENS.index(symbol))
    else:
      ids += [TOKENS.index(f"<0x{byte:02X}>") for byte in symbol.encode()]
  return ids


SOME = st.text(st.sampled_from([*LETTERS, " ", "\n", "é", "🙂"]), min_size=1, max_size=40)
ANY = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40)


@hypothesis.given(st.one_of(SOME, ANY))
@hypothesis.settings(max_examples=80)
def test_ids_are_those_of_the_definition(tokenizer, text):
  # User-defined tokens are cut out of the text before anything else.
  hypothesis.assume("  " not in text and "\n\n" not in text)
  assert tokenizer.encode(text) == joined(text)


@hypothesis.given(st.one_of(SOME, ANY))
@hypothesis.settings(max_examples=80)
def test_texts_come_back_also_piece_by_piece(tokenizer, text):
  hypothesis.assume("▁" not in text)
  ids = tokenizer.encode(text)
  assert tokenizer.decode(ids, skip_special_tokens=False) == text
  stream = tokenizer.stream(skip_special_tokens=False)
  assert "".join(stream.push(i) for i in ids) + stream.finish() == text


def test_special_and_user_defined_tokens_are_cut_out_first(tokenizer):
  at = TOKENS.index
  assert tokenizer.encode("<bos>a<eos>") == [at("<bos>"), *joined("a"), at("<eos>")]
  assert tokenizer.encode("a   b") == [*joined("a"), at("  "), *joined(" b")]
  assert tokenizer.encode("\n\n\n") == [at("\n\n"), at("<0x0A>")]
  assert tokenizer.encode("<0x0A>") == joined("<0x0A>")  # A text, not a byte.
  as_text = tokenizer.encode("<bos>", special_tokens_as_text=True)
  assert as_text == joined("<bos>") and at("<bos>") not in as_text


def test_a_text_begins_with_bos_unless_the_file_says_no(tokenizer, tmp_path):
  assert tokenizer.encode("a", add_special_tokens=True) == [TOKENS.index("<bos>"), *joined("a")]
  without = loaded(tmp_path / "m.gguf", add_bos_token=gguf_cases.value("bool", 0))
  assert without.encode("a", add_special_tokens=True) == joined("a")
  assert tokenizer.eos_ids == (TOKENS.index("<eos>"),)
  assert tokenizer.special_tokens["unk_token"] == "<unk>"


def test_a_turn_ends_by_the_text_of_its_token(tmp_path):
  tokens = [*TOKENS]
  tokens[0] = "<end_of_turn>"
  changed = loaded(tmp_path / "m.gguf", tokens=gguf_cases.value("list str", tokens))
  assert changed.eos_ids == (1, 0)


def test_merges_are_in_the_order_of_scores():
  tokens = {"a": 0, "b": 1, "c": 2, "ab": 3, "bc": 4, "abc": 5}
  scores = np.array([-4.0, -5.0, -6.0, -2.0, -1.0, -3.0])
  found = gguf_sentence_pieces.merges(tokens, scores)
  assert found == [("b", "c"), ("a", "b"), ("a", "bc"), ("ab", "c")]


NO_BYTE = [kind if text != "<0x41>" else 1 for text, kind in zip(TOKENS, KINDS, strict=True)]


@refusals.table(
  (NotImplementedError, lambda at: loaded(at, add_space_prefix=None),
   "m.gguf: tokenizer.ggml.add_space_prefix: got nothing, expected false; a space before"),
  (lambda at: loaded(at, scores=None),
   "m.gguf: tokenizer.ggml.scores: got nothing, expected 400 numbers, one per token"),
  (lambda at: loaded(at, scores=gguf_cases.value("list f32", [float("nan")] * 400)),
   "m.gguf: tokenizer.ggml.scores: got ", "expected 400 numbers"),
  (lambda at: loaded(at, token_type=gguf_cases.value("list i32", NO_BYTE)),
   "m.gguf: tokenizer.ggml.tokens: got no token <0x41> of the kind 6, expected one for every byte"),
  (lambda at: loaded(at, token_type=gguf_cases.value("list i32", [7] * 400)),
   "tokenizer.ggml.token_type: got the kinds [7], expected 1 to 6"),
)  # fmt: skip
def test_what_is_missing_is_refused(row, tmp_path):
  refusals.check(row, tmp_path / "m.gguf")
