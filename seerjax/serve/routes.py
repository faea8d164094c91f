"""The routes: who may ask, what is asked, and its answer, whole or piece by piece.

    body --protocol--> Asked --served.plan--> requests --engine_thread--> parts --answers--> body
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
import contextlib
import dataclasses
import hmac
import json
import logging
import time
from typing import Any
import uuid

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from seerjax.serve import answers, protocol, served as served_lib
from seerjax.serve.config import ServeConfig
from seerjax.serve.engine_thread import Begun, EngineThread, Event, Job, Part, PromptScores
from seerjax.serve.family import Family
from seerjax.serve.metrics import Metrics
from seerjax.serve.protocol import Asked
from seerjax.serve.refusals import Refusal, shown
from seerjax.serve.served import Plan, Served
from seerjax.serve.sleeping import Reading, Sleeping

LOG = logging.getLogger("seerjax.serve")
# Of one body: a longer one is read on another thread, so that no other request waits for it.
QUICK_BYTES = 1 << 14
SLOW_FIELDS = (b"response_format", b"regex")  # Grammars are compiled.
# Like nginx's: the client has left, and does not read the status.
GONE = 499


class Service:
  """What the routes share.

  Attributes:
    models: by name; the first is what a request means that names none.
    thread: that runs the engines.
    config: bounds.
    metrics: counters.
    seed_of: `served.choice_seed`.
    families: by the names of their bases, those whose weights may be replaced.
    sleeping: contexts, by the names of the bases that sleep for them.
    is_swapping: whether some are being replaced.
  """

  def __init__(
    self,
    models: Mapping[str, Served],
    config: ServeConfig,
    *,
    seed_of: Callable[[int, int], int] = served_lib.choice_seed,
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
      {name: served.engine for name, served in models.items() if served.beside is None},
      scorers={name: served.scorer for name, served in models.items()},
      max_waiting=config.max_waiting,
      max_waiting_of_client=config.max_waiting_of_client,
      on_tokens=lambda name, count: self.metrics.sampled_tokens.labels(name).inc(count),
      sleeping=self.sleeping,
    )
    self.metrics = Metrics(self.thread)

  def find(self, name: str) -> Served:
    """Returns a model by name.

    Raises:
      Refusal: if there is none (404).
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
    """Returns what a short function returns that runs on the engine's thread.

    Raises:
      Refusal: that it raises, or if the server stops.
    """
    loop = asyncio.get_running_loop()
    found: asyncio.Future[Any] = loop.create_future()

    def done(result: Any) -> None:
      def tell() -> None:
        if not found.done():  # Who asked may have left.
          found.set_result(result)

      with contextlib.suppress(RuntimeError):  # The loop is over.
        loop.call_soon_threadsafe(tell)

    self.thread.call(run, done)
    result = await found
    if isinstance(result, Exception):
      raise result
    return result

  def sleeping_of(self, served: Served) -> Sleeping:
    """Returns the contexts of a model.

    Raises:
      Refusal: if it has none (404).
    """
    found = self.sleeping.get(served.name)
    if found is None:
      raise Refusal(
        f"context: got one for {shown(served.name)}, which sleeps for none, expected one of"
        f" {', '.join(self.sleeping) or 'none: this server sleeps for no model'}; start the server"
        " with --contexts.",
        status=404,
        param="context",
        code="no_contexts",
      )
    return found


class _Entry:
  """One request's line in the log and its place in the counters."""

  def __init__(self, service: Service, route: str):
    self._service, self._route = service, route
    self.begun = time.monotonic()
    self.answer_id = uuid.uuid4().hex[:24]
    self.status, self.reason = 500, "-"
    self.num_prompt = self.num_answer = 0

  def see_token(self) -> None:
    if not self.num_answer:
      self._service.metrics.first_token.observe(time.monotonic() - self.begun)

  def finish(self) -> None:
    seconds, metrics = time.monotonic() - self.begun, self._service.metrics
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
  """Returns a refusal as a response."""
  return Response(
    answers.encoded(refusal.body),
    status_code=refusal.status,
    media_type="application/json",
    headers=dict(refusal.headers),
  )


