"""One question in random batches on real weights: cells, their contents, and a small run."""

from __future__ import annotations

import dataclasses
import pathlib

import made_rollouts
import numpy as np
import pytest

from experiments import cells as cells_lib
from experiments.invariance import real as real_invariance
from experiments.invariance.real import Cell, Peers, Settings
from seerjax.types import Completion


def completion(tokens: tuple[int, ...], logprobs: list[float]) -> Completion:
  one = made_rollouts.completion("probe", tokens, logprobs=logprobs)
  return dataclasses.replace(one, raw_logprobs=-one.raw_logprobs)


def test_cells_grow_block_by_block_and_take_seeds_in_turn():
  found = real_invariance.cells_of(("native", "untiled"), ("bfloat16",), (0.0, 1.0), 120)
  assert len(found) == len({*found}) == 2 * 2 * 6  # 6 blocks of 20.
  assert found[:2] == [
    Cell("native", "bfloat16", 0.0, 0, 0),
    Cell("untiled", "bfloat16", 0.0, 0, 0),
  ]
  sampled = [(cell.seed, cell.block) for cell in found if cell.temperature == 1.0]
  assert sampled[::2] == [(0, 0), (1, 0), (2, 0), (3, 0), (4, 0), (0, 1)]


def test_paths_are_asked_in_the_same_company():
  one, other = Cell("native", "float32", 1.0, 3, 2), Cell("untiled", "bfloat16", 1.0, 3, 2)
  draw = lambda cell: real_invariance.rng_of(cell).integers(0, 1000, 9).tolist()
  assert draw(one) == draw(other) != draw(one._replace(block=1))


def test_what_a_cell_keeps_has_every_bit():
  first = completion((1, 2), [-1.0, -0.0])
  other = completion((1, 2), [-1.0, 0.0])  # Of another bit.
  kept = real_invariance.patterns([first, other, first])
  assert [one["count"] for one in kept] == [2, 1]
  back = real_invariance.completions_of(kept)
  bits = [one.behaviour_logprobs.view(np.uint32).tolist() for one in back]
  wanted = [one.behaviour_logprobs.view(np.uint32).tolist() for one in (first, first, other)]
  assert bits == wanted and back[0].raw_logprobs.tolist() == [1.0, 0.0]


def test_rows_compare_completions_of_one_seed():
  def record(seed: int, block: int, completions: list[Completion]) -> dict:
    cell = Cell("untiled", "bfloat16", 1.0, seed, block)
    return cell._asdict() | dict(patterns=real_invariance.patterns(completions), seconds=2.0)

  same = completion((1, 2, 3), [-1.0, -2.0, -3.0])
  records = [
    record(0, 0, [same, same]),
    record(0, 1, [completion((1, 2, 4), [-1.0, -2.0, -3.0])]),
    record(1, 0, [completion((9,), [-1.0])]),  # Texts of other seeds are not compared.
  ]
  (row,) = real_invariance.rows_of(records)
  assert (row["seeds"], row["completions"], row["distinct_tokens"]) == (2, 4, 3)
  assert (row["first_divergence"], row["first_bit_divergence"]) == (2, 2)
  assert "| untiled | bfloat16 | 1 | 2 | 4 | 2 | 3 | 2 | 3 | 2 | 6 |" in real_invariance.table(
    records
  )


def test_a_peers_batches_hold_the_question_as_often_as_asked():
  rng = np.random.default_rng(0)
  batches = real_invariance.peer_batches(rng, [1, 2, 3], 50)
  assert sum(batch.count([1, 2, 3]) for batch in batches) == real_invariance.BLOCK
  assert all(1 <= len(batch) <= 8 for batch in batches) and len(batches) > 1


@pytest.mark.parametrize(
  "paths, dtypes, message",
  [
    (["tiled"], ["float32"], r"--paths: got tiled, expected some of native, untiled, transformers"),
    ([], ["float32"], r"--paths: got none"),
    (["native"], ["float16"], r"--dtypes: got float16, expected some of bfloat16, float32"),
  ],
)
def test_what_there_is_not_is_refused(paths, dtypes, message):
  with pytest.raises(ValueError, match=message):
    real_invariance.check(paths, dtypes)


@pytest.mark.parametrize("path, flag", [("transformers", "python"), ("llama.cpp", "gguf")])
def test_a_peer_that_is_nowhere_is_refused(path, flag):
  cell = Cell(path, "float32", 0.0, 0, 0)
  with pytest.raises(ValueError, match=f"--{flag}: got none with --paths={path}"):
    real_invariance.of_peer(Settings(model="nano"), cell, Peers())


@pytest.mark.long
def test_a_small_run_goes_on_where_it_stopped(tiny: str, tmp_path: pathlib.Path):
  settings = Settings(model=tiny, prompt="Tom has 3 apples.", max_tokens=8)
  wanted = real_invariance.cells_of(("native", "untiled"), ("float32",), (1.0,), 20)
  lines: list[str] = []
  run = lambda: real_invariance.run(settings, wanted, tmp_path, peers=Peers(), say=lines.append)
  text = run()
  native, untiled = real_invariance.rows_of(
    cells_lib.read(tmp_path / cells_lib.FILE_NAME, dataclasses.asdict(settings))
  )
  assert (native["distinct_tokens"], native["distinct_bits"]) == (1, 1)
  assert untiled["distinct_bits"] > 1  # The twin.
  num_lines = len(lines)
  assert run() == text == (tmp_path / "table.md").read_text() and len(lines) == num_lines
