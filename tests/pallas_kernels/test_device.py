"""Reasons against a device and its software, from given facts."""

from __future__ import annotations

import dataclasses

import pytest

from pallas_kernels import device

H200 = device.Facts(
  kind="NVIDIA H200",
  compute_capability="9.0",
  shared_memory_bytes=232_448,
  ptxas=(13, 0, 88),
  plugin="jax-cuda13-plugin 0.11.2",
  driver="580.159.04",
)


def test_hopper_with_a_sound_assembler_is_taken():
  assert device.reason_against(H200) is None
  # A missing fact is no reason against a device.
  unsaid = device.Facts(kind="NVIDIA H100", compute_capability="9.0")
  assert device.reason_against(unsaid) is None


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (
      dict(kind="NVIDIA A100", compute_capability="8.0"),
      "got NVIDIA A100 of compute capability 8.0, expected an NVIDIA GPU of compute capability 9.0"
      " (Hopper); run on an H100 or H200, or pass interpret=True to run the kernel slowly on a CPU",
    ),
    (dict(kind="NVIDIA B200", compute_capability="10.0"),
     "got NVIDIA B200 of compute capability 10.0, expected an NVIDIA GPU of compute capability"),
    (dict(shared_memory_bytes=101_376),
     "got NVIDIA H200 with 101376 bytes of shared memory per block, expected 232448, as on Hopper"),
    (
      dict(ptxas=(12, 8, 61)),
      "got ptxas 12.8.61, which miscompiles causal masks, expected 12.9.86 (CUDA 12.9.1) or later;"
      " upgrade CUDA's compiler (pip install -U nvidia-cuda-nvcc-cu12), or JAX to its plugin for",
    ),
    (dict(ptxas=(12, 9, 41)), "got ptxas 12.9.41, which miscompiles causal masks, expected"),
    (dict(ptxas=(12, 6, 77)), "got ptxas 12.6.77, which miscompiles limits of indices, expected"),
  ],
)  # fmt: skip
def test_what_cannot_run_the_kernels_is_named(change, message):
  reason = device.reason_against(dataclasses.replace(H200, **change))
  assert reason is not None and reason.startswith(message)


@pytest.mark.parametrize("ptxas", [(12, 6, 85), (12, 9, 86), (13, 0, 48)])
def test_mended_assemblers_are_taken(ptxas):
  assert device.reason_against(dataclasses.replace(H200, ptxas=ptxas)) is None


PTXAS = """ptxas: NVIDIA (R) Ptx optimizing assembler
Built on Wed_Aug_20_01:55:12_PM_PDT_2025
Cuda compilation tools, release 13.0, V13.0.88
Build cuda_13.0.r13.0/compiler.36424714_0
"""
DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Tue Jul  1 13:34:15 2025\n"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  535.54.03  Release Build\n"


def test_versions_are_read_from_what_programs_say():
  assert device.ptxas_version(PTXAS) == (13, 0, 88)
  assert device.ptxas_version("") == ()
  assert device.cuda_version("PJRT C API\ncuda 12090") == (12, 9)
  assert device.cuda_version("cuda 13000") == (13, 0)
  assert device.cuda_version("cpu") == ()
  assert device.driver_version(DRIVER) == "580.159.04"
  assert device.driver_version(OPEN) == "535.54.03"
  assert device.driver_version("570.86\n") == "570.86"
  assert device.driver_version("no such thing") == device.UNKNOWN
  assert device.version_text((13, 0, 88)) == "13.0.88"
  assert device.version_text(()) == device.UNKNOWN


def test_a_plugin_that_only_says_its_cuda_is_judged_by_it():
  only_said = dataclasses.replace(H200, ptxas=device.cuda_version("cuda 12080"))
  assert "miscompiles causal masks" in (device.reason_against(only_said) or "")
  assert device.reason_against(dataclasses.replace(H200, ptxas=(13, 0))) is None


def test_this_machine_can_be_asked():
  # On any installation nothing raises; missing packages are empty or unknown.
  assert isinstance(device._ptxas_text(), str)
  assert isinstance(device._plugin(), str)
  assert device._said("no-such-program-of-anybody") == ""
