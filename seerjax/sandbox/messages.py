"""Messages between a sandbox and its supervisors: a length, JSON, blobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import contextlib
import json
import socket
import struct
from typing import Any


def send(channel: socket.socket, header: Mapping[str, Any], blobs: Sequence[bytes]) -> None:
  """Sends a message; `header["blobs"]` has the lengths of the blobs."""
  text = json.dumps(header).encode()
  channel.sendall(struct.pack("Q", len(text)) + text)
  for blob in blobs:
    channel.sendall(blob)


def receive(channel: socket.socket) -> tuple[dict[str, Any], list[bytes]] | None:
  """Returns a message, or None if the other side closed the connection."""

  def exactly(size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
      part = channel.recv(min(size - len(parts), 2**20))
      if not part:
        raise EOFError
      parts += part
    return bytes(parts)

  try:
    header = json.loads(exactly(struct.unpack("Q", exactly(8))[0]))
    return header, [exactly(size) for size in header.get("blobs", ())]
  except (EOFError, ConnectionError):
    return None


def answer(caller: socket.socket, header: dict[str, Any], blobs: list[bytes]) -> None:
  with contextlib.suppress(OSError):  # The caller may have closed the connection.
    send(caller, {**header, "blobs": [len(blob) for blob in blobs]}, blobs)
