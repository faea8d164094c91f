"""Which workers sample a run's steps."""

from __future__ import annotations

import dataclasses

from seerjax import fields

# The address of workers that are engines of the run's own process.
LOCAL = "local"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterConfig:
  """Workers of a run, each with an engine of its own. None of it changes a bit.

  Attributes:
    workers: how many; with 0 the run's own engine samples.
    address: of a Ray cluster, "host:port" or "auto" for the one of this machine; "" starts Ray on
      this machine and ends it with the run; "local" makes the engines in the run's own process,
      where they take turns, without Ray.
    patience_seconds: within which a worker has to answer; its first chunk compiles its programs.
  """

  workers: int = 0
  address: str = ""
  patience_seconds: float = 600.0

  def __post_init__(self):
    fields.check(self)
    if self.workers < 0 or not self.patience_seconds > 0:
      raise ValueError(
        f"ClusterConfig: got workers={self.workers}, patience_seconds={self.patience_seconds},"
        " expected no worker or more, and some seconds; workers=2 and 600 s will do."
      )
    host, _, port = self.address.rpartition(":")
    is_address = bool(host) and port.isdigit() and 0 < int(port) < 2**16
    if self.address not in ("", "auto", LOCAL) and not is_address:
      raise ValueError(
        f"ClusterConfig.address: got {self.address!r}, expected 'host:port' of a Ray cluster,"
        " 'auto', 'local' or nothing; leave it out to use this machine."
      )
