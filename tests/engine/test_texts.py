"""`Engine.generate` on text prompts."""

from __future__ import annotations

import dataclasses

import pytest
import refusals

from seerjax import Engine, EngineConfig, Request, SamplingParams, load_model
from seerjax.engine import texts

QUESTION = "Tom has 3 apples and buys 4. How many apples has Tom?"


def asked(*questions, sampling=None, context=64, seed=None, **fields):
  tokenizer = load_model().tokenizer
  return texts.as_requests(questions, sampling, tokenizer, context, seed, fields)


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


def test_fields_of_sampling_may_be_given_one_by_one():
  fields = dict(temperature=0.5, top_k=3, max_tokens=7, stop=("x",))
  found, usual = asked(QUESTION, **fields)[0], asked(QUESTION)[0]
  assert found.sampling == dataclasses.replace(usual.sampling, **fields)
  # Omitted fields have their defaults: the tokens that the context leaves, the model's stop ids.
  (greedy,) = asked(QUESTION, temperature=0.0)
  assert greedy.sampling == dataclasses.replace(usual.sampling, temperature=0.0)
  assert {*texts.SamplingFields.__annotations__} == {
    field.name for field in dataclasses.fields(SamplingParams)
  }


def test_one_seed_gives_each_text_its_own_and_leaves_requests_alone():
  request = Request(request_id="mine", prompt=(5, 6), seed=3)
  found = asked(QUESTION, request, QUESTION, seed=7, temperature=0.5)
  assert [one.seed for one in found] == [texts.seed_at(7, 0), 3, texts.seed_at(7, 2)]
  assert found[1] is request


REQUEST = Request(request_id="mine", prompt=(5, 6))


@refusals.table(
  (lambda: asked(QUESTION, sampling=SamplingParams(), temperature=0.0),
   "got sampling and temperature, expected only one of the two; leave out sampling"),
  (lambda: asked(QUESTION, sampling=SamplingParams(), top_k=2, min_p=0.1),
   "sampling and top_k, min_p"),
  (lambda: asked(REQUEST, temperature=0.0),
   "got temperature and no text, expected a text to apply"),
  (lambda: asked(REQUEST, seed=0), "got seed and no text, expected a text"),
  (lambda: asked(REQUEST, sampling=SamplingParams()), "got sampling and no text, expected a text"),
  (lambda: asked(max_tokens=5, seed=1), "got max_tokens, seed and no text, expected a text"),
  (lambda: asked(QUESTION, max_token=5), "got 'max_token', expected one of", "mean 'max_tokens'"),
  (lambda: asked(QUESTION, n=2), "got 'n', expected one of", "; correct the spelling"),
  (lambda: asked(QUESTION, max_tokens=0), "SamplingParams.max_tokens: got 0"),
  (lambda: asked(QUESTION, temperature=-1.0), "SamplingParams.temperature: got -1.0"),
  (lambda: asked(" "), "got the text ' ', expected at least one character"),
  (lambda: texts.as_requests(QUESTION, None, None, 64),
   "without a tokenizer, expected a model that has one"),
)  # fmt: skip
def test_refusals(row):
  refusals.check(row)


@pytest.mark.thorough
def test_a_model_by_name_answers_a_text_with_the_bits_of_a_list_of_texts():
  engine = Engine(load_model(), config=EngineConfig(max_model_len=128, max_num_seqs=2))
  sampling = SamplingParams(max_tokens=8)
  (alone,) = engine.generate(QUESTION, sampling=sampling)
  both = engine.generate([QUESTION, "How many?"], sampling=sampling)
  assert alone.text and alone.has_bits_of(both[0])
  (by_name,) = engine.generate(QUESTION, max_tokens=8, temperature=1.0, seed=0)
  assert by_name.has_bits_of(alone)
  hot = [engine.generate(QUESTION, max_tokens=8, temperature=9.0, seed=n)[0] for n in (1, 2)]
  assert not hot[0].has_bits_of(hot[1])
  assert [one.request_id for one in both] == ["text 0", "text 1"]
