"""Schedules of an engine: sizes, events, the drawn plans, and those that always run."""

from __future__ import annotations

from typing import Any, NamedTuple

from drawn_requests import SAMPLING, alone, tokens
from hypothesis import strategies as st
import tiny_model

from seerjax.engine.engine import EngineConfig
from seerjax.engine.step_times import StepTimes
from seerjax.types import Request, SamplingParams

MAX_CONTEXT = 64
MAX_STEPS = 1000
SIZES = {
  "chunks of 16": EngineConfig(
    page_size=8, num_pages=26, max_num_seqs=4, max_model_len=64, batch_size_buckets=(4, 16)
  ),
  "chunks of 1 to 7": EngineConfig(
    page_size=4, num_pages=40, max_num_seqs=6, max_model_len=64, batch_size_buckets=(7,)
  ),
  "pages of a split": EngineConfig(
    page_size=16, num_pages=14, max_num_seqs=3, max_model_len=64, batch_size_buckets=(3, 9)
  ),
  "small pages": EngineConfig(
    page_size=2, num_pages=90, max_num_seqs=8, max_model_len=64, batch_size_buckets=(8, 40)
  ),
  "no reuse": EngineConfig(
    page_size=8,
    num_pages=26,
    max_num_seqs=5,
    max_model_len=64,
    batch_size_buckets=(5, 24),
    enable_prefix_caching=False,
  ),
}
MESHES = ((1, 1), (2, 1), (1, 2), (2, 2))  # (instances, model shards)
# KV buckets of 4, 5 and 9 splits.
CONTEXTS = (MAX_CONTEXT, 80, 144)

EVENTS = (
  "requests",
  "arrivals between steps",
  "mixed steps",
  "chunked prompts",
  "preempted",
  "cancelled",
  "pages withheld",
  "steps with waiting",
  "restarts",
  "continued requests",
  "drafted tokens",
  "accepted tokens",
  "side paths",
  "further turns",
  "stopped by an id",
  "stopped by a string",
  "greedy",
  "filtered",
  "biased",
)
# Events in the middle of a visit of several steps.
VISIT_EVENTS = (
  "visits of several steps",
  "ended by an id within a visit",
  "ended by its length within a visit",
  "ended its chunk within a visit",
  "continued in visits of another length",
)
# Events with background requests.
BACKGROUND_EVENTS = (
  "requests in background",
  "rows in background",
  "rows among others",
  "paused for others",
  "taken off for others",
)
# Step times: free rows, rows of equal cost, and stairs.
TABLES = (
  None,
  StepTimes(rows=(1, 4096), seconds=(1.0, 1.0)),
  StepTimes(rows=(1, 64), seconds=(1.0, 64.0)),
  StepTimes(rows=(1, 4, 5, 64), seconds=(1.0, 1.0, 2.0, 2.0), visits=((1, 8, 6.0),)),
)
VISIT_ENDS = {"stop": "by an id", "length": "by its length", "": "its chunk"}
REUSE_EVENTS = ("positions reused", "pages copied")
OTHER_BUCKET = "continued in another KV bucket"


class Turn(NamedTuple):
  """A further turn after a completion, and the fields of its `SamplingParams`."""

  question: tuple[int, ...]
  sampling: dict[str, Any]


class Ask(NamedTuple):
  """The fields of a `Request`, visits since the previous one, tokens of a chunk (None: all), and
  the turn that follows the completion.

  Fields and not records: annotations are checked at random places, which must not happen while
  hypothesis draws.
  """

  request_id: str
  prompt: tuple[int, ...]
  sampling: dict[str, Any]
  seed: int
  group_id: str
  wait: int
  chunk_tokens: int | None
  then: Turn | None
  is_background: bool = False

  @property
  def request(self) -> Request:
    return Request(
      request_id=self.request_id,
      prompt=self.prompt,
      sampling=SamplingParams(**self.sampling),
      seed=self.seed,
      group_id=self.group_id,
    )


class Disturbance(NamedTuple):
  """A disturbance of the engine, `wait` visits after the previous one.

  `choice` selects the request, modulo their number; `steps` is how long pages are withheld or a
  cancelled request stays away. A restart takes the next context and the next steps per visit.
  """

  wait: int
  kind: str
  choice: int
  steps: int


class Plan(NamedTuple):
  """One schedule: everything that is drawn. `guesses` seeds a drafter, None has none; `table` is
  one of `TABLES`; `host_pages` is the pool's number of host pages."""

  context: int
  decode_steps_per_call: int
  guesses: int | None
  asks: tuple[Ask, ...]
  disturbances: tuple[Disturbance, ...]
  table: int = 0
  host_pages: int = 4096


