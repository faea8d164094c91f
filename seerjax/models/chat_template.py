"""Renders chats as text with a chat template, in a sandbox that can only read.

A template is an untrusted program: it runs in jinja2's immutable sandbox. The messages are
untrusted as well: a user who writes `<|im_end|>` must not end a turn. So while the template runs,
special tokens in its own text are lone surrogates, characters that no message can contain
(`Rendered.marks`), and `models.tokenizer` converts only these to special ids.

The rendered text is a function of the template, the messages and `ChatConfig`. So a template has no
clock (`strftime_now` formats one fixed moment, in English on every machine), no random choice, and
no address of an object.
"""

from __future__ import annotations

import calendar
from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import datetime
import functools
import json
import re
from typing import Any, NamedTuple

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.sandbox
import jinja2.utils
import jinja2.visitor

from seerjax import fields

# Each mark of the template is one lone surrogate in the rendered text.
FIRST_SURROGATE, LAST_SURROGATE = 0xD800, 0xDFFF
SURROGATE = re.compile("[\ud800-\udfff]")

# The only function with which templates read the clock, by Hugging Face's name.
CLOCK = "strftime_now"

Message = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatConfig:
  """Settings of every chat of a run besides its messages.

  Attributes:
    system: system message for conversations that have none; "" adds none.
    variables: variables of the chat template, such as `enable_thinking=False` for Qwen3; text,
      numbers, booleans, None, and lists and mappings of these.
    now: the moment that a template's `strftime_now` formats, with its zone, such as
      "2026-11-27T12:00:00+01:00". "" uses the start of the run or server, if the template reads the
      clock; a resumed run keeps the moment of its first start.
  """

  system: str = ""
  variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  now: str = ""

  def __post_init__(self):
    fields.check(self)
    self.moment()  # Refuses an invalid moment.
    for name in self.variables:
      if not name.isidentifier() or name in ("messages", "add_generation_prompt", "now"):
        raise ValueError(
          f"ChatConfig.variables: got {name!r}, expected the name of a variable that the chat"
          " template reads, except messages and add_generation_prompt; write"
          " --config.chat.variables.enable_thinking=False."
        )
    plain_data(dict(self.variables), "ChatConfig.variables")

  def __hash__(self) -> int:
    variables = json.dumps(plain_data(self.variables, "ChatConfig.variables"))
    return hash((self.system, variables, self.now))

  def moment(self) -> datetime.datetime | None:
    """Returns `now` as a date and time with a zone; None if it is "".

    Raises:
      ValueError: if it is not ISO 8601 text with a zone.
    """
    if not self.now:
      return None
    try:
      moment = datetime.datetime.fromisoformat(self.now)
    except ValueError:
      moment = None
    if moment is None or moment.tzinfo is None:
      raise ValueError(
        f"ChatConfig.now: got {self.now!r}, expected an ISO 8601 date and time with its zone, or"
        ' ""; write --config.chat.now=2026-11-27T12:00:00+01:00.'
      )
    return moment


def current_moment() -> str:
  """Returns the current time in this machine's zone, in the format of `ChatConfig.now`.

  It is called once, when a tokenizer is loaded; rendering never reads the clock.
  """
  return datetime.datetime.now().astimezone().isoformat(timespec="seconds")


def reads_clock(template: str) -> bool:
  """Returns whether a template's program reads the clock; mentions in its text do not count."""
  return CLOCK in variables_read(template)


class Rendered(NamedTuple):
  """A rendered chat.

  Attributes:
    text: rendered text, with each of the template's own special tokens as one lone surrogate.
    marks: special tokens by their surrogates.
    outside: every text that came from outside of the template.
  """

  text: str
  marks: Mapping[str, str]
  outside: Sequence[str]


