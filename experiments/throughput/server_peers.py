"""The servers that `throughput.server` compares, each in a separate process, and its requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import contextlib
import dataclasses
import importlib
import json
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any, NamedTuple

import numpy as np

from experiments import llama_cpp, peer_models, peer_process
from experiments.throughput import engine as engine_throughput

START_SECONDS = 600
CONTEXT = 768  # Positions of prompt and completion.
NO_END = -1e6  # A bias that excludes a token.


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
  **peer_process.PACKAGES,
  "transformers": (*peer_process.PACKAGES["transformers"], "fastapi", "openai"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """The workload.

  Attributes:
    model: "nano" or a Hugging Face directory.
    askings: repetitions of the prompt of part (a).
    requests_per_client: requests per client in part (b), at least 8 in all.
    max_tokens: maximum length.
    seed: seed of all draws.
    num_threads: threads of llama.cpp.
  """

  model: str = "nano"
  askings: int = 1000
  requests_per_client: int = 4
  max_tokens: int = 384
  seed: int = 0
  num_threads: int = 2


class Question(NamedTuple):
  """One request.

  Attributes:
    prompt: token ids.
    text: the same as text.
    max_tokens: maximum tokens of the completion.
    temperature: 0 is greedy.
    seed: sampling seed.
  """

  prompt: tuple[int, ...]
  text: str
  max_tokens: int
  temperature: float
  seed: int


def prompts(settings: Settings, count: int) -> list[tuple[tuple[int, ...], str]]:
  """Returns prompts as ids and as text: word problems as user turns."""
  from seerjax.models import loading, tokenizer as tokenizer_lib

  workload = engine_throughput.Workload(model=settings.model, num_prompts=count, seed=settings.seed)
  tokenizer = tokenizer_lib.load(loading.path_of(settings.model))
  found = [tuple(ids) for ids in engine_throughput.prompts(workload)]
  return [(ids, tokenizer.decode(ids, skip_special_tokens=False)) for ids in found]


def timed_questions(settings: Settings, clients: int) -> list[Question]:
  """Returns the requests of `clients` clients."""
  count = max(8, settings.requests_per_client * clients)
  rng = np.random.default_rng([settings.seed, clients])
  lengths = np.clip(np.rint(np.exp(rng.normal(4.35, 0.88, count))), 1, settings.max_tokens)
  return [
    Question(ids, text, int(length), 1.0, seed)
    for seed, ((ids, text), length) in enumerate(
      zip(prompts(settings, count), lengths, strict=True)
    )
  ]


def body(
  kind: str,
  question: Question,
  *,
  model: str,
  is_streamed: bool,
  is_forced: bool,
  ends: Sequence[int],
) -> bytes:
  """Returns the body of an equivalent request for each kind of server.

  Args:
    kind: kind of the peer.
    question: the request.
    model: "nano" or a Hugging Face directory.
    is_streamed: whether to stream the response.
    is_forced: whether the completion has a forced length and no log-probabilities; else it may stop
      by itself and has them.
    ends: ids that end a completion.
  """
  fields: dict[str, Any] = dict(
    max_tokens=question.max_tokens, temperature=question.temperature, seed=question.seed
  )
  if is_streamed:
    fields["stream"] = True
  if kind == "ours":
    fields |= dict(prompt=question.prompt)
    if is_forced:
      fields["logit_bias"] = {str(token): NO_END for token in ends}
    else:
      fields["logprobs"] = 0
    if is_streamed:
      fields["stream_options"] = {"include_usage": True}
  elif kind == "llama.cpp":
    # Turns off the filters that llama.cpp applies by default.
    fields |= dict(
      prompt=question.prompt, top_k=0, top_p=1, min_p=0, samplers=["temperature"],
      ignore_eos=is_forced,
    )  # fmt: skip
    if not is_forced:
      fields["logprobs"] = 1
  else:  # transformers: takes only text, and sampling settings in its own configuration.
    is_sampled = question.temperature > 0
    how = dict(do_sample=is_sampled, max_new_tokens=question.max_tokens, eos_token_id=[*ends])
    if is_sampled:
      how |= dict(temperature=question.temperature, top_k=0)
    fields |= dict(
      prompt=question.text, model=directory_of(model), generation_config=json.dumps(how)
    )
  return json.dumps(fields).encode()


def directory_of(model: str) -> str:
  """Returns the directory of a model."""
  from seerjax.models import loading

  return str(loading.path_of(model))


def same_questions(settings: Settings, temperature: float) -> tuple[Question, list[Question]]:
  """Returns the repeated request of part (a), and the other requests."""
  found = prompts(settings, 65)
  rng = random.Random(settings.seed)
  others = [
    Question(ids, text, rng.randint(4, 96), rng.choice((0.0, 0.7, 1.0)), 0)
    for ids, text in found[1:]
  ]
  ids, text = found[0]
  return Question(ids, text, 48, temperature, 7), others


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
    with log.open("wb") as out:
      self._process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
        env=peer_process.environment(),
      )  # fmt: skip
    try:
      self.url = self._wait(url)
    except BaseException:
      self.close()
      raise

  def _wait(self, url: str) -> str:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and self._process.poll() is None:
      found = url or (re.findall(r"^serving at (http://[^/\s]+)", self.output(), re.M) or [""])[0]
      if found:
        host, port = found.removeprefix("http://").split(":")
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 1):
          return found
      time.sleep(0.1)
    last = " ".join(self.output().split())[-400:]
    raise RuntimeError(f"{self._log}: got no server ({last}), expected one that listens; read it.")

  def output(self) -> str:
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
        python, "-P", "-m", "seerjax.commands", "serve", settings.model, "--port=0",
        f"--max_model_len={CONTEXT}", f"--max_num_seqs={slots}",
      ],
      log,
    )  # fmt: skip
  if kind == "llama.cpp":
    what = json.dumps([dataclasses.asdict(settings), slots])
    return Server(
      [python, "-P", "-m", "experiments.throughput.server", f"--serve_llama={what}"], log
    )
  port = peer_process.free_port()
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
  `experiments.throughput.engine`.
  """
  signal.signal(signal.SIGTERM, signal.SIG_DFL)  # An orderly exit would wait for its threads.
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


