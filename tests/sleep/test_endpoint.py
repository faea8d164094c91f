"""A thinker behind HTTP: requests, responses, and every way in which a response can fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
import contextlib
import http.server
import json
import os
import re
import threading
import time
from typing import Any

import pytest

from seerjax.sleep import thinkers
from seerjax.sleep.endpoint import Endpoint, EndpointConfig
from seerjax.sleep.thinkers import Call, Completed, NoAnswer

KEY = "sk-secret-123"
MESSAGES = ({"role": "system", "content": "s"}, {"role": "user", "content": "caf\u00e9 <|im_end|>"})


def reply(content: Any = "four words are here", tokens: Any = 5, **fields) -> dict[str, Any]:
  choice = {"index": 0, "message": {"role": "assistant", "content": content}}
  choice |= {"finish_reason": "stop"} | fields
  usage = {"prompt_tokens": 9, "completion_tokens": tokens}
  return {"choices": [choice], "usage": usage}


class _Handler(http.server.BaseHTTPRequestHandler):
  """Responds with the next entry of the server's list."""

  def do_POST(self):
    body = self.rfile.read(int(self.headers["Content-Length"]))
    self.server.asked.append((self.path, dict(self.headers), json.loads(body)))
    answers = self.server.answers
    answer = answers.pop(0) if len(answers) > 1 else answers[0]
    if callable(answer):
      answer(self)
      return
    status, answer = answer if isinstance(answer, tuple) else (200, answer)
    data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
    self.send_response(status)
    self.send_header("Content-Length", str(len(data)))
    self.send_header("Location", "/elsewhere")
    self.end_headers()
    self.wfile.write(data)

  def log_message(self, *_: object) -> None:
    pass


@contextlib.contextmanager
def answering(*answers: Any) -> Iterator[tuple[str, list[Any]]]:
  """Serves responses, the last one repeatedly; yields the URL and the requests."""
  server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
  server.daemon_threads = True
  server.answers, server.asked = list(answers), []  # type: ignore[attr-defined]
  thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
  thread.start()
  try:
    yield f"http://127.0.0.1:{server.server_port}", server.asked  # type: ignore[attr-defined]
  finally:
    server.shutdown()
    server.server_close()
    thread.join()


def asked(
  url: str, *, pauses: list[float] | None = None, max_tokens: int = 16, count=None, **fields
) -> Completed:
  fields = dict(model="m", max_tries=3, timeout_seconds=5.0) | fields
  pause = (lambda seconds: None) if pauses is None else pauses.append
  endpoint = Endpoint(EndpointConfig(url=url, **fields), count=count, pause=pause)
  return endpoint.complete(MESSAGES, max_tokens=max_tokens, temperature=0.5, seed=7)


def test_a_call_is_one_post_and_its_answer(key_is_set):
  with answering(reply()) as (url, requests):
    answer = asked(f"{url}/v1", key_variable="SLEEP_TEST_KEY")
  assert answer == Completed(text="four words are here", num_tokens=5, num_prompt_tokens=9)
  ((path, headers, body),) = requests
  assert path == "/v1/chat/completions"
  assert headers["Authorization"] == f"Bearer {KEY}"
  assert body == {
    "model": "m", "messages": [dict(m) for m in MESSAGES], "max_tokens": 16, "temperature": 0.5,
    "seed": 7,
  }  # fmt: skip


def test_paths_stand_before_the_route():
  for path, expected in (("", ""), ("/", ""), ("/v1/", ""), ("/api/v1", "/api"), ("/api", "/api")):
    with answering(reply()) as (url, requests):
      asked(url + path)
    assert requests[0][0] == f"{expected}/v1/chat/completions"
    assert "Authorization" not in requests[0][1]


def test_reasoning_is_counted_and_no_part_of_the_text():
  message = {"content": "4", "reasoning_content": "2+2"}
  with answering(reply(tokens=5, message=message)) as (url, _):
    assert asked(url) == Completed(text="4", num_tokens=5, num_prompt_tokens=9)
  hidden = reply("4", tokens=12)
  hidden["usage"]["completion_tokens_details"] = {"reasoning_tokens": 10}
  with answering(hidden) as (url, _):
    assert asked(url).num_tokens == 12


