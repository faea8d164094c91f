"""A user's drafter is named in a run's settings, and changes no bit of the run."""

from __future__ import annotations

from collections.abc import Sequence
import itertools
import json

import pytest
from small_run import assert_equal_bits, records_of, train

from seerjax.engine.drafting import DraftQuery
from seerjax.rollout import trace
from seerjax.run.config import RunConfig
from seerjax.run.drafter import RunDrafts
from seerjax.speculation.config import DraftedRun, SpeculationConfig, make_drafter
from seerjax.speculation.statistics import Acceptance


class DraftModel:
  """A stub draft model that predicts the last seen successor of each token."""

  def __init__(self, config: SpeculationConfig, run: DraftedRun):
    self.most, self.acceptance = config.budget.num_speculative_tokens, run.acceptance
    self.after: dict[int, int] = {}

  def draft(self, queries: Sequence[DraftQuery]) -> list[list[list[int]]]:
    return [[self._path(query.tokens[-1], query.max_draft)] for query in queries]

  def observe(self, request_id: str, group_id: str, num_drafted: int, num_accepted: int) -> None:
    self.acceptance.add(num_drafted, num_accepted)

  def finish(self, request_id: str, group_id: str, tokens: Sequence[int], num_prompt: int) -> None:
    self.after.update(itertools.pairwise(tokens))

  def _path(self, token: int, most: int) -> list[int]:
    path = [token := self.after.get(token, token) for _ in range(min(most, self.most))]
    return path


def no_drafter(config: SpeculationConfig, run: DraftedRun) -> str:
  return "guesses"


NUMBER = 7


@pytest.mark.thorough
@pytest.mark.usefixtures("programs_on_disk")
def test_a_draft_model_of_ones_own_is_named_and_changes_no_bit(tmp_path):
  configs = {
    "own": SpeculationConfig(drafter=f"{__name__}:DraftModel"), "default": SpeculationConfig(),
  }  # fmt: skip
  own, default = (
    train(tmp_path / name, num_steps=2, scheduler=RunConfig().scheduler, speculation=config)
    for name, config in configs.items()
  )
  assert_equal_bits(own.state, default.state)
  assert records_of(tmp_path / "own") == records_of(tmp_path / "default")
  # It was called, and its calls are in the report.
  done = trace.read(tmp_path / "own" / trace.FILE_NAME)
  assert sum(step.drafts.num_drafted for step in done.values()) > 0
  settings = json.loads((tmp_path / "own" / "config.json").read_text())
  assert settings["speculation"]["drafter"] == f"{__name__}:DraftModel"


@pytest.mark.parametrize(
  "name, message",
  [
    ("no_such_module_here:drafter", "cannot be imported"),
    (f"{__name__}:Nothing", "has no 'Nothing', expected a function that returns a drafter"),
    (f"{__name__}:NUMBER", "a int, expected a function of a SpeculationConfig"),
  ],
)
def test_a_run_refuses_what_names_no_drafter_before_it_begins(tmp_path, name, message):
  with pytest.raises(ValueError, match=message):
    RunDrafts(SpeculationConfig(drafter=name))


def test_what_makes_no_drafter_is_refused():
  run = DraftedRun(None, lambda request_id: False, Acceptance())  # pyright: ignore
  config = SpeculationConfig(drafter=f"{__name__}:no_drafter")
  with pytest.raises(ValueError, match="got str from .*no_drafter', expected a drafter with draft"):
    make_drafter(config, run)


def test_the_record_of_drafts_begins_anew_when_it_is_taken():
  record = Acceptance()
  record.add(3, 2)
  taken = record.take()
  assert (taken.num_steps, taken.num_drafted, taken.num_accepted) == (1, 3, 2)
  assert record == Acceptance()
  record.add(1, 0)
  assert taken.num_steps == 1
