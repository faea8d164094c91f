"""Drafts from the group's suffix tree, a draft model, or both merged into one tree.

    queries -> Budget.plan -> suffix tree ---+--> paths, the more promising source's first
                           `-> draft model --'       |
        `observe` for each source <--- tokens sampled since, whatever their source

In each step, each request uses the source with the most expected tokens per second, including its
cost, or none if plain decoding is faster (`budget`). The value of a source is learnt by comparing
its own path with the request's tokens. A merged draft thus gives information on both sources, and a
draft that the engine had to cut gives as much as a whole one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from seerjax.engine import timing
from seerjax.engine.drafting import DraftQuery
from seerjax.speculation import (
  budget as budget_lib,
  config as config_lib,
  draft_loading,
  draft_times,
  history as history_lib,
  statistics,
  suffix_drafter,
)
from seerjax.speculation.budget import Budget, Choice
from seerjax.speculation.draft_model import ModelDrafter
from seerjax.speculation.suffix_drafter import Paths, SuffixDrafter


class _Drafted(NamedTuple):
  """A request's draft without a known result.

  Attributes:
    choice: the plan, limited to what could be used.
    start: number of tokens the request had.
    paths: paths of the suffix tree, and of the model.
  """

  choice: Choice
  start: int
  paths: tuple[Paths, Paths]


class HybridDrafter:
  """Drafts each request from the best source; see `engine.drafting.Drafter`.

  Attributes:
    suffix: suffix-tree drafter, which learns all texts; its `acceptance` covers its own drafts.
    model: draft-model drafter; its `acceptance` covers its own drafts.
    budget: plans the drafts.
    acceptance: acceptance statistics of all drafts.
  """

  def __init__(
    self,
    suffix: SuffixDrafter,
    model: ModelDrafter,
    budget: Budget,
    *,
    acceptance: statistics.Acceptance | None = None,
  ):
    """Creates a drafter from two others.

    Args:
      suffix: a drafter without a budget.
      model: a model drafter; its width limits the planned width.
      budget: plans each step, with a model as one of its sources.
      acceptance: collects statistics; a new record if None.

    Raises:
      ValueError: if the suffix drafter has a budget, or the budget has no model, or its width
        exceeds the model's.
    """
    if suffix.budget is not None:
      raise ValueError(
        "HybridDrafter.suffix: got a drafter with its own budget, expected one without; one budget"
        " plans for both."
      )
    if budget.model is None:
      raise ValueError(
        "HybridDrafter.budget: got a budget without a model, expected one that plans for both"
        " sources; pass its drafting times as Budget.model."
      )
    if budget.max_width > model.config.width:
      raise ValueError(
        f"HybridDrafter.budget: got max_width={budget.max_width} for a model of width"
        f" {model.config.width}, expected no more; raise DraftModelConfig.width, or lower"
        " Budget.max_width."
      )
    self.suffix, self.model, self.budget = suffix, model, budget
    self.acceptance = statistics.Acceptance() if acceptance is None else acceptance
    self._drafted: dict[str, _Drafted] = {}

  def draft(self, queries: Sequence[DraftQuery]) -> Sequence[Paths]:
    """Returns the paths of each query; () if nothing is drafted."""
    if self._drafted:
      for query in queries:
        self._settle(query.request_id, query.group_id, query.tokens)
    plan = self.budget.plan([query.request_id for query in queries])
    if not plan:
      self.suffix.learn(queries)
      return ()
    choices = [_cut(choice, query.max_draft) for choice, query in zip(plan, queries, strict=True)]
    of_suffix = self.suffix.draft_up_to(queries, [choice.suffix_length for choice in choices])
    of_model = self.model.draft_up_to(
      queries, [choice.model_length for choice in choices], [choice.width for choice in choices]
    )
    nothing: Sequence[Paths] = [()] * len(queries)
    drafts, is_any = [], False
    for query, choice, by_suffix, by_model in zip(
      queries, choices, of_suffix or nothing, of_model or nothing, strict=True
    ):
      paths: Paths = ()
      if choice.source != "none":
        self._drafted[query.request_id] = _Drafted(choice, len(query.tokens), (by_suffix, by_model))
        paths = self._merged(query.request_id, choice, by_suffix, by_model)
        if not paths:
          self._count(query.request_id, query.group_id, 0, 0)
      drafts.append(paths)
      is_any = is_any or bool(paths)
    return drafts if is_any else ()

  def observe(self, request_id: str, group_id: str, num_drafted: int, num_accepted: int) -> None:
    """Records the result of the path with the most accepted tokens."""
    self._count(request_id, group_id, num_drafted, num_accepted)

  def finish(self, request_id: str, group_id: str, tokens: Sequence[int], num_prompt: int) -> None:
    """Takes the complete text of a finished request."""
    self._settle(request_id, group_id, tokens)
    self.suffix.finish(request_id, group_id, tokens, num_prompt)
    self.model.finish(request_id, group_id, tokens, num_prompt)
    self.budget.finish(request_id)

  def hear(
    self,
    request_id: str,
    group_id: str,
    prompt: Sequence[int],
    start: int,
    answer: Sequence[int],
  ) -> bool:
    """Implements `engine.drafting.Hearer.hear`."""
    return self.suffix.hear(request_id, group_id, prompt, start, answer)

  def _count(self, request_id: str, group_id: str, num_drafted: int, num_accepted: int) -> None:
    references = self.suffix.num_references(request_id, group_id)
    self.acceptance.add(num_drafted, num_accepted, references)

  def _merged(self, request_id: str, choice: Choice, by_suffix: Paths, by_model: Paths) -> Paths:
    """Returns all paths, the more promising source's first.

    If there is no room for all, the engine cuts the last ones.
    """
    if not by_suffix or not by_model:
      return [*by_suffix, *by_model]
    suffix = self.budget.expected(request_id, Choice("suffix", choice.suffix_length, 0, 1))
    model = self.budget.expected(request_id, Choice("model", 0, choice.model_length, choice.width))
    return [*by_suffix, *by_model] if suffix > model else [*by_model, *by_suffix]

  def _settle(self, request_id: str, group_id: str, tokens: Sequence[int]) -> None:
    """Reports the result of a request's last draft to sources and budget, once it is known."""
    drafted = self._drafted.pop(request_id, None)
    if drafted is None or len(tokens) <= drafted.start:
      return
    choice = drafted.choice
    longest = max(choice.suffix_length, choice.model_length)
    sampled = tuple(tokens[drafted.start : drafted.start + longest])
    best = 0
    by_suffix, by_model = drafted.paths
    if choice.suffix_length:
      held = _held(by_suffix[0], sampled) if by_suffix else 0
      best = held
      self._tell(request_id, "suffix", choice.suffix_length, by_suffix[:1], held, sampled)
      if by_suffix:  # An empty draft was counted when it was made.
        self.suffix.observe(request_id, group_id, len(by_suffix[0]), held)
    if choice.model_length:
      counts = [_held(path, sampled) for path in by_model]
      held, furthest = (counts[0], max(counts)) if counts else (0, 0)
      has_sibling = None if choice.width < 2 or not counts else furthest > held
      self._tell(
        request_id,
        "model",
        choice.model_length,
        by_model[:1],
        held,
        sampled,
        sibling_held=has_sibling,
      )
      if counts:
        path = by_model[counts.index(furthest)]
        self.model.observe(request_id, group_id, len(path), furthest)
      best = max(best, furthest)
    if choice.source == "both":
      self._tell(request_id, "both", longest, [*by_suffix, *by_model], best, sampled)

  def _tell(
    self,
    request_id: str,
    source: budget_lib.Source,
    num_allowed: int,
    paths: Paths,
    num_held: int,
    sampled: Sequence[int],
    *,
    sibling_held: bool | None = None,
  ) -> None:
    """Reports to the budget how many tokens of a source's path were correct.

    A path shorter than allowed counts as failed where it ended, because the plan needs to know what
    a source yields if it may draft that much. Beyond the end of the known text, nothing is counted.
    """
    if num_held == len(sampled):
      num_allowed = min(num_allowed, len(sampled))
    num_drafted = min(max(map(len, paths), default=0), num_allowed)
    self.budget.observe(
      request_id, source, num_allowed, num_drafted, num_held, sibling_held=sibling_held
    )


