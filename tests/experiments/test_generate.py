"""An answer is streamed as it is sampled; what cannot be asked is refused."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import jax
import pytest

from experiments import generate
from seerjax.types import Request, SamplingParams

ROOT = pathlib.Path(__file__).parents[2]


def answer(tiny: str, seed: int) -> tuple[list[str], str, tuple[int, ...]]:
  policy, numerics = generate.load(tiny)
  tokens = generate.prompt_tokens(policy, "Tom has 3 apples.")
  engine = generate.engine_for(
    policy, numerics, num_tokens=len(tokens) + 12, key=jax.random.key(0)
  )
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
  assert answer(tiny, seed=5)[2] == tokens


def test_a_raw_prompt_has_no_template(tiny: str):
  policy, _ = generate.load(tiny)
  raw = generate.prompt_tokens(policy, "3+4=", is_raw=True)
  assert raw == tuple(policy.tokenizer.encode("3+4="))
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
    [sys.executable, "-m", "experiments.generate", "--prompt=-", f"--model={tiny}"],
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