def test_a_text_that_utf8_cannot_hold_is_mended():
  with answering(reply("a \ud800 b <|im_end|>", finish_reason="length")) as (url, _):
    answer = asked(url)
  assert answer.text == "a \ufffd b <|im_end|>" and answer.finish_reason == "length"


def hang(handler) -> None:
  """Sends nothing until the client has disconnected."""
  with contextlib.suppress(OSError):
    handler.rfile.read(1)


def drip(handler) -> None:
  """Sends single bytes, so that no read takes long."""
  handler.send_response(200)
  handler.send_header("Content-Length", "100000")
  handler.end_headers()
  with contextlib.suppress(OSError):  # Once the client has disconnected.
    while True:
      handler.wfile.write(b" ")
      handler.wfile.flush()
      time.sleep(0.02)


def half(handler) -> None:
  handler.send_response(200)
  handler.send_header("Content-Length", "1000")
  handler.end_headers()
  handler.wfile.write(json.dumps(reply()).encode())
  handler.close_connection = True


def close(handler) -> None:
  handler.close_connection = True


BAD: list[tuple[Any, str]] = [
  ((500, b"boom"), "got status 500 ('boom'), expected 200; wait, or send fewer requests at once."),
  ((429, b"slow"), "got status 429 ('slow'), expected 200; wait, or send fewer requests at once."),
  (b"<html>", "got invalid JSON ('<html>'), expected a chat completion; check whether a proxy"),
  (b"[" * 100_000, "got invalid JSON ('[[["),
  ({"choices": []}, """got no choices ('{"choices": []}'), expected one with a message; check"""),
  ([1], "got no choices ('[1]'), expected one with a message"),
  ({"choices": [{"text": "a completion"}]}, "got no choices ('{"),
  (reply([{"type": "text"}]), "got content that is not text, expected text; request text"),
  ({**reply(), "usage": None}, "got no usage.completion_tokens, expected the number of generated"),
  (reply(tokens=True), "got no usage.completion_tokens, expected the number of generated tokens"),
  (reply(tokens=18), "got 18 tokens, expected at most max_tokens = 16; use an endpoint that"
                     " respects"),
  (reply("ab", tokens=9), "got a text of at most 3 tokens with a reported count of 9, expected at"
                          " most as many"),
  (reply(None, tokens=2), "got a text of at most 1 tokens with a reported count of 2, expected at"
                          " most as many"),
  (reply(finish_reason="content_filter"), "got finish_reason='content_filter', expected one of"),
  (close, "got no response (RemoteDisconnected: "),
  (half, "bytes, and 8"),
]  # fmt: skip


@pytest.mark.parametrize("bad, message", BAD)
def test_a_bad_answer_is_asked_for_again(bad: Any, message: str):
  pauses: list[float] = []
  with answering(bad, reply()) as (url, requests):
    assert asked(url, pauses=pauses).text == "four words are here"
    assert len(requests) == 2 and pauses == [1.0]
  with answering(bad) as (url, requests):
    with pytest.raises(NoAnswer, match=f"^{url}: .*{re.escape(message)}.*\\(3 tries\\)$"):
      asked(url, pauses=pauses, pause_seconds=2.0)
    assert len(requests) == 3 and pauses[1:] == [2.0, 4.0]


@pytest.mark.parametrize("bad", [hang, drip])
def test_what_hangs_is_left(bad: Callable[[Any], None]):
  late = pytest.raises(
    NoAnswer, match="got no complete response in 0.2 seconds, expected an answer"
  )
  with answering(bad) as (url, _), late:
    asked(url, timeout_seconds=0.2, max_tries=2)


