"""The writer survives kills and full disks; the reductions have a value on every mask."""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
import textwrap

from absl import logging
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rich.console
from tensorboardX.proto import event_pb2

from seerjax import metrics

QUIET = dict(console="off", tensorboard=False)


def strict(line: str):
  def refuse(word):
    raise AssertionError(f"{word} is no JSON")

  return json.loads(line, parse_constant=refuse)


# Reductions.


def test_masked_reductions_by_hand():
  values = jnp.array([[1.0, jnp.nan, 3.0], [jnp.inf, 5.0, -7.0]])
  mask = jnp.array([[True, False, True], [False, False, True]])
  np.testing.assert_array_equal(metrics.masked_sum(values, mask, axis=1), [4.0, -7.0])
  np.testing.assert_array_equal(metrics.masked_mean(values, mask, axis=1), [2.0, -7.0])
  np.testing.assert_array_equal(metrics.masked_max(values, mask, axis=1), [3.0, -7.0])
  assert metrics.masked_mean(values, mask) == -1.0


def test_an_empty_mask_has_a_defined_value_and_gradient():
  values = jnp.full((2, 3), jnp.nan)
  mask = jnp.zeros((2, 3), bool)
  assert metrics.masked_sum(values, mask) == 0.0
  assert metrics.masked_mean(values, mask) == 0.0
  assert metrics.masked_max(values, mask) == 0.0
  assert metrics.masked_max(values, mask, empty=-1.0) == -1.0
  assert metrics.masked_mean(jnp.zeros((0,)), jnp.zeros((0,), bool)) == 0.0
  gradient = jax.grad(lambda v: metrics.masked_mean(v, mask))(values)
  np.testing.assert_array_equal(gradient, np.zeros((2, 3)))


def test_reductions_are_f32_under_strict_promotion():
  with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
    for dtype in (jnp.bfloat16, jnp.int32, jnp.float32):
      values = jnp.arange(1, 5).astype(dtype)
      mask = jnp.array([True, True, False, False])
      for function, expected in (
        (metrics.masked_sum, 3.0),
        (metrics.masked_mean, 1.5),
        (metrics.masked_max, 2.0),
      ):
        result = jax.jit(function)(values, mask)
        assert result.dtype == jnp.float32 and result == expected


# The file.


def test_lines_are_sorted_strict_json(tmp_path):
  with metrics.Writer(tmp_path, **QUIET) as writer:
    writer.write(0, {"train/loss": jnp.float32(0.5), "rollout/reward": np.float64(1 / 3)})
    writer.write(1, {"train/loss": jnp.bfloat16(1.5), "train/tokens": 3, "train/skipped": False})
    assert writer.offset == (tmp_path / "metrics.jsonl").stat().st_size
  lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
  assert lines[0] == '{"step": 0, "rollout/reward": 0.3333333333333333, "train/loss": 0.5}'
  assert strict(lines[1]) == {
    "step": 1,
    "train/loss": 1.5,
    "train/skipped": False,
    "train/tokens": 3,
  }


def test_counts_are_lists_in_the_file_alone(tmp_path):
  with metrics.Writer(tmp_path, tensorboard=True, console="off") as writer:
    writer.write(1, {"train/tokens": np.asarray([3, 0, 5]), "train/loss": 0.5})
    for wrong in (np.asarray([0.5]), np.zeros((1, 1), int), [3]):
      with pytest.raises(ValueError, match=r"metrics\.(encode|write): got .*, expected "):
        writer.write(2, {"train/tokens": wrong})
  line = (tmp_path / "metrics.jsonl").read_text()
  assert line == '{"step": 1, "train/loss": 0.5, "train/tokens": [3, 0, 5]}\n'
  assert metrics.read(tmp_path / "metrics.jsonl")[0]["train/tokens"] == [3, 0, 5]


