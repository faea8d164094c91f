"""Default learning rates by model, warnings, and that nano's rate is not used for others."""

from __future__ import annotations

import dataclasses

import pytest

from seerjax.models import presets as shapes
from seerjax.run import config as config_lib, learning_rates, presets
from seerjax.trainer import optimizer as optimizer_lib

LARGE = [name for name in shapes.CONFIGS if not name.startswith("nano")]


def rate_of(name: str, **changes) -> float:
  """Returns the learning rate of a run that leaves it open."""
  config = dataclasses.replace(presets.of_model(name), **changes)
  return config_lib.for_model(config.shared, shapes.get(name))[0].optimizer.learning_rate


@pytest.mark.parametrize("name", LARGE)
def test_a_large_model_gets_what_others_publish(name):
  assert rate_of(name) == 1e-6
  assert 10 * 1e-6 <= rate_of(name, lora_rank=8) <= 100 * 1e-6


def test_a_rate_never_rises_with_the_model_and_adapters_have_the_higher_one():
  counts = [10**power * digit for power in range(3, 12) for digit in (1, 2, 5)]
  for is_lora in (False, True):
    rates = [learning_rates.usual(count, is_lora=is_lora) for count in counts]
    assert rates == sorted(rates, reverse=True)
    assert all(float(f"{rate:.0e}") == rate for rate in rates)
  assert all(
    learning_rates.usual(count, is_lora=False) < learning_rates.usual(count, is_lora=True)
    for count in counts
  )


@pytest.mark.parametrize(
  ("name", "millions"),
  [("nano", 1.13), ("qwen3-0.6b", 596), ("qwen3-8b", 8191), ("llama-3.2-1b", 1236)],
)
def test_parameters_are_counted(name, millions):
  count = learning_rates.num_parameters(shapes.get(name))
  assert count / 1e6 == pytest.approx(millions, rel=2e-3)


@pytest.mark.parametrize(
  ("name", "rate", "is_lora", "usual"),
  [
    ("nano-gpu", 3e-5, False, "1e-06"),
    ("qwen3-0.6b", 2e-4, False, "1e-06"),  # The main job's.
    ("qwen3-0.6b", 1e-5, False, "1e-06"),
    ("qwen3-8b", 3e-3, True, "2e-05"),  # The tiny policy's.
    ("qwen3-8b", 2e-4, True, "2e-05"),
    ("nano-10m", 1e-4, False, "1e-05"),
    ("qwen3-0.6b", 5e-6, False, ""),
    ("qwen3-0.6b", 1e-6, False, ""),
    ("qwen3-8b", 4e-5, True, ""),  # As TTT-Discover published it.
    ("qwen3-8b", 1e-4, True, ""),
    ("nano", 2e-4, False, ""),
    ("nano", 3e-3, False, ""),
  ],
)
def test_a_rate_far_above_the_usual_one_is_warned_of(name, rate, is_lora, usual):
  warning = learning_rates.warning(rate, shapes.get(name), is_lora=is_lora)
  assert bool(warning) == bool(usual)
  if usual:
    what = "adapters of" if is_lora else "all of"
    assert f"OptimizerConfig.learning_rate: got {rate:g} for {what} " in warning
    assert f"expected about {usual} and at most " in warning
    assert f"set --config.optimizer.learning_rate={usual}, or 0" in warning


def test_the_main_jobs_sizes_are_nanos_alone():
  main = presets.main_job()
  assert presets.of_model("nano") == presets.of_model("nano-sleep") == main
  assert (main.data_parallel_size, main.rollout.prompts_per_step) == (2, 48)
  assert rate_of("nano") == 2e-4
  for name in ("Qwen/Qwen3-0.6B", "runs/grpo/model", "/models/nano"):
    other = presets.of_model(name)
    assert other == presets.named_model() and other.optimizer.learning_rate == 0
    assert (other.data_parallel_size, other.rollout.prompts_per_step) == (1, 16)


def test_an_optimiser_that_was_given_no_rate_is_refused():
  with pytest.raises(ValueError, match=r"OptimizerConfig.learning_rate: got 0, which only a run"):
    optimizer_lib.make_optimizer(optimizer_lib.OptimizerConfig())
