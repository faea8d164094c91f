"""Handles one request for responses, from its body to the last byte.

body --protocol--> Asked --served.plan--> requests --engine_thread--> parts --answers--> body
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
import contextlib
import dataclasses
import time
from typing import Any, NamedTuple

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from seerjax.serve import (
  answers,
  auth,
  bodies,
  protocol,
  responses,
  served as served_lib,
  service as service_lib,
)
from seerjax.serve.engine_thread import Event, Job, Part, PromptScores, Started
from seerjax.serve.protocol import Asked
from seerjax.serve.refusals import Refusal
from seerjax.serve.served import Plan
from seerjax.serve.service import LOG, Entry, Service
from seerjax.serve.sleeping import Reading

# The status that nginx uses if the client disconnected before a response.
GONE = 499


class Kind(NamedTuple):
  """Request parser and response writer of one route.

  Attributes:
    read: parses a body.
    answer: class that writes the response.
    prefix: prefix of the response id.
  """

  read: Callable[[Mapping[str, Any]], Asked]
  answer: type[answers.Answer]
  prefix: str


KINDS = {
  "/v1/chat/completions": Kind(protocol.chat, answers.Answer, "chatcmpl-"),
  "/v1/completions": Kind(protocol.completion, answers.Answer, "cmpl-"),
  "/v1/responses": Kind(responses.read, responses.ResponseAnswer, "resp_"),
}


class Asking:
  """ASGI response that handles one request for responses.

  If the client disconnects, the job is cancelled, whether or not the response is streamed.
  """

  def __init__(self, service: Service, request: Request, route: str):
    self._service = service
    self._request = request
    self._kind = KINDS[route]
    self._answer: answers.Answer | None = None
    self._entry = Entry(service, route)
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
          f"the server: got no complete response in {seconds:g} s, expected one; request fewer"
          " tokens, or retry later.",
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
      LOG.exception("%s: got an internal error", entry.answer_id)
      await self._refuse(
        Refusal(
          "the server: got an internal error, expected none; see the server's log.",
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
        await _send_whole(send, service_lib.refused(refusal))
      elif self._answer is not None:  # The status line was sent: end the stream with the error.
        await send(_body(self._answer.failure(refusal), more=False))

  async def _plan(self) -> Plan:
    config = self._service.config
    namespace = auth.namespace_of(self._request, config)
    body = await service_lib.read_body(self._request, config)
    is_quick = len(body) <= service_lib.QUICK_BYTES
    asked = self._asked(body) if is_quick else await asyncio.to_thread(self._asked, body)
    await self._service.try_grammar(asked, namespace)
    reading = await self._reading(asked, namespace)
    if is_quick and asked.grammar is None:  # A grammar may have been evicted and compile again.
      return self._plan_of(asked, namespace, reading)
    return await asyncio.to_thread(self._plan_of, asked, namespace, reading)

  def _asked(self, body: bytes) -> Asked:
    asked = self._kind.read(bodies.parsed(body))
    if asked.ignored and self._service.config.strict_fields:
      name = asked.ignored[0]
      raise Refusal(
        f"{name}: got a field that has no effect here, expected none on a server with"
        " --strict_fields; leave it out.",
        param=name,
        code="unsupported_parameter",
      )
    return asked

  async def _reading(self, asked: Asked, namespace: str) -> Reading | None:
    """Returns the context that a question is about, in its current version."""
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
    """Runs a coroutine until it ends or the client disconnects."""
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
    self._answer = answer = self._kind.answer(
      plan, answer_id=self._kind.prefix + entry.answer_id, created=int(time.time())
    )
    if not asked.is_streamed:
      parts = [part async for part in self._parts(plan, answer)]
      body = answers.encoded(answer.whole(parts))
      entry.status, self._has_begun = 200, True
      await _send_whole(
        send, Response(body, media_type="application/json", headers=_ignored(asked))
      )
      return
    async for part in self._parts(plan, answer):
      if not self._has_begun:
        self._has_begun, entry.status = True, 200
        await send(_stream_head(asked))
      for chunk in answer.chunks(part):
        await send(_body(chunk, more=True))
    await send(_body(answer.end(), more=False))

  async def _parts(self, plan: Plan, answer: answers.Answer) -> AsyncIterator[Part]:
    """Submits the job and yields its parts until every choice has finished."""
    asked, entry = plan.asked, self._entry
    loop, events = asyncio.get_running_loop(), asyncio.Queue[Event]()

    def deliver(event: Event) -> None:
      with contextlib.suppress(RuntimeError):  # The event loop is closed.
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
    held: list[Part] = []  # Parts that arrived before the scores of their prompt.
    while left:
      found = await events.get()
      if isinstance(found, Refusal):
        raise found
      if isinstance(found, Started):
        answer.begin(found.fingerprint)
      elif isinstance(found, PromptScores):
        answer.take_prompt(found)
      elif found.finish_reason == "error":
        raise Refusal(
          f"the answer: got an error ({found.error}), expected none; retry.",
          status=500,
          kind="server_error",
          code="answer_failed",
        )
      else:
        held.append(found)
      due = [part for part in held if answer.is_due(part.choice)]
      held = [part for part in held if not answer.is_due(part.choice)]
      for part in due:
        entry.see_token()
        entry.num_answer += len(part.tokens)
        if part.finish_reason:
          left -= 1
          reasons.add(part.finish_reason)
        yield part
    self._job = None  # Nothing is left to cancel.
    entry.reason = "+".join(sorted(reasons))


async def _disconnected(receive: Receive) -> None:
  while (await receive())["type"] != "http.disconnect":
    pass


def _ignored(asked: Asked) -> dict[str, str]:
  """Returns the header that lists fields accepted without effect."""
  return {"x-ignored-fields": ", ".join(asked.ignored)} if asked.ignored else {}


def _stream_head(asked: Asked) -> Message:
  kind = b"text/event-stream; charset=utf-8"
  headers = [(b"content-type", kind), (b"cache-control", b"no-store")]
  headers += [(name.encode(), value.encode()) for name, value in _ignored(asked).items()]
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
