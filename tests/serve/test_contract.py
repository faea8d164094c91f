"""The contract over HTTP: a response does not depend on other clients' requests.

Clients concurrently send requests of every kind, streamed and whole, through OpenAI's own package;
some disconnect early. The engine is constantly disturbed (`serving_cases.Restless`). Every choice
is compared (text, tokens, both log-probabilities and those of alternatives) with itself alone in a
fresh server with another batch, other pages, row buckets and instances, in which an adapter's
engine holds no other adapter.
"""

from __future__ import annotations

import collections
import dataclasses

import openai
import pytest
import serving_cases as cases

# (model, backend); three blocks of each have their own sizes and requests.
SUBJECTS = (("tiny", "native"), ("nano", "native"), ("tiny", "tiled"), ("tiny", "native"))
BLOCKS = 3
FEW = (
  "answers", "streamed", "whole", "chats", "completions", "siblings", "paused", "preempted",
  "visits while clients wait", "drafted tokens", "masked rows",
  "of the base", "of an adapter", "steps of several adapters",
)  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["native", pytest.param("tiled", marks=pytest.mark.long)])
def test_no_neighbour_changes_a_bit(backend, seed, tell_events):
  of = cases.subject("tiny", backend, seed, 0)
  case = cases.draw(seed, 0, of=of, clients=16, each=2)
  events: collections.Counter[str] = collections.Counter()
  with cases.alone(case) as alone:
    cases.load(case, alone, events)
  tell_events(str(case.subject), events, FEW)


@pytest.mark.few(1)
@pytest.mark.thorough
@pytest.mark.parametrize("make", [cases.Seedless, cases.Neighbourly])
def test_a_server_that_mixes_requests_up_is_found_out(make, seed):
  # Twins. A single case may be unaffected, so there are several per model.
  of = cases.subject("tiny", "native", seed, 0)
  first = cases.draw(seed, 0, of=of, clients=16, each=2)
  found = ""
  with cases.alone(first) as alone:
    for number in range(4):
      case = dataclasses.replace(first, number=number)
      try:
        cases.load(case, alone, collections.Counter(), make)
      except (AssertionError, openai.APIError) as error:
        found = str(error)
        break
  signs = ["got Response"]
  if make is cases.Neighbourly:
    # A mask on the wrong row also gives a completion that the row's own mask forbids.
    signs += ["that it does not go on from", "that its grammar cannot continue"]
  assert any(sign in found for sign in signs), f"{make.__name__}: got {found!r}"


@pytest.mark.long
@pytest.mark.parametrize("block", range(len(SUBJECTS) * BLOCKS))
def test_sixty_four_clients_get_the_bits_of_each_alone(block, seed, tell_events):
  of = block // BLOCKS
  kind, backend = SUBJECTS[of]
  drawn = cases.subject(kind, backend, seed, of)
  case = cases.draw(seed, block, of=drawn, clients=64, each=2)
  events: collections.Counter[str] = collections.Counter()
  with cases.alone(case) as alone:
    count = cases.load(case, alone, events)
  assert count >= 150
  tell_events(f"block {block}, {case.subject}", events, cases.EVENTS)
