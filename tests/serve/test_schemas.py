"""Schema sources: numbers that would change in conversion, and the format of calls."""

from __future__ import annotations

import json

import pytest
import serving
import word_engine

from seerjax.serve import bodies, grammar, protocol, schemas
from seerjax.serve.protocol import Grammar
from seerjax.serve.refusals import Refusal

MESSAGES = [{"role": "user", "content": "Hi"}]


def asked(schema: str, **fields) -> protocol.Asked:
  form = f'{{"type": "json_schema", "json_schema": {{"name": "a", "schema": {schema}}}}}'
  body = json.dumps({"messages": MESSAGES, **fields})[:-1] + f', "response_format": {form}}}'
  return protocol.chat(bodies.parsed(body.encode()))


@pytest.mark.parametrize(
  "number",
  [
    "1234567890123456789", "9007199254740993", "-9007199254740993", "9223372036854775808",
    "1e400", "-1e400", "1e-400", "0.1234567890123456789", "100000000000000000000001.5",
    "3.14159265358979323846", "1" + "0" * 400, "18446744073709551615", "1e999999999999999999999",
  ],
)  # fmt: skip
@pytest.mark.parametrize(
  "schema",
  [
    '{"const": %s}', '{"enum": [1, %s]}', '{"type": "number", "minimum": %s}',
    '{"type": "object", "properties": {"a": {"items": {"multipleOf": %s}}}}',
    '{"anyOf": [{"type": "string"}, {"default": {"a": [[%s]]}}]}',
  ],
)  # fmt: skip
def test_a_number_that_would_be_another_is_refused_at_any_depth(schema: str, number: str):
  found = serving.refusal(asked, schema % number)
  assert found.param == "response_format.json_schema.schema"
  assert found.code == "inexact_number" and len(found.message) < 300
  assert f"got the number {number[:60]}" in found.message


@pytest.mark.parametrize(
  "number",
  [
    "0", "-0.0", "0.1", "1e22", "1E+2", "2.50", "9007199254740992", "1152921504606846976",
    "-9223372036854775808", "1.7976931348623157e308", "5e-324", "0.30000000000000004", "1e-5",
  ],
)  # fmt: skip
def test_a_number_that_stays_what_it_is_is_taken(number: str):
  found = json.loads(asked(f'{{"const": {number}}}').grammar.source)["const"]
  assert found == float(number)


def test_a_number_beyond_a_float_is_a_number_elsewhere():
  body = b'{"messages": [{"role": "user", "content": "a"}], "temperature": 0.70000000000000000001}'
  assert protocol.chat(bodies.parsed(body)).sampling["temperature"] == 0.7
  assert isinstance(schemas.number("0.70000000000000000001"), schemas.Inexact)


# Forms of JSON.


@pytest.fixture(scope="module")
def compiler():
  found = grammar.Compiler(word_engine.TOKENIZER, word_engine.CONFIG.vocab_size)
  yield found
  found.close()


