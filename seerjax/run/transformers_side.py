"""Answers prompts by `transformers`, as a script of a Python that has it and torch, but not us.

    python seerjax/run/transformers_side.py DIRECTORY QUESTIONS.npz ANSWERS.npz NUM_TOKENS

QUESTIONS.npz has the i64[t] ids of each prompt. ANSWERS.npz gets, under a prompt's name and a
suffix, its `.logits` f32[t, v] and `.tokens` i64[num_tokens], greedy and not ended by end tokens;
for a model with experts also `.routers` f32[l, t, E], the logits of each layer that has them.
"""

from __future__ import annotations

import sys

import numpy as np


def main(directory: str, questions: str, answers: str, num_tokens: int) -> None:
  """Writes the logits and the greedy tokens of each prompt."""
  import torch  # pyright: ignore[reportMissingImports]
  import transformers  # pyright: ignore[reportMissingImports]

  transformers.logging.set_verbosity_error()
  model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
  # `generate` replaces None by this setting, and would suppress end tokens.
  model.generation_config.eos_token_id = None
  greedy = transformers.GenerationConfig(
    max_new_tokens=num_tokens, min_new_tokens=num_tokens, eos_token_id=None, pad_token_id=0,
    do_sample=False, use_cache=True,
  )  # fmt: skip
  # Its name depends on the family and on the version of transformers.
  has_experts = not {"num_experts", "num_local_experts"}.isdisjoint(model.config.to_dict())
  found = {}
  with np.load(questions) as prompts, torch.inference_mode():
    for name, ids in prompts.items():
      prompt = torch.tensor(ids)[None]
      out = model(prompt, **({"output_router_logits": True} if has_experts else {}))
      found[f"{name}.logits"] = out.logits[0].float().numpy()
      if has_experts:
        routers = [leaf.reshape(len(ids), -1) for leaf in out.router_logits]
        found[f"{name}.routers"] = torch.stack(routers).float().numpy()
      whole = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), generation_config=greedy
      )
      found[f"{name}.tokens"] = whole[0, prompt.shape[1] :].numpy()
  np.savez(answers, **found)


if __name__ == "__main__":
  main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
