"""Twins of sleep: each breaks one rule, and a schedule that always runs detects it."""

from __future__ import annotations

import collections
import functools

import pytest
import sleep_plans
import sleep_references
import sleep_runs
import twins

from seerjax.kv.owner import BASE, Owner
from seerjax.kv.prefix_index import PrefixIndex
from seerjax.sleep import contexts as contexts_lib
from seerjax.sleep.contexts import Contexts


class Careless(Contexts):
  """Twin: rewrites of version n are served for n + 1."""

  def _take(self, context):
    kept = dict(self._kept.get((context.namespace, context.name), {}))
    super()._take(context)
    self._kept[context.namespace, context.name] = kept
    return ()


class Trusting(Contexts):
  """Twin: a rewrite is accepted although its file was changed."""

  def _all(self, namespace, name, step):
    for kept in self._kept.get((namespace, name), {}).values():
      path = self._path(namespace, name, kept.rewrite, kept.digest)
      digest = contexts_lib._digest(path.read_text())
      if digest != kept.digest:
        fresh = self._path(namespace, name, kept.rewrite, digest)
        path.rename(fresh)
        self._kept[namespace, name][kept.rewrite.job] = kept._replace(digest=digest)
    return super()._all(namespace, name, step)


class KeepsPins(sleep_runs.Watched):
  """Twin: pages of pins are found after a weight update."""

  def _forget_pages(self):
    held = {sequence: list(sequence.pages) for sequence in self._pins.sequences if sequence.pages}
    self.memory.forget_all()
    self._weights.publish(self.memory, self.policy_version)
    for sequence in held:
      self.memory.remember(sequence, sequence.tokens[: sequence.num_written])


TAKES_A_SLOT = functools.partial(sleep_runs.Watched, planner=twins.TakesASlot)


class Shared(PrefixIndex):
  """A prefix index that ignores namespaces."""

  def find(self, tokens, owner=BASE):
    return super().find(tokens, Owner(owner.adapter))

  def remember(self, tokens, pages, owner=BASE):
    super().remember(tokens, pages, Owner(owner.adapter))


class FindsAnothers(sleep_runs.Watched):
  """Twin: all namespaces find a page."""

  def __init__(self, *args, **others):
    super().__init__(*args, **others)
    for pool in self.memory.pools:
      pool._index = Shared(self.config.page_size)


@pytest.mark.parametrize(
  "plan, kinds, message",
  [
    pytest.param(
      sleep_plans.ALWAYS[1],
      dict(runner_kind=twins.FromTheClock),
      "expected .'",
      id="seeds of a clock",
    ),
    pytest.param(
      sleep_plans.ALWAYS[1], dict(contexts_kind=Careless), "expected version 2", id="old version"
    ),
    pytest.param(
      sleep_plans.ALWAYS[1], dict(contexts_kind=Trusting), "expected .'", id="a changed token"
    ),
    pytest.param(
      sleep_plans.PINNED, dict(engine_kind=KeepsPins), "got pins of old", id="pins of old weights"
    ),
    pytest.param(
      sleep_plans.ALWAYS[2], dict(engine_kind=TAKES_A_SLOT), "got ", id="another's slot"
    ),
    pytest.param(
      sleep_plans.SHARED,
      dict(engine_kind=FindsAnothers),
      "got a page of '(ours|theirs)' for",
      id="namespaces",
    ),
  ],
)
def test_what_breaks_a_rule_is_found_out(tmp_path, plan, kinds, message):
  events = collections.Counter()
  with pytest.raises(AssertionError, match=message):
    sleep_runs.Schedule(
      plan, sleep_references.NUMERICS["f32"], (1, 1), tmp_path, events, **kinds
    ).run()
