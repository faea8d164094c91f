"""Steps compiled for a GPU: errors, the tables, and the whole engine step.

The step itself is compiled where JAX's CUDA plugin is (`bash launch/gpu_compile.sh`).
"""

from __future__ import annotations

import dataclasses

import pytest

from experiments.compiled import gpu_step
from experiments.compiled.gpu_step import Step
from pallas_kernels import sass
from pallas_kernels.program import Start
from pallas_kernels.sass import Kernel, Launch
from seerjax.models import presets

OURS = Start("mpmd_map", True, ("bf16[64,4096]", "bf16[4096,768]"), ("bf16[64,768]",))
OTHER = Start("fusion", False, ("f32[64,8]",), ("f32[64,8]",))
LAUNCH = Launch("matmul", 6, 0, ("bfloat16[64,4096]", "bfloat16[4096,768]"), ("bfloat16[64,768]",))
HEAD = Launch("token_logprobs", 132, 0, ("bfloat16[64,8]", "bfloat16[99,8]"), ("float32[6,128]",))


def step(num_layers: int, ours: int, others: int, **more) -> Step:
  """Returns a step with `ours` and `others` launches per layer, and one of ours at the end."""
  starts = (OURS,) * (num_layers * ours + 1) + (OTHER,) * (num_layers * others)
  launches = (LAUNCH,) * (num_layers * ours) + (HEAD,)
  return Step("engine step", 64, num_layers, starts=starts, launches=launches, **more)


def test_a_layers_launches_are_those_of_two_less_those_of_one():
  steps = [step(1, 10, 12), step(2, 10, 12)]
  assert gpu_step.of_layer(steps, 64) == (10, 12)
  assert gpu_step.of_layer(steps, 1) is None and gpu_step.of_layer(steps[:1], 64) is None
  assert gpu_step.complaints(steps) == []


@pytest.mark.parametrize("ours, others", [(11, 12), (10, 13)])
def test_more_launches_than_claimed_are_refused(ours: int, others: int):
  (sentence,) = gpu_step.complaints([step(1, ours, others), step(2, ours, others)])
  assert sentence == (
    f"engine step: 64 rows: got {ours} launches of our kernels and {others} others a layer,"
    " expected at most 10 and 12"
  )


def test_what_the_host_would_wait_for_is_refused():
  waiting = step(1, 1, 1, unknown_loops=("while.5",), branches=("cond.2",))
  (sentence,) = gpu_step.complaints([waiting])
  assert sentence == (
    "engine step: 64 rows, 1 layer: got loops of unknown length ['while.5'] and branches"
    " ['cond.2'], expected none: the host would wait for each"
  )
  assert gpu_step.complaints([dataclasses.replace(waiting, kind="train step")]) == []


def test_a_deep_step_that_compiles_for_long_is_refused():
  deep = step(36, 1, 1, lowering_seconds=100.0, compile_seconds=81.0)
  (sentence,) = gpu_step.complaints([deep])
  assert sentence.endswith("36 layers: got 181 CPU seconds, expected at most 180")
  assert gpu_step.complaints([dataclasses.replace(deep, num_layers=8)]) == []


def test_kernels_of_steps_are_refused_as_those_of_cases():
  kernel = Kernel("matmul", 384, 168, 4, 4, (), {}, 0)
  found = gpu_step.complaints([step(1, 1, 1, kernels=(kernel,)), step(1, 1, 1, error="no")])
  assert found == [
    "engine step: 64 rows, 1 layer: matmul: got 4 bytes of spill stores and 4 of spill loads,"
    " expected at most 0 a thread",
    "engine step: 64 rows, 1 layer: does not compile: no",
  ]


def test_the_roofline_sums_all_layers():
  works = gpu_step.works([step(1, 2, 3), step(2, 2, 3)], 64)
  num_layers = presets.get(gpu_step.MODEL).num_layers
  assert [(work.name, number) for work, number in works] == [
    ("matmul", 2 * num_layers),
    ("token_logprobs", 1),
    ("XLA", 3 * num_layers),
  ]
  lines = gpu_step.roofline_table(works, 0.0).splitlines()
  assert lines[2].startswith("| matmul | bfloat16[4096,768] | 72 | 6.")
  assert lines[-1].startswith(f"| **all** |  | {5 * num_layers + 1} |")
  assert gpu_step.works([step(1, 2, 3)], 64) == []


def test_the_tables_name_every_step_and_their_numbers_of_rows():
  steps = [step(1, 10, 12), step(2, 10, 12), Step("train step", 64, 1, error="ValueError: no")]
  text = gpu_step.markdown(steps)
  assert "| engine step, 64 rows, 1 layer | 11 | 12 | 0 | 0 | 0 | 0.0 | 0.0 |" in text
  assert "| train step, 64 rows, 1 layer | ValueError: no |" in text
  assert "| 64 | 10 | 12 |" in text
  assert "computed, not measured" in text
  for heading in ("### 1 row, ", "### 64 rows, ", "### 256 rows, "):
    assert heading in text


@pytest.mark.skipif(sass.reason_against() is None, reason="JAX's CUDA plugin is here")
def test_without_the_plugin_it_says_what_is_missing(capsys: pytest.CaptureFixture[str]):
  with pytest.raises(SystemExit):
    gpu_step.main([])
  assert "got no module jax_cuda13_plugin, expected JAX's CUDA plugin" in capsys.readouterr().err


@pytest.mark.skipif(sass.reason_against() is not None, reason=str(sass.reason_against()))
def test_the_engines_whole_step_compiles_and_waits_for_nothing():
  made = gpu_step.compiled("engine step", 64, presets.get(gpu_step.MODEL).num_layers)
  assert not made.error, made.error
  assert made.unknown_loops == () and made.branches == ()
  names = {kernel.name for kernel in made.kernels}
  assert {"attention", "token_logprobs"} <= names and any(n.startswith("matmul") for n in names)
  assert gpu_step.complaints([made]) == []
