"""Hostile bodies and clients: the server answers with an error, and keeps no state of them.

Bodies are drawn by the thousand: invalid JSON, wrong types, unknown fields, deep, huge, invalid
UTF-8, wrong lengths. Meanwhile other clients send valid requests, and get the bits that they get
alone. `long` tests a server in its own process: 500 requests in flight, slow readers, clients that
disconnect, SIGTERM under load, `kill -9` and a restart.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import json
import random
import signal
import socket
import threading
import time
from typing import Any

import httpx2
import pytest
from served_process import Process
import serving
import word_engine

from seerjax.serve import bodies, protocol
from seerjax.serve.config import ServeConfig

GOOD = {"prompt": "How many?", "max_tokens": 6, "seed": 3, "logprobs": 2}
NAMES = sorted({*protocol.CHAT, *protocol.COMPLETION, *bodies.NEUTRAL, "audio", "", "self"})
KINDS = (
  "cut", "bytes", "types", "unknown", "deep", "huge numbers", "no UTF-8", "long", "too long",
  "short of its length", "no length", "no HTTP", "other methods", "in pieces",
)  # fmt: skip


def value(rng: random.Random, depth: int = 3) -> Any:
  """Returns any JSON value, often of unusual size."""
  kinds = 9 if depth else 7
  match rng.randrange(kinds):
    case 0:
      return rng.choice([None, True, False])
    case 1:
      return rng.choice([0, 1, -1, 2**31, 2**63, 10**400, -(10**400), 4, 7])
    case 2:
      return rng.choice([0.5, -0.0, 1e308, 5e-324, 1e-9, 2.0])
    case 3:
      return rng.choice(["", "a", "\x00", "\ud800", "é" * 5, "<|im_end|>", "[a-", "x" * 3000])
    case 4:
      return rng.choice([[], {}, [[]], [{}], {"": None}])
    case 5:
      return rng.choice([{"role": "user"}, {"type": "json_schema"}, {"type": "function"}])
    case 6:
      return [{"role": rng.choice(["user", "tool", "assistant"]), "content": value(rng, 0)}]
    case 7:
      return [value(rng, depth - 1) for _ in range(rng.randrange(4))]
    case _:
      return {rng.choice(NAMES): value(rng, depth - 1) for _ in range(rng.randrange(4))}


def drawn(rng: random.Random, kind: str, most: int) -> tuple[bytes, bytes]:
  """Returns (lines of a head besides the usual, body) of a request that is not as it should be."""
  body = dict(GOOD)
  if kind in ("types", "unknown"):
    names = NAMES if kind == "unknown" else [*protocol.COMPLETION]
    body |= {rng.choice(names): value(rng) for _ in range(rng.randint(1, 4))}
  elif kind == "huge numbers":
    field = rng.choice(["temperature", "seed", "top_p", "max_tokens", "top_k", "n", "min_p"])
    body[field] = rng.choice([10**400, -(10**300), 1e300, 2**64, 10**4000])
  elif kind == "deep":
    body["logit_bias"] = "@"
  elif kind == "long":
    body["prompt"] = "a b " * rng.randrange(200, 4000)
  text = json.dumps(body).encode()
  if kind == "cut":
    text = text[: rng.randrange(len(text))]
  elif kind == "bytes":
    place = rng.randrange(len(text))
    text = text[:place] + rng.randbytes(rng.randrange(1, 9)) + text[place + 1 :]
  elif kind == "deep":
    depth = rng.choice([70, 1000, 50_000])
    text = text.replace(b'"@"', b"[" * depth + b"]" * depth)
  elif kind == "no UTF-8":
    text = text.replace(b"How", rng.choice([b"\xff\xfe", b"\xc3\x28", b"\xed\xa0\x80"]))
  elif kind == "too long":
    text = b'{"prompt": "' + b"x" * (most + rng.randrange(1, 5000)) + b'"}'
  length = f"content-length: {len(text)}\r\n".encode()
  if kind == "short of its length":
    length = f"content-length: {len(text) + rng.randint(1, 99)}\r\n".encode()
  elif kind == "no length":
    length = rng.choice([b"", b"content-length: -5\r\n", b"content-length: x\r\n",
                         b"content-length: 3\r\ncontent-length: 9\r\n"])  # fmt: skip
  elif kind == "in pieces":
    length = b"transfer-encoding: chunked\r\n"
    text = rng.choice([b"zz\r\n{}\r\n", b"5\r\n{}\r\n0\r\n\r\n", b"2\r\n{}\r\n0\r\n\r\n"])
  return length, text


def ask(address: tuple[str, int], rng: random.Random, kind: str, most: int) -> bytes:
  """Sends one request over one connection, and returns the whole response."""
  length, text = drawn(rng, kind, most)
  line = b"POST /v1/completions HTTP/1.1\r\n"
  if kind == "other methods":
    line = (
      rng.choice([b"GET /v1/completions", b"PUT /v1/models", b"POST /v1/nothing"])
      + b" HTTP/1.1\r\n"
    )
  elif kind == "no HTTP":
    line = rng.choice([b"\x16\x03\x01\x02\x00", b"hello\r\n", b"GET\r\n"])
  with socket.create_connection(address, timeout=600) as to:
    with contextlib.suppress(OSError):
      to.sendall(
        line + b"host: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
        + length + b"\r\n" + text
      )  # fmt: skip
      to.shutdown(socket.SHUT_WR)
    found = b""
    with contextlib.suppress(ConnectionError):
      while part := to.recv(1 << 16):
        found += part
  return found


def strangers(
  address: tuple[str, int], seed: int, count: int, most: int, threads: int
) -> collections.Counter[str]:
  """Sends `count` invalid requests; returns the counts of kinds and of statuses."""
  events: collections.Counter[str] = collections.Counter()
  lock = threading.Lock()

  def one(number: int) -> None:
    rng = random.Random(f"{seed}/{number}")
    kind = KINDS[number % len(KINDS)]
    found = ask(address, rng, kind, most)
    status = "no answer"
    if found:
      head, _, body = found.partition(b"\r\n\r\n")
      status = head.split()[1].decode()
      assert status[0] in "24", f"stranger {seed}/{number}, {kind}: got {found[:600]!r}"
      if status[0] == "4":
        error = json.loads(body)["error"]
        assert ": got " in error["message"] and "; " in error["message"], error
    with lock:
      events[kind] += 1
      events[f"status {status}"] += 1

  with concurrent.futures.ThreadPoolExecutor(threads) as pool:
    for done in [pool.submit(one, number) for number in range(count)]:
      done.result()
  return events


def choice_of(client: httpx2.Client) -> dict[str, Any]:
  done = client.post("/v1/completions", json=GOOD)
  assert done.status_code == 200, done.text
  return done.json()["choices"][0]


@pytest.mark.parametrize(
  "count",
  [pytest.param(280, marks=pytest.mark.thorough), pytest.param(5600, marks=pytest.mark.long)],
)
def test_whatever_strangers_send_the_others_are_answered(count: int, seed, tell_events):
  config = ServeConfig(port=0, max_body_bytes=20_000, body_seconds=2)
  threads = {thread.name for thread in threading.enumerate()}
  with serving.running(config) as (service, url), serving.client(url) as plain:
    alone = choice_of(plain)
    wrong, is_over, num_asked = [], threading.Event(), 0

    def go_on() -> None:
      nonlocal num_asked
      with serving.client(url) as own:
        while not is_over.is_set():
          wrong.extend([found] if (found := choice_of(own)) != alone else [])
          num_asked += 1

    others = threading.Thread(target=go_on)
    others.start()
    try:
      address = plain.base_url.host, plain.base_url.port
      events = strangers(address, seed, count, config.max_body_bytes, threads=8)
    finally:
      is_over.set()
      others.join()
    assert not wrong and num_asked
    events["answered at the same time"] = num_asked
    engine = service.models["tiny"].engine
    assert engine.num_unfinished == 0 and not service.thread.num_waiting
    assert engine.chunks.free_pages(0) == engine.config.num_pages - 1
  left = {thread.name for thread in threading.enumerate()} - threads
  assert not [name for name in left if name in ("engine", "http")]
  statuses = ("status 400", "status 413", "status 405", "status 404")
  tell_events("strangers", events, (*KINDS, *statuses, "answered at the same time"))


# A server in a separate process.

SERVED = (
  "nano", "--max_model_len=256", "--max_num_seqs=16", "--grace_seconds=60",
  "--timeout_seconds=1800",
)  # fmt: skip


def crowd(server: Process, rng: random.Random, count: int, alone: dict[int, Any], events) -> None:
  """`count` requests at once: some stay and are compared, some read slowly, some leave."""
  lock = threading.Lock()

  def one(number: int) -> None:
    seed, manner = number % 8, ("stay", "stream", "slow", "leave")[number % 4]
    body = dict(GOOD, seed=seed, max_tokens=40, user=f"client {number % 50}")
    limits = httpx2.Timeout(1800)
    with httpx2.Client(base_url=server.url, timeout=limits, trust_env=False) as own:
      if manner == "stay":
        assert own.post("/v1/completions", json=body).json()["choices"][0] == alone[seed]
      else:
        body["stream"] = True
        text = ids = None
        with own.stream("POST", "/v1/completions", json=body) as stream:
          assert stream.status_code == 200
          lines, text, ids = stream.iter_lines(), "", []
          for place, line in enumerate(line for line in lines if line):
            if line == "data: [DONE]":
              break
            if manner == "leave" and place > number % 9:
              break
            if manner == "slow":
              time.sleep(0.05)
            choice = json.loads(line.removeprefix("data: "))["choices"][0]
            text += choice["text"]
            ids += choice["logprobs"]["token_ids"]
        wanted = alone[seed]["logprobs"]["token_ids"]
        assert ids == (wanted[: len(ids)] if manner == "leave" else wanted)
    with lock:
      events[manner] += 1

  with concurrent.futures.ThreadPoolExecutor(count) as pool:
    for done in [pool.submit(one, number) for number in rng.sample(range(count), count)]:
      done.result()


@pytest.mark.parametrize(
  "count, rounds",
  [
    pytest.param(24, 1, marks=pytest.mark.thorough),
    pytest.param(500, 3, marks=[pytest.mark.long, pytest.mark.timeout(7200)]),
  ],
)
def test_crowds_leave_nothing_behind(count, rounds, seed, tmp_path, tell_events):
  events: collections.Counter[str] = collections.Counter()
  server, rng = Process(tmp_path, *SERVED), random.Random(seed)
  try:
    ask_alone = lambda: {
      number: _post(server, dict(GOOD, seed=number, max_tokens=40)) for number in range(8)
    }
    alone = ask_alone()
    pages = server.metric("seerjax_free_pages")
    resident, threads = [], []
    for _ in range(rounds):
      crowd(server, rng, count, alone, events)
      _until_quiet(server)
      assert server.metric("seerjax_free_pages") == pages
      resident.append(server.status("VmRSS"))
      threads.append(server.status("Threads"))
    # Programs and buffers of the first crowd stay; what each later one adds is nothing.
    assert all(now < 1.05 * resident[0] + 20_000 for now in resident[1:]), resident
    assert all(now <= threads[0] + 2 for now in threads[1:]), threads
    # After a kill under load, it restarts intact.
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
      asking = [pool.submit(_until_gone, server, number) for number in range(8)]
      _wait(lambda: server.metric("seerjax_running") > 0)
      server.end(signal.SIGKILL)
    events["lost by kill -9"] += len(asking)
    answers = [(number, found) for number, one in enumerate(asking) for found in one.result()]
    assert all(found == alone[number] for number, found in answers)
    server = Process(tmp_path, *SERVED)
    assert ask_alone() == alone
    events["starts"] += 2
    # SIGTERM under load: running requests finish, and new ones get an error that says so.
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
      asking = [pool.submit(_until_gone, server, number) for number in range(4)]
      _wait(lambda: server.metric("seerjax_running") > 0)
      assert server.end(signal.SIGTERM) in (0, 128 + signal.SIGTERM)
    answers = [(number, found) for number, one in enumerate(asking) for found in one.result()]
    events["finished around SIGTERM"] += len(answers)
    assert all(found == alone[number] for number, found in answers)
  finally:
    if server.process.poll() is None:
      server.end(signal.SIGKILL)
  written = (tmp_path / "serve.log").read_text()
  assert "How many?" not in written and "Traceback" not in written
  events |= {"KiB resident": resident[-1], "threads": threads[-1]}
  claimed = ("stay", "stream", "slow", "leave", "lost by kill -9", "finished around SIGTERM")
  tell_events(f"crowds of {count}", events, claimed)


def _post(server: Process, body: dict[str, Any]) -> Any:
  """Returns the choice; None if the server was gone or reported its shutdown."""
  try:
    with serving.client(server.url) as plain:
      done = plain.post("/v1/completions", json=body)
  except httpx2.TransportError:
    return None
  return done.json()["choices"][0] if done.status_code == 200 else None


def _until_gone(server: Process, number: int) -> list[Any]:
  """Sends requests until none is answered; returns the responses."""
  body, answers = dict(GOOD, seed=number, max_tokens=40), []
  while (found := _post(server, body)) is not None:
    answers.append(found)
  return answers


def _until_quiet(server: Process) -> None:
  _wait(lambda: not server.metric("seerjax_running") and not server.metric("seerjax_waiting"))


def _wait(is_so, seconds: float = 600) -> None:
  end = time.monotonic() + seconds
  while not is_so():
    assert time.monotonic() < end, f"it was not so after {seconds} s"
    time.sleep(0.01)


def test_a_body_of_numbers_beyond_any_is_refused_by_name():
  # Found by the corpus: integers too large for a float.
  for field in ("temperature", "top_p", "min_p"):
    found = serving.refusal(protocol.completion, {"prompt": "x", field: 10**400})
    assert found.param == field and "expected" in found.message


def test_more_answers_than_may_be_asked_for_at_once_are_refused():
  found = serving.refusal(protocol.completion, {"prompt": ["x"] * 100, "n": 2})
  assert found.param == "n"
  assert "got 2 for each of 100 prompts, expected at most 128 choices" in found.message


def test_a_variable_of_our_own_is_refused():
  config = word_engine.SIZES
  with serving.running(sizes=config) as (_, url), serving.client(url) as plain:
    body = {"messages": serving.HELLO, "chat_template_kwargs": {"self": 1}}
    error = plain.post("/v1/chat/completions", json=body).json()["error"]
    assert error["param"] == "chat_template_kwargs" and "leave it out" in error["message"]
