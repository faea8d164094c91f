"""Request bodies: conversion of fields to records, and errors that name the field."""

from __future__ import annotations

import dataclasses
import json

from hypothesis import given, strategies as st
import pytest
from serving import refusal

from seerjax.serve import protocol
from seerjax.serve.refusals import Refusal, shown

ASK = [{"role": "user", "content": "How many?"}]


def chat(**fields) -> protocol.Asked:
  return protocol.chat({"messages": ASK, **fields})


def complete(**fields) -> protocol.Asked:
  return protocol.completion({"prompt": "one", **fields})


def test_what_is_not_named_is_left_open():
  asked = chat()
  assert asked.is_chat
  assert asked.messages == ({"role": "user", "content": "How many?"},)
  assert (asked.seed, asked.max_tokens, asked.num_choices, asked.sampling) == (None, None, 1, {})
  assert complete().max_tokens is None
  assert complete().prompts == ("one",)


def test_fields_become_a_record():
  asked = chat(
    model="nano", temperature=0.5, top_k=-1, top_p=1, min_p=0.1, logit_bias={"5": -1},
    presence_penalty=1, frequency_penalty=-0.5, repetition_penalty=1.2,
    max_completion_tokens=7, n=3, seed=9, stop="x", stop_token_ids=[4], stream=True,
    stream_options={"include_usage": True}, logprobs=True, top_logprobs=2, user="ana",
    prompt_logprobs=1, regex="[a-z]+", chat_template_kwargs={"enable_thinking": False},
  )  # fmt: skip
  assert asked.sampling == dict(
    temperature=0.5,
    top_k=0,
    top_p=1.0,
    min_p=0.1,
    logit_bias=((5, -1.0),),
    presence_penalty=1.0,
    frequency_penalty=-0.5,
    repetition_penalty=1.2,
  )
  assert (asked.max_tokens, asked.num_choices, asked.seed) == (7, 3, 9)
  assert (asked.stop, asked.stop_token_ids) == (("x",), (4,))
  assert asked.is_streamed and asked.wants_usage and asked.wants_logprobs and asked.wants_prompt
  assert (asked.num_top, asked.num_prompt_top, asked.user) == (2, 1, "ana")
  assert asked.grammar == protocol.Grammar(kind="regex", source="[a-z]+", param="regex")
  assert asked.variables == {"enable_thinking": False}


def test_null_is_as_if_a_field_were_not_there():
  assert chat(temperature=None, frequency_penalty=None, seed=None, audio=None) == chat()


def test_what_asks_for_nothing_is_taken_and_all_else_of_it_refused():
  assert chat(min_tokens=0, length_penalty=1.0, ignore_eos=False) == chat()
  found = refusal(chat, length_penalty=0.5)
  assert found.param == "length_penalty"
  assert "got 0.5, expected 1, since other values are not supported; leave it out." in found.message


WITHOUT_EFFECT = [
  ("metadata", {"team": "a"}), ("store", True), ("reasoning_effort", "high"),
  ("service_tier", "flex"), ("safety_identifier", "user-1"), ("prompt_cache_key", "k"),
  ("prompt_cache_retention", "24h"), ("verbosity", "low"), ("prediction", {"type": "content"}),
  ("priority", 3), ("request_id", "r"), ("cache_salt", "s"), ("kv_transfer_params", {}),
  ("reasoning", {"effort": "low"}),
]  # fmt: skip


@pytest.mark.parametrize("name, value", WITHOUT_EFFECT)
def test_a_field_that_could_change_no_text_is_accepted_and_named(name, value):
  for ask in (chat, complete):
    asked = ask(**{name: value})
    assert asked.ignored == (name,)
    assert dataclasses.replace(asked, ignored=()) == ask()
    # The same name is no field elsewhere, nor is a misspelt one.
    assert refusal(ask, **{name + "x": value}).param == name + "x"
    form = {"type": "json_schema", "json_schema": {"schema": {}, name: value}}
    assert refusal(ask, response_format=form).param == f"response_format.json_schema.{name}"