def rendered(
  template: str,
  messages: Sequence[Message] | str,
  *,
  special: Iterable[str],
  roles: Mapping[str, str],
  config: ChatConfig,
  add_generation_prompt: bool,
  now: datetime.datetime | None,
  variables: Mapping[str, Any],
) -> Rendered:
  """Renders a conversation with a chat template.

  Args:
    template: jinja2 source.
    messages: as in `Tokenizer.chat`.
    special: texts of the special tokens.
    roles: special tokens by role, which are variables of the template.
    config: settings of the chat besides its messages.
    add_generation_prompt: whether to end where the assistant's response begins.
    now: the moment that `strftime_now` formats; that of `config` if None.
    variables: further variables of the template; they take precedence over those of `config`.

  Raises:
    ValueError: as `Tokenizer.chat`.
  """
  if isinstance(messages, str):
    messages = [{"role": "user", "content": messages}]
  if not messages:
    raise ValueError(
      "Tokenizer.chat: got no messages, expected at least one; pass"
      ' [{"role": "user", "content": "..."}].'
    )
  for index, message in enumerate(messages):
    if "role" not in message:
      raise ValueError(
        f"Tokenizer.chat: got message {index} with the keys {sorted(message)}, expected 'role'"
        " and 'content'; add the role."
      )
    if message["role"] == "user" and not message.get("content"):
      raise ValueError(
        f"Tokenizer.chat: got an empty user message at index {index}, expected at least one"
        " character; a prompt must not be empty."
      )
  if not template:
    raise ValueError(
      "Tokenizer.chat: got a tokenizer without chat template, expected chat_template.jinja or"
      " 'chat_template' in tokenizer_config.json; add one, or encode plain text."
    )
  if config.system and messages[0]["role"] != "system":
    messages = [{"role": "system", "content": config.system}, *messages]
  given = {"tools": None, "documents": None, **config.variables, **variables}
  outside: list[str] = []
  plain = [{k: v for k, v in message.items() if v is not None} for message in messages]
  plain = plain_data(plain, "Tokenizer.chat: messages", outside)
  given = plain_data(given, "Tokenizer.chat: variables", outside)
  moment = config.moment() if now is None else now

  def strftime_now(form: str) -> str:
    if moment is None:
      raise jinja2.exceptions.TemplateError(
        "it reads the clock, and no time is set: set ChatConfig.now, or load the tokenizer with"
        " models.tokenizer.load, which sets it"
      )
    return formatted(moment, form)

  marks: dict[str, str] = {}
  try:
    compiled = _compiled(template, tuple(special), tuple(roles.items()))
    marks = compiled.marks
    text = compiled.template.render(
      messages=plain,
      add_generation_prompt=add_generation_prompt,
      **{CLOCK: strftime_now, **compiled.special_tokens, **given},
    )
  except jinja2.exceptions.SecurityError as error:
    raise ValueError(
      f"Tokenizer.chat: got a chat template that the sandbox forbids ({error}), expected a template"
      " that only reads its messages; do not trust this template."
    ) from error
  except jinja2.exceptions.TemplateError as error:
    raise ValueError(
      f"Tokenizer.chat: got {type(error).__name__} from the chat template"
      f" ({unmarked(str(error), marks)}), expected text; correct the messages, or the template."
    ) from error
  except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
    # Raised by the template's own expressions, such as adding a number to a string.
    raise ValueError(
      f"Tokenizer.chat: got {type(error).__name__} inside the chat template"
      f" ({unmarked(str(error), marks)}), expected text; check that the messages have the form that"
      " this template needs."
    ) from error
  return Rendered(text, marks, outside)


# Directives for which `strftime` uses the process's locale or zone, in the C locale's English form.
_COMPOSITES = {
  "c": "%a %b %e %H:%M:%S %Y", "x": "%m/%d/%y", "X": "%H:%M:%S", "r": "%I:%M:%S %p",
  "+": "%a %b %e %H:%M:%S %Z %Y",
}  # fmt: skip
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_MONTHS = (
  "January", "February", "March", "April", "May", "June", "July", "August", "September", "October",
  "November", "December",
)  # fmt: skip
# A directive, with the flags of glibc.
_DIRECTIVE = re.compile(r"%([-_0^#]*)[EO]?([a-zA-Z%+])")


def formatted(moment: datetime.datetime, form: str) -> str:
  """Formats a moment like `strftime`, in English, independent of the process's locale and zone."""
  form = _DIRECTIVE.sub(lambda match: _COMPOSITES.get(match[2], f"%{match[1]}{match[2]}"), form)
  day, month = _DAYS[moment.weekday()], _MONTHS[moment.month - 1]
  half = "AM" if moment.hour < 12 else "PM"
  words = {
    "a": day[:3], "A": day, "b": month[:3], "h": month[:3], "B": month, "p": half,
    "P": half.lower(), "s": str(calendar.timegm(moment.utctimetuple())),
  }  # fmt: skip

  def word(match: re.Match[str]) -> str:
    if match[2] not in words:
      return match[0]
    return words[match[2]].upper() if "^" in match[1] else words[match[2]]

  return moment.strftime(_DIRECTIVE.sub(word, form))


