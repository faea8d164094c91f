"""An error in a step ends the request at fault; the engine and the other requests continue."""

from __future__ import annotations

import dataclasses

from made_drafters import Observed
import pytest
from word_engine import (
  CONFIG,
  NUMERICS,
  SIZES,
  TOKENIZER,
  make_engine,
  params,
  request,
  run,
  runner,
  same,
  tokenizer_fields,
)

from seerjax.engine import engine as engine_lib, runner as runner_lib
from seerjax.kv import pool as kv_pool_lib
from seerjax.kv.values import Identity
from seerjax.models import tokenizer as tokenizer_lib
from seerjax.models.loading import Model

REQUESTS = [request(name, (5, 6, 7 + seed), seed=seed) for seed, name in enumerate("abc")]


@pytest.fixture(scope="module")
def answers() -> dict:
  """Returns the completions without faults."""
  return run_all(make_engine())


def run_all(engine: engine_lib.Engine) -> dict:
  for one in REQUESTS:
    engine.add_request(one)
  return run(engine)


class BrokenStream(tokenizer_lib.TextStream):
  """A stream that cannot decode the fifth token of completions that start with a given token."""

  breaks_at: int = -1

  def push(self, token_id: int) -> str:
    piece = super().push(token_id)
    if len(self._ids) == 5 and self._ids[0] == self.breaks_at:
      raise RuntimeError("no such word")
    return piece


@dataclasses.dataclass(frozen=True, kw_only=True)
class BrokenTokenizer(tokenizer_lib.Tokenizer):
  """Raises in completions that start with a given token."""

  breaks_at: int

  def stream(self, skip_special_tokens: bool = True) -> tokenizer_lib.TextStream:
    stream = BrokenStream(self.backend, skip_special_tokens)
    stream.breaks_at = self.breaks_at
    return stream


@pytest.mark.thorough
def test_a_tokenizer_that_breaks_ends_the_request_whose_text_it_was(answers, caplog):
  first = answers["b"].tokens[0]
  assert all(answers[name].tokens[0] != first for name in "ac")
  engine = make_engine(tokenizer=BrokenTokenizer(**tokenizer_fields(), breaks_at=first))
  updates = []
  for one in REQUESTS:
    engine.add_request(one)
  while engine.num_unfinished:
    updates += engine.step()
  found = {completion.request_id: completion for completion in engine.poll()}
  assert same(found["a"], answers["a"]) and same(found["c"], answers["c"])
  broken = found["b"]
  assert broken.finish_reason == "error" and broken.tokens == answers["b"].tokens[:4]
  assert "request 'b': got RuntimeError (no such word) in a step after 4 tokens" in broken.error
  assert broken.error in caplog.text
  last = [update for update in updates if update.request_id == "b"][-1]
  assert last == engine_lib.StepOutput("b", (), "", "error", broken.error)
  streamed = [token for update in updates if update.request_id == "b" for token in update.tokens]
  assert tuple(streamed) == broken.tokens
  assert engine.chunks.free_pages(0) == SIZES.num_pages - 1 and engine.counters.errors == 1


class Nonsense(Observed):
  """Returns its given value, or raises it if it is an error."""

  def __init__(self, answer, *, fails_in: str = "draft"):
    super().__init__()
    self.answer, self.fails_in = answer, fails_in

  def draft(self, queries):
    if self.fails_in != "draft":
      return [[(1, 2)] for _ in queries]
    return self._said(queries)

  def observe(self, *arguments):
    if self.fails_in == "observe":
      self._said(None)

  def finish(self, *arguments):
    if self.fails_in == "finish":
      self._said(None)

  def _said(self, queries):
    if isinstance(self.answer, Exception):
      raise self.answer
    return self.answer(queries)


