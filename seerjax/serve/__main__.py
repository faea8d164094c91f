"""Serves a model with OpenAI's protocol, on loopback only unless a token is set.

    python -m seerjax.serve [MODEL]      MODEL: nano, nano-sleep, a Hugging Face directory, a GGUF
                                         file, a Hub id
      --adapter=NAME=DIR                 also serves a low-rank adapter in PEFT format; repeatable

    curl http://127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json' \\
      -d '{"messages": [{"role": "user", "content": "How many?"}], "seed": 1}'

Equal `system_fingerprint`, prompt, parameters and seed give equal bits under any other load.
The token is read from the variable SEERJAX_SERVE_TOKEN, or from --token_file.

      --contexts=DIR                     registers contexts, and rewrites them in spare rows

nano was not trained to rewrite contexts and produces no rewrites; a shipped model that was:

    python -m seerjax.serve nano-sleep --is_taught --contexts=DIR
"""

from __future__ import annotations

from collections.abc import Sequence
import logging
import os
import pathlib
import sys
import time

from absl import app, flags

from seerjax import numerics as numerics_lib
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
from seerjax.speculation import step_times
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
    raise ValueError(f"--token_file: got {file}, which is empty, expected a token; write one.")
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
        f"--tenants_file: got line {number} of {file} with {len(words)} words, or with a name or a"
        " token that is there twice, expected NAME TOKEN; correct it."
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
    max_waiting=args.max_waiting,
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
        f"--adapter: got the name {name!r}, which is the model's, expected another; rename it."
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
  placed = placement.of_flags(name, numerics_lib.NumericsConfig(reduction_shards=0))
  say(placed.describe())
  most = placed.shape.max_context
  config = EngineConfig(
    max_context=min(args.max_context or most, most),
    max_sequences=args.max_sequences,
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
    say(f"the chat template reads the clock: until this server ends it is {now} (--now={now})")
  defaults = served_lib.generation_defaults(tokenizer)
  if defaults.in_force:
    say(f"generation_config.json: where a request says nothing else, {defaults.in_force}")
  if defaults.not_taken:
    say(f"generation_config.json: {', '.join(defaults.not_taken)} not taken: not supported")
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
  say(engine.plan())
  say("compiling its steps, or reading them from JAX's cache")
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
  found = Sleeping(
    args.contexts, engine, asked, identity=family.identity, config=config
  )
  say(f"measuring its steps, for {step_times.SECONDS:g} s")
  engine.step_times = step_times.measure(engine)
  if args.anticipated or args.drafts:
    engine.drafter = SuffixDrafter(budget=Budget(engine.step_times, BudgetConfig()))
  say(f"sleeping for {len(found.contexts.namespaces(step=found.step))} callers' contexts")
  return {family.base.name: found}


def warm(engine: Engine) -> None:
  """Compiles the engine's programs, so that no client waits for it."""
  last = engine.config.row_buckets[-1]
  room = min(last, engine.config.max_context) - 40
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
      raise ValueError(f"seerjax.serve: got {argv[1:]}, expected one MODEL and flags; write one.")
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
  flags.DEFINE_string("host", usual.host, "Address to listen at; another needs a token.")
  flags.DEFINE_integer("port", usual.port, "Port to listen at; 0 takes a free one.")
  flags.DEFINE_string("token_file", "", "File with the token that clients have to send.")
  flags.DEFINE_string("tenants_file", "", "File with a client's NAME and TOKEN a line.")
  flags.DEFINE_string("contexts", "", "Directory of contexts, which are slept for; '' has none.")
  flags.DEFINE_bool("is_taught", False, "The model was trained to rewrite contexts, as nano-sleep.")
  flags.DEFINE_integer("sleepers", 1, "Rewrites of a context.")
  flags.DEFINE_integer("rethinks", 3, "Calls of a sleeper, at most.")
  flags.DEFINE_integer("sleep_tokens", 256, "Of one call of a sleeper, at most.")
  flags.DEFINE_integer("answer_length", 0, "Of answers from a context, 0 the shortest.")
  flags.DEFINE_integer("anticipated", 0, "Questions of a context that are answered for drafts.")
  flags.DEFINE_bool("drafts", False, "Rewrites are drafts of their context's questions.")
  flags.DEFINE_integer("pinned_pages", 0, "Pages that starts of contexts' questions may keep.")
  flags.DEFINE_multi_string("adapter", [], "NAME=DIR: an adapter beside the model, as PEFT writes.")
  flags.DEFINE_string("system", "", "Begins a conversation that has no system message.")
  flags.DEFINE_string(
    "now", "", "2026-11-27T12:00:00+01:00, for a template that reads the clock; '': the start."
  )
  flags.DEFINE_integer("max_context", 0, "Positions of a prompt and its answer; 0: the model's.")
  flags.DEFINE_integer("max_sequences", 0, "Answers at once; 0 asks model and memory.")
  flags.DEFINE_integer(
    "reserved_tokens", EngineConfig().reserved_tokens,
    "Of each answer, ahead of what it has, for which memory is counted; 0 counts whole answers.",
  )  # fmt: skip
  placement.define_flags()
  flags.DEFINE_integer("num_pages", 0, "Pages of keys and values; 0 asks the free memory.")
  flags.DEFINE_integer("key_seed", 0, "Of the sampling key, which is a part of the fingerprint.")
  flags.DEFINE_integer("max_body_bytes", usual.max_body_bytes, "Of one request.")
  flags.DEFINE_integer("max_answer_tokens", usual.max_answer_tokens, "Of one answer.")
  flags.DEFINE_integer("max_waiting", usual.max_waiting, "Answers that wait for the engine.")
  flags.DEFINE_integer(
    "max_waiting_of_client", usual.max_waiting_of_client, "Those of one client."
  )
  flags.DEFINE_float("timeout_seconds", usual.timeout_seconds, "That an answer may take.")
  flags.DEFINE_float("grace_seconds", usual.grace_seconds, "After SIGTERM, for what runs.")
  flags.DEFINE_bool("strict_fields", False, "Refuses fields that would have no effect.")


if __name__ == "__main__":
  define_flags()
  command_line.keep_programs()
  app.run(main)