def namespace_of(request: Request, config: ServeConfig) -> str:
  """Returns whose a request is: a tenant's name, "" with the server's token or where it has none.

  Who sends no token of these is refused, in one way whatever is wrong with it.

  Raises:
    Refusal: 401.
  """
  if not config.token:
    return ""
  scheme, _, sent = request.headers.get("authorization", "").partition(" ")
  tokens = {config.token: "", **config.tenants}
  # All are compared, always, and in constant time.
  found = [
    name
    for token, name in tokens.items()
    if hmac.compare_digest(sent.strip().encode(), token.encode())
  ]
  if not (found and scheme.lower() == "bearer"):
    raise Refusal(
      "authorization: got none that is valid, expected 'Bearer TOKEN' with the server's token; send"
      " it as the API key.",
      status=401,
      kind="authentication_error",
      code="invalid_api_key",
    )
  return found[0]


def require_token(request: Request, config: ServeConfig) -> None:
  """Refuses who does not send the server's own token.

  Raises:
    Refusal: 401 as `namespace_of`, 403 for a tenant.
  """
  if namespace_of(request, config):
    raise Refusal(
      "authorization: got a tenant's token, expected the server's own for what concerns all; ask"
      " whoever runs the server.",
      status=403,
      kind="permission_error",
      code="not_a_tenants",
    )


