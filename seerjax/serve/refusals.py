"""What a client gets in an answer's place: a status and an OpenAI-style error body.

    {"error": {"message": got, expected, what to change, "type": ..., "param": ..., "code": ...}}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

INVALID = "invalid_request_error"


class Refusal(Exception):
  """A request that is not answered, and why.

  Attributes:
    message: got, expected, what to change.
    status: of HTTP.
    kind: `type` of the body.
    param: the field, None if it is none of the body's.
    code: a word for programs, None if there is none.
    retry_seconds: when asking again makes sense, None if it does not.
  """

  def __init__(
    self,
    message: str,
    *,
    status: int = 400,
    kind: str = INVALID,
    param: str | None = None,
    code: str | None = None,
    retry_seconds: int | None = None,
  ):
    super().__init__(message)
    self.message = message
    self.status = status
    self.kind = kind
    self.param = param
    self.code = code
    self.retry_seconds = retry_seconds

  @property
  def body(self) -> dict[str, Any]:
    """The JSON body."""
    return {
      "error": {
        "message": self.message, "type": self.kind, "param": self.param, "code": self.code,
      }
    }  # fmt: skip

  @property
  def headers(self) -> Mapping[str, str]:
    """Headers beside it."""
    if self.status == 401:
      return {"www-authenticate": "Bearer"}
    return {} if self.retry_seconds is None else {"retry-after": str(self.retry_seconds)}


def refuse(param: str | None, got: object, expected: str, fix: str, **others: Any) -> NoReturn:
  """Refuses a field; see `Refusal`.

  Raises:
    Refusal: always.
  """
  where = "the body" if param is None else param
  raise Refusal(f"{where}: got {got}, expected {expected}; {fix}.", param=param, **others)


def shown(value: Any) -> str:
  """Returns a value as a message quotes it: short, whatever a client sent."""
  text = repr(value)
  return text if len(text) <= 80 else f"{text[:77]}..."
