"""Joules that processors spend, where the machine lets them be read.

    CPU  RAPL, /sys/class/powercap/intel-rapl:*/energy_uj (Intel's and AMD's; often for root alone)
    GPU  NVML, nvmlDeviceGetTotalEnergyConsumption (NVIDIA's, from Volta on), by its own library

Counters are of whole processors: what else runs there counts as well. RAPL's wrap around after a
quarter of a million joules or so, so that a meter is read every few minutes at least.
Sources: https://docs.kernel.org/power/powercap/powercap.html,
https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html.
"""

from __future__ import annotations

import contextlib
import ctypes
import pathlib

POWERCAP = pathlib.Path("/sys/class/powercap")
NVML = "libnvidia-ml.so.1"


class Meter:
  """Counts joules from its making on."""

  def __init__(self, powercap: pathlib.Path = POWERCAP, nvml: str = NVML):
    """Finds what can be read.

    Args:
      powercap: where the kernel shows RAPL's zones.
      nvml: name of the library.
    """
    self._counters = [*_zones(powercap), *_devices(nvml)]
    self._last = [counter.microjoules() for counter in self._counters]
    self._total = 0

  def read(self) -> float | None:
    """Returns the joules so far, None if nothing here can be read."""
    if not self._counters:
      return None
    for place, counter in enumerate(self._counters):
      now = counter.microjoules()
      spent = now - self._last[place]
      # A counter begins again at 0.
      self._total += spent if spent >= 0 else spent + counter.range_microjoules
      self._last[place] = now
    return self._total / 1e6


class _Zone:
  """A zone of RAPL: a processor's package, or its memory."""

  def __init__(self, directory: pathlib.Path):
    self._path = directory / "energy_uj"
    self.range_microjoules = int((directory / "max_energy_range_uj").read_text()) + 1

  def microjoules(self) -> int:
    return int(self._path.read_text())


def _zones(powercap: pathlib.Path) -> list[_Zone]:
  """Returns the zones that may be read and that no other one includes."""
  found = []
  for directory in sorted(powercap.glob("intel-rapl:*")):
    # Cores are part of their package, and "psys" has all packages in it.
    with contextlib.suppress(OSError, ValueError):
      name = (directory / "name").read_text().strip()
      if name.startswith("package") or name == "dram":
        zone = _Zone(directory)
        zone.microjoules()
        found.append(zone)
  return found


class _Device:
  """A GPU of NVML."""

  range_microjoules = 2**64 * 1000

  def __init__(self, library: ctypes.CDLL, index: int):
    self._library, self._handle = library, ctypes.c_void_p()
    _check(library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(self._handle)))

  def microjoules(self) -> int:
    value = ctypes.c_ulonglong()
    _check(self._library.nvmlDeviceGetTotalEnergyConsumption(self._handle, ctypes.byref(value)))
    return 1000 * value.value  # It says millijoules.


def _devices(name: str) -> list[_Device]:
  """Returns the GPUs that tell; none where there is no driver."""
  with contextlib.suppress(OSError):
    library = ctypes.CDLL(name)
    _check(library.nvmlInit_v2())
    count = ctypes.c_uint()
    _check(library.nvmlDeviceGetCount_v2(ctypes.byref(count)))
    found = [_Device(library, index) for index in range(count.value)]
    for device in found:
      device.microjoules()
    return found
  return []


def _check(status: int) -> None:
  if status:
    raise OSError(f"NVML: got status {status}, expected 0.")
