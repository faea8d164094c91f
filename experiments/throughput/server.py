"""Compares servers: bits of one prompt under load, tokens/s, time to first token.

Claim: with our server, one prompt sent 1,000 times under load has one completion and one bit
pattern of log-probabilities; 64 clients get at least 0.9 of the tokens/s of the engine alone on the
same requests; and 8 and 64 clients get more than from llama.cpp's server.
Command: bash launch/local.sh experiments.throughput.server --workdir=runs/serving
  peers need additional packages, which `bash launch/peers.sh` installs; the script names missing
  ones and measures the others. A killed run continues with the same command.
  a check in a minute: --askings=20 --repetitions=1 --requests_per_client=1
Hardware: 2 CPU cores, about 10 minutes. Numbers: docs/results/serving.md

(a) The prompt is sent repeatedly among random other requests: prompts, lengths and seeds are drawn,
1 to 32 at once in random order, half of them streamed. (b) Every client sends its next request
after each response; lengths are forced and log-normal, and no token ends a completion. Servers run
in separate processes and take turns, and so does the engine alone, which has the server's sizes.
The clients (one process) share the two cores with the server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
import contextlib
import dataclasses
import functools
import json
import pathlib
import random
import struct
import sys
import time
from typing import Any, NamedTuple

from absl import flags
import numpy as np
import rich.progress

from experiments import cells as cells_lib, measure, peer_models, peer_process
from experiments.throughput import http_load, server_peers as serving_peers
from experiments.throughput.server_peers import (
  CONTEXT,
  PACKAGES,
  PEERS,
  EngineAlone,
  Peer,
  Question,
  Server,
  Settings,
  body,
  quantiles,
  same_questions,
  timed_questions,
)
from seerjax import metrics

PATH = "/v1/completions"
MOST_AT_ONCE = 32
CLIENTS = (1, 8, 64)
# (peer, peer to compare with, number of clients, minimum ratio).
AIMS = (
  ("ours", "engine", 64, 0.9),
  ("ours", "llama-cpp", 8, 1.0),
  ("ours", "llama-cpp", 64, 1.0),
)


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


class Summary(NamedTuple):
  """Results of a peer with a number of clients, over all repetitions.

  Attributes:
    rate: median tokens/s.
    lowest: minimum over repetitions.
    highest: maximum over repetitions.
    by_cpu: median tokens per second of its own CPU time.
    first: seconds to the first token, median and 95th percentile; None if it is not observable.
    whole: seconds to the whole completion, median and 95th percentile.
  """

  rate: float
  lowest: float
  highest: float
  by_cpu: float
  first: tuple[float, float] | None
  whole: tuple[float, float]


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
  """Sends one request repeatedly among others.

  Returns:
    the numbers of distinct completions and of bit patterns of log-probabilities, and the load.
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
    # First alone: continuous batching in transformers keeps the sampling settings of its first use.
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
      answer = http_load.parsed(reply)
      if counts:
        texts[answer.text] = texts.get(answer.text, 0) + 1
        patterns.add(struct.pack(f"{len(answer.logprobs)}d", *answer.logprobs))
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


def timed(
  server: Server, peer: Peer, settings: Settings, cell: Timed, ends: Sequence[int]
) -> dict[str, Any]:
  """Measures a server with the clients of a cell.

  Raises:
    ValueError: if a completion does not have its forced length.
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
  found = [http_load.parsed(reply).count for reply in replies]
  for count, one in zip(found, questions, strict=True):
    if count != one.max_tokens:
      raise ValueError(
        f"{peer.label}: got a response of {count} tokens, expected the {one.max_tokens} requested;"
        " see its log."
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
  """The servers of a run. Each is started on first use and kept, because warm-up takes long."""

  def __init__(self, settings: Settings, directory: pathlib.Path, interpreters: dict[str, str]):
    self._settings, self._directory, self._interpreters = settings, directory, interpreters
    self._servers: dict[tuple[str, int], Server] = {}
    self._engine: EngineAlone | None = None
    self._is_warm: set[tuple[str, int]] = set()
    from seerjax.models import loading, tokenizer as tokenizer_lib

    tokenizer = tokenizer_lib.load(loading.path_of(settings.model))
    self.ends = tokenizer.eos_ids

  def server(self, name: str, slots: int) -> Server:
    """Returns a peer's server."""
    if (name, slots) not in self._servers:
      kind = PEERS[name].kind
      log = self._directory / f"{name}-{slots}.log"
      self._servers[name, slots] = serving_peers.start(
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
      # llama.cpp gets one slot per client; more would slow it down.
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
      same(server.url, peer, question, others, settings=settings, ends=self.ends, on_asked=on_asked)
    )

  def stop(self, name: str) -> None:
    """Stops a peer's servers."""
    for key in [key for key in self._servers if key[0] == name]:
      self._servers.pop(key).close()

  def close(self) -> None:
    """Stops all servers."""
    for name in PEERS:
      self.stop(name)
    if self._engine is not None:
      self._engine.close()


