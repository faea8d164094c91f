"""Cells of the digest table: the digested contents, errors, and (long) all cells."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import jax
import made_rollouts
import numpy as np
import pytest
import small_run
import tiny_model

from experiments.cluster import training as cluster_digests
from seerjax.models import huggingface, parameters
from seerjax.rollout import journal as journal_lib
from seerjax.types import Rollout

ROOT = pathlib.Path(__file__).parents[3]
# One head per possible device, and nano's vocabulary.
MODEL = tiny_model.SMALLEST.changed(vocab_size=512, num_layers=1, num_heads=8, num_kv_heads=8)
# With these settings, starting processes and compiling dominate a cell's cost.
SMALL = (
  "--config.task=small_run:Vowels", "--config.num_steps=4", "--config.checkpoint_every=2",
  "--config.rollout.prompts_per_step=2", "--config.rollout.group_size=4",
  "--config.rollout.max_tokens=12", "--config.evaluation.num_problems=2",
  "--config.engine.max_model_len=96", "--config.trainer.rows_per_micro_batch=128",
  "--config.trainer.sequences_per_micro_batch=4", "--config.scheduler.chunk_tokens=4",
)  # fmt: skip


def write_model(directory: pathlib.Path) -> None:
  """Writes the model of one layer, from weights that say something."""
  numerics = tiny_model.NATIVE
  master = parameters.init(jax.random.key(0), MODEL, numerics)
  master = jax.tree.map(lambda leaf: leaf * 4 if leaf.ndim > 1 else leaf, master)
  tokenizer = small_run.policy().require_tokenizer()
  huggingface.save(directory, master, MODEL, tokenizer=tokenizer, dtype="float32")


def rollout(logprob: np.float32) -> Rollout:
  return made_rollouts.rollout((1,), (3,), name="0/0/0", logprobs=[logprob])


def digest_of(directory: pathlib.Path, *logprobs: np.float32) -> str:
  path = directory / "journal.jsonl"
  with journal_lib.Journal(path, fingerprint={}, settings={}) as journal:
    for member, logprob in enumerate(logprobs):
      journal.append(0, 0, member, rollout(logprob))
  digest, count = cluster_digests.rollouts_digest(path)
  assert count == len(logprobs)
  return digest


def test_a_digest_is_of_every_bit(tmp_path):
  one, two = np.float32(-1), np.float32(-2)
  found = {
    digest_of(tmp_path / str(index), *logprobs)
    for index, logprobs in enumerate(
      [(one, two), (two, one), (one,), (one, np.nextafter(two, one)), (one, two)]
    )
  }
  assert len(found) == 4


def test_cells_come_in_the_order_of_the_table_and_another_is_refused():
  assert cluster_digests.chosen([]) == [*cluster_digests.PHASES]
  assert cluster_digests.chosen(["2_workers", "1x1"]) == ["1x1", "2_workers"]
  with pytest.raises(ValueError, match=r"--cells: got '3x3', expected some of \['1x1', '8x1'"):
    cluster_digests.chosen(["3x3"])


def test_a_table_by_hand():
  one = dict(learnt="1" * 64, rollouts="2" * 64, tokens=1234, steps=20, kl_max=0.0)
  found = cluster_digests.table([{**one, "name": "1x1"}])
  assert found.splitlines()[2].startswith(f"| 1x1 | `{'1' * 16}` | `{'2' * 16}` | 1,234 | 20 |")


def test_each_process_of_a_cell_is_told_who_it_is():
  [phase] = cluster_digests.PHASES["4_processes_4x2"]
  runs = cluster_digests.commands("4_processes_4x2", 0, phase, ["--config.seed=1"])
  assert [run[-1] for run in runs] == [f"--process_id={rank}" for rank in range(4)]
  assert all("--num_processes=4" in run and "--config.seed=1" in run for run in runs)
  assert phase.data_parallel_size * phase.tensor_parallel_size == 8


def command(directory: pathlib.Path, *arguments: str) -> subprocess.CompletedProcess:
  paths = os.pathsep.join((str(ROOT), str(ROOT / "tests" / "support")))
  return subprocess.run(
    [sys.executable, "-m", "experiments.cluster.training", f"--workdir={directory}", *arguments],
    cwd=ROOT, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True,
  )  # fmt: skip


def test_a_cell_whose_process_fails_says_what_that_said(tmp_path):
  done = command(tmp_path, "--cells=1x1", "--config.task=nowhere:Task")
  assert done.returncode
  assert re.search(r"cluster_digests: got status \d+ of a process, expected 0;", done.stderr)
  assert "nowhere" in done.stderr


@pytest.mark.long
def test_all_systems_learn_one_thing_from_the_same_answers(tmp_path):
  write_model(tmp_path / "model")
  arguments = (f"--config.model={tmp_path / 'model'}", *SMALL)
  done = command(tmp_path / "run", *arguments)
  print(done.stdout, done.stderr[-3000:])
  assert done.returncode == 0
  systems = len(cluster_digests.chosen([]))
  assert f"equal bits: {systems} systems learnt one thing" in done.stdout
  # And a cell is not run twice.
  again = command(tmp_path / "run", *arguments)
  assert f"{systems} were finished" in again.stdout + again.stderr