def _cut(choice: Choice, max_draft: int) -> Choice:
  """Returns a choice limited to what can be used."""
  return choice._replace(
    suffix_length=min(choice.suffix_length, max_draft),
    model_length=min(choice.model_length, max_draft),
  )


def _held(path: Sequence[int], sampled: Sequence[int]) -> int:
  """Returns how many leading tokens of a path equal the sampled tokens."""
  count = 0
  while count < min(len(path), len(sampled)) and path[count] == sampled[count]:
    count += 1
  return count


def of_run(
  config: config_lib.SpeculationConfig, run: config_lib.DraftedRun
) -> HybridDrafter | SuffixDrafter:
  """Returns a run's drafter: group texts, and the model `draft_model` if there is one.

  The budget uses the measured step times of the run's engine. With a model, no class of requests
  has priority over another (`BudgetConfig.priority`).
  """
  if not config.draft_model:
    return suffix_drafter.of_run(config, run)
  model = draft_loading.drafter_for(run.engine, config.draft_model, config.draft)
  longest = min(config.budget.num_speculative_tokens, budget_lib.LENGTHS[-1])
  budget = Budget(
    timing.measure(run.engine),
    config.budget,
    model=draft_times.measure_model(model, run.engine, longest),
    max_width=min(config.draft.width, budget_lib.WIDTHS[-1]),
  )
  suffix = SuffixDrafter(
    budget=None, is_probe=run.is_probe, history=history_lib.History(config.history)
  )
  return HybridDrafter(suffix, model, budget, acceptance=run.acceptance)
