"""Program that compiles untrusted grammars in forked workers, which may crash.

    grammar.Compiler --socket--> server     loads the tokenizer once, then only forks
                                  `- worker  limited; compiles, computes masks, or dies

The server never sees client text: it passes each worker its socket, and reports on that socket how
the worker ended. A worker cannot open files or connections; its memory is limited for life, its
time for each request.

    asks     u32 length, JSON {"gone": [session], "asks": [{...}]}
    answers  `HEAD`, then a mask or a text; the first one reports the worker's process id

`sandbox.helper` starts it. It needs only the standard library and llguidance.
Source: man pages getrlimit(2), setitimer(2).
"""

from __future__ import annotations

from collections.abc import Mapping
import contextlib
import fcntl
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from typing import Any, NoReturn

# Kind, session, CPU seconds for compiling and for masks, resident MiB, length of the payload.
HEAD = struct.Struct("<BQffII")
MASK, REFUSED, DEAD, BORN = range(4)
LENGTH = struct.Struct("<I")
NO_MEMORY = 70  # Exit code of a worker after a MemoryError.
# Forced tokens up to which a trial follows a grammar.
MOST_FORCED = 64
# Steps of building a regular expression's automaton; at most 50,000 take a millisecond.
LEXER_FUEL = 400_000
FEW_FILES = 16


def main(control: socket.socket, settings: Mapping[str, Any], tokenizer_file: int) -> None:
  """Loads the tokenizer, then forks a worker for each socket that arrives, until EOF."""
  sys.path.extend(path for path in settings["packages"] if path not in sys.path)
  import llguidance

  signal.signal(signal.SIGINT, signal.SIG_IGN)
  woken, wake = socket.socketpair()
  woken.setblocking(False)
  wake.setblocking(False)
  signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
  signal.signal(signal.SIGCHLD, lambda *_: None)
  source = os.pread(tokenizer_file, os.fstat(tokenizer_file).st_size, 0).decode()
  tokenizer = llguidance.LLTokenizer(
    source, n_vocab=settings["vocab_size"], eos_token=settings["eos_ids"]
  )
  del source
  workers: dict[int, socket.socket] = {}
  while True:  # Each socket comes with one byte, the worker's nice value.
    ready, _, _ = select.select([control, woken], [], [])
    if woken in ready:
      with contextlib.suppress(BlockingIOError):
        woken.recv(4096)
      _tell_of_the_dead(workers)
    if control not in ready:
      continue
    message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
    if not message:
      return
    channel = socket.socket(fileno=descriptors[0])
    process = os.fork()
    if process == 0:
      _become_worker(channel, tokenizer, settings, message[0])
    workers[process] = channel


def _tell_of_the_dead(workers: dict[int, socket.socket]) -> None:
  """Reports, on the sockets of dead workers, how they ended."""
  while workers:
    process, status = os.waitpid(-1, os.WNOHANG)
    if not process:
      return
    with workers.pop(process) as channel, contextlib.suppress(OSError):
      ending = str(os.waitstatus_to_exitcode(status)).encode()
      channel.setblocking(False)  # The other end may not be read any more.
      channel.sendall(HEAD.pack(DEAD, 0, 0.0, 0.0, 0, len(ending)) + ending)


def _become_worker(
  channel: socket.socket, tokenizer: Any, settings: Mapping[str, Any], nice: int
) -> NoReturn:
  code = 1
  try:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGPROF, signal.SIGALRM, signal.SIGINT):
      signal.signal(number, signal.SIG_DFL)
    kept, statm = 3, 4
    first, second = os.dup(channel.fileno()), os.open("/proc/self/statm", os.O_RDONLY)
    first, second = (_above(number) for number in (first, second))
    os.dup2(first, kept)
    os.dup2(second, statm)
    os.closerange(statm + 1, 1 << 12)
    channel.detach()
    os.nice(nice)
    pages = int(os.pread(statm, 100, 0).split()[0])
    most = pages * resource.getpagesize() + settings["memory_bytes"]
    for limit, value in (
      (resource.RLIMIT_AS, most),
      (resource.RLIMIT_NOFILE, statm + 1),  # Prevents opening files and connections.
      (resource.RLIMIT_FSIZE, 0),
      (resource.RLIMIT_CORE, 0),
    ):
      resource.setrlimit(limit, (value, value))
    ours = socket.socket(fileno=kept)
    ours.sendall(HEAD.pack(BORN, os.getpid(), 0.0, 0.0, 0, 0))
    Worker(ours, statm, tokenizer, settings).run()
    code = 0
  except MemoryError:
    code = NO_MEMORY
  finally:
    os._exit(code)


def _above(number: int) -> int:
  """Returns a copy of a descriptor above the first few numbers."""
  return fcntl.fcntl(number, fcntl.F_DUPFD, FEW_FILES)


class Refused(Exception):
  """A grammar or response is invalid; has the library's message."""


