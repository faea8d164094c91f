"""Streams one completion, or chats: `seerjax.generate` from a checkout.

Claim: the text is a function of (weights, prompt, sampling parameters, seed) only; repeating a
command gives the same bits.
Command: bash launch/local.sh experiments.generate --prompt="Tom has 3 apples and buys 4. How many?"
  from the wheel: python -m seerjax.generate
Hardware: 2 CPU cores, a few seconds and one compilation. Text goes to stdout, numbers to stderr.
"""

from __future__ import annotations

from absl import app

from seerjax import generate

if __name__ == "__main__":
  generate.define_flags()
  app.run(generate.main)
