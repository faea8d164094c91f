"""The servers that `experiments.serving` compares, each in a separate process."""

from __future__ import annotations

from collections.abc import Sequence
import contextlib
import dataclasses
import importlib
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any, NamedTuple

import numpy as np

from experiments import llama_cpp, peer_models
from experiments.serving_questions import (
  CONTEXT,
  NO_END,
  Settings,
  directory_of,
  timed_questions,
)

ROOT = pathlib.Path(__file__).parents[1]
START_SECONDS = 600


class Peer(NamedTuple):
  """A server to measure.

  Attributes:
    label: display label.
    kind: "ours", "engine", "llama.cpp" or "transformers".
    has_logprobs: whether its responses have log-probabilities.
    is_timed: whether part (b) measures it.
  """

  label: str
  kind: str
  has_logprobs: bool = True
  is_timed: bool = True


PEERS = {
  "ours": Peer("SeerJAX's server", "ours"),
  "engine": Peer("SeerJAX's engine alone, no server", "engine"),
  "llama-cpp": Peer("llama.cpp's server", "llama.cpp"),
  "transformers": Peer(
    "transformers serve, continuous batching", "transformers", has_logprobs=False, is_timed=False
  ),
}
# Additional packages by kind.
PACKAGES = {
  "llama.cpp": (llama_cpp.PACKAGE,),
  "transformers": ("torch", "transformers", "fastapi", "openai"),
}


class Server:
  """A server's process.

  Attributes:
    url: address of the server.
  """

  def __init__(self, command: Sequence[str], log: pathlib.Path, url: str = ""):
    """Starts the server and waits until it accepts connections.

    Args:
      command: the command to run.
      log: file for its output.
      url: its address; "" if it prints the address itself ("serving at URL").

    Raises:
      RuntimeError: if it ends or does not listen in time; with the end of its output.
    """
    self._log = log
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH", "")])])
    with log.open("wb") as out:
      self._process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
      )  # fmt: skip
    try:
      self.url = self._wait(url)
    except BaseException:
      self.close()
      raise

  def _wait(self, url: str) -> str:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and self._process.poll() is None:
      found = url or (re.findall(r"^serving at (http://[^/\s]+)", self.said(), re.M) or [""])[0]
      if found:
        host, port = found.removeprefix("http://").split(":")
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 1):
          return found
      time.sleep(0.1)
    last = " ".join(self.said().split())[-400:]
    raise RuntimeError(f"{self._log}: got no server ({last}), expected one that listens; read it.")

  def said(self) -> str:
    """Returns the server's output."""
    return self._log.read_text(errors="replace")

  def cpu_seconds(self) -> float:
    """Returns the CPU seconds of all its threads so far."""
    fields = pathlib.Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

  def close(self) -> None:
    """Stops the server."""
    self._process.terminate()
    try:
      self._process.wait(30)
    except subprocess.TimeoutExpired:
      self._process.kill()
      self._process.wait()


def free_port() -> int:
  """Returns an unused port."""
  with socket.socket() as found:
    found.bind(("127.0.0.1", 0))
    return found.getsockname()[1]


def start(kind: str, settings: Settings, slots: int, log: pathlib.Path, python: str) -> Server:
  """Starts a server.

  Args:
    kind: kind of the peer.
    settings: the workload.
    slots: concurrent completions.
    log: file for its output.
    python: Python interpreter of its environment.
  """
  if kind == "ours":
    return Server(
      [
        python, "-P", "-m", "seerjax.serve", settings.model, "--port=0",
        f"--max_context={CONTEXT}", f"--max_sequences={slots}",
      ],
      log,
    )  # fmt: skip
  if kind == "llama.cpp":
    what = json.dumps([dataclasses.asdict(settings), slots])
    return Server([python, "-P", "-m", "experiments.serving", f"--serve_llama={what}"], log)
  port = free_port()
  program = "import sys; from transformers.cli.transformers import main; sys.exit(main())"
  return Server(
    [
      python, "-c", program, "serve", directory_of(settings.model),
      "--continuous-batching", "--dtype=float32", "--device=cpu", f"--port={port}",
      "--host=127.0.0.1",
    ],
    log,
    f"http://127.0.0.1:{port}",
  )  # fmt: skip


