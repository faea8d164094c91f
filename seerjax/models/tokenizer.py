"""Text to token ids and back, and chats to tokens, from a Hugging Face model directory.

    messages --template--> text in which the template's own marks are marked --> ids
                           marks: one id each; everything else: text, whatever it spells

Files: `tokenizer.json` (required), `tokenizer_config.json` and, for roles that it leaves out,
`special_tokens_map.json`, `chat_template.jinja`, and of `generation_config.json` the ids that end a
generation (`Tokenizer.ignored_generation` names the rest). `added_tokens.json` is kept for `save`
alone: `tokenizer.json` holds what it says.

A chat template is a program from a stranger: it runs in jinja2's immutable sandbox. The messages
are strangers' words as well: a user who writes `<|im_end|>` must not end a turn. So special tokens
in the template's own text are lone surrogates while it runs, characters that no message can hold,
and what else looks like a special token in the result is encoded as the letters it is made of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import datetime
import functools
import json
import os
import pathlib
import re
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
import jinja2.visitor
import tokenizers
import tokenizers.decoders

FILES = (
  "tokenizer.json",
  "tokenizer_config.json",
  "chat_template.jinja",
  "special_tokens_map.json",
  "added_tokens.json",
  "generation_config.json",
)
SPECIAL_TOKENS = (
  "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"
)  # fmt: skip
# Fields of generation_config.json that say nothing about how to sample, or are taken.
NOT_SAMPLING = ("eos_token_id", "bos_token_id", "pad_token_id", "transformers_version")
# Added tokens that look like this are special whatever a file says: some that begin a turn in
# published files are not flagged.
CONTROL_FORM = re.compile(r"<[|\uff5c].*[|\uff5c]>", re.DOTALL)
# A mark of the template stands as one lone surrogate in what it renders.
FIRST_SURROGATE, LAST_SURROGATE = 0xD800, 0xDFFF
SURROGATE = re.compile("[\ud800-\udfff]")

Message = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatConfig:
  """What every chat of a run says besides its messages.

  Attributes:
    system: what the system says before a conversation that has no system message; "" is nothing.
    variables: of the chat template, such as `enable_thinking=False` for Qwen3; text, numbers,
      booleans, None, and lists and mappings of these.
  """

  system: str = ""
  variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    for name in self.variables:
      if not name.isidentifier() or name in ("messages", "add_generation_prompt", "now"):
        raise ValueError(
          f"ChatConfig.variables: got {name!r}, expected the name of a variable that the chat"
          " template reads, messages and add_generation_prompt aside; write"
          " --config.chat.variables.enable_thinking=False."
        )
    _plain_data(dict(self.variables), "ChatConfig.variables")

  def __hash__(self) -> int:
    return hash((self.system, json.dumps(_plain_data(self.variables, "ChatConfig.variables"))))


class TextStream:
  """Decodes token by token; a piece is held back until its characters are complete."""

  def __init__(self, backend: tokenizers.Tokenizer, skip_special_tokens: bool):
    self._backend = backend
    self._skip = skip_special_tokens
    self._stream = tokenizers.decoders.DecodeStream(skip_special_tokens=skip_special_tokens)
    self._ids: list[int] = []
    self._text = ""

  def push(self, token_id: int) -> str:
    """Returns the text that this token completes, often one word, sometimes ""."""
    self._ids.append(token_id)
    piece = self._stream.step(self._backend, token_id) or ""
    self._text += piece
    return piece

  def finish(self) -> str:
    """Returns what was held back, so that all pieces together equal `decode` of all ids."""
    whole = self._backend.decode(self._ids, skip_special_tokens=self._skip)
    rest = whole[len(self._text) :] if whole.startswith(self._text) else ""
    self._text += rest
    return rest


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokenizer:
  """A tokenizer and the chat template that belongs to it; see `load`.

  Attributes:
    backend: the `tokenizers` object.
    chat_template: jinja2 source, "" if the directory has none.
    special_tokens: by role (`SPECIAL_TOKENS`), those that exist.
    eos_ids: ids that end a generation, `generation_config.json`'s first.
    files: what was read, byte for byte, by file name.
    chat_config: what every chat says besides its messages.
  """

  backend: tokenizers.Tokenizer
  chat_template: str = ""
  special_tokens: Mapping[str, str] = dataclasses.field(default_factory=dict)
  eos_ids: tuple[int, ...] = ()
  files: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
  chat_config: ChatConfig = dataclasses.field(default_factory=ChatConfig)

  @property
  def vocab_size(self) -> int:
    """Number of ids, added tokens included; a model's padded vocabulary may be larger."""
    return self.backend.get_vocab_size(with_added_tokens=True)

  @property
  def pad_id(self) -> int | None:
    """Id of the padding token, None if there is none."""
    if "pad_token" not in self.special_tokens:
      return None
    return self.backend.token_to_id(self.special_tokens["pad_token"])

  @property
  def ignored_generation(self) -> tuple[str, ...]:
    """What generation_config.json asks for in vain, such as ("temperature=0.6",).

    How a request is sampled is decided by its `SamplingParams` alone.
    """
    if "generation_config.json" not in self.files:
      return ()
    name = pathlib.Path("generation_config.json")
    generation = json_object(name, self.files[name.name])
    return tuple(
      f"{field}={value!r}"
      for field, value in sorted(generation.items())
      if field not in NOT_SAMPLING and not field.startswith("_") and value is not None
    )

  @functools.cached_property
  def special_ids(self) -> Mapping[str, int]:
    """Ids by text of all tokens that no stranger's text may become.

    They are the added tokens that tokenizer.json calls special, those with a role, those that end a
    generation, and those of the form `<|...|>`. Other added tokens (Qwen3's `<think>` and
    `<tool_call>`) are words, which anybody may say.
    """
    added = self.backend.get_added_tokens_decoder()
    named = {self.backend.token_to_id(token) for token in self.special_tokens.values()}
    return {
      token.content: token_id
      for token_id, token in added.items()
      if token.special
      or token_id in named
      or token_id in self.eos_ids
      or CONTROL_FORM.fullmatch(token.content)
    }

  @functools.cached_property
  def _letters(self) -> tokenizers.Tokenizer:
    """A backend to which special tokens are text like any other."""
    written = json.loads(self.backend.to_str())
    for token in written["added_tokens"]:
      token["special"] = token["content"] in self.special_ids
    backend = tokenizers.Tokenizer.from_str(json.dumps(written))
    backend.encode_special_tokens = True
    return backend

  def encode(
    self, text: str, *, add_special_tokens: bool = False, special_tokens_as_text: bool = False
  ) -> list[int]:
    """Returns the ids of a text.

    Args:
      text: what to encode, such as the result of `chat`, which holds its special tokens already.
      add_special_tokens: whether to add what tokenizer.json adds around a text (often a bos token).
      special_tokens_as_text: whether special tokens written in it are the letters they are made of
        (for words of strangers), and do not become their ids.

    Raises:
      ValueError: if the text has no token, or can only be spelled as a special token.
    """
    _check_utf8(text, "Tokenizer.encode")
    backend = self._letters if special_tokens_as_text else self.backend
    ids = backend.encode(text, add_special_tokens=add_special_tokens).ids
    if special_tokens_as_text:
      # What is unknown to a vocabulary is not forged by being unknown.
      unknown = self.backend.token_to_id(self.special_tokens.get("unk_token", ""))
      forged = {i for i in self.special_ids.values() if i != unknown} & set(ids)
      if forged and not add_special_tokens:
        tokens = [token for token, i in self.special_ids.items() if i in forged]
        raise ValueError(
          f"Tokenizer.encode: got {text[:80]!r}, which this vocabulary can spell only with the"
          f" special tokens {tokens}, expected text; take them out."
        )
    if not ids:
      raise ValueError(
        f"Tokenizer.encode: got {text[:40]!r}, which has no token, expected at least one; a prompt"
        " must not be empty."
      )
    return ids

  def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
    """Returns the text of the ids; ids beyond the vocabulary (a model's padding) have none.

    Raises:
      ValueError: for an id below 0, or from 2**32 on.
    """
    plain = [int(i) for i in ids]
    if min(plain, default=0) < 0 or max(plain, default=0) >= 2**32:
      raise ValueError(
        f"Tokenizer.decode: got ids from {min(plain)} to {max(plain)}, expected 0 to 2**32 - 1;"
        " pass what was encoded or sampled."
      )
    return self.backend.decode(plain, skip_special_tokens=skip_special_tokens)

  def stream(self, skip_special_tokens: bool = True) -> TextStream:
    """Returns a fresh incremental decoder."""
    return TextStream(self.backend, skip_special_tokens)

  def chat(
    self,
    messages: Sequence[Message] | str,
    add_generation_prompt: bool = True,
    *,
    now: datetime.datetime | None = None,
    **variables: Any,
  ) -> str:
    """Returns the text of a conversation by the chat template, for people; see `chat_ids`.

    Args:
      messages: {"role": ..., "content": ...} each, or one string, which is a user's message. Fields
        that are None are left out.
      add_generation_prompt: whether to end where the assistant begins to speak.
      now: what the template's `strftime_now` sees; the clock if None. Give one where prompts must
        stay equal from day to day.
      **variables: further template variables, such as `enable_thinking=False`; before those of
        `chat_config`. `tools` and `documents` are None where they are not given.

    Raises:
      ValueError: if there is no template or nothing to say, if the template refuses the messages
        (its own words are quoted), reaches for what the sandbox forbids, or has an error.
    """
    text, marks, _ = self._rendered(messages, add_generation_prompt, now, variables)
    return _unmarked(text, marks)

  def chat_ids(
    self,
    messages: Sequence[Message] | str,
    add_generation_prompt: bool = True,
    *,
    now: datetime.datetime | None = None,
    **variables: Any,
  ) -> list[int]:
    """Returns the ids of a conversation by the chat template; arguments as for `chat`.

    The template's own special tokens become their ids; those in messages, tools, documents and
    variables are text, so that their writer can neither begin nor end a turn. Where there are none,
    these are the ids of `chat`'s text.

    Raises:
      ValueError: as `chat`; and if the template puts a special token together from parts, which may
        be a stranger's.
    """
    text, marks, outside = self._rendered(messages, add_generation_prompt, now, variables)
    ids = self.encode(_unmarked(text, marks))
    expected = [self.special_ids[marks[letter]] for letter in SURROGATE.findall(text)]
    special = set(self.special_ids.values())
    if [i for i in ids if i in special] == expected:
      return ids
    ids = []
    for run in re.split("([\ud800-\udfff])", text):
      if run in marks:
        ids.append(self.special_ids[marks[run]])
      elif run:
        self._refuse_parts(run, outside)
        ids += self.encode(run, special_tokens_as_text=True)
    return ids

  def _refuse_parts(self, run: str, outside: Sequence[str]) -> None:
    """Refuses special tokens in what a template rendered that stand neither in it nor outside."""
    for token in self.special_ids:
      if token in run and not any(token in text for text in outside):
        raise ValueError(
          f"Tokenizer.chat_ids: got a chat template that puts {token!r} together from parts,"
          " expected its special tokens written whole; write them so in chat_template.jinja, or"
          " look whether the messages hold half of one."
        )

  def _rendered(
    self,
    messages: Sequence[Message] | str,
    add_generation_prompt: bool,
    now: datetime.datetime | None,
    variables: Mapping[str, Any],
  ) -> tuple[str, dict[str, str], list[str]]:
    """Returns a chat with marks as surrogates, what each stands for, and all text from outside."""
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
    if not self.chat_template:
      raise ValueError(
        "Tokenizer.chat: got a tokenizer without chat template, expected chat_template.jinja or"
        " 'chat_template' in tokenizer_config.json; add one, or encode plain text."
      )
    if self.chat_config.system and messages[0]["role"] != "system":
      messages = [{"role": "system", "content": self.chat_config.system}, *messages]
    given = {"tools": None, "documents": None, **self.chat_config.variables, **variables}
    outside: list[str] = []
    plain = [{k: v for k, v in message.items() if v is not None} for message in messages]
    plain = _plain_data(plain, "Tokenizer.chat: messages", outside)
    given = _plain_data(given, "Tokenizer.chat: variables", outside)
    functions = {"strftime_now": lambda form: (now or datetime.datetime.now()).strftime(form)}
    marks: dict[str, str] = {}
    try:
      compiled = _compiled(
        self.chat_template, tuple(self.special_ids), tuple(self.special_tokens.items())
      )
      marks = compiled.marks
      text = compiled.template.render(
        messages=plain,
        add_generation_prompt=add_generation_prompt,
        **{**functions, **compiled.special_tokens, **given},
      )
    except jinja2.exceptions.SecurityError as error:
      raise ValueError(
        f"Tokenizer.chat: got a chat template that the sandbox forbids ({error}), expected one that"
        " only reads its messages; do not trust this template."
      ) from error
    except jinja2.exceptions.TemplateError as error:
      raise ValueError(
        f"Tokenizer.chat: got {type(error).__name__} from the chat template"
        f" ({_unmarked(str(error), marks)}), expected text; correct the messages, or the template."
      ) from error
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
      # Raised by the template's own expressions, such as adding a number to a string.
      raise ValueError(
        f"Tokenizer.chat: got {type(error).__name__} inside the chat template"
        f" ({_unmarked(str(error), marks)}), expected text; check that the messages have the shape"
        " that this template reads."
      ) from error
    return text, marks, outside

  def save(self, directory: str | os.PathLike[str]) -> None:
    """Writes every file that was read, byte for byte; other files there are left alone."""
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in self.files.items():
      (directory / name).write_bytes(content)


