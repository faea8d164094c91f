"""A base and the adapters beside it, on one engine, and how the weights of each are replaced.

    directory --read, on any thread--> Loaded --put, between two requests--> other weights answer

Weights that are read are checked before anything stops for them. What runs is answered by those of
before; what waits, and what comes, by the new ones, whose fingerprint its answer names.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import pathlib
from typing import Any, NamedTuple

from seerjax.array_typing import PRNGKeyArray
from seerjax.engine.engine import Engine
from seerjax.engine.kv import values
from seerjax.models import (
  adapters as adapters_lib,
  gguf_file,
  huggingface,
  loading,
  lora,
  parameters,
  peft,
  tokenizer as tokenizer_lib,
)
from seerjax.serve import identity, sleeping
from seerjax.serve.scoring import Scorer
from seerjax.serve.served import Defaults, Served
from seerjax.sleep.contexts import Identity

NO_DEFAULTS = Defaults()


class Loaded(NamedTuple):
  """Weights that were read and are this family's.

  Attributes:
    name: whose they become.
    params: of the base, in compute dtype; None of an adapter.
    adapter: and its scale; None of the base.
    digest: of them.
  """

  name: str
  params: parameters.Params | None
  adapter: adapters_lib.Scaled | None
  digest: str


class Family:
  """A base, its adapters, and their engine.

  Attributes:
    models: what is served, by name; the base first.
  """

  def __init__(
    self,
    name: str,
    model: loading.Model,
    engine: Engine,
    *,
    key: PRNGKeyArray,
    adapters: Mapping[str, adapters_lib.Scaled] | None = None,
    defaults: Defaults = NO_DEFAULTS,
    created: int = 0,
  ):
    """Makes it.

    Args:
      name: of the base.
      model: as the engine runs it.
      engine: with these adapters; the engine's thread has it once that runs.
      key: the engine's sampling key.
      adapters: by name.
      defaults: where a request names nothing.
      created: seconds since 1970.
    """
    self._model, self._engine, self._key = model, engine, key
    self._adapters = dict(adapters or {})
    self._defaults = defaults
    self._digest = values.weights_digest(model.params)
    self._adapter_digests = {own: _digest(scaled) for own, scaled in self._adapters.items()}
    shared: dict[str, Any] = dict(engine=engine, defaults=defaults, created=created)
    base = Served(
      name=name, scorer=self._scorer(""), fingerprint=self._fingerprint(""), **shared
    )
    self.base = base
    self.models: dict[str, Served] = {name: base} | {
      own: Served(
        name=own,
        scorer=self._scorer(own),
        fingerprint=self._fingerprint(own),
        beside=base,
        **shared,
      )
      for own in self._adapters
    }

  def _params_of(self, adapter: str) -> parameters.Params:
    params = self._model.params
    return lora.attach(params, *self._adapters[adapter]) if adapter else params

  def _scorer(self, adapter: str) -> Scorer:
    model = dataclasses.replace(self._model, params=self._params_of(adapter))
    return Scorer(model, context=self._engine.config.max_context)

  def _fingerprint(self, adapter: str) -> str:
    weights = self._digest
    if adapter:
      weights = f"{weights}+{self._adapter_digests[adapter]}"
    return identity.fingerprint(
      self._model, self._key, defaults=self._defaults.in_force, weights=weights
    )

  @property
  def identity(self) -> Identity:
    """What contexts of the base depend on."""
    return sleeping.identity_of(self._model, self._digest)

  def read(self, name: str, directory: str) -> Loaded:
    """Reads the weights of a directory or GGUF file, to take the place of a model's.

    Args:
      name: whose place; an adapter's is taken by an adapter as PEFT writes it.
      directory: on this machine.

    Raises:
      FileNotFoundError: if a file is missing.
      ImportError: for a GGUF file, if the `gguf` package is not installed.
      NotImplementedError: for a GGUF file of a kind that is not read.
      ValueError: if they are not this family's, naming what differs.
    """
    path = pathlib.Path(directory)
    is_file = gguf_file.is_named(path) and path.is_file()
    if not path.is_dir() and not is_file:
      raise FileNotFoundError(
        f"got {directory!r}, which is no directory, expected one on the server's machine; write its"
        " whole path."
      )
    is_adapter = (path / peft.CONFIG_FILE).is_file()
    if name != self.base.name:
      if is_file or (not is_adapter and (path / huggingface.CONFIG_FILE).is_file()):
        raise ValueError(
          f"got the model {directory!r} for the adapter {name!r}, expected an adapter; name the"
          f" model {self.base.name!r}, or a directory with {peft.CONFIG_FILE}."
        )
      scaled = peft.load(path, self._model.config, self._model.numerics)
      adapters_lib.check(self._model.params, {name: scaled}, what="weights")
      return Loaded(name, None, scaled, _digest(scaled))
    if is_adapter:
      raise ValueError(
        f"got the adapter {directory!r} for the base {name!r}, expected a model; name one of the"
        f" adapters that are served ({', '.join(self._adapters) or 'there is none'})."
      )
    masters, config = huggingface.load(path, self._model.numerics)
    if config != self._model.config:
      raise ValueError(_difference(config, self._model.config))
    self._check_tokenizer(path)
    params = parameters.compute_params(masters, self._model.numerics)
    return Loaded(name, params, None, values.weights_digest(params))

  def _check_tokenizer(self, path: pathlib.Path) -> None:
    """Refuses words that are not those by which prompts were encoded."""
    if path.is_dir() and not (path / "tokenizer.json").is_file():  # Weights alone.
      return
    new, old = (
      identity.tokenizer_parts(one) for one in (tokenizer_lib.load(path), self.base.tokenizer)
    )
    for part in ("backend", "template", "special", "ends"):
      if new[part] != old[part]:
        raise ValueError(
          f"got another {'vocabulary' if part == 'backend' else part} in the tokenizer of {path},"
          " expected that of the model that is served; start a server of the directory."
        )

  def put(self, loaded: Loaded) -> Served:
    """Lets weights answer, on the engine's thread, while the engine has no request.

    Raises:
      ValueError: if they are not finite; then the old ones stay.
    """
    if loaded.params is not None:
      self._engine.set_params(loaded.params, self._engine.policy_version + 1)
      self._model = dataclasses.replace(self._model, params=loaded.params)
      self._digest = loaded.digest
      changed = [*self.models.values()]  # An adapter's answers are those of its base, too.
    else:
      assert loaded.adapter is not None
      adapters = {**self._adapters, loaded.name: loaded.adapter}
      self._engine.set_adapters(adapters)
      self._adapters = adapters
      self._adapter_digests[loaded.name] = loaded.digest
      changed = [self.models[loaded.name]]
    for served in changed:
      served.scorer.params = self._params_of(served.adapter)
      served.fingerprint = self._fingerprint(served.adapter)
    return self.models[loaded.name]


def _digest(scaled: adapters_lib.Scaled) -> str:
  return values.weights_digest(adapters_lib.parts(scaled))


def _difference(found: Any, expected: Any) -> str:
  """Returns a sentence about the first field in which two shapes of a model differ."""
  for field in dataclasses.fields(expected):
    got, should = getattr(found, field.name), getattr(expected, field.name)
    if got != should:
      break
  return (
    f"got a model with {field.name}={got}, expected {should}, as of the model that is served; start"
    " a server of the directory."
  )
