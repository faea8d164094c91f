"""Masks of grammars: pure functions of the answer so far, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import word_engine

from seerjax.serve import grammar
from seerjax.serve.protocol import Grammar
from seerjax.serve.refusals import Refusal


@pytest.fixture(scope="module")
def compiler():
  return grammar.Compiler(word_engine.TOKENIZER, word_engine.CONFIG.vocab_size)


def ids_of(mask: np.ndarray) -> set[int]:
  places = range(32 * mask.size)
  return {place for place in places if mask[place // 32] >> place % 32 & 1}


def test_a_mask_is_a_function_of_the_answer_alone(compiler):
  mask = compiler.mask(Grammar(kind="regex", source="[0-9]{2}", param="regex"))
  first = mask(())
  digits = ids_of(first)
  assert digits and len(digits) < word_engine.CONFIG.vocab_size
  one = min(digits)
  second = mask((one,))
  # Asked again of an earlier answer, and of one that another took.
  np.testing.assert_array_equal(mask(()), first)
  np.testing.assert_array_equal(mask.copy()((one,)), second)
  # The twin: what it has read is part of the question.
  assert not np.array_equal(mask((one, one)), second)


def test_an_answer_that_is_none_of_the_grammar_is_refused(compiler):
  mask = compiler.mask(Grammar(kind="regex", source="[0-9]{2}", param="regex"))
  outside = min(set(range(word_engine.CONFIG.vocab_size)) - ids_of(mask(())))
  with pytest.raises(ValueError, match="grammar: got an answer of 1 tokens that it does not go on"):
    mask((outside,))


@pytest.mark.parametrize(
  "source, message",
  [
    ("(", "got a grammar that cannot be compiled"),
    ("a" * (grammar.MAX_SOURCE + 1), "got a grammar of 262145 characters, expected at most 262144"),
  ],
)
def test_a_grammar_that_cannot_be_compiled_is_refused(compiler, source, message):
  with pytest.raises(Refusal) as refused:
    compiler.mask(Grammar(kind="regex", source=source, param="regex"))
  assert message in refused.value.message and refused.value.param == "regex"