DISTURBANCES = st.lists(
  st.builds(
    Disturbance,
    wait=st.integers(0, 5),
    # Cancelling ends what the others disturb, so it is rarer.
    kind=st.sampled_from(
      ["preempt", "withhold", "restart", "preempt", "withhold", "restart", "cancel"]
    ),
    choice=st.integers(0, 11),
    steps=st.integers(1, 8),
  ),
  min_size=6,
  max_size=20,
).map(tuple)


@st.composite
def plans(draw, contexts: tuple[int, ...], steps: tuple[int, ...]) -> Plan:
  """Groups of one to four; half of the prompts share a prefix with another. Where visits may have
  several steps, every other schedule has no row that limits a visit to one."""
  is_free = draw(st.booleans()) and len(steps) > 1
  asked_nothing = dict(stop=(), allowed_token_ranges=()) if is_free else {}
  sampling_of = SAMPLING.map(lambda fields: fields | asked_nothing)
  starts = [draw(tokens(3, 30)) for _ in range(2)]
  waits = st.integers(0, draw(st.sampled_from([0, 1, 4])))
  asleep = st.booleans() if draw(st.booleans()) else st.just(False)
  asks = []
  for group in range(draw(st.integers(2, 4))):
    start = draw(st.sampled_from([(), *starts]))
    prompt, sampling = start + draw(tokens(1, 12)), draw(sampling_of)
    members = draw(st.integers(1, 4))
    asks += [
      Ask(
        request_id=f"{group}-{member}",
        prompt=prompt,
        sampling=sampling,
        seed=draw(st.integers(0, 2**32 - 1)),
        group_id=f"group {group}" if members > 1 else "",
        wait=draw(waits),
        chunk_tokens=draw(st.none() | st.integers(1, 12)),
        then=draw(st.none() | st.builds(Turn, tokens(1, 4), sampling_of)),
        is_background=draw(asleep),
      )
      for member in range(members)
    ]
  return Plan(
    context=draw(st.sampled_from(contexts)),
    decode_steps_per_call=draw(st.sampled_from(steps)),
    guesses=draw(st.none() | st.integers(0, 2**32 - 1)),
    asks=tuple(draw(st.permutations(asks))),
    disturbances=draw(DISTURBANCES),
    table=draw(st.integers(0, len(TABLES) - 1)),
    host_pages=draw(st.sampled_from([4096, 0])),
  )


def within_visits(numerics, context: int, steps: int) -> Plan:
  """Returns a schedule that always runs: rows leave in the middle of visits, one by an id, one by
  its length, and one at the end of each chunk; then other engines continue."""
  first, seed = (5, 6, 7), 3
  answer = alone(numerics, first, SamplingParams(max_tokens=20), seed).tokens
  stop = next(place for place in range(4, 20) if answer[place] not in answer[:place])
  fields = dict(max_tokens=20, stop_token_ids=(answer[stop],))
  asks = [
    Ask("by an id", first, fields, seed, "", 0, None, None),
    Ask("by its length", first, dict(max_tokens=6), 4, "", 0, None, None),
    Ask("by chunks", (8, 9), dict(max_tokens=20), 5, "", 0, 7, None),
    Ask("to the end", (10,), dict(max_tokens=20), 6, "", 0, None, None),
  ]
  restart = Disturbance(wait=3, kind="restart", choice=0, steps=1)
  return Plan(context, steps, None, tuple(asks), (restart,))


def beside_sleepers(context: int, *, host_pages: int) -> Plan:
  """Returns a schedule that always runs: background requests fill the memory and the rows that a
  table permits, until foreground requests arrive."""
  asks = [
    Ask(f"sleeper {place}", (7, place), dict(max_tokens=40), place, "", 0, None, None, True)
    for place in range(8)
  ]
  asks += [
    Ask(f"front {place}", (9, place), dict(max_tokens=40), place, "", 4 - place, None, None)
    for place in range(3)
  ]
  return Plan(context, 1, None, tuple(asks), (), 1, host_pages)


NUMERICS = tiny_model.BACKENDS
STEPS = (3, 8, 1)  # Maximum steps of a visit.
# A second KV bucket where it costs one program, and visits of several steps where they cost one.
QUICK = {
  "f32": (
    ("chunks of 16", (1, 1), (64,), STEPS),
    ("chunks of 1 to 7", (2, 1), (64, 144), (1,)),
  ),
  "bf16": (
    ("chunks of 16", (2, 2), (64,), STEPS),
    ("chunks of 1 to 7", (1, 1), (64, 144), (1,)),
  ),
  "native f32": (
    ("small pages", (2, 2), (64,), STEPS),
    ("chunks of 1 to 7", (1, 1), (64, 144), (1,)),
  ),
  "native bf16": (
    ("chunks of 16", (1, 2), (64,), STEPS),
    ("chunks of 1 to 7", (2, 1), (64, 144), (1,)),
  ),
}
