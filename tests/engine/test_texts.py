"""Texts in, answers out: `Engine.generate` of what a user writes."""

from __future__ import annotations

import pytest

from seerjax import Engine, EngineConfig, Request, SamplingParams, load_model
from seerjax.engine import texts

QUESTION = "Tom has 3 apples and buys 4. How many apples has Tom?"


def asked(*questions, sampling=None, context=64):
  tokenizer = load_model().tokenizer
  return texts.as_requests(questions, sampling, tokenizer, context)


def test_a_text_is_one_turn_of_a_user_and_ends_where_the_model_ends():
  tokenizer = load_model().tokenizer
  assert tokenizer is not None
  (request,) = asked(QUESTION, context=1000)
  assert request.prompt == tuple(tokenizer.chat_ids(QUESTION))
  assert request.sampling == SamplingParams(max_tokens=256, stop_token_ids=tokenizer.eos_ids)


def test_an_answer_gets_what_the_context_leaves():
  (request,) = asked("How many?", context=64)
  assert len(request.prompt) + request.sampling.max_tokens == 64


def test_sampling_is_taken_and_requests_stay():
  sampling = SamplingParams(temperature=0.0, max_tokens=3, stop_token_ids=(7,))
  request = Request(request_id="mine", prompt=(5, 6))
  first, second = asked(request, QUESTION, sampling=sampling)
  assert first is request
  assert (second.request_id, second.sampling) == ("text 1", sampling)


def test_equal_texts_have_seeds_of_their_own_and_the_first_has_the_usual_one():
  seeds = [request.seed for request in asked(*[QUESTION] * 6)]
  assert seeds[0] == Request(request_id="", prompt=(1,)).seed
  assert len({*seeds}) == 6
  assert seeds == [texts.seed_at(0, place) for place in range(6)]


def test_a_position_has_one_seed_and_no_two_positions_share_one():
  places = [(prompt, choice) for prompt in range(16) for choice in range(8)]
  for seed in (0, 7, 2**32 - 1):
    found = [texts.seed_at(seed, *place) for place in places]
    assert found[0] == seed and len({*found}) == len(places)
    assert all(0 <= one < 2**32 for one in found)
  assert texts.seed_at(7, 1, 2) == 0x8A14404A  # Stored answers are asked for again by it.


def test_a_text_that_says_nothing_is_refused():
  with pytest.raises(ValueError, match="got the text ' ', expected at least one character"):
    asked(" ")


def test_a_text_without_a_tokenizer_is_refused():
  with pytest.raises(ValueError, match="without a tokenizer, expected a model that has one"):
    texts.as_requests(QUESTION, None, None, 64)


@pytest.mark.thorough
def test_a_model_by_name_answers_a_text_with_the_bits_of_a_list_of_texts():
  engine = Engine(load_model(), config=EngineConfig(max_context=128, max_sequences=2))
  sampling = SamplingParams(max_tokens=8)
  (alone,) = engine.generate(QUESTION, sampling=sampling)
  both = engine.generate([QUESTION, "How many?"], sampling=sampling)
  assert alone.text and alone.has_bits_of(both[0])
  assert [one.request_id for one in both] == ["text 0", "text 1"]