def test_a_streams_padding_is_accepted_without_effect():
  options = {"include_usage": True, "include_obfuscation": False}
  asked = chat(stream=True, stream_options=options)
  assert asked.wants_usage and asked.ignored == ("stream_options.include_obfuscation",)
  assert refusal(chat, stream=True, stream_options={"pad": 1}).param == "stream_options.pad"


def test_prompts_are_texts_or_token_ids():
  assert complete(prompt=["a", "b"]).prompts == ("a", "b")
  assert complete(prompt=[3, 4]).prompts == ((3, 4),)
  assert complete(prompt=[[3], [4, 5]]).prompts == ((3,), (4, 5))


def test_an_echo_with_log_probabilities_asks_for_the_prompts():
  asked = complete(echo=True, logprobs=2)
  assert asked.is_echoed and asked.wants_prompt and asked.num_prompt_top == 2
  assert not complete(echo=True).wants_prompt


def test_parts_of_text_are_one_text_and_the_newer_role_is_the_system():
  content = [{"type": "text", "text": "How "}, {"type": "text", "text": "many?"}]
  messages = [{"role": "developer", "content": "x"}, {"role": "user", "content": content}]
  asked = chat(messages=messages)
  assert asked.messages == (
    {"role": "system", "content": "x"}, {"role": "user", "content": "How many?"}
  )  # fmt: skip


def test_response_formats_are_grammars():
  schema = {"type": "object"}
  written = chat(
    response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
  ).grammar
  assert written == protocol.Grammar(
    kind="json", source=json.dumps(schema), param="response_format"
  )
  assert chat(response_format={"type": "json_object"}).grammar.kind == "object"
  assert chat(response_format={"type": "text"}).grammar is None


