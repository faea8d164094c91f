"""Contexts that are slept on: whose they are, which version, and the rewrites that are true of it.

  register -> version n --sleep--> rewrite of n --read--> waker
     edit  -> version n+1: rewrites of n are gone at once, and are never taken again

A context belongs to a namespace and has a name in it; namespaces share nothing, and what another
namespace has is unknown to it. A rewrite is text with its provenance. One that
states a false equation is put into quarantine: it is kept to be looked at, and never read. Time to
live is counted in steps of the engine, since no clock decides anything here.

On disk: `contexts.jsonl`, one event a line under its checksum, and a file a rewrite, which is there
before its event is. A kill loses at most the event in work. A rewrite whose bytes do not match
their checksum is dropped, said, and slept again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import pathlib
from typing import Any, NamedTuple

from seerjax.rollout import record_lines
from seerjax.tasks import equations

FORMAT = 1
EVENTS, REWRITES = "contexts.jsonl", "rewrites"
MAX_TEXT = 4 << 20  # Bytes of one context or rewrite.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Identity:
  """What a context's id depends on besides its tokens: digests, as text.

  Attributes:
    weights: of the model that a run began with; later ones are told apart by `policy_version`.
    tokenizer: that made the tokens.
    template: of the chat.
  """

  weights: str
  tokenizer: str
  template: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Context:
  """A registered context.

  Attributes:
    context_id: digest of (tokens, weights, tokenizer, template), 64 hexadecimal digits.
    namespace: whose it is.
    name: in the namespace.
    version: 1 for a name's first text, then one more at every change, also after it was forgotten.
    text: what is read.
    registered_step: at which this version began.
    expires_step: from which on it is gone; None for never.
  """

  context_id: str
  namespace: str
  name: str
  version: int
  text: str
  registered_step: int
  expires_step: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rewrite:
  """What a sleeper left of one version of a context.

  Attributes:
    context_id: of the context that was read.
    version: of it.
    job: number of the sleeper.
    seed: of the sleeper.
    policy_version: of the weights that wrote every token.
    num_tokens: of sleep.
    text: the rewrite.
    false_equations: that it states; it is in quarantine if there are any.
    is_truncated: whether the last of the sleeper's calls was cut at its limit of tokens.
  """

  context_id: str
  version: int
  job: int
  seed: int
  policy_version: int
  num_tokens: int
  text: str
  false_equations: tuple[str, ...] = ()
  is_truncated: bool = False


class Dropped(NamedTuple):
  """A version that is gone: pages and drafts that are kept of it are released now.

  Attributes:
    namespace: whose it was.
    name: in the namespace.
    context_id: of it.
    version: of it.
    why: "edited", "forgotten" or "expired".
  """

  namespace: str
  name: str
  context_id: str
  version: int
  why: str


@dataclasses.dataclass
class Counts:
  """What a registry met since it was opened.

  Attributes:
    stale: rewrites of a version that is gone, which were offered and not taken.
    quarantined: rewrites with false equations.
    damaged: rewrites whose bytes did not match their checksum.
    expired: versions whose time was over.
    edited: versions that another text replaced.
  """

  stale: int = 0
  quarantined: int = 0
  damaged: int = 0
  expired: int = 0
  edited: int = 0


def context_id(tokens: Sequence[int], identity: Identity) -> str:
  """Returns the digest of a context, 64 hexadecimal digits.

  Args:
    tokens: ids of its text.
    identity: what else it depends on.

  Raises:
    ValueError: for no token.
  """
  if not len(tokens):
    raise ValueError(
      "context_id: got no token, expected one at least; an empty context has nothing to sleep on."
    )
  fields = [[int(token) for token in tokens], *dataclasses.astuple(identity)]
  return hashlib.sha256(json.dumps(fields).encode()).hexdigest()


class _Kept(NamedTuple):
  """A rewrite as its event says, before its bytes were read."""

  rewrite: Rewrite
  digest: str


class Contexts:
  """A registry in a directory; it has one writer at a time.

  Steps are the caller's and never go back; after a restart they continue from `last_step`.

  Attributes:
    last_step: the highest that any event had.
    truncated_bytes: of a torn tail that opening cut off.
    said: a sentence for each rewrite that was dropped for its bytes.
    counts: what was met since it was opened.
  """

  def __init__(
    self,
    directory: str | os.PathLike[str],
    *,
    identity: Identity,
    on_drop: Callable[[Dropped], None] = lambda dropped: None,
    max_contexts: int = 10_000,
  ):
    """Opens a registry, or starts one.

    Args:
      directory: that is its own; made if it is not there.
      identity: of the model.
      on_drop: told of each version that is gone, before anything of the next is served.
      max_contexts: most of one namespace.

    Raises:
      ValueError: if another writer has it open, if its events are damaged before their end or none,
        if it began with another model (both values are named), or for less than one context.
      OSError: if it cannot be written.
    """
    if max_contexts < 1:
      raise ValueError(
        f"Contexts.max_contexts: got {max_contexts}, expected at least 1; 10000 is usual."
      )
    self.directory = pathlib.Path(directory)
    self.path = self.directory / EVENTS
    self.last_step = 0
    self._checked_step = -1  # For contexts whose time is over: one registered there has time left.
    self.said: list[str] = []
    self.counts = Counts()
    self._on_drop = on_drop
    self._identity = identity
    self._max_contexts = max_contexts
    self._contexts: dict[tuple[str, str], Context] = {}
    self._versions: dict[tuple[str, str], int] = {}
    self._kept: dict[tuple[str, str], dict[int, _Kept]] = {}
    self._end = 0
    if self.directory.exists() and not self.directory.is_dir():
      raise ValueError(
        f"{self.directory}: got a file, expected a directory of contexts, or none yet; name"
        " another."
      )
    self.directory.mkdir(parents=True, exist_ok=True)
    self._descriptor: int | None = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
      record_lines.lock(self._descriptor, self.path)
      self._load()
    except BaseException:
      self.close()
      raise

  # What a caller may do.

  def register(
    self,
    namespace: str,
    name: str,
    text: str,
    tokens: Sequence[int],
    *,
    step: int,
    ttl_steps: int | None = None,
  ) -> Context:
    """Returns a context under its name; another text than before is another version.

    The same text again keeps its version and its rewrites, and begins its time to live anew.

    Args:
      namespace: whose it is.
      name: in the namespace.
      text: what is read.
      tokens: ids of the text.
      step: of the engine.
      ttl_steps: after which it is gone; None keeps it.

    Raises:
      ValueError: for an empty text, one that UTF-8 cannot hold or that is too long, a time to live
        below 1, a step before the last, or more contexts than a namespace may have.
      OSError: if the disk is full; the registry is as before.
    """
    self._advance(step)
    self._check_text(text, f"context {name!r}")
    if not name or not namespace:
      raise ValueError(
        f"register: got the namespace {namespace!r} and the name {name!r}, expected a character at"
        " least in both; name them."
      )
    if ttl_steps is not None and ttl_steps < 1:
      raise ValueError(
        f"register: got ttl_steps={ttl_steps}, expected at least 1; None keeps a context."
      )
    key, before = (namespace, name), self._contexts.get((namespace, name))
    if before is None and self._num_of(namespace) >= self._max_contexts:
      raise ValueError(
        f"register: got another context of a namespace that has {self._max_contexts}, expected at"
        " most so many; forget one, or raise max_contexts."
      )
    found = context_id(tokens, self._identity)
    is_same = before is not None and before.text == text and before.context_id == found
    version = self._versions.get(key, 0) + (not is_same)
    context = Context(
      context_id=found,
      namespace=namespace,
      name=name,
      version=version,
      text=text,
      registered_step=before.registered_step if before and is_same else step,
      expires_step=None if ttl_steps is None else step + ttl_steps,
    )
    self._write({"kind": "context", "step": step, "context": dataclasses.asdict(context)})
    gone = self._take(context)
    if before is not None and not is_same:
      self.counts.edited += 1
      self._tell(before, gone, "edited")
    return context

  def get(self, namespace: str, name: str, *, step: int) -> Context:
    """Returns a context as it is now.

    Raises:
      ValueError: if this namespace has none of that name, or its time is over.
    """
    self._advance(step)
    context = self._contexts.get((namespace, name))
    if context is None:
      raise ValueError(
        f"contexts: got the name {name!r}, which is unknown in this namespace, expected a"
        " registered context; register it (again, if its time to live is over)."
      )
    return context

  def namespaces(self, *, step: int) -> tuple[str, ...]:
    """Returns the namespaces that have a context, sorted."""
    self._advance(step)
    return tuple(sorted({space for space, _ in self._contexts}))

  def names(self, namespace: str, *, step: int) -> tuple[str, ...]:
    """Returns the names of a namespace, sorted."""
    self._advance(step)
    return tuple(sorted(name for space, name in self._contexts if space == namespace))

  def keep(self, namespace: str, name: str, rewrite: Rewrite, *, step: int) -> Rewrite | None:
    """Puts a rewrite on disk and returns it as it is kept: its false equations found.

    Args:
      namespace: whose context was read.
      name: of the context.
      rewrite: of the version that its sleeper read; a job's earlier one is replaced.
      step: of the engine.

    Returns:
      None, and nothing is kept, if that version is gone.

    Raises:
      ValueError: for a text that is empty, too long or no UTF-8.
      OSError: if the disk is full; what was kept before is still there.
    """
    self._advance(step)
    self._check_text(rewrite.text, "rewrite")
    context = self._contexts.get((namespace, name))
    if context is None or (context.context_id, context.version) != (
      rewrite.context_id, rewrite.version,
    ):  # fmt: skip
      self.counts.stale += 1
      return None
    rewrite = dataclasses.replace(rewrite, false_equations=equations.false_ones(rewrite.text))
    digest = _digest(rewrite.text)
    path = self._path(namespace, name, rewrite, digest)
    _store(path, rewrite.text)
    fields = dataclasses.asdict(rewrite)
    del fields["text"]
    self._write({
      "kind": "rewrite", "step": step, "namespace": namespace, "name": name, "digest": digest,
      "rewrite": fields,
    })  # fmt: skip
    before = self._kept[namespace, name].get(rewrite.job)
    self._kept[namespace, name][rewrite.job] = _Kept(rewrite, digest)
    if before is not None and before.digest != digest:
      self._path(namespace, name, before.rewrite, before.digest).unlink(missing_ok=True)
    self.counts.quarantined += bool(rewrite.false_equations)
    return rewrite

  def rewrites(self, namespace: str, name: str, *, step: int) -> tuple[Rewrite, ...]:
    """Returns what may be read of a context, by job: its version's, without false equations.

    A rewrite whose file is not what was written is dropped here, and said in `said`.

    Raises:
      ValueError: as `get`.
    """
    found = self._all(namespace, name, step)
    return tuple(rewrite for rewrite in found if not rewrite.false_equations)

  def provenance(self, namespace: str, name: str, *, step: int) -> tuple[Rewrite, ...]:
    """Returns all rewrites of a context by job, without their texts: no file is read.

    Raises:
      ValueError: as `get`.
    """
    self.get(namespace, name, step=step)
    found = sorted(self._kept[namespace, name].items())
    return tuple(dataclasses.replace(kept.rewrite, text="") for _, kept in found)

  def quarantine(self, namespace: str, name: str, *, step: int) -> tuple[Rewrite, ...]:
    """Returns the rewrites that are not read, for people to look at; as `rewrites`."""
    return tuple(one for one in self._all(namespace, name, step) if one.false_equations)

  def forget(self, namespace: str, name: str, *, step: int) -> None:
    """Lets a context go, with all that was made of it.

    Raises:
      ValueError: as `get`.
    """
    context = self.get(namespace, name, step=step)
    self._drop(context, "forgotten", step)

  def close(self) -> None:
    """Closes the events' file; may be called twice."""
    if self._descriptor is not None:
      os.close(self._descriptor)
      self._descriptor = None

  def __enter__(self) -> Contexts:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  # Time.

  def _advance(self, step: int) -> None:
    """Goes to a step, and drops what is over there."""
    if step < self.last_step:
      raise ValueError(
        f"contexts: got step {step}, expected at least {self.last_step}, the last; continue from"
        " Contexts.last_step after a restart."
      )
    self.last_step = step
    if step == self._checked_step:
      return
    self._checked_step = step
    over = [c for c in self._contexts.values() if c.expires_step is not None]
    for context in over:
      if context.expires_step is not None and context.expires_step <= step:
        self.counts.expired += 1
        self._drop(context, "expired", step)

  def _drop(self, context: Context, why: str, step: int) -> None:
    self._write({
      "kind": "drop", "step": step, "namespace": context.namespace, "name": context.name,
      "version": context.version, "why": why,
    })  # fmt: skip
    key = (context.namespace, context.name)
    del self._contexts[key]
    self._tell(context, tuple(self._kept.pop(key).values()), why)

  def _tell(self, context: Context, gone: Sequence[_Kept], why: str) -> None:
    """Removes a version's files, which no event names any more, and says that it is gone."""
    for kept in gone:
      path = self._path(context.namespace, context.name, kept.rewrite, kept.digest)
      path.unlink(missing_ok=True)
    self._on_drop(
      Dropped(context.namespace, context.name, context.context_id, context.version, why)
    )

  def _take(self, context: Context) -> tuple[_Kept, ...]:
    """Makes a context the current one of its name, and returns the rewrites that end with it."""
    key = (context.namespace, context.name)
    is_same = self._versions.get(key) == context.version and key in self._contexts
    gone = () if is_same else tuple(self._kept.pop(key, {}).values())
    self._contexts[key] = context
    self._versions[key] = context.version
    self._kept.setdefault(key, {})
    return gone

  # Files.

  def _path(self, namespace: str, name: str, rewrite: Rewrite, digest: str) -> pathlib.Path:
    """Returns a rewrite's file: no two share one, so that none is another namespace's."""
    place = _digest(json.dumps([name, rewrite.version, rewrite.job]))
    folder = self.directory / REWRITES / _digest(namespace)[:32]
    return folder / f"{place[:32]}-{digest[:32]}.txt"

  def _all(self, namespace: str, name: str, step: int) -> tuple[Rewrite, ...]:
    """Returns a context's rewrites by job; drops those whose bytes are not what was written."""
    self.get(namespace, name, step=step)
    found = []
    for job, kept in sorted(self._kept[namespace, name].items()):
      path = self._path(namespace, name, kept.rewrite, kept.digest)
      data = path.read_bytes() if path.is_file() else b""
      if hashlib.sha256(data).hexdigest() == kept.digest:
        found.append(dataclasses.replace(kept.rewrite, text=data.decode()))
        continue
      self._write({
        "kind": "lost", "step": step, "namespace": namespace, "name": name, "job": job,
      })  # fmt: skip
      del self._kept[namespace, name][job]
      path.unlink(missing_ok=True)
      self.counts.damaged += 1
      self.said.append(
        f"{path}: got {len(data)} bytes that do not match their checksum, expected the rewrite of"
        f" job {job} for {name!r}, version {kept.rewrite.version}; it is dropped, to be slept"
        " again."
      )
    return tuple(found)

  def _num_of(self, namespace: str) -> int:
    return sum(space == namespace for space, _ in self._contexts)

  def _load(self) -> None:
    is_begun = False
    for _, end, record in record_lines.scan(self.path):
      if not is_begun:
        self._check_header(record)
        is_begun = True
      else:
        self._replay(record)
      self._end = end
    assert self._descriptor is not None
    if not is_begun and os.fstat(self._descriptor).st_size:
      if not record_lines.may_be_torn_header(self.path):
        self._check_header({})
    self.truncated_bytes = record_lines.cut_tail(self._descriptor, self._end)
    if not is_begun:
      identity = dataclasses.asdict(self._identity)
      self._write({"kind": "contexts", "format": FORMAT, "identity": identity})
    self._remove_strays()

  def _check_header(self, record: Mapping[str, Any]) -> None:
    if record.get("kind") != "contexts" or record.get("format") != FORMAT:
      raise ValueError(
        f"{self.path}: got {record_lines.short(record)} as the first record, expected a registry of"
        f" contexts of format {FORMAT}; choose another directory."
      )
    for field, ours in dataclasses.asdict(self._identity).items():
      if record["identity"][field] != ours:
        raise ValueError(
          f"{self.path}: got contexts of a model whose {field} is {record['identity'][field]!r},"
          f" expected {ours!r}; load that model, or choose another directory."
        )

  def _replay(self, record: Mapping[str, Any]) -> None:
    """Takes an event that was written before."""
    self.last_step = max(self.last_step, record["step"])
    if record["kind"] == "context":
      self._take(Context(**record["context"]))
      return
    key = (record["namespace"], record["name"])
    if record["kind"] == "drop":
      del self._contexts[key], self._kept[key]
    elif record["kind"] == "lost":
      del self._kept[key][record["job"]]
    else:
      fields = {**record["rewrite"], "text": ""}
      fields["false_equations"] = tuple(fields["false_equations"])
      rewrite = Rewrite(**fields)
      self._kept[key][rewrite.job] = _Kept(rewrite, record["digest"])

  def _remove_strays(self) -> None:
    """Removes files that no event names: a kill came between the two."""
    known = {
      self._path(*key, kept.rewrite, kept.digest)
      for key, jobs in self._kept.items()
      for kept in jobs.values()
    }
    for path in (self.directory / REWRITES).glob("*/*.txt*"):
      if path not in known:
        path.unlink()

  def _write(self, record: Mapping[str, Any]) -> None:
    if self._descriptor is None:
      raise ValueError(
        f"{self.path}: got an event for a closed registry, expected an open one; open it again."
      )
    self._end = record_lines.append(self._descriptor, self.path, self._end, record)

  def _check_text(self, text: str, what: str) -> None:
    try:
      size = len(text.encode())
    except UnicodeEncodeError as error:
      raise ValueError(
        f"contexts: got a {what} with a lone surrogate at offset {error.start}, expected characters"
        " that UTF-8 can hold; replace it."
      ) from error
    if not text.strip():
      raise ValueError(
        f"contexts: got an empty {what}, expected at least one character that is no space; leave it"
        " out."
      )
    if size > MAX_TEXT:
      raise ValueError(
        f"contexts: got a {what} of {size} bytes, expected at most {MAX_TEXT}; split it."
      )


def _digest(text: str) -> str:
  return hashlib.sha256(text.encode()).hexdigest()


def _store(path: pathlib.Path, text: str) -> None:
  """Puts a rewrite's file on disk, whole or not at all."""
  path.parent.mkdir(parents=True, exist_ok=True)
  fresh = path.with_suffix(".txt.new")
  data = text.encode()
  try:
    with open(fresh, "wb") as file:
      file.write(data)
      file.flush()
      os.fsync(file.fileno())
    fresh.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
      os.fsync(folder)
    finally:
      os.close(folder)
  except OSError as error:
    with contextlib.suppress(OSError):
      fresh.unlink()
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
      raise
    raise OSError(
      error.errno,
      f"contexts: got '{os.strerror(error.errno)}' writing {len(data)} bytes to {path}, expected"
      " room for them; free some space and sleep again: every earlier rewrite is still there",
    ) from error
