"""A run's memory is estimated before anything is allocated."""

from __future__ import annotations

import dataclasses

import pytest
from small_run import CONFIG, MODEL

from seerjax.models import config as model_config, presets
from seerjax.run import memory as memory_lib, programs as programs_lib
from seerjax.run.config import RunConfig

pytestmark = pytest.mark.usefixtures("programs_on_disk")


def plan_of(config: RunConfig, model: model_config.TransformerConfig) -> memory_lib.MemoryPlan:
  return memory_lib.memory_plan(programs_lib.make_programs(config.shared, model))


def test_a_run_that_cannot_fit_is_refused_with_the_figures():
  model = presets.get("qwen3-32b").changed(num_layers=1, hidden_size=2**22)
  message = (
    r"got a run that needs more memory than is free \(memory, MiB a device: [\d,]+ masters, [\d,]+"
    r" moments, .* gradient sums, [\d,]+ activations, [\d,]+ scratch pages, .* are free\), expected"
    r" a run that fits; set TrainerConfig.remat=layer"
  )
  with pytest.raises(ValueError, match=message):
    plan_of(RunConfig(), model)


def test_a_plan_is_counted_before_anything_is_taken():
  plan = plan_of(CONFIG, MODEL)
  two = plan_of(dataclasses.replace(CONFIG, data_parallel_size=2), MODEL)
  assert 0 < plan.needed < two.needed and plan.others == 0 < two.others
  assert plan.engine.num_pages > 0 and plan.pages > 0
  engine = dataclasses.replace(CONFIG.engine, release_kv_while_training=True)
  back = dataclasses.replace(CONFIG, engine=engine)
  assert plan_of(back, MODEL).needed < plan.needed
  assert "released while training" in plan_of(back, MODEL).describe()
