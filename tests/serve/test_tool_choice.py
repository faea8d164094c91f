"""Required tool calls and response formats, over HTTP with OpenAI's own client."""

from __future__ import annotations

import dataclasses
import json
import re

import chat_forms
import openai
import pytest
import serving
import word_engine

from seerjax.serve import parts, server

MESSAGES = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"],
          "additionalProperties": False}  # fmt: skip
TOOLS = [
  {"type": "function", "function": {"name": "f", "parameters": SCHEMA}},
  {"type": "function", "function": {"name": "g"}},
]
NAMED = {"type": "function", "function": {"name": "f"}}
# Kinds of templates: with tools and call marks, with a thinking start, and with neither.
SHORT = "{% for one in messages %}{{ one.content }}{% endfor %}"
TEMPLATES = {
  "calls": SHORT + "{% for one in tools or [] %}{{ one.function.name }}{% endfor %}"
  "{% if 0 %}<think></think><tool_call></tool_call>{% endif %}",
  "thinks": SHORT + "{% if 0 %}</think><tool_call></tool_call>{{ tools }}{% endif %}<think>\n",
  "plain": SHORT,
}
assert parts.knows_tools(TEMPLATES["calls"]) and not parts.knows_tools(TEMPLATES["plain"])


@pytest.fixture(
  scope="module",
  params=["thinks", *(pytest.param(one, marks=pytest.mark.thorough) for one in ("calls", "plain"))],
)
def kind(request) -> str:
  return request.param


@pytest.fixture(scope="module")
def client(kind: str):
  tokenizer = dataclasses.replace(word_engine.TOKENIZER, chat_template=TEMPLATES[kind])
  service = serving.make_service(tokenizer=tokenizer)
  with (
    server.running(service) as url,
    openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as found,
  ):
    yield found


def choice_of(client: openai.OpenAI, **fields):
  """Returns a choice, after its stream was compared with it."""
  fields = dict(model="tiny", messages=MESSAGES, max_tokens=57, seed=1) | fields
  whole = client.chat.completions.create(**fields).choices[0]
  deltas, reasons, calls = [], [], {}
  for piece in client.chat.completions.create(**fields, stream=True):
    choice = piece.choices[0]
    deltas.append(choice.delta)
    reasons.append(choice.finish_reason)
    for call in choice.delta.tool_calls or ():
      calls[call.index] = (call.id, call.function.name, call.function.arguments)
  assert "".join(one.content or "" for one in deltas) == (whole.message.content or "")
  assert not any(getattr(one, "reasoning_content", None) for one in deltas)
  assert reasons[-1] == whole.finish_reason and not any(reasons[:-1])
  assert [*calls.values()] == [
    (call.id, call.function.name, call.function.arguments)
    for call in whole.message.tool_calls or ()
  ]
  return whole


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_tool_that_has_to_be_called_is_called(client, choice):
  found = choice_of(client, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
  assert found.finish_reason == "tool_calls" and not found.message.content
  (call,) = found.message.tool_calls
  assert call.function.name in (("f", "g") if choice == "required" else ("f",))
  arguments = json.loads(call.function.arguments)
  assert arguments in ([{"a": 1}, {"a": 2}] if call.function.name == "f" else [{}])


def test_all_of_a_formed_answer_is_content(client):
  form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
  found = choice_of(client, response_format=form)
  assert found.finish_reason == "stop" and found.message.content in ('{"a":1}', '{"a":2}')
  assert not hasattr(found.message, "reasoning_content")


@pytest.mark.parametrize("text", ["<think>a</think>", '<tool_call>{"name": 1}</tool_call>'])
def test_marks_inside_a_formed_answer_are_its_own(client, text):
  form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": {"a": text}}}}
  assert json.loads(choice_of(client, response_format=form).message.content) == {"a": text}
  found = choice_of(client, extra_body={"regex": re.escape(text)})
  assert found.message.content == text and not found.message.tool_calls


def test_tools_that_may_be_called_need_a_template_that_knows_them(client, kind):
  fields = dict(model="tiny", messages=MESSAGES, max_tokens=4, seed=1, tools=TOOLS)
  if kind != "plain":
    assert client.chat.completions.create(**fields).choices[0].finish_reason == "length"
    return
  with pytest.raises(openai.BadRequestError) as refused:
    client.chat.completions.create(**fields)
  assert "does not support tools" in str(refused.value)
  assert 'set tool_choice to "required" or a function' in str(refused.value)


def test_forms_of_published_templates_are_those_of_calls():
  called = [dict(role="assistant", content="", tool_calls=[
    dict(id="c", type="function", function=dict(name="f", arguments='{"a": 1}'))
  ])]  # fmt: skip
  for form in chat_forms.FORMS:
    if not parts.knows_tools(form.template):
      continue
    tokenizer = form.tokenizer()
    messages = [parts.as_template_reads(form.template, one) for one in [*MESSAGES, *called]]
    text = tokenizer.decode(tokenizer.chat_ids(messages), skip_special_tokens=False)
    assert '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>' in text
