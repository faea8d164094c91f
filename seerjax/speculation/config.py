"""Configuration of a run's drafter, and the function that creates it.

A drafter is any object with the three methods of `engine.drafting.Drafter`. A run names a function
that creates one, so a draft model, a draft tree or another acceptance rule can be a separate file,
in this package or outside:

  --config.speculation.draft_model=MODEL          group texts and a draft model, whichever is faster
  --config.speculation.drafter=seerjax.speculation.draft_loading:of_run \
    --config.speculation.draft_model=MODEL        the draft model only
  --config.speculation.drafter=my_module:make_drafter

  def make_drafter(config: SpeculationConfig, run: DraftedRun) -> Drafter: ...
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
from typing import NamedTuple, cast

from seerjax import fields
from seerjax.engine.drafting import Drafter
from seerjax.engine.engine import Engine
from seerjax.speculation.budget import BudgetConfig
from seerjax.speculation.draft_model import DraftModelConfig
from seerjax.speculation.history import HistoryConfig
from seerjax.speculation.statistics import Acceptance
from seerjax.tasks import loading


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeculationConfig:
  """Configuration of a run's drafts. Drafts never affect results.

  Attributes:
    drafter: "module:function" that creates the drafter, from a `SpeculationConfig` and a
      `DraftedRun`. The default drafts from the group's own texts and, if there is a draft model,
      also with that: each request uses the source with the most expected tokens per second.
    budget: how many tokens to draft.
    history: earlier completions of repeated prompts. A resumed run starts without any.
    draft_model: draft model: "nano", a directory, a GGUF file, or a Hub id; "" is none.
    draft: configuration of the draft model. The default drafter plans the draft length (up to
      `budget.num_speculative_tokens`); "seerjax.speculation.draft_loading:of_run" uses it as
      configured.
  """

  drafter: str = "seerjax.speculation.hybrid_drafter:of_run"
  budget: BudgetConfig = BudgetConfig()
  history: HistoryConfig = HistoryConfig()
  draft_model: str = ""
  draft: DraftModelConfig = DraftModelConfig()

  def __post_init__(self):
    fields.check(self)
    module, _, function = self.drafter.partition(":")
    if not module or not function.isidentifier():
      raise ValueError(
        f"SpeculationConfig.drafter: got {self.drafter!r}, expected 'my_module:make_drafter'; leave"
        " it out to draft from the completions of the group."
      )
    if self.draft.learn and not self.draft_model:
      raise ValueError(
        "DraftModelConfig.learn: got True without a draft model, expected a draft model; set"
        " --config.speculation.draft_model=MODEL, or learn=False."
      )


class DraftedRun(NamedTuple):
  """Arguments for creating a drafter.

  Attributes:
    engine: the engine that will call it.
    is_probe: whether a request is its group's first, which the scheduling of the others depends on.
    acceptance: collects statistics (`Acceptance.add`) for the report.
  """

  engine: Engine
  is_probe: Callable[[str], bool]
  acceptance: Acceptance


MakeDrafter = Callable[[SpeculationConfig, DraftedRun], Drafter]


def load(config: SpeculationConfig) -> MakeDrafter:
  """Returns the function that creates a run's drafter.

  Raises:
    ValueError: if there is no such function.
  """
  found = loading.imported(
    config.drafter,
    caller="SpeculationConfig.drafter",
    example="my_module:make_drafter",
    expected="a function that returns a drafter",
  )
  if not callable(found):
    raise ValueError(
      f"SpeculationConfig.drafter: got {config.drafter!r}, a {type(found).__name__}, expected a"
      " function of a SpeculationConfig and a DraftedRun; pass the function's name."
    )
  return cast(MakeDrafter, found)


def make_drafter(config: SpeculationConfig, run: DraftedRun) -> Drafter:
  """Creates the drafter that a config names, for a run.

  Raises:
    ValueError: if there is no such function, or its result is not a drafter.
  """
  drafter = load(config)(config, run)
  if not isinstance(drafter, Drafter):
    raise ValueError(
      f"SpeculationConfig.drafter: got {type(drafter).__name__} from {config.drafter!r}, expected a"
      " drafter with draft, observe and finish; see seerjax.engine.drafting.Drafter."
    )
  return drafter
