"""Servers beside one another: one question's bits under load, tokens/s, time to the first token.

Claim: one question asked 1,000 times beside others has one answer and one bit pattern of
log-probabilities here; 64 clients get at least 0.9 of the tokens/s that the engine gives alone to
the same requests; and 8 and 64 clients get more than from llama.cpp's server.
Command: bash launch/local.sh experiments.serving --workdir=runs/serving
  peers need packages of their own, which `bash launch/peers.sh` installs; the script says which are
  missing and measures the others. A run that was killed goes on where it was.
  in a minute, to see that everything runs: --askings=20 --repetitions=1 --requests_per_client=1
Hardware: 2 CPU cores, about 10 minutes. Numbers: docs/results/serving.md

(a) The question is asked again and again beside random others: prompts, lengths and seeds drawn,
1 to 32 at once in a drawn order, half of them streamed. (b) Every client asks the next request once
it has its answer; lengths are forced and log-normal, and no token ends an answer. Servers have
processes of their own and take turns, and so does the engine alone, which has the server's sizes.
The clients (one process) share the two cores with whom they ask.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
import contextlib
import dataclasses
import functools
import importlib
import json
import os
import pathlib
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from typing import Any, NamedTuple

from absl import app, flags
import numpy as np
import rich.progress

from experiments import cells as cells_lib, engine_throughput, gguf, http_load, llama_cpp
from seerjax import metrics
from seerjax.run import command_line

ROOT = pathlib.Path(__file__).parents[1]
PATH = "/v1/completions"
CONTEXT = 768  # Positions of a prompt and its answer.
CLIENTS = (1, 8, 64)
NO_END = -1e6  # A bias that no token survives.
MOST_AT_ONCE = 32
START_SECONDS = 600


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """What is asked.

  Attributes:
    model: "nano" or a Hugging Face directory.
    askings: of the question of part (a).
    requests_per_client: of part (b); 8 together at least.
    max_tokens: the longest answer.
    seed: of all that is drawn.
    num_threads: of llama.cpp.
  """

  model: str = "nano"
  askings: int = 1000
  requests_per_client: int = 4
  max_tokens: int = 384
  seed: int = 0
  num_threads: int = 2


class Peer(NamedTuple):
  """Who answers.

  Attributes:
    label: for people.
    kind: "ours", "engine", "llama.cpp" or "transformers".
    has_logprobs: whether its answers have them.
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
# What each kind needs besides our own packages.
PACKAGES = {
  "llama.cpp": (llama_cpp.PACKAGE,),
  "transformers": ("torch", "transformers", "fastapi", "openai"),
}
# (who, times whom, at how many clients, at least).
AIMS = (
  ("ours", "engine", 64, 0.9),
  ("ours", "llama-cpp", 8, 1.0),
  ("ours", "llama-cpp", 64, 1.0),
)


class Question(NamedTuple):
  """One request.

  Attributes:
    prompt: token ids.
    text: the same, as text.
    max_tokens: of the answer.
    temperature: 0 is greedy.
    seed: of its noise.
  """

  prompt: tuple[int, ...]
  text: str
  max_tokens: int
  temperature: float
  seed: int


class Timed(NamedTuple):
  """A cell of part (b)."""

  repetition: int
  peer: str
  clients: int
  is_streamed: bool


class Same(NamedTuple):
  """A cell of part (a)."""

  peer: str
  temperature: float


# What is asked.


def prompts(settings: Settings, count: int) -> list[tuple[tuple[int, ...], str]]:
  """Returns prompts as ids and as text: word problems as user turns."""
  from seerjax.models import loading, tokenizer as tokenizer_lib

  workload = engine_throughput.Workload(
    model=settings.model, num_prompts=count, seed=settings.seed
  )
  tokenizer = tokenizer_lib.load(loading.directory_of(settings.model))
  found = [tuple(ids) for ids in engine_throughput.prompts(workload)]
  return [(ids, tokenizer.decode(ids, skip_special_tokens=False)) for ids in found]


