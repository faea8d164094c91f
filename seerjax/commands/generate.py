"""Streams one response, token by token, as it is sampled; chats in a terminal without a prompt.

    seerjax generate --prompt="Tom has 3 apples and buys 4. How many?"

The text is a function of (weights, prompt, sampling parameters, seed) alone: a repeated call gives
the same bits. Text goes to stdout, numbers to stderr.

  a chat:         no --prompt; Ctrl-D or Ctrl-C ends it, /help lists the commands
  another model:  --model=PATH_OR_HUB_ID
  no thinking:    --variable=enable_thinking=False, which Qwen3's template reads
  from stdin:     --prompt=-
  with a draft:   --draft=MODEL guesses --draft_tokens tokens ahead; the text is the same
  no template:    --raw
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import contextlib
import dataclasses
import math
import sys
import time
from typing import Any

from absl import flags
import jax

from seerjax import numerics as numerics_lib
from seerjax.engine import engine as engine_lib
from seerjax.models import chat_template, decoder as decoder_lib, parameters
from seerjax.models.loading import Model
from seerjax.run import (
  command_line,
  placement,
  policy as policy_lib,
  presets as run_presets,
  stops,
)
from seerjax.run.policy import Policy
from seerjax.speculation import draft_loading
from seerjax.speculation.draft_model import DraftModelConfig, ModelDrafter
from seerjax.speculation.draft_program import MAX_STEPS
from seerjax.types import Completion, Request, SamplingParams

PREFILL_ROWS = 256
DRAFT_TOKENS = 4  # Drafted per step if there is a draft model.
CHAT_CONTEXT = 4096  # Maximum positions of a chat, within the model's limit.
HELP = """/help   this
/new    forgets the conversation
Ctrl-D  ends the chat, as Ctrl-C does, also within an answer"""

# Maps the conversation so far to the next response.
Answer = Callable[[Sequence[chat_template.Message]], str]


def load(
  name: str, numerics: numerics_lib.NumericsConfig | None = None
) -> tuple[Policy, numerics_lib.NumericsConfig]:
  """Returns a model by name and its resolved numerics; None uses those of the main job."""
  numerics = run_presets.main_job().numerics if numerics is None else numerics
  policy = policy_lib.load_policy(name, numerics)
  return policy, decoder_lib.decide(policy.model, numerics).numerics


def prompt_tokens(policy: Policy, prompt: str, *, is_raw: bool = False) -> tuple[int, ...]:
  """Returns a prompt's tokens: as a user turn, or verbatim with special tokens if `is_raw`.

  Raises:
    ValueError: if the prompt is blank.
  """
  if not prompt.strip():
    raise ValueError(
      f"--prompt: got {prompt!r}, expected at least one character other than spaces; write"
      " --prompt='How many ...?', or --prompt=- to read it from stdin."
    )
  tokenizer = policy.require_tokenizer()
  return tuple(tokenizer.encode(prompt) if is_raw else tokenizer.chat_ids(prompt))


def engine_for(
  policy: Policy,
  numerics: numerics_lib.NumericsConfig,
  *,
  num_tokens: int,
  key: jax.Array,
  mesh: jax.sharding.Mesh | None = None,
  draft: str = "",
  draft_tokens: int = DRAFT_TOKENS,
) -> engine_lib.Engine:
  """Returns an engine for one request of `num_tokens` positions, prompt and response.

  Args:
    policy: the model.
    numerics: numerics of the model.
    num_tokens: positions of prompt and response.
    key: sampling key.
    mesh: devices that share the model; one if None.
    draft: draft model with the same vocabulary, which guesses tokens ahead; "" disables it.
    draft_tokens: number of tokens drafted per step.

  Raises:
    ValueError: if the model does not support this many positions, or the draft does not fit it.
  """
  if num_tokens > policy.model.max_model_len:
    raise ValueError(
      f"generate: got a prompt and max_tokens of {num_tokens} positions together, expected at most"
      f" the model's {policy.model.max_model_len}; shorten the prompt or lower --max_tokens."
    )
  page_size = min(32, numerics.kv_split)
  # Verifying a draft takes a row per drafted token, and one for the last sampled token.
  rows = {1, 1 + draft_tokens} if draft else {1}
  config = engine_lib.EngineConfig(
    page_size=page_size,
    num_pages=math.ceil(num_tokens / page_size) + 1,
    max_num_seqs=1,
    max_model_len=num_tokens,
    batch_size_buckets=(*sorted(rows), PREFILL_ROWS),
    decode_steps_per_call=1,  # Streams every token to a reader.
  )
  params = parameters.compute_params(policy.params, numerics)
  engine = engine_lib.Engine(
    Model(policy.model, params, numerics, policy.require_tokenizer()),
    config=config,
    key=key,
    mesh=mesh,
  )
  if draft:
    how = DraftModelConfig(length=draft_tokens, num_slots=1, batch_size_buckets=(8, PREFILL_ROWS))
    engine.drafter = draft_loading.drafter_for(engine, draft, how)
  return engine


def stream(
  engine: engine_lib.Engine, request: Request, say: Callable[[str], None]
) -> tuple[Completion, float]:
  """Runs one request and passes on its text as it is sampled.

  Returns:
    (completion, tokens per second without compilation, 0 for too few tokens).
  """
  times: list[float] = []
  counts: list[int] = []

  def on_step(updates: list[engine_lib.StepOutput]) -> None:
    for update in updates:
      times.append(time.monotonic())
      counts.append(len(update.tokens))
      say(update.text)

  (completion,) = engine.generate([request], on_step=on_step)
  # The first update comes from the prefill program, the second from the decode program.
  rate = sum(counts[2:]) / (times[-1] - times[1]) if len(times) > 2 else 0.0
  return completion, rate


def answerer(
  engine: engine_lib.Engine,
  sampling: SamplingParams,
  *,
  seed: int,
  say: Callable[[str], None],
) -> Answer:
  """Returns a function that continues a conversation, streaming each response with one engine.

  Args:
    engine: engine with a tokenizer; its context limits the conversation.
    sampling: sampling parameters of every response; `max_tokens` is lowered if there is less room.
    seed: seed of every response.
    say: receives text as it is sampled.
  """
  tokenizer = engine.tokenizer
  assert tokenizer is not None

  def answer(messages: Sequence[chat_template.Message]) -> str:
    tokens = tuple(tokenizer.chat_ids(messages))
    room = engine.config.max_model_len - len(tokens)
    if room < 1:
      raise ValueError(
        f"generate: got a conversation of {len(tokens)} tokens, expected fewer than"
        f" {engine.config.max_model_len}; /new starts a new one."
      )
    request = Request(
      request_id=str(len(messages)),
      prompt=tokens,
      sampling=dataclasses.replace(sampling, max_tokens=min(sampling.max_tokens, room)),
      seed=seed,
    )
    completion, _ = stream(engine, request, say)
    if completion.error:
      raise ValueError(completion.error)
    return completion.text

  return answer


def converse(answer: Answer, read: Callable[[], str], tell: Callable[[str], None]) -> None:
  """Chats until there is no more input.

  Args:
    answer: responds to the conversation; its ValueErrors are printed, and the chat continues
      without that message.
    read: returns the next line; raises EOFError at the end.
    tell: receives lines that are not responses.
  """
  messages: list[chat_template.Message] = []
  while True:
    try:
      line = read().rstrip()
    except EOFError:
      return
    if line == "/help":
      tell(HELP)
    elif line == "/new":
      messages = []
      tell("forgotten")
    elif line.startswith("/"):
      tell(
        f"got {line.split()[0]!r}, expected /help or /new; start with a space to send it as text"
      )
    elif line:
      asked = [*messages, {"role": "user", "content": line.strip()}]
      try:
        text = answer(asked)
      except ValueError as error:
        tell(str(error))
        continue
      messages = [*asked, {"role": "assistant", "content": text}]
      tell("")


def chat(policy: Policy, placed: placement.Placement, sampling: SamplingParams) -> None:
  """Chats in the terminal; Ctrl-D and Ctrl-C end it."""
  context = min(policy.model.max_model_len, flags.FLAGS.max_model_len or CHAT_CONTEXT)
  engine = engine_for(
    policy,
    placed.numerics,
    num_tokens=context,
    key=numerics_lib.key(0),
    mesh=placed.mesh,
    draft=flags.FLAGS.draft,
    draft_tokens=flags.FLAGS.draft_tokens,
  )
  with contextlib.suppress(ImportError):
    import readline  # noqa: F401  Enables line editing.
  print(
    f"{flags.FLAGS.model}, {context} tokens in all; /help lists the commands, Ctrl-D ends the chat."
    " The first answer takes longer, because its program is compiled.",
    file=sys.stderr,
  )
  answer = answerer(
    engine, sampling, seed=flags.FLAGS.seed, say=lambda text: print(text, end="", flush=True)
  )
  try:
    converse(answer, lambda: input("> "), print)
  except stops.Terminated:
    raise
  except KeyboardInterrupt:
    pass  # Ctrl-C is a normal way to leave the chat.
  print(flush=True)


def variables_of(arguments: Sequence[str]) -> dict[str, Any]:
  """Returns the chat template's variables by name, from NAME=VALUE arguments.

  Raises:
    ValueError: for an argument of another form.
  """
  found: dict[str, Any] = {}
  for argument in arguments:
    name, is_given, value = argument.partition("=")
    if not is_given:
      raise ValueError(
        f"--variable: got {argument!r}, expected NAME=VALUE; write --variable={name}=True."
      )
    found[name] = command_line.literal(value)
  return found


def drafted(engine: engine_lib.Engine) -> str:
  """Returns a summary of an engine's draft model, to append to other text; "" without one."""
  if not isinstance(engine.drafter, ModelDrafter):
    return ""
  acceptance = engine.drafter.acceptance
  return f"; {acceptance.length:.2f} tokens per step, {acceptance.rate:.0%} of drafts accepted"