def load(directory: str | os.PathLike[str]) -> Tokenizer:
  """Reads a tokenizer from a model directory.

  Raises:
    FileNotFoundError: if the directory or its tokenizer.json is missing.
    ValueError: naming the file that is corrupt, and what is wrong in it.
  """
  directory = pathlib.Path(directory)
  if not (directory / "tokenizer.json").is_file():
    raise FileNotFoundError(
      f"{directory / 'tokenizer.json'}: got no such file, expected a Hugging Face model directory"
      " with a fast tokenizer; check the path, or convert the tokenizer first."
    )
  files = {name: (directory / name).read_bytes() for name in FILES if (directory / name).is_file()}
  try:
    backend = tokenizers.Tokenizer.from_buffer(files["tokenizer.json"])
  except Exception as error:  # `tokenizers` raises bare Exception, and nothing narrower.
    raise ValueError(
      f"{directory / 'tokenizer.json'}: got a file that `tokenizers` cannot read ({error}),"
      " expected its JSON; download it again."
    ) from error
  # A file may ask for truncation or padding, which would change prompts in silence.
  backend.no_truncation()
  backend.no_padding()

  def read(name: str) -> dict[str, Any]:
    return json_object(directory / name, files[name]) if name in files else {}

  config = read("tokenizer_config.json")
  special_tokens = _special_tokens(config)
  older = _special_tokens(read("special_tokens_map.json"))
  if "chat_template.jinja" in files:
    chat_template = _text(directory / "chat_template.jinja", files["chat_template.jinja"])
  else:
    chat_template = _configured_template(directory, config)
  generation = read("generation_config.json")
  return Tokenizer(
    backend=backend,
    chat_template=chat_template,
    special_tokens={**older, **special_tokens},
    eos_ids=_eos_ids(
      directory,
      backend,
      {"tokenizer_config.json": special_tokens, "special_tokens_map.json": older},
      generation,
    ),
    files=files,
  )


