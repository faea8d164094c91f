"""Constrained decoding: turns a JSON schema or regular expression into a mask for each token.

    Compiler.mask(grammar) --trial--> worker                    before anything is sampled
    AnswerMask.ask(answer) --quick or slow--> worker --> u32[w], a bit for each token

The mask is applied before the distribution is normalised, so log-probabilities are over the allowed
tokens. It is a pure function of the tokens so far: every worker computes the same bits.

Grammars are untrusted input to native code, so none is parsed in this process. Workers of
`grammar_server`, with limits of time and memory, do that and may crash. There are three kinds:

- trial workers compile a new grammar and compute its first masks, concurrently with serving; one
  that takes long yields the cores to the engine's threads;
- the quick worker computes masks of all grammars that compiled and answered quickly;
- the slow worker computes masks of the other grammars, which delay only each other.

If a worker dies while processing a grammar, the request with that grammar fails; the other requests
move to a fresh worker. A grammar that killed two workers is refused from then on.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
import contextlib
import dataclasses
import hashlib
import json
import math
import queue
import signal
import threading
import time
from typing import Any
import weakref

import numpy as np

from seerjax import fields
from seerjax.models.tokenizer import Tokenizer
from seerjax.sandbox import helper
from seerjax.serve import grammar_server, grammar_workers as workers
from seerjax.serve.protocol import Grammar
from seerjax.serve.refusals import Refusal, refuse

MAX_SOURCE = 1 << 18  # Characters.
# Above these a grammar is slow: the quick worker's masks would delay all other grammars.
QUICK_MASK_SECONDS = 0.005
QUICK_COMPILE_SECONDS = 0.05
NUM_TRIALS = 2
TRIAL_NICE, QUICK_NICE, SLOW_NICE = 5, 0, 10
# More than most grammars take to compile on a busy machine; longer trials yield.
TRIAL_PATIENCE_SECONDS, YIELDING_NICE = 0.1, 15
MOST_REMEMBERED = 1024  # Grammars with a cached trial result.
MOST_DEATHS = 2
MAX_REASON = 160  # Characters of the library's error message.
MOST_LOST = 3  # Consecutive workers that ended without an answer and not because of a grammar.
LOST = "it cannot be started, or is killed from outside"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
  """Limits for one grammar.

  Attributes:
    compile_seconds: CPU time to compile it and to compute the masks before its first choice.
    mask_seconds: CPU time for one mask.
    wall_seconds: wall time for either, on a machine of any load.
    memory_bytes: memory of a worker in addition to its memory at start.
    trial_seconds: longest wait of a request for a free trial worker.
  """

  compile_seconds: float = 0.3
  mask_seconds: float = 0.4
  wall_seconds: float = 10.0
  memory_bytes: int = 1 << 30
  trial_seconds: float = 5.0

  def __post_init__(self):
    fields.check(self)
    for field, value in vars(self).items():
      if not value > 0:
        raise ValueError(f"grammar.Limits.{field}: got {value}, expected more than 0; raise it.")


DEFAULT_LIMITS = Limits()


class AnswerMask:
  """Token mask for the next position of one choice. Used on one thread only."""

  def __init__(self, compiler: Compiler, grammar: Grammar, digest: str, first: bytes):
    self.grammar, self.digest = grammar, digest
    self.session = compiler.next_session()
    self.serial = 0  # Number of masks requested.
    self.answer: list[int] = []
    self.failure = ""
    self.compiler = compiler
    self._first = _words(first)
    self._ready: np.ndarray | None = self._first
    weakref.finalize(self, compiler.gone.append, self.session)

  def copy(self) -> AnswerMask:
    """Returns a mask at the start of a response."""
    return AnswerMask(self.compiler, self.grammar, self.digest, self._first.tobytes())

  @property
  def is_ready(self) -> bool:
    """Whether the last requested mask has arrived."""
    return self._ready is not None

  @property
  def is_awaited(self) -> bool:
    """Whether the last requested mask is still expected."""
    return self._ready is None and not self.failure

  def ask(self, answer: Sequence[int]) -> None:
    """Requests the mask after `answer`, without waiting for it."""
    if self.answer == [*answer] or self.failure:
      return
    self.answer, self.serial, self._ready = [*answer], self.serial + 1, None
    self.compiler.put(self)

  def found(self, words: np.ndarray) -> None:
    """Receives the last requested mask."""
    self._ready = words

  def __call__(self, answer: Sequence[int]) -> np.ndarray:
    """Returns u32[w], a bit for each token; requests it and waits if it is not there yet.

    Raises:
      ValueError: if the answer violates the grammar, or hit a limit.
    """
    self.ask(answer)
    while self._ready is None and not self.failure:
      self.compiler.gather(self.compiler.limits.wall_seconds)
    if self._ready is None:
      raise ValueError(self.failure)
    return self._ready


class Compiler:
  """Compiles grammars for one tokenizer and computes their masks, in separate processes.

  `mask` may be called on any thread, `put` and `gather` only on the engine thread.
  """

  def __init__(self, tokenizer: Tokenizer, vocab_size: int, *, limits: Limits = DEFAULT_LIMITS):
    self.limits = limits
    self.gone: collections.deque[int] = collections.deque()  # Sessions that have ended.
    self._tokenizer = tokenizer.backend.to_str()
    self._settings = {
      "vocab_size": vocab_size,
      "eos_ids": [*tokenizer.eos_ids],
      **dataclasses.asdict(limits),
    }
    self._lock = threading.Lock()
    self._num_sessions = 0
    self._server: helper.Helper | None = None
    self._trials: queue.LifoQueue[workers.Line[AnswerMask] | None] = queue.LifoQueue()
    for _ in range(NUM_TRIALS):
      self._trials.put(None)
    # By digest: the first mask, or the reason why the grammar is refused.
    self._tried: collections.OrderedDict[str, bytes | str] = collections.OrderedDict()
    self._slow: collections.OrderedDict[str, None] = collections.OrderedDict()
    self._deaths: collections.Counter[str] = collections.Counter()
    # By whether the line is slow.
    self._lines: dict[bool, workers.Line[AnswerMask] | None] = {False: None, True: None}
    self._unsent: list[AnswerMask] = []
    self._num_lost = 0

  def start(self) -> None:
    """Starts the server of the workers, so that the first grammar does not wait for it."""
    with self._lock:
      self._started()

  def close(self) -> None:
    """Ends the server and the workers."""
    with self._lock:
      for line in self._lines.values():
        if line is not None:
          line.close()
      self._lines = {False: None, True: None}
      with contextlib.suppress(queue.Empty):
        while True:
          line = self._trials.get_nowait()
          if line is not None:
            line.close()
      if self._server is not None:
        self._server.close()
      self._server = None

  def next_session(self) -> int:
    """Returns a unique session number."""
    with self._lock:
      self._num_sessions += 1
      return self._num_sessions

  # Callable from any thread, before anything is sampled.

  def is_tried(self, grammar: Grammar, namespace: str = "") -> bool:
    """Returns whether `mask` would return without compiling."""
    with self._lock:
      return _digest(grammar, namespace) in self._tried

  def mask(self, grammar: Grammar, namespace: str = "") -> AnswerMask:
    """Returns the mask of a grammar, for one choice.

    Args:
      grammar: the grammar.
      namespace: namespace of the client; results are cached per namespace.

    Raises:
      Refusal: if the grammar does not compile within the limits, or allows nothing; or if too many
        others are being compiled (429).
    """
    if len(grammar.source) > MAX_SOURCE:
      refuse(
        grammar.param, f"a grammar of {len(grammar.source)} characters", f"at most {MAX_SOURCE}",
        "simplify it",
      )  # fmt: skip
    digest = _digest(grammar, namespace)
    with self._lock:
      found = self._tried.get(digest)
      if found is not None:
        self._tried.move_to_end(digest)
    if found is None:
      found = self._try(grammar, digest)
      with self._lock:
        self._tried[digest] = found
        while len(self._tried) > MOST_REMEMBERED:
          self._tried.popitem(last=False)
    if isinstance(found, str):
      refuse(
        grammar.param, f"a grammar that cannot be used ({found})",
        "one that llguidance accepts, within the limits of a request", "correct or simplify it",
        code="invalid_grammar",
      )  # fmt: skip
    return AnswerMask(self, grammar, digest, found)

  def _try(self, grammar: Grammar, digest: str) -> bytes | str:
    """Returns a grammar's first mask, or the reason why it has none.

    Raises:
      Refusal: if no trial worker becomes free in time, or no worker can be started.
    """
    try:
      line = self._trials.get(timeout=self.limits.trial_seconds)
    except queue.Empty:
      raise Refusal(
        f"{grammar.param}: got a grammar while {NUM_TRIALS} others are being compiled, expected a"
        " free compiler; retry.",
        status=429, kind="rate_limit_error", param=grammar.param, code="rate_limit_exceeded",
        retry_seconds=1,
      ) from None  # fmt: skip
    try:
      for is_last in (False, True):
        if line is not None and line.is_used_up:
          line.close()
          line = None  # Stays None if starting another one fails.
        if line is None:
          with self._lock:
            line = workers.Line(self._started(), TRIAL_NICE)
        line.put([{**_source(grammar), "session": 0, "is_new": True}])
        answers, ending = self._await_trial(line)
        if answers:
          break
        line.close()
        line = None
        if ending is None or ending or is_last:
          break  # If the server died, which leaves no exit code, try once more.
    finally:
      self._trials.put(line)
    if not answers and ending == "":
      raise Refusal(
        f"{grammar.param}: got a grammar, but no process to compile it ({LOST}), expected one;"
        " check the machine's memory and process limits.",
        status=503, kind="server_error", param=grammar.param, code="no_grammars",
      )  # fmt: skip
    if not answers:
      with self._lock:
        self._count_death(digest)
      return self._name(ending)
    kind, compiling, masking, text = answers[0]
    if kind == grammar_server.REFUSED:
      return _one_line(text.decode(errors="replace"))
    if compiling > QUICK_COMPILE_SECONDS or masking > QUICK_MASK_SECONDS:
      self._set_slow(digest)
    return text

  def _await_trial(self, line: workers.Line) -> tuple[list[workers.Answer], str | None]:
    deadline, patience = time.monotonic() + 2 * self.limits.wall_seconds, math.inf
    while (now := time.monotonic()) < deadline:
      if line.process and patience == math.inf:  # Time counts from when the worker runs.
        patience = now + TRIAL_PATIENCE_SECONDS
      if now >= patience and not line.is_yielding:
        line.yield_to(YIELDING_NICE)
      if workers.wait([line], (deadline if line.is_yielding else min(deadline, patience)) - now):
        answers, ending = line.take()
        if answers or ending is not None:
          return answers, ending
    return [], None

  # Called on the engine thread.

  def put(self, mask: AnswerMask) -> None:
    """Queues a mask's request for the next `gather`."""
    self._unsent.append(mask)

  def gather(self, seconds: float) -> bool:
    """Sends queued requests, and takes masks that have arrived.

    Args:
      seconds: longest wait for a mask if none has arrived.

    Returns:
      Whether a mask arrived or failed.
    """
    self._send()
    found = self._take()
    lines = [line for line in self._lines.values() if line is not None and line.asked]
    if found or not lines or seconds <= 0:
      return found
    return self._take() if workers.wait(lines, seconds) else False

  @property
  def awaits_quick(self) -> bool:
    """Whether masks are outstanding at the quick worker, or not sent yet."""
    line = self._lines[False]
    return bool(self._unsent) or (line is not None and bool(line.asked))

  def _send(self) -> None:
    unsent, self._unsent = dict.fromkeys(self._unsent), []
    by_line: dict[bool, list[AnswerMask]] = {}
    for mask in unsent:
      if self._deaths[mask.digest] >= MOST_DEATHS:
        mask.failure = _failure(mask, "it has crashed other workers before")
      else:
        by_line.setdefault(mask.digest in self._slow, []).append(mask)
    gone = []
    while self.gone:
      gone.append(self.gone.popleft())
    for line in self._lines.values():
      if line is not None:
        line.gone += [one for one in gone if line.sessions.pop(one, None) is not None]
    for is_slow, masks in by_line.items():
      line = self._line(is_slow)
      if line is None:
        self._unsent += masks
        continue
      line.put([self._ask(line, mask) for mask in masks])

  def _line(self, is_slow: bool) -> workers.Line | None:
    """Returns the line to the quick or slow worker; None while a used-up worker still owes masks.

    A used-up worker gets no more requests, or under constant load it would never be replaced.
    """
    line = self._lines[is_slow]
    if line is not None and not line.is_used_up:
      return line
    if line is not None and line.asked:
      return None
    if line is not None:
      line.close()
    with self._lock:
      line = workers.Line(self._started(), SLOW_NICE if is_slow else QUICK_NICE)
    self._lines[is_slow] = line
    return line

  def _ask(self, line: workers.Line, mask: AnswerMask) -> dict[str, Any]:
    """Returns the request for a worker; leaves out what the worker already has."""
    known, answer = line.sessions.get(mask.session, []), mask.answer
    first = len(known) if answer[: len(known)] == known else 0
    line.sessions[mask.session] = [*answer]
    ask: dict[str, Any] = {"is_new": False, "session": mask.session, "digest": mask.digest}
    if mask.digest not in line.digests:
      ask |= _source(mask.grammar)
      line.digests.add(mask.digest)
    if not line.asked:
      line.since = time.monotonic()
    line.asked.append((mask, mask.serial))
    return {**ask, "from": first, "tokens": [int(token) for token in answer[first:]]}

  def _take(self) -> bool:
    """Takes what has arrived from both workers; returns whether anything did."""
    has_found = False
    for is_slow, line in self._lines.items():
      if line is None:
        continue
      answers, ending = line.take()
      for kind, _, masking, text in answers:
        mask, serial = line.asked.popleft()
        line.since, self._num_lost = time.monotonic(), 0
        if masking > QUICK_MASK_SECONDS:
          self._set_slow(mask.digest)
        if serial != mask.serial:
          continue  # Superseded by a later request.
        has_found = True
        if kind == grammar_server.MASK:
          mask.found(_words(text))
        else:
          mask.failure = _failure(mask, text.decode(errors="replace"))
      is_stuck = line.asked and time.monotonic() - line.since > 2 * self.limits.wall_seconds
      if ending is not None or is_stuck:
        self._bury(is_slow, line, ending)
        has_found = True
    return has_found

  def _bury(self, is_slow: bool, line: workers.Line, ending: str | None) -> None:
    """Fails the request that a worker died of, and moves the others to a fresh worker."""
    line.close()
    self._lines[is_slow] = None
    asked = [mask for mask, serial in line.asked if serial == mask.serial]
    if ending == "":  # The server died, which no grammar caused.
      self._num_lost += 1
      if self._num_lost > MOST_LOST:
        for mask in asked:
          mask.failure = _failure(mask, LOST)
        return
    elif line.asked:
      culprit, serial = line.asked[0]
      with self._lock:
        if self._count_death(culprit.digest) >= MOST_DEATHS:
          self._tried[culprit.digest] = self._name(ending)
      if serial == culprit.serial:
        culprit.failure = _failure(culprit, self._name(ending))
        asked = asked[1:]
    self._unsent += asked

  def _count_death(self, digest: str) -> int:
    """Returns how many workers a grammar has killed, this one included.

    Keeps as many grammars as are cached. The caller holds the lock.
    """
    self._deaths[digest] += 1
    while len(self._deaths) > MOST_REMEMBERED:
      del self._deaths[next(iter(self._deaths))]
    return self._deaths[digest]

  def _set_slow(self, digest: str) -> None:
    with self._lock:
      self._slow[digest] = None
      while len(self._slow) > MOST_REMEMBERED:
        self._slow.popitem(last=False)

  def _name(self, ending: str | None) -> str:
    """Describes how a worker ended."""
    limits = self.limits
    if ending is None or ending == str(-signal.SIGALRM):
      return f"it took more than {limits.wall_seconds:g} s"
    if ending == str(-signal.SIGPROF):
      return (
        f"it took more than {limits.compile_seconds:g} s of CPU, or {limits.mask_seconds:g} s for a"
        " mask"
      )
    if ending in (str(grammar_server.NO_MEMORY), str(-signal.SIGABRT)):
      return f"it took more than {limits.memory_bytes >> 20} MiB of memory"
    with contextlib.suppress(ValueError):
      ending = signal.Signals(-int(ending)).name
    return f"the library that compiles it crashed ({ending or 'unknown cause'})"

  def _started(self) -> helper.Helper:
    """Returns the server, starting it if it does not run. The caller holds the lock."""
    if self._server is None or not self._server.is_alive:
      if self._server is not None:
        self._server.close()
      self._server = workers.start(self._tokenizer, self._settings)
    return self._server


def _source(grammar: Grammar) -> dict[str, Any]:
  source = grammar.source if grammar.kind != "object" else '{"type": "object"}'
  return {"kind": grammar.kind, "source": source, "is_spaced": grammar.is_spaced}


def _digest(grammar: Grammar, namespace: str) -> str:
  text = json.dumps([namespace, _source(grammar)], sort_keys=True).encode()
  return hashlib.blake2b(text, digest_size=16).hexdigest()


def _words(text: bytes) -> np.ndarray:
  return np.frombuffer(text, "<u4").astype(np.uint32, copy=False)


def _one_line(reason: str) -> str:
  """Returns the library's message as one short line of printable characters."""
  text = " ".join("".join(c if c.isprintable() else " " for c in reason).split())
  return text if len(text) <= MAX_REASON else f"{text[: MAX_REASON - 3]}..."


def _failure(mask: AnswerMask, reason: str) -> str:
  return (
    f"{mask.grammar.param}: got a response of {len(mask.answer)} tokens that its grammar cannot"
    f" continue ({_one_line(reason)}), expected one that it allows, within the limits of a request;"
    " simplify it."
  )
