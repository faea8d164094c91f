"""Helper processes: they start, get nothing of ours, and end without a trace."""

from __future__ import annotations

import os
import pathlib

import pytest

from seerjax.sandbox import helper


def is_child(process: int) -> bool:
  children = pathlib.Path(f"/proc/{os.getpid()}/task").glob("*/children")
  return any(str(process) in file.read_text().split() for file in children)


def test_a_helper_that_cannot_start_is_an_error_and_leaves_nothing():
  started = helper.Helper("seerjax.sandbox.missing", {})
  expected = (
    r"seerjax.sandbox.missing: got exit code 1 from its server, expected it to start; run"
    r" `.* -m seerjax.sandbox.missing` by hand"
  )
  with pytest.raises(RuntimeError, match=expected):
    started.report()
  assert not started.is_alive and not is_child(started._process.pid)


@pytest.mark.parametrize("has_session", [False, True])
def test_a_helper_gets_a_clean_process_and_ends_when_closed(has_session: bool):
  settings = {"readable": ["/usr"], "packages": [], "preloaded": []}
  environment = {"HOME": "/"}
  started = helper.Helper(
    "seerjax.sandbox.server", settings, environment=environment, has_session=has_session
  )
  process = started._process.pid
  assert started.report()["readable"] == ["/usr"]
  assert started.is_alive and is_child(process)
  variables = pathlib.Path(f"/proc/{process}/environ").read_text().split("\0")
  assert {one.split("=")[0] for one in variables} <= {"HOME", "LANG", "PATH", "LD_LIBRARY_PATH", ""}
  assert os.getpgid(process) == process
  assert (os.getsid(process) == process) == has_session
  with started.call(b"+"):
    pass
  started.close()
  started.close()
  assert not started.is_alive and not is_child(process)
  with started.call(b"+") as channel:
    assert channel.recv(1) == b""