def takes(compiler: grammar.Compiler, asked_for: Grammar, text: str) -> bool:
  """Returns whether a grammar allows a text, letter by letter, and an end behind it."""
  mask, answer = compiler.mask(asked_for), []
  for token in (*word_engine.TOKENIZER.encode(text), word_engine.TOKENIZER.eos_ids[0]):
    words = mask(answer)
    if not words[token // 32] >> token % 32 & 1:
      return False
    answer.append(token)
  return True


SCHEMA = """{"type": "object", "properties": {"a": {"enum": [1, 2]}, "b": {"type": "boolean"}},
  "required": ["a", "b"], "additionalProperties": false}"""


@pytest.mark.parametrize(
  "text, is_compact, is_spaced",
  [
    ('{"a":1,"b":true}', True, True),
    ('{"a": 1, "b": true}', False, True),
    ('{\n  "a": 1,\n  "b": true\n}', False, True),
    ('{"a":3,"b":true}', False, False),
    ('{"a":1}', False, False),
  ],
)
def test_json_is_compact_unless_white_space_is_asked_for(compiler, text, is_compact, is_spaced):
  assert takes(compiler, asked(SCHEMA).grammar, text) == is_compact
  assert takes(compiler, asked(SCHEMA, json_whitespace=True).grammar, text) == is_spaced


def test_white_space_of_no_json_is_refused():
  with pytest.raises(Refusal, match="json_whitespace: got it without JSON, expected a response_f"):
    protocol.chat({"messages": MESSAGES, "json_whitespace": True})
  with pytest.raises(Refusal, match="json_whitespace: got it without JSON"):
    protocol.chat({"messages": MESSAGES, "json_whitespace": True, "regex": "a"})


def tool(name: str, parameters=None) -> dict:
  function = {"name": name, **({} if parameters is None else {"parameters": parameters})}
  return {"type": "function", "function": function}


TOOLS = [tool("f", json.loads(SCHEMA)), tool("g")]
NAMED = {"type": "function", "function": {"name": "g"}}
F = '<tool_call>\n{"name": "f", "arguments": {"a": 1, "b": true}}\n</tool_call>'
G = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
  "fields, text, is_taken",
  [
    ({"tool_choice": "required"}, F, True),
    ({"tool_choice": "required"}, G, True),
    ({"tool_choice": "required"}, f"{F}\n{G}\n{G}", True),
    ({"tool_choice": "required"}, F[:-1], False),
    ({"tool_choice": "required"}, F.replace("1", "3"), False),
    ({"tool_choice": "required"}, F.replace('"f"', '"h"'), False),
    ({"tool_choice": "required"}, f"Well. {F}", False),
    ({"tool_choice": "required", "parallel_tool_calls": False}, F, True),
    ({"tool_choice": "required", "parallel_tool_calls": False}, f"{F}\n{G}", False),
    ({"tool_choice": NAMED}, G, True),
    ({"tool_choice": NAMED}, F, False),
    ({"tool_choice": NAMED}, f"{G}\n{G}", False),
  ],
)
def test_calls_have_the_form_that_was_asked_for(compiler, fields, text, is_taken):
  found = protocol.chat({"messages": MESSAGES, "tools": TOOLS, **fields})
  assert found.tools == tuple(TOOLS) and found.grammar.kind == "calls"
  assert takes(compiler, found.grammar, text) == is_taken


@pytest.mark.parametrize("name", ["f", "a.b-c_1", 'quo"te', "new\nline", "ünï", "x" * 64, "%json"])
def test_a_function_may_have_any_name(compiler, name: str):
  body = {"messages": MESSAGES, "tools": [tool(name)], "tool_choice": "required"}
  called = f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {{}}}}\n</tool_call>'
  assert takes(compiler, protocol.chat(body).grammar, called)


@pytest.mark.parametrize("fields", [{}, {"tool_choice": "auto"}, {"tool_choice": "none"}])
def test_who_need_not_call_has_no_grammar(fields):
  found = protocol.chat({"messages": MESSAGES, "tools": TOOLS, **fields})
  assert found.grammar is None and bool(found.tools) == (fields != {"tool_choice": "none"})


@pytest.mark.parametrize(
  "fields, param, message",
  [
    ({"tool_choice": "always"}, "tool_choice", "got 'always', expected \"none\", \"auto\""),
    ({"tool_choice": 3}, "tool_choice", "got 3, expected \"none\""),
    ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice", "got {'type': 'allowed_tools'}"),
    ({"tool_choice": "required", "tools": None}, "tool_choice", "got \"required\" without tools"),
    ({"tool_choice": "required", "tools": []}, "tool_choice", "got \"required\" without tools"),
    ({"tool_choice": {"type": "function", "function": {"name": "h"}}},
     "tool_choice.function.name", "got 'h', expected one of the 2 functions in tools, such as 'f'"),
    ({"tool_choice": NAMED, "tools": None},
     "tool_choice.function.name", "got 'g', expected one of the 0 functions in tools"),
    ({"tool_choice": {"type": "function"}}, "tool_choice.function", "got nothing, expected a"),
    ({"tool_choice": {"type": "function", "function": {"name": "g"}, "a": 1}},
     "tool_choice.a", "got a field that is not supported"),
    ({"parallel_tool_calls": False}, "parallel_tool_calls", "got false when calls are optional"),
    ({"tool_choice": NAMED, "regex": "a"}, "tool_choice", "got required calls together with regex"),
    ({"tool_choice": "required", "response_format": {"type": "json_object"}},
     "tool_choice", "got required calls together with response_format"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]},
     "tools[0].function.name", "got nothing, expected a name"),
    ({"tools": [tool("f", 3)]}, "tools[0].function.parameters", "got 3 (a whole number), expected"),
    ({"tool_choice": "required", "tools": [tool("f", {"const": 2**53 + 1})]},
     "tools", "got the number 9007199254740993"),
  ],
)  # fmt: skip
def test_a_choice_of_tools_that_is_none_is_refused_by_name(fields, param, message):
  found = serving.refusal(protocol.chat, {"messages": MESSAGES, "tools": TOOLS, **fields})
  assert found.param == param
  assert found.message.startswith(f"{param}: {message}"), found.message