class EngineAlone(peer_process.Process):
  """Our engine without a server, in a separate process."""

  def __init__(self, settings: Settings, slots: int, log: pathlib.Path):
    what = json.dumps([dataclasses.asdict(settings), slots])
    super().__init__("experiments.throughput.server", f"--serve_engine={what}", log=log)
    self._log = log

  def answer(self, clients: int) -> dict[str, Any]:
    """Runs the requests of `clients` clients; returns the record.

    Raises:
      RuntimeError: if the process ends.
    """
    if "error" in (record := self.ask(str(clients))):
      raise RuntimeError(
        f"{self._log}: got an engine that ended ({record['error']}), expected answers; read it."
      )
    return record


def serve_engine(settings: Settings, slots: int) -> None:
  """Runs the engine alone: for each number of clients on stdin, prints one line of results."""
  peer_process.serve(_engine_answers(settings, slots))


def _engine_answers(settings: Settings, slots: int) -> Iterator[dict[str, Any]]:
  from seerjax import numerics as numerics_lib
  from seerjax.engine.engine import Engine, EngineConfig
  from seerjax.models import loading
  from seerjax.types import Request, SamplingParams

  model = loading.load_model(settings.model)
  assert model.tokenizer is not None
  bias = tuple((token, NO_END) for token in model.tokenizer.eos_ids)
  engine = Engine(
    model,
    config=EngineConfig(max_model_len=CONTEXT, max_num_seqs=slots),
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
    yield in_turn(engine, requests, int(line))


def in_turn(engine: Any, requests: Sequence[Any], clients: int) -> dict[str, Any]:
  """Runs requests on an engine, `clients` at once; the next one starts when one finishes."""
  waiting, started = iter(requests), {}
  first: list[float] = []
  whole: list[float] = []
  num_tokens, cpu, begin = 0, time.process_time(), time.perf_counter()

  def submit() -> None:
    for request in waiting:
      started[request.request_id] = time.perf_counter()
      engine.add_request(request)
      return

  for _ in range(clients):
    submit()
  seen: set[str] = set()
  while engine.num_unfinished:
    updates, now = engine.step(), time.perf_counter()
    new = {update.request_id for update in updates} - seen
    first += [now - started[name] for name in new]
    seen |= new
    for completion in engine.poll():
      num_tokens += len(completion.tokens)
      whole.append(now - started[completion.request_id])
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
