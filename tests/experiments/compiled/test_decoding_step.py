"""The step in which every row decodes: each row's context, and the size of the page table."""

from __future__ import annotations

import numpy as np

from experiments.compiled import decoding_step
from experiments.compiled.engine_step import SMALL


def test_every_row_decodes_at_the_end_of_a_context_of_its_own():
  inputs = decoding_step.inputs(SMALL, 3, 100)
  assert inputs.batch.page_table.tolist() == [[1, 2], [3, 4], [5, 6]]
  np.testing.assert_array_equal(inputs.batch.positions, [99, 99, 99])
  np.testing.assert_array_equal(inputs.batch.slots, [2 * 64 + 35, 4 * 64 + 35, 6 * 64 + 35])
  np.testing.assert_array_equal(inputs.positions, [100, 100, 100])
  np.testing.assert_array_equal(inputs.batch.segment_length, [1, 1, 1])


def test_a_table_has_room_for_a_longer_context():
  inputs = decoding_step.inputs(SMALL, 2, 100, max_model_len=200)
  assert inputs.batch.page_table.tolist() == [[1, 2, 0, 0], [3, 4, 0, 0]]
  np.testing.assert_array_equal(inputs.batch.slots, [2 * 64 + 35, 4 * 64 + 35])
  shorter = decoding_step.inputs(SMALL, 2, 100, max_model_len=64)
  assert shorter.batch.page_table.shape == (2, 2)
