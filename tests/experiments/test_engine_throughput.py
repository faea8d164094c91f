"""The workload of the throughput experiment, its tables by hand, and one peer in its process."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest

from experiments import engine_throughput
from experiments.engine_throughput import Workload
from seerjax.models import loading as model_loading, tokenizer as tokenizer_lib

RESULTS = {
  "tiled-8": dict(tokens_per_second=2000.0, lowest=1900.0, highest=2100.0, peak=2**30),
  "untiled-1": dict(tokens_per_second=2500.0, lowest=2400.0, highest=2600.0, peak=2**30),
  "hf-static": dict(tokens_per_second=200.0, lowest=190.0, highest=210.0, peak=2**29),
  "hf-continuous": dict(error="OSError: no"),
}


def test_lengths_are_grouped_and_long_tailed():
  lengths = engine_throughput.forced_lengths(Workload())
  assert lengths.shape == (16, 8)
  np.testing.assert_array_equal(lengths, engine_throughput.forced_lengths(Workload()))
  assert lengths.min() >= 1
  assert np.median(lengths) < lengths.mean() < lengths.max() / 3
  logs = np.log(lengths)
  assert np.var(logs.mean(axis=1)) > 2 * np.mean(np.var(logs, axis=1)) / 8  # Alike in a group.
  assert engine_throughput.forced_lengths(Workload(max_tokens=20)).max() == 20


def test_ratios_by_hand():
  text = engine_throughput.table(RESULTS)
  assert "| 2,000 (1,900 to 2,100) | 10.0 | 1,024 |" in text
  assert "| 200 (190 to 210) | 1.0 | 512 |" in text
  assert "does not run here: OSError: no" in text
  assert engine_throughput.costs(RESULTS).startswith("Invariance with 8 slabs costs +25% time")
  alone = {name: RESULTS[name] for name in ("tiled-8", "untiled-1")}
  assert "not measured" in engine_throughput.table(alone)


def test_without_torch_the_engine_is_measured_alone():
  lines: list[str] = []
  names = engine_throughput.chosen_peers([], lines.append)
  if engine_throughput.missing_packages():
    assert names == ["tiled-8", "tiled-1", "untiled-1"]
    assert "this engine is measured alone" in lines[0]
  else:
    assert names == list(engine_throughput.PEERS)
    assert not lines


def test_an_unknown_peer_is_refused():
  with pytest.raises(ValueError, match=r"--peers: got vllm, expected some of tiled-8, tiled-1"):
    engine_throughput.chosen_peers(["tiled-8", "vllm"], print)


@pytest.mark.long
def test_peers_take_turns_and_give_every_token(tiny: str, tmp_path: pathlib.Path):
  workload = Workload(model=tiny, num_prompts=1, group_size=2, max_tokens=4, num_instances=2)
  lines: list[str] = []
  results = engine_throughput.run(workload, ["tiled-8"], 1, tmp_path, lines.append)
  assert results["tiled-8"]["tokens_per_second"] > 0
  assert results["tiled-8"]["peak"] > 2**20
  assert "SeerJAX, tiled, 8 slabs (as shipped)" in (tmp_path / "table.md").read_text()
  assert (tmp_path / "throughput.png").stat().st_size > 1000


def test_an_answer_counts_if_every_token_came():
  assert engine_throughput.fault(dict(seconds=1.0, tokens=1200, peak=1), 1200) == ""
  assert engine_throughput.fault(dict(error="OSError: no"), 1200) == "OSError: no"
  found = engine_throughput.fault(dict(seconds=1.0, tokens=1100, peak=1), 1200)
  assert found == "gave 1,100 tokens where 1,200 were asked for"


def test_a_peer_that_cannot_run_says_why_and_holds_up_no_other(tmp_path: pathlib.Path):
  # A tokenizer without weights: prompts can be made, and nobody can answer them.
  tokenizer_lib.load(model_loading.NANO).save(tmp_path / "model")
  workload = Workload(model=str(tmp_path / "model"), num_prompts=1, group_size=2, max_tokens=4)
  lines: list[str] = []
  results = engine_throughput.measure(["tiled-8"], workload, 1, lines.append)
  assert "config.json: got no such file" in results["tiled-8"]["error"]
  assert len(lines) == 1 and "SeerJAX, tiled, 8 slabs (as shipped): does not run here" in lines[0]
  assert "does not run here: FileNotFoundError" in engine_throughput.table(results)


def test_a_process_that_ended_is_an_error(tmp_path: pathlib.Path):
  process = engine_throughput.Process("tiled-8", Workload(model=str(tmp_path / "none")), [(1,)])
  try:
    assert "no directory" in process.answer()["error"]
    assert process.answer() == dict(error="its process ended")
  finally:
    process.close()
