"""Cost model: seconds of a step by batch, context and verified tokens, and of moving KV.

    rows    = batch * (1 + draft_tokens)
    step    = fixed + max(weights / bandwidth, rows * operations / speed)
              + max(kv_bytes * context / bandwidth, attention * context * rows / batch / speed)
              (times 1 + draft_overhead, if there are drafts)
    weights = all * (1 - (1 - active / all) ** rows)    (for experts: those that any row uses)

Source: the roofline model; experts as independent draws. Hardware constants are the vendor's, times
an efficiency.
"""

from __future__ import annotations

import dataclasses

from seerjax import fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostModel:
  """Cost model of one instance: a model on its devices.

  Attributes:
    num_devices: devices of the instance.
    device_bytes: memory of one device.
    device_bandwidth: achieved memory bandwidth of one device, bytes/s.
    device_speed: achieved operations/s of one device, in decoding and prefill.
    weight_bytes: bytes of all parameters.
    resident_bytes: bytes of parameters on all devices together, including copies.
    active_bytes: bytes of the parameters used by one token; `weight_bytes` if dense.
    active_parameters: parameters used by one token.
    kv_bytes: bytes of KV per position.
    attention_operations: operations of one query with one position, over all layers and heads.
    draft_overhead: relative increase of a step by drafting, for any number of drafts.
    fixed_seconds: fixed time of a step (launches, collectives, the host).
    memory_share: share of device memory for weights and KV.
    host_bandwidth: bytes/s between the instance's devices and their host.
    peer_bandwidth: bytes/s between two instances.
  """

  num_devices: int
  device_bytes: float
  device_bandwidth: float
  device_speed: float
  weight_bytes: float
  resident_bytes: float
  active_bytes: float
  active_parameters: float
  kv_bytes: float
  attention_operations: float
  draft_overhead: float
  fixed_seconds: float
  memory_share: float
  host_bandwidth: float
  peer_bandwidth: float

  def __post_init__(self):
    fields.check(self)
    for name, value in dataclasses.asdict(self).items():
      if value < 0 or (value == 0 and name not in ("fixed_seconds", "draft_overhead")):
        raise ValueError(
          f"CostModel: got {name}={value}, expected more than 0; only fixed_seconds and"
          " draft_overhead may be 0."
        )
    if self.kv_tokens < 1:
      raise ValueError(
        f"CostModel: got {self.resident_bytes:.3g} bytes of weights on"
        f" {self.num_devices} x {self.device_bytes:.3g} bytes at memory_share={self.memory_share},"
        " expected room for KV next to them; use more devices or a larger share."
      )

  @property
  def kv_tokens(self) -> int:
    """Number of positions of KV that fit in memory next to the weights."""
    room = self.num_devices * self.device_bytes * self.memory_share - self.resident_bytes
    return int(room // self.kv_bytes)

  def context_seconds(self, draft_tokens: int = 0) -> float:
    """Returns the seconds that one position of context adds to a step."""
    read = self.kv_bytes / self.device_bandwidth
    computed = (1 + draft_tokens) * self.attention_operations / self.device_speed
    seconds = max(read, computed) / self.num_devices
    return seconds * (1 + self.draft_overhead) if draft_tokens else seconds

  def step_seconds(self, batch: int, context: float, draft_tokens: int = 0) -> float:
    """Returns the seconds of a step.

    Args:
      batch: number of requests.
      context: total positions of KV that they read.
      draft_tokens: verified tokens per request, in addition to its own.
    """
    rows = batch * (1 + draft_tokens)
    touched = self.weight_bytes * (1 - (1 - self.active_bytes / self.weight_bytes) ** rows)
    read = touched / (self.num_devices * self.device_bandwidth)
    computed = 2 * rows * self.active_parameters / (self.num_devices * self.device_speed)
    seconds = self.fixed_seconds + max(read, computed)
    if draft_tokens:
      seconds *= 1 + self.draft_overhead
    return seconds + context * self.context_seconds(draft_tokens)

  def prefill_seconds(self, tokens: int) -> float:
    """Returns the seconds to prefill that many positions, without other work."""
    return 2 * tokens * self.active_parameters / (self.num_devices * self.device_speed)

  def peer_seconds(self, tokens: int) -> float:
    """Returns the seconds to move the KV of that many positions between two instances."""
    return tokens * self.kv_bytes / self.peer_bandwidth

  def host_seconds(self, tokens: int) -> float:
    """Returns the seconds to load the KV of that many positions from host memory."""
    return tokens * self.kv_bytes / self.host_bandwidth