def all_cells(names: Sequence[str], repetitions: int) -> Iterator[Same | Timed]:
  """Yields the cells in order of measurement; in part (b) peers take turns."""
  for name in names:
    for temperature in (1.0, 0.0):
      if PEERS[name].kind != "engine":
        yield Same(name, temperature)
  for repetition in range(repetitions):
    for clients in CLIENTS:
      for name in measure.in_turn(names, repetition):
        if PEERS[name].is_timed:
          yield Timed(repetition, name, clients, False)
          if PEERS[name].kind != "engine":
            yield Timed(repetition, name, clients, True)


def key_of(record: dict[str, Any]) -> Same | Timed:
  """Returns the cell of a record."""
  kind = Timed if "clients" in record else Same
  return kind(*(record[field] for field in kind._fields))


def measured(
  names: Sequence[str],
  settings: Settings,
  repetitions: int,
  directory: pathlib.Path,
  interpreters: dict[str, str],
  say: Callable[[str], None],
) -> dict[Same | Timed, dict[str, Any]]:
  """Measures missing cells; returns all records by cell."""
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
        found_here = fleet.same(cell, functools.partial(progress.advance, asking))
        progress.remove_task(asking)
        line = f"temperature {cell.temperature:g}: {found_here['answers']} distinct answers"
        if found_here["patterns"] is not None:
          line += f", {found_here['patterns']} bit patterns"
        if peer.kind in ("transformers", "llama.cpp"):  # Fixed slots or sampling settings.
          fleet.stop(cell.peer)
      else:
        found_here = fleet.timed(cell)
        rate = found_here["tokens"] / found_here["seconds"]
        how = "streamed" if cell.is_streamed else "whole"
        line = f"{cell.clients} clients, {how}: {rate:,.0f} tokens/s"
      progress.console.print(f"{peer.label}: {line}", highlight=False)
      record = metrics.encode(dict(settings=kept, **cell._asdict(), **found_here))
      cells_lib.append(path, record)
      found[cell] = record
      progress.advance(total)
  return {cell: found[cell] for cell in cells}


def chosen(names: Sequence[str], interpreters: dict[str, str]) -> tuple[list[str], dict[str, str]]:
  """Returns the named peers (all if none) that can run here, and missing packages of the others.

  Raises:
    ValueError: if a name is unknown.
  """
  peer_process.check_names("--peers", names, PEERS)
  missing = {}
  for name in names or PEERS:
    kind = PEERS[name].kind
    if found := peer_process.missing_packages(PACKAGES.get(kind, ()), interpreters[kind]):
      missing[name] = ", ".join(found)
  return [name for name in names or PEERS if name not in missing], missing


def summary(
  found: dict[Same | Timed, dict[str, Any]], name: str, clients: int, is_streamed: bool
) -> Summary | None:
  """Returns the results of a peer; None if it was not measured."""
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
  rows = []
  for cell, record in found.items():
    if isinstance(cell, Same):
      rows.append((
        PEERS[cell.peer].label, f"{cell.temperature:g}",
        *(f"{record[field]:,}" for field in ("asked", "others", "answers", "commonest")),
        "it has none" if record["patterns"] is None else f"{record['patterns']:,}",
      ))  # fmt: skip
  for name, why in missing.items():
    rows.append((PEERS[name].label, f"not installed here: {why}", *[""] * 5))
  names = (
    "server", "temperature", "requests", "among others", "distinct responses", "most common",
    "distinct bit patterns of log-probabilities",
  )  # fmt: skip
  return measure.table(names, rows)


def timed_table(found: dict[Same | Timed, dict[str, Any]]) -> str:
  """Returns part (b) as Markdown."""
  rows = []
  for clients in CLIENTS:
    alone = summary(found, "engine", clients, False)
    for name, peer in PEERS.items():
      for is_streamed in (False, True):
        one = summary(found, name, clients, is_streamed)
        if one is None:
          continue
        rows.append((
          clients, peer.label,
          "no server" if peer.kind == "engine" else "streamed" if is_streamed else "whole",
          f"{one.rate:,.0f} ({one.lowest:,.0f} to {one.highest:,.0f})",
          f"{one.rate / alone.rate:.2f}" if alone else "not measured",
          f"{one.by_cpu:,.0f}", _pair(one.first), _pair(one.whole),
        ))  # fmt: skip
  names = (
    "clients", "who", "responses", "tokens/s, median (range)", "times the engine alone",
    "tokens per CPU second", "first token, ms, median (95 %)", "whole response, ms, median (95 %)",
  )  # fmt: skip
  return measure.table(names, rows)


