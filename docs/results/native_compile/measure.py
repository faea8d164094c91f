"""CPU seconds to compile each native handler, in this process and with an empty cache.

python docs/results/native_compile/measure.py
"""

import os
import tempfile
import time

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp()
os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)

from seerjax.backends.native import (
  attention,
  attention_backward,
  ffi,
  first_product,
  head_backward,
  head_forward,
  layers,
  layers_backward,
  pages,
  rotation,
)

# The last one's are in part those of a mesh axis, which a run on one device does not call.
MODULES = (
  first_product, rotation, pages, attention, head_forward, attention_backward, head_backward,
  layers_backward, layers,
)  # fmt: skip


def main():
  total = 0.0
  for module in MODULES:
    for handler in vars(module).values():
      if not isinstance(handler, ffi.Handler):
        continue
      before = time.process_time()
      ffi._register(handler)
      spent = time.process_time() - before
      total += spent
      print(f"{spent:6.2f} {handler.name}", flush=True)
  print(f"{total:6.2f} all")


if __name__ == "__main__":
  main()
