"""Tokenizers of GGUF files: round trips of published forms, and end-of-generation tokens."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import gguf_cases
from gguf_cases import raw, value
import hypothesis
from hypothesis import strategies as st
import pytest
import tokenizers

from seerjax.models import gguf_tokenizer, gguf_write, loading, tokenizer as tokenizer_lib

FORMS = pytest.mark.parametrize("form", gguf_cases.FORMS)


def through(path: pathlib.Path, tokenizer: tokenizer_lib.Tokenizer, **settings: Any):
  """Returns a tokenizer that was written to a file and read back."""
  config = gguf_cases.LLAMA
  gguf_write.save(
    path, gguf_cases.weights(config), config, tokenizer=tokenizer, overwrite=True, **settings
  )
  return tokenizer_lib.load(path)


@FORMS
def test_published_forms_come_back(form, tmp_path):
  tokenizer = gguf_cases.tokenizer(form)
  found = through(tmp_path / "m.gguf", tokenizer)
  for text in gguf_cases.TEXTS:
    assert found.encode(text) == tokenizer.encode(text)
    assert found.encode(text, add_special_tokens=True) == tokenizer.encode(
      text, add_special_tokens=True
    )
    assert found.encode(text, special_tokens_as_text=True) == tokenizer.encode(
      text, special_tokens_as_text=True
    )
    ids = tokenizer.encode(text)
    assert found.decode(ids, skip_special_tokens=False) == tokenizer.decode(
      ids, skip_special_tokens=False
    )
  assert found.special_tokens == tokenizer.special_tokens
  assert found.special_ids == tokenizer.special_ids
  assert found.eos_ids == tokenizer.eos_ids
  assert found.chat_template == tokenizer.chat_template
  assert found.chat_ids("hi <|im_end|>") == tokenizer.chat_ids("hi <|im_end|>")
  # GGUF's metadata alone were sufficient.
  metadata = gguf_tokenizer.metadata(
    tokenizer.backend, vocab_size=400, chat_template="", special_tokens={}, eos_ids=()
  )
  assert metadata["tokenizer.ggml.pre"] == form
  assert "tokenizer.huggingface.json" not in metadata


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
  path = tmp_path_factory.mktemp("pairs") / "m.gguf"
  forms = [gguf_cases.tokenizer(form) for form in gguf_cases.FORMS]
  return [(tokenizer, through(path, tokenizer)) for tokenizer in forms]


@hypothesis.given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=60))
@hypothesis.settings(max_examples=40)
def test_any_text_has_the_same_ids(pairs, text):
  for tokenizer, found in pairs:
    assert found.encode(text) == tokenizer.encode(text)


def test_only_llama_3_begins_with_a_bos_token_unasked(tmp_path):
  for form in gguf_cases.FORMS:
    found = through(tmp_path / "m.gguf", gguf_cases.tokenizer(form))
    ids = found.encode("a", add_special_tokens=True)
    assert (ids[0] == 0) == (form == "llama-bpe")
    assert found.encode("a") == ids[-1:]


def changed(tmp_path: pathlib.Path, **entries: bytes | None) -> tokenizer_lib.Tokenizer:
  """Reads a small file with other entries of `tokenizer.ggml.`; None leaves one out."""
  found, records = gguf_cases.parts()
  for key, content in entries.items():
    name = f"tokenizer.ggml.{key}"
    found = {k: v for k, v in found.items() if k != name}
    if content is not None:
      found[name] = content
  (tmp_path / "m.gguf").write_bytes(raw(found, records))
  return tokenizer_lib.load(tmp_path / "m.gguf")


def test_where_a_file_does_not_say_whether_a_bos_token_comes_first_its_pre_tokenizer_does(tmp_path):
  asked = {"pre": value("str", "llama-bpe"), "add_bos_token": None}
  assert changed(tmp_path, **asked).encode("a", add_special_tokens=True)[0] == 0
  asked["add_bos_token"] = value("bool", 0)
  assert changed(tmp_path, **asked).encode("a", add_special_tokens=True)[0] != 0
  ends = changed(tmp_path, add_eos_token=value("bool", 1)).encode("a", add_special_tokens=True)
  assert len(ends) == 2 and ends[-1] == 2


def test_ends_are_those_that_the_metadata_names(tmp_path):
  # Without a token that ends a turn, control tokens end by their text, as in llama.cpp.
  assert changed(tmp_path).eos_ids == (2, 0)
  assert changed(tmp_path, eot_token_id=value("u32", 5)).eos_ids == (2, 5)
  both = {"eot_token_id": value("u32", 5), "eom_token_id": value("u32", 9)}
  assert changed(tmp_path, **both).eos_ids == (2, 5, 9)
  assert changed(tmp_path, eos_token_id=None, eot_token_id=value("u32", 5)).eos_ids == (5,)


@pytest.mark.parametrize("ends", [(2,), (2, 0), (2, 0, 7)])
def test_ends_come_back(ends, tmp_path):
  tokenizer = dataclasses.replace(gguf_cases.tokenizer("qwen2"), eos_ids=ends)
  assert through(tmp_path / "m.gguf", tokenizer).eos_ids == ends


def test_how_answers_are_sampled_comes_back(tmp_path):
  generation = {
    "temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05,
    "eos_token_id": [2, 0], "do_sample": True, "bos_token_id": 0,
  }  # fmt: skip
  tokenizer = gguf_cases.tokenizer("qwen2")
  files = {**tokenizer.files, "generation_config.json": json.dumps(generation).encode()}
  tokenizer = dataclasses.replace(tokenizer, files=files)
  found = through(tmp_path / "m.gguf", tokenizer)
  kept = {name: value for name, value in generation.items() if name in gguf_tokenizer.SAMPLING}
  assert found.generation == {**kept, "eos_token_id": [2, 0]}
  # A default without sampling has temperature 0.
  files["generation_config.json"] = json.dumps(generation | {"do_sample": False}).encode()
  greedy = through(tmp_path / "m.gguf", dataclasses.replace(tokenizer, files=files))
  assert greedy.generation["temperature"] == 0.0


def test_unused_ids_have_no_text(tmp_path):
  found = through(tmp_path / "m.gguf", gguf_cases.tokenizer("qwen2"))
  assert found.decode([395]) == "" and found.backend.token_to_id("[PAD395]") is None
  assert found.vocab_size == gguf_cases.tokenizer("qwen2").vocab_size


def test_a_cut_of_our_own_needs_the_nearest_one_named_and_comes_back(tmp_path):
  """nano splits white space unlike any pre-tokenizer of llama.cpp."""
  nano = loading.load_model("nano")
  assert nano.tokenizer is not None
  with pytest.raises(NotImplementedError, match="got .*Split.*pass the closest one"):
    gguf_write.save(tmp_path / "m.gguf", nano.params, nano.config, tokenizer=nano.tokenizer)
  gguf_write.save(
    tmp_path / "m.gguf", nano.params, nano.config, tokenizer=nano.tokenizer, pre="qwen2"
  )
  found = tokenizer_lib.load(tmp_path / "m.gguf")
  for text in gguf_cases.TEXTS:
    assert found.encode(text) == nano.tokenizer.encode(text)
  assert found.eos_ids == nano.tokenizer.eos_ids
  # A pre-tokenizer that cuts as the tokenizer does is not replaced by a name.
  metadata = gguf_tokenizer.metadata(
    gguf_cases.tokenizer("smollm").backend,
    vocab_size=400, chat_template="", special_tokens={}, eos_ids=(), pre="qwen2",
  )  # fmt: skip
  assert metadata["tokenizer.ggml.pre"] == "smollm"


def other(**changes: Any) -> tokenizers.Tokenizer:
  written = json.loads(gguf_cases.tokenizer("gpt-2").backend.to_str())
  model = {**written["model"], **changes.pop("model", {})}
  return tokenizers.Tokenizer.from_str(json.dumps({**written, **changes, "model": model}))


def special(**changes: Any) -> tokenizers.Tokenizer:
  written = json.loads(gguf_cases.tokenizer("gpt-2").backend.to_str())
  added = [{**token, **changes} for token in written["added_tokens"]]
  return other(added_tokens=added)


def pair_of_starts() -> tokenizers.Tokenizer:
  twice = {**gguf_cases._BOS_FIRST, "single": gguf_cases._BOS_FIRST["single"][:1] * 2}
  twice["single"] = [*twice["single"], {"Sequence": {"id": "A", "type_id": 0}}]
  return other(post_processor=twice)


PLAIN = dict(vocab_size=400, chat_template="", special_tokens={}, eos_ids=())


@pytest.mark.parametrize(
  "backend, settings, error, fragments",
  [
    (lambda: tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")), {},
     NotImplementedError, ["model.type of tokenizer.json: got 'WordLevel'"]),
    (lambda: other(decoder=None), {}, NotImplementedError, ["decoder.type", "got None"]),
    (lambda: other(model={"byte_fallback": True}), {}, NotImplementedError,
     ["model.byte_fallback", "got True"]),
    (lambda: other(model={"dropout": 0.5}), {}, NotImplementedError, ["model.dropout", "got 0.5"]),
    (lambda: special(lstrip=True), {}, NotImplementedError, ["'<|endoftext|>'", "lstrip"]),
    (lambda: other(normalizer={"type": "Lowercase"}), {}, NotImplementedError,
     ["pre_tokenizer of tokenizer.json", "pass the closest one"]),
    (pair_of_starts, {}, NotImplementedError, ["post_processor of tokenizer.json"]),
    (lambda: other(), {"vocab_size": 300}, ValueError, ["expected ids below the 300 rows"]),
    (lambda: other(), {"eos_ids": (1, 2, 3, 4)}, NotImplementedError, ["[1, 2, 3, 4]", "most 3"]),
    (lambda: other(), {"pre": "tekken"}, ValueError, ["pre: got 'tekken'", "'gpt-2'"]),
  ],
)  # fmt: skip
def test_what_gguf_has_no_words_for_is_refused(backend, settings, error, fragments):
  with pytest.raises(error) as found:
    gguf_tokenizer.metadata(backend(), **(PLAIN | settings))
  for fragment in fragments:
    assert fragment in str(found.value)
