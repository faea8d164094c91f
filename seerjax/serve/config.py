"""Configuration of a server: address, tokens and limits."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses

from seerjax import fields

LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeConfig:
  """Limits of a server. None of them affects the bits of a response.

  Attributes:
    host: address to listen on; any other than loopback requires a token.
    port: port to listen on; 0 picks a free one.
    token: token that clients send as `Authorization: Bearer TOKEN`; "" requires none.
    tenants: maps tokens to the names of isolated clients. They share no contexts, and neither
      memory nor drafts reveal one client's requests to another.
    max_body_bytes: upper bound of a request body.
    max_answer_tokens: upper bound of a choice's tokens; default `max_tokens` of a chat.
    max_queued_requests: most choices queued for the engine.
    max_waiting_of_client: most queued choices of one client.
    max_connections: most open connections.
    body_seconds: timeout for receiving a body.
    timeout_seconds: timeout of a whole response.
    grace_seconds: time that running requests have to finish after a stop signal.
    strict_fields: refuse fields that would be accepted without effect.
  """

  host: str = "127.0.0.1"
  port: int = 8000
  token: str = ""
  tenants: Mapping[str, str] = dataclasses.field(default_factory=dict)
  max_body_bytes: int = 4 << 20
  max_answer_tokens: int = 1024
  max_queued_requests: int = 1024
  max_waiting_of_client: int = 512
  max_connections: int = 2048
  body_seconds: float = 30.0
  timeout_seconds: float = 600.0
  grace_seconds: float = 20.0
  strict_fields: bool = False

  def __post_init__(self):
    one, seconds = fields.at_least(1), fields.positive("raise it")
    fields.check(
      self, port=fields.at_least(0), max_body_bytes=one, max_answer_tokens=one,
      max_queued_requests=one, max_waiting_of_client=one, max_connections=one,
      body_seconds=seconds, timeout_seconds=seconds, grace_seconds=seconds,
    )  # fmt: skip
    if self.host not in LOOPBACK and not self.token:
      raise ValueError(
        f"ServeConfig.host: got {self.host!r} without a token, expected one of {LOOPBACK}, or a"
        " token, since anyone who reaches the port may send requests; set SEERJAX_SERVE_TOKEN or"
        " --token_file."
      )
    for token in (self.token, *self.tenants):
      if not token.isascii() or any(not letter.isprintable() for letter in token):
        raise ValueError(
          "ServeConfig.token: got a token that does not fit in a header, expected printable ASCII;"
          " choose another."
        )
    if self.tenants and (not self.token or self.token in self.tenants or "" in self.tenants):
      raise ValueError(
        f"ServeConfig.tenants: got {len(self.tenants)} tenants, and an empty token, the server's"
        " own token, or a server without a token, expected a separate token for each tenant and one"
        " for the server; set SEERJAX_SERVE_TOKEN."
      )
    for name in self.tenants.values():
      if not name.isprintable() or not name:
        raise ValueError(
          f"ServeConfig.tenants: got the name {name!r}, expected printable text; rename it."
        )
