"""Tables of refusals: each row is a call and pieces of the message that refuses it."""

from __future__ import annotations

from typing import Any

import pytest


def table(*rows: tuple[Any, ...]) -> pytest.MarkDecorator:
  """Parametrises a test by rows `(call, *pieces)`, or `(error, call, *pieces)` with its type."""
  return pytest.mark.parametrize("row", rows, ids=[row[-1] for row in rows])


def check(row: tuple[Any, ...], *arguments: Any) -> None:
  """Checks that the row's call raises its error, a ValueError if unnamed, with its pieces."""
  is_named = isinstance(row[0], type) and issubclass(row[0], Exception)
  error, call, *pieces = row if is_named else (ValueError, *row)
  with pytest.raises(error) as refusal:
    call(*arguments)
  require(str(refusal.value), pieces)


def require(message: str, pieces: list[str]) -> None:
  """Checks that the message contains the pieces, one after the other."""
  place = 0
  for piece in pieces:
    assert piece in message[place:], f"got {message!r}, expected {piece!r} in {message[place:]!r}"
    place = message.index(piece, place) + len(piece)
