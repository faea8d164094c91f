"""A model by name, ready to sample: shape, weights in compute dtype, numerics and tokenizer.

    "nano" | directory | Hub id -- load_model --> Model -- Engine(model) --> answers
"""

from __future__ import annotations

import dataclasses
import os
import pathlib

from seerjax import numerics as numerics_lib
from seerjax.models import (
  config as model_config,
  huggingface,
  parameters,
  tokenizer as tokenizer_lib,
)

# The model in the package.
NANO = pathlib.Path(__file__).parent / "nano"


@dataclasses.dataclass(frozen=True)
class Model:
  """What an engine samples from.

  Attributes:
    config: shape of the model.
    params: weights in compute dtype, as `parameters.compute_params` lays them out.
    numerics: what decides bits, with the slabs that the model asks for.
    tokenizer: between text and tokens; None for an engine that is given tokens alone.
  """

  config: model_config.TransformerConfig
  params: parameters.Params
  numerics: numerics_lib.NumericsConfig
  tokenizer: tokenizer_lib.Tokenizer | None = None


def directory_of(name_or_path: str | os.PathLike[str]) -> pathlib.Path:
  """Returns the directory of a model: "nano" is the one in the package.

  Raises:
    FileNotFoundError: if there is no such directory, or the Hub does not give it.
    ImportError: if a Hub id is given and `huggingface_hub` is not installed.
  """
  return NANO if name_or_path == "nano" else huggingface.resolve(name_or_path)


def load_model(
  name_or_path: str | os.PathLike[str] = "nano",
  numerics: numerics_lib.NumericsConfig | None = None,
) -> Model:
  """Returns a model with its weights, tokenizer and numerics.

  Args:
    name_or_path: "nano" (the model in the package), a Hugging Face directory, or a Hub id such as
      "Qwen/Qwen3-0.6B", which is downloaded into the Hub's cache.
    numerics: what decides bits; None is float32 by what runs here ("auto"), with as many slabs as
      the model allows.

  Raises:
    FileNotFoundError: if there is no such directory, or the Hub does not give it.
    ImportError: if a Hub id is given and `huggingface_hub` is not installed.
    ValueError: if the directory holds no model that we read, or slabs do not divide it.
  """
  if numerics is None:
    numerics = numerics_lib.NumericsConfig(reduction_shards=0)
  directory = directory_of(name_or_path)
  masters, config = huggingface.load(directory, numerics)
  numerics = model_config.numerics_for(config, numerics)
  return Model(
    config=config,
    params=parameters.compute_params(masters, numerics),
    numerics=numerics,
    tokenizer=tokenizer_lib.load(directory),
  )