def unmarked(text: str, marks: Mapping[str, str]) -> str:
  """Returns a rendered text with its surrogates replaced by special tokens."""
  return SURROGATE.sub(lambda match: marks.get(match[0], match[0]), text)


def check_utf8(text: str, where: str) -> None:
  """Refuses text that UTF-8 cannot hold.

  Raises:
    ValueError: with `where` as its prefix.
  """
  found = SURROGATE.search(text)
  if found:  # The error of `tokenizers` would be misleading: it got no str.
    raise ValueError(
      f"{where}: got text with a lone surrogate at offset {found.start()}, expected characters that"
      " UTF-8 can hold; replace it."
    )


def plain_data(value: Any, where: str, texts: list[str] | None = None) -> Any:
  """Returns a copy made of JSON types only, which have no method that a template could misuse.

  Args:
    value: value for a template.
    where: prefix of the error message.
    texts: receives every text in the value, keys included.

  Raises:
    ValueError: for any other type, and for text that UTF-8 cannot hold.
  """
  if isinstance(value, str):
    check_utf8(value, where)
    if texts is not None:
      texts.append(str(value))
    return str(value)
  if value is None or isinstance(value, (bool, int, float)):
    return value
  if isinstance(value, Mapping):
    return {plain_data(k, where, texts): plain_data(v, where, texts) for k, v in value.items()}
  if isinstance(value, (list, tuple)):
    return [plain_data(item, where, texts) for item in value]
  raise ValueError(
    f"{where}: got {value!r} of type {type(value).__name__}, expected text, numbers, booleans,"
    " None, and lists and mappings of these; convert it."
  )


class _Generation(jinja2.ext.Extension):
  """Accepts `{% generation %}...{% endgeneration %}`, which marks the assistant's text."""

  tags = {"generation"}

  def parse(self, parser: Any) -> Any:
    next(parser.stream)
    return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
  raise jinja2.exceptions.TemplateError(message)


def _to_json(
  value: Any,
  ensure_ascii: bool = False,
  indent: int | None = None,
  separators: tuple[str, str] | None = None,
  sort_keys: bool = False,
) -> str:
  # Not jinja2's own filter, which escapes <, > and & for HTML.
  return json.dumps(
    value,
    ensure_ascii=ensure_ascii,
    indent=indent,
    separators=separators,
    sort_keys=sort_keys,
  )


def _printable(value: Any) -> Any:
  """Returns a printed value; refuses an object that prints as its address in this process."""
  is_object = callable(value) or isinstance(value, (jinja2.utils.Cycler, jinja2.utils.Joiner))
  if is_object and not isinstance(value, jinja2.Undefined):
    raise jinja2.exceptions.TemplateError(
      f"it prints an object of type {type(value).__name__} by its memory address: call it, or"
      " print a value"
    )
  return value


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
  """Raises where jinja2 would return an undefined value, which prints as nothing."""

  def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
    raise jinja2.exceptions.SecurityError(
      f"access to attribute {attribute!r} of {type(obj).__name__!r} object is unsafe"
    )


@dataclasses.dataclass(frozen=True)
class _Compiled:
  """A template's program with every special token of its text as one lone surrogate.

  Attributes:
    template: the program.
    marks: special tokens by their surrogates.
    special_tokens: marked special tokens by role.
  """

  template: jinja2.Template
  marks: dict[str, str]
  special_tokens: dict[str, str]


# Arguments of these, which a template compares with its input, keep their special tokens unmarked.
_COMPARING_METHODS = (
  "split", "rsplit", "partition", "rpartition", "startswith", "endswith", "removeprefix",
  "removesuffix", "find", "rfind", "index", "rindex", "count", "strip", "lstrip", "rstrip", "get",
)  # fmt: skip
_COMPARING_FILTERS = ("trim", "select", "reject", "selectattr", "rejectattr", "attr")


def _environment() -> _Sandbox:
  # Templates written for Hugging Face rely on block trimming and on these names.
  environment = _Sandbox(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=[_Generation, "jinja2.ext.loopcontrols"],
    finalize=_printable,
  )
  # Both are random, so equal messages would give different prompts.
  del environment.filters["random"], environment.globals["lipsum"]
  environment.filters["tojson"] = _to_json
  environment.globals["raise_exception"] = _raise_exception
  return environment