def timed_questions(settings: Settings, clients: int) -> list[Question]:
  """Returns what so many clients ask."""
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
  """Returns a request's body, as each server is asked for the same.

  Args:
    kind: of the peer.
    question: what is asked.
    model: "nano" or a Hugging Face directory.
    is_streamed: whether the answer comes in pieces.
    is_forced: whether the answer has its length, and no log-probabilities are asked for; else it
      ends as it likes, and they are.
    ends: ids that end an answer.
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
    # No filter: what it does by default it need not do here.
    fields |= dict(
      prompt=question.prompt, top_k=0, top_p=1, min_p=0, samplers=["temperature"],
      ignore_eos=is_forced,
    )  # fmt: skip
    if not is_forced:
      fields["logprobs"] = 1
  else:  # It takes text alone, and how to sample from a configuration of its own.
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

  return str(loading.directory_of(model))


# Servers, each in a process of its own.


class Server:
  """A server's process.

  Attributes:
    url: where it listens.
  """

  def __init__(self, command: Sequence[str], log: pathlib.Path, url: str = ""):
    """Starts it, and waits until it listens.

    Args:
      command: to run.
      log: takes what it prints.
      url: where it will listen; "" if it says so itself ("serving at URL").

    Raises:
      RuntimeError: if it ends, or does not listen in time; with the last that it said.
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
    """Returns what it has printed."""
    return self._log.read_text(errors="replace")

  def cpu_seconds(self) -> float:
    """Returns what its threads have computed so far, in seconds."""
    fields = pathlib.Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

  def close(self) -> None:
    """Ends it."""
    self._process.terminate()
    try:
      self._process.wait(30)
    except subprocess.TimeoutExpired:
      self._process.kill()
      self._process.wait()


def free_port() -> int:
  """Returns a port where nothing listens."""
  with socket.socket() as found:
    found.bind(("127.0.0.1", 0))
    return found.getsockname()[1]


def start(kind: str, settings: Settings, slots: int, log: pathlib.Path, python: str) -> Server:
  """Starts a server.

  Args:
    kind: of the peer.
    settings: what is asked.
    slots: answers at once.
    log: takes what it prints.
    python: of its environment.
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
  """Is llama.cpp's server: a slot for each client with a stream of its own in the cache.

  Flash attention and the dtype of its cache are those with which `experiments.engine_throughput`
  found it fastest.
  """
  library: Any = importlib.import_module(llama_cpp.PACKAGE)
  with tempfile.TemporaryDirectory() as directory:
    file = pathlib.Path(directory, "model.gguf")
    source = pathlib.Path(directory_of(settings.model))
    gguf.write(source, file, np.dtype(np.float32), has_tokenizer=True)
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
  """Our engine without a server, in a process of its own."""

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
    """Answers what so many clients ask.

    Raises:
      RuntimeError: if it ends.
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
    """Ends it."""
    assert self._process.stdin is not None and self._process.stdout is not None
    self._process.stdin.close()
    self._process.wait()
    self._process.stdout.close()


def serve_engine(settings: Settings, slots: int) -> None:
  """Is the engine alone: a line on stdin is how many clients ask, a line on stdout what it took."""
  from seerjax import numerics as numerics_lib
  from seerjax.engine.engine import Engine, EngineConfig
  from seerjax.models import loading
  from seerjax.types import Request, SamplingParams

  reply = os.fdopen(os.dup(1), "w")
  os.dup2(2, 1)  # What libraries print must not look like a reply.
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
  """Lets an engine answer as many requests at once as there are clients, each the next as soon as
  one is answered."""
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


# Part (a).


async def same(
  url: str,
  peer: Peer,
  question: Question,
  others: Sequence[Question],
  *,
  settings: Settings,
  ends: Sequence[int],
  on_asked: Callable[[int], None],
) -> dict[str, Any]:
  """Asks one question again and again beside others.

  Returns:
    how many distinct answers and bit patterns of log-probabilities it got, and beside what.
  """
  rng = random.Random(f"{settings.seed}/{question.temperature}")
  texts: dict[str, int] = {}
  patterns: set[bytes] = set()
  asked = num_others = num_streamed = 0
  connections = [http_load.Connection() for _ in range(MOST_AT_ONCE)]

  async def ask(
    connection: http_load.Connection, one: Question, is_streamed: bool, delay: float
  ) -> http_load.Reply:
    await asyncio.sleep(delay)
    sent = body(
      peer.kind, one, model=settings.model, is_streamed=is_streamed, is_forced=False, ends=ends
    )
    return await connection.ask(url, PATH, sent)

  while asked < settings.askings:
    # Alone at first: continuous batching of transformers samples all as it was asked first.
    size = rng.randint(1, MOST_AT_ONCE) if asked else 1
    is_it = [rng.random() < 0.5 for _ in range(size)]
    is_it[rng.randrange(size)] = True
    streamed = [rng.random() < 0.5 for _ in range(size)]
    replies = await asyncio.gather(
      *(
        ask(
          connections[place],
          question if is_it[place] else rng.choice(others)._replace(seed=rng.randrange(2**31)),
          streamed[place],
          rng.choice((0.0, 0.0, 0.01, 0.05)),
        )
        for place in range(size)
      )
    )
    for reply, counts in zip(replies, is_it, strict=True):
      said = http_load.said(reply)
      if counts:
        texts[said.text] = texts.get(said.text, 0) + 1
        patterns.add(struct.pack(f"{len(said.logprobs)}d", *said.logprobs))
    asked += sum(is_it)
    num_others += size - sum(is_it)
    num_streamed += sum(streamed)
    on_asked(sum(is_it))
  for connection in connections:
    connection.close()
  return dict(
    asked=asked, others=num_others, streamed=num_streamed,
    answers=len(texts), commonest=max(texts.values()),
    patterns=len(patterns) if peer.has_logprobs else None,
  )  # fmt: skip


