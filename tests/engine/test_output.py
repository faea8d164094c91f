"""Detokenisation: end conditions, stop strings and streams."""

from __future__ import annotations

import numpy as np
import pytest
from word_engine import TOKENIZER, make_engine, request


def test_a_completion_ends_at_max_tokens():
  completion = make_engine().generate([request(max_tokens=5)])[0]
  assert len(completion.tokens) == 5 and completion.finish_reason == "length"
  assert completion.behaviour_logprobs.shape == completion.raw_logprobs.shape == (5,)
  assert completion.behaviour_logprobs.dtype == np.float32
  assert (completion.behaviour_logprobs < 0).all()


def test_a_stop_id_is_kept_and_ends():
  free = make_engine().generate([request()])[0]
  stop = free.tokens[4]
  first = free.tokens.index(stop)
  completion = make_engine().generate([request(stop_token_ids=(stop, 511))])[0]
  assert completion.tokens == free.tokens[: first + 1] and completion.finish_reason == "stop"


def test_a_stop_id_as_the_last_allowed_token_is_a_stop():
  free = make_engine().generate([request(max_tokens=1)])[0]
  completion = make_engine().generate([request(max_tokens=1, stop_token_ids=free.tokens)])[0]
  assert completion.tokens == free.tokens and completion.finish_reason == "stop"


@pytest.mark.parametrize("seed", range(6))
def test_a_stop_string_is_cut_from_the_text_and_never_streamed(seed):
  free = make_engine().generate([request(seed=seed, max_tokens=30)])[0]
  # Four characters from the middle, without a partial character.
  places = range(len(free.text) // 3, len(free.text) - 4)
  windows = (free.text[place : place + 4] for place in places)
  stop = next(window for window in windows if "\ufffd" not in window)
  pieces, seen = [], []

  def watch(updates):
    for update in updates:
      pieces.append(update.text)
      seen.extend(update.tokens)

  stops = (stop, "never in there")
  engine = make_engine()
  one = request(seed=seed, max_tokens=30, stop=stops)
  [completion] = engine.generate([one], on_step=watch)
  assert completion.finish_reason == "stop"
  assert completion.text == free.text[: free.text.find(stop)]
  # Tokens are kept whole: the last one completes the stop string.
  assert completion.tokens == free.tokens[: len(completion.tokens)] == tuple(seen)
  assert stop in TOKENIZER.decode(completion.tokens)
  assert stop not in TOKENIZER.decode(completion.tokens[:-1])
  assert "".join(pieces) == completion.text


def test_what_may_become_a_stop_string_is_held_back_and_comes_when_it_does_not():
  free = make_engine().generate([request(max_tokens=20)])[0]
  texts = []
  [completion] = make_engine().generate(
    [request(max_tokens=20, stop=("x" * 6,))],
    on_step=lambda updates: texts.extend(update.text for update in updates),
  )
  assert completion.text == free.text == "".join(texts)
  streamed = ""
  for index, text in enumerate(texts[:-1]):
    streamed += text
    assert len(streamed) <= max(len(TOKENIZER.decode(free.tokens[: index + 1])) - 5, 0)


@pytest.mark.parametrize("seed", range(4))
def test_the_stream_is_the_text_and_the_text_is_the_tokens(seed):
  engine, streamed, tokens, reasons = make_engine(), {}, {}, {}

  def watch(updates):
    for update in updates:
      streamed[update.request_id] = streamed.get(update.request_id, "") + update.text
      tokens[update.request_id] = tokens.get(update.request_id, ()) + update.tokens
      reasons[update.request_id] = update.finish_reason

  requests = [request(str(index), seed=10 * seed + index, max_tokens=16) for index in range(4)]
  for completion in engine.generate(requests, on_step=watch):
    name = completion.request_id
    assert streamed[name] == completion.text == TOKENIZER.decode(completion.tokens)
    assert tokens[name] == completion.tokens and reasons[name] == completion.finish_reason


def test_without_a_tokenizer_there_is_no_text():
  completion = make_engine(tokenizer=None).generate([request()])[0]
  assert completion.text == "" and len(completion.tokens) == 12
