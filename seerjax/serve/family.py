"""A base model and its adapters on one engine; replaces their weights while serving.

    directory --read, on any thread--> Loaded --put, between two requests--> other weights answer

New weights are checked before serving is interrupted. Requests in progress finish on the old
weights; queued and new requests use the new ones, and their response has the new fingerprint.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import pathlib
from typing import Any, NamedTuple

from seerjax.array_typing import PRNGKeyArray
from seerjax.engine.engine import Engine
from seerjax.kv import values
from seerjax.models import (
  adapters as adapters_lib,
  gguf_file,
  huggingface,
  loading,
  parameters,
  peft,
  tokenizer as tokenizer_lib,
)
from seerjax.serve import identity, sleeping
from seerjax.serve.served import Defaults, Served
from seerjax.sleep.contexts import Identity

NO_DEFAULTS = Defaults()


class Loaded(NamedTuple):
  """Weights that were read and match the family.

  Attributes:
    name: name of the model that they are for.
    params: parameters of the base in the compute dtype; None for an adapter.
    adapter: an adapter with its scale; None for the base.
    digest: digest of the weights.
  """

  name: str
  params: parameters.Params | None
  adapter: adapters_lib.Scaled | None
  digest: str


class Family:
  """A base model, its adapters, and their engine.

  Attributes:
    models: served models by name, the base first.
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
    """Initialises the family.

    Args:
      name: name of the base.
      model: the base, as the engine runs it.
      engine: engine with these adapters; only the engine thread may use it once that thread runs.
      key: sampling key of the engine.
      adapters: adapters by name.
      defaults: used where a request sets no value.
      created: seconds since 1970.
    """
    self._model, self._engine, self._key = model, engine, key
    self._adapters = dict(adapters or {})
    self._defaults = defaults
    self._digest = values.weights_digest(model.params)
    self._adapter_digests = {own: _digest(scaled) for own, scaled in self._adapters.items()}
    shared: dict[str, Any] = dict(engine=engine, defaults=defaults, created=created)
    base = Served(name=name, fingerprint=self._fingerprint(""), **shared)
    self.base = base
    self.models: dict[str, Served] = {name: base} | {
      own: Served(
        name=own,
        fingerprint=self._fingerprint(own),
        parent=base,
        **shared,
      )
      for own in self._adapters
    }

  def _fingerprint(self, adapter: str) -> str:
    weights = self._digest
    if adapter:
      weights = f"{weights}+{self._adapter_digests[adapter]}"
    return identity.fingerprint(
      self._model, self._key, defaults=self._defaults.in_force, weights=weights
    )

  @property
  def identity(self) -> Identity:
    """Identity of the base, on which its contexts depend."""
    return sleeping.identity_of(self._model, self._digest)

  def read(self, name: str, directory: str) -> Loaded:
    """Reads replacement weights of a model from a directory or a GGUF file.

    Args:
      name: name of the model; an adapter is replaced by an adapter in PEFT's format.
      directory: path on the server's machine.

    Raises:
      FileNotFoundError: if a file is missing.
      ImportError: for a GGUF file, if the `gguf` package is not installed.
      NotImplementedError: for an unsupported kind of GGUF file.
      ValueError: if the weights do not fit the family; names the difference.
    """
    path = pathlib.Path(directory)
    is_file = gguf_file.is_named(path) and path.is_file()
    if not path.is_dir() and not is_file:
      raise FileNotFoundError(
        f"got {directory!r}, which is not a directory, expected one on the server's machine; write"
        " the absolute path."
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
        f" served adapters ({', '.join(self._adapters) or 'there are none'})."
      )
    masters, config = huggingface.load(path, self._model.numerics)
    if config != self._model.config:
      raise ValueError(_difference(config, self._model.config))
    self._check_tokenizer(path)
    params = parameters.compute_params(masters, self._model.numerics)
    return Loaded(name, params, None, values.weights_digest(params))

  def _check_tokenizer(self, path: pathlib.Path) -> None:
    """Refuses a tokenizer that encodes prompts differently."""
    if path.is_dir() and not (path / "tokenizer.json").is_file():  # Only weights.
      return
    new, old = (
      identity.tokenizer_parts(one) for one in (tokenizer_lib.load(path), self.base.tokenizer)
    )
    for part in ("backend", "template", "special", "ends"):
      if new[part] != old[part]:
        raise ValueError(
          f"got another {'vocabulary' if part == 'backend' else part} in the tokenizer of {path},"
          " expected that of the served model; start a server for the directory."
        )

  def put(self, loaded: Loaded) -> Served:
    """Installs weights. Call it on the engine thread while the engine has no requests.

    Raises:
      ValueError: if the weights are not finite; the old weights stay in place.
    """
    if loaded.params is not None:
      self._engine.update_weights(loaded.params, self._engine.policy_version + 1)
      self._model = dataclasses.replace(self._model, params=loaded.params)
      self._digest = loaded.digest
      changed = [*self.models.values()]  # The base's weights affect its adapters, too.
    else:
      assert loaded.adapter is not None
      adapters = {**self._adapters, loaded.name: loaded.adapter}
      self._engine.set_adapters(adapters)
      self._adapters = adapters
      self._adapter_digests[loaded.name] = loaded.digest
      changed = [self.models[loaded.name]]
    for served in changed:
      served.fingerprint = self._fingerprint(served.adapter)
    return self.models[loaded.name]


def _digest(scaled: adapters_lib.Scaled) -> str:
  return values.weights_digest(adapters_lib.parts(scaled))


def _difference(found: Any, expected: Any) -> str:
  """Returns a message about the first field in which two model shapes differ."""
  for field in dataclasses.fields(expected):
    got, should = getattr(found, field.name), getattr(expected, field.name)
    if got != should:
      break
  return (
    f"got a model with {field.name}={got}, expected {should}, as in the served model; start a"
    " server for the directory."
  )
