"""A tokenizer's files: how they combine, and which are refused by name."""

from __future__ import annotations

import json
import pathlib
import shutil

import pytest

from seerjax.models import tokenizer as tokenizer_lib

NANO_FILES = pathlib.Path(tokenizer_lib.__file__).parent / "nano"


def copy_of_nano(directory: pathlib.Path, **config: object) -> pathlib.Path:
  """nano's tokenizer files in another directory, with changed configuration."""
  for name in ("tokenizer.json", "tokenizer_config.json"):
    shutil.copy(NANO_FILES / name, directory / name)
  path = directory / "tokenizer_config.json"
  path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
  return directory


def test_roles_are_read_from_the_special_tokens_map_too(tmp_path):
  copy_of_nano(tmp_path, eos_token=None, bos_token="<|endoftext|>")
  older = dict(eos_token={"content": "<|im_start|>"}, bos_token="<|im_end|>")
  (tmp_path / "special_tokens_map.json").write_text(json.dumps(older))
  tokenizer = tokenizer_lib.load(tmp_path)
  assert tokenizer.eos_ids == (1,)
  assert tokenizer.special_tokens["eos_token"] == "<|im_start|>"
  assert tokenizer.special_tokens["bos_token"] == "<|endoftext|>"
  # If both files name an end token, both are end tokens.
  copy_of_nano(tmp_path)
  assert tokenizer_lib.load(tmp_path).eos_ids == (2, 1)


def test_templates_are_found_where_hugging_face_puts_them(tmp_path):
  named = [
    {"name": "tool_use", "template": "tools"},
    {"name": "default", "template": "{{ bos_token }}{{ messages[0].content }}"},
  ]
  bos = {"content": "<|im_start|>", "lstrip": False}
  tokenizer = tokenizer_lib.load(copy_of_nano(tmp_path, chat_template=named, bos_token=bos))
  assert tokenizer.chat("hi") == "<|im_start|>hi"


def test_missing_files_are_refused_by_name(tmp_path):
  with pytest.raises(FileNotFoundError, match=r"tokenizer\.json: got no such file"):
    tokenizer_lib.load(tmp_path)
  with pytest.raises(FileNotFoundError, match=r"absent/tokenizer\.json: got no such file"):
    tokenizer_lib.load(tmp_path / "absent")


@pytest.mark.parametrize(
  ("name", "content", "message"),
  [
    ("tokenizer.json", b'{"version": "1.0"', "tokenizer.json: got a file that `tokenizers` cannot"),
    ("tokenizer.json", b"", "tokenizer.json: got a file that `tokenizers` cannot read"),
    ("tokenizer_config.json", b"{", "tokenizer_config.json: got text that is not JSON"),
    ("tokenizer_config.json", b"[]", "tokenizer_config.json: got a JSON list, expected an object"),
    ("tokenizer_config.json", b"\xff", "tokenizer_config.json: got bytes that are not UTF-8"),
    ("tokenizer_config.json", b'{"chat_template": 3}', "got chat_template of type int, expected"),
    ("tokenizer_config.json", b'{"chat_template": [{"name": "a", "template": "b"}]}',
     r"got chat templates named \['a'\], expected 'default' among them; rename one"),
    ("tokenizer_config.json", b'{"eos_token": "</s>"}',
     "got eos_token '</s>', expected a token of"),
    ("special_tokens_map.json", b'{"eos_token": "</s>"}',
     "special_tokens_map.json: got eos_token '</s>', expected a token of tokenizer.json"),
    ("chat_template.jinja", b"\xff", "chat_template.jinja: got bytes that are not UTF-8"),
    ("generation_config.json", b"nope", "generation_config.json: got text that is not JSON"),
    ("generation_config.json", b'{"eos_token_id": "2"}',
     "got eos_token_id='2', expected a token id"),
    ("generation_config.json", b'{"eos_token_id": [true]}', r"got eos_token_id=\[True\], expected"),
  ],
)  # fmt: skip
def test_corrupt_files_are_refused_by_name(tmp_path, name, content, message):
  copy_of_nano(tmp_path)
  (tmp_path / name).write_bytes(content)
  with pytest.raises(ValueError, match=message):
    tokenizer_lib.load(tmp_path)


def test_a_file_cannot_cut_prompts_in_silence(tmp_path):
  copy_of_nano(tmp_path)
  path = tmp_path / "tokenizer.json"
  truncation = dict(direction="Right", max_length=2, strategy="LongestFirst", stride=0)
  path.write_text(json.dumps({**json.loads(path.read_text()), "truncation": truncation}))
  assert len(tokenizer_lib.load(tmp_path).encode("12345")) == 5


def test_saved_files_are_equal_byte_by_byte(tmp_path):
  source, target = tmp_path / "source", tmp_path / "target" / "deeper"
  source.mkdir()
  copy_of_nano(source)
  (source / "chat_template.jinja").write_bytes(b"{{ messages[0].content }}\r\n")
  (source / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
  (source / "other.txt").write_text("not ours")
  tokenizer = tokenizer_lib.load(source)
  tokenizer.save(target)
  names = sorted(path.name for path in target.iterdir())
  assert names == sorted({path.name for path in source.iterdir()} - {"other.txt"})
  assert all((source / n).read_bytes() == (target / n).read_bytes() for n in names)
  assert tokenizer.eos_ids == (7, 2)
  assert tokenizer.chat("hi") == "hi"


def test_what_generation_config_asks_for_is_named_where_it_is_not_taken(tmp_path):
  copy_of_nano(tmp_path)
  asked = dict(
    eos_token_id=7, pad_token_id=0, temperature=0.6, top_k=20, do_sample=True, min_p=None,
    transformers_version="5", _from_model_config=True,
  )  # fmt: skip
  (tmp_path / "generation_config.json").write_text(json.dumps(asked))
  tokenizer = tokenizer_lib.load(tmp_path)
  assert tokenizer.ignored_generation == ("do_sample=True", "temperature=0.6", "top_k=20")
  assert tokenizer_lib.load(NANO_FILES).ignored_generation == ()
  assert tokenizer_lib.Tokenizer(backend=tokenizer.backend).ignored_generation == ()
