"""A user's drafter is named in a run's settings, and changes no bit of the run."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import itertools
import json
import pathlib
import zlib

import jax
import pytest
import tiny_model

from seerjax import numerics as numerics_lib, rl
from seerjax.engine.drafting import DraftQuery
from seerjax.engine.sizes import EngineConfig
from seerjax.models import parameters, tokenizer
from seerjax.rollout import journal, trace
from seerjax.rollout.groups import RolloutConfig
from seerjax.run.config import RunConfig, TrainerConfig
from seerjax.run.drafter import RunDrafts
from seerjax.run.evaluation import EvaluationConfig
from seerjax.run.policy import Policy
from seerjax.run.programs import make_programs
from seerjax.speculation.config import DraftedRun, SpeculationConfig, make_drafter
from seerjax.speculation.statistics import Acceptance
from seerjax.types import Problem, Verdict

NANO = pathlib.Path(parameters.__file__).parent / "nano"
# A model with nano's vocabulary.
MODEL = dataclasses.replace(tiny_model.SMALLEST, vocab_size=512, num_layers=1)


class DraftModel:
  """A stub draft model that predicts the last seen successor of each token."""

  def __init__(self, config: SpeculationConfig, run: DraftedRun):
    self.most, self.acceptance = config.budget.gamma_max, run.acceptance
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


class Vowels:
  """Rewards vowels."""

  name = "vowels"

  def num_problems(self, split: str) -> int:
    return 3

  def problem(self, split: str, index: int) -> Problem:
    return Problem(problem_id=f"{split}-{index}", prompt=f"{index}?")

  def verdict(self, problem: Problem, text: str) -> Verdict:
    return Verdict(reward=zlib.crc32(text.encode()) % 3 / 2, correct=False, well_formed=True)


def config_of(speculation: SpeculationConfig) -> RunConfig:
  return RunConfig(
    model="tiny",
    task="vowels",
    num_steps=2,
    numerics=tiny_model.ONE_SLAB,
    engine=EngineConfig(
      page_size=8, num_pages=64, max_sequences=4, max_context=48, row_buckets=(16,)
    ),
    rollout=RolloutConfig(groups_per_step=2, group_size=2, max_tokens=8),
    trainer=TrainerConfig(rows_per_micro_batch=64, sequences_per_micro_batch=4),
    speculation=speculation,
    evaluation=EvaluationConfig(num_problems=2),
  )


def records_of(directory: pathlib.Path) -> list[dict]:
  lines = (directory / journal.FILE_NAME).read_text().splitlines()
  return [json.loads(line)["record"] for line in lines]


@pytest.mark.thorough
@pytest.mark.usefixtures("programs_on_disk")
def test_a_draft_model_of_ones_own_is_named_and_changes_no_bit(tmp_path):
  master = parameters.init(numerics_lib.key(0), MODEL, tiny_model.ONE_SLAB)
  policy = Policy(MODEL, master, tokenizer.load(NANO))
  configs = {
    "own": config_of(SpeculationConfig(drafter=f"{__name__}:DraftModel")),
    "default": config_of(SpeculationConfig()),
  }
  programs = make_programs(configs["own"], MODEL)
  own, default = (
    rl.train(config, policy, Vowels(), tmp_path / name, programs=programs)
    for name, config in configs.items()
  )
  assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), own.state, default.state))
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
