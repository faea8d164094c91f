"""The speed comparison at real size: seconds, ratios and table by hand, and a small model."""

from __future__ import annotations

import pathlib
import sys
import time

import pytest

from experiments.throughput import real as real_speed
from experiments.throughput.real import Cell, Config


class Turns:
  """A peer that responds at once, and records the order of calls."""

  def __init__(self, asked: list[tuple[str, int]], seconds: float):
    self.asked, self.seconds = asked, seconds

  def time(self, timed: str, cores: int) -> dict:
    self.asked.append((timed, cores))
    return dict(seconds=self.seconds, peak=2**30) if self.seconds else dict(error="no memory")


def record(dtype: str, kind: str, native: float, llama: float) -> dict:
  rates = {"native": [native, 2 * native, 3 * native], "llama-cpp": [llama]}
  return dict(Cell(dtype, kind)._asdict(), rates=rates, peaks={}, faults={})


def test_decoding_is_what_longer_answers_take_more_and_prefill_is_one_answer():
  asked: list[tuple[int, int, int]] = []

  def answer(batch: int, length: int, count: int) -> None:
    asked.append((batch, length, count))
    time.sleep(0.01 * count)

  assert real_speed.seconds_of(answer, "decode 8") > 0.05
  assert real_speed.seconds_of(answer, "prefill") >= 0.01
  assert asked == [(8, 16, 1), (8, 16, 1 + real_speed.DECODED[8]), (1, 512, 1)]
  assert real_speed.tokens_of("decode 8") == 8 * real_speed.DECODED[8]
  assert real_speed.tokens_of("prefill") == 512


def test_sides_take_turns_and_one_that_fails_is_left_out():
  asked: list[tuple[str, int]] = []
  processes = {"ours": Turns(asked, 0.5), "llama.cpp": Turns(asked, 0.0)}
  names = ["native", "llama-cpp", "native-1"]
  found = real_speed.measured(Cell("float32", "prefill"), processes, names, rounds=2)  # pyright: ignore[reportArgumentType]
  assert asked == [("prefill", 2), ("prefill", 2), ("prefill", 1)] + 2 * [
    ("prefill", 2), ("prefill", 1)
  ]  # fmt: skip
  assert found["rates"] == {"native": [1024, 1024], "llama-cpp": [], "native-1": [1024, 1024]}
  assert found["faults"] == {"llama-cpp": "no memory"}


def test_the_aims_by_hand():
  records = [record("float32", "decode 1", 10, 18), record("float32", "decode 8", 40, 40)]
  text = real_speed.table(
    records, ["native", "llama-cpp"], dict(copy=10e9, read=20e9), {"float32": 10**9}
  )
  assert "copy 10.0 GB/s, read 20.0 GB/s" in text
  assert "| float32 | decode 1 | 20.0 (10.0 to 30.0) | 18.0 (18.0 to 18.0) |" in text
  assert "| one sequence, against llama.cpp | float32, decode 1 | 1.1 | 1.11 | yes |" in text
  assert "| one sequence, of what memory allows | float32, decode 1 | 0.6 | 1.00 | yes |" in text
  assert "llama.cpp | float32, decode 8 | 2.5 | 2.00 | **no** |" in text
  assert "transformers |" not in text.split("| aim |")[1]


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    (dict(names=("vllm",)), "names: got vllm, expected some of native, native-1, llama-cpp"),
    (dict(names=("native",), dtypes=("int8",)), "dtypes: got int8, expected some of float32"),
    (dict(names=("native",), kinds=("decode 2",)), "kinds: got decode 2, expected some of dec"),
  ],
)
def test_an_unknown_name_is_refused(settings, message):
  with pytest.raises(ValueError, match=message):
    Config(model=pathlib.Path("m"), **settings)


@pytest.mark.parametrize("bandwidth", [real_speed.read_bandwidth, real_speed.copy_bandwidth])
def test_reading_and_copying_have_a_bandwidth(bandwidth):
  assert 1e7 < bandwidth(2, num_bytes=2**22, rounds=2) < 1e13


def test_models_whose_names_share_a_beginning_have_files_of_their_own():
  places = [pathlib.Path("m", f"qwen3-{size}") for size in ("0.6b", "0.7b")]
  assert [real_speed.gguf_file(place, "BF16") for place in places] == [
    pathlib.Path("m/qwen3-0.6b-bf16.gguf"), pathlib.Path("m/qwen3-0.7b-bf16.gguf")
  ]  # fmt: skip


@pytest.mark.thorough
def test_a_process_that_cannot_run_says_why(tmp_path: pathlib.Path):
  process = real_speed.Process("ours", tmp_path / "none", "bfloat16", sys.executable)
  try:
    error = process.time("decode 1", 1)["error"]
  finally:
    process.close()
  assert "not a directory" in error or "config.json" in error


@pytest.mark.long
def test_a_small_model_is_measured_and_its_cells_are_kept(tiny: str, tmp_path: pathlib.Path):
  lines: list[str] = []
  config = Config(
    model=pathlib.Path(tiny), names=("native",), dtypes=("float32",), kinds=("decode 1",), rounds=1
  )
  text = real_speed.run(config, tmp_path, lines.append, sys.executable)
  assert "| float32 | decode 1 |" in text
  begin = time.monotonic()
  assert real_speed.run(config, tmp_path, lines.append, sys.executable) == text
  assert time.monotonic() - begin < 5
