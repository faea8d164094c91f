"""Measures the energy used by processors, where the machine exposes it.

    CPU  RAPL, /sys/class/powercap/intel-rapl:*/energy_uj (Intel and AMD; often for root only)
    GPU  NVML, nvmlDeviceGetTotalEnergyConsumption (NVIDIA, since Volta)

Counters cover whole processors, including other processes. RAPL counters wrap around after about
250,000 joules, so a meter must be read at least every few minutes.
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
  """Counts joules since construction."""

  def __init__(self, powercap: pathlib.Path = POWERCAP, nvml: str = NVML):
    """Finds the readable counters.

    Args:
      powercap: sysfs directory of the RAPL zones.
      nvml: name of the NVML library.
    """
    self._counters = [*_zones(powercap), *_devices(nvml)]
    self._last = [counter.microjoules() for counter in self._counters]
    self._total = 0

  def read(self) -> float | None:
    """Returns the joules so far; None if no counter is readable."""
    if not self._counters:
      return None
    for place, counter in enumerate(self._counters):
      now = counter.microjoules()
      spent = now - self._last[place]
      # The counter wrapped around.
      self._total += spent if spent >= 0 else spent + counter.range_microjoules
      self._last[place] = now
    return self._total / 1e6


class _Zone:
  """A RAPL zone: a processor package or its memory."""

  def __init__(self, directory: pathlib.Path):
    self._path = directory / "energy_uj"
    self.range_microjoules = int((directory / "max_energy_range_uj").read_text()) + 1

  def microjoules(self) -> int:
    return int(self._path.read_text())


def _zones(powercap: pathlib.Path) -> list[_Zone]:
  """Returns the readable zones that are not part of another one."""
  found = []
  for directory in sorted(powercap.glob("intel-rapl:*")):
    # "core" zones are part of their package, and "psys" includes all packages.
    with contextlib.suppress(OSError, ValueError):
      name = (directory / "name").read_text().strip()
      if name.startswith("package") or name == "dram":
        zone = _Zone(directory)
        zone.microjoules()
        found.append(zone)
  return found


class _Device:
  """A GPU read through NVML."""

  range_microjoules = 2**64 * 1000

  def __init__(self, library: ctypes.CDLL, index: int):
    self._library, self._handle = library, ctypes.c_void_p()
    _check(library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(self._handle)))

  def microjoules(self) -> int:
    value = ctypes.c_ulonglong()
    _check(self._library.nvmlDeviceGetTotalEnergyConsumption(self._handle, ctypes.byref(value)))
    return 1000 * value.value  # NVML reports millijoules.


def _devices(name: str) -> list[_Device]:
  """Returns the GPUs with an energy counter; empty without a driver."""
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
