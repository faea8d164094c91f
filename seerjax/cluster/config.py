"""Configuration of the workers that sample a run's steps."""

from __future__ import annotations

import dataclasses

from seerjax import fields

# Address for workers that are engines in the run's own process.
LOCAL = "local"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterConfig:
  """Configuration of a run's workers, each with its own engine. It does not affect results.

  Attributes:
    workers: number of workers; with 0 the run's own engine samples.
    address: address of a Ray cluster, "host:port", or "auto" for the one on this machine; "" starts
      Ray on this machine and ends it with the run; "local" creates the engines in the run's own
      process, where they run in turn, without Ray.
    patience_seconds: timeout of a worker's reply; its first chunk includes compilation.
  """

  workers: int = 0
  address: str = ""
  patience_seconds: float = 600.0

  def __post_init__(self):
    fields.check(
      self,
      workers=fields.at_least(0, "2 for example"),
      patience_seconds=fields.positive("600 for example"),
    )
    host, _, port = self.address.rpartition(":")
    is_address = bool(host) and port.isdigit() and 0 < int(port) < 2**16
    if self.address not in ("", "auto", LOCAL) and not is_address:
      raise ValueError(
        f"ClusterConfig.address: got {self.address!r}, expected 'host:port' of a Ray cluster,"
        " 'auto', 'local' or ''; leave it out to use this machine."
      )
