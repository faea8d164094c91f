"""OpenAI's Responses protocol for text: parses a request as a chat and writes it as a response.

    input, instructions --> messages --protocol.chat--> Asked --> parts --> output items, events

Nothing is stored; to continue a conversation, clients send its items again as `input`.
Source: https://platform.openai.com/docs/api-reference/responses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import json
from typing import Any

from seerjax.serve import answers, bodies, protocol
from seerjax.serve.answers import Body
from seerjax.serve.engine_thread import Part
from seerjax.serve.parts import Piece
from seerjax.serve.protocol import Asked
from seerjax.serve.refusals import Refusal, refuse, shown

LOGPROBS = "message.output_text.logprobs"
# Fields with the same name and meaning as in a chat.
SAME = (
  "model", "temperature", "top_p", "top_k", "min_p", "presence_penalty",
  "frequency_penalty", "repetition_penalty", "logit_bias", "seed", "stop",
  "stop_token_ids", "stream", "stream_options", "regex", "user", "chat_template_kwargs", "context",
)  # fmt: skip
SUPPORTED = (*SAME, "input", "instructions", "max_output_tokens", "text", "top_logprobs", "include")
# Fields that are accepted only with values that have no effect; others need missing features.
NEUTRAL: Mapping[str, tuple[tuple[Any, ...], str]] = {
  "background": ((False,), "request a stream"),
  "conversation": ((), "no conversation is stored: send its earlier items as input"),
  "max_tool_calls": ((), "leave it out: there are no tools"),
  "parallel_tool_calls": ((True, False), "leave it out: there are no tools"),
  "previous_response_id": ((), "no response is stored: send the earlier items as input"),
  "prompt": ((), "send the text itself as instructions and input"),
  "tool_choice": (("auto", "none"), "leave it out: there are no tools"),
  "tools": (([],), "use /v1/chat/completions, which supports tools"),
  "truncation": (("disabled",), "send less input"),
}
# Names of chat fields, as refusals have them, and the names in the client's body.
_WRITTEN = (
  ("messages", "input"), ("max_completion_tokens", "max_output_tokens"),
  ("response_format.json_schema", "text.format"), ("response_format", "text.format"),
)  # fmt: skip


def read(body: Mapping[str, Any]) -> Asked:
  """Parses the body of /v1/responses.

  Raises:
    Refusal: if a field is unknown, unsupported or invalid; names the field.
  """
  left = {name: value for name, value in body.items() if value is not None}
  chat: dict[str, Any] = {name: left.pop(name) for name in SAME if name in left}
  for name in bodies.WITHOUT_EFFECT & left.keys():
    chat[name] = left.pop(name)
  messages = _messages(left.pop("input", None))
  if "instructions" in left:
    first = {"role": "system", "content": left.pop("instructions")}
    messages = {"instructions": first, **messages}
  chat["messages"] = [*messages.values()]
  if "max_output_tokens" in left:
    chat["max_completion_tokens"] = left.pop("max_output_tokens")
  ignored = _format(left.pop("text", {}), chat)
  _logprobs(left, chat)
  for name, value in left.items():
    if name not in NEUTRAL:
      raise Refusal(
        f"{name[:80]}: got a field that is not supported, expected one of {', '.join(SUPPORTED)};"
        " leave it out.",
        param=name[:80],
        code="unsupported_parameter",
      )
    neutral, fix = NEUTRAL[name]
    if value not in neutral:
      only = " or ".join(json.dumps(one) for one in neutral) or "nothing"
      refuse(name, shown(value), only, fix, code="unsupported_parameter")
  try:
    asked = protocol.chat(chat)
  except Refusal as refusal:
    raise _as_written(refusal, [*messages]) from refusal
  if asked.grammar is not None and asked.grammar.param == "response_format":
    asked = dataclasses.replace(
      asked, grammar=dataclasses.replace(asked.grammar, param="text.format")
    )
  return dataclasses.replace(
    asked,
    ignored=tuple(sorted({*asked.ignored, *ignored})),
    names={"messages": "input", "max_tokens": "max_output_tokens"},
  )


def _as_written(refusal: Refusal, messages: Sequence[str]) -> Refusal:
  """Returns a chat's refusal with the field named as in the client's body.

  Args:
    refusal: refusal that names a field of the chat.
    messages: for each message of the chat, its path in the body; plain text has no subfields.
  """
  of_messages = []
  for place, name in enumerate(messages):
    ours = f"messages[{place}]"
    of_messages += [(ours, name)] if "[" in name else [(f"{ours}.content", name), (ours, name)]
  for ours, written in (*of_messages, *_WRITTEN):
    if refusal.param is not None and refusal.param.startswith(ours):
      param = written + refusal.param.removeprefix(ours)
      message = refusal.message.replace(refusal.param, param)
      return Refusal(message, status=refusal.status, param=param, code=refusal.code)
  return refusal


def _messages(value: Any) -> dict[str, dict[str, Any]]:
  """Returns the messages of an `input`, keyed by their paths in the body.

  An `input` is a text, or a list of items as they were sent and returned.
  """
  if isinstance(value, str):
    return {"input": {"role": "user", "content": value}}
  if not isinstance(value, list) or not value:
    refuse("input", shown(value), "text, or a list of at least one item", "send some text")
  messages: dict[str, dict[str, Any]] = {}
  thought = ""
  for place, item in enumerate(value):
    where = f"input[{place}]"
    if not isinstance(item, dict):
      refuse(where, shown(item), "an object", 'write {"role": "user", "content": "..."}')
    kind = item.get("type", "message")
    known = ("type", "id", "status", "content", "role", "phase")
    if kind == "reasoning":
      known = ("type", "id", "status", "content", "summary", "encrypted_content")
    elif kind != "message":
      refuse(f"{where}.type", shown(kind), '"message" or "reasoning"', "send text only")
    for name in item:
      if name not in known:
        refuse(f"{where}.{name[:80]}", "a field that is not supported", ", ".join(known),
               "leave it out", code="unsupported_parameter")  # fmt: skip
    text = _text_of(f"{where}.content", item.get("content") or "")
    if kind == "reasoning":  # It belongs to the next assistant message.
      thought += text
      continue
    messages[where] = {"role": item.get("role"), "content": text}
    if thought and item.get("role") == "assistant":
      messages[where]["reasoning_content"] = thought
    thought = ""
  return messages


def _text_of(where: str, content: Any) -> Any:
  """Returns the text of an item's parts; any other value is left for the chat to validate."""
  if not isinstance(content, list):
    return content
  found = ""
  for place, part in enumerate(content):
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in ("input_text", "output_text", "reasoning_text"):
      refuse(f"{where}[{place}].type", shown(kind), "input_text or output_text", "send text only")
    if not isinstance(part.get("text"), str):
      refuse(f"{where}[{place}].text", shown(part.get("text")), "text", "write it in quotes")
    found += part["text"]
  return found


