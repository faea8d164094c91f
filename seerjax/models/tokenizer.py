"""Text to token ids and back, and chats to text, from a Hugging Face model directory.

Files read: `tokenizer.json` (required), `tokenizer_config.json`, `chat_template.jinja`,
`special_tokens_map.json`, `added_tokens.json` and `generation_config.json`. A chat template is a
program from a stranger: it runs in jinja2's immutable sandbox.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import datetime
import functools
import json
import os
import pathlib
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
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
SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")

Message = Mapping[str, Any]


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
    special_tokens: by role ("bos_token", "eos_token", "pad_token", "unk_token"), those that exist.
    eos_ids: ids that end a generation, `generation_config.json`'s first.
    files: what was read, byte for byte, by file name.
  """

  backend: tokenizers.Tokenizer
  chat_template: str = ""
  special_tokens: Mapping[str, str] = dataclasses.field(default_factory=dict)
  eos_ids: tuple[int, ...] = ()
  files: Mapping[str, bytes] = dataclasses.field(default_factory=dict)

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

  def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
    """Returns the ids of a text; special tokens written in it become their ids.

    Args:
      text: what to encode, such as the result of `chat`, which holds its special tokens already.
      add_special_tokens: whether to add what tokenizer.json adds around a text (often a bos token).

    Raises:
      ValueError: if the text has no token.
    """
    try:
      text.encode("utf-8")  # `tokenizers` would only say that it got no str.
    except UnicodeEncodeError as error:
      raise ValueError(
        f"Tokenizer.encode: got text with a lone surrogate at offset {error.start}, expected"
        " characters that UTF-8 can hold; replace it."
      ) from error
    ids = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
    if not ids:
      raise ValueError(
        f"Tokenizer.encode: got {text[:40]!r}, which has no token, expected at least one; a prompt"
        " must not be empty."
      )
    return ids

  def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
    """Returns the text of the ids; ids beyond the vocabulary (a model's padding) say nothing."""
    return self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

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
    """Returns the text of a conversation by the chat template.

    Args:
      messages: {"role": ..., "content": ...} each, or one string, which is a user's message.
      add_generation_prompt: whether to end where the assistant begins to speak.
      now: what the template's `strftime_now` sees; the clock if None. Give one where prompts must
        stay equal from day to day.
      **variables: further template variables, such as `enable_thinking=False`.

    Raises:
      ValueError: if there is no template or nothing to say, if the template refuses the messages
        (its own words are quoted), reaches for what the sandbox forbids, or has an error.
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
    if not self.chat_template:
      raise ValueError(
        "Tokenizer.chat: got a tokenizer without chat template, expected chat_template.jinja or"
        " 'chat_template' in tokenizer_config.json; add one, or encode plain text."
      )
    functions = {"strftime_now": lambda form: (now or datetime.datetime.now()).strftime(form)}
    try:
      return _compiled(self.chat_template).render(
        messages=messages,
        add_generation_prompt=add_generation_prompt,
        **{**functions, **self.special_tokens, **variables},
      )
    except jinja2.exceptions.SecurityError as error:
      raise ValueError(
        f"Tokenizer.chat: got a chat template that the sandbox forbids ({error}), expected one that"
        " only reads its messages; do not trust this template."
      ) from error
    except jinja2.exceptions.TemplateError as error:
      raise ValueError(
        f"Tokenizer.chat: got {type(error).__name__} from the chat template ({error}), expected"
        " text; correct the messages, or the template."
      ) from error
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
      # Raised by the template's own expressions, such as adding a number to a string.
      raise ValueError(
        f"Tokenizer.chat: got {type(error).__name__} inside the chat template ({error}), expected"
        " text; check that the messages have the shape that this template reads."
      ) from error

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
  if "chat_template.jinja" in files:
    chat_template = _text(directory / "chat_template.jinja", files["chat_template.jinja"])
  else:
    chat_template = _configured_template(directory, config)
  generation = read("generation_config.json")
  return Tokenizer(
    backend=backend,
    chat_template=chat_template,
    special_tokens=special_tokens,
    eos_ids=_eos_ids(directory, backend, special_tokens, generation),
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
  special_tokens: Mapping[str, str],
  generation: Mapping[str, Any],
) -> tuple[int, ...]:
  found = generation.get("eos_token_id")
  ids = found if isinstance(found, list) else [] if found is None else [found]
  if any(not isinstance(i, int) or isinstance(i, bool) or i < 0 for i in ids):
    raise ValueError(
      f"{directory / 'generation_config.json'}: got eos_token_id={found!r}, expected a token id or"
      " a list of them; correct the file."
    )
  if "eos_token" in special_tokens:
    token_id = backend.token_to_id(special_tokens["eos_token"])
    if token_id is None:
      raise ValueError(
        f"{directory / 'tokenizer_config.json'}: got eos_token {special_tokens['eos_token']!r},"
        " expected a token of tokenizer.json; the two files do not belong together."
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


@functools.lru_cache(maxsize=16)
def _compiled(chat_template: str) -> jinja2.Template:
  """Returns the template's program, made once: that takes longer than a prompt does with it."""
  # Block trimming and these names are what templates written for Hugging Face count on.
  environment = _Sandbox(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=[_Generation, "jinja2.ext.loopcontrols"],
  )
  environment.filters["tojson"] = _to_json
  environment.globals["raise_exception"] = _raise_exception
  return environment.from_string(chat_template)
