"""Slots of a draft's cache: a request reuses the prefix that it has in common with its slot."""

from __future__ import annotations

from collections import OrderedDict
import random

from seerjax.speculation.draft_slots import Slots


def read(slots: Slots, name: str, tokens: list[int], drafted=()) -> int:
  """Reads a request and drafts; returns the tokens that were known."""
  (slot,) = slots.take([name])
  known = slots.num_known(slot, tokens)
  slots.tell(slot, tokens, known, drafted)
  return known


def test_what_was_read_is_not_read_again_and_a_rejected_draft_is():
  slots = Slots(2)
  assert read(slots, "a", [1, 2, 3], [4, 5]) == 0
  assert read(slots, "a", [1, 2, 3, 4, 5, 6], [7]) == 5  # Both held; the bonus is new.
  assert read(slots, "a", [1, 2, 3, 4, 5, 6, 8]) == 6  # 7 did not hold.
  assert slots.num_read_again == 0


def test_the_last_token_is_always_read():
  slots = Slots(1)
  read(slots, "a", [1, 2, 3], [4, 5, 6])
  assert read(slots, "a", [1, 2, 3, 4]) == 3
  assert read(slots, "a", [1, 2, 3, 4]) == 3


def test_a_request_that_is_another_one_now_is_read_again():
  slots = Slots(1)
  read(slots, "a", [1, 2, 3, 4])
  assert read(slots, "a", [1, 2, 9, 9, 9]) == 2  # Its name was used again.
  assert slots.num_read_again == 1
  slots.forget_all()
  assert read(slots, "a", [1, 2, 9, 9, 9]) == 0


def test_the_slot_that_was_not_used_longest_is_given_away():
  slots = Slots(2)
  for name in ("a", "b", "a", "c"):
    read(slots, name, [1, 2, 3])
  assert slots.num_evicted == 1
  assert read(slots, "a", [1, 2, 3]) == 2
  assert read(slots, "b", [1, 2, 3]) == 0  # It was b's, and then c's is.
  assert slots.num_evicted == 2


def test_where_there_are_too_many_those_that_have_a_slot_keep_it():
  slots = Slots(2)
  assert slots.with_slots(["a", "b", "c"]) == [0, 1]
  slots.take(["b", "c"])
  assert slots.with_slots(["a", "b", "c"]) == [1, 2]
  slots.free("b")
  assert slots.with_slots(["a", "b", "c"]) == [0, 2]
  assert slots.with_slots(["a"]) == [0]


def test_slots_are_as_a_cache_of_whole_texts_would_have_them():
  chooses, events = random.Random(0), dict(evicted=0, rejected=0)
  slots, whole = Slots(3), OrderedDict()  # Request -> its tokens in the cache.
  texts: dict[str, list[int]] = {}
  for _ in range(2000):
    name = chooses.choice("abcde")
    tokens = texts.setdefault(name, [0])
    if chooses.random() < 0.1:
      del tokens[chooses.randrange(1, len(tokens) + 1) :]
    tokens += [chooses.randrange(2) for _ in range(chooses.randrange(1, 4))]
    drafted = [chooses.randrange(2) for _ in range(chooses.randrange(4))]
    written = whole.pop(name, None)
    if written is None and len(whole) == 3:
      whole.popitem(last=False)
      events["evicted"] += 1
    written = written or []
    common = 0
    while common < min(len(written), len(tokens) - 1) and written[common] == tokens[common]:
      common += 1
    events["rejected"] += common < len(written)
    whole[name] = [*tokens, *drafted]
    assert read(slots, name, tokens, drafted) == common
  assert slots.num_evicted == events["evicted"] > 100 and events["rejected"] > 100