async def read_body(request: Request, config: ServeConfig) -> bytes:
  """Returns a body within its bounds.

  Raises:
    Refusal: if it is no JSON by its type (415), too long (413), or takes too long (408).
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
      f"the body: got {size} bytes in {config.body_seconds:g} s, expected all of it; send it"
      " faster.",
      status=408,
    ) from error
  return b"".join(chunks)


def _too_large(got: str, most: int) -> Refusal:
  return Refusal(
    f"the body: got {got}, expected at most {most}; send less.",
    status=413,
    code="request_too_large",
  )


class Asking:
  """One request for answers, from its body to its last byte: an ASGI response.

  A client that leaves cancels its job, whether it reads a stream or waits for the whole.
  """

  def __init__(self, service: Service, request: Request, route: str):
    self._service = service
    self._request = request
    self._is_chat = route == "/v1/chat/completions"
    self._entry = _Entry(service, route)
    self._job: Job | None = None
    self._has_begun = False

  async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
    entry = self._entry
    try:
      async with asyncio.timeout(self._service.config.timeout_seconds):
        plan = await self._plan()
        await self._until_gone(self._run(plan, send), receive)
    except Refusal as refusal:
      await self._refuse(refusal, send)
    except TimeoutError:
      seconds = self._service.config.timeout_seconds
      await self._refuse(
        Refusal(
          f"the server: got no whole answer in {seconds:g} s, expected one; ask for fewer tokens,"
          " or later.",
          status=504,
          kind="timeout_error",
          code="timeout",
        ),
        send,
      )
    except (ClientDisconnect, OSError):
      entry.status, entry.reason = GONE, "gone"
    except asyncio.CancelledError:
      entry.status, entry.reason = 503, "stopped"
      raise
    except Exception:
      LOG.exception("%s: got an error of the server's own", entry.answer_id)
      await self._refuse(
        Refusal(
          "the server: got an error of its own, expected none; look into its log.",
          status=500,
          kind="server_error",
          code="internal_error",
        ),
        send,
      )
    finally:
      if self._job is not None:
        self._service.thread.cancel(self._job)
      entry.finish()

  async def _refuse(self, refusal: Refusal, send: Send) -> None:
    self._entry.status, self._entry.reason = refusal.status, refusal.code or "refused"
    with contextlib.suppress(OSError):
      if not self._has_begun:
        await _send_whole(send, refused(refusal))
      else:  # The status is out: a stream ends by what went wrong, and without [DONE].
        await send(_body(answers.event(refusal.body), more=False))

  async def _plan(self) -> Plan:
    config = self._service.config
    namespace = namespace_of(self._request, config)
    body = await read_body(self._request, config)
    if len(body) <= QUICK_BYTES and not any(word in body for word in SLOW_FIELDS):
      return await self._planned(self._asked(body), namespace)
    asked = await asyncio.to_thread(self._asked, body)
    reading = await self._reading(asked, namespace)
    return await asyncio.to_thread(self._plan_of, asked, namespace, reading)

  def _asked(self, body: bytes) -> Asked:
    read = protocol.chat if self._is_chat else protocol.completion
    return read(protocol.parsed(body))

  async def _planned(self, asked: Asked, namespace: str) -> Plan:
    return self._plan_of(asked, namespace, await self._reading(asked, namespace))

  async def _reading(self, asked: Asked, namespace: str) -> Reading | None:
    """Returns the context that a question is about, as it is read now."""
    if not asked.context:
      return None
    sleeping = self._service.sleeping_of(self._service.find(asked.model))
    question = asked.messages[0]["content"]
    return await self._service.call(lambda: sleeping.read(namespace, asked.context, question))

  def _plan_of(self, asked: Asked, namespace: str, reading: Reading | None) -> Plan:
    if reading is not None:
      asked = dataclasses.replace(asked, messages=reading.messages)
    return served_lib.plan(
      asked,
      self._service.find(asked.model),
      job_id=self._entry.answer_id,
      max_answer_tokens=self._service.config.max_answer_tokens,
      seed_of=self._service.seed_of,
      namespace=namespace,
      reading=reading,
    )

  async def _until_gone(self, running: Any, receive: Receive) -> None:
    """Runs it as long as the client is there."""
    task = asyncio.ensure_future(running)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
      await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
      if not task.done():
        raise ClientDisconnect
      task.result()
    finally:
      for one in (task, gone):
        one.cancel()
      await asyncio.gather(task, gone, return_exceptions=True)

  async def _run(self, plan: Plan, send: Send) -> None:
    asked, entry = plan.asked, self._entry
    entry.num_prompt = sum(len(prompt) for prompt in plan.prompts)
    prefix = "chatcmpl" if asked.is_chat else "cmpl"
    answer = answers.Answer(
      plan, answer_id=f"{prefix}-{entry.answer_id}", created=int(time.time())
    )
    if not asked.is_streamed:
      parts = [part async for part in self._parts(plan, answer)]
      body = answers.encoded(answer.whole(parts))
      entry.status, self._has_begun = 200, True
      await _send_whole(send, Response(body, media_type="application/json"))
      return
    async for part in self._parts(plan, answer):
      if not self._has_begun:
        self._has_begun, entry.status = True, 200
        await send(_stream_head())
      for piece in answer.piece(part):
        await send(_body(answers.event(piece), more=True))
    if asked.wants_usage:
      await send(_body(answers.event(answer.last_piece()), more=True))
    await send(_body(answers.DONE, more=False))

  async def _parts(self, plan: Plan, answer: answers.Answer) -> AsyncIterator[Part]:
    """Submits the job and yields its parts until every choice has ended."""
    asked, entry = plan.asked, self._entry
    loop, events = asyncio.get_running_loop(), asyncio.Queue[Event]()

    def deliver(event: Event) -> None:
      with contextlib.suppress(RuntimeError):  # The loop is over, and with it who would read.
        loop.call_soon_threadsafe(events.put_nowait, event)

    address = self._request.client.host if self._request.client else ""
    self._job = job = Job(
      job_id=entry.answer_id,
      client=f"{address}/{asked.user}",
      model=plan.served.base.name,
      adapter=plan.served.adapter,
      fingerprint=lambda: plan.served.fingerprint,
      reading=plan.reading,
      requests=plan.requests,
      masks=plan.masks,
      num_choices=asked.num_choices,
      is_streamed=asked.is_streamed,
      num_top=asked.num_top,
      wants_prompt=asked.wants_prompt,
      num_prompt_top=asked.num_prompt_top,
      deliver=deliver,
    )
    self._service.thread.submit(job)
    left, reasons = len(plan.requests), set()
    while left:
      found = await events.get()
      if isinstance(found, Refusal):
        raise found
      if isinstance(found, Begun):
        answer.begin(found.fingerprint)
        continue
      if isinstance(found, PromptScores):
        answer.take_prompt(found)
        continue
      if found.finish_reason == "error":
        raise Refusal(
          f"the answer: got an error ({found.error}), expected none; ask again.",
          status=500,
          kind="server_error",
          code="answer_failed",
        )
      entry.see_token()
      entry.num_answer += len(found.tokens)
      if found.finish_reason:
        left -= 1
        reasons.add(found.finish_reason)
      yield found
    self._job = None  # There is nothing left to cancel.
    entry.reason = "+".join(sorted(reasons))


async def _disconnected(receive: Receive) -> None:
  while (await receive())["type"] != "http.disconnect":
    pass


def _stream_head() -> Message:
  kind = b"text/event-stream; charset=utf-8"
  headers = [(b"content-type", kind), (b"cache-control", b"no-store")]
  return {"type": "http.response.start", "status": 200, "headers": headers}


def _body(data: bytes, *, more: bool) -> Message:
  return {"type": "http.response.body", "body": data, "more_body": more}


async def _send_whole(send: Send, response: Response) -> None:
  await send(
    {
      "type": "http.response.start",
      "status": response.status_code,
      "headers": response.raw_headers,
    }
  )
  await send(_body(bytes(response.body), more=False))


def application(service: Service) -> Starlette:
  """Returns the ASGI application; the service's thread is started and stopped by its owner."""
  config = service.config

  def asking(route: str) -> Route:
    async def endpoint(request: Request) -> Any:
      return Asking(service, request, route)

    return Route(route, endpoint, methods=["POST"])

  async def models(request: Request) -> Response:
    namespace_of(request, config)
    listed = [_described(served) for served in service.models.values()]
    return _json({"object": "list", "data": listed})

  async def model(request: Request) -> Response:
    namespace_of(request, config)
    return _json(_described(service.find(request.path_params["name"])))

  async def health(request: Request) -> Response:
    del request  # Open to all that can reach the port: it says nothing else.
    thread = service.thread
    if not thread.is_alive or thread.is_stopping:
      return _json({"status": "stopping" if thread.is_alive else "stopped"}, status=503)
    return _json({"status": "ok"})

  async def metrics(request: Request) -> Response:
    require_token(request, config)
    return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

  async def weights(request: Request) -> Response:
    return await _replace_weights(service, request)

  async def contexts(request: Request) -> Response:
    return await _contexts(service, request)

  async def on_refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return refused(error)

  async def on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    routes = (
      "POST /v1/chat/completions, /v1/completions, /v1/contexts, /v1/weights; GET /v1/models,"
      " /v1/contexts, /health, /metrics; DELETE /v1/contexts/NAME"
    )
    got = f"{request.method} {shown(request.url.path)}"
    return refused(
      Refusal(
        f"the route: got {got}, expected one of {routes}; correct the base URL, which ends in /v1.",
        status=error.status_code,
        code="unknown_route",
      )
    )

  return Starlette(
    routes=[
      asking("/v1/chat/completions"),
      asking("/v1/completions"),
      Route("/v1/contexts", contexts, methods=["GET", "POST"]),
      Route("/v1/contexts/{name:path}", contexts, methods=["GET", "DELETE"]),
      Route("/v1/weights", weights, methods=["POST"]),
      Route("/v1/models", models),
      Route("/v1/models/{name:path}", model),
      Route("/health", health),
      Route("/metrics", metrics),
    ],
    exception_handlers={Refusal: on_refusal, HTTPException: on_http},
  )


