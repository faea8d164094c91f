"""Writes a saved step of a run as a model directory, or its adapters as PEFT reads them.

Claim: none; the latest step's directory has the bytes that the run itself exported.
Command: bash launch/local.sh experiments.export --run=runs/grpo --step=10 --out=runs/step-10
  adapters alone:  --adapter (of a run with --config.lora_rank)
Hardware: 2 CPU cores, seconds for nano; memory as for the run's masters and moments.
"""

from __future__ import annotations

import json
import pathlib

from absl import app, flags, logging

from experiments import replay
from seerjax import checkpoint, numerics as numerics_lib, parallel
from seerjax.models import huggingface, peft
from seerjax.run import command_line, policy as policy_lib, programs as programs_lib


def export(
  run: pathlib.Path,
  step: int | None,
  out: pathlib.Path,
  *,
  is_adapter: bool = False,
  dtype: str = "bfloat16",
  overwrite: bool = False,
) -> int:
  """Writes a step that a run saved; returns which.

  Args:
    run: the run's directory.
    step: one that is saved; None is the latest.
    out: is made. A model directory with the run's tokenizer, adapters merged.
    is_adapter: write the adapters instead, in float32.
    dtype: of a model's tensors, "bfloat16" or "float32".
    overwrite: replace what an export wrote there before.

  Raises:
    FileExistsError: if `out` holds something.
    ValueError: if there is no such run or step, or it has no adapters.
  """
  path = run / "config.json"
  if path.is_file() and "task" not in json.loads(path.read_text()):
    raise ValueError(
      f"--run: got {run}, a run of discovery, expected one of experiments.grpo; of discovery the"
      " weights may go, and what it found is best.json."
    )
  config = replay.read_config(run)
  if is_adapter and not config.lora_rank:
    raise ValueError(
      f"--adapter: got {run}, which trained all weights, expected a run with lora_rank; leave the"
      " flag out."
    )
  policy = policy_lib.load_policy(config.model, config.numerics)
  restored = checkpoint.restore(
    run / "checkpoints",
    programs_lib.abstract_state(config, policy, mesh=parallel.make_mesh()),
    fingerprint=numerics_lib.fingerprint(config.numerics, config.trainer.remat),
    step=step,
    accept_new_numerics=True,  # Weights are what they are.
  )
  if is_adapter:
    peft.save(
      out,
      restored.state.params,
      policy.model,
      scale=config.lora_alpha / config.lora_rank,
      base=config.model,
      overwrite=overwrite,
    )
  else:
    huggingface.save(
      out,
      policy_lib.exported_weights(config.weights, policy, restored.state.params),
      policy.model,
      dtype=dtype,
      tokenizer=policy.tokenizer,
      overwrite=overwrite,
    )
  return restored.step


def main(argv: list[str]) -> None:
  logging.set_verbosity(logging.WARNING)  # Orbax tells of every file.
  args = flags.FLAGS
  with command_line.refusals():
    command_line.check_arguments(argv)
    if not args.out:
      raise ValueError("--out: got no path, expected a directory to make; name one.")
    step = export(
      pathlib.Path(args.run),
      args.step,
      pathlib.Path(args.out),
      is_adapter=args.adapter,
      dtype=args.dtype,
      overwrite=args.overwrite,
    )
  print(f"step {step} of {args.run} is in {args.out}")


if __name__ == "__main__":
  flags.DEFINE_string("run", "runs/grpo", "A run's directory.")
  flags.DEFINE_integer("step", None, "One that was saved; the latest if not given.")
  flags.DEFINE_string("out", "", "The directory that is made.")
  flags.DEFINE_bool("adapter", False, "Write the adapters alone, as PEFT reads them.")
  flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float32"], "Of the model's tensors.")
  flags.DEFINE_bool("overwrite", False, "Replace what an export wrote there before.")
  app.run(main)
