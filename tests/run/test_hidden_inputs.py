"""A run's records include inputs outside the settings: its data, its code, and the clock."""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import json
import os
import pathlib
import shutil
import time
from typing import Any

import pytest
from small_run import CONFIG, PER_STEP, interrupt, policy, programs_of, records_of, train

from seerjax import checkpoint, rl
from seerjax.models import chat_template
from seerjax.rollout import journal as journal_lib
from seerjax.run import stops
from seerjax.tasks.function_task import function_task

pytestmark = pytest.mark.usefixtures("programs_on_disk")

ROWS = [{"prompt": f"{i}?"} for i in range(20)]


class Reward:
  """Rewards vowels, and can call `stop` at one of its texts."""

  def __init__(self, stop_at: int = -1, stop: Callable[[], Any] = interrupt):
    self.stop_at, self.stop, self.num_texts = stop_at, stop, 0

  def __call__(self, prompt: str, text: str) -> float:
    self.num_texts += 1
    if self.num_texts == self.stop_at:
      self.stop()
    return sum(letter in "aeiou" for letter in text) / 8


def task_of(path: pathlib.Path, rows: list[dict[str, Any]], reward: Reward | None = None):
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return function_task("own", path, reward or Reward())


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory, programs_on_disk):
  """A run on a file of prompts, interrupted in its second step with two of four judged."""
  directory = tmp_path_factory.mktemp("interrupted")
  # After two held-out responses and a whole step.
  reward = Reward(stop_at=2 + PER_STEP + 3)
  with pytest.raises(stops.Interrupted, match="after step 1 of 4"):
    train(directory / "run", task_of(directory / "rows.jsonl", ROWS, reward))
  return directory / "run"


@pytest.fixture
def copied(interrupted, tmp_path):
  return pathlib.Path(shutil.copytree(interrupted, tmp_path / "run"))


def test_a_run_says_the_digests_of_its_data(interrupted):
  config = json.loads((interrupted / "config.json").read_text())
  assert set(config["data"]) == {"train", "heldout", "source"}
  assert records_of(interrupted)[0]["data"] == {
    name: config["data"][name] for name in ("train", "heldout")
  }
  host_state = checkpoint.read_host_state(interrupted / "checkpoints")
  assert host_state["data"] == [{"step": 0, "digests": config["data"]}]


def test_prompts_in_another_order_are_refused_before_any_work(copied, tmp_path):
  files = {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()}
  reward = Reward()
  other = task_of(tmp_path / "rows.jsonl", ROWS[::-1], reward)
  message = (
    r"--resume: got data that differ from the run's \(heldout was '\w{16}' and is '\w{16}'; train"
    r" was '\w{16}' and is '\w{16}'\), expected the same problems .* or pass --accept_new_data"
  )
  with pytest.raises(ValueError, match=message):
    train(copied, other, resume=True)
  assert reward.num_texts == 0
  assert files == {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()}


@pytest.mark.thorough
def test_other_data_are_accepted_by_name_and_both_are_recorded(copied, tmp_path):
  heard: list[str] = []
  other = task_of(tmp_path / "rows.jsonl", ROWS[::-1])
  result = train(copied, other, resume=True, accept_new_data=True, num_steps=2, say=heard.append)
  assert any(line.startswith("OTHER DATA OR CODE from step 2 on: heldout was") for line in heard)
  first, second = result.summary["data"]
  assert (first["step"], second["step"]) == (0, 1)
  assert first["digests"]["train"] != second["digests"]["train"]
  header, epoch = (record for record in records_of(copied) if record["kind"] in ("header", "epoch"))
  assert header["data"] != epoch["data"] and epoch["step"] == 0
  # Rollouts of the old problems that the interrupted step had judged were sampled anew.
  _, entries = journal_lib.read(copied / "journal.jsonl")
  prompts = {(one.step, one.group): one.prompt_text for one in entries}
  assert len(prompts) == 4
  # The run now uses the new data.
  with pytest.raises(ValueError, match="--resume: got data that differ from the run's"):
    train(copied, task_of(tmp_path / "rows.jsonl", ROWS), resume=True)


