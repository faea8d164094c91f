"""A run's memory is estimated before anything is allocated."""

from __future__ import annotations

import dataclasses

import pytest
from small_run import CONFIG, MODEL

from seerjax.models import presets
from seerjax.run import memory as memory_lib
from seerjax.run.config import RunConfig

pytestmark = pytest.mark.usefixtures("programs_on_disk")


def test_a_run_that_cannot_fit_is_refused_with_the_figures():
  model = dataclasses.replace(presets.get("qwen3-32b"), num_layers=1, hidden_size=2**22)
  message = (
    r"got a run that needs more memory than is free \(memory, MiB a device: [\d,]+ masters, [\d,]+"
    r" moments, .* gradient sums, [\d,]+ activations, [\d,]+ scratch pages, .* are free\), expected"
    r" a run that fits; set TrainerConfig.remat=layer"
  )
  with pytest.raises(ValueError, match=message):
    memory_lib.memory_plan(RunConfig(), model)


def test_a_plan_is_counted_before_anything_is_taken():
  plan = memory_lib.memory_plan(CONFIG, MODEL)
  two = memory_lib.memory_plan(dataclasses.replace(CONFIG, data_parallel_size=2), MODEL)
  assert 0 < plan.needed < two.needed and plan.others == 0 < two.others
  assert plan.engine.num_pages > 0 and plan.pages > 0
  engine = dataclasses.replace(CONFIG.engine, release_kv_while_training=True)
  back = dataclasses.replace(CONFIG, engine=engine)
  assert memory_lib.memory_plan(back, MODEL).needed < plan.needed
  assert "released while training" in memory_lib.memory_plan(back, MODEL).describe()
