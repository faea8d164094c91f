"""Samples one prompt in random batches with `transformers` or llama.cpp's server.

Claim: none; `experiments.invariance.real` runs this in a separate process, because a peer may need
another Python and should not share threads with us. Stdin has the request as one line of JSON, the
last line of stdout the completions. It imports nothing of SeerJAX.
"""

from __future__ import annotations

import concurrent.futures
import importlib
import json
import os
import sys
from typing import Any
import urllib.request

SLOTS = 8  # Concurrent completions.


def of_transformers(request: dict[str, Any]) -> list[dict[str, Any]]:
  """Returns the prompt's completions from `generate`, in left-padded batches.

  Without a prompt (None) it returns those of all prompts; with an adapter, PEFT loads it.
  """
  torch: Any = importlib.import_module("torch")
  transformers: Any = importlib.import_module("transformers")
  torch.set_num_threads(os.cpu_count() or 1)
  model = transformers.AutoModelForCausalLM.from_pretrained(
    request["model"], dtype=getattr(torch, request["dtype"])
  )
  if adapter := request.get("adapter"):
    model = importlib.import_module("peft").PeftModel.from_pretrained(model, adapter)
  model.eval()
  pad = request["eos_ids"][0]
  options = (
    dict(do_sample=False)
    if not request["temperature"]
    else dict(do_sample=True, temperature=request["temperature"], top_k=0, top_p=1.0)
  )
  found = []
  for prompts in request["batches"]:
    longest = max(map(len, prompts))
    ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    torch.manual_seed(request["seed"])
    with torch.no_grad():
      generated = model.generate(
        ids, attention_mask=mask, max_new_tokens=request["max_tokens"], pad_token_id=pad,
        eos_token_id=request["eos_ids"], return_dict_in_generate=True, output_logits=True,
        **options,
      )  # fmt: skip
    for row, prompt in enumerate(prompts):
      if request["prompt"] in (None, prompt):
        tokens, logprobs = [], []
        for token, logits in zip(generated.sequences[row, longest:].tolist(), generated.logits):
          tokens.append(token)
          logprobs.append(float(torch.log_softmax(logits[row].float(), -1)[token]))
          if token in request["eos_ids"]:
            break
        found.append(dict(tokens=tokens, logprobs=logprobs))
    print(f"transformers: {len(found)} answers", file=sys.stderr, flush=True)
  return found


def of_llama(request: dict[str, Any]) -> list[dict[str, Any]]:
  """Returns the prompt's completions from llama.cpp's server, with `SLOTS` concurrent clients."""
  library: Any = importlib.import_module("xllamacpp")
  parameters = library.CommonParams()
  parameters.model.path = request["model"]
  parameters.port, parameters.verbosity = 0, -1
  context = len(request["prompt"]) + request["max_tokens"] + 8
  parameters.n_parallel, parameters.n_ctx = SLOTS, SLOTS * context
  threads = os.cpu_count() or 1
  parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = threads
  kind = library.ggml_type.GGML_TYPE_F32
  parameters.cache_type_k = parameters.cache_type_v = kind
  server = library.Server(parameters)

  def ask(prompt: list[int]) -> dict[str, Any]:
    body = dict(
      prompt=prompt, n_predict=request["max_tokens"], temperature=request["temperature"],
      seed=request["seed"], n_probs=1, return_tokens=True, cache_prompt=False,
      post_sampling_probs=False, samplers=["temperature"],
    )  # fmt: skip
    call = urllib.request.Request(
      f"{server.listening_address}/completion", json.dumps(body).encode(),
      {"Content-Type": "application/json"},
    )  # fmt: skip
    with urllib.request.urlopen(call, timeout=600) as reply:
      reply_fields = json.load(reply)
    chosen = reply_fields["completion_probabilities"]
    return dict(tokens=[one["id"] for one in chosen], logprobs=[one["logprob"] for one in chosen])

  found = []
  with concurrent.futures.ThreadPoolExecutor(SLOTS) as pool:
    for prompts in request["batches"]:
      answers = list(pool.map(ask, prompts))
      found += [answer for prompt, answer in zip(prompts, answers) if prompt == request["prompt"]]
      print(f"llama.cpp: {len(found)} answers", file=sys.stderr, flush=True)
  return found


def main() -> None:
  reply = os.fdopen(os.dup(1), "w")
  os.dup2(2, 1)  # Output of libraries must not be mistaken for a reply.
  request = json.loads(sys.stdin.readline())
  found = of_transformers(request) if request["path"] == "transformers" else of_llama(request)
  print(json.dumps(found), file=reply, flush=True)
  os._exit(0)  # llama.cpp's threads would keep the process alive.


if __name__ == "__main__":
  main()