@pytest.mark.parametrize(
  "drafter",
  [
    Nonsense(KeyError("tree")),
    Nonsense(lambda queries: None),
    Nonsense(lambda queries: 7),
    Nonsense(lambda queries: [[(1,)]] * (len(queries) + 1)),
    Nonsense(lambda queries: [[("a",)] for _ in queries]),
    Nonsense(lambda queries: [[(1.5,)] for _ in queries]),
    Nonsense(lambda queries: [5 for _ in queries]),
    Nonsense(KeyError("tree"), fails_in="observe"),
    Nonsense(KeyError("tree"), fails_in="finish"),
  ],
)
def test_a_drafter_that_errs_is_not_asked_again_and_changes_no_bit(
  drafter, answers, caplog, unchecked_annotations
):
  engine = make_engine(drafter=drafter)
  found = run_all(engine)
  assert all(same(found[name], answers[name]) for name in answers)
  assert engine.drafter is None and engine.counters.errors == 0
  assert "Engine.drafter: got " in caplog.text and "the drafter is disabled" in caplog.text
  assert engine.chunks.free_pages(0) == SIZES.num_pages - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failing(runner_lib.Runner):
  """The shared runner, with a step that raises once after it has taken the pages."""

  inner: runner_lib.Runner
  errors: dict

  def step(self, params, pages, inputs, key):
    out = self.inner.step(params, pages, inputs, key)
    self.errors["count"] = self.errors.get("count", 0) + 1
    if self.errors["count"] in self.errors["at"]:
      raise self.errors["error"]
    return out


def failing_engine(error: BaseException, *at: int) -> engine_lib.Engine:
  inner = runner()
  mesh = inner.mesh
  errors = {"error": error, "at": at}
  engine = make_engine()
  return engine_lib.Engine(
    Model(CONFIG, params(), NUMERICS, TOKENIZER),
    config=SIZES,
    key=engine.key,
    runner=Failing(inner.decoder, mesh, 2, inner=inner, errors=errors),
  )


@pytest.mark.parametrize("error", [RuntimeError("the device is gone"), KeyboardInterrupt()])
def test_after_a_step_that_broke_off_all_go_on_to_the_same_bits(error, answers):
  engine = failing_engine(error, 2, 7)
  for one in REQUESTS:
    engine.add_request(one)
  updates, num_broken = [], 0
  while engine.num_unfinished:
    try:
      updates += engine.step()
    except (RuntimeError, KeyboardInterrupt):
      num_broken += 1
  found = {completion.request_id: completion for completion in engine.poll()}
  assert num_broken == engine.counters.new_starts == 2
  assert all(same(found[name], answers[name]) for name in answers)
  for name, answer in answers.items():
    streamed = [token for update in updates if update.request_id == name for token in update.tokens]
    assert tuple(streamed) == answer.tokens
    assert "".join(u.text for u in updates if u.request_id == name) == answer.text
  assert engine.chunks.free_pages(0) == SIZES.num_pages - 1


def test_generate_that_is_stopped_leaves_nothing_behind(answers):
  engine = make_engine()

  def stop(updates):
    raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    engine.generate(REQUESTS, on_step=stop)
  assert engine.num_unfinished == 0 and not engine.poll()
  found = engine.generate(REQUESTS)
  assert all(same(one, answers[one.request_id]) for one in found)


def test_a_request_that_can_become_no_rows_is_ended_and_the_others_go_on(answers):
  engine = make_engine()
  for one in REQUESTS:
    engine.add_request(one)
  engine.step()
  # No entry point accepts this; if a step meets it all the same, one request ends.
  object.__setattr__(REQUESTS[1], "seed", "seven")
  try:
    found = run(engine)
  finally:
    object.__setattr__(REQUESTS[1], "seed", 1)
  assert found["b"].finish_reason == "error" and "got ValueError (" in found["b"].error
  assert same(found["a"], answers["a"]) and same(found["c"], answers["c"])
  assert engine.chunks.free_pages(0) == SIZES.num_pages - 1


class BrokenStore:
  """A last tier that raises in every call."""

  def put(self, key: str, data: bytes) -> bool:
    raise OSError("the disk is gone")

  def has(self, key: str) -> bool:
    raise OSError("the disk is gone")

  def get(self, key: str) -> bytes | None:
    raise OSError("the disk is gone")

  def remove(self, key: str) -> None:
    raise OSError("the disk is gone")


def test_a_store_that_raises_is_one_that_is_full(caplog):
  pool = kv_pool_lib.KVPool(kv_pool_lib.KVPoolConfig(host_pages=1), BrokenStore())
  pool.identify(lambda owner: Identity("f", "w", 0))
  pool.put("a", 1, [], [1, 2])
  assert not pool.claim("b", [1, 2])
  assert not pool.make_room(1) and "a" in pool
  assert "got OSError (the disk is gone)" in caplog.text and pool.store.failures == 2
