"""Texts of a few requests that grow and are removed, drawn for the tests of suffix trees."""

from __future__ import annotations

import random

from hypothesis import strategies as st

from seerjax.speculation.suffix_tree import DEPTH, ROW


@st.composite
def histories(draw):
  """Appends of a few requests in small alphabets, with copies of each other, and removals."""
  rng = random.Random(draw(st.integers(0, 2**32)))
  vocab = draw(st.sampled_from([1, 2, 3, 8]))
  texts: dict[str, list[int]] = {}
  steps = []
  for _ in range(draw(st.integers(1, 25))):
    if texts and rng.random() < 0.1:
      name = rng.choice(sorted(texts))
      del texts[name]
      steps.append((name, -1, []))
      continue
    name = rng.choice("abcd")
    text = texts.setdefault(name, [])
    count = rng.choice([0, 1, 1, 2, 5, 17, 70, ROW])
    new = [rng.randrange(vocab) for _ in range(count)]
    if rng.random() < 0.5:
      source = texts[rng.choice(sorted(texts))]
      start = rng.randrange(len(source) + 1)
      new = source[start : start + count]
    repeated = rng.randrange(len(text) + 1) if rng.random() < 0.2 else len(text)
    steps.append((name, repeated, text[repeated:] + new))
    text.extend(new)
  return steps, vocab, rng


def play(steps, *trees):
  for name, start, tokens in steps:
    for tree in trees:
      if start < 0:
        tree.remove(name)
      else:
        tree.append(name, start, tokens)


def strings(texts, vocab, rng, count):
  """Substrings of the texts, half of them with another last token."""
  found = []
  for _ in range(count):
    text = rng.choice([*texts.values(), [0]]) or [0]
    start = rng.randrange(len(text))
    string = text[start : start + rng.randrange(1, DEPTH + 1)]
    found.append(string if rng.random() < 0.5 else [*string[:-1], rng.randrange(vocab)])
  return found
