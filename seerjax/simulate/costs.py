"""What a step costs: seconds by batch, context and verified tokens; and what moving KV costs.

    rows    = batch * (1 + draft_tokens)
    step    = fixed + max(weights / bandwidth, rows * operations / speed)
              + max(kv_bytes * context / bandwidth, attention * context * rows / batch / speed)
              (times 1 + draft_overhead, where there are drafts)
    weights = all * (1 - (1 - active / all) ** rows)    (of experts, those that some row meets)

Source: the roofline; experts as independent draws. Constants of the hardware are the maker's, times
an efficiency.
"""

from __future__ import annotations

import dataclasses

from seerjax import fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostModel:
  """One instance: its model on its devices.

  Attributes:
    num_devices: of the instance.
    device_bytes: memory of one.
    device_bandwidth: bytes/s of its memory, as reached.
    device_speed: operations/s, as reached in decoding and prefill.
    weight_bytes: of all parameters.
    resident_bytes: that they take on all devices together, copies included.
    active_bytes: of the parameters that one token meets; `weight_bytes` if dense.
    active_parameters: that one token meets.
    kv_bytes: of one position.
    attention_operations: of one query with one position, all layers and heads.
    draft_overhead: part of a step that drafting and its bookkeeping add, whatever their number.
    fixed_seconds: of a step, whatever is in it (launches, collectives, the host).
    memory_share: of the devices' memory that weights and KV may fill.
    host_bandwidth: bytes/s between devices and their host, of the instance.
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
    """Returns how many positions of KV fit next to the weights."""
    room = self.num_devices * self.device_bytes * self.memory_share - self.resident_bytes
    return int(room // self.kv_bytes)

  def context_seconds(self, draft_tokens: int = 0) -> float:
    """Returns what one position of context adds to a step."""
    read = self.kv_bytes / self.device_bandwidth
    computed = (1 + draft_tokens) * self.attention_operations / self.device_speed
    seconds = max(read, computed) / self.num_devices
    return seconds * (1 + self.draft_overhead) if draft_tokens else seconds

  def step_seconds(self, batch: int, context: float, draft_tokens: int = 0) -> float:
    """Returns a step's time.

    Args:
      batch: requests.
      context: positions of KV that they read, in all.
      draft_tokens: verified for each, in addition to its own token.
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
    """Returns how long an instance computes so many positions, and nothing else."""
    return 2 * tokens * self.active_parameters / (self.num_devices * self.device_speed)

  def peer_seconds(self, tokens: int) -> float:
    """Returns how long KV of so many positions travels between two instances."""
    return tokens * self.kv_bytes / self.peer_bandwidth

  def host_seconds(self, tokens: int) -> float:
    """Returns how long KV of so many positions comes back from the host's memory."""
    return tokens * self.kv_bytes / self.host_bandwidth