def json_object(path: pathlib.Path, content: bytes) -> dict[str, Any]:
  """Returns the JSON object that one of a model directory's files holds.

  Raises:
    ValueError: naming the file if it is no UTF-8, no JSON, or no object.
  """
  try:
    value = json.loads(_text(path, content))
  except (json.JSONDecodeError, RecursionError) as error:
    raise ValueError(
      f"{path}: got text that is not JSON ({error}), expected an object; download it again."
    ) from error
  if not isinstance(value, dict):
    raise ValueError(
      f"{path}: got a JSON {type(value).__name__}, expected an object; download it again."
    )
  return value


def _text(path: pathlib.Path, content: bytes) -> str:
  try:
    return content.decode("utf-8")
  except UnicodeDecodeError as error:
    raise ValueError(
      f"{path}: got bytes that are no UTF-8 at offset {error.start}, expected text; download it"
      " again."
    ) from error


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
  special = {}
  for role in SPECIAL_TOKENS:
    token = config.get(role)
    if isinstance(token, dict):
      token = token.get("content")
    if isinstance(token, str):
      special[role] = token
  return special


def _configured_template(directory: pathlib.Path, config: Mapping[str, Any]) -> str:
  template = config.get("chat_template")
  if isinstance(template, list):
    # Several named templates; a plain chat is the one named "default".
    named = {t["name"]: t["template"] for t in template if {"name", "template"} <= set(t)}
    if "default" not in named:
      raise ValueError(
        f"{directory / 'tokenizer_config.json'}: got chat templates named {sorted(named)}, expected"
        " 'default' among them; rename one."
      )
    template = named["default"]
  if template is None:
    return ""
  if not isinstance(template, str):
    raise ValueError(
      f"{directory / 'tokenizer_config.json'}: got chat_template of type {type(template).__name__},"
      " expected a string or a list of named ones; download it again."
    )
  return template