def same_questions(settings: Settings, temperature: float) -> tuple[Question, list[Question]]:
  """Returns the question, and those that are asked beside it."""
  found = prompts(settings, 65)
  rng = random.Random(settings.seed)
  others = [
    Question(ids, text, rng.randint(4, 96), rng.choice((0.0, 0.7, 1.0)), 0)
    for ids, text in found[1:]
  ]
  ids, text = found[0]
  return Question(ids, text, 48, temperature, 7), others


# Both parts.


def quantiles(seconds: Sequence[float]) -> list[float]:
  """Returns the median and the 95th percentile."""
  return [float(value) for value in np.quantile(seconds, (0.5, 0.95))]


def timed(server: Server, peer: Peer, settings: Settings, cell: Timed, ends: Sequence[int]):
  """Returns what a server gave to so many clients.

  Raises:
    ValueError: if an answer is not as long as it should be.
  """
  questions = timed_questions(settings, cell.clients)
  bodies = [
    body(
      peer.kind, one, model=settings.model, is_streamed=cell.is_streamed, is_forced=True, ends=ends
    )
    for one in questions
  ]
  cpu, own = server.cpu_seconds(), time.process_time()
  replies, seconds = asyncio.run(http_load.in_turn(server.url, PATH, bodies, cell.clients))
  cpu, own = server.cpu_seconds() - cpu, time.process_time() - own
  found = [http_load.said(reply).count for reply in replies]
  for count, one in zip(found, questions, strict=True):
    if count != one.max_tokens:
      raise ValueError(
        f"{peer.label}: got an answer of {count} tokens, expected the {one.max_tokens} that were"
        " asked for; look into its log."
      )
  return dict(
    seconds=seconds,
    cpu_seconds=cpu,
    client_cpu_seconds=own,
    tokens=sum(found),
    first=quantiles([reply.first for reply in replies]) if cell.is_streamed else None,
    whole=quantiles([reply.whole for reply in replies]),
  )


class Fleet:
  """The servers of a run, each started when it is first needed, and kept: their warm-up is long."""

  def __init__(self, settings: Settings, directory: pathlib.Path, interpreters: dict[str, str]):
    self._settings, self._directory, self._interpreters = settings, directory, interpreters
    self._servers: dict[tuple[str, int], Server] = {}
    self._engine: EngineAlone | None = None
    self._is_warm: set[tuple[str, int]] = set()
    from seerjax.models import loading, tokenizer as tokenizer_lib

    tokenizer = tokenizer_lib.load(loading.directory_of(settings.model))
    self.ends = tokenizer.eos_ids

  def server(self, name: str, slots: int) -> Server:
    """Returns a peer's server."""
    if (name, slots) not in self._servers:
      kind = PEERS[name].kind
      log = self._directory / f"{name}-{slots}.log"
      self._servers[name, slots] = start(
        kind, self._settings, slots, log, self._interpreters[kind]
      )
    return self._servers[name, slots]

  def timed(self, cell: Timed) -> dict[str, Any]:
    """Measures a cell of part (b), once its peer is warm."""
    peer = PEERS[cell.peer]
    if peer.kind == "engine":
      log = self._directory / "engine.log"
      self._engine = self._engine or EngineAlone(self._settings, max(CLIENTS), log)
      engine = self._engine
      run = lambda: engine.answer(cell.clients)
    else:
      # llama.cpp has a slot for each client; more would cost it.
      slots = cell.clients if peer.kind == "llama.cpp" else max(CLIENTS)
      server = self.server(cell.peer, slots)
      run = lambda: timed(server, peer, self._settings, cell, self.ends)
    if (cell.peer, cell.clients) not in self._is_warm:
      run()
      self._is_warm.add((cell.peer, cell.clients))
    return run()

  def same(self, cell: Same, on_asked: Callable[[int], None]) -> dict[str, Any]:
    """Measures a cell of part (a)."""
    peer, settings = PEERS[cell.peer], self._settings
    slots = MOST_AT_ONCE if peer.kind == "llama.cpp" else max(CLIENTS)
    server = self.server(cell.peer, slots)
    question, others = same_questions(settings, cell.temperature)
    return asyncio.run(
      same(
        server.url, peer, question, others, settings=settings, ends=self.ends, on_asked=on_asked
      )
    )

  def stop(self, name: str) -> None:
    """Ends a peer's servers."""
    for key in [key for key in self._servers if key[0] == name]:
      self._servers.pop(key).close()

  def close(self) -> None:
    """Ends all."""
    for name in PEERS:
      self.stop(name)
    if self._engine is not None:
      self._engine.close()