def _pair(seconds: tuple[float, float] | None) -> str:
  if seconds is None:
    return ""
  return f"{seconds[0] * 1e3:,.0f} ({seconds[1] * 1e3:,.0f})"


def aims(found: dict[Same | Timed, dict[str, Any]]) -> str:
  """Returns the targets as Markdown, and which of them are met."""
  rows = []
  for name, other, clients, aim in AIMS:
    label = PEERS[other].label
    one, two = (summary(found, who, clients, False) for who in (name, other))
    if one is None or two is None:
      rows.append((label, clients, f"{aim:g}", "not measured", "", ""))
      continue
    ratio, by_cpu = one.rate / two.rate, one.by_cpu / two.by_cpu
    holds = measure.holds(ratio >= aim)
    rows.append((label, clients, f"{aim:g}", f"{ratio:.2f}", f"{by_cpu:.2f}", holds))
  names = (
    "tokens/s of our server, whole responses, times those of", "clients", "aimed at",
    "per wall second", "per second of their CPU", "holds (wall)",
  )  # fmt: skip
  return measure.table(names, rows)


def picture(found: dict[Same | Timed, dict[str, Any]], path: pathlib.Path) -> None:
  """Draws tokens/s by peer and number of clients."""
  colors = {"ours": "tab:blue", "engine": "tab:green"}
  rows = [
    measure.Bar(
      f"{clients}: {peer.label}{', streamed' if is_streamed else ''}",
      one.rate,
      colors.get(peer.kind, "tab:gray"),
      0.5 if is_streamed else 1.0,
    )
    for clients in CLIENTS
    for name, peer in PEERS.items()
    for is_streamed in (False, True)
    if (one := summary(found, name, clients, is_streamed)) is not None
  ]
  measure.bars(rows, "tokens/s by number of clients", path)


def run(
  settings: Settings,
  names: Sequence[str],
  repetitions: int,
  directory: pathlib.Path,
  say: Callable[[str], None],
  torch_python: str = "",
) -> None:
  """Measures, prints, and writes cells.jsonl, table.md and serving.png."""
  interpreters = {"engine": sys.executable, **peer_process.pythons(torch_python)}
  names, missing = chosen(names, interpreters)
  for name, why in missing.items():
    say(f"{why} not installed: {name} left out (`bash launch/peers.sh` installs it)")
  results = measured(names, settings, repetitions, directory, interpreters, say)
  text = f"{same_table(results, missing)}\n\n{timed_table(results)}\n\n{aims(results)}\n"
  (directory / "table.md").write_text(text)
  if any(isinstance(cell, Timed) for cell in results):
    picture(results, directory / "serving.png")
  say(f"\n{text}\nwritten to {directory}")


def main(args: flags.FlagValues) -> None:
  for written, be in (
    (args.serve_llama, serving_peers.serve_llama),
    (args.serve_engine, serving_peers.serve_engine),
  ):
    if written:
      settings, slots = json.loads(written)
      be(Settings(**settings), slots)
      return
  directory = pathlib.Path(args.workdir)
  settings = Settings(
    model=peer_models.as_directory(args.model, directory),
    askings=args.askings,
    requests_per_client=args.requests_per_client,
    max_tokens=args.max_tokens,
    num_threads=args.num_threads,
  )
  run(settings, args.peers, args.repetitions, directory, measure.say, args.torch_python)


if __name__ == "__main__":
  usual = Settings()
  flags.DEFINE_string("model", usual.model, "Model: nano, a Hugging Face directory or a GGUF file.")
  flags.DEFINE_list("peers", [], f"Peers to measure, from {', '.join(PEERS)}; all by default.")
  flags.DEFINE_integer("askings", usual.askings, "Number of times to send the same question.", 1)
  flags.DEFINE_integer("repetitions", 3, "Number of rounds per peer and number of clients.", 1)
  flags.DEFINE_integer(
    "requests_per_client",
    usual.requests_per_client,
    "Number of requests per client, at least 8 in total.",
    1,
  )
  flags.DEFINE_integer(
    "max_tokens", usual.max_tokens, "Maximum response length in tokens.", 1, CONTEXT // 2
  )
  flags.DEFINE_integer(
    "num_threads", usual.num_threads, "Number of threads of llama.cpp's server.", 1
  )
  flags.DEFINE_string(
    "torch_python", "", "Python with transformers; by default this one, or the one in .venv-3.11."
  )
  flags.DEFINE_string("workdir", "runs/serving", "Output directory for numbers, tables and plot.")
  flags.DEFINE_string("serve_llama", "", "Internal: run llama.cpp's server.")
  flags.DEFINE_string("serve_engine", "", "Internal: run only the engine.")
  measure.command(main)
