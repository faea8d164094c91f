"""The tokenizer: text there and back, chats, streams, and templates that are not to be trusted."""

from __future__ import annotations

import datetime
import json
import pathlib
import re
import shutil

import hypothesis
from hypothesis import strategies as st
import pytest

from experiments import nano_corpus
from seerjax.models import tokenizer as tokenizer_lib
from seerjax.tasks import word_problems

NANO_FILES = pathlib.Path(tokenizer_lib.__file__).parent / "nano"
NANO = tokenizer_lib.load(NANO_FILES)


def copy_of_nano(directory: pathlib.Path, **config: object) -> pathlib.Path:
  """nano's tokenizer files in another directory, with changed configuration."""
  for name in ("tokenizer.json", "tokenizer_config.json"):
    shutil.copy(NANO_FILES / name, directory / name)
  path = directory / "tokenizer_config.json"
  path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
  return directory


def with_template(template: str) -> tokenizer_lib.Tokenizer:
  return tokenizer_lib.Tokenizer(backend=NANO.backend, chat_template=template)


def test_nano_has_512_entries_and_names_its_special_tokens():
  assert NANO.vocab_size == 512
  assert NANO.pad_id == 0 and NANO.eos_ids == (2,)
  assert NANO.decode([1, 2], skip_special_tokens=False) == "<|im_start|><|im_end|>"
  assert NANO.decode([0, 1, 2]) == ""


def test_nano_spells_numbers_digit_by_digit_and_words_whole():
  assert [NANO.decode([i]) for i in NANO.encode("12+7=19")] == list("12+7=19")
  assert len(NANO.encode("#### 365")) == 5
  task = word_problems.WordProblems()
  for split in ("train", "heldout"):
    for index in range(0, 2000, 40):
      sentence = " " + task.problem(split, index).context
      # A word or sign is one token, a number its digits and the space before it.
      num_tokens = len(re.findall(r" [A-Za-z]+|\.| (?=[0-9])|[0-9]", sentence))
      assert len(NANO.encode(sentence)) == num_tokens


def test_a_chat_costs_eight_tokens():
  text = NANO.chat("Ana has 3 pens.")
  assert text == "<|im_start|>user\nAna has 3 pens.<|im_end|>\n<|im_start|>assistant\n"
  assert len(NANO.encode(text)) == len(NANO.encode("Ana has 3 pens.")) + 8
  messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
  assert NANO.chat(messages, add_generation_prompt=False) == (
    "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
  )


@hypothesis.given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=200))
def test_any_text_comes_back(text):
  assert NANO.decode(NANO.encode(text), skip_special_tokens=False) == text


@hypothesis.given(st.lists(st.integers(0, 600), max_size=60))
def test_a_stream_says_what_decode_says(ids):
  stream = NANO.stream()
  pieces = [stream.push(i) for i in ids]
  assert "".join(pieces) + stream.finish() == NANO.decode(ids)


def test_a_stream_holds_back_half_a_character():
  ids = NANO.encode("aé!")
  stream = NANO.stream()
  assert [stream.push(i) for i in ids] == ["a", "", "é", "!"]
  stream = NANO.stream()
  assert [stream.push(i) for i in ids[:2]] == ["a", ""]
  assert stream.finish() == "�"


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


def test_roles_are_read_from_the_special_tokens_map_too(tmp_path):
  copy_of_nano(tmp_path, eos_token=None, bos_token="<|endoftext|>")
  older = dict(eos_token={"content": "<|im_start|>"}, bos_token="<|im_end|>")
  (tmp_path / "special_tokens_map.json").write_text(json.dumps(older))
  tokenizer = tokenizer_lib.load(tmp_path)
  assert tokenizer.eos_ids == (1,)
  assert tokenizer.special_tokens["eos_token"] == "<|im_start|>"
  assert tokenizer.special_tokens["bos_token"] == "<|endoftext|>"
  # Where both name an end, both end.
  copy_of_nano(tmp_path)
  assert tokenizer_lib.load(tmp_path).eos_ids == (2, 1)


def test_what_generation_config_asks_for_is_named_where_it_is_not_taken(tmp_path):
  copy_of_nano(tmp_path)
  asked = dict(
    eos_token_id=7, pad_token_id=0, temperature=0.6, top_k=20, do_sample=True, min_p=None,
    transformers_version="5", _from_model_config=True,
  )  # fmt: skip
  (tmp_path / "generation_config.json").write_text(json.dumps(asked))
  tokenizer = tokenizer_lib.load(tmp_path)
  assert tokenizer.ignored_generation == ("do_sample=True", "temperature=0.6", "top_k=20")
  assert NANO.ignored_generation == () and with_template("a").ignored_generation == ()


def test_templates_are_found_where_hugging_face_puts_them(tmp_path):
  named = [
    {"name": "tool_use", "template": "tools"},
    {"name": "default", "template": "{{ bos_token }}{{ messages[0].content }}"},
  ]
  bos = {"content": "<|im_start|>", "lstrip": False}
  tokenizer = tokenizer_lib.load(copy_of_nano(tmp_path, chat_template=named, bos_token=bos))
  assert tokenizer.chat("hi") == "<|im_start|>hi"


