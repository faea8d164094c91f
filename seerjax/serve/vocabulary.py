"""What each token is: its bytes, and the text by which an answer names it."""

from __future__ import annotations

import functools
import re

from seerjax.models.tokenizer import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_letters() -> dict[str, int]:
  """The letters by which byte-level vocabularies write bytes.

  Source: GPT-2's encoder, https://github.com/openai/gpt-2/blob/master/src/encoder.py.
  """
  plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
  letters = {chr(byte): byte for byte in plain}
  others = [byte for byte in range(256) if byte not in plain]
  return letters | {chr(256 + place): byte for place, byte in enumerate(others)}


class Vocabulary:
  """The tokens of one tokenizer."""

  def __init__(self, tokenizer: Tokenizer):
    self._backend = tokenizer.backend
    self._added = tokenizer.backend.get_added_tokens_decoder()
    self._letters = _byte_letters() if "ByteLevel" in str(self._backend.decoder) else None
    self.bytes_of = functools.lru_cache(maxsize=1 << 16)(self._bytes_of)

  def _bytes_of(self, token: int) -> bytes:
    """Returns a token's bytes; none for an id beyond the vocabulary (a model's padding)."""
    if token in self._added:
      return self._added[token].content.encode()
    piece = self._backend.id_to_token(token)
    if piece is None:
      return b""
    if self._letters is not None and all(letter in self._letters for letter in piece):
      return bytes(self._letters[letter] for letter in piece)
    byte = _BYTE.fullmatch(piece)
    return bytes([int(byte[1], 16)]) if byte else piece.replace("\u2581", " ").encode()

  def text_of(self, token: int) -> str:
    """Returns a token's text; `bytes:` and its bytes where these are no whole characters."""
    found = self.bytes_of(token)
    try:
      return found.decode()
    except UnicodeDecodeError:
      return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)