def _eos_ids(
  directory: pathlib.Path,
  backend: tokenizers.Tokenizer,
  special_tokens: Mapping[str, Mapping[str, str]],
  generation: Mapping[str, Any],
) -> tuple[int, ...]:
  found = generation.get("eos_token_id")
  ids = found if isinstance(found, list) else [] if found is None else [found]
  if any(not isinstance(i, int) or isinstance(i, bool) or i < 0 for i in ids):
    raise ValueError(
      f"{directory / 'generation_config.json'}: got eos_token_id={found!r}, expected a token id or"
      " a list of them; correct the file."
    )
  for name, by_role in special_tokens.items():
    if "eos_token" in by_role:
      token_id = backend.token_to_id(by_role["eos_token"])
      if token_id is None:
        raise ValueError(
          f"{directory / name}: got eos_token {by_role['eos_token']!r}, expected a token of"
          " tokenizer.json; the two files do not belong together."
        )
      ids = [*ids, token_id]
  return tuple(dict.fromkeys(ids))


class _Generation(jinja2.ext.Extension):
  """Lets `{% generation %}...{% endgeneration %}` through: it marks the assistant's own words."""

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


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
  """Raises where jinja2 hands out an undefined value, which prints as nothing."""

  def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
    raise jinja2.exceptions.SecurityError(
      f"access to attribute {attribute!r} of {type(obj).__name__!r} object is unsafe"
    )


