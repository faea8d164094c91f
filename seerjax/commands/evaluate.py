r"""Evaluates a model directory on a task: accuracy, mean reward, pass@k, with their errors.

    seerjax evaluate --config.model=runs/grpo/model

  another task:    --config.task=gsm8k --config.task_path=DIRECTORY
  pass@k:          --config.evaluation.num_samples=8 --config.evaluation.pass_at="(1, 4)" \
                     --config.evaluation.temperature=1
  further sets:    --config.evaluation.sets.math=math=DIRECTORY

A run's evaluations give the same numbers for the same weights. The numbers are also written to
--workdir/evaluation.json; nano takes a minute on two cores.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib

from absl import flags, logging

from seerjax import metrics
from seerjax.commands import flags as flags_lib
from seerjax.run import command_line, evaluating
from seerjax.run.evaluating import EvaluateConfig


def main(argv: list[str]) -> None:
  logging.set_verbosity(logging.WARNING)
  args = flags.FLAGS
  with command_line.refusals():
    command_line.check_arguments(argv)
    config = flags_lib.from_flags(EvaluateConfig, args.config)
    found = evaluating.evaluate_model(config, log=functools.partial(print, flush=True))
    path = pathlib.Path(args.workdir) / "evaluation.json"
    metrics.write_summary(path, {"config": dataclasses.asdict(config), **found})
  print(f"numbers  {path}")


def define_flags() -> EvaluateConfig:
  """Defines the flags of the command."""
  return flags_lib.define_flags(EvaluateConfig(), "runs/evaluate")