def main(argv: list[str]) -> None:
  args = flags.FLAGS
  with command_line.refusals():
    command_line.check_arguments(argv)
    is_chat = args.prompt is None and sys.stdin.isatty() and sys.stdout.isatty()
    if is_chat and args.raw:
      raise ValueError(
        "--raw: got no --prompt, expected one (a chat needs its template); write --prompt='...'."
      )
    chat_config = chat_template.ChatConfig(
      system=args.system, variables=variables_of(args.variable), now=args.now
    )
    # Before the model is loaded, because it rejects what cannot be sampled.
    sampling = SamplingParams(
      temperature=args.temperature,
      top_k=args.top_k,
      top_p=args.top_p,
      max_tokens=args.max_tokens,
      stop=tuple(args.stop),
    )
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt or ""
    placed = placement.of_flags(args.model, run_presets.main_job().numerics)
    print(placed.describe(), file=sys.stderr)
    policy, numerics = load(args.model, placed.numerics)
    tokenizer = policy_lib.chatting(policy.require_tokenizer(), chat_config)
    policy = dataclasses.replace(policy, tokenizer=tokenizer)
    if now := tokenizer.chat_config.now:
      print(f"the chat template reads the clock: it is {now} (--now={now})", file=sys.stderr)
    if tokenizer.ignored_generation:
      print(policy_lib.ignored_settings(tokenizer), file=sys.stderr)
    sampling = dataclasses.replace(sampling, stop_token_ids=tokenizer.eos_ids)
    if is_chat:
      chat(policy, placed, sampling)
      return
    tokens = prompt_tokens(policy, prompt, is_raw=args.raw)
    most = args.max_model_len or policy.model.max_model_len
    if len(tokens) + args.max_tokens > most:
      raise ValueError(
        f"--max_model_len: got {len(tokens)} prompt tokens and --max_tokens={args.max_tokens},"
        f" expected at most {most} together; lower --max_tokens, or raise --max_model_len up to the"
        f" model's {policy.model.max_model_len}."
      )
    engine = engine_for(
      policy,
      numerics,
      num_tokens=len(tokens) + args.max_tokens,
      key=numerics_lib.key(0),
      mesh=placed.mesh,
      draft=args.draft,
      draft_tokens=args.draft_tokens,
    )
    request = Request(request_id="0", prompt=tokens, sampling=sampling, seed=args.seed)

    def say(text: str) -> None:
      print(text, end="", flush=True)

    completion, rate = stream(engine, request, say)
  print(flush=True)
  print(
    f"{len(tokens)} prompt tokens, {len(completion.tokens)} generated, {rate:.0f} tokens/s without"
    f" compilation; finish reason: {completion.finish_reason}{drafted(engine)}",
    file=sys.stderr,
  )
  if completion.error:
    print(completion.error, file=sys.stderr)
    sys.exit(2)


