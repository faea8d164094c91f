"""Loads a model by name: shape, weights in compute dtype, numerics and tokenizer.

a name in `SHIPPED` | directory | GGUF file | Hub id -- load_model --> Model -- Engine(model)
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import types

from seerjax import fields, numerics as numerics_lib
from seerjax.models import (
  config as model_config,
  decoder as decoder_lib,
  huggingface,
  parameters,
  tokenizer as tokenizer_lib,
)

# The models in the package: nano, its draft model, and a model trained for sleep-time compute.
NANO = pathlib.Path(__file__).parent / "nano"
NANO_DRAFT = pathlib.Path(__file__).parent / "nano_draft"
NANO_MOE = pathlib.Path(__file__).parent / "nano_moe"
NANO_SLEEP = pathlib.Path(__file__).parent / "nano_sleep"
SHIPPED = types.MappingProxyType(
  {"nano": NANO, "nano-draft": NANO_DRAFT, "nano-moe": NANO_MOE, "nano-sleep": NANO_SLEEP}
)

# Our shapes without shipped weights, with the arguments of the command that trains them.
RECIPES = types.MappingProxyType(
  {
    "nano-10m": "--preset=nano-10m --num_tokens=10000000 --learning_rate=1.5e-3",
    "nano-gpu": "--preset=nano-gpu",
  }
)


@dataclasses.dataclass(frozen=True)
class Model:
  """A model, ready for an engine.

  Attributes:
    config: shape of the model.
    params: weights in compute dtype, in the layout of `parameters.compute_params`.
    numerics: the numerics configuration; `load_model` leaves nothing open.
    tokenizer: the tokenizer; None for an engine that is only given token ids.
    name: the argument of `load_model`; "" for weights from elsewhere.
  """

  config: model_config.TransformerConfig
  params: parameters.Params
  numerics: numerics_lib.NumericsConfig
  tokenizer: tokenizer_lib.Tokenizer | None = None
  name: str = ""

  @functools.cached_property
  def decoder(self) -> decoder_lib.Decoder:
    """The decisions for the model on this machine."""
    return decoder_lib.decide(self.config, self.numerics)


def path_of(name_or_path: str | os.PathLike[str]) -> pathlib.Path:
  """Returns the directory or GGUF file of a model; those of `SHIPPED` are in the package.

  Raises:
    FileNotFoundError: if there is no such directory or file, the Hub does not have it, or the name
      is one of our shapes without shipped weights; the message has their recipe then.
    ImportError: if a Hub id is given and `huggingface_hub` is not installed.
  """
  name = str(name_or_path)
  if name in SHIPPED:
    return SHIPPED[name]
  if name in RECIPES and not pathlib.Path(name).is_dir():
    raise FileNotFoundError(
      f"load: got {name!r}, a preset without shipped weights, expected a model directory; create it"
      f" with `bash launch/local.sh experiments.learning.pretrain_nano {RECIPES[name]}"
      f" --workdir=runs/{name}`, and pass runs/{name}/model."
    )
  return huggingface.resolve(name_or_path)


def load_masters(
  path: str | os.PathLike[str], numerics: numerics_lib.NumericsConfig, family: str = ""
) -> tuple[parameters.Params, decoder_lib.Decoder]:
  """Returns the f32 master weights of a directory or file, and the model as it was decided.

  Numerics that cannot run here are refused before any weight is read. Raises as `load_model`.
  """
  decoder = decoder_lib.decide(huggingface.load_config(path, family), numerics)
  masters, _ = huggingface.load(path, decoder.numerics, family=family)
  return masters, decoder


@fields.checked
def load_model(
  name_or_path: str | os.PathLike[str] = "nano",
  numerics: numerics_lib.NumericsConfig | None = None,
  *,
  family: str = "",
) -> Model:
  """Returns a model with its weights, tokenizer and numerics.

  Args:
    name_or_path: "nano", "nano-moe" or "nano-sleep" (in the package), a Hugging Face directory, a
      GGUF file (the first one if there are several), or a Hub id such as "Qwen/Qwen3-0.6B", which
      is downloaded into the Hub's cache.
    numerics: the numerics configuration; None is float32 with the backend for this machine
      ("auto") and the largest number of slabs that the model allows.
    family: "my_module:FAMILY" for a directory of a family outside this package
      (`models.families.Family`); "" takes the `model_type` of config.json.

  Raises:
    FileNotFoundError: if there is no such directory or file, or the Hub does not have it.
    ImportError: if a Hub id is given and `huggingface_hub` is not installed, or a GGUF file and
      `gguf` is not.
    NotImplementedError: for a GGUF file with an unsupported architecture, kind or pre-tokenizer.
    ValueError: if the directory or file holds no supported model, or slabs do not divide it.
  """
  if numerics is None:
    numerics = numerics_lib.NumericsConfig()
  path = path_of(name_or_path)
  masters, decoder = load_masters(path, numerics, family)
  return Model(
    config=decoder.shape,
    params=parameters.compute_params(masters, decoder.numerics),
    numerics=decoder.numerics,
    tokenizer=tokenizer_lib.load(path),
    name=str(name_or_path),
  )
