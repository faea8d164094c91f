"""A thinker behind an OpenAI-style `/v1/chat/completions`; uses only the standard library.

  messages --POST--> {"choices": [...], "usage": {...}} --checked--> Completed

The server may refuse, hang, return invalid data or wrong token counts. Each of these is retried a
few times; then the call fails and the run continues. Redirections are refused, so that the key is
sent only to the configured host; the key comes from an environment variable and never appears in a
message. Returned text is data; characters that UTF-8 cannot encode are replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import contextlib
import dataclasses
import http.client
import json
import os
import re
import socket
import ssl
import threading
import time
from typing import Any, NoReturn, TypeGuard
import urllib.parse

from seerjax import fields
from seerjax.sleep.thinkers import Completed, Message, NoAnswer

PATH = "/v1/chat/completions"
MAX_BYTES = 16 << 20  # Of one response.
# Client errors that may be transient; all others would be repeated by a retry.
_TRANSIENT = (408, 409, 425, 429)
_FINISHED = ("stop", "length")


class _Retry(Exception):
  """An invalid response; a retry may help."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EndpointConfig:
  """Address and retry policy of an endpoint.

  Attributes:
    url: base URL, such as "http://127.0.0.1:8000"; a path in it precedes /v1/chat/completions, and
      may end in /v1.
    model: model name at the endpoint.
    key_variable: environment variable with the API key; "" sends none.
    timeout_seconds: timeout of a whole response.
    max_tries: most attempts of one call.
    pause_seconds: pause before the second attempt; doubled before each further one.
  """

  url: str
  model: str
  key_variable: str = ""
  timeout_seconds: float = 300.0
  max_tries: int = 4
  pause_seconds: float = 1.0

  def __post_init__(self):
    fields.check(
      self,
      model=fields.Rule("the model's name at the endpoint", bool, "see its /v1/models"),
      timeout_seconds=fields.positive("raise it"),
      max_tries=fields.at_least(1),
      pause_seconds=fields.at_least(0),
    )
    parts = urllib.parse.urlsplit(self.url)
    try:
      port_is_right = parts.port is None or parts.port > 0
    except ValueError:
      port_is_right = False
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_is_right:
      raise ValueError(
        f"--endpoint: got {_shown_url(self.url)!r}, expected http://host:port or https://host;"
        " write --endpoint=http://127.0.0.1:8000."
      )
    if parts.username or parts.password or parts.query or parts.fragment:
      raise ValueError(
        f"--endpoint: got {_shown_url(self.url)!r} with a user, a query or a fragment, expected"
        " only host and path; put the key in an environment variable (key_variable)."
      )


