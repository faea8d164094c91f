"""Answers of a given form: a JSON schema or a regular expression as a mask for each token.

    schema | expression --llguidance--> matcher --answer so far--> u32[w], a bit for each token

The mask joins the processed distribution, so that log-probabilities are over what was allowed, and
it is a pure function of the answer so far.
"""

from __future__ import annotations

from collections.abc import Sequence

import llguidance
import llguidance.numpy
import numpy as np

from seerjax.models.tokenizer import Tokenizer
from seerjax.serve.protocol import Grammar
from seerjax.serve.refusals import refuse

MAX_SOURCE = 1 << 18  # Characters.


class AnswerMask:
  """What may follow an answer so far. One belongs to one choice: it remembers what it has read."""

  def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int, eos_ids: Sequence[int]):
    self._fresh = matcher
    self._vocab_size = vocab_size
    self._eos_ids = eos_ids
    self._read: list[int] = []
    self._matcher = matcher.deep_copy()

  def copy(self) -> AnswerMask:
    """Returns one that has read nothing."""
    return AnswerMask(self._fresh, self._vocab_size, self._eos_ids)

  def __call__(self, answer: Sequence[int]) -> np.ndarray:
    """Returns u32[w], a bit for each token.

    Raises:
      ValueError: if the answer is none of the grammar's, or the grammar became too large.
    """
    if [*answer[: len(self._read)]] != self._read:  # A step broke off: the answer is another.
      self._matcher, self._read = self._fresh.deep_copy(), []
    for token in answer[len(self._read) :]:
      self._matcher.consume_token(token)
      self._read.append(token)
    words = np.zeros((1, -(-self._vocab_size // 32)), np.int32)
    if self._matcher.is_stopped() and not self._matcher.is_error():
      for token in self._eos_ids:
        words.view(np.uint32)[0, token // 32] |= np.uint32(1 << token % 32)
    else:
      llguidance.numpy.fill_next_token_bitmask(self._matcher, words, 0)
    if self._matcher.is_error() or not words.any():
      raise ValueError(
        f"grammar: got an answer of {len(answer)} tokens that it does not go on from"
        f" ({self._matcher.get_error()}), expected one that it allows; simplify the grammar."
      )
    return words[0].view(np.uint32)


class Compiler:
  """Compiles grammars for one tokenizer."""

  def __init__(self, tokenizer: Tokenizer, vocab_size: int):
    self._vocab_size = vocab_size
    self._eos_ids = [*tokenizer.eos_ids]
    self._tokenizer = llguidance.LLTokenizer(
      tokenizer.backend.to_str(), n_vocab=vocab_size, eos_token=self._eos_ids
    )

  def mask(self, grammar: Grammar) -> AnswerMask:
    """Returns the mask of a grammar, for one choice.

    Raises:
      Refusal: if it cannot be compiled.
    """
    if len(grammar.source) > MAX_SOURCE:
      refuse(
        grammar.param, f"a grammar of {len(grammar.source)} characters", f"at most {MAX_SOURCE}",
        "simplify it",
      )  # fmt: skip
    try:
      if grammar.kind == "regex":
        source = llguidance.LLMatcher.grammar_from_regex(grammar.source)
      else:
        schema = grammar.source if grammar.kind == "json" else '{"type": "object"}'
        source = llguidance.LLMatcher.grammar_from_json_schema(schema)
      matcher = llguidance.LLMatcher(self._tokenizer, source, log_level=0)
      problem = matcher.get_error() if matcher.is_error() else ""
    except ValueError as error:
      problem = str(error)
    if problem:
      reason = " ".join(problem.split())[:200]
      refuse(
        grammar.param, f"a grammar that cannot be compiled ({reason})",
        "a JSON schema or a regular expression that llguidance reads", "correct or simplify it",
        code="invalid_grammar",
      )  # fmt: skip
    return AnswerMask(matcher, self._vocab_size, self._eos_ids)
