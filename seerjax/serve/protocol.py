"""Parses and validates request bodies: untrusted JSON becomes a record or a `Refusal`.

bytes --bodies.parsed--> object --chat | completion--> Asked
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import json
from typing import Any

from seerjax.ops import sampling as sampling_lib
from seerjax.serve import bodies, schemas
from seerjax.serve.refusals import Refusal, refuse, shown
from seerjax.types import PENALTIES, TEMPERATURES, is_temperature

MAX_TOP_LOGPROBS = 16
MAX_CHOICES = 128
MAX_STOPS = 16
MAX_BIAS = 1e6
MAX_NAME = 200  # Characters of a context name.
# OpenAI's default `max_tokens` of a completion, if neither the request nor the model sets one.
COMPLETION_TOKENS = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grammar:
  """A constraint on the text of a response.

  Attributes:
    kind: "json" (a schema), "object" (any JSON object), "regex", or "calls" (tool calls).
    source: the schema as JSON, the expression, or the grammar of calls; "" for "object".
    param: name of the request field that set the constraint.
    is_spaced: whether JSON may contain white space between tokens.
  """

  kind: str
  source: str
  param: str
  is_spaced: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
  """A request that was validated as far as possible without a model.

  Attributes:
    model: model name; "" if the body has none.
    messages: chat messages; empty for a completion.
    variables: variables for the chat template.
    tools: tools shown to the chat template.
    prompts: prompts of a completion, as text or token ids; empty for a chat.
    sampling: fields of `SamplingParams` that the body sets.
    max_tokens: None if the body does not set it.
    stop: stop strings.
    stop_token_ids: stop token ids, in addition to the model's.
    seed: None for a random seed.
    num_choices: choices per prompt.
    is_streamed: whether to stream the response.
    wants_usage: whether a stream ends with token counts.
    wants_logprobs: whether to return the log-probability of each token.
    num_top: top alternatives returned for each token.
    wants_prompt: whether to return the log-probabilities of the prompt's tokens.
    num_prompt_top: top alternatives returned for each token of the prompt.
    is_echoed: whether a completion starts with its prompt.
    grammar: constraint on the text; None for free text.
    context: name of the context that the chat's only message asks about; "" for none.
    user: identifies the client for fair scheduling, together with the IP address.
    ignored: fields of the body that were accepted without effect.
    names: names of `messages` and `max_tokens` in the body, where they differ.
  """

  model: str = ""
  messages: tuple[Mapping[str, Any], ...] = ()
  variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  tools: tuple[Mapping[str, Any], ...] = ()
  prompts: tuple[str | tuple[int, ...], ...] = ()
  sampling: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  max_tokens: int | None = None
  stop: tuple[str, ...] = ()
  stop_token_ids: tuple[int, ...] = ()
  seed: int | None = None
  num_choices: int = 1
  is_streamed: bool = False
  wants_usage: bool = False
  wants_logprobs: bool = False
  num_top: int = 0
  wants_prompt: bool = False
  num_prompt_top: int = 0
  is_echoed: bool = False
  grammar: Grammar | None = None
  context: str = ""
  user: str = ""
  ignored: tuple[str, ...] = ()
  names: Mapping[str, str] = dataclasses.field(default_factory=dict)

  @property
  def is_chat(self) -> bool:
    """Whether the request is a chat."""
    return bool(self.messages)


def _penalty(name: str) -> Callable[[str, Any], float]:
  low, high, none = PENALTIES[name]
  expected = f"{low:g} <= {name} <= {high:g}"
  return bodies.number(lambda x: low <= x <= high, expected, f"{none} means no penalty")


def _stops(name: str, value: Any) -> tuple[str, ...]:
  stops = [value] if isinstance(value, str) else bodies.json_list(name, value)
  if len(stops) > MAX_STOPS:
    refuse(name, f"{len(stops)} strings", f"at most {MAX_STOPS}", "send fewer")
  for stop in stops:
    if not bodies.text(name, stop):
      refuse(name, "an empty string", "strings of at least one character", "leave it out")
  return tuple(stops)


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
  for token in bodies.json_list(name, value):
    if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < 2**31:
      refuse(name, shown(token), "token ids of at least 0", "encode with the model's tokenizer")
  return tuple(value)


def _logit_bias(name: str, value: Any) -> tuple[tuple[int, float], ...]:
  found: list[tuple[int, float]] = []
  most = sampling_lib.MAX_LOGIT_BIAS
  if len(bodies.json_object(name, value)) > most:
    refuse(name, f"{len(value)} entries", f"at most {most}", "bias fewer tokens")
  bias = bodies.number(
    lambda x: abs(x) <= MAX_BIAS, f"from -{MAX_BIAS:g} to {MAX_BIAS:g}", "lower it"
  )
  for token, number in value.items():
    if not token.isascii() or not token.isdigit() or len(token) > 10:
      refuse(name, f"the key {shown(token)}", 'a token id, such as "42"', "write the id's digits")
    found.append((int(token), bias(f"{name}.{token}", number)))
  ids = [token for token, _ in found]
  if len({*ids}) < len(ids):
    refuse(name, "a token id twice", "each once", "merge the entries")
  return tuple(found)


def _stream_options(fields: bodies.Fields, *, is_streamed: bool) -> bool:
  """Takes `stream_options`; returns whether the stream ends with token counts."""
  name = "stream_options"
  value = fields.take(name, None, bodies.json_object)
  if value is None:
    return False
  if not is_streamed:
    refuse(name, "it without stream", "stream to be true", "leave it out")
  inner = bodies.Fields(value, name)
  wants_usage = inner.take("include_usage", False, bodies.boolean)
  inner.finish(("include_usage",))
  fields.ignored += inner.ignored
  return wants_usage


def _grammar_of(name: str, value: Any) -> Grammar | None:
  """Returns the constraint that a `response_format` sets."""
  kind = bodies.json_object(name, value).get("type")
  if kind == "text" and len(value) == 1:
    return None
  if kind == "json_object" and len(value) == 1:
    return Grammar(kind="object", source="", param=name)
  if kind != "json_schema":
    refuse(
      f"{name}.type",
      shown(kind),
      "text, json_object or json_schema",
      "write one of them, without other fields",
    )
  where = f"{name}.json_schema"
  fields = bodies.Fields(bodies.json_object(where, value.get("json_schema")), where)
  fields.take("name", "", bodies.text)
  fields.take("description", "", bodies.text)
  fields.take("strict", True, bodies.boolean)  # Schemas are always enforced.
  schema = fields.require("schema", bodies.json_object, "send the schema as an object")
  fields.finish(("name", "description", "strict", "schema"))
  return Grammar(kind="json", source=schemas.source(f"{where}.schema", schema), param=name)


def _regex(name: str, value: Any) -> Grammar:
  if not bodies.text(name, value):
    refuse(name, "an empty expression", "a regular expression", "leave it out")
  return Grammar(kind="regex", source=value, param=name)


# Fields of both routes that map to fields of `SamplingParams`.
_SAMPLING: dict[str, Callable[[str, Any], Any]] = {
  "temperature": bodies.number(
    lambda x: x == 0 or is_temperature(x), f"0 or {TEMPERATURES}", "0 is greedy, 1 is usual"
  ),
  "top_p": bodies.number(lambda x: 1e-37 <= x <= 1, "0 < top_p <= 1", "1 keeps every token"),
  "top_k": bodies.whole(-1, 2**31 - 1, "0 or -1 keeps every token"),
  "min_p": bodies.number(lambda x: 0 <= x <= 1, "0 <= min_p <= 1", "0 drops no token"),
  **{name: _penalty(name) for name in PENALTIES},
  "logit_bias": _logit_bias,
}
_SEED = bodies.whole(0, 2**32 - 1, "0 <= seed < 2**32, or leave it out for a random one")
_TOP = bodies.whole(0, MAX_TOP_LOGPROBS, "request fewer")
_TOKENS = bodies.whole(1, 2**31 - 1, "request at least one token")
SHARED = (
  "model", *_SAMPLING, "max_tokens", "n", "seed", "stop", "stop_token_ids", "stream",
  "stream_options", "response_format", "regex", "json_whitespace", "prompt_logprobs", "user",
)  # fmt: skip
CHAT = (*SHARED, "messages", "max_completion_tokens", "logprobs", "top_logprobs", "tools",
        "tool_choice", "parallel_tool_calls", "chat_template_kwargs", "context")  # fmt: skip
COMPLETION = (*SHARED, "prompt", "logprobs", "echo")


# Fields of a model's generation_config.json that serve as defaults of a request.
GENERATION = (
  "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens"
)  # fmt: skip


def generation_fields(written: Mapping[str, Any]) -> tuple[dict[str, Any], int | None]:
  """Returns (fields of `SamplingParams`, `max_tokens` or None) of a generation_config.json.

  Raises:
    Refusal: if a field has a value that a request could not have; names the field.
  """
  fields = bodies.Fields({name: written[name] for name in GENERATION if name in written})
  max_tokens = fields.take("max_new_tokens", None, _TOKENS)
  sampling = _sampling(fields)
  if written.get("do_sample") is False:
    repetition = {name: x for name, x in sampling.items() if name == "repetition_penalty"}
    sampling = {"temperature": 0.0, **repetition}
  return sampling, max_tokens


def _sampling(fields: bodies.Fields) -> dict[str, Any]:
  """Returns the fields of `SamplingParams` that are present."""
  sampling = {
    name: value
    for name, check in _SAMPLING.items()
    if (value := fields.take(name, None, check)) is not None
  }
  if sampling.get("top_k") == -1:
    sampling["top_k"] = 0
  return sampling


def _shared(fields: bodies.Fields) -> dict[str, Any]:
  """Returns the fields of `Asked` that both routes share."""
  sampling = _sampling(fields)
  is_streamed = fields.take("stream", False, bodies.boolean)
  wants_usage = _stream_options(fields, is_streamed=is_streamed)
  grammar = fields.take("response_format", None, _grammar_of)
  regex = fields.take("regex", None, _regex)
  if grammar and regex:
    refuse("regex", "it together with response_format", "one of them", "leave one out")
  if fields.take("json_whitespace", False, bodies.boolean):
    if grammar is None:
      refuse("json_whitespace", "it without JSON", "a response_format of JSON", "leave it out")
    grammar = dataclasses.replace(grammar, is_spaced=True)
  prompt_top = fields.take("prompt_logprobs", None, _TOP)
  return dict(
    model=fields.take("model", "", bodies.text),
    sampling=sampling,
    max_tokens=fields.take("max_tokens", None, _TOKENS),
    stop=fields.take("stop", (), _stops),
    stop_token_ids=fields.take("stop_token_ids", (), _token_ids),
    seed=fields.take("seed", None, _SEED),
    num_choices=fields.take("n", 1, bodies.whole(1, MAX_CHOICES, "send several requests")),
    is_streamed=is_streamed,
    wants_usage=wants_usage,
    grammar=grammar or regex,
    wants_prompt=prompt_top is not None,
    num_prompt_top=prompt_top or 0,
    user=fields.take("user", "", bodies.text),
  )


def chat(body: Mapping[str, Any]) -> Asked:
  """Parses the body of /v1/chat/completions.

  Raises:
    Refusal: if a field is unknown, unsupported or invalid; names the field.
  """
  fields = bodies.Fields(body)
  shared = _shared(fields)
  messages = fields.require("messages", _messages, 'send [{"role": "user", "content": "..."}]')
  newer = fields.take("max_completion_tokens", None, _TOKENS)
  if newer is not None and shared["max_tokens"] not in (None, newer):
    refuse("max_tokens", "it together with max_completion_tokens", "one of them", "leave one out")
  wants_logprobs = fields.take("logprobs", False, bodies.boolean)
  num_top = fields.take("top_logprobs", 0, _TOP)
  if num_top and not wants_logprobs:
    refuse("top_logprobs", "it without logprobs", "logprobs to be true", "set it")
  tools = fields.take("tools", (), _tools)
  is_told, called = _tool_choice(fields, tools)
  if called is not None and shared["grammar"] is not None:
    param = shared["grammar"].param
    refuse(
      "tool_choice", f"required calls together with {param}", "one of them", f"leave {param} out"
    )
  variables = fields.take("chat_template_kwargs", {}, bodies.json_object)
  context = fields.take("context", "", bodies.text)
  if context and (len(messages) > 1 or messages[0]["role"] != "user" or tools):
    refuse(
      "context", f"it with {len(messages)} messages and {len(tools)} tools",
      "one user message, the question, and no tools", "leave the others out",
    )  # fmt: skip
  fields.finish(CHAT)
  return Asked(
    **{
      **shared,
      "grammar": called or shared["grammar"],
      "max_tokens": shared["max_tokens"] if newer is None else newer,
    },
    names={} if newer is None else {"max_tokens": "max_completion_tokens"},
    messages=messages,
    variables=variables,
    tools=tools if is_told else (),
    wants_logprobs=wants_logprobs,
    num_top=num_top,
    context=context,
    ignored=tuple(fields.ignored),
  )


def _tool_choice(
  fields: bodies.Fields, tools: Sequence[Mapping[str, Any]]
) -> tuple[bool, Grammar | None]:
  """Returns (whether the prompt lists the tools, grammar of calls if a call is required)."""
  name = "tool_choice"
  choice = fields.take(name, "auto", lambda _, value: value)
  is_one = not fields.take("parallel_tool_calls", True, bodies.boolean)
  functions = [tool["function"] for tool in tools]
  if isinstance(choice, dict) and choice.get("type") == "function":
    inner = bodies.Fields(choice, name)
    inner.take("type", "", bodies.text)
    wanted = inner.require("function", bodies.json_object, "name a function")
    inner.finish(("type", "function"))
    wanted = bodies.text(f"{name}.function.name", wanted.get("name"))
    known = [function["name"] for function in functions]
    if wanted not in known:
      refuse(
        f"{name}.function.name", shown(wanted),
        f"one of the {len(known)} functions in tools"
        + (f", such as {shown(known[0])}" if known else ""),
        "name one of them",
      )  # fmt: skip
    functions, is_one = [functions[known.index(wanted)]], True
  elif choice in ("auto", "none"):
    if is_one and tools and choice == "auto":
      refuse(
        "parallel_tool_calls", "false when calls are optional",
        "it with tool_choice \"required\" or a named function",
        "leave it out, or set tool_choice",
      )  # fmt: skip
    return choice == "auto", None
  elif choice != "required":
    refuse(
      name, shown(choice),
      '"none", "auto", "required" or {"type": "function", "function": {"name": ...}}',
      "write one of them",
    )  # fmt: skip
  elif not tools:
    refuse(name, '"required" without tools', "tools to call", "send them as tools")
  source = schemas.calls("tools", functions, is_one=is_one)
  return True, Grammar(kind="calls", source=source, param="tools")


def _messages(name: str, value: Any) -> tuple[dict[str, Any], ...]:
  if not bodies.json_list(name, value):
    refuse(name, "no messages", "at least one", 'send [{"role": "user", "content": "..."}]')
  return tuple(_message(f"{name}[{place}]", one) for place, one in enumerate(value))


def _message(name: str, value: Any) -> dict[str, Any]:
  message = {key: one for key, one in bodies.json_object(name, value).items() if one is not None}
  role = message.get("role")
  if role == "developer":  # OpenAI's newer name of the system role.
    message["role"] = role = "system"
  if role not in ("system", "user", "assistant", "tool"):
    refuse(
      f"{name}.role", shown(role), "system, developer, user, assistant or tool", "write its role"
    )
  known = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
  for field in message:
    if field not in known:
      raise Refusal(
        f"{name}.{field[:80]}: got a field that is not supported, expected one of"
        f" {', '.join(known)}; leave it out.",
        param=f"{name}.{field[:80]}",
        code="unsupported_parameter",
      )
  content = message.get("content", "")
  if isinstance(content, list):
    content = "".join(_part(f"{name}.content[{i}]", part) for i, part in enumerate(content))
  message["content"] = bodies.text(f"{name}.content", content)
  if role == "user" and not content:
    refuse(f"{name}.content", "nothing", "at least one character", "send some text")
  if "tool_calls" in message:
    where = f"{name}.tool_calls"
    if role != "assistant":
      refuse(
        where,
        f"calls in a message of role {role}",
        "calls in assistant messages only",
        "leave it out",
      )
    calls = bodies.json_list(where, message["tool_calls"])
    message["tool_calls"] = [_call(f"{where}[{place}]", one) for place, one in enumerate(calls)]
  for field in ("name", "tool_call_id", "reasoning_content"):
    if field in message:
      bodies.text(f"{name}.{field}", message[field])
  return message


def _call(name: str, value: Any) -> dict[str, Any]:
  """Returns a checked tool call of an earlier assistant message."""
  fields = bodies.Fields(bodies.json_object(name, value), name)
  found: dict[str, Any] = {"id": fields.take("id", "", bodies.text), "type": "function"}
  kind = fields.take("type", "function", bodies.text)
  if kind != "function":
    refuse(f"{name}.type", shown(kind), '"function"', "describe a call of a function")
  found["function"] = fields.require(
    "function", bodies.json_object, "name the function that was called"
  )
  fields.finish(("id", "type", "function"))
  where = f"{name}.function"
  fields = bodies.Fields(found["function"], where)
  found["function"] = {
    "name": fields.require("name", bodies.text, "name the function that was called"),
    "arguments": fields.require("arguments", bodies.text, "write a JSON object as text"),
  }
  fields.finish(("name", "arguments"))
  written = found["function"]["arguments"]
  try:
    is_object = isinstance(json.loads(written), dict)
  except (ValueError, RecursionError):
    is_object = False
  if not is_object:
    refuse(
      f"{where}.arguments",
      shown(written),
      "a JSON object as text",
      "send the arguments as they were returned",
    )
  return found


def _part(name: str, value: Any) -> str:
  kind = bodies.json_object(name, value).get("type")
  if kind != "text" or set(value) != {"type", "text"}:
    refuse(f"{name}.type", shown(kind), 'parts {"type": "text", "text": ...}', "send text only")
  return bodies.text(f"{name}.text", value["text"])


def _tools(name: str, value: Any) -> tuple[dict[str, Any], ...]:
  for place, tool in enumerate(bodies.json_list(name, value)):
    where = f"{name}[{place}]"
    if bodies.json_object(where, tool).get("type") != "function":
      refuse(f"{where}.type", shown(tool.get("type")), '"function"', "describe a function")
    function = bodies.json_object(f"{where}.function", tool.get("function"))
    if not bodies.text(f"{where}.function.name", function.get("name")):
      refuse(f"{where}.function.name", "nothing", "a name", "name the function")
    if function.get("parameters") is not None:
      bodies.json_object(f"{where}.function.parameters", function["parameters"])
  return tuple(value)


def weights(body: Mapping[str, Any]) -> tuple[str, str]:
  """Parses the body of /v1/weights into (model name or "", directory).

  Raises:
    Refusal: if a field is unknown, missing or invalid; names the field.
  """
  fields = bodies.Fields(body)
  model = fields.take("model", "", bodies.text)
  directory = fields.require("directory", bodies.text, "name a directory on the server's machine")
  fields.finish(("model", "directory"))
  return model, directory


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContextBody:
  """A context to register.

  Attributes:
    name: unique among the caller's contexts.
    text: the context itself.
    ttl_steps: lifetime in engine steps; None for no limit.
  """

  name: str
  text: str
  ttl_steps: int | None


def context(body: Mapping[str, Any]) -> ContextBody:
  """Parses the body of POST /v1/contexts.

  Raises:
    Refusal: if a field is unknown, missing or invalid; names the field.
  """
  fields = bodies.Fields(body)
  name = fields.require("name", bodies.text, "name the context")
  if not name or len(name) > MAX_NAME or not name.isprintable():
    refuse("name", shown(name), f"1 to {MAX_NAME} printable characters", "rename it")
  found = ContextBody(
    name=name,
    text=fields.require("text", bodies.text, "send the text of the context"),
    ttl_steps=fields.take(
      "ttl_steps", None, bodies.whole(1, 2**53, "leave it out to keep the context")
    ),
  )
  fields.finish(("name", "text", "ttl_steps"))
  return found


def completion(body: Mapping[str, Any]) -> Asked:
  """Parses the body of /v1/completions.

  Raises:
    Refusal: if a field is unknown, unsupported or invalid; names the field.
  """
  fields = bodies.Fields(body)
  shared = _shared(fields)
  prompts = fields.require("prompt", _prompts, "send text, or token ids")
  if len(prompts) * shared["num_choices"] > MAX_CHOICES:
    got = f"{shared['num_choices']} for each of {len(prompts)} prompts"
    refuse("n", got, f"at most {MAX_CHOICES} choices in total", "send several requests")
  num_top = fields.take("logprobs", None, _completion_logprobs)
  is_echoed = fields.take("echo", False, bodies.boolean)
  fields.finish(COMPLETION)
  if is_echoed and num_top is not None:
    shared.update(wants_prompt=True, num_prompt_top=max(shared["num_prompt_top"], num_top))
  return Asked(
    **shared,
    prompts=prompts,
    wants_logprobs=num_top is not None,
    num_top=num_top or 0,
    is_echoed=is_echoed,
    ignored=tuple(fields.ignored),
  )


def _completion_logprobs(name: str, value: Any) -> int | None:
  if value is False:  # The form that chats use.
    return None
  return 0 if value is True else _TOP(name, value)


def _prompts(name: str, value: Any) -> tuple[str | tuple[int, ...], ...]:
  if isinstance(value, str):
    value = [value]
  elif bodies.json_list(name, value) and not isinstance(value[0], str | list):
    value = [value]  # One prompt, as token ids.
  if not value:
    refuse(name, "no prompt", "at least one", "send text, or token ids")
  if len(value) > MAX_CHOICES:
    refuse(name, f"{len(value)} prompts", f"at most {MAX_CHOICES}", "send several requests")
  prompts = tuple(
    one if isinstance(one, str) else _token_ids(f"{name}[{place}]", one)
    for place, one in enumerate(value)
  )
  if not all(prompts):
    refuse(name, "an empty prompt", "at least one token", "send some text")
  return prompts