async def _contexts(service: Service, request: Request) -> Response:
  """Registers, lists, shows or forgets contexts of a caller.

  Raises:
    Refusal: if it may not ask, the body is none, or the context is not its own.
  """
  entry = _Entry(service, "/v1/contexts")
  try:
    namespace = namespace_of(request, service.config)
    sleeping = service.sleeping_of(service.find(request.query_params.get("model", "")))
    name = request.path_params.get("name", "")
    if request.method == "POST":
      sent = protocol.context(protocol.parsed(await read_body(request, service.config)))
      run = lambda: sleeping.register(namespace, sent.name, sent.text, sent.ttl_steps)
    elif request.method == "DELETE":
      run = lambda: sleeping.forget(namespace, name)
    else:
      run = lambda: sleeping.inspect(namespace, name) if name else sleeping.list(namespace)
    body = await service.call(run)
    entry.status, entry.reason = 200, request.method.lower()
    return _json(body)
  except Refusal as refusal:
    entry.status, entry.reason = refusal.status, refusal.code or "refused"
    raise
  finally:
    entry.finish()


async def _replace_weights(service: Service, request: Request) -> Response:
  """Reads a directory, and puts its weights in the place of a model's between two requests.

  Raises:
    Refusal: if there is no token to ask for, or not the token; if the directory's weights are not
      this model's; or if others are being put there.
  """
  entry = _Entry(service, "/v1/weights")
  try:
    served = await _replaced(service, request)
    entry.status, entry.reason = 200, "replaced"
    return _json(_described(served))
  except Refusal as refusal:
    entry.status, entry.reason = refusal.status, refusal.code or "refused"
    raise
  finally:
    entry.finish()


