"""Flags set a server's dtype and devices; responses change only with the fingerprint."""

from __future__ import annotations

import concurrent.futures
import signal
import subprocess
import sys

import pytest
from served_process import Process
import serving

QUESTION = {"prompt": "Tom has 3 apples and buys 4.", "max_tokens": 24, "seed": 5, "logprobs": 2}


def ask(url: str, **others) -> tuple[str, dict]:
  """Returns the fingerprint, and the choice with text and log-probabilities."""
  with serving.client(url) as client:
    answer = client.post("/v1/completions", json={**QUESTION, **others}).json()
  return answer["system_fingerprint"], answer["choices"][0]


@pytest.mark.thorough
def test_bfloat16_has_equal_bits_alone_in_company_and_on_two_devices(tmp_path):
  sizes = ("nano", "--max_model_len=256", "--compute_dtype=bfloat16")
  process = Process(tmp_path, *sizes)
  try:
    alone = ask(process.url)
    with concurrent.futures.ThreadPoolExecutor(65) as pool:
      others = [pool.submit(ask, process.url, seed=100 + n, max_tokens=40) for n in range(64)]
      together = pool.submit(ask, process.url).result()
      assert len({other.result()[1]["text"] for other in others}) > 1
    assert together == alone
  finally:
    process.end(signal.SIGTERM)
  assert "runs in bfloat16 by " in (tmp_path / "serve.log").read_text()
  process = Process(tmp_path, *sizes, "--tensor_parallel_size=2")
  try:
    assert ask(process.url) == alone
  finally:
    process.end(signal.SIGTERM)
  assert "1 instance(s) of 2 cpu device(s)" in (tmp_path / "serve.log").read_text()


@pytest.mark.thorough
@pytest.mark.parametrize(
  ("command", "flag", "message"),
  [
    ("serve", "--compute_dtype=half", "NumericsConfig.compute_dtype: got 'half', expected one of"),
    ("serve", "--tensor_parallel_size=3", "--tensor_parallel_size: got 3, expected one of"),
    ("serve", "--max_model_len=1", "EngineConfig.max_model_len: got 1, expected at least 2"),
    ("serve", "--max_num_seqs=-1", "EngineConfig.max_num_seqs: got -1, expected at least 0"),
    ("generate", "--backend=gpu", "backend: got 'gpu', expected one of"),
    ("generate", "--max_model_len=8", "expected at most 8 together; lower --max_tokens"),
  ],
)
def test_a_flag_that_cannot_be_is_refused_in_one_line(command, flag, message):
  given = [sys.executable, "-m", "seerjax.commands", command, flag]
  if command == "generate":
    given.append("--prompt=How many?")
  ended = subprocess.run(given, capture_output=True, text=True, check=False)
  assert ended.returncode == 2
  assert message in ended.stderr.splitlines()[-1] and "loading" not in ended.stderr
