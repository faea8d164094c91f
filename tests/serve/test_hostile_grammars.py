"""Hostile grammars cause no crash and no internal error, and change no bit of other requests.

classes of schemas and expressions, each drawn anew --> a server --> refused, or answered
neighbours with and without grammars, before and alongside --> equal bits
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import threading
import time
from typing import Any

import numpy as np
import pytest
import serving

from seerjax.serve import grammar

Case = dict[str, Any]  # Fields of a body.
FULL = 2**63


def schema(value: Any) -> Case:
  form = {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}
  return {"response_format": form}


def regex(value: str) -> Case:
  return {"regex": value}


def tool(value: Any) -> Case:
  function = {"name": "f", "parameters": value}
  return {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}


def nested(value: Any, depth: int, wrap) -> Any:
  for _ in range(depth):
    value = wrap(value)
  return value


def numbers(rng) -> list[Case]:
  edge = [
    FULL - 1, -FULL, -FULL + 1, 2**53, -(2**53), 2**62, 0, 1, -1, 10**18, 1e308, -1e308, 5e-324,
  ]  # fmt: skip
  pick = lambda: edge[int(rng.integers(len(edge)))]
  return [
    schema({"type": kind, low: pick(), high: pick()})
    for kind in ("integer", "number")
    for low, high in (
      ("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum"), ("minimum", "multipleOf"),
    )
    for _ in range(5)
  ] + [schema({"type": "integer", "minimum": -FULL, "maximum": -FULL})]  # fmt: skip


def texts(rng) -> list[Case]:
  count = lambda: int(10 ** rng.uniform(0, 9))
  strange = [
    "\x00", "\ud800", "\udfff\ud800", "\U0010ffff", "\u202e", "\ufeff", "a\u0300" * 40, "\x7f",
  ]  # fmt: skip
  return [
    *(schema({"const": one}) for one in strange),
    *(schema({"enum": [one, one]}) for one in strange),
    *(schema({"type": "object", "properties": {one: {"const": one}}, "required": [one]})
      for one in strange),
    *(schema({"type": "string", "minLength": count(), "maxLength": count()}) for _ in range(8)),
    *(schema({"type": "string", "pattern": one}) for one in strange),
    *(regex(one) for one in strange),
    *(schema({"type": "string", "format": one}) for one in ("regex", "uri", "", "\x00", "date")),
  ]  # fmt: skip


def structures(rng) -> list[Case]:
  many = lambda n: {f"a{place}": {"type": "integer"} for place in range(n)}
  depth = lambda: int(rng.integers(2, 55))
  return [
    schema({"$ref": "#"}), schema({"$ref": "#/$defs/a"}), schema({"$ref": "http://x.yz/a"}),
    schema({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
            "$ref": "#/$defs/a"}),
    schema({"type": "array", "items": {"$ref": "#"}, "minItems": 1}),
    schema({"type": "array", "items": {}, "minItems": 10**9}),
    schema({"type": "array", "prefixItems": [{"const": 1}] * 5000}),
    schema({"type": "object", "properties": many(2500)}),
    schema({"type": "object", "properties": many(900), "required": [*many(900)]}),
    schema({"type": "object", "properties": many(40), "required": [f"b{i}" for i in range(2000)]}),
    schema({"type": "object", "minProperties": 10**9}),
    schema({"type": "object", "patternProperties": {"(a*)*b": {"const": 1}}}),
    schema({"type": "object", "additionalProperties": {"$ref": "#"}}),
    schema({"enum": [f"v{place}" for place in range(20_000)]}),
    schema({"enum": [*range(20_000)]}), schema({"enum": []}), schema({"enum": [[{}]] * 500}),
    schema({"allOf": [{"type": "string"}, {"type": "integer"}]}),
    schema({"allOf": [{"minimum": 3}, {"maximum": 2}], "type": "integer"}),
    schema({"anyOf": [{"const": place} for place in range(3000)]}),
    schema({"oneOf": [{"type": "string"}, {"type": "string"}]}), schema({"anyOf": []}),
    schema({"not": {}}), schema({"if": {}, "then": {}}), schema({"type": "apple"}),
    schema({"type": ["string"] * 2000}), schema({"type": 3}), schema({"properties": 3}),
    schema({"const": float("1e300")}), schema({"unknown": 1}), schema({}),
    schema({"x-guidance": {"lenient": True}, "not": {}}), schema({"x-guidance": {"a": 1}}),
    schema({"x-guidance": {"whitespace_pattern": "(((("}}),
    *(schema(nested({"type": "string"}, depth(), lambda one: {"type": "array", "items": one}))
      for _ in range(6)),
    *(schema(nested({"const": 1}, depth() // 6, lambda one: {"anyOf": [one, one]}))
      for _ in range(4)),
    *(schema(nested({"const": 1}, depth() // 6, lambda one: {"allOf": [one, one]}))
      for _ in range(4)),
    schema(nested({"const": 1}, 9, lambda one: {"items": one, "anyOf": [one]})),
    schema(nested({"const": 1}, 9, lambda one: {"items": one, "prefixItems": [one]})),
    *(tool({"type": "object", "properties": many(int(rng.integers(2, 2500)))}) for _ in range(4)),
    *(tool(one) for one in ({"$ref": "#"}, {"const": "\x00"}, {"not": 1}, {"enum": []})),
  ]  # fmt: skip


def expressions(rng) -> list[Case]:
  count = lambda: int(10 ** rng.uniform(1, 9))
  found = [
    r"[^\s\S]", "a{1000000}", "(a|aa)*" * 40, "((a*)*)*b", "(a+)+$", "(", ")", "[", "a**", "a{2,1}",
    r"\p{L}{1000}", r"(?i)[a-z]{5000}", r"(?<=a)b", r"(a)\1", r"(?P<n>a)(?P=n)", r"\b", "^$", "",
    "(" * 5000 + ")" * 5000, "(" * 100_000, "a|" * 50_000, "[a-z]" * 20_000, "(?:" * 2000, "\\",
    "(.{1,1000}){1,1000}", ".*a.{500}", "(.*a.{20}){5}", "(x+x+)+y", "[\\x00-\\x{10FFFF}]{9999}",
    "(?s).{99999}", "\\d{1,99999}\\w{1,99999}", "a{99999999999999999999}", "(?#comment)a",
    "(?x) a b # c", "~(.*)", "(a&b)", "%json {}", "/a/", "start: x", "\\u{110000}", "a" * 262_145,
    "[[:alpha:]]{9}",
  ]  # fmt: skip
  found += [f"(a{{{count()}}}){{{count()}}}" for _ in range(8)]
  found += [f"[ab]*a[ab]{{{int(rng.integers(8, 4000))}}}" for _ in range(8)]
  found += [f"(a{{1,{count()}}}|b{{1,{count()}}})*c" for _ in range(8)]
  return [regex(one) for one in found if one]


def cases(seed: int) -> list[Case]:
  rng = np.random.default_rng(seed)
  return [*numbers(rng), *texts(rng), *structures(rng), *expressions(rng)]


NEIGHBOURS: list[Case] = [
  {}, {"regex": "[0-9]{30}"}, schema({"type": "array", "items": {"enum": [1, 2]}, "minItems": 8}),
  {"seed": 4, "temperature": 0.7},
]  # fmt: skip


def body(fields: Case, most: int = 12) -> bytes:
  messages = [{"role": "user", "content": "Hi"}]
  return json.dumps({"messages": messages, "max_tokens": most, "seed": 3, **fields}).encode()


def ask(client, fields: Case, most: int = 12) -> tuple[int, dict[str, Any], float]:
  start = time.monotonic()
  done = client.post(
    "/v1/chat/completions",
    content=body(fields, most),
    headers={"content-type": "application/json"},
  )
  return done.status_code, done.json(), time.monotonic() - start


def run(hostile: list[Case], workers: int = 1) -> dict[str, Any]:
  """Sends all cases, with neighbours alongside; returns the observations."""
  with serving.running() as (service, url), serving.client(url) as client:
    choices_of = lambda fields: ask(client, {**fields, "logprobs": True}, 30)[1]["choices"]
    expected = [choices_of(fields) for fields in NEIGHBOURS]
    over, found = threading.Event(), []

    def neighbour(place: int) -> int:
      count = 0
      while not over.is_set():
        assert choices_of(NEIGHBOURS[place]) == expected[place]
        count += 1
      return count

    with concurrent.futures.ThreadPoolExecutor(len(NEIGHBOURS)) as neighbours:
      counts = [neighbours.submit(neighbour, place) for place in range(len(NEIGHBOURS))]
      try:
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
          found = [*pool.map(lambda fields: ask(client, fields), hostile)]
      finally:
        over.set()
      num_answered = [one.result() for one in counts]
    assert service.thread.is_alive and client.get("/health").json() == {"status": "ok"}
    assert min(num_answered) > 0
  names = {200: "answered", 400: "refused", 429: "asked to wait"}
  statuses = dict.fromkeys(names.values(), 0)
  for fields, (status, answer, seconds) in zip(hostile, found, strict=True):
    shown = json.dumps(fields)[:200]
    assert status in names, (shown, status, answer)
    statuses[names[status]] += 1
    if status != 200:
      message = answer["error"]["message"]
      assert len(message) <= 320 and "\n" not in message, (shown, message)
    assert seconds < 60, (shown, seconds)
  return dict(statuses=statuses, seconds=sorted(one[2] for one in found), answered=num_answered)


def test_hostile_grammars_harm_nobody(seed, tell_events):
  rng = np.random.default_rng(seed)
  drawn = cases(seed)
  some = [drawn[place] for place in rng.choice(len(drawn), 12, replace=False)]
  deadly = schema({"type": "integer", "minimum": -FULL, "maximum": -FULL})
  tell_events("hostile grammars", run([deadly, *some])["statuses"], ["refused"])


def test_new_grammars_that_wait_delay_nothing_but_new_grammars():
  with serving.running() as (service, url), serving.client(url) as client:
    compiler = service.find("").compiler
    compiler.limits = dataclasses.replace(compiler.limits, trial_seconds=60.0)
    assert ask(client, {"regex": "[0-9]"})[0] == 200
    held = [compiler._trials.get() for _ in range(grammar.NUM_TRIALS)]  # As if they took long.
    with concurrent.futures.ThreadPoolExecutor(40) as pool:  # More than asyncio's threads.
      new = [pool.submit(ask, client, {"regex": f"[0-9]{{{n}}}"}, 1) for n in range(2, 42)]
      deadline = time.monotonic() + 60
      while service._num_new_grammars < len(new) and time.monotonic() < deadline:
        time.sleep(0.01)
      try:
        long = client.post("/tokenize", json={"prompt": "How many? " * 3000}, timeout=30)
        known, _, _ = ask(client, {"regex": "[0-9]"})
        assert (long.status_code, known) == (200, 200)
        assert not any(one.done() for one in new)
      finally:
        for line in held:
          compiler._trials.put(line)
      assert {one.result()[0] for one in new} == {200}


@pytest.mark.thorough
def test_two_hundred_hostile_grammars_harm_nobody(seed, tell_events):
  drawn = cases(seed)
  assert len(drawn) >= 200
  found = run(drawn)
  times = [round(1000 * found["seconds"][-one]) for one in (1, 2, 5, 10, len(drawn) // 2)]
  events = {**found["statuses"], "ms of the slowest": times[0], "ms of the middle": times[-1]}
  tell_events(f"hostile grammars, slowest {times} ms", events, ["refused", "answered"])


@pytest.mark.thorough
def test_hostile_grammars_at_once_harm_nobody(seed):
  rng = np.random.default_rng(seed)
  drawn = cases(seed)
  run([drawn[place] for place in rng.choice(len(drawn), 60, replace=False)], workers=12)