def all_cells(names: Sequence[str], repetitions: int) -> Iterator[Same | Timed]:
  """Returns what is measured, in its order: in part (b) peers take turns."""
  for name in names:
    for temperature in (1.0, 0.0):
      if PEERS[name].kind != "engine":
        yield Same(name, temperature)
  for repetition in range(repetitions):
    for clients in CLIENTS:
      # Backwards every second time: what the machine does meanwhile then hits all peers alike.
      for name in list(names)[:: 1 if repetition % 2 == 0 else -1]:
        if PEERS[name].is_timed:
          yield Timed(repetition, name, clients, False)
          if PEERS[name].kind != "engine":
            yield Timed(repetition, name, clients, True)


def key_of(record: dict[str, Any]) -> Same | Timed:
  """Returns the cell that a record is of."""
  kind = Timed if "clients" in record else Same
  return kind(*(record[field] for field in kind._fields))


def measure(
  names: Sequence[str],
  settings: Settings,
  repetitions: int,
  directory: pathlib.Path,
  interpreters: dict[str, str],
  say: Callable[[str], None],
) -> dict[Same | Timed, dict[str, Any]]:
  """Returns what was measured by cell; what an earlier run measured is not measured again."""
  directory.mkdir(parents=True, exist_ok=True)
  path, kept = directory / cells_lib.FILE_NAME, dataclasses.asdict(settings)
  found = {key_of(record): record for record in cells_lib.read(path, kept)}
  cells = [*all_cells(names, repetitions)]
  missing = [cell for cell in cells if cell not in found]
  if len(missing) < len(cells):
    say(f"{len(cells) - len(missing)} of {len(cells)} were measured before")
  with contextlib.ExitStack() as stack:
    fleet = Fleet(settings, directory, interpreters)
    stack.callback(fleet.close)
    progress = stack.enter_context(rich.progress.Progress(transient=True))
    total = progress.add_task("cells", total=len(missing))
    for cell in missing:
      peer = PEERS[cell.peer]
      if isinstance(cell, Same):
        asking = progress.add_task(peer.label, total=settings.askings)
        measured = fleet.same(cell, functools.partial(progress.advance, asking))
        progress.remove_task(asking)
        line = f"temperature {cell.temperature:g}: {measured['answers']} distinct answers"
        if measured["patterns"] is not None:
          line += f", {measured['patterns']} bit patterns"
        if peer.kind in ("transformers", "llama.cpp"):  # A slot a client, or a way to sample.
          fleet.stop(cell.peer)
      else:
        measured = fleet.timed(cell)
        rate = measured["tokens"] / measured["seconds"]
        how = "streamed" if cell.is_streamed else "whole"
        line = f"{cell.clients} clients, {how}: {rate:,.0f} tokens/s"
      progress.console.print(f"{peer.label}: {line}", highlight=False)
      record = metrics.encode(dict(settings=kept, **cell._asdict(), **measured))
      cells_lib.append(path, record)
      found[cell] = record
      progress.advance(total)
  return {cell: found[cell] for cell in cells}


# What is written.


class Summary(NamedTuple):
  """A peer at so many clients, over all repetitions.

  Attributes:
    rate: tokens/s, median.
    lowest: of one repetition.
    highest: of one repetition.
    by_cpu: tokens a second of its own CPU time, median.
    first: seconds to a first token, median and 95th percentile; None if there is none to see.
    whole: seconds to a whole answer, alike.
  """

  rate: float
  lowest: float
  highest: float
  by_cpu: float
  first: tuple[float, float] | None
  whole: tuple[float, float]


