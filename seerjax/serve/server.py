"""The HTTP server: connections, limits, and graceful shutdown on SIGTERM."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
import contextlib
import socket
import threading
from types import FrameType
from typing import Any

import h11
from starlette.types import Receive, Scope, Send
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from seerjax.serve import routes, service as service_lib
from seerjax.serve.refusals import Refusal
from seerjax.serve.service import Service

# Time after the grace period in which the last responses are sent.
LAST_SECONDS = 5


class Connection(H11Protocol):
  """A connection that is closed when the client neither sends a request nor reads the response.

  It is checked every `patience` seconds. The client counts as gone if the same bytes are still
  unsent as at the last check, or if the headers of a request are still incomplete.

  Attributes:
    patience: seconds between two checks.
    most: upper bound of open connections; requests on further ones are refused.
  """

  patience = 30.0
  most = 2048

  def __init__(self, *args: Any, **others: Any):
    super().__init__(*args, **others)
    self._own_app, self.app = self.app, self._answer
    self._look_task: asyncio.TimerHandle | None = None
    self._seen: tuple[Any, ...] = ()

  async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
    if len(self.connections) <= self.most:
      await self._own_app(scope, receive, send)
      return
    refusal = Refusal(
      f"the server: got {len(self.connections)} connections, expected at most {self.most}; close"
      " some, or retry in 1 s.",
      status=503,
      kind="server_error",
      code="too_many_connections",
      retry_seconds=1,
    )
    response = service_lib.refused(refusal)
    response.headers["connection"] = "close"
    await response(scope, receive, send)

  def connection_made(self, transport: Any) -> None:  # A transport of asyncio or uvloop.
    super().connection_made(transport)
    self._wait()

  def connection_lost(self, exc: Exception | None) -> None:
    if self._look_task is not None:
      self._look_task.cancel()
      self._look_task = None
    super().connection_lost(exc)

  def _wait(self) -> None:
    self._look_task = self.loop.call_later(self.patience, self._look)

  def _look(self) -> None:
    cycle, unsent = self.cycle, self.transport.get_write_buffer_size()
    is_over = cycle is None or cycle.response_complete
    is_stuck = bool(unsent) and (is_over or self.flow.write_paused)
    # Between two requests uvicorn's keep-alive timer runs instead.
    is_silent = is_over and not unsent and self.timeout_keep_alive_task is None
    before, self._seen = self._seen, (cycle, unsent, is_stuck, is_silent)
    if (is_stuck or is_silent) and before == self._seen:
      self._look_task = None
      self.transport.abort()
    else:
      self._wait()

  def send_400_response(self, msg: str) -> None:
    """Responds to invalid HTTP with 400; aborts the connection if a response has started."""
    refusal = Refusal(
      "the request: got invalid HTTP/1.1 (request line, header or length), expected a request; use"
      " an HTTP client."
    )
    response = service_lib.refused(refusal)
    headers = [*response.raw_headers, (b"connection", b"close")]
    try:
      for event in (
        h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
        h11.Data(data=bytes(response.body)),
        h11.EndOfMessage(),
      ):
        self.transport.write(self.conn.send(event) or b"")
    except h11.LocalProtocolError:
      self.transport.abort()
      return
    self.transport.close()


class Server(uvicorn.Server):
  """Serves a service; the first signal stops admission and starts the grace period."""

  def __init__(self, service: Service, on_start: Callable[[], object] = lambda: None):
    """Initialises the server; `on_start` is called once its sockets accept connections."""
    config = service.config
    bounds = dict(patience=config.body_seconds, most=config.max_connections)
    super().__init__(
      uvicorn.Config(
        routes.application(service),
        host=config.host,
        port=config.port,
        http=type("Connection", (Connection,), bounds),
        ws="none",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=int(config.grace_seconds) + LAST_SECONDS,
      )
    )
    self._service = service
    self._on_start = on_start

  async def startup(self, sockets: list[socket.socket] | None = None) -> None:
    """Starts listening, then calls `on_start`."""
    await super().startup(sockets)
    if self.started:
      self._on_start()

  def handle_exit(self, sig: int, frame: FrameType | None) -> None:
    """Handles a signal."""
    self.stop()
    super().handle_exit(sig, frame)

  def stop(self) -> None:
    """Stops admission; the server ends after running requests or after the grace period."""
    self._service.thread.stop(self._service.config.grace_seconds)
    self.should_exit = True


def bound(service: Service) -> socket.socket:
  """Returns a socket bound to the configured address; it accepts connections once served.

  Raises:
    OSError: if the address cannot be bound.
  """
  config = service.config
  family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
  found = socket.socket(family, socket.SOCK_STREAM)
  try:
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    found.bind((config.host, config.port))
  except OSError as error:
    found.close()
    raise OSError(
      f"--port: got {config.host}:{config.port}, where listening failed ({error}), expected a free"
      " port; choose another, or 0 for any."
    ) from error
  return found


def address(bound: socket.socket) -> str:
  """Returns the server's URL."""
  host, port = bound.getsockname()[:2]
  return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run(
  service: Service,
  sockets: list[socket.socket],
  on_start: Callable[[], object] = lambda: None,
) -> None:
  """Serves until a signal arrives and running requests have ended.

  Args:
    service: the service.
    sockets: sockets made by `bound`.
    on_start: called once the sockets accept connections.
  """
  service.thread.start()
  try:
    Server(service, on_start).run(sockets=sockets)
  finally:
    service.thread.stop(0)
    service.thread.join()
    service.close()


@contextlib.contextmanager
def running(service: Service) -> Iterator[str]:
  """Serves on a separate thread, and yields the URL."""
  found = bound(service)
  server = Server(service)
  thread = threading.Thread(target=lambda: server.run(sockets=[found]), name="http", daemon=True)
  service.thread.start()
  thread.start()
  try:
    while not server.started and thread.is_alive():
      thread.join(0.01)
    yield address(found)
  finally:
    server.stop()
    thread.join()
    service.thread.join()
    service.close()
    found.close()
