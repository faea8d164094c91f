"""Each run of the experiment is the main job on its backend."""

from __future__ import annotations

import pytest

from experiments.learning import moe_routes


@pytest.mark.parametrize("backend", moe_routes.BACKENDS)
def test_each_run_is_the_main_job_on_its_backend(backend):
  config = moe_routes.config_of("nano-moe", backend, "bfloat16", 3)
  assert (config.model, config.num_steps, config.numerics.backend) == ("nano-moe", 3, backend)
