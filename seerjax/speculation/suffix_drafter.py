"""A drafter that learns from the texts of a group's requests: one suffix tree a group.

A prompt that was answered before begins with those answers in its tree (`history`).

What is asked of it, and how its drafts are verified: `engine.drafting`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses

import numpy as np

from seerjax.engine import drafting
from seerjax.engine.drafting import DraftQuery
from seerjax.speculation import (
  budget as budget_lib,
  config as config_lib,
  group_trees,
  history as history_lib,
  statistics,
  step_times,
  suffix_tree,
  times as times_lib,
)

# Tokens of the prompt with which the text of every answer begins, so that the first tokens of the
# siblings are found from the prompt's end. The whole prompt is a text of its own, once a group.
LEAD_IN = 8
# The prompt's name among the requests of its group; no request has it.
PROMPT = "\0prompt"
# And those of what was answered before: this and a number.
PAST = "\0past "
# While nothing is drafted, trees learn the new tokens in every so many steps only: a step then
# costs next to nothing, and drafting can begin without a long silence.
STEPS_PER_UPDATE = 256

# Of a drafter that is given none: drafts where they pay by `times.PRIOR`.
DEFAULT_BUDGET = budget_lib.BudgetConfig()

# Of one query: alternative continuations, the main one first, each as its tokens.
Paths = Sequence[tuple[int, ...]]


@dataclasses.dataclass(slots=True)
class _Text:
  """The text of a request.

  Attributes:
    group: of the request.
    is_high: whether it is of the high class.
    tokens: prompt and answer, as of the last query; the engine's own list, or a remembered
      answer's i32[n]. () once the request is over and its tree has all of them.
    num_prompt: how many of them are the prompt.
    num_lead: last tokens of the prompt that stand before the answer.
    num_in_tree: tokens that the tree has, from the lead on.
  """

  group: str
  is_high: bool
  tokens: Sequence[int] | np.ndarray
  num_prompt: int
  num_lead: int
  num_in_tree: int = 0

  def waiting(self) -> Sequence[int] | np.ndarray:
    """Returns the tokens that the tree does not have yet."""
    return self.tokens[self.num_prompt - self.num_lead + self.num_in_tree :]


class SuffixDrafter:
  """Drafts from the group's texts: the prompt, the answer so far, the siblings' answers.

  All texts together stay within `max_bytes`: whenever a group has finished and they do not, groups
  are forgotten, those that finished first before those that came first.
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
    """Makes a drafter without texts.

    Args:
      args: how drafts are made; `max_spec_tokens` bounds every path.
      budget: plans each step's lengths. A config alone plans by `times.PRIOR`, which knows nothing
        of the machine: `Budget(step_times.measure(engine))` plans better. None drafts as much as
        queries allow, which takes more than twice the work where few drafts hold.
      is_probe: whether a request is of the high class; none is if None.
      acceptance: takes what comes of drafts; a record of its own if None.
      history: of answers, which this drafter adds to; nothing is remembered if None.
      max_bytes: of trees.

    Raises:
      ValueError: for arguments that name no draft.
    """
    suffix_tree.check_args(args)
    self.args = args
    if isinstance(budget, budget_lib.BudgetConfig):
      budget = budget_lib.Budget(times_lib.PRIOR, budget)
    self.budget = budget
    self.acceptance = statistics.Acceptance() if acceptance is None else acceptance
    self._is_probe = is_probe
    self.history = history
    self._max_bytes = max_bytes
    self._trees = group_trees.GroupTrees()
    # Group -> request -> its text, the prompt's and past answers' among them. Groups stand in the
    # order in which they came or finished.
    self._texts: dict[str, dict[str, _Text]] = {}
    self._num_past: dict[str, int] = {}  # By group: past answers among its texts.
    # Of these, by request, those that are not over; and how many a group has.
    self._live: dict[str, _Text] = {}
    self._num_live: dict[str, int] = {}
    self._heard: dict[str, list[int]] = {}  # By request that is answered elsewhere: its text.
    # Request -> longest path that it was allowed in the last step.
    self._allowed: dict[str, int] = {}
    self._num_steps = 0

  @property
  def num_bytes(self) -> int:
    """Bytes allocated for trees."""
    return self._trees.num_bytes

  @property
  def group_ids(self) -> tuple[str, ...]:
    """Groups whose texts are here."""
    return tuple(self._texts)

  def draft(self, queries: Sequence[DraftQuery]) -> Sequence[Paths]:
    """Returns the paths of each query, [] where nothing is expected to hold; () if none may draft.
    """
    num_high = self._meet(queries)
    return self._drafts(queries, self._widths(queries, num_high))

  def draft_up_to(
    self, queries: Sequence[DraftQuery], lengths: Sequence[int]
  ) -> Sequence[Paths]:
    """Returns `draft` of at most so many tokens a path, whatever a budget says; 0 drafts nothing.

    All requests of a step are given, for the texts of those that draft nothing are learnt too.
    """
    most = self.args.max_spec_tokens
    widths = [max(0, min(most, n, query.max_draft)) for n, query in zip(lengths, queries)]
    # One that is alone is not drafted from by others.
    self._meet([query for width, query in zip(widths, queries) if width or _has_group(query)])
    return self._drafts(queries, widths)

  def learn(self, queries: Sequence[DraftQuery]) -> None:
    """Takes note of requests for which nothing is drafted in a step, for their siblings' drafts."""
    self._meet([query for query in queries if _has_group(query)])

  def num_references(self, request_id: str, group_id: str) -> int:
    """Returns how many siblings' texts a request's draft can draw on."""
    group = _group(group_id, request_id)
    return max(0, len(self._texts.get(group, ())) - 2 - self._num_past.get(group, 0))

  def _meet(self, queries: Sequence[DraftQuery]) -> int:
    """Begins the texts of requests that are new; returns how many are of the high class."""
    num_high = 0
    for query in queries:
      text = self._live.get(query.request_id)
      num_high += (text or self._begin(query.request_id, *query[1:4])).is_high
    self._num_steps += 1
    if self._num_steps % STEPS_PER_UPDATE == 0:
      self._update(queries)
    self._allowed.clear()
    return num_high

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

  def observe(
    self, request_id: str, group_id: str, num_drafted: int, num_accepted: int
  ) -> None:
    """Takes what of the path that held furthest held."""
    references = self.num_references(request_id, group_id)
    self.acceptance.add(num_drafted, num_accepted, references)
    allowed = self._allowed.pop(request_id, 0)
    if self.budget is not None and allowed:
      self.budget.observe(max(allowed, num_drafted), num_drafted, num_accepted)

  def finish(
    self, request_id: str, group_id: str, tokens: Sequence[int], num_prompt: int
  ) -> None:
    """Takes the whole text of a request that is over."""
    if self.history is not None and len(tokens) > num_prompt:
      text_of = tokens[num_prompt - min(LEAD_IN, num_prompt) :]
      self.history.add(tokens[:num_prompt], text_of, drafting.namespace_of(group_id))
    text = self._live.get(request_id)
    if text is None and not drafting.is_group(group_id):
      return  # Nothing was drafted for it, nor will be from it.
    text = text or self._begin(request_id, group_id, tokens, num_prompt)
    text.tokens = tokens
    self._end(request_id, text)
    if not drafting.is_group(group_id):
      self.drop_group(text.group)
    elif not self._num_live[text.group]:
      self._forget_old(text.group)

  def teach(self, name: str, group_id: str, tokens: Sequence[int]) -> None:
    """Gives a group a text that no request has said, such as one written ahead of its questions.

    Args:
      name: of the text, unlike any request's; another of the name is replaced.
      group_id: that is begun if it is not here; the text is forgotten with it, and in no history.
      tokens: whole.
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
    """Does `engine.drafting.Hearer.hear`: siblings that run here draft from it, too."""
    group, num_prompt = _group(group_id, request_id), len(prompt)
    text = self._texts.get(group, {}).get(request_id)
    heard = self._heard.get(request_id)
    if text is None:
      heard = [*prompt]
    elif request_id in self._live:  # It ran here.
      heard = [*text.tokens]
    if heard is None or num_prompt + start > len(heard):
      return False  # It ended here, or something before this was lost.
    del heard[num_prompt + start :]
    heard += answer
    if text is None:
      text = self._begin(request_id, group_id, heard, num_prompt)
    if request_id in self._live:
      self._end(request_id, text)
    self._heard[request_id] = text.tokens = heard
    return True

  def drop_group(self, group_id: str) -> None:
    """Forgets a group and its requests.

    Raises:
      ValueError: if there is no such group.
    """
    self._trees.drop_group(group_id)
    for name, text in self._texts.pop(group_id).items():
      self._heard.pop(name, None)
      if self._live.get(name) is text:
        del self._live[name]
    del self._num_live[group_id], self._num_past[group_id]

  def _widths(self, queries: Sequence[DraftQuery], num_high: int) -> Sequence[int]:
    """Returns the longest path that each query may have; () if none may have any."""
    most = self.args.max_spec_tokens
    if self.budget is None:
      return [max(0, min(most, query.max_draft)) for query in queries]
    plan = self.budget.plan(num_high, len(queries) - num_high)
    return [
      max(
        0,
        min(
          most, query.max_draft, plan.high if self._live[query.request_id].is_high else plan.low
        ),
      )
      for query in queries[: plan.num_requests]
    ]

  def _begin(
    self, request_id: str, group_id: str, tokens: Sequence[int], num_prompt: int
  ) -> _Text:
    """Starts a request's text, and with its first one its group."""
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
      self._trees.remove_request(group, request_id)  # The name was used before.
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
    """Gives the trees of some requests' groups all tokens of their texts so far."""
    for query in queries:
      text = self._live[query.request_id]
      was_cut = len(query.tokens) - text.num_prompt + text.num_lead < text.num_in_tree
      if was_cut or (text.group, text.num_prompt) != (
        _group(query.group_id, query.request_id), query.num_prompt
      ):
        # The name was given to another request, before this one was over.
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
    """Puts a finished group behind all others, and forgets groups until the rest fit."""
    self._texts[group] = self._texts.pop(group)
    while self._trees.num_bytes > self._max_bytes:
      finished = [name for name in self._texts if not self._num_live[name]]
      self.drop_group(next(iter(finished or self._texts)))


def of_run(config: config_lib.SpeculationConfig, run: config_lib.DraftedRun) -> SuffixDrafter:
  """Returns a run's drafter, with a budget for the step times of the run's engine."""
  return SuffixDrafter(
    budget=budget_lib.Budget(step_times.measure(run.engine), config.budget),
    is_probe=run.is_probe,
    acceptance=run.acceptance,
    history=history_lib.History(config.history),
  )


def _group(group_id: str, request_id: str) -> str:
  # A request without a group is alone in one of its own.
  return group_id if drafting.is_group(group_id) else f"{group_id}request {request_id}"


def _has_group(query: DraftQuery) -> bool:
  return drafting.is_group(query.group_id)


def _tail(tokens: Sequence[int]) -> np.ndarray:
  return np.asarray(tokens[-suffix_tree.DEPTH :], np.int32)
