"""Reads and checks the tokenizer files of a Hugging Face model directory.

`tokenizer.json` is required. Also read: `tokenizer_config.json` and, for roles that it leaves out,
`special_tokens_map.json`; `chat_template.jinja`; from `generation_config.json` the ids that end a
generation. `added_tokens.json` is only kept for saving: `tokenizer.json` has the same content.
"""

from __future__ import annotations

from collections.abc import Mapping
import json
import pathlib
from typing import Any, NamedTuple

import tokenizers

from seerjax.models import gguf_file, gguf_tokenizer

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


class Found(NamedTuple):
  """Contents of a directory's tokenizer files.

  Attributes:
    backend: the `tokenizers` object, without truncation and padding.
    chat_template: jinja2 source, "" if there is none.
    special_tokens: special tokens by role (`SPECIAL_TOKENS`), if they exist.
    eos_ids: ids that end a generation, those of `generation_config.json` first.
    files: content of the files, byte for byte, by file name.
  """

  backend: tokenizers.Tokenizer
  chat_template: str
  special_tokens: Mapping[str, str]
  eos_ids: tuple[int, ...]
  files: Mapping[str, bytes]


def read(path: pathlib.Path) -> Found:
  """Reads the tokenizer files of a model directory, or those that a GGUF file describes.

  Raises:
    FileNotFoundError: if the directory or its tokenizer.json is missing.
    NotImplementedError: for a GGUF file with an unsupported tokenizer.
    ValueError: naming the corrupt file and the fault in it.
  """
  if gguf_file.is_named(path):
    files = gguf_tokenizer.files(path)
  elif (path / "tokenizer.json").is_file():
    files = {name: (path / name).read_bytes() for name in FILES if (path / name).is_file()}
  else:
    raise FileNotFoundError(
      f"{path / 'tokenizer.json'}: got no such file, expected a Hugging Face model directory"
      " with a fast tokenizer; check the path, or convert the tokenizer first."
    )
  try:
    backend = tokenizers.Tokenizer.from_buffer(files["tokenizer.json"])
  except Exception as error:  # `tokenizers` raises bare Exception, and nothing narrower.
    raise ValueError(
      f"{path / 'tokenizer.json'}: got a file that `tokenizers` cannot read ({error}), expected"
      " tokenizer JSON; download it again."
    ) from error
  # A file may enable truncation or padding, which would change prompts silently.
  backend.no_truncation()
  backend.no_padding()

  def object_of(name: str) -> dict[str, Any]:
    return json_object(path / name, files[name]) if name in files else {}

  config = object_of("tokenizer_config.json")
  special_tokens = _special_tokens(config)
  older = _special_tokens(object_of("special_tokens_map.json"))
  if "chat_template.jinja" in files:
    chat_template = _text(path / "chat_template.jinja", files["chat_template.jinja"])
  else:
    chat_template = _configured_template(path, config)
  generation = object_of("generation_config.json")
  return Found(
    backend=backend,
    chat_template=chat_template,
    special_tokens={**older, **special_tokens},
    eos_ids=_eos_ids(
      path,
      backend,
      {"tokenizer_config.json": special_tokens, "special_tokens_map.json": older},
      generation,
    ),
    files=files,
  )


def json_object(path: pathlib.Path, content: bytes) -> dict[str, Any]:
  """Returns the JSON object in one of a model directory's files.

  Raises:
    ValueError: naming the file, if it is not UTF-8, not JSON, or not an object.
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
      f"{path}: got bytes that are not UTF-8 at offset {error.start}, expected text; download it"
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
    # Several named templates; "default" is the one for plain chats.
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
