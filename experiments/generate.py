"""Streams one answer, token by token, as it is sampled.

Claim: the text is a function of (weights, prompt, sampling parameters, seed) alone; ask twice, get
the same bits.
Command: bash launch/local.sh experiments.generate --prompt="Tom has 3 apples and buys 4. How many?"
  another model:  --model=PATH_OR_HUB_ID
  from stdin:     --prompt=-
  no template:    --raw
Hardware: 2 CPU cores, a few seconds and one compilation. Text goes to stdout, numbers to stderr.
"""

from __future__ import annotations

from collections.abc import Callable
import math
import pathlib
import sys
import time

from absl import app, flags
import jax

from experiments import configuration, grpo
from seerjax import numerics as numerics_lib, rl
from seerjax.engine import engine as engine_lib
from seerjax.models import transformer
from seerjax.types import Completion, Request, SamplingParams

NANO = pathlib.Path(transformer.__file__).parent / "nano"
PREFILL_ROWS = 256


def load(name: str) -> tuple[rl.Policy, numerics_lib.NumericsConfig]:
  """Returns a model by name and the main job's numerics, as the model decides them."""
  numerics = grpo.main_job().numerics
  policy = grpo.load_policy(name, numerics)
  return policy, transformer.numerics_for(policy.model, numerics)


def prompt_tokens(policy: rl.Policy, prompt: str, *, is_raw: bool = False) -> tuple[int, ...]:
  """Returns a prompt's tokens, as a user's turn or, special tokens included, as it stands.

  Raises:
    ValueError: if there is nothing but white space.
  """
  if not prompt.strip():
    raise ValueError(
      f"--prompt: got {prompt!r}, expected at least one character that is no space; write"
      " --prompt='How many ...?', or --prompt=- to read it from stdin."
    )
  tokenizer = policy.tokenizer
  return tuple(tokenizer.encode(prompt) if is_raw else tokenizer.chat_ids(prompt))


def engine_for(
  policy: rl.Policy,
  numerics: numerics_lib.NumericsConfig,
  *,
  num_tokens: int,
  key: jax.Array,
) -> engine_lib.Engine:
  """Returns an engine for one request of `num_tokens` positions, prompt and answer.

  Raises:
    ValueError: if the model was not made for so many.
  """
  if num_tokens > policy.model.max_context:
    raise ValueError(
      f"generate: got a prompt and max_tokens of {num_tokens} positions together, expected at most"
      f" the model's {policy.model.max_context}; shorten the prompt or lower --max_tokens."
    )
  page_size = min(32, numerics.kv_split)
  config = engine_lib.EngineConfig(
    page_size=page_size,
    num_pages=math.ceil(num_tokens / page_size) + 1,
    max_sequences=1,
    max_context=num_tokens,
    row_buckets=(1, PREFILL_ROWS),
  )
  params = transformer.compute_params(policy.params, numerics)
  return engine_lib.Engine(
    policy.model,
    params,
    numerics=numerics,
    config=config,
    key=key,
    tokenizer=policy.tokenizer,
  )


def stream(
  engine: engine_lib.Engine, request: Request, say: Callable[[str], None]
) -> tuple[Completion, float]:
  """Runs one request, handing over its text as it comes.

  Returns:
    (completion, tokens per second once both programs are compiled, 0 for too few tokens).
  """
  times: list[float] = []

  def on_step(updates: list[engine_lib.Update]) -> None:
    for update in updates:
      times.append(time.monotonic())
      say(update.text)

  (completion,) = engine.generate([request], on_step=on_step)
  # The first token comes out of the prefill's program, the second out of the decoding one.
  rate = (len(times) - 2) / (times[-1] - times[1]) if len(times) > 2 else 0.0
  return completion, rate


def main(argv: list[str]) -> None:
  args = flags.FLAGS
  with configuration.refusals():
    configuration.check_arguments(argv)
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    policy, numerics = load(args.model)
    tokens = prompt_tokens(policy, prompt, is_raw=args.raw)
    sampling = SamplingParams(
      temperature=args.temperature,
      top_k=args.top_k,
      top_p=args.top_p,
      max_tokens=args.max_tokens,
      stop_token_ids=policy.tokenizer.eos_ids,
      stop_strings=tuple(args.stop),
    )
    engine = engine_for(
      policy, numerics, num_tokens=len(tokens) + args.max_tokens, key=numerics_lib.key(0)
    )
    request = Request(request_id="0", prompt=tokens, sampling=sampling, seed=args.seed)

    def say(text: str) -> None:
      print(text, end="", flush=True)

    completion, rate = stream(engine, request, say)
  print(flush=True)
  print(
    f"{len(tokens)} prompt tokens, {len(completion.tokens)} generated, {rate:.0f} tokens/s without"
    f" compilation; finish reason: {completion.finish_reason}",
    file=sys.stderr,
  )
  if completion.error:
    print(completion.error, file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
  flags.DEFINE_string("prompt", "", "What is asked; - reads it from stdin.")
  flags.DEFINE_string("model", "nano", "nano, a Hugging Face directory, or a Hub id.")
  flags.DEFINE_float("temperature", 1.0, "0 is greedy.")
  flags.DEFINE_integer("top_k", 0, "Keeps the k most likely tokens; 0 keeps all.")
  flags.DEFINE_float("top_p", 1.0, "Keeps the most likely tokens up to this probability.")
  flags.DEFINE_integer("max_tokens", 256, "Most tokens generated.")
  flags.DEFINE_integer("seed", 0, "Of the request; the same seed gives the same text.")
  flags.DEFINE_multi_string("stop", [], "Ends the text before this string; may be repeated.")
  flags.DEFINE_bool("raw", False, "Sends the prompt as it stands, without the chat template.")
  app.run(main)