@pytest.mark.parametrize(
  "bad, message",
  [
    ((401, b"no"), "got status 401 ('no'), expected 200; see its message, and check model, key"),
    ((400, b"too long"), "got status 400 ('too long'), expected 200"),
    ((307, b""), "got status 307 (''), a redirection, expected a direct response; use the final"),
    (
      b" " * (17 << 20),
      "got more than 16 MiB, expected one answer; lower max_tokens, or check which",
    ),
  ],
)
def test_what_would_be_refused_again_is_asked_once(bad: Any, message: str):
  with answering(bad, reply()) as (url, requests):
    with pytest.raises(NoAnswer, match=re.escape(message)):
      asked(url)
    assert len(requests) == 1


def test_nobody_there_is_no_answer():
  with answering(reply()) as (url, _):
    pass
  with pytest.raises(NoAnswer, match=r"got no response \(ConnectionRefusedError"):
    asked(url)


def test_a_count_of_ones_own_is_asked():
  with answering(reply("one two", tokens=5)) as (url, _):
    assert asked(url, count=lambda text: 4).num_tokens == 5
    with pytest.raises(NoAnswer, match="got a text of at most 3 tokens with a reported count of 5"):
      asked(url, count=lambda text: len(text.split()))


@pytest.fixture
def key_is_set():
  os.environ["SLEEP_TEST_KEY"] = KEY
  yield
  del os.environ["SLEEP_TEST_KEY"]


def test_the_key_stands_in_no_message(key_is_set):
  echo = f"your key {KEY} is wrong".encode()
  for answer in ((401, echo), (500, echo), echo):
    said_so = pytest.raises(NoAnswer, match="your key \\(the key\\) is wrong")
    with answering(answer) as (url, _), said_so as found:
      asked(url, key_variable="SLEEP_TEST_KEY")
    assert KEY not in str(found.value) and found.value.__cause__ is None
  assert KEY not in repr(EndpointConfig(url=url, model="m", key_variable="SLEEP_TEST_KEY"))


def test_a_run_over_an_endpoint_goes_on_without_an_answer():
  with answering((400, b"no"), reply()) as (url, _):
    endpoint = Endpoint(EndpointConfig(url=url, model="m"), pause=lambda seconds: None)
    calls = [Call(messages=MESSAGES, max_tokens=16, temperature=0, seed=s) for s in range(3)]
    answers = [answer for _, answer in thinkers.asking(endpoint)(calls)]
  assert [isinstance(answer, NoAnswer) for answer in answers] == [True, False, False]


@pytest.mark.parametrize(
  "fields, message",
  [
    (dict(url="localhost:8000"), "--endpoint: got 'localhost:8000', expected http://host:port or"),
    (dict(url="ftp://a"), "--endpoint: got 'ftp://a', expected http://host:port"),
    (dict(url="http://a:x"), "--endpoint: got 'http://a:x', expected http://host:port"),
    (dict(url="http://u:pw@a"), "got 'http://(hidden)@a' with a user, a query or a fragment, exp"),
    (dict(url="http://a?key=pw"), "got 'http://a' with a user, a query or a fragment, expected"),
    (dict(url="http://a", model=""), "EndpointConfig.model: got '', expected the model's name at"),
    (dict(url="http://a", max_tries=0), "EndpointConfig.max_tries: got 0, expected at least 1"),
    (
      dict(url="http://a", timeout_seconds=0.0),
      "timeout_seconds: got 0.0, expected a posi",
    ),
  ],
)
def test_bad_settings_are_refused(fields: dict[str, Any], message: str):
  with pytest.raises(ValueError, match=re.escape(message)):
    EndpointConfig(**(dict(model="m") | fields))


def test_a_key_that_is_not_there_is_refused():
  config = EndpointConfig(url="http://a", model="m", key_variable="SLEEP_TEST_NONE")
  with pytest.raises(ValueError, match="got 'SLEEP_TEST_NONE', which is not set, expected the end"):
    Endpoint(config)
  os.environ["SLEEP_TEST_NONE"] = "a\nb"
  try:
    with pytest.raises(ValueError, match="which does not fit in a header, expected the endpoint's"):
      Endpoint(config)
  finally:
    del os.environ["SLEEP_TEST_NONE"]
