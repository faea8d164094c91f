"""A model under a name, and what a request of it becomes: prompts, seeds, requests of an engine."""

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
from seerjax.serve.scoring import Scorer
from seerjax.serve.sleeping import Reading
from seerjax.serve.vocabulary import Vocabulary
from seerjax.types import Request, SamplingParams

GENERATION_FILE = "generation_config.json"
# Of its fields, those that ask for nothing at one value. What else it asks for cannot be had.
_NEUTRAL = {
  "do_sample": (True, False), "num_beams": (1,), "use_cache": (True,),
  "num_return_sequences": (1,),
}  # fmt: skip
# Of a chat template's variables, those that `chat_template_kwargs` may not name.
_OWN_VARIABLES = ("self", "messages", "add_generation_prompt", "now", "tools")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Defaults:
  """What a model's generation_config.json says, for requests that say nothing else.

  Attributes:
    sampling: fields of `SamplingParams`.
    max_tokens: of an answer; None if the file says nothing.
    not_taken: what the file asks for in vain, such as "num_beams=4".
  """

  sampling: Mapping[str, float] = dataclasses.field(default_factory=dict)
  max_tokens: int | None = None
  not_taken: tuple[str, ...] = ()

  @property
  def in_force(self) -> dict[str, Any]:
    """The file's own fields, as far as they are taken."""
    length = {} if self.max_tokens is None else {"max_new_tokens": self.max_tokens}
    return {**self.sampling, **length}


def generation_defaults(tokenizer: Tokenizer) -> Defaults:
  """Returns what a model's generation_config.json says; its `eos_token_id` is the tokenizer's.

  Without `do_sample` the file's temperature counts; with `do_sample` false answers are greedy.

  Raises:
    ValueError: if a field that is taken is not what a request's own may be.
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
  """A model that is served.

  Attributes:
    name: by which clients ask for it.
    engine: that answers; the engine's thread has it.
    scorer: of the same weights; the engine's thread has it too.
    fingerprint: `identity.fingerprint`; another once weights are swapped.
    defaults: where a request names nothing.
    created: seconds since 1970.
    beside: the base whose engine it shares, of an adapter; None is a base.
  """

  name: str
  engine: Engine
  scorer: Scorer
  fingerprint: str
  defaults: Defaults = Defaults()
  created: int = 0
  beside: Served | None = None

  def __post_init__(self):
    if self.engine.tokenizer is None:
      raise ValueError(
        f"Served {self.name!r}: got an engine without a tokenizer, expected a model that has one;"
        " load it with seerjax.load_model."
      )
    self.tokenizer: Tokenizer = self.engine.tokenizer
    if self.beside is not None:
      self.vocabulary, self.compiler = self.beside.vocabulary, self.beside.compiler
      return
    self.vocabulary = Vocabulary(self.tokenizer)
    self.compiler = Compiler(self.tokenizer, self.engine.model.vocab_size)

  @property
  def base(self) -> Served:
    """The base, which may be itself."""
    return self if self.beside is None else self.beside

  @property
  def adapter(self) -> str:
    """Its name in the engine; "" is the base."""
    return "" if self.beside is None else self.name

  @property
  def context(self) -> int:
    """Most positions of a prompt and its answer."""
    return min(self.engine.config.max_context, self.engine.model.max_context)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """What a request becomes.

  Attributes:
    asked: the request.
    served: the model.
    fingerprint: of the weights that were there; `Begun` names those that answer.
    prompts: token ids.
    requests: one a choice, those of one prompt after one another.
    masks: one a choice, where answers have a grammar.
    is_thinking: whether the prompt has begun the model's reasoning.
    reading: the context that the prompt was made of, if any.
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
    """Returns what splits one choice of a chat into its parts."""
    template, grammar = self.served.tokenizer.chat_template, self.asked.grammar
    if grammar is None:
      return Splitter(template, is_thinking=self.is_thinking, has_tools=bool(self.asked.tools))
    # Marks in a text of a given form are its own, but for those that the form of calls writes.
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
  """Returns what a request becomes.

  Args:
    asked: the request.
    served: the model that it names.
    job_id: unique.
    max_answer_tokens: of one choice, at most.
    seed_of: `texts.seed_at`.
    namespace: of who asks.
    reading: the context whose question `asked` has become.

  Raises:
    Refusal: if the template refuses the messages, a prompt is too long, an id is beyond the
      vocabulary, or the engine could never answer.
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
  return tuple(mask.copy(keeps=bool(asked.num_top)) for _ in range(count))


def prompts_of(asked: Asked, served: Served) -> tuple[tuple[tuple[int, ...], ...], bool]:
  """Returns (token ids of each prompt, whether the template has begun the model's reasoning).

  Raises:
    Refusal: if the template refuses the messages, or a text cannot be encoded.
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
          "none: this model's chat template knows no tools, or does not mark calls by"
          f" {parts.CALL}",
          'leave it out, set tool_choice to "required" or a function, which needs no template, or'
          " serve a model that was trained with tools",
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
  """Returns the field of the body that has the text, as the client wrote it."""
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
    refuse(length, most, f"at most {max_answer_tokens}, this server's bound", "lower it")
  elif most > room:
    refuse(
      length, f"{most} beside a prompt of {num_prompt} tokens",
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
    stop_strings=asked.stop,
  )
