"""A server from its first connection to its last: SIGTERM ends it as clients would like."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import socket
import threading
from types import FrameType

import uvicorn

from seerjax.serve import routes
from seerjax.serve.routes import Service

# Between the end of the grace period and the last answer that says so.
LAST_SECONDS = 5


class Server(uvicorn.Server):
  """Serves a service; the first signal stops admission, and what runs has its grace period."""

  def __init__(self, service: Service):
    config = service.config
    super().__init__(
      uvicorn.Config(
        routes.application(service),
        host=config.host,
        port=config.port,
        http="h11",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        limit_concurrency=config.max_connections,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=int(config.grace_seconds) + LAST_SECONDS,
      )
    )
    self._service = service

  def handle_exit(self, sig: int, frame: FrameType | None) -> None:
    """Takes a signal."""
    self.stop()
    super().handle_exit(sig, frame)

  def stop(self) -> None:
    """Stops admission; the server ends when what runs has ended, or its grace period."""
    self._service.thread.stop(self._service.config.grace_seconds)
    self.should_exit = True


def listening(service: Service) -> socket.socket:
  """Returns a socket that listens where the service's config says.

  Raises:
    OSError: if it cannot.
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
      f"--port: got {config.host}:{config.port}, where nothing can listen ({error}), expected a"
      " free one; take another, or 0 for any."
    ) from error
  return found


def address(listening: socket.socket) -> str:
  """Returns the URL that clients ask."""
  host, port = listening.getsockname()[:2]
  return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run(service: Service, sockets: list[socket.socket]) -> None:
  """Serves until a signal comes, and until what ran then has ended."""
  service.thread.start()
  try:
    Server(service).run(sockets=sockets)
  finally:
    service.thread.stop(0)
    service.thread.join()


@contextlib.contextmanager
def running(service: Service) -> Iterator[str]:
  """Serves on a thread of its own, and yields the URL."""
  found = listening(service)
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
    found.close()
