"""A served model, and the plan that turns a request for it into engine requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
import pathlib
import secrets
from typing import Any

from seerjax.engine import texts
from seerjax.engine.engine import Engine
from seerjax.models import tokenizer_files
from seerjax.models.tokenizer import Tokenizer
from seerjax.serve import parts, protocol
from seerjax.serve.grammar import AnswerMask, Compiler
from seerjax.serve.parts import Splitter
from seerjax.serve.protocol import Asked
from seerjax.serve.refusals import Refusal, refuse
from seerjax.serve.sleeping import Reading
from seerjax.serve.vocabulary import Vocabulary
from seerjax.types import Request, SamplingParams

GENERATION_FILE = "generation_config.json"
# Fields of that file that are accepted only with values that have no effect.
_NEUTRAL = {
  "do_sample": (True, False), "num_beams": (1,), "use_cache": (True,),
  "num_return_sequences": (1,),
}  # fmt: skip
# Variables of a chat template that `chat_template_kwargs` may not set.
_OWN_VARIABLES = ("self", "messages", "add_generation_prompt", "now", "tools")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Defaults:
  """Defaults from a model's generation_config.json, for fields that a request does not set.

  Attributes:
    sampling: fields of `SamplingParams`.
    max_tokens: default `max_tokens`; None if the file has none.
    not_taken: settings of the file that are not supported, such as "num_beams=4".
  """

  sampling: Mapping[str, float] = dataclasses.field(default_factory=dict)
  max_tokens: int | None = None
  not_taken: tuple[str, ...] = ()

  @property
  def in_force(self) -> dict[str, Any]:
    """The defaults in use, under the file's field names."""
    length = {} if self.max_tokens is None else {"max_new_tokens": self.max_tokens}
    return {**self.sampling, **length}


def generation_defaults(tokenizer: Tokenizer) -> Defaults:
  """Returns the defaults in a model's generation_config.json; `eos_token_id` is the tokenizer's.

  Without `do_sample` the file's temperature applies; with `do_sample` false decoding is greedy.

  Raises:
    ValueError: if a supported field has a value that a request could not have.
  """
  if GENERATION_FILE not in tokenizer.files:
    return Defaults()
  written = tokenizer_files.json_object(
    pathlib.Path(GENERATION_FILE), tokenizer.files[GENERATION_FILE]
  )
  try:
    sampling, max_tokens = protocol.generation_fields(written)
  except Refusal as refusal:
    raise ValueError(f"{GENERATION_FILE}: {refusal.message}") from refusal
  not_taken = []
  for text in tokenizer.ignored_generation:
    field = text.partition("=")[0]
    is_neutral = any(written[field] == value for value in _NEUTRAL.get(field, ()))
    if field not in protocol.GENERATION and not is_neutral:
      not_taken.append(text)
  return Defaults(sampling=sampling, max_tokens=max_tokens, not_taken=tuple(not_taken))


@dataclasses.dataclass(eq=False)
class Served:
  """A served model.

  Attributes:
    name: model name in requests.
    engine: runs the model; used only on the engine thread.
    fingerprint: `identity.fingerprint`; changes when weights are replaced.
    defaults: used where a request sets no value.
    created: seconds since 1970.
    parent: for an adapter, the base with the engine that it shares; None for a base.
  """

  name: str
  engine: Engine
  fingerprint: str
  defaults: Defaults = Defaults()
  created: int = 0
  parent: Served | None = None

  def __post_init__(self):
    if self.engine.tokenizer is None:
      raise ValueError(
        f"Served {self.name!r}: got an engine without a tokenizer, expected a model with one; load"
        " it with seerjax.load_model."
      )
    self.tokenizer: Tokenizer = self.engine.tokenizer
    if self.parent is not None:
      self.vocabulary, self.compiler = self.parent.vocabulary, self.parent.compiler
      return
    self.vocabulary = Vocabulary(self.tokenizer)
    self.compiler = Compiler(self.tokenizer, self.engine.model.vocab_size)

  @property
  def base(self) -> Served:
    """The base model; the model itself if it is a base."""
    return self if self.parent is None else self.parent

  @property
  def adapter(self) -> str:
    """The adapter's name in the engine; "" for a base."""
    return "" if self.parent is None else self.name

  @property
  def context(self) -> int:
    """Most positions of a prompt with its completion."""
    return min(self.engine.config.max_model_len, self.engine.model.max_model_len)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """The engine requests for one HTTP request.

  Attributes:
    asked: the parsed request.
    served: the model.
    fingerprint: fingerprint at planning time; `Started` has that of the weights in use.
    prompts: token ids of each prompt.
    requests: one per choice; the choices of a prompt are adjacent.
    masks: one per choice; None without a grammar.
    is_thinking: whether the prompt already opened the model's reasoning.
    reading: the context that the prompt was made from, if any.
  """

  asked: Asked
  served: Served
  fingerprint: str
  prompts: tuple[tuple[int, ...], ...]
  requests: tuple[Request, ...]
  masks: tuple[AnswerMask | None, ...]
  is_thinking: bool = False
  reading: Reading | None = None

  def splitter(self) -> Splitter:
    """Returns a splitter for one choice of a chat."""
    template, grammar = self.served.tokenizer.chat_template, self.asked.grammar
    if grammar is None:
      return Splitter(template, is_thinking=self.is_thinking, has_tools=bool(self.asked.tools))
    # In constrained text, markers are ordinary text, except those that the grammar of calls emits.
    return Splitter(parts.CALL + parts.END_CALL, has_tools=grammar.kind == "calls")

  def prompt_of(self, choice: int) -> int:
    """Returns the index of a choice's prompt."""
    return choice // self.asked.num_choices