def _format(value: Any, chat: dict[str, Any]) -> list[str]:
  """Moves the format in `text` into a chat; returns the names of fields without effect."""
  if not isinstance(value, dict):
    refuse("text", shown(value), "an object", 'write {"format": {"type": "text"}}')
  for name in value:
    if name not in ("format", "verbosity"):
      refuse(f"text.{name[:80]}", "a field that is not supported", "format", "leave it out",
             code="unsupported_parameter")  # fmt: skip
  form = value.get("format")
  if isinstance(form, dict) and form.get("type") == "json_schema":
    written = {name: one for name, one in form.items() if name != "type"}
    form = {"type": "json_schema", "json_schema": written}
  if form is not None:
    chat["response_format"] = form
  return ["text.verbosity"] if value.get("verbosity") is not None else []


def _logprobs(left: dict[str, Any], chat: dict[str, Any]) -> None:
  """Moves the options for log-probabilities from a body into a chat."""
  include = left.pop("include", [])
  if not isinstance(include, list):
    refuse("include", shown(include), "a list", f'write ["{LOGPROBS}"]')
  for one in include:
    if one != LOGPROBS:
      refuse("include", shown(one), f'"{LOGPROBS}" alone', "leave the others out")
  num_top = left.pop("top_logprobs", None)
  if num_top is not None:
    chat["top_logprobs"] = num_top
  if include or num_top:
    chat["logprobs"] = True


