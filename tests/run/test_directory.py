"""A directory is resumed only with its original settings."""

from __future__ import annotations

import pytest
from small_run import assert_equal_bits, rows_of, train

from seerjax import checkpoint, metrics
from seerjax.reports import run_directory, run_report
from seerjax.run import directory

FREE = ("scheduler", "speculation")
BEFORE = {"seed": 3, "engine": {"page_size": 16}}


def check(current, stored=BEFORE):
  directory.check_settings(stored, current, free=FREE)


def test_every_setting_that_differs_is_named_with_both_values():
  expected = r"\(engine.page_size was 16 and is 32; seed was 3 and is 4\)"
  with pytest.raises(ValueError, match=expected):
    check({"seed": 4, "engine": {"page_size": 32}})


def test_what_today_does_not_know_at_all_is_refused():
  with pytest.raises(ValueError, match=r"\(gone was 7 and is None\)"):
    check(BEFORE, BEFORE | {"gone": 7})


def test_free_settings_may_be_others():
  now = BEFORE | {"speculation": {"drafter": "a:b"}}
  check(now, BEFORE | {"scheduler": {"chunk_tokens": 8}})


def test_numbers_without_a_checkpoint_are_another_run_too(tmp_path):
  (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
  with pytest.raises(ValueError, match=r"another run \(its metrics\), expected none; continue it"):
    directory.check_directory(tmp_path, resume=False)
  directory.check_directory(tmp_path / "new", resume=False)


def test_nothing_to_resume_is_refused(tmp_path):
  with pytest.raises(ValueError, match=r"got no checkpoint to resume, expected one under .*check"):
    train(tmp_path / "run", resume=True)
  assert not (tmp_path / "run").exists()


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["lost", "emptied"])
def test_records_that_are_gone_are_named_and_end_no_run(whole, stopped_copy, how):
  for name in ("journal.jsonl", "metrics.jsonl"):
    path = stopped_copy / name
    path.unlink() if how == "lost" else path.write_bytes(b"")
  traces = stopped_copy / "traces.jsonl"
  data = traces.read_bytes()
  traces.write_bytes(data[:5] + b"\xff" + data[6:])
  lines = []
  result = train(stopped_copy, resume=True, say=lines.append)
  text = "\n".join(lines)
  assert "journal.jsonl: got no rollouts of 2 of 2 steps, expected rollouts of all; the" in text
  assert "metrics.jsonl: got no metrics of 2 of 2 steps, expected metrics of all; the run" in text
  assert "traces.jsonl: got damage in line(s) 1, expected a step's trace in each; the run" in text
  assert_equal_bits(result.state, whole[1].state)
  assert [row["step"] for row in rows_of(stopped_copy)] == [3, 4, 4]
  assert run_directory.load(stopped_copy).traces.keys() == {1, 2, 3}
  assert run_report.render(stopped_copy).is_file()
  lines.clear()
  train(stopped_copy, resume=True, say=lines.append, num_steps=5)
  assert sum(" of all; the" in line for line in lines) == 2  # Until they are restored.


@pytest.mark.parametrize(
  ("values", "saved", "step", "expected"),
  [
    ({0: 0.1, 2: 0.5, 4: 0.3}, (0, 2, 4), 4, (2, 0.5)),
    ({0: 0.5, 2: 0.5, 4: 0.5}, (0, 2, 4), 4, (0, 0.5)),  # Of equals the earliest.
    ({0: 0.1, 2: 0.5, 4: 0.5}, (0, 2, 4), 4, (2, 0.5)),
    ({0: 0.1, 2: 0.5}, (0,), 2, (2, 0.5)),  # The last one is not saved yet.
    ({0: 0.1, 2: 0.5, 4: 0.3}, (0, 4), 4, (4, 0.3)),  # The best was deleted by hand.
    ({0: -3.0, 2: -1.5}, (0, 2), 3, (2, -1.5)),
    ({}, (0,), 0, None),
  ],
)
def test_the_best_step_is_the_highest_of_those_that_are_there(
  tmp_path, values, saved, step, expected
):
  with metrics.Writer(tmp_path, console="off", tensorboard=False) as writer:
    for at, value in values.items():
      writer.write(at, {"rollout/reward_mean": 9.0})
      writer.write(at, {"heldout/reward": value})
  for at in saved:
    (tmp_path / "checkpoints" / f"step_{at:08d}").mkdir(parents=True)
  assert checkpoint.steps(tmp_path / "checkpoints") == saved
  assert directory.best_step(tmp_path, "heldout/reward", step) == expected


def test_a_metric_that_evaluations_do_not_have_is_named(tmp_path):
  with metrics.Writer(tmp_path, console="off", tensorboard=False) as writer:
    writer.write(0, {"heldout/reward": 1.0, "heldout_hard/accuracy": 0.5})
  with pytest.raises(ValueError, match=r"best: got 'heldout/acuracy', expected a metric of the ev"):
    directory.best_step(tmp_path, "heldout/acuracy", 0)


def test_an_evaluation_of_an_earlier_version_has_no_reward_to_be_the_best_by(tmp_path):
  with metrics.Writer(tmp_path, console="off", tensorboard=False) as writer:
    writer.write(0, {"heldout/accuracy": 0.5})
  assert directory.best_step(tmp_path, "heldout/reward", 0) is None
