"""The Responses protocol: bodies to chats, and responses to items and events."""

from __future__ import annotations

import dataclasses

import openai
import pytest
import serving
import word_engine

from seerjax.serve import protocol, responses, server

INSTRUCTED = [{"role": "system", "content": "Be brief."}, *serving.HELLO]


@pytest.fixture(scope="module")
def url():
  with serving.running() as (_, url):
    yield url


@pytest.fixture(scope="module")
def client(url: str):
  with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as found:
    yield found


@pytest.fixture(scope="module")
def plain(url: str):
  with serving.client(url) as found:
    yield found


@pytest.mark.parametrize(
  "fields, chat",
  [
    ({"input": "How many?"}, {"messages": serving.HELLO}),
    ({"input": "How many?", "instructions": "Be brief."}, {"messages": INSTRUCTED}),
    ({"input": INSTRUCTED}, {"messages": INSTRUCTED}),
    (
      {"input": [
        {"role": "user", "content": [{"type": "input_text", "text": "How many?"}]},
        {"type": "reasoning", "id": "rs_0", "summary": [], "status": "completed",
         "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "id": "msg_0", "status": "completed", "role": "assistant",
         "content": [{"type": "output_text", "text": "Two", "annotations": [], "logprobs": []}]},
        {"role": "user", "content": "Of what?"},
      ]},
      {"messages": [
        *serving.HELLO,
        {"role": "assistant", "content": "Two", "reasoning_content": "Hm."},
        {"role": "user", "content": "Of what?"},
      ]},
    ),
    (
      {"input": "a", "max_output_tokens": 7, "temperature": 0.5, "seed": 3, "stop": "x"},
      {"messages": [{"role": "user", "content": "a"}], "max_tokens": 7, "temperature": 0.5,
       "seed": 3, "stop": "x"},
    ),
    (
      {"input": "a", "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}}},
      {"messages": [{"role": "user", "content": "a"}],
       "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}},
    ),
    (
      {"input": "a", "include": [responses.LOGPROBS], "top_logprobs": 2, "background": False,
       "tools": [], "truncation": "disabled", "tool_choice": "auto"},
      {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 2},
    ),
  ],
)  # fmt: skip
def test_a_body_is_read_as_a_chat(fields, chat):
  expected, found = protocol.chat(chat), responses.read(fields)
  if expected.grammar is not None:
    grammar = dataclasses.replace(expected.grammar, param="text.format")
    expected = dataclasses.replace(expected, grammar=grammar)
  names = {"messages": "input", "max_tokens": "max_output_tokens"}
  assert found == dataclasses.replace(expected, names=names)


def test_fields_without_effect_are_named():
  asked = responses.read(
    {"input": "a", "reasoning": {"effort": "low"}, "store": False, "text": {"verbosity": "low"}}
  )
  assert asked.ignored == ("reasoning", "store", "text.verbosity")


@pytest.mark.parametrize(
  "fields, param, expected",
  [
    ({}, "input", "got None, expected text, or a list"),
    ({"input": []}, "input", "got [], expected text, or a list of at least one item"),
    ({"input": ""}, "input", "send some text"),
    ({"input": "", "instructions": "Be brief."}, "input", "send some text"),
    ({"input": [{"type": "reasoning", "content": "Hm."}, {"role": "assistant", "content": "a"},
                {"role": "god", "content": "x"}], "instructions": "Be brief."},
     "input[2].role", "input[2].role: got 'god', expected"),
    ({"input": [3]}, "input[0]", "got 3, expected an object"),
    ({"input": [{"type": "function_call_output"}]}, "input[0].type", "send text only"),
    ({"input": [{"role": "god", "content": "x"}]}, "input[0].role", "got 'god', expected"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
     "input[0].content[0].type", "got 'input_image', expected input_text or output_text"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
     "input[0].content[0].text", "got None, expected text"),
    ({"input": [{"role": "user", "content": "x", "name": "y"}]}, "input[0].name", "leave it out"),
    ({"input": "a", "instructions": 3}, "instructions", "instructions: got 3 (a whole number)"),
    ({"input": "a", "max_output_tokens": 0}, "max_output_tokens", "request at least one token"),
    ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id",
     "got 'resp_1', expected nothing; no response is stored: send the earlier items as input."),
    ({"input": "a", "conversation": "c"}, "conversation", "no conversation is stored"),
    ({"input": "a", "tools": [{"type": "function"}]}, "tools", "use /v1/chat/completions"),
    ({"input": "a", "background": True}, "background", "got True, expected false"),
    ({"input": "a", "truncation": "auto"}, "truncation", "send less input"),
    ({"input": "a", "include": ["reasoning.encrypted_content"]}, "include", "leave the others"),
    ({"input": "a", "text": {"format": {"type": "yaml"}}}, "text.format.type", "got 'yaml'"),
    ({"input": "a", "text": {"form": 1}}, "text.form", "expected format; leave it out"),
    ({"input": "a", "top_logprobs": 99}, "top_logprobs", "got 99, expected 0 to 16"),
    ({"input": "a", "temprature": 1}, "temprature", "got a field that is not supported"),
    ({"input": "a", "messages": []}, "messages", "got a field that is not supported"),
    ({"input": "a", "n": 2}, "n", "got a field that is not supported"),
  ],
)  # fmt: skip
def test_a_wrong_field_is_named_as_it_was_written(fields, param, expected):
  found = serving.refusal(responses.read, fields)
  assert found.param == param
  assert expected in found.message


def test_a_response_has_the_bits_of_the_chat(client):
  same = dict(model="tiny", temperature=0.8)
  chat = client.chat.completions.create(
    **same, messages=INSTRUCTED, seed=5, max_tokens=9, logprobs=True
  )
  found = client.responses.create(
    **same, input="How many?", instructions="Be brief.", max_output_tokens=9,
    include=[responses.LOGPROBS], extra_body={"seed": 5},
  )  # fmt: skip
  assert found.output_text == chat.choices[0].message.content
  (item,) = found.output
  rows = chat.choices[0].logprobs.content
  assert [one.logprob for one in item.content[0].logprobs] == [one.logprob for one in rows]
  assert (found.usage.input_tokens, found.usage.output_tokens) == (
    chat.usage.prompt_tokens, chat.usage.completion_tokens
  )  # fmt: skip
  is_cut = chat.choices[0].finish_reason == "length"
  assert found.status == ("incomplete" if is_cut else "completed")
  assert found.incomplete_details is None or found.incomplete_details.reason == "max_output_tokens"
  assert found.seed == 5 and found.system_fingerprint == "fp_test"


@pytest.mark.parametrize("most", [1, 12])
def test_a_stream_of_events_makes_the_same_response(client, most):
  fields = dict(
    model="tiny", input="How many?", max_output_tokens=most, include=[responses.LOGPROBS],
    extra_body={"seed": 6},
  )  # fmt: skip
  whole = client.responses.create(**fields)
  with client.responses.stream(**fields) as stream:  # The client's own reader puts it together.
    events = [*stream]
  last = events[-1].response
  alike = lambda one: [
    (item.type, item.status, item.role, item.content[0].text, item.content[0].logprobs)
    for item in one.output
  ]
  assert alike(last) == alike(whole) and alike(last)[0][3] == whole.output_text
  assert (last.status, last.usage) == (whole.status, whole.usage)
  assert [event.sequence_number for event in events] == [*range(len(events))]
  kinds = [event.type for event in events]
  assert kinds[:4] == [
    "response.created", "response.in_progress", "response.output_item.added",
    "response.content_part.added",
  ]  # fmt: skip
  assert kinds[-4:] == [
    "response.output_text.done", "response.content_part.done", "response.output_item.done",
    f"response.{whole.status}",
  ]  # fmt: skip
  deltas = [event for event in events if event.type == "response.output_text.delta"]
  assert "".join(event.delta for event in deltas) == whole.output_text
  rows = [row.logprob for event in deltas for row in event.logprobs]
  assert rows == [row.logprob for row in whole.output[0].content[0].logprobs]
  assert len(rows) == whole.usage.output_tokens


def test_a_conversation_goes_on_by_its_items(client):
  fields = dict(model="tiny", max_output_tokens=6, extra_body={"seed": 4})
  first = client.responses.create(input=serving.HELLO, **fields)
  said = [*serving.HELLO, *first.output, {"role": "user", "content": "Of what?"}]
  second = client.responses.create(input=said, **fields)
  chat = client.chat.completions.create(
    model="tiny", seed=4, max_tokens=6,
    messages=[*serving.HELLO, {"role": "assistant", "content": first.output_text}, said[-1]],
  )  # fmt: skip
  assert second.output_text == chat.choices[0].message.content


@pytest.mark.thorough
def test_reasoning_is_an_item_of_its_own():
  template = (
    "{% for one in messages %}{{ one.content }}{% endfor %}{% if 0 %}<think></think>{% endif %}"
  )
  tokenizer = dataclasses.replace(word_engine.TOKENIZER, chat_template=template)
  fields = dict(
    model="tiny", input="Hi", max_output_tokens=40,
    extra_body={"regex": "<think>[a-c]{2}</think>[d-f]{2}", "seed": 1},
  )  # fmt: skip
  with (
    server.running(serving.make_service(tokenizer=tokenizer)) as url,
    openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
  ):
    whole = client.responses.create(**fields)
    with client.responses.stream(**fields) as stream:
      events = [*stream]
  assert whole.output_text
  assert "".join(e.delta for e in events if e.type.endswith("text.delta")) == "".join(
    item.content[0].text for item in whole.output
  )


@pytest.mark.parametrize(
  "path, body, expected",
  [
    ("/v1/embeddings", {"input": "a"}, "/v1/embeddings: got a request for embeddings, expected"),
    ("/v1/responses/resp_1", {}, "the route: got POST '/v1/responses/resp_1'"),
    (
      "/v1/responses", {"input": "a", "max_output_tokens": 60},
      "max_output_tokens: got 60 with a prompt",
    ),
    ("/v1/responses", {"input": "a" * 70}, "input: got"),
    ("/tokenize", {"prompt": "a", "promt": 1}, "promt: got a field that is not supported"),
    ("/tokenize", {}, "prompt: got nothing, expected a value"),
    ("/tokenize", {"prompt": ["a", "b"]}, "prompt: got 2 prompts, expected one"),
    ("/tokenize", {"prompt": "a", "return_token_strs": 1}, "return_token_strs: got 1, expected"),
    ("/tokenize", {"prompt": "a", "model": "gone"}, "model: got 'gone', expected one of tiny"),
    ("/detokenize", {}, "tokens: got None, expected a list of token ids"),
    ("/detokenize", {"tokens": [1, -1]}, "tokens: got -1, expected ids from 0 to 511"),
    ("/detokenize", {"tokens": [512]}, "tokens: got 512, expected ids from 0 to 511"),
    ("/detokenize", {"tokens": [True]}, "tokens: got True, expected ids from 0 to 511"),
    ("/detokenize", {"tokens": [1], "model": 3}, "model: got 3, expected text"),
    ("/detokenize", {"tokens": [1], "text": 3}, "text: got a field that is not supported"),
  ],
)  # fmt: skip
def test_what_is_not_there_is_refused_in_openais_form(plain, path, body, expected):
  found = plain.post(path, json=body)
  assert found.status_code in (400, 404)
  error = found.json()["error"]
  assert expected in error["message"]
  assert {*error} == {"message", "type", "param", "code"}


def test_embeddings_are_refused_at_once(client):
  with pytest.raises(openai.BadRequestError, match="were not trained to embed"):
    client.embeddings.create(model="tiny", input="a")


def test_tokens_are_those_that_an_answer_reads(plain, client):
  tokenizer = word_engine.TOKENIZER
  text = "How many \u20ac?"
  found = plain.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
  assert found["tokens"] == tokenizer.encode(text)
  assert (found["count"], found["max_model_len"]) == (len(found["tokens"]), 64)
  assert len(found["token_strs"]) == found["count"]
  back = plain.post("/detokenize", json={"tokens": found["tokens"]}).json()
  assert back == {"prompt": text}
  chat = plain.post("/tokenize", json={"messages": serving.HELLO}).json()
  assert chat["tokens"] == tokenizer.chat_ids(serving.HELLO) and chat["token_strs"] is None
  said = client.chat.completions.create(model="tiny", messages=serving.HELLO, max_tokens=1)
  assert said.usage.prompt_tokens == chat["count"]
  about = plain.post("/tokenize", json={"messages": serving.HELLO, "context": "stock"})
  assert about.status_code == 400 and about.json()["error"]["param"] == "context"
  shown = plain.post("/detokenize", json={"tokens": chat["tokens"]}).json()["prompt"]
  assert shown == tokenizer.decode(chat["tokens"], skip_special_tokens=False)