@dataclasses.dataclass(frozen=True)
class _Compiled:
  """A template's program, in whose text every special token is one lone surrogate.

  Attributes:
    template: the program.
    marks: special tokens by the surrogate that stands for them.
    special_tokens: by role, marked.
  """

  template: jinja2.Template
  marks: dict[str, str]
  special_tokens: dict[str, str]


# Where a template compares its own text with what it reads, it has to stay as it is written.
_COMPARING_METHODS = (
  "split", "rsplit", "partition", "rpartition", "startswith", "endswith", "removeprefix",
  "removesuffix", "find", "rfind", "index", "rindex", "count", "strip", "lstrip", "rstrip", "get",
)  # fmt: skip
_COMPARING_FILTERS = ("trim", "select", "reject", "selectattr", "rejectattr", "attr")


@functools.lru_cache(maxsize=16)
def _compiled(
  chat_template: str, special: tuple[str, ...], roles: tuple[tuple[str, str], ...]
) -> _Compiled:
  """Returns the template's program, made once: that takes longer than a prompt does with it.

  Args:
    chat_template: jinja2 source.
    special: texts of the special tokens.
    roles: pairs (role, text).
  """
  # Block trimming and these names are what templates written for Hugging Face count on.
  environment = _Sandbox(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=[_Generation, "jinja2.ext.loopcontrols"],
  )
  environment.filters["tojson"] = _to_json
  environment.globals["raise_exception"] = _raise_exception
  tree = environment.parse(chat_template)
  marker = _Marker(special, dict(roles))
  special_tokens = {role: marker.marked(text) for role, text in roles}
  marker.visit(tree)
  marks = {letter: text for text, letter in marker.letters.items()}
  return _Compiled(environment.from_string(tree), marks, special_tokens)


class _Marker(jinja2.visitor.NodeTransformer):
  """Puts surrogates for special tokens into a template's text, but where it only compares."""

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
    # What is tested may be a name that is not defined.
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
    # Of `replace`, what is looked for is compared, and what stands for it is the template's own.
    count = len(node.args) if name in compares else 1 if name == "replace" else 0
    compared, rest = self._compare(node.args[:count]), node.args[count:]
    node.args = rest
    self.generic_visit(node)
    node.args = [*compared, *node.args]
    return node


def _unmarked(text: str, marks: Mapping[str, str]) -> str:
  return SURROGATE.sub(lambda match: marks.get(match[0], match[0]), text)


def _check_utf8(text: str, where: str) -> None:
  found = SURROGATE.search(text)
  if found:  # `tokenizers` would only say that it got no str.
    raise ValueError(
      f"{where}: got text with a lone surrogate at offset {found.start()}, expected characters that"
      " UTF-8 can hold; replace it."
    )


def _plain_data(value: Any, where: str, texts: list[str] | None = None) -> Any:
  """Returns a copy made of JSON's kinds alone, which have no method that a template could misuse.

  Args:
    value: what a template is to read.
    where: for the refusal.
    texts: takes every text in it, keys included.

  Raises:
    ValueError: for any other kind, and for text that UTF-8 cannot hold.
  """
  if isinstance(value, str):
    _check_utf8(value, where)
    if texts is not None:
      texts.append(str(value))
    return str(value)
  if value is None or isinstance(value, (bool, int, float)):
    return value
  if isinstance(value, Mapping):
    return {_plain_data(k, where, texts): _plain_data(v, where, texts) for k, v in value.items()}
  if isinstance(value, (list, tuple)):
    return [_plain_data(item, where, texts) for item in value]
  raise ValueError(
    f"{where}: got {value!r} of type {type(value).__name__}, expected text, numbers, booleans,"
    " None, and lists and mappings of these; convert it."
  )
