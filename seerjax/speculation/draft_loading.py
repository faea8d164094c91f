"""Loads a draft model by name and checks that it fits its target engine.

Draft and target must use the same token ids; their tokenizers are compared id by id. Embedding rows
beyond the tokenizer are padding, and models may differ in their number (Qwen: 151,936 and 152,064).
The draft's padding rows are dropped, so that it can neither read nor draft such ids.
"""

from __future__ import annotations

import dataclasses
import os

from seerjax.engine.engine import Engine
from seerjax.models import huggingface, loading, parameters, tokenizer as tokenizer_lib
from seerjax.models.loading import Model
from seerjax.models.tokenizer import Tokenizer
from seerjax.speculation import config as config_lib, statistics
from seerjax.speculation.draft_model import DraftModelConfig, ModelDrafter
from seerjax.speculation.draft_program import decoder_of

DEFAULT_CONFIG = DraftModelConfig()


def context_of(engine: Engine) -> int:
  """Returns the maximum positions of a sequence in an engine."""
  return min(engine.config.max_model_len, engine.model.max_model_len)


def load_draft(name_or_path: str | os.PathLike[str], engine: Engine) -> Model:
  """Loads a draft model for an engine, in the engine's numerics and with one slab.

  Args:
    name_or_path: "nano" (in the package), a Hugging Face directory, a GGUF file, or a Hub id.
    engine: the target engine.

  Raises:
    FileNotFoundError: if the directory does not exist, or the Hub does not provide it.
    ImportError: if a Hub id is given and `huggingface_hub` is not installed.
    ValueError: if the directory contains no supported model, or its ids or context do not match the
      engine's.
  """
  path = loading.path_of(name_or_path)
  config = huggingface.load_config(path)
  context = context_of(engine)
  numerics = decoder_of(engine.numerics, config, context).numerics
  masters, config = huggingface.load(path, numerics, allow_int8=True)
  tokenizer = tokenizer_lib.load(path)
  draft = Model(config, parameters.compute_params(masters, numerics), numerics, tokenizer)
  return fitted(draft, engine, name=str(name_or_path))


def fitted(draft: Model, engine: Engine, *, name: str = "") -> Model:
  """Returns a draft without padding rows in its embedding.

  Raises:
    ValueError: if its ids or its context do not match the engine's.
  """
  name = name or "a draft model"
  context = context_of(engine)
  if draft.config.max_model_len < context:
    raise ValueError(
      f"draft: got {name} of {draft.config.max_model_len} positions for an engine of {context},"
      " expected at least as many; lower EngineConfig.max_model_len to"
      f" {draft.config.max_model_len},"
      " or use another draft."
    )
  if draft.tokenizer is None or engine.tokenizer is None:
    size = engine.model.vocab_size
    if draft.config.vocab_size != size:
      raise ValueError(
        f"draft: got {name} of {draft.config.vocab_size} ids and an engine of {size}, without both"
        " tokenizers to compare, expected equal numbers; load both with their tokenizers, or take"
        " another draft."
      )
    return draft
  require_same_ids(draft.tokenizer, engine.tokenizer, name)
  size = min(draft.config.vocab_size, engine.tokenizer.vocab_size)
  if size == draft.config.vocab_size:
    return draft
  params = {**draft.params, "embed": draft.params["embed"][:size]}
  if "head" in params:
    params["head"] = params["head"][:, :size]
  return dataclasses.replace(
    draft, config=dataclasses.replace(draft.config, vocab_size=size), params=params
  )


def require_same_ids(draft: Tokenizer, target: Tokenizer, name: str) -> None:
  """Raises if a draft's token ids differ from the target's.

  Raises:
    ValueError: with the first id that differs.
  """
  theirs, ours = (
    {index: token for token, index in one.backend.get_vocab(with_added_tokens=True).items()}
    for one in (draft, target)
  )
  for index in range(max(*theirs, *ours) + 1):
    got, expected = theirs.get(index), ours.get(index)
    if got != expected:
      raise ValueError(
        f"draft: got {name}, whose id {index} is {got!r}, expected {expected!r}, as in the target's"
        " tokenizer; a draft needs the target's vocabulary: use one of the same family."
      )


def drafter_for(
  engine: Engine,
  name_or_path: str | os.PathLike[str],
  config: DraftModelConfig = DEFAULT_CONFIG,
  acceptance: statistics.Acceptance | None = None,
) -> ModelDrafter:
  """Returns a drafter for `Engine.drafter` by the name of a model; raises as `load_draft`.

  Args:
    engine: the target engine, which determines key and context.
    name_or_path: name of the draft model.
    config: draft settings.
    acceptance: collects statistics; a new record if None.
  """
  return ModelDrafter(
    load_draft(name_or_path, engine),
    context=context_of(engine),
    key=engine.key,
    config=config,
    acceptance=acceptance,
  )


def of_run(config: config_lib.SpeculationConfig, run: config_lib.DraftedRun) -> ModelDrafter:
  """Returns a run's draft-model drafter, by the name in its config.

  Raises:
    ValueError: if no name is set; otherwise as `load_draft`.
  """
  if not config.draft_model:
    raise ValueError(
      "SpeculationConfig.draft_model: got '', expected a draft model for the drafter of this name;"
      " write --config.speculation.draft_model=MODEL."
    )
  return drafter_for(run.engine, config.draft_model, config.draft, run.acceptance)
