"""Chat templates in the published forms of several model families, rewritten from scratch."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import pathlib
from typing import Any

import tokenizers

from seerjax.models import tokenizer as tokenizer_lib

NANO_FILES = pathlib.Path(tokenizer_lib.__file__).parent / "nano"

_CALLS = """
{%- macro calls(message, has_content) %}
  {%- for tool_call in message.tool_calls %}
    {%- if (loop.first and has_content) or not loop.first %}{{- '\\n' }}{% endif %}
    {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{% endif %}
    {{- '<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
    {{- tool_call.arguments if tool_call.arguments is string else tool_call.arguments | tojson }}
    {{- '}\\n</tool_call>' }}
  {%- endfor %}
{%- endmacro %}
"""
_TOOLS = """
    {{- "# Tools\\n\\nCall a function by name.\\n<tools>" }}
    {%- for tool in tools %}
      {{- "\\n" }}{{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
"""
_RESPONSE = """
    {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
      {{- '<|im_start|>user' }}
    {%- endif %}
    {{- '\\n<tool_response>\\n' }}{{- message.content }}{{- '\\n</tool_response>' }}
    {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
      {{- '<|im_end|>\\n' }}
    {%- endif %}
"""
# A default system prompt, tools, tool calls, and tool results as user turns.
QWEN25 = (
  _CALLS
  + """
{%- if tools %}
  {{- '<|im_start|>system\\n' }}
  {%- if messages[0]['role'] == 'system' %}
    {{- messages[0]['content'] }}
  {%- else %}
    {{- 'You help.' }}
  {%- endif %}
  {{- '\\n\\n' }}"""
  + _TOOLS
  + """
{%- elif messages[0]['role'] == 'system' %}
  {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}
  {{- '<|im_start|>system\\nYou help.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
  {%- if (message.role == "user") or (message.role == "system" and not loop.first)
      or (message.role == "assistant" and not message.tool_calls) %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
  {%- elif message.role == "assistant" %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content %}{{- message.content }}{% endif %}
    {{- calls(message, message.content) }}
    {{- '<|im_end|>\\n' }}
  {%- elif message.role == "tool" %}"""
  + _RESPONSE
  + """
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""
)
# Reasoning before the last question is dropped; enable_thinking=False asks for none.
QWEN3 = (
  _CALLS
  + """
{%- if tools %}
  {{- '<|im_start|>system\\n' }}
  {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{% endif %}"""
  + _TOOLS
  + """
{%- elif messages[0].role == 'system' %}
  {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(asking=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
  {%- set index = (messages|length - 1) - loop.index0 %}
  {%- if ns.asking and message.role == "user" and message.content is string
      and not (message.content.startswith('<tool_response>')
               and message.content.endswith('</tool_response>')) %}
    {%- set ns.asking = false %}
    {%- set ns.last = index %}
  {%- endif %}
{%- endfor %}
{%- for message in messages %}
  {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
  {%- elif message.role == "assistant" %}
    {%- set content = message.content if message.content is string else '' %}
    {%- set thoughts = '' %}
    {%- if message.reasoning_content is string %}
      {%- set thoughts = message.reasoning_content %}
    {%- elif '</think>' in content %}
      {%- set thoughts = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1] %}
      {%- set thoughts = thoughts.lstrip('\\n') %}
      {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if loop.index0 > ns.last and (loop.last or thoughts) %}
      {{- '<think>\\n' + thoughts.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
    {%- else %}
      {{- content }}
    {%- endif %}
    {%- if message.tool_calls %}{{- calls(message, content) }}{% endif %}
    {{- '<|im_end|>\\n' }}
  {%- elif message.role == "tool" %}"""
  + _RESPONSE
  + """
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- '<|im_start|>assistant\\n' }}
  {%- if enable_thinking is defined and enable_thinking is false %}
    {{- '<think>\\n\\n</think>\\n\\n' }}
  {%- endif %}
{%- endif %}
"""
)
# One trimmed expression per turn, with the start-of-text token before the first.
LLAMA3 = (
  "{% set loop_messages = messages %}{% for message in loop_messages %}"
  "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
  " + message['content'] | trim + '<|eot_id|>' %}"
  "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}"
  "{% endfor %}{% if add_generation_prompt %}"
  "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# Always a system turn, with dates; tools go into the first question, tool results are "ipython".
LLAMA31 = """
{{- bos_token }}
{%- if not date_string is defined %}
  {%- if strftime_now is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{% endif %}
{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{% endif %}
{%- if messages[0]['role'] == 'system' %}
  {%- set system_message = messages[0]['content']|trim %}
  {%- set messages = messages[1:] %}
{%- else %}
  {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}{{- "Environment: ipython\\n" }}{% endif %}
{{- "Cutting Knowledge Date: December 2023\\nToday Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- if tools is not none %}
  {%- set first_user_message = messages[0]['content']|trim %}
  {%- set messages = messages[1:] %}
  {{- '<|start_header_id|>user<|end_header_id|>\\n\\nCall one of these.\\n\\n' }}
  {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{% endfor %}
  {{- first_user_message + "<|eot_id|>" }}
{%- endif %}
{%- for message in messages %}
  {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
  {%- elif 'tool_calls' in message %}
    {%- if not message.tool_calls|length == 1 %}
      {{- raise_exception("one <|python_tag|> call at once") }}
    {%- endif %}
    {%- set tool_call = message.tool_calls[0].function %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n<|python_tag|>' }}
    {{- '{"name": "' + tool_call.name + '", "parameters": ' }}
    {{- tool_call.arguments | tojson }}{{- "}" }}{{- "<|eom_id|>" }}
  {%- else %}
    {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
    {%- if message.content is mapping or message.content is iterable %}
      {{- message.content | tojson }}
    {%- else %}
      {{- message.content }}
    {%- endif %}
    {{- "<|eot_id|>" }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
# Distilled models of either family, with turn markers that tokenizer.json does not call special.
DISTILLED = """
{%- if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{%- set ns = namespace(system='') %}
{%- for message in messages if message['role'] == 'system' %}
  {%- set ns.system = message['content'] %}
{%- endfor %}
{{- bos_token }}{{- ns.system }}
{%- for message in messages %}
  {%- if message['role'] == 'user' %}{{- '<｜User｜>' + message['content'] }}{% endif %}
  {%- if message['role'] == 'assistant' and message['content'] is not none %}
    {%- set content = message['content'] %}
    {%- if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
    {{- '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜><think>\\n' }}{% endif %}
"""


@dataclasses.dataclass(frozen=True)
class Form:
  """A published form: template, special tokens, words that are added tokens, and roles."""

  name: str
  template: str
  special: tuple[str, ...]
  words: tuple[str, ...]
  roles: dict[str, str]
  has_tools: bool = True

  def tokenizer(self) -> tokenizer_lib.Tokenizer:
    """Returns nano's letters with this form's added tokens."""
    backend = tokenizers.Tokenizer.from_file(str(NANO_FILES / "tokenizer.json"))
    backend.add_special_tokens(list(self.special))
    backend.add_tokens(list(self.words))
    return tokenizer_lib.Tokenizer(
      backend=backend, chat_template=self.template, special_tokens=self.roles
    )


_WORDS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>")
_CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|vision_start|>")
_HEADERS = (
  "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>",
  "<|python_tag|>",
)  # fmt: skip
_LLAMA_ROLES = dict(bos_token="<|begin_of_text|>", eos_token="<|eot_id|>")
FORMS = (
  Form("qwen2.5", QWEN25, _CHATML, _WORDS[2:4], dict(eos_token="<|im_end|>")),
  Form("qwen3", QWEN3, _CHATML, _WORDS, dict(eos_token="<|im_end|>")),
  Form("llama3", LLAMA3, _HEADERS, (), _LLAMA_ROLES, has_tools=False),
  Form("llama3.1", LLAMA31, _HEADERS, (), _LLAMA_ROLES),
  Form(
    "distilled",
    DISTILLED,
    ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    ("<｜User｜>", "<｜Assistant｜>", *_WORDS[:2]),
    dict(bos_token="<｜begin▁of▁sentence｜>", eos_token="<｜end▁of▁sentence｜>"),
    has_tools=False,
  ),
)


def conversations(content: str, has_tools: bool) -> Sequence[tuple[list[dict[str, Any]], dict]]:
  """Returns conversations and variables; every external text equals or contains `content`."""
  user = dict(role="user", content=f" {content}?\n")
  system = dict(role="system", content=f"Be {content}.")
  answer = dict(role="assistant", content=f"<think>\n{content}\n</think>\n\nyes, {content}")
  plain = dict(role="assistant", content=content)
  chats: list[tuple[list[dict[str, Any]], dict]] = [
    ([user], {}),
    ([system, user], dict(enable_thinking=False)),
    ([user, answer, user], {}),
    ([system, user, plain, user, answer], {}),
  ]
  if has_tools:
    function = dict(
      name=f"f{content}", description=content, parameters={f"p {content}": dict(type=content)}
    )
    tools = [dict(type="function", function=function)]
    arguments = {f"a {content}": [content, 1, None]}
    call = dict(
      role="assistant",
      content="",
      tool_calls=[dict(type="function", function=dict(name=content, arguments=arguments))],
    )
    result = dict(role="tool", content=content)
    chats += [
      ([system, user], dict(tools=tools)),
      ([user, call, result, result, plain, user], dict(tools=tools)),
      ([user, call, result], dict(tools=tools, date_string=content)),
    ]
  return chats