def plan(
  asked: Asked,
  served: Served,
  *,
  job_id: str,
  max_answer_tokens: int,
  seed_of: Callable[[int, int, int], int] = texts.seed_at,
  namespace: str = "",
  reading: Reading | None = None,
) -> Plan:
  """Turns a parsed request into engine requests.

  Args:
    asked: the parsed request.
    served: the model that it names.
    job_id: unique id.
    max_answer_tokens: upper bound of a choice's tokens.
    seed_of: see `texts.seed_at`.
    namespace: namespace of the client.
    reading: the context that the messages of `asked` were made from, if any.

  Raises:
    Refusal: if the template rejects the messages, a prompt is too long, a token id is beyond the
      vocabulary, or the engine could never run the request.
  """
  prompts, is_thinking = prompts_of(asked, served)
  masks = _masks(asked, served, len(prompts) * asked.num_choices, namespace)
  seed = secrets.randbelow(2**32) if asked.seed is None else asked.seed
  requests: list[Request] = []
  if reading is not None:
    namespace = reading.context.namespace
  for place, prompt in enumerate(prompts):
    sampling = _sampling(asked, served, len(prompt), max_answer_tokens)
    group_id = f"{job_id}/{place}" if asked.num_choices > 1 else ""
    if reading is not None:
      group_id = reading.group_id
    for index in range(asked.num_choices):
      request = Request(
        request_id=f"{job_id}/{place}/{index}",
        prompt=prompt,
        sampling=sampling,
        seed=seed_of(seed, place, index),
        group_id=group_id,
        adapter=served.adapter,
        namespace=namespace,
      )
      if not index:
        try:
          served.engine.check(request)
        except ValueError as error:
          raise Refusal(str(error), param=_text_field(asked)) from error
      requests.append(request)
  return Plan(
    asked=asked,
    served=served,
    fingerprint=served.fingerprint,
    prompts=prompts,
    requests=tuple(requests),
    masks=masks,
    is_thinking=is_thinking,
    reading=reading,
  )


def _masks(
  asked: Asked, served: Served, count: int, namespace: str
) -> tuple[AnswerMask | None, ...]:
  if asked.grammar is None:
    return (None,) * count
  mask = served.compiler.mask(asked.grammar, namespace)
  return tuple(mask.copy() for _ in range(count))


def prompts_of(asked: Asked, served: Served) -> tuple[tuple[tuple[int, ...], ...], bool]:
  """Returns (token ids of each prompt, whether the template opened the model's reasoning).

  Raises:
    Refusal: if the template rejects the messages, or a text cannot be encoded.
  """
  tokenizer = served.tokenizer
  try:
    if not asked.is_chat:
      encoded = [tokenizer.encode(p) if isinstance(p, str) else p for p in asked.prompts]
      return tuple(map(tuple, encoded)), False
    variables = dict(asked.variables)
    for name in variables:
      if not name.isidentifier() or name in _OWN_VARIABLES:
        refuse(
          "chat_template_kwargs", repr(name[:80]), "names of variables that the template reads",
          "leave it out",
        )  # fmt: skip
    template = tokenizer.chat_template
    has_to_call = asked.grammar is not None and asked.grammar.kind == "calls"
    if asked.tools:
      if not (has_to_call or parts.knows_tools(template)):
        refuse(
          "tools", f"{len(asked.tools)} tools",
          "none: this model's chat template does not support tools, or does not mark calls with"
          f" {parts.CALL}",
          'leave it out, set tool_choice to "required" or a function, which needs no template, or'
          ' serve a model trained with tools',
        )  # fmt: skip
      if parts.reads_tools(template):
        variables["tools"] = list(asked.tools)
    messages = [parts.as_template_reads(template, message) for message in asked.messages]
    ids = tokenizer.chat_ids(messages, **variables)
    is_thinking = False
    if parts.END_THINK in template:
      tail = tokenizer.decode(ids[-8:], skip_special_tokens=False).rstrip()
      is_thinking = tail.endswith(parts.THINK)
    return (tuple(ids),), is_thinking
  except ValueError as error:
    raise Refusal(str(error), param=_text_field(asked)) from error


def _text_field(asked: Asked) -> str:
  """Returns the name of the field with the text, as in the client's body."""
  return asked.names.get("messages", "messages") if asked.is_chat else "prompt"


def _sampling(
  asked: Asked, served: Served, num_prompt: int, max_answer_tokens: int
) -> SamplingParams:
  where, context = _text_field(asked), served.context
  length = asked.names.get("max_tokens", "max_tokens")
  room = context - num_prompt
  if room < 1:
    refuse(
      where, f"{num_prompt} tokens", f"fewer than the context of {context}", "shorten it",
      code="context_length_exceeded",
    )  # fmt: skip
  most = asked.max_tokens
  if most is None:
    usual = max_answer_tokens if asked.is_chat else protocol.COMPLETION_TOKENS
    most = min(room, max_answer_tokens, served.defaults.max_tokens or usual)
  elif most > max_answer_tokens:
    refuse(length, most, f"at most {max_answer_tokens}, the limit of this server", "lower it")
  elif most > room:
    refuse(
      length, f"{most} with a prompt of {num_prompt} tokens",
      f"a sum of at most the context of {context}", f"lower it to {room}",
      code="context_length_exceeded",
    )  # fmt: skip
  for token, _ in asked.sampling.get("logit_bias", ()):
    if token >= served.engine.model.vocab_size:
      refuse(
        "logit_bias", f"token id {token}", f"0 to {served.engine.model.vocab_size - 1}", "drop it"
      )
  return SamplingParams(
    **{**served.defaults.sampling, **asked.sampling},
    max_tokens=most,
    stop_token_ids=tuple(dict.fromkeys((*served.tokenizer.eos_ids, *asked.stop_token_ids))),
    stop=asked.stop,
  )
