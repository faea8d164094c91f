"""Serves a model with OpenAI's protocol, on loopback only unless a token is set.

    seerjax serve [MODEL]      MODEL: nano, nano-sleep, a Hugging Face directory, a GGUF file,
                               a Hub id
      --adapter=NAME=DIR       also serves a low-rank adapter in PEFT format; repeatable

    curl http://127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json' \\
      -d '{"messages": [{"role": "user", "content": "How many?"}], "seed": 1}'

Equal `system_fingerprint`, prompt, parameters and seed give equal bits under any other load.
The token is read from the variable SEERJAX_SERVE_TOKEN, or from --token_file.

      --contexts=DIR           registers contexts, and rewrites them in spare rows

nano was not trained to rewrite contexts and produces no rewrites; a shipped model that was:

    seerjax serve nano-sleep --is_taught --contexts=DIR
"""

from __future__ import annotations

from collections.abc import Sequence
import logging
import os
import pathlib
import sys
import time

from absl import flags

from seerjax import numerics as numerics_lib
from seerjax.engine import timing
from seerjax.engine.engine import Engine, EngineConfig
from seerjax.models import chat_template, gguf_file, loading, peft
from seerjax.run import command_line, placement, policy as policy_lib
from seerjax.serve import served as served_lib, server
from seerjax.serve.config import ServeConfig
from seerjax.serve.family import Family
from seerjax.serve.service import Service
from seerjax.serve.sleeping import Sleeping
from seerjax.sleep import prompts
from seerjax.sleep.runner import RunnerConfig
from seerjax.speculation.budget import Budget, BudgetConfig
from seerjax.speculation.suffix_drafter import SuffixDrafter
from seerjax.tasks.stateful import StatefulWordProblems
from seerjax.types import Request, SamplingParams

TOKEN_VARIABLE = "SEERJAX_SERVE_TOKEN"


def token_of(file: str) -> str:
  """Returns the token that clients must send, from a file or the environment; "" for none.

  Raises:
    ValueError: if the file is empty.
  """
  if not file:
    return os.environ.get(TOKEN_VARIABLE, "")
  token = pathlib.Path(file).read_text().strip()
  if not token:
    raise ValueError(f"--token_file: got {file}, an empty file, expected a token; write one.")
  return token


def tenants_of(file: str) -> dict[str, str]:
  """Returns names by token, from a file with a name and a token per line.

  Raises:
    ValueError: if a line is malformed, or a name or token occurs twice.
  """
  found: dict[str, str] = {}
  if not file:
    return found
  for number, line in enumerate(pathlib.Path(file).read_text().splitlines(), 1):
    words = line.split()
    if not words:
      continue
    if len(words) != 2 or words[1] in found or words[0] in found.values():
      raise ValueError(
        f"--tenants_file: got line {number} of {file} with {len(words)} words, or a name or token"
        " that occurs twice, expected NAME TOKEN; correct it."
      )
    found[words[1]] = words[0]
  return found


def serve_config() -> ServeConfig:
  """Returns the configuration that the flags set."""
  args = flags.FLAGS
  return ServeConfig(
    host=args.host,
    port=args.port,
    token=token_of(args.token_file),
    tenants=tenants_of(args.tenants_file),
    max_body_bytes=args.max_body_bytes,
    max_answer_tokens=args.max_answer_tokens,
    max_queued_requests=args.max_queued_requests,
    max_waiting_of_client=args.max_waiting_of_client,
    timeout_seconds=args.timeout_seconds,
    grace_seconds=args.grace_seconds,
    strict_fields=args.strict_fields,
  )


def adapter_directories(flags: Sequence[str], model: str) -> dict[str, str]:
  """Returns adapter directories by name.

  Args:
    flags: values of the form NAME=DIR.
    model: name of the base.

  Raises:
    ValueError: if a value is malformed, or a name is the model's or occurs twice.
  """
  found: dict[str, str] = {}
  for flag in flags:
    name, is_pair, directory = flag.partition("=")
    if not (name and is_pair and directory):
      raise ValueError(f"--adapter: got {flag!r}, expected NAME=DIR; write --adapter=poet=DIR.")
    if name == model:
      raise ValueError(
        f"--adapter: got the name {name!r}, which the model has, expected a different one; rename"
        " it."
      )
    if name in found:
      raise ValueError(
        f"--adapter: got {name!r} twice ({found[name]} and {directory}), expected each name once;"
        " rename one."
      )
    found[name] = directory
  return found


