"""A drafter that learns from what a group's requests have said: one suffix tree a group.

What is asked of it, and how its drafts are verified: `engine.drafts`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses

import numpy as np

from seerjax.engine.drafts import DraftQuery
from seerjax.speculation import acceptance, budget as budget_lib, suffix_tree

# Tokens of the prompt with which the text of every answer begins, so that the first tokens of the
# siblings are found from the prompt's end. The whole prompt is a text of its own, once a group.
LEAD_IN = 8
# The prompt's name among the requests of its group; nobody's else.
PROMPT = "\0prompt"
# While nothing is drafted, so many tokens of a request wait for its tree at most: what is said then
# costs next to nothing, and drafting can begin without a long silence.
MAX_WAITING = 256

# Of one query: alternative continuations, the main one first, each as its tokens.
Paths = Sequence[tuple[int, ...]]


@dataclasses.dataclass(slots=True)
class _Text:
  """What a request has said.

  Attributes:
    num_lead: tokens of the prompt that stand before the answer.
    waiting: the newest tokens, those that the tree does not have yet.
    num_in_tree: those that it has.
  """

  num_lead: int
  waiting: list[int]
  num_in_tree: int = 0

  @property
  def num_said(self) -> int:
    return self.num_in_tree + len(self.waiting) - self.num_lead


class SuffixDrafter:
  """Drafts from what the group has said: the prompt, the answer so far, the siblings' answers.

  All texts together stay within `max_bytes`: whenever a group has finished and they do not, groups
  are forgotten, those that finished first before those that came first.
  """

  def __init__(
    self,
    args: suffix_tree.SpeculationArgs = suffix_tree.DEFAULT_ARGS,
    *,
    budget: budget_lib.Budget | None = None,
    is_probe: Callable[[str], bool] | None = None,
    max_bytes: int = 2**28,
  ):
    """Makes a drafter without texts.

    Args:
      args: how drafts are made; `max_spec_tokens` bounds every path.
      budget: plans each step's lengths; without one, as much is drafted as queries allow.
      is_probe: whether a request is of the high class; none is if None.
      max_bytes: of trees.

    Raises:
      ValueError: for arguments that name no draft.
    """
    suffix_tree.check_args(args)
    self.args = args
    self.budget = budget
    self.acceptance = acceptance.Acceptance()
    self._is_probe = is_probe
    self._max_bytes = max_bytes
    self._trees = suffix_tree.GroupTrees()
    # Group -> its unfinished requests, and whether each is of the high class. Groups stand in the
    # order in which they came or finished.
    self._live: dict[str, dict[str, bool]] = {}
    # Group -> request -> its text, the prompt's among them.
    self._texts: dict[str, dict[str, _Text]] = {}
    # Request -> longest path that it was allowed in the last step.
    self._allowed: dict[str, int] = {}

  @property
  def num_bytes(self) -> int:
    """Bytes allocated for trees."""
    return self._trees.num_bytes

  @property
  def group_ids(self) -> tuple[str, ...]:
    """Groups whose texts are here."""
    return tuple(self._live)

  def draft(self, queries: Sequence[DraftQuery]) -> Sequence[Paths]:
    """Returns the paths of each query; [] where nothing is expected to hold, or to pay."""
    for query in queries:
      if query.request_id not in self._live.get(_group(query.group_id, query.request_id), ()):
        self._meet(query)
    widths = self._widths(queries)
    paths: list[Paths] = [[] for _ in queries]
    order = [place for place, width in enumerate(widths) if width]
    self._allowed = {queries[place].request_id: widths[place] for place in order}
    if not order:
      return paths
    for place in order:
      self._meet(queries[place])
    for group in {_group(queries[place].group_id, queries[place].request_id) for place in order}:
      self._flush(group)
    contexts = [_tail(queries[place].tokens) for place in order]
    limits = [(widths[place], queries[place].max_draft) for place in order]
    output = np.empty((len(order), self.args.top_k, self.args.max_spec_tokens), np.int32)
    drafts = self._trees.batch_speculate(
      [_group(queries[place].group_id, queries[place].request_id) for place in order],
      np.cumsum([0, *map(len, contexts)]),
      np.concatenate(contexts),
      output,
      self.args,
      np.asarray(limits, np.int32),
      [queries[place].request_id for place in order],
    )
    for row, place in enumerate(order):
      lengths = drafts.num_tokens[row].tolist()
      paths[place] = [tuple(output[row, k, :n].tolist()) for k, n in enumerate(lengths) if n]
    return paths

  def observe(
    self,
    request_id: str,
    group_id: str,
    new_tokens: Sequence[int],
    num_drafted: int,
    num_accepted: int,
    is_finished: bool,
  ) -> None:
    """Takes what a step said of a request, and what of the path that held furthest held."""
    group = _group(group_id, request_id)
    texts = self._texts.get(group, {})
    text = texts.get(request_id) or self._begin(group, request_id, ())
    text.waiting.extend(new_tokens)
    if len(text.waiting) >= MAX_WAITING:
      self._flush(group)
    self.acceptance.add(num_drafted, num_accepted, max(0, len(texts) - 2))
    allowed = self._allowed.pop(request_id, 0)
    if self.budget is not None and allowed:
      self.budget.observe(max(allowed, num_drafted), num_drafted, num_accepted)
    if is_finished:
      self._live[group].pop(request_id, None)
      if not group_id:
        self.drop_group(group)
      elif not self._live[group]:
        self._forget_old(group)

  def drop_group(self, group_id: str) -> None:
    """Forgets a group and its requests.

    Raises:
      ValueError: if there is no such group.
    """
    self._trees.drop_group(group_id)
    del self._live[group_id], self._texts[group_id]

  def _widths(self, queries: Sequence[DraftQuery]) -> list[int]:
    """Returns the longest path that each query may have."""
    most = self.args.max_spec_tokens
    if self.budget is None:
      return [max(0, min(most, query.max_draft)) for query in queries]
    is_probe = [
      self._live[_group(query.group_id, query.request_id)][query.request_id] for query in queries
    ]
    plan = self.budget.plan(sum(is_probe), len(queries) - sum(is_probe))
    return [
      max(0, min(most, query.max_draft, plan.high if is_high else plan.low))
      if place < plan.num_requests
      else 0
      for place, (query, is_high) in enumerate(zip(queries, is_probe))
    ]

  def _meet(self, query: DraftQuery) -> None:
    """Makes sure that the request's text is here, as far as the query has it."""
    group = _group(query.group_id, query.request_id)
    text = self._texts.get(group, {}).get(query.request_id)
    if text is not None:
      is_whole = text.num_said == len(query.tokens) - query.num_prompt
      if is_whole and query.request_id in self._live[group]:
        return
      # Not all was told, or the name was used before: begin again.
      if text.num_in_tree:
        self._trees.remove_request(group, query.request_id)
    text = self._begin(group, query.request_id, query.tokens[: query.num_prompt])
    text.waiting.extend(query.tokens[query.num_prompt :])

  def _begin(self, group: str, request_id: str, prompt: Sequence[int]) -> _Text:
    """Starts a request's text, and with its first one its group."""
    if group not in self._live:
      self._trees.register_group(group)
      self._live[group], self._texts[group] = {}, {PROMPT: _Text(0, [])}
    self._live[group][request_id] = self._is_probe is not None and self._is_probe(request_id)
    texts = self._texts[group]
    if not texts[PROMPT].num_said:
      texts[PROMPT].waiting.extend(prompt)
    lead = list(prompt[-LEAD_IN:])
    texts[request_id] = _Text(len(lead), lead)
    return texts[request_id]

  def _flush(self, group: str) -> None:
    """Gives the tree what was said since it was last asked."""
    updates = []
    for name, text in self._texts[group].items():
      if text.waiting:
        updates.append((name, text.num_in_tree, text.waiting))
        text.num_in_tree += len(text.waiting)
        text.waiting = []
    if updates:
      self._trees.update_many(group, updates)

  def _forget_old(self, group: str) -> None:
    """Puts a finished group behind all others, and forgets groups until the rest fit."""
    self._live[group] = self._live.pop(group)
    while self._trees.num_bytes > self._max_bytes:
      finished = [name for name, live in self._live.items() if not live]
      self.drop_group(next(iter(finished or self._live)))


def _group(group_id: str, request_id: str) -> str:
  # A request without a group is alone in one of its own.
  return group_id or f"request {request_id}"


def _tail(tokens: Sequence[int]) -> np.ndarray:
  return np.asarray(tokens[-suffix_tree.DEPTH :], np.int32)
