"""Schedules of an engine with contexts: the drawn ones, and those that always run."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from hypothesis import strategies as st
import sleep_prompts
import word_engine

from seerjax.engine.engine import EngineConfig
from seerjax.engine.step_times import StepTimes
from seerjax.sleep import planner
from seerjax.sleep.contexts import Identity
from seerjax.sleep.planner import Mean, PlannerConfig, Seen

NANO = Identity(weights="w", tokenizer="t", template="c")
SPACES, NAMES = ("ours", "theirs"), ("a", "b")
TEXTS = ("Ana has 2.", "Bo has 19 and 5.", "Cy has 7.")
# Sleeps for every context: the seen statistics outweigh later ones and make sleep worthwhile.
EAGER = PlannerConfig(num_trials=10**6)
SEEN = Seen(
  sleep={planner.kind_of(1): Mean(10**6, 0)},
  short={planner.kind_of(1): Mean(10**6, 0)},
  full={planner.kind_of(1): Mean(10**6, 10**9)},
)
SIZES = dataclasses.replace(word_engine.SIZES, pinned_pages=4)
SMALL = EngineConfig(
  page_size=4,
  num_pages=20,
  max_num_seqs=3,
  max_model_len=64,
  batch_size_buckets=(4, 16),
  pinned_pages=6,
)
TABLES = (
  None,
  StepTimes(rows=(1, 64), seconds=(1.0, 1.0)),
  StepTimes(rows=(1, 64), seconds=(1.0, 64.0)),
)
MAX_VISITS = 1500
LOADS = (0, 7, 1)  # Visits between two foreground requests: never, now and then, always.
EVENTS = (
  "contexts", "edits", "expired", "forgotten", "rewrites", "quarantined", "questions from rewrites",
  "questions from text", "scored questions", "requests in front", "rows among others",
  "paused", "preempted sleep", "spilled sleep", "taken off for others", "cut short", "pins held",
  "pins taken off", "restored pins", "other weights", "restarts", "stale refused", "damaged",
  "drafted tokens", "accepted tokens", "positions reused",
)  # fmt: skip


def read(reply: str, notes: str) -> tuple[str, bool]:
  """Finishes with the second reply; some texts, selected by content, get a false equation."""
  text = f"{notes}{reply[:9]}"
  is_false = bool(notes) and sum(map(ord, text)) % 4 == 0
  return text + "\n1+1=3" * is_false, bool(notes)


PROMPTS = dataclasses.replace(sleep_prompts.PROMPTS, read=read, anticipated=lambda notes: ("Who?",))
QUESTIONS = ("Who?", "Ana?", "How many has Bo?")


class Disturbance(NamedTuple):
  """An event `wait` visits after the previous one; `choice` selects its target."""

  wait: int
  kind: str
  choice: int
  number: int


class Plan(NamedTuple):
  """One schedule. `load` and `table` are indices into `LOADS` and `TABLES`."""

  load: int
  table: int
  host_pages: int
  num_jobs: int
  has_drafts: bool
  is_small: bool
  disturbances: tuple[Disturbance, ...]


KINDS = (
  "register", "register", "register", "ask", "ask", "ask", "pause", "preempt", "spill", "pin",
  "unpin", "forget", "weights", "restart", "late", "damage",
)  # fmt: skip
PLANS = st.builds(
  Plan,
  load=st.integers(0, len(LOADS) - 1),
  table=st.integers(0, len(TABLES) - 1),
  host_pages=st.sampled_from([4096, 0]),
  num_jobs=st.integers(1, 2),
  has_drafts=st.booleans(),
  is_small=st.booleans(),
  disturbances=st.lists(
    st.builds(
      Disturbance,
      wait=st.integers(0, 12),
      kind=st.sampled_from(KINDS),
      choice=st.integers(0, 11),
      number=st.integers(0, 11),
    ),
    min_size=8,
    max_size=24,
  ).map(tuple),
)


def plan_of(*disturbances: tuple[int, str, int, int], **fields: Any) -> Plan:
  """Returns a hand-written schedule."""
  usual = dict(load=0, table=1, host_pages=0, num_jobs=1, has_drafts=True, is_small=False)
  return Plan(**{**usual, **fields}, disturbances=tuple(Disturbance(*one) for one in disturbances))


# Schedules that always run: pins that leave for foreground requests and come back; all ways in
# which a context is removed; and weight updates during much sleep.
ALWAYS = (
  plan_of(
    (0, "register", 0, 1), (0, "register", 1, 2), (60, "ask", 0, 0), (2, "crowd", 0, 0),
    (99, "ask", 0, 1), (30, "spill", 0, 0), host_pages=4096,
  ),
  plan_of(
    (0, "register", 0, 0), (0, "register", 3, 1), (9, "spill", 0, 3), (40, "late", 0, 0),
    (9, "damage", 0, 0), (0, "ask", 3, 2), (30, "register", 0, 4), (0, "late", 0, 0),
    (50, "forget", 0, 0), (0, "ask", 3, 0), (9, "restart", 0, 0), (9, "ask", 3, 0),
    (5, "register", 1, 2), (2, "preempt", 0, 0), (60, "ask", 1, 1), (9, "crowd", 0, 0),
    num_jobs=2, load=1,
  ),
  plan_of(
    (0, "register", 0, 0), (0, "register", 2, 3), (7, "weights", 0, 0), (50, "ask", 0, 0),
    (9, "weights", 0, 0), (0, "ask", 0, 1), (12, "pause", 0, 6), (3, "ask", 2, 0),
    (1, "register", 2, 1), (9, "restart", 0, 0), load=2, host_pages=4096,
  ),
)  # fmt: skip


# Two namespaces register the same text, one after the other.
SHARED = plan_of((0, "register", 0, 0), (60, "register", 1, 0))
# Prefixes are pinned when the weights are updated.
PINNED = plan_of(
  (0, "register", 0, 1), (0, "register", 1, 2), (60, "weights", 0, 0), (0, "ask", 0, 1)
)