def name_of(name: str) -> str:
  """Returns the name that a model is served under; for a directory or GGUF file, its base name."""
  path = pathlib.PurePath(name)
  if gguf_file.is_named(path):
    return path.stem
  return path.name if pathlib.Path(name).is_dir() else name


def load(name: str) -> Family:
  """Loads the model, its adapters and the engine."""
  args = flags.FLAGS
  placed = placement.of_flags(name, numerics_lib.NumericsConfig())
  say(placed.describe())
  most = placed.shape.max_model_len
  config = EngineConfig(
    max_model_len=min(args.max_model_len or most, most),
    max_num_seqs=args.max_num_seqs,
    reserved_tokens=args.reserved_tokens,
    num_pages=args.num_pages,
    pinned_pages=args.pinned_pages,
  )
  say(f"loading {name}")
  model = loading.load_model(name, placed.numerics)
  if model.tokenizer is None:
    raise ValueError(f"MODEL: got {name!r} without a tokenizer, expected one; add tokenizer.json.")
  chat = chat_template.ChatConfig(system=args.system, now=args.now)
  tokenizer = policy_lib.chatting(model.tokenizer, chat)
  if now := tokenizer.chat_config.now:
    say(
      f"the chat template reads the clock: its time stays {now} while this server runs"
      f" (--now={now})"
    )
  defaults = served_lib.generation_defaults(tokenizer)
  if defaults.in_force:
    say(f"generation_config.json: defaults of requests: {defaults.in_force}")
  if defaults.not_taken:
    say(f"generation_config.json: ignored, because not supported: {', '.join(defaults.not_taken)}")
  served_name = name_of(name)
  directories = adapter_directories(args.adapter, served_name)
  adapters = {
    own: peft.load(directory, model.config, model.numerics)
    for own, directory in directories.items()
  }
  key = numerics_lib.key(args.key_seed)
  model = loading.Model(model.config, model.params, model.numerics, tokenizer)
  engine = Engine(
    model,
    config=config,
    key=key,
    mesh=placed.mesh,
    adapters=adapters,
  )
  say(engine.memory_plan())
  say("compiling the engine's steps, or loading them from JAX's cache")
  warm(engine)
  return Family(
    served_name,
    model,
    engine,
    key=key,
    adapters=adapters,
    defaults=defaults,
    created=int(time.time()),
  )


def sleep(family: Family) -> dict[str, Sleeping]:
  """Returns the sleep state of the base, by name; empty without --contexts."""
  args = flags.FLAGS
  if not args.contexts:
    return {}
  engine = family.base.engine
  asked = prompts.taught(StatefulWordProblems()) if args.is_taught else prompts.general()
  config = RunnerConfig(
    num_jobs=args.sleepers,
    max_rethinks=args.rethinks,
    sleep_tokens=args.sleep_tokens,
    num_anticipated=args.anticipated,
    verbosity=args.answer_length,
  )
  found = Sleeping(args.contexts, engine, asked, identity=family.identity, config=config)
  say(f"timing the engine's steps for {timing.SECONDS:g} s")
  engine.step_times = timing.measure(engine)
  if args.anticipated or args.drafts:
    engine.drafter = SuffixDrafter(budget=Budget(engine.step_times, BudgetConfig()))
  say(
    f"sleep-time compute for the contexts of {len(found.contexts.namespaces(step=found.step))}"
    " callers"
  )
  return {family.base.name: found}


def warm(engine: Engine) -> None:
  """Compiles the engine's programs, so that no client waits for it."""
  last = engine.config.batch_size_buckets[-1]
  room = min(last, engine.config.max_model_len) - 40
  if room > 0:
    prompt = (0,) * max(1, room)
    sampling = SamplingParams(max_tokens=40)
    engine.generate([Request(request_id="warm", prompt=prompt, sampling=sampling)])


def say(line: str) -> None:
  """Prints a progress line to stderr."""
  print(line, file=sys.stderr, flush=True)


