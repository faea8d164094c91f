"""The cost of a gradient, on a tiny model, and its table by hand."""

from __future__ import annotations

import pathlib

import pytest

from experiments import gradient_cost


def test_ratios_by_hand():
  def seconds(wall: float) -> dict[str, float]:
    return dict(wall=wall, lowest=wall - 0.01, highest=wall + 0.01, cpu=2 * wall)

  results = dict(
    rows=1234,
    seconds={
      "tiled": dict(forward=seconds(0.4), gradient=seconds(3.2)),
      "native": dict(forward=seconds(0.2), gradient=seconds(0.7)),
    },
  )
  text = gradient_cost.table(results)
  assert text.startswith("1,234 rows;")
  assert "| tiled | 0.400 (0.390 to 0.410) | 3.200 (3.190 to 3.210) | 0.800 | 6.400 | 8.0 |" in text
  assert "| native's gradient at most 4 of its forwards | 3.50 | yes |" in text
  assert "| native's forward at least 2.5 times as fast as tiled's | 2.00 | **no** |" in text


def test_more_than_one_micro_batch_is_refused(tiny: str):
  with pytest.raises(ValueError, match="--groups: got 9, which fill 3 micro-batches"):
    gradient_cost.calls(tiny, "tiled", 9)


def test_the_main_jobs_micro_batch_is_filled_by_the_default():
  batch, _ = gradient_cost.calls("nano", "tiled", 4)
  assert batch.targets.shape == (1, 2048)
  assert int(batch.tokens.num_rows[0]) > 1024


@pytest.mark.long
def test_both_implementations_take_turns(tiny: str, tmp_path: pathlib.Path):
  lines: list[str] = []
  results = gradient_cost.run(tiny, 1, 1, tmp_path, lines.append)
  assert set(results["seconds"]) == {"tiled", "native"}
  assert all(row["gradient"]["cpu"] > 0 for row in results["seconds"].values())
  assert (tmp_path / "table.md").read_text() in "\n".join(lines)