def summary(
  found: dict[Same | Timed, dict[str, Any]], name: str, clients: int, is_streamed: bool
) -> Summary | None:
  """Returns what a peer did; None if that was not measured."""
  records = [
    record
    for cell, record in found.items()
    if isinstance(cell, Timed) and cell[1:] == (name, clients, is_streamed)
  ]
  if not records:
    return None
  rates = [record["tokens"] / record["seconds"] for record in records]
  middle = lambda field: tuple(np.median([record[field] for record in records], axis=0).tolist())
  return Summary(
    rate=float(np.median(rates)),
    lowest=min(rates),
    highest=max(rates),
    by_cpu=float(np.median([one["tokens"] / one["cpu_seconds"] for one in records])),
    first=middle("first") if records[0]["first"] is not None else None,
    whole=middle("whole"),
  )


def same_table(found: dict[Same | Timed, dict[str, Any]], missing: dict[str, str]) -> str:
  """Returns part (a) as Markdown."""
  lines = [
    "| server | temperature | asked | beside others | distinct answers | the commonest |"
    " distinct bit patterns of log-probabilities |",
    "|---|---|---|---|---|---|---|",
  ]
  for cell, record in found.items():
    if isinstance(cell, Same):
      patterns = "it has none" if record["patterns"] is None else f"{record['patterns']:,}"
      lines.append(
        f"| {PEERS[cell.peer].label} | {cell.temperature:g} | {record['asked']:,} |"
        f" {record['others']:,} | {record['answers']:,} | {record['commonest']:,} | {patterns} |"
      )
  for name, why in missing.items():
    lines.append(f"| {PEERS[name].label} | not installed here: {why} | | | | | |")
  return "\n".join(lines)


def timed_table(found: dict[Same | Timed, dict[str, Any]]) -> str:
  """Returns part (b) as Markdown."""
  lines = [
    "| clients | who | answers | tokens/s, median (range) | times the engine alone | tokens a CPU"
    " second | first token, ms, median (95 %) | whole answer, ms, median (95 %) |",
    "|---|---|---|---|---|---|---|---|",
  ]
  for clients in CLIENTS:
    alone = summary(found, "engine", clients, False)
    for name, peer in PEERS.items():
      for is_streamed in (False, True):
        one = summary(found, name, clients, is_streamed)
        if one is None:
          continue
        ratio = f"{one.rate / alone.rate:.2f}" if alone else "not measured"
        how = "no server" if peer.kind == "engine" else "streamed" if is_streamed else "whole"
        lines.append(
          f"| {clients} | {peer.label} | {how} | {one.rate:,.0f} ({one.lowest:,.0f} to"
          f" {one.highest:,.0f}) | {ratio} | {one.by_cpu:,.0f} | {_pair(one.first)} |"
          f" {_pair(one.whole)} |"
        )
  return "\n".join(lines)


def _pair(seconds: tuple[float, float] | None) -> str:
  if seconds is None:
    return ""
  return f"{seconds[0] * 1e3:,.0f} ({seconds[1] * 1e3:,.0f})"


def aims(found: dict[Same | Timed, dict[str, Any]]) -> str:
  """Returns what is aimed at as Markdown, and what of it holds."""
  lines = [
    "| tokens/s of our server, answers whole, times those of | clients | aimed at | a wall second |"
    " a second of their CPU | holds (wall) |",
    "|---|---|---|---|---|---|",
  ]
  for name, other, clients, aim in AIMS:
    label = PEERS[other].label
    one, two = (summary(found, who, clients, False) for who in (name, other))
    if one is None or two is None:
      lines.append(f"| {label} | {clients} | {aim:g} | not measured | | |")
      continue
    ratio = one.rate / two.rate
    holds = "yes" if ratio >= aim else "**no**"
    by_cpu = one.by_cpu / two.by_cpu
    lines.append(f"| {label} | {clients} | {aim:g} | {ratio:.2f} | {by_cpu:.2f} | {holds} |")
  return "\n".join(lines)


