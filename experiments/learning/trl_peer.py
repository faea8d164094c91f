"""Times the phases of TRL's GRPOTrainer, and measures the gap between its sampler and its trainer.

Claim: none; `experiments.learning.step` runs this in a separate process, in an environment with TRL
(launch/locks/trl-3.11.txt). Stdin has the request as one line of JSON; the last line of stdout has
the result. It imports nothing of SeerJAX.

The sampler's log-probabilities are those of the logits from which `generate` samples, the trainer's
those of `_get_per_token_logps_and_entropies`, both with the same weights.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import resource
import sys
import tempfile
import time
from typing import Any

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def run(request: dict[str, Any]) -> dict[str, Any]:
  """Trains for some steps; returns seconds, tokens and gaps by step, and the peak memory."""
  torch: Any = importlib.import_module("torch")
  datasets: Any = importlib.import_module("datasets")
  transformers: Any = importlib.import_module("transformers")
  trl: Any = importlib.import_module("trl")
  torch.set_num_threads(os.cpu_count() or 1)
  steps: list[dict[str, float]] = []
  current: dict[str, float] = {}
  sampled: dict[tuple[int, ...], list[float]] = {}
  gaps: list[float] = []
  temperature = request["temperature"]

  def add(name: str, seconds: float) -> None:
    current[name] = current.get(name, 0.0) + seconds

  def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    texts = [one[0]["content"] if isinstance(one, list) else one for one in completions]
    found = [NUMBER.findall(text) for text in texts]
    return [
      float(bool(numbers) and float(numbers[-1].replace(",", "")) == float(right))
      for numbers, right in zip(found, answer)
    ]

  class Timed(trl.GRPOTrainer):
    """A trainer that times its phases."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
      begin = time.perf_counter()
      found = super()._generate_and_score_completions(inputs)
      add("generate_and_score", time.perf_counter() - begin)
      return found

    def _get_per_token_logps_and_entropies(self, model: Any, ids: Any, mask: Any, *more, **named):
      found = super()._get_per_token_logps_and_entropies(model, ids, mask, *more, **named)
      for row, whole, logprobs in zip(mask.tolist(), ids.tolist(), found[0].tolist()):
        key = tuple(token for token, is_one in zip(whole, row) if is_one)
        ours = sampled.get(key)
        if ours is not None:
          gaps.extend(abs(a - b) for a, b in zip(ours, logprobs))
      return found

    def training_step(self, *arguments: Any) -> Any:
      begin, before = time.perf_counter(), current.get("generate_and_score", 0.0)
      found = super().training_step(*arguments)
      add("learn", time.perf_counter() - begin)
      current["learn"] -= current.get("generate_and_score", 0.0) - before
      return found

  model = transformers.AutoModelForCausalLM.from_pretrained(
    request["model"], dtype=getattr(torch, request["dtype"])
  )
  tokenizer = transformers.AutoTokenizer.from_pretrained(request["model"])
  generate = model.generate

  def recorded(*arguments: Any, **options: Any) -> Any:
    begin = time.perf_counter()
    generated = generate(*arguments, **options, return_dict_in_generate=True, output_logits=True)
    add("generate", time.perf_counter() - begin)
    ids, mask = options["input_ids"], options["attention_mask"]
    start, eos = ids.shape[1], tokenizer.eos_token_id
    sampled.clear()
    begin = time.perf_counter()
    for row, whole in enumerate(generated.sequences.tolist()):
      answer = whole[start:]
      answer = answer[: answer.index(eos) + 1] if eos in answer else answer
      prompt = [token for token, is_one in zip(whole, mask[row].tolist()) if is_one]
      sampled[(*prompt, *answer)] = [
        float(torch.log_softmax(generated.logits[place][row].float() / temperature, -1)[token])
        for place, token in enumerate(answer)
      ]
      add("tokens", len(answer))
    add("recording", time.perf_counter() - begin)
    return generated.sequences

  model.generate = recorded
  count = request["prompts_per_step"] * request["group_size"]

  class Steps(transformers.TrainerCallback):
    """Records the numbers of each step."""

    def on_step_begin(self, *_: Any, **__: Any) -> None:
      self.begin = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
      numbers = dict(current, seconds=time.perf_counter() - self.begin)
      numbers |= dict(max_gap=max(gaps, default=0.0), mean_gap=sum(gaps) / max(len(gaps), 1))
      steps.append(numbers)
      current.clear()
      gaps.clear()
      print(f"step {len(steps)}: {numbers}", file=sys.stderr, flush=True)

  rows = [
    dict(prompt=[dict(role="user", content=one["prompt"])], answer=one["answer"])
    for one in request["rows"]
  ]
  with tempfile.TemporaryDirectory() as directory:
    options = trl.GRPOConfig(
      output_dir=directory, per_device_train_batch_size=count, gradient_accumulation_steps=1,
      num_generations=request["group_size"], max_completion_length=request["max_tokens"],
      max_steps=request["num_steps"], learning_rate=request["learning_rate"],
      adam_beta2=0.95, lr_scheduler_type="constant", warmup_steps=0, temperature=temperature,
      beta=0.0,
      loss_type="dapo", epsilon=0.2, epsilon_high=0.28, bf16=False, fp16=False, use_cpu=True,
      gradient_checkpointing=False, report_to=[], save_strategy="no", logging_strategy="no",
      disable_tqdm=True, shuffle_dataset=False, seed=request["seed"],
    )  # fmt: skip
    trainer = Timed(
      model=model, reward_funcs=reward, args=options, processing_class=tokenizer,
      train_dataset=datasets.Dataset.from_list(rows), callbacks=[Steps()],
    )  # fmt: skip
    trainer.train()
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
  return dict(steps=steps, peak_bytes=peak, versions=dict(trl=trl.__version__))


def main() -> None:
  reply = os.fdopen(os.dup(1), "w")
  os.dup2(2, 1)
  print(json.dumps(run(json.loads(sys.stdin.readline()))), file=reply, flush=True)


if __name__ == "__main__":
  main()