@functools.lru_cache(maxsize=16)
def variables_read(chat_template: str) -> frozenset[str]:
  """Returns the names of the variables that a template reads; none if it does not parse."""
  try:
    return frozenset(jinja2.meta.find_undeclared_variables(_environment().parse(chat_template)))
  except jinja2.exceptions.TemplateError:
    return frozenset()


@functools.lru_cache(maxsize=16)
def _compiled(
  chat_template: str, special: tuple[str, ...], roles: tuple[tuple[str, str], ...]
) -> _Compiled:
  """Returns the template's program. It is cached, since compiling takes longer than rendering.

  Args:
    chat_template: jinja2 source.
    special: texts of the special tokens.
    roles: pairs (role, text).
  """
  environment = _environment()
  tree = environment.parse(chat_template)
  marker = _Marker(special, dict(roles))
  special_tokens = {role: marker.marked(text) for role, text in roles}
  marker.visit(tree)
  marks = {letter: text for text, letter in marker.letters.items()}
  return _Compiled(environment.from_string(tree), marks, special_tokens)


class _Marker(jinja2.visitor.NodeTransformer):
  """Replaces special tokens in a template's text by surrogates, except where it only compares."""

  def __init__(self, special: Sequence[str], roles: Mapping[str, str]):
    longest_first = sorted(special, key=len, reverse=True)
    self._special = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
    self._roles = roles
    self._is_comparing = False
    self.letters: dict[str, str] = {}

  def marked(self, text: str) -> str:
    return self._special.sub(lambda match: self._letter(match[0]), text)

  def _letter(self, token: str) -> str:
    if token not in self.letters:
      code = FIRST_SURROGATE + len(self.letters)
      if code > LAST_SURROGATE:
        most = LAST_SURROGATE - FIRST_SURROGATE + 1
        raise jinja2.exceptions.TemplateError(f"more than {most} special tokens in its text")
      self.letters[token] = chr(code)
    return self.letters[token]

  def _compare(self, nodes: Sequence[jinja2.nodes.Node | None]) -> list[Any]:
    before, self._is_comparing = self._is_comparing, True
    visited = [node if node is None else self.visit(node) for node in nodes]
    self._is_comparing = before
    return visited

  def visit_TemplateData(self, node: jinja2.nodes.TemplateData) -> jinja2.nodes.Node:
    node.data = self.marked(node.data)
    return node

  def visit_Const(self, node: jinja2.nodes.Const) -> jinja2.nodes.Node:
    if isinstance(node.value, str) and not self._is_comparing:
      node.value = self.marked(node.value)
    return node

  def visit_Name(self, node: jinja2.nodes.Name) -> jinja2.nodes.Node:
    if self._is_comparing and node.ctx == "load" and node.name in self._roles:
      return jinja2.nodes.Const(self._roles[node.name], lineno=node.lineno)
    return node

  def visit_Compare(self, node: jinja2.nodes.Compare) -> jinja2.nodes.Node:
    node.expr, *node.ops = self._compare([node.expr, *node.ops])
    return node

  def visit_Test(self, node: jinja2.nodes.Test) -> jinja2.nodes.Node:
    # The tested name may be undefined.
    node.node = self.visit(node.node)
    node.args = self._compare(node.args)
    return node

  def visit_Getitem(self, node: jinja2.nodes.Getitem) -> jinja2.nodes.Node:
    node.node = self.visit(node.node)
    (node.arg,) = self._compare([node.arg])
    return node

  def visit_Pair(self, node: jinja2.nodes.Pair) -> jinja2.nodes.Node:
    (node.key,) = self._compare([node.key])
    node.value = self.visit(node.value)
    return node

  def visit_Call(self, node: jinja2.nodes.Call) -> jinja2.nodes.Node:
    return self._call(node, node.node.attr if isinstance(node.node, jinja2.nodes.Getattr) else "")

  def visit_Filter(self, node: jinja2.nodes.Filter) -> jinja2.nodes.Node:
    return self._call(node, node.name)

  def _call(self, node: Any, name: str) -> jinja2.nodes.Node:
    compares = _COMPARING_FILTERS if isinstance(node, jinja2.nodes.Filter) else _COMPARING_METHODS
    # The first argument of `replace` is compared; the replacement is the template's own text.
    count = len(node.args) if name in compares else 1 if name == "replace" else 0
    compared, rest = self._compare(node.args[:count]), node.args[count:]
    node.args = rest
    self.generic_visit(node)
    node.args = [*compared, *node.args]
    return node
