"""Tests of the processes of peers."""

from __future__ import annotations

import sys
import types

import pytest

from experiments import peer_process
from experiments.invariance import peers
from experiments.learning import trl_peer


@pytest.mark.parametrize("program", [peers, trl_peer])
def test_a_failed_peer_is_reported_with_its_own_traceback(program: types.ModuleType):
  with pytest.raises(RuntimeError, match="side: got status 1: Traceback"):
    peer_process.answer("side", sys.executable, program, {})
