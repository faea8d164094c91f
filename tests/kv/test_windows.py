"""Pages of layers with windows: which are kept or given back, and which prefixes they serve.

Windows of 3 positions, splits of 4 and pages of 2, unless a test names others.
"""

from __future__ import annotations

import pytest

from seerjax.kv.holding import Holding
from seerjax.kv.owner import BASE
from seerjax.kv.pages import PagePool
from seerjax.kv.windows import PageKind, Windows


def made(*kinds: tuple[int | None, int], page_size: int = 2, split: int = 4) -> Windows:
  """Windows of one instance with kinds (window, pages)."""
  found = tuple(PageKind(window, count) for window, count in kinds)
  return Windows(found, page_size=page_size, split=split, table_width=8, num_instances=1)


def holding(pool: PagePool, tokens: range, num_pages: int) -> Holding:
  sequence = Holding(name="a", owner=BASE, tokens=list(tokens), instance=0)
  sequence.hold(pool.take(num_pages), 8, 2)
  return sequence


def test_pages_are_kept_from_the_split_of_the_window_s_first_position_on():
  windows = made((None, 9), (3, 9))
  # The next row is n: it sees positions n - 2 to n, and its window begins in split (n - 2) // 4.
  assert [windows.first(1, n) for n in range(14)] == [0, 0, 0, 0, 0, 0, 2, 2, 2, 2, 4, 4, 4, 4]
  assert {windows.first(0, n) for n in range(14)} == {0}
  assert [made((1, 9), split=2).first(0, n) for n in range(5)] == [0, 0, 1, 1, 2]


def test_pages_that_every_later_row_has_passed_go_back_to_their_pool():
  windows, pool = made((None, 9), (3, 9)), PagePool(9, 2)
  sequence = holding(pool, range(9), 5)
  assert windows.fill(sequence, 1, 9)
  (window,), (further,) = sequence.windows, windows.pools[0]
  assert window.row.tolist() == [1, 2, 3, 4, 5, 0, 0, 0] and sequence.num_in_windows == 10
  sequence.num_written = 5
  assert windows.release_passed(sequence, pool) == 0
  sequence.num_written = 6
  assert windows.release_passed(sequence, pool) == 2 == windows.first(1, 6)
  assert (window.first, window.pages) == (2, [3, 4, 5])
  assert window.row.tolist() == [0, 0, 3, 4, 5, 0, 0, 0]
  assert further.num_available == 5 and pool.num_available == 3
  assert windows.written(sequence, 1) == [3] and windows.written(sequence, 0) == [1, 2, 3]
  windows.release(sequence)
  assert further.num_available == 8 and sequence.windows == []


def test_where_all_layers_have_windows_the_pages_themselves_go_back():
  windows, pool = made((3, 9)), PagePool(9, 2)
  sequence = holding(pool, range(9), 4)
  sequence.num_written = 7
  assert windows.release_passed(sequence, pool) == 2 and pool.num_available == 6
  assert sequence.pages == [0, 0, 3, 4] and sequence.page_row.tolist()[:4] == [0, 0, 3, 4]
  assert windows.release_passed(sequence, pool) == 0  # Not a second time.
  assert windows.written(sequence, 0) == [3, 4]


def test_too_few_pages_are_not_taken_at_all_and_enough_as_many_as_there_are():
  windows, pool = made((None, 9), (3, 4)), PagePool(9, 2)
  first, other = holding(pool, range(9), 4), holding(pool, range(9), 4)
  assert windows.fill(first, 1, 4) and first.num_in_windows == 4
  assert not windows.fill(other, 3, 4) and other.num_in_windows == 0
  assert windows.fill(other, 2, 8) and other.num_in_windows == 2
  assert windows.fill(first, 3, 9) and not windows.fill(first, 5, 9)


def test_a_prefix_is_found_up_to_where_every_kind_has_its_window():
  windows, pool = made((None, 9), (3, 9)), PagePool(9, 2)
  sequence, tokens = holding(pool, range(9), 5), list(range(9))
  (further,) = windows.pools[0]
  assert windows.find(pool, 0, tokens, BASE).num_tokens == 0
  windows.fill(sequence, 1, 9)
  pool.remember(tokens, sequence.pages)
  windows.remember(sequence, tokens, [window.row for window in sequence.windows])
  hit = windows.find(pool, 0, tokens, BASE)
  assert (hit.pages, hit.copy_from, hit.num_tokens) == ((1, 2, 3, 4), None, 8)
  sequence.num_written = 8
  windows.release_passed(sequence, pool)
  windows.hold_cached(sequence)
  assert sequence.windows[0].row.tolist() == [0, 0, 3, 4, 0, 0, 0, 0]
  # Without the first pages, only prefixes with a window behind them are found.
  taken = further.take(6)
  assert set(taken) >= {1, 2} and further.num_available == 0
  assert windows.find(pool, 0, tokens, BASE).num_tokens == 8
  assert windows.find(pool, 0, tokens[:7], BASE).num_tokens == 6  # Its window begins in page 2.
  assert windows.find(pool, 0, tokens[:5], BASE).num_tokens == 0
  for page in taken:
    further.release(page)
  windows.release(sequence)
  further.take(8)
  assert windows.find(pool, 0, tokens, BASE).num_tokens == 0


def test_a_prefix_of_layers_with_windows_alone_needs_no_earlier_page():
  windows, pool = made((3, 9)), PagePool(9, 2)
  sequence, tokens = holding(pool, range(9), 5), list(range(9))
  sequence.num_written = 9
  windows.release_passed(sequence, pool)
  pool.remember(tokens, sequence.pages)
  hit = windows.find(pool, 0, tokens, BASE)
  assert (hit.pages, hit.num_tokens) == ((0, 0, 3, 4), 8)
  for page in hit.pages:
    pool.hold(page)
    pool.release(page)
  assert pool.num_holders(0) == 0


@pytest.mark.parametrize("num_written", [0, 3, 8])
def test_a_moving_request_takes_its_window_with_it(num_written):
  windows, pool = made((None, 9), (3, 9)), PagePool(9, 2)
  sequence = holding(pool, range(9), 5)
  sequence.num_written = num_written
  count = windows.num_written_pages(sequence, 1)
  assert count == {0: 0, 3: 2, 8: 2}[num_written]
  assert windows.has_room(sequence, 0)
  (window,) = windows.take(sequence, 0)
  assert (window.first, len(window.pages)) == (windows.first(1, num_written), count)
  windows.pools[0][0].take(windows.pools[0][0].num_available)
  assert windows.has_room(sequence, 0) == (num_written == 0)
