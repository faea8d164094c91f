"""The throughput experiment: its workload, tables by hand, and one peer in its own process."""

from __future__ import annotations

import pathlib
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from experiments import peer_process
from experiments.throughput import engine as engine_throughput
from experiments.throughput.engine import Workload
from seerjax.models import loading as model_loading, tokenizer as tokenizer_lib


def result(rate: float, *, per_cpu: float, mebibytes: int) -> dict[str, Any]:
  """A peer's numbers, of 2,000 useful tokens a round."""
  return dict(
    tokens_per_second=rate,
    lowest=rate - 100,
    highest=rate + 100,
    tokens_per_cpu_second=per_cpu,
    seconds=[2000 / rate],
    cpu_seconds=[2000 / per_cpu],
    peak=mebibytes * 2**20,
  )


RESULTS = {
  "native-k": result(8000.0, per_cpu=4000.0, mebibytes=1024),
  "tiled-8": result(2000.0, per_cpu=1000.0, mebibytes=1024),
  "untiled-1": result(2500.0, per_cpu=1250.0, mebibytes=1024),
  "hf-static": result(200.0, per_cpu=100.0, mebibytes=512),
  "hf-sorted-32": result(2100.0, per_cpu=800.0, mebibytes=512),
  "hf-continuous": dict(error="OSError: no"),
}
# Every package that a peer needs, by kind.
HERE = {kind: [] for kind in peer_process.PACKAGES}


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
  assert "| 2,000 (1,900 to 2,100) | 10.0 | 1,000 | 1.00 | 2.00 | 1,024 |" in text
  assert "| 200 (100 to 300) | 1.0 | 100 | 10.00 | 20.00 | 512 |" in text
  assert "does not run here: OSError: no" in text
  assert engine_throughput.costs(RESULTS).startswith("Invariance with 8 slabs costs +25% time")
  alone = {name: RESULTS[name] for name in ("tiled-8", "untiled-1")}
  assert "not measured" in engine_throughput.table(alone)


def test_aims_by_hand():
  text = engine_throughput.aims(RESULTS)
  assert "| SeerJAX, tiled, 8 slabs | 4 | 4.0 | 4.0 | yes |" in text
  assert "one batch of all | 10 | 40.0 | 40.0 | yes |" in text
  assert "sorted by known length | 4 | 3.8 | 5.0 | **no** |" in text
  assert "slots by known length | 3 | not measured |  |  |" in text
  without = {name: RESULTS[name] for name in ("tiled-8", "hf-static")}
  assert engine_throughput.aims(without) == (
    "SeerJAX, native, 8 steps per visit was not measured, so no aim is checked."
  )


def test_peers_without_their_packages_are_left_out_and_named():
  lines: list[str] = []
  everyone = list(engine_throughput.PEERS)
  assert engine_throughput.chosen_peers([], HERE, lines.append) == everyone
  assert not lines
  missing = HERE | {"transformers": ["torch", "transformers"], "llama.cpp": ["xllamacpp"]}
  chosen = engine_throughput.chosen_peers([], missing, lines.append)
  assert chosen == [name for name in everyone if engine_throughput.PEERS[name].kind == "ours"]
  assert "torch and transformers not installed: hf-static, hf-static-32, hf-sorted-32" in lines[0]
  assert lines[1].startswith("xllamacpp not installed: llama-cpp left out (`bash launch/peers.sh`")
  lines.clear()
  engine_throughput.chosen_peers(["native"], missing, lines.append)
  assert not lines  # No lines were requested.


def test_packages_are_looked_for_in_the_python_that_runs_the_peer():
  assert peer_process.missing_of("ours", sys.executable) == []
  found = peer_process.pythons("/usr/bin/another")
  assert found["transformers"] == "/usr/bin/another"
  assert found["ours"] == found["llama.cpp"] == sys.executable


def test_an_unknown_peer_is_refused():
  with pytest.raises(ValueError, match=r"--peers: got vllm, expected some of native-k, native"):
    engine_throughput.chosen_peers(["tiled-8", "vllm"], HERE, print)


@pytest.mark.long
def test_peers_take_turns_and_give_every_token(tiny: str, tmp_path: pathlib.Path):
  workload = Workload(model=tiny, num_prompts=1, group_size=2, max_tokens=4, data_parallel_size=2)
  lines: list[str] = []
  results = engine_throughput.run(workload, ["tiled-8"], 1, tmp_path, lines.append)
  assert results["tiled-8"]["tokens_per_second"] > 0
  assert results["tiled-8"]["tokens_per_cpu_second"] > 0
  assert results["tiled-8"]["peak"] > 2**20
  assert "SeerJAX, tiled, 8 slabs" in (tmp_path / "table.md").read_text()
  assert (tmp_path / "throughput.png").stat().st_size > 1000


def test_an_answer_counts_if_every_token_came():
  assert engine_throughput.fault(dict(seconds=1.0, tokens=1200, peak=1), 1200) == ""
  assert engine_throughput.fault(dict(error="OSError: no"), 1200) == "OSError: no"
  found = engine_throughput.fault(dict(seconds=1.0, tokens=1100, peak=1), 1200)
  assert found == "gave 1,100 tokens, 1,200 were requested"


def test_a_peer_that_cannot_run_says_why_and_holds_up_no_other(tmp_path: pathlib.Path):
  # A tokenizer without weights: prompts can be made, but not answered.
  tokenizer_lib.load(model_loading.NANO).save(tmp_path / "model")
  workload = Workload(model=str(tmp_path / "model"), num_prompts=1, group_size=2, max_tokens=4)
  lines: list[str] = []
  results = engine_throughput.measured(
    ["tiled-8"], workload, 1, lines.append, {"ours": sys.executable}
  )
  assert "config.json: got no such file" in results["tiled-8"]["error"]
  assert len(lines) == 1 and "SeerJAX, tiled, 8 slabs: does not run here" in lines[0]
  assert "does not run here: FileNotFoundError" in engine_throughput.table(results)


def test_a_peers_peak_is_its_own_and_not_that_of_who_started_it():
  held = np.ones(2**27, np.float32)  # 512 MiB, more than an idle peer needs.
  program = (
    "import resource; from experiments import peer_process as e;"
    " print(e.peak_memory(), 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
  )
  command = [sys.executable, "-c", program]
  done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=peer_process.ROOT)
  own, with_parents = map(int, done.stdout.split())
  assert 2**22 < own < held.nbytes
  assert sys.platform != "linux" or with_parents >= held.nbytes  # The wrong measurement.


def test_a_process_that_ended_is_an_error(tmp_path: pathlib.Path):
  process = engine_throughput.start("tiled-8", Workload(model=str(tmp_path / "none")), [(1,)])
  try:
    assert "not a directory" in process.ask()["error"]
    assert process.ask() == dict(error="its process ended")
  finally:
    process.close()