def main(argv: list[str]) -> None:
  with command_line.refusals():
    if len(argv) > 2:
      raise ValueError(
        f"seerjax serve: got {argv[1:]}, expected one MODEL and flags; name one model."
      )
    config = serve_config()
    logging.basicConfig(
      format="%(asctime)s %(message)s", level=logging.WARNING, stream=sys.stderr, force=True
    )
    logging.getLogger("seerjax.serve").setLevel(logging.INFO)
    family = load(argv[1] if argv[1:] else "nano")
    service = Service(
      family.models,
      config,
      families={family.base.name: family},
      sleeping=sleep(family),
    )
    family.base.compiler.start()
    found = server.bound(service)
    for served in family.models.values():
      say(f"model {served.name}, {served.context} tokens of context, {served.fingerprint}")
    server.run(service, [found], lambda: say(f"serving at {server.address(found)}/v1"))


def define_flags() -> None:
  """Defines the flags of the command."""
  usual = ServeConfig()
  flags.DEFINE_string(
    "host", usual.host, "Address to listen on; an address other than localhost needs a token."
  )
  flags.DEFINE_integer("port", usual.port, "Port to listen on; 0 picks a free one.")
  flags.DEFINE_string("token_file", "", "File with the token that clients must send.")
  flags.DEFINE_string("tenants_file", "", "File with one NAME TOKEN pair per line, one per client.")
  flags.DEFINE_string(
    "contexts", "", "Directory of contexts for sleep-time compute; '' turns it off."
  )
  flags.DEFINE_bool(
    "is_taught", False, "Whether the model was trained to rewrite contexts, like nano-sleep."
  )
  flags.DEFINE_integer("sleepers", 1, "Number of rewrites per context.")
  flags.DEFINE_integer("rethinks", 3, "Maximum number of model calls per rewrite.")
  flags.DEFINE_integer("sleep_tokens", 256, "Maximum number of tokens per call of a rewrite.")
  flags.DEFINE_integer("answer_length", 0, "Length of answers from a context; 0 is the shortest.")
  flags.DEFINE_integer(
    "anticipated", 0, "Number of questions per context to answer in advance, as drafts."
  )
  flags.DEFINE_bool(
    "drafts", False, "Whether rewrites serve as drafts for questions about their context."
  )
  flags.DEFINE_integer(
    "pinned_pages", 0, "Number of KV pages that may stay pinned for prompts of contexts."
  )
  flags.DEFINE_multi_string(
    "adapter", [], "NAME=DIR: an adapter to serve with the model, in PEFT's format."
  )
  flags.DEFINE_string("system", "", "System message for conversations without one.")
  flags.DEFINE_string(
    "now",
    "",
    "Time for a template that reads the clock, like 2026-11-27T12:00:00+01:00; '': start time.",
  )
  flags.DEFINE_integer(
    "max_model_len", 0, "Maximum tokens of a prompt plus its response; 0: the model's limit."
  )
  flags.DEFINE_integer(
    "max_num_seqs",
    0,
    "Maximum number of concurrent sequences; 0 derives it from model and memory.",
  )
  flags.DEFINE_integer(
    "reserved_tokens", EngineConfig().reserved_tokens,
    "Future tokens per response to reserve memory for; 0 reserves for whole responses.",
  )  # fmt: skip
  placement.define_flags()
  flags.DEFINE_integer("num_pages", 0, "Number of KV pages; 0 derives it from the free memory.")
  flags.DEFINE_integer("key_seed", 0, "Seed of the sampling key, which is part of the fingerprint.")
  flags.DEFINE_integer(
    "max_body_bytes", usual.max_body_bytes, "Maximum size of a request body in bytes."
  )
  flags.DEFINE_integer(
    "max_answer_tokens", usual.max_answer_tokens, "Maximum number of tokens per response."
  )
  flags.DEFINE_integer(
    "max_queued_requests",
    usual.max_queued_requests,
    "Maximum number of responses queued for the engine.",
  )
  flags.DEFINE_integer(
    "max_waiting_of_client",
    usual.max_waiting_of_client,
    "Maximum number of queued responses per client.",
  )
  flags.DEFINE_float(
    "timeout_seconds", usual.timeout_seconds, "Maximum number of seconds per response."
  )
  flags.DEFINE_float(
    "grace_seconds", usual.grace_seconds, "Seconds after SIGTERM for running requests to finish."
  )
  flags.DEFINE_bool("strict_fields", False, "Whether to refuse fields that would have no effect.")
