"""Uses this library's engine as a thinker: answers conversations, many of them concurrently.

The chat template builds the prompts, and message text cannot produce its special tokens
(`Tokenizer.chat_ids`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from seerjax.engine.engine import Engine
from seerjax.sleep.thinkers import Answer, Call, Completed, Message, NoAnswer
from seerjax.types import Completion, Request, SamplingParams


class EngineThinker:
  """Answers calls with an engine that runs no other requests meanwhile."""

  def __init__(self, engine: Engine):
    """Wraps an engine.

    Raises:
      ValueError: if the engine has no tokenizer.
    """
    if engine.tokenizer is None:
      raise ValueError(
        "EngineThinker: got an engine without a tokenizer, expected one with a tokenizer; load its"
        " model with seerjax.load_model."
      )
    self._engine = engine
    self._tokenizer = engine.tokenizer

  def complete(
    self, messages: Sequence[Message], *, max_tokens: int, temperature: float, seed: int
  ) -> Completed:
    """Returns the completion of a conversation; see `Thinker`.

    Raises:
      NoAnswer: if the request is invalid (for example too long), or ended with an error.
    """
    call = Call(messages=tuple(messages), max_tokens=max_tokens, temperature=temperature, seed=seed)
    ((_, answer),) = self.ask((call,))
    if isinstance(answer, NoAnswer):
      raise answer
    return answer

  def ask(self, calls: Sequence[Call]) -> Iterator[tuple[int, Answer]]:
    """Runs calls concurrently and yields each result when it finishes; an `Ask`."""
    waiting: dict[str, tuple[int, int]] = {}
    for index, call in enumerate(calls):
      try:
        request = self.request(call, str(index))
        self._engine.add_request(request)
      except (ValueError, NoAnswer) as error:
        yield index, error if isinstance(error, NoAnswer) else NoAnswer(str(error))
        continue
      waiting[request.request_id] = (index, len(request.prompt))
    while waiting:
      self._engine.step()
      for completion in self._engine.poll():
        if completion.request_id in waiting:
          index, num_prompt_tokens = waiting.pop(completion.request_id)
          yield index, _answer(completion, num_prompt_tokens)

  def request(self, call: Call, request_id: str) -> Request:
    """Returns the engine request of a call.

    Raises:
      NoAnswer: if prompt and `max_tokens` exceed the engine's context.
      ValueError: if the messages or the sampling parameters are invalid.
    """
    prompt = tuple(self._tokenizer.chat_ids(list(call.messages)))
    window = min(self._engine.config.max_model_len, self._engine.model.max_model_len)
    if len(prompt) + call.max_tokens > window:
      raise NoAnswer(
        f"EngineThinker: got a prompt of {len(prompt)} tokens with max_tokens={call.max_tokens},"
        f" expected at most {window} together; shorten the context, or lower the limit."
      )
    sampling = SamplingParams(
      temperature=call.temperature,
      max_tokens=call.max_tokens,
      stop_token_ids=self._tokenizer.eos_ids,
    )
    return Request(request_id=request_id, prompt=prompt, sampling=sampling, seed=call.seed)


def _answer(completion: Completion, num_prompt_tokens: int) -> Answer:
  if completion.finish_reason == "error":
    return NoAnswer(f"EngineThinker: got an error of the engine: {completion.error}")
  return Completed(
    text=completion.text,
    num_tokens=len(completion.tokens),
    num_prompt_tokens=num_prompt_tokens,
    finish_reason=completion.finish_reason,
  )
