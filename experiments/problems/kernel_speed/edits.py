"""The language: sentences that change fields."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.problems.kernel_speed.rules import Field
from seerjax.discovery.environment import Artefact


class FieldEdits:
  """Up to four pairs (field, choice); a choice beyond a field's last one wraps around.

  Id 0 is the stop token, followed by the fields and eight choices.
  """

  NUM_EDITS = 4
  NUM_CHOICES = 8

  def __init__(self, fields: Sequence[Field]):
    self._fields = tuple(fields)
    self._choice = 1 + len(self._fields)

  @property
  def vocab_size(self) -> int:
    return -(-(self._choice + self.NUM_CHOICES) // 8) * 8

  @property
  def allowed(self) -> tuple[tuple[int, int], ...]:
    choice = (self._choice, self._choice + self.NUM_CHOICES)
    # A sentence has to change something, so the first edit may not be the stop token.
    return ((1, self._choice), choice) + ((0, self._choice), choice) * (self.NUM_EDITS - 1)

  @property
  def stop_token(self) -> int | None:
    return 0

  def prompt(self, artefact: Artefact) -> tuple[int, ...]:
    levels = (field.choices.index(artefact[field.name]) for field in self._fields)
    return (0, *(self._choice + level for level in levels))

  def apply(self, artefact: Artefact, tokens: Sequence[int], seed: int) -> Artefact:
    edited = dict(artefact)
    kept = list(tokens)
    if len(kept) < len(self.allowed) and len(kept) % 2 and kept[-1] == self.stop_token:
      kept.pop()
    if not kept or len(kept) % 2 or (len(kept) == len(tokens) != len(self.allowed)):
      raise ValueError(
        f"FieldEdits.apply: got {len(tokens)} tokens, expected {len(self.allowed)}, or pairs of a"
        " field and a choice and then the stop token 0; finish the sentence."
      )
    for place, (token, (first, past)) in enumerate(zip(kept, self.allowed)):
      # The stop token is only allowed at the end, where it has been removed.
      least = max(first, 1)
      if not least <= token < past:
        raise ValueError(
          f"FieldEdits.apply: got token {token} at place {place}, expected {least} to {past - 1};"
          " see `allowed`."
        )
    for name, choice in zip(kept[::2], kept[1::2]):
      field = self._fields[name - 1]
      edited[field.name] = field.choices[(choice - self._choice) % len(field.choices)]
    return edited
