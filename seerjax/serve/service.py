"""State shared by all routes: models, engine thread and metrics; reads and sends bodies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
import concurrent.futures
import contextlib
import json
import logging
import time
from typing import Any
import uuid

from starlette.requests import Request
from starlette.responses import Response

from seerjax.engine import texts
from seerjax.serve import answers, bodies
from seerjax.serve.config import ServeConfig
from seerjax.serve.engine_thread import EngineThread
from seerjax.serve.family import Family
from seerjax.serve.metrics import Metrics
from seerjax.serve.protocol import Asked
from seerjax.serve.refusals import Refusal, shown
from seerjax.serve.served import Served
from seerjax.serve.sleeping import Sleeping

LOG = logging.getLogger("seerjax.serve")
# Longer bodies are parsed on another thread, so that they do not delay other requests.
QUICK_BYTES = 1 << 14
# Threads that wait for new grammars to compile, and the most such grammars in flight.
GRAMMAR_THREADS = 16
MOST_NEW_GRAMMARS = 512


class Service:
  """State shared by all routes.

  Attributes:
    models: served models by name; the first one is the default.
    thread: runs the engines.
    config: limits.
    metrics: counters.
    seed_of: derives a choice's seed from (request seed, prompt index, choice index).
    families: families that support replacing weights, by the name of their base.
    sleeping: contexts and sleep-time compute, by the name of the base.
    is_swapping: whether weights are being replaced.
  """

  def __init__(
    self,
    models: Mapping[str, Served],
    config: ServeConfig,
    *,
    seed_of: Callable[[int, int, int], int] = texts.seed_at,
    families: Mapping[str, Family] | None = None,
    sleeping: Mapping[str, Sleeping] | None = None,
  ):
    self.models = dict(models)
    self.families = dict(families or {})
    self.sleeping = dict(sleeping or {})
    self.is_swapping = False
    self.config = config
    self.seed_of = seed_of
    self.thread = EngineThread(
      {name: served.engine for name, served in models.items() if served.parent is None},
      max_queued_requests=config.max_queued_requests,
      max_waiting_of_client=config.max_waiting_of_client,
      on_tokens=lambda name, count: self.metrics.sampled_tokens.labels(name).inc(count),
      sleeping=self.sleeping,
    )
    self.metrics = Metrics(self.thread)
    self._num_new_grammars = 0
    self._grammar_threads = concurrent.futures.ThreadPoolExecutor(GRAMMAR_THREADS, "grammar")

  def close(self) -> None:
    """Releases threads and grammar workers; call it after the engine thread has ended."""
    self._grammar_threads.shutdown(cancel_futures=True)
    for served in self.models.values():
      served.compiler.close()

  def find(self, name: str) -> Served:
    """Returns the model with this name, or the default model for "".

    Raises:
      Refusal: if there is no such model (404).
    """
    if not name:
      return next(iter(self.models.values()))
    if name not in self.models:
      raise Refusal(
        f"model: got {shown(name)}, expected one of {', '.join(self.models)}; GET /v1/models lists"
        " them.",
        status=404,
        param="model",
        code="model_not_found",
      )
    return self.models[name]

  async def call(self, run: Callable[[], Any]) -> Any:
    """Runs a short function on the engine thread and returns its result.

    Raises:
      Refusal: if the function raises it, or if the server is stopping.
    """
    loop = asyncio.get_running_loop()
    found: asyncio.Future[Any] = loop.create_future()

    def done(result: Any) -> None:
      def tell() -> None:
        if not found.done():  # The client may have disconnected.
          found.set_result(result)

      with contextlib.suppress(RuntimeError):  # The event loop is closed.
        loop.call_soon_threadsafe(tell)

    self.thread.call(run, done)
    result = await found
    if isinstance(result, Exception):
      raise result
    return result

  async def try_grammar(self, asked: Asked, namespace: str) -> None:
    """Compiles a request's grammar if it is new; only other new grammars queue behind it.

    Raises:
      Refusal: if the grammar is unusable, or too many new grammars are queued (429).
    """
    grammar, served = asked.grammar, self.find(asked.model)
    if grammar is None or served.compiler.is_tried(grammar, namespace):
      return
    if self._num_new_grammars >= MOST_NEW_GRAMMARS:
      raise Refusal(
        f"{grammar.param}: got a grammar while {MOST_NEW_GRAMMARS} others are queued for"
        " compilation, expected fewer; retry.",
        status=429, kind="rate_limit_error", param=grammar.param, code="rate_limit_exceeded",
        retry_seconds=1,
      )  # fmt: skip
    self._num_new_grammars += 1
    try:
      await asyncio.get_running_loop().run_in_executor(
        self._grammar_threads, served.compiler.mask, grammar, namespace
      )
    finally:
      self._num_new_grammars -= 1

  def sleeping_of(self, served: Served) -> Sleeping:
    """Returns the contexts of a model.

    Raises:
      Refusal: if the server keeps none for this model (404).
    """
    found = self.sleeping.get(served.name)
    if found is None:
      raise Refusal(
        f"context: got one for {shown(served.name)}, which has no contexts, expected one of"
        f" {', '.join(self.sleeping) or 'none: this server has no contexts'}; start the server with"
        " --contexts.",
        status=404,
        param="context",
        code="no_contexts",
      )
    return found


class Entry:
  """Log line and metrics of one request."""

  def __init__(self, service: Service, route: str):
    self._service, self._route = service, route
    self.start = time.monotonic()
    self.answer_id = uuid.uuid4().hex[:24]
    self.status, self.reason = 500, "-"
    self.num_prompt = self.num_answer = 0

  def see_token(self) -> None:
    if not self.num_answer:
      self._service.metrics.first_token.observe(time.monotonic() - self.start)

  def finish(self) -> None:
    seconds, metrics = time.monotonic() - self.start, self._service.metrics
    metrics.requests.labels(self._route, str(self.status)).inc()
    metrics.duration.observe(seconds)
    metrics.prompt_tokens.inc(self.num_prompt)
    metrics.answer_tokens.inc(self.num_answer)
    LOG.info(
      "%s %s status=%d tokens=%d+%d seconds=%.3f finish=%s",
      self.answer_id, self._route, self.status, self.num_prompt, self.num_answer, seconds,
      self.reason,
    )  # fmt: skip


def refused(refusal: Refusal) -> Response:
  """Returns the HTTP response for a refusal."""
  return Response(
    answers.encoded(refusal.body),
    status_code=refusal.status,
    media_type="application/json",
    headers=dict(refusal.headers),
  )


def json_response(body: Mapping[str, Any], status: int = 200) -> Response:
  """Returns a JSON response."""
  return Response(
    json.dumps(body, allow_nan=False), status_code=status, media_type="application/json"
  )


async def read_body(request: Request, config: ServeConfig) -> bytes:
  """Reads a request body within the configured limits.

  Raises:
    Refusal: if the content type is not JSON (415), the body is too long (413), or it arrives too
      slowly (408).
  """
  kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
  if kind != "application/json":
    raise Refusal(
      f"content-type: got {shown(kind)}, expected application/json; send that header.", status=415
    )
  most = config.max_body_bytes
  length = request.headers.get("content-length", "0")
  if length.isdigit() and int(length) > most:
    raise _too_large(f"{int(length)} bytes", most)
  chunks: list[bytes] = []
  size = 0
  try:
    async with asyncio.timeout(config.body_seconds):
      async for chunk in request.stream():
        size += len(chunk)
        if size > most:
          raise _too_large(f"more than {most} bytes", most)
        chunks.append(chunk)
  except TimeoutError as error:
    raise Refusal(
      f"the body: got {size} bytes in {config.body_seconds:g} s, expected the whole body; send it"
      " faster.",
      status=408,
    ) from error
  return b"".join(chunks)


async def read_object(request: Request, config: ServeConfig) -> dict[str, Any]:
  """Reads a request body that is a JSON object.

  Raises:
    Refusal: see `read_body` and `bodies.parsed`.
  """
  body = await read_body(request, config)
  if len(body) <= QUICK_BYTES:
    return bodies.parsed(body)
  return await asyncio.to_thread(bodies.parsed, body)


def _too_large(got: str, most: int) -> Refusal:
  return Refusal(
    f"the body: got {got}, expected at most {most}; send less.",
    status=413,
    code="request_too_large",
  )
