"""Sampling defaults from a model's generation_config.json."""

from __future__ import annotations

import dataclasses
import json

import jax
import pytest
import serving
import word_engine

from seerjax.models.loading import Model
from seerjax.serve import identity, served as served_lib, server
from seerjax.serve.config import ServeConfig
from seerjax.serve.served import Defaults, Served, generation_defaults
from seerjax.serve.service import Service

EOS = word_engine.TOKENIZER.eos_ids
WRITTEN = {
  "do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_new_tokens": 5,
  "eos_token_id": [2], "repetition_penalty": 1.0, "transformers_version": "5.0",
}  # fmt: skip


def defaults_of(written) -> Defaults:
  content = written if isinstance(written, bytes) else json.dumps(written).encode()
  files = {"generation_config.json": content}
  return generation_defaults(dataclasses.replace(word_engine.TOKENIZER, files=files))


def test_a_file_gives_defaults():
  found = defaults_of(WRITTEN)
  assert found.sampling == dict(temperature=0.6, top_p=0.95, top_k=20, repetition_penalty=1.0)
  assert (found.max_tokens, found.not_taken) == (5, ())
  assert found.in_force == {**found.sampling, "max_new_tokens": 5}


def test_what_is_not_supported_is_named_and_what_asks_for_nothing_is_not():
  found = defaults_of(
    dict(repetition_penalty=1.1, num_beams=4, use_cache=True, temperature=None, min_p=0.1)
  )
  assert found.sampling == dict(min_p=0.1, repetition_penalty=1.1)
  assert found.not_taken == ("num_beams=4",)


def test_without_sampling_answers_are_greedy():
  assert defaults_of(dict(do_sample=False, top_p=0.5)).sampling == {"temperature": 0.0}
  # Penalties also apply to greedy completions.
  found = defaults_of(dict(do_sample=False, repetition_penalty=1.1)).sampling
  assert found == {"temperature": 0.0, "repetition_penalty": 1.1}


def test_without_a_file_there_are_none():
  tokenizer = dataclasses.replace(word_engine.TOKENIZER, files={})
  assert generation_defaults(tokenizer) == Defaults()
  assert generation_defaults(word_engine.TOKENIZER) == Defaults()  # It names ends alone.


@pytest.mark.parametrize(
  "written, expected",
  [
    ({"temperature": "hot"}, "generation_config.json: temperature: got 'hot' (text), expected a"),
    ({"top_p": 1.5}, "generation_config.json: top_p: got 1.5, expected 0 < top_p <= 1; 1 keeps"),
    ({"top_k": 2.5}, "generation_config.json: top_k: got 2.5 (a number), expected a whole number"),
    ({"min_p": -1}, "generation_config.json: min_p: got -1, expected 0 <= min_p <= 1"),
    ({"max_new_tokens": 0}, "generation_config.json: max_new_tokens: got 0, expected 1 to"),
    (b"{", "generation_config.json: got text that is not JSON"),
    (b"[]", "generation_config.json: got a JSON list, expected an object; download it again."),
  ],
)
def test_a_bad_file_is_refused_by_its_field(written, expected: str):
  with pytest.raises(ValueError) as caught:
    defaults_of(written)
  assert expected in str(caught.value)


def test_a_requests_own_fields_come_before_them():
  tiny = Served(
    name="tiny",
    engine=word_engine.make_engine(),
    fingerprint="fp_test",
    defaults=Defaults(sampling={"temperature": 0.0}, max_tokens=5, not_taken=("a=1",)),
  )
  service = Service({"tiny": tiny}, ServeConfig(port=0))
  alone = serving.engine_alone()
  prompt = (5, 6, 7)
  with server.running(service) as url, serving.client(url) as plain:
    listed = plain.get("/v1/models").json()["data"][0]
    assert listed["defaults"] == dict(temperature=0.0, max_new_tokens=5, eos_token_id=[*EOS])
    assert listed["not_taken"] == ["a=1"]
    for fields, temperature, count in (
      ({}, 0.0, 5), ({"max_tokens": 9}, 0.0, 9), ({"temperature": 1.5, "max_tokens": 9}, 1.5, 9),
    ):  # fmt: skip
      body = {"prompt": prompt, "seed": 3, "logprobs": 0, **fields}
      logprobs = plain.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
      sampling = served_lib.SamplingParams(
        temperature=temperature, max_tokens=count, stop_token_ids=EOS
      )
      expected = serving.answer_alone(alone, prompt, 3, sampling)
      assert logprobs["token_ids"] == [*expected.tokens]
      assert logprobs["token_logprobs"] == expected.behaviour_logprobs.tolist()


def test_other_defaults_are_another_fingerprint():
  model = Model(
    word_engine.CONFIG, word_engine.params(), word_engine.NUMERICS, word_engine.TOKENIZER
  )
  key = jax.random.key(0)
  found = [
    identity.fingerprint(model, key, defaults=defaults.in_force)
    for defaults in (Defaults(), defaults_of(WRITTEN), defaults_of({**WRITTEN, "top_k": 21}))
  ]
  assert len({*found}) == 3
