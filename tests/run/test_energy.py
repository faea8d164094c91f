"""Energy in joules where available, from files like the kernel's and a library like NVML."""

from __future__ import annotations

import pathlib
import subprocess

import pytest

from seerjax.run import energy

ABSENT = "libno-such-nvml.so.1"
# Two GPUs; each look at either costs a joule more.
NVML = """
static unsigned long long looks;
int nvmlInit_v2(void) { return STATUS; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
  *device = (void *)(unsigned long)(index + 1);
  return 0;
}
int nvmlDeviceGetTotalEnergyConsumption(void *device, unsigned long long *millijoules) {
  *millijoules = ++looks * 1000;
  return 0;
}
"""


def zone(powercap: pathlib.Path, place: str, name: str, microjoules: int, most: int = 999_999_999):
  directory = powercap / f"intel-rapl:{place}"
  directory.mkdir(parents=True, exist_ok=True)
  (directory / "name").write_text(f"{name}\n")
  (directory / "energy_uj").write_text(f"{microjoules}\n")
  (directory / "max_energy_range_uj").write_text(f"{most}\n")


def test_where_nothing_can_be_read_nothing_is_said(tmp_path):
  assert energy.Meter(tmp_path / "none", ABSENT).read() is None


def test_packages_and_memory_count_once(tmp_path):
  for place, name in (
    ("0", "package-0"), ("0:0", "core"), ("0:1", "dram"), ("1", "package-1"), ("2", "psys")
  ):  # fmt: skip
    zone(tmp_path, place, name, 5_000_000)
  meter = energy.Meter(tmp_path, ABSENT)
  assert meter.read() == 0.0
  for place, name, joules in (
    ("0", "package-0", 15), ("0:0", "core", 9), ("0:1", "dram", 6), ("1", "package-1", 25),
    ("2", "psys", 99),
  ):  # fmt: skip
    zone(tmp_path, place, name, joules * 1_000_000)
  assert meter.read() == 10.0 + 1.0 + 20.0
  assert meter.read() == 31.0


def test_a_counter_that_begins_again_goes_on(tmp_path):
  zone(tmp_path, "0", "package-0", 99_000_000, most=99_999_999)
  meter = energy.Meter(tmp_path, ABSENT)
  zone(tmp_path, "0", "package-0", 2_000_000, most=99_999_999)
  assert meter.read() == 3.0


def test_a_zone_that_others_may_not_read_is_left_out(tmp_path):
  zone(tmp_path, "0", "package-0", 1)
  (tmp_path / "intel-rapl:0" / "energy_uj").unlink()
  (tmp_path / "intel-rapl:0" / "energy_uj").mkdir()  # Root may read any file.
  assert energy.Meter(tmp_path, ABSENT).read() is None


@pytest.fixture(scope="module")
def nvml(tmp_path_factory):
  """Compiles a library with NVML's functions; its initialisation returns `status`."""

  def made(status: int) -> str:
    directory = tmp_path_factory.mktemp("nvml")
    (directory / "nvml.c").write_text(NVML.replace("STATUS", str(status)))
    command = ["cc", "-shared", "-fPIC", "-o", "libnvml.so", "nvml.c"]
    try:
      subprocess.run(command, cwd=directory, check=True, capture_output=True)
    except FileNotFoundError:
      pytest.skip("no C compiler")
    return str(directory / "libnvml.so")

  return made


def test_gpus_tell_their_millijoules(nvml, tmp_path):
  meter = energy.Meter(tmp_path, nvml(0))
  # Six looks of one joule each: as they are found, at the beginning, and now.
  assert meter.read() == 4.0


def test_a_driver_that_does_not_start_is_none(nvml, tmp_path):
  assert energy.Meter(tmp_path, nvml(9)).read() is None
