"""A reference beam search that runs each hypothesis alone, and a drafter for beam searches."""

from __future__ import annotations

from collections.abc import Sequence
import functools

from made_drafters import Observed
import numpy as np
from plain_scores import PlainScores

from seerjax import numerics as numerics_lib
from seerjax.engine.engine import EngineConfig
from seerjax.models import config as model_config, parameters

# Pages of four, four of them a split; rows for trees behind each of eight hypotheses.
SIZES = EngineConfig(
  page_size=4,
  num_pages=300,
  max_num_seqs=10,
  max_model_len=64,
  batch_size_buckets=(64,),
  decode_steps_per_call=1,
)


class Plain:
  """Computes each text from its first token in a separate forward pass, without any reuse."""

  def __init__(
    self,
    config: model_config.TransformerConfig,
    numerics: numerics_lib.NumericsConfig,
    params: parameters.Params,
  ):
    self._scores = PlainScores(config, numerics, params)

  @functools.cache  # noqa: B019, lives as long as the tests.
  def top_logprobs(self, tokens: tuple[int, ...]) -> list[tuple[int, np.float32]]:
    """Returns the ids and log-probabilities of up to 16 most likely next tokens, unsorted."""
    return self._scores.next(tokens)

  def search(
    self, prompt: Sequence[int], width: int, max_tokens: int, stops: Sequence[int] = ()
  ) -> tuple[list[tuple[tuple[int, ...], float, str]], set[tuple[int, ...]]]:
    """Returns (tokens, score, reason) of the best hypotheses, and every hypothesis ever kept."""
    beam = [((), 0.0, "")]
    kept = set()
    while not all(reason for *_, reason in beam):
      candidates = []
      for rank, (tokens, score, reason) in enumerate(beam):
        if reason:
          candidates.append(((-score, -1, rank), (tokens, score, reason)))
          continue
        for token, logprob in self.top_logprobs((*prompt, *tokens))[:width]:
          longer, total = (*tokens, token), score + float(logprob)
          ended = "stop" if token in stops else "length" if len(longer) == max_tokens else ""
          candidates.append(((-total, token, rank), (longer, total, ended)))
      beam = [one for _, one in sorted(candidates, key=lambda pair: pair[0])[:width]]
      kept |= {tokens for tokens, *_ in beam}
    return beam, kept


class Knowing(Observed):
  """Drafts the tokens that a search will keep, as a tree around each hypothesis, with errors."""

  def __init__(self, kept: set[tuple[int, ...]], vocab_size: int, *, right: float, seed: int):
    super().__init__()
    self._kept = sorted(kept)
    self._vocab_size = vocab_size
    self._right = right
    self._rng = np.random.default_rng(seed)

  def draft(self, queries):
    found = []
    for query in queries:
      sampled = tuple(query.tokens[query.num_prompt :])
      paths = [one[len(sampled) :] for one in self._kept if one[: len(sampled)] == sampled]
      # Deepest paths first, so that others branch from them.
      paths = sorted((path for path in paths if path), key=len, reverse=True)
      found.append([self._bent(path[: query.max_draft]) for path in paths[:6]])
    return found

  def _bent(self, path: tuple[int, ...]) -> list[int]:
    is_right = self._rng.random(len(path)) < self._right
    wrong = self._rng.integers(0, self._vocab_size, len(path)).tolist()
    return [token if good else bad for token, good, bad in zip(path, is_right, wrong)]
