"""Creates the starts of a discovery's groups, and adds attempts to the archive."""

from __future__ import annotations

from seerjax.discovery import (
  archive as archive_lib,
  environment as environment_lib,
)
from seerjax.discovery.attempts import Sampled
from seerjax.discovery.config import DiscoverConfig
from seerjax.discovery.environment import Environment
from seerjax.rollout import groups


def first_archive(config: DiscoverConfig, environment: Environment) -> archive_lib.Archive:
  """Returns an archive with one start per group.

  Raises:
    ValueError: if a start is invalid, which is a bug of the environment.
  """
  seeds = [seed_of(config, environment, place) for place in range(config.prompts_per_step)]
  return archive_lib.start(
    seeds, keep_children=config.search.keep_children, capacity=config.search.capacity
  )


def replanted(
  config: DiscoverConfig, environment: Environment, archive: archive_lib.Archive, step: int
) -> archive_lib.Archive:
  """Returns the archive with islands that are stuck after a step replaced by fresh starts."""
  search = config.search
  for root in archive_lib.stuck_roots(
    archive, step, islands=search.islands, patience=search.patience
  ):
    seed = seed_of(config, environment, archive.roots.index(root), step + 1)
    archive = archive_lib.replant(archive, root, seed, step=step)
  return archive


def seed_of(
  config: DiscoverConfig, environment: Environment, place: int, step: int = 0
) -> archive_lib.Child:
  """Returns the start of a group's tree that grows from the given step on.

  Raises:
    ValueError: if it is invalid, which is a bug of the environment.
  """
  artefact = environment_lib.started(environment, groups.request_seed(config.seed, -3, place, step))
  score = environment_lib.verified(environment, artefact)
  if not score.is_valid:
    raise ValueError(
      f"{environment.name}: got an invalid start ({score.reason}), expected a valid one; fix its"
      " `start`, and try `seerjax check`."
    )
  return archive_lib.Child(
    artefact=artefact, value=environment_lib.signed(environment, score.value), reward=score.reward
  )


def archived(
  environment: Environment, archive: archive_lib.Archive, sampled: Sampled, step: int
) -> archive_lib.Archive:
  """Returns the archive after a step's attempts."""
  expansions = [
    (
      start,
      [
        archive_lib.Child(
          artefact=attempt.artefact,
          value=environment_lib.signed(environment, attempt.score.value),
          reward=attempt.score.reward,
          tokens=sequences[-1].completion.text or sequences[-1].completion.tokens,
          printed=attempt.message,
        )
        for sequences, attempt in zip(group, attempts, strict=True)
        if attempt.score.is_valid
      ],
    )
    for start, group, attempts in zip(
      sampled.starts, sampled.sequences, sampled.attempts, strict=True
    )
  ]
  return archive_lib.record_step(archive, expansions, step=step)
