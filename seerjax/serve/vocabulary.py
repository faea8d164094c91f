"""Bytes and text of single tokens, and their character offsets in a response."""

from __future__ import annotations

import codecs
import functools
import re

from seerjax.models.tokenizer import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_letters() -> dict[str, int]:
  """Returns the byte that each letter of a byte-level vocabulary stands for.

  Source: GPT-2's encoder, https://github.com/openai/gpt-2/blob/master/src/encoder.py.
  """
  plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
  letters = {chr(byte): byte for byte in plain}
  others = [byte for byte in range(256) if byte not in plain]
  return letters | {chr(256 + place): byte for place, byte in enumerate(others)}


class Vocabulary:
  """The tokens of one tokenizer.

  Attributes:
    tokenizer: the tokenizer.
    bytes_of: the bytes of a token.
  """

  def __init__(self, tokenizer: Tokenizer):
    self.tokenizer = tokenizer
    self._backend = tokenizer.backend
    self._added = tokenizer.backend.get_added_tokens_decoder()
    self._letters = _byte_letters() if "ByteLevel" in str(self._backend.decoder) else None
    self.bytes_of = functools.lru_cache(maxsize=1 << 16)(self._bytes_of)

  def _bytes_of(self, token: int) -> bytes:
    """Returns a token's bytes; b"" for an id beyond the vocabulary (padding of the model)."""
    if token in self._added:
      return self._added[token].content.encode()
    piece = self._backend.id_to_token(token)
    if piece is None:
      return b""
    if self._letters is not None and all(letter in self._letters for letter in piece):
      return bytes(self._letters[letter] for letter in piece)
    byte = _BYTE.fullmatch(piece)
    return bytes([int(byte[1], 16)]) if byte else piece.replace("\u2581", " ").encode()

  def is_special(self, token: int) -> bool:
    """Returns whether decoding with `skip_special_tokens` drops the token."""
    return token in self._added and self._added[token].special

  def text_of(self, token: int) -> str:
    """Returns a token's text, or `bytes:` and its bytes if they are not valid UTF-8."""
    found = self.bytes_of(token)
    try:
      return found.decode()
    except UnicodeDecodeError:
      return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)


class Offsets:
  """Computes the character offset of each token in a text.

  A token that continues a multi-byte character has the offset of that character. Invalid bytes
  count as decoding replaces them: one character for each maximal prefix of a valid sequence.
  """

  def __init__(self, vocabulary: Vocabulary, *, start: int = 0, skips_special: bool = True):
    """Initialises the offsets.

    Args:
      vocabulary: vocabulary of the tokens.
      start: offset at which the text starts.
      skips_special: whether the text omits special tokens.
    """
    self._vocabulary = vocabulary
    self._start = start
    self._skips_special = skips_special
    self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
    self._place: int | None = None  # Complete characters so far; None before the first token.

  def of(self, token: int) -> int:
    """Returns the offset of the next token."""
    data = self._vocabulary.bytes_of(token)
    if self._skips_special and self._vocabulary.is_special(token):
      data = b""
    if self._place is None:
      # Decoders such as Llama 2's drop the first token's leading space.
      text = self._vocabulary.tokenizer.decode([token], skip_special_tokens=self._skips_special)
      if data.startswith(b" ") and not text.startswith(" "):
        data = data[1:]
      self._place = self._start
    first, rest = data[:1], data[1:]
    begins = self._place + bool(self._pending)
    before, text = self._place, self._decoder.decode(first)
    if first and 0x80 <= first[0] <= 0xBF and len(text) <= 1:
      begins = before  # The token continues the previous character.
    self._place += len(text) + len(self._decoder.decode(rest))
    return begins

  @property
  def _pending(self) -> bytes:
    return self._decoder.getstate()[0]
