"""The tokenizer: round trips of text, chats and streams."""

from __future__ import annotations

import pathlib
import re

import hypothesis
from hypothesis import strategies as st
import pytest

from experiments.learning import nano_corpus
from seerjax.models import tokenizer as tokenizer_lib
from seerjax.tasks import word_problems

NANO_FILES = pathlib.Path(tokenizer_lib.__file__).parent / "nano"
NANO = tokenizer_lib.load(NANO_FILES)


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


def test_texts_without_tokens_are_refused():
  with pytest.raises(ValueError, match="got '', which has no token, expected at least one"):
    NANO.encode("")
  with pytest.raises(ValueError, match="lone surrogate at offset 1"):
    NANO.encode("a\ud800")


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
