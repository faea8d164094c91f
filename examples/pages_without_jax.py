"""The engine's page pool without JAX: how requests share the KV pages of a prompt.

`seerjax.kv.pages` decides which KV pages a request shares, copies, or allocates; it is plain
Python and NumPy, so a scheduler or simulator can use it alone. Four requests with the same prompt
of 22 tokens arrive one after another, with pages of 8 positions:

    prompt tokens   | 0 .. 7 | 8 .. 15 | 16 .. 21     |
    later requests  | shared | shared  | copied first |

  python examples/pages_without_jax.py

Takes a second. The last line reads `jax imported: False`.
"""

from __future__ import annotations

import math
import sys

from seerjax.kv import pages

PAGE_SIZE = 8
NUM_PAGES = 32
PROMPT = tuple(range(100, 122))
ANSWER_TOKENS = 12
NUM_REQUESTS = 4


def admit(pool: pages.PagePool, prompt: tuple[int, ...], answer_tokens: int) -> list[int]:
  """Allocates all pages that a request can need, and returns them in order."""
  # The prompt's last token is always computed, because the next token is sampled from it.
  hit = pool.find(prompt[:-1])
  for page in hit.pages:
    pool.hold(page)
  fresh = pool.take(math.ceil((len(prompt) + answer_tokens) / PAGE_SIZE) - len(hit.pages))
  copied = f", page {hit.copy_from} copied to {fresh[0]}" if hit.copy_from is not None else ""
  print(
    f"  shares {list(hit.pages)}, takes {fresh}{copied}: {hit.num_tokens} of {len(prompt)} prompt"
    " tokens are there already"
  )
  return [*hit.pages, *fresh]


def main() -> bool:
  """Admits a group of requests, releases them, and returns whether JAX was imported meanwhile."""
  pool = pages.PagePool(NUM_PAGES, PAGE_SIZE)
  tables = []
  for request in range(NUM_REQUESTS):
    print(f"request {request}")
    table = admit(pool, PROMPT, ANSWER_TOKENS)
    # The engine does this once the prompt's keys and values are computed.
    pool.remember(PROMPT, table)
    tables.append(table)
  used = len({page for table in tables for page in table})
  print(f"{used} pages serve {sum(map(len, tables))} page-table entries")
  assert used < sum(map(len, tables))

  for table in tables:
    for page in table:
      pool.release(page)
  print(f"all done: {pool.num_available} of {NUM_PAGES - 1} pages can be taken")
  hit = pool.find(PROMPT)
  print(f"the same prompt again: {hit.num_tokens} of its {len(PROMPT)} tokens are still found")
  pool.forget_all()
  print(f"after new weights: {pool.find(PROMPT).num_tokens}, since old keys are stale")
  return "jax" in sys.modules


if __name__ == "__main__":
  is_imported = main()
  print("jax imported:", is_imported)
  sys.exit(is_imported)
