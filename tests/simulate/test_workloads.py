"""The presets match the paper's table."""

from __future__ import annotations

import pytest

from seerjax.simulate import workloads


@pytest.mark.parametrize("workload", workloads.WORKLOADS, ids=lambda workload: workload.name)
def test_presets_are_the_published_ones(workload: workloads.Workload):
  requests, devices, mean, cap = {
    "Moonlight": (3200, 32, 22_386, 65_536),
    "Qwen2-VL-72B": (9600, 128, 7_615, 40_960),
    "Kimi-K2": (6400, 256, 38_959, 98_304),
  }[workload.name]
  assert workload.num_groups * workload.group_size == requests
  assert workload.data_parallel_size * workload.devices == devices
  lengths = workload.lengths(0)
  assert lengths.shape == (workload.num_groups, workload.group_size)
  assert lengths.mean() == pytest.approx(mean, rel=0.03)
  assert lengths.max() == cap
  # A request of the cap fits an instance, or no schedule could end.
  assert workload.cluster().costs.kv_tokens > workload.prompt_tokens + cap


def test_at_most_four_parameters_are_fitted_and_only_where_columns_were_published():
  for workload in workloads.WORKLOADS:
    columns = 2 + (workload.published.preemptions is not None)
    assert len(workload.free) == columns <= 4
  assert workloads.MOONLIGHT.published.tail_share == pytest.approx(0.46, abs=0.005)
  assert workloads.QWEN2_VL_72B.published.tail_share == pytest.approx(0.58, abs=0.005)
  assert workloads.KIMI_K2.published.tail_share == pytest.approx(0.26, abs=0.005)