# By the routes that refuse them: (fields, the field that is named, a piece of the message).
WRONG = {
  (chat, complete): [
    ({"audio": {}}, "audio", "got a field that is not supported, expected one of model,"),
    ({"n_best": 1}, "n_best", "leave it out."),
    ({"temperature": "hot"}, "temperature", "got 'hot' (text), expected a number, 0 or"),
    ({"temperature": 1e9}, "temperature", "expected 0 or 0.0001 <= temperature <= 10000"),
    ({"temperature": True}, "temperature", "got True (a boolean), expected a number"),
    ({"top_p": 0}, "top_p", "got 0, expected 0 < top_p <= 1; 1 keeps every token."),
    ({"top_k": 1.5}, "top_k", "got 1.5 (a number), expected a whole number"),
    ({"min_p": 2}, "min_p", "got 2, expected 0 <= min_p <= 1"),
    ({"presence_penalty": 2.1}, "presence_penalty", "got 2.1, expected -2 <= presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty", "got -3, expected -2 <= frequency_penalty"),
    ({"frequency_penalty": "1"}, "frequency_penalty", "(text), expected a number, -2 <="),
    ({"repetition_penalty": 0}, "repetition_penalty", "got 0, expected 0.0001 <= repetition_pen"),
    ({"logit_bias": [1]}, "logit_bias", "got [1] (a list), expected an object"),
    ({"logit_bias": {"a": 1}}, "logit_bias", "got the key 'a', expected a token id"),
    ({"logit_bias": {"1": 1e9}}, "logit_bias.1", "expected from -1e+06 to 1e+06"),
    ({"logit_bias": {"1": 1, "01": 1}}, "logit_bias", "got a token id twice"),
    ({"logit_bias": {str(i): 1 for i in range(17)}}, "logit_bias", "got 17 entries"),
    ({"max_tokens": 0}, "max_tokens", "request at least one token."),
    ({"n": 0}, "n", "got 0, expected 1 to 128"),
    ({"seed": -1}, "seed", "leave it out for a random one"),
    ({"stop": ["a"] * 17}, "stop", "got 17 strings, expected at most 16"),
    ({"stop": ""}, "stop", "got an empty string"),
    ({"stop": 3}, "stop", "got 3 (a whole number), expected a list"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids", "got 'a', expected token ids of at least 0"),
    ({"stream": 1}, "stream", "got 1 (a whole number), expected true or false"),
    ({"stream_options": {}}, "stream_options", "expected stream to be true"),
    ({"regex": ""}, "regex", "got an empty expression"),
    ({"regex": "a", "response_format": {"type": "json_object"}}, "regex", "leave one out"),
    ({"response_format": {"type": "yaml"}}, "response_format.type", "got 'yaml', expected text,"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}},
     "response_format.json_schema.schema",
     "got nothing, expected a value; send the schema as an object."),
    ({"user": 3}, "user", "write it in quotes."),
  ],
  (chat,): [
    ({"messages": []}, "messages", "got no messages, expected at least one"),
    ({"messages": None}, "messages", "got nothing, expected a value"),
    ({"messages": [{"role": "god", "content": "x"}]}, "messages[0].role", "got 'god', expected"),
    ({"messages": [{"role": "user", "content": ""}]}, "messages[0].content", "send some text"),
    ({"messages": [{"role": "user", "images": 1}]}, "messages[0].images", "leave it out"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": []}]}, "messages[0].tool_calls",
     "got calls in a message of role user, expected calls in assistant messages"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}]},
     "messages[0].tool_calls[0].function.name", "name the function that was called"),
    ({"messages": [{"role": "assistant",
                    "tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]}]},
     "messages[0].tool_calls[0].function.arguments",
     "got '[]', expected a JSON object as text; send the arguments as they were returned."),
    ({"messages": [{"role": "assistant", "tool_calls": [{"type": "code"}]}]},
     "messages[0].tool_calls[0].type", "describe a call of a function"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
     "messages[0].content[0].type", "send text only"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "leave one out"),
    ({"top_logprobs": 2}, "top_logprobs", "expected logprobs to be true"),
    ({"logprobs": True, "top_logprobs": 17}, "top_logprobs", "got 17, expected 0 to 16"),
    ({"tools": [{"type": "x"}]}, "tools[0].type", "describe a function"),
    ({"tool_choice": "required"}, "tool_choice", "send them as tools"),
    ({"prompt": "x"}, "prompt", "got a field that is not supported"),
  ],
  (complete,): [
    ({"prompt": None}, "prompt", "got nothing, expected a value; send text, or token ids."),
    ({"prompt": []}, "prompt", "got no prompt, expected at least one"),
    ({"prompt": ""}, "prompt", "got an empty prompt"),
    ({"prompt": ["a"] * 129}, "prompt", "got 129 prompts, expected at most 128"),
    ({"prompt": [[1.5]]}, "prompt[0]", "got 1.5, expected token ids"),
    ({"logprobs": 17}, "logprobs", "got 17, expected 0 to 16"),
    ({"suffix": "x"}, "suffix", 'expected "", since other values are not supported'),
    ({"best_of": 2}, "best_of", "expected 1, since other values are not supported"),
  ],
}  # fmt: skip


@pytest.mark.parametrize(
  "routes, fields, param, expected",
  [(routes, *row) for routes, rows in WRONG.items() for row in rows],
)
def test_a_wrong_field_is_named(routes, fields, param: str, expected: str):
  for ask in routes:
    found = refusal(ask, **fields)
    assert (found.status, found.kind, found.param) == (400, "invalid_request_error", param)
    assert expected in found.message


def test_a_message_quotes_little_of_what_it_got():
  assert len(shown("x" * 10_000)) == 80
  assert len(refusal(chat, **{"y" * 10_000: 1}).param) == 80


JSON = st.recursive(
  st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
  lambda inner: (
    st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
  ),
  max_leaves=6,
)


@given(
  st.dictionaries(st.sampled_from(sorted({*protocol.CHAT, *protocol.COMPLETION, "x"})), JSON),
  st.sampled_from([chat, complete]),
)
def test_any_json_is_read_or_refused_in_words(fields, ask):
  fields = {**fields}
  found = None
  try:
    asked = ask(**fields)
  except Refusal as refusal:
    found = refusal
  if found is None:
    assert asked.is_chat == (ask is chat)
  else:
    assert found.status == 400 and "; " in found.message
    json.dumps(found.body)
