"""Distils a draft model from its target's completions, and writes it in INT8.

Claim: with 0.14 M parameters, 5 million tokens of nano's completions (half an hour on two CPU
cores) suffice to draft more than one accepted token per step. `nano-draft`, which this package
ships, was made by the command below; its card (seerjax/models/nano_draft/README.md) has the
numbers.
Command: bash launch/local.sh experiments.distill_draft --workdir=runs/nano_draft
Hardware: 2 CPU cores, about 45 minutes in all. Results: the model's card

  target -- completions of train problems, temperature 1 -->   answers.npz
  target -- likely tokens at each position -->                 likely.npz
  draft  -- trained on both (seerjax.trainer.distill) -->      model/, INT8

Each part is kept in --workdir and reused; training resumes from its last checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
import itertools
import pathlib
import time
from typing import Any

from absl import app, flags
import jax
import numpy as np

from seerjax import checkpoint, numerics as numerics_lib
from seerjax.engine.engine import Engine, EngineConfig
from seerjax.models import (
  config as model_config,
  huggingface,
  loading,
  parameters,
  presets,
  tokenizer as tokenizer_lib,
)
from seerjax.run import command_line, presets as run_presets
from seerjax.tasks import countdown, word_problems
from seerjax.tasks.draws import Draws
from seerjax.trainer import distill
from seerjax.types import Problem, Request, SamplingParams

COUNTDOWN_RATE = 0.15  # As in nano's corpus.
REQUESTS_AT_ONCE = 1024
STEPS_PER_CHECKPOINT = 100


def problems(seed: int, split: str = "train") -> Iterator[Problem]:
  """Yields problems of a split without end, in the mixture of nano's corpus."""
  draws = Draws("distill", seed)
  words, numbers = word_problems.WordProblems(), countdown.Countdown()
  while True:
    task = numbers if draws.chance(COUNTDOWN_RATE) else words
    yield task.problem(split, draws.below(task.num_problems(split)))


def answered(target: loading.Model, num_problems: int, asked: Iterator[Problem]) -> distill.Answers:
  """Returns the target's completions of `num_problems` problems, at temperature 1.

  A request's seed is its index.
  """
  tokenizer = target.tokenizer
  assert tokenizer is not None
  engine = Engine(
    target,
    config=EngineConfig(max_sequences=64, max_context=512, row_buckets=(64, 256)),
  )
  sampling = SamplingParams(max_tokens=216, stop_token_ids=tokenizer.eos_ids)
  texts: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
  drawn = enumerate(itertools.islice(asked, num_problems))
  while some := list(itertools.islice(drawn, REQUESTS_AT_ONCE)):
    requests = [
      Request(
        request_id=str(index),
        prompt=tuple(tokenizer.chat_ids(problem.prompt)),
        sampling=sampling,
        seed=index,
      )
      for index, problem in some
    ]
    completions = engine.generate(requests)
    texts += [(r.prompt, c.tokens) for r, c in zip(requests, completions, strict=True)]
    print(f"{len(texts)} of {num_problems} problems answered", flush=True)
  return distill.answers_of(texts)


def kept(path: pathlib.Path, record: type, make: Callable[[], Any]) -> Any:
  """Returns a record of arrays from a file; creates the file with `make` if it does not exist."""
  if not path.exists():
    partial = path.with_suffix(".partial.npz")
    np.savez(partial, **make()._asdict())
    partial.replace(path)
  with np.load(path) as found:
    return record(**{name: found[name] for name in record._fields})


def distilled(
  draft: model_config.TransformerConfig,
  batches: Iterator[distill.Batch],
  config: distill.DistillConfig,
  directory: pathlib.Path,
) -> parameters.Params:
  """Trains the draft to the end of the budget and returns its weights; resumes in `directory`."""
  numerics = distill.numerics_for(config.lengths[0])
  optimizer = distill.make_optimizer(config)
  params = parameters.init(numerics_lib.key(config.seed), draft, numerics)
  opt_state, first = optimizer.init(params), 0
  fingerprint = numerics_lib.fingerprint(numerics)
  if (latest := checkpoint.latest_step(directory)) is not None:
    abstract = jax.eval_shape(lambda: (params, opt_state))
    restored = checkpoint.restore(directory, abstract, fingerprint=fingerprint)
    (params, opt_state), first = restored.state, latest
    print(f"resumed at step {first} of {config.num_steps}", flush=True)
  step = distill.make_step(draft, optimizer)
  started, seen = time.monotonic(), 0
  for index, batch in enumerate(itertools.islice(batches, config.num_steps)):
    if index < first:
      continue
    params, opt_state, metrics = step(params, opt_state, batch)
    seen += batch.tokens.size
    if (index + 1) % STEPS_PER_CHECKPOINT == 0 or index + 1 == config.num_steps:
      note = " ".join(f"{name} {float(value):.3f}" for name, value in metrics.items())
      rate = seen / (time.monotonic() - started)
      print(f"step {index + 1} of {config.num_steps}: {note} {rate:,.0f} tok/s", flush=True)
      checkpoint.save(
        directory, index + 1, (params, opt_state), host_state={}, fingerprint=fingerprint
      )
  return params


def main(argv: list[str]) -> None:
  args = flags.FLAGS
  with command_line.refusals():
    command_line.check_arguments(argv)
    directory = pathlib.Path(args.workdir)
    directory.mkdir(parents=True, exist_ok=True)
    if (directory / "model").exists():
      raise ValueError(
        f"--workdir: got {directory}, which holds a finished draft, expected an empty or resumable"
        " directory; choose another, or remove its model/."
      )
    config = distill.DistillConfig(
      num_tokens=args.num_tokens, learning_rate=args.learning_rate, seed=args.seed
    )
    draft, numerics = presets.get(args.draft), distill.numerics_for(config.lengths[0])
    target = loading.path_of(args.target)
    answers = kept(
      directory / "answers.npz",
      distill.Answers,
      lambda: answered(
        loading.load_model(target, run_presets.main_job().numerics),
        args.num_problems,
        problems(args.seed),
      ),
    )
    likely = None
    if args.likely:

      def asked() -> distill.Likely:
        params, model = huggingface.load(target, numerics)
        return distill.likely_of(params, model, answers, count=args.likely)

      likely = kept(directory / "likely.npz", distill.Likely, asked)
    batches = distill.batches(answers, likely, config)
    params = distilled(draft, batches, config, directory / "checkpoints")
    huggingface.save(
      directory / "model", params, draft, dtype="int8", tokenizer=tokenizer_lib.load(target)
    )
  print(f"wrote {directory / 'model'}")


if __name__ == "__main__":
  flags.DEFINE_string(
    "workdir", "runs/distill_draft", "Output directory for responses, checkpoints and the draft."
  )
  flags.DEFINE_string(
    "target", "nano", "Target: nano, a Hugging Face directory, a GGUF file, or a Hub id."
  )
  flags.DEFINE_string("draft", "nano-draft", "Preset of the draft's shape.")
  flags.DEFINE_integer(
    "num_problems", 18_432, "Number of problems that the target answers.", lower_bound=1
  )
  flags.DEFINE_integer(
    "likely", 16, "Number of top tokens in the forward KL; 0 trains on sampled tokens.", 0
  )
  flags.DEFINE_integer(
    "num_tokens",
    distill.DistillConfig.num_tokens,
    "Training budget in tokens, including padding.",
    lower_bound=1,
  )
  flags.DEFINE_float("learning_rate", distill.DistillConfig.learning_rate, "Peak learning rate.")
  flags.DEFINE_integer("seed", 0, "Seed of weights, problems and document order.")
  app.run(main)
