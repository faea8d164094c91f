"""A slow reference suffix tree, written from the definition, for tests of the real one."""

from __future__ import annotations

from seerjax.speculation.suffix_drafts import SMOOTHING
from seerjax.speculation.suffix_tree import DEFAULT_ARGS, DEPTH, SpeculationArgs, Tokens


class ReferenceTree:
  """Counts and drafts as `SuffixTree` is defined to, by a full search of the texts every time."""

  def __init__(self):
    self.texts: dict[str, list[int]] = {}

  def append(self, request_id: str, prev_token_count: int, new_tokens: Tokens) -> int:
    """As `SuffixTree.append`, for calls that it would not refuse."""
    text = self.texts.setdefault(request_id, [])
    fresh = list(new_tokens[len(text) - prev_token_count :])
    text.extend(fresh)
    return len(fresh)

  def remove(self, request_id: str) -> None:
    """As `SuffixTree.remove`."""
    del self.texts[request_id]

  def count(self, tokens: Tokens) -> tuple[int, int]:
    """As `SuffixTree.count`."""
    counts = [len(self._places(text, tokens)) for text in self.texts.values()]
    return sum(counts), sum(count > 0 for count in counts)

  def draft(
    self, context: Tokens, args: SpeculationArgs = DEFAULT_ARGS
  ) -> tuple[list[tuple[int, ...]], float, int]:
    """As `SuffixTree.draft`."""
    context = tuple(context)
    longest = min(len(context), args.pattern_lookup_max, DEPTH - args.max_spec_tokens)
    while longest and not self._next(context[-longest:]):
      longest -= 1
    if longest < args.pattern_lookup_min:
      return [], 0.0, 0
    paths, score = [], 0.0
    start, step, chance = longest, (), 1.0
    branches: list[tuple[float, int, int, int]] = []
    while True:
      path, more = self._walk(context[-start:], step, chance, args, branches, len(paths))
      if not path:
        break
      paths.append(path)
      score += more
      if len(paths) == args.top_k:
        break
      while not branches and start > args.pattern_lookup_min:
        start = max(start // 2, args.pattern_lookup_min)
        for token, chance in self._next(context[-start:]):
          if chance >= args.min_token_prob and all(token != path[0] for path in paths):
            branches.append((-chance, len(paths), 0, token))
      if not branches:
        break
      branches.sort()
      chance, other, at, token = branches.pop(0)
      chance = -chance
      step = (*(paths[other][:at] if other < len(paths) else ()), token)
      score += chance
    return paths, score, longest if paths else 0

  def _walk(
    self,
    string: tuple[int, ...],
    path: tuple[int, ...],
    chance: float,
    args: SpeculationArgs,
    branches: list[tuple[float, int, int, int]],
    number: int,
  ) -> tuple[tuple[int, ...], float]:
    """Follows the likeliest tokens after `string + path`; returns the path and what it adds."""
    score = 0.0
    while len(path) < args.max_spec_tokens:
      followers = self._next(string + path)
      for token, share in followers[1:]:
        if chance * share >= args.min_token_prob:
          branches.append((-chance * share, number, len(path), token))
      if not followers or chance * followers[0][1] < args.min_token_prob:
        break
      chance *= followers[0][1]
      score += chance
      path = (*path, followers[0][0])
    return path, score

  def _next(self, string: tuple[int, ...]) -> list[tuple[int, float]]:
    """Returns the tokens that followed a string, with their probabilities, best first."""
    if len(string) >= DEPTH:
      return []
    counts: dict[int, list[int]] = {}
    for text in self.texts.values():
      ends = [place + len(string) for place in self._places(text, string)]
      next_tokens = [text[end] for end in ends if end < len(text)]
      for token in set(next_tokens):
        count = counts.setdefault(token, [0, 0])
        count[0] += 1
        count[1] += next_tokens.count(token)
    order = sorted(counts, key=lambda token: (-counts[token][0], -counts[token][1], token))
    total = sum(requests for requests, _ in counts.values())
    return [(token, counts[token][0] / (total + SMOOTHING)) for token in order]

  @staticmethod
  def _places(text: Tokens, string: Tokens) -> list[int]:
    last = len(text) - len(string)
    return [n for n in range(last + 1) if tuple(text[n : n + len(string)]) == tuple(string)]
