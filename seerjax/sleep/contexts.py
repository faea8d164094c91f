"""Registered contexts with owner, version and valid rewrites, on disk.

  register -> version n --sleep--> rewrite of n --read--> waker
     edit  -> version n+1: rewrites of n are dropped at once and never accepted again

A context has a name in a namespace. Namespaces are isolated: a context of another namespace is
reported as unknown. A rewrite is text with its provenance. Rewrites that state a false equation are
quarantined: kept for inspection, never used. Time to live is counted in engine steps, because
nothing here depends on a clock.

On disk: `contexts.jsonl` with one checksummed event per line, and one file per rewrite, written
before its event. A crash loses at most the event being written. A rewrite with bytes that do not
match the checksum is dropped and reported in `messages`, and its job runs again.
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

from seerjax.records import file
from seerjax.tasks import equations

FORMAT = 1
_KIND = file.Kind(
  "contexts", FORMAT, "registry", "a registry of contexts", "choose another directory"
)
EVENTS, REWRITES = "contexts.jsonl", "rewrites"
MAX_TEXT = 4 << 20  # Bytes of one context or rewrite.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Identity:
  """Digests on which a context's id depends, besides its tokens.

  Attributes:
    weights: weights at the start of a run; later ones are distinguished by `policy_version`.
    tokenizer: the tokenizer.
    template: the chat template.
  """

  weights: str
  tokenizer: str
  template: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Context:
  """A registered context.

  Attributes:
    context_id: digest of (tokens, weights, tokenizer, template), 64 hexadecimal digits.
    namespace: namespace of the owner.
    name: name in the namespace.
    version: 1 for a name's first text; incremented by each change, also after `forget`.
    text: text of the context.
    registered_step: step at which this version was registered.
    expires_step: step at which the context expires; None for never.
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
  """A sleeper's result for one version of a context.

  Attributes:
    context_id: id of the context.
    version: version of the context.
    job: number of the sleeper.
    seed: seed of the sleeper.
    policy_version: version of the weights that generated it.
    num_tokens: tokens generated for it.
    text: the rewrite.
    false_equations: false equations in the text; if there are any, it is in quarantine.
    is_truncated: whether the sleeper's last call hit its token limit.
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
  """A version that was dropped; its pages and drafts must be released.

  Attributes:
    namespace: namespace of the context.
    name: name in the namespace.
    context_id: id of the context.
    version: version number.
    why: "edited", "forgotten" or "expired".
  """

  namespace: str
  name: str
  context_id: str
  version: int
  why: str


@dataclasses.dataclass
class Counts:
  """Event counts since a registry was opened.

  Attributes:
    stale: rewrites rejected because their version had been dropped.
    quarantined: rewrites with false equations.
    damaged: rewrites with a wrong checksum.
    expired: versions that expired.
    edited: versions replaced by another text.
  """

  stale: int = 0
  quarantined: int = 0
  damaged: int = 0
  expired: int = 0
  edited: int = 0


def context_id(tokens: Sequence[int], identity: Identity) -> str:
  """Returns the digest of a context, 64 hexadecimal digits.

  Raises:
    ValueError: if there are no tokens.
  """
  if not len(tokens):
    raise ValueError(
      "context_id: got no token, expected at least one; an empty context needs no sleep."
    )
  fields = [[int(token) for token in tokens], *dataclasses.astuple(identity)]
  return hashlib.sha256(json.dumps(fields).encode()).hexdigest()


class _Kept(NamedTuple):
  """A rewrite as described by its event, without its text."""

  rewrite: Rewrite
  digest: str


class Contexts(file.RecordFile):
  """A registry in a directory, with one writer at a time.

  Steps are given by the caller and never decrease; after a restart they continue from `last_step`.

  Attributes:
    last_step: highest step of any event.
    messages: a message for each rewrite dropped because of its checksum.
    counts: event counts since opening.
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
      directory: directory used by this registry alone; created if needed.
      identity: identity of the model.
      on_drop: called for each dropped version, before the next version is served.
      max_contexts: most contexts per namespace.

    Raises:
      ValueError: if another writer has the registry open, if its events are damaged before their
        end or are not a registry's, if it belongs to another model (names both values), or if
        `max_contexts` is below 1.
      OSError: if the directory cannot be written.
    """
    if max_contexts < 1:
      raise ValueError(
        f"Contexts.max_contexts: got {max_contexts}, expected at least 1; 10000 is usual."
      )
    self.directory = pathlib.Path(directory)
    self.last_step = 0
    self._checked_step = -1  # Last step at which expiry was checked.
    self.messages: list[str] = []
    self.counts = Counts()
    self._on_drop = on_drop
    self._identity = identity
    self._max_contexts = max_contexts
    self._contexts: dict[tuple[str, str], Context] = {}
    self._versions: dict[tuple[str, str], int] = {}
    self._kept: dict[tuple[str, str], dict[int, _Kept]] = {}
    if self.directory.exists() and not self.directory.is_dir():
      raise ValueError(
        f"{self.directory}: got a file, expected a directory of contexts, or none yet; name"
        " another."
      )
    self._is_started = False
    super().__init__(self.directory / EVENTS, _KIND)
    with self._closing_on_error():
      if not self._is_started:
        self._begin({"identity": dataclasses.asdict(self._identity)})
      self._remove_strays()

  # Public operations.

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
    """Registers a context under its name; a changed text starts a new version.

    Registering the same text again keeps version and rewrites, and restarts the time to live.

    Args:
      namespace: namespace of the owner.
      name: name in the namespace.
      text: text of the context.
      tokens: token ids of the text.
      step: engine step.
      ttl_steps: lifetime in steps; None for no limit.

    Raises:
      ValueError: if the text is empty, too long or not encodable as UTF-8, `ttl_steps` is below 1,
        the step is before the last one, or the namespace is full.
      OSError: if the disk is full; the registry is unchanged.
    """
    self._advance(step)
    self._check_text(text, f"context {name!r}")
    if not name or not namespace:
      raise ValueError(
        f"register: got the namespace {namespace!r} and the name {name!r}, expected at least one"
        " character in each; set both."
      )
    if ttl_steps is not None and ttl_steps < 1:
      raise ValueError(
        f"register: got ttl_steps={ttl_steps}, expected at least 1; None keeps a context."
      )
    key, before = (namespace, name), self._contexts.get((namespace, name))
    if before is None and self._num_of(namespace) >= self._max_contexts:
      raise ValueError(
        f"register: got a new context for a namespace that has {self._max_contexts}, the limit;"
        " forget one, or raise max_contexts."
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
    """Returns the current version of a context.

    Raises:
      ValueError: if the namespace has no context of this name, or it has expired.
    """
    self._advance(step)
    context = self._contexts.get((namespace, name))
    if context is None:
      raise ValueError(
        f"contexts: got the name {name!r}, which is unknown in this namespace, expected a"
        " registered context; register it (again, if it expired)."
      )
    return context

  def namespaces(self, *, step: int) -> tuple[str, ...]:
    """Returns the namespaces that have contexts, sorted."""
    self._advance(step)
    return tuple(sorted({space for space, _ in self._contexts}))

  def names(self, namespace: str, *, step: int) -> tuple[str, ...]:
    """Returns the names of contexts in a namespace, sorted."""
    self._advance(step)
    return tuple(sorted(name for space, name in self._contexts if space == namespace))

  def keep(self, namespace: str, name: str, rewrite: Rewrite, *, step: int) -> Rewrite | None:
    """Stores a rewrite, and returns it with `false_equations` filled in.

    Args:
      namespace: namespace of the context.
      name: name of the context.
      rewrite: rewrite with the version that its sleeper read; replaces the job's earlier one.
      step: engine step.

    Returns:
      The stored rewrite, or None if that version was dropped.

    Raises:
      ValueError: if the text is empty, too long or not encodable as UTF-8.
      OSError: if the disk is full; earlier rewrites are intact.
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
    """Returns the usable rewrites of a context's version, by job: those without false equations.

    A rewrite with a wrong checksum is dropped and reported in `messages`.

    Raises:
      ValueError: see `get`.
    """
    found = self._all(namespace, name, step)
    return tuple(rewrite for rewrite in found if not rewrite.false_equations)

  def provenance(self, namespace: str, name: str, *, step: int) -> tuple[Rewrite, ...]:
    """Returns all rewrites of a context by job, without their texts; reads no files.

    Raises:
      ValueError: see `get`.
    """
    self.get(namespace, name, step=step)
    found = sorted(self._kept[namespace, name].items())
    return tuple(dataclasses.replace(kept.rewrite, text="") for _, kept in found)

  def quarantine(self, namespace: str, name: str, *, step: int) -> tuple[Rewrite, ...]:
    """Returns the rewrites with false equations, for inspection; see `rewrites`."""
    return tuple(one for one in self._all(namespace, name, step) if one.false_equations)

  def forget(self, namespace: str, name: str, *, step: int) -> None:
    """Deletes a context and everything made from it.

    Raises:
      ValueError: see `get`.
    """
    context = self.get(namespace, name, step=step)
    self._drop(context, "forgotten", step)

  def __enter__(self) -> Contexts:
    return self

  # Expiry.

  def _advance(self, step: int) -> None:
    """Advances to a step, and drops expired contexts."""
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
    """Deletes the files of a dropped version, and calls `on_drop`."""
    for kept in gone:
      path = self._path(context.namespace, context.name, kept.rewrite, kept.digest)
      path.unlink(missing_ok=True)
    self._on_drop(
      Dropped(context.namespace, context.name, context.context_id, context.version, why)
    )

  def _take(self, context: Context) -> tuple[_Kept, ...]:
    """Makes a context the current version of its name; returns the invalidated rewrites."""
    key = (context.namespace, context.name)
    is_same = self._versions.get(key) == context.version and key in self._contexts
    gone = () if is_same else tuple(self._kept.pop(key, {}).values())
    self._contexts[key] = context
    self._versions[key] = context.version
    self._kept.setdefault(key, {})
    return gone

  # Files.

  def _path(self, namespace: str, name: str, rewrite: Rewrite, digest: str) -> pathlib.Path:
    """Returns the file of a rewrite; namespaces never share one."""
    place = _digest(json.dumps([name, rewrite.version, rewrite.job]))
    folder = self.directory / REWRITES / _digest(namespace)[:32]
    return folder / f"{place[:32]}-{digest[:32]}.txt"

  def _all(self, namespace: str, name: str, step: int) -> tuple[Rewrite, ...]:
    """Returns a context's rewrites by job; drops those with a wrong checksum."""
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
      self.messages.append(
        f"{path}: got {len(data)} bytes that do not match their checksum, expected the rewrite of"
        f" job {job} for {name!r}, version {kept.rewrite.version}; it is dropped, and its job runs"
        " again."
      )
    return tuple(found)

  def _num_of(self, namespace: str) -> int:
    return sum(space == namespace for space, _ in self._contexts)

  def _load_record(self, offset: int, record: dict[str, Any]) -> None:
    if self._is_started:
      self._replay(record)
      return
    self._is_started = True
    for field, ours in dataclasses.asdict(self._identity).items():
      if record["identity"][field] != ours:
        raise ValueError(
          f"{self.path}: got contexts of a model whose {field} is {record['identity'][field]!r},"
          f" expected {ours!r}; load that model, or choose another directory."
        )

  def _replay(self, record: Mapping[str, Any]) -> None:
    """Applies an event read from disk."""
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
    """Deletes files without an event, which a crash left between the two writes."""
    known = {
      self._path(*key, kept.rewrite, kept.digest)
      for key, jobs in self._kept.items()
      for kept in jobs.values()
    }
    for path in (self.directory / REWRITES).glob("*/*.txt*"):
      if path not in known:
        path.unlink()

  def _check_text(self, text: str, what: str) -> None:
    try:
      size = len(text.encode())
    except UnicodeEncodeError as error:
      raise ValueError(
        f"contexts: got a {what} with a lone surrogate at offset {error.start}, expected characters"
        " that UTF-8 can encode; replace it."
      ) from error
    if not text.strip():
      raise ValueError(
        f"contexts: got an empty {what}, expected at least one character that is not a space; leave"
        " it out."
      )
    if size > MAX_TEXT:
      raise ValueError(
        f"contexts: got a {what} of {size} bytes, expected at most {MAX_TEXT}; split it."
      )


def _digest(text: str) -> str:
  return hashlib.sha256(text.encode()).hexdigest()


def _store(path: pathlib.Path, text: str) -> None:
  """Writes a rewrite's file atomically."""
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
      " enough disk space; free some and sleep again: earlier rewrites are kept",
    ) from error
