"""The paper's three workloads, with its published results.

Source: arXiv 2511.14617v3, tables 3 and 4, figures 7, 8, 10 and 11. Bytes of KV follow from the
models' public configurations; the hardware is H800 nodes.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from seerjax.simulate import cluster, costs, lengths

H800_BYTES = 80e9
H800_BANDWIDTH = 3.35e12  # bytes/s
H800_SPEED = 989e12  # operations/s, bfloat16, dense
# Achieved shares: typical values of decoding kernels, not fitted.
BANDWIDTH_SHARE = 0.6
SPEED_SHARE = 0.4
HOST_BANDWIDTH = 25e9  # bytes/s per device: PCIe 5 in one direction at half its rate
NETWORK_BANDWIDTH = 50e9  # bytes/s per device: one 400 Gb/s port each


# Vanilla speculation on veRL gave 1.18x at 1.67 tokens a step (Moonlight) and 1.22x at 1.74
# (Kimi-K2): in both cases steps took 1.42x as long, with 16 draft tokens and with 1.
DRAFT_OVERHEAD = 0.42


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fitted:
  """Free parameters, fitted to the baseline's results only; at most 4 per workload.

  Attributes:
    fixed_seconds: fixed time of a step.
    sigma: standard deviation of ln L; fitted to Qwen2-VL-72B, for which a third result is
      published, and used for all.
    memory_share: share of device memory for weights and KV.
  """

  fixed_seconds: float
  sigma: float
  memory_share: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Published:
  """Published results of a workload.

  Attributes:
    baseline_seconds: time of veRL's rollout.
    baseline_tail_seconds: time spent on the last tenth of its requests.
    preemptions: per request, in veRL; None if not published.
    gains: throughput relative to the baseline of divided rollout, + context, + speculation.
    tail_cut: reduction of the tail time by the whole system.
    seconds: time of the whole system's rollout.
    accepted: tokens per step of the whole system.
  """

  baseline_seconds: float
  baseline_tail_seconds: float
  preemptions: float | None
  gains: tuple[float, float, float]
  tail_cut: float
  seconds: float
  accepted: float

  @property
  def tail_share(self) -> float:
    """The tail's share of the baseline's rollout time."""
    return self.baseline_tail_seconds / self.baseline_seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
  """One column of the paper's tables.

  Attributes:
    name: name of the model.
    data_parallel_size: instances of the cluster.
    devices: devices of an instance.
    weight_bytes: bytes of the model's weights.
    replicated_bytes: part of these that is replicated on each device (attention under expert
      parallelism).
    active_bytes: bytes of the weights used by one token.
    active_parameters: parameters used by one token.
    kv_bytes: bytes of KV per position.
    attention_operations: operations of one query with one position.
    num_groups: prompts per iteration.
    group_size: responses per prompt.
    mean_tokens: mean generated tokens per response.
    max_tokens: maximum generated tokens per response.
    prompt_tokens: length of a prompt; not published.
    rho: similarity of lengths within groups; not published.
    rollout_share: rollout's share of the baseline's iteration; the rest is training and weight
      transfer.
    free: fields of `fitted` that were fitted to the baseline; the others were fixed in advance.
    fitted: free parameters.
    published: results to compare with.
  """

  name: str
  data_parallel_size: int
  devices: int
  weight_bytes: float
  replicated_bytes: float
  active_bytes: float
  active_parameters: float
  kv_bytes: float
  attention_operations: float
  num_groups: int
  group_size: int
  mean_tokens: float
  max_tokens: int
  prompt_tokens: int
  rho: float
  rollout_share: float
  free: tuple[str, ...]
  fitted: Fitted
  published: Published

  def cluster(self) -> cluster.ClusterConfig:
    """Returns the configuration of the machines."""
    model = costs.CostModel(
      num_devices=self.devices,
      device_bytes=H800_BYTES,
      device_bandwidth=BANDWIDTH_SHARE * H800_BANDWIDTH,
      device_speed=SPEED_SHARE * H800_SPEED,
      weight_bytes=self.weight_bytes,
      resident_bytes=self.weight_bytes + (self.devices - 1) * self.replicated_bytes,
      active_bytes=self.active_bytes,
      active_parameters=self.active_parameters,
      kv_bytes=self.kv_bytes,
      attention_operations=self.attention_operations,
      draft_overhead=DRAFT_OVERHEAD,
      fixed_seconds=self.fitted.fixed_seconds,
      memory_share=self.fitted.memory_share,
      host_bandwidth=self.devices * HOST_BANDWIDTH,
      peer_bandwidth=self.devices * NETWORK_BANDWIDTH,
    )
    return cluster.ClusterConfig(
      data_parallel_size=self.data_parallel_size,
      costs=model,
      max_running=MAX_RUNNING,
      prompt_tokens=self.prompt_tokens,
    )

  def lengths(self, seed: int) -> np.ndarray:
    """Returns lengths i64[groups, members] of one iteration."""
    config = lengths.LengthsConfig(
      num_groups=self.num_groups,
      group_size=self.group_size,
      mean_tokens=self.mean_tokens,
      max_tokens=self.max_tokens,
      sigma=self.fitted.sigma,
      rho=self.rho,
    )
    return lengths.generate(config, seed)


MAX_RUNNING = 1024  # verl's default; memory is the actual limit

MOONLIGHT = Workload(
  name="Moonlight",
  data_parallel_size=32,
  devices=1,
  weight_bytes=32e9,
  replicated_bytes=0.0,
  active_bytes=6e9,
  active_parameters=3e9,
  kv_bytes=31_104,  # 27 layers of 512 + 64 latent values, bfloat16
  attention_operations=0.94e6,  # 27 layers of 16 heads on 576 + 512 latent values
  num_groups=400,
  group_size=8,
  mean_tokens=22_386,
  max_tokens=65_536,
  prompt_tokens=256,
  rho=0.8,
  rollout_share=0.84,
  free=("fixed_seconds", "memory_share"),
  fitted=Fitted(fixed_seconds=0.01277, sigma=0.8545, memory_share=0.821),
  published=Published(
    baseline_seconds=3910,
    baseline_tail_seconds=1817,
    preemptions=None,
    gains=(1.41, 1.47, 1.90),
    tail_cut=0.84,
    seconds=2181,
    accepted=1.89,
  ),
)

QWEN2_VL_72B = Workload(
  name="Qwen2-VL-72B",
  data_parallel_size=16,
  devices=8,
  weight_bytes=146e9,
  replicated_bytes=0.0,
  active_bytes=146e9,
  active_parameters=73e9,
  kv_bytes=327_680,  # 80 layers, 8 KV heads of 128, keys and values, bfloat16
  attention_operations=2.6e6,  # 80 layers of 64 heads on 128 + 128
  num_groups=600,
  group_size=16,
  mean_tokens=7_615,
  max_tokens=40_960,
  prompt_tokens=1_024,
  rho=0.8,
  rollout_share=0.63,
  free=("fixed_seconds", "sigma", "memory_share"),
  fitted=Fitted(fixed_seconds=0.0276, sigma=0.8545, memory_share=0.8725),
  published=Published(
    baseline_seconds=3957,
    baseline_tail_seconds=2301,
    preemptions=13_686 / 9_600,
    gains=(1.42, 1.56, 2.04),
    tail_cut=0.94,
    seconds=1922,
    accepted=2.15,
  ),
)

KIMI_K2 = Workload(
  name="Kimi-K2",
  data_parallel_size=8,
  devices=32,
  weight_bytes=1e12,
  replicated_bytes=14e9,  # attention 6.2 G and shared experts 3.0 G at 8 bits, vocabulary at 16
  active_bytes=32e9,
  active_parameters=32e9,
  kv_bytes=70_272,  # 61 layers of 512 + 64 latent values, bfloat16
  attention_operations=8.5e6,  # 61 layers of 64 heads on 576 + 512 latent values
  num_groups=800,
  group_size=8,
  mean_tokens=38_959,
  max_tokens=98_304,
  prompt_tokens=256,
  rho=0.8,
  rollout_share=0.87,
  free=("fixed_seconds", "memory_share"),
  fitted=Fitted(fixed_seconds=0.0709, sigma=0.8545, memory_share=0.909),
  published=Published(
    baseline_seconds=12202,
    baseline_tail_seconds=3144,
    preemptions=None,
    gains=(1.16, 1.27, 1.53),
    tail_cut=0.72,
    seconds=8267,
    accepted=1.77,
  ),
)

WORKLOADS = (MOONLIGHT, QWEN2_VL_72B, KIMI_K2)
