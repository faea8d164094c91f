"""Authorisation: which client sent a request, by its token."""

from __future__ import annotations

import hmac

from starlette.requests import Request

from seerjax.serve.config import ServeConfig
from seerjax.serve.refusals import Refusal


def namespace_of(request: Request, config: ServeConfig) -> str:
  """Returns whose a request is: a tenant's name, "" with the server's token or where it has none.

  Who sends no token of these is refused, in one way whatever is wrong with it.

  Raises:
    Refusal: 401.
  """
  if not config.token:
    return ""
  scheme, _, sent = request.headers.get("authorization", "").partition(" ")
  tokens = {config.token: "", **config.tenants}
  # All are compared, always, and in constant time.
  found = [
    name
    for token, name in tokens.items()
    if hmac.compare_digest(sent.strip().encode(), token.encode())
  ]
  if not (found and scheme.lower() == "bearer"):
    raise Refusal(
      "authorization: got none that is valid, expected 'Bearer TOKEN' with the server's token; send"
      " it as the API key.",
      status=401,
      kind="authentication_error",
      code="invalid_api_key",
    )
  return found[0]


def require_token(request: Request, config: ServeConfig) -> None:
  """Refuses who does not send the server's own token.

  Raises:
    Refusal: 401 as `namespace_of`, 403 for a tenant.
  """
  if namespace_of(request, config):
    raise Refusal(
      "authorization: got a tenant's token, expected the server's own for what concerns all; ask"
      " whoever runs the server.",
      status=403,
      kind="permission_error",
      code="not_a_tenants",
    )
