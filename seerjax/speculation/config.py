"""How a run drafts, and the one function from that to a drafter.

A drafter is any object with the three methods of `engine.drafting.Drafter`. A run names a function
that makes one, so that a draft model, a tree of drafts or another rule of acceptance is a file of
its own, in this package or outside:

  --config.speculation.draft_name=MODEL          by the group's texts and by a model, whichever pays
  --config.speculation.drafter=seerjax.speculation.draft_loading:of_run \
    --config.speculation.draft_name=MODEL        by the model alone
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
  """How a run drafts. No draft changes a bit.

  Attributes:
    drafter: "module:function" that makes the drafter, from a `SpeculationConfig` and a
      `DraftedRun`. The default drafts from the group's own texts and, where there is a draft
      model, by that too: each request from the source of the most expected tokens a second.
    budget: how much is drafted where it pays.
    history: of answers to prompts that come again. A resumed run begins without.
    draft_name: of a draft model: "nano", a directory, a GGUF file, or a Hub id; "" is none.
    draft: how it drafts. Its length is planned (`budget.gamma_max` at most) by the default drafter,
      and taken as it is by "seerjax.speculation.draft_loading:of_run".
  """

  drafter: str = "seerjax.speculation.hybrid_drafter:of_run"
  budget: BudgetConfig = BudgetConfig()
  history: HistoryConfig = HistoryConfig()
  draft_name: str = ""
  draft: DraftModelConfig = DraftModelConfig()

  def __post_init__(self):
    fields.check(self)
    module, _, function = self.drafter.partition(":")
    if not module or not function.isidentifier():
      raise ValueError(
        f"SpeculationConfig.drafter: got {self.drafter!r}, expected 'my_module:make_drafter'; leave"
        " it out to draft from the group's own texts."
      )
    if self.draft.learn and not self.draft_name:
      raise ValueError(
        "DraftModelConfig.learn: got True without a draft model, expected its name; set"
        " --config.speculation.draft_name=MODEL, or do not learn."
      )


class DraftedRun(NamedTuple):
  """What a drafter is made for.

  Attributes:
    engine: that will ask it.
    is_probe: whether a request is its group's first, on which the others' schedule waits.
    acceptance: takes what came of the drafts (`Acceptance.add`), for the report.
  """

  engine: Engine
  is_probe: Callable[[str], bool]
  acceptance: Acceptance


MakeDrafter = Callable[[SpeculationConfig, DraftedRun], Drafter]


def load(config: SpeculationConfig) -> MakeDrafter:
  """Returns the function that makes a run's drafter.

  Raises:
    ValueError: if there is no such function.
  """
  found = loading.imported(
    config.drafter,
    caller="SpeculationConfig.drafter",
    example="my_module:make_drafter",
    expected="a function that makes a drafter",
  )
  if not callable(found):
    raise ValueError(
      f"SpeculationConfig.drafter: got {config.drafter!r}, a {type(found).__name__}, expected a"
      " function of a SpeculationConfig and a DraftedRun; name the function."
    )
  return cast(MakeDrafter, found)


def make_drafter(config: SpeculationConfig, run: DraftedRun) -> Drafter:
  """Returns the drafter that a config names, made for a run.

  Raises:
    ValueError: if there is no such function, or what it makes is no drafter.
  """
  drafter = load(config)(config, run)
  if not isinstance(drafter, Drafter):
    raise ValueError(
      f"SpeculationConfig.drafter: got {type(drafter).__name__} from {config.drafter!r}, expected a"
      " drafter with draft, observe and finish; see seerjax.engine.drafting.Drafter."
    )
  return drafter
