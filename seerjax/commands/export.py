"""Writes a saved step of a run, or a model, as a model directory, a GGUF file or adapters.

    seerjax export --run=runs/grpo --step=10 --out=runs/step-10

  adapters alone:  --adapter (of a run with --config.lora_rank), in PEFT's format
  for llama.cpp:   --gguf=Q8_0 --out=step-10.gguf, with tokenizer and chat template
  another model:   --model=MODEL.gguf --dtype=float32 --out=DIR (or a directory and --gguf)

For the latest step the directory has the same bytes as the run's own export. It takes memory for
the run's masters and moments, or for the model.
"""

from __future__ import annotations

import json
import pathlib
from typing import NamedTuple

from absl import flags, logging

from seerjax import checkpoint, numerics as numerics_lib, parallel
from seerjax.commands import replay
from seerjax.models import (
  config as model_config,
  gguf_tokenizer,
  gguf_write,
  huggingface,
  loading,
  parameters,
  peft,
  tokenizer as tokenizer_lib,
)
from seerjax.run import command_line, policy as policy_lib
from seerjax.run.config import RunConfig
from seerjax.trainer import optimizer as optimizer_lib


class Target(NamedTuple):
  """Output format and location.

  Attributes:
    out: the path to create: a directory, or a GGUF file if `gguf` is set.
    dtype: dtype of a directory's tensors, "bfloat16" or "float32".
    gguf: type of a GGUF file's matrices, of `gguf_write.KINDS`; "" for a directory.
    pre: the llama.cpp pre-tokenizer to use if none splits text as this tokenizer does.
    overwrite: whether to replace the output of an earlier export.
  """

  out: pathlib.Path
  dtype: str = "bfloat16"
  gguf: str = ""
  pre: str = ""
  overwrite: bool = False


def write(
  target: Target,
  params: parameters.Params,
  config: model_config.TransformerConfig,
  tokenizer: tokenizer_lib.Tokenizer | None,
) -> str:
  """Writes a model; returns a readable description of the output.

  Raises:
    FileExistsError: if `target.out` exists and is not empty.
    ValueError: naming what the format cannot represent.
  """
  if not target.gguf:
    huggingface.save(
      target.out,
      params,
      config,
      dtype=target.dtype,
      tokenizer=tokenizer,
      overwrite=target.overwrite,
    )
    return f"tensors in {target.dtype}"
  written = gguf_write.save(
    target.out,
    params,
    config,
    kind=target.gguf,
    tokenizer=tokenizer,
    pre=target.pre,
    overwrite=target.overwrite,
  )
  return gguf_write.summary(written)


def export_model(model: str, target: Target) -> str:
  """Exports a model by name, directory or GGUF file; returns a readable description of the output.

  Raises:
    FileExistsError: if `target.out` exists and is not empty.
    FileNotFoundError: if there is no such model.
    ValueError: naming an error in the model's files, or what the format cannot represent.
  """
  source = loading.path_of(model)
  params, config = huggingface.load(source, numerics_lib.NumericsConfig())
  return write(target, params, config, tokenizer_lib.load(source))


def restored_step(
  run: pathlib.Path, step: int | None, config: RunConfig, policy: policy_lib.Policy
) -> checkpoint.Restored:
  """Restores a saved step of a run, the latest if `step` is None, under any numerics."""
  optimizer = optimizer_lib.make_optimizer(config.optimizer)
  return checkpoint.restore(
    run / "checkpoints",
    policy_lib.abstract_state(config.weights, policy, optimizer, parallel.make_mesh()),
    fingerprint=numerics_lib.fingerprint(config.numerics, config.trainer.remat),
    step=step,
    accept_new_numerics=True,  # Exported weights do not depend on the numerics.
  )


def export(
  run: pathlib.Path, step: int | None, target: Target, *, is_adapter: bool = False
) -> tuple[int, str]:
  """Exports a saved step of a run; returns (step, readable description of the output).

  Args:
    run: the run's directory.
    step: a saved step; None is the latest.
    target: output of the model, with the run's tokenizer and merged adapters.
    is_adapter: write the adapters instead, in float32.

  Raises:
    FileExistsError: if `target.out` exists and is not empty.
    ValueError: if there is no such run or step, or it has no adapters.
  """
  path = run / "config.json"
  if path.is_file() and "task" not in json.loads(path.read_text()):
    raise ValueError(
      f"--run: got {run}, a run of discovery, expected one of `train`; the result of"
      " discovery is best.json, and its weights need not be kept."
    )
  config = replay.read_config(run)
  if is_adapter and not config.lora_rank:
    raise ValueError(
      f"--adapter: got {run}, which trained all weights, expected a run with lora_rank; leave the"
      " flag out."
    )
  policy = policy_lib.load_policy(config.model, config.numerics)
  restored = restored_step(run, step, config, policy)
  if is_adapter:
    peft.save(
      target.out,
      restored.state.params,
      policy.model,
      scale=config.lora_alpha / config.lora_rank,
      base=config.model,
      overwrite=target.overwrite,
    )
    return restored.step, "adapters in float32"
  weights = policy_lib.exported_weights(config.weights, policy, restored.state.params)
  return restored.step, write(target, weights, policy.model, policy.tokenizer)


def main(argv: list[str]) -> None:
  logging.set_verbosity(logging.WARNING)  # Orbax logs every file.
  args = flags.FLAGS
  with command_line.refusals():
    command_line.check_arguments(argv)
    if not args.out:
      raise ValueError("--out: got no path, expected a directory or GGUF file to make; name one.")
    target = Target(pathlib.Path(args.out), args.dtype, args.gguf, args.gguf_pre, args.overwrite)
    for flag, is_beside, other in (
      ("--adapter", args.adapter and args.gguf, "--gguf"),
      ("--adapter", args.adapter and args.model, "--model"),
      ("--step", args.step is not None and args.model, "--model"),
      ("--gguf_pre", args.gguf_pre and not args.gguf, "no --gguf"),
    ):
      if is_beside:
        raise ValueError(f"{flag}: got it with {other}, where it means nothing; leave one out.")
    if args.model:
      what, written = args.model, export_model(args.model, target)
    else:
      step, written = export(pathlib.Path(args.run), args.step, target, is_adapter=args.adapter)
      what = f"step {step} of {args.run}"
  print(f"{what} is in {args.out}\n{written}")


def define_flags() -> None:
  """Defines the flags of the command."""
  flags.DEFINE_string("run", "runs/grpo", "Run directory.")
  flags.DEFINE_integer("step", None, "Saved step to export; the latest by default.")
  flags.DEFINE_string("model", "", "Model name, directory or GGUF file to export instead of a run.")
  flags.DEFINE_string("out", "", "Output directory, or output file with --gguf.")
  flags.DEFINE_bool("adapter", False, "Whether to write only the adapters, in PEFT's format.")
  flags.DEFINE_enum(
    "dtype", "bfloat16", ["bfloat16", "float32"], "Data type of the tensors in a directory."
  )
  flags.DEFINE_enum(
    "gguf", "", ["", *gguf_write.KINDS], "Write a GGUF file with matrices of this type."
  )
  flags.DEFINE_enum(
    "gguf_pre",
    "",
    ["", *gguf_tokenizer.PRE_TOKENIZERS],
    "Pre-tokenizer for llama.cpp, if it has no equivalent of the model's own.",
  )
  flags.DEFINE_bool("overwrite", False, "Whether to replace an earlier export there.")
