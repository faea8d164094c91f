"""The history of completions for repeated prompts: its contents and their lifetime."""

from __future__ import annotations

import random

from seerjax.speculation.history import TEXTS_PER_PROMPT, History, HistoryConfig


def texts_of(history: History, prompt) -> list[list[int]]:
  return [text.tolist() for text in history.texts(prompt)]


def test_the_newest_answers_of_each_prompt_are_kept():
  history = History()
  for number in range(TEXTS_PER_PROMPT + 3):
    history.add([1, 2], [number, number])
    history.add([1, 3], [7])
  assert texts_of(history, [1, 2]) == [[n, n] for n in range(3, TEXTS_PER_PROMPT + 3)]
  assert texts_of(history, (1, 3)) == [[7]] * TEXTS_PER_PROMPT
  assert texts_of(history, [1]) == [] and history.num_found == 2
  assert history.num_bytes == 4 * 3 * TEXTS_PER_PROMPT and len(history) == 2 * TEXTS_PER_PROMPT


def test_an_answer_is_forgotten_at_its_age_and_where_there_is_no_room():
  aged = History(HistoryConfig(max_age=3))
  for number in range(5):
    aged.add([number], [1, 2, 3])
  assert [len(aged.texts([number])) for number in range(5)] == [0, 0, 1, 1, 1]
  small = History(HistoryConfig(max_bytes=4 * 7))
  for number in range(5):
    small.add([number % 2], [number] * 3)
  assert small.num_bytes == 4 * 6
  assert texts_of(small, [0]) == [[4, 4, 4]] and texts_of(small, [1]) == [[3, 3, 3]]
  small.add([0], [5] * 8)  # More than there is room for.
  assert len(small) == small.num_bytes == 0 and not small._texts
  off = History(HistoryConfig(max_bytes=0))
  off.add([1], [2])
  assert not off.texts([1])


def test_bytes_are_what_is_there():
  """Against a list of all completions, in drawn orders."""
  rng = random.Random(0)
  for _ in range(20):
    config = HistoryConfig(max_bytes=4 * rng.randint(5, 60), max_age=rng.randint(1, 30))
    history = History(config)
    for number in range(120):
      history.add([rng.randrange(4)], [number] * rng.randint(1, 4))
      texts = [text for queue in history._texts.values() for text in queue]
      assert history.num_bytes == sum(text.nbytes for _, text in texts) <= config.max_bytes
      assert all(born > number + 1 - config.max_age for born, _ in texts)