def test_non_finite_numbers_are_words_and_warned_of_once(tmp_path, caplog):
  logger = logging.get_absl_logger()
  logger.addHandler(caplog.handler)
  try:
    with metrics.Writer(tmp_path, **QUIET) as writer:
      for step in range(3):
        writer.write(step, {"train/loss": jnp.nan, "train/grad_norm": -np.inf})
  finally:
    logger.removeHandler(caplog.handler)
  warnings = {record.getMessage() for record in caplog.records}
  assert warnings == {
    "train/loss is nan at step 0; further such values are not reported",
    "train/grad_norm is -inf at step 0; further such values are not reported",
  }
  for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
    assert strict(line)["train/loss"] == "NaN"
  values = metrics.read(tmp_path / "metrics.jsonl")[0]
  assert math.isnan(values["train/loss"]) and values["train/grad_norm"] == -math.inf


def numbers(step: int) -> dict[str, float]:
  return {"train/loss": 1.0 / (step + 1), "rollout/reward": float(np.sin(step))}


def test_a_resumed_file_equals_an_uninterrupted_one(tmp_path):
  with metrics.Writer(tmp_path / "whole", **QUIET) as writer:
    for step in range(6):
      writer.write(step, numbers(step))
  whole = (tmp_path / "whole/metrics.jsonl").read_bytes()
  for size in range(len(whole) // 2, len(whole), 11):  # The kill comes at any byte.
    directory = tmp_path / f"cut{size}"
    directory.mkdir()
    (directory / "metrics.jsonl").write_bytes(whole[:size])
    with metrics.Writer(directory, resume_step=2, **QUIET) as writer:
      for step in range(3, 6):
        writer.write(step, numbers(step))
    assert (directory / "metrics.jsonl").read_bytes() == whole


def test_reading_leaves_out_a_torn_line(tmp_path):
  path = tmp_path / "metrics.jsonl"
  path.write_text('{"step": 0, "a/b": 1}\n{"step": 1, "a')
  assert metrics.read(path) == [{"step": 0, "a/b": 1}]


def test_a_broken_line_before_the_end_is_refused(tmp_path):
  (tmp_path / "metrics.jsonl").write_text('{"step": 0}\nnonsense\n{"step": 1}\n')
  with pytest.raises(ValueError, match="got b'nonsense' as line 2, expected a JSON object"):
    metrics.Writer(tmp_path, resume_step=1, **QUIET)


def test_a_new_run_refuses_the_numbers_of_another(tmp_path):
  with metrics.Writer(tmp_path, **QUIET) as writer:
    writer.write(0, {"train/loss": 1.0})
  before = (tmp_path / "metrics.jsonl").read_bytes()
  with pytest.raises(ValueError, match="expected none at the start of a new run"):
    metrics.Writer(tmp_path, **QUIET)
  assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_a_closed_writer_takes_no_numbers(tmp_path):
  with metrics.Writer(tmp_path, **QUIET) as writer:
    writer.write(4, {"train/loss": 1.0})
  with pytest.raises(ValueError, match="expected an open one"):
    writer.write(5, {"train/loss": 1.0})


def run_with_file_limit(directory, limit: int, code: str) -> subprocess.CompletedProcess:
  start = f"""
    import resource, sys
    from seerjax import metrics
    resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, resource.RLIM_INFINITY))
    directory = sys.argv[1]
    """
  return subprocess.run(
    [sys.executable, "-c", textwrap.dedent(start) + textwrap.dedent(code), str(directory)],
    capture_output=True,
    text=True,
    timeout=60,
    env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
  )


def test_a_full_disk_is_said_and_costs_no_finished_line(tmp_path):
  result = run_with_file_limit(
    tmp_path,
    1000,
    """
    writer = metrics.Writer(directory, console="off", tensorboard=False)
    try:
      for step in range(100):
        writer.write(step, {"train/loss": 1 / 3})
    except OSError as error:
      print(error)
      print(step)
    """,
  )
  assert result.returncode == 0, result.stderr
  message, step = result.stdout.splitlines()
  assert "metrics.write: got 'File too large' writing" in message and "bytes free" in message
  data = (tmp_path / "metrics.jsonl").read_bytes()
  assert data.endswith(b"\n")
  assert [line["step"] for line in metrics.read(tmp_path / "metrics.jsonl")] == list(
    range(int(step))
  )


def test_a_full_disk_is_said_of_tensorboard_too(tmp_path):
  result = run_with_file_limit(
    tmp_path,
    3000,
    """
    writer = metrics.Writer(directory, console="off", tensorboard=True)
    try:
      for step in range(1000):
        # An event each, and one short line.
        writer.write(step, {"a/" + 20 * letter: 1.0 for letter in "abcdefgh"})
    except OSError as error:
      print(error)
    """,
  )
  assert result.returncode == 0, result.stderr
  assert "metrics.write: got 'File too large' writing" in result.stdout
  assert "tensorboard" in result.stdout


@pytest.mark.thorough
def test_a_summary_is_written_whole_or_not_at_all(tmp_path):
  path = tmp_path / "deep/summary.json"
  metrics.write_summary(path, {"kl_max": jnp.float32(0.0), "loss": float("nan"), "n": [1, "a"]})
  assert strict(path.read_text()) == {"kl_max": 0.0, "loss": "NaN", "n": [1, "a"]}
  result = run_with_file_limit(
    path,
    20,
    """
    try:
      metrics.write_summary(directory, {"text": "x" * 1000})
    except OSError as error:
      print(error)
    """,
  )
  assert "write_summary: got 'File too large'" in result.stdout, result.stderr
  assert strict(path.read_text())["loss"] == "NaN"
  assert os.listdir(path.parent) == ["summary.json"]
  with pytest.raises(ValueError, match="got object"):
    metrics.write_summary(path, {"thing": object()})
  with pytest.raises(OSError, match="Not a directory|File exists"):
    metrics.write_summary(path / "below", {})


# Console and TensorBoard.


def test_the_console_prints_a_line_a_step(tmp_path):
  stream = rich.console.Console(file=io.StringIO(), width=200)
  with metrics.Writer(
    tmp_path,
    tensorboard=False,
    stream=stream,
    console_digits={"rollout/reward": 4, "train/loss": 6},
  ) as writer:
    writer.write(7, {"train/loss": 0.123456, "rollout/reward": 1, "train/other": 2})
    writer.print("[bold]done[/bold]")
  assert stream.file.getvalue() == "step 7  reward 1  loss 0.123456\n[bold]done[/bold]\n"


def test_a_step_of_which_the_console_shows_no_number_has_no_line(tmp_path):
  stream = rich.console.Console(file=io.StringIO(), width=200)
  with metrics.Writer(
    tmp_path, tensorboard=False, stream=stream, console_digits={"train/loss": 6}
  ) as writer:
    writer.write(0, {"heldout/accuracy": 0.5})
    assert not writer.note("evaluating")  # No progress bar exists.
  assert not stream.file.getvalue()


def test_a_terminal_gets_a_progress_bar(tmp_path):
  stream = rich.console.Console(file=io.StringIO(), width=100, force_terminal=True)
  with metrics.Writer(tmp_path, tensorboard=False, stream=stream, total_steps=4) as writer:
    assert writer.note("sampling, 3 of 8 requests")
    writer.write(4, {"train/loss": 0.5})
  assert "step 4" in stream.file.getvalue() and "loss 0.5" in stream.file.getvalue()
  assert "sampling, 3 of 8 requests" in stream.file.getvalue()
  assert not writer.note("afterwards")


def test_tensorboard_events_hold_the_same_numbers(tmp_path):
  with metrics.Writer(tmp_path, console="off") as writer:
    writer.write(0, {"train/loss": 0.5})
    writer.write(1, {"train/loss": 0.25})
  with metrics.Writer(tmp_path, console="off", resume_step=0) as writer:
    writer.write(1, {"train/loss": 0.125})
  found, starts = [], []
  for path in sorted((tmp_path / "tensorboard").iterdir()):
    data, at = path.read_bytes(), 0
    while at < len(data):  # A record: u64 length, u32 checksum, the event, u32 checksum.
      length = int.from_bytes(data[at : at + 8], "little")
      event = event_pb2.Event.FromString(data[at + 12 : at + 12 + length])
      at += length + 16
      found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
      if event.session_log.status == event_pb2.SessionLog.START:
        starts.append(event.step)
  assert found == [(0, "train/loss", 0.5), (1, "train/loss", 0.25), (1, "train/loss", 0.125)]
  assert starts == [1]
