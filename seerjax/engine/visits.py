"""Visits of an engine: the steps that run on the devices before control returns to the host.

    plan of rows -> arrays -> devices: one step, or several if all rows decode -> samples

A visit that fails frees all pages. The next one computes the keys again, to the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from seerjax.array_typing import PRNGKeyArray
from seerjax.engine import output
from seerjax.engine.counters import Counters
from seerjax.engine.output import Outputs
from seerjax.engine.planner import Plan, Planner
from seerjax.engine.requests import Requests
from seerjax.engine.runner import Runner, StepInputs
from seerjax.engine.sequence import SequenceState, StepOutput
from seerjax.engine.step_times import StepTimes
from seerjax.engine.weights import Weights
from seerjax.kv.memory import Memory
from seerjax.kv.pins import Pins
from seerjax.models import tokenizer as tokenizer_lib


class Visits:
  """Runs the visits of one engine.

  Attributes:
    runner: compiled programs of the steps.
  """

  def __init__(
    self,
    planner: Planner,
    outputs: Outputs,
    requests: Requests,
    memory: Memory,
    counters: Counters,
    *,
    pins: Pins,
    runner: Runner,
    weights: Weights,
    key: PRNGKeyArray,
    tokenizer: tokenizer_lib.Tokenizer | None,
  ):
    self.runner = runner
    self._planner = planner
    self._outputs = outputs
    self._requests = requests
    self._memory = memory
    self._counters = counters
    self._pins = pins
    self._weights = weights
    self._key = key
    self._tokenizer = tokenizer

  def run(self, policy_version: int, table: StepTimes | None) -> list[StepOutput]:
    """Runs one visit; returns the new tokens of each request. See `Engine.step`."""
    self._requests.busy = None
    try:
      self._run(policy_version, table)
    except BaseException as error:
      busy = self._requests.take_busy()
      self._start_over(busy)
      if busy is None or not isinstance(error, Exception):
        raise
      sequence, num_tokens = busy
      if sequence.request.request_id not in self._requests.live:
        raise
      self._outputs.fail(sequence, num_tokens, error, policy_version=policy_version)
    return self._outputs.take_updates()

  def idle(
    self, num_requests: int, num_rows: int, num_steps: int, context: int
  ) -> Callable[[], None]:
    """Returns a function that runs a visit of dummy rows; see `Planner.idle_rows`."""
    plan = Plan(self._planner.idle_rows(num_requests, num_rows, num_steps, context), num_steps)

    def run() -> None:
      jax.device_get(self._dispatch(plan, self._planner.inputs(plan.rows)))

    return run

  def _run(self, policy_version: int, table: StepTimes | None) -> None:
    plan = self._planner.plan(table)
    if not any(plan.rows):
      self._planner.allocation.settle()
      return
    self._memory.restore()
    if self._memory.windows.kinds[1:]:
      self._planner.allocation.settle()  # A step has copies of one kind of pages only.
    try:
      inputs = self._planner.inputs(plan.rows)
    except Exception:
      self._requests.busy = self._planner.culprit(plan.rows)
      raise
    found, top = self._dispatch(plan, inputs)
    self._planner.remember_prompts(plan.rows)  # On the host, while the device computes.
    (tokens, scores), top = jax.device_get((found, top))
    columns = [
      (part[:, : plan.num_steps] if plan.num_steps > 1 else part[:, None]).tolist()
      for part in (tokens, scores.logprob, scores.raw_logprob)
    ]
    self._counters.visits += 1
    self._outputs.take(
      plan.rows,
      columns,
      plan.num_steps,
      policy_version=policy_version,
      top=None if top is None else output.Top(*(part.tolist() for part in top)),
    )
    self._planner.release_passed(plan.rows)
    self._requests.busy = None

  def _dispatch(self, plan: Plan, inputs: StepInputs) -> tuple[list[Any], Any]:
    """Dispatches a visit; returns its samples, and the top tokens if it has any."""
    top, before = None, (self._weights.params, self._memory.pages)
    if plan.num_steps > 1:
      visit = self._planner.visit_inputs(plan.rows, inputs, plan.num_steps)
      self._memory.pages, *found = self.runner.visit(*before, visit, self._key)
    elif inputs.scores is not None:
      pages, sampled, scored = self.runner.read(*before, inputs, self._key)
      self._memory.pages = pages
      found = [sampled, scored.scores]
      top = (scored.ids, scored.top.logprob, scored.top.raw_logprob)
    else:
      self._memory.pages, *found = self.runner.step(*before, inputs, self._key)
    return found, top

  def _start_over(self, busy: tuple[SequenceState, int] | None) -> None:
    """Frees all pages after a failed step: keys are computed again, to the same bits.

    `busy` is the request that the step was working on, if any, and its number of tokens before.
    """
    self._counters.new_starts += 1
    if busy is not None:
      output.take_back(*busy, self._tokenizer)
    self._requests.wait_again()
    self._planner.allocation.start_over()
    self._memory.start_over([*self._requests.live.values(), *self._pins.sequences])
