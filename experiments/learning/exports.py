"""Compares a run's exported weights with its own, in transformers, PEFT and llama.cpp.

Claim: of a run on real weights, the exported directory has the run's weights to the bit, and
`transformers` (given our ids), llama.cpp (on the exported GGUF file) and, for adapters, PEFT answer
twelve prompts greedily with the same tokens as our engine.
Command: bash launch/local.sh experiments.learning.exports --run=DIR --python=.venv-3.11/bin/python
  `bash launch/peers.sh` creates that Python and installs llama.cpp
Hardware: 2 CPU cores, 8 GiB; two minutes. Numbers: docs/results/real/learning.md
"""

from __future__ import annotations

from collections.abc import Sequence
import os
import pathlib
from typing import Any

from absl import flags, logging
import jax
import numpy as np

from experiments import llama_cpp, measure, peer_process
from experiments.invariance import peers
from seerjax.commands import export, generate, replay
from seerjax.engine import engine as engine_lib
from seerjax.models import huggingface, loading
from seerjax.run import policy as policy_lib
from seerjax.types import Request, SamplingParams

MAX_TOKENS = 32
PROMPTS = (
  "What is the capital of France?",
  "Tell me about Richard Feynman.",
  "Write a haiku about the sea.",
  "Calculate 3 + 4.\nWrite the final answer between <answer> and </answer>.",
  "Calculate 9 - 12.\nWrite the final answer between <answer> and </answer>.",
  "List three fruits.",
  "Why is the sky blue?",
  "Translate 'good morning' into French.",
  "def add(a, b):",
  "What does a compiler do?",
  "Name a prime number above 10.",
  "Who wrote Hamlet?",
)


def has_equal_weights(run: pathlib.Path, directory: pathlib.Path) -> bool:
  """Returns whether an exported float32 directory has the weights of the run's last step."""
  config = replay.read_config(run)
  policy = policy_lib.load_policy(config.model, config.numerics)
  restored = export.restored_step(run, None, config, policy)
  ours = policy_lib.exported_weights(config.weights, policy, restored.state.params)
  theirs, _ = huggingface.load(directory, config.numerics)
  pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
  return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


def until_end(tokens: Sequence[int], eos_ids: Sequence[int]) -> list[int]:
  """Returns the tokens up to and including the first end token."""
  ends = [place for place, token in enumerate(tokens) if token in eos_ids]
  return list(tokens[: ends[0] + 1] if ends else tokens)


def of_transformers(python: str, prompts: list[list[int]], **request: object) -> list[list[int]]:
  """Returns the completions of a process with transformers, and PEFT if there is an adapter.

  Raises:
    RuntimeError: with the end of its output, if it fails.
  """
  whole = dict(
    path="transformers", dtype="float32", max_tokens=MAX_TOKENS, temperature=0.0, seed=0,
    prompt=None, batches=[[prompt] for prompt in prompts], **request,
  )  # fmt: skip
  found = peer_process.answer("transformers", python, peers, whole)
  return [one["tokens"] for one in found]


def of_llama(file: pathlib.Path, prompts: list[list[int]]) -> list[list[int]]:
  """Returns llama.cpp's greedy completions, each computed alone with a float32 cache."""
  context = max(map(len, prompts)) + MAX_TOKENS
  model = llama_cpp.Model(
    file, num_sequences=1, context=context, num_threads=os.cpu_count() or 1, kv="f32"
  )
  length = np.full((1, 1), MAX_TOKENS)
  found = [llama_cpp.answer(model, [tuple(prompt)], length, None)[0] for prompt in prompts]
  model.close()
  return found


def compare(run: pathlib.Path, workdir: pathlib.Path, python: str) -> str:
  """Exports the last step of a run and returns a Markdown table of equal completions."""
  config = replay.read_config(run)
  directory, file = workdir / "model", workdir / "model.gguf"
  export.export(run, None, export.Target(directory, "float32", overwrite=True))
  export.export(run, None, export.Target(file, gguf="F32", overwrite=True))
  model = loading.load_model(directory)
  assert model.tokenizer is not None
  policy, _ = generate.load(str(directory))
  prompts = [list(generate.prompt_tokens(policy, prompt)) for prompt in PROMPTS]
  eos_ids = list(model.tokenizer.eos_ids)
  sampling = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
  engine = engine_lib.Engine(
    model, config=engine_lib.EngineConfig(max_model_len=512, max_num_seqs=16)
  )
  requests = [
    Request(request_id=str(place), prompt=tuple(prompt), sampling=sampling)
    for place, prompt in enumerate(prompts)
  ]
  ours = [until_end(done.tokens, eos_ids) for done in engine.generate(requests)]
  found = {"llama.cpp, GGUF in F32": of_llama(file, prompts)}
  if python:
    request = dict(eos_ids=eos_ids)
    found["transformers, the directory"] = of_transformers(
      python, prompts, model=str(directory), **request
    )
    if config.lora_rank:
      adapter = workdir / "adapter"
      export.export(run, None, export.Target(adapter, overwrite=True), is_adapter=True)
      found["PEFT, the adapter"] = of_transformers(
        python, prompts, model=config.model, adapter=str(adapter), **request
      )
  same = "yes" if has_equal_weights(run, directory) else "**no**"
  equal = {
    reader: sum(until_end(theirs, eos_ids) == mine for theirs, mine in zip(answers, ours))
    for reader, answers in found.items()
  }
  names = ("reader", f"equal completions of up to {MAX_TOKENS} tokens")
  table = measure.table(names, ((reader, f"{n} of {len(ours)}") for reader, n in equal.items()))
  return (
    f"Exported weights equal to the run's, bit by bit: {same}.\n"
    f"{PROMPTS[0]} {model.tokenizer.decode(ours[0])!r}\n\n{table}\n"
  )


def main(args: Any) -> None:
  logging.set_verbosity(logging.WARNING)
  workdir = pathlib.Path(args.workdir)
  workdir.mkdir(parents=True, exist_ok=True)
  text = compare(pathlib.Path(args.run), workdir, args.python)
  (workdir / "table.md").write_text(text)
  measure.say(text)


if __name__ == "__main__":
  flags.DEFINE_string("run", None, "Directory of a finished run.", required=True)
  flags.DEFINE_string("python", "", "Python that has transformers and PEFT.")
  flags.DEFINE_string("workdir", "runs/real_exports", "Output directory for exports and the table.")
  measure.command(main)
