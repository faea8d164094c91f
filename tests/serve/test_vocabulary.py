"""The text offsets at which tokens start."""

from __future__ import annotations

import pytest
import tokenizers
from tokenizers import decoders, models
import word_engine

from seerjax.models.tokenizer import Tokenizer
from seerjax.serve.vocabulary import Offsets, Vocabulary

# Like Llama 2's: a space is its own letter, a lone byte is a token, a first space gives no text.
PIECES = {"<unk>": 0, "\u2581one": 1, "\u2581two": 2, "s": 3} | {
  f"<0x{byte:02X}>": 4 + byte for byte in range(256)
}
BYTES_OF = 4
LLAMA = tokenizers.Tokenizer(models.BPE(PIECES, [], unk_token="<unk>", byte_fallback=True))
LLAMA.decoder = decoders.Sequence([
  decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
  decoders.Strip(" ", 1, 0),
])  # fmt: skip

EURO = [BYTES_OF + byte for byte in "\u20ac".encode()]


def ids(text: str) -> list[int]:
  return word_engine.TOKENIZER.encode(text)


def places(tokenizer: Tokenizer, tokens, **others) -> list[int]:
  offsets = Offsets(Vocabulary(tokenizer), **others)
  return [offsets.of(token) for token in tokens]


@pytest.mark.parametrize(
  "text",
  [
    "How many?",
    "\u20ac\u20ac 5",
    "na\u00efve \U0001f600!",
    "\u65e5\u672c\u8a9e and \u00df",
    "a\ufffdb",
    "\n\n ",
  ],
)
def test_every_character_belongs_to_the_token_that_begins_it(text: str):
  tokenizer = word_engine.TOKENIZER
  tokens = ids(text)
  assert tokenizer.decode(tokens) == text
  found = places(tokenizer, tokens)
  # Counted in bytes: where a token's first byte is, among the characters' first bytes.
  begins, place = [], 0
  for token in tokens:
    begins.append(place)
    place += len(Vocabulary(tokenizer).bytes_of(token))
  characters = [len(text[:end].encode()) for end in range(1, len(text) + 1)]
  assert found == [sum(end <= begin for end in characters) for begin in begins]


def test_a_text_begins_where_it_is_told_and_special_tokens_have_none():
  tokenizer = word_engine.TOKENIZER
  (end, *_), one = tokenizer.eos_ids, ids("How")
  name = tokenizer.backend.id_to_token(end)
  assert places(tokenizer, [*one, end, *one], start=10) == [
    *places(tokenizer, one, start=10), 10 + 3, *places(tokenizer, one, start=13)
  ]  # fmt: skip
  shown = places(tokenizer, [*one, end, *one], skips_special=False)
  assert shown[-len(one)] == 3 + len(name)


def test_bytes_that_are_no_character_count_as_they_are_replaced():
  tokenizer = word_engine.TOKENIZER
  bytes_of = Vocabulary(tokenizer).bytes_of
  letters = {bytes_of(token): token for token in range(tokenizer.vocab_size)}
  (a,), (b,) = ids("a"), ids("b")
  broken = [letters[bytes([byte])] for byte in (0xE2, 0xE2, 0x82, 0xF0, 0x80)]
  tokens = [broken[0], a, *broken[1:], b]
  text = tokenizer.decode(tokens)
  assert text == b"\xe2a\xe2\x82\xf0\x80b".decode(errors="replace")
  assert places(tokenizer, tokens) == [0, 1, 2, 2, 3, 4, 5]
  assert text.index("a") == 1 and text.index("b") == 5


@pytest.mark.parametrize(
  "tokens, expected",
  [
    ([1, 2, 3], [0, 3, 7]),
    ([*EURO, 2], [0, 0, 0, 1]),
    ([1, *EURO, *EURO, 3], [0, 3, 3, 3, 4, 4, 4, 5]),
  ],
)
def test_a_first_space_that_decoding_takes_away_counts_for_nothing(tokens, expected):
  tokenizer = Tokenizer(backend=LLAMA)
  assert places(tokenizer, tokens) == expected
  assert len(tokenizer.decode(tokens)) > expected[-1]
