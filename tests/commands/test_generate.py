"""Completions stream as they are sampled; invalid requests are refused."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys

import jax
import pytest

from seerjax.commands import generate
from seerjax.types import Request, SamplingParams

ROOT = pathlib.Path(__file__).parents[2]


def answer(tiny: str, seed: int) -> tuple[list[str], str, tuple[int, ...]]:
  policy, numerics = generate.load(tiny)
  tokens = generate.prompt_tokens(policy, "Tom has 3 apples.")
  engine = generate.engine_for(policy, numerics, num_tokens=len(tokens) + 12, key=jax.random.key(0))
  parts: list[str] = []
  request = Request(
    request_id="0", prompt=tokens, sampling=SamplingParams(max_tokens=12), seed=seed
  )
  completion, rate = generate.stream(engine, request, parts.append)
  assert rate > 0
  return parts, completion.text, completion.tokens


def test_streamed_parts_are_the_text_and_a_seed_repeats_it(tiny: str):
  parts, text, tokens = answer(tiny, seed=5)
  assert "".join(parts) == text
  assert len(parts) == len(tokens) == 12
  # A chat's first answer is the one to its first question alone.
  policy, numerics = generate.load(tiny)
  size = len(generate.prompt_tokens(policy, "Tom has 3 apples.")) + 40
  engine = generate.engine_for(policy, numerics, num_tokens=size, key=jax.random.key(0))
  pieces: list[str] = []
  sampling = SamplingParams(max_tokens=12)
  speak = generate.answerer(engine, sampling, seed=5, say=pieces.append)
  messages = [dict(role="user", content="Tom has 3 apples.")]
  assert speak(messages) == "".join(pieces) == text
  # The next turn has less room, and the one after it none.
  messages += [dict(role="assistant", content=text), dict(role="user", content="So")]
  room = size - len(policy.require_tokenizer().chat_ids(messages))
  assert 0 < room < 12
  pieces.clear()
  speak(messages)
  assert len(pieces) == room  # One token per piece.
  messages[-1]["content"] = "So? " * 20
  with pytest.raises(ValueError, match=r"conversation of \d+ tokens, expected fewer than \d+; /"):
    speak(messages)


@pytest.mark.thorough
def test_a_draft_moves_no_letter(tiny: str):
  policy, numerics = generate.load(tiny)
  tokens = generate.prompt_tokens(policy, "Tom has 3 apples.")
  request = Request(request_id="0", prompt=tokens, sampling=SamplingParams(max_tokens=12), seed=5)
  found = {}
  for draft in ("", tiny):
    engine = generate.engine_for(
      policy, numerics, num_tokens=len(tokens) + 12, key=jax.random.key(0), draft=draft
    )
    found[draft], _ = generate.stream(engine, request, lambda text: None)
    # A draft by the model itself is right, but where it was drawn at a lower temperature.
    assert ("tokens per step" in generate.drafted(engine)) == bool(draft)
  assert found[tiny].has_bits_of(found[""])


def test_a_chat_goes_on_until_there_is_nothing_to_read():
  lines = iter(["Hi", "", "/help", "  /usr is full  ", "bad", "/new", "Hi again", "/quit now"])
  asked: list[list] = []
  printed: list[str] = []

  def read() -> str:
    for line in lines:
      return line
    raise EOFError

  def speak(messages) -> str:
    asked.append(list(messages))
    if messages[-1]["content"] == "bad":
      raise ValueError("refused")
    return f"answer {len(asked)}"

  generate.converse(speak, read, printed.append)
  user, assistant = (
    lambda text, role=role: dict(role=role, content=text) for role in ("user", "assistant")
  )
  first = [user("Hi"), assistant("answer 1"), user("/usr is full")]
  assert asked[:2] == [first[:1], first]
  # Refused and forgotten turns are not part of later prompts.
  assert asked[2:] == [[*first, assistant("answer 2"), user("bad")], [user("Hi again")]]
  assert printed == [
    "", generate.HELP, "", "refused", "forgotten", "",
    "got '/quit', expected /help or /new; start with a space to send it as text",
  ]  # fmt: skip


def test_variables_of_a_template_are_read_from_the_command_line():
  found = generate.variables_of(["enable_thinking=false", "style=a=b", "depth=3"])
  assert found == dict(enable_thinking=False, style="a=b", depth=3)
  with pytest.raises(ValueError, match="--variable: got 'a', expected NAME=VALUE; write"):
    generate.variables_of(["a"])


@pytest.mark.long
@pytest.mark.parametrize("end", ["ctrl-d", "ctrl-c"])
def test_a_terminal_without_a_prompt_is_a_chat(tiny: str, end: str):
  parent, child = os.openpty()
  command = [
    sys.executable,
    "-m",
    "seerjax.commands",
    "generate",
    f"--model={tiny}",
    "--max_tokens=4",
  ]
  # A shell's background jobs ignore SIGINT, and their children would inherit that.
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  try:
    process = subprocess.Popen(
      command,
      stdin=child,
      stdout=child,
      stderr=child,
      cwd=ROOT,
      env={**os.environ, "JAX_PLATFORMS": "cpu"},
      start_new_session=True,
    )
  finally:
    signal.signal(signal.SIGINT, before)
  os.close(child)
  shown = ""

  def until(wanted: str, count: int = 1) -> None:
    nonlocal shown
    while shown.count(wanted) < count:
      shown += os.read(parent, 4096).decode(errors="replace")

  until("> ")
  os.write(parent, b"/help\n")
  until("forgets the conversation")
  for turn in range(2):
    os.write(parent, b"Tom has 3 apples.\n")
    until("> ", 3 + turn)
  if end == "ctrl-d":
    os.write(parent, b"\x04")
  else:
    process.send_signal(signal.SIGINT)  # As a terminal sends to its session.
  assert process.wait(timeout=60) == 0, shown
  assert "Traceback" not in shown
  os.close(parent)


def test_a_raw_prompt_has_no_template(tiny: str):
  policy, _ = generate.load(tiny)
  raw = generate.prompt_tokens(policy, "3+4=", is_raw=True)
  assert raw == tuple(policy.require_tokenizer().encode("3+4="))
  assert len(generate.prompt_tokens(policy, "3+4=")) > len(raw)


def test_an_empty_prompt_is_refused(tiny: str):
  policy, _ = generate.load(tiny)
  with pytest.raises(ValueError, match=r"--prompt: got ' \\n', expected at least one character"):
    generate.prompt_tokens(policy, " \n")


def test_a_prompt_beyond_the_context_is_refused(tiny: str):
  policy, numerics = generate.load(tiny)
  with pytest.raises(ValueError, match=r"got .* of 600 positions together, expected at most the"):
    generate.engine_for(policy, numerics, num_tokens=600, key=jax.random.key(0))


def test_the_command_reads_stdin_and_says_why_it_refuses(tiny: str):
  done = subprocess.run(
    [sys.executable, "-m", "seerjax.commands", "generate", "--prompt=-", f"--model={tiny}"],
    input="\n",
    capture_output=True,
    text=True,
    cwd=ROOT,
    env={**os.environ, "JAX_PLATFORMS": "cpu"},
    check=False,
  )
  assert done.returncode == 2, done.stderr
  assert "expected at least one character" in done.stderr
  assert done.stdout == ""
