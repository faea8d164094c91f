"""Server state for registered contexts and sleep-time compute. Used only on the engine thread.

    register, forget, read --between two visits--> registry on disk, runner --background rows--> c'

A caller sees only its own contexts; any other name is reported as not found. A question about a
context is answered from the context's rewrites, or from its text while there are none.
"""

from __future__ import annotations

from collections.abc import Iterable
import dataclasses
import hashlib
import json
import logging
import os
from typing import Any, NamedTuple

from seerjax.engine.engine import Engine
from seerjax.models.loading import Model
from seerjax.serve import identity as identity_lib
from seerjax.serve.refusals import Refusal, shown
from seerjax.sleep import runner as runner_lib, states
from seerjax.sleep.contexts import Context, Contexts, Dropped, Identity, Rewrite
from seerjax.sleep.planner import PlannerConfig
from seerjax.sleep.prompts import Prompts
from seerjax.sleep.runner import Runner, RunnerConfig
from seerjax.sleep.thinkers import Message
from seerjax.types import Completion

LOG = logging.getLogger("seerjax.serve")
# Namespace in the registry for callers that are not a tenant.
EVERYBODY = "everybody"


class Reading(NamedTuple):
  """A context as a question uses it.

  Attributes:
    context: the version that is used.
    question: the question.
    messages: the chat messages for the model.
    jobs: jobs that made the rewrites in use; empty if the text itself is used.
  """

  context: Context
  question: str
  messages: tuple[Message, ...]
  jobs: tuple[int, ...]

  @property
  def group_id(self) -> str:
    """Group of requests about this context; they share drafts with the context's rewrites."""
    return runner_lib.group_of(self.context)

  @property
  def body(self) -> dict[str, Any]:
    """The `context` object of the response."""
    return {
      "name": self.context.name, "id": self.context.context_id, "version": self.context.version,
      "rewrites": list(self.jobs),
    }  # fmt: skip


def identity_of(model: Model, weights: str) -> Identity:
  """Returns the identity that a registry's contexts are bound to.

  Raises:
    ValueError: if the model has no tokenizer.
  """
  if model.tokenizer is None:
    raise ValueError("identity_of: got a model without a tokenizer, expected one; load another.")
  parts = identity_lib.tokenizer_parts(model.tokenizer)
  # Without the template's time: rewrites stay valid across a restart.
  template = json.dumps([parts.pop("template"), parts.pop("chat")[:2]], sort_keys=True)
  return Identity(
    weights=weights,
    tokenizer=_digest(json.dumps(parts, sort_keys=True)),
    template=_digest(template),
  )


def _digest(text: str) -> str:
  return hashlib.sha256(text.encode()).hexdigest()


