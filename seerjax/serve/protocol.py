"""What may be asked, field by field: JSON from a stranger to a record, or a refusal by name.

    bytes --parsed--> object --chat | completion--> Asked

A field is taken, or accepted without effect where none of its values could change an answer's text
(`WITHOUT_EFFECT`), or refused by its name; null is as if a field were not there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import json
import math
from typing import Any, NoReturn

from seerjax.ops import sampling as sampling_lib
from seerjax.serve import schemas
from seerjax.serve.refusals import Refusal, refuse, shown
from seerjax.types import PENALTIES, TEMPERATURES, is_temperature

MAX_TOP_LOGPROBS = 16
MAX_CHOICES = 128
MAX_STOPS = 16
MAX_BIAS = 1e6
MAX_NAME = 200  # Characters of a context's.
MAX_DEPTH = 64  # Of lists and objects within one another.
# What OpenAI's protocol answers to a completion where neither it nor the model's files say more.
COMPLETION_TOKENS = 16
# Fields of OpenAI's and vLLM's protocols that concern an account, a cache, a queue or a family of
# models, and could change no text here. They are listed in an answer's header, or refused by
# `ServeConfig.strict_fields`.
WITHOUT_EFFECT = frozenset({
  "cache_salt", "kv_transfer_params", "metadata", "moderation", "prediction", "priority",
  "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "reasoning",
  "reasoning_effort", "request_id", "safety_identifier", "service_tier", "store",
  "stream_options.include_obfuscation", "verbosity",
})  # fmt: skip
# Fields of the protocols that ask for nothing at one value, and are refused at every other.
NEUTRAL = {
  "add_generation_prompt": (True,),
  "add_special_tokens": (False,),
  "best_of": (1,),
  "continue_final_message": (False,),
  "function_call": ("auto", "none"),
  "ignore_eos": (False,),
  "include_reasoning": (True,),
  "include_stop_str_in_output": (False,),
  "length_penalty": (1,),
  "logprobs_mode": ("processed_logprobs",),
  "min_tokens": (0,),
  "modalities": (["text"],),
  "return_token_ids": (False,),
  "return_tokens_as_token_ids": (False,),
  "skip_special_tokens": (True,),
  "spaces_between_special_tokens": (True,),
  "suffix": ("",),
  "use_beam_search": (False,),
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grammar:
  """What an answer's text has to match.

  Attributes:
    kind: "json" (a schema), "object" (any JSON object), "regex", or "calls" (of tools).
    source: the schema as JSON, the expression, or the grammar of calls; "" for "object".
    param: the field that asked for it.
    is_spaced: whether JSON may have white space between its parts.
  """

  kind: str
  source: str
  param: str
  is_spaced: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
  """A request for answers, checked as far as that goes without a model.

  Attributes:
    model: by name, "" where the body names none.
    messages: of a chat; empty for a completion.
    variables: of the chat template.
    tools: that the chat template is told of.
    prompts: of a completion: texts, or token ids; empty for a chat.
    sampling: fields of `SamplingParams` that the body names.
    max_tokens: None where the body names none.
    stop: strings that end an answer.
    stop_token_ids: ids that do, besides the model's.
    seed: None where a fresh one is wanted.
    num_choices: answers for each prompt.
    is_streamed: whether pieces are sent as they come.
    wants_usage: whether a stream ends with a count of tokens.
    wants_logprobs: whether each token's log-probability is answered.
    num_top: other tokens that are named at each place.
    wants_prompt: whether a prompt's own log-probabilities are answered.
    num_prompt_top: other tokens named at each place of the prompt.
    is_echoed: whether a completion begins with its prompt.
    grammar: None where any text will do.
    context: name of the context that a chat's one message is a question about; "" is none.
    user: whom fairness between clients takes it for, beside the address.
    ignored: names of the body's fields that were accepted without effect.
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

  @property
  def is_chat(self) -> bool:
    """Whether it is a conversation of several turns."""
    return bool(self.messages)