class ResponseAnswer(answers.Answer):
  """Builds one response incrementally: its output items, and the events that stream them."""

  def __init__(self, plan: Any, *, answer_id: str, created: int):
    super().__init__(plan, answer_id=answer_id, created=created)
    self._output: list[Body] = []
    self._num_events = 0
    self._rows: list[Body] = []  # Scores of tokens that have no text yet.
    self._is_open = False  # Whether the last item is unfinished.
    self._finish_reason = ""

  def whole(self, parts: Sequence[Part]) -> Body:
    """Returns the body of a non-streamed response."""
    (part,) = parts
    for _ in self._grown(part):
      pass
    return self._response()

  def chunks(self, part: Part) -> list[bytes]:
    """Returns the events of a stream for a part."""
    found = []
    if not self._num_events:
      found += [self._event(f"response.{kind}", response=self._response())
                for kind in ("created", "in_progress")]  # fmt: skip
    return found + [*self._grown(part)]

  def end(self) -> bytes:
    """Returns the final event of a stream, which has the whole response."""
    body = self._response()
    return self._event(f"response.{body['status']}", response=body)

  def failure(self, refusal: Refusal) -> bytes:
    """Returns the final event of a stream that failed."""
    error = refusal.body["error"]
    return self._event("error", code=error["code"], message=error["message"], param=error["param"])

  def _event(self, kind: str, **fields: Any) -> bytes:
    body = {"type": kind, "sequence_number": self._num_events, **fields}
    self._num_events += 1
    return f"event: {kind}\n".encode() + answers.event(body)

  def _response(self) -> Body:
    asked, request = self._plan.asked, self._plan.requests[0]
    status = {"": "in_progress", "length": "incomplete"}.get(self._finish_reason, "completed")
    read = self.usage
    usage = {
      "input_tokens": read["prompt_tokens"],
      "input_tokens_details": {"cached_tokens": 0},  # Not counted, nor are reasoning tokens.
      "output_tokens": read["completion_tokens"],
      "output_tokens_details": {"reasoning_tokens": 0},
      "total_tokens": read["total_tokens"],
    }
    head = dict(self._head)
    return {
      "id": head.pop("id"),
      "object": "response",
      "created_at": head.pop("created"),
      **{name: value for name, value in head.items() if name != "object"},
      "status": status,
      "error": None,
      "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
      "instructions": None,
      "max_output_tokens": asked.max_tokens,
      "metadata": {},
      "output": self._output,
      "parallel_tool_calls": True,
      "previous_response_id": None,
      "seed": request.seed,
      "temperature": request.sampling.temperature,
      "tool_choice": "auto",
      "tools": [],
      "top_p": request.sampling.top_p,
      "truncation": "disabled",
      "usage": None if status == "in_progress" else usage,
    }

  def _grown(self, part: Part) -> Iterator[bytes]:
    """Adds a part to the output and yields its events."""
    self.num_answered += len(part.tokens)
    splitter = self._splitters[0]
    pieces = splitter.push(part.text)
    if part.finish_reason:
      pieces += splitter.finish()
    visible = [piece for piece in pieces if piece.kind != "mark"]
    scores = self._chat_logprobs(part)
    self._rows += [] if scores is None else scores["content"]
    is_message = visible[-1].kind == "content" if visible else self._kind == "content"
    if part.finish_reason and not visible and is_message:
      visible = [Piece("content", "")]  # An item to hold the scores of tokens without text.
    for piece in visible:
      if not self._is_open or piece.kind != self._kind:
        yield from self._closed()
        yield from self._opened(piece.kind)
      content = self._output[-1]["content"][0]
      content["text"] += piece.text
      rows, self._rows = self._rows, []  # The protocol has no field for scores of reasoning.
      fields: Body = {}
      if piece.kind == "content":
        content["logprobs"] += rows
        fields["logprobs"] = rows
      yield self._of_content("delta", delta=piece.text, **fields)
    if part.finish_reason:
      self._finish_reason = part.finish_reason
      yield from self._closed()

  @property
  def _kind(self) -> str:
    """The kind of the last item; "content" if there is no item yet."""
    is_message = not self._output or self._output[-1]["type"] == "message"
    return "content" if is_message else "reasoning"

  def _of_content(self, what: str, **fields: Any) -> bytes:
    """Returns an event about the text of the last item."""
    name = "output_text" if self._kind == "content" else "reasoning_text"
    return self._event(f"response.{name}.{what}", **self._place(), content_index=0, **fields)

  def _place(self) -> Body:
    return {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}

  def _opened(self, kind: str) -> Iterator[bytes]:
    number = f"{self._head['id'].removeprefix('resp_')}_{len(self._output)}"
    if kind == "content":
      item: Body = {"id": f"msg_{number}", "type": "message", "role": "assistant"}
      content = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    else:
      item = {"id": f"rs_{number}", "type": "reasoning", "summary": []}
      content = {"type": "reasoning_text", "text": ""}
    self._output.append({**item, "status": "in_progress", "content": []})
    self._is_open = True
    index = len(self._output) - 1
    yield self._event("response.output_item.added", output_index=index, item=self._output[-1])
    yield self._event("response.content_part.added", **self._place(), content_index=0, part=content)
    self._output[-1]["content"].append(content)

  def _closed(self) -> Iterator[bytes]:
    if not self._is_open:
      return
    self._is_open = False
    item = self._output[-1]
    content = item["content"][0]
    fields = {"logprobs": content["logprobs"]} if self._kind == "content" else {}
    item["status"] = "incomplete" if self._finish_reason == "length" else "completed"
    yield self._of_content("done", text=content["text"], **fields)
    yield self._event("response.content_part.done", **self._place(), content_index=0, part=content)
    yield self._event(
      "response.output_item.done", output_index=self._place()["output_index"], item=item
    )