def picture(found: dict[Same | Timed, dict[str, Any]], path: pathlib.Path) -> None:
  """Draws tokens/s for each peer at each number of clients."""
  import matplotlib

  matplotlib.use("Agg")
  from matplotlib import pyplot

  rows = [
    (clients, name, is_streamed, one)
    for clients in CLIENTS
    for name in PEERS
    for is_streamed in (False, True)
    if (one := summary(found, name, clients, is_streamed)) is not None
  ]
  figure, axes = pyplot.subplots(figsize=(7, 0.6 + 0.3 * len(rows)))
  colors = {"ours": "tab:blue", "engine": "tab:green"}
  labels = []
  for place, (clients, name, is_streamed, one) in enumerate(reversed(rows)):
    color = colors.get(PEERS[name].kind, "tab:gray")
    axes.barh(place, one.rate, color=color, alpha=0.5 if is_streamed else 1.0)
    axes.text(one.rate, place, f" {one.rate:,.0f}", va="center", fontsize=8)
    labels.append(f"{clients}: {PEERS[name].label}{', streamed' if is_streamed else ''}")
  axes.set_yticks(range(len(rows)), labels, fontsize=8)
  axes.set_xlabel("tokens/s by number of clients")
  axes.margins(x=0.15)
  figure.tight_layout()
  figure.savefig(path, dpi=90)
  pyplot.close(figure)


def chosen(names: Sequence[str], interpreters: dict[str, str]) -> tuple[list[str], dict[str, str]]:
  """Returns the peers that can run here, of those that are named, or of all if none is; and of the
  others which packages they miss.

  Raises:
    ValueError: if a name is not known.
  """
  if unknown := [name for name in names if name not in PEERS]:
    raise ValueError(
      f"--peers: got {', '.join(unknown)}, expected some of {', '.join(PEERS)}; correct the name."
    )
  missing = {}
  for name in names or PEERS:
    kind = PEERS[name].kind
    if kind in PACKAGES:
      found = engine_throughput.missing_of(PACKAGES[kind], interpreters[kind])
      if found:
        missing[name] = ", ".join(found)
  return [name for name in names or PEERS if name not in missing], missing


def run(
  settings: Settings,
  names: Sequence[str],
  repetitions: int,
  directory: pathlib.Path,
  say: Callable[[str], None],
  torch_python: str = "",
) -> None:
  """Measures, prints, and writes cells.jsonl, table.md and serving.png."""
  found = engine_throughput.pythons(torch_python)
  interpreters = {"engine": sys.executable, **found}
  names, missing = chosen(names, interpreters)
  for name, why in missing.items():
    say(f"{why} not installed: {name} left out (`bash launch/peers.sh` installs it)")
  results = measure(names, settings, repetitions, directory, interpreters, say)
  text = f"{same_table(results, missing)}\n\n{timed_table(results)}\n\n{aims(results)}\n"
  (directory / "table.md").write_text(text)
  if any(isinstance(cell, Timed) for cell in results):
    picture(results, directory / "serving.png")
  say(f"\n{text}\nwritten to {directory}")


def main(argv: list[str]) -> None:
  args = flags.FLAGS
  for written, be in ((args.serve_llama, serve_llama), (args.serve_engine, serve_engine)):
    if written:
      settings, slots = json.loads(written)
      be(Settings(**settings), slots)
      return
  with command_line.refusals():
    command_line.check_arguments(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # Servers end with who started them.
    settings = Settings(
      model=args.model,
      askings=args.askings,
      requests_per_client=args.requests_per_client,
      max_tokens=args.max_tokens,
      num_threads=args.num_threads,
    )
    run(
      settings,
      args.peers,
      args.repetitions,
      pathlib.Path(args.workdir),
      lambda line: print(line, flush=True),
      args.torch_python,
    )


if __name__ == "__main__":
  usual = Settings()
  flags.DEFINE_string("model", usual.model, "nano or a Hugging Face directory.")
  flags.DEFINE_list("peers", [], f"Some of {', '.join(PEERS)}; all by default.")
  flags.DEFINE_integer("askings", usual.askings, "How often the one question is asked.", 1)
  flags.DEFINE_integer("repetitions", 3, "How often each number of clients asks each peer.", 1)
  flags.DEFINE_integer("requests_per_client", usual.requests_per_client, "8 together at least.", 1)
  flags.DEFINE_integer("max_tokens", usual.max_tokens, "Longest answer.", 1, CONTEXT // 2)
  flags.DEFINE_integer("num_threads", usual.num_threads, "Of llama.cpp's server.", 1)
  flags.DEFINE_string("torch_python", "", "Of transformers; this one, or .venv-3.11's.")
  flags.DEFINE_string("workdir", "runs/serving", "Takes numbers, tables and picture.")
  flags.DEFINE_string("serve_llama", "", "Internal: be llama.cpp's server.")
  flags.DEFINE_string("serve_engine", "", "Internal: be the engine alone.")
  app.run(main)
