"""XLA's GPU flags: additions, errors, and the cases that change nothing."""

from __future__ import annotations

import os

import pytest

from seerjax import xla_flags

GPU = "--xla_gpu_autotune_level=0 --xla_gpu_deterministic_ops=true"


@pytest.mark.parametrize(
  "flags",
  [
    "",
    "--xla_gpu_autotune_level=0",
    "--xla_gpu_deterministic_ops",
    "--xla_gpu_deterministic_ops=1 --xla_gpu_autotune_level=0",
    GPU,
  ],
)
def test_flags_of_a_gpu_are_spelled_alike_whoever_set_them(flags):
  assert xla_flags.with_gpu_flags(flags) == GPU
  assert xla_flags.with_gpu_flags(f"{flags} --xla_dump_to=there") == f"--xla_dump_to=there {GPU}"


def test_a_gpu_without_the_flags_has_no_fingerprint():
  xla_flags.require_gpu_flags(GPU)
  with pytest.raises(ValueError, match=r"XLA_FLAGS: got '' on a GPU, expected '--xla_gpu_autotu"):
    xla_flags.require_gpu_flags("")
  with pytest.raises(ValueError, match=r"call seerjax.xla_flags.pin\(print\) at the start"):
    xla_flags.require_gpu_flags("--xla_gpu_autotune_level=0")


@pytest.mark.parametrize(
  ("platforms", "has_plugin", "has_device", "expected"),
  [
    ("", True, True, True),
    ("", True, False, False),
    ("", False, True, False),
    ("cuda,cpu", False, False, True),
    ("gpu", True, True, True),
    ("cpu", True, True, False),
    ("tpu,cpu", True, True, False),
  ],
)
def test_who_runs_on_a_gpu(platforms, has_plugin, has_device, expected):
  assert xla_flags.takes_gpu(platforms, has_plugin, has_device) is expected


def test_on_a_cpu_nothing_is_set_and_nothing_said():
  before, lines = dict(os.environ), []
  xla_flags.pin(lines.append)
  assert os.environ == before
  assert lines == []