class Worker:
  """Compiles grammars and computes masks, one request after another."""

  def __init__(
    self, channel: socket.socket, statm: int, tokenizer: Any, settings: Mapping[str, Any]
  ):
    import llguidance

    self._matcher = llguidance.LLMatcher
    self._limits = llguidance.LLParserLimits(verbose_errors=False, initial_lexer_fuel=LEXER_FUEL)
    self._channel, self._statm = channel, statm
    self._tokenizer = tokenizer
    self._settings = settings
    self._num_bytes = 4 * -(-settings["vocab_size"] // 32)
    self._compiled: dict[str, Any] = {}
    self._sessions: dict[int, Any] = {}

  def run(self) -> None:
    """Handles requests until EOF."""
    while (message := self._receive()) is not None:
      for session in message["gone"]:
        self._sessions.pop(session, None)
      for ask in message["asks"]:
        self._answer(ask)

  def _receive(self) -> dict[str, Any] | None:
    head = self._exactly(LENGTH.size)
    text = self._exactly(LENGTH.unpack(head)[0]) if head else b""
    return json.loads(text) if text else None

  def _exactly(self, count: int) -> bytes:
    found = bytearray()
    while len(found) < count:
      part = self._channel.recv(count - len(found))
      if not part:
        return b""
      found += part
    return bytes(found)

  def _answer(self, ask: Mapping[str, Any]) -> None:
    spent = [0.0, 0.0]
    try:
      kind, text = MASK, self._look(ask, spent) if ask["is_new"] else self._follow(ask, spent)
    except Refused as refused:
      kind, text = REFUSED, str(refused).encode(errors="replace")[:4096]
    finally:
      self._set_limits(0, 0)
    memory = int(os.pread(self._statm, 100, 0).split()[1]) * resource.getpagesize() >> 20
    self._channel.sendall(HEAD.pack(kind, ask["session"], *spent, memory, len(text)) + text)

  def _set_limits(self, cpu_seconds: float, wall_seconds: float) -> None:
    """Limits the time of the next request; a signal kills the process when it is exceeded."""
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    signal.setitimer(signal.ITIMER_REAL, wall_seconds)

  def _look(self, ask: Mapping[str, Any], spent: list[float]) -> bytes:
    """Compiles a grammar, follows its forced tokens, and returns its first mask."""
    settings = self._settings
    self._set_limits(settings["compile_seconds"], settings["wall_seconds"])
    matcher = self._compile(ask, spent)
    first = self._mask(matcher, spent)
    num_forced = 0
    while num_forced < MOST_FORCED and not matcher.is_stopped():
      forced = matcher.compute_ff_tokens()[:MOST_FORCED]
      if forced:
        matcher.consume_tokens(forced)
      if matcher.is_error():
        raise Refused(_why(matcher))
      if not forced:
        break
      num_forced += len(forced)
      self._mask(matcher, spent)
    return first

  def _follow(self, ask: Mapping[str, Any], spent: list[float]) -> bytes:
    """Returns the mask after a response; the session already has its beginning."""
    settings, session, digest = self._settings, ask["session"], ask["digest"]
    seconds = settings["mask_seconds"]
    if not ask["from"]:  # The session starts again.
      seconds += settings["compile_seconds"]
    self._set_limits(seconds, settings["wall_seconds"])
    if digest not in self._compiled:
      self._compiled[digest] = self._compile(ask, spent)
    if not ask["from"]:
      self._sessions[session] = self._compiled[digest].deep_copy()
    matcher = self._sessions[session]
    for token in ask["tokens"]:
      matcher.consume_token(token)
    return self._mask(matcher, spent)

  def _compile(self, ask: Mapping[str, Any], spent: list[float]) -> Any:
    start, matcher_of = time.process_time(), self._matcher
    try:
      if ask["kind"] == "regex":
        grammar = matcher_of.grammar_from_regex(ask["source"])
      elif ask["kind"] == "calls":
        grammar = matcher_of.grammar_from_lark(ask["source"])
      else:
        grammar = matcher_of.grammar_from_json_schema(
          ask["source"], overrides={"whitespace_flexible": ask["is_spaced"]}
        )
      matcher = matcher_of(self._tokenizer, grammar, log_level=0, limits=self._limits)
    except MemoryError:
      raise
    except BaseException as error:  # A panic of the library is not an Exception.
      raise Refused(f"{type(error).__name__}: {error}") from error
    if matcher.is_error():
      raise Refused(matcher.get_error())
    spent[0] += time.process_time() - start
    return matcher

  def _mask(self, matcher: Any, spent: list[float]) -> bytes:
    start, size = time.process_time(), self._num_bytes
    try:
      if matcher.is_stopped() and not matcher.is_error():
        found = bytearray(size)
        for token in self._settings["eos_ids"]:
          found[token // 8] |= 1 << token % 8
      else:
        found = matcher.compute_bitmask()[:size]
    except MemoryError:
      raise
    except BaseException as error:
      raise Refused(f"{type(error).__name__}: {error}") from error
    if matcher.is_error() or not found.strip(b"\0"):
      raise Refused(_why(matcher))
    spent[1] = max(spent[1], time.process_time() - start)
    return bytes(found)


def _why(matcher: Any) -> str:
  reason = f"{matcher.stop_reason()}: {matcher.get_error()}".replace("<non-verbose/>", "")
  reason = reason.removeprefix("InternalError: ")
  return "no text can continue from here" if "NoExtension" in reason else reason