def parsed(body: bytes) -> dict[str, Any]:
  """Returns the object that a body is.

  Raises:
    Refusal: if it is no JSON object, says a name twice or a number that is none, or is nested
      deeper than `MAX_DEPTH`.
  """

  def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
      names = [name for name, _ in pairs]
      twice = next(name for name in names if names.count(name) > 1)
      refuse(None, f"the name {shown(twice)} twice in one object", "once", "keep one of them")
    return found

  def no_number(word: str) -> NoReturn:
    refuse(None, word, "JSON, which has no such number", "send a finite number")

  try:
    value = json.loads(
      body, object_pairs_hook=once, parse_constant=no_number, parse_float=schemas.number
    )
  except RecursionError:
    refuse(None, "JSON nested too deeply", f"at most {MAX_DEPTH} levels", "flatten it")
  except (ValueError, UnicodeDecodeError) as error:
    refuse(None, f"what is no JSON ({error})", "one JSON object", "correct it")
  if not isinstance(value, dict):
    refuse(None, f"a JSON {type(value).__name__}", "one JSON object", 'send {"model": ...}')
  if _depth(value) > MAX_DEPTH:
    refuse(None, "JSON nested too deeply", f"at most {MAX_DEPTH} levels", "flatten it")
  return value


def _depth(value: Any) -> int:
  depth, level = 0, [value]
  while level:
    depth += 1
    level = [
      inner
      for outer in level
      for inner in (outer.values() if isinstance(outer, dict) else outer)
      if isinstance(inner, dict | list)
    ]
  return depth


class _Fields:
  """The fields of one body, each of which is taken once.

  Attributes:
    ignored: names of the fields that `finish` accepted without effect.
  """

  def __init__(self, body: Mapping[str, Any], where: str = ""):
    self._left = {name: value for name, value in body.items() if value is not None}
    self._where = f"{where}." if where else ""
    self.ignored: list[str] = []

  def take(self, name: str, default: Any, check: Callable[[str, Any], Any]) -> Any:
    if name not in self._left:
      return default
    return check(self._where + name, self._left.pop(name))

  def require(self, name: str, check: Callable[[str, Any], Any], fix: str) -> Any:
    if name not in self._left:
      refuse(self._where + name, "nothing", "a value", fix)
    return check(self._where + name, self._left.pop(name))

  def finish(self, supported: Sequence[str]) -> None:
    """Refuses what is left over, but for fields that could change no text."""
    for name, value in self._left.items():
      where = self._where + name[:80]
      if where in WITHOUT_EFFECT:
        self.ignored.append(where)
        continue
      if name in NEUTRAL and any(value == one for one in NEUTRAL[name]):
        continue
      if name in NEUTRAL:
        only = " or ".join(json.dumps(one) for one in NEUTRAL[name])
        refuse(where, shown(value), f"{only}, for it is not supported", "leave it out")
      raise Refusal(
        f"{where}: got a field that is not supported, expected one of {', '.join(supported)};"
        " leave it out.",
        param=where,
        code="unsupported_parameter",
      )


def _kind(value: Any) -> str:
  names = {
    bool: "a boolean", int: "a whole number", float: "a number", schemas.Inexact: "a number",
    str: "text",
  }  # fmt: skip
  return names.get(type(value), "a list" if isinstance(value, list) else "an object")


def _boolean(name: str, value: Any) -> bool:
  if not isinstance(value, bool):
    refuse(name, f"{shown(value)} ({_kind(value)})", "true or false", "write one of them")
  return value


def _text(name: str, value: Any) -> str:
  if not isinstance(value, str):
    refuse(name, f"{shown(value)} ({_kind(value)})", "text", "write it in quotes")
  return value


