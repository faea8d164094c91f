"""The prefix index by hand: which pages hold the start of a sequence."""

from __future__ import annotations

from seerjax.kv.prefix_index import MAX_PARTIAL_CANDIDATES, PrefixHit, PrefixIndex


def test_an_empty_index_finds_nothing():
  assert PrefixIndex(2).find([1, 2, 3]) == PrefixHit((), None, 0)
  assert PrefixIndex(2).find([]) == PrefixHit((), None, 0)


def test_full_pages_are_shared_and_the_partial_one_is_copied():
  index = PrefixIndex(4)
  pages = [1, 2, 3]
  index.remember([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], pages)
  # 4 + 4 in full pages, then 9 of (9, 10).
  assert index.find([1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 0]) == PrefixHit((1, 2), 3, 9)
  assert index.find([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]) == PrefixHit((1, 2), 3, 10)
  assert index.find([1, 2, 3, 4, 5, 6, 7, 8]) == PrefixHit((1, 2), None, 8)
  # The start of a full page is also copied.
  assert index.find([1, 2, 3, 4, 5, 6]) == PrefixHit((1,), 2, 6)
  assert index.find([1, 2, 0]) == PrefixHit((), 1, 2)
  assert index.find([2, 2]) == PrefixHit((), None, 0)


def test_equal_tokens_after_another_start_are_another_page():
  # A page's keys depend on all preceding tokens, so its digest continues the previous page's.
  index = PrefixIndex(2)
  index.remember([1, 2, 3, 4], [1, 2])
  assert index.find([9, 9, 3, 4]) == PrefixHit((), None, 0)
  assert index.find([3, 4]) == PrefixHit((), None, 0)
  index.remember([9, 9, 3, 4], [3, 4])
  assert index.find([9, 9, 3, 4]) == PrefixHit((3, 4), None, 4)
  assert index.find([1, 2, 3, 4]) == PrefixHit((1, 2), None, 4)


def test_the_first_of_two_pages_with_equal_tokens_is_found():
  index = PrefixIndex(2)
  index.remember([1, 2], [1])
  index.remember([1, 2], [2])
  assert index.find([1, 2, 3]).pages == (1,)
  index.forget(1)
  assert not index.knows(1) and index.knows(2)
  # The other page still serves, as a copy of all its positions.
  assert index.find([1, 2, 3]) == PrefixHit((), 2, 2)


def test_a_page_that_grows_is_found_by_all_its_tokens():
  index = PrefixIndex(4)
  pages = [1]
  index.remember([1], pages)
  assert index.find([1, 2, 3]) == PrefixHit((), 1, 1)
  index.remember([1, 2, 3, 4], pages)
  assert index.find([1, 2, 3]) == PrefixHit((), 1, 3)
  index.remember([1, 2], pages)  # Registering a shorter prefix removes nothing.
  assert index.find([1, 2, 3, 4]) == PrefixHit((1,), None, 4)


def test_the_longest_of_many_candidates_is_copied_and_only_the_latest_are_looked_at():
  count = MAX_PARTIAL_CANDIDATES
  index = PrefixIndex(4)
  index.remember([7, 8, 9], [1])
  for token in range(count - 1):
    index.remember([7, 8, 10 + token], [2 + token])
  assert index.find([7, 8, 9, 9]) == PrefixHit((), 1, 3)
  index.remember([7, 8, 30], [count + 1])
  assert index.find([7, 8, 9, 9]).num_tokens == 2
