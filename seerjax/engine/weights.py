"""The weights and adapters of an engine, on its mesh."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from seerjax.engine.runner import Runner
from seerjax.kv.memory import Memory
from seerjax.models import adapters as adapters_lib, parameters


class Weights:
  """The weights of one engine.

  Attributes:
    params: the weights with the forms of the adapters, as the step takes them; only the latter
      after `drop`.
    adapters: by name, f32 masters and scale of each adapter.
    index_of: by name, the index of a row's adapter; 0 is the base weights, "".
  """

  params: parameters.Params
  adapters: dict[str, Any]
  index_of: Mapping[str, int]

  def __init__(self, runner: Runner, params: parameters.Params, adapters: Mapping[str, Any]):
    self._runner = runner
    self.params = runner.place_params(params, what="Engine.params")
    self.set_adapters(adapters, what="Engine.adapters")

  @property
  def base(self) -> parameters.Params:
    """The weights without adapters."""
    return {name: part for name, part in self.params.items() if name != "adapters"}

  def replace(self, params: parameters.Params, *, what: str) -> None:
    """Replaces the weights and keeps the adapters; see `Engine.update_weights`."""
    placed = self._runner.place_params(params, what=what)
    if self.adapters:
      adapters_lib.check(placed, {}, what=what)
      placed["adapters"] = self.params["adapters"]
    self.params = placed

  def drop(self) -> None:
    """Frees the weights and keeps the adapters."""
    self.params = {name: part for name, part in self.params.items() if name == "adapters"}

  def set_adapters(self, adapters: Mapping[str, Any], *, what: str) -> None:
    """Replaces the adapters; see `Engine.set_adapters`."""
    base, chosen = self.base, adapters_lib.NONE
    if adapters:
      chosen = self._runner.place_adapters(base, adapters, what=what)
      base["adapters"] = chosen.forms
    self.params, self.adapters, self.index_of = base, dict(adapters), chosen.index_of

  def publish(self, memory: Memory, policy_version: int) -> None:
    """Sets the weights identity under which keys and values are written from now on."""
    parts = {name: adapters_lib.parts(scaled) for name, scaled in self.adapters.items()}
    memory.publish(self.base, policy_version, parts)