def _whole(least: int, most: int, fix: str) -> Callable[[str, Any], int]:
  def check(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
      refuse(name, f"{shown(value)} ({_kind(value)})", f"a whole number, {least} to {most}", fix)
    if not least <= value <= most:
      refuse(name, shown(value), f"{least} to {most}", fix)
    return value

  return check


def _number(
  is_good: Callable[[float], bool], expected: str, fix: str
) -> Callable[[str, Any], float]:
  def check(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
      refuse(name, f"{shown(value)} ({_kind(value)})", f"a number, {expected}", fix)
    try:
      number = float(value)
    except OverflowError:  # A whole number of JSON may have any length.
      number = math.inf
    if not math.isfinite(number) or not is_good(number):
      refuse(name, shown(value), expected, fix)
    return number

  return check


def _penalty(name: str) -> Callable[[str, Any], float]:
  low, high, none = PENALTIES[name]
  expected = f"{low:g} <= {name} <= {high:g}"
  return _number(lambda x: low <= x <= high, expected, f"{none} penalises no token")


def _object(name: str, value: Any) -> dict[str, Any]:
  if not isinstance(value, dict):
    refuse(name, f"{shown(value)} ({_kind(value)})", "an object", "write {...}")
  return value


def _list(name: str, value: Any) -> list[Any]:
  if not isinstance(value, list):
    refuse(name, f"{shown(value)} ({_kind(value)})", "a list", "write [...]")
  return value


def _stops(name: str, value: Any) -> tuple[str, ...]:
  stops = [value] if isinstance(value, str) else _list(name, value)
  if len(stops) > MAX_STOPS:
    refuse(name, f"{len(stops)} strings", f"at most {MAX_STOPS}", "send fewer")
  for stop in stops:
    if not _text(name, stop):
      refuse(name, "an empty string", "strings of at least one character", "leave it out")
  return tuple(stops)


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
  for token in _list(name, value):
    if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < 2**31:
      refuse(name, shown(token), "token ids from 0 on", "encode with the model's tokenizer")
  return tuple(value)


def _logit_bias(name: str, value: Any) -> tuple[tuple[int, float], ...]:
  found: list[tuple[int, float]] = []
  most = sampling_lib.MAX_LOGIT_BIAS
  if len(_object(name, value)) > most:
    refuse(name, f"{len(value)} entries", f"at most {most}", "bias fewer tokens")
  bias = _number(lambda x: abs(x) <= MAX_BIAS, f"from -{MAX_BIAS:g} to {MAX_BIAS:g}", "lower it")
  for token, number in value.items():
    if not token.isascii() or not token.isdigit() or len(token) > 10:
      refuse(name, f"the key {shown(token)}", "a token id, such as \"42\"", "write its number")
    found.append((int(token), bias(f"{name}.{token}", number)))
  ids = [token for token, _ in found]
  if len({*ids}) < len(ids):
    refuse(name, "one token id twice", "each once", "add its biases")
  return tuple(found)


def _stream_options(fields: _Fields, *, is_streamed: bool) -> bool:
  """Takes `stream_options`; returns whether a stream ends with a count of tokens."""
  name = "stream_options"
  value = fields.take(name, None, _object)
  if value is None:
    return False
  if not is_streamed:
    refuse(name, "it without stream", "stream to be true", "leave it out")
  inner = _Fields(value, name)
  wants_usage = inner.take("include_usage", False, _boolean)
  inner.finish(("include_usage",))
  fields.ignored += inner.ignored
  return wants_usage


def _grammar_of(name: str, value: Any) -> Grammar | None:
  """A `response_format`."""
  kind = _object(name, value).get("type")
  if kind == "text" and len(value) == 1:
    return None
  if kind == "json_object" and len(value) == 1:
    return Grammar(kind="object", source="", param=name)
  if kind != "json_schema":
    refuse(
      f"{name}.type", shown(kind), "text, json_object or json_schema", "write one of them, alone"
    )
  where = f"{name}.json_schema"
  fields = _Fields(_object(where, value.get("json_schema")), where)
  fields.take("name", "", _text)
  fields.take("description", "", _text)
  fields.take("strict", True, _boolean)  # Every answer is strict.
  schema = fields.require("schema", _object, "a schema is an object")
  fields.finish(("name", "description", "strict", "schema"))
  return Grammar(kind="json", source=schemas.source(f"{where}.schema", schema), param=name)


def _regex(name: str, value: Any) -> Grammar:
  if not _text(name, value):
    refuse(name, "an empty expression", "a regular expression", "leave it out")
  return Grammar(kind="regex", source=value, param=name)


# Fields of both routes that become fields of `SamplingParams`.
_SAMPLING: dict[str, Callable[[str, Any], Any]] = {
  "temperature": _number(
    lambda x: x == 0 or is_temperature(x), f"0 or {TEMPERATURES}", "0 is greedy, 1 is usual"
  ),
  "top_p": _number(lambda x: 1e-37 <= x <= 1, "0 < top_p <= 1", "1 keeps every token"),
  "top_k": _whole(-1, 2**31 - 1, "0 or -1 keeps every token"),
  "min_p": _number(lambda x: 0 <= x <= 1, "0 <= min_p <= 1", "0 drops no token"),
  **{name: _penalty(name) for name in PENALTIES},
  "logit_bias": _logit_bias,
}
_SEED = _whole(0, 2**32 - 1, "0 <= seed < 2**32, or leave it out for a fresh one")
_TOP = _whole(0, MAX_TOP_LOGPROBS, "ask for fewer")
_TOKENS = _whole(1, 2**31 - 1, "ask for one token at least")
SHARED = (
  "model", *_SAMPLING, "max_tokens", "n", "seed", "stop", "stop_token_ids", "stream",
  "stream_options", "response_format", "regex", "json_whitespace", "prompt_logprobs", "user",
)  # fmt: skip
CHAT = (*SHARED, "messages", "max_completion_tokens", "logprobs", "top_logprobs", "tools",
        "tool_choice", "parallel_tool_calls", "chat_template_kwargs", "context")  # fmt: skip
COMPLETION = (*SHARED, "prompt", "logprobs", "echo")


# Fields of a model's generation_config.json that are a request's where it names none.
GENERATION = (
  "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens"
)  # fmt: skip


def generation_fields(written: Mapping[str, Any]) -> tuple[dict[str, Any], int | None]:
  """Returns (fields of `SamplingParams`, most tokens of an answer) of a generation_config.json.

  Raises:
    Refusal: naming the field that is not what a request's own may be.
  """
  fields = _Fields({name: written[name] for name in GENERATION if name in written})
  max_tokens = fields.take("max_new_tokens", None, _TOKENS)
  sampling = _sampling(fields)
  if written.get("do_sample") is False:
    repetition = {name: x for name, x in sampling.items() if name == "repetition_penalty"}
    sampling = {"temperature": 0.0, **repetition}
  return sampling, max_tokens


def _sampling(fields: _Fields) -> dict[str, Any]:
  """Returns the fields of `SamplingParams` that are named."""
  sampling = {
    name: value
    for name, check in _SAMPLING.items()
    if (value := fields.take(name, None, check)) is not None
  }
  if sampling.get("top_k") == -1:
    sampling["top_k"] = 0
  return sampling


def _shared(fields: _Fields) -> dict[str, Any]:
  """Returns the fields of `Asked` that both routes have."""
  sampling = _sampling(fields)
  is_streamed = fields.take("stream", False, _boolean)
  wants_usage = _stream_options(fields, is_streamed=is_streamed)
  grammar = fields.take("response_format", None, _grammar_of)
  regex = fields.take("regex", None, _regex)
  if grammar and regex:
    refuse("regex", "it beside response_format", "one of them", "leave one out")
  if fields.take("json_whitespace", False, _boolean):
    if grammar is None:
      refuse("json_whitespace", "it without JSON", "a response_format of JSON", "leave it out")
    grammar = dataclasses.replace(grammar, is_spaced=True)
  prompt_top = fields.take("prompt_logprobs", None, _TOP)
  return dict(
    model=fields.take("model", "", _text),
    sampling=sampling,
    max_tokens=fields.take("max_tokens", None, _TOKENS),
    stop=fields.take("stop", (), _stops),
    stop_token_ids=fields.take("stop_token_ids", (), _token_ids),
    seed=fields.take("seed", None, _SEED),
    num_choices=fields.take("n", 1, _whole(1, MAX_CHOICES, "ask again for more")),
    is_streamed=is_streamed,
    wants_usage=wants_usage,
    grammar=grammar or regex,
    wants_prompt=prompt_top is not None,
    num_prompt_top=prompt_top or 0,
    user=fields.take("user", "", _text),
  )


def chat(body: Mapping[str, Any]) -> Asked:
  """Reads the body of /v1/chat/completions.

  Raises:
    Refusal: naming the field that is unknown, unsupported or not what it should be.
  """
  fields = _Fields(body)
  shared = _shared(fields)
  messages = fields.require("messages", _messages, 'send [{"role": "user", "content": "..."}]')
  newer = fields.take("max_completion_tokens", None, _TOKENS)
  if newer is not None and shared["max_tokens"] not in (None, newer):
    refuse("max_tokens", "it beside max_completion_tokens", "one of them", "leave one out")
  wants_logprobs = fields.take("logprobs", False, _boolean)
  num_top = fields.take("top_logprobs", 0, _TOP)
  if num_top and not wants_logprobs:
    refuse("top_logprobs", "it without logprobs", "logprobs to be true", "set it")
  tools = fields.take("tools", (), _tools)
  is_told, called = _tool_choice(fields, tools)
  if called is not None and shared["grammar"] is not None:
    param = shared["grammar"].param
    refuse("tool_choice", f"calls beside {param}", "one of them", f"leave {param} out")
  variables = fields.take("chat_template_kwargs", {}, _object)
  context = fields.take("context", "", _text)
  if context and (len(messages) > 1 or messages[0]["role"] != "user" or tools):
    refuse(
      "context", f"it beside {len(messages)} messages and {len(tools)} tools",
      "one message of the user, the question, and no tools", "leave the others out",
    )  # fmt: skip
  fields.finish(CHAT)
  return Asked(
    **{
      **shared,
      "grammar": called or shared["grammar"],
      "max_tokens": shared["max_tokens"] if newer is None else newer,
    },
    messages=messages,
    variables=variables,
    tools=tools if is_told else (),
    wants_logprobs=wants_logprobs,
    num_top=num_top,
    context=context,
    ignored=tuple(fields.ignored),
  )


def _tool_choice(
  fields: _Fields, tools: Sequence[Mapping[str, Any]]
) -> tuple[bool, Grammar | None]:
  """Returns whether a model is told of the tools, and the grammar of its calls where it has to."""
  name = "tool_choice"
  choice = fields.take(name, "auto", lambda _, value: value)
  is_one = not fields.take("parallel_tool_calls", True, _boolean)
  functions = [tool["function"] for tool in tools]
  if isinstance(choice, dict) and choice.get("type") == "function":
    inner = _Fields(choice, name)
    inner.take("type", "", _text)
    wanted = _object(f"{name}.function", inner.require("function", _object, "name a function"))
    inner.finish(("type", "function"))
    wanted = _text(f"{name}.function.name", wanted.get("name"))
    known = [function["name"] for function in functions]
    if wanted not in known:
      refuse(
        f"{name}.function.name", shown(wanted),
        f"one of the {len(known)} of tools" + (f", such as {shown(known[0])}" if known else ""),
        "name one of them",
      )  # fmt: skip
    functions, is_one = [functions[known.index(wanted)]], True
  elif choice in ("auto", "none"):
    if is_one and tools and choice == "auto":
      refuse(
        "parallel_tool_calls", "false where a model may call or not",
        "it beside tool_choice \"required\" or a named function", "leave it out, or set those",
      )  # fmt: skip
    return choice == "auto", None
  elif choice != "required":
    refuse(
      name, shown(choice),
      '"none", "auto", "required" or {"type": "function", "function": {"name": ...}}',
      "write one of them",
    )  # fmt: skip
  elif not tools:
    refuse(name, '"required" without tools', "tools that may be called", "send them as tools")
  source = schemas.calls("tools", functions, is_one=is_one)
  return True, Grammar(kind="calls", source=source, param="tools")


def _messages(name: str, value: Any) -> tuple[dict[str, Any], ...]:
  if not _list(name, value):
    refuse(name, "no messages", "one at least", 'send [{"role": "user", "content": "..."}]')
  return tuple(_message(f"{name}[{place}]", one) for place, one in enumerate(value))


def _message(name: str, value: Any) -> dict[str, Any]:
  message = {key: one for key, one in _object(name, value).items() if one is not None}
  role = message.get("role")
  if role == "developer":  # Its newer name.
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
  message["content"] = _text(f"{name}.content", content)
  if role == "user" and not content:
    refuse(f"{name}.content", "nothing", "at least one character", "say something")
  if "tool_calls" in message:
    where = f"{name}.tool_calls"
    if role != "assistant":
      refuse(where, f"calls of the role {role}", "those of the assistant", "leave it out")
    calls = _list(where, message["tool_calls"])
    message["tool_calls"] = [_call(f"{where}[{place}]", one) for place, one in enumerate(calls)]
  for field in ("name", "tool_call_id", "reasoning_content"):
    if field in message:
      _text(f"{name}.{field}", message[field])
  return message


def _call(name: str, value: Any) -> dict[str, Any]:
  """A call that the assistant made, as it was answered."""
  fields = _Fields(_object(name, value), name)
  found: dict[str, Any] = {"id": fields.take("id", "", _text), "type": "function"}
  kind = fields.take("type", "function", _text)
  if kind != "function":
    refuse(f"{name}.type", shown(kind), '"function"', "describe a call of a function")
  found["function"] = fields.require("function", _object, "name the function that was called")
  fields.finish(("id", "type", "function"))
  where = f"{name}.function"
  fields = _Fields(found["function"], where)
  found["function"] = {
    "name": fields.require("name", _text, "name the function that was called"),
    "arguments": fields.require("arguments", _text, "write a JSON object as text"),
  }
  fields.finish(("name", "arguments"))
  written = found["function"]["arguments"]
  try:
    is_object = isinstance(json.loads(written), dict)
  except (ValueError, RecursionError):
    is_object = False
  if not is_object:
    refuse(f"{where}.arguments", shown(written), "a JSON object as text", "send what was answered")
  return found


def _part(name: str, value: Any) -> str:
  kind = _object(name, value).get("type")
  if kind != "text" or set(value) != {"type", "text"}:
    refuse(f"{name}.type", shown(kind), 'parts {"type": "text", "text": ...}', "send text alone")
  return _text(f"{name}.text", value["text"])


def _tools(name: str, value: Any) -> tuple[dict[str, Any], ...]:
  for place, tool in enumerate(_list(name, value)):
    where = f"{name}[{place}]"
    if _object(where, tool).get("type") != "function":
      refuse(f"{where}.type", shown(tool.get("type")), '"function"', "describe a function")
    function = _object(f"{where}.function", tool.get("function"))
    if not _text(f"{where}.function.name", function.get("name")):
      refuse(f"{where}.function.name", "nothing", "a name", "name the function")
    if function.get("parameters") is not None:
      _object(f"{where}.function.parameters", function["parameters"])
  return tuple(value)


def weights(body: Mapping[str, Any]) -> tuple[str, str]:
  """Reads the body of /v1/weights: (model by name, "" where none is named; directory).

  Raises:
    Refusal: naming the field that is unknown, missing or not what it should be.
  """
  fields = _Fields(body)
  model = fields.take("model", "", _text)
  directory = fields.require("directory", _text, "name one on the server's machine")
  fields.finish(("model", "directory"))
  return model, directory


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContextBody:
  """A context as it is registered.

  Attributes:
    name: among its caller's.
    text: to be read.
    ttl_steps: of the engine, after which it is gone; None for never.
  """

  name: str
  text: str
  ttl_steps: int | None


def context(body: Mapping[str, Any]) -> ContextBody:
  """Reads the body of POST /v1/contexts.

  Raises:
    Refusal: naming the field that is unknown, missing or not what it should be.
  """
  fields = _Fields(body)
  name = fields.require("name", _text, "name the context")
  if not name or len(name) > MAX_NAME or not name.isprintable():
    refuse("name", shown(name), f"1 to {MAX_NAME} printable characters", "rename it")
  found = ContextBody(
    name=name,
    text=fields.require("text", _text, "send what is to be read"),
    ttl_steps=fields.take("ttl_steps", None, _whole(1, 2**53, "leave it out to keep it")),
  )
  fields.finish(("name", "text", "ttl_steps"))
  return found


def completion(body: Mapping[str, Any]) -> Asked:
  """Reads the body of /v1/completions.

  Raises:
    Refusal: naming the field that is unknown, unsupported or not what it should be.
  """
  fields = _Fields(body)
  shared = _shared(fields)
  prompts = fields.require("prompt", _prompts, "send text, or token ids")
  if len(prompts) * shared["num_choices"] > MAX_CHOICES:
    got = f"{shared['num_choices']} of each of {len(prompts)} prompts"
    refuse("n", got, f"at most {MAX_CHOICES} answers in all", "ask again for more")
  num_top = fields.take("logprobs", None, _completion_logprobs)
  is_echoed = fields.take("echo", False, _boolean)
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
  if value is False:  # As chats write it.
    return None
  return 0 if value is True else _TOP(name, value)


def _prompts(name: str, value: Any) -> tuple[str | tuple[int, ...], ...]:
  if isinstance(value, str):
    value = [value]
  elif _list(name, value) and not isinstance(value[0], str | list):
    value = [value]  # One prompt, as token ids.
  if not value:
    refuse(name, "no prompt", "one at least", "send text, or token ids")
  if len(value) > MAX_CHOICES:
    refuse(name, f"{len(value)} prompts", f"at most {MAX_CHOICES}", "ask again for more")
  prompts = tuple(
    one if isinstance(one, str) else _token_ids(f"{name}[{place}]", one)
    for place, one in enumerate(value)
  )
  if not all(prompts):
    refuse(name, "an empty prompt", "one token at least", "say something")
  return prompts