class Sleeping:
  """The contexts of one engine. Made on any thread, then used only on the engine thread.

  Attributes:
    contexts: the registry.
    runner: runs sleep-time compute.
    num_by_state: number of contexts by `states.STATES`, over all callers; other threads may read
      it.
  """

  def __init__(
    self,
    directory: str | os.PathLike[str],
    engine: Engine,
    prompts: Prompts,
    *,
    identity: Identity,
    config: RunnerConfig,
    planner_config: PlannerConfig | None = None,
    max_contexts: int = 10_000,
  ):
    """Opens the registry.

    Args:
      directory: directory of the registry.
      engine: engine that rewrites contexts and answers questions.
      prompts: prompts for rewriting and for questions.
      identity: identity of the model.
      config: budgets of sleep-time compute.
      planner_config: cost model of sleep-time compute.
      max_contexts: upper bound per namespace.

    Raises:
      ValueError: see `Contexts` and `Runner`.
      OSError: if the registry cannot be written.
    """
    self.contexts = Contexts(
      directory, identity=identity, on_drop=self._dropped, max_contexts=max_contexts
    )
    try:
      self.runner = Runner(
        engine, self.contexts, prompts, config=config, planner_config=planner_config
      )
    except BaseException:
      self.contexts.close()
      raise
    self._engine, self._prompts, self._config = engine, prompts, config
    assert engine.tokenizer is not None  # `Runner` checks this.
    self._tokenizer = engine.tokenizer
    self._first_step = self.contexts.last_step - engine.counters.steps
    self._has_news = True  # Whether new jobs may be worth starting.
    self._is_off = False
    self.num_by_state: dict[str, int] = dict.fromkeys(states.STATES, 0)
    self._states: dict[tuple[str, int], str] = {}  # By (context id, version).

  def _dropped(self, dropped: Dropped) -> None:
    self.runner.dropped(dropped)
    self._has_news = True

  @property
  def step(self) -> int:
    """Engine steps, summed over all servers that used this registry."""
    return self._first_step + self._engine.counters.steps

  # Called by the engine thread in every iteration.

  @property
  def has_work(self) -> bool:
    """Whether there is work while no request is queued."""
    return not self._is_off and (self._has_news or bool(self._engine.num_background))

  def advance(self) -> None:
    """Starts jobs that are worth running."""
    spaces = self.contexts.namespaces(step=self.step)  # Also drops expired contexts.
    if self._has_news and not self._is_off:
      self._has_news = False
      self.runner.advance(spaces, step=self.step)
      self._look()

  def _look(self) -> None:
    """Counts contexts by state, and logs every change of a state."""
    step, found = self.step, dict[tuple[str, int], str]()
    counts: dict[str, int] = dict.fromkeys(states.STATES, 0)
    for space in self.contexts.namespaces(step=step):
      for name in self.contexts.names(space, step=step):
        context = self.contexts.get(space, name, step=step)
        state, reason = self._state(context)
        key = (context.context_id, context.version)
        counts[state] += 1
        found[key] = state
        if self._states.get(key) != state:  # Logs no user text, not even names.
          LOG.info(
            "context %s version=%d %s: %s", context.context_id[:12], context.version, state, reason
          )
    self._states, self.num_by_state = found, counts

  def _state(self, context: Context) -> tuple[str, str]:
    """Returns (state of a context, a sentence that explains it)."""
    progress = self.runner.progress(context, step=self.step)
    if self._is_off and progress.state in (states.QUEUED, states.RUNNING):
      return states.SKIPPED, "sleep-time compute is off because steps failed; see the server's log"
    return progress.state, progress.reason

  def take(self, completions: Iterable[Completion]) -> list[Completion]:
    """Takes finished sleep jobs out of completions; returns the other completions.

    If the disk is full, only the new rewrite is lost; its job runs again after the next event.
    """
    completions = [*completions]
    ours = [one for one in completions if one.request_id.startswith(runner_lib.NAME)]
    for completion in ours:
      try:
        self.runner.take([completion], step=self.step)
        self._has_news = True
      except OSError as error:
        LOG.warning("sleep: %s", error)
    for sentence in self.contexts.messages:
      LOG.warning("sleep: %s", sentence)
    self.contexts.messages.clear()
    return [one for one in completions if not one.request_id.startswith(runner_lib.NAME)]

  def stop(self) -> None:
    """Aborts running jobs, which start again later; finished rewrites are on disk."""
    self.runner.stop()
    self._has_news = True

  def give_up(self) -> None:
    """Ends sleep-time compute; existing rewrites stay in use."""
    self.runner.stop()
    self._is_off = True
    self._look()

  def close(self) -> None:
    """Stops jobs and releases the registry to other processes."""
    self.runner.stop()
    self._has_news = False
    self.contexts.close()

  # Called for clients, between two visits.

  def register(self, namespace: str, name: str, text: str, ttl_steps: int | None) -> dict[str, Any]:
    """Registers a context; a changed text invalidates the rewrites of the old one.

    Raises:
      Refusal: see `Contexts.register`; also if the text leaves no room for a question.
    """
    try:
      text.encode()
    except UnicodeEncodeError as error:
      raise Refusal(
        f"text: got a lone surrogate at offset {error.start}, expected characters that UTF-8 can"
        " encode; replace it.",
        param="text",
      ) from error
    ids = self._tokenizer.encode(text, special_tokens_as_text=True)
    room = min(self._engine.config.max_model_len, self._engine.model.max_model_len)
    if len(ids) + self._config.sleep_tokens > room:
      raise Refusal(
        f"text: got {len(ids)} tokens, expected at most {max(0, room - self._config.sleep_tokens)}:"
        f" the context of {room} minus {self._config.sleep_tokens} for a rewrite; shorten it.",
        param="text",
        code="context_length_exceeded",
      )
    try:
      context = self.contexts.register(
        namespace or EVERYBODY, name, text, ids, step=self.step, ttl_steps=ttl_steps
      )
    except ValueError as error:
      raise Refusal(str(error), param="text") from error
    except OSError as error:
      raise Refusal(str(error), status=507, kind="server_error", code="disk_full") from error
    self._has_news = True
    return self._described(context)

  def forget(self, namespace: str, name: str) -> dict[str, Any]:
    """Deletes a context and its rewrites; raises `Refusal` if the caller has no such context."""
    self._find(namespace, name)
    self.contexts.forget(namespace or EVERYBODY, name, step=self.step)
    return {"object": "context", "name": name, "deleted": True}

  def inspect(self, namespace: str, name: str) -> dict[str, Any]:
    """Returns a context with its rewrites; raises `Refusal` if the caller has no such context."""
    context = self._find(namespace, name)
    body = self._described(context)
    space = context.namespace
    rewrites = self.contexts.rewrites(space, name, step=self.step)
    quarantine = self.contexts.quarantine(space, name, step=self.step)
    return {
      **body,
      "text": context.text,
      "rewrites": [_rewrite(one) for one in rewrites],
      "quarantine": [_rewrite(one) for one in quarantine],
    }

  def list(self, namespace: str) -> dict[str, Any]:
    """Returns the caller's contexts."""
    names = self.contexts.names(namespace or EVERYBODY, step=self.step)
    found = [self._described(self._find(namespace, name)) for name in names]
    return {"object": "list", "data": found}

  def read(self, namespace: str, name: str, question: str) -> Reading:
    """Returns a context as a question uses it; `Refusal` if the caller has no such context."""
    context = self._find(namespace, name)
    rewrites = self.contexts.rewrites(context.namespace, name, step=self.step)
    notes = self._prompts.joined([one.text for one in rewrites]) if rewrites else ""
    text = "" if notes.strip() else context.text
    messages = self._prompts.wake(question, text, notes, self._config.verbosity)
    jobs = () if text else tuple(one.job for one in rewrites)
    return Reading(context, question, messages, jobs)

  def is_current(self, reading: Reading) -> bool:
    """Returns whether the version in use is still the current one."""
    context = reading.context
    names = self.contexts.names(context.namespace, step=self.step)
    if context.name not in names:
      return False
    now = self.contexts.get(context.namespace, context.name, step=self.step)
    return (now.context_id, now.version) == (context.context_id, context.version)

  def answered(self, reading: Reading, completion: Completion) -> None:
    """Records an answer about a context; the planner estimates the value of sleep from it."""
    if completion.finish_reason == "error" or not self.is_current(reading):
      return
    self.runner.answered(
      reading.context,
      len(completion.tokens),
      has_slept=bool(reading.jobs),
      question=reading.question,
    )
    self._has_news = True

  def _find(self, namespace: str, name: str) -> Context:
    try:
      return self.contexts.get(namespace or EVERYBODY, name, step=self.step)
    except ValueError as error:
      raise Refusal(
        f"context: got {shown(name)}, which this caller has not registered, expected a registered"
        " one; POST /v1/contexts registers it (again, if it expired).",
        status=404,
        param="context",
        code="context_not_found",
      ) from error

  def _described(self, context: Context) -> dict[str, Any]:
    step = self.step
    rewrites = self.contexts.rewrites(context.namespace, context.name, step=step)
    state, reason = self._state(context)
    left = None if context.expires_step is None else context.expires_step - step
    fields = dataclasses.asdict(context)
    for hidden in ("namespace", "text", "registered_step", "expires_step"):
      del fields[hidden]
    return {
      "object": "context",
      "id": fields.pop("context_id"),
      **fields,
      "steps_left": left,
      "num_rewrites": len(rewrites),
      "state": state,
      "state_reason": reason,
    }


def _rewrite(rewrite: Rewrite) -> dict[str, Any]:
  fields = dataclasses.asdict(rewrite)
  del fields["context_id"], fields["version"]
  return {**fields, "false_equations": list(rewrite.false_equations)}
