"""Samples the requests of a discovery; completions in the journal are not sampled again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from seerjax.discovery import attempts as attempts_lib
from seerjax.discovery.attempts import Generate
from seerjax.discovery.config import DiscoverConfig
from seerjax.engine import engine as engine_lib
from seerjax.rollout import divided, groups, journal as journal_lib, policy_loading
from seerjax.run import progress as progress_lib
from seerjax.types import Completion, Request, Rollout


def sampler(
  config: DiscoverConfig,
  engine: engine_lib.Engine,
  journal: journal_lib.Journal | None,
  progress: progress_lib.Progress,
) -> Generate:
  """Returns a sampling function; the completions of a language model are journalled."""
  policy = policy_loading.load(config.scheduler)

  def generate(requests: Sequence[Request]) -> Iterator[Completion]:
    with progress.phase(
      "sampling", total=len(requests), num_tokens=lambda: engine.counters.sampled_tokens
    ) as phase:
      for completion in sampled(requests):
        phase.num_finished += 1
        yield completion

  def sampled(requests: Sequence[Request]) -> Iterator[Completion]:
    if journal is None:
      yield from groups.whole(divided.DividedRollout(engine, policy).run(requests))
      return
    missing: dict[str, Request] = {}
    for request in requests:
      entry = journal.lookup(*groups.place_of(request.request_id))
      if entry is None:
        missing[request.request_id] = request
      else:
        yield entry.rollout.completion
    asked = list(missing.values())
    answered = divided.resumed(engine, policy, journal, asked).run(asked)
    for completion in groups.whole(answered):
      rollout = Rollout(
        request=missing[completion.request_id], completion=completion, verdict=attempts_lib.UNJUDGED
      )
      journal.append(*groups.place_of(completion.request_id), rollout)
      yield completion

  return generate
