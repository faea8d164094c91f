"""Records shared between rooms: their derived values."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from seerjax.types import Completion

ONE = Completion(
  request_id="0/0/0",
  tokens=(1, 2),
  behaviour_logprobs=np.array([-1.0, -0.0], np.float32),
  raw_logprobs=np.array([-1.5, np.nan], np.float32),
  text="",
  finish_reason="stop",
  policy_version=0,
)


def test_equal_bits_are_equal_whoever_asks():
  other = dataclasses.replace(ONE, request_id="another", raw_logprobs=ONE.raw_logprobs.copy())
  assert ONE.has_bits_of(ONE) and ONE.has_bits_of(other)


@pytest.mark.parametrize(
  "changed",
  [
    dict(tokens=(1, 3)),
    dict(raw_logprobs=np.nextafter(ONE.raw_logprobs, np.float32(0))),
    dict(behaviour_logprobs=np.abs(ONE.behaviour_logprobs)),  # Zero where it was negative zero.
    dict(
      tokens=(1,),
      behaviour_logprobs=ONE.behaviour_logprobs[:1],
      raw_logprobs=ONE.raw_logprobs[:1],
    ),
  ],
)
def test_one_other_bit_is_noticed(changed):
  assert not ONE.has_bits_of(dataclasses.replace(ONE, **changed))