async def _replaced(service: Service, request: Request) -> Served:
  if not service.config.token:
    raise Refusal(
      "weights: got a server without a token, expected one that has one: every caller of the port"
      " could replace them; set SEERJAX_SERVE_TOKEN or --token_file.",
      status=403,
      kind="permission_error",
      code="token_required",
    )
  require_token(request, service.config)
  name, directory = protocol.weights(
    protocol.parsed(await read_body(request, service.config))
  )
  served = service.find(name)
  family = service.families.get(served.base.name)
  if family is None:
    raise Refusal(
      f"model: got {shown(served.name)}, whose weights this server keeps, expected one of"
      f" {', '.join(service.families) or 'none'}; start a server of the directory.",
      param="model",
    )
  if service.is_swapping:
    raise Refusal(
      "weights: got another directory while one is being put in place, expected one after the"
      " other; ask again when that is done.",
      status=409,
      kind="conflict_error",
      code="weights_busy",
      retry_seconds=1,
    )
  service.is_swapping = True
  loop = asyncio.get_running_loop()
  found: asyncio.Future[Any] = loop.create_future()

  def done(result: Any) -> None:
    def tell() -> None:
      service.is_swapping = False
      if not found.done():  # Who asked may have left.
        found.set_result(result)

    with contextlib.suppress(RuntimeError):  # The loop is over.
      loop.call_soon_threadsafe(tell)

  try:
    loaded = await asyncio.to_thread(family.read, served.name, directory)
    service.thread.swap(lambda: family.put(loaded), done)
  except BaseException as error:
    service.is_swapping = False
    if isinstance(error, ValueError | OSError):
      raise _unfit(error) from error
    raise
  result = await found
  if isinstance(result, ValueError):
    raise _unfit(result) from result
  if isinstance(result, Exception):
    raise result
  return result


def _unfit(error: Exception) -> Refusal:
  return Refusal(f"directory: {error}", param="directory", code="unfit_weights")


def _described(served: Served) -> dict[str, Any]:
  return {
    "id": served.name,
    "object": "model",
    "created": served.created,
    "owned_by": "seerjax",
    "parent": None if served.beside is None else served.beside.name,
    "max_model_len": served.context,
    "system_fingerprint": served.fingerprint,
    # Of the model's own files; a request's fields come before them.
    "defaults": {**served.defaults.in_force, "eos_token_id": [*served.tokenizer.eos_ids]},
    "not_taken": [*served.defaults.not_taken],
  }


def _json(body: Mapping[str, Any], status: int = 200) -> Response:
  return Response(
    json.dumps(body, allow_nan=False), status_code=status, media_type="application/json"
  )