def test_a_journal_of_other_problems_is_refused_by_their_names(tmp_path):
  def book(**changes: Any) -> journal_lib.Journal:
    arguments: dict[str, Any] = dict(fingerprint={"a": "b"}, settings={}, data={"train": "1"})
    return journal_lib.Journal(tmp_path / "journal.jsonl", **(arguments | changes))

  with book() as one:
    assert one.data == {"train": "1"}
  with pytest.raises(ValueError, match=r"journal.jsonl: got data .*train was '1' and is '2'"):
    book(data={"train": "2"})
  with book(data={"train": "2"}, accept_new_data=True) as one:
    assert one.data == {"train": "2"} and len(one.fingerprints) == 2
  with book(data={"train": "2"}) as one:
    assert len(one.fingerprints) == 2


def test_a_rollout_of_another_problem_is_not_taken(interrupted):
  entry = next(journal_lib.read(interrupted / "journal.jsonl")[1])
  header = records_of(interrupted)[0]
  copy = interrupted.parent / "journal.jsonl"
  shutil.copy(interrupted / "journal.jsonl", copy)
  with journal_lib.Journal(
    copy, fingerprint=header["fingerprint"], settings=header["settings"], data=header["data"]
  ) as one:
    place = (entry.step, entry.group, entry.member)
    assert one.lookup(*place, problem_id=entry.problem_id) is not None
    message = "got a rollout of problem 'own-.*' for step 0, .* problem 'other', which now"
    with pytest.raises(ValueError, match=message):
      one.lookup(*place, problem_id="other")


# The clock.


def with_clock(config: chat_template.ChatConfig):
  tokenizer = policy().require_tokenizer()
  template = "{{ strftime_now('%d %b %H:%M') }} {{ messages[-1].content }}"
  return dataclasses.replace(
    policy(), tokenizer=dataclasses.replace(tokenizer, chat_template=template, chat_config=config)
  )


def train_by_clock(directory, task, zone: str, **changes):
  """A run in a time zone, with a freshly loaded model and so its own moment."""
  config = dataclasses.replace(CONFIG, num_steps=1, **changes.pop("settings", {}))
  before = os.environ.get("TZ")
  os.environ["TZ"] = zone
  time.tzset()
  try:
    loaded = chat_template.ChatConfig(now=chat_template.current_moment())
    return rl.train(
      config, with_clock(loaded), task, directory, log=lambda line: None,
      programs=programs_of(config), **changes,
    )  # fmt: skip
  finally:
    del os.environ["TZ"]
    os.environ |= {} if before is None else {"TZ": before}
    time.tzset()


def prompts_of(directory) -> set[str]:
  entries = journal_lib.read(directory / "journal.jsonl")[1]
  decode = policy().require_tokenizer().decode
  return {decode(one.rollout.request.prompt)[:12] for one in entries}


def test_a_run_keeps_the_moment_at_which_it_began(tmp_path):
  path, directory = tmp_path / "rows.jsonl", tmp_path / "run"
  task = task_of(path, ROWS, Reward(stop_at=PER_STEP + 2))
  with pytest.raises(stops.Interrupted, match="after step 0 of 1"):
    train_by_clock(directory, task, "Asia/Tokyo")
  now = json.loads((directory / "config.json").read_text())["chat"]["now"]
  assert now.endswith("+09:00")
  before = prompts_of(directory)
  assert len(before) == 1
  # Setting another moment makes another run.
  given = chat_template.ChatConfig(now="2027-01-02T03:04:05+00:00")
  with pytest.raises(ValueError, match=rf"chat.now was '{now[:10]}.*' and is '2027-01-02T03:04:05"):
    train_by_clock(directory, task_of(path, ROWS), "UTC", resume=True, settings=dict(chat=given))

  def ruin(step: int, state: Any, numbers: dict[str, float]) -> None:
    state.params.clear()
    numbers.clear()

  result = train_by_clock(
    directory, task_of(path, ROWS), "America/New_York", resume=True, on_step=ruin
  )
  assert result.state.params  # The step callback receives its own copy.
  assert json.loads((directory / "config.json").read_text())["chat"]["now"] == now
  assert prompts_of(directory) == before
