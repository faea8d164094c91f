"""Refusals of requests: an HTTP status with an OpenAI-style error body.

{"error": {"message": got, expected, what to change, "type": ..., "param": ..., "code": ...}}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

INVALID = "invalid_request_error"


class Refusal(Exception):
  """An error that is sent to the client.

  Attributes:
    message: got, expected, what to change.
    status: HTTP status.
    kind: `type` of the error body.
    param: field at fault; None if it is not a field of the body.
    code: machine-readable code; None if there is none.
    retry_seconds: delay after which a retry makes sense; None for no retry.
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
    """The additional response headers."""
    if self.status == 401:
      return {"www-authenticate": "Bearer"}
    return {} if self.retry_seconds is None else {"retry-after": str(self.retry_seconds)}


def refuse(param: str | None, got: object, expected: str, fix: str, **others: Any) -> NoReturn:
  """Raises a `Refusal` that names a field.

  Raises:
    Refusal: always.
  """
  where = "the body" if param is None else param
  raise Refusal(f"{where}: got {got}, expected {expected}; {fix}.", param=param, **others)


def shown(value: Any) -> str:
  """Returns a value's repr for a message, shortened to 80 characters."""
  text = repr(value)
  return text if len(text) <= 80 else f"{text[:77]}..."
