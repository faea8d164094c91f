"""A gradient compared with torch's: the table by hand, and a stored cell of a tiny model."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from experiments import cells as cells_lib
from experiments.throughput import gradient as real_gradient

CONFIG = real_gradient.Config(
  model="", lengths=dict(float32=32, bfloat16=16), sequences=dict(float32=4, bfloat16=2)
)
MIB = 2**20


def record(dtype: str, side: str, seconds: float, **changes: float) -> dict[str, Any]:
  cell: dict[str, Any] = dict(dtype=dtype, side=side, round=0, seconds=seconds, cpu=2 * seconds)
  return cell | dict(loss=0.5, norm=2.0, held=100 * MIB, plan=0, peak=180 * MIB) | changes


def test_ratios_and_memory_by_hand():
  records = [
    record("float32", "ours", 2.0, plan=200 * MIB),
    record("float32", "ours-again", 3.0, plan=64 * MIB),
    record("float32", "torch", 3.0),
    record("float32", "torch-again", 2.4),
    record("bfloat16", "ours", 1.0, plan=100 * MIB),
    record("bfloat16", "torch", 9.0),
  ]
  text = real_gradient.table(records, CONFIG)
  line = "| float32, 128 rows | SeerJAX, remat=none | 1 | 2.00 (2.00 to 2.00) | 4.00 | 64.0 | 80 |"
  assert f"{line} 200 |" in text
  assert "| float32: at least 1.3 of torch's rows/s, each at its best | 1.20 | **no** |" in text
  assert "| bfloat16: at least 1.3 of torch's rows/s, each at its best | 9.00 | yes |" in text
  assert "| peak at most as planned | 0.40, 1.25, 0.80 of it | **no** |" in text


@pytest.mark.parametrize("change", [dict(norm=2.01), dict(loss=-0.5)], ids=["norm", "loss"])
def test_gradients_that_differ_are_named(change):
  same = record("float32", "ours", 1.0), record("float32", "torch", 1.0, norm=2.0001)
  assert not real_gradient.differing({(r["dtype"], r["side"]): r for r in same})
  other = same[0], record("float32", "torch", 1.0, **change)
  found = real_gradient.differing({(r["dtype"], r["side"]): r for r in other})
  assert f"float32 {next(iter(change))}" in found


@pytest.mark.parametrize("changes", [dict(sides=["our"]), dict(dtypes=["float16"])])
def test_a_name_that_is_not_known_is_refused(changes, tmp_path: pathlib.Path):
  names: dict[str, Any] = dict(sides=["ours"], dtypes=["float32"]) | changes
  with pytest.raises(ValueError, match=r"--(sides|dtypes): got (our|float16), expected some of"):
    real_gradient.run(CONFIG, rounds=1, directory=tmp_path, say=print, **names)


@pytest.mark.long
def test_a_cell_is_kept_and_not_measured_again(tiny: str, tmp_path: pathlib.Path):
  config = real_gradient.Config(model=tiny, lengths=CONFIG.lengths, sequences=CONFIG.sequences)
  lines: list[str] = []
  arguments: dict[str, Any] = dict(rounds=1, directory=tmp_path, say=lines.append)
  first = real_gradient.run(config, ["ours"], ["float32"], **arguments)
  assert first[0]["peak"] > 0 and first[0]["plan"] > 0 and first[0]["norm"] > 0
  again = real_gradient.run(config, ["ours"], ["float32"], **arguments)
  assert again == first == cells_lib.read(tmp_path / cells_lib.FILE_NAME, first[0]["settings"])
  assert sum(line.startswith("float32, round 0") for line in lines) == 1
