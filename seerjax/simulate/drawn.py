"""Randomly drawn workloads, for testing claims about schedulers.

    seed -> likeness, spread, group size, scarce resource, chunk, mean, cap, machines -> lengths

They are small enough to run hundreds in minutes: 128 to 768 requests on 1 to 8 instances of one of
the paper's machines, with room for a sixth to two thirds of them at once.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from seerjax.simulate import cluster, lengths as lengths_lib, workloads


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrawnWorkload:
  """A randomly drawn workload.

  Attributes:
    seed: seed of the draw.
    scarce: the limiting resource: "KV", or "places" (slots) with plenty of memory.
    machine: name of the workload in `workloads.WORKLOADS` with the same instances.
    data_parallel_size: 1, 2, 4 or 8.
    num_groups: at least 8.
    group_size: 4 to 16.
    rho: similarity of lengths within groups, 0.02 to 0.95.
    sigma: standard deviation of ln L, 0.3 to 1.5.
    mean_tokens: 100 to 4,000; at most 24 chunks, if these are short.
    max_tokens: 3 to 20 times the mean.
    prompt_tokens: 16 to 1,024.
    chunk_tokens: 16 to 2,048.
    waves: number of requests relative to those that run at once: 1.5 to 6.
  """

  seed: int
  scarce: str
  machine: str
  data_parallel_size: int
  num_groups: int
  group_size: int
  rho: float
  sigma: float
  mean_tokens: float
  max_tokens: int
  prompt_tokens: int
  chunk_tokens: int
  waves: float

  def cluster(self) -> cluster.ClusterConfig:
    """Returns the configuration of the machines."""
    (machine,) = (one for one in workloads.WORKLOADS if one.name == self.machine)
    requests = self.num_groups * self.group_size / self.data_parallel_size
    most = self.prompt_tokens + self.max_tokens + 16  # The longest request alone always fits.
    if self.scarce == "KV":
      places = workloads.MAX_RUNNING
      positions = max(requests * (self.prompt_tokens + self.mean_tokens) / self.waves, most)
    else:
      places = max(int(requests / self.waves), 1)
      positions = requests * most
    costs = machine.cluster().costs
    room = costs.num_devices * costs.device_bytes
    share = ((positions + 16) * costs.kv_bytes + costs.resident_bytes) / room
    return cluster.ClusterConfig(
      data_parallel_size=self.data_parallel_size,
      costs=dataclasses.replace(costs, memory_share=share),
      max_running=places,
      prompt_tokens=self.prompt_tokens,
    )

  def lengths(self, sample: int = 0) -> np.ndarray:
    """Returns lengths i64[groups, members], different for each sample."""
    config = lengths_lib.LengthsConfig(
      num_groups=self.num_groups,
      group_size=self.group_size,
      mean_tokens=self.mean_tokens,
      max_tokens=self.max_tokens,
      sigma=self.sigma,
      rho=self.rho,
    )
    return lengths_lib.generate(config, self.seed + 1_000_000 * sample)


def draw(seed: int) -> DrawnWorkload:
  """Returns the workload of a seed; KV is scarce for odd seeds, slots for even ones."""
  rng = np.random.default_rng(seed)
  between = lambda low, high: math.exp(rng.uniform(math.log(low), math.log(high)))
  group_size = int(rng.integers(4, 17))
  chunk = round(between(16, 2048))
  mean = between(100, max(200, min(4000, 24 * chunk)))
  return DrawnWorkload(
    seed=seed,
    scarce="KV" if seed % 2 else "places",
    machine=workloads.WORKLOADS[int(rng.integers(3))].name,
    data_parallel_size=int(rng.choice([1, 2, 4, 8])),
    num_groups=max(int(rng.uniform(128, 768) / group_size), 8),
    group_size=group_size,
    rho=float(rng.uniform(0.02, 0.95)),
    sigma=float(rng.uniform(0.3, 1.5)),
    mean_tokens=mean,
    max_tokens=int(mean * rng.uniform(3, 20)),
    prompt_tokens=round(between(16, 1024)),
    chunk_tokens=chunk,
    waves=float(rng.uniform(1.5, 6)),
  )
