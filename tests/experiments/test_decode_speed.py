"""Decode speed at real size: seconds, bandwidth and table by hand, and a small model."""

from __future__ import annotations

import pathlib
import sys
import time

import pytest

from experiments import decode_speed
from experiments.decode_speed import Config

CONFIG = Config(batches=(1, 8), decode_steps=4, repetitions=2)
HERE = dict.fromkeys(decode_speed.BUILDERS, sys.executable)


def test_decoding_is_what_longer_answers_take_more():
  asked: list[tuple[int, int]] = []

  def answer(batch: int, length: int) -> None:
    asked.append((batch, length))
    time.sleep(0.02 + 0.005 * length)

  found = decode_speed.decoding(answer, CONFIG)
  assert asked == [(1, 1), (1, 5)] * 3 + [(8, 1), (8, 5)] * 3
  assert {name: len(seconds["wall"]) for name, seconds in found.items()} == {"1": 2, "8": 2}
  assert all(seconds > 0.01 for seconds in found["8"]["wall"])


def test_the_share_of_bandwidth_and_aims_by_hand():
  def result(one: float, eight: float) -> dict:
    seconds = {"1": dict(wall=[one], cpu=[2 * one]), "8": dict(wall=[eight], cpu=[2 * eight])}
    return dict(batches=seconds, peak=2**30)

  results = {
    "native": result(0.5, 1.0),  # 8 and 32 tokens/s.
    "llama-cpp": result(0.4, 2.0),
    "transformers": dict(error="OSError: no"),
  }
  text = decode_speed.table(results, CONFIG, {1: 10e9, 2: 12e9}, 1_200_000_000)
  assert "10.0 GB/s with 1 thread, 12.0 GB/s with 2 threads" in text
  assert "allows 10.0 tokens/s at batch 1" in text
  assert "| SeerJAX, native | 1 | 8.0 | 4.0 | 0.80 | 1,024 |" in text
  assert "| llama.cpp | 8 | 16.0 | 8.0 | 1.60 | 1,024 |" in text
  assert "| transformers generate | does not run here: OSError: no |" in text
  assert "| batch 1: at least 0.6 of what bandwidth allows | 0.80 | yes |" in text
  assert "| batch 8: ahead of llama.cpp | 2.00 | yes |" in text
  slow = decode_speed.table({"native": result(2.0, 9.0)}, CONFIG, {1: 10e9}, 10**9)
  assert "| 0.20 | **no** |" in slow


def test_a_copy_has_a_bandwidth():
  assert 1e7 < decode_speed.copy_bandwidth(2, num_bytes=2**22, rounds=2) < 1e13


def test_models_whose_names_share_a_beginning_have_files_of_their_own():
  files = [decode_speed.gguf_file(pathlib.Path("m", f"qwen3-{size}")) for size in ("0.6b", "0.7b")]
  assert files == [pathlib.Path("m/qwen3-0.6b.gguf"), pathlib.Path("m/qwen3-0.7b.gguf")]


def test_an_unknown_side_is_refused():
  with pytest.raises(ValueError, match=r"--peers: got vllm, expected some of native, tiled"):
    decode_speed.chosen_peers(["native", "vllm"], HERE, print)


@pytest.mark.thorough
def test_a_process_that_cannot_run_says_why(tmp_path: pathlib.Path):
  found = decode_speed.measured("native", tmp_path / "none", CONFIG, sys.executable)
  assert "not a directory" in found["error"] or "config.json" in found["error"]


@pytest.mark.long
def test_a_small_model_is_measured_in_a_process_of_its_own(tiny: str, tmp_path: pathlib.Path):
  lines: list[str] = []
  config = Config(batches=(1, 2), decode_steps=4, repetitions=1)
  decode_speed.run(pathlib.Path(tiny), ["native", "tiled"], config, tmp_path, lines.append)
  text = (tmp_path / "table.md").read_text()
  assert "| SeerJAX, native | 2 |" in text and "| SeerJAX, tiled | 2 |" in text
  assert text in "\n".join(lines)
