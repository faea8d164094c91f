"""HTTP clients for load tests that use little CPU themselves.

Claim: none; `serving` measures servers with them.

A connection is kept alive and sends one request at a time. While a response arrives, the client
only looks for its end; `parsed` reads the content after the clock has stopped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
import json
import time
from typing import Any, NamedTuple
import urllib.parse

HEAD_END = b"\r\n\r\n"
LAST_CHUNK = b"\r\n0\r\n\r\n"


class Reply(NamedTuple):
  """A raw response.

  Attributes:
    status: HTTP status.
    body: body without chunk framing.
    first: seconds until the first byte of the body.
    whole: seconds until the last byte.
  """

  status: int
  body: bytes
  first: float
  whole: float


class Answer(NamedTuple):
  """Parsed content of a response.

  Attributes:
    text: the whole text.
    logprobs: log-probability of each token, if the response has them.
    count: number of tokens; 0 if the response does not report it.
  """

  text: str
  logprobs: tuple[float, ...]
  count: int


class Connection(asyncio.Protocol):
  """One keep-alive connection; see `ask`."""

  def __init__(self):
    self._transport: asyncio.Transport | None = None
    self._forget()

  def _forget(self) -> None:
    self._data, self._start, self._end = bytearray(), 0, 0
    self._first = 0.0
    self._done: asyncio.Future[None] | None = None

  def connection_made(self, transport: asyncio.BaseTransport) -> None:
    assert isinstance(transport, asyncio.Transport)
    self._transport = transport

  def connection_lost(self, exc: Exception | None) -> None:
    self._transport = None
    if self._done is not None and not self._done.done():
      self._done.set_exception(exc or ConnectionError("the server closed the connection"))

  def data_received(self, data: bytes) -> None:
    self._data += data
    if not self._start:
      place = self._data.find(HEAD_END)
      if place < 0:
        return
      self._start = place + len(HEAD_END)
      head = bytes(self._data[:place]).lower()
      if b"content-length:" in head:
        length = head.partition(b"content-length:")[2].partition(b"\r\n")[0]
        self._end = self._start + int(length)
    if not self._first and len(self._data) > self._start:
      self._first = time.perf_counter()
    is_over = len(self._data) >= self._end if self._end else self._data.endswith(LAST_CHUNK)
    if is_over and self._done is not None and not self._done.done():
      self._done.set_result(None)

  async def ask(self, url: str, path: str, body: bytes) -> Reply:
    """Sends a request and returns the response.

    Args:
      url: address of the server, the same for all requests of a connection.
      path: path of the route.
      body: JSON.

    Raises:
      OSError: if the server cannot be reached or closes the connection.
    """
    place = urllib.parse.urlsplit(url)
    head = (
      f"POST {path} HTTP/1.1\r\nhost: {place.netloc}\r\ncontent-type: application/json\r\n"
      f"content-length: {len(body)}\r\n\r\n"
    )
    was_open = self._transport is not None
    begin = time.perf_counter()
    try:
      await self._exchange(place, head.encode() + body)
    except ConnectionError:
      # A server may close an idle keep-alive connection at any time, but not within a response.
      if not was_open or self._data:
        raise
      self._transport = None
      await self._exchange(place, head.encode() + body)
    whole = time.perf_counter() - begin
    status = int(self._data[9:12])
    found = bytes(self._data[self._start :])
    if b"connection: close" in bytes(self._data[: self._start]).lower():
      self.close()
    return Reply(status, found if self._end else _joined(found), self._first - begin, whole)

  async def _exchange(self, place: urllib.parse.SplitResult, message: bytes) -> None:
    """Sends a message and waits for the end of the response."""
    loop = asyncio.get_running_loop()
    if self._transport is None:
      await loop.create_connection(lambda: self, place.hostname or "", place.port or 80)
    assert self._transport is not None
    self._forget()
    self._done = loop.create_future()
    self._transport.write(message)
    await self._done

  def close(self) -> None:
    """Closes the connection."""
    if self._transport is not None:
      self._transport.abort()
      self._transport = None


def _joined(data: bytes) -> bytes:
  """Returns a chunked body without its chunk sizes."""
  found, place = [], 0
  while True:
    end = data.index(b"\r\n", place)
    size = int(data[place:end].partition(b";")[0], 16)
    if not size:
      return b"".join(found)
    found.append(data[end + 2 : end + 2 + size])
    place = end + 2 + size + 2


def parsed(reply: Reply) -> Answer:
  """Parses a response in OpenAI's protocol, whole or streamed, from our server or llama.cpp's.

  Raises:
    ValueError: if the response is an error, quoting it.
  """
  text = reply.body.decode()
  if reply.status != 200:
    raise ValueError(
      f"the server: got status {reply.status} ({text[:300]}), expected 200; see its log."
    )
  if not text.startswith("data: "):
    bodies = [json.loads(text)]
  else:
    events = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    bodies = [json.loads(event) for event in events if event.strip() != "[DONE]"]
  whole, logprobs, count = "", [], 0
  for body in bodies:
    if "choices" not in body:
      raise ValueError(f"the server: got {text[-300:]!r}, expected a response; see its log.")
    for choice in body["choices"]:
      whole += choice.get("text") or ""
      logprobs += _logprobs(choice.get("logprobs") or {})
    count = (body.get("usage") or {}).get("completion_tokens", count)
  return Answer(whole, tuple(logprobs), count)


def _logprobs(found: dict[str, Any]) -> list[float]:
  """Returns the log-probabilities, in the form of completions or of llama.cpp's chats."""
  if "content" in found:
    return [row["logprob"] for row in found["content"]]
  return found.get("token_logprobs") or []


async def in_turn(
  url: str, path: str, bodies: Sequence[bytes], num_clients: int
) -> tuple[list[Reply], float]:
  """Sends all bodies with `num_clients` clients; each sends the next body after its response.

  Returns:
    replies in the order of the bodies, and the total seconds.
  """
  replies: list[Reply | None] = [None] * len(bodies)
  places = iter(range(len(bodies)))

  async def client() -> None:
    connection = Connection()
    try:
      for place in places:
        replies[place] = await connection.ask(url, path, bodies[place])
    finally:
      connection.close()

  begin = time.perf_counter()
  async with asyncio.TaskGroup() as group:
    for _ in range(num_clients):
      group.create_task(client())
  return [reply for reply in replies if reply is not None], time.perf_counter() - begin
