"""The page pool's reference counts and contents, by hand and against a model."""

from __future__ import annotations

import subprocess
import sys

import hypothesis
from hypothesis import stateful, strategies as st
import pytest

from seerjax.kv.pages import PagePool
from seerjax.kv.prefix_index import PrefixHit


def test_pages_are_taken_in_order_and_page_zero_stays():
  pool = PagePool(5, 4)
  assert pool.num_available == 4
  assert pool.take(3) == [1, 2, 3]
  assert pool.take(1) == [4]
  assert pool.num_available == 0 and pool.take(0) == []


def test_released_pages_without_known_tokens_are_free_again():
  pool = PagePool(3, 4)
  assert pool.take(2) == [1, 2]
  pool.release(2)
  pool.release(1)
  assert pool.take(2) == [2, 1]


def test_the_page_unused_longest_goes_first_and_a_hold_renews():
  pool = PagePool(4, 2)
  for tokens in ([1, 1], [2, 2], [3, 3]):
    pool.remember(tokens, pool.take(1))
  for page in (2, 1, 3):
    pool.release(page)
  assert pool.num_available == 3
  pool.hold(2)
  pool.release(2)  # Order of use is now 1, 3, 2.
  assert pool.take(1) == [1]
  assert pool.find([1, 1]).pages == () and pool.find([3, 3]).pages == (3,)
  assert pool.take(2) == [3, 2]
  assert pool.find([2, 2]) == PrefixHit((), None, 0)


def test_a_page_of_two_holders_is_available_after_both_let_go():
  pool = PagePool(3, 2)
  pool.remember([1, 1], pool.take(1))
  pool.hold(1)
  pool.release(1)
  assert pool.num_available == 1
  pool.release(1)
  assert pool.num_available == 2


def test_forget_all_finds_nothing_and_leaves_pages_with_their_holders():
  pool = PagePool(5, 2)
  pool.remember([1, 1, 2, 2, 3], pool.take(3))
  pool.release(1)
  pool.forget_all()
  assert pool.find([1, 1, 2, 2, 3]) == PrefixHit((), None, 0)
  assert pool.num_available == 2
  pool.release(2)
  pool.release(3)
  assert sorted(pool.take(4)) == [1, 2, 3, 4]


def test_a_pool_of_one_page_is_refused():
  with pytest.raises(
    ValueError, match=r"PagePool.num_pages: got 1, expected at least 2 .* EngineConfig.num_pages"
  ):
    PagePool(1, 4)


def test_taking_more_than_there_is_is_refused():
  pool = PagePool(3, 4)
  pool.take(1)
  with pytest.raises(ValueError, match=r"take: got a request for 2 pages, expected at most 1;"):
    pool.take(2)
  assert pool.take(1) == [2]


def test_releasing_what_nobody_holds_fails():
  with pytest.raises(AssertionError, match="page 2 has no holder"):
    PagePool(3, 4).release(2)


SIZE = 2


class PoolMachine(stateful.RuleBasedStateMachine):
  """Sequences start, write, register prefixes and end, as in the engine.

  The model knows each page's true content: `content[page]` is all tokens of the sequence from its
  start up to the last one written in the page.
  """

  def __init__(self):
    super().__init__()
    self.pool = PagePool(7, SIZE)
    self.live: list[tuple[list[int], list[int]]] = []  # (tokens, pages)
    self.content: dict[int, tuple[int, ...]] = {}

  @stateful.rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9))
  def start(self, tokens):
    hit = self.pool.find(tokens[:-1])
    assert hit.num_tokens <= len(tokens) - 1
    full = len(hit.pages) * SIZE
    for index, page in enumerate(hit.pages):
      assert self.content[page][: (index + 1) * SIZE] == tuple(tokens[: (index + 1) * SIZE])
    if hit.copy_from is None:
      assert hit.num_tokens == full
    else:
      assert full < hit.num_tokens <= full + SIZE
      assert self.content[hit.copy_from][: hit.num_tokens] == tuple(tokens[: hit.num_tokens])
    held = [*hit.pages, *([] if hit.copy_from is None else [hit.copy_from])]
    for page in held:
      self.pool.hold(page)
    needed = -(-len(tokens) // SIZE) - len(hit.pages)
    if needed > self.pool.num_available:
      for page in held:
        self.pool.release(page)
      return
    fresh = self.pool.take(needed)
    assert not set(fresh) & set(held)
    if hit.copy_from is not None:
      self.pool.release(hit.copy_from)
    pages = [*hit.pages, *fresh]
    for index in range(len(hit.pages), len(pages)):
      self.content[pages[index]] = tuple(tokens[: (index + 1) * SIZE])
    self.live.append((tokens, pages))

  @stateful.precondition(lambda self: self.live)
  @stateful.rule(data=st.data())
  def remember(self, data):
    tokens, pages = data.draw(st.sampled_from(self.live))
    count = data.draw(st.integers(0, len(tokens)))
    self.pool.remember(tokens[:count], pages)

  @stateful.precondition(lambda self: self.live)
  @stateful.rule(data=st.data(), is_finished=st.booleans())
  def leave(self, data, is_finished):
    index = data.draw(st.integers(0, len(self.live) - 1))
    tokens, pages = self.live.pop(index)
    if is_finished:
      self.pool.remember(tokens, pages)
      # Whatever was just remembered is found whole.
      assert self.pool.find(tokens).num_tokens >= len(tokens) // SIZE * SIZE
    for page in pages:
      self.pool.release(page)

  @stateful.precondition(lambda self: not self.live)
  @stateful.rule()
  def forget_all(self):
    self.pool.forget_all()
    self.content.clear()
    assert len(self.pool._free) == 6

  @stateful.invariant()
  def pages_are_free_or_idle_or_held(self):
    free, idle = list(self.pool._free), list(self.pool._idle)
    held = [page for _, pages in self.live for page in pages]
    assert sorted([*free, *idle, *set(held)]) == [1, 2, 3, 4, 5, 6]
    for page in range(1, 7):
      assert self.pool._holders[page] == held.count(page)
    assert self.pool.num_available == len(free) + len(idle)
    # A free page cannot be found.
    found = set(self.pool._index._page_of.values())
    found |= {page for followers in self.pool._index._followers.values() for page in followers}
    assert not found & set(free)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = hypothesis.settings(max_examples=60, stateful_step_count=40)


def test_pages_need_no_jax():
  program = "import seerjax.kv.pages, sys; sys.exit('jax' in sys.modules)"
  subprocess.run([sys.executable, "-c", program], check=True)
