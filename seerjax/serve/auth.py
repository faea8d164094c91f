"""Authorisation: maps a request's token to its client."""

from __future__ import annotations

import hmac

from starlette.requests import Request

from seerjax.serve.config import ServeConfig
from seerjax.serve.refusals import Refusal


def namespace_of(request: Request, config: ServeConfig) -> str:
  """Returns the tenant that sent a request; "" for the server's token, or if there is none.

  A wrong scheme, a wrong token and a missing one get the same response.

  Raises:
    Refusal: if no valid token was sent (401).
  """
  if not config.token:
    return ""
  scheme, _, sent = request.headers.get("authorization", "").partition(" ")
  tokens = {config.token: "", **config.tenants}
  # Compare with every token, in constant time.
  found = [
    name
    for token, name in tokens.items()
    if hmac.compare_digest(sent.strip().encode(), token.encode())
  ]
  if not (found and scheme.lower() == "bearer"):
    raise Refusal(
      "authorization: got no valid token, expected 'Bearer TOKEN' with the server's token; send it"
      " as the API key.",
      status=401,
      kind="authentication_error",
      code="invalid_api_key",
    )
  return found[0]


def require_token(request: Request, config: ServeConfig) -> None:
  """Requires the server's own token.

  Raises:
    Refusal: 401 as in `namespace_of`; 403 for a tenant's token.
  """
  if namespace_of(request, config):
    raise Refusal(
      "authorization: got a tenant's token, expected the server's own token on this route; contact"
      " the server's administrator.",
      status=403,
      kind="permission_error",
      code="not_a_tenants",
    )