def serve_llama(settings: Settings, slots: int) -> None:
  """Runs llama.cpp's server with one slot per client, each with its own stream in the cache.

  Flash attention and the cache's dtype are the fastest settings found by
  `experiments.engine_throughput`.
  """
  library: Any = importlib.import_module(llama_cpp.PACKAGE)
  with tempfile.TemporaryDirectory() as directory:
    file = pathlib.Path(directory, "model.gguf")
    peer_models.write_gguf(settings.model, file)
    parameters = library.CommonParams()
    parameters.model.path = str(file)
    parameters.port, parameters.verbosity = 0, -1
    parameters.n_parallel, parameters.n_ctx = slots, slots * CONTEXT
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = settings.num_threads
    parameters.cache_type_k = parameters.cache_type_v = library.ggml_type.GGML_TYPE_F32
    kinds = library.llama_flash_attn_type
    parameters.flash_attn_type = kinds.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = library.Server(parameters)
    print(f"serving at {server.listening_address}", flush=True)
    while True:
      time.sleep(3600)


class EngineAlone:
  """Our engine without a server, in a separate process."""

  def __init__(self, settings: Settings, slots: int, log: pathlib.Path):
    self._settings, self._log = settings, log
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH", "")])])
    what = json.dumps([dataclasses.asdict(settings), slots])
    with log.open("wb") as out:
      self._process = subprocess.Popen(
        [sys.executable, "-P", "-m", "experiments.serving", f"--serve_engine={what}"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=out, text=True,
        env={**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
      )  # fmt: skip

  def answer(self, clients: int) -> dict[str, Any]:
    """Runs the requests of `clients` clients; returns the record.

    Raises:
      RuntimeError: if the process ends.
    """
    assert self._process.stdin is not None and self._process.stdout is not None
    try:
      print(clients, file=self._process.stdin, flush=True)
      line = self._process.stdout.readline()
    except BrokenPipeError:
      line = ""
    if not line:
      raise RuntimeError(f"{self._log}: got an engine that ended, expected answers; read it.")
    return json.loads(line)

  def close(self) -> None:
    """Ends the process."""
    assert self._process.stdin is not None and self._process.stdout is not None
    self._process.stdin.close()
    self._process.wait()
    self._process.stdout.close()


def serve_engine(settings: Settings, slots: int) -> None:
  """Runs the engine alone: for each number of clients on stdin, prints one line of results."""
  from seerjax import numerics as numerics_lib
  from seerjax.engine.engine import Engine, EngineConfig
  from seerjax.models import loading
  from seerjax.types import Request, SamplingParams

  reply = os.fdopen(os.dup(1), "w")
  os.dup2(2, 1)  # Output of libraries must not be mistaken for a reply.
  model = loading.load_model(settings.model)
  assert model.tokenizer is not None
  bias = tuple((token, NO_END) for token in model.tokenizer.eos_ids)
  engine = Engine(
    model,
    config=EngineConfig(max_context=CONTEXT, max_sequences=slots),
    key=numerics_lib.key(0),
  )
  for line in sys.stdin:
    requests = [
      Request(
        request_id=str(place),
        prompt=one.prompt,
        sampling=SamplingParams(
          temperature=one.temperature, max_tokens=one.max_tokens, logit_bias=bias,
          stop_token_ids=model.tokenizer.eos_ids,
        ),
        seed=one.seed,
      )
      for place, one in enumerate(timed_questions(settings, int(line)))
    ]  # fmt: skip
    print(json.dumps(in_turn(engine, requests, int(line))), file=reply, flush=True)


def in_turn(engine: Any, requests: Sequence[Any], clients: int) -> dict[str, Any]:
  """Runs requests on an engine, `clients` at once; the next one starts when one finishes."""
  waiting, begun = iter(requests), {}
  first: list[float] = []
  whole: list[float] = []
  num_tokens, cpu, begin = 0, time.process_time(), time.perf_counter()

  def submit() -> None:
    for request in waiting:
      begun[request.request_id] = time.perf_counter()
      engine.submit(request)
      return

  for _ in range(clients):
    submit()
  seen: set[str] = set()
  while engine.num_unfinished:
    updates, now = engine.step(), time.perf_counter()
    new = {update.request_id for update in updates} - seen
    first += [now - begun[name] for name in new]
    seen |= new
    for completion in engine.poll():
      num_tokens += len(completion.tokens)
      whole.append(now - begun[completion.request_id])
      submit()
  return dict(
    seconds=time.perf_counter() - begin,
    cpu_seconds=time.process_time() - cpu,
    tokens=num_tokens,
    first=quantiles(first),
    whole=quantiles(whole),
  )


def quantiles(seconds: Sequence[float]) -> list[float]:
  """Returns the median and the 95th percentile."""
  return [float(value) for value in np.quantile(seconds, (0.5, 0.95))]
