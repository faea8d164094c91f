"""A drafter that uses the texts of a group's requests, with one suffix tree per group.

If a prompt was completed before, its tree starts with those completions (`history`).

Interface and verification of drafters: `engine.drafting`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses

import numpy as np

from seerjax.engine import drafting, timing
from seerjax.engine.drafting import DraftQuery
from seerjax.engine.step_times import PRIOR
from seerjax.speculation import (
  budget as budget_lib,
  config as config_lib,
  group_trees,
  history as history_lib,
  statistics,
  suffix_tree,
)

# Prompt tokens that precede each completion in the tree, so that siblings' first tokens are found
# from the end of the prompt. The whole prompt is a separate text, once per group.
LEAD_IN = 8
# Name of the prompt's text in its group; no request has this name.
PROMPT = "\0prompt"
# Names of earlier completions: this and a number.
PAST = "\0past "
# While nothing is drafted, trees are updated only once in this many steps: a step then costs almost
# nothing, and drafting can start without a long delay.
STEPS_PER_UPDATE = 256

# Default budget: drafts as much as is worthwhile by `times.PRIOR`.
DEFAULT_BUDGET = budget_lib.BudgetConfig()

# Alternative continuations for one query, the main one first, as tokens.
Paths = Sequence[tuple[int, ...]]


@dataclasses.dataclass(slots=True)
class _Text:
  """The text of a request.

  Attributes:
    group: group of the request.
    is_high: whether the request is in the high-priority class.
    tokens: prompt and completion as of the last query: the engine's own list, or i32[n] for an
      earlier completion. () once the request is finished and all its tokens are in the tree.
    num_prompt: number of prompt tokens.
    num_lead: number of prompt tokens that precede the completion in the tree.
    num_in_tree: number of tokens in the tree, from the lead-in on.
  """

  group: str
  is_high: bool
  tokens: Sequence[int] | np.ndarray
  num_prompt: int
  num_lead: int
  num_in_tree: int = 0

  def waiting(self) -> Sequence[int] | np.ndarray:
    """Returns the tokens that are not in the tree yet."""
    return self.tokens[self.num_prompt - self.num_lead + self.num_in_tree :]


class SuffixDrafter:
  """Drafts from a group's texts: the prompt, the request's own tokens, and sibling completions.

  All trees together stay within `max_bytes`: when a group finishes and they exceed it, groups are
  dropped, finished ones first (in order of finishing), then the others (in order of arrival).
  """

  def __init__(
    self,
    args: suffix_tree.SpeculationArgs = suffix_tree.DEFAULT_ARGS,
    *,
    budget: budget_lib.Budget | budget_lib.BudgetConfig | None = DEFAULT_BUDGET,
    is_probe: Callable[[str], bool] | None = None,
    acceptance: statistics.Acceptance | None = None,
    history: history_lib.History | None = None,
    max_bytes: int = 2**28,
  ):
    """Creates a drafter without texts.

    Args:
      args: how drafts are made; `max_spec_tokens` limits every path.
      budget: plans each step's draft lengths. A config alone uses `times.PRIOR`, which does not
        know the machine; `Budget(timing.measure(engine))` plans better. None drafts as much as
        queries allow, which more than doubles the work if few drafts are accepted.
      is_probe: whether a request is in the high-priority class; None: no request is.
      acceptance: collects statistics; a new record if None.
      history: earlier completions, to which this drafter adds; None remembers nothing.
      max_bytes: maximum size of all trees.

    Raises:
      ValueError: for invalid `args`.
    """
    suffix_tree.check_args(args)
    self.args = args
    if isinstance(budget, budget_lib.BudgetConfig):
      budget = budget_lib.Budget(PRIOR, budget)
    self.budget = budget
    self.acceptance = statistics.Acceptance() if acceptance is None else acceptance
    self._is_probe = is_probe
    self.history = history
    self._max_bytes = max_bytes
    self._trees = group_trees.GroupTrees()
    # Group -> request -> text, including those of the prompt and of earlier completions. Groups are
    # in the order of arrival, or of finishing.
    self._texts: dict[str, dict[str, _Text]] = {}
    self._num_past: dict[str, int] = {}  # Number of earlier completions by group.
    # Texts of unfinished requests by request, and their number by group.
    self._live: dict[str, _Text] = {}
    self._num_live: dict[str, int] = {}
    self._heard: dict[str, list[int]] = {}  # Texts of requests that run on other workers.
    # Request -> maximum path length allowed in the last step.
    self._allowed: dict[str, int] = {}
    self._num_steps = 0

  @property
  def num_bytes(self) -> int:
    """Bytes allocated for trees."""
    return self._trees.num_bytes

  @property
  def group_ids(self) -> tuple[str, ...]:
    """Groups that have texts."""
    return tuple(self._texts)

  def draft(self, queries: Sequence[DraftQuery]) -> Sequence[Paths]:
    """Returns the paths of each query, [] if no acceptance is expected; () if none may draft."""
    self._meet(queries)
    return self._drafts(queries, self._widths(queries))

  def draft_up_to(self, queries: Sequence[DraftQuery], lengths: Sequence[int]) -> Sequence[Paths]:
    """Returns drafts with at most `lengths` tokens per path, ignoring the budget; 0 drafts nothing.

    Pass all requests of a step, because texts of requests that draft nothing are learnt too.
    """
    most = self.args.max_spec_tokens
    widths = [max(0, min(most, n, query.max_draft)) for n, query in zip(lengths, queries)]
    # A request without a group has no siblings that could draft from it.
    self._meet([query for width, query in zip(widths, queries) if width or _has_group(query)])
    return self._drafts(queries, widths)

  def learn(self, queries: Sequence[DraftQuery]) -> None:
    """Learns the texts of requests for which nothing is drafted, for their siblings' drafts."""
    self._meet([query for query in queries if _has_group(query)])

  def num_references(self, request_id: str, group_id: str) -> int:
    """Returns the number of sibling texts that a request's draft can use."""
    group = _group(group_id, request_id)
    return max(0, len(self._texts.get(group, ())) - 2 - self._num_past.get(group, 0))

  def _meet(self, queries: Sequence[DraftQuery]) -> None:
    """Creates the texts of new requests."""
    for query in queries:
      if query.request_id not in self._live:
        self._begin(query.request_id, *query[1:4])
    self._num_steps += 1
    if self._num_steps % STEPS_PER_UPDATE == 0:
      self._update(queries)
    self._allowed.clear()

  def _drafts(self, queries: Sequence[DraftQuery], widths: Sequence[int]) -> Sequence[Paths]:
    order = [place for place, width in enumerate(widths) if width]
    if not order:
      return ()
    self._allowed = {queries[place].request_id: widths[place] for place in order}
    self._update([queries[place] for place in order])
    contexts = [_tail(queries[place].tokens) for place in order]
    limits = [(widths[place], queries[place].max_draft) for place in order]
    groups = [_group(queries[place].group_id, queries[place].request_id) for place in order]
    output = np.empty((len(order), self.args.top_k, self.args.max_spec_tokens), np.int32)
    drafts = self._trees.batch_speculate(
      groups,
      np.cumsum([0, *map(len, contexts)]),
      np.concatenate(contexts),
      output,
      self.args,
      np.asarray(limits, np.int32),
      [queries[place].request_id for place in order],
    )
    paths: list[Paths] = [[] for _ in queries]
    for row, place in enumerate(order):
      lengths = drafts.num_tokens[row].tolist()
      paths[place] = [tuple(output[row, k, :n].tolist()) for k, n in enumerate(lengths) if n]
      if not paths[place]:
        self.observe(queries[place].request_id, queries[place].group_id, 0, 0)
    return paths

  def observe(self, request_id: str, group_id: str, num_drafted: int, num_accepted: int) -> None:
    """Records the result of the path with the most accepted tokens."""
    references = self.num_references(request_id, group_id)
    self.acceptance.add(num_drafted, num_accepted, references)
    allowed = self._allowed.pop(request_id, 0)
    if self.budget is not None and allowed:
      most = max(allowed, num_drafted)
      self.budget.observe(request_id, "suffix", most, num_drafted, num_accepted)

  def finish(self, request_id: str, group_id: str, tokens: Sequence[int], num_prompt: int) -> None:
    """Takes the complete text of a finished request."""
    if self.history is not None and len(tokens) > num_prompt:
      text_of = tokens[num_prompt - min(LEAD_IN, num_prompt) :]
      self.history.add(tokens[:num_prompt], text_of, drafting.namespace_of(group_id))
    text = self._live.get(request_id)
    if text is None and not drafting.is_group(group_id):
      return  # Nothing was drafted for it, and nothing will be drafted from it.
    text = text or self._begin(request_id, group_id, tokens, num_prompt)
    text.tokens = tokens
    self._end(request_id, text)
    if not drafting.is_group(group_id):
      self.drop_group(text.group)
    elif not self._num_live[text.group]:
      self._forget_old(text.group)

  def teach(self, name: str, group_id: str, tokens: Sequence[int]) -> None:
    """Adds a text that no request produced to a group, such as one written before its questions.

    Args:
      name: name of the text, distinct from all requests'; replaces a text of the same name.
      group_id: group, created if missing; the text is dropped with it and enters no history.
      tokens: complete text.
    """
    text = self._begin(name, group_id, tokens, 0)
    self._end(name, text)
    if not self._num_live[text.group]:
      self._forget_old(text.group)

  def hear(
    self,
    request_id: str,
    group_id: str,
    prompt: Sequence[int],
    start: int,
    answer: Sequence[int],
  ) -> bool:
    """Implements `engine.drafting.Hearer.hear`; local siblings draft from the text, too."""
    group, num_prompt = _group(group_id, request_id), len(prompt)
    text = self._texts.get(group, {}).get(request_id)
    heard = self._heard.get(request_id)
    if text is None:
      heard = [*prompt]
    elif request_id in self._live:  # It ran here before.
      heard = [*text.tokens]
    if heard is None or num_prompt + start > len(heard):
      return False  # It finished here, or an earlier part was lost.
    del heard[num_prompt + start :]
    heard += answer
    if text is None:
      text = self._begin(request_id, group_id, heard, num_prompt)
    if request_id in self._live:
      self._end(request_id, text)
    self._heard[request_id] = text.tokens = heard
    return True

  def drop_group(self, group_id: str) -> None:
    """Drops a group and its requests.

    Raises:
      ValueError: if there is no such group.
    """
    self._trees.drop_group(group_id)
    for name, text in self._texts.pop(group_id).items():
      self._heard.pop(name, None)
      if self._live.get(name) is text:
        del self._live[name]
    del self._num_live[group_id], self._num_past[group_id]

  def _widths(self, queries: Sequence[DraftQuery]) -> Sequence[int]:
    """Returns the maximum path length of each query; () if none may draft."""
    most = self.args.max_spec_tokens
    if self.budget is None:
      return [max(0, min(most, query.max_draft)) for query in queries]
    names = [query.request_id for query in queries]
    choices = self.budget.plan(names, {name for name in names if self._live[name].is_high})
    return [
      max(0, min(most, query.max_draft, choice.suffix_length))
      for query, choice in zip(queries, choices)
    ]

  def _begin(self, request_id: str, group_id: str, tokens: Sequence[int], num_prompt: int) -> _Text:
    """Creates a request's text, and its group if it is the first."""
    group = _group(group_id, request_id)
    if group not in self._texts:
      self._trees.register_group(group)
      prompt = tokens[:num_prompt]
      namespace = drafting.namespace_of(group_id)
      past = () if self.history is None else self.history.texts(prompt, namespace)
      self._texts[group] = {PROMPT: _Text(group, False, prompt, 0, 0)}
      for place, answer in enumerate(past):
        self._texts[group][f"{PAST}{place}"] = _Text(group, False, answer, 0, 0)
      self._num_live[group], self._num_past[group] = 0, len(past)
    texts = self._texts[group]
    if request_id in texts and texts[request_id].num_in_tree:
      self._trees.remove_request(group, request_id)  # The name is being reused.
    self._heard.pop(request_id, None)
    is_high = self._is_probe is not None and self._is_probe(request_id)
    lead = min(LEAD_IN, num_prompt)
    self._live[request_id] = texts[request_id] = _Text(group, is_high, tokens, num_prompt, lead)
    self._num_live[group] += 1
    return texts[request_id]

  def _end(self, request_id: str, text: _Text) -> None:
    del self._live[request_id]
    self._num_live[text.group] -= 1

  def _update(self, queries: Sequence[DraftQuery]) -> None:
    """Updates the trees of some requests' groups with all tokens so far."""
    for query in queries:
      text = self._live[query.request_id]
      was_cut = len(query.tokens) - text.num_prompt + text.num_lead < text.num_in_tree
      if was_cut or (text.group, text.num_prompt) != (
        _group(query.group_id, query.request_id),
        query.num_prompt,
      ):
        # The name was reused for another request before this one finished.
        self._end(query.request_id, text)
        text = self._begin(query.request_id, *query[1:4])
      text.tokens = query.tokens
    for group in dict.fromkeys(self._live[query.request_id].group for query in queries):
      updates = []
      for name, text in self._texts[group].items():
        if len(new := text.waiting()):
          updates.append((name, text.num_in_tree, new))
          text.num_in_tree += len(new)
        if name not in self._live:
          text.tokens = ()
      if updates:
        self._trees.append(group, updates)

  def _forget_old(self, group: str) -> None:
    """Moves a finished group to the end, and drops groups until the rest fit in `max_bytes`."""
    self._texts[group] = self._texts.pop(group)
    while self._trees.num_bytes > self._max_bytes:
      finished = [name for name in self._texts if not self._num_live[name]]
      self.drop_group(next(iter(finished or self._texts)))


def of_run(config: config_lib.SpeculationConfig, run: config_lib.DraftedRun) -> SuffixDrafter:
  """Returns a run's drafter, with a budget based on the measured step times of its engine."""
  return SuffixDrafter(
    budget=budget_lib.Budget(timing.measure(run.engine), config.budget),
    is_probe=run.is_probe,
    acceptance=run.acceptance,
    history=history_lib.History(config.history),
  )


def _group(group_id: str, request_id: str) -> str:
  # A request without a group is alone in a group of its own.
  return group_id if drafting.is_group(group_id) else f"{group_id}request {request_id}"


def _has_group(query: DraftQuery) -> bool:
  return drafting.is_group(query.group_id)


def _tail(tokens: Sequence[int]) -> np.ndarray:
  return np.asarray(tokens[-suffix_tree.DEPTH :], np.int32)
