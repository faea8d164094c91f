"""Writes responses in OpenAI's format, as one body or as the chunks of a stream.

Extensions of the protocol have names of their own: the `seed` of a choice, the id of each token,
its log-probability before temperature and filters, and the log-probabilities of the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import hashlib
import json
from typing import Any

from seerjax.serve.engine_thread import Part, PromptScores
from seerjax.serve.parts import Piece, Splitter
from seerjax.serve.refusals import Refusal
from seerjax.serve.served import Plan
from seerjax.serve.vocabulary import Offsets, Vocabulary

Body = dict[str, Any]
DONE = b"data: [DONE]\n\n"


def event(body: Mapping[str, Any]) -> bytes:
  """Returns one server-sent event."""
  return b"data: " + encoded(body) + b"\n\n"


def encoded(body: Mapping[str, Any]) -> bytes:
  """Returns JSON in ASCII, so that client text can be quoted safely."""
  return json.dumps(body, allow_nan=False, separators=(",", ":")).encode()


class Answer:
  """Builds one response incrementally."""

  def __init__(self, plan: Plan, *, answer_id: str, created: int):
    self._plan = plan
    self._vocabulary = plan.served.vocabulary
    kind = "chat.completion" if plan.asked.is_chat else "text_completion"
    if plan.asked.is_chat and plan.asked.is_streamed:
      kind = "chat.completion.chunk"
    self._head: Body = {
      "id": answer_id,
      "object": kind,
      "created": created,
      "model": plan.served.name,
      "system_fingerprint": plan.fingerprint,
    }
    if plan.reading is not None:
      self._head["context"] = plan.reading.body
    count = len(plan.requests)
    self._splitters = [plan.splitter() for _ in range(count)] if plan.asked.is_chat else []
    self._has_begun = [False] * count
    self._num_calls = [0] * count
    self._offsets: dict[int, Offsets] = {}
    self._prompts: dict[int, PromptScores] = {}
    self.num_answered = 0

  @property
  def usage(self) -> Body:
    """Token counts of prompts and completions."""
    read = sum(len(prompt) for prompt in self._plan.prompts)
    return {
      "prompt_tokens": read,
      "completion_tokens": self.num_answered,
      "total_tokens": read + self.num_answered,
    }

  def begin(self, fingerprint: str) -> None:
    """Sets the fingerprint of the weights in use; called before the first part."""
    self._head["system_fingerprint"] = fingerprint

  def take_prompt(self, scores: PromptScores) -> None:
    """Takes the scores of a prompt; called before its first choice."""
    self._prompts[scores.prompt] = scores

  def is_due(self, choice: int) -> bool:
    """Returns whether a choice may be written: its prompt's scores, if wanted, are there."""
    return not self._plan.asked.wants_prompt or self._plan.prompt_of(choice) in self._prompts

  def whole(self, parts: Sequence[Part]) -> Body:
    """Returns the body of a non-streamed response; each part is a whole choice."""
    choices = []
    for part in sorted(parts, key=lambda part: part.choice):
      self.num_answered += len(part.tokens)
      choices.append(self._chat(part) if self._plan.asked.is_chat else self._completion(part))
    return {**self._head, "choices": choices, "usage": self.usage}

  def chunks(self, part: Part) -> list[bytes]:
    """Returns the chunks of a stream for a part."""
    self.num_answered += len(part.tokens)
    if self._plan.asked.is_chat:
      return [event(piece) for piece in self._chat_pieces(part)]
    return [event({**self._head, "choices": [self._completion(part)]})]

  def end(self) -> bytes:
    """Returns the end of a stream: token counts, if requested, and the [DONE] event."""
    if not self._plan.asked.wants_usage:
      return DONE
    return event({**self._head, "choices": [], "usage": self.usage}) + DONE

  def failure(self, refusal: Refusal) -> bytes:
    """Returns the end of a stream that failed: the error, without a [DONE] event."""
    return event(refusal.body)

  # Chats.

  def _chat(self, part: Part) -> Body:
    splitter = self._splitters[part.choice]
    message, calls = self._joined(part.choice, [*splitter.push(part.text), *splitter.finish()])
    return self._choice(
      part, message={"role": "assistant", **message}, logprobs=self._chat_logprobs(part),
      finish_reason="tool_calls" if calls and part.finish_reason == "stop" else part.finish_reason,
    )  # fmt: skip

  def _choice(self, part: Part, **fields: Any) -> Body:
    choice: Body = {
      "index": part.choice, **fields, "seed": self._plan.requests[part.choice].seed,
    }  # fmt: skip
    if not self._plan.asked.is_streamed or not self._has_begun[part.choice]:
      scores = self._prompt_of(part.choice)
      if scores is not None:
        choice["prompt_logprobs"] = scores
    self._has_begun[part.choice] = True
    return choice

  def _chat_pieces(self, part: Part) -> list[Body]:
    splitter: Splitter = self._splitters[part.choice]
    pieces = splitter.push(part.text)
    if part.finish_reason:
      pieces += splitter.finish()
    visible = [piece for piece in pieces if piece.kind != "mark"]
    deltas = [self._delta(part.choice, piece) for piece in visible] or [{"content": ""}]
    if not self._has_begun[part.choice]:
      deltas[0] = {"role": "assistant", **deltas[0]}
    bodies = []
    for place, delta in enumerate(deltas):
      is_last = place == len(deltas) - 1
      reason = part.finish_reason if is_last and part.finish_reason else None
      if reason == "stop" and self._num_calls[part.choice]:
        reason = "tool_calls"
      logprobs = self._chat_logprobs(part) if not place else None
      choice = self._choice(part, delta=delta, logprobs=logprobs, finish_reason=reason)
      bodies.append({**self._head, "choices": [choice]})
    return bodies

  def _delta(self, choice: int, piece: Piece) -> Body:
    if piece.kind != "call":
      return {"content" if piece.kind == "content" else "reasoning_content": piece.text}
    index = self._num_calls[choice]
    self._num_calls[choice] += 1
    return {"tool_calls": [{"index": index, **self._call(choice, piece, index)}]}

  def _joined(self, choice: int, pieces: Sequence[Piece]) -> tuple[Body, int]:
    """Returns (fields of a message, number of its tool calls)."""
    text = lambda kind: "".join(piece.text for piece in pieces if piece.kind == kind)
    message: Body = {"content": text("content")}
    if reasoning := text("reasoning"):
      message["reasoning_content"] = reasoning
    calls = [piece for piece in pieces if piece.kind == "call"]
    if calls:
      message["tool_calls"] = [
        self._call(choice, piece, place) for place, piece in enumerate(calls)
      ]
    return message, len(calls)

  def _call(self, choice: int, piece: Piece, index: int) -> Body:
    # Tool results refer to calls by id, so ids must be unique in a conversation; they are also
    # deterministic, so that a repeated request gives the same bytes.
    request = self._plan.requests[choice]
    source = f"{request.prompt}/{request.seed}/{index}".encode()
    return {
      "id": f"call_{hashlib.blake2b(source, digest_size=12).hexdigest()}",
      "type": "function",
      "function": {"name": piece.name, "arguments": piece.text},
    }

  def _chat_logprobs(self, part: Part) -> Body | None:
    if not self._plan.asked.wants_logprobs:
      return None
    tops = part.tops or [()] * len(part.tokens)
    rows = zip(part.tokens, part.logprobs, part.raw_logprobs, tops, strict=True)
    return {
      "content": [
        {
          **self._token(token, logprob),
          "raw_logprob": raw,
          "top_logprobs": [self._token(*one) for one in top],
        }
        for token, logprob, raw, top in rows
      ]
    }

  def _token(self, token: int, logprob: float) -> Body:
    return {
      "token": self._vocabulary.text_of(token),
      "token_id": token,
      "logprob": logprob,
      "bytes": [*self._vocabulary.bytes_of(token)],
    }

  def _prompt_of(self, choice: int) -> list[Body | None] | None:
    """Returns a prompt's scored tokens, in the format of both chats and completions."""
    asked, place = self._plan.asked, self._plan.prompt_of(choice)
    scores = self._prompts.get(place)
    if scores is None:
      return None
    prompt = self._plan.prompts[place]
    found: list[Body | None] = [None]  # The first token has no score.
    for token, logprob, top in zip(prompt[1:], scores.logprobs, scores.tops, strict=True):
      row = self._token(token, logprob)
      if asked.num_prompt_top:
        row["top_logprobs"] = [self._token(*one) for one in top]
      found.append(row)
    return found

  # Completions.

  def _completion(self, part: Part) -> Body:
    asked, text, place = self._plan.asked, part.text, self._plan.prompt_of(part.choice)
    is_first = not self._has_begun[part.choice]
    prompt = self._plan.prompts[place]
    if asked.is_echoed and is_first:
      text = _prompt_text(self._plan, place) + text
    logprobs = None
    if asked.wants_logprobs:
      rows = _Rows(self._vocabulary, bool(asked.num_top))
      if is_first:
        start = len(text) - len(part.text)
        self._offsets[part.choice] = Offsets(self._vocabulary, start=start)
      offsets = self._offsets[part.choice]
      scores = self._prompts.get(place)
      if asked.is_echoed and is_first and scores is not None:
        tops, echoed = [None, *scores.tops], Offsets(self._vocabulary, skips_special=False)
        for token, logprob, top in zip(prompt, [None, *scores.logprobs], tops, strict=True):
          rows.add(token, logprob, logprob, top, echoed.of(token))
      tops = part.tops or [()] * len(part.tokens)
      answered = zip(part.tokens, part.logprobs, part.raw_logprobs, tops, strict=True)
      for token, logprob, raw, top in answered:
        rows.add(token, logprob, raw, top, offsets.of(token))
      logprobs = rows.body
    return self._choice(
      part, text=text, logprobs=logprobs, finish_reason=part.finish_reason or None
    )


class _Rows:
  """Columns of a completion's log-probabilities."""

  def __init__(self, vocabulary: Vocabulary, has_tops: bool):
    self._vocabulary = vocabulary
    self.body: Body = dict(
      tokens=[], token_ids=[], token_logprobs=[], raw_logprobs=[], text_offset=[],
      top_logprobs=[] if has_tops else None,
    )  # fmt: skip

  def add(
    self,
    token: int,
    logprob: float | None,
    raw: float | None,
    top: Sequence[tuple[int, float]] | None,
    offset: int,
  ) -> None:
    body, text_of = self.body, self._vocabulary.text_of
    body["tokens"].append(text_of(token))
    body["token_ids"].append(token)
    body["token_logprobs"].append(logprob)
    body["raw_logprobs"].append(raw)
    body["text_offset"].append(offset)
    if body["top_logprobs"] is not None:
      named = None if top is None else {text_of(one): value for one, value in top}
      body["top_logprobs"].append(named)


def _prompt_text(plan: Plan, place: int) -> str:
  asked = plan.asked.prompts[place]
  if isinstance(asked, str):
    return asked
  return plan.served.tokenizer.decode(asked, skip_special_tokens=False)
