"""Admission by expected length changes no bit, and starves no request.

Hypothesis draws requests of mixed lengths, without chunks, on fewer pages than their full
completions need: from the needs of the longest request to a few pages more. The engine reserves a
drawn number of tokens ahead (`EngineConfig.reserved_tokens`); when memory runs short, the youngest
requests give up their pages, which are spilled or computed again. Every completion is compared, bit
by bit, with the same request alone in a plain engine.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

from drawn_requests import SAMPLING, alone, make_engine, tokens
from guessing import Guesser
import hypothesis
from hypothesis import strategies as st
import pytest
import tiny_model

from seerjax.engine import engine as engine_lib, sizes
from seerjax.engine.engine import EngineConfig
from seerjax.kv.pool import KVPool, KVPoolConfig
from seerjax.types import Request, SamplingParams

MAX_CONTEXT = 64
MAX_STEPS = 3000
PAGE_SIZE = 4
NUMERICS = {
  "f32": tiny_model.NUMERICS,
  "native f32": tiny_model.NATIVE,
  "native bf16": tiny_model.NATIVE_BFLOAT16,
}
EVENTS = (
  "requests",
  "displaced",
  "computed again",
  "spilled pages",
  "restored pages",
  "steps with waiting",
  "requests in chunks",
  "requests in background",
  "drafted tokens",
  "visits of several steps",
  "more at once than whole answers",
)


class Ask(NamedTuple):
  """The fields of a request, and how it is submitted."""

  prompt: tuple[int, ...]
  sampling: dict[str, Any]
  max_tokens: int
  seed: int
  wait: int
  chunk_tokens: int | None
  is_background: bool


class Plan(NamedTuple):
  """One schedule; `more_pages` is the number of pages beyond those of the longest request."""

  asks: tuple[Ask, ...]
  reserved_tokens: int
  more_pages: int
  host_pages: int
  decode_steps_per_call: int
  guesses: int | None


@st.composite
def plans(draw) -> Plan:
  start = draw(tokens(0, 12))
  # Mostly plain requests: features that limit a visit to one step are drawn for few schedules.
  plain = st.fixed_dictionaries(dict(temperature=st.sampled_from([1.0, 0.0])))
  sampling = SAMPLING if draw(st.booleans()) else plain
  is_mixed = draw(st.booleans())
  asks = []
  for _ in range(draw(st.integers(4, 10))):
    prompt, fields = start + draw(tokens(1, 10)), draw(sampling)
    asks.append(
      Ask(
        prompt=prompt,
        sampling=fields,
        # A grammar of 20 places permits no more tokens.
        max_tokens=draw(
          st.integers(1, 20 if fields.get("allowed_token_ranges") else MAX_CONTEXT - len(prompt))
        ),
        seed=draw(st.integers(0, 2**32 - 1)),
        wait=draw(st.integers(0, 3)),
        chunk_tokens=draw(st.none() | st.integers(1, 12)) if is_mixed else None,
        is_background=is_mixed and draw(st.sampled_from([False, False, True])),
      )
    )
  return Plan(
    asks=tuple(asks),
    reserved_tokens=draw(st.sampled_from([1, 1, 4, 16, 64, 0])),
    more_pages=draw(st.integers(0, 12)),
    host_pages=draw(st.sampled_from([4096, 4096, 0])),
    decode_steps_per_call=draw(st.sampled_from([1, 3, 8])),
    guesses=draw(st.none() | st.none() | st.integers(0, 2**32 - 1)),
  )


def long_answers(host_pages: int) -> Plan:
  """Returns a schedule that always runs: long completions that all start at once."""
  asks = tuple(Ask((7, place), {}, 40, place, 0, None, False) for place in range(8))
  return Plan(asks, 4, 4, host_pages, 3, None)


def run_plan(
  plan: Plan,
  numerics,
  mesh: tuple[int, int],
  events: collections.Counter[str],
  kind: type[engine_lib.Engine] = engine_lib.Engine,
) -> None:
  """Runs one schedule and compares every completion with its request's alone."""
  requests = {
    f"r{place}": Request(
      request_id=f"r{place}",
      prompt=ask.prompt,
      sampling=SamplingParams(**{**ask.sampling, "max_tokens": ask.max_tokens}),
      seed=ask.seed,
    )
    for place, ask in enumerate(plan.asks)
  }
  expected = {
    name: alone(numerics, one.prompt, one.sampling, one.seed) for name, one in requests.items()
  }
  whole = {
    name: sizes.pages_for(len(one.prompt) + one.sampling.max_tokens, PAGE_SIZE)
    for name, one in requests.items()
  }
  guesser = None
  if plan.guesses is not None:
    answers = {name: one.tokens for name, one in expected.items()}
    guesser = Guesser(answers, plan.guesses, silent=0.4)
  config = EngineConfig(
    page_size=PAGE_SIZE,
    num_pages=1 + max(whole.values()) + plan.more_pages,
    max_num_seqs=6,
    max_model_len=MAX_CONTEXT,
    batch_size_buckets=(6, 24),
    decode_steps_per_call=plan.decode_steps_per_call,
    reserved_tokens=plan.reserved_tokens,
  )
  pool = KVPool(KVPoolConfig(host_pages=plan.host_pages))
  engine = make_engine(config, numerics, mesh, kind, drafter=guesser, kv_pool=pool)
  due, todo = 0, []
  for name, ask in zip(requests, plan.asks, strict=True):
    due += ask.wait
    todo.append((due, name, ask))
  streamed: dict[str, list[int]] = {name: [] for name in requests}
  chunks = {name: ask.chunk_tokens for name, ask in zip(requests, plan.asks, strict=True)}
  for step in range(MAX_STEPS):
    while todo and todo[0][0] <= step:
      _, name, ask = todo.pop(0)
      engine.add_request(
        requests[name], chunk_tokens=ask.chunk_tokens, is_background=ask.is_background
      )
      events["requests"] += 1
      events["requests in chunks"] += ask.chunk_tokens is not None
      events["requests in background"] += ask.is_background
    if not todo and not engine.num_unfinished:
      break
    before = engine.counters.steps
    for update in engine.step():
      streamed[update.request_id] += update.tokens
    events["visits of several steps"] += engine.counters.steps - before > 1
    for running in engine._requests.running:
      at_once = sum(whole[one.request.request_id] for one in running)
      events["more at once than whole answers"] += at_once > config.num_pages - 1
    for completion in engine.poll():
      name = completion.request_id
      assert tiny_model.same(completion, expected[name]), (
        f"request {requests[name]}: got {completion}, expected {expected[name]}"
      )
      assert completion.text == expected[name].text
      assert tuple(streamed[name]) == completion.tokens
    for name in engine.chunks.poll_paused():
      engine.chunks.resume(name, chunk_tokens=chunks[name])
    if engine.counters.steps == before and engine.num_unfinished:
      # Paused requests may hold the pages that all need; a scheduler preempts one of them.
      held = [name for name in requests if name in engine._requests.live]
      held = [name for name in held if engine.chunks.held_pages(name) and chunks[name] is not None]
      if held:
        engine.chunks.preempt(held[-1])
  assert not todo and not engine.num_unfinished, f"{engine.num_unfinished} requests starve"
  usable = config.num_pages - 1
  assert [engine.chunks.free_pages(place) for place in range(engine.data_parallel_size)] == (
    [usable] * engine.data_parallel_size
  )
  if not plan.reserved_tokens:
    assert not engine.counters.displaced
  counters = dataclasses.asdict(engine.counters)
  for event, field in (
    ("displaced", "displaced"),
    ("computed again", "preemptions"),
    ("spilled pages", "spilled_pages"),
    ("restored pages", "restored_pages"),
    ("steps with waiting", "waits"),
    ("drafted tokens", "drafted_tokens"),
  ):
    events[event] += counters[field]


