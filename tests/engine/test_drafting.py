"""Drafts change the number of steps of a completion, and nothing else."""

from __future__ import annotations

import dataclasses

from guessing import Guesser
from hypothesis import given, strategies as st
from made_drafters import Observed
import pytest
from word_engine import SIZES, make_engine, request, run, same, tokens_from

from seerjax.engine import drafting

TOKENS = st.lists(st.integers(0, 2), max_size=6)
ROOM = dataclasses.replace(SIZES, num_pages=41)


def asked(count: int = 4, **sampling) -> list:
  return [
    request(f"r{index}", tokens_from(index, 3 + 5 * index), seed=index, group="g", **sampling)
    for index in range(count)
  ]


def test_a_draft_holds_until_it_differs():
  assert drafting.accepted([5, 6, 7], [5, 6, 7, 8]) == 3
  assert drafting.accepted([5, 6, 7], [5, 9, 7, 8]) == 1
  assert drafting.accepted([5], [4, 4]) == 0
  assert drafting.accepted([], [4]) == 0


def test_the_path_that_holds_furthest_is_said_with_the_bonus():
  paths = [(1, 2), (1, 3, 4), (1, 3)]
  sampled = [(1, 3, 9), (1, 3, 5, 9), (1, 3, 5)]
  assert drafting.verify(paths, sampled) == drafting.Verified(1, 2, (1, 3, 5))
  assert drafting.verify([()], [(7,)]) == drafting.Verified(0, 0, (7,))


@given(st.lists(TOKENS, min_size=1, max_size=4), st.lists(st.integers(0, 2), min_size=7))
def test_what_is_said_does_not_depend_on_the_draft(paths, text):
  # The target continues `text` while its input follows `text`; otherwise it samples 9.
  sampled = [
    [text[k] if path[:k] == text[:k] else 9 for k in range(len(path) + 1)] for path in paths
  ]
  verified = drafting.verify(paths, sampled)
  assert list(verified.tokens) == text[: verified.num_accepted + 1]
  counts = [drafting.accepted(*pair) for pair in zip(paths, sampled)]
  assert verified.num_accepted == max(counts) and verified.path == counts.index(max(counts))


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.0}, {"top_k": 5, "top_p": 0.9}])
def test_no_guess_changes_what_is_said(sampling, seed):
  requests = asked(max_tokens=30, **sampling)
  plain = make_engine(ROOM).generate(requests)
  answers = {completion.request_id: completion.tokens for completion in plain}
  totals = dict.fromkeys(("drafted_tokens", "accepted_tokens", "side_paths"), 0)
  for attempt in range(4):
    guesser = Guesser(answers, seed + attempt)
    engine = make_engine(ROOM, drafter=guesser)
    free = engine.chunks.free_pages(0)
    for one, other in zip(engine.generate(requests), plain, strict=True):
      assert same(one, other) and one.text == other.text
      assert guesser.finished[one.request_id] == list(one.tokens)
    assert engine.chunks.free_pages(0) == free
    assert engine.counters.sampled_tokens == sum(len(tokens) for tokens in answers.values())
    for name in totals:
      totals[name] += getattr(engine.counters, name)
  assert all(totals.values()), totals


def test_right_guesses_save_steps():
  requests = asked(max_tokens=30)
  plain = make_engine(ROOM)
  answers = {completion.request_id: completion.tokens for completion in plain.generate(requests)}

  class Knows(Observed):
    def draft(self, queries):
      return [[answers[q.request_id][len(q.tokens) - q.num_prompt :][:3]] for q in queries]

  engine = make_engine(ROOM, drafter=Knows())
  engine.generate(requests)
  assert engine.counters.steps < plain.counters.steps / 2
  assert engine.counters.accepted_tokens == engine.counters.drafted_tokens > 0


def test_a_side_path_wins_and_its_pages_become_the_requests():
  one = request(max_tokens=30)
  [plain] = make_engine(ROOM).generate([one])

  class Second(Observed):
    """The first path is wrong at once, the second right over a page's end."""

    def draft(self, queries):
      rest = [plain.tokens[len(q.tokens) - q.num_prompt :] for q in queries]
      return [[((r[0] + 1) % 500, 1, 1), r[:2], r[:9]] for r in rest]

  engine = make_engine(ROOM, drafter=Second())
  free = engine.chunks.free_pages(0)
  [found] = engine.generate([one])
  assert same(found, plain) and engine.chunks.free_pages(0) == free
  # 13 rows: the last token, the first path's 3 and the second's 9; the prompt's first 2, once.
  assert engine.counters.side_paths == engine.counters.steps == 3
  assert engine.counters.rows == 2 + 3 * 13 and engine.counters.drafted_tokens == 3 * 12


def test_drafts_end_where_the_answer_may():
  """A draft never extends past the limit, where no page exists for its keys."""
  one = request(max_tokens=5)
  [plain] = make_engine().generate([one])
  seen = []

  class Long(Observed):
    def draft(self, queries):
      seen.extend(query.max_draft for query in queries)
      return [[(*plain.tokens[len(q.tokens) - q.num_prompt :], 3, 3, 3)] for q in queries]

  [found] = make_engine(drafter=Long()).generate([one])
  # The first token comes with the prompt; drafts may cover all tokens but the last.
  assert same(found, plain) and seen == [4]


def test_a_stop_within_a_draft_ends_the_answer():
  [free] = make_engine(ROOM).generate([request(max_tokens=30)])
  stop = free.tokens[7]
  one = request(max_tokens=30, stop_token_ids=(stop,))
  [plain] = make_engine(ROOM).generate([one])

  class Beyond(Observed):
    def draft(self, queries):
      return [[free.tokens[len(q.tokens) - q.num_prompt :][:9]] for q in queries]

  engine = make_engine(ROOM, drafter=Beyond())
  updates = []
  [found] = engine.generate([one], on_step=updates.extend)
  assert same(found, plain) and found.finish_reason == "stop"
  assert sum((update.tokens for update in updates), ()) == plain.tokens
  assert "".join(update.text for update in updates) == plain.text


def test_few_pages_leave_the_first_path_only():
  """Eight pages: a request that may need all of them has none left for a second path."""
  one = request(max_tokens=61)
  [plain] = make_engine().generate([one])
  whole = dataclasses.replace(SIZES, reserved_tokens=0)  # It takes all of them at once.
  engine = make_engine(whole, drafter=Guesser({"a": plain.tokens}, 0, right=1.0))
  [found] = engine.generate([one])
  assert same(found, plain)
  assert engine.counters.side_paths == 0 < engine.counters.accepted_tokens
  assert run(engine) == {}
