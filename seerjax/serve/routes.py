"""HTTP routes: maps paths to handlers, and implements those that do not sample."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from seerjax.serve import auth, page, protocol, service as service_lib, tokens
from seerjax.serve.asking import KINDS, Asking
from seerjax.serve.refusals import Refusal, shown
from seerjax.serve.served import Served
from seerjax.serve.service import Service


def application(service: Service) -> Starlette:
  """Returns the ASGI application. The caller starts and stops the service's engine thread."""
  config = service.config

  def asking(route: str) -> Route:
    async def endpoint(request: Request) -> Any:
      return Asking(service, request, route)

    return Route(route, endpoint, methods=["POST"])

  shown_page = page.response()

  async def front(request: Request) -> Response:
    del request  # Needs no token: the page contains no data.
    return shown_page

  async def models(request: Request) -> Response:
    auth.namespace_of(request, config)
    listed = [_described(served) for served in service.models.values()]
    return service_lib.json_response({"object": "list", "data": listed})

  async def model(request: Request) -> Response:
    auth.namespace_of(request, config)
    return service_lib.json_response(_described(service.find(request.path_params["name"])))

  async def health(request: Request) -> Response:
    del request  # Needs no token: reports nothing but the status.
    thread = service.thread
    if not thread.is_alive or thread.is_stopping:
      status = "stopping" if thread.is_alive else "stopped"
      return service_lib.json_response({"status": status}, status=503)
    return service_lib.json_response({"status": "ok"})

  async def metrics(request: Request) -> Response:
    auth.require_token(request, config)
    return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

  async def weights(request: Request) -> Response:
    return await _replace_weights(service, request)

  async def contexts(request: Request) -> Response:
    return await _contexts(service, request)

  async def tokenize(request: Request) -> Response:
    auth.namespace_of(request, config)
    body = await service_lib.read_object(request, config)
    return service_lib.json_response(await asyncio.to_thread(tokens.tokenize, body, service.find))

  async def detokenize(request: Request) -> Response:
    auth.namespace_of(request, config)
    body = await service_lib.read_object(request, config)
    return service_lib.json_response(await asyncio.to_thread(tokens.detokenize, body, service.find))

  async def embeddings(request: Request) -> Response:
    auth.namespace_of(request, config)
    # Not 501: clients retry on status 500 and above.
    raise Refusal(
      "/v1/embeddings: got a request for embeddings, expected one for text: these models generate"
      " text and were not trained to embed; use a server with an embedding model.",
      code="unsupported_route",
    )

  async def on_refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return service_lib.refused(error)

  async def on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    routes = (
      "POST /v1/chat/completions, /v1/completions, /v1/responses, /v1/contexts, /v1/weights,"
      " /tokenize, /detokenize; GET /, /v1/models, /v1/contexts, /health, /metrics; DELETE"
      " /v1/contexts/NAME"
    )
    got = f"{request.method} {shown(request.url.path)}"
    return service_lib.refused(
      Refusal(
        f"the route: got {got}, expected one of {routes}; correct the base URL, which ends in /v1.",
        status=error.status_code,
        code="unknown_route",
      )
    )

  return Starlette(
    routes=[
      Route("/", front),
      *map(asking, KINDS),
      Route("/tokenize", tokenize, methods=["POST"]),
      Route("/detokenize", detokenize, methods=["POST"]),
      Route("/v1/embeddings", embeddings, methods=["GET", "POST"]),
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
  """Registers, lists, returns or deletes contexts of the caller.

  Raises:
    Refusal: if the caller is not authorised, the body is invalid, or the caller has no such
      context.
  """
  entry = service_lib.Entry(service, "/v1/contexts")
  try:
    namespace = auth.namespace_of(request, service.config)
    sleeping = service.sleeping_of(service.find(request.query_params.get("model", "")))
    name = request.path_params.get("name", "")
    if request.method == "POST":
      sent = protocol.context(await service_lib.read_object(request, service.config))
      run = lambda: sleeping.register(namespace, sent.name, sent.text, sent.ttl_steps)
    elif request.method == "DELETE":
      run = lambda: sleeping.forget(namespace, name)
    else:
      run = lambda: sleeping.inspect(namespace, name) if name else sleeping.list(namespace)
    body = await service.call(run)
    entry.status, entry.reason = 200, request.method.lower()
    return service_lib.json_response(body)
  except Refusal as refusal:
    entry.status, entry.reason = refusal.status, refusal.code or "refused"
    raise
  finally:
    entry.finish()


async def _replace_weights(service: Service, request: Request) -> Response:
  """Reads a directory and replaces a model's weights by its own between two requests.

  Raises:
    Refusal: if the server has no token, or the request has another one; if the weights do not fit
      the model; or if another replacement is in progress.
  """
  entry = service_lib.Entry(service, "/v1/weights")
  try:
    served = await _replaced(service, request)
    entry.status, entry.reason = 200, "replaced"
    return service_lib.json_response(_described(served))
  except Refusal as refusal:
    entry.status, entry.reason = refusal.status, refusal.code or "refused"
    raise
  finally:
    entry.finish()


async def _replaced(service: Service, request: Request) -> Served:
  if not service.config.token:
    raise Refusal(
      "weights: got a server without a token, expected one with a token, since any caller could"
      " replace the weights; set SEERJAX_SERVE_TOKEN or --token_file.",
      status=403,
      kind="permission_error",
      code="token_required",
    )
  auth.require_token(request, service.config)
  name, directory = protocol.weights(await service_lib.read_object(request, service.config))
  served = service.find(name)
  family = service.families.get(served.base.name)
  if family is None:
    raise Refusal(
      f"model: got {shown(served.name)}, a model with fixed weights, expected one of"
      f" {', '.join(service.families) or 'none'}; start a server for the directory.",
      param="model",
    )
  if service.is_swapping:
    raise Refusal(
      "weights: got another directory during a weight update, expected one update at a time; retry"
      " when it is done.",
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
      if not found.done():  # The client may have disconnected.
        found.set_result(result)

    with contextlib.suppress(RuntimeError):  # The event loop is closed.
      loop.call_soon_threadsafe(tell)

  try:
    loaded = await asyncio.to_thread(family.read, served.name, directory)
    service.thread.swap(lambda: family.put(loaded), done)
  except BaseException as error:
    service.is_swapping = False
    if isinstance(error, ValueError | OSError | ImportError | NotImplementedError):
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
    "parent": None if served.parent is None else served.parent.name,
    "max_model_len": served.context,
    "system_fingerprint": served.fingerprint,
    # From the model's own files; fields of a request override them.
    "defaults": {**served.defaults.in_force, "eos_token_id": [*served.tokenizer.eos_ids]},
    "not_taken": [*served.defaults.not_taken],
  }