def define_flags() -> None:
  """Defines the flags of the command."""
  flags.DEFINE_string("prompt", None, "Prompt; - reads it from stdin. Without it, a chat starts.")
  flags.DEFINE_string("system", "", "System message at the start, if the model supports one.")
  flags.DEFINE_multi_string("variable", [], "NAME=VALUE for the chat template; may be repeated.")
  flags.DEFINE_string(
    "now", "", "Time for the chat template, as in 2026-11-27T12:00:00+01:00; '' is now."
  )
  flags.DEFINE_string("model", "nano", "nano, a Hugging Face directory, a GGUF file, or a Hub id.")
  flags.DEFINE_string("draft", "", "Smaller model with the same vocabulary, which drafts tokens.")
  flags.DEFINE_integer("draft_tokens", DRAFT_TOKENS, "Tokens drafted per step.", 1, MAX_STEPS)
  flags.DEFINE_float("temperature", 1.0, "Sampling temperature; 0 is greedy.")
  flags.DEFINE_integer("top_k", 0, "Keeps the k most likely tokens; 0 keeps all.")
  flags.DEFINE_float("top_p", 1.0, "Keeps the most likely tokens up to this probability.")
  flags.DEFINE_integer("max_tokens", 256, "Maximum number of generated tokens.")
  flags.DEFINE_integer("seed", 0, "Seed of the request; the same seed gives the same text.")
  flags.DEFINE_multi_string("stop", [], "Ends the text before this string; may be repeated.")
  flags.DEFINE_integer(
    "max_model_len", 0, "Most tokens of prompt and answer; 0 is the model limit."
  )
  placement.define_flags()
  flags.DEFINE_bool("raw", False, "Sends the prompt unchanged, without the chat template.")