def test_templates_have_the_helpers_they_count_on():
  tokenizer = with_template(
    "{%- for m in messages %}\n"
    "  {%- if loop.index > 1 %}{% break %}{% endif %}\n"
    "  {%- generation %}{{ m | tojson }}{% endgeneration %}\n"
    "{%- endfor %}\n"
    "{{- strftime_now('%Y') }}{{ thinking }}"
  )
  text = tokenizer.chat("<é>", now=datetime.datetime(1999, 1, 2), thinking="no")
  assert text == '{"role": "user", "content": "<é>"}1999no'
  assert int(with_template("{{ strftime_now('%Y') }}").chat("a")) >= 2024


@pytest.mark.parametrize(
  "template",
  [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.append(1) }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__closure__ }}",
    "{{ cycler.__init__.__globals__.os }}",
    "{{ ''['__class__'].__mro__ }}",
    "{{ (messages | attr('__class__')).__mro__ }}",
    "{% for i in range(10000000) %}{% endfor %}",
  ],
)
def test_malicious_templates_are_refused(template):
  with pytest.raises(ValueError, match="Tokenizer.chat: got .* chat template"):
    with_template(template).chat("hi")


def test_the_sandbox_says_why():
  with pytest.raises(ValueError, match="that the sandbox forbids .*'__class__'.*do not trust"):
    with_template("{{ ''.__class__.__name__ }}").chat("hi")


@pytest.mark.parametrize(
  ("template", "message"),
  [
    ("{{ raise_exception('must alternate') }}", r"from the chat template \(must alternate\)"),
    ("{% for %}", "TemplateSyntaxError from the chat template"),
    ("{{ messages[0].absent.deeper }}", "UndefinedError from the chat template"),
    ("{{ 1 + 'a' }}", "TypeError inside the chat template"),
    ("{{ 1 // 0 }}", "ZeroDivisionError inside the chat template"),
    ("", "got a tokenizer without chat template"),
  ],
)
def test_template_errors_are_quoted(template, message):
  message = message.replace(
    "TemplateError .* roles", r"TemplateError from the chat template \(roles"
  )
  with pytest.raises(ValueError, match=message):
    with_template(template).chat("hi")


@pytest.mark.parametrize(
  ("messages", "message"),
  [
    ([], "got no messages, expected at least one"),
    ("", "got an empty user message at index 0"),
    ([{"role": "system", "content": ""}, {"role": "user"}], "empty user message at index 1"),
    ([{"content": "hi"}], r"got message 0 with the keys \['content'\], expected 'role'"),
  ],
)
def test_empty_chats_are_refused(messages, message):
  with pytest.raises(ValueError, match=message):
    NANO.chat(messages)


def test_texts_without_tokens_are_refused():
  with pytest.raises(ValueError, match="got '', which has no token, expected at least one"):
    NANO.encode("")
  with pytest.raises(ValueError, match="lone surrogate at offset 1"):
    NANO.encode("a\ud800")


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
    ("tokenizer_config.json", b"\xff", "tokenizer_config.json: got bytes that are no UTF-8"),
    ("tokenizer_config.json", b'{"chat_template": 3}', "got chat_template of type int, expected"),
    (
      "tokenizer_config.json",
      b'{"chat_template": [{"name": "a", "template": "b"}]}',
      r"got chat templates named \['a'\], expected 'default' among them; rename one",
    ),
    (
      "tokenizer_config.json",
      b'{"eos_token": "</s>"}',
      "got eos_token '</s>', expected a token of",
    ),
    (
      "special_tokens_map.json",
      b'{"eos_token": "</s>"}',
      "special_tokens_map.json: got eos_token '</s>', expected a token of tokenizer.json",
    ),
    ("chat_template.jinja", b"\xff", "chat_template.jinja: got bytes that are no UTF-8"),
    ("generation_config.json", b"nope", "generation_config.json: got text that is not JSON"),
    (
      "generation_config.json",
      b'{"eos_token_id": "2"}',
      "got eos_token_id='2', expected a token id",
    ),
    ("generation_config.json", b'{"eos_token_id": [true]}', r"got eos_token_id=\[True\], expected"),
  ],
)
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


def test_training_is_deterministic(tmp_path):
  for name in ("first", "second"):
    nano_corpus.train_tokenizer(tmp_path / name, num_documents=300)
  for name in ("tokenizer.json", "tokenizer_config.json"):
    first, second = (tmp_path / d / name for d in ("first", "second"))
    assert first.read_bytes() == second.read_bytes()
  shipped = (NANO_FILES / "tokenizer_config.json").read_bytes()
  assert (tmp_path / "first" / "tokenizer_config.json").read_bytes() == shipped


def test_documents_are_fixed_by_their_seed_and_mix_both_tasks():
  def first(seed: int) -> list[tuple[str, str]]:
    stream = nano_corpus.documents(seed)
    return [next(stream) for _ in range(400)]

  texts = first(1)
  assert texts == first(1) and not set(texts) & set(first(2))
  share = sum(prompt.startswith("Use ") for prompt, _ in texts) / len(texts)
  assert 0.1 < share < 0.2
  assert all("#### " in solution for _, solution in texts)
  words = [solution for prompt, solution in texts if not prompt.startswith("Use ")]
  assert 0.15 < sum(solution.startswith("#### ") for solution in words) / len(words) < 0.35
  worked = nano_corpus.documents(1, brief_rate=0.0)
  assert not any(next(worked)[1].startswith("#### ") for _ in range(100))
