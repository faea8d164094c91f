#!/usr/bin/env bash
# Compiles the engine's step and the trainer's step for TPUs, on a machine without a TPU.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=launch/environment.sh
source "$ROOT/launch/environment.sh"

if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then
  cat <<'EOT'
usage: bash launch/tpu_compile.sh [--flags of experiments.compiled.tpu_compile]

Creates .venv-tpu in the checkout with the newest Python that has a lock for it (3.13 or 3.12),
installs libtpu (half a gigabyte, x86-64 Linux) and compiles Qwen3-0.6B and 8B for TPU v5e and v6e,
each case in a separate process. Nothing is run, since that needs a TPU. The cases and the compiler's
messages go to runs/tpu_compile (--workdir=DIR), as results.jsonl and table.md; cases that are in
results.jsonl are not compiled again.

  --cases=TEXT   compiles only the cases with TEXT in their name
  --list         lists the cases, and compiles none
EOT
  exit 0
fi

found=$(find_python "3.13 3.12")
minor=${found%% *}
environment "$ROOT/.venv-tpu" "${found#* }" "$ROOT/launch/locks/runtime-$minor.txt" \
  "$ROOT/launch/locks/tpu-compile-$minor.txt" ||
  fail "libtpu is not installed: its wheel is for x86-64 Linux with glibc 2.31 or later."
# Tracing uses the host's platform; the experiment selects the compiler by name.
export JAX_PLATFORMS=cpu
cd "$ROOT"
exec nice -n 10 "$ROOT/.venv-tpu/bin/python" -P -m experiments.compiled.tpu_compile "$@"
