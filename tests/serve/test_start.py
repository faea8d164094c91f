"""A server prints its URL only when it accepts connections."""

from __future__ import annotations

import socket
import threading

import pytest
import serving

from seerjax.serve import server


def test_connections_are_taken_as_soon_as_a_server_says_so():
  for _ in range(20):
    service = serving.make_service()
    found, taken = server.bound(service), []
    # A bound address alone refuses connections; the line used to be printed at this point.
    with pytest.raises(ConnectionRefusedError):
      socket.create_connection(found.getsockname(), timeout=10)

    def connect(found=found, taken=taken) -> None:
      with socket.create_connection(found.getsockname(), timeout=10):
        taken.append(True)

    served = server.Server(service, connect)
    thread = threading.Thread(target=lambda served=served, found=found: served.run([found]))
    service.thread.start()
    thread.start()
    while not taken and thread.is_alive():
      thread.join(0.001)
    served.stop()
    thread.join()
    service.thread.join()
    found.close()
    assert taken == [True]