def run_plans(
  numerics,
  mesh: tuple[int, int],
  *,
  seed: int,
  max_examples: int,
  events: collections.Counter[str],
) -> None:
  @hypothesis.seed(seed)
  @hypothesis.settings(
    max_examples=max_examples,
    # A failing schedule is printed unshrunk, because shrinking takes minutes.
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
  )
  @hypothesis.example(plan=long_answers(4096))
  @hypothesis.example(plan=long_answers(0))
  @hypothesis.given(plan=plans())
  def check(plan: Plan) -> None:
    run_plan(plan, numerics, mesh, events)
    events["schedules"] += 1

  check()


@pytest.mark.parametrize(
  ("name", "mesh", "max_examples"),
  [
    ("native f32", (1, 1), 5),
    pytest.param("native bf16", (2, 1), 30, marks=pytest.mark.thorough),
    pytest.param("native f32", (2, 2), 30, marks=pytest.mark.thorough),
    pytest.param("f32", (1, 1), 10, marks=pytest.mark.thorough),
  ],
)
def test_requests_on_few_pages_say_what_they_say_alone(name, mesh, max_examples, seed, tell_events):
  events: collections.Counter[str] = collections.Counter()
  run_plans(NUMERICS[name], mesh, seed=seed, max_examples=max_examples, events=events)
  always = ("requests", "displaced", "computed again", "restored pages", "steps with waiting")
  tell_events(f"{name}, {mesh}", events, EVENTS if max_examples >= 30 else always)


@pytest.mark.long
@pytest.mark.parametrize("block", range(8))
def test_no_admission_of_five_hundred_changes_a_bit(block, seed, tell_events):
  name, mesh = list(NUMERICS)[block % 3], ((1, 1), (2, 1), (1, 2))[block // 3]
  events: collections.Counter[str] = collections.Counter()
  run_plans(NUMERICS[name], mesh, seed=100 * seed + block, max_examples=63, events=events)
  tell_events(f"block {block}, {name}, {mesh}", events, EVENTS)


class KeepsItsPlace(engine_lib.Engine):
  """Twin: preempted requests resume as if their new pages already contained their keys."""

  def step(self):
    for waiting in self._requests.waiting:
      for sequence in waiting:
        if not sequence.pages and len(sequence.tokens) > sequence.num_prompt:
          sequence.num_written = 0 if sequence.request.request_id in self.memory.kv_pool else 4
    return super().step()


@pytest.mark.thorough
def test_an_engine_that_forgets_to_compute_again_is_found_out():
  events: collections.Counter[str] = collections.Counter()
  with pytest.raises(AssertionError, match="got Completion|starve"):
    run_plan(long_answers(0), NUMERICS["native f32"], (1, 1), events, KeepsItsPlace)
