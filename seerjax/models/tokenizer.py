"""Converts text to token ids and back, and chats to tokens, for a Hugging Face model directory.

    messages --template--> text in which the template's own marks are marked --> ids
                           marks: one id each; everything else: text, whatever it spells

`tokenizer_files` reads the directory's files, and `chat_template` renders the text of a chat. Text
in a chat that looks like a special token, but does not come from its template, is encoded as
ordinary text.
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

import tokenizers
import tokenizers.decoders

from seerjax.models import chat_template as chat_template_lib, tokenizer_files
from seerjax.models.chat_template import ChatConfig, Message

# Fields of generation_config.json that are not about sampling, or are used.
NOT_SAMPLING = ("eos_token_id", "bos_token_id", "pad_token_id", "transformers_version")
# Added tokens of this form are always special: some tokens that begin a turn in published files are
# not flagged.
CONTROL_FORM = re.compile(r"<[|\uff5c].*[|\uff5c]>", re.DOTALL)


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
    """Returns the text held back, so that all pieces together equal `decode` of all ids."""
    whole = self._backend.decode(self._ids, skip_special_tokens=self._skip)
    rest = whole[len(self._text) :] if whole.startswith(self._text) else ""
    self._text += rest
    return rest


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokenizer:
  """A tokenizer with its chat template; see `load`.

  Attributes:
    backend: the `tokenizers` object.
    chat_template: jinja2 source, "" if the directory has none.
    special_tokens: special tokens by role (`tokenizer_files.SPECIAL_TOKENS`), if they exist.
    eos_ids: ids that end a generation, those of `generation_config.json` first.
    files: content of the files, byte for byte, by file name.
    chat_config: settings of every chat besides its messages, and the moment for its dates.
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
  def generation(self) -> Mapping[str, Any]:
    """Content of generation_config.json, {} if there is none."""
    name = pathlib.Path("generation_config.json")
    if name.name not in self.files:
      return {}
    return tokenizer_files.json_object(name, self.files[name.name])

  @property
  def ignored_generation(self) -> tuple[str, ...]:
    """Ignored settings of generation_config.json, such as ("temperature=0.6",).

    A request is sampled with its `SamplingParams` only.
    """
    return tuple(
      f"{field}={value!r}"
      for field, value in sorted(self.generation.items())
      if field not in NOT_SAMPLING and not field.startswith("_") and value is not None
    )

  @functools.cached_property
  def special_ids(self) -> Mapping[str, int]:
    """Ids by text of all tokens that user text must never become.

    They are the added tokens that tokenizer.json calls special, those with a role, those that end a
    generation, and those of the form `<|...|>`. Other added tokens (Qwen3's `<think>` and
    `<tool_call>`) are ordinary words, which any text may contain.
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
    """A backend that encodes special tokens as ordinary text."""
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
      text: text to encode, such as the result of `chat`, which contains its special tokens.
      add_special_tokens: whether to add what tokenizer.json adds around a text (often a bos token).
      special_tokens_as_text: whether special tokens in the text are encoded as ordinary text (for
        untrusted text), instead of as their ids.

    Raises:
      ValueError: if the text has no token, or can only be spelled as a special token.
    """
    chat_template_lib.check_utf8(text, "Tokenizer.encode")
    backend = self._letters if special_tokens_as_text else self.backend
    ids = backend.encode(text, add_special_tokens=add_special_tokens).ids
    if special_tokens_as_text:
      # The unknown token is allowed: it represents text outside the vocabulary.
      unknown = self.backend.token_to_id(self.special_tokens.get("unk_token", ""))
      forged = {i for i in self.special_ids.values() if i != unknown} & set(ids)
      if forged and not add_special_tokens:
        tokens = [token for token, i in self.special_ids.items() if i in forged]
        raise ValueError(
          f"Tokenizer.encode: got {text[:80]!r}, which this vocabulary can encode only with the"
          f" special tokens {tokens}, expected text; remove them."
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
        " pass encoded or sampled ids."
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
    """Returns the text of a conversation by the chat template, for display; see `chat_ids`.

    Args:
      messages: {"role": ..., "content": ...} each, or one string as a user message. Fields that are
        None are left out.
      add_generation_prompt: whether to end where the assistant's response begins.
      now: the moment that the template's `strftime_now` formats; that of `chat_config` if None.
      **variables: further template variables, such as `enable_thinking=False`; they take precedence
        over those of `chat_config`. `tools` and `documents` default to None.

    Raises:
      ValueError: if there is no template or no message, or if the template refuses the messages
        (with its own message), violates the sandbox, or has an error.
    """
    found = self._rendered(messages, add_generation_prompt, now, variables)
    return chat_template_lib.unmarked(found.text, found.marks)

  def chat_ids(
    self,
    messages: Sequence[Message] | str,
    add_generation_prompt: bool = True,
    *,
    now: datetime.datetime | None = None,
    **variables: Any,
  ) -> list[int]:
    """Returns the ids of a conversation by the chat template; arguments as for `chat`.

    The template's own special tokens become their ids. Special tokens in messages, tools, documents
    and variables are encoded as text, so that untrusted text can neither begin nor end a turn.
    Without such tokens, the result equals the ids of `chat`'s text.

    Raises:
      ValueError: as `chat`; and if the template puts a special token together from parts, which may
        come from untrusted text.
    """
    text, marks, outside = self._rendered(messages, add_generation_prompt, now, variables)
    ids = self.encode(chat_template_lib.unmarked(text, marks))
    letters = chat_template_lib.SURROGATE.findall(text)
    expected = [self.special_ids[marks[letter]] for letter in letters]
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
    """Refuses special tokens in rendered text that occur neither in the template nor outside."""
    for token in self.special_ids:
      if token in run and not any(token in text for text in outside):
        raise ValueError(
          f"Tokenizer.chat_ids: got a chat template that assembles {token!r} from parts, expected"
          " special tokens written in full; change chat_template.jinja, or check whether the"
          " messages contain half of one."
        )

  def _rendered(
    self,
    messages: Sequence[Message] | str,
    add_generation_prompt: bool,
    now: datetime.datetime | None,
    variables: Mapping[str, Any],
  ) -> chat_template_lib.Rendered:
    return chat_template_lib.rendered(
      self.chat_template,
      messages,
      special=self.special_ids,
      roles=self.special_tokens,
      config=self.chat_config,
      add_generation_prompt=add_generation_prompt,
      now=now,
      variables=variables,
    )

  def save(self, directory: str | os.PathLike[str]) -> None:
    """Writes every tokenizer file, byte for byte; other files in the directory are left alone."""
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in self.files.items():
      (directory / name).write_bytes(content)


def load(directory: str | os.PathLike[str]) -> Tokenizer:
  """Reads a tokenizer from a model directory.

  If its chat template reads the clock, `chat_config.now` is set to the time of this call, so that
  all chats of the tokenizer have the same date.

  Raises:
    FileNotFoundError: if the directory or its tokenizer.json is missing.
    ValueError: naming the corrupt file and the fault in it.
  """
  found = tokenizer_files.read(pathlib.Path(directory))
  reads_clock = chat_template_lib.reads_clock(found.chat_template)
  chat_config = ChatConfig(now=chat_template_lib.current_moment() if reads_clock else "")
  return Tokenizer(**found._asdict(), chat_config=chat_config)