class Endpoint:
  """A `Thinker` behind a URL. Thread-safe."""

  def __init__(
    self,
    config: EndpointConfig,
    *,
    count: Callable[[str], int] | None = None,
    pause: Callable[[float], None] = time.sleep,
  ):
    """Prepares the endpoint; sends nothing yet.

    Args:
      config: address and retry policy.
      count: text -> number of tokens, to check the endpoint's counts; None checks against bytes.
      pause: sleeps for a number of seconds between attempts.

    Raises:
      ValueError: if the key's variable is unset, or has characters that a header cannot have.
    """
    self.config = config
    self._count = count
    self._pause = pause
    self._key = ""
    if config.key_variable:
      self._key = os.environ.get(config.key_variable, "").strip()
      if not self._key or not re.fullmatch(r"[\x21-\x7e]+", self._key):
        raise ValueError(
          f"EndpointConfig.key_variable: got {config.key_variable!r}, which"
          f" {'does not fit in a header' if self._key else 'is not set'}, expected the endpoint's"
          f" key in it; run: export {config.key_variable}=..."
        )

  def complete(
    self, messages: Sequence[Message], *, max_tokens: int, temperature: float, seed: int
  ) -> Completed:
    """Returns the completion of a conversation; see `Thinker`.

    Raises:
      NoAnswer: if all attempts failed; the message describes the last one.
    """
    body = {
      "model": self.config.model,
      "messages": [dict(message) for message in messages],
      "max_tokens": max_tokens,
      "temperature": temperature,
      "seed": seed,
    }
    data = json.dumps(body).encode()
    met = ""
    for number in range(self.config.max_tries):
      if number:
        self._pause(self.config.pause_seconds * 2 ** (number - 1))
      try:
        return self._checked(self._posted(data), max_tokens)
      except _Retry as error:
        met = self._hidden(str(error))
      except NoAnswer as error:
        # The message may quote the response, which may contain the key.
        raise NoAnswer(self._hidden(str(error))) from None
    raise NoAnswer(f"{met} ({self.config.max_tries} tries)")

  def _hidden(self, text: str) -> str:
    return text.replace(self._key, "(the key)") if self._key else text

  def _retry(self, got: str, expected: str, fix: str) -> NoReturn:
    raise _Retry(f"{self.config.url}: got {got}, expected {expected}; {fix}.")

  def _posted(self, data: bytes) -> bytes:
    """Returns the body of a response with status 200."""
    parts = urllib.parse.urlsplit(self.config.url)
    path = parts.path.rstrip("/")
    path = path.removesuffix("/v1") + PATH
    assert parts.hostname is not None
    timeout = self.config.timeout_seconds
    if parts.scheme == "https":
      connection: http.client.HTTPConnection = http.client.HTTPSConnection(
        parts.hostname, parts.port, timeout=timeout, context=ssl.create_default_context()
      )
    else:
      connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout)
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    if self._key:
      headers["Authorization"] = f"Bearer {self._key}"
    # The socket's own timeout restarts with every byte.
    is_late = threading.Event()
    sockets: list[socket.socket] = []

    def end() -> None:
      is_late.set()
      for one in sockets:
        with contextlib.suppress(OSError):  # It may have just been closed.
          one.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(timeout, end)
    timer.daemon = True
    timer.start()
    try:
      connection.connect()
      sockets.append(connection.sock)  # Kept because a response may take over the socket.
      connection.request("POST", path, body=data, headers=headers)
      response = connection.getresponse()
      answer = response.read(MAX_BYTES + 1)
    except (OSError, http.client.HTTPException) as error:
      # The socket's own timeout may expire just before the timer. A timeout of the network (which
      # has an error number) comes earlier than ours, and is no sign of a late response.
      if isinstance(error, TimeoutError) and error.errno is None:
        is_late.set()
      self._hang(is_late, f"no response ({type(error).__name__}: {error})")
    finally:
      timer.cancel()
      connection.close()
    if len(answer) > MAX_BYTES:
      raise NoAnswer(
        f"{self.config.url}: got more than {MAX_BYTES >> 20} MiB, expected one answer; lower"
        " max_tokens, or check which program answers there."
      )
    if is_late.is_set() or response.length:
      self._hang(is_late, f"{len(answer)} bytes, and {response.length} fewer than announced")
    if response.status == 200:
      return answer
    words = answer[:300].decode("utf-8", "replace")
    got = f"status {response.status} ({words!r})"
    if response.status in _TRANSIENT or response.status >= 500:
      self._retry(got, "200", "wait, or send fewer requests at once")
    if 300 <= response.status < 400:
      raise NoAnswer(
        f"{self.config.url}: got {got}, a redirection, expected a direct response; use the final"
        " URL, since the key is not sent elsewhere."
      )
    raise NoAnswer(
      f"{self.config.url}: got {got}, expected 200; see its message, and check model, key and"
      " prompt length."
    )

  def _hang(self, is_late: threading.Event, met: str) -> NoReturn:
    if is_late.is_set():
      met = f"no complete response in {self.config.timeout_seconds:g} seconds"
    self._retry(met, "an answer", "check that it runs, or raise EndpointConfig.timeout_seconds")

  def _checked(self, answer: bytes, max_tokens: int) -> Completed:
    """Parses and validates the body of a response."""
    try:
      body = json.loads(answer)
    except (ValueError, RecursionError):
      self._retry(
        f"invalid JSON ({answer[:100].decode('utf-8', 'replace')!r})", "a chat completion",
        "check whether a proxy responds instead",
      )  # fmt: skip
    choices = body.get("choices") if isinstance(body, Mapping) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, Mapping) or not isinstance(choice.get("message"), Mapping):
      self._retry(
        f"no choices ({answer[:100].decode('utf-8', 'replace')!r})", "one with a message",
        "check that this is a chat endpoint",
      )  # fmt: skip
    message = choice["message"]
    texts = [message.get(field) or "" for field in ("content", "reasoning_content")]
    if not all(isinstance(text, str) for text in texts):
      self._retry("content that is not text", "text", "request text only")
    usage = body.get("usage")
    usage = usage if isinstance(usage, Mapping) else {}
    num_tokens, num_prompt_tokens = (
      usage.get(f"{which}_tokens") for which in ("completion", "prompt")
    )
    if not _is_count(num_tokens):
      self._retry(
        "no usage.completion_tokens", "the number of generated tokens",
        "use an endpoint that counts them: costs are based on them",
      )  # fmt: skip
    self._check_count(num_tokens, _hidden_tokens(usage), texts, max_tokens)
    reason = choice.get("finish_reason")
    if reason not in _FINISHED:
      self._retry(
        f"finish_reason={reason!r}", f"one of {_FINISHED}", "check why the response ended"
      )
    return Completed(
      text=re.sub("[\ud800-\udfff]", "\ufffd", texts[0]),
      num_tokens=num_tokens,
      num_prompt_tokens=num_prompt_tokens if _is_count(num_prompt_tokens) else 0,
      finish_reason=reason,
    )

  def _check_count(
    self, num_tokens: int, num_hidden: int, texts: Sequence[str], max_tokens: int
  ) -> None:
    """Rejects a token count that is impossible for the text, since costs are based on it."""
    if num_tokens > max_tokens + 1:
      self._retry(
        f"{num_tokens} tokens", f"at most max_tokens = {max_tokens}",
        "use an endpoint that respects the limit",
      )  # fmt: skip
    text = "".join(texts)
    # Every token has at least one byte, except the end token.
    most = (self._count(text) if self._count else len(text.encode("utf-8", "replace"))) + 1
    if num_tokens - num_hidden > most:
      self._retry(
        f"a text of at most {most} tokens with a reported count of {num_tokens - num_hidden}",
        "at most as many", "check whether part of the response is missing",
      )  # fmt: skip


def _is_count(value: Any) -> TypeGuard[int]:
  return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _hidden_tokens(usage: Mapping[str, Any]) -> int:
  """Returns the number of reasoning tokens that are counted but not returned."""
  details = usage.get("completion_tokens_details")
  found = details.get("reasoning_tokens") if isinstance(details, Mapping) else None
  return found if _is_count(found) else 0


def _shown_url(url: str) -> str:
  """Returns a URL without its user and query, which may be secret."""
  return re.sub(r"//[^/@]*@", "//(hidden)@", url.partition("?")[0])
